"""The loader alone and the model alone."""

import re
import shlex
import time

import pytest
import torch

from flatten_zoo.cli import main
from flatten_zoo.training import loader_bench

from .tiny_images import write_images, write_shards

TINY = shlex.split('--model test_resnet --num-classes 3 --img-size 32 -b 6 -j 0 --lr 0.02 --device cpu')


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp('data'))


def figures(capsys, *options) -> tuple[float, float, str]:
    capsys.readouterr()
    assert main(['bench', '--loader', *TINY, '--seconds', '0.4', *map(str, options)]) == 0
    output = capsys.readouterr().out
    match = re.fullmatch(
        r'loader alone +(\S+) images/s  \d workers, \d+ CPU cores\n'
        r'model alone +(\S+) images/s  training on cpu, 6 images at a time\nlimit: the (\w+)\n',
        output,
    )
    assert match, output
    return float(match[1]), float(match[2]), match[3]


class Slow(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.1)
        return x


def test_slow_loader_is_the_limit(images, capsys, monkeypatch):
    build = loader_bench.training_loader

    def slow_loader(*args):
        loader = build(*args)
        loader.dataset.transform.transforms.append(Slow())
        return loader

    monkeypatch.setattr(loader_bench, 'training_loader', slow_loader)
    loader, model, limit = figures(capsys, images)
    assert 5 < loader < 10  # a tenth of a second for each image
    assert model > loader
    assert limit == 'loader'


def test_slow_model_is_the_limit(images, capsys, monkeypatch):
    build = loader_bench.build_training_model

    def slow_model(args):
        model = build(args)
        model.register_forward_pre_hook(lambda *_: time.sleep(0.1))
        return model

    monkeypatch.setattr(loader_bench, 'build_training_model', slow_model)
    loader, model, limit = figures(capsys, images, '--no-aug')
    assert 5 < model < 60  # a tenth of a second for each batch of six
    assert loader > model
    assert limit == 'model'


@pytest.mark.parametrize('options', ['-j 1 --mixup 0.5 --model-ema', '--no-prefetcher --mixup 0.5', '--dataset wds/x'])
def test_options_of_training(tmp_path, images, capsys, options):
    root = write_shards(tmp_path / 'shards', images) if 'wds' in options else images
    loader, model, _ = figures(capsys, root, *options.split())
    assert loader > 0 and model > 0


def test_nothing_is_written(tmp_path, images, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figures(capsys, images)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'options, message',
    [
        (['--seconds', '0'], 'error: --seconds 0.0: must be positive'),
        (['--second', '1'], "error: unknown option '--second'; did you mean --seconds"),
        (['/none'], "error: --data-dir '/none' does not exist"),
    ],
)
def test_mistakes_are_one_line(capsys, options, message):
    assert main(['bench', '--loader', *TINY, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == '' and captured.err.splitlines()[-1].startswith(message)
