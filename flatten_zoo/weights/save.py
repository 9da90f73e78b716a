"""Checkpoints of any origin, to the files that others load: timm's Hub layout, bare safetensors, official files."""
import argparse
import json
import os
import tempfile
from pathlib import Path

import timm
import torch
from timm.data import resolve_data_config
from timm.models import resolve_model_input_args, save_for_hf, split_model_name_tag
from torch import nn

from ..errors import UsageError, first_line
from ..files import write_beside
from ..models.build import check_model_name
from ..models.recorded import check_arguments, check_model, check_settings, check_size, meta_model
from .card import model_card
from .catalogue import zoo_models
from .checkpoint import read_checkpoint, select_state_dict, write_safetensors
from .official_names import family_of, from_official, is_official, to_official

__all__ = ['HUB_FILES', 'check_finite', 'load_model', 'save_model', 'write_weights']

HUB_FILES = ('README.md', 'config.json', 'model.safetensors')


def load_model(
        source: str | Path,
        model_name: str | None = None,
        use_ema: bool | None = False,
        model_kwargs: dict | None = None,
        img_size: tuple[int, int] | None = None,
        zoo_only: bool = True,
        allow_non_finite: bool = False,
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

    Raises:
        UsageError: The checkpoint can't be read, doesn't say its model, is of another model, or records what a file may
            not say.
    """
    checkpoint = read_checkpoint(source)
    state_dict = select_state_dict(checkpoint, use_ema)
    # a run that started from released weights records their tag, but its weights are others
    tag = split_model_name_tag(model_name)[1] if model_name else None
    if model_name is None:
        model_name = checkpoint.get('arch')
        if model_name is None:
            raise UsageError(f"'{source}' does not say which model it is of; name it with --model")
        check_model(model_name, f"'{source}'")
    check_model_name(model_name)
    if zoo_only and ':' not in model_name and split_model_name_tag(model_name)[0] not in zoo_models():
        raise UsageError(f"'{model_name}' is no model of the zoo but of timm's own; see `flatten-zoo list`")
    options = checkpoint.get('args')
    options = vars(options) if isinstance(options, argparse.Namespace) else options if isinstance(options, dict) else {}
    recorded = options.get('model_kwargs') or {}
    check_settings(options, f"'{source}'")
    if ':' not in model_name:
        check_arguments(model_name, recorded, f"'{source}': model_kwargs")
        check_arguments(model_name, {'global_pool': options.get('gp')}, f"'{source}': gp")
    else:
        recorded = {}  # an address has its own
    if not allow_non_finite:
        check_finite(state_dict, f"'{source}'")
    try:
        arguments = resolve_model_input_args(model_name, options, **{
            'global_pool': options.get('gp') if ':' not in model_name else None,
            **recorded,
            **(model_kwargs or {}),
            **_counts(state_dict, timm.create_model(model_name, device='meta')),
        })
        cfg = arguments['pretrained_cfg']
        cfg |= {
            'tag': tag or None, 'label_names': _label_names(checkpoint, arguments['num_classes']),
            **_evaluation_settings(options, cfg)}
        network = meta_model(**arguments)  # held against the file before it takes memory
        check_size(network, Path(source).stat().st_size, f"'{source}'")
        state_dict = from_official(state_dict, network)
        model = timm.create_model(**arguments)
    except UsageError:
        raise
    except Exception as e:  # whatever arguments can do to each other
        raise UsageError(f"cannot build '{model_name}' for '{source}': {first_line(e)}") from e
    model.load_state_dict(state_dict)
    if img_size is None:
        return model
    try:
        resized = timm.create_model(**{**arguments, 'img_size': img_size})
    except (AssertionError, TypeError, ValueError) as e:
        raise UsageError(f"cannot build '{model_name}' for images of {img_size}: {first_line(e)}") from e
    resized.load_state_dict(family_of(model).checkpoint_filter_fn(model.state_dict(), resized))
    return resized


def _counts(state_dict: dict[str, torch.Tensor], model: nn.Module) -> dict[str, int]:
    """Numbers of channels and of classes that a state dict for some variation of `model` was made for."""
    names = [f'{model.pretrained_cfg[key]}.weight' for key in ('first_conv', 'classifier')]
    if is_official(state_dict, model):
        names = [next(iter(family_of(model).official_state_dict({name: torch.empty(0)}))) for name in names]
    stem, classifier = (state_dict.get(name) for name in names)
    for name, tensor, ndim in zip(names, (stem, classifier), (4, 2), strict=True):
        if tensor is not None and tensor.ndim != ndim:
            raise UsageError(f"'{name}' has {tensor.ndim} dimensions, expected {ndim}")
    counts = {'num_classes': 0 if classifier is None else len(classifier)}
    return counts if stem is None else {**counts, 'in_chans': stem.shape[1]}


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
                f'{source} has values in {name} that are infinite or not a number; --allow-non-finite takes them')


def save_model(model: nn.Module, folder: Path, name: str) -> None:
    """Write a model in timm's Hub layout: `model.safetensors`, `config.json` and a model card.

    Args:
        model: The model.
        folder: Where to write; other files there are left alone.
        name: Title of the model card.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f'.{folder.name}.') as temporary:
        cfg = model.pretrained_cfg
        save_for_hf(
            model, temporary, safe_serialization=True,
            model_config={'pretrained_cfg': {'tag': cfg.get('tag')}, 'label_names': cfg.get('label_names')})
        config = json.loads(Path(temporary, 'config.json').read_text())
        config['pretrained_cfg'].pop('label_names', None)  # they stand above it
        config['model_args'].pop('num_classes')  # stands above them, and transformers takes it from there
        Path(temporary, 'config.json').write_text(json.dumps(config, indent=2) + '\n')
        parameters = sum(p.numel() for p in model.parameters())
        Path(temporary, 'README.md').write_text(model_card(config, parameters, name), encoding='utf-8')
        folder.mkdir(exist_ok=True)
        for file in HUB_FILES:
            os.replace(Path(temporary, file), folder / file)


def write_weights(model: nn.Module, output: Path, official: bool = False) -> None:
    """Write a model's weights.

    Args:
        model: The model.
        output: File that ends in `.safetensors` for the tensors alone, or in `.pth` for a checkpoint of the official
            repository, otherwise a folder for timm's Hub layout.
        official: Use the names and shapes of the official repository.

    Raises:
        UsageError: The output can't be of that kind, or be written.
    """
    if official != (output.suffix == '.pth') and output.suffix != '.safetensors':
        raise UsageError(
            f"-o '{output}': official checkpoints are files, with --to official and a name that ends in .pth or "
            f'.safetensors; everything else is a folder, or a file that ends in .safetensors')
    try:
        if output.suffix == '.safetensors':
            write_safetensors(to_official(model) if official else model.state_dict(), output)
        elif official:
            with write_beside(output) as temporary:
                torch.save({'model': to_official(model)}, temporary)
        else:
            save_model(model, output, name=output.resolve().name)
    except OSError as e:
        raise UsageError(f"-o '{output}': {e}") from e
