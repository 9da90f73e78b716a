"""From a name, an address or a checkpoint to a model with its size, its channels, its classes and its weights."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from timm.models import get_arch_pretrained_cfgs, parse_model_name, split_model_name_tag
from torch import nn

from ..errors import UsageError, unknown_name
from ..images import two_sides
from ..models.linearized import LINEARIZED, Linearized, resolve_arguments, with_attention
from ..models.recorded import (
    building,
    check_arguments,
    check_config,
    check_model,
    check_settings,
    check_size,
    meta_model,
)
from .catalogue import zoo_models
from .checkpoint import read_checkpoint, select_state_dict
from .official_names import converted, from_official, is_official, official_name

__all__ = ['check_finite', 'check_model_name', 'create_model', 'load_model', 'load_weights', 'open_model']


def check_model_name(name: str) -> None:
    """Raises a `UsageError` where timm knows no such model or tag, or the config.json of an address won't do."""
    if isinstance(name, Linearized):
        name = name.arguments['base']
    try:
        source, _ = parse_model_name(name)
    except ValueError as e:
        raise UsageError(f"model '{name}': {e}") from e
    if source is not None:
        check_config(name)
        return
    architecture, tag = split_model_name_tag(name)
    if not timm.is_model(architecture):
        raise unknown_name('model', name, timm.list_models())
    if tag and name not in (tagged := get_arch_pretrained_cfgs(architecture)):
        raise unknown_name('model', name, tagged)


def open_model(
    name: str | None = None,
    img_size: Sequence[int] | None = None,
    dynamic_size: bool = False,
    pretrained: bool = False,
    checkpoint: Path | None = None,
) -> tuple[nn.Module, str]:
    """A model in inference mode, and where its weights come from, in words; untrained ones are always the same.

    Args:
        name: Any model name of timm, with or without a tag, or an address, or a `Linearized` of these; None if the
            checkpoint says which.
        img_size: Side, or height and width, of the images; matters to models that are made for one size. The size of
            the checkpoint's run or else the model's own if None.
        dynamic_size: Of models that are made for one size, make one that takes others.
        pretrained: Load timm's weights for it.
        checkpoint: Load this file's weights: the averaged ones where there are any.

    Raises:
        UsageError: There is no such model, it does not take that size, or the weights can't be had or don't fit.
    """
    if pretrained and checkpoint:
        raise UsageError('choose one of --pretrained and --checkpoint')
    if not name and not checkpoint:
        raise UsageError('name a model, or give a checkpoint of train.py, which says it')
    size: dict[str, Any] = {'img_size': two_sides(img_size) if img_size else None, 'dynamic_size': dynamic_size}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if checkpoint:
            model = load_model(
                checkpoint, name, use_ema=None, zoo_only=False, allow_non_finite=True, adapt=True, **size
            )
            return model.eval(), checkpoint.name
        model = create_model(name or '', pretrained=pretrained, **size).eval()
    if not pretrained:
        return model, 'untrained'
    tag = model.pretrained_cfg.get('tag') or ''
    untrained_attention = isinstance(name, Linearized) or tag.endswith('untrained_attn')
    return model, 'pretrained, but the attention untrained' if untrained_attention else 'pretrained'


def create_model(
    name: str,
    options: dict[str, Any] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    img_size: tuple[int, int] | int | None = None,
    dynamic_size: bool = False,
    given: str = '',
    **kwargs,
) -> nn.Module:
    """`timm.create_model` with errors that a person can act on.

    Args:
        name: Any model name of timm, with or without a tag, or an address, or a `Linearized` of these.
        options: Options of a training script, which say size and channels as timm reads them.
        model_kwargs: The model's own arguments. An `img_size` among them reaches it whatever it is made for.
        img_size, dynamic_size: As in `open_model`.
        given: What was asked for besides, for the error.
        **kwargs: Arguments of `timm.create_model`; None stands for the model's own default.

    Raises:
        UsageError: There is no such model, it can't be built like that, or its weights can't be had.
    """
    check_model_name(name)
    with building(f"'{name}'{given}"):
        arguments = resolve_arguments(name, options, **kwargs, **(model_kwargs or {}))
        return timm.create_model(**_for_images(arguments, img_size, dynamic_size))


def _for_images(arguments: dict[str, Any], img_size: tuple[int, int] | int | None, dynamic_size: bool) -> dict:
    """Arguments of `timm.create_model` for images of a size: only models that are made for one are told."""
    if arguments['pretrained_cfg'].get('fixed_input_size'):
        size = {'img_size': img_size} if img_size else {}
        return {**({'dynamic_img_size': True} if dynamic_size else {}), **arguments, **size}
    return arguments


def load_weights(model: nn.Module, path: str | Path, use_ema: bool | None = False, adapt: bool = False) -> None:
    """Load a checkpoint into a model; every tensor must fit.

    Args:
        model: Model to load into.
        path: Official checkpoint, checkpoint of train.py or of timm, a bare state dict, or a safetensors file.
        use_ema: Take the averaged weights; None takes them where there are some.
        adapt: Where they do not fit, have the model's family convert them, as in `from_official`.

    Raises:
        UsageError: The file is missing or damaged, has no averaged weights, or belongs to another architecture.
    """
    _, state_dict, source = _read(path, use_ema)
    model.load_state_dict(from_official(state_dict, model, adapt, source))


def _read(path: str | Path, use_ema: bool | None) -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    """A checkpoint, the weights in it, and what to call it in errors."""
    checkpoint = read_checkpoint(path)
    try:
        state_dict = select_state_dict(checkpoint, use_ema)
    except UsageError as e:
        raise UsageError(f"'{path}': {e}") from e
    name = checkpoint.get('arch')
    return checkpoint, state_dict, f"'{path}' of '{name}'" if isinstance(name, str) else f"'{path}'"


def load_model(
    source: str | Path,
    model_name: str | None = None,
    use_ema: bool | None = False,
    model_kwargs: dict | None = None,
    img_size: tuple[int, int] | None = None,
    zoo_only: bool = True,
    allow_non_finite: bool = False,
    dynamic_size: bool = False,
    adapt: bool = False,
) -> nn.Module:
    """The model of a checkpoint, with its weights.

    Numbers of channels and classes are those of the tensors, other arguments those that a training run has recorded.

    Args:
        source: Official checkpoint, `train.py` checkpoint, or file in timm's style.
        model_name: Name of the model, with tag if these are the released weights; None if the checkpoint says which.
        use_ema: Take the averaged weights; None for those where there are any.
        model_kwargs: More arguments of the model, over those recorded.
        img_size: Image size that the position tensors are brought to, for models that are made for one size; that of
            the checkpoint if None.
        zoo_only: Refuse timm's own models.
        allow_non_finite: Take weights that are infinite or not a number.
        dynamic_size: As in `open_model`.
        adapt: As in `load_weights`, with an `img_size` in any case.

    Raises:
        UsageError: The checkpoint can't be read, doesn't say its model, is of another model, or records what a file may
            not say.
    """
    checkpoint, state_dict, called = _read(source, use_ema)
    file = f"'{source}'"
    # a run that started from released weights records their tag, but its weights are others
    tag = split_model_name_tag(model_name)[1] if model_name and not isinstance(model_name, Linearized) else None
    if model_name is None:
        model_name = checkpoint.get('arch')
        if model_name is None:
            raise UsageError(f'{file} does not say which model it is of; name it with --model')
        check_model(model_name, file)
    check_model_name(model_name)
    options = checkpoint.get('args')
    options = vars(options) if isinstance(options, argparse.Namespace) else options if isinstance(options, dict) else {}
    if not isinstance(model_name, Linearized):
        where = options.get('attention_where')
        model_name = with_attention(model_name, options.get('attention'), where, source=file)
    known = isinstance(model_name, Linearized) or split_model_name_tag(model_name)[0] in (*zoo_models(), LINEARIZED)
    if zoo_only and ':' not in model_name and not known:
        raise UsageError(f"'{model_name}' is no model of the zoo but of timm's own; see `flatten-zoo list`")
    check_settings(options, file)
    recorded = {}
    if ':' not in model_name:  # an address has its own
        recorded = {'global_pool': options.get('gp')}
        check_arguments(model_name, recorded, f'{file}: gp')
        check_arguments(model_name, options.get('model_kwargs') or {}, f'{file}: model_kwargs')
        recorded |= options.get('model_kwargs') or {}
    if not allow_non_finite:
        check_finite(state_dict, file)
    with building(f"'{model_name}' for {file}"):
        recorded |= model_kwargs or {}
        base = resolve_arguments(model_name, **recorded).get('base', model_name)  # of a linearized model
        counts = _counts(state_dict, meta_model(model_name=base))
        arguments = resolve_arguments(model_name, options, **{**recorded, **counts})
        network = meta_model(**arguments)  # held against the file before it takes memory
        check_size(network, Path(source).stat().st_size, file)
        if img_size or dynamic_size:
            arguments = _for_images(arguments, img_size, dynamic_size)
            network = meta_model(**arguments)
        state_dict = from_official(state_dict, network, adapt or bool(img_size), called)
        model = timm.create_model(**arguments)
    model.load_state_dict(state_dict)
    model.pretrained_cfg |= {
        'tag': tag or None,
        'label_names': _label_names(checkpoint, model.num_classes),
        **_evaluation_settings(options, model.pretrained_cfg),
    }
    return model


def _counts(state_dict: dict[str, torch.Tensor], model: nn.Module) -> dict[str, int]:
    """Numbers of channels and of classes that a state dict for some variation of `model` was made for."""
    cfg, own = model.pretrained_cfg, model.state_dict()
    official = is_official(state_dict, model)
    found = []
    if not official:  # some of timm's families know files of other names
        state_dict = converted(state_dict, model)
    for module in (cfg['first_conv'], cfg['classifier']):
        key = f'{module if isinstance(module, str) else next(iter(module or ()), None)}.weight'
        name = official_name(key, model) if official else key
        tensor, like = state_dict.get(name), own.get(key)
        if tensor is not None and like is not None and tensor.ndim != like.ndim:
            raise UsageError(f"'{name}' has {tensor.ndim} dimensions, expected {like.ndim}")
        found.append((tensor, like))
    (stem, own_stem), (classifier, _) = found
    counts = {'num_classes': 0 if classifier is None else len(classifier)}
    if stem is None or own_stem is None:
        return counts
    return {**counts, 'in_chans': cfg['input_size'][0] * stem.shape[1] // own_stem.shape[1]}


def _evaluation_settings(options: dict, cfg: dict) -> dict:
    """Input size, normalisation and crop of a training run's validation, None of it where there was no run."""
    if not options:
        return {}
    settings = resolve_data_config(options, pretrained_cfg=cfg)
    if settings['input_size'] != tuple(cfg['input_size']):
        settings['pool_size'] = None
    return {**settings, 'test_input_size': None, 'test_crop_pct': None}  # those were for other weights


def _label_names(checkpoint: dict, num_classes: int) -> list[str] | None:
    """Names of the classes, of a checkpoint that has them for its classifier."""
    names = checkpoint.get('label_names')
    if not isinstance(names, list) or len(names) != num_classes:
        return None
    return names if all(isinstance(name, str) and len(name) < 256 and name.isprintable() for name in names) else None


def check_finite(state_dict: dict[str, torch.Tensor], source: str) -> None:
    """Refuse weights that are infinite or not a number.

    Args:
        state_dict: The weights.
        source: What to call their file in errors.
    """
    for name, value in state_dict.items():
        if not torch.isfinite(value).all():
            raise UsageError(
                f'{source} has values in {name} that are infinite or not a number; --allow-non-finite takes them'
            )
