"""`flatten-zoo validate-dense`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from flatten_zoo.errors import UsageError
from flatten_zoo.training.loop.model import resolve_device
from flatten_zoo.training.processes import as_one, exit_status, interrupts_between_batches, is_first, join
from flatten_zoo.training.report import log, setup_logging

from .options import recorded_run, validation_parser
from .trained import load_weights
from .trainer import BEST, accelerator, evaluate, read_run_checkpoint, validation_loader

__all__ = ['main']

_USAGE = """usage: flatten-zoo validate-dense FOLDER [OPTION ...]

FOLDER is the output of flatten-zoo train-dense. Its args.yaml says what was trained and how; options override it.
flatten-zoo validate-dense FOLDER --help lists them. Scores are printed as JSON."""


def main(argv: Sequence[str] | None = None) -> int:
    """Validate the best weights of a run.

    Args:
        argv: Folder and options; those of `sys.argv` if None.

    Returns:
        Exit status: 0, or 130 after Ctrl-C, or 143 after SIGTERM.

    Raises:
        UsageError: What was asked for cannot be done.
    """
    setup_logging()
    folder, *options = (sys.argv[1:] if argv is None else list(argv)) or ['']
    if folder in ('-h', '--help'):
        print(_USAGE)
        return 0
    with as_one():
        if not folder or folder.startswith('-'):
            raise UsageError('name the output folder of flatten-zoo train-dense first')
        try:
            with interrupts_between_batches():
                scores = validate(Path(folder), options)
        except KeyboardInterrupt as e:
            log.info('interrupted')
            return exit_status(e)
        if is_first():
            print(json.dumps(scores, indent=4))
    return 0


def validate(folder: Path, options: Sequence[str]) -> dict[str, float]:
    """Scores of the best weights of a run, with its options but where others are given."""
    task_type, run = recorded_run(folder)
    parser = validation_parser(task_type)
    parser.set_defaults(**{name: run[name] for name in vars(parser.parse_args([])) if name in run})
    args = parser.parse_with_config(options)
    args = args.replace(output=str(folder))  # where generated data are
    path = folder / BEST
    state = read_run_checkpoint(path)
    device = join(resolve_device(args.device))
    with accelerator(args, device) as accelerate:
        task = task_type(args, trained=True)
        load_weights(task.network, state, path)
        network = task.network.to(accelerate.device)
        loader = validation_loader(task, args.workers, accelerate)
        scores = evaluate(task, network, loader, accelerate, 'validation', args.log_interval)
        if args.picture and is_first():
            with torch.inference_mode():
                task.draw(network, accelerate.device, Path(args.picture))
    return scores
