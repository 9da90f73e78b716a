"""Position tensors at the size of the map."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .sizes import surely_equal

__all__ = ['resample_positions']


@torch.library.impl('aten::_upsample_bicubic2d_aa_backward', 'Meta')
def _gradient_shape(grad, output_size, input_size, align_corners, scales_h=None, scales_w=None):
    """What PyTorch lacks to compile training at changing sizes: https://github.com/pytorch/pytorch/issues/197622."""
    return grad.new_empty(input_size)


_resampled = WeakTensorKeyDictionary()  # by position tensor: a copy of it, and what it became


def _resample(positions: torch.Tensor, grid_size: tuple[int, int], height: int, width: int) -> torch.Tensor:
    maps = positions.reshape(1, grid_size[0], grid_size[1], -1).permute(0, 3, 1, 2).float()
    maps = F.interpolate(maps, size=[height, width], mode='bicubic', antialias=True)
    return maps.permute(0, 2, 3, 1).to(positions.dtype)


@torch.jit.ignore
def _resample_once(positions: torch.Tensor, grid_size: tuple[int, int], height: int, width: int) -> torch.Tensor:
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_grad_enabled()
        or positions.device.type != 'cpu'
        or type(positions) is not nn.Parameter  # fake or batched tensors are none
    ):
        return _resample(positions, grid_size, height, width)
    source, resampled = _resampled.get(positions, (None, None))
    # a copy tells what no counter does: that the tensor was written through `.data`
    if (
        source is None
        or source.dtype != positions.dtype
        or resampled.shape[1:3] != (height, width)
        or not torch.equal(source, positions)
    ):
        resampled = _resample(positions, grid_size, height, width)
        _resampled[positions] = positions.clone(), resampled
    return resampled


@register_notrace_function  # reason: branches on sizes, and remembers
def resample_positions(positions: torch.Tensor, grid_size: tuple[int, int], height: int, width: int) -> torch.Tensor:
    """Bring a position tensor to another grid: `timm.layers.resample_abs_pos_embed_nhwc`, in one graph for all sizes.

    On the CPU, where no gradients are wanted, the result for a parameter's last size is kept: resampling is up to a
    tenth of the time of a network on one image.

    Args:
        positions: (1, H, W, C), or (1, H · W, C) in row order.
        grid_size: H and W.
        height, width: Of the other grid.

    Returns:
        (1, height, width, C).
    """
    if surely_equal(height, grid_size[0]) and surely_equal(width, grid_size[1]):
        return positions.reshape(1, grid_size[0], grid_size[1], -1)
    if torch.jit.is_scripting():
        return _resample(positions, grid_size, height, width)
    return _resample_once(positions, grid_size, height, width)
