"""Continuing a training run where an earlier process left it."""
import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.weights import select_state_dict

from .output.checkpoints import last_checkpoint
from .output.logs import log

if TYPE_CHECKING:
    from .train import Run

__all__ = ['find_resumed', 'first_epoch', 'resume']


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


def resume(run: 'Run', path: Path, checkpoint: dict[str, Any]) -> None:
    """Bring a new run to the state of a checkpoint whose weights its model has already.

    Where the checkpoint is the output folder's own, its history of checkpoints goes on too.

    Args:
        run: The run to continue.
        path: Where the checkpoint was read.
        checkpoint: Its content.

    Raises:
        UsageError: The optimizer's state is missing or does not fit.
    """
    args, task = run.args, run.trainer.task
    if task.has_ema() and checkpoint.get('state_dict_ema') is not None:
        task.load_checkpoint_state(select_state_dict(checkpoint, use_ema=True), ema=True)
    try:
        run.trainer.load_state_dict(checkpoint, run.epoch, with_optimizer=not args.no_resume_opt)
    except (KeyError, ValueError) as e:
        raise UsageError(
            f"--resume '{path}': its optimizer state does not fit ({first_line(e)}); "
            f'--no-resume-opt continues with a new one') from e
    if path.parent.resolve() == run.folder.resolve():
        whole = 'position' not in checkpoint.get('run', {}) and not args.no_resume_opt and args.start_epoch is None
        run.saver.continue_with(checkpoint, again=whole)
    log.info('continuing from %s at epoch %d', path, run.epoch)
