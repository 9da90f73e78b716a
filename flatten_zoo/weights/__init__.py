"""Official weights and checkpoints: finding them, reading them safely, converting them, and publishing."""

from ..models import RELEASES, use_hub
from .catalogue import describe, list_table, zoo_models
from .checkpoint import read_checkpoint, select_state_dict
from .official import official_weights
from .official_names import from_official, to_official
from .open import load_model, open_model
from .publish import dry_run, hub_folder, push
from .save import save_model, write_weights

__all__ = [
    'RELEASES',
    'describe',
    'dry_run',
    'from_official',
    'hub_folder',
    'list_table',
    'load_model',
    'official_weights',
    'open_model',
    'push',
    'read_checkpoint',
    'save_model',
    'select_state_dict',
    'to_official',
    'use_hub',
    'write_weights',
    'zoo_models',
]
