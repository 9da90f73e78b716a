"""The attention operators, as plain modules."""
from .focused_linear_attention import FocusedLinearAttention

__all__ = ['FocusedLinearAttention']
