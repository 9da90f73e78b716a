"""Interlaced sparse self-attention (arXiv 1907.12273)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import nn

from .attention_rows import select_queries
from .folding import make_norms_foldable
from .projected_attention import check_dimensions
from .sizes import surely_equal

__all__ = ['InterlacedSparseAttention']

torch.fx.wrap('check_dimensions')

_STEPS = ('long_range', 'short_range')


class InterlacedSparseAttention(nn.Module):
    """Interlaced sparse self-attention: a long-range step, then a short-range step.

    The map is divided into Qh × Qw blocks of P = Ph × Pw positions. The long-range step attends among the positions
    with the same place in their block (P groups of Qh·Qw), the short-range step among the positions of a block (Qh·Qw
    groups of P): each sees few positions, both together connect every position with every other. A map that is no
    multiple of P is zero-padded, half on each side, the odd row or column at the end, and the padding takes part in the
    attention.

    With `residual` the block is the one that is added to the features of a backbone "like a non-local block", and as
    there its last convolution ends in batch norm without a ReLU: the branch can then add and subtract, and learns from
    a zero start, which a ReLU at zero would forbid. Without, it is the block of the official segmentation head, ReLU
    included. Tensor names are the official ones in both forms, and official state dicts load as they are.

    Args:
        dim: Channels of the input.
        key_dim: Channels d_k of queries and keys.
        value_dim: Channels d_v of the values.
        out_dim: Channels of the output, `dim` if None.
        group_size: P = (Ph, Pw), the number of groups of the long-range step and the block of the short-range step.
        residual: Add the input to the output; needs `out_dim` equal to `dim`.

    Raises:
        ValueError: An argument is out of its range, or a forward input does not have four dimensions.
    """

    def __init__(
        self,
        dim: int,
        key_dim: int = 64,
        value_dim: int = 64,
        out_dim: int | None = None,
        group_size: int | tuple[int, int] = (8, 8),
        residual: bool = True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        out_dim = dim if out_dim is None else out_dim
        for name, value in {'dim': dim, 'key_dim': key_dim, 'value_dim': value_dim, 'out_dim': out_dim}.items():
            if value < 1:
                raise ValueError(f'{name} must be positive, got {value}')
        group_size = to_2tuple(group_size)
        if len(group_size) != 2 or min(group_size) < 1:
            raise ValueError(f'group_size must be two positive integers, got {group_size}')
        if residual and out_dim != dim:
            raise ValueError(f'residual=True needs out_dim equal to dim {dim}, got {out_dim}')
        self.group_size = group_size
        self.residual = residual

        dd = {'device': device, 'dtype': dtype}
        self.long_range_sa = GroupedSelfAttention(
            dim, key_dim, value_dim, out_dim, self.group_size, long_range=True, **dd
        )
        self.short_range_sa = GroupedSelfAttention(
            out_dim, key_dim, value_dim, out_dim, self.group_size, long_range=False, final_act=not residual, **dd
        )

    def zero_init_last(self) -> None:
        """Zero the branch's last batch norm, so that with `residual` the module starts as the identity and learns.

        Without `residual` the last batch norm is followed by a ReLU, through which a zero cannot learn: an error.
        """
        if not self.residual:
            raise ValueError('zero_init_last needs residual=True: a final ReLU passes no gradient to a zero branch')
        for parameter in self.short_range_sa.W[1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps B×C×H×W to B×out_dim×H×W."""
        check_dimensions(x, 2)
        y = self.short_range_sa(self.long_range_sa(_pad_to_groups(x, self.group_size)))
        y = _crop_padding(y, x, self.group_size)
        return x + y if self.residual else y

    def attention_matrix(
        self, x: torch.Tensor, queries: Sequence[int] | torch.Tensor | None = None, step: str | None = None
    ) -> torch.Tensor:
        """Rows of the dense attention matrix: the product of the two steps' sparse matrices, or one of these.

        A query's block holds each place of a block once, so that exactly one path leads from it to any position: along
        its block to the position with that place, then within that place's long-range group. An entry of the product is
        therefore one short-range weight times one long-range weight. What falls on the padding is left out.

        Call it in inference mode (`eval()`), as batch norm otherwise uses and updates batch statistics.

        Args:
            x: B×C×H×W.
            queries: Flat indices (row · W + column) of the positions whose rows are wanted; all n = H·W of them if None
                (small maps only).
            step: 'long_range' or 'short_range' for that step's own matrix, None for the product.

        Returns:
            B × 1 × queries × n; rows sum to 1, less the weight on the padding.

        Raises:
            ValueError: An index is out of range, all rows of a large map are asked for, or the step is unknown.
        """
        if step is not None and step not in _STEPS:
            raise ValueError(f'step must be None or one of {_STEPS}, got {step!r}')
        h, w = x.shape[2:]
        queries = select_queries(queries, h * w, x.device)
        left, right, top, bottom = _padding(h, w, self.group_size)
        x = F.pad(x, [left, right, top, bottom])
        (ph, pw), (qh, qw) = self.group_size, (x.shape[2] // self.group_size[0], x.shape[3] // self.group_size[1])
        row, col = queries // w + top, queries % w + left
        place, block = row % ph * pw + col % pw, row // ph * qw + col // pw

        # weight of each place in the query's block (B × queries × P), then of each block (B × P × queries × Q)
        over_places, over_blocks = F.one_hot(place, ph * pw)[None].to(x.dtype), F.one_hot(block, qh * qw)[None, None]
        if step != 'long_range':
            q, k = self.short_range_sa.queries_keys(self.long_range_sa(x))
            over_places = _softmax_rows(q[:, block, place, None], k[:, block]).squeeze(2)
        if step != 'short_range':
            q, k = self.long_range_sa.queries_keys(x)
            over_blocks = _softmax_rows(q[:, :, block], k)
        rows = over_places[..., None] * over_blocks.transpose(1, 2)
        rows = rows.unflatten(3, (qh, qw)).unflatten(2, (ph, pw)).permute(0, 1, 4, 2, 5, 3)
        rows = rows.flatten(4, 5).flatten(2, 3)[:, None, :, top : top + h, left : left + w]
        return rows.flatten(3)


def _padding(h: int, w: int, group_size: tuple[int, int]) -> list[int]:
    """Columns and rows to add: left, right, top, bottom."""
    ph, pw = group_size
    rows, cols = (h + ph - 1) // ph * ph - h, (w + pw - 1) // pw * pw - w
    return [cols // 2, cols - cols // 2, rows // 2, rows - rows // 2]


# These two look at sizes: symbolic tracing leaves them whole, and `torch.jit.trace` scripts them. A graph for several
# sizes always pads, if only by nothing; elsewhere that copy is saved.
@torch.fx.wrap
@torch.jit.script_if_tracing
def _pad_to_groups(x: torch.Tensor, group_size: tuple[int, int]) -> torch.Tensor:
    padding = _padding(x.shape[2], x.shape[3], group_size)
    return x if surely_equal(sum(padding), 0) else F.pad(x, padding)


@torch.fx.wrap
@torch.jit.script_if_tracing
def _crop_padding(y: torch.Tensor, x: torch.Tensor, group_size: tuple[int, int]) -> torch.Tensor:
    """What `_pad_to_groups(x, …)` has become, without what it added."""
    padding = _padding(x.shape[2], x.shape[3], group_size)
    return y if surely_equal(sum(padding), 0) else F.pad(y, [-p for p in padding])


def _softmax_rows(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ / √d_k) over matrices in the last two dimensions."""
    return (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)


class GroupedSelfAttention(nn.Module):
    """Self-attention within groups: W(softmax(θ(x) φ(x)ᵀ / √d_k) g(x)), the step of both ranges.

    θ, φ, g and W are the official `f_query`, `f_key`, `f_value` and `W`. They act on single positions, so they run on
    the map; only their narrow outputs are regrouped.
    """

    def __init__(
        self,
        dim: int,
        key_dim: int,
        value_dim: int,
        out_dim: int,
        group_size: tuple[int, int],
        long_range: bool,
        final_act: bool = True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.group_size = group_size
        self.long_range = long_range
        self.f_key = nn.Sequential(*_conv_norm_act(dim, key_dim, **dd), *_conv_norm_act(key_dim, key_dim, **dd))
        self.f_query = nn.Sequential(*_conv_norm_act(dim, key_dim, **dd), *_conv_norm_act(key_dim, key_dim, **dd))
        self.f_value = nn.Conv2d(dim, value_dim, 1, bias=False, **dd)
        self.W = nn.Sequential(*_conv_norm_act(value_dim, out_dim, act=final_act, **dd))
        for layers in (self.f_key, self.f_query, self.W):
            make_norms_foldable(layers)

    def queries_keys(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """θ(x) and φ(x), each B × groups × positions in a group × d_k."""
        return self._split(self.f_query(x)), self._split(self.f_key(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps B×C×H×W, H and W multiples of the group size, to B×out_dim×H×W."""
        q, k = self.queries_keys(x)
        y = F.scaled_dot_product_attention(q, k, self._split(self.f_value(x)))
        return self.W(self._merge(y, x.shape[2], x.shape[3]))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """B×C×H×W to B × groups × positions in a group × C."""
        ph, pw = self.group_size
        x = x.unflatten(3, [x.shape[3] // pw, pw]).unflatten(2, [x.shape[2] // ph, ph])
        x = x.permute(0, 3, 5, 2, 4, 1) if self.long_range else x.permute(0, 2, 4, 3, 5, 1)
        # not contiguous(), whose look at the strides would tie an exported graph to the number of groups it saw
        return x.clone(memory_format=torch.contiguous_format).flatten(3, 4).flatten(1, 2)

    def _merge(self, x: torch.Tensor, h: int, w: int) -> torch.Tensor:
        """Inverse of `_split`."""
        ph, pw = self.group_size
        if self.long_range:
            x = x.unflatten(2, [h // ph, w // pw]).unflatten(1, [ph, pw]).permute(0, 5, 3, 1, 4, 2)
        else:
            x = x.unflatten(2, [ph, pw]).unflatten(1, [h // ph, w // pw]).permute(0, 5, 1, 3, 2, 4)
        return x.clone(memory_format=torch.contiguous_format).flatten(4, 5).flatten(2, 3)


def _conv_norm_act(dim: int, out_dim: int, act: bool = True, device=None, dtype=None) -> list[nn.Module]:
    """1×1 convolution, then batch norm and ReLU nested in one module as in the official tensor names."""
    dd = {'device': device, 'dtype': dtype}
    norm = nn.Sequential(nn.BatchNorm2d(out_dim, **dd))
    if act:
        norm.append(nn.ReLU(inplace=True))
    return [nn.Conv2d(dim, out_dim, 1, bias=False, **dd), norm]
