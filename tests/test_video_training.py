"""Training temporal action detection."""

import shlex

import pytest
import torch
from PIL import Image

from flatten_zoo.cli import main
from flatten_zoo.dense import rc3d, write_clips
from flatten_zoo.dense.training.video import small_trunk

TINY = shlex.split('--frames 16 --image-size 32 --clips 2 --batch-size 2 --epochs 1 --device cpu')


def train(*arguments) -> int:
    pytest.importorskip('accelerate')
    return main(['train-dense', 'video', *map(str, arguments)])


def test_training(tmp_path):
    assert train(*TINY, '--attention', 'none', '--output', tmp_path) == 0
    saved = torch.load(tmp_path / 'best.pth', weights_only=True)
    assert list(saved['scores'])[3:] == [f'mAP@{i / 10:g}' for i in range(1, 8)]
    assert saved['classes'] == ['background', 'blink', 'move', 'turn']
    rc3d(small_trunk(), 4, anchor_scales=(1, 1.5, 2, 3, 4)).load_state_dict(saved['model'])
    assert Image.open(tmp_path / 'predictions.png').width > 1000


def test_training_on_a_folder_of_longer_clips(tmp_path, capsys):
    write_clips(tmp_path / 'data', 2, 1, 24, 32)
    arguments = [*TINY, '--data', tmp_path / 'data', '--fps', 6, '--output', tmp_path / 'out']
    assert train(*arguments) == 0
    network = rc3d(small_trunk(), 4, 'ea')  # with the anchors for THUMOS14
    network.load_state_dict(torch.load(tmp_path / 'out' / 'best.pth', weights_only=True)['model'])
    assert main(['predict-dense', str(tmp_path / 'out'), str(tmp_path / 'data')]) == 2
    assert 'was trained for video, which finds no classes in images' in capsys.readouterr().err


@pytest.mark.parametrize(
    'arguments, message',
    [
        ('--frames 15', 'num_frames must be at least 16, got 15'),
        ('--backbone resnet50', "argument --backbone: invalid choice: 'resnet50'"),
        ('--pretrained', '--backbone small has no pretrained weights: leave out --pretrained'),
        ('--val-subset test', "has no videos of subset 'test', only of training, validation"),
        ('--data nowhere', "there is no folder 'nowhere' (--data)"),
        ('--fps 0', 'argument --fps: expects a number above 0, not 0'),
    ],
)
def test_bad_arguments(tmp_path, capsys, arguments, message):
    assert train(*TINY, '--output', tmp_path, *arguments.split()) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob('last.pth'))


@pytest.mark.slow
def test_rc3d_learns(tmp_path):
    """From nothing, on generated clips."""
    assert train('--output', tmp_path) == 0
    assert torch.load(tmp_path / 'best.pth', weights_only=True)['scores']['mAP@0.5'] >= 0.6
