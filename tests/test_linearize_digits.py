"""Attention transfer on handwritten digits, without labels: the table in docs/linearize.md."""

import json
import shlex
import time

import pytest

from flatten_zoo.cli import main
from flatten_zoo.samples.digits import write_digits
from flatten_zoo.training.train import main as train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('no_pictures')]
pytest.importorskip('sklearn')
VIT = 'deit_tiny_patch16_224'
COMMON = f"""
    --model {VIT} --num-classes 10 --img-size 32 --crop-pct 1
    --model-kwargs img_size=32 patch_size=4 depth=4 embed_dim=64 num_heads=2
    -j 0 --opt adamw --weight-decay 0.05 --sched-on-updates --clip-grad 1 --hflip 0 --color-jitter 0
    --train-interpolation bilinear --checkpoint-hist 1 --device cpu
"""


def seconds_of(run) -> float:
    """Computing time of this process, which is all there is without workers."""
    started = time.process_time()
    assert run() == 0
    return time.process_time() - started


def test_transfer_keeps_what_the_teacher_knows(tmp_path):
    digits, runs = tmp_path / 'digits', tmp_path / 'runs'
    write_digits(digits)

    def learn(name: str, options: str) -> float:
        words = shlex.split(f'{digits} {COMMON} {options} --output {runs} --experiment {name}')
        return seconds_of(lambda: train(words))

    def accuracy(name: str) -> float:
        with (runs / name / 'summary.csv').open() as file:
            header, *rows = (line.strip().split(',') for line in file)
        return max(float(row[header.index('eval_top1')]) for row in rows)

    crops, small = '--scale 0.7 1 --ratio 0.85 1.18', '--scale 0.85 1 --ratio 0.9 1.1'
    teaching = learn('teacher', f'-b 32 --epochs 50 --lr 1.5e-3 --warmup-epochs 3 {crops}')
    teaching += learn(
        'refined',
        f'-b 32 --epochs 16 --lr 8e-4 --warmup-epochs 1 --model-ema --model-ema-decay 0.99 {small} '
        f'--initial-checkpoint {runs / "teacher" / "last.pth.tar"}',
    )
    assert accuracy('refined') >= 96.5
    options = f'--checkpoint {runs / "refined" / "model_best.pth.tar"} --data {digits} -o {tmp_path / "out"}'
    options += ' -j 0 --device cpu --epochs 5 4 4 --lr 1e-2 2e-3 1e-3 --scale 0.85 1 --hflip 0 --sizes'
    transfer = seconds_of(lambda: main(['linearize', VIT, *shlex.split(options)]))
    assert transfer <= teaching / 3
    found = json.loads((tmp_path / 'out' / 'report.json').read_text())['accuracy']
    assert found['converted'] < found['teacher'] - 5
    assert found['network'] >= found['teacher'] - 1
