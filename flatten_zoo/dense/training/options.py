"""The options of `flatten-zoo train-dense`, and what they may say together."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import timm
from timm.models import split_model_name_tag
from timm.optim import list_optimizers

from flatten_zoo.errors import UsageError, shown, unknown_name
from flatten_zoo.training.options.definitions import COUNT, FRACTION, NOT_NEGATIVE, PART, POSITIVE, WHOLE
from flatten_zoo.training.options.parser import OptionParser, read_options_file

from .detection import Detection
from .segmentation import Segmentation
from .stereo import Stereo
from .task import Task
from .video import Video

__all__ = ['TASKS', 'check_options', 'recorded_run', 'task_parser', 'validation_parser']

TASKS: dict[str, type[Task]] = {task.name: task for task in (Detection, Segmentation, Stereo, Video)}


def task_parser(task: type[Task]) -> OptionParser:
    """The parser of `train-dense` for a task, with its defaults."""
    parser = _common_parser(task, f'train-dense {task.name}')
    _optimization_options(parser)
    group = parser.add_argument_group('several processes')
    group.add_argument('--sync-bn', action='store_true', help='batch norm over the batches of all of them')
    group = parser.add_argument_group('output')
    group.add_argument(
        '--output', metavar='FOLDER', default=f'output/{task.name}', help='folder for all that is written'
    )
    group.add_argument('--resume', choices=('auto',), help='auto: continue the run in --output, if there is one')
    group.add_argument(
        '--val-interval',
        type=COUNT,
        metavar='N',
        help='epochs from one validation to the next, or updates where --updates is given; None: 1 epoch, or a tenth '
        'of the updates',
    )
    group.add_argument(
        '--save-interval', type=WHOLE, default=0, metavar='N', help='updates after which to save in between, 0: never'
    )
    group.add_argument('--log-tensorboard', action='store_true', help='log for TensorBoard, too')
    parser.set_defaults(**task.defaults)
    return parser


def validation_parser(task: type[Task]) -> OptionParser:
    """The parser of `validate-dense` for a run of a task."""
    parser = _common_parser(task, 'validate-dense FOLDER')
    parser.add_argument('--picture', metavar='FILE', help='draw predictions there')
    return parser


def _common_parser(task: type[Task], program: str) -> OptionParser:
    """A parser with the options of a task, and those of every program that runs its network."""
    parser = OptionParser(recipe_folder=f'dense/{task.name}', prog=f'flatten-zoo {program}', description=task.__doc__)
    task.add_options(parser)
    group = parser.add_argument_group('running')
    group.add_argument('-j', '--workers', type=WHOLE, default=0, metavar='N', help='processes that load data')
    group.add_argument('--device', default='cuda', help='where to run; the CPU if there is no GPU')
    group.add_argument(
        '--amp', nargs='?', const='bfloat16', choices=('bfloat16', 'float16'), help='mixed precision (bfloat16)'
    )
    group.add_argument('--seed', type=WHOLE, default=0, metavar='N', help='of weights, order and augmentation')
    group.add_argument('--log-interval', type=COUNT, default=50, metavar='N', help='batches between log lines')
    return parser


def _optimization_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('training')
    group.add_argument('--epochs', type=COUNT, metavar='N', help='passes over the data')
    group.add_argument('--updates', type=COUNT, metavar='N', help='in place of that, updates of the weights')
    group.add_argument('-b', '--batch-size', type=COUNT, metavar='N', help='images of a batch, in each process')
    group.add_argument(
        '--grad-accum-steps', type=COUNT, default=1, metavar='N', help='batches of each process in an update'
    )
    group.add_argument('--opt', default='adamw', metavar='NAME', help="timm's name of the optimizer")
    group.add_argument('--lr', type=POSITIVE, help='highest learning rate')
    group.add_argument('--momentum', type=FRACTION, default=0.9, help='of SGD and its like')
    group.add_argument('--weight-decay', type=NOT_NEGATIVE, default=0.05, help='of weights that are matrices or more')
    group.add_argument('--clip-grad', type=NOT_NEGATIVE, metavar='NORM', help='largest norm of the gradients, 0: any')
    group.add_argument(
        '--sched', default='cosine', choices=('cosine', 'poly', 'step'), help='how the learning rate falls'
    )
    group.add_argument('--min-lr', type=NOT_NEGATIVE, default=0.0, metavar='LR', help='where cosine and poly end')
    group.add_argument('--power', type=POSITIVE, default=1.0, help='of --sched poly')
    group.add_argument(
        '--milestones',
        nargs='+',
        type=COUNT,
        default=[],
        metavar='N',
        help='epochs (or updates, where --updates is given) after which --sched step goes down',
    )
    group.add_argument('--decay-rate', type=PART, default=0.1, help='factor of --sched step')
    group.add_argument(
        '--warmup-updates', type=WHOLE, metavar='N', help='in which the rate rises; None: a tenth of all'
    )
    group.add_argument('--warmup-ratio', type=FRACTION, default=0.001, help='part of --lr that it rises from')
    group.add_argument('--model-ema', action='store_true', help='validate and keep an average of the weights')
    group.add_argument('--model-ema-decay', type=FRACTION, default=0.9998, metavar='X', help='of the average')


def check_options(args: argparse.Namespace) -> None:
    """Refuse combinations that cannot work.

    Raises:
        UsageError: The option, its value and what would be right.
    """
    if args.opt.lower() not in list_optimizers():
        raise UsageError(f'--opt: {unknown_name("optimizer", args.opt, map(str, list_optimizers()))}')
    if args.sched == 'step' and not args.milestones:
        raise UsageError('--sched step needs --milestones')
    if args.sched != 'step' and args.milestones:
        raise UsageError(f'--milestones are for --sched step, not for {args.sched}')
    if args.log_tensorboard and importlib.util.find_spec('tensorboard') is None:
        raise UsageError("--log-tensorboard needs the package tensorboard: pip install 'flatten_zoo[tensorboard]'")


def recorded_run(folder: Path) -> tuple[type[Task], dict[str, Any]]:
    """Task and options of a run.

    Args:
        folder: Its output folder.

    Raises:
        UsageError: There are none, they are not those of `train-dense`, or they would fetch a network from somewhere.
    """
    path = folder / 'args.yaml'
    if not path.is_file():
        raise UsageError(f"'{folder}' is no output folder of flatten-zoo train-dense: it has no args.yaml")
    values = read_options_file(path)
    task = values.pop('task', None)
    if task not in TASKS:
        raise UsageError(f"'{path}' is of no task of flatten-zoo train-dense")
    run = task_parser(TASKS[task]).check(values, source=path)
    backbone = run.get('backbone')
    if task != Video.name and backbone and not timm.is_model(split_model_name_tag(backbone)[0]):
        raise UsageError(f"'{path}' records the backbone {shown(backbone)}, which is no registered model")
    return TASKS[task], run
