"""Reading checkpoints of any origin without running code, and writing safetensors."""

import io
import mmap
import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from timm.models import clean_state_dict

from ..errors import UsageError, first_line
from ..files import write_beside
from . import restricted_pickle

__all__ = ['read_checkpoint', 'select_state_dict', 'write_safetensors']

WEIGHTS = ('state_dict', 'model', 'model_state_dict')
EMA_WEIGHTS = ('state_dict_ema', 'model_ema')
LIGHTNING = 'model.'  # what Lightning modules call the network in them
MAX_INFLATED = 2**24  # what a compressed file may hold besides twice its own length


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
            f'nothing but tensors'
        ) from e
    except Exception as e:  # bytes that are no checkpoint fail in many ways
        raise UsageError(f'{name} is incomplete, damaged or no checkpoint: {first_line(e)}; get the file again') from e
    if not isinstance(checkpoint, dict):
        raise UsageError(f'{name} holds a {type(checkpoint).__name__}, expected a dict of tensors')
    return dict(dict.items(checkpoint))  # whatever a pickle has set on the object stays behind


def _load_pickle(path: Path) -> object:
    with path.open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _read_zip(path, len(content)) if content[:4] == b'PK\3\4' else _read_legacy(content)


def _read_zip(path: Path, length: int) -> object:
    """What `torch.save` wrote, with every checksum compared, which `torch.load` doesn't do."""
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        entries = {info.filename.partition('/')[2]: info for info in infos}
        if 'constants.pkl' in entries:
            raise pickle.UnpicklingError('it is a TorchScript program')
        if len(entries) < len(infos):
            raise ValueError('it has two entries of one name')
        if sum(info.file_size for info in infos) > 2 * length + MAX_INFLATED:
            raise ValueError(f'its entries declare more than the {length} bytes that it has')
        if any(info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for info in infos):
            raise ValueError('it is compressed in a way that torch does not know')
        if entries['data.pkl'].CRC == 0:
            for info in infos:  # `torch.serialization.set_crc32_options(False)` leaves checksums out
                del info.CRC
        swapped = 'byteorder' in entries and bytes(_read_entry(archive, entries['byteorder'])) != sys.byteorder.encode()
        storages, damaged = {}, {}

        def storage(key: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
            if key not in storages:
                info = entries[f'data/{key}']
                if info.file_size != numel * dtype.itemsize:
                    raise ValueError(f'{info.filename} has {info.file_size} bytes, expected {numel} × {dtype}')
                storages[key] = torch.empty(info.file_size, dtype=torch.uint8)
                try:
                    _read_entry(archive, info, storages[key].numpy())
                except zipfile.BadZipFile:
                    damaged[storages[key].data_ptr()] = info.filename
                if swapped:
                    storages[key].untyped_storage().byteswap(dtype)
            return storages[key].view(dtype)

        data = bytes(_read_entry(archive, entries['data.pkl']))
        checkpoint = restricted_pickle.load(io.BytesIO(data), len(data), storage)
    if damaged:
        raise ValueError(f'the checksum of {_name_of(damaged, checkpoint)} is wrong')
    return checkpoint


def _read_entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo, buffer: np.ndarray | None = None) -> np.ndarray:
    """The bytes of an entry, in a buffer if there is one; never more than it declares."""
    buffer = np.empty(info.file_size, np.uint8) if buffer is None else buffer
    with archive.open(info) as file:
        if file.readinto(buffer) != info.file_size:  # type: ignore[attr-defined]  # ZipExtFile has it
            raise ValueError(f'{info.filename} is cut off')
    return buffer


def _name_of(damaged: dict[int, str], checkpoint: object) -> str:
    """The first tensor whose storage is damaged, or the entry of the file where none has a name."""
    for group in (checkpoint, *checkpoint.values()) if isinstance(checkpoint, dict) else ():
        for key, value in group.items() if isinstance(group, dict) else ():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in damaged:
                return f"'{key}'"
    return next(iter(damaged.values()))


def _read_legacy(content: mmap.mmap) -> object:
    """What `torch.save` wrote before version 1.6: pickles in a row, then the bytes of each tensor."""
    storages: dict[str, torch.Tensor] = {}
    dtypes = {}

    def storage(key: str, dtype: torch.dtype, numel: int, part: tuple | None) -> torch.Tensor:
        if key not in storages:
            nbytes = numel * dtype.itemsize
            if sum(map(len, storages.values())) + nbytes > len(content):
                raise ValueError(f'it declares more than the {len(content)} bytes that it has')
            storages[key], dtypes[key] = torch.empty(nbytes, dtype=torch.uint8), dtype
        values = storages[key].view(dtype)
        return values if part is None else values[part[1] : part[1] + part[2]]

    if restricted_pickle.load(content, len(content)) != torch.serialization.MAGIC_NUMBER:
        raise ValueError('it does not begin as one')
    for _ in ('version', 'system'):
        restricted_pickle.load(content, len(content))
    checkpoint = restricted_pickle.load(content, len(content), storage)
    for key in restricted_pickle.load(content, len(content)):
        numel = int.from_bytes(content.read(8), 'little')
        data = content.read(len(storages[key]))
        if numel * dtypes[key].itemsize != len(storages[key]) or len(data) != len(storages[key]):
            raise ValueError(f'the bytes of tensor {key} are cut off')
        storages[key].numpy()[:] = np.frombuffer(data, np.uint8)
    return checkpoint


def select_state_dict(checkpoint: dict, use_ema: bool | None = False) -> dict[str, torch.Tensor]:
    """The state dict in a checkpoint: under the names that timm and the official trainers use, or the whole of it.

    Args:
        checkpoint: What `read_checkpoint` returned.
        use_ema: Take the averaged weights; None for those where there are any.

    Raises:
        UsageError: There are no averaged weights although asked for, or something is no dense tensor with a name.
    """
    averaged = [key for key in EMA_WEIGHTS if isinstance(checkpoint.get(key), dict)]
    if use_ema and not averaged:
        raise UsageError(
            f'there are no averaged (EMA) weights in the checkpoint, which has {", ".join(map(str, checkpoint))}'
        )
    plain = [key for key in WEIGHTS if isinstance(checkpoint.get(key), dict)]
    keys = plain if use_ema is False else averaged + plain
    state_dict = dict(dict.items(checkpoint[keys[0]] if keys else checkpoint))
    if not state_dict:
        raise UsageError('there are no weights in the checkpoint')
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise UsageError(f'no state dict: it has the {type(key).__name__} {key} as a key, expected names')
        if (problem := _problem(value)) is not None:
            raise UsageError(f"no state dict: '{key}' is {problem}, expected a dense tensor")
    state_dict = clean_state_dict(state_dict)
    network = {key.removeprefix(LIGHTNING): value for key, value in state_dict.items() if key.startswith(LIGHTNING)}
    if len(network) > len(state_dict) / 2:  # the rest are the module's own, such as weights of its loss
        state_dict = clean_state_dict(network)
    return {key: value.detach() for key, value in state_dict.items()}


def _problem(value: object) -> str | None:
    """Why a value is no weight: not a tensor, or none whose numbers are all there."""
    if isinstance(value, restricted_pickle.Unknown):
        return f'a {value.name}'
    if not isinstance(value, torch.Tensor):
        return f'a {type(value).__name__}'
    if value.layout != torch.strided or value.is_nested:
        return 'a sparse tensor'
    if value.is_meta or value.is_quantized:
        return f'a {"meta" if value.is_meta else "quantized"} tensor'
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return f'a few numbers repeated to {tuple(value.shape)}'
    return None


def write_safetensors(state_dict: dict[str, torch.Tensor], path: Path) -> None:
    """Write a state dict, whole or not at all."""
    with write_beside(path) as temporary:
        # tensors that share memory, such as halves of one, can't be written as they are
        tensors = {key: value.clone(memory_format=torch.contiguous_format) for key, value in state_dict.items()}
        safetensors.torch.save_file(tensors, temporary, metadata={'format': 'pt'})
