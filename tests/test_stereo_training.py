"""The example that trains stereo matching."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from flatten_zoo.dense import SceneFlowPairs, psmnet, write_stereo_pairs
from flatten_zoo.errors import UsageError
from tests.examples import load_example

ROOT = Path(__file__).parents[1]
TINY = ['--image-size', 32, 32, '--max-disparity', 8, '--pairs', 2, '--batch-size', 2, '--epochs', 1]


def run_example(*arguments):
    return load_example('train_stereo').main([str(argument) for argument in arguments])


def test_example(tmp_path, capsys):
    scores = run_example(*TINY, '--output', tmp_path)
    assert list(scores) == ['ea', 'none']
    out = capsys.readouterr().out
    assert out.count('epoch 1/1  loss ') == 2 and 'off by > 3 px' in out
    for name in scores:
        saved = torch.load(tmp_path / name / 'last.pth')
        assert saved['scores'] == scores[name] and math.isfinite(scores[name]['EPE'])
        psmnet(8, None if name == 'none' else name).load_state_dict(saved['model'])
        assert Image.open(tmp_path / name / 'predictions.png').width > 1000
    assert not (tmp_path / 'last.pth').exists()


def test_example_on_a_folder_of_larger_pairs(tmp_path):
    write_stereo_pairs(tmp_path / 'data', 2, 1, (33, 45), 8)
    arguments = [*TINY, '--attention', 'nl', '--data', tmp_path / 'data', '--output', tmp_path / 'out']
    assert list(run_example(*arguments)) == ['nl']
    assert [p.name for p in (tmp_path / 'out').iterdir()] == ['nl']
    with pytest.raises(UsageError, match='holds a trained network already'):
        run_example(*arguments)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--epochs', 0], '--epochs must be positive, got 0'),
        (['--pairs', 0], '--pairs must be positive, got 0'),
        (['--max-disparity', 10], 'max_disparity must be a positive multiple of 4, got 10'),
        (['--image-size', 16, 32], 'image_size must be at least 32 × 32, got 16 × 32'),
        (['--batch-size', 3], '--batch-size 3 is more than the 2 training images'),
        (['--data', 'nowhere'], "there are no pairs .* in 'nowhere/"),
    ],
)
def test_bad_arguments_of_the_example(tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        run_example(*TINY, '--output', tmp_path, *arguments)
    assert not list(tmp_path.rglob('last.pth'))


def test_parts_are_no_larger_than_the_images(tmp_path):
    write_stereo_pairs(tmp_path / 'data', 2, 1, (32, 40), 8)
    with pytest.raises(UsageError, match="--image-size 32 48 is more than the 32 × 40 of the images in '.*data'"):
        run_example(*TINY, '--image-size', 32, 48, '--data', tmp_path / 'data', '--output', tmp_path / 'out')


@pytest.mark.slow
def test_psmnet_learns(tmp_path):
    """From nothing, in half of the example's own few epochs."""
    arguments = ['--attention', 'ea', '--epochs', '2', '--output', tmp_path]
    subprocess.run([sys.executable, ROOT / 'examples' / 'train_stereo.py', *arguments], check=True)
    held_out = SceneFlowPairs(next(tmp_path.glob('pairs-*')), 'TEST')
    truth = torch.cat([target['disparity'].flatten() for _, _, target in held_out])
    guess = (truth - truth.median()).abs().mean()
    assert torch.load(tmp_path / 'ea' / 'last.pth')['scores']['EPE'] < 1 < guess
