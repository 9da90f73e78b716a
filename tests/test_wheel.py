"""The package without its repository: training's programs as subcommands, recipes by name, and the wheel."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flatten_zoo.cli import PROGRAMS, main
from flatten_zoo.training.options.parser import recipes

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize('name', PROGRAMS)
def test_programs_read_their_own_options(name, capsys):
    if 'dense' in name:
        pytest.importorskip('accelerate')
    words = [name, 'detection'] if name == 'train-dense' else [name]
    if name == 'validate-dense':  # whose options are those of a run
        assert main([name, '--help']) == 0
        assert capsys.readouterr().out.startswith('usage: flatten-zoo validate-dense FOLDER ')
        return
    with pytest.raises(SystemExit) as e:
        main([*words, '--help'])
    assert e.value.code == 0
    assert capsys.readouterr().out.startswith(f'usage: flatten-zoo {" ".join(words)} ')
    assert main([*words, '--modle', 'resnet18', '-j', '0']) == 2
    assert "unknown option '--modle'; did you mean --model" in capsys.readouterr().err


def test_recipes_by_name(capsys, tmp_path, monkeypatch):
    assert {path.name for path in recipes().values()} == {path.name for path in (ROOT / 'configs').glob('*.yaml')}
    nowhere = str(tmp_path / 'nowhere')
    assert main(['train', '--config', 'flatten_swin_t', '--data-dir', nowhere, '--device', 'cpu']) == 2
    assert f"--data-dir '{nowhere}' does not exist" in capsys.readouterr().err
    assert main(['train', '--config', 'flatten_swin_x']) == 2
    assert "--config: unknown recipe 'flatten_swin_x'; did you mean flatten_swin_" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    Path('flatten_swin_t').write_text('nonsense: 1')  # a file goes before a recipe
    assert main(['train', '--config', 'flatten_swin_t']) == 2
    assert "unknown option 'nonsense'" in capsys.readouterr().err


@pytest.mark.slow
def test_wheel_does_everything(tmp_path):
    """Built and installed by pip; its dependencies are those of this environment."""
    environment = {**os.environ, 'PYTHONPATH': str(tmp_path / 'site'), 'OMP_NUM_THREADS': '1'}

    def run(command: str) -> str:
        done = subprocess.run(
            [sys.executable, *shlex.split(command)], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    run(f'-m pip wheel --quiet --no-deps --wheel-dir . {shlex.quote(str(ROOT))}')
    (wheel,) = tmp_path.glob('*.whl')
    run(f'-m pip install --quiet --no-deps --target site {wheel.name}')
    assert run("-c 'import flatten_zoo; print(flatten_zoo.__file__)'").startswith(str(tmp_path / 'site'))
    run('-m flatten_zoo.samples.digits data/digits')
    log = run(
        '-m flatten_zoo train --config quickstart --model flatten_pvt_v2_b0 --model-kwargs img_size=32 '
        'depths=1,1,1,1 --epochs 1 --warmup-epochs 0 --device cpu -j 0'
    )
    (following,) = [line for line in log.splitlines() if line.startswith('next: ')]
    assert following == 'next: flatten-zoo validate --checkpoint output/train/quickstart'
    assert '"top1"' in run(following.replace('next: flatten-zoo', '-m flatten_zoo') + ' --device cpu -j 0')
    checkpoint = 'output/train/quickstart/model_best.pth.tar'
    picture = next((tmp_path / 'data/digits/validation/3').iterdir())
    assert picture.name in run(f'-m flatten_zoo predict {picture} --checkpoint {checkpoint} --device cpu')
    run(f'-m flatten_zoo export flatten_pvt_v2_b0 --checkpoint {checkpoint} --format pt2 -o digits.pt2')
    assert 'flatten_pvt_t' in run('-m flatten_zoo list')
