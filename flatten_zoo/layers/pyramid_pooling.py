"""Pyramid pooling: PSPNet (CVPR 2017, arXiv 1612.01105)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .folding import make_norms_foldable
from .projected_attention import check_dimensions

__all__ = ['PyramidPooling']

torch.fx.wrap('check_dimensions')


class PyramidPooling(nn.Module):
    """The map beside its averages over coarse grids: section 3.2 and figure 3 of the paper.

        Y = [X, up(conv_1(pool_1(X))), …, up(conv_N(pool_N(X)))]

    where pool_b averages over b × b regions, conv_b is a 1×1 convolution to C/N channels with batch norm and ReLU, up
    is bilinear, and [ ] puts channels beside each other.

    Maps B×C×H×W to B × out_dim × H × W, out_dim = C + N·(C // N). The batch norm of a single bin needs two images or
    more in training.

    Args:
        dim: Channels of the input.
        bins: Regions b along each side, for each of the N levels.

    Raises:
        ValueError: An argument is out of its range, or a forward input does not have four dimensions.
    """

    def __init__(self, dim: int, bins: Sequence[int] = (1, 2, 3, 6), device=None, dtype=None):
        super().__init__()
        if not bins or min(bins) < 1:
            raise ValueError(f'bins must be one or more positive integers, got {tuple(bins)}')
        if dim < len(bins):
            raise ValueError(f'dim must be at least the number of bins, {len(bins)}, got {dim}')
        level_dim = dim // len(bins)
        self.out_dim = dim + len(bins) * level_dim
        dd = {'device': device, 'dtype': dtype}
        self.levels = nn.ModuleList(
            nn.Sequential(
                nn.AdaptiveAvgPool2d(size),
                nn.Conv2d(dim, level_dim, 1, bias=False, **dd),
                nn.BatchNorm2d(level_dim, **dd),
                nn.ReLU(inplace=True),
            )
            for size in bins
        )
        make_norms_foldable(*self.levels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps B×C×H×W to B × out_dim × H × W."""
        check_dimensions(x, 2)
        maps = [x]
        for level in self.levels:
            maps.append(F.interpolate(level(x), size=x.shape[2:], mode='bilinear', align_corners=True))
        return torch.cat(maps, dim=1)
