"""What the FLatten families share: options, evaluation settings, and reading official checkpoints."""
import math
import re
from collections.abc import Sequence

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import resample_abs_pos_embed_nhwc, to_ntuple
from torch import nn

__all__ = [
    'fit_position_tensors', 'flatten_cfg', 'flatten_position_tensors', 'fuse_qkv', 'resolve_attn_types', 'split_qkv',
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


def flatten_cfg(**kwargs) -> dict:
    """timm pretrained configuration with the settings that the official FLatten models are evaluated with."""
    return {
        'url': '', 'num_classes': 1000, 'input_size': (3, 224, 224), 'pool_size': (7, 7),
        'crop_pct': 0.875, 'crop_mode': 'squash', 'interpolation': 'bicubic', 'fixed_input_size': False,
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'paper_name': 'FLatten Transformer: Vision Transformer using Focused Linear Attention',
        'paper_ids': 'arXiv:2308.00442', 'origin_url': 'https://github.com/LeapLabTHU/FLatten-Transformer',
        **kwargs,
    }


def unwrap_state_dict(checkpoint: dict) -> dict[str, torch.Tensor]:
    """The state dict itself, where a checkpoint has it under 'model' or 'state_dict'."""
    for key in ('model', 'state_dict'):
        checkpoint = checkpoint.get(key, checkpoint)
    return checkpoint


def fuse_qkv(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Concatenate separate `q` and `kv` projections of focused linear attention into its `qkv`."""
    linear = {key.removesuffix('.positional_encoding') for key in state_dict if key.endswith('.positional_encoding')}
    fused = {}
    for key, value in state_dict.items():
        match = re.fullmatch(r'(.+)\.(q|kv)\.(weight|bias)', key)
        if match is None or match[1] not in linear:
            fused[key] = value
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
            if value.ndim == 3:
                side = math.isqrt(value.shape[1])
                source_size = (side, side) if side * side == value.shape[1] else grid_size
                value = value.reshape(1, *source_size, -1)
            value = resample_abs_pos_embed_nhwc(value, grid_size)
        fitted[key] = value
    return fitted
