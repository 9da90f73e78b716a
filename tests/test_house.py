"""The house: private names of timm and torch, which fail here by name when an upgrade moves them, and imports."""

import ast
import graphlib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import flatten_zoo

ROOT = Path(flatten_zoo.__file__).parent
HOMES = {'_timm.py', '_torch.py'}
LIBRARIES = ('timm', 'torch', 'torchvision', 'huggingface_hub', 'safetensors')


MEMBERS = {  # of timm's classes, which the zoo overrides, calls or sets where it has to
    'timm.utils.CheckpointSaver': ('_save', '_replace', '_duplicate'),  # a file under its final name is always whole
    'timm.utils.ModelEmaV3': ('_sr_generator',),  # has to go on with the run
    'timm.data.ImageDataset': ('_max_retries',),  # no second image in place of one that cannot be read
    'timm.data.readers.reader_wds.ReaderWds': ('_lazy_init',),  # decides which process reads which part of a stream
    'timm.data.readers.reader_hfids.ReaderHfids': ('_lazy_init',),
    'timm.models.swin_transformer.SwinTransformerBlock': ('_attn',),  # what a block's linear attention is to give
    'timm.models.swin_transformer_v2.SwinTransformerV2Block': ('_attn',),
    'timm.models.swin_transformer.SwinTransformer': ('_ref_window_sizes',),  # windows of a Swin with dilated stages
}


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


@pytest.mark.parametrize('owner, member', [(owner, member) for owner, members in MEMBERS.items() for member in members])
def test_member_is_there(owner, member):
    module, _, name = owner.rpartition('.')
    if 'hf' in module:
        pytest.importorskip('datasets')
    source = inspect.getsource(getattr(importlib.import_module(module), name))
    assert re.search(rf'\b{member}\b', source), f'{owner}.{member} has gone: mend who uses it'


def test_has_its_place():
    elsewhere = {
        str(path.relative_to(ROOT)): names
        for path in ROOT.rglob('*.py')
        if path.name not in HOMES and (names := private_names(path))
    }
    assert not elsewhere, 'private names belong in flatten_zoo/_timm.py or _torch.py'


def imports_at_start(path: Path, package: str, modules: set[str]) -> set[str]:
    """The package's modules that one imports when it is imported, those for type checkers counted."""
    found = set()
    pending = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If | ast.Try):
            pending += [*node.body, *node.orelse]
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            name = '.' * node.level + (node.module or '')
            base = importlib.util.resolve_name(name, package) if node.level else name
            found |= {base} | {f'{base}.{alias.name}' for alias in node.names}
    return found & modules


def test_no_circle_of_imports():
    paths = {
        '.'.join(path.relative_to(ROOT.parent).with_suffix('').parts).removesuffix('.__init__'): path
        for path in ROOT.rglob('*.py')
    }
    graph = {}
    for name, path in paths.items():
        package = name if path.name == '__init__.py' else name.rpartition('.')[0]
        graph[name] = imports_at_start(path, package, set(paths)) - {name}
        if path.name != '__init__.py':  # a submodule's import runs its package's __init__ too, which is no circle
            graph[name] -= {package}
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle
