"""Checkpoints read into a model, with errors that say what is wrong."""
from pathlib import Path

import torch
from torch import nn

from flatten_zoo.errors import UsageError
from flatten_zoo.weights import read_checkpoint, select_state_dict
from flatten_zoo.weights.official_names import family_of

__all__ = ['load_weights']


def load_weights(model: nn.Module, path: str | Path, use_ema: bool | None, adapt: bool = False) -> None:
    """Load a checkpoint into a model; every tensor must fit.

    Args:
        model: Model to load into.
        path: Checkpoint of train.py, of timm, a bare state dict, or a safetensors file.
        use_ema: Take the averaged weights; None takes them where there are some.
        adapt: Where they do not fit, let the model's own conversion try first: it resamples position tensors to the
            model's image size, and knows the official names.

    Raises:
        UsageError: The file is missing or damaged, has no averaged weights, or belongs to another architecture.
    """
    checkpoint = read_checkpoint(path)
    try:
        state = select_state_dict(checkpoint, use_ema)
    except UsageError as e:
        raise UsageError(f"'{path}': {e}") from e
    misfit = _misfit(model.state_dict(), state)
    if misfit and adapt:
        state = _adapted(model, state)
        misfit = _misfit(model.state_dict(), state)
    if misfit:
        made_by = f", it is of '{checkpoint['arch']}'" if isinstance(checkpoint.get('arch'), str) else ''
        raise UsageError(f"the checkpoint '{path}' does not fit the model{made_by}: {misfit}")
    model.load_state_dict(state)


def _adapted(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict as the model's family converts it, or as it was where the family cannot."""
    convert = getattr(family_of(model), 'checkpoint_filter_fn', None)
    try:
        return convert(state, model) if convert else state
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # of another architecture
        return state


def _misfit(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str:
    """How two state dicts differ in names and shapes, in a few words; empty when they do not."""
    missing = [name for name in ours if name not in theirs]
    unexpected = [name for name in theirs if name not in ours]
    reshaped = [
        f'{name} is {tuple(theirs[name].shape)} in place of {tuple(ours[name].shape)}'
        for name in ours if name in theirs and ours[name].shape != theirs[name].shape]
    parts = []
    if missing:
        parts.append(f'{len(missing)} tensors are missing ({missing[0]} for one)')
    if unexpected:
        parts.append(f'{len(unexpected)} are unknown ({unexpected[0]} for one)')
    if reshaped:
        parts.append(f'{len(reshaped)} of another shape ({reshaped[0]})')
    return ', '.join(parts)
