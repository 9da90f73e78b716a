"""The two loops, one epoch of training and one pass of evaluation; and how one that diverges is noticed."""

import argparse
import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchvision
from timm.data import Mixup
from timm.task.evaluator import ClassificationEvaluator
from timm.utils import dispatch_clip_grad, unwrap_model
from torch import nn

from flatten_zoo.errors import UsageError

from ..continuing import Position, TrainingState, random_state, set_random_state
from ..processes import distribute_batch_norm, is_first, total, world_size
from ..report import Progress, figure_texts
from .optimization import Numerics

__all__ = ['Divergence', 'Trainer', 'check_weights', 'evaluate', 'remedies']


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
        self, label: str, device: torch.device, batches: int = 0, images: int = 0, total: float | torch.Tensor = 0.0
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


@dataclass
class Trainer(TrainingState):
    """The loop over an epoch's batches, with all that it changes.

    Attributes:
        mixup: Mixes a batch on the device, where the loader does not.
        folder: Output folder.
        loss: Losses of the current epoch, None before the first.
    """

    mixup: Mixup | None
    folder: Path
    loss: EpochLoss | None = field(default=None, init=False)

    def train_epoch(self, epoch: int, label: str, recover: Callable[[int], None] | None = None) -> dict[str, float]:
        """One pass over the training data, or what is left of it after `position`.

        Args:
            epoch: Its number.
            label: What to call it in the progress.
            recover: Called with the number of batches done at every `--recovery-interval`.

        Returns:
            The mean training loss as 'loss'.

        Raises:
            Divergence: A loss or a weight is not finite. It comes to light when figures are shown, before anything is
                saved, and at the end of the epoch.
        """
        self._start_epoch(epoch)
        position = self.position = self.position or Position(start := random_state(self.numerics.device), start)
        done = position.batches
        self.loss = EpochLoss(label, self.numerics.device, done, position.images, position.loss_sum)
        closed = True
        progress = Progress(self.loader, label, self.args.log_interval)
        for index, (images, target) in enumerate(progress):
            if index < done:  # trained on before
                progress.skip()
                if index + 1 == done:  # the random numbers go on from here
                    set_random_state(position.now, self.numerics.device)
                continue
            images, target = self._prepare_batch(images, target, index)
            batches, closed = self._place_in_update(index)
            self.loss.add(self._backward(images, target, batches, closed), len(images))
            if closed:
                self._update()
                now = random_state(self.numerics.device)
                self.position = Position(position.start, now, index + 1, self.loss.images, self.loss.total)
                if recover and self._recovery_is_due():
                    self.check()
                    recover(index + 1)
            if progress.advance(len(images)):
                progress.show(loss=f'{self.loss.mean():.4f}', lr=f'{self.learning_rate():.3g}')
        if not closed and world_size() == 1:  # a stream that was shorter than it said
            self._update()
        if hasattr(self.optimizer, 'sync_lookahead'):
            self.optimizer.sync_lookahead()
        distribute_batch_norm(self.task, self.dist_bn)
        self.check()
        loss_sum, images_done = total(self.loss.total.item(), self.loss.images)
        return OrderedDict(loss=loss_sum / max(images_done, 1))

    def check(self) -> None:
        """Refuse to go on with, or save, what has diverged in this process.

        Raises:
            Divergence: A loss of the epoch or a weight is not finite.
        """
        if self.loss is not None:
            self.loss.mean()
        check_weights(unwrap_model(self.task.get_trainable_module()), self.loss.label if self.loss else 'checkpoint')

    def learning_rate(self) -> float:
        """Mean over the parameter groups."""
        rates = [group['lr'] for group in self.optimizer.param_groups]
        return sum(rates) / len(rates)

    def _start_epoch(self, epoch: int) -> None:
        self.task.train()
        self.optimizer.zero_grad()
        for owner in (self.loader.dataset, self.loader.sampler, self.loader.batch_sampler):
            if hasattr(owner, 'set_epoch'):
                owner.set_epoch(epoch)
        if self.args.mixup_off_epoch and epoch >= self.args.mixup_off_epoch:
            (self.mixup or self.loader).mixup_enabled = False

    def _prepare_batch(
        self, images: torch.Tensor, target: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        images = self.numerics.images(images)
        target = target.to(self.numerics.device, non_blocking=True)
        if self.mixup is not None:
            images, target = self.mixup(images, target)
        if self.args.save_images and is_first() and index % self.args.log_interval == 0:
            path = self.folder / f'train-batch-{index}.jpg'
            torchvision.utils.save_image(images, path, padding=0, normalize=True)
        return images, target

    def _recovery_is_due(self) -> bool:
        return self.args.recovery_interval > 0 and self.updates % self.args.recovery_interval == 0

    def _place_in_update(self, index: int) -> tuple[int, bool]:
        """How many batches make the update that a batch belongs to, and whether it is the last of them."""
        steps = self.args.grad_accum_steps
        first = index - index % steps
        left = len(self.loader) - first
        batches = min(steps, left) if left > 0 else steps
        return batches, index + 1 == first + batches

    def _backward(self, images: torch.Tensor, target: torch.Tensor, batches: int, closed: bool) -> torch.Tensor:
        """Add a batch's share to the gradients, with the last of an update over all processes; returns its loss."""
        with nullcontext() if closed else self.task.no_sync():
            with self.numerics.autocast():
                loss = self.task(images, target)['loss']
            share = self._loss_scale(len(images)) * loss / batches
            self.scaler.scale(share).backward(create_graph=getattr(self.optimizer, 'is_second_order', False))
        return loss.detach()

    def _loss_scale(self, images: int) -> float:
        """Weight of a batch that `--train-batch-sizes` makes larger or smaller than `--batch-size`."""
        exponent = {'none': 0, 'sqrt': 0.5, 'linear': 1}[self.args.variable_batch_loss_scale]
        return (images / self.args.batch_size) ** exponent

    def _update(self) -> None:
        """One update of the weights, their average and the learning rate."""
        if self.args.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            parameters = self.task.get_clip_parameters(exclude_head=self.args.clip_mode == 'agc')
            dispatch_clip_grad(parameters, self.args.clip_grad, mode=self.args.clip_mode)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.updates += 1
        if self.args.synchronize_step and self.numerics.device.type != 'cpu':
            torch.accelerator.synchronize()
        self.task.update_ema(step=self.updates)
        if self.scheduler is not None:
            self.scheduler.step_update(num_updates=self.updates)


@torch.inference_mode()
def evaluate(
    model: nn.Module, loader: Any, numerics: Numerics, evaluator: ClassificationEvaluator, label: str, log_interval: int
) -> OrderedDict[str, float]:
    """One pass over the evaluation data.

    Returns:
        'loss', and 'top1' and 'top5' in percent, over the images of all processes.

    Raises:
        UsageError: There is no image.
    """
    model.eval()
    progress = Progress(loader, label, log_interval, in_step=False)
    for images, target in progress:
        with numerics.autocast():
            output = model(numerics.images(images.flatten(0, -4)))
        if images.ndim == 5:  # several views of each image
            output = output.float().unflatten(0, images.shape[:2]).mean(1)
        evaluator.update(output, target.to(numerics.device, non_blocking=True))
        if progress.advance(len(images)):
            progress.show(**figure_texts(evaluator.summary()))
    if not total(evaluator.num_samples)[0]:
        raise UsageError(f'{label}: no image can be read')
    return evaluator.compute(distributed=world_size() > 1)


def remedies(args: argparse.Namespace, lr: float) -> str:
    """What to try with these options and that learning rate."""
    rates = {'--lr': lr, '--min-lr': args.min_lr} | ({'--warmup-lr': args.warmup_lr} if args.warmup_epochs else {})
    highest = max(rates, key=rates.__getitem__)
    ideas = [f'a lower {highest} than {rates[highest]:g}', 'more --warmup-epochs']
    if args.clip_grad is None:
        ideas.append('--clip-grad 1')
    if args.amp and args.amp_dtype == 'float16':
        ideas.append('--amp-dtype bfloat16')
    if args.model_dtype == 'float16':
        ideas.append('--model-dtype bfloat16')
    return f'try {", ".join(ideas[:-1])} or {ideas[-1]}'
