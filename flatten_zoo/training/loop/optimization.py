"""What the options make of learning: number formats, mixing, loss, optimizer and schedule."""

import argparse
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.scheduler.scheduler import Scheduler
from timm.task import ClassificationTask, TrainingTask
from torch import nn

from flatten_zoo.errors import UsageError, first_line

from ..options.parser import as_given
from ..processes import lay_out_gradients, world_size

__all__ = [
    'Numerics',
    'Settled',
    'build_optimizer',
    'build_scheduler',
    'build_task',
    'mixup_arguments',
    'share_gradients',
    'updates_per_epoch',
]


Task = TypeVar('Task', bound=TrainingTask)


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
            memory_format=torch.channels_last if args.channels_last else torch.contiguous_format,
        )

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, in its type and layout."""
        return model.to(device=self.device, dtype=self.dtype, memory_format=self.memory_format)  # type: ignore[call-overload]  # torch's overloads take fewer

    def images(self, images: torch.Tensor) -> torch.Tensor:
        """Move a batch of images to the device, in the model's type and layout."""
        return images.to(device=self.device, dtype=self.dtype, memory_format=self.memory_format, non_blocking=True)

    def autocast(self) -> AbstractContextManager:
        """Within, operators run in `amp_dtype` where that is safe."""
        if self.amp_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.amp_dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """The scaling of the loss that keeps small float16 gradients from vanishing; it does nothing elsewhere."""
        return torch.amp.GradScaler(self.device.type, enabled=self.amp_dtype == torch.float16)


@dataclass(frozen=True)
class Settled:
    """Values of options that follow from the others, the model and the number of processes, where they are not given.

    Attributes:
        num_classes: Classes of the model.
        lr: Learning rate.
        lr_base_scale: How it scales with the images per update, where it follows from `--lr-base`.
        dist_bn: What becomes of batch norm's statistics after an epoch.
        data_dir: Folder of the data.
        data: None, as `data_dir` says it.
    """

    num_classes: int
    lr: float
    lr_base_scale: str
    dist_bn: str
    data_dir: str | None
    data: None = None

    @classmethod
    def from_options(cls, args: argparse.Namespace, num_classes: int) -> 'Settled':
        """Without `--lr`, the rate follows from `--lr-base` and all images per update."""
        lr, scale = args.lr, args.lr_base_scale
        if lr is None:
            ratio = args.batch_size * world_size() * args.grad_accum_steps / args.lr_base_size
            if not scale:
                adaptive = any(name in args.opt.lower() for name in ('ada', 'lamb'))
                scale = 'sqrt' if adaptive else 'linear'
            lr = args.lr_base * (ratio**0.5 if scale == 'sqrt' else ratio)
        dist_bn = '' if args.sync_bn and world_size() > 1 else args.dist_bn  # there is nothing left to distribute
        return cls(num_classes, lr, scale, dist_bn, args.data or args.data_dir)


def is_mixed(args: argparse.Namespace) -> bool:
    """Whether `--mixup` or `--cutmix` mixes images, and so targets."""
    return args.mixup > 0 or args.cutmix > 0 or args.cutmix_minmax is not None


def mixup_arguments(args: argparse.Namespace, num_classes: int) -> dict[str, Any] | None:
    """Arguments of timm's `Mixup`, or None when nothing is mixed."""
    if not is_mixed(args):
        return None
    return {
        'mixup_alpha': args.mixup,
        'cutmix_alpha': args.cutmix,
        'cutmix_minmax': args.cutmix_minmax,
        'prob': args.mixup_prob,
        'switch_prob': args.mixup_switch_prob,
        'mode': args.mixup_mode,
        'label_smoothing': args.smoothing,
        'num_classes': num_classes,
    }


def build_task(args: argparse.Namespace, model: nn.Module, device: torch.device) -> ClassificationTask:
    """Model, loss and average of the weights; compiled if asked for, and joined to those of the other processes."""
    loss: dict[str, Any] = {'smoothing': args.smoothing, 'soft_targets': is_mixed(args)}
    if args.jsd_loss:
        loss |= {'loss_type': 'jsd', 'jsd_splits': args.aug_splits}
    elif args.bce_loss:
        loss |= {
            'loss_type': 'bce',
            'bce_sum': args.bce_sum,
            'bce_target_thresh': args.bce_target_thresh,
            'pos_weight': args.bce_pos_weight,
        }
    task = ClassificationTask(model, criterion_kwargs=loss, device=device, verbose=False)
    if args.model_ema:
        task.setup_ema(
            decay=args.model_ema_decay,
            use_warmup=args.model_ema_warmup,
            device=torch.device('cpu') if args.model_ema_force_cpu else None,
        )
    if args.torchcompile:
        task.compile(backend=args.torchcompile, mode=args.torchcompile_mode)
        if args.model_ema and not args.model_ema_force_cpu:
            task.compile_ema(backend=args.torchcompile, mode=args.torchcompile_mode)
    return share_gradients(args, task, model, device)


def share_gradients(args: argparse.Namespace, task: Task, model: nn.Module, device: torch.device) -> Task:
    """The task, where there are several processes joined to those of the others; its model learns from all of them."""
    if world_size() > 1:
        lay_out_gradients(model)
        task.prepare_distributed(
            device_ids=None if device.type == 'cpu' else [device],
            **{'broadcast_buffers': False} if args.no_ddp_bb else {},
        )
    return task


def build_optimizer(args: argparse.Namespace, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """timm's optimizer of that name, with that learning rate."""
    try:
        optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args) | {'lr': lr}, **args.opt_kwargs)
    except (AssertionError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as e:
        given = as_given(args, 'opt', 'momentum', 'opt_eps', 'opt_betas', 'opt_kwargs')
        raise UsageError(f'cannot build the optimizer{given}: {first_line(e)}') from e
    if world_size() > 1 and getattr(optimizer, 'is_second_order', False):
        raise UsageError(f'--opt {args.opt} needs second derivatives, which DistributedDataParallel does not have')
    return optimizer


def updates_per_epoch(args: argparse.Namespace, batches: int) -> int:
    """Updates of the weights in an epoch of so many batches."""
    return math.ceil(batches / args.grad_accum_steps)


def build_scheduler(
    args: argparse.Namespace, optimizer: torch.optim.Optimizer, updates: int, start: int
) -> tuple[Scheduler | None, int]:
    """timm's schedule of that name, set to the first epoch, and the number of epochs with everything included.

    Args:
        args: Options of `train.py`.
        optimizer: What to schedule.
        updates: Updates per epoch.
        start: First epoch.
    """
    try:
        scheduler, epochs = create_scheduler_v2(optimizer, **scheduler_kwargs(args), updates_per_epoch=updates)
    except (AssertionError, ValueError) as e:
        raise UsageError(f"cannot build the schedule '{args.sched}': {e}") from e
    if args.start_epoch is not None and start >= epochs:
        raise UsageError(f'--start-epoch {args.start_epoch}: the schedule ends after {epochs} epochs')
    if scheduler is not None and start:
        scheduler.step_update(start * updates)
        scheduler.step(start)
    return scheduler, epochs
