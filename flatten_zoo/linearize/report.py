"""What came of an attention transfer: words, a JSON file and a picture."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from ..bench.alternating import in_turn, timed
from ..cost.counting import count, peak_memory
from ..figures import save_figure, written_whole
from ..tables import as_text
from .hybrid import at_size, part_of

__all__ = ['Report', 'Speed', 'draw', 'layers_table', 'speeds', 'speeds_table', 'write_report']


@dataclass(frozen=True)
class Speed:
    """Teacher and student with one image of a size.

    Attributes:
        size: Side of the image.
        macs: Multiply-accumulates of both.
        seconds: Median time of both.
        peak_memory: Bytes at the worst moment, of both.
    """

    size: int
    macs: tuple[int, ...]
    seconds: tuple[float, ...]
    peak_memory: tuple[int, ...]


@dataclass
class Report:
    """Figures on held-out images: 'converted' before anything was learned, after 'layers', and after the 'network'.

    Attributes:
        layers: Relative squared error of each attention, by its name, at each of these times.
        kept: Parts that keep softmax; None before that is decided.
        agreement: Images in percent for which student and teacher find the same class; empty without classes.
        feature_error: In its place, the relative squared error of the pooled features.
        accuracy: Top-1 in percent, that of the 'teacher' too; empty without labels.
        speeds: Cost and speed, by size.
    """

    layers: dict[str, dict[str, float]] = field(default_factory=dict)
    kept: list[int] | None = None
    agreement: dict[str, float] = field(default_factory=dict)
    feature_error: dict[str, float] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)
    speeds: list[Speed] = field(default_factory=list)


def speeds(teacher: nn.Module, student: nn.Module, sizes: Sequence[int], seconds: float) -> list[Speed]:
    """Cost and speed of two networks for one image of each size, taking turns on the device of the teacher.

    Args:
        teacher, student: The networks.
        sizes: Sides of the images.
        seconds: Time to measure each.
    """
    device = next(teacher.parameters()).device
    found = []
    for size in sizes:
        models = {name: at_size(model, size).eval() for name, model in (('teacher', teacher), ('student', student))}
        x = torch.randn(1, teacher.in_chans, size, size, device=device)
        memory = tuple(peak_memory(model, x) for model in models.values())  # and libraries choose their kernels

        def run(model: nn.Module, x: torch.Tensor = x) -> None:
            with torch.inference_mode():
                model(x)
            if device.type != 'cpu':
                torch.accelerator.synchronize(device)

        times: dict[str, list[float]] = {name: [] for name in models}
        runs: dict[str, Callable[[], object]] = {name: partial(run, model) for name, model in models.items()}
        for name, call in in_turn(runs, 2 * seconds):
            times[name].append(timed(call))
        macs = tuple(count(model.to('meta'), x.shape).macs for model in models.values())
        found.append(Speed(size, macs, tuple(map(statistics.median, times.values())), memory))
    return found


def layers_table(report: Report) -> str:
    """The errors of the layers so far."""
    times = list(next(iter(report.layers.values())))
    kept = [name for name in report.layers if part_of(name) in (report.kept or ())]
    rows = [
        [name, *(f'{figures[time]:.4f}' if time in figures else '' for time in times), 'softmax' * (name in kept)]
        for name, figures in report.layers.items()
    ]
    return as_text(['layer', *times, ''], rows)


def speeds_table(found: Sequence[Speed]) -> str:
    """Cost and speed of teacher and student, and how many times as fast the student is."""
    header = ['size', 'GMACs', 'student', 'ms', 'student', 'peak MB', 'student', 'times as fast']
    rows = [
        [
            str(s.size),
            *(f'{macs / 1e9:.3g}' for macs in s.macs),
            *(f'{1e3 * seconds:.1f}' for seconds in s.seconds),
            *(f'{memory / 1e6:.0f}' for memory in s.peak_memory),
            f'{s.seconds[0] / s.seconds[1]:.2f}',
        ]
        for s in found
    ]
    return as_text(header, rows)


def write_report(report: Report, about: dict[str, Any], folder: Path) -> None:
    """Write `report.json` and `report.png` to a folder.

    Args:
        report: What was found.
        about: What else the file is to say.
        folder: The folder.
    """
    with written_whole(folder / 'report.json') as temporary:
        temporary.write_text(json.dumps({**about, **asdict(report)}, indent=2) + '\n')
    save_figure(draw(report), folder / 'report.png', dpi=100)


def draw(report: Report) -> Figure:
    """Errors of the layers, accuracy or agreement, and where it was measured speed."""
    widths = (2, 1, 1) if report.speeds else (2, 1)
    figure = Figure(figsize=(13, 4), layout='constrained')
    layers, classes, *speed = figure.subplots(1, len(widths), width_ratios=widths)
    times = [time for time in ('converted', 'layers', 'network') if any(time in f for f in report.layers.values())]
    for index, time in enumerate(times):
        points = [(place + (index - 1) * 0.28, f[time]) for place, f in enumerate(report.layers.values()) if time in f]
        layers.bar(*zip(*points, strict=True), width=0.26, label=time)
    layers.set_xticks(range(len(report.layers)), [short(name) for name in report.layers], rotation=45)
    layers.set(title='relative squared error of each attention', xlabel='layer')
    layers.legend(fontsize='small')

    found = report.accuracy or report.agreement or report.feature_error
    classes.bar(list(found), list(found.values()), color='tab:gray')
    for place, value in enumerate(found.values()):
        classes.text(place, value, f'{value:.3g}', ha='center', va='bottom')
    title = 'accuracy / %' if report.accuracy else 'same class as the teacher / %'
    classes.set(title='error of the features' if report.feature_error else title)
    classes.tick_params(axis='x', rotation=30)

    for axes in speed:
        sizes = [s.size for s in report.speeds]
        for index, label in enumerate(('teacher', 'student')):
            axes.plot(sizes, [1e3 * s.seconds[index] for s in report.speeds], marker='o', label=label)
        axes.set(xscale='log', yscale='log', title='time of one image / ms', xlabel='side of the image')
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize='small')
    return figure


def short(name: str) -> str:
    """The numbers in a module's name: 2.1 for stages.2.blocks.1.attn."""
    return '.'.join(part for part in name.split('.') if part.isdigit())
