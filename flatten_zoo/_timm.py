"""Private names of timm's that have no public twin, for the one place to mend when an upgrade moves them.

`tests/test_house.py` fails by the name of what is gone, private members of timm's classes included.
"""

from timm.layers import _assert  # torch's, which scripting and tracing keep; a plain `assert` they would drop
from timm.models._features import (
    FeatureGetterNet,  # makes the maps of `features_only` from a network that there is
    feature_take_indices,  # how timm reads `indices` of intermediates
)
from timm.models._hub import (
    generate_readme,  # the model card that timm's own push writes
    get_cache_dir,  # where timm keeps files of `pretrained=True`
    load_model_config_from_path,  # public for addresses of the Hub alone
)
from timm.models._input import update_model_args  # what a changed network is to be built with again
from timm.models._manipulate import MATCH_PREV_GROUP  # `group_matcher`: with the layer before

__all__ = [
    'MATCH_PREV_GROUP',
    'FeatureGetterNet',
    '_assert',
    'feature_take_indices',
    'generate_readme',
    'get_cache_dir',
    'load_model_config_from_path',
    'update_model_args',
]
