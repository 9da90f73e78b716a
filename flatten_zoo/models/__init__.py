"""The networks; importing them registers them with timm."""
from .flatten_cswin import FlattenCSwin
from .flatten_deit import FlattenViT
from .flatten_pvt import FlattenPVT
from .flatten_pvt_v2 import FlattenPVTv2
from .flatten_swin import FlattenSwin

__all__ = ['FlattenCSwin', 'FlattenPVT', 'FlattenPVTv2', 'FlattenSwin', 'FlattenViT']
