"""Efficient-attention vision backbones as ordinary timm models; importing the package registers them."""

import importlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layers import (
        CompactGeneralizedNonLocal,
        DualAttention,
        EfficientAttention,
        FocusedLinearAttention,
        InterlacedSparseAttention,
        LatentGNN,
        NonLocalAttention,
        PyramidPooling,
        RecurrentCrissCrossAttention,
    )
    from .models.replace_attention import replace_attention

__all__ = [
    'CompactGeneralizedNonLocal',
    'DualAttention',
    'EfficientAttention',
    'FocusedLinearAttention',
    'InterlacedSparseAttention',
    'LatentGNN',
    'NonLocalAttention',
    'PyramidPooling',
    'RecurrentCrissCrossAttention',
    'replace_attention',
]
__version__: str


def _is_command() -> bool:
    """Whether Python was started for the `flatten-zoo` command, whose help must not wait for torch."""
    if sys.argv[:1] == ['-m']:  # while `python -m NAME` looks for NAME
        return sys.orig_argv[-len(sys.argv) :][:1] == ['flatten_zoo']
    return os.path.basename(sys.argv[0] if sys.argv else '') in ('flatten-zoo', 'flatten-zoo.exe')


def __getattr__(name: str) -> object:
    if name == '__version__':
        from importlib.metadata import version

        return version(__name__)
    if name in __all__:
        return getattr(importlib.import_module('.models' if name == 'replace_attention' else '.layers', __name__), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


if not _is_command():  # otherwise `cli.main` does it, before it runs a command
    importlib.import_module('.weights', __name__)  # registers the networks
