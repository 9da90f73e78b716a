"""Padding at the end of maps, which costs a copy only where it adds something.

They look at sizes: `torch.jit.trace` scripts them, and who imports them wraps them for symbolic tracing. An exported
graph is for all sizes and always pads, if only by nothing.
"""
import torch
import torch.nn.functional as F
from timm.layers import is_exporting

__all__ = ['pad_for_convolution', 'pad_to_windows']


@torch.jit.script_if_tracing
def pad_for_convolution(x: torch.Tensor, stride: list[int], reach: list[int]) -> torch.Tensor:
    """Pad a (B, C, H, W) map so that a convolution gives ⌈H / stride⌉ × ⌈W / stride⌉ positions.

    Args:
        x: The map.
        stride: Of the convolution, vertical and horizontal.
        reach: Rows and columns that it sees from a position, less its own padding on both sides.
    """
    rows = (x.shape[2] - reach[0]) // stride[0] + 1
    columns = (x.shape[3] - reach[1]) // stride[1] + 1
    short = rows < (x.shape[2] + stride[0] - 1) // stride[0] or columns < (x.shape[3] + stride[1] - 1) // stride[1]
    # enough for any size, as the convolution leaves out what is short of a stride; an amount computed from H and W
    # would make their expressions in an exported graph grow from stage to stage
    return F.pad(x, [0, reach[1] - 1, 0, reach[0] - 1]) if is_exporting() or short else x


@torch.jit.script_if_tracing
def pad_to_windows(x: torch.Tensor, window_size: list[int]) -> torch.Tensor:
    """Pad a (B, H, W, C) map to multiples of a window's height and width."""
    rows = (x.shape[1] + window_size[0] - 1) // window_size[0] * window_size[0] - x.shape[1]
    columns = (x.shape[2] + window_size[1] - 1) // window_size[1] * window_size[1] - x.shape[2]
    return F.pad(x, [0, 0, 0, columns, 0, rows]) if is_exporting() or rows + columns > 0 else x
