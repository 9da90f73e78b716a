"""The operators as their papers print them: what the zoo must be faster than.

Each function stands in for one method. It is the equation term by term, with no thought of how it runs.
"""

import torch
import torch.nn.functional as F

from flatten_zoo.layers import EfficientAttention, FocusedLinearCore, NonLocalAttention
from flatten_zoo.layers.interlaced_attention import GroupedSelfAttention

__all__ = ['TRANSCRIPTIONS']


def focused_linear_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FLatten Transformer, equations 5 and 6 and section 4.3.

    Shape:
        - q, k, v and output: (B, H, W, num_heads · head_dim)
    """
    B, H, W, C = q.shape
    N = H * W
    k = k + self._positional_encoding(H, W)

    def focused(x: torch.Tensor) -> torch.Tensor:
        x = (F.relu(x) + 1e-6) / F.softplus(self.scale)
        power = x**self.focusing_factor
        return power / power.norm(dim=-1, keepdim=True) * x.norm(dim=-1, keepdim=True)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(B, N, self.num_heads, self.head_dim).transpose(1, 2)

    q, k, values = heads(focused(q)), heads(focused(k)), heads(v)
    normalizer = 1 / (q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) + 1e-6)
    context = (k.transpose(-2, -1) * N**-0.5) @ (values * N**-0.5)
    out = q @ context * normalizer

    maps = values.transpose(-2, -1).reshape(B * self.num_heads, self.head_dim, H, W)
    depthwise = self.dwc(maps).reshape(B, C, H, W).permute(0, 2, 3, 1)
    return out.transpose(1, 2).reshape(B, H, W, C) + depthwise


def efficient_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Efficient Attention, section 3.2, with softmax.

    Shape:
        - q, k, v and output: (B · heads, channels, n)
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return (q.softmax(dim=-1) @ (k.softmax(dim=-2).transpose(1, 2) @ v)).transpose(1, 2)


def dot_product_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Efficient Attention, section 3.1, with softmax.

    Shape:
        - q, k, v and output: (B · heads, channels, n)
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return ((q @ k.transpose(1, 2)).softmax(dim=-1) @ v).transpose(1, 2)


def grouped_self_attention(self, x: torch.Tensor) -> torch.Tensor:
    """Interlaced Sparse Self-Attention, section 3.2: permute, attend in groups, permute back.

    Shape:
        - x: (B, C, H, W)
        - output: (B, C', H, W)
    """
    B, C, H, W = x.shape
    Ph, Pw = self.group_size
    to_groups, back = (
        ((0, 3, 5, 1, 2, 4), (0, 3, 4, 1, 5, 2)) if self.long_range else ((0, 2, 4, 1, 3, 5), (0, 3, 1, 4, 2, 5))
    )
    groups = x.reshape(B, C, H // Ph, Ph, W // Pw, Pw).permute(to_groups)
    rows, columns, h, w = groups.shape[1], groups.shape[2], *groups.shape[4:]
    groups = groups.reshape(-1, C, h, w)

    q, k, v = (f(groups).flatten(2).transpose(1, 2) for f in (self.f_query, self.f_key, self.f_value))
    y = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(dim=-1) @ v
    y = self.W(y.transpose(1, 2).reshape(len(groups), -1, h, w))
    return y.reshape(B, rows, columns, -1, h, w).permute(back).reshape(B, -1, H, W)


TRANSCRIPTIONS = {
    (FocusedLinearCore, 'attend'): focused_linear_attention,
    (EfficientAttention, 'attend'): efficient_attention,
    (NonLocalAttention, 'attend'): dot_product_attention,
    (GroupedSelfAttention, 'forward'): grouped_self_attention,
}
