"""`flatten-zoo run`: other scripts with the zoo's models registered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatten_zoo.cli import main

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys
import timm
from beside import LAYERS
from flatten_zoo import *

if __name__ == '__main__':
    model = timm.create_model('flatten_pvt_t', device='meta')
    print(type(model).__name__, replace_attention.__name__, LAYERS, __file__, sys.argv)
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / 'beside.py').write_text('LAYERS = 4\n')
    path = tmp_path / 'script.py'
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(sys, 'argv', sys.argv)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.delitem(sys.modules, 'beside', raising=False)


def flatten_zoo(*arguments, launcher=(), **kwargs) -> subprocess.CompletedProcess:
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    return subprocess.run(
        [sys.executable, *launcher, '-m', 'flatten_zoo', *map(str, arguments)],
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
        **kwargs,
    )


def test_script_runs_as_main_and_its_status_is_ours(script):
    done = flatten_zoo('run', 'script.py', 3, '--config', 'a b', '-c', '--', '--help', cwd=script.parent)
    assert done.returncode == 3, done.stderr
    arguments = ['script.py', '3', '--config', 'a b', '-c', '--', '--help']
    assert done.stdout == f'FlattenPVT replace_attention 4 script.py {arguments}\n'


def test_uncaught_exception_is_the_scripts_own(tmp_path):
    path = tmp_path / 'script.py'
    path.write_text('raise KeyError("not found")\n')
    with pytest.raises(KeyError, match='not found'):
        main(['run', str(path)])


@pytest.mark.parametrize('code, status', [('raise SystemExit("stopped")', 'stopped'), ('raise SystemExit(7)', 7)])
def test_exit_passes_through(tmp_path, code, status):
    path = tmp_path / 'script.py'
    path.write_text(code)
    with pytest.raises(SystemExit) as e:
        main(['run', str(path)])
    assert e.value.code == status


def test_end_without_exit_is_success(tmp_path, capsys):
    path = tmp_path / 'script.py'
    path.write_text('import sys, timm\nprint(timm.is_model("ea_resnet50"), sys.argv[1:])\n')
    assert main(['run', str(path), '--model', 'x']) == 0
    assert capsys.readouterr().out == "True ['--model', 'x']\n"


@pytest.mark.parametrize('name', ['missing.py', '.'])
def test_missing_script_is_one_line(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    assert main(['run', name, '--option']) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ('', f"error: there is no script '{name}'\n")


def test_no_script(capsys):
    with pytest.raises(SystemExit) as e:
        main(['run'])
    assert e.value.code == 2 and 'SCRIPT' in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun(tmp_path):
    path = tmp_path / 'script.py'
    path.write_text(
        'import os, sys, timm\n'
        'open(f"{sys.argv[1]}/{os.environ[\'RANK\']}", "w").write(str(timm.is_model("flatten_swin_t")))\n'
    )
    launcher = ('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2')
    done = flatten_zoo('run', path, tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in '01'] == ['True', 'True']
