"""What the options make of learning: loss, optimizer and schedule."""
import argparse
import math
from typing import Any

import torch
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.scheduler.scheduler import Scheduler
from timm.task import ClassificationTask
from torch import nn

from flatten_zoo.errors import UsageError, first_line

from ..data.loaders import mixup_arguments
from ..options.parser import as_given
from ..processes.distributed import lay_out_gradients, world_size

__all__ = ['build_optimizer', 'build_scheduler', 'build_task', 'updates_per_epoch']


def build_task(args: argparse.Namespace, model: nn.Module, device: torch.device) -> ClassificationTask:
    """Model, loss and average of the weights; compiled if asked for, and joined to those of the other processes."""
    loss: dict[str, Any] = {'smoothing': args.smoothing, 'soft_targets': mixup_arguments(args) is not None}
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
            decay=args.model_ema_decay, use_warmup=args.model_ema_warmup,
            device=torch.device('cpu') if args.model_ema_force_cpu else None)
    if args.torchcompile:
        task.compile(backend=args.torchcompile, mode=args.torchcompile_mode)
        if args.model_ema and not args.model_ema_force_cpu:
            task.compile_ema(backend=args.torchcompile, mode=args.torchcompile_mode)
    if world_size() > 1:
        lay_out_gradients(model)
        task.prepare_distributed(
            device_ids=None if device.type == 'cpu' else [device],
            **{'broadcast_buffers': False} if args.no_ddp_bb else {})
    return task


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """timm's optimizer of that name; without `--lr`, the rate follows from `--lr-base` and all images per update."""
    if args.lr is None:
        ratio = args.batch_size * world_size() * args.grad_accum_steps / args.lr_base_size
        if not args.lr_base_scale:
            adaptive = any(name in args.opt.lower() for name in ('ada', 'lamb'))
            args.lr_base_scale = 'sqrt' if adaptive else 'linear'
        args.lr = args.lr_base * (ratio ** 0.5 if args.lr_base_scale == 'sqrt' else ratio)
    try:
        optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args), **args.opt_kwargs)
    except Exception as e:  # each of timm's and torch's optimizers checks its own arguments
        given = as_given(args, 'opt', 'momentum', 'opt_eps', 'opt_betas', 'opt_kwargs')
        raise UsageError(f'cannot build the optimizer{given}: {first_line(e)}') from e
    if world_size() > 1 and getattr(optimizer, 'is_second_order', False):
        raise UsageError(f'--opt {args.opt} needs second derivatives, which DistributedDataParallel does not have')
    return optimizer


def updates_per_epoch(args: argparse.Namespace, batches: int) -> int:
    """Updates of the weights in an epoch of so many batches."""
    return math.ceil(batches / args.grad_accum_steps)


def build_scheduler(
        args: argparse.Namespace,
        optimizer: torch.optim.Optimizer,
        updates: int,
        start: int,
) -> tuple[Scheduler | None, int]:
    """timm's schedule of that name, set to the first epoch, and the number of epochs with everything included.

    Args:
        args: Options of `train.py`.
        optimizer: What to schedule.
        updates: Updates per epoch.
        start: First epoch.
    """
    try:
        scheduler, epochs = create_scheduler_v2(
            optimizer, **scheduler_kwargs(args), updates_per_epoch=updates)
    except (AssertionError, ValueError) as e:
        raise UsageError(f"cannot build the schedule '{args.sched}': {e}") from e
    if args.start_epoch is not None and start >= epochs:
        raise UsageError(f'--start-epoch {args.start_epoch}: the schedule ends after {epochs} epochs')
    if scheduler is not None and start:
        scheduler.step_update(start * updates)
        scheduler.step(start)
    return scheduler, epochs
