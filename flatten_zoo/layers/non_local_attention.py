"""Non-local (dot-product) attention, the baseline that efficient attention is measured against."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .attention_rows import select_queries
from .projected_attention import ProjectedAttention

__all__ = ['NonLocalAttention']


class NonLocalAttention(ProjectedAttention):
    """Dot-product attention, D(Q, K, V) = ρ(Q Kᵀ) V: section 3.1 of "Efficient Attention" (arXiv 1812.01243).

    ρ is the softmax of each row ('softmax'; without a 1/√d, as in the paper) or a division by n ('scaling'). Time is
    quadratic in the number n of positions, and so is the memory of 'scaling'; 'softmax' runs in
    `scaled_dot_product_attention`, whose fused kernels never hold the whole n × n matrix.

    Arguments, tensor names and errors are those of `ProjectedAttention`.
    """

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.normalization == 'scaling':
            y = torch.bmm(self._scaled_affinity(q, k), v)
        else:
            # fused kernels need contiguous rows and a dimension for heads; on channels-last maps nothing is copied
            q, k, v = q.contiguous()[:, None], k.contiguous()[:, None], v.contiguous()[:, None]
            y = F.scaled_dot_product_attention(q, k, v, scale=1.0)[:, 0]
        return y.transpose(1, 2)

    def attention_matrix(self, x: torch.Tensor, queries: Sequence[int] | torch.Tensor | None = None) -> torch.Tensor:
        """Rows of the attention matrix ρ(Q Kᵀ).

        Args:
            x: B×C×(spatial…).
            queries: Flat indices of the positions whose rows are wanted; all n of them if None (small maps only).

        Returns:
            B × heads × queries × n.

        Raises:
            ValueError: An index is out of range, or all rows of a large map are asked for.
        """
        q, k, _ = self.project(x)
        q, k = q.transpose(1, 2)[:, select_queries(queries, k.shape[2], x.device)], k.transpose(1, 2)
        if self.normalization == 'scaling':
            rows = self._scaled_affinity(q, k)
        else:
            rows = torch.bmm(q, k.transpose(1, 2)).softmax(dim=2)
        return rows.unflatten(0, [-1, self.num_heads])

    @staticmethod
    def _scaled_affinity(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Q Kᵀ / n, with half of the division on each side to stay in the range of half precision."""
        scale = k.shape[1] ** -0.5
        return torch.bmm(q * scale, (k * scale).transpose(1, 2))
