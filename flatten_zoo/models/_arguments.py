"""What the networks of all families ask of their arguments, where timm asks nothing."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

__all__ = ['CheckedClassifier', 'check_any_size', 'check_arguments']

PER_STAGE = ('embed_dims', 'num_heads', 'sr_ratios', 'mlp_ratios', 'split_sizes')


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, Integral) and int(value) >= least


def check_arguments(
    depths: Sequence[int] | None = None, depth: int | None = None, num_classes: int = 0, **arguments: Any
) -> None:
    """Raises a ValueError for an argument out of its range; those that it does not know pass.

    Args:
        depths: Number of blocks of each stage, None for a network whose stages have no arguments of their own.
        depth: Number of blocks of a network without stages.
        num_classes: Number of classes.
        **arguments: Drop rates, and what each stage has one of.
    """
    if depth is not None and not _is_count(depth, 1):
        raise ValueError(f'depth must be a positive whole number of blocks, got {depth!r}')
    if depths is not None and not (
        isinstance(depths, Sequence) and depths and all(_is_count(number, 1) for number in depths)
    ):
        raise ValueError(f'depths must be a positive whole number of blocks for each stage, got {depths!r}')
    if not _is_count(num_classes, 0):
        raise ValueError(f'num_classes must be a whole number, 0 for no classifier, got {num_classes!r}')
    for name, value in arguments.items():
        if name.endswith('_rate') and not (isinstance(value, int | float) and 0 <= value <= 1):
            raise ValueError(f'{name} must be between 0 and 1, got {value!r}')
        if depths is not None and name in PER_STAGE and isinstance(value, Sequence) and len(value) != len(depths):
            raise ValueError(f'{name} must have one value for each of the {len(depths)} depths, got {value!r}')


def check_any_size(dynamic_img_size: bool) -> None:
    """Raises a ValueError unless a network that takes any size is left to do so."""
    if not dynamic_img_size:
        raise ValueError('dynamic_img_size=False: this network always takes images of any size; leave it out')


class CheckedClassifier:
    """Mixin of networks with a classifier."""

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """timm's, but a number of classes that is none is a ValueError."""
        check_arguments(num_classes=num_classes)
        super().reset_classifier(num_classes, global_pool)  # type: ignore[misc]  # of the network beside the mixin
