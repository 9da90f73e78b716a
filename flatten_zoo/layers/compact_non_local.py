"""Compact generalized non-local: CGNL (NeurIPS 2018, arXiv 1810.13125)."""

import math

import torch
from torch import nn

from .projected_attention import check_dimensions

__all__ = ['CompactGeneralizedNonLocal']

torch.fx.wrap('check_dimensions')

_GAMMA = 1e-4  # γ of the kernel in the official code


class CompactGeneralizedNonLocal(nn.Module):
    """Non-local attention among the positions of all channels, by the Taylor expansion of a Gaussian RBF kernel.

    Section 3 of the paper. θ, φ and g of a group of channels are vectors of m = n·d/groups numbers, one for each
    position and channel, and every number attends to every other one:

        y_i = Σ_j exp(-γ (θ_i - φ_j)²) g_j ≈ Σ_p α_p² θ_i^p Σ_j φ_j^p g_j,   α_p² = β (2γ)^p / p!,   p = 0 … P

    with γ = 1e-4 and β = exp(-2γ), that of normalised vectors. The sums over j are P + 1 numbers, so that time and
    memory are linear in n. Then a 1×1 convolution and a norm of each group, and the input added: Z = norm(W_z y) + X.
    The scale of the norm is zero at the start. Here y is divided by √m, as the official code can do, to stay in
    the range of half precision; the norm takes the factor out again, but for its epsilon.

    Maps B×C×H×W to the same shape.

    Args:
        dim: Channels of the input and the output.
        hidden_dim: Channels d of θ, φ and g, half of `dim` if None.
        groups: Groups, which split `dim` and `hidden_dim` evenly.
        order: P, the highest power of the expansion.

    Raises:
        ValueError: An argument is out of its range, or a forward input does not have four dimensions.
    """

    def __init__(
        self, dim: int, hidden_dim: int | None = None, groups: int = 8, order: int = 3, device=None, dtype=None
    ):
        super().__init__()
        hidden_dim = max(dim // 2, 1) if hidden_dim is None else hidden_dim
        for name, value in {'dim': dim, 'hidden_dim': hidden_dim, 'groups': groups, 'order': order}.items():
            if value < 1:
                raise ValueError(f'{name} must be positive, got {value}')
        for name, value in {'dim': dim, 'hidden_dim': hidden_dim}.items():
            if value % groups:
                raise ValueError(f'{name} {value} must be divisible by groups {groups}')
        self.groups = groups
        self.order = order
        self.root, self.beta = math.sqrt(2 * _GAMMA), math.exp(-2 * _GAMMA)
        dd = {'device': device, 'dtype': dtype}
        self.theta = nn.Conv2d(dim, hidden_dim, 1, bias=False, **dd)
        self.phi = nn.Conv2d(dim, hidden_dim, 1, bias=False, **dd)
        self.g = nn.Conv2d(dim, hidden_dim, 1, bias=False, **dd)
        self.z = nn.Conv2d(hidden_dim, dim, 1, groups=groups, bias=False, **dd)
        self.norm = nn.GroupNorm(groups, dim, **dd)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps B×C×H×W to the same shape."""
        check_dimensions(x, 2)
        theta, phi, g = self._split(self.theta(x)), self._split(self.phi(x)), self._split(self.g(x))
        y = self.attend(theta, phi, g).unflatten(2, [-1, x.shape[2], x.shape[3]]).flatten(1, 2)
        return x + self.norm(self.z(y))

    def attend(self, theta: torch.Tensor, phi: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """y / √m, as B × groups × m like all three."""
        theta, phi, g = theta * self.root, phi * self.root, g * (self.beta * g.shape[2] ** -0.5)
        sums = [g.sum(dim=2, keepdim=True)]
        for p in range(1, self.order + 1):
            g = g * phi
            sums.append(g.sum(dim=2, keepdim=True) / math.factorial(p))
        y = sums[self.order]
        for p in range(self.order - 1, -1, -1):  # the polynomial in θ, from its highest power down
            y = y * theta + sums[p]
        return y

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """B×d×H×W to B × groups × m."""
        return x.unflatten(1, [self.groups, -1]).flatten(2)
