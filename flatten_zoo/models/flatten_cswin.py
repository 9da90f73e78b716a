"""FLatten-CSwin: CSwin Transformer with focused linear attention in its first stages.

With `attn_types='softmax'` it is the plain CSwin Transformer.

Papers:
    * `FLatten Transformer: Vision Transformer using Focused Linear Attention` (ICCV 2023)
        - https://arxiv.org/abs/2308.00442
    * `CSWin Transformer: A General Vision Transformer Backbone with Cross-Shaped Windows` (CVPR 2022)
        - https://arxiv.org/abs/2107.00652
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, calculate_drop_path_rates, to_2tuple, to_ntuple
from timm.models import generate_default_cfgs, register_model
from torch import nn

from ..layers import FocusedLinearCore
from ..layers.attention_rows import convolution_rows, select_queries
from ..layers.sizes import surely_equal
from ._arguments import check_any_size, check_arguments
from ._dilation import stage_strides
from ._flatten import (
    create_pyramid,
    fit_position_tensors,
    flatten_cfg,
    flatten_position_tensors,
    resolve_attn_types,
    unwrap_state_dict,
)
from ._padding import pad_for_convolution
from ._pyramid import PyramidStage, PyramidTransformer
from ._released import official_url

__all__ = ['FlattenCSwin']

torch.fx.wrap('pad_for_convolution')  # looks at sizes


class ConvEmbed(nn.Module):
    """Overlapping convolution and norm: (B, C, H, W) to (B, ⌈H / stride⌉, ⌈W / stride⌉, dim)."""

    def __init__(self, in_chans: int, dim: int, kernel_size: int, stride: int, device=None, dtype=None):
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        padding = (kernel_size - stride + 1) // 2
        self.reach = kernel_size - 2 * padding
        self.proj = nn.Conv2d(in_chans, dim, kernel_size, stride=stride, padding=padding, **dd)
        self.norm = nn.LayerNorm(dim, **dd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stride = self.proj.stride
        x = pad_for_convolution(x, [stride[0], stride[1]], [self.reach, self.reach])
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


# Below, what looks at sizes is in functions that symbolic tracing leaves whole and `torch.jit.trace` scripts.
# timm's window functions would do, but for their look at the strides, which ties an exported graph to the sizes it saw.
def stripe_and_padded(height: int, width: int, split_size: int, direction: str) -> tuple[int, int, int, int]:
    """Height and width of a stripe, and of the map padded to whole stripes."""
    stripe_h = min(split_size, height) if direction == 'horizontal' else height
    stripe_w = min(split_size, width) if direction == 'vertical' else width
    return stripe_h, stripe_w, height + -height % stripe_h, width + -width % stripe_w


def to_stripes(x: torch.Tensor, stripe_h: int, stripe_w: int) -> torch.Tensor:
    """(B, H, W, …) map to (B · stripes, stripe height, stripe width, …)."""
    x = x.unflatten(2, [x.shape[2] // stripe_w, stripe_w]).unflatten(1, [x.shape[1] // stripe_h, stripe_h])
    return x.transpose(2, 3).clone(memory_format=torch.contiguous_format).flatten(0, 2)


@torch.fx.wrap
@torch.jit.script_if_tracing
def attend_in_stripes(
    qkv: torch.Tensor, num_heads: int, split_size: int, direction: str, dropout: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in the stripes of a (B, H, W, 3, C) map, and their values: (B · stripes, height, width, C) each."""
    B, H, W, _, C = qkv.shape
    stripe_h, stripe_w, padded_h, padded_w = stripe_and_padded(H, W, split_size, direction)
    N = stripe_h * stripe_w
    mask: torch.Tensor | None = None
    if direction != 'whole' and not (surely_equal(padded_h, H) and surely_equal(padded_w, W)):
        padding = [0, 0, 0, 0, 0, padded_w - W, 0, padded_h - H]
        inside = F.pad(torch.ones(1, H, W, 1, 1, device=qkv.device), padding)
        mask = to_stripes(inside, stripe_h, stripe_w).reshape(-1, 1, 1, N).repeat(B, 1, 1, 1) > 0
        qkv = F.pad(qkv, padding)
    qkv = to_stripes(qkv, stripe_h, stripe_w)
    v = qkv[..., 2, :]
    q, k, v_heads = qkv.reshape(-1, N, 3, num_heads, C // num_heads).permute(2, 0, 3, 1, 4).unbind(0)
    x = F.scaled_dot_product_attention(q, k, v_heads, attn_mask=mask, dropout_p=dropout)
    return x.transpose(1, 2).reshape(v.shape), v


@torch.fx.wrap
@torch.jit.script_if_tracing
def from_stripes(x: torch.Tensor, qkv: torch.Tensor, split_size: int, direction: str) -> torch.Tensor:
    """Stripes of `attend_in_stripes(qkv, …)` to a (B, H, W, C) map."""
    H, W = qkv.shape[1], qkv.shape[2]
    stripe_h, stripe_w, padded_h, padded_w = stripe_and_padded(H, W, split_size, direction)
    x = x.unflatten(0, [-1, padded_h // stripe_h, padded_w // stripe_w]).transpose(2, 3)
    return x.clone(memory_format=torch.contiguous_format).flatten(3, 4).flatten(1, 2)[:, :H, :W]


class LocallyEnhancedPositionalEncoding(nn.Conv2d):
    """LePE (section 3.3): a 3×3 depthwise convolution of the values, over (B, H, W, C) maps."""

    def __init__(self, dim: int, device=None, dtype=None):
        super().__init__(dim, dim, 3, padding=1, groups=dim, device=device, dtype=dtype)

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(v.permute(0, 3, 1, 2), self.weight, self.bias).permute(0, 2, 3, 1)


class FocusedLinearBranch(FocusedLinearCore):
    """Focused linear attention over the whole grid, plus LePE: (B, H, W, 3, C) q, k and v to (B, H, W, C)."""

    def __init__(self, num_heads: int, head_dim: int, grid_size: tuple[int, int], device=None, dtype=None, **kwargs):
        dd = {'device': device, 'dtype': dtype}
        super().__init__(num_heads, head_dim, grid_size, dynamic_grid_size=True, **kwargs, **dd)
        self.get_v: nn.Module | None = LocallyEnhancedPositionalEncoding(num_heads * head_dim, **dd)

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unbind(-2)
        out = self.attend(q, k, v)
        return out if self.get_v is None else out + self.get_v(v)

    @torch.no_grad()
    def fold(self, qkv: nn.Linear) -> None:
        """The core's, for a projection to this one branch; and LePE becomes part of its depthwise convolution."""
        super().fold(qkv)
        margin = (self.dwc.kernel_size[0] - 3) // 2
        if self.inverse_scale is not None and self.get_v is not None and margin >= 0:
            self.dwc.weight += F.pad(self.get_v.weight, [margin] * 4)
            self.dwc.bias += self.get_v.bias
            self.get_v = None

    def depthwise_matrix(
        self, channel: int, grid_size: tuple[int, int], queries: Sequence[int] | torch.Tensor | None = None
    ) -> torch.Tensor:
        """With LePE, which is another depthwise term."""
        rows = super().depthwise_matrix(channel, grid_size, queries)
        if self.get_v is None:
            return rows
        queries = select_queries(queries, rows.shape[1], rows.device)
        return rows + convolution_rows(self.get_v.weight[channel, 0], grid_size, queries)


class StripeBranch(nn.Module):
    """Softmax attention inside stripes (section 3.2), plus LePE: (B, H, W, 3, C) q, k and v to (B, H, W, C).

    A grid that the stripes do not divide is padded; padded positions are not attended to.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        split_size: int,
        direction: str,
        attn_drop: float = 0.0,
        device=None,
        dtype=None,
    ):
        """
        Args:
            split_size: Width of a stripe.
            direction: 'vertical' for full height, 'horizontal' for full width, 'whole' for one stripe that is the grid.
            attn_drop: Dropout rate of the attention weights.
        """
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.split_size = split_size
        self.direction = direction
        self.attn_drop = attn_drop
        self.get_v = LocallyEnhancedPositionalEncoding(num_heads * head_dim, device=device, dtype=dtype)

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        dropout = self.attn_drop if self.training else 0.0
        x, v = attend_in_stripes(qkv, self.num_heads, self.split_size, self.direction, dropout)
        return from_stripes(x + self.get_v(v), qkv, self.split_size, self.direction)


class FlattenCSwinBlock(nn.Module):
    """Cross-shaped or focused linear attention and MLP, each with pre-norm and residual, over a (B, H, W, dim) map."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attn_type: str,
        grid_size: tuple[int, int],
        split_size: int,
        last_stage: bool = False,
        focusing_factor: float = 3,
        kernel_size: int = 5,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        norm_layer: type[nn.Module] = nn.LayerNorm,
        device=None,
        dtype=None,
    ):
        """
        Args:
            attn_type: 'linear' for one branch of focused linear attention, 'softmax' for stripes.
            focusing_factor, kernel_size, grid_size: Of linear attention alone.
            split_size, attn_drop: Of softmax attention alone.
            last_stage: Softmax attention is one branch over the whole grid, rather than two of crossing stripes.

        Raises:
            ValueError: num_heads does not divide dim, or is odd where heads go to two branches.
        """
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        directions = ['whole'] if last_stage or attn_type == 'linear' else ['vertical', 'horizontal']
        if dim % num_heads or num_heads % len(directions):
            raise ValueError(
                f'num_heads={num_heads} must divide dim={dim} and be a multiple of {len(directions)} branches'
            )
        head_dim = dim // num_heads

        self.norm1 = norm_layer(dim, **dd)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **dd)
        if attn_type == 'linear':
            self.attns = nn.ModuleList(
                [
                    FocusedLinearBranch(
                        num_heads, head_dim, grid_size, focusing_factor=focusing_factor, kernel_size=kernel_size, **dd
                    )
                ]
            )
        else:
            self.attns = nn.ModuleList(
                [
                    StripeBranch(
                        num_heads // len(directions), head_dim, split_size, direction, attn_drop=attn_drop, **dd
                    )
                    for direction in directions
                ]
            )
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

        self.norm2 = norm_layer(dim, **dd)
        self.mlp = Mlp(dim, hidden_features=int(dim * mlp_ratio), drop=proj_drop, **dd)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def _attn(self, x: torch.Tensor) -> torch.Tensor:
        # every branch takes its share of the channels of queries, keys and values
        qkv = self.qkv(x).unflatten(-1, (3, len(self.attns), -1))
        branches = [attn(qkv[..., i, :]) for i, attn in enumerate(self.attns)]
        x = torch.cat(branches, dim=-1) if len(branches) > 1 else branches[0]
        return self.proj_drop(self.proj(x))

    def reparameterize(self) -> None:
        """What `timm.utils.reparameterize_model` calls: fold linear attention into the projection."""
        for attn in self.attns:
            if isinstance(attn, FocusedLinearBranch):
                attn.fold(self.qkv)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path1(self._attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class FlattenCSwin(PyramidTransformer):
    """CSwin Transformer with focused linear attention over the whole grid in its linear stages.

    Takes images of any size.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = 'avg',
        depths: Sequence[int] = (2, 4, 18, 1),
        embed_dim: int = 64,
        num_heads: Sequence[int] = (2, 4, 8, 16),
        attn_types: str | Sequence[str] = ('linear', 'linear', 'softmax', 'softmax'),
        focusing_factor: float = 3,
        kernel_size: int = 5,
        split_sizes: int | Sequence[int] = (1, 2, 7, 7),
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: type[nn.Module] = nn.LayerNorm,
        dynamic_img_size: bool = True,
        output_stride: int = 32,
        device=None,
        dtype=None,
    ):
        """
        Args:
            img_size: Image size (H, W) that the position tensors are made for; they are resampled for others.
            in_chans: Number of image channels.
            num_classes: Number of classes, 0 for no classifier.
            global_pool: 'avg', or '' for none.
            depths: Number of blocks of each stage.
            embed_dim: Number of channels of the first stage; it doubles from stage to stage.
            num_heads: Number of attention heads of each stage.
            attn_types: 'linear' or 'softmax', for all stages or for each.
            focusing_factor: Power of the focused function, linear stages only.
            kernel_size: Size of the attention's depthwise convolution, linear stages only.
            split_sizes: Stripe width, for all stages or for each; softmax stages only, and not the last one, whose
                attention covers the whole grid.
            mlp_ratio: Hidden over embedding width of the MLPs.
            qkv_bias: Add a learned bias to queries, keys and values.
            drop_rate: Dropout rate before the classifier.
            proj_drop_rate: Dropout rate after the projections of attention and MLP.
            attn_drop_rate: Dropout rate of the attention weights, softmax stages only.
            drop_path_rate: Stochastic depth rate of the last block; that of the first is 0.
            norm_layer: Norm of the blocks and of the last stage's output.
            dynamic_img_size: True, the only possibility: images of any size.
            output_stride: 32, or 8 or 16: then the last patch embeddings are dilated instead of striding further.

        Raises:
            ValueError: An argument is out of its range.
        """
        dd = {'device': device, 'dtype': dtype}
        check_arguments(
            depths,
            num_classes=num_classes,
            num_heads=num_heads,
            split_sizes=split_sizes,
            drop_rate=drop_rate,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
        )
        check_any_size(dynamic_img_size)
        num_stages = len(depths)
        attn_types = resolve_attn_types(attn_types, num_stages)
        num_heads = to_ntuple(num_stages)(num_heads)
        split_sizes = to_ntuple(num_stages)(split_sizes)
        if min(split_sizes) <= 0:
            raise ValueError(f'split_sizes must be positive, got {split_sizes}')
        dims = [embed_dim * 2**i for i in range(num_stages)]
        drop_path_rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        strides = stage_strides(num_stages, output_stride)
        stages = []
        dim = in_chans
        for i in range(num_stages):
            kernel_stride = (7, 4) if i == 0 else (3, 2)
            grid_size = tuple(-(-size // strides[i]) for size in to_2tuple(img_size))
            blocks = [
                FlattenCSwinBlock(
                    dims[i],
                    num_heads=num_heads[i],
                    attn_type=attn_types[i],
                    grid_size=grid_size,
                    split_size=split_sizes[i],
                    last_stage=i == num_stages - 1,
                    focusing_factor=focusing_factor,
                    kernel_size=kernel_size,
                    mlp_ratio=mlp_ratio,
                    qkv_bias=qkv_bias,
                    proj_drop=proj_drop_rate,
                    attn_drop=attn_drop_rate,
                    drop_path=drop_path,
                    norm_layer=norm_layer,
                    **dd,
                )
                for drop_path in drop_path_rates[i]
            ]
            stages.append(PyramidStage(ConvEmbed(dim, dims[i], *kernel_stride, **dd), blocks))
            dim = dims[i]
        super().__init__(
            stages,
            dims,
            strides,
            num_classes=num_classes,
            in_chans=in_chans,
            global_pool=global_pool,
            drop_rate=drop_rate,
            norm=norm_layer(dim, **dd),
            **dd,
        )


def checkpoint_filter_fn(checkpoint: dict, model: nn.Module) -> dict[str, torch.Tensor]:
    """Official FLatten-CSwin checkpoint, or the zoo's own, to a state dict that fits the model."""
    state_dict = {}
    for key, value in unwrap_state_dict(checkpoint).items():
        key = re.sub(r'^stage1_conv_embed\.0\.', 'stages.0.patch_embed.proj.', key)
        key = re.sub(r'^stage1_conv_embed\.2\.', 'stages.0.patch_embed.norm.', key)
        key = re.sub(r'^merge(\d)\.conv\.', r'stages.\1.patch_embed.proj.', key)
        key = re.sub(r'^merge(\d)\.norm\.', r'stages.\1.patch_embed.norm.', key)
        key = re.sub(r'^stage(\d)\.', lambda m: f'stages.{int(m[1]) - 1}.blocks.', key)
        state_dict[key] = value
    return fit_position_tensors(state_dict, model)


def official_state_dict(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The zoo's state dict under official names and shapes."""
    official = {}
    for key, value in flatten_position_tensors(state_dict).items():
        key = re.sub(r'^stages\.0\.patch_embed\.proj\.', 'stage1_conv_embed.0.', key)
        key = re.sub(r'^stages\.0\.patch_embed\.norm\.', 'stage1_conv_embed.2.', key)
        key = re.sub(r'^stages\.(\d)\.patch_embed\.proj\.', r'merge\1.conv.', key)
        key = re.sub(r'^stages\.(\d)\.patch_embed\.norm\.', r'merge\1.norm.', key)
        key = re.sub(r'^stages\.(\d)\.blocks\.', lambda m: f'stage{int(m[1]) + 1}.', key)
        official[key] = value
    return official


def _create_flatten_cswin(variant: str, pretrained: bool = False, **kwargs) -> FlattenCSwin:
    return create_pyramid(FlattenCSwin, variant, pretrained, checkpoint_filter_fn, **kwargs)


def _cfg(**kwargs) -> dict:
    return flatten_cfg(first_conv='stages.0.patch_embed.proj', classifier='head', **kwargs)


default_cfgs = generate_default_cfgs(
    {
        'flatten_cswin_t.leaplab_in1k': _cfg(url=official_url('flatten_cswin_t')),
        'flatten_cswin_s.untrained': _cfg(),
        'flatten_cswin_b.untrained': _cfg(),
        'flatten_cswin_b_384.untrained': _cfg(input_size=(3, 384, 384), pool_size=(12, 12), crop_pct=384 / 438),
    }
)


@register_model
def flatten_cswin_t(pretrained=False, **kwargs) -> FlattenCSwin:
    """FLatten-CSwin-T"""
    model_args = dict(embed_dim=64, depths=(2, 4, 18, 1), num_heads=(2, 4, 8, 16))
    return _create_flatten_cswin('flatten_cswin_t', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_cswin_s(pretrained=False, **kwargs) -> FlattenCSwin:
    """FLatten-CSwin-S"""
    model_args = dict(embed_dim=64, depths=(2, 4, 32, 2), num_heads=(2, 4, 8, 16))
    return _create_flatten_cswin('flatten_cswin_s', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_cswin_b(pretrained=False, **kwargs) -> FlattenCSwin:
    """FLatten-CSwin-B"""
    model_args = dict(embed_dim=96, depths=(3, 6, 29, 2), num_heads=(4, 8, 16, 32))
    return _create_flatten_cswin('flatten_cswin_b', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_cswin_b_384(pretrained=False, **kwargs) -> FlattenCSwin:
    """FLatten-CSwin-B, native at 384x384"""
    model_args = dict(
        img_size=384, embed_dim=96, depths=(3, 6, 29, 2), num_heads=(4, 8, 16, 32), split_sizes=(1, 2, 12, 12)
    )
    return _create_flatten_cswin('flatten_cswin_b_384', pretrained=pretrained, **dict(model_args, **kwargs))
