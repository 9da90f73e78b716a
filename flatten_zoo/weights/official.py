"""Official weights for `pretrained=True`: downloaded and converted once, kept in timm's cache."""

import logging
import os
from pathlib import Path
from typing import Any

import safetensors
import timm
from timm.models import PretrainedCfg
from torch import nn

from .._timm import get_cache_dir
from ..errors import UsageError
from ..files import write_beside
from .checkpoint import read_checkpoint, select_state_dict, write_safetensors
from .download import download
from .official_names import from_official

__all__ = ['cached_files', 'official_weights']

_logger = logging.getLogger(__name__)


def cached_files(cfg: PretrainedCfg, cache_dir: str | Path | None = None) -> tuple[Path, Path]:
    """Where a released model's official file and its conversion are in the cache, once they are there."""
    address: Any = cfg.url  # the pair that `official_url` makes
    source = Path(cache_dir or get_cache_dir()) / address[1]
    return source, source.with_suffix('.safetensors')


def official_weights(cfg: PretrainedCfg, cache_dir: str | Path | None = None) -> Path:
    """A released model's weights, converted for timm to load.

    Downloads the official file only where the cache has neither it nor its conversion.

    Args:
        cfg: The model's pretrained configuration.
        cache_dir: The cache; None for timm's, `<torch home>/hub/checkpoints`.

    Raises:
        UsageError: The file can't be had, or is none of this model's weights; it is not kept then.
    """
    source, converted = cached_files(cfg, cache_dir)
    model = timm.create_model(str(cfg.architecture), device='meta')
    if _is_sound(converted, model):
        return converted
    if source.exists():
        try:
            _convert(source, converted, model, f"'{source}'")
        except UsageError as e:
            source.unlink(missing_ok=True)
            raise UsageError(f'{e}; it is removed from the cache now, the next try downloads it again') from e
    else:
        with write_beside(source) as temporary:
            address: Any = cfg.url
            _logger.info('downloading %s to %s', address[0], source)
            try:
                download(address[0], temporary)
                _convert(temporary, converted, model, f'the file at {address[0]}')
            except UsageError as e:
                raise UsageError(
                    f"{e}; if that does not help, download it in a browser and save it as '{source}'"
                ) from e
    return converted


def _convert(source: Path, converted: Path, model: nn.Module, name: str) -> None:
    state_dict = select_state_dict(read_checkpoint(source, name), use_ema=None)
    write_safetensors(from_official(state_dict, model, source=name), converted)


def _is_sound(path: Path, model: nn.Module) -> bool:
    """Whether a converted file is there, whole, and of this model; reads its header alone."""
    if not path.exists():
        return False
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    try:
        with safetensors.safe_open(path, 'pt') as file:
            sound = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()} == expected  # noqa: SIM118
    except (safetensors.SafetensorError, OSError):
        sound = False
    if not sound:
        os.unlink(path)
    return sound
