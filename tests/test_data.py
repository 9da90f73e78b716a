"""Every kind of data set: the same images through each reader, with and without loader processes."""
import csv
import json
import shlex
from pathlib import Path

import pytest

from flatten_zoo.errors import report_usage_errors
from flatten_zoo.training import sources
from flatten_zoo.training.train import main as train
from flatten_zoo.training.validate import main as validate

from .tiny_images import write_images, write_parquet, write_shards, write_tars

TINY = shlex.split('--model test_resnet --num-classes 3 --img-size 32 -b 6')
BRIEF = shlex.split('--epochs 2 --lr 0.02 --warmup-epochs 0')
LENGTHS = shlex.split('--train-num-samples 36 --val-num-samples 15')
SHARD_NAMES = ['--train-split', 'train-{0..3}.tar|36', '--val-split', 'validation-{0..3}.tar|15']


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A shuffled stream of `datasets` that is left before its end sleeps for 5 seconds."""
    monkeypatch.setattr('datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN', 0.1)


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    """The same images in every layout."""
    root = tmp_path_factory.mktemp('data')
    images = write_images(root / 'images')
    write_tars(root / 'tars', images)
    write_shards(root / 'shards', images)
    (write_shards(root / 'bare', images) / '_info.json').unlink()
    write_parquet(root / 'parquet', images)
    return root


@pytest.fixture(scope='module')
def checkpoint(root, tmp_path_factory):
    output = tmp_path_factory.mktemp('output')
    assert train([str(root / 'images'), *TINY, *BRIEF, '-j', '0', '--output', str(output), '--experiment', 'run']) == 0
    return output / 'run' / 'model_best.pth.tar'


def layouts(root) -> dict[str, list[str]]:
    """Options that read each layout in training; streams say how many images there are where they do not know."""
    return {
        'folder': [str(root / 'images')],
        'tar': [str(root / 'tars')],
        'torchvision': [str(root / 'images'), '--dataset', 'torch/image_folder'],
        'wds': [str(root / 'shards'), '--dataset', 'wds/tiny'],
        'wds by name': [str(root / 'bare'), '--dataset', 'wds/tiny', *SHARD_NAMES],
        'hfds folder': [str(root / 'cache'), '--dataset', f'hfds/{root}/images'],
        'hfds parquet': [str(root / 'cache'), '--dataset', f'hfds/{root}/parquet'],
        'hfids parquet': [str(root / 'cache'), '--dataset', f'hfids/{root}/parquet', *LENGTHS],
        'hfids prepared': [str(root / 'cache'), '--dataset', f'hfids/{root}/parquet', '--dataset-download'],
    }


NAMES = list(layouts(Path()))


def for_validation(options: list[str]) -> list[str]:
    """The same for `validate.py`, which has one split."""
    words = iter(options)
    kept = []
    for word in words:
        if word.startswith('--train-'):
            next(words)
        else:
            kept.append({'--val-split': '--split', '--val-num-samples': '--num-samples'}.get(word, word))
    return kept


def validated(capsys, checkpoint, *options) -> dict:
    capsys.readouterr()
    assert validate([*TINY, '--checkpoint', str(checkpoint), *options]) == 0
    return json.loads(capsys.readouterr().out.removeprefix('--result\n'))


@pytest.mark.parametrize('workers', ['0', '2'])
@pytest.mark.parametrize('name', NAMES)
def test_every_reader_gives_every_image_once_with_its_class(root, checkpoint, capsys, name, workers):
    expected = validated(capsys, checkpoint, str(root / 'images'), '-j', '0')
    found = validated(capsys, checkpoint, *for_validation(layouts(root)[name]), '-j', workers)
    assert found['images'] == expected['images'] == 15
    assert found['loss'] == pytest.approx(expected['loss'], abs=2e-4)
    assert found['top1'] == expected['top1'] > 60


@pytest.mark.parametrize('name', NAMES)
def test_every_reader_trains(root, tmp_path, caplog, name):
    argv = [*TINY, *BRIEF, *layouts(root)[name], '-j', '2', '--log-interval', '6']
    assert train([*argv, '--output', str(tmp_path), '--experiment', 'run']) == 0
    with (tmp_path / 'run' / 'summary.csv').open(newline='') as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]['train_loss']) < float(rows[0]['train_loss'])
    assert max(float(row['eval_top1']) for row in rows) > 60
    assert 'epoch 1/2  batch 6/6' in caplog.text  # an epoch is of 36 images


def test_order_of_a_stream_is_that_of_the_seed(root, tmp_path):
    options = [*TINY, *BRIEF, *layouts(root)['wds'], '-j', '2', '--output', str(tmp_path)]
    for experiment, seed in (('a', '42'), ('b', '42'), ('c', '43')):
        assert train([*options, '--epochs', '1', '--experiment', experiment, '--seed', seed]) == 0
    first, second, other = ((tmp_path / name / 'summary.csv').read_text() for name in 'abc')
    assert first == second != other


# Refusals

def refused(capsys, *options) -> str:
    capsys.readouterr()
    assert report_usage_errors(lambda: train([*TINY, *BRIEF, *map(str, options)])) == 2
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith('error: ')]
    assert 'Traceback' not in output.err
    assert output.out == ''
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize('name, message', [
    ('imagenet', "--dataset 'imagenet': must be PREFIX/NAME with prefix torch, hfds, hfids, tfds, wds"),
    ('tf/imagenet', "--dataset 'tf/imagenet': must be PREFIX/NAME"),
    ('torch/imagenette3', 'Unknown torchvision dataset imagenette3'),
    ('wds/tiny', "no _info.json in"),
])
def test_unknown_kinds_and_names(root, capsys, name, message):
    assert message in refused(capsys, root / 'images', '--dataset', name, '-j', 0)


@pytest.mark.parametrize('name, install', [
    ('hfds/x', "'flatten_zoo[hfds]'"), ('HFIDS/x', "'flatten_zoo[hfds]'"), ('wds/x', "'flatten_zoo[wds]'"),
    ('tfds/x', 'tensorflow tensorflow-datasets'),
])
def test_missing_packages(capsys, monkeypatch, name, install):
    monkeypatch.setattr(sources.importlib.util, 'find_spec', lambda package: None)
    line = refused(capsys, '--dataset', name, '-j', 0)
    assert f"--dataset '{name}' needs the package " in line
    assert line.endswith(f': pip install {install}')


def test_shards_without_a_folder(capsys):
    assert 'no data: give the folder (or address) of the shards' in refused(capsys, '--dataset', 'wds/x')


def test_missing_shards(tmp_path, capsys):
    shards = write_shards(tmp_path / 'shards', write_images(tmp_path / 'images'))
    (shards / 'train-2.tar').unlink()
    assert f"there is no shard '{shards}/train-2.tar'" in refused(capsys, shards, '--dataset', 'wds/tiny', '-j', 0)


@pytest.mark.filterwarnings('ignore:This DataLoader will create 5 worker processes')
def test_more_workers_than_shards(root, capsys):
    line = refused(capsys, root / 'shards', '--dataset', 'wds/tiny', '-j', 5)
    assert line.startswith("error: --workers 5: 'wds/tiny' has 4 shards for 1 training process, so at most 4 workers")


def test_more_workers_than_files_of_a_hugging_face_stream(root, tmp_path, capsys):
    one = write_parquet(tmp_path / 'parquet', root / 'images', shards=1)
    line = refused(capsys, tmp_path / 'cache', '--dataset', f'hfids/{one}', *LENGTHS, '-j', 2, '--output', tmp_path)
    assert 'reports 1 shard(s) for this process but the loader has 2 workers' in line


@pytest.mark.parametrize('workers', [0, 1])
def test_unreadable_image_in_a_stream(tmp_path, capsys, workers):
    images = write_images(tmp_path / 'images')
    (images / 'train' / 'green' / '3.png').write_bytes(b'nothing')
    parquet = write_parquet(tmp_path / 'parquet', images)
    options = ('--dataset', f'hfids/{parquet}', *LENGTHS, '-j', workers, '--output', tmp_path / 'output')
    line = refused(capsys, tmp_path / 'cache', *options)
    assert line.startswith(f"error: cannot read on in 'hfids/{parquet}': cannot identify image file")


def test_unreadable_image_of_a_hugging_face_dataset_is_named(tmp_path, capsys):
    images = write_images(tmp_path / 'images')
    (images / 'train' / 'green' / '3.png').write_bytes(b'nothing')
    parquet = write_parquet(tmp_path / 'parquet', images)
    line = refused(
        capsys, tmp_path / 'cache', '--dataset', f'hfds/{parquet}', '-j', 0, '--output', tmp_path / 'output')
    assert line == "error: cannot read the image '3.png'; remove or replace it"


@pytest.mark.parametrize('options, message', [
    ('wds/x --input-key tiff', "error: no image in 'wds/x' can be read"),
    ('wds/x --target-key kind', "error: cannot read on in 'wds/x': Target key(s) ['kind'] require a json sidecar"),
    ('hfds/{root}/parquet --input-key photo', "error: --input-key photo: 'hfds/{root}/parquet' has no such column, "
                                              'but image, label'),
    ('hfds/{root}/parquet --target-key kind', 'error: --target-key kind: '),
    ('hfids/{root}/parquet --input-key photo', "error: 'hfids/{root}/parquet' has no column 'photo': name others by"),
])
@pytest.mark.parametrize('workers', [0, 1])
def test_keys_that_are_not_there(root, tmp_path, capsys, options, message, workers):
    options = options.format(root=root).split()
    data = root / 'shards' if options[0].startswith('wds') else tmp_path / 'cache'
    lengths = LENGTHS if options[0].startswith('hfids') else ()
    line = refused(capsys, data, '--dataset', *options, *lengths, '-j', workers, '--output', tmp_path)
    assert line.startswith(message.format(root=root))


def test_validation_without_an_image(root, checkpoint, capsys):
    options = ('--checkpoint', checkpoint, root / 'shards', '--dataset', 'wds/x', '--input-key', 'tiff', '-j', 0)
    assert report_usage_errors(lambda: validate([*TINY, *map(str, options)])) == 2
    assert 'error: test_resnet: no image can be read\n' in capsys.readouterr().err


def test_passes_in_an_epoch(root, tmp_path, caplog):
    """Of training, not of validation."""
    options = [*layouts(root)['hfids parquet'], '-j', '0', '--epoch-repeats', '2', '--epochs', '1']
    assert train([*TINY, *BRIEF, *options, '--output', str(tmp_path), '--log-interval', '1']) == 0
    assert 'epoch 0/1  batch 12/12' in caplog.text
    assert '72 for training and 15 for validation' in caplog.text
