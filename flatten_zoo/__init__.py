"""Efficient-attention vision backbones as ordinary timm models; importing the package registers them."""
from . import weights as weights  # tells the networks where official weights come from
from .layers import EfficientAttention, FocusedLinearAttention, InterlacedSparseAttention, NonLocalAttention
from .models import replace_attention

__all__ = [
    'EfficientAttention', 'FocusedLinearAttention', 'InterlacedSparseAttention', 'NonLocalAttention',
    'replace_attention',
]
