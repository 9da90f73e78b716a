"""The attention operators, as plain modules."""
from .focused_linear_attention import FocusedLinearAttention, FocusedLinearCore

__all__ = ['FocusedLinearAttention', 'FocusedLinearCore']
