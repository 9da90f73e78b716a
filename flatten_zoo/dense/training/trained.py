"""Networks that `flatten-zoo train-dense` has trained, without its data."""

from pathlib import Path
from typing import Any

from torch import nn

from flatten_zoo.errors import UsageError, first_line

from .options import recorded_run, task_parser
from .task import Task
from .trainer import BEST, read_run_checkpoint

__all__ = ['load_weights', 'open_run', 'open_segmentation']


def open_run(folder: Path) -> Task:
    """What was trained for objects or classes of pixels, with its best weights, on the CPU and in inference mode.

    Args:
        folder: The output folder; the data need not be there.

    Raises:
        UsageError: It is no such folder, or the run was of another task.
    """
    task_type, run = recorded_run(folder)
    if task_type.picture is Task.picture:
        raise UsageError(f"'{folder}' was trained for {task_type.name}, which finds no classes in images")
    path = folder / BEST
    state = read_run_checkpoint(path)
    parser = task_parser(task_type)
    parser.set_defaults(**run)
    task = task_type(parser.parse_with_config([]), trained=True, facts={'classes': state['classes']})
    load_weights(task.network, state, path)
    task.network.eval()
    return task


def open_segmentation(folder: Path) -> tuple[nn.Module, list[str], list[int]]:
    """A trained segmentation network that takes normalised images, names of its classes, and height and width.

    Args:
        folder: The output folder.

    Raises:
        UsageError: It is no such folder, or the run was of another task.
    """
    task = open_run(folder)
    if task.name != 'segmentation':
        raise UsageError(f"'{folder}' was trained for {task.name}, not for segmentation")
    return task.network.model, task.facts['classes'], task.args.crop_size or [task.args.image_size]


def load_weights(network: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Give a network the weights of a checkpoint, their average where it has one.

    Raises:
        UsageError: They do not fit.
    """
    try:
        network.load_state_dict(state.get('model_ema', state['model']))
    except RuntimeError as e:
        raise UsageError(f"'{path}' does not fit the network of these options: {first_line(e)}") from e
