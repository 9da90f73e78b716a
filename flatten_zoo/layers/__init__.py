"""The attention operators, as plain modules."""

from .compact_non_local import CompactGeneralizedNonLocal
from .criss_cross_attention import RecurrentCrissCrossAttention
from .dual_attention import DualAttention
from .efficient_attention import EfficientAttention
from .focused_linear_attention import FocusedLinearAttention, FocusedLinearCore
from .interlaced_attention import InterlacedSparseAttention
from .latent_gnn import LatentGNN
from .non_local_attention import NonLocalAttention
from .pyramid_pooling import PyramidPooling

__all__ = [
    'CompactGeneralizedNonLocal',
    'DualAttention',
    'EfficientAttention',
    'FocusedLinearAttention',
    'FocusedLinearCore',
    'InterlacedSparseAttention',
    'LatentGNN',
    'NonLocalAttention',
    'PyramidPooling',
    'RecurrentCrissCrossAttention',
]
