"""The official implementations' float64 outputs, and the weights and inputs that belong to them.

`NAME.json` lists a network's (or module's) state-dict entries, `NAME.npz` holds its outputs; `deterministic.py` makes
the weights and inputs from names and shapes.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from . import deterministic

FOLDER = Path(__file__).parent


@dataclass
class Reference:
    """One official network or module: its float64 state dict, an input, and what it made of it."""

    state_dict: dict[str, torch.Tensor]
    input: torch.Tensor
    outputs: dict[str, torch.Tensor]
    description: dict


def load_description(name: str) -> dict:
    return json.loads((FOLDER / f'{name}.json').read_text())


def load_reference(name: str) -> Reference:
    description = load_description(name)
    with np.load(FOLDER / f'{name}.npz') as outputs:
        return Reference(
            state_dict={
                key: torch.from_numpy(np.asarray(deterministic.tensor_values(key, tuple(shape))))
                for key, shape in description['state_dict'].items()
            },
            input=torch.from_numpy(deterministic.image_batch(tuple(description['input_shape']))),
            outputs={key: torch.from_numpy(value) for key, value in outputs.items()},
            description=description,
        )
