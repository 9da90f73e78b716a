"""Pictures of what the attention does: `reading` takes the numbers out of a model, `drawing` makes figures of them."""

from .drawing import draw
from .reading import (
    DEFAULT_POINTS,
    EnergyMaps,
    Form,
    GlobalMaps,
    QueryMaps,
    attention_layers,
    efficient_attention_maps,
    focused_linear_forms,
    interlaced_attention_forms,
    layer_inputs,
    non_local_attention_forms,
    queries_keys_values,
    read_attention,
    read_energy,
)
from .rendering import load_picture, render

__all__ = [
    'DEFAULT_POINTS',
    'EnergyMaps',
    'Form',
    'GlobalMaps',
    'QueryMaps',
    'attention_layers',
    'draw',
    'efficient_attention_maps',
    'focused_linear_forms',
    'interlaced_attention_forms',
    'layer_inputs',
    'load_picture',
    'non_local_attention_forms',
    'queries_keys_values',
    'read_attention',
    'read_energy',
    'render',
]
