"""Logging to Weights & Biases, by a stand-in for its package."""

import shlex
import sys
from types import SimpleNamespace

import pytest
import timm.utils.summary
import yaml

from flatten_zoo.errors import UsageError
from flatten_zoo.training.options.definitions import train_parser
from flatten_zoo.training.train import main

from .tiny_images import write_images

pytestmark = pytest.mark.usefixtures('no_pictures')
TINY = shlex.split(
    '--model test_resnet --num-classes 3 --img-size 32 -b 6 -j 0 --epochs 2 --lr 0.02 --warmup-epochs 0 --device cpu '
    '--experiment run --log-wandb'
)


@pytest.fixture
def wandb(monkeypatch):
    calls = SimpleNamespace(begun=[], rows=[])
    package = SimpleNamespace(init=lambda **kwargs: calls.begun.append(kwargs), log=calls.rows.append)
    monkeypatch.setitem(sys.modules, 'wandb', package)
    monkeypatch.setattr(timm.utils.summary, 'wandb', package, raising=False)
    return calls


def test_every_epoch_is_logged(tmp_path, wandb):
    images = str(write_images(tmp_path / 'data'))
    argv = [*TINY, images, '--output', str(tmp_path), '--wandb-project', 'zoo', '--wandb-tags', 'a', 'b']
    assert main(argv) == 0
    (begun,) = wandb.begun
    assert (begun['project'], begun['name'], begun['tags'], begun['resume']) == ('zoo', 'run', ['a', 'b'], None)
    assert begun['config']['model'] == 'test_resnet'
    assert [row['epoch'] for row in wandb.rows] == [0, 1]
    assert {'train_loss', 'eval_top1', 'lr'} <= set(wandb.rows[0])
    assert main([*argv, '--resume', 'auto', '--epochs', '3', '--wandb-resume-id', 'x1']) == 0
    assert (wandb.begun[1]['id'], wandb.begun[1]['resume']) == ('x1', 'must')
    assert [row['epoch'] for row in wandb.rows] == [0, 1, 2]


def test_missing_package_is_named_and_leaves_no_output(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    images = str(write_images(tmp_path / 'data'))
    with pytest.raises(UsageError, match='--log-wandb needs the package wandb'):
        main([*TINY, images, '--output', str(tmp_path / 'out')])
    assert not (tmp_path / 'out').exists()


def test_no_tags_are_read_back(tmp_path):
    path = tmp_path / 'options.yaml'
    path.write_text(yaml.safe_dump({'wandb_tags': []}))
    assert train_parser().parse_with_config(['-c', str(path)]).wandb_tags == []
