"""Padding at the end of maps, which costs a copy only where it adds something.

They look at sizes: `torch.jit.trace` scripts them, and who imports them wraps them for symbolic tracing. A graph for
several sizes always pads, if only by nothing.
"""

import torch
import torch.nn.functional as F

from ..layers.sizes import surely_equal

__all__ = ['crop_windows', 'pad_for_convolution', 'pad_to_windows']


@torch.jit.script_if_tracing
def pad_for_convolution(x: torch.Tensor, stride: list[int], reach: list[int]) -> torch.Tensor:
    """Pad a (B, C, H, W) map so that a convolution gives ⌈H / stride⌉ × ⌈W / stride⌉ positions.

    Args:
        x: The map.
        stride: Of the convolution, vertical and horizontal.
        reach: Rows and columns that it sees from a position, less its own padding on both sides.
    """
    H, W = x.shape[2], x.shape[3]
    rows, columns = (H - reach[0]) // stride[0] + 1, (W - reach[1]) // stride[1] + 1
    if surely_equal((H + stride[0] - 1) // stride[0], rows) and surely_equal((W + stride[1] - 1) // stride[1], columns):
        return x
    # enough for any size, as the convolution leaves out what is short of a stride; an amount computed from H and W
    # would make their expressions in an exported graph grow from stage to stage
    return F.pad(x, [0, reach[1] - 1, 0, reach[0] - 1])


@torch.jit.script_if_tracing
def pad_to_windows(x: torch.Tensor, window_size: list[int]) -> torch.Tensor:
    """Pad a (B, H, W, C) map to multiples of a window's height and width."""
    H, W = x.shape[1], x.shape[2]
    rows = (H + window_size[0] - 1) // window_size[0] * window_size[0] - H
    columns = (W + window_size[1] - 1) // window_size[1] * window_size[1] - W
    return x if surely_equal(rows + columns, 0) else F.pad(x, [0, 0, 0, columns, 0, rows])


@torch.jit.script_if_tracing
def crop_windows(x: torch.Tensor, unpadded: torch.Tensor) -> torch.Tensor:
    """What `pad_to_windows(unpadded, …)` has become, without what it added."""
    rows, columns = unpadded.shape[1] - x.shape[1], unpadded.shape[2] - x.shape[2]
    return x if surely_equal(rows + columns, 0) else F.pad(x, [0, 0, 0, columns, 0, rows])
