"""FLatten-PVT: Pyramid Vision Transformer with focused linear attention.

Papers:
    * `FLatten Transformer: Vision Transformer using Focused Linear Attention` (ICCV 2023)
        - https://arxiv.org/abs/2308.00442
    * `Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions` (ICCV 2021)
        - https://arxiv.org/abs/2102.12122
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import DropPath, LayerNorm, Mlp, calculate_drop_path_rates, to_2tuple, to_ntuple
from timm.models import generate_default_cfgs, register_model
from timm.models.pvt_v2 import Attention
from torch import nn

from ..layers import FocusedLinearAttention
from ._arguments import check_any_size, check_arguments
from ._dilation import stage_strides
from ._flatten import (
    create_pyramid,
    fit_position_tensors,
    flatten_cfg,
    flatten_position_tensors,
    fuse_qkv,
    resolve_attn_types,
    split_qkv,
    unwrap_state_dict,
)
from ._patch_embed import PatchEmbed
from ._pyramid import PyramidStage, PyramidTransformer
from ._released import official_url

__all__ = ['FlattenPVT']


class FlattenPVTBlock(nn.Module):
    """Attention and MLP, each with pre-norm and residual, over a (B, H, W, dim) map."""

    linear: torch.jit.Final[bool]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: tuple[int, int],
        attn_type: str = 'linear',
        focusing_factor: float = 3,
        kernel_size: int = 5,
        sr_ratio: int = 1,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        norm_layer: type[nn.Module] = LayerNorm,
        device=None,
        dtype=None,
    ):
        """
        Args:
            attn_type: 'linear' for focused linear attention, 'softmax' for PVT's spatial-reduction attention.
            focusing_factor, kernel_size, grid_size: Of linear attention alone.
            sr_ratio, attn_drop: Of softmax attention alone.
        """
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.linear = attn_type == 'linear'
        self.norm1 = norm_layer(dim, **dd)
        if self.linear:
            self.attn: nn.Module = FocusedLinearAttention(
                dim,
                num_heads=num_heads,
                grid_size=grid_size,
                focusing_factor=focusing_factor,
                kernel_size=kernel_size,
                qkv_bias=qkv_bias,
                proj_drop=proj_drop,
                dynamic_grid_size=True,
                **dd,
            )
        else:
            self.attn = Attention(
                dim,
                num_heads=num_heads,
                sr_ratio=sr_ratio,
                qkv_bias=qkv_bias,
                attn_drop=attn_drop,
                proj_drop=proj_drop,
                **dd,
            )
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

        self.norm2 = norm_layer(dim, **dd)
        self.mlp = Mlp(dim, hidden_features=int(dim * mlp_ratio), drop=proj_drop, **dd)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def _attn(self, x: torch.Tensor) -> torch.Tensor:
        if self.linear:
            return self.attn(x)
        B, H, W, C = x.shape
        return self.attn(x.reshape(B, H * W, C), [H, W]).reshape(B, H, W, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path1(self._attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class FlattenPVT(PyramidTransformer):
    """Pyramid Vision Transformer whose attention is focused linear attention over each stage's whole grid.

    Takes images of any size. As in PVT no norm follows the last stage.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = 'avg',
        depths: Sequence[int] = (2, 2, 2, 2),
        embed_dims: Sequence[int] = (64, 128, 320, 512),
        num_heads: Sequence[int] = (1, 2, 5, 8),
        attn_types: str | Sequence[str] = 'linear',
        focusing_factor: float = 3,
        kernel_size: int = 5,
        sr_ratios: Sequence[int] = (8, 4, 2, 1),
        mlp_ratios: Sequence[float] = (8.0, 8.0, 4.0, 4.0),
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_layer: type[nn.Module] = LayerNorm,
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
            embed_dims: Number of channels of each stage.
            num_heads: Number of attention heads of each stage.
            attn_types: 'linear' or 'softmax', for all stages or for each.
            focusing_factor: Power of the focused function, linear stages only.
            kernel_size: Size of the attention's depthwise convolution, linear stages only.
            sr_ratios: Reduction of keys and values of each stage, softmax stages only.
            mlp_ratios: Hidden over embedding width of the MLPs of each stage.
            qkv_bias: Add a learned bias to queries, keys and values.
            drop_rate: Dropout rate before the classifier.
            proj_drop_rate: Dropout rate after the projections of attention and MLP.
            attn_drop_rate: Dropout rate of the attention weights, softmax stages only.
            drop_path_rate: Stochastic depth rate of the last block; that of the first is 0.
            norm_layer: Norm of the blocks.
            dynamic_img_size: True, the only possibility: images of any size.
            output_stride: 32, or 8 or 16: then the last patch embeddings are dilated instead of striding further.

        Raises:
            ValueError: An argument is out of its range.
        """
        dd = {'device': device, 'dtype': dtype}
        check_arguments(
            depths,
            num_classes=num_classes,
            embed_dims=embed_dims,
            num_heads=num_heads,
            sr_ratios=sr_ratios,
            mlp_ratios=mlp_ratios,
            drop_rate=drop_rate,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            drop_path_rate=drop_path_rate,
        )
        check_any_size(dynamic_img_size)
        num_stages = len(depths)
        attn_types = resolve_attn_types(attn_types, num_stages)
        num_heads = to_ntuple(num_stages)(num_heads)
        sr_ratios = to_ntuple(num_stages)(sr_ratios)
        mlp_ratios = to_ntuple(num_stages)(mlp_ratios)
        drop_path_rates: Any = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        strides = stage_strides(num_stages, output_stride)
        stages = []
        dim = in_chans
        for i in range(num_stages):
            patch_size = 4 if i == 0 else 2
            grid_size = tuple(-(-size // strides[i]) for size in to_2tuple(img_size))
            patch_embed = PatchEmbed(
                img_size=None,
                patch_size=patch_size,
                in_chans=dim,
                embed_dim=embed_dims[i],
                norm_layer=nn.LayerNorm,
                output_fmt='NHWC',
                strict_img_size=False,
                **dd,
            )
            blocks = [
                FlattenPVTBlock(
                    embed_dims[i],
                    num_heads=num_heads[i],
                    grid_size=grid_size,
                    attn_type=attn_types[i],
                    focusing_factor=focusing_factor,
                    kernel_size=kernel_size,
                    sr_ratio=sr_ratios[i],
                    mlp_ratio=mlp_ratios[i],
                    qkv_bias=qkv_bias,
                    proj_drop=proj_drop_rate,
                    attn_drop=attn_drop_rate,
                    drop_path=drop_path,
                    norm_layer=norm_layer,
                    **dd,
                )
                for drop_path in drop_path_rates[i]
            ]
            pos_embed = nn.Parameter(torch.empty(1, *grid_size, embed_dims[i], **dd))
            stages.append(PyramidStage(patch_embed, blocks, pos_embed))
            dim = embed_dims[i]
        super().__init__(
            stages,
            embed_dims,
            strides,
            num_classes=num_classes,
            in_chans=in_chans,
            global_pool=global_pool,
            drop_rate=drop_rate,
            **dd,
        )


def checkpoint_filter_fn(checkpoint: dict, model: nn.Module) -> dict[str, torch.Tensor]:
    """Official FLatten-PVT checkpoint, or the zoo's own, to a state dict that fits the model."""
    state_dict = unwrap_state_dict(checkpoint)
    if 'patch_embed1.proj.weight' in state_dict:
        converted = {}
        for key, value in state_dict.items():
            if key.startswith('norm.'):  # the official network owns this norm, but never calls it
                continue
            key = re.sub(r'^(patch_embed|pos_embed|block)(\d)', lambda m: f'stages.{int(m[2]) - 1}.{m[1]}', key)
            converted[re.sub(r'^(stages\.\d\.block)\.', r'\1s.', key)] = value
        state_dict = fuse_qkv(converted)
    return fit_position_tensors(state_dict, model)


def official_state_dict(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The zoo's state dict under official names and shapes."""
    official = {}
    for key, value in flatten_position_tensors(split_qkv(state_dict)).items():
        key = re.sub(r'^stages\.(\d)\.(patch_embed|pos_embed|block)s?', lambda m: f'{m[2]}{int(m[1]) + 1}', key)
        official[key] = value
    return official


def official_extras(model: FlattenPVT) -> dict[str, torch.Tensor]:
    """What the official network owns besides: a norm that it never calls."""
    norm = nn.LayerNorm(model.num_features)
    return {'norm.weight': norm.weight.detach(), 'norm.bias': norm.bias.detach()}


def _create_flatten_pvt(variant: str, pretrained: bool = False, **kwargs) -> FlattenPVT:
    return create_pyramid(FlattenPVT, variant, pretrained, checkpoint_filter_fn, **kwargs)


def _cfg(**kwargs) -> dict:
    return flatten_cfg(first_conv='stages.0.patch_embed.proj', classifier='head', **kwargs)


default_cfgs = generate_default_cfgs(
    {
        'flatten_pvt_t.leaplab_in1k': _cfg(url=official_url('flatten_pvt_t')),
        'flatten_pvt_s.untrained': _cfg(),
        'flatten_pvt_m.untrained': _cfg(),
        'flatten_pvt_b.untrained': _cfg(),
    }
)


@register_model
def flatten_pvt_t(pretrained=False, **kwargs) -> FlattenPVT:
    """FLatten-PVT-T"""
    model_args = dict(depths=(2, 2, 2, 2))
    return _create_flatten_pvt('flatten_pvt_t', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_pvt_s(pretrained=False, **kwargs) -> FlattenPVT:
    """FLatten-PVT-S"""
    model_args = dict(depths=(3, 4, 6, 3))
    return _create_flatten_pvt('flatten_pvt_s', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_pvt_m(pretrained=False, **kwargs) -> FlattenPVT:
    """FLatten-PVT-M"""
    model_args = dict(depths=(3, 4, 18, 3))
    return _create_flatten_pvt('flatten_pvt_m', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_pvt_b(pretrained=False, **kwargs) -> FlattenPVT:
    """FLatten-PVT-B"""
    model_args = dict(depths=(3, 8, 27, 3))
    return _create_flatten_pvt('flatten_pvt_b', pretrained=pretrained, **dict(model_args, **kwargs))
