"""Figures of what `reading` takes out of a model; nothing here needs a display."""

import math
from collections.abc import Sequence
from functools import singledispatch
from textwrap import fill
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.markers import CARETDOWN, CARETRIGHT

from .reading import EnergyMaps, GlobalMaps, QueryMaps

__all__ = ['draw']

MAX_MAPS = 12  # of efficient attention
WIDTH = 9  # inches
TICKS = [0, 0.5, *(digit * 10**power for power in range(5) for digit in (1, 3))]  # of a logarithmic scale


@singledispatch
def draw(maps: QueryMaps | GlobalMaps | EnergyMaps, picture: torch.Tensor, model: str) -> Figure:
    """Draw what was read from a model, over the picture that the model has seen.

    Weights are in units of uniform attention, 1 / n for n positions, and energies in units of the stage's mean, so that
    all maps of a figure share one colour scale. The relief of the picture shows through.

    Args:
        maps: What `read_attention` or `read_energy` returned.
        picture: Height × width × 3, from 0 to 1.
        model: What to call the model in the title.
    """
    raise TypeError(f'cannot draw a {type(maps).__name__}')


@draw.register
def _draw_query_maps(maps: QueryMaps, picture: torch.Tensor, model: str) -> Figure:
    forms = list(maps.forms.values())
    grid = forms[0].rows.shape[1:]
    overlay = _Overlay([form.rows for form in forms], unit=grid.numel(), picture=picture)
    columns, rows = [f'row {row}, col {col}' for row, col in maps.cells], [fill(form.label, 18) for form in forms]
    panels = np.arange(len(rows) * len(columns)).reshape(len(rows), len(columns))  # form · queries + query
    if len(forms) == 1:
        shape, rows = _near_square(len(columns)), []
    elif len(columns) > len(rows):
        shape = panels.shape
    else:  # of few queries each has a row, not a column
        columns, rows, panels, shape = rows, columns, panels.T, panels.T.shape
    spectra = forms[0].matrix is not None
    below = [2.2] if spectra else [0.4] if maps.note else []
    figure, parts = _figure(
        f'{maps.operator.capitalize()}: what the marked position attends to',
        model,
        maps,
        grid,
        picture,
        heights=[_height(shape, picture, width=7 if rows else 8), *below],
    )
    axes = _panels(parts[0], shape, panels.size)
    for ax, panel in zip(axes, panels.flat, strict=True):
        form, query = divmod(panel, len(maps.cells))
        overlay.show(ax, forms[form].rows[query], mode='nearest')
        _mark(ax, maps.cells[query], grid, picture)
    for ax, label in zip(axes, columns, strict=False):
        ax.set_title(label, fontsize=7)
    for ax, label in zip(axes[:: len(columns)], rows, strict=False):
        ax.set_ylabel(label, fontsize=8, rotation=0, ha='right', va='center')
    overlay.add_bar(parts[0], axes, 'attention weight\n(1 = uniform)')
    if spectra:
        _draw_spectra(parts[1], forms, overlay)
    elif maps.note:
        parts[1].text(0.5, 0.5, maps.note, ha='center', va='center', fontsize=8)
    return figure


@draw.register
def _draw_global_maps(maps: GlobalMaps, picture: torch.Tensor, model: str) -> Figure:
    shown = maps.maps[:MAX_MAPS]
    grid = shown.shape[1:]
    overlay = _Overlay([shown], unit=grid.numel(), picture=picture)
    shape = _near_square(len(shown))
    figure, parts = _figure(
        f'{maps.operator.capitalize()}: the {len(shown)} global attention maps ρk(K), of {len(maps.maps)}, that carry '
        f'most of the output',
        model,
        maps,
        grid,
        picture,
        heights=[_height(shape, picture)],
    )
    axes = _panels(parts[0], shape, len(shown))
    for i, (ax, weights) in enumerate(zip(axes, shown, strict=True)):
        overlay.show(ax, weights, mode='bilinear')
        ax.set_title(f'{i + 1}. key channel {maps.channels[i]}: {100 * maps.shares[i]:.1f} %', fontsize=8)
    overlay.add_bar(parts[0], axes, 'attention weight\n(1 = uniform)')
    return figure


@draw.register
def _draw_energy(maps: EnergyMaps, picture: torch.Tensor, model: str) -> Figure:
    means = [energy.mean() for energy in maps.maps.values()]
    relative = [energy / mean.clamp_min(1e-30) for energy, mean in zip(maps.maps.values(), means, strict=True)]
    constant = [bool((energy - 1).abs().max() < 1e-3) for energy in relative]  # as behind a norm over the channels
    relative = [energy.round() if flat else energy for energy, flat in zip(relative, constant, strict=True)]
    overlay = _Overlay(relative, unit=1, picture=picture)
    shape = _near_square(1 + len(relative))
    figure, parts = _figure(
        'Energy of the feature pyramid: root mean square over the channels',
        model,
        None,
        None,
        picture,
        heights=[_height(shape, picture)],
    )
    axes = _panels(parts[0], shape, 1 + len(relative))
    axes[0].imshow(picture.numpy())
    axes[0].set_title('what the model sees', fontsize=8)
    for ax, name, energy, mean, flat in zip(axes[1:], maps.maps, relative, means, constant, strict=True):
        overlay.show(ax, energy, mode='nearest')
        ax.set_title(
            f'{name}: {maps.channels[name]} channels,\n{_size(energy.shape)} positions, '
            f'{"everywhere" if flat else "mean"} {mean:.3g}',
            fontsize=8,
        )
    overlay.add_bar(parts[0], axes, 'energy\n(1 = mean of the stage)')
    return figure


class _Overlay:
    """Maps in colour over the picture's relief, all on one colour scale: from pale to red, or through white from blue.

    The relief is what the picture has beside its large bright and dark areas, which would be mistaken for weights.
    """

    norm: Normalize

    def __init__(self, maps: Sequence[torch.Tensor], unit: float, picture: torch.Tensor):
        """
        Args:
            maps: All the maps that are drawn.
            unit: Factor that brings them into the units of the overlay.
            picture: Height × width × 3, from 0 to 1.
        """
        self.unit = unit
        low = min(m.min().item() for m in maps) * unit
        high = max(m.max().item() for m in maps) * unit
        if low < 0:
            limit = max(-low, high)
            self.norm, self.cmap = SymLogNorm(1, vmin=-limit, vmax=limit), colormaps['RdBu_r']
        elif high > 5:  # linear up to uniform attention, logarithmic above
            self.norm, self.cmap = SymLogNorm(1, vmin=0, vmax=high), colormaps['YlOrRd']
        else:
            self.norm, self.cmap = Normalize(low, high), colormaps['YlOrRd']
        grey = picture.mean(dim=2)[None, None]
        radius = min(grey.shape[2:]) // 24 + 1
        detail = grey - F.avg_pool2d(F.pad(grey, [radius] * 4, mode='replicate'), 2 * radius + 1, stride=1)
        detail = detail / detail.square().mean().sqrt().clamp_min(1e-6)
        self.relief = (0.95 + 0.09 * detail).clamp(0.6, 1)[0, 0]

    def show(self, ax: Axes, weights: torch.Tensor, mode: str) -> None:
        """Draw a map, resized to the picture by `mode`."""
        smooth = {'align_corners': False} if mode == 'bilinear' else {}
        weights = F.interpolate(
            (weights.double() * self.unit)[None, None], tuple(self.relief.shape), mode=mode, **smooth
        )[0, 0]
        ax.imshow(self.cmap(self.norm(weights.numpy()))[..., :3] * self.relief[..., None].numpy())

    def add_bar(self, figure: FigureBase, axes: Sequence[Axes], label: str) -> None:
        bar = figure.colorbar(ScalarMappable(self.norm, self.cmap), ax=axes, aspect=30, pad=0.01, fraction=0.05)
        if isinstance(self.norm, SymLogNorm):
            ticks = [tick for tick in (*TICKS, *(-t for t in TICKS)) if self.norm.vmin <= tick <= self.norm.vmax]
            bar.set_ticks(ticks, labels=[f'{tick:g}' for tick in ticks])
            bar.minorticks_off()
        bar.set_label(label, fontsize=8)
        bar.ax.tick_params(labelsize=8)


def _draw_spectra(figure: FigureBase, forms: Sequence[Any], overlay: _Overlay) -> None:
    """The matrices as pictures, and their singular values in one plot."""
    *squares, plot = figure.subplots(1, len(forms) + 1, width_ratios=[1] * len(forms) + [1.5])
    n = len(forms[0].matrix)
    for ax, form in zip(squares, forms, strict=True):
        ax.imshow(form.matrix.numpy() * overlay.unit, norm=overlay.norm, cmap=overlay.cmap)
        ax.set(xticks=[], yticks=[])
        ax.set_xlabel(f'{n} positions', fontsize=7)
        ax.set_ylabel(f'{n} queries', fontsize=7)
        relative = (form.singular_values / form.singular_values[0]).clamp_min(1e-20)
        (line,) = plot.plot(np.arange(1, n + 1), relative.numpy())
        ax.set_title(f'{fill(form.label, 24)}\nrank {form.rank} of {n}', fontsize=8, color=line.get_color())
    plot.set(yscale='log', ylim=(1e-6, 2))
    plot.set_title('singular values, in the colours of the titles', fontsize=8)
    plot.set_xlabel('index', fontsize=7)
    plot.set_ylabel('relative to the largest', fontsize=7)
    plot.tick_params(labelsize=7)
    plot.grid(alpha=0.3)


def _figure(
    title: str,
    model: str,
    maps: QueryMaps | GlobalMaps | None,
    grid: Sequence[int] | None,
    picture: torch.Tensor,
    heights: Sequence[float],
    width: float = WIDTH,
) -> tuple[Figure, list[FigureBase]]:
    """Figure with title and one part for each height in inches."""
    facts = [model]
    if maps and grid:
        head = f'head {maps.head} of {maps.num_heads}' if maps.num_heads > 1 else 'one head'
        facts += [maps.layer, head, f'{_size(grid)} positions']
    facts.append(f'image {_size(picture.shape)}')
    figure = Figure(figsize=(width, sum(heights) + 0.6), layout='constrained')
    figure.suptitle(f'{title}\n{fill(" · ".join(facts), 110)}', fontsize=10)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    return figure, list(parts[:, 0])


def _panels(figure: FigureBase, shape: tuple[int, int], number: int) -> list[Axes]:
    axes = figure.subplots(*shape, squeeze=False).flatten()
    for ax in axes:
        ax.set(xticks=[], yticks=[])
    for ax in axes[number:]:
        ax.remove()
    return list(axes[:number])


def _near_square(number: int) -> tuple[int, int]:
    columns = math.ceil(math.sqrt(number))
    return math.ceil(number / columns), columns


def _height(shape: tuple[int, int], picture: torch.Tensor, width: float = 8) -> float:
    """Inches for rows of panels that are `width` inches wide."""
    rows, columns = shape
    return rows * (width / columns * picture.shape[0] / picture.shape[1] + 0.2)


def _size(shape: Sequence[int]) -> str:
    return f'{shape[0]} × {shape[1]}'


def _mark(ax: Axes, cell: tuple[int, int], grid: Sequence[int], picture: torch.Tensor) -> None:
    """Triangles beside the picture that point at a position's row and column: on small maps a ring would hide it."""
    y, x = ((i + 0.5) * side / n - 0.5 for i, n, side in zip(cell, grid, picture.shape, strict=False))
    style: dict[str, Any] = {'color': 'black', 'markersize': 5, 'markeredgewidth': 0, 'clip_on': False}
    ax.plot(x, 1, marker=CARETDOWN, transform=ax.get_xaxis_transform(), **style)
    ax.plot(0, y, marker=CARETRIGHT, transform=ax.get_yaxis_transform(), **style)
