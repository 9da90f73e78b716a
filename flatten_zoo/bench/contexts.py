"""The heads of `isa_net` side by side: the efficiency comparison of the ISSA paper."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from ..cost.comparison import Comparison
from ..cost.counting import available_memory, count, peak_memory
from ..dense.isa_net import CONTEXTS, context_head
from ..errors import UsageError
from ..figures import check_picture_path
from .alternating import in_turn, timed

__all__ = ['compare_contexts']

CHANNELS = 2048  # of the map, as in the paper: the last one of a ResNet
SIZES = (16, 32, 64)  # default sides; the paper has 128
CONVOLUTION = '3×3 conv'  # what all heads but those of 'ppm' and 'aspp' begin with


@torch.no_grad()
def compare_contexts(sizes: Sequence[int] | None = None, picture: Path | None = None) -> list[Comparison]:
    """Counts, measures and times every head of `isa_net`, and the convolution that most of them begin with.

    The heads map 2048 channels to 512, 256 of 'aspp', in inference, on the GPU if there is one; those of one size take
    turns, and the time is the median of at least five runs.

    Args:
        sizes: Sides of the square maps; `SIZES` if None.
        picture: Where the comparison is to be drawn, checked before anything is measured.

    Raises:
        UsageError: A size is not positive or there is no memory for it, or the picture cannot be written.
    """
    sizes = list(dict.fromkeys(sizes or SIZES))
    if min(sizes) < 1:
        raise UsageError(f'--img-size must be positive, got {min(sizes)}')
    if picture:
        check_picture_path(picture)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    counted = {(name, size): count(head, (1, CHANNELS, size, size)) for size in sizes for name, head in _heads('meta')}
    available = available_memory(device)
    for (name, size), cost in counted.items():
        if cost.peak_memory > available:
            raise UsageError(
                f"'{name}' at size {size} needs {cost.peak_memory / 1e9:.1f} GB of memory by its equations, and "
                f'{available / 1e9:.1f} GB are free ({device.type}): choose smaller sizes with --img-size'
            )
    heads = dict(_heads(device))
    rows = []
    for size in tqdm(sizes, leave=False, disable=None):
        x = torch.randn(1, CHANNELS, size, size, device=device)
        peaks = {name: peak_memory(head, x) for name, head in heads.items()}  # warms them up, too
        times: dict[str, list[float]] = {name: [] for name in heads}
        for name, run in in_turn({name: _run(head, x) for name, head in heads.items()}, 0.0):
            times[name].append(timed(run))
        for name, seconds in times.items():
            measured = replace(counted[name, size], peak_memory=peaks[name])
            rows.append(Comparison(name, size, measured, None, statistics.median(seconds)))
    return rows


def _heads(device: str | torch.device) -> list[tuple[str, nn.Module]]:
    """Names and heads in inference mode."""
    with torch.device(device):
        heads = {name: context_head(name, CHANNELS).eval() for name in CONTEXTS}
    return [*heads.items(), (CONVOLUTION, heads['issa'][:2])]


def _run(head: nn.Module, x: torch.Tensor):
    def run() -> None:
        head(x)
        if x.is_cuda:
            torch.cuda.synchronize()

    return run
