"""Rows of dense attention matrices, for inspection."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

__all__ = ['convolution_rows', 'select_queries']

MAX_DENSE_POSITIONS = 16384  # 1 GiB per head and image in float32


def select_queries(queries: Sequence[int] | torch.Tensor | None, positions: int, device) -> torch.Tensor:
    """Indices of the rows to compute.

    Args:
        queries: Flat indices in [0, positions), or None for all of them.
        positions: Number n of positions of the map.
        device: Where the indices are needed.

    Returns:
        1-D tensor of indices.

    Raises:
        ValueError: An index is out of range, or all rows are asked for and n exceeds `MAX_DENSE_POSITIONS`.
    """
    if queries is None:
        if positions > MAX_DENSE_POSITIONS:
            raise ValueError(
                f'the full attention matrix of {positions} positions is too large (at most {MAX_DENSE_POSITIONS}): '
                f'name the rows wanted with queries='
            )
        return torch.arange(positions, device=device)
    queries = torch.as_tensor(queries, dtype=torch.long, device=device).reshape(-1)
    outside = queries[(queries < 0) | (queries >= positions)]
    if outside.numel():
        raise ValueError(f'queries must lie in [0, {positions}), got {outside.tolist()}')
    return queries


def convolution_rows(kernel: torch.Tensor, grid_size: tuple[int, int], queries: torch.Tensor) -> torch.Tensor:
    """Rows of the matrix of a convolution of one channel with zero padding: the kernel, centred at each query.

    Args:
        kernel: k × k, k odd.
        grid_size: H and W.
        queries: Flat indices (row · W + column).

    Returns:
        queries × n, n = H · W.
    """
    height, width = grid_size
    centres = F.one_hot(queries, height * width).to(kernel.dtype).reshape(-1, 1, height, width)
    return F.conv_transpose2d(centres, kernel[None, None], padding=kernel.shape[0] // 2).flatten(1)
