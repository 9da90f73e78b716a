"""Attention transfer: linear attention that keeps what a trained network knows."""

from .transfer import Settings, linearize

__all__ = ['Settings', 'linearize']
