"""Number formats, memory layout, and compilation, the same for training and validation."""
import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from flatten_zoo.errors import UsageError, first_line

__all__ = ['Numerics', 'check_compilation']


@dataclass(frozen=True)
class Numerics:
    """Where and how a model computes.

    Attributes:
        device: Where the model is.
        dtype: Type of its weights and of the images.
        amp_dtype: Lower precision that operators choose by themselves under `autocast`, None for none.
        memory_format: Layout of its weights and of the images.
    """
    device: torch.device
    dtype: torch.dtype = torch.float32
    amp_dtype: torch.dtype | None = None
    memory_format: torch.memory_format = torch.contiguous_format

    @classmethod
    def from_options(cls, args: argparse.Namespace, device: torch.device) -> 'Numerics':
        """What `--amp`, `--amp-dtype`, `--model-dtype` and `--channels-last` ask for."""
        return cls(
            device,
            dtype=getattr(torch, args.model_dtype or 'float32'),
            amp_dtype=getattr(torch, args.amp_dtype) if args.amp else None,
            memory_format=torch.channels_last if args.channels_last else torch.contiguous_format)

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, in its type and layout."""
        return model.to(device=self.device, dtype=self.dtype, memory_format=self.memory_format)

    def images(self, images: torch.Tensor) -> torch.Tensor:
        """Move a batch of images to the device, in the model's type and layout."""
        return images.to(
            device=self.device, dtype=self.dtype, memory_format=self.memory_format, non_blocking=True)

    def autocast(self) -> AbstractContextManager:
        """Within, operators run in `amp_dtype` where that is safe."""
        if self.amp_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.amp_dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """The scaling of the loss that keeps small float16 gradients from vanishing; it does nothing elsewhere."""
        return torch.amp.GradScaler(self.device.type, enabled=self.amp_dtype == torch.float16)


def check_compilation(args: argparse.Namespace) -> None:
    """Refuse a backend or mode that `torch.compile` does not have.

    Raises:
        UsageError: The options, and what there is.
    """
    if args.torchcompile is None:
        if args.torchcompile_mode:
            raise UsageError(f'--torchcompile-mode {args.torchcompile_mode} needs --torchcompile')
        return
    try:
        torch.compile(nn.Identity(), backend=args.torchcompile, mode=args.torchcompile_mode)
    except RuntimeError as e:
        mode = f' --torchcompile-mode {args.torchcompile_mode}' if args.torchcompile_mode else ''
        backends = ', '.join(torch.compiler.list_backends())
        raise UsageError(f"--torchcompile {args.torchcompile}{mode}: {first_line(e)} Backends: {backends}") from e
