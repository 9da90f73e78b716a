"""Training stereo matching."""

import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from flatten_zoo.cli import main
from flatten_zoo.dense import SceneFlowPairs, psmnet, write_stereo_pairs

pytest.importorskip('accelerate')
ROOT = Path(__file__).parents[1]
TINY = shlex.split('--image-size 32 32 --max-disparity 8 --pairs 2 --batch-size 2 --epochs 1 --device cpu')


def test_training_on_a_folder_of_larger_pairs(tmp_path, capsys):
    write_stereo_pairs(tmp_path / 'data', 2, 1, (33, 45), 8)
    for attention in ('nl', 'none'):
        output = tmp_path / attention
        options = ['--attention', attention, '--data', str(tmp_path / 'data'), '--output', str(output)]
        assert main(['train-dense', 'stereo', *TINY, *options]) == 0
        saved = torch.load(output / 'best.pth', weights_only=True)
        assert math.isfinite(saved['scores']['EPE'])
        state = {name.removeprefix('model.'): x for name, x in saved['model'].items()}
        psmnet(8, None if attention == 'none' else attention).load_state_dict(state)
        assert Image.open(output / 'predictions.png').width > 1000
    options = ['--image-size', '32', '48', '--data', str(tmp_path / 'data'), '--output', str(tmp_path / 'out')]
    assert main(['train-dense', 'stereo', *TINY, *options]) == 2
    assert '--image-size 32 48 is more than the 33 × 45 of the images in' in capsys.readouterr().err


@pytest.mark.slow
def test_psmnet_learns(tmp_path):
    """From nothing, in three of the four epochs that are the default."""
    arguments = ['train-dense', 'stereo', '--epochs', '3', '--output', tmp_path]
    subprocess.run([sys.executable, '-m', 'flatten_zoo', *arguments], cwd=ROOT, check=True)
    held_out = SceneFlowPairs(next(tmp_path.glob('pairs-*')), 'TEST')
    truth = torch.cat([target['disparity'].flatten() for _, _, target in held_out])
    guess = (truth - truth.median()).abs().mean()
    assert torch.load(tmp_path / 'best.pth', weights_only=True)['scores']['EPE'] < 1 < guess
