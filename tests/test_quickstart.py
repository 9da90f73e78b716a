"""The quickstart, as `make demo` runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flatten_zoo.samples.digits import write_digits
from flatten_zoo.training.options.definitions import train_parser

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / 'configs' / 'quickstart.yaml'


@pytest.mark.parametrize('path', sorted((ROOT / 'configs').glob('*.yaml')), ids=lambda path: path.stem)
def test_configurations_are_valid(path):
    train_parser().check(yaml.safe_load(path.read_text()), source=path)


@pytest.mark.slow
def test_quickstart_reads_digits(tmp_path):
    write_digits(tmp_path / 'data' / 'digits')
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    subprocess.run([sys.executable, ROOT / 'train.py', '--config', CONFIG], cwd=tmp_path, env=environment, check=True)
    done = subprocess.run(
        [sys.executable, ROOT / 'validate.py', '--checkpoint', 'output/train/quickstart'],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    results = json.loads(done.stdout.removeprefix('--result\n'))
    assert results['images'] == 360
    assert results['top1'] >= 98.5
