"""Networks whose attention `replace_attention` has replaced, as models of timm: by name, in files, and on the Hub.

timm makes a model of what its config.json says: an `architecture`, and arguments of it. `replace_attention` records
what it did as just that, so that whatever timm saves of a network is of the converted one.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from timm.models import (
    build_model_with_cfg,
    get_arch_pretrained_cfgs,
    get_model_args,
    model_entrypoint,
    register_model,
    resolve_model_input_args,
    resolve_pretrained_cfg,
    split_model_name_tag,
)
from torch import nn

from ..errors import UsageError, shown
from ._features import check_feature_cls
from ._flatten import fit_position_tensors, unwrap_state_dict
from .replace_attention import LINEAR_ATTENTIONS, LINEARIZED, replace_attention

__all__ = [
    'ARGUMENTS',
    'DEFAULT_BASE',
    'Linearized',
    'base_of',
    'full_name',
    'name_of',
    'resolve_arguments',
    'with_attention',
]

Name = TypeVar('Name', bound=str | None)
DEFAULT_BASE = 'pvt_v2_b0'  # the smallest that can be converted
ARGUMENTS = {'base', 'attention', 'where', 'attention_kwargs'}  # of `linearized` besides those of the base


class Linearized(str):
    """The name of a model with other attention, for people: 'deit_tiny_patch16_224+focused_linear[0-5]'.

    It stands for the model wherever a name of timm's does; its `arguments` say the same to timm.
    """

    arguments: dict[str, Any]

    def __new__(cls, base: str, attention: str, where: Sequence[int] | None = None):
        """
        Args:
            base: Model name of timm, or an address.
            attention, where: As in `replace_attention`.
        """
        parts = '' if where is None else f'[{_ranges(where)}]'
        name = super().__new__(cls, f'{base}+{attention}{parts}')
        name.arguments = {'base': base, 'attention': attention, **({} if where is None else {'where': list(where)})}
        return name


def with_attention(name: Name, attention: object, where: object, source: str = '') -> Name | Linearized:
    """The model that `--model`, `--attention` and `--attention-where` name, or a file that has recorded them.

    Args:
        name: Model name of timm, or an address; None where a checkpoint says it.
        attention: One of `LINEAR_ATTENTIONS`; None for the model as it is.
        where: Indices and ranges of them, as in '0-3,8'; None for all.
        source: What to call the file in errors.

    Raises:
        UsageError: They say no such thing.
    """
    prefix = f'{source}: ' if source else ''
    if attention is None and where is None:
        return name
    if attention is None:
        raise UsageError(f'{prefix}--attention-where {shown(where)} needs --attention')
    if not isinstance(attention, str) or attention not in LINEAR_ATTENTIONS:
        raise UsageError(f'{prefix}--attention {shown(attention)}: must be one of {", ".join(LINEAR_ATTENTIONS)}')
    if name is None:
        raise UsageError(f'--attention {attention} needs --model; a checkpoint of train.py says it by itself')
    if where is None:
        return Linearized(name, attention)
    if not isinstance(where, str) or not re.fullmatch(r'\d{1,3}(-\d{1,3})?(,\d{1,3}(-\d{1,3})?)*', where):
        raise UsageError(f'{prefix}--attention-where {shown(where)}: must be indices and ranges, such as 0-5 or 0-3,8')
    ends = [[int(end) for end in part.split('-')] for part in where.split(',')]
    return Linearized(name, attention, sorted({i for part in ends for i in range(part[0], part[-1] + 1)}))


def _ranges(indices: Sequence[int]) -> str:
    chosen = sorted(set(indices))
    firsts = [i for i in chosen if i - 1 not in chosen]
    lasts = [i for i in chosen if i + 1 not in chosen]
    return ','.join(str(a) if a == b else f'{a}-{b}' for a, b in zip(firsts, lasts, strict=True))


def name_of(model: nn.Module) -> str:
    """The architecture of a timm model, with its attention where that was replaced."""
    return full_name(model.pretrained_cfg['architecture'], get_model_args(model))


def full_name(architecture: str, arguments: Mapping[str, Any]) -> str:
    """An architecture, with its attention where that was replaced: what a config.json says, in short."""
    if architecture != LINEARIZED:
        return architecture
    return Linearized(split_model_name_tag(arguments['base'])[0], arguments['attention'], arguments.get('where'))


def base_of(model: nn.Module) -> str:
    """The architecture of a timm model before its attention was replaced, if it was."""
    architecture = model.pretrained_cfg['architecture']
    return split_model_name_tag(get_model_args(model)['base'])[0] if architecture == LINEARIZED else architecture


def resolve_arguments(name: str, options: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    """timm's `resolve_model_input_args`, where a linearized model is configured as its base is.

    Args:
        name: Model name of timm, address, or `Linearized`.
        options, **kwargs: As in timm.
    """
    if isinstance(name, Linearized):
        kwargs |= name.arguments
        name = LINEARIZED
    if split_model_name_tag(name)[0] != LINEARIZED:
        return resolve_model_input_args(name, options, **kwargs)
    arguments = resolve_model_input_args(kwargs.pop('base', DEFAULT_BASE), options, **kwargs)
    return {**arguments, 'model_name': LINEARIZED, 'base': arguments['model_name']}


def checkpoint_filter_fn(checkpoint: dict, model: nn.Module) -> dict[str, torch.Tensor]:
    """A checkpoint of a linearized model, perhaps of another image size, to a state dict that fits the model."""
    state_dict = dict(unwrap_state_dict(checkpoint))
    convert = getattr(sys.modules[model_entrypoint(base_of(model)).__module__], 'checkpoint_filter_fn', None)
    return fit_position_tensors(convert(state_dict, model) if convert else state_dict, model)


@register_model
def linearized(
    pretrained: bool = False,
    base: str = DEFAULT_BASE,
    attention: str = 'focused_linear',
    where: Sequence[int] | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    pretrained_cfg: Any = None,  # as in timm: a tag, a dictionary or a PretrainedCfg
    pretrained_cfg_overlay: dict | None = None,
    cache_dir: str | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Any of timm's transformers that `replace_attention` can convert, with linear attention

    Args:
        pretrained: Load weights: the base's, before the conversion, unless `pretrained_cfg` is of a converted network,
            such as that of a folder or repository in timm's Hub layout.
        base: Model name of timm, with or without a tag.
        attention, where: As in `replace_attention`.
        attention_kwargs: Further arguments of `replace_attention`.
        pretrained_cfg, pretrained_cfg_overlay, cache_dir: As in timm.
        **kwargs: Arguments of the base.

    Raises:
        ValueError: There is no such base, or it cannot be converted; the message says why.
    """
    architecture, tag = split_model_name_tag(base)
    if not get_arch_pretrained_cfgs(architecture):  # nor has 'linearized' any, or a name that timm has given up
        raise ValueError(f"base must be the name of a model of timm that is not converted yet, got '{base}'")
    cfg: Any = resolve_pretrained_cfg(architecture, pretrained_cfg or tag, pretrained_cfg_overlay)
    about = pretrained_cfg if isinstance(pretrained_cfg, dict) else getattr(pretrained_cfg, '__dict__', None)
    converted = about is not None and about.get('architecture') != architecture
    base_cfg, cfg = (replace(cfg, architecture=name) for name in (architecture, LINEARIZED))
    create_base = model_entrypoint(architecture)
    check_feature_cls(kwargs.pop('feature_cls', 'getter'))
    if kwargs.get('features_only') and 'out_indices' not in kwargs:
        with torch.device('meta'):
            kwargs['out_indices'] = create_base(pretrained_cfg=base_cfg, **kwargs).feature_info.out_indices

    def create(**kwargs: Any) -> nn.Module:
        model = create_base(pretrained and not converted, pretrained_cfg=base_cfg, cache_dir=cache_dir, **kwargs)
        return replace_attention(model, attention, where, **(attention_kwargs or {}))

    return build_model_with_cfg(
        create,
        LINEARIZED,
        pretrained and converted,
        pretrained_cfg=cfg,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={'feature_cls': 'getter'},
        cache_dir=cache_dir,
        **kwargs,
    )
