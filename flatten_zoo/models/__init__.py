"""The networks; importing them registers them with timm."""

from ._released import RELEASES, Release, use_hub
from .attention_resnet import AttentionResNet
from .flatten_cswin import FlattenCSwin
from .flatten_deit import FlattenViT
from .flatten_pvt import FlattenPVT
from .flatten_pvt_v2 import FlattenPVTv2
from .flatten_swin import FlattenSwin
from .linearized import Linearized
from .replace_attention import replace_attention

__all__ = [
    'RELEASES',
    'AttentionResNet',
    'FlattenCSwin',
    'FlattenPVT',
    'FlattenPVTv2',
    'FlattenSwin',
    'FlattenViT',
    'Linearized',
    'Release',
    'replace_attention',
    'use_hub',
]
