"""What the FLatten families share: options, evaluation settings, construction, and official checkpoints."""

import math
import re
from collections.abc import Callable, Sequence

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import get_device_dtype, resample_abs_pos_embed_nhwc, to_ntuple
from torch import nn

from ..layers import FocusedLinearAttention
from ._arguments import check_arguments
from ._features import check_out_indices
from ._released import Network, build_released_model

__all__ = [
    'create_pyramid',
    'fit_position_tensors',
    'flatten_cfg',
    'flatten_position_tensors',
    'focused_twin',
    'fuse_qkv',
    'resolve_attn_types',
    'split_qkv',
    'unwrap_state_dict',
]


def resolve_attn_types(attn_types: str | Sequence[str], number: int, of: str = 'stages') -> tuple[str, ...]:
    """One attention type per stage (or block), from one for all or one for each.

    Raises:
        ValueError: Another number of types than stages, or an unknown type.
    """
    attn_types = to_ntuple(number)(attn_types)
    if len(attn_types) != number or not set(attn_types) <= {'linear', 'softmax'}:
        raise ValueError(f"attn_types must be 'linear' or 'softmax' for each of the {number} {of}, got {attn_types}")
    return attn_types


def focused_twin(
    attn: nn.Module, grid_size: int | tuple[int, int], dynamic_grid_size: bool, **kwargs
) -> FocusedLinearAttention:
    """Focused linear attention that takes over the projections of softmax attention.

    Args:
        attn: Has `qkv`, `proj`, `proj_drop` and `num_heads`; the first three become part of the result.
        grid_size: Native grid.
        dynamic_grid_size: Accept any grid.
        **kwargs: focusing_factor and kernel_size.
    """
    focused = FocusedLinearAttention(
        attn.qkv.in_features,
        num_heads=attn.num_heads,
        head_dim=attn.proj.in_features // attn.num_heads,
        grid_size=grid_size,
        dynamic_grid_size=dynamic_grid_size,
        **kwargs,
        **get_device_dtype(attn),
    )
    focused.qkv, focused.proj, focused.proj_drop = attn.qkv, attn.proj, attn.proj_drop
    return focused


def flatten_cfg(**kwargs) -> dict:
    """timm pretrained configuration with the settings that the official FLatten models are evaluated with."""
    return {
        'url': '',
        'num_classes': 1000,
        'input_size': (3, 224, 224),
        'pool_size': (7, 7),
        'crop_pct': 0.875,
        'crop_mode': 'squash',
        'interpolation': 'bicubic',
        'fixed_input_size': False,
        'mean': IMAGENET_DEFAULT_MEAN,
        'std': IMAGENET_DEFAULT_STD,
        'paper_name': 'FLatten Transformer: Vision Transformer using Focused Linear Attention',
        'paper_ids': 'arXiv:2308.00442',
        'origin_url': 'https://github.com/LeapLabTHU/FLatten-Transformer',
        **kwargs,
    }


def create_pyramid(
    model_cls: type[Network],
    variant: str,
    pretrained: bool,
    filter_fn: Callable[[dict, Network], dict[str, torch.Tensor]],
    **kwargs,
) -> Network:
    """Build a variant through timm, the maps of its `stages` being what `features_only=True` gives."""
    check_arguments(**kwargs)
    out_indices = kwargs.pop('out_indices', tuple(range(len(kwargs['depths']))))
    check_out_indices(out_indices, len(kwargs['depths']))
    return build_released_model(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg=dict(flatten_sequential=True, out_indices=out_indices),
        **kwargs,
    )


def unwrap_state_dict(checkpoint: dict) -> dict[str, torch.Tensor]:
    """The state dict itself, where a checkpoint has it under 'model' or 'state_dict'."""
    for key in ('model', 'state_dict'):
        checkpoint = checkpoint.get(key, checkpoint)
    for key in checkpoint:
        if not isinstance(key, str):
            raise ValueError(
                f'the state dict has the {type(key).__name__} {key} as a key; name its tensors as the network does'
            )
    return checkpoint


def fuse_qkv(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Concatenate separate `q` and `kv` projections of focused linear attention into its `qkv`."""
    linear = {key.removesuffix('.positional_encoding') for key in state_dict if key.endswith('.positional_encoding')}
    fused = {}
    for key, value in state_dict.items():
        match = re.fullmatch(r'(.+)\.(q|kv)\.(weight|bias)', key)
        if match is None or match[1] not in linear:
            fused[key] = value
        elif f'{match[1]}.q.{match[3]}' not in state_dict or f'{match[1]}.kv.{match[3]}' not in state_dict:
            raise ValueError(f"the checkpoint has '{key}' without its counterpart of q and kv; get the file again")
        elif match[2] == 'q':
            fused[f'{match[1]}.qkv.{match[3]}'] = torch.cat([value, state_dict[f'{match[1]}.kv.{match[3]}']])
    return fused


def split_qkv(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo `fuse_qkv`."""
    split = {}
    for key, value in state_dict.items():
        match = re.fullmatch(r'(.+)\.qkv\.(weight|bias)', key)
        if match is None:
            split[key] = value
        else:
            q, k, v = value.chunk(3)
            split[f'{match[1]}.q.{match[2]}'] = q
            split[f'{match[1]}.kv.{match[2]}'] = torch.cat([k, v])
    return split


def flatten_position_tensors(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give the zoo's (1, H, W, C) position tensors their official shape (1, N, C)."""
    return {
        key: value.flatten(1, 2) if re.search(r'\b(positional_encoding|pos_embed)$', key) else value
        for key, value in state_dict.items()
    }


def _grid_of_row(key: str, length: int, grid_size: Sequence[int]) -> Sequence[int]:
    """The grid behind a row of positions: a square one, or the model's own."""
    side = math.isqrt(length)
    if side * side == length:
        return side, side
    if length != grid_size[0] * grid_size[1]:
        raise ValueError(
            f"'{key}' has {length} positions, neither a square grid nor the model's {grid_size[0]} × {grid_size[1]}; "
            f'build the model with the img_size of the checkpoint'
        )
    return grid_size


def fit_position_tensors(state_dict: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Bring every position tensor to the shape that `model` has for it.

    The zoo's own are (1, H, W, C). Official ones are (1, N, C), in row order of a square grid. Where the grids differ
    they are resampled.
    """
    fitted = {}
    targets = dict(model.named_parameters())
    for key, value in state_dict.items():
        if re.search(r'\b(positional_encoding|pos_embed)$', key) and key in targets and targets[key].ndim == 4:
            grid_size = targets[key].shape[1:3]
            if value.ndim not in (3, 4) or len(value) != 1 or value.shape[-1] != targets[key].shape[-1]:
                raise ValueError(
                    f"'{key}' has the shape {tuple(value.shape)}, expected (1, H, W, {targets[key].shape[-1]}) or "
                    f'(1, H · W, {targets[key].shape[-1]})'
                )
            if value.ndim == 3:
                value = value.reshape(1, *_grid_of_row(key, value.shape[1], grid_size), -1)
            value = resample_abs_pos_embed_nhwc(value, grid_size)
        fitted[key] = value
    return fitted
