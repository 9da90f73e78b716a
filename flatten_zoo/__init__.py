"""Efficient-attention vision backbones as ordinary timm models; importing the package registers them."""
from . import models  # noqa: F401  registers every model
from .layers import EfficientAttention, InterlacedSparseAttention, NonLocalAttention

__all__ = ['EfficientAttention', 'InterlacedSparseAttention', 'NonLocalAttention']
