"""Efficient-attention vision backbones as ordinary timm models; importing the package registers them."""
from . import models as models
from .layers import FocusedLinearAttention

__all__ = ['FocusedLinearAttention']
