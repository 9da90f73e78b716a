"""What a run says and leaves for people: messages, progress, a table, a picture of the curves, and closing words."""

import argparse
import csv
import logging
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from timm.utils.distributed import world_info_from_env
from tqdm import tqdm

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.files import write_beside

from .options.parser import program
from .processes import is_first, until_interrupted, world_size

__all__ = [
    'Progress',
    'draw_curves',
    'draw_panels',
    'figure_texts',
    'figures_text',
    'log',
    'log_last_row',
    'next_command',
    'setup_logging',
    'start_tensorboard',
    'start_wandb',
    'trim_summary',
]

matplotlib.use('Agg')

log = logging.getLogger('flatten_zoo')


def setup_logging() -> None:
    """Show the zoo's messages as they are, those of the first process only, and of the libraries' only warnings."""
    logging.basicConfig(format='%(message)s', level=logging.WARNING)
    logging.getLogger('timm.data.dataset').setLevel(logging.ERROR)  # an image it would skip is an error here
    first = world_info_from_env()[1] == 0
    log.setLevel(logging.INFO if first else logging.WARNING)


class Progress:
    """Iterates over batches and shows how far it is.

    Args:
        batches: What to iterate over; its length, if known, gives the time left.
        label: What the loop does.
        interval: Batches between two lines when standard error is not a terminal.
        in_step: Whether all processes have the same number of batches and go through them together.
    """

    REFRESH = 0.5  # seconds between two figures on a bar

    def __init__(self, batches: Any, label: str, interval: int, in_step: bool = True):
        self.batches = batches
        self.label = label
        self.interval = interval
        self.in_step = in_step
        self.total = len(batches) or None
        self.on_terminal = sys.stderr.isatty() and is_first()
        self.done = 0
        self.skipped = 0
        self.images = 0
        self.started = self.shown = time.monotonic()

    def __iter__(self) -> Iterator[Any]:
        with tqdm(
            total=self.total,
            desc=self.label,
            unit='batch',
            leave=False,
            dynamic_ncols=True,
            disable=not self.on_terminal,
        ) as self.bar:
            self.started = time.monotonic()
            for batch in until_interrupted(self.batches, self.in_step):
                yield batch
                self.bar.update()

    def skip(self) -> None:
        """Pass over a batch that an earlier process has finished; it counts for the place, not for the speed."""
        self.done += 1
        self.skipped += 1
        self.started = time.monotonic()

    def advance(self, images: int) -> bool:
        """Count a finished batch.

        Returns:
            Whether figures are wanted now: they cost a wait for the device, so they are not computed every time.
        """
        self.done += 1
        self.images += images
        if self.on_terminal:
            return self.done == self.total or time.monotonic() - self.shown > self.REFRESH
        return self.done % self.interval == 0

    def show(self, **figures: str) -> None:
        """Show figures, the speed and the time left."""
        self.shown = time.monotonic()
        elapsed = self.shown - self.started
        figures['images/s'] = f'{self.rate:.0f}'
        if self.on_terminal:
            self.bar.set_postfix(figures)
            return
        if self.total:
            figures['left'] = tqdm.format_interval(elapsed / (self.done - self.skipped) * (self.total - self.done))
        text = '  '.join(f'{name} {value}' for name, value in figures.items())
        log.info('%s  batch %d/%s  %s', self.label, self.done, self.total or '?', text)

    @property
    def rate(self) -> float:
        """Images per second of all processes so far."""
        return world_size() * self.images / max(time.monotonic() - self.started, 1e-9)


def start_wandb(args: argparse.Namespace, record: dict[str, Any], name: str) -> None:
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
            project=args.wandb_project,
            name=name,
            config=record,
            tags=args.wandb_tags,
            id=args.wandb_resume_id or None,
            resume='must' if args.wandb_resume_id else None,
        )
    except (wandb.Error, OSError, ValueError) as e:
        raise UsageError(f'--log-wandb: {first_line(e)}') from e


def start_tensorboard(folder: Path, epoch: int):
    """Begin or continue a folder's event files for TensorBoard; what they had from `epoch` on counts no more."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=epoch)


def log_last_row(tensorboard: Any, summary: Path) -> None:
    """Log the figures of the last row of a `summary.csv` under the names of its columns."""
    with summary.open(newline='') as file:
        *_, row = csv.DictReader(file)
    epoch = int(row.pop('epoch'))
    for name, value in row.items():
        if value:
            tensorboard.add_scalar(name, float(value), epoch)
    tensorboard.flush()


def trim_summary(summary: Path, epochs: int) -> None:
    """Keep the whole rows of the first epochs of a `summary.csv`, as the others will be written again.

    timm's own writes the file in place, and keeps a row that a kill has cut off, such as '1' of epoch 12.
    """
    if not summary.is_file():
        return
    with summary.open(newline='') as file:
        header, *rows = list(csv.reader(file)) or [[]]
    kept = [row for row in rows if len(row) == len(header) and row[0].isdigit() and int(row[0]) < epochs]
    with write_beside(summary) as temporary, temporary.open('w', newline='') as file:
        csv.writer(file).writerows([header, *kept] if kept else [])


def draw_curves(summary: Path, picture: Path) -> None:
    """Draw the losses, accuracies (or errors of layers, where these were validated) and learning rate of every epoch.

    Args:
        summary: The run's `summary.csv`.
        picture: PNG file to write.
    """
    with summary.open(newline='') as file:
        rows = list(csv.DictReader(file))
    validated = {'top-1': 'eval_top1', 'top-5': 'eval_top5'}
    layers = {
        column.removeprefix('eval_'): column
        for column in rows[0]
        if column.startswith('eval_') and column not in ('eval_loss', *validated.values())
    }
    panels = {
        'loss': {'train': 'train_loss', 'validation': 'eval_loss'},
        'error of layers' if layers else 'accuracy / %': layers or validated,
        'learning rate': {'': 'lr'},
    }
    draw_panels(rows, panels, picture, logarithmic='error of layers')


def draw_panels(
    rows: list[dict[str, Any]],
    panels: Mapping[str, Mapping[str, str]],
    picture: Path,
    x: str = 'epoch',
    logarithmic: str = '',
) -> None:
    """Draw columns of a table as curves, side by side.

    Args:
        rows: The table.
        panels: By title the lines of each panel: by name their column.
        picture: PNG file to write.
        x: Column of whole numbers along which they are drawn.
        logarithmic: Title of a panel of many lines with a logarithmic scale.
    """
    figure = Figure(figsize=(12, 3.6))
    place = {'left': 0.05, 'right': 0.99, 'bottom': 0.14, 'top': 0.91, 'wspace': 0.2}  # computing it takes longest
    for axes, (title, lines) in zip(figure.subplots(1, len(panels), gridspec_kw=place), panels.items(), strict=True):
        for name, column in lines.items():
            points = [(int(row[x]), float(row[column])) for row in rows if row.get(column)]
            if points:
                axes.plot(*zip(*points, strict=True), marker='.', label=name)
        axes.set(title=title, xlabel=x)
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axes.grid(alpha=0.3)
        if title == logarithmic:
            axes.set_yscale('log')
        if len(lines) > 1 and axes.lines:
            axes.legend(fontsize='small' if title == logarithmic else None, ncols=-(-len(lines) // 12))
    with write_beside(picture) as temporary:
        figure.savefig(temporary, dpi=110)


def figure_texts(figures: Mapping[str, float]) -> dict[str, str]:
    """Loss and accuracies in words, by name; what else there is, is for the table."""
    digits = {'loss': 4, 'top1': 2, 'top5': 2}
    return {name: f'{figures[name]:.{number}f}' for name, number in digits.items() if name in figures}


def figures_text(figures: Mapping[str, float]) -> str:
    """Loss and accuracies on one line."""
    return '  '.join(f'{name} {text}' for name, text in figure_texts(figures).items())


def next_command(folder: Path) -> str:
    """The command that validates a run, as it works from the folder where training was started."""
    start = program('validate')
    start = ['python', start] if start.endswith('.py') else start.split()
    return shlex.join([*start, '--checkpoint', str(folder)])
