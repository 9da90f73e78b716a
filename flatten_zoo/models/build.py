"""Building a model by the name that a person typed, for commands."""
from collections.abc import Sequence

import timm
from timm.models import get_arch_pretrained_cfgs, parse_model_name, split_model_name_tag
from torch import nn

from ..errors import UsageError, unknown_name
from .recorded import check_config

__all__ = ['build_model', 'check_model_name', 'two_sides']


def check_model_name(name: str) -> None:
    """Raises a `UsageError` where timm knows no such model or tag, or the config.json of an address won't do."""
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


def build_model(name: str, **kwargs) -> nn.Module:
    """`timm.create_model` with errors that a person can act on.

    Args:
        name: Any model name of timm, with or without a tag: a zoo model, another timm model, or a 'hf-hub:…' address.
        **kwargs: Arguments of `timm.create_model`.

    Raises:
        UsageError: There is no such model or tag, or the model does not have one of the arguments.
    """
    check_model_name(name)
    try:
        return timm.create_model(name, **kwargs)
    except TypeError as e:  # what Python says of an unknown argument
        raise UsageError(f"model '{name}': {e}") from e


def two_sides(img_size: Sequence[int]) -> tuple[int, int]:
    """Height and width, from one number or two.

    Raises:
        UsageError: There are more, or they are not positive.
    """
    if len(img_size) > 2 or min(img_size) < 1:
        raise UsageError(f'--img-size must be one or two positive numbers, got {" ".join(map(str, img_size))}')
    return img_size[0], img_size[-1]
