"""`flatten-zoo train-dense`."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from timm.utils import random_seed

from flatten_zoo.errors import UsageError, unknown_name
from flatten_zoo.training.loop.model import resolve_device
from flatten_zoo.training.loop.trainer import Divergence
from flatten_zoo.training.options.parser import Options, write_options_file
from flatten_zoo.training.processes import (
    Terminated,
    as_one,
    exit_status,
    first_of_machine_ahead,
    from_first,
    interrupts_between_batches,
    is_first,
    join,
    wait_for_all,
    world_size,
)
from flatten_zoo.training.report import log, setup_logging
from flatten_zoo.training.train import lock_folder

from .options import TASKS, check_options, task_parser
from .task import Task
from .trainer import BEST, LAST, Trainer, accelerator

__all__ = ['main']

_USAGE = 'usage: flatten-zoo train-dense {{{}}} [OPTION ...]\n\nflatten-zoo train-dense TASK --help lists the options.'


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says.

    Args:
        argv: Task and options; those of `sys.argv` if None.

    Returns:
        Exit status: 0, or 130 after Ctrl-C, or 143 after SIGTERM, which first saves a checkpoint.

    Raises:
        UsageError: What was asked for cannot be done.
    """
    setup_logging()
    name, *options = (sys.argv[1:] if argv is None else list(argv)) or ['']
    if name in ('-h', '--help'):
        print(_USAGE.format(','.join(TASKS)))
        return 0
    with as_one():
        if name not in TASKS:
            raise unknown_name('task', name, TASKS) if name else UsageError(f'name a task: {", ".join(TASKS)}')
        args = task_parser(TASKS[name]).parse_with_config(options)
        check_options(args)
        return train(TASKS[name], args)


def train(task_type: type[Task], args: Options) -> int:
    """What `main` does, in each of the processes."""
    device = join(resolve_device(args.device))
    folder = Path(args.output)
    last = folder / LAST
    resumed = from_first(last.is_file())
    if resumed and not args.resume:
        raise UsageError(f"'{folder}' holds a trained network already: give another --output, or --resume auto")
    with accelerator(args, device) as accelerate:
        lock = lock_folder(folder) if is_first() else None
        random_seed(args.seed)
        with first_of_machine_ahead():  # it fetches weights and makes data for the others
            task = task_type(args, trained=resumed)
            data = task.train_data()
        trainer = Trainer(task, data, args, folder, accelerate)
        if resumed:
            trainer.resume(last)
        if is_first():
            write_options_file(folder / 'args.yaml', {'task': task.name} | vars(args))
        wait_for_all()
        log.info(
            '%.2f M parameters on %s%s: %d images for training and %d for validation, %d updates',
            sum(p.numel() for p in trainer.network.parameters()) / 1e6,
            f'{world_size()} × ' if world_size() > 1 else '',
            device,
            trainer.batches.items,
            len(task.val_data),  # type: ignore[arg-type]  # torch's Dataset declares no length
            trainer.all_updates,
        )
        try:
            with interrupts_between_batches():
                try:
                    trainer.train()
                except Terminated:
                    trainer.save()
                    raise
        except Divergence as e:
            ideas = 'try a lower --lr, more --warmup-updates or a --clip-grad'
            raise UsageError(f'{e}; {ideas}; {_what_is_left(last)}') from e
        except KeyboardInterrupt as e:
            log.warning('interrupted; %s', _what_is_left(last))
            return exit_status(e)
        finally:
            if lock is not None:
                lock.close()
    log.info('written to %s: %s, %s, summary.csv, curves.png, predictions.png, args.yaml', folder, BEST, LAST)
    log.info('next: flatten-zoo validate-dense %s', shlex.quote(str(folder)))
    return 0


def _what_is_left(last: Path) -> str:
    return f'--resume auto continues from {last}' if last.is_file() else 'there is no checkpoint yet'
