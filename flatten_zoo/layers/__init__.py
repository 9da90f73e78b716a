from .efficient_attention import EfficientAttention
from .interlaced_attention import InterlacedSparseAttention
from .non_local_attention import NonLocalAttention

__all__ = ['EfficientAttention', 'InterlacedSparseAttention', 'NonLocalAttention']
