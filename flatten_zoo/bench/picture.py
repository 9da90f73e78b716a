"""The picture of speed against accuracy."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from timm.models import split_model_name_tag

from ..cost.comparison import default_size
from ..errors import UsageError
from ..figures import check_picture_path, save_figure
from ..models import RELEASES
from ..models._released import TAG
from .measuring import Timing, family

__all__ = ['check_accuracies', 'plot', 'reported_top1']


def reported_top1(name: str, size: int) -> float | None:
    """ImageNet top-1 in percent that the authors report for a model at that image size; timm does not ship its own."""
    if ':' in name:  # an address
        return None
    architecture, tag = split_model_name_tag(name)
    if architecture not in RELEASES or tag not in ('', TAG):
        return None
    return RELEASES[architecture].top1 if size == default_size(architecture) else None


def check_accuracies(path: Path, names: Sequence[str], sizes: Sequence[int] | None) -> list[str]:
    """What can't be drawn, found before anything is measured.

    Args:
        path: The picture.
        names: Models.
        sizes: Sides of images; each model's own if None.

    Returns:
        The models for which nobody has reported an accuracy at any of these sizes.

    Raises:
        UsageError: There is no accuracy at all, or the picture can't be written there.
    """
    check_picture_path(path)
    without = [name for name in names if not any(reported_top1(name, size) for size in sizes or [default_size(name)])]
    if len(without) == len(names):
        raise UsageError(
            '--plot: no accuracy is reported for any of these models at these sizes; name one that has released '
            f'weights, such as {next(iter(RELEASES))}, and leave out --img-size'
        )
    return without


def plot(timings: Sequence[Timing], path: Path, train: bool) -> bool:
    """Draws the time of a batch against reported ImageNet top-1, one panel for each mode and batch size.

    Args:
        timings: What was measured; those without a reported accuracy are left out.
        path: File to write; its suffix names the format.
        train: They are of training steps.

    Returns:
        Whether there was anything to draw.

    Raises:
        UsageError: The file can't be written.
    """
    points = [(t, top1) for t in timings if (top1 := reported_top1(t.model, t.img_size))]
    if not points:
        return False
    panels = {key: list(group) for key, group in itertools.groupby(points, lambda p: (p[0].mode, p[0].batch_size))}
    families = list(dict.fromkeys(family(t.model) for t, _ in points))
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(max(6, 5 * columns), 4.5 * rows), layout='constrained')
    for i, ((mode, batch_size), panel) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, i)
        for name in families:
            mine = [(1e3 * t.quartiles[1], top1) for t, top1 in panel if family(t.model) == name]
            axes.plot(*zip(*sorted(mine), strict=True) if mine else ((), ()), marker='o', label=name)
        axes.set(
            title=f'{mode}, batch {batch_size}',
            ylabel='reported ImageNet top-1 (%)',
            xscale='log',
            xlabel=f'{"training step" if train else "latency"} (ms per batch)',
        )
        axes.margins(0.2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize='small', loc='lower right')
    figure.draw_without_rendering()  # the axes are where they will be
    figure.set_layout_engine('none')
    for axes, panel in zip(figure.axes, panels.values(), strict=True):
        _label(axes, [(t.model, (1e3 * t.quartiles[1], top1)) for t, top1 in panel])
    save_figure(figure, path)
    return True


def _label(axes: Axes, points: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """Writes names at points, each as near as it can without covering lines, other names or the legend."""
    pixels = axes.figure.dpi / 72
    radius = 4 * pixels
    taken = [
        Bbox.from_bounds(x - radius, y - radius, 2 * radius, 2 * radius)
        for line in axes.lines
        for x, y in np.asarray(line.get_transform().transform_path(line.get_path()).interpolated(50).vertices)
    ]
    taken.append(axes.get_legend().get_window_extent())  # type: ignore[union-attr]  # each has one
    for name, point in points:
        label = axes.annotate(
            name,
            point,
            (0, 0),
            textcoords='offset points',
            ha='center',
            va='center',
            fontsize='small',
            arrowprops={'arrowstyle': '-', 'alpha': 0.4},
            zorder=1,
        )
        at = label.get_window_extent()
        half = at.width / 2 / pixels, at.height / 2 / pixels
        for distance, angle in itertools.product(range(6, 200, 6), range(0, 360, 30)):
            direction = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            right, up = (d * (distance + h) for d, h in zip(direction, half, strict=True))
            label.set_position((right, up))
            box = at.translated(pixels * right, pixels * up)
            inside = all(axes.bbox.contains(*corner) for corner in box.corners())
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
