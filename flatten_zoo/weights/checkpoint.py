"""Reading checkpoints of any origin without running code, and writing safetensors."""
import argparse
import pickle
import zipfile
from pathlib import Path

import safetensors.torch
import torch
from timm.models import clean_state_dict

from ..errors import UsageError, first_line
from ..files import write_beside
from . import restricted_pickle

__all__ = ['read_checkpoint', 'select_state_dict', 'write_safetensors']

WEIGHTS = ('state_dict', 'model')
EMA_WEIGHTS = ('state_dict_ema', 'model_ema')


def read_checkpoint(path: str | Path, name: str | None = None) -> dict:
    """Read a safetensors file or a PyTorch checkpoint, new or legacy format, without running what a pickle asks for.

    Args:
        path: The file; one that ends in `.safetensors` is read as such.
        name: What to call the file in errors, its path if None.

    Returns:
        The checkpoint's dict, tensors on the CPU. Objects of unknown classes in it are inert placeholders.

    Raises:
        UsageError: There is no such file, or it is a web page, incomplete, damaged, no dict, or asks to run code.
    """
    path, name = Path(path), name or f"'{path}'"
    if not path.is_file():
        raise UsageError(f'there is no file {name}')
    with path.open('rb') as file:
        start = file.read(1024).lstrip().lower()
    if start.startswith((b'<!doctype', b'<html', b'<?xml')):
        raise UsageError(f'{name} is a web page, not weights; open its address in a browser to see what it says')
    if start.startswith(b'pk\3\4') and not zipfile.is_zipfile(path):
        raise UsageError(f'{name} is incomplete: its end is missing; get the file again')
    try:
        checkpoint = safetensors.torch.load_file(path) if path.suffix == '.safetensors' else _load_pickle(path)
    except pickle.UnpicklingError as e:
        raise UsageError(
            f'{name} cannot be read safely: {first_line(e)}; ask its author for safetensors, or for a file with '
            f'nothing but tensors') from e
    except Exception as e:  # bytes that are no checkpoint fail in many ways
        raise UsageError(f'{name} is incomplete, damaged or no checkpoint: {first_line(e)}; get the file again') from e
    if not isinstance(checkpoint, dict):
        raise UsageError(f'{name} holds a {type(checkpoint).__name__}, expected a dict of tensors')
    return dict(dict.items(checkpoint))  # whatever a pickle has set on the object stays behind



def _load_pickle(path: Path) -> object:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # the options that timm keeps in its checkpoints
            return torch.load(path, map_location='cpu', weights_only=True)
    except pickle.UnpicklingError:
        return torch.load(path, map_location='cpu', weights_only=False, pickle_module=restricted_pickle)


def select_state_dict(checkpoint: dict, use_ema: bool | None = False) -> dict[str, torch.Tensor]:
    """The state dict in a checkpoint: under the names that timm and the official trainers use, or the whole of it.

    Args:
        checkpoint: What `read_checkpoint` returned.
        use_ema: Take the averaged weights; None for those where there are any.

    Raises:
        UsageError: There are no averaged weights although asked for, or something is no tensor.
    """
    averaged = [key for key in EMA_WEIGHTS if checkpoint.get(key) is not None]
    if use_ema and not averaged:
        raise UsageError(f"there are no averaged (EMA) weights in the checkpoint, which has {', '.join(checkpoint)}")
    plain = [key for key in WEIGHTS if checkpoint.get(key) is not None]
    keys = plain if use_ema is False else averaged + plain
    state_dict = checkpoint[keys[0]] if keys else checkpoint
    if not isinstance(state_dict, dict) or not state_dict:
        raise UsageError('there are no weights in the checkpoint')
    state_dict = clean_state_dict(dict(dict.items(state_dict)))
    for key, value in state_dict.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise UsageError(f"no state dict: '{key}' is a {type(value).__name__}, expected a tensor")
    return {key: value.detach() for key, value in state_dict.items()}


def write_safetensors(state_dict: dict[str, torch.Tensor], path: Path) -> None:
    """Write a state dict, whole or not at all."""
    with write_beside(path) as temporary:
        # tensors that share memory, such as halves of one, can't be written as they are
        tensors = {key: value.clone(memory_format=torch.contiguous_format) for key, value in state_dict.items()}
        safetensors.torch.save_file(tensors, temporary, metadata={'format': 'pt'})
