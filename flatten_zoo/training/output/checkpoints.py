"""Checkpoints: written whole or not at all, and read with errors that say what is wrong."""
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timm.utils import CheckpointSaver

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.files import remove_temporaries
from flatten_zoo.weights import read_checkpoint

from ..processes.distributed import is_first

__all__ = ['Checkpoints', 'last_checkpoint', 'read_saved', 'remove_unfinished', 'run_checkpoint']

BEST, LAST = 'model_best.pth.tar', 'last.pth.tar'


class Checkpoints(CheckpointSaver):
    """timm's keeper of the last and the best checkpoints, safe against an end at any moment.

    A file under its final name is always complete: it is written beside, synchronised to disk, and renamed.
    Checkpoints hold plain types and tensors only, so that `torch.load` reads them with `weights_only=True`.
    The first process writes them, but all have to take part, as each has a state of its own.

    Args:
        state: Returns more entries of a checkpoint, to be called in all processes together.
        kwargs: Arguments of timm's saver.
    """

    def __init__(self, *, state: Callable[[], dict[str, Any]], **kwargs):
        super().__init__(**kwargs)
        self.more_state = state
        self.entries = {}

    def save_checkpoint(self, epoch: int, metric: float | None = None) -> tuple[float | None, int | None]:
        """Save the state after an epoch, as timm does; recovery checkpoints of earlier moments go.

        A metric that is not a number ranks like none: compared with, it would stay the best for ever.
        """
        self.entries = self.more_state()
        if not is_first():
            return None, None
        best = super().save_checkpoint(epoch, None if metric is None or math.isnan(metric) else metric)
        for path in recoveries(Path(self.recovery_dir)).values():
            path.unlink(missing_ok=True)
        return best

    def save_recovery(self, epoch: int, batch_idx: int = 0) -> None:
        """Save the state within an epoch, after so many batches."""
        self.entries = self.more_state()
        if is_first():
            super().save_recovery(epoch, batch_idx)

    def continue_with(self, checkpoint: dict[str, Any], again: bool) -> None:
        """Go on with the history of an earlier process in the same folder.

        Args:
            checkpoint: The checkpoint that the run continues from.
            again: Save it again, as the end of that may have been cut off: last, numbered and best checkpoint.
        """
        history = checkpoint.get('saver', {})
        files = [  # they will be removed one day, so no others
            entry for entry in history.get('checkpoint_files', ())
            if re.fullmatch(r'checkpoint-\d+\.pth\.tar', str(entry[0]))]
        self.load_state_dict({**history, 'checkpoint_files': files, 'pending': (None, None)})
        if again:
            self.save_checkpoint(checkpoint['epoch'], checkpoint.get('metric'))

    def _save(self, save_path: str, epoch: int, metric: float | None = None) -> None:
        state = {
            'epoch': epoch,
            'arch': self.args.model,
            'args': vars(self.args),
            'version': 2,
            'optimizer': self.optimizer.state_dict(),
            'saver': self.state_dict(epoch, metric),
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
            f"{e}, or move it away and continue with --resume '{whole}', which is whole" if whole else str(e)) from e


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
