"""The networks; importing them registers them with timm."""
from .flatten_pvt import FlattenPVT
from .flatten_swin import FlattenSwin

__all__ = ['FlattenPVT', 'FlattenSwin']
