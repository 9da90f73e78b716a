"""Focused linear attention as its paper prints it: what the operator must be faster than."""
import torch
import torch.nn.functional as F

__all__ = ['attend']


def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stands in for `FocusedLinearCore.attend`: equations 5 and 6 and section 4.3 word by word, one term after another.

    Shape:
        - q, k, v and output: (B, H, W, num_heads · head_dim)
    """
    B, H, W, C = q.shape
    N = H * W
    k = k + self._positional_encoding(H, W)

    def focused(x: torch.Tensor) -> torch.Tensor:
        x = (F.relu(x) + 1e-6) / F.softplus(self.scale)
        power = x ** self.focusing_factor
        return power / power.norm(dim=-1, keepdim=True) * x.norm(dim=-1, keepdim=True)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(B, N, self.num_heads, self.head_dim).transpose(1, 2)

    q, k, values = heads(focused(q)), heads(focused(k)), heads(v)
    normalizer = 1 / (q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) + 1e-6)
    context = (k.transpose(-2, -1) * N ** -0.5) @ (values * N ** -0.5)
    out = q @ context * normalizer

    maps = values.transpose(-2, -1).reshape(B * self.num_heads, self.head_dim, H, W)
    depthwise = self.dwc(maps).reshape(B, C, H, W).permute(0, 2, 3, 1)
    return out.transpose(1, 2).reshape(B, H, W, C) + depthwise
