"""What efficient and non-local attention share: four 1×1 convolutions around an attention over all positions."""

import torch
from torch import nn

__all__ = ['ProjectedAttention']

_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_NORMALIZATIONS = ('softmax', 'scaling')


@torch.fx.wrap
def check_dimensions(x: torch.Tensor, spatial_dims: int) -> None:
    """Refuse what is not B×C×(spatial…); symbolic tracing leaves this out."""
    if x.dim() != spatial_dims + 2:
        raise ValueError(
            f'x must have {spatial_dims + 2} dimensions (batch, channels and spatial_dims={spatial_dims} more), '
            f'got {x.dim()}'
        )


class ProjectedAttention(nn.Module):
    """Base of the attention modules of "Efficient Attention" (arXiv 1812.01243), which differ in `attend` alone.

    Maps B×C×(spatial…) to the same shape: queries, keys and values by 1×1 convolutions, the attention of the subclass,
    a reprojection to the input's channels and, as a rule, the input added. Its parameters have the official names
    (`keys`, `queries`, `values`, `reprojection`); official state dicts load as they are for two spatial dimensions, and
    with singleton dimensions added to, or taken from, the end of each `weight` for three or one.

    Args:
        dim: Channels of the input and the output.
        key_dim: Channels d_k of queries and keys, all heads together.
        value_dim: Channels d_v of the values, all heads together.
        num_heads: Heads, which split d_k and d_v evenly.
        normalization: 'softmax', or 'scaling' for a division by the number of positions.
        reproject: Map the d_v channels back to `dim` with a 1×1 convolution; without it `value_dim` must equal `dim`.
        residual: Add the input to the output.
        spatial_dims: 1 for B×C×L sequences, 2 for B×C×H×W maps, 3 for B×C×D×H×W volumes.

    Raises:
        ValueError: An argument is out of its range, or a forward input has another number of dimensions.
    """

    def __init__(
        self,
        dim: int,
        key_dim: int = 64,
        value_dim: int = 64,
        num_heads: int = 1,
        normalization: str = 'softmax',
        reproject: bool = True,
        residual: bool = True,
        spatial_dims: int = 2,
        device=None,
        dtype=None,
    ):
        super().__init__()
        sizes = {'dim': dim, 'key_dim': key_dim, 'value_dim': value_dim, 'num_heads': num_heads}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f'{name} must be positive, got {value}')
        for name in ('key_dim', 'value_dim'):
            if sizes[name] % num_heads:
                raise ValueError(f'{name} {sizes[name]} must be divisible by num_heads {num_heads}')
        if normalization not in _NORMALIZATIONS:
            raise ValueError(f'normalization must be one of {_NORMALIZATIONS}, got {normalization!r}')
        if spatial_dims not in _CONVOLUTIONS:
            raise ValueError(f'spatial_dims must be one of {tuple(_CONVOLUTIONS)}, got {spatial_dims}')
        if not reproject and value_dim != dim:
            raise ValueError(f'reproject=False needs value_dim equal to dim {dim}, got {value_dim}')
        self.num_heads = num_heads
        self.normalization = normalization
        self.residual = residual
        self.spatial_dims = spatial_dims

        conv = _CONVOLUTIONS[spatial_dims]
        dd = {'device': device, 'dtype': dtype}
        self.keys = conv(dim, key_dim, 1, **dd)
        self.queries = conv(dim, key_dim, 1, **dd)
        self.values = conv(dim, value_dim, 1, **dd)
        self.reprojection = conv(value_dim, dim, 1, **dd) if reproject else nn.Identity()

    def zero_init_last(self) -> None:
        """Zero the branch's last layer, so that with `residual` the module starts as the identity and still learns."""
        last = self.values if isinstance(self.reprojection, nn.Identity) else self.reprojection
        for parameter in last.parameters():
            nn.init.zeros_(parameter)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of the n positions, one matrix for each image and head.

        Args:
            x: B×C×(spatial…).

        Returns:
            Qᵀ and Kᵀ of shape (B · heads) × d_k/heads × n, Vᵀ of shape (B · heads) × d_v/heads × n.
        """
        check_dimensions(x, self.spatial_dims)
        heads = [self.num_heads, -1]
        q = self.queries(x).flatten(2).unflatten(1, heads).flatten(0, 1)
        k = self.keys(x).flatten(2).unflatten(1, heads).flatten(0, 1)
        v = self.values(x).flatten(2).unflatten(1, heads).flatten(0, 1)
        return q, k, v

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Transposed attention output, (B · heads) × d_v/heads × n, of what `project` returns."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps B×C×(spatial…) to the same shape."""
        q, k, v = self.project(x)
        y = self.attend(q, k, v)
        y = y.unflatten(0, [x.shape[0], self.num_heads]).flatten(1, 2).unflatten(2, x.shape[2:])
        y = self.reprojection(y)
        return x + y if self.residual else y
