"""The state of the random generators, as plain types and tensors that a checkpoint can hold."""
import random
from typing import Any

import numpy as np
import torch

__all__ = ['random_state', 'set_random_state']


def random_state(device: torch.device) -> dict[str, Any]:
    """State of the global generators of Python, NumPy, torch, and torch on the device."""
    numpy = np.random.get_state(legacy=False)
    numpy['state'] = {**numpy['state'], 'key': numpy['state']['key'].tolist()}
    state = {'python': random.getstate(), 'numpy': numpy, 'torch': torch.get_rng_state()}
    if device.type != 'cpu':
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue from what `random_state` returned; the device's part only on a device of the same kind."""
    random.setstate(state['python'])
    numpy = state['numpy']
    np.random.set_state({**numpy, 'state': {**numpy['state'], 'key': np.array(numpy['state']['key'], np.uint32)}})
    torch.set_rng_state(state['torch'])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])
