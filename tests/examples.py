"""Access to the scripts in `examples/`, which are no package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock


def load_example(name: str) -> ModuleType:
    """The module `examples/NAME.py`."""
    path = Path(__file__).parents[1] / 'examples' / f'{name}.py'
    spec = importlib.util.spec_from_file_location(f'example_{name}', path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, 'path', [str(path.parent), *sys.path]):  # as when it is run
        spec.loader.exec_module(module)
    return module
