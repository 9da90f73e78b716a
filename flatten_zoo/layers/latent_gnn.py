"""LatentGNN: non-local relations through a small latent graph (ICML 2019, arXiv 1905.11634)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .folding import make_norms_foldable
from .projected_attention import check_dimensions

__all__ = ['LatentGNN']

torch.fx.wrap('check_dimensions')


class LatentGNN(nn.Module):
    """Messages from n positions to d latent nodes, among these, and back: section 3.2 of the paper.

    With X₁ and X₂ two maps of the input, 1×1 convolutions with batch norm to fewer channels, each position normalised,

        visible to latent    Z = Ψ₁ X₁      Ψ₁ = ψ₁(X₁), each node's row normalised over the positions
        latent to latent     Z' = A Z       A = softmax(Ẑ Ẑᵀ), Ẑ the nodes normalised
        latent to visible    Y = Ψ₂ᵀ Z'     Ψ₂ = ψ₂(X₂), each position's column normalised over the nodes

    where ψ is a 1×1 convolution with batch norm and ReLU to d channels, and normalised is divided by the Euclidean
    norm, or by 0.001 where that is larger: the form that the official code calls asymmetric. Several such kernels of
    their own d are a mixture: their outputs are concatenated. The output is X + γ W(Y), W a 1×1 convolution with batch
    norm, γ = 0 at the start.

    Maps B×C×H×W to the same shape. Time and memory are linear in n.

    Args:
        dim: Channels of the input and the output.
        hidden_dim: Channels of X₁ and X₂, a quarter of `dim` if None.
        latent_dims: Number d of latent nodes of each kernel.

    Raises:
        ValueError: An argument is out of its range, or a forward input does not have four dimensions.
    """

    def __init__(
        self, dim: int, hidden_dim: int | None = None, latent_dims: Sequence[int] = (100,), device=None, dtype=None
    ):
        super().__init__()
        hidden_dim = max(dim // 4, 1) if hidden_dim is None else hidden_dim
        for name, value in {'dim': dim, 'hidden_dim': hidden_dim}.items():
            if value < 1:
                raise ValueError(f'{name} must be positive, got {value}')
        if not latent_dims or min(latent_dims) < 1:
            raise ValueError(f'latent_dims must be one or more positive integers, got {tuple(latent_dims)}')
        dd = {'device': device, 'dtype': dtype}
        self.down_v2l = nn.Sequential(*_conv_norm(dim, hidden_dim, **dd))
        self.down_l2v = nn.Sequential(*_conv_norm(dim, hidden_dim, **dd))
        self.kernels = nn.ModuleList(LatentKernel(hidden_dim, d, **dd) for d in latent_dims)
        self.up = nn.Sequential(*_conv_norm(len(latent_dims) * hidden_dim, dim, **dd))
        self.gamma = nn.Parameter(torch.zeros(1, **dd))
        for layers in (self.down_v2l, self.down_l2v, self.up):
            make_norms_foldable(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps B×C×H×W to the same shape."""
        check_dimensions(x, 2)
        x1, x2 = _normalize(self.down_v2l(x), 1), _normalize(self.down_l2v(x), 1)
        y = torch.cat([kernel(x1, x2) for kernel in self.kernels], dim=1)
        return x + self.gamma * self.up(y)


class LatentKernel(nn.Module):
    """The three steps with d latent nodes.

    Shape:
        - input, output: (B, C, H, W)
    """

    def __init__(self, dim: int, latent_dim: int, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.psi_v2l = nn.Sequential(*_conv_norm(dim, latent_dim, **dd), nn.ReLU(inplace=True))
        self.psi_l2v = nn.Sequential(*_conv_norm(dim, latent_dim, **dd), nn.ReLU(inplace=True))
        make_norms_foldable(self.psi_v2l)
        make_norms_foldable(self.psi_l2v)

    def forward(self, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
        to_latent = _normalize(self.psi_v2l(x1).flatten(2), 2)
        to_visible = _normalize(self.psi_l2v(x2).flatten(2), 1)
        z = torch.bmm(to_latent, x1.flatten(2).transpose(1, 2))
        nodes = _normalize(z, 2)
        z = torch.bmm(torch.bmm(nodes, nodes.transpose(1, 2)).softmax(dim=2), z)
        return torch.bmm(z.transpose(1, 2), to_visible).unflatten(2, x1.shape[2:])


def _normalize(x: torch.Tensor, dim: int) -> torch.Tensor:
    return F.normalize(x, dim=dim, eps=1e-3)  # by which half precision can divide, there and back


def _conv_norm(dim: int, out_dim: int, device=None, dtype=None) -> list[nn.Module]:
    dd = {'device': device, 'dtype': dtype}
    return [nn.Conv2d(dim, out_dim, 1, bias=False, **dd), nn.BatchNorm2d(out_dim, **dd)]
