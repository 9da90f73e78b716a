"""The two loops: one epoch of training, one pass of evaluation."""
import argparse
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchvision
from timm.scheduler import PlateauLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.task import TrainingTask
from timm.task.evaluator import ClassificationEvaluator
from timm.utils import dispatch_clip_grad, unwrap_model
from torch import nn
from torch.utils.data import IterableDataset

from flatten_zoo.errors import UsageError

from ..output.logs import log
from ..output.progress import Progress
from ..processes.distributed import distribute_batch_norm, gathered, is_first, rank, total, world_size
from ..randomness import random_state, set_random_state
from .divergence import EpochLoss, check_weights
from .optimization import updates_per_epoch
from .precision import Numerics

__all__ = ['Trainer', 'evaluate']


@dataclass
class Position:
    """A place within an epoch, after an update of the weights.

    Attributes:
        start: State of the random generators at the start of the epoch.
        now: Their state at the place: the next batch moves it on.
        batches: Batches done by this process, as by each of the others.
        images: Images in them.
        loss_sum: Sum of their losses.
    """
    start: dict[str, Any]
    now: dict[str, Any]
    batches: int = 0
    images: int = 0
    loss_sum: float | torch.Tensor = 0.0


@dataclass
class Trainer:
    """What an epoch of training needs, and how far it is.

    Attributes:
        args: Options of `train.py`.
        numerics: Where and how the model computes.
        task: Model, loss and average of the weights.
        optimizer: Optimizer of the task's model.
        scheduler: Schedule of its learning rate, if any.
        loader: Training batches.
        mixup: Mixes a batch on the device, where the loader does not.
        folder: Output folder.
        updates: Updates of the weights so far.
        position: Where in an epoch it is, None between epochs.
        loss: Losses of the current epoch, None before the first.
        scaler: Scaling of the loss.
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
    position: Position | None = field(default=None, init=False)
    loss: EpochLoss | None = field(default=None, init=False)
    scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self):
        self.scaler = self.numerics.scaler()

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
        position = self.position = self.position or self._epochs_start()
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
                    recover(index + 1)
            if progress.advance(len(images)):
                progress.show(loss=f'{self.loss.mean():.4f}', lr=f'{self.learning_rate():.3g}')
        if not closed and world_size() == 1:  # a stream that was shorter than it said
            self._update()
        if hasattr(self.optimizer, 'sync_lookahead'):
            self.optimizer.sync_lookahead()
        distribute_batch_norm(self.task, self.args.dist_bn)
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

    def state_dict(self) -> dict[str, Any]:
        """What continuing needs besides the model, its average and the optimizer: plain types and tensors.

        All processes have to ask for it together; the first one's is that of all.

        Raises:
            Divergence: There is nothing to continue with.
        """
        self.check()
        run, *others = gathered(self._own_state()) or [{}]
        if isinstance(self.scheduler, PlateauLRScheduler):
            run['plateau'] = {
                'state': self.scheduler.lr_scheduler.state_dict(), 'restore_lr': self.scheduler.restore_lr}
        state = {'run': run, 'other_runs': others}
        return state | ({'amp_scaler': self.scaler.state_dict()} if self.scaler.is_enabled() else {})

    def _own_state(self) -> dict[str, Any]:
        """This process's part of the state."""
        run = {'updates': self.updates, 'random': random_state(self.numerics.device)}
        run['generators'] = {name: generator.get_state() for name, generator in self._generators().items()}
        if self.position is not None and self.position.batches:
            run['position'] = {**vars(self.position), 'loss_sum': float(self.position.loss_sum)}
            run['division'] = self._division()
        if not is_first():
            run['statistics'] = [statistics.cpu() for statistics in self._own_statistics()]
        return run

    def _own_statistics(self) -> list[torch.Tensor]:
        """Statistics of batch norm that differ between the processes."""
        if self.args.sync_bn or (self.args.dist_bn and self.position is None):
            return []
        models = (self.task.get_trainable_module(ema=ema) for ema in (False, True))
        return [
            buffer for model in models if model is not None for name, buffer in model.named_buffers()
            if name.endswith(('running_mean', 'running_var'))]

    def _division(self) -> dict[str, Any]:
        """What divides the images of an epoch into batches and updates, so that a position in it means something."""
        names = ['batch_size', 'grad_accum_steps'] + ['workers'] * isinstance(self.loader.dataset, IterableDataset)
        names += [name for name in vars(self.args) if name.startswith(('train_batch', 'train_size'))]
        return {name: getattr(self.args, name) for name in names} | {'batches': len(self.loader)}

    def go_to(self, epoch: int, position: Position | None = None) -> None:
        """Set the place in training; the updates before it, by which rates may be scheduled, follow from the place."""
        self.position = position
        before = epoch * updates_per_epoch(self.args, len(self.loader))
        self.updates = before + updates_per_epoch(self.args, position.batches if position else 0)
        if self.scheduler is not None:
            self.scheduler.step_update(self.updates)

    def load_state_dict(self, checkpoint: dict[str, Any], epoch: int, with_optimizer: bool) -> None:
        """Continue from a checkpoint.

        Args:
            checkpoint: What `state_dict` returned, and the optimizer's state under 'optimizer'.
            epoch: The epoch to continue with.
            with_optimizer: Whether to take over the states of the optimizer, the loss scaling and the plateau.
        """
        run = self._run_to_continue(checkpoint)
        if with_optimizer:
            self.optimizer.load_state_dict(checkpoint['optimizer'])
            if self.scaler.is_enabled() and 'amp_scaler' in checkpoint:
                self.scaler.load_state_dict(checkpoint['amp_scaler'])
        self.go_to(epoch, Position(**run['position']) if 'position' in run else None)
        if not isinstance(self.scheduler, PlateauLRScheduler):
            if self.scheduler is not None:  # the options' rates, whatever the optimizer had
                self.scheduler.step(epoch)
        elif with_optimizer and 'plateau' in run:
            self.scheduler.lr_scheduler.load_state_dict(run['plateau']['state'])
            self.scheduler.restore_lr = run['plateau']['restore_lr']
        for name, generator in self._generators().items():
            if name in run.get('generators', {}):
                generator.set_state(run['generators'][name])
        for ours, theirs in zip(self._own_statistics(), run.get('statistics', ()), strict=False):
            ours.copy_(theirs)
        if self.position is not None:
            set_random_state(self.position.start, self.numerics.device)
        elif 'random' in run:
            set_random_state(run['random'], self.numerics.device)

    def _run_to_continue(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """This process's state in a checkpoint, as far as it holds for this run."""
        runs = [checkpoint.get('run', {}), *checkpoint.get('other_runs', ())]
        if len(runs) != world_size():
            log.info(
                'the checkpoint is of %d process%s and this run of %d: the epoch starts %swith other random numbers',
                len(runs), 'es' if len(runs) > 1 else '', world_size(), 'anew, ' if 'position' in runs[0] else '')
            return {key: value for key, value in runs[0].items() if key in ('plateau', 'generators')}
        run = runs[rank()] | {key: value for key, value in runs[0].items() if key == 'plateau'}
        if self.args.start_epoch is not None:  # another place than the checkpoint's
            run.pop('position', None)
        elif 'position' in run and run.get('division') != self._division():
            log.info('the checkpoint is of an epoch that was divided into other batches or updates: it starts anew')
            run['random'] = run.pop('position')['start']
        return run

    def _epochs_start(self) -> Position:
        state = random_state(self.numerics.device)
        return Position(start=state, now=state)

    def _generators(self) -> dict[str, torch.Generator]:
        """Random generators of their own, of the average of bfloat16 weights and of second-order optimizers."""
        owners = {'average': getattr(self.task.get_trainable_module(ema=True), '_sr_generator', None),
                  'optimizer': getattr(self.optimizer, 'generator', None)}
        return {name: generator for name, generator in owners.items() if generator is not None}

    def learning_rate(self) -> float:
        """Mean over the parameter groups."""
        rates = [group['lr'] for group in self.optimizer.param_groups]
        return sum(rates) / len(rates)

    def _start_epoch(self, epoch: int) -> None:
        self.task.train()
        self.optimizer.zero_grad()
        if hasattr(self.loader.dataset, 'set_epoch'):
            self.loader.dataset.set_epoch(epoch)
        for sampler in (self.loader.sampler, self.loader.batch_sampler):
            if hasattr(sampler, 'set_epoch'):
                sampler.set_epoch(epoch)
        if self.args.mixup_off_epoch and epoch >= self.args.mixup_off_epoch:
            if self.mixup is not None:
                self.mixup.mixup_enabled = False
            else:
                self.loader.mixup_enabled = False

    def _prepare_batch(
            self,
            images: torch.Tensor,
            target: torch.Tensor,
            index: int,
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
        model: nn.Module,
        loader: Any,
        numerics: Numerics,
        evaluator: ClassificationEvaluator,
        label: str,
        log_interval: int,
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
            figures = evaluator.summary()
            progress.show(loss=f"{figures['loss']:.4f}", top1=f"{figures['top1']:.2f}", top5=f"{figures['top5']:.2f}")
    if not total(evaluator.num_samples)[0]:
        raise UsageError(f'{label}: no image can be read')
    return evaluator.compute(distributed=world_size() > 1)
