"""FLatten-PVTv2: Pyramid Vision Transformer v2 with focused linear attention.

Papers:
    * `FLatten Transformer: Vision Transformer using Focused Linear Attention` (ICCV 2023)
        - https://arxiv.org/abs/2308.00442
    * `PVT v2: Improved Baselines with Pyramid Vision Transformer` - https://arxiv.org/abs/2106.13797
"""

import re
from collections.abc import Sequence

import torch
from timm.layers import get_device_dtype, to_2tuple
from timm.models import generate_default_cfgs, pvt_v2, register_model
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from torch import nn

from ..layers import FocusedLinearAttention
from ._arguments import CheckedClassifier, check_any_size, check_arguments
from ._dilation import dilate, stage_strides
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
from ._released import official_url

__all__ = ['FlattenPVTv2']


class FlattenPVTv2Attention(FocusedLinearAttention):
    """Focused linear attention as PVTv2's blocks call it: (B, H · W, dim) tokens and their grid, to tokens."""

    def __init__(self, attn: pvt_v2.Attention, grid_size: tuple[int, int], **kwargs):
        """
        Args:
            attn: The attention to take over: its projections become those of this one.
            grid_size: Native grid of the stage.
            **kwargs: focusing_factor and kernel_size.
        """
        dd = get_device_dtype(attn)
        super().__init__(
            attn.dim,
            num_heads=attn.num_heads,
            grid_size=grid_size,
            qkv_bias=attn.q.bias is not None,
            dynamic_grid_size=True,
            **kwargs,
            **dd,
        )
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([attn.q.weight, attn.kv.weight]))
            if self.qkv.bias is not None:
                self.qkv.bias.copy_(torch.cat([attn.q.bias, attn.kv.bias]))
        self.qkv.requires_grad_(attn.q.weight.requires_grad)
        self.proj = attn.proj
        self.proj_drop = attn.proj_drop

    def forward(self, x: torch.Tensor, feat_size: list[int]) -> torch.Tensor:  # type: ignore[override]
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, feat_size[0], feat_size[1], -1).chunk(3, dim=-1)
        x = self.attend(q, k, v).reshape(B, N, -1)
        return self.proj_drop(self.proj(x))


def flatten_stages(
    model: PyramidVisionTransformerV2, attn_types: Sequence[str], img_size: int | tuple[int, int], **kwargs
) -> None:
    """Give the linear stages of a PVTv2 focused linear attention, in place.

    Args:
        model: The network.
        attn_types: 'linear' or 'softmax' for each stage.
        img_size: Image size whose stage grids the positional encodings are made for.
        **kwargs: focusing_factor and kernel_size.

    Raises:
        ValueError: A linear stage has other attention than PVTv2's; the model is as it was.
    """
    linear_stages = [i for i, attn_type in enumerate(attn_types) if attn_type == 'linear']
    for i in linear_stages:
        for block in model.stages[i].blocks:
            if type(block.attn) is not pvt_v2.Attention:
                raise ValueError(f"cannot replace a {type(block.attn).__name__}: only PVTv2's Attention")
    for i in linear_stages:
        grid_size = tuple(-(-size // model.feature_info[i]['reduction']) for size in to_2tuple(img_size))
        for block in model.stages[i].blocks:
            block.attn = FlattenPVTv2Attention(block.attn, grid_size, **kwargs)


class FlattenPVTv2(CheckedClassifier, PyramidVisionTransformerV2):
    """Pyramid Vision Transformer v2 whose attention is focused linear attention over each stage's whole grid.

    Takes images of any size. As in the official training, weight decay spares biases and norms alone, not `scale` and
    `positional_encoding`.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        *,
        attn_types: str | Sequence[str] = 'linear',
        focusing_factor: float = 3,
        kernel_size: int = 5,
        dynamic_img_size: bool = True,
        output_stride: int = 32,
        **kwargs,
    ):
        """
        Args:
            img_size: Image size (H, W) that the position tensors are made for; they are resampled for others.
            attn_types: 'linear' or 'softmax', for all stages or for each.
            focusing_factor: Power of the focused function, linear stages only.
            kernel_size: Size of the attention's depthwise convolution, linear stages only.
            dynamic_img_size: True, the only possibility: images of any size.
            output_stride: 32, or 8 or 16: then the last patch embeddings are dilated instead of striding further.
            **kwargs: Arguments of timm's PyramidVisionTransformerV2. `sr_ratios`, `linear` and `attn_drop_rate`
                concern the softmax stages alone.
        """
        check_any_size(dynamic_img_size)
        check_arguments(**{'depths': (3, 4, 6, 3), **kwargs})
        super().__init__(**kwargs)
        strides = stage_strides(len(self.depths), output_stride)
        dilate([self.patch_embed, *(stage.downsample for stage in self.stages[1:])], strides)
        for info, stride in zip(self.feature_info, strides, strict=True):
            info['reduction'] = stride
        attn_types = resolve_attn_types(attn_types, len(self.depths))
        flatten_stages(self, attn_types, img_size, focusing_factor=focusing_factor, kernel_size=kernel_size)
        for module in self.modules():
            if isinstance(module, FlattenPVTv2Attention):  # came after timm had initialised every convolution
                self._init_weights(module.dwc)


def checkpoint_filter_fn(checkpoint: dict, model: nn.Module) -> dict[str, torch.Tensor]:
    """Official FLatten-PVTv2 checkpoint, or the zoo's own, to a state dict that fits the model."""
    state_dict = pvt_v2.checkpoint_filter_fn(unwrap_state_dict(checkpoint), model)
    return fit_position_tensors(fuse_qkv(state_dict), model)


def official_state_dict(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The zoo's state dict under official names and shapes."""
    official = {}
    for key, value in flatten_position_tensors(split_qkv(state_dict)).items():
        key = re.sub(r'^patch_embed\.', 'patch_embed1.', key)
        key = re.sub(r'^stages\.(\d)\.downsample\.', lambda m: f'patch_embed{int(m[1]) + 1}.', key)
        key = re.sub(r'^stages\.(\d)\.(block|norm)s?\.', lambda m: f'{m[2]}{int(m[1]) + 1}.', key)
        official[key.replace('.dwconv.', '.dwconv.dwconv.')] = value
    return official


def _create_flatten_pvt_v2(variant: str, pretrained: bool = False, **kwargs) -> FlattenPVTv2:
    return create_pyramid(FlattenPVTv2, variant, pretrained, checkpoint_filter_fn, **kwargs)


def _cfg(**kwargs) -> dict:
    return flatten_cfg(first_conv='patch_embed.proj', classifier='head', **kwargs)


default_cfgs = generate_default_cfgs(
    {
        'flatten_pvt_v2_b0.leaplab_in1k': _cfg(url=official_url('flatten_pvt_v2_b0')),
        'flatten_pvt_v2_b1.untrained': _cfg(),
        'flatten_pvt_v2_b2.untrained': _cfg(),
        'flatten_pvt_v2_b3.untrained': _cfg(),
        'flatten_pvt_v2_b4.untrained': _cfg(),
        'flatten_pvt_v2_b5.untrained': _cfg(),
    }
)


@register_model
def flatten_pvt_v2_b0(pretrained=False, **kwargs) -> FlattenPVTv2:
    """FLatten-PVTv2-B0"""
    model_args = dict(depths=(2, 2, 2, 2), embed_dims=(32, 64, 160, 256), num_heads=(1, 2, 5, 8))
    return _create_flatten_pvt_v2('flatten_pvt_v2_b0', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_pvt_v2_b1(pretrained=False, **kwargs) -> FlattenPVTv2:
    """FLatten-PVTv2-B1"""
    model_args = dict(depths=(2, 2, 2, 2), embed_dims=(64, 128, 320, 512), num_heads=(1, 2, 5, 8))
    return _create_flatten_pvt_v2('flatten_pvt_v2_b1', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_pvt_v2_b2(pretrained=False, **kwargs) -> FlattenPVTv2:
    """FLatten-PVTv2-B2"""
    model_args = dict(depths=(3, 4, 6, 3), embed_dims=(64, 128, 320, 512), num_heads=(1, 2, 5, 8))
    return _create_flatten_pvt_v2('flatten_pvt_v2_b2', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_pvt_v2_b3(pretrained=False, **kwargs) -> FlattenPVTv2:
    """FLatten-PVTv2-B3"""
    model_args = dict(depths=(3, 4, 18, 3), embed_dims=(64, 128, 320, 512), num_heads=(1, 2, 5, 8))
    return _create_flatten_pvt_v2('flatten_pvt_v2_b3', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_pvt_v2_b4(pretrained=False, **kwargs) -> FlattenPVTv2:
    """FLatten-PVTv2-B4"""
    model_args = dict(depths=(3, 8, 27, 3), embed_dims=(64, 128, 320, 512), num_heads=(1, 2, 5, 8))
    return _create_flatten_pvt_v2('flatten_pvt_v2_b4', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_pvt_v2_b5(pretrained=False, **kwargs) -> FlattenPVTv2:
    """FLatten-PVTv2-B5 (no official configuration)"""
    model_args = dict(
        depths=(3, 6, 40, 3), embed_dims=(64, 128, 320, 512), num_heads=(1, 2, 5, 8), mlp_ratios=(4, 4, 4, 4)
    )
    return _create_flatten_pvt_v2('flatten_pvt_v2_b5', pretrained=pretrained, **dict(model_args, **kwargs))
