"""Recurrent criss-cross attention: CCNet (ICCV 2019, arXiv 1811.11721)."""

import torch
from torch import nn

from .projected_attention import check_dimensions

__all__ = ['RecurrentCrissCrossAttention']

torch.fx.wrap('check_dimensions')


class RecurrentCrissCrossAttention(nn.Module):
    """Criss-cross attention, over and over with the same weights: section 3 of the paper, equations 1 and 2.

    A position u sees the positions of its row and of its column, itself once: H + W - 1 in all. One round is

        d_{i,u} = Q_u · K_{i,u},   A_u = softmax over i of d_{i,u},   H'_u = γ Σ_i A_{i,u} V_{i,u} + H_u

    with γ = 0 at the start, as in the official code. After two rounds every position has received from every other.
    The affinities of a round are n × (H + W) numbers for n = H·W positions, never n × n.

    Maps B×C×H×W to the same shape.

    Args:
        dim: Channels of the input and the output.
        key_dim: Channels of queries and keys, an eighth of `dim` if None.
        rounds: Number R of rounds.

    Raises:
        ValueError: An argument is out of its range, or a forward input does not have four dimensions.
    """

    def __init__(self, dim: int, key_dim: int | None = None, rounds: int = 2, device=None, dtype=None):
        super().__init__()
        key_dim = max(dim // 8, 1) if key_dim is None else key_dim
        for name, value in {'dim': dim, 'key_dim': key_dim, 'rounds': rounds}.items():
            if value < 1:
                raise ValueError(f'{name} must be positive, got {value}')
        self.rounds = rounds
        dd = {'device': device, 'dtype': dtype}
        self.queries = nn.Conv2d(dim, key_dim, 1, **dd)
        self.keys = nn.Conv2d(dim, key_dim, 1, **dd)
        self.values = nn.Conv2d(dim, dim, 1, **dd)
        self.gamma = nn.Parameter(torch.zeros(1, **dd))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps B×C×H×W to the same shape."""
        check_dimensions(x, 2)
        for _ in range(self.rounds):
            x = x + self.gamma * self.attend(self.queries(x), self.keys(x), self.values(x))
        return x

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Σ_i A_{i,u} V_{i,u}, as B×C×H×W like all three."""
        # a matrix for each row, (B · H) × W × channels, and one for each column, (B · W) × H × channels
        q_rows, k_rows, v_rows = [_matrices(y.permute(0, 2, 3, 1)) for y in (q, k, v)]
        q_cols, k_cols, v_cols = [_matrices(y.permute(0, 3, 2, 1)) for y in (q, k, v)]
        b, h, w = q.shape[0], q.shape[2], q.shape[3]
        own = torch.eye(h, dtype=torch.bool, device=q.device)  # which its row has already
        along_row = torch.bmm(q_rows, k_rows.transpose(1, 2)).unflatten(0, [b, h])
        along_col = torch.bmm(q_cols, k_cols.transpose(1, 2)).masked_fill(own, float('-inf')).unflatten(0, [b, w])
        weights = torch.cat([along_row, along_col.transpose(1, 2)], dim=3).softmax(dim=3)
        row, col = weights.split([w, h], dim=3)
        from_row = torch.bmm(_matrices(row), v_rows).unflatten(0, [b, h])
        from_col = torch.bmm(_matrices(col.transpose(1, 2)), v_cols).unflatten(0, [b, w])
        return (from_row + from_col.transpose(1, 2)).permute(0, 3, 1, 2)


def _matrices(x: torch.Tensor) -> torch.Tensor:
    """One matrix after the other, from the last two of four dimensions."""
    # not flatten() alone, whose look at the strides would tie an exported graph to the sizes it saw
    return x.clone(memory_format=torch.contiguous_format).flatten(0, 1)
