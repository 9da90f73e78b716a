"""The rooms of the house: nothing imports in a circle, for type checkers either."""
import ast
from graphlib import TopologicalSorter
from pathlib import Path

import flatten_zoo

TRAINING = Path(flatten_zoo.__file__).parent / 'training'


def imported(path: Path) -> set[Path]:
    """The files of `training/` that one of them imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].joinpath(*(node.module or '').split('.'))
            found |= {folder.with_suffix('.py'), *(folder / f'{alias.name}.py' for alias in node.names)}
    return {file for file in found if file.is_file() and TRAINING in file.parents}


def test_training_has_no_circle_of_imports():
    graph = {path: imported(path) for path in TRAINING.rglob('*.py')}
    assert graph[TRAINING / 'continuing.py'] and TRAINING / 'continuing.py' in graph[TRAINING / 'train.py']
    TopologicalSorter(graph).prepare()  # a circle is an error that names its files
