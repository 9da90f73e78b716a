"""Conversion between official checkpoints and the zoo's, strictly: every tensor has its place and its shape."""

import sys
from types import ModuleType

import torch
from timm.models import model_entrypoint
from torch import nn

from ..errors import UsageError
from ..models.linearized import name_of

__all__ = ['converted', 'family_of', 'from_official', 'is_official', 'official_name', 'to_official']

POSITIONS = ('positional_encoding', 'pos_embed')
BUFFERS = ('relative_position_index', 'attn_mask')  # follow from the architecture, yet some checkpoints hold them


def family_of(model: nn.Module) -> ModuleType:
    """The module of a model's family, which has `checkpoint_filter_fn` and, if it is official, `official_state_dict`"""
    return sys.modules[model_entrypoint(model.pretrained_cfg['architecture']).__module__]


def to_official(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's weights as the official repository has them, so that its code loads them strictly.

    Raises:
        UsageError: There is no official implementation of this model, or not for its image size.
    """
    family = family_of(model)
    if not hasattr(family, 'official_state_dict'):
        raise UsageError(f"--to official: there is no official implementation of '{name_of(model)}'")
    state_dict = model.state_dict()
    for key, value in state_dict.items():
        if key.endswith(POSITIONS) and value.shape[1] != value.shape[2]:
            raise UsageError(
                f'--to official: official networks are square, and {key} is of a {value.shape[1]} × {value.shape[2]} '
                f'grid; use a square img_size'
            )
    return {**family.official_state_dict(state_dict), **_official_extras(model)}


def _official_extras(model: nn.Module) -> dict[str, torch.Tensor]:
    extras = getattr(family_of(model), 'official_extras', None)
    return extras(model) if extras else {}


def is_official(state_dict: dict[str, torch.Tensor], model: nn.Module) -> bool:
    """Whether a state dict has the official names rather than those of the zoo."""
    family = family_of(model)
    if not hasattr(family, 'official_state_dict'):
        return False
    own = model.state_dict()
    official = family.official_state_dict(own)
    return len(official.keys() & state_dict.keys()) > len(own.keys() & state_dict.keys())


def official_name(name: str, model: nn.Module) -> str:
    """What the official repository calls a tensor."""
    return next(iter(family_of(model).official_state_dict({name: torch.empty(0)})))


def from_official(
    state_dict: dict[str, torch.Tensor], model: nn.Module, adapt: bool = False, source: str = 'the state dict'
) -> dict[str, torch.Tensor]:
    """The model's state dict from an official one or from its own; nothing is left out or left over.

    Args:
        state_dict: Official, or the zoo's own.
        model: The model that it is for, on any device, also 'meta'.
        adapt: Where it does not fit, have the model's family convert it: it resamples position tensors to the model's
            image size, and may know more names than the official ones.
        source: What to call it in errors.

    Raises:
        UsageError: It is for another model.
    """
    expected = model.state_dict()
    official = is_official(state_dict, model)
    if official:
        unused = _official_extras(model)
        state_dict = {
            key: value for key, value in state_dict.items() if key not in unused and not key.endswith(BUFFERS)
        }
        if not adapt:
            _check_fit(state_dict, family_of(model).official_state_dict(expected), model, source)
    if official or adapt and _misfit(state_dict, expected):
        state_dict = converted(state_dict, model)
    _check_fit(state_dict, expected, model, source)
    return state_dict


def converted(state_dict: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict as the model's family converts it, or as it is where the family has no way to."""
    convert = getattr(family_of(model), 'checkpoint_filter_fn', None)
    try:
        return convert(dict(state_dict), model) if convert else state_dict
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # of another architecture
        return state_dict


def _check_fit(
    state_dict: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], model: nn.Module, source: str
) -> None:
    if problems := _misfit(state_dict, expected):
        raise UsageError(f"{source} does not fit the model '{name_of(model)}': {'; '.join(problems)}")


def _misfit(state_dict: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """How a state dict differs in names and shapes from what is expected, in a few words each."""
    missing = [key for key in expected if key not in state_dict]
    unknown = [key for key in state_dict if key not in expected]
    reshaped = [
        f'{key} {tuple(state_dict[key].shape)} instead of {tuple(value.shape)}'
        for key, value in expected.items()
        if key in state_dict and state_dict[key].shape != value.shape
    ]
    return [
        f'{len(keys)} tensors {what}, such as {keys[0]}'
        for what, keys in (('missing', missing), ('unknown', unknown), ('of another shape', reshaped))
        if keys
    ]
