"""Private names of timm and torch: an upgrade that moves one fails here by its name."""
import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import flatten_zoo

ROOT = Path(flatten_zoo.__file__).parent
HOMES = {'_timm.py', '_torch.py'}
LIBRARIES = ('timm', 'torch', 'torchvision', 'huggingface_hub', 'safetensors')


def is_private(name: str) -> bool:
    first, *parts = name.split('.')
    return first in LIBRARIES and any(part.startswith('_') and not part.startswith('__') for part in parts)


def names_of(path: Path) -> Iterator[str]:
    """What a file names of the libraries: `from timm.x import y`, `import torch.x`, `torch.x.y`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f'{node.module}.{alias.name}' for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def private_names(*paths: Path) -> list[str]:
    return sorted({name for path in paths for name in names_of(path) if is_private(name)})


@pytest.mark.parametrize('name', private_names(*(ROOT / name for name in HOMES)))
def test_is_where_it_was(name):
    module, _, attribute = name.rpartition('.')
    assert hasattr(importlib.import_module(module), attribute), f'{name} has moved: mend it in flatten_zoo/_*.py'


def test_has_its_place():
    elsewhere = {
        str(path.relative_to(ROOT)): names for path in ROOT.rglob('*.py')
        if path.name not in HOMES and (names := private_names(path))}
    assert not elsewhere, 'private names belong in flatten_zoo/_timm.py or _torch.py'
