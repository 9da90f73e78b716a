"""What the benchmark found, as a table, CSV and JSON, with what the machine is."""

import json
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from ..figures import check_path, written_whole
from ..tables import Table, as_csv
from .measuring import Report, Timing
from .modes import ONNX_MODES

__all__ = ['RESULT_FORMATS', 'check_results_path', 'machine', 'save_results', 'timings_table']

RESULT_FORMATS = ('csv', 'json')


def machine(device: torch.device, modes: Sequence[str], train: bool) -> dict[str, str | int | None]:
    """What the figures hold for: the machine, versions, and what was measured."""
    packages = ['torch', 'timm', *(['onnxruntime'] if set(modes) & set(ONNX_MODES) else [])]
    about = {
        'cpu': _processor(),
        'cores': os.cpu_count(),
        'threads': torch.get_num_threads(),
        'device': torch.cuda.get_device_name(device) if device.type == 'cuda' else str(device),
        **{package: version(package) for package in packages},
        'measured': 'training steps: forward, cross-entropy, backward, SGD with momentum' if train else 'inference',
    }
    if hasattr(os, 'getloadavg'):  # not on Windows
        about['load before'] = f'{os.getloadavg()[0]:.1f}'
    if device.type == 'cuda':
        about['float32'] = 'matrix products in TF32'
    if 'int8' in modes:
        about['int8'] = 'calibrated with random images: its speed alone is meant'
    return about


def _processor() -> str:
    cpuinfo = Path('/proc/cpuinfo')
    names = (
        [line.partition(':')[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith('model name')]
        if cpuinfo.is_file()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def timings_table(timings: Sequence[Timing]) -> Table:
    """Timings for people: medians, and the quartiles in brackets."""
    return ['model', 'mode', 'batch', 'size', 'images/s', 'ms per batch', 'peak memory (MB)', 'speed'], [
        [
            t.model,
            t.mode,
            str(t.batch_size),
            str(t.img_size),
            _spread(t.batch_size / s for s in reversed(t.quartiles)),
            _spread(1e3 * s for s in t.quartiles),
            '' if t.peak_memory is None else f'{t.peak_memory / 1e6:.0f}',
            '' if t.ratio is None else f'{t.ratio:.2f}×',
        ]
        for t in timings
    ]


def _spread(quartiles: Iterable[float]) -> str:
    low, median, high = (f'{value:.3g}' if value < 999.5 else f'{value:.0f}' for value in quartiles)
    return f'{median} ({low} to {high})'


def check_results_path(path: Path) -> None:
    """Raises a `UsageError` where no results can be written, before they are measured."""
    check_path('results', path, RESULT_FORMATS)


def save_results(path: Path, about: dict[str, str | int | None], report: Report) -> None:
    """Writes timings for programs; the suffix, one of `RESULT_FORMATS`, names the format.

    Args:
        path: The file.
        about: What the figures hold for; in CSV, lines that begin with '#'.
        report: What came out.

    Raises:
        UsageError: The file cannot be written.
    """
    rows = [_values(t) for t in report.timings]
    if path.suffix.lower() == '.json':
        text = json.dumps({'machine': about, 'results': rows, 'failures': report.failures}, indent=2)
    else:
        comments = [f'# {key}: {value}' for key, value in about.items()]
        comments += [f'# failed: {line}' for line in report.failures]
        header = list(_values(Timing('', '', 1, 1, (1.0,), None, 1.0)))
        cells = [['' if value is None else str(value) for value in row.values()] for row in rows]
        text = '\n'.join([*comments, as_csv(header, cells)])
    with written_whole(path) as unfinished:
        unfinished.write_text(text + '\n')


def _values(timing: Timing) -> dict[str, str | int | float | None]:
    low, median, high = timing.quartiles
    images = timing.batch_size
    return {
        'model': timing.model,
        'mode': timing.mode,
        'batch_size': images,
        'img_size': timing.img_size,
        'images_per_second': images / median,
        'images_per_second_q1': images / high,
        'images_per_second_q3': images / low,
        'milliseconds': 1e3 * median,
        'milliseconds_q1': 1e3 * low,
        'milliseconds_q3': 1e3 * high,
        'runs': len(timing.seconds),
        'peak_memory': timing.peak_memory,
        'speed_ratio': timing.ratio,
    }
