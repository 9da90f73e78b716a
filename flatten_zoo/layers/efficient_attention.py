"""Efficient attention: attention with linear complexities (WACV 2021, arXiv 1812.01243)."""

import torch

from .projected_attention import ProjectedAttention

__all__ = ['EfficientAttention']


class EfficientAttention(ProjectedAttention):
    """Efficient attention, E(Q, K, V) = ρq(Q) (ρk(K)ᵀ V): section 3.2 of the paper.

    Multiplying K by V first gives a d_k × d_v context in place of the n × n matrix of `NonLocalAttention`, so that time
    and memory are linear in the number n of positions. With 'softmax', ρq is a softmax over the d_k/heads channels of
    each position and ρk one over the n positions of each channel. With 'scaling', ρq(Y) = ρk(Y) = Y / √n, and the
    result equals that of `NonLocalAttention` with 'scaling'.

    Arguments, tensor names and errors are those of `ProjectedAttention`.
    """

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.normalization == 'scaling':
            # ρq's 1/√n acts on V: the same product, and the context is a mean, which cannot overflow half precision
            scale = k.shape[2] ** -0.5
            k, v = k * scale, v * scale
        else:
            q, k = q.softmax(dim=1), k.softmax(dim=2)
        context = torch.bmm(k, v.transpose(1, 2))
        return torch.bmm(context.transpose(1, 2), q)

    def attention_maps(self, x: torch.Tensor) -> torch.Tensor:
        """The global attention maps ρk(K), the templates of the paper's Figure 3.

        Args:
            x: B×C×(spatial…).

        Returns:
            B × heads × d_k/heads × (spatial…); with 'softmax' each map is non-negative and sums to 1.
        """
        _, k, _ = self.project(x)
        k = k.softmax(dim=2) if self.normalization == 'softmax' else k * k.shape[2] ** -0.5
        return k.unflatten(2, x.shape[2:]).unflatten(0, [-1, self.num_heads])
