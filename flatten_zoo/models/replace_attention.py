"""Linear attention for timm transformers that already exist."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from timm.layers import Attention, AttentionRope, get_device_dtype
from timm.models import FeatureInfo, beit, eva
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, VisionTransformer
from torch import nn

from .._timm import update_model_args
from ..layers import FocusedLinearCore
from . import _flatten_swin_v2, flatten_pvt_v2, flatten_swin
from ._token_attention import EfficientTokenAttention, FocusedTokenAttention, LinearParallelScalingBlock
from ._token_grids import NETWORKS, GridNetwork, tell_grids
from .flatten_deit import FlattenViT

__all__ = ['LINEAR_ATTENTIONS', 'LINEARIZED', 'replace_attention']

LINEAR_ATTENTIONS = ('focused_linear', 'efficient')
LINEARIZED = 'linearized'  # timm's name for networks with other attention, see linearized.py

_logger = logging.getLogger(__name__)

SOFTMAX_ATTENTIONS = (Attention, AttentionRope, eva.EvaAttention, beit.Attention)  # of blocks of (B, N, C) tokens

REFUSED = {  # timm's class: what people call it, and why it cannot be converted
    'Xcit': ('XCiT', 'its attention is between channels, and linear in the number of tokens already'),
    'MaxxVit': ('MaxViT', 'between its convolutions it attends in windows and sparse grids, in layouts of its own'),
    'Cait': ('CaiT', 'its talking heads mix the attention matrices of the heads, and linear attention has none'),
    'Levit': ('LeViT', 'a bias in the attention matrix is all that it knows of positions'),
    'ConVit': ('ConViT', 'it mixes the attention matrix with one of positions, and linear attention has none'),
    'MultiScaleVit': ('MViTv2', 'its queries, keys and values are on grids of their own'),
    'CoaT': ('CoaT', 'its attention is linear in the number of tokens already'),
    'EfficientVit': ('EfficientViT', 'its attention is linear in the number of tokens already'),
    'NaFlexVit': ('NaFlexViT', 'every image of a batch has a grid of its own, and masked padding'),
    'VisionTransformerSAM': ("SAM's ViT", 'its queries meet relative positions in the attention matrix'),
}


def log_dropped(what: str) -> None:
    _logger.warning('Linear attention has no place for %s: dropped.', what)


def attention_owners(block: nn.Module) -> list[nn.Module]:
    """The modules of a block whose `attn` is to be replaced.

    Raises:
        ValueError: There is none, or it is no attention that can be replaced.
    """
    owners = list(block.attns) if isinstance(block, ParallelThingsBlock) else [block]
    for owner in owners:
        if not hasattr(owner, 'attn'):
            raise ValueError(f'cannot replace the attention of a {type(owner).__name__}, which is no module of its own')
        if type(owner.attn) not in SOFTMAX_ATTENTIONS:
            raise ValueError(
                f'cannot replace a {type(owner.attn).__name__}: only softmax attention between tokens, of the types '
                f'{", ".join(dict.fromkeys(kind.__name__ for kind in SOFTMAX_ATTENTIONS))}'
            )
    return owners


def replace_in_blocks(model: nn.Module, where: Sequence[int], make: Callable[[nn.Module], nn.Module]) -> None:
    """Replace the attention of a ViT's blocks, in place.

    Args:
        model: The network.
        where: Indices of its blocks.
        make: The new attention, of the old one.
    """
    owners = [owner for i in where for owner in attention_owners(model.blocks[i])]
    made = [make(owner.attn) for owner in owners]
    if isinstance(model, Beit) and any(
        bias is not None for bias in (model.rel_pos_bias, *(o.attn.relative_position_bias_table for o in owners))
    ):
        log_dropped('relative position bias')
    for owner, attn in zip(owners, made, strict=True):
        owner.attn = attn
    if isinstance(model, Beit) and not any(isinstance(block.attn, beit.Attention) for block in model.blocks):
        model.rel_pos_bias = None  # type: ignore[assignment]  # as in a BEiT that has none


def replace_by_efficient_attention(model: nn.Module, where: Sequence[int]) -> None:
    """Give the blocks of a ViT at the indices `where` efficient attention, in place."""
    replace_in_blocks(model, where, lambda attn: EfficientTokenAttention(attn, model.num_prefix_tokens))


def replace_by_focused_linear_attention(model: nn.Module, where: Sequence[int], **kwargs: Any) -> None:
    """Give the blocks of a ViT at the indices `where` focused linear attention, in place."""
    if not isinstance(getattr(model, 'patch_drop', None), nn.Identity | None):
        raise ValueError('focused linear attention needs all tokens of the grid; build the ViT with patch_drop_rate=0')
    if type(model) not in NETWORKS and not isinstance(model, GridNetwork | Beit):
        raise ValueError(f"cannot convert a {type(model).__name__}: only timm's own ViTs tell attention their grid")
    dynamic, rotary = getattr(model, 'dynamic_img_size', False), getattr(model, 'rope', None) is not None
    options = dict(grid_size=model.patch_embed.grid_size, dynamic_grid_size=dynamic, **kwargs)
    prefix = {'num_prefix_tokens': model.num_prefix_tokens}
    cores = {
        i: FocusedLinearCore(block.num_heads, block.head_dim, **options, **get_device_dtype(block))
        for i, block in enumerate(model.blocks)
        if i in where and type(block) is ParallelScalingBlock
    }
    replace_in_blocks(
        model,
        [i for i in where if i not in cores],
        lambda attn: FocusedTokenAttention(attn, rotary=rotary, **options, **prefix),
    )
    for i, core in cores.items():
        model.blocks[i] = LinearParallelScalingBlock(model.blocks[i], core, **prefix)
    tell_grids(model)


def replace_attention(
    model: nn.Module,
    attention: str = 'focused_linear',
    where: Sequence[int] | None = None,
    img_size: int | tuple[int, int] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Give blocks or stages of a timm transformer linear attention, in place, keeping their trained projections.

    The weights of queries, keys, values and output stay, and so do norms of queries and keys, rotary embedding and
    gates; what the new attention has besides starts fresh, so the model wants fine-tuning. Everything of timm's API
    works as before: blocks keep their (B, N, C) tokens. Class, register and distillation tokens attend and are attended
    to like the others; positional encoding and depthwise convolution are of the patches alone.

    Converted are `VisionTransformer` (ViT, DeiT with or without distillation, DeiT III, DINO, DINOv2, CLIP, SigLIP, …),
    `Eva` (EVA, EVA-02, DINOv3, Perception Encoder, …), `Beit`, and for 'focused_linear' also `SwinTransformer`,
    `SwinTransformerV2` and `PyramidVisionTransformerV2`. What depends on an attention matrix has no place in linear
    attention, and is dropped: its dropout, the relative position bias of Swin and BEiT, and the temperature of Swin V2,
    whose queries and keys keep their norm of 1; biases and temperatures that were trained are mentioned in the log.
    Masks (`attn_mask`, `is_causal`) are refused in the forward pass, and TorchScript cannot take a ViT with focused
    linear attention and `dynamic_img_size`.

    timm then knows the network as a 'linearized' one, with what was done among its arguments
    (`timm.models.get_model_args`), so that whatever is saved of it rebuilds it, where `flatten_zoo` is imported.

    Refused, with the reason: XCiT, MaxViT, CaiT, LeViT, ConViT, MViTv2, CoaT, EfficientViT, NaFlexViT, SAM's ViT; the
    blocks of a ViT that take the difference of two attentions; ViTs that drop patches; and whatever is not named here.

    Args:
        model: The network.
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
    for kind in type(model).__mro__:
        if kind.__name__ in REFUSED:
            name, reason = REFUSED[kind.__name__]
            raise ValueError(f'cannot convert a {type(model).__name__} ({name}): {reason}')
    is_vit = isinstance(model, VisionTransformer | Eva | Beit)
    if attention == 'efficient':
        if not is_vit:
            raise ValueError(
                f"attention='efficient' is for a VisionTransformer, Eva or Beit, got a {type(model).__name__}"
            )
        if img_size or kwargs:
            further = ', '.join([*['img_size'][: bool(img_size)], *kwargs])
            raise ValueError(f"attention='efficient' takes no further arguments, got {further}")
        replace_by_efficient_attention(model, _chosen(where, len(model.blocks)))
    elif img_size and not isinstance(model, PyramidVisionTransformerV2):
        raise ValueError(f'img_size is for a PVTv2; a {type(model).__name__} knows its own')
    elif isinstance(model, FlattenViT):
        raise ValueError('cannot convert a FlattenViT, whose attn_types say which blocks have focused linear attention')
    elif is_vit:
        replace_by_focused_linear_attention(model, _chosen(where, len(model.blocks)), **kwargs)
    elif isinstance(model, SwinTransformer):
        flatten_swin.flatten_stages(model, _attn_types(where, len(model.layers)), **kwargs)
        log_dropped('relative position bias')
    elif isinstance(model, SwinTransformerV2):
        _flatten_swin_v2.flatten_stages(model, _attn_types(where, len(model.layers)), **kwargs)
        log_dropped('relative position bias and temperature')
    elif isinstance(model, PyramidVisionTransformerV2):
        img_size = img_size or getattr(model, 'pretrained_cfg', {}).get('input_size', (3, 224, 224))[1:]
        flatten_pvt_v2.flatten_stages(model, _attn_types(where, len(model.stages)), img_size, **kwargs)
    else:
        raise ValueError(
            f'cannot convert a {type(model).__name__}; what can be converted is a timm VisionTransformer, Eva, Beit, '
            f'SwinTransformer, SwinTransformerV2 or PyramidVisionTransformerV2'
        )
    for module in set(model.modules()) - before:  # the others keep their mode, such as frozen parts in eval mode
        module.training = model.training
    if getattr(model, 'pretrained_cfg', {}).get('architecture'):  # it was made by its name
        kwargs = {**({'img_size': img_size} if img_size else {}), **kwargs}
        _record(
            model,
            attention=attention,
            where=None if where is None else [int(i) for i in where],
            attention_kwargs=kwargs,
        )
    return model


def _chosen(where: Sequence[int] | None, number: int) -> list[int]:
    where = list(range(number) if where is None else where)
    if not set(where) <= set(range(number)):
        raise ValueError(f'where must be indices from 0 to {number - 1}, got {where}')
    return sorted(set(where))


def _attn_types(where: Sequence[int] | None, number: int) -> list[str]:
    where = _chosen(where, number)
    return ['linear' if i in where else 'softmax' for i in range(number)]


def _record(model: Any, **arguments: Any) -> None:
    """Have timm know the network as a 'linearized' one with these arguments; None and {} are left out."""
    base = model.pretrained_cfg['architecture']
    update_model_args(model, base=base, **{key: value for key, value in arguments.items() if value not in (None, {})})
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, 'architecture': LINEARIZED}
