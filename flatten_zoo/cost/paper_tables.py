"""The papers' cost tables, computed from the operators."""

import math
from collections.abc import Callable

from ..layers import EfficientAttention, NonLocalAttention
from ..tables import Table
from .operators import Cost, closed_form

__all__ = ['PAPER_TABLES', 'three_digits']


def three_digits(value: float, unit: str = '') -> str:
    """A count as the papers print it: three significant digits and a decimal prefix, '1.21 G'."""
    value = float(f'{value:.2e}')
    power = int(math.log10(value)) // 3
    digits = value / 1000**power
    return f'{digits:.{2 - int(math.log10(digits))}f} {["", "K", "M", "G", "T", "P"][power]}{unit}'


def _operator_costs(spatial: tuple[int, ...], *args, **kwargs) -> tuple[Cost, ...]:
    """Closed forms of efficient and of non-local attention with the same arguments on the same map."""
    kwargs = {'spatial_dims': len(spatial), 'device': 'meta', **kwargs}
    return tuple(closed_form(cls(*args, **kwargs), spatial) for cls in (EfficientAttention, NonLocalAttention))


def _ea_table2() -> Table:
    """Table 2 of the efficient attention paper: cost of one module in a Mask R-CNN at 896 × 1280."""
    places = {
        'res3': (1024, 16),
        'res4': (2048, 32),
        'fpn1': (256, 4),
        'fpn2': (256, 8),
        'fpn3': (256, 16),
        'fpn4': (256, 32),
        'fpn5': (256, 64),
    }
    sums = {'res3-4+fpn3-5': ['res3', 'res4', 'fpn3', 'fpn4', 'fpn5'], 'res3-4+fpn1-5': list(places)}

    def cells(costs: list[tuple[Cost, ...]]) -> list[str]:
        efficient, non_local = zip(*costs, strict=True)
        return [
            three_digits(sum(getattr(c, what) for c in column))
            for column in (efficient, non_local)
            for what in ('memory', 'macs')
        ]

    costs, rows = {}, []
    for place, (channels, stride) in places.items():
        size = (896 // stride, 1280 // stride)
        costs[place] = _operator_costs(size, channels)
        rows.append([place, str(channels), f'{size[0]} × {size[1]}', *cells([costs[place]])])
    rows += [[name, '', '', *cells([costs[place] for place in parts])] for name, parts in sums.items()]
    return ['where', 'channels', 'input', 'EA memory', 'EA MACC', 'non-local memory', 'non-local MACC'], rows


def _ea_section3_5() -> Table:
    """Savings of section 3.5: d = d_v = 64, d_k = 32, no reprojection."""
    rows = []
    for size in ((64, 64), (256, 256), (28, 28, 4), (64, 64, 32)):
        efficient, non_local = _operator_costs(size, 64, key_dim=32, value_dim=64, reproject=False)
        rows.append(
            [
                ' × '.join(map(str, size)),
                f'{non_local.memory / efficient.memory:.0f}×',
                f'{non_local.macs / efficient.macs:.0f}×',
                three_digits(efficient.memory, 'B'),
                three_digits(efficient.macs),
                three_digits(non_local.memory, 'B'),
                three_digits(non_local.macs),
            ]
        )
    return [
        'input',
        'memory saving',
        'computation saving',
        'EA memory',
        'EA MACC',
        'non-local memory',
        'non-local MACC',
    ], rows


def _stereo() -> Table:
    """A module after the last hourglass of PSMNet: d = 32, d_k = d_v = 16 on a 48 × 135 × 240 cost volume."""
    size = (48, 135, 240)
    efficient, non_local = _operator_costs(size, 32, key_dim=16, value_dim=16)
    return ['input', 'EA memory', 'non-local memory'], [
        [' × '.join(map(str, size)), three_digits(efficient.memory, 'B'), three_digits(non_local.memory, 'B')]
    ]


def _ea_mask_rcnn() -> Table:
    """What attention adds to a Mask R-CNN with a ResNet-50 at 896 × 1280, and what the paper says that it adds."""
    from ..dense import mask_rcnn, rcnn_cost  # torchvision's detection networks, which no other table needs

    arrangements = {  # backbone, attention and levels; increase of parameters and computation in the paper
        'none': ('resnet50', None, (), ('', '')),
        'res3-4': ('ea_resnet50', None, (), ('', '')),
        'res3-4+fpn3-5': ('ea_resnet50', 'ea', ('fpn3', 'fpn4', 'fpn5'), ('', '')),
        'res3-4+fpn1-5': ('ea_resnet50', 'ea', ('fpn1', 'fpn2', 'fpn3', 'fpn4', 'fpn5'), ('+2.9 %', '+5.3 %')),
    }
    costs = {
        name: rcnn_cost(mask_rcnn(backbone, 81, attention, levels), (896, 1280))
        for name, (backbone, attention, levels, _) in arrangements.items()
    }
    rows = []
    for name, (*_, paper) in arrangements.items():
        row = [name]
        for what, reported in zip(('parameters', 'macs'), paper, strict=True):
            value, plain = getattr(costs[name], what), getattr(costs['none'], what)
            row += [three_digits(value), f'+{100 * (value / plain - 1):.1f} %', reported]
        rows.append(row)
    return ['attention', 'parameters', 'increase', 'paper', 'MACC', 'increase', 'paper'], rows


PAPER_TABLES: dict[str, Callable[[], Table]] = {
    'ea-table2': _ea_table2,
    'ea-section3.5': _ea_section3_5,
    'ea-mask-rcnn': _ea_mask_rcnn,
    'stereo': _stereo,
}
