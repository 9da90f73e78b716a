"""Focused linear attention.

Paper: `FLatten Transformer: Vision Transformer using Focused Linear Attention` (ICCV 2023)
    - https://arxiv.org/abs/2308.00442
"""

import math
from collections.abc import Sequence

import torch
from timm.layers import get_device_dtype, resample_abs_pos_embed_nhwc, to_2tuple
from torch import nn

from .._timm import _assert
from .attention_rows import convolution_rows, select_queries
from .focused_linear_function import depthwise_and_focused_attention, focus, inverse_softplus
from .folding import inference_only
from .position_tensors import resample_positions

__all__ = ['FocusedLinearAttention', 'FocusedLinearCore', 'focused_feature_map']

torch.fx.wrap('resample_positions')  # branches on sizes
torch.fx.wrap('depthwise_and_focused_attention')  # looks at what transforms it
torch.fx.wrap('inference_only')  # raises where networks are only looked at


def focused_feature_map(x: torch.Tensor, scale: torch.Tensor, focusing_factor: float) -> torch.Tensor:
    """The focused function of the paper (section 4.2, equations 5 and 6).

    With φ(x) = (relu(x) + 1e-6) / softplus(scale), f(x) = φ(x)ᵖ · ‖φ(x)‖ / ‖φ(x)ᵖ‖: the norm of a token stays, its
    direction is drawn towards its largest channels.

    Args:
        x: Queries or keys, shape (..., C).
        scale: Learned scale before softplus, broadcastable to x.
        focusing_factor: The power p.

    Returns:
        Positive features of x's shape, in float32 if x is of lower precision.
    """
    w, r = focus(x, inverse_softplus(scale), focusing_factor)
    return w * r


class FocusedLinearCore(nn.Module):
    """Focused linear attention (section 4) between queries, keys and values that are given.

    With f the focused function, N = H · W positions, and heads of d channels:

        O = f(Q) (f(K)ᵀ V / N) / (f(Q) · mean(f(K)) + 1e-6) + DWC(V)

    where a positional encoding has been added to K, the mean is over positions, and DWC is a depthwise convolution of V
    over the grid (section 4.3) whose d kernels are shared by the heads. Time and memory are linear in N.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        grid_size: int | tuple[int, int],
        focusing_factor: float = 3,
        kernel_size: int = 5,
        dynamic_grid_size: bool = False,
        device=None,
        dtype=None,
    ):
        """
        Args:
            num_heads: Number of heads.
            head_dim: Channels per head.
            grid_size: Native grid (H, W) of the positional encoding.
            focusing_factor: Power p of the focused function, > 0 and finite.
            kernel_size: Size of the depthwise convolution, odd.
            dynamic_grid_size: Accept any grid, resampling the positional encoding to it.

        Raises:
            ValueError: An argument is out of its range.
        """
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        grid_size = to_2tuple(grid_size)
        if num_heads <= 0 or head_dim <= 0:
            raise ValueError(f'num_heads and head_dim must be positive, got {num_heads} and {head_dim}')
        if len(grid_size) != 2 or min(grid_size) <= 0:
            raise ValueError(f'grid_size must be one or two positive sizes, got {grid_size}')
        if not 0 < focusing_factor < math.inf:
            raise ValueError(f'focusing_factor must be positive and finite, got {focusing_factor}')
        if kernel_size <= 0 or kernel_size % 2 == 0:
            raise ValueError(f'kernel_size must be odd and positive, got {kernel_size}')
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.grid_size = grid_size
        self.focusing_factor = float(focusing_factor)
        self.dynamic_grid_size = dynamic_grid_size

        self.positional_encoding = nn.Parameter(torch.empty(1, *grid_size, num_heads * head_dim, **dd))
        self.scale = nn.Parameter(torch.empty(1, 1, num_heads * head_dim, **dd))
        self.register_buffer('inverse_scale', None)  # in the scale's place once it is folded
        self.dwc = nn.Conv2d(head_dim, head_dim, kernel_size, padding=kernel_size // 2, groups=head_dim, **dd)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start without positional encoding and with one scale for all channels."""
        nn.init.zeros_(self.positional_encoding)
        nn.init.zeros_(self.scale)

    @torch.jit.ignore
    def set_grid_size(self, grid_size: tuple[int, int]) -> None:
        """Make (H, W) the native grid, resampling the positional encoding."""
        if to_2tuple(grid_size) == self.grid_size:
            return
        self.grid_size = to_2tuple(grid_size)
        with torch.no_grad():
            self.positional_encoding = nn.Parameter(
                resample_abs_pos_embed_nhwc(self.positional_encoding, self.grid_size),
                requires_grad=self.positional_encoding.requires_grad,
            )

    def _positional_encoding(self, height: int, width: int) -> torch.Tensor:
        if self.dynamic_grid_size:
            return resample_positions(self.positional_encoding, self.grid_size, height, width)
        way_out = 'build the network with img_size= for this size, or with dynamic_img_size=True for any'
        _assert(height == self.grid_size[0], f'Grid height ({height}) is not {self.grid_size[0]}; {way_out}.')
        _assert(width == self.grid_size[1], f'Grid width ({width}) is not {self.grid_size[1]}; {way_out}.')
        return self.positional_encoding

    @torch.no_grad()
    def fold(self, qkv: nn.Linear) -> None:
        """Make the scale part of the projection to queries and keys, and lay out the depthwise kernels: for inference.

        Nothing happens where that has been done, or where the projection is no plain linear layer.

        Args:
            qkv: Projection to queries, keys and values, used by nothing else.
        """
        if self.inverse_scale is not None or type(qkv) is not nn.Linear:
            return
        s = inverse_softplus(self.scale)
        factor = torch.cat([s, s, torch.ones_like(s)], dim=-1).flatten()
        shift = torch.cat([s, s, torch.zeros_like(s)], dim=-1).flatten() * 1e-6
        bias = shift if qkv.bias is None else qkv.bias * factor + shift
        requires_grad = qkv.weight.requires_grad
        qkv.bias = nn.Parameter(bias.to(qkv.weight.dtype), requires_grad)
        qkv.weight = nn.Parameter((qkv.weight * factor[:, None]).to(qkv.weight.dtype), requires_grad)
        encoding = self.positional_encoding
        self.positional_encoding = nn.Parameter((encoding * s).to(encoding.dtype), encoding.requires_grad)

        weight, bias = self._depthwise_kernels()
        shared = self.dwc
        self.dwc = (
            nn.utils.skip_init(
                nn.Conv2d,
                len(weight),
                len(weight),
                shared.kernel_size,
                padding=shared.padding,
                groups=len(weight),
                **get_device_dtype(shared),
            )
            .train(shared.training)
            .requires_grad_(shared.weight.requires_grad)
        )
        self.dwc.load_state_dict({'weight': weight, 'bias': bias})
        self.register_buffer('inverse_scale', s.to(self.scale.dtype))
        self.register_parameter('scale', None)

    def _inverse_scale(self) -> torch.Tensor:
        return inverse_softplus(self.scale) if self.inverse_scale is None else self.inverse_scale

    def _depthwise_kernels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Kernels and biases of the convolution of v as a whole: the shared ones laid out once per head."""
        bias = self.dwc.bias
        assert bias is not None  # for TorchScript
        if self.inverse_scale is not None:
            return self.dwc.weight, bias
        return self.dwc.weight.repeat(self.num_heads, 1, 1, 1), bias.repeat(self.num_heads)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Output O (B, H, W, num_heads · head_dim) for queries, keys and values of that shape."""
        return self.attend_tokens(q, k, v, q.shape[1], q.shape[2])

    def attend_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, height: int, width: int, num_prefix_tokens: int = 0
    ) -> torch.Tensor:
        """Output O for tokens of which the first ones, such as a class token, are on no grid.

        They attend and are attended to like the others, N being the number of all tokens; positional encoding and
        depthwise convolution are of the others alone.

        Args:
            q, k, v: Queries, keys and values, (B, num_prefix_tokens + height · width, num_heads · head_dim).
            height, width: Grid of the tokens after the first ones, in row order.
            num_prefix_tokens: Number of the first ones.

        Returns:
            Of the shape of q.
        """
        positional_encoding = self._positional_encoding(height, width)
        weight, bias = self._depthwise_kernels()
        folded = self.inverse_scale is not None
        if folded:
            q = inference_only(q, self.training)
        return depthwise_and_focused_attention(
            q,
            k,
            v,
            positional_encoding,
            self._inverse_scale(),
            weight,
            bias,
            self.focusing_factor,
            self.num_heads,
            num_prefix_tokens,
            folded,
        )

    def attention_matrix(
        self, q: torch.Tensor, k: torch.Tensor, queries: Sequence[int] | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows of the attention matrix that linear attention never forms, without the depthwise term.

        Times the values of its head, and with `depthwise_matrix` and the convolution's bias added, it is what `attend`
        gives.

        Args:
            q: Queries as for `attend`, (B, H, W, num_heads · head_dim).
            k: Keys of the same shape.
            queries: Flat indices (row · W + column) of the positions whose rows are wanted; all N of them if None
                (small maps only).

        Returns:
            B × heads × queries × N; no entry is negative, and the rows sum to 1 (short of what the 1e-6 takes).

        Raises:
            ValueError: An index is out of range, or all rows of a large map are asked for.
        """
        B, H, W, _ = q.shape
        N = H * W
        queries = select_queries(queries, N, q.device)
        q, k = (
            direction * factor
            for direction, factor in (
                focus(x, self._inverse_scale(), self.focusing_factor, self.inverse_scale is not None)
                for x in (q, k + self._positional_encoding(H, W))
            )
        )
        q = q.reshape(B, N, self.num_heads, self.head_dim).transpose(1, 2)[:, :, queries]
        k = k.reshape(B, N, self.num_heads, self.head_dim).transpose(1, 2)
        normalizer = q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) + 1e-6
        return q @ k.transpose(-2, -1) / N / normalizer

    def depthwise_matrix(
        self, channel: int, grid_size: tuple[int, int], queries: Sequence[int] | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows of the matrix that the depthwise term is for one channel of the values: M_DWC in section 4.3.

        Args:
            channel: Index among all num_heads · head_dim channels.
            grid_size: H and W.
            queries: As in `attention_matrix`.

        Returns:
            queries × N.
        """
        queries = select_queries(queries, grid_size[0] * grid_size[1], self.dwc.weight.device)
        return convolution_rows(self.dwc.weight[channel % len(self.dwc.weight), 0], grid_size, queries)


class FocusedLinearAttention(FocusedLinearCore):
    """Multi-head focused linear attention over a whole grid, with its projections.

    Shape:
        - input: (B, H, W, dim)
        - output: (B, H, W, dim)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        grid_size: int | tuple[int, int] = 14,
        head_dim: int | None = None,
        focusing_factor: float = 3,
        kernel_size: int = 5,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        dynamic_grid_size: bool = False,
        device=None,
        dtype=None,
    ):
        """
        Args:
            dim: Number of input and output channels.
            num_heads: Number of heads.
            grid_size: Native grid (H, W) of the positional encoding.
            head_dim: Channels per head, dim // num_heads if None.
            focusing_factor: Power p of the focused function, > 0.
            kernel_size: Size of the depthwise convolution, odd.
            qkv_bias: Add a learned bias to queries, keys and values.
            proj_drop: Dropout rate of the output.
            dynamic_grid_size: Accept any grid, resampling the positional encoding to it.

        Raises:
            ValueError: An argument is out of its range, or num_heads does not divide dim.
        """
        dd = {'device': device, 'dtype': dtype}
        if dim <= 0 or num_heads <= 0:
            raise ValueError(f'dim and num_heads must be positive, got dim={dim}, num_heads={num_heads}')
        if head_dim is None and dim % num_heads:
            raise ValueError(f'num_heads={num_heads} does not divide dim={dim}; choose a divisor or set head_dim')
        super().__init__(
            num_heads,
            dim // num_heads if head_dim is None else head_dim,
            grid_size,
            focusing_factor=focusing_factor,
            kernel_size=kernel_size,
            dynamic_grid_size=dynamic_grid_size,
            **dd,
        )
        attn_dim = self.num_heads * self.head_dim
        self.qkv = nn.Linear(dim, 3 * attn_dim, bias=qkv_bias, **dd)
        self.proj = nn.Linear(attn_dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _assert(x.ndim == 4, f'Input must be (batch, height, width, channels), got {x.ndim} dimensions.')
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = self.proj(self.attend(q, k, v))
        return self.proj_drop(x)

    def reparameterize(self) -> None:
        """What `timm.utils.reparameterize_model` calls: see `fold`."""
        self.fold(self.qkv)
