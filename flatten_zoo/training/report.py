"""What a run leaves for people: a table, a picture of the curves, and closing words."""
import csv
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from flatten_zoo.files import write_beside

__all__ = ['draw_curves', 'figures_text', 'next_command']

matplotlib.use('Agg')


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
    figure = Figure(figsize=(12, 3.6), layout='constrained')
    for axes, (title, lines) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name, column in lines.items():
            points = [(int(row['epoch']), float(row[column])) for row in rows if row.get(column)]
            if points:
                axes.plot(*zip(*points, strict=True), marker='.', label=name)
        axes.set(title=title, xlabel='epoch')
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
