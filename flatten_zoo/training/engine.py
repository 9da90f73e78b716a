"""The two loops: one epoch of training, one pass of evaluation."""
import argparse
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchvision
from timm.scheduler.scheduler import Scheduler
from timm.task import TrainingTask
from timm.task.evaluator import ClassificationEvaluator
from timm.utils import dispatch_clip_grad
from torch import nn

from .numerics import Numerics
from .progress import Progress

__all__ = ['Trainer', 'evaluate']


@dataclass
class Trainer:
    """What an epoch of training needs, and the number of updates made so far.

    Attributes:
        args: Options of `train.py`.
        numerics: Where and how the model computes.
        task: Model, loss and average of the weights.
        optimizer: Optimizer of the task's model.
        scheduler: Schedule of its learning rate, if any.
        loader: Training batches.
        mixup: Mixes a batch on the device, where the loader does not.
        folder: Output folder.
    """
    args: argparse.Namespace
    numerics: Numerics
    task: TrainingTask
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None
    loader: Any
    mixup: Callable | None
    folder: Path
    updates: int = field(default=0, init=False)
    scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self):
        self.scaler = self.numerics.scaler()

    def train_epoch(self, epoch: int, label: str) -> OrderedDict[str, float]:
        """One pass over the training data.

        Returns:
            The mean training loss as 'loss'.
        """
        self._start_epoch(epoch)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.numerics.device)
        closed = True
        progress = Progress(self.loader, label, self.args.log_interval)
        for index, (images, target) in enumerate(progress):
            images = self.numerics.images(images)
            target = target.to(self.numerics.device, non_blocking=True)
            if self.mixup is not None:
                images, target = self.mixup(images, target)
            batches, closed = self._place_in_update(index)
            loss_sum += self._backward(images, target, batches) * len(images)
            if closed:
                self._update()
            if progress.advance(len(images)):
                progress.show(loss=f'{loss_sum.item() / progress.images:.4f}', lr=f'{self.learning_rate():.3g}')
            if self.args.save_images and index % self.args.log_interval == 0:
                path = self.folder / f'train-batch-{index}.jpg'
                torchvision.utils.save_image(images, path, padding=0, normalize=True)
        if not closed:  # a stream that was shorter than it said
            self._update()
        if hasattr(self.optimizer, 'sync_lookahead'):
            self.optimizer.sync_lookahead()
        return OrderedDict(loss=loss_sum.item() / max(progress.images, 1))

    def learning_rate(self) -> float:
        """Mean over the parameter groups."""
        rates = [group['lr'] for group in self.optimizer.param_groups]
        return sum(rates) / len(rates)

    def _start_epoch(self, epoch: int) -> None:
        self.task.train()
        self.optimizer.zero_grad()
        if hasattr(self.loader.dataset, 'set_epoch'):
            self.loader.dataset.set_epoch(epoch)
        if self.args.mixup_off_epoch and epoch >= self.args.mixup_off_epoch:
            if self.mixup is not None:
                self.mixup.mixup_enabled = False
            else:
                self.loader.mixup_enabled = False

    def _place_in_update(self, index: int) -> tuple[int, bool]:
        """How many batches make the update that a batch belongs to, and whether it is the last of them."""
        steps = self.args.grad_accum_steps
        first = index - index % steps
        left = len(self.loader) - first
        batches = min(steps, left) if left > 0 else steps
        return batches, index + 1 == first + batches

    def _backward(self, images: torch.Tensor, target: torch.Tensor, batches: int) -> torch.Tensor:
        """Add a batch's share to the gradients; returns its loss."""
        with self.numerics.autocast():
            loss = self.task(images, target)['loss']
        self.scaler.scale(loss / batches).backward(create_graph=getattr(self.optimizer, 'is_second_order', False))
        return loss.detach()

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
        self.task.update_ema(step=self.updates)
        if self.scheduler is not None:
            self.scheduler.step_update(num_updates=self.updates)


@torch.inference_mode()
def evaluate(
        model: nn.Module,
        loader: Any,
        numerics: Numerics,
        evaluator: ClassificationEvaluator,
        label: str,
        log_interval: int,
) -> OrderedDict[str, float]:
    """One pass over the evaluation data.

    Returns:
        'loss', and 'top1' and 'top5' in percent, over all images.
    """
    model.eval()
    progress = Progress(loader, label, log_interval)
    for images, target in progress:
        with numerics.autocast():
            output = model(numerics.images(images))
        evaluator.update(output, target.to(numerics.device, non_blocking=True))
        if progress.advance(len(images)):
            figures = evaluator.summary()
            progress.show(loss=f"{figures['loss']:.4f}", top1=f"{figures['top1']:.2f}", top5=f"{figures['top5']:.2f}")
    return evaluator.compute()
