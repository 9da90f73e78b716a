"""Linear attention for timm transformers that already exist."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import get_device_dtype
from timm.models import FeatureInfo
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import nn

from .._timm import update_model_args
from ..layers import EfficientAttention
from . import flatten_deit, flatten_pvt_v2, flatten_swin
from .flatten_deit import check_plain_attention

__all__ = ['LINEAR_ATTENTIONS', 'LINEARIZED', 'replace_attention']

LINEAR_ATTENTIONS = ('focused_linear', 'efficient')
LINEARIZED = 'linearized'  # timm's name for networks with other attention, see linearized.py


class EfficientTokenAttention(EfficientAttention):
    """Efficient attention in place of a ViT's attention, over its (B, N, C) tokens."""

    def __init__(self, attn: Attention):
        super().__init__(
            attn.qkv.in_features,
            key_dim=attn.attn_dim,
            value_dim=attn.attn_dim,
            num_heads=attn.num_heads,
            residual=False,
            spatial_dims=1,
            **get_device_dtype(attn),
        )
        q, k, v = (linear_part(attn.qkv, part) for part in range(3))
        convs = {self.queries: q, self.keys: k, self.values: v, self.reprojection: linear_part(attn.proj, 0, 1)}
        for conv, (weight, bias, trainable) in convs.items():
            with torch.no_grad():
                conv.weight.copy_(weight.unsqueeze(-1))
                conv.bias.copy_(bias)
            conv.requires_grad_(trainable)
        self.proj_drop = attn.proj_drop

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError('efficient attention has no attention matrix: attn_mask and is_causal must be unset')
        q, k, v = self.project(x.transpose(1, 2))
        y = self.attend(q, k, v).reshape(x.shape[0], -1, x.shape[1])
        return self.proj_drop(self.reprojection(y).transpose(1, 2))


def linear_part(linear: nn.Linear, part: int, parts: int = 3) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Weight, bias (zero if there is none) and whether both are trainable, of one of the fused parts of a linear."""
    weight = linear.weight.chunk(parts)[part]
    bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.chunk(parts)[part]
    return weight, bias, linear.weight.requires_grad


def replace_by_efficient_attention(model: VisionTransformer, where: Sequence[int]) -> None:
    """Give the blocks of a ViT at the indices `where` efficient attention, in place."""
    for i in where:
        if not hasattr(model.blocks[i], 'attn'):
            raise ValueError(f'cannot replace the attention of a {type(model.blocks[i]).__name__}, which has no attn')
        check_plain_attention(model.blocks[i].attn)
    for i in where:
        model.blocks[i].attn = EfficientTokenAttention(model.blocks[i].attn)


def replace_attention(
    model: nn.Module,
    attention: str = 'focused_linear',
    where: Sequence[int] | None = None,
    img_size: int | tuple[int, int] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Give blocks or stages of a timm transformer linear attention, in place, keeping their trained projections.

    The weights of queries, keys, values and output stay; what the new attention has besides starts fresh, so the model
    wants fine-tuning. Everything of timm's API works as before, but that a ViT with focused linear attention keeps its
    tokens as maps: its `forward_features` gives (B, H, W, C).

    Args:
        model: A plain `VisionTransformer` (ViT, DeiT), `SwinTransformer` or `PyramidVisionTransformerV2`; for
            'focused_linear' the ViT must have no prefix tokens.
        attention: 'focused_linear' (FLatten Transformer), or for ViTs 'efficient' (efficient attention, softmax
            normalization, as many heads and channels as before).
        where: Indices of the blocks of a ViT, or of the stages of the others; None for all.
        img_size: Image size (H, W) whose grids a PVTv2's positional encodings are made for; the size of its pretrained
            configuration if None. The others know theirs.
        **kwargs: focusing_factor and kernel_size of focused linear attention.

    Returns:
        The model.

    Raises:
        ValueError: The model cannot be converted, and is as it was; the message says why.
    """
    if attention not in LINEAR_ATTENTIONS:
        raise ValueError(f"attention must be 'focused_linear' or 'efficient', got '{attention}'")
    if getattr(model, 'pretrained_cfg', {}).get('architecture') == LINEARIZED:
        raise ValueError('cannot convert a network that is converted already; name all its parts at once')
    before = set(model.modules())
    if isinstance(getattr(model, 'feature_info', None), FeatureInfo):
        raise ValueError(
            f'cannot convert a {type(model).__name__}, what features_only=True makes of a network; convert the '
            f'network, then wrap it: timm.models._features.FeatureGetterNet(network, out_indices=...)'
        )
    if attention == 'efficient':
        if not isinstance(model, VisionTransformer):
            raise ValueError(f"attention='efficient' is for a VisionTransformer, got a {type(model).__name__}")
        if img_size or kwargs:
            further = ', '.join([*['img_size'][: bool(img_size)], *kwargs])
            raise ValueError(f"attention='efficient' takes no further arguments, got {further}")
        replace_by_efficient_attention(model, _chosen(where, len(model.blocks)))
    elif img_size and not isinstance(model, PyramidVisionTransformerV2):
        raise ValueError(f'img_size is for a PVTv2; a {type(model).__name__} knows its own')
    elif type(model) in (VisionTransformer, flatten_deit.FlattenViT):
        flatten_deit.flatten_blocks(model, _attn_types(where, len(model.blocks)), **kwargs)
        model.__class__ = flatten_deit.FlattenViT  # in place: its methods know of tokens as maps
    elif isinstance(model, SwinTransformer):
        flatten_swin.flatten_stages(model, _attn_types(where, len(model.layers)), **kwargs)
    elif isinstance(model, PyramidVisionTransformerV2):
        img_size = img_size or getattr(model, 'pretrained_cfg', {}).get('input_size', (3, 224, 224))[1:]
        flatten_pvt_v2.flatten_stages(model, _attn_types(where, len(model.stages)), img_size, **kwargs)
    else:
        raise ValueError(
            f'cannot convert a {type(model).__name__}; what can be converted is a timm VisionTransformer without '
            f'prefix tokens, a SwinTransformer or a PyramidVisionTransformerV2'
        )
    for module in set(model.modules()) - before:  # the others keep their mode, such as frozen parts in eval mode
        module.training = model.training
    if hasattr(model, 'pretrained_cfg'):  # it was made by its name
        kwargs = {**({'img_size': img_size} if img_size else {}), **kwargs}
        _record(
            model,
            attention=attention,
            where=None if where is None else [int(i) for i in where],
            attention_kwargs=kwargs,
        )
    return model


def _chosen(where: Sequence[int] | None, number: int) -> Sequence[int]:
    where = list(range(number) if where is None else where)
    if not set(where) <= set(range(number)):
        raise ValueError(f'where must be indices from 0 to {number - 1}, got {where}')
    return where


def _attn_types(where: Sequence[int] | None, number: int) -> list[str]:
    where = _chosen(where, number)
    return ['linear' if i in where else 'softmax' for i in range(number)]


def _record(model: nn.Module, **arguments: Any) -> None:
    """Have timm know the network as a 'linearized' one with these arguments; None and {} are left out."""
    base = model.pretrained_cfg['architecture']
    update_model_args(model, base=base, **{key: value for key, value in arguments.items() if value not in (None, {})})
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, 'architecture': LINEARIZED}
