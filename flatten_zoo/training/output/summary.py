"""What a run leaves for people: a table, a picture of the curves, and closing words."""
import argparse
import csv
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.files import write_beside

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = [
    'draw_curves', 'figures_text', 'log_last_row', 'next_command', 'start_tensorboard', 'start_wandb', 'trim_summary']

matplotlib.use('Agg')


def start_wandb(args: argparse.Namespace, name: str) -> None:
    """Begin a run on Weights & Biases, or continue the one that the options name.

    Raises:
        UsageError: The package is missing, or it cannot begin.
    """
    try:
        import wandb
    except ImportError as e:
        raise UsageError("--log-wandb needs the package wandb: pip install 'flatten_zoo[wandb]'") from e
    try:
        wandb.init(
            project=args.wandb_project, name=name, config=vars(args), tags=args.wandb_tags,
            id=args.wandb_resume_id or None, resume='must' if args.wandb_resume_id else None)
    except Exception as e:
        raise UsageError(f'--log-wandb: {first_line(e)}') from e


def start_tensorboard(folder: Path, epoch: int) -> 'SummaryWriter':
    """Begin or continue a folder's event files for TensorBoard; what they had from `epoch` on counts no more."""
    from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(str(folder), purge_step=epoch)


def log_last_row(tensorboard: 'SummaryWriter', summary: Path) -> None:
    """Log the figures of the last row of a `summary.csv` under the names of its columns."""
    with summary.open(newline='') as file:
        *_, row = csv.DictReader(file)
    epoch = int(row.pop('epoch'))
    for name, value in row.items():
        if value:
            tensorboard.add_scalar(name, float(value), epoch)
    tensorboard.flush()


def trim_summary(summary: Path, epochs: int) -> None:
    """Keep the whole rows of the first epochs of a `summary.csv`, as the others will be written again."""
    if not summary.is_file():
        return
    with summary.open(newline='') as file:
        header, *rows = list(csv.reader(file)) or [[]]
    kept = [row for row in rows if len(row) == len(header) and row[0].isdigit() and int(row[0]) < epochs]
    with write_beside(summary) as temporary, temporary.open('w', newline='') as file:
        csv.writer(file).writerows([header, *kept] if kept else [])


def draw_curves(summary: Path, picture: Path) -> None:
    """Draw the losses, accuracies and learning rate of every epoch.

    Args:
        summary: The run's `summary.csv`.
        picture: PNG file to write.
    """
    with summary.open(newline='') as file:
        rows = list(csv.DictReader(file))
    panels = {
        'loss': {'train': 'train_loss', 'validation': 'eval_loss'},
        'accuracy / %': {'top-1': 'eval_top1', 'top-5': 'eval_top5'},
        'learning rate': {'': 'lr'},
    }
    figure = Figure(figsize=(12, 3.6))
    place = {'left': 0.05, 'right': 0.99, 'bottom': 0.14, 'top': 0.91, 'wspace': 0.2}  # computing it takes longest
    for axes, (title, lines) in zip(figure.subplots(1, len(panels), gridspec_kw=place), panels.items(), strict=True):
        for name, column in lines.items():
            points = [(int(row['epoch']), float(row[column])) for row in rows if row.get(column)]
            if points:
                axes.plot(*zip(*points, strict=True), marker='.', label=name)
        axes.set(title=title, xlabel='epoch')
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axes.grid(alpha=0.3)
        if len(lines) > 1 and axes.lines:
            axes.legend()
    with write_beside(picture) as temporary:
        figure.savefig(temporary, dpi=110)


def figures_text(figures: Mapping[str, float]) -> str:
    """Loss and accuracies on one line."""
    return '  '.join(f'{name} {value:.{4 if name == "loss" else 2}f}' for name, value in figures.items())


def next_command(folder: Path) -> str:
    """The command that validates a run, as it works from the folder where training was started."""
    script = Path(sys.argv[0]).with_name('validate.py')
    return shlex.join(['python', str(script), '--checkpoint', str(folder)])
