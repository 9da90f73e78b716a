"""What a file records about a network is input, never an instruction.

A checkpoint, a config.json or a run's args.yaml may say which registered model it is of, the arguments of that
network's constructor, and how its images are prepared. Where weights come from, and whatever else timm's factory does
for its callers, is not for a file to say.
"""

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import timm
import torch
from timm.data.transforms import str_to_interp_mode
from timm.models import build_model_with_cfg, load_model_config_from_hf, parse_model_name, split_model_name_tag
from torch import nn

from .._timm import load_model_config_from_path
from ..errors import UsageError, first_line, shown
from .linearized import ARGUMENTS, DEFAULT_BASE, Linearized
from .replace_attention import LINEARIZED

__all__ = [
    'building',
    'check_arguments',
    'check_config',
    'check_model',
    'check_plain',
    'check_settings',
    'check_size',
    'meta_model',
]

FACTORY = {  # arguments of timm's factory, or of where a network lives
    'self',
    'cfg',
    'device',
    'dtype',
    'feature_cls',
    'features_only',
    'out_indices',
    'pruned',
    *inspect.signature(timm.create_model).parameters,
    *inspect.signature(build_model_with_cfg).parameters,
}
BATCH_NORM = {'bn_eps', 'bn_momentum', 'bn_tf'}  # arguments that some of timm's families take before their constructor
LARGEST = 2**16  # whole number, such as a width
LARGEST_REAL = 1e6
DEEPEST = 256  # blocks altogether
LONGEST = 256  # characters, or entries of a tuple
LARGEST_SIDE = 2**13  # pixels
LARGEST_CONFIG = 2**25  # bytes, or names and characters in it
CROP_MODES = ('center', 'squash', 'border')
WEIGHTS = ('.safetensors', '.pth', '.tar', '.bin')


def check_model(name: object, source: str) -> None:
    """Refuse a recorded model that is no registered one, such as an address.

    Args:
        name: What the file records.
        source: What to call the file in errors.
    """
    if not isinstance(name, str) or not timm.is_model(split_model_name_tag(name)[0]):
        raise UsageError(f'{source} records the model {shown(name)}, which is no registered one; name it with --model')


def check_arguments(model_name: str, arguments: Any, source: str) -> None:
    """Refuse what is no argument of a network's constructor, or no plain value within bounds.

    Args:
        model_name: A registered model, with or without a tag, or a `Linearized` of one.
        arguments: Recorded arguments.
        source: What to call the file and the entry in errors.
    """
    check_plain(arguments, source)
    if isinstance(model_name, Linearized):
        arguments = arguments | model_name.arguments
        model_name = LINEARIZED
    architecture, known = split_model_name_tag(model_name)[0], set()
    if architecture == LINEARIZED:
        base, known = arguments.get('base', DEFAULT_BASE), ARGUMENTS
        check_model(base, source)
        architecture = split_model_name_tag(base)[0]
    known = known | _constructor_arguments(architecture)
    for key in arguments:
        if key not in known:
            raise UsageError(f"{source} records {shown(key)}, which is no argument of the network '{model_name}'")


def check_plain(arguments: Any, source: str) -> None:
    """Refuse arguments that no network's constructor takes: timm's own, and values that are not plain or too large."""
    if not isinstance(arguments, dict):
        raise UsageError(f'{source} is {shown(arguments)}, expected names with values')
    for key, value in arguments.items():
        if not isinstance(key, str) or not key.isidentifier() or key in FACTORY:
            raise UsageError(f'{source} records {shown(key)}, which is not for a file to say; give it yourself')
        if isinstance(value, dict) and key.endswith(('_args', '_kwargs')):  # of the network's layers
            check_plain(value, f'{source}: {key}')
        elif not _is_plain(value) or _blocks(key, value) > DEEPEST:
            raise UsageError(f'{source} records {key} = {shown(value)}; expected numbers or short text, within bounds')


@functools.cache
def _constructor_arguments(architecture: str) -> set[str]:
    """Names in the signature of a network's class, and of those that it passes further arguments on to."""
    names = set(BATCH_NORM)
    for cls in type(meta_model(model_name=architecture)).__mro__:
        if '__init__' not in vars(cls):
            continue
        parameters = inspect.signature(vars(cls)['__init__']).parameters.values()
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break
    return names - FACTORY


def _is_plain(value: object, levels: int = 2) -> bool:
    if isinstance(value, list | tuple):
        return levels > 0 and len(value) <= LONGEST and all(_is_plain(item, levels - 1) for item in value)
    if isinstance(value, str):
        return len(value) <= LONGEST and value.isprintable()
    return value is None or isinstance(value, bool) or _is_number(value)


def _is_number(value: object) -> TypeGuard[float]:
    largest = LARGEST if isinstance(value, int) else LARGEST_REAL
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= largest  # NaN is not


def _blocks(key: str, value: object) -> int:
    """How many blocks an argument asks for, if it is about that."""
    if not any(word in key for word in ('depth', 'layers', 'blocks')):
        return 0
    if isinstance(value, list | tuple):
        return sum(_blocks(key, item) for item in value)
    return value if isinstance(value, int) else 0


def check_settings(settings: Mapping[str, Any], source: str) -> None:
    """Refuse recorded settings of image preparation that are none; entries of other names are left alone.

    Args:
        settings: Options of a run, or timm's configuration of pretrained weights.
        source: What to call the file in errors.
    """

    def is_side(value: object, largest: int = LARGEST_SIDE) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= largest

    def is_size(value: object) -> bool:
        return isinstance(value, list | tuple) and len(value) == 3 and all(map(is_side, value))

    def is_square_or_pair(value: object) -> bool:
        return is_side(value) or isinstance(value, list | tuple) and len(value) == 2 and all(map(is_side, value))

    def is_mean(value: object) -> bool:
        return isinstance(value, list | tuple) and 0 < len(value) <= LARGEST_SIDE and all(map(_is_number, value))

    def is_fraction(value: object) -> bool:
        return _is_number(value) and 0 < value <= 10

    def is_interpolation(value: object) -> bool:
        try:
            return isinstance(value, str) and (not value or bool(str_to_interp_mode(value)))
        except KeyError:
            return False

    expected = {
        **dict.fromkeys(('in_chans', 'chans'), (is_side, 'a number of channels')),
        **dict.fromkeys(('input_size', 'test_input_size', 'min_input_size'), (is_size, 'channels, height and width')),
        'img_size': (is_square_or_pair, 'one or two sides in pixels'),
        'mean': (is_mean, 'a number for each channel'),
        'std': (lambda value: is_mean(value) and min(value) > 0, 'a positive number for each channel'),
        **dict.fromkeys(('crop_pct', 'test_crop_pct'), (is_fraction, 'a fraction')),
        'crop_mode': (lambda value: value in ('', *CROP_MODES), f'one of {", ".join(CROP_MODES)}'),
        'interpolation': (is_interpolation, 'the name of an interpolation'),
        'num_classes': (lambda value: value == 0 or is_side(value, LARGEST_CONFIG), 'a number of classes'),
    }
    for key, (is_right, what) in expected.items():
        value = settings.get(key)
        if value is not None and not is_right(value):
            raise UsageError(f'{source} records {key} = {shown(value)}; expected {what}')


def check_size(model: nn.Module, held: int, source: str) -> None:
    """Refuse a network that a file is too small for.

    Args:
        model: The network on the 'meta' device, where it takes no memory.
        held: Bytes of the file.
        source: What to call the file in errors.
    """
    needed = sum(tensor.nbytes for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
    if needed > 4 * held + 2**26:  # weights may be stored in fewer bits, and small networks have large buffers
        raise UsageError(f'{source} of {held} bytes records a network of {needed} bytes, which it cannot hold')


@contextmanager
def building(what: str) -> Iterator[None]:
    """Turn what goes wrong while a model is built into a `UsageError`.

    This is the one place that catches whatever comes: it runs the code of any network of timm, or of anyone who has
    registered one, with any arguments, and the code that gets configurations and weights from anywhere.

    Args:
        what: The model, and what was asked for, for the error.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as e:
        raise UsageError(f'cannot build {what}: {first_line(e)}') from e


def meta_model(**arguments) -> nn.Module:
    """`timm.create_model` without memory or computation: all tensors on the 'meta' device."""
    with torch.device('meta'):
        return timm.create_model(**arguments)


def check_config(address: str) -> None:
    """Refuse the config.json of a folder or of the Hub where it holds what no network or card can mean.

    Args:
        address: A model's 'local-dir:…' or 'hf-hub:…' address.

    Raises:
        UsageError: It can't be had or read, or one of its entries won't do.
    """
    kind, location = parse_model_name(address)
    source = f"the config.json of '{location}'"
    held = 2**33
    with building(f"'{address}'"):
        if kind == 'local-dir':
            held = _bytes_of_weights(Path(location)) or 2**30
            cfg, architecture, arguments = load_model_config_from_path(location)
        else:
            cfg, architecture, arguments = load_model_config_from_hf(location)
    check_model(architecture, source)
    check_settings(cfg, source)
    for key, value in cfg.items():
        if not _is_text_or_numbers(value):
            raise UsageError(f'{source} records {shown(key)} = {shown(value)}; expected text and numbers')
    check_arguments(architecture, arguments, f'{source}: model_args')
    with building(f"'{address}'"):
        model = meta_model(model_name=address)
    check_size(model, held, source)


def _bytes_of_weights(folder: Path) -> int:
    config = folder / 'config.json'
    if config.is_file() and config.stat().st_size > LARGEST_CONFIG:
        raise UsageError(f"'{config}' has {config.stat().st_size} bytes, which no configuration has")
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in WEIGHTS)


def _is_text_or_numbers(value: object, levels: int = 2) -> bool:
    if isinstance(value, list | tuple | dict):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return levels > 0 and all(_is_text_or_numbers(item, levels - 1) for item in items)
    if isinstance(value, str):
        return all(c.isprintable() or c in '\n\t' for c in value)
    return value is None or isinstance(value, bool) or _is_number(value)
