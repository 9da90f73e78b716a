"""Which rows of a dense attention matrix an inspection asks for."""
from collections.abc import Sequence

import torch

__all__ = ['select_queries']

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
                f'name the rows wanted with queries=')
        return torch.arange(positions, device=device)
    queries = torch.as_tensor(queries, dtype=torch.long, device=device).reshape(-1)
    outside = queries[(queries < 0) | (queries >= positions)]
    if outside.numel():
        raise ValueError(f'queries must lie in [0, {positions}), got {outside.tolist()}')
    return queries
