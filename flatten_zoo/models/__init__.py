"""The networks; importing them registers them with timm."""
from ._released import RELEASES, Release, use_hub
from .flatten_cswin import FlattenCSwin
from .flatten_deit import FlattenViT
from .flatten_pvt import FlattenPVT
from .flatten_pvt_v2 import FlattenPVTv2
from .flatten_swin import FlattenSwin

__all__ = [
    'RELEASES', 'FlattenCSwin', 'FlattenPVT', 'FlattenPVTv2', 'FlattenSwin', 'FlattenViT', 'Release', 'use_hub']
