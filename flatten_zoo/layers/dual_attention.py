"""Position and channel attention: DANet (CVPR 2019, arXiv 1809.02983)."""

import torch
from torch import nn

from .folding import make_norms_foldable
from .non_local_attention import NonLocalAttention

__all__ = ['DualAttention']


class DualAttention(nn.Module):
    """Position attention and channel attention side by side: section 3 of the paper.

    With A the n positions of the map, each a vector of C channels, and A_c a channel, a vector of n positions:

        position (equations 1 and 2)   E_j = α Σ_i softmax_i(B_i · C_j) D_i + A_j,   B, C, D = 1×1 convolutions of A
        channel (equations 3 and 4)    E_c = β Σ_i softmax_i(A_i · A_c) A_i + A_c

    with α = β = 0 at the start. Each goes through a 3×3 convolution, batch norm and ReLU, and both are added (section
    3.4). The official code has the negative affinities of the channels in the place of those of equation 3.

    Maps B×C×H×W to the same shape. Time is quadratic in the number of positions.

    Args:
        dim: Channels of the input and the output.
        key_dim: Channels of the position attention's queries and keys, an eighth of `dim` if None.

    Raises:
        ValueError: An argument is out of its range, or a forward input does not have four dimensions.
    """

    def __init__(self, dim: int, key_dim: int | None = None, device=None, dtype=None):
        super().__init__()
        key_dim = max(dim // 8, 1) if key_dim is None else key_dim
        dd = {'device': device, 'dtype': dtype}
        self.position = NonLocalAttention(dim, key_dim, dim, reproject=False, residual=False, **dd)
        self.alpha = nn.Parameter(torch.zeros(1, **dd))
        self.beta = nn.Parameter(torch.zeros(1, **dd))
        self.position_conv = _conv_norm_act(dim, **dd)
        self.channel_conv = _conv_norm_act(dim, **dd)
        make_norms_foldable(self.position_conv)
        make_norms_foldable(self.channel_conv)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps B×C×H×W to the same shape."""
        # sums are laid out in memory as their first operand: the convolutions get the input's layout
        position = x + self.alpha * self.position(x)
        channel = x + self.beta * self.attend_channels(x.flatten(2)).unflatten(2, x.shape[2:])
        return self.position_conv(position) + self.channel_conv(channel)

    def attend_channels(self, a: torch.Tensor) -> torch.Tensor:
        """Σ_i softmax_i(A_i · A_c) A_i of B × C × n."""
        n = a.shape[2]
        mean = a * n**-0.5
        mean = torch.bmm(mean, mean.transpose(1, 2))
        # sums over all positions leave the range of half precision: their differences from the largest only downwards
        weights = ((mean - mean.detach().amax(dim=2, keepdim=True)) * n).softmax(dim=2)
        return torch.bmm(weights, a)


def _conv_norm_act(dim: int, device=None, dtype=None) -> nn.Sequential:
    dd = {'device': device, 'dtype': dtype}
    return nn.Sequential(
        nn.Conv2d(dim, dim, 3, padding=1, bias=False, **dd), nn.BatchNorm2d(dim, **dd), nn.ReLU(inplace=True)
    )
