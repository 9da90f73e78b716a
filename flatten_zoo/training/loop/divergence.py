"""Training that has diverged: noticed without a wait for the device on every batch, before anything is saved."""
import argparse
import math

import torch
from torch import nn

from flatten_zoo.errors import UsageError

__all__ = ['Divergence', 'EpochLoss', 'check_weights', 'remedies']


class Divergence(UsageError):
    """A loss or a weight that is no longer a finite number."""


class EpochLoss:
    """The mean loss of an epoch so far.

    `add` does not wait for the device. `mean` does, and so it is where a loss that is not finite comes to light.

    Args:
        label: What to call the epoch in messages.
        device: Where the losses are.
        batches: Batches that went before, in an epoch that is continued.
        images: Images in them.
        total: Sum of the losses of these images.
    """

    def __init__(
            self,
            label: str,
            device: torch.device,
            batches: int = 0,
            images: int = 0,
            total: float | torch.Tensor = 0.0,
    ):
        self.label = label
        self.batches = batches
        self.images = images
        dtype = torch.float32 if device.type == 'mps' else torch.float64  # which MPS does not have
        self.total = torch.as_tensor(total, dtype=dtype, device=device)
        self._unseen: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, images: int) -> None:
        """Count a batch and its mean loss."""
        self.total = self.total + loss.to(self.total.dtype) * images  # not in place: a Position keeps earlier sums
        self.batches += 1
        self.images += images
        self._unseen.append(loss)

    def mean(self) -> float:
        """Mean over the images.

        Raises:
            Divergence: The loss of a batch is not finite.
        """
        mean = self.total.item() / max(self.images, 1)
        if not math.isfinite(mean):
            first = self.batches - len(self._unseen) + 1
            batch, loss = next((n, x) for n, x in enumerate(map(float, self._unseen), first) if not math.isfinite(x))
            raise Divergence(f'{self.label}: the loss of batch {batch} is {loss}')
        self._unseen.clear()
        return mean


def check_weights(model: nn.Module, label: str) -> None:
    """Refuse a model that an update has broken. Waits for the device once.

    Buffers may be infinite by design, but never NaN: batch norm's averages are among them.

    Args:
        model: The model.
        label: What to call the moment in the message.

    Raises:
        Divergence: The name of a tensor that is not finite.
    """
    broken = {name: ~tensor.isfinite().all() for name, tensor in model.named_parameters()}
    broken |= {name: tensor.isnan().any() for name, tensor in model.named_buffers()}
    if broken and torch.stack(list(broken.values())).any():
        name = next(name for name, value in broken.items() if value)
        raise Divergence(f'{label}: the weights are no longer finite ({name} for one)')


def remedies(args: argparse.Namespace) -> str:
    """What to try with these options."""
    rates = {'--lr': args.lr, '--min-lr': args.min_lr} | ({'--warmup-lr': args.warmup_lr} if args.warmup_epochs else {})
    highest = max(rates, key=rates.get)
    ideas = [f'a lower {highest} than {rates[highest]:g}', 'more --warmup-epochs']
    if args.clip_grad is None:
        ideas.append('--clip-grad 1')
    if args.amp and args.amp_dtype == 'float16':
        ideas.append('--amp-dtype bfloat16')
    if args.model_dtype == 'float16':
        ideas.append('--model-dtype bfloat16')
    return f'try {", ".join(ideas[:-1])} or {ideas[-1]}'
