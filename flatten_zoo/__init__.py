"""Efficient-attention vision backbones as ordinary timm models; importing the package registers them."""
from .layers import EfficientAttention, InterlacedSparseAttention, NonLocalAttention

__all__ = ['EfficientAttention', 'InterlacedSparseAttention', 'NonLocalAttention']
