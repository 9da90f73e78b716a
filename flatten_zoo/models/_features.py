"""Which feature maps `features_only=True` gives, and how."""

import operator
from collections.abc import Iterable

from .._timm import FeatureGetterNet

__all__ = ['check_feature_cls', 'check_out_indices']


def check_feature_cls(feature_cls: str | type) -> None:
    """Raises a ValueError for timm's other ways to feature maps, which would give those of a network as it holds them:
    channels last.
    """
    if feature_cls not in ('getter', FeatureGetterNet):
        raise ValueError(
            f"feature_cls must be left out or 'getter', which gives a list of maps in NCHW, got {feature_cls!r}: this "
            f'network keeps its maps channels last'
        )


def check_out_indices(out_indices: int | Iterable[int], num_features: int) -> None:
    """Checks what timm takes as it is: maps come in the network's order and once each, whatever the indices.

    Args:
        out_indices: The last n maps if an int, otherwise their indices, negative ones from the end.
        num_features: Number of maps that there are.

    Raises:
        ValueError: They are not whole numbers in range and in increasing order.
    """
    try:
        if isinstance(out_indices, Iterable):
            indices = [operator.index(i) for i in out_indices]
            in_range = indices and all(-num_features <= i < num_features for i in indices)
        else:
            indices = []
            in_range = 1 <= operator.index(out_indices) <= num_features
    except TypeError:
        in_range = False
    if not in_range:
        raise ValueError(
            f'out_indices must be indices from 0 to {num_features - 1}, from {-num_features} to -1 counted from the '
            f'end, or the number of last maps, 1 to {num_features}; got {out_indices!r}'
        )
    indices = [i % num_features for i in indices]
    if any(b <= a for a, b in zip(indices, indices[1:], strict=False)):
        raise ValueError(f'out_indices must be in increasing order, each once; got {out_indices!r}')
