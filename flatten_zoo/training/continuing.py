"""Continuing a run where an earlier process left it: its state, the checkpoints that hold it, and the way back.

A run has a `TrainingState`, of which `Checkpoints` writes files and brings it back from one.
"""

import argparse
import math
import os
import random
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.scheduler import PlateauLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.task import TrainingTask
from timm.utils import CheckpointSaver
from torch.utils.data import IterableDataset

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.files import remove_temporaries
from flatten_zoo.weights import read_checkpoint, select_state_dict

from .loop.optimization import Numerics, updates_per_epoch
from .processes import gathered, is_first, rank, world_size
from .report import log

__all__ = [
    'Checkpoints',
    'Position',
    'TrainingState',
    'find_resumed',
    'first_epoch',
    'last_checkpoint',
    'random_state',
    'read_saved',
    'remove_unfinished',
    'run_checkpoint',
    'set_random_state',
]

BEST, LAST = 'model_best.pth.tar', 'last.pth.tar'


def random_state(device: torch.device) -> dict[str, Any]:
    """State of the global generators of Python, NumPy, torch, and torch on the device."""
    numpy = np.random.get_state(legacy=False)
    numpy['state'] = {**numpy['state'], 'key': numpy['state']['key'].tolist()}
    state = {'python': random.getstate(), 'numpy': numpy, 'torch': torch.get_rng_state()}
    if device.type != 'cpu':
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue from what `random_state` returned; the device's part only on a device of the same kind."""
    random.setstate(state['python'])
    numpy = state['numpy']
    np.random.set_state({**numpy, 'state': {**numpy['state'], 'key': np.array(numpy['state']['key'], np.uint32)}})
    torch.set_rng_state(state['torch'])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])


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
class TrainingState:
    """What training changes, and how far it is; what a checkpoint holds of a run is this.

    Attributes:
        args: Options of `train.py`.
        dist_bn: What becomes of batch norm's statistics after an epoch, as `distribute_batch_norm` takes it.
        numerics: Where and how the model computes.
        task: Model, loss and average of the weights.
        optimizer: Optimizer of the task's model.
        scheduler: Schedule of its learning rate, if any.
        loader: Training batches.
        updates: Updates of the weights so far.
        position: Where in an epoch it is, None between epochs.
        scaler: Scaling of the loss.
    """

    args: argparse.Namespace
    dist_bn: str
    numerics: Numerics
    task: TrainingTask
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None
    loader: Any
    updates: int = field(default=0, init=False)
    position: Position | None = field(default=None, init=False)
    scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self):
        self.scaler = self.numerics.scaler()

    def state_dict(self) -> dict[str, Any]:
        """What continuing needs besides the model, its average and the optimizer: plain types and tensors.

        All processes have to ask for it together; the first one's is that of all.
        """
        run, *others = gathered(self._own_state()) or [{}]
        if isinstance(self.scheduler, PlateauLRScheduler):
            run['plateau'] = {
                'state': self.scheduler.lr_scheduler.state_dict(),
                'restore_lr': self.scheduler.restore_lr,
            }
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
        if self.args.sync_bn or (self.dist_bn and self.position is None):
            return []
        models = (self.task.get_trainable_module(ema=ema) for ema in (False, True))
        return [
            buffer
            for model in models
            if model is not None
            for name, buffer in model.named_buffers()
            if name.endswith(('running_mean', 'running_var'))
        ]

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
                len(runs),
                'es' if len(runs) > 1 else '',
                world_size(),
                'anew, ' if 'position' in runs[0] else '',
            )
            return {key: value for key, value in runs[0].items() if key in ('plateau', 'generators')}
        run = runs[rank()] | {key: value for key, value in runs[0].items() if key == 'plateau'}
        if self.args.start_epoch is not None:  # another place than the checkpoint's
            run.pop('position', None)
        elif 'position' in run and run.get('division') != self._division():
            log.info('the checkpoint is of an epoch that was divided into other batches or updates: it starts anew')
            run['random'] = run.pop('position')['start']
        return run

    def _generators(self) -> dict[str, torch.Generator]:
        """Random generators of their own, of the average of bfloat16 weights and of second-order optimizers."""
        owners = {
            'average': getattr(self.task.get_trainable_module(ema=True), '_sr_generator', None),
            'optimizer': getattr(self.optimizer, 'generator', None),
        }
        return {name: generator for name, generator in owners.items() if generator is not None}


class Checkpoints(CheckpointSaver):
    """timm's keeper of the last and the best checkpoints, safe against an end at any moment.

    A file under its final name is always complete: it is written beside, synchronised to disk, and renamed.
    Checkpoints hold plain types and tensors only, so that `torch.load` reads them with `weights_only=True`.
    The first process writes them, but all have to take part, as each has a state of its own.

    Args:
        training: What to save.
        record: The options, as they were settled.
        label_names: Names of the classes, if known.
        folder: Where.
    """

    def __init__(self, training: TrainingState, record: dict[str, Any], label_names: list[str] | None, folder: Path):
        args = training.args
        super().__init__(
            model=training.task,
            optimizer=training.optimizer,
            args=record,
            task=training.task,
            checkpoint_dir=str(folder),
            recovery_dir=str(folder),
            decreasing=args.eval_metric == 'loss',
            max_history=args.checkpoint_hist,
        )
        self.training = training
        self.label_names = label_names
        self.entries: dict[str, Any] = {}

    def save_checkpoint(self, epoch: int, metric: float | None = None) -> tuple[float | None, int | None]:
        """Save the state after an epoch, as timm does; recovery checkpoints of earlier moments go.

        A metric that is not a number ranks like none: compared with, it would stay the best for ever.
        """
        self.entries = self.training.state_dict()
        if not is_first():
            return None, None
        best = super().save_checkpoint(epoch, None if metric is None or math.isnan(metric) else metric)
        for path in recoveries(Path(self.recovery_dir)).values():
            path.unlink(missing_ok=True)
        return best

    def save_recovery(self, epoch: int, batch_idx: int = 0) -> None:
        """Save the state within an epoch, after so many batches."""
        self.entries = self.training.state_dict()
        if is_first():
            super().save_recovery(epoch, batch_idx)

    def resume(self, path: Path, checkpoint: dict[str, Any], epoch: int) -> None:
        """Bring a new run to the state of a checkpoint whose weights its model has already.

        Where the checkpoint is the output folder's own, its history of checkpoints goes on too.

        Args:
            path: Where the checkpoint was read.
            checkpoint: Its content.
            epoch: The epoch to continue with.

        Raises:
            UsageError: The optimizer's state is missing or does not fit.
        """
        args, task = self.training.args, self.training.task
        if task.has_ema() and checkpoint.get('state_dict_ema') is not None:
            task.load_checkpoint_state(select_state_dict(checkpoint, use_ema=True), ema=True)
        try:
            self.training.load_state_dict(checkpoint, epoch, with_optimizer=not args.no_resume_opt)
        except (KeyError, ValueError) as e:
            raise UsageError(
                f"--resume '{path}': its optimizer state does not fit ({first_line(e)}); "
                f'--no-resume-opt continues with a new one'
            ) from e
        if path.parent.resolve() == Path(self.checkpoint_dir).resolve():
            whole = 'position' not in checkpoint.get('run', {}) and not args.no_resume_opt and args.start_epoch is None
            self._continue_history(checkpoint, again=whole)
        log.info('continuing from %s at epoch %d', path, epoch)

    def _continue_history(self, checkpoint: dict[str, Any], again: bool) -> None:
        """Go on with the history of an earlier process in the same folder.

        Args:
            checkpoint: The checkpoint that the run continues from.
            again: Save it again, as the end of that may have been cut off: last, numbered and best checkpoint.
        """
        history = checkpoint.get('saver', {})
        files = [  # they will be removed one day, so no others
            entry
            for entry in history.get('checkpoint_files', ())
            if re.fullmatch(r'checkpoint-\d+\.pth\.tar', str(entry[0]))
        ]
        self.load_state_dict({**history, 'checkpoint_files': files, 'pending': (None, None)})
        if again:
            self.save_checkpoint(checkpoint['epoch'], checkpoint.get('metric'))

    def _save(self, save_path: str, epoch: int, metric: float | None = None) -> None:
        state = {
            'epoch': epoch,
            'arch': self.args['model'],
            'args': self.args,
            'version': 2,
            'optimizer': self.optimizer.state_dict(),
            'saver': self.state_dict(epoch, metric),
            'label_names': self.label_names,
            **self.entries,
            **self.task.get_checkpoint_state(unwrap_fn=self.unwrap_fn),
            **self.task.get_checkpoint_state(ema=True, unwrap_fn=self.unwrap_fn),
        }
        if metric is not None:
            state['metric'] = metric
        try:
            with open(save_path, 'wb') as file:
                torch.save(state, file)
                os.fsync(file.fileno())
        except BaseException as e:
            Path(save_path).unlink(missing_ok=True)
            if isinstance(e, OSError | RuntimeError):  # torch raises the latter while it handles the former
                cause = e if isinstance(e, OSError) else e.__context__
                reason = getattr(cause, 'strerror', None) or first_line(e)
                left = 'there is no earlier one'
                if last_checkpoint(Path(self.checkpoint_dir)):
                    left = 'the earlier ones are whole, --resume auto continues from there'
                raise UsageError(f"cannot write a checkpoint in '{self.checkpoint_dir}': {reason}; {left}") from e
            raise

    def _replace(self, src: str, dst: str) -> None:
        os.replace(src, dst)

    def _duplicate(self, src: str, dst: str) -> None:
        beside = f'{dst}.tmp'
        Path(beside).unlink(missing_ok=True)
        try:
            os.link(src, beside)
        except OSError:  # a file system without hard links
            shutil.copyfile(src, beside)
        os.replace(beside, dst)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process was just writing in its output folder."""
    for pattern in ('*tmp.pth.tar', '*.pth.tar.tmp'):
        for path in folder.glob(pattern):
            path.unlink()
    remove_temporaries(folder)


def recoveries(folder: Path) -> dict[tuple[int, int], Path]:
    """The recovery checkpoints in a folder, by epoch and batches done."""
    found = {}
    for path in folder.glob('recovery-*.pth.tar'):
        match = re.fullmatch(r'recovery-(\d+)-(\d+)\.pth\.tar', path.name)
        if match:
            found[int(match[1]), int(match[2])] = path
    return found


def last_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that is furthest in training: the last one, or a recovery checkpoint of the epoch after it.

    Raises:
        UsageError: The last checkpoint is damaged.
    """
    found = recoveries(folder) if os.path.isdir(folder) else {}
    last = folder / LAST
    if os.path.isfile(last):
        found[(read_saved(last).get('epoch', -1) + 1, 0) if found else (0, 0)] = last
    return found[max(found)] if found else None


def read_saved(path: Path) -> dict[str, Any]:
    """Read a checkpoint to continue from.

    Raises:
        UsageError: It is damaged; the message names the latest whole one in its folder, if there is one.
    """
    try:
        return read_checkpoint(path)
    except UsageError as e:
        others = sorted(path.parent.glob('*-*.pth.tar'), key=os.path.getmtime, reverse=True)
        whole = next(filter(_is_whole, others), None)
        raise UsageError(
            f"{e}, or move it away and continue with --resume '{whole}', which is whole" if whole else str(e)
        ) from e


def _is_whole(path: Path) -> bool:
    try:
        return bool(read_checkpoint(path))
    except UsageError:
        return False


def run_checkpoint(folder: Path) -> Path:
    """The best checkpoint of a training run, or its last one where none was validated.

    Raises:
        UsageError: The folder has no checkpoint.
    """
    for name in (BEST, LAST):
        if (folder / name).is_file():
            return folder / name
    raise UsageError(f"no {BEST} or {LAST} in '{folder}': give the output folder of a run of train.py")


def find_resumed(args: argparse.Namespace) -> Path | None:
    """The checkpoint that `--resume` names, None to start anew.

    Raises:
        UsageError: There is no such file, nothing to continue in the folder, or `auto` lacks an experiment.
    """
    if not args.resume:
        return None
    if args.resume == 'auto':
        if not args.experiment:
            raise UsageError('--resume auto needs --experiment: it continues from its last checkpoint')
        return last_checkpoint(Path(args.output or 'output/train', args.experiment))
    path = Path(args.resume)
    if os.path.isdir(path):
        path = last_checkpoint(path)
        if path is None:
            raise UsageError(f"--resume '{args.resume}': there is no checkpoint in this folder yet")
    elif not os.path.isfile(path):
        raise UsageError(f"--resume '{args.resume}': there is no such file; 'auto' takes the experiment's last one")
    return path


def first_epoch(args: argparse.Namespace, checkpoint: dict[str, Any] | None) -> int:
    """The epoch to start with: `--start-epoch`, else the one that the checkpoint leaves to be done, else 0."""
    if args.start_epoch is not None:
        return args.start_epoch
    if checkpoint is None or not isinstance(checkpoint.get('epoch'), int):
        return 0
    unfinished = 'position' in checkpoint.get('run', {}) or checkpoint.get('version', 1) < 2
    return checkpoint['epoch'] + (0 if unfinished else 1)
