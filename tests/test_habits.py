"""What a public project has around its code."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import flatten_zoo

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / 'pyproject.toml').read_text()
VERSION = re.search(r'^version = "(.+)"', PYPROJECT, re.M)[1]
MODULES = ('flatten_zoo', 'flatten_zoo.dense', 'flatten_zoo.weights')


def public_objects() -> list[tuple[str, object]]:
    modules = map(importlib.import_module, MODULES)
    return [(f'{module.__name__}.{name}', getattr(module, name)) for module in modules for name in module.__all__]


@pytest.mark.slow
def test_documentation(tmp_path: Path):
    """The site is built without warnings, and every public object has its place there."""
    pytest.importorskip('mkdocstrings')
    done = subprocess.run(
        [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--quiet', '--site-dir', tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pages = ''.join(page.read_text() for page in (tmp_path / 'api').rglob('*.html'))
    described = set(re.findall(r'<h2 id="([\w.]+)"', pages))
    # mkdocstrings shows what has a docstring; a function with the name of its module stands under both
    missing = [name for name, _ in public_objects() if not {name, f'{name}.{name.rpartition(".")[2]}'} & described]
    assert not missing


def test_docstrings():
    assert [name for name, value in public_objects() if callable(value) and not value.__doc__] == []


def test_version_is_the_same_everywhere():
    assert flatten_zoo.__version__ == VERSION
    assert re.search(r'^## (\S+) - ', (ROOT / 'CHANGELOG.md').read_text(), re.M)[1] == VERSION
    assert yaml.safe_load((ROOT / 'CITATION.cff').read_text())['version'] == VERSION


def test_oldest_releases_in_ci_are_those_of_the_package():
    dependencies = re.search(r'^dependencies = \[(.*?)^\]', PYPROJECT, re.M | re.S)[1]
    declared = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', dependencies))
    tried = dict(re.findall(r'^([\w-]+)==([\d.]+)$', (ROOT / '.github/minimum.txt').read_text(), re.M))
    assert len(declared) == dependencies.count('"') // 2
    assert tried.keys() == declared.keys()
    for name, version in declared.items():
        assert f'{tried[name]}.'.startswith(f'{version}.'), name


@pytest.mark.parametrize(
    'path',
    [
        '.pre-commit-config.yaml',
        '.github/workflows/ci.yml',
        '.github/ISSUE_TEMPLATE/bug.yml',
        '.github/ISSUE_TEMPLATE/config.yml',
        '.github/ISSUE_TEMPLATE/feature.yml',
        'mkdocs.yml',
        'CITATION.cff',
    ],
)
def test_files_can_be_read(path: str):
    assert yaml.safe_load((ROOT / path).read_text())
