"""What the constructors of all families ask of their arguments, where timm asks nothing."""
from collections.abc import Sequence
from typing import Any

__all__ = ['check_arguments']

PER_STAGE = ('embed_dims', 'num_heads', 'sr_ratios', 'mlp_ratios', 'split_sizes')


def check_arguments(depths: Sequence[int] | None = None, **arguments: Any) -> None:
    """Raises a ValueError for an argument out of its range; those that it does not know pass.

    Args:
        depths: Number of blocks of each stage, None for a network whose stages have no arguments of their own.
        **arguments: `num_classes`, drop rates, and what each stage has one of.
    """
    num_classes = arguments.get('num_classes', 0)
    if not isinstance(num_classes, int) or num_classes < 0:
        raise ValueError(f'num_classes must be a whole number, 0 for no classifier, got {num_classes!r}')
    for name, value in arguments.items():
        if name.endswith('_rate') and not (isinstance(value, int | float) and 0 <= value <= 1):
            raise ValueError(f'{name} must be between 0 and 1, got {value!r}')
        if depths is not None and name in PER_STAGE and isinstance(value, Sequence) and len(value) != len(depths):
            raise ValueError(f'{name} must have one value for each of the {len(depths)} depths, got {value!r}')
