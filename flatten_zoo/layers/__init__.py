"""The attention operators, as plain modules."""

from .efficient_attention import EfficientAttention
from .focused_linear_attention import FocusedLinearAttention, FocusedLinearCore
from .interlaced_attention import InterlacedSparseAttention
from .non_local_attention import NonLocalAttention

__all__ = [
    'EfficientAttention',
    'FocusedLinearAttention',
    'FocusedLinearCore',
    'InterlacedSparseAttention',
    'NonLocalAttention',
]
