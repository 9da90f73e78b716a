"""The loop that all dense tasks share, and what it leaves in its folder.

It is built on Hugging Face Accelerate, which is started by torchrun without a launcher of its own, and has devices,
several processes, mixed precision, accumulation of gradients, and the division of loaders among processes behind a few
calls that leave the loop a loop. Lightning Fabric would do as well, but brings Lightning along.

Everything random follows from the seed and the place in training (`data.py`), so that a checkpoint needs no random
state, and a run that is stopped anywhere and continued ends with the same weights as one that is not.
"""

import csv
import errno
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, distribute_bn, random_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.files import remove_temporaries, write_beside
from flatten_zoo.training.loop.sync_batch_norm import synchronize_batch_norm
from flatten_zoo.training.loop.trainer import EpochLoss, check_weights
from flatten_zoo.training.options.parser import Options
from flatten_zoo.training.processes import (
    from_first,
    gathered,
    is_first,
    lay_out_gradients,
    rank,
    total,
    wait_for_all,
    world_size,
)
from flatten_zoo.training.report import Progress, draw_panels, log, start_tensorboard
from flatten_zoo.weights import read_checkpoint

from ..optional_packages import dense_extra
from .data import Batches, SeededItems, seed_of
from .task import Task

with dense_extra():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration

__all__ = ['BEST', 'LAST', 'Trainer', 'accelerator', 'evaluate', 'read_run_checkpoint', 'validation_loader']

LAST, BEST = 'last.pth', 'best.pth'
_PRECISIONS = {None: 'no', 'bfloat16': 'bf16', 'float16': 'fp16'}


@contextmanager
def accelerator(args: Options, device: torch.device) -> Iterator[Accelerator]:
    """Accelerate for one run.

    Args:
        args: The options.
        device: Where to compute.

    Raises:
        UsageError: The device does not have the precision.
    """
    if args.amp == 'float16' and device.type == 'cpu':
        raise UsageError('--amp float16 needs a GPU: give --amp bfloat16 on the CPU')
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    try:
        yield Accelerator(
            cpu=device.type == 'cpu',
            mixed_precision=_PRECISIONS[args.amp],
            gradient_accumulation_steps=getattr(args, 'grad_accum_steps', 1),
            # a process has fewer validation items rather than one of another process again
            dataloader_config=DataLoaderConfiguration(even_batches=False),
        )
    finally:
        # it keeps the precision of the first run for all others of this Python process
        AcceleratorState._reset_state(reset_partial_state=True)


class Trainer:
    """A run of training.

    Args:
        task: What is learned.
        data: What it is learned from.
        args: The options.
        folder: Output folder, which is this process's.
        accelerator: Accelerate.
    """

    def __init__(self, task: Task, data: Dataset, args: Options, folder: Path, accelerator: Accelerator):
        self.task, self.args, self.folder = task, args, folder
        self.accelerator = accelerator
        device = accelerator.device
        items = len(data)  # type: ignore[arg-type]  # torch's Dataset declares no length
        self.batches = Batches(items, args.batch_size, world_size() * args.grad_accum_steps, args.seed)
        if not self.batches.updates_per_pass:
            raise UsageError(f'{_images_of_an_update(args)} is more than the {items} training images')
        self.updates = 0  # so far
        self.rows: list[dict[str, float]] = []  # of the table, one for each validation
        self.loss: EpochLoss | None = None  # since the last of them
        self.network: nn.Module = task.network.to(device)
        if args.sync_bn and world_size() > 1:
            self.network = synchronize_batch_norm(self.network, device)
        lay_out_gradients(self.network)
        self.average = ModelEmaV3(self.network, args.model_ema_decay) if args.model_ema else None
        self.optimizer = _build_optimizer(args, self.network)
        self.scheduler = _build_scheduler(args, self.optimizer, self.all_updates, self._unit)
        loader = DataLoader(
            SeededItems(data, args.seed),
            batch_sampler=self.batches,
            num_workers=args.workers,
            collate_fn=task.collate,
            pin_memory=device.type == 'cuda',
        )
        self.model, self.prepared_optimizer, self.loader = accelerator.prepare(self.network, self.optimizer, loader)
        self.val_loader = validation_loader(task, args.workers, accelerator)

    @property
    def _unit(self) -> int:
        """Updates of what `--milestones` and `--val-interval` count."""
        return 1 if self.args.updates else self.batches.updates_per_pass

    @property
    def all_updates(self) -> int:
        """Updates of the whole training."""
        return self.args.updates or self.args.epochs * self._unit

    @property
    def interval(self) -> int:
        """Updates from one validation to the next."""
        if self.args.val_interval:
            return min(self.args.val_interval * self._unit, self.all_updates)
        return math.ceil(self.args.updates / 10) if self.args.updates else self._unit

    @cached_property
    def tensorboard(self) -> Any:
        """Where each row of the table is logged as well."""
        return start_tensorboard(self.folder, self.updates)

    def train(self) -> None:
        """Train to the end; validate, record and save on the way."""
        if is_first():
            remove_temporaries(self.folder)
        while (validated := int(self.rows[-1]['update']) if self.rows else 0) < self.all_updates:
            stop = min((validated // self.interval + 1) * self.interval, self.all_updates)
            label = self._label(stop)
            self._train_until(stop, label)
            self._record(self._validate(label), label)
            self.save()
        if is_first():
            self.task.draw(self._evaluated, self.accelerator.device, self.folder / 'predictions.png')
        wait_for_all()

    def _label(self, stop: int) -> str:
        if self.args.updates:
            return f'update {stop}/{self.all_updates}'
        return f'epoch {math.ceil(stop / self._unit)}/{self.args.epochs}'

    def _train_until(self, stop: int, label: str) -> None:
        """Train up to an update."""
        self.batches.updates = range(self.updates, stop)
        self.loss = self.loss or EpochLoss(label, self.accelerator.device)
        self.loss.label = label
        self.model.train()
        progress = Progress(_Updates(self.loader, self.args.grad_accum_steps), label, self.args.log_interval)
        for batches in progress:
            self._update(batches)
            if progress.advance(self.args.grad_accum_steps * self.args.batch_size):
                progress.show(loss=f'{self.loss.mean():.4f}', lr=f'{self.learning_rate:.3g}')
            if self.args.save_interval and self.updates % self.args.save_interval == 0:
                self.save()
        self.check()

    def _update(self, batches: Iterable[tuple]) -> None:
        """Learn from the batches of an update."""
        assert self.loss is not None
        accelerator = self.accelerator
        self.scheduler.step_update(self.updates)
        for number, batch in enumerate(batches):
            random_seed(seed_of(self.args.seed, self.updates, number, rank()))
            with accelerator.accumulate(self.model):
                loss = torch.stack(list(self.task.losses(self.model, batch).values())).sum()
                accelerator.backward(loss)
                if accelerator.sync_gradients and self.args.clip_grad:
                    accelerator.clip_grad_norm_(self.model.parameters(), self.args.clip_grad)
                self.prepared_optimizer.step()
                self.prepared_optimizer.zero_grad()
            self.loss.add(loss.detach(), self.args.batch_size)
        self.updates += 1
        if self.average is not None:
            self.average.update(self.network, step=self.updates)

    @property
    def learning_rate(self) -> float:
        """The highest of the parameter groups."""
        return max(group['lr'] for group in self.optimizer.param_groups)

    def check(self) -> None:
        """Refuse to go on with, or save, what has diverged.

        Raises:
            Divergence: A loss since the last validation or a weight is not finite.
        """
        if self.loss is not None:
            self.loss.mean()
            check_weights(self.network, self.loss.label)

    @property
    def _evaluated(self) -> nn.Module:
        """What is validated: the average of the weights where there is one."""
        return self.network if self.average is None else self.average.module

    def _validate(self, label: str) -> dict[str, float]:
        if world_size() > 1 and not self.args.sync_bn:  # the statistics of a process are those of its batches
            distribute_bn(self.network, world_size(), reduce=False)
            if self.average is not None:
                distribute_bn(self.average.module, world_size(), reduce=False)
        interval = self.args.log_interval
        return evaluate(self.task, self._evaluated, self.val_loader, self.accelerator, f'{label} validation', interval)

    def _record(self, scores: dict[str, float], label: str) -> None:
        """Add a row to the table, and say, write and draw it."""
        assert self.loss is not None
        loss_sum, images = total(self.loss.total.item(), self.loss.images)
        row = {'update': self.updates, 'lr': self.learning_rate, 'train_loss': loss_sum / images, **scores}
        self.rows.append(row)
        self.loss = None
        log.info('%s  loss %.4f  %s', label, row['train_loss'], self.task.show(scores))
        if not is_first():
            return
        with write_beside(self.folder / 'summary.csv') as temporary, temporary.open('w', newline='') as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerows(self.rows)
        lines = {name: name for name in self.task.main_scores(scores)}
        panels = {'loss': {'': 'train_loss'}, 'scores': lines, 'learning rate': {'': 'lr'}}
        draw_panels(self.rows, panels, self.folder / 'curves.png', x='update')
        if self.args.log_tensorboard:
            for name, value in row.items():
                self.tensorboard.add_scalar(name, value, self.updates)
            self.tensorboard.flush()

    def save(self) -> None:
        """Write `last.pth`, from which the run can go on, and where no earlier weights were better `best.pth`.

        Each is one file that takes its place when it is whole; all processes have to take part.
        """
        self.check()
        loss = None if self.loss is None else total(self.loss.total.item(), self.loss.images)
        if not is_first():
            return wait_for_all()
        weights = {'model': self.network.state_dict()}
        if self.average is not None:
            weights['model_ema'] = self.average.module.state_dict()
        facts = {'task': self.task.name, 'scores': self.rows[-1] if self.rows else {}, **self.task.facts}
        state = {
            **weights,
            **facts,
            'optimizer': self.optimizer.state_dict(),
            'updates': self.updates,
            'rows': self.rows,
            'loss': loss,
            'division': self._division,
        }
        if self.accelerator.scaler is not None:
            state['scaler'] = self.accelerator.scaler.state_dict()
        if loss is None and self.rows and self._is_best():
            _write(self.folder / BEST, weights | facts)
        _write(self.folder / LAST, state)
        return wait_for_all()

    def _is_best(self) -> bool:
        """Whether the last row is the first, or as good as the best before."""
        sign = -1 if self.task.best_is_low else 1
        *before, last = (sign * row[self.task.best] for row in self.rows)
        return not before or last >= max((value for value in before if not math.isnan(value)), default=-math.inf)

    @property
    def _division(self) -> list[int]:
        """What makes an update the same images again: their number in all, and in an update."""
        return [self.batches.items, self.batches.batch_size * self.batches.per_update]

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of an earlier process.

        Raises:
            UsageError: It is damaged, or of a training with other options.
        """
        state = read_run_checkpoint(path)
        if 'optimizer' not in state or state.get('division') != self._division:
            items, images = state.get('division') or (0, 0)
            raise UsageError(
                f"'{path}' is of {items} training images, {images} in an update, and this run of "
                f'{self._division[0]} and {self._division[1]}: continue with the same data, and the same product of '
                f'--batch-size, --grad-accum-steps and processes'
            )
        try:
            self.network.load_state_dict(state['model'])
            if self.average is not None:
                self.average.module.load_state_dict(state['model_ema'])
            self.optimizer.load_state_dict(state['optimizer'])
        except (KeyError, RuntimeError, ValueError) as e:
            raise UsageError(f"'{path}' is of other options than these: {first_line(e)}") from e
        if self.accelerator.scaler is not None and 'scaler' in state:
            self.accelerator.scaler.load_state_dict(state['scaler'])
        self.updates, self.rows = state['updates'], state['rows']
        if state['loss'] is not None:
            loss_sum, images = state['loss'] if is_first() else (0.0, 0)
            self.loss = EpochLoss('', self.accelerator.device, images=int(images), total=loss_sum)
        log.info('continuing from %s after %d updates', path, self.updates)


class _Updates:
    """A loader's batches, those of an update together, as it can be interrupted only between two updates.

    Args:
        loader: The loader.
        number: Of batches in an update.
    """

    def __init__(self, loader: DataLoader, number: int):
        self.loader = loader
        self.number = number

    def __len__(self) -> int:
        return len(self.loader) // self.number

    def __iter__(self) -> Iterator[Iterable[tuple]]:
        batches = iter(self.loader)
        for first in batches:
            yield itertools.chain([first], itertools.islice(batches, self.number - 1))


def _write(path: Path, state: dict[str, Any]) -> None:
    try:
        with write_beside(path) as temporary, temporary.open('wb') as file:
            torch.save(state, file)
            os.fsync(file.fileno())
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(f"cannot write '{path}': {e.strerror}; an earlier one is whole") from e


def read_run_checkpoint(path: Path) -> dict[str, Any]:
    """What is in a checkpoint of `Trainer.save`.

    Raises:
        UsageError: It is damaged, or of something else.
    """
    state = read_checkpoint(path)
    if not isinstance(state.get('model'), dict):
        raise UsageError(f"'{path}' is no checkpoint of flatten-zoo train-dense")
    return state


def validation_loader(task: Task, workers: int, accelerator: Accelerator) -> DataLoader:
    """Validation items, each for one of the processes, and one at a time: attention would see a batch's padding."""
    loader = DataLoader(task.val_data, batch_size=1, num_workers=workers, collate_fn=task.collate)
    return accelerator.prepare_data_loader(loader)


@torch.inference_mode()
def evaluate(
    task: Task, network: nn.Module, loader: DataLoader, accelerator: Accelerator, label: str, interval: int
) -> dict[str, float]:
    """The scores of all validation items.

    Args:
        task: What the network has learned.
        network: `task.network` or its average.
        loader: What `validation_loader` returned.
        accelerator: Accelerate.
        label: What to call it in the progress.
        interval: Items between two lines of it.
    """
    network.eval()
    scores = task.new_scores()
    progress = Progress(loader, label, interval, in_step=False)
    for batch in progress:
        with accelerator.autocast():
            task.score(network, batch, scores)
        if progress.advance(1):
            progress.show()
    parts = gathered(scores.state())
    figures = None
    if is_first():
        whole = task.new_scores()
        for part in parts:
            whole.merge(part)
        figures = whole.compute()
    return from_first(figures)


def _build_optimizer(args: Options, network: nn.Module) -> torch.optim.Optimizer:
    """timm's optimizer; biases, norms and what the backbone names have no weight decay."""
    exempt = {
        f'{name}.{parameter}'.lstrip('.')
        for name, module in network.named_modules()
        if hasattr(module, 'no_weight_decay')
        for parameter in module.no_weight_decay()
    }
    groups = param_groups_weight_decay(network, args.weight_decay, no_weight_decay_list=exempt)
    try:
        return create_optimizer_v2(groups, args.opt, args.lr, momentum=args.momentum)
    except (AssertionError, ImportError, TypeError, ValueError) as e:
        raise UsageError(f'cannot build the optimizer --opt {args.opt}: {first_line(e)}') from e


def _build_scheduler(args: Options, optimizer: torch.optim.Optimizer, updates: int, unit: int) -> Scheduler:
    """timm's schedule, over updates."""
    warmup = updates // 10 if args.warmup_updates is None else args.warmup_updates
    if warmup >= updates:
        raise UsageError(f'--warmup-updates {warmup} leaves nothing of the {updates} updates')
    common: dict[str, Any] = {
        'warmup_t': warmup,
        'warmup_lr_init': args.warmup_ratio * args.lr,
        'warmup_prefix': False,
        't_in_epochs': False,
    }
    if args.sched == 'cosine':
        return CosineLRScheduler(optimizer, updates, lr_min=args.min_lr, **common)
    if args.sched == 'poly':
        return PolyLRScheduler(optimizer, updates, power=args.power, lr_min=args.min_lr, **common)
    milestones = [unit * milestone + 1 for milestone in sorted(args.milestones)]  # timm's are one early
    return MultiStepLRScheduler(optimizer, milestones, decay_rate=args.decay_rate, **common)


def _images_of_an_update(args: Options) -> str:
    text = f'--batch-size {args.batch_size}'
    if args.grad_accum_steps > 1:
        text += f' with --grad-accum-steps {args.grad_accum_steps}'
    return text + (f' in {world_size()} processes' if world_size() > 1 else '')
