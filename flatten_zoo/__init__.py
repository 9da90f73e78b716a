"""Efficient-attention vision backbones as ordinary timm models; importing the package registers them."""
from .layers import EfficientAttention, FocusedLinearAttention, InterlacedSparseAttention, NonLocalAttention
from .models import replace_attention

__all__ = [
    'EfficientAttention', 'FocusedLinearAttention', 'InterlacedSparseAttention', 'NonLocalAttention',
    'replace_attention',
]
