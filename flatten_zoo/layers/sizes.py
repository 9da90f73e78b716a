"""What depends on sizes, without tying a graph for several sizes to those that it was first made with."""
import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ['resample_positions', 'surely_equal']


def surely_equal(a: int, b: int) -> bool:
    """Whether two sizes are equal; False where a compiled or exported graph leaves that open.

    A plain `a == b` would hold the graph to the answer, and the next size would need another one.
    """
    if not torch.jit.is_scripting():
        return statically_known_true(a == b)
    return a == b


def resample_positions(positions: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Bring a position tensor (1, H, W, C) to another grid: `timm.layers.resample_abs_pos_embed_nhwc` for any size."""
    if surely_equal(height, positions.shape[1]) and surely_equal(width, positions.shape[2]):
        return positions
    maps = positions.permute(0, 3, 1, 2).float()
    maps = F.interpolate(maps, size=[height, width], mode='bicubic', antialias=True)
    return maps.permute(0, 2, 3, 1).to(positions.dtype)
