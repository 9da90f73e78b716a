"""Predictions and features of pictures: against the network's own, in every format, and what can't be read."""
import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from timm.models import list_pretrained

from flatten_zoo.cli import main
from flatten_zoo.images import open_image
from flatten_zoo.predict.labels import class_labels

from .tiny_images import write_images, write_parquet, write_shards, write_tars

NAMES = ['café', 'dog, with a comma', '=emu']


def write_run(path, num_classes=3, name='test_resnet', **changes):
    """A checkpoint as a run of train.py writes it; its size is not the model's own."""
    torch.manual_seed(0)
    kwargs = changes.pop('kwargs', {})
    model = timm.create_model(name, num_classes=num_classes, **kwargs).eval()
    for parameter in model.parameters():  # so that images differ
        parameter.data += 0.05 * torch.randn_like(parameter)
    args = {'img_size': 32, 'crop_pct': 0.9, 'mean': [0.4, 0.5, 0.6], 'model_kwargs': kwargs}
    torch.save({'arch': name, 'state_dict': model.state_dict(), 'label_names': NAMES, 'args': args} | changes, path)
    return model


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run's checkpoint, its network, and a function from a picture's path to what the network takes."""
    path = tmp_path_factory.mktemp('run') / 'last.pth.tar'
    model = write_run(path)
    transform = create_transform((3, 32, 32), crop_pct=0.9, mean=(0.4, 0.5, 0.6), interpolation='bicubic')
    return path, model, lambda picture: transform(open_image(picture))


@pytest.fixture(scope='module')
def pictures(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp('pictures'), train=1, validation=4)


def predict(*argv):
    return main(['predict', '--device', 'cpu', *map(str, argv)])


def predicted(tmp_path, *argv, status=0):
    """The records of a run of the command."""
    path = tmp_path / 'predicted.json'
    assert predict(*argv, '--results-file', path) == status
    return json.loads(path.read_text())


@torch.no_grad()
def expected_of(run, paths, topk=3):
    _, model, read = run
    probabilities = model(torch.stack([read(path) for path in paths])).softmax(1)
    probabilities, indices = probabilities.topk(topk)
    return [{'filename': str(path), 'index': i.tolist(), 'label': [NAMES[n] for n in i], 'prob': p.tolist()}
            for path, i, p in zip(paths, indices, probabilities, strict=True)]


def assert_same(actual, expected):
    assert len(actual) == len(expected) > 0
    for a, b in zip(actual, expected, strict=True):
        assert {**a, 'prob': pytest.approx(b['prob'], abs=1e-5)} == b


def read_csv(text):
    """The records of CSV."""
    rows = list(csv.DictReader(text.splitlines()))
    ranks = range(1, (len(rows[0]) - 1) // 3 + 1)
    return [{'filename': row['filename'], 'index': [int(row[f'index_{n}']) for n in ranks],
             'label': [row[f'label_{n}'] for n in ranks], 'prob': [float(row[f'prob_{n}']) for n in ranks]}
            for row in rows]


READERS = {'csv': read_csv, 'json': json.loads, 'jsonl': lambda text: [json.loads(line) for line in text.splitlines()]}


@pytest.mark.parametrize('workers', [0, 2])
def test_every_format(run, pictures, tmp_path, capsys, workers):
    """In the order of the folder, whatever the batches; to files and to the terminal."""
    expected = expected_of(run, sorted(pictures.rglob('*.png')), topk=2)
    arguments = '--checkpoint', run[0], '--topk', 2, '-b', 4, '-j', workers, pictures
    for format, read in READERS.items():
        path = tmp_path / f'new.{format}'
        assert predict(*arguments, '--results-file', path) == 0
        assert capsys.readouterr().out == f'{path}: {len(expected)} images\n'
        assert_same(read(path.read_text(encoding='utf-8')), expected)
        assert predict(*arguments, '--results-format', format) == 0
        assert_same(read(capsys.readouterr().out), expected)
    assert predict(*arguments, '--results-file', tmp_path / 'results', '--results-format', 'parquet') == 0
    assert_same(pyarrow.parquet.read_table(tmp_path / 'results').to_pylist(), expected)
    capsys.readouterr()
    assert predict(*arguments) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ['image', 'rank', 'probability', 'class']
    for record, first, second in zip(expected, lines[::2], lines[1::2], strict=True):
        assert first.split() == [record['filename'], '1', f'{record["prob"][0]:.1%}', *record['label'][0].split()]
        assert second.split() == ['2', f'{record["prob"][1]:.1%}', *record['label'][1].split()]


def test_at_most_all_classes(run, pictures, tmp_path):
    paths = sorted(pictures.glob('train/*/*'))
    assert_same(predicted(tmp_path, '--checkpoint', run[0], '--topk', 99, *paths), expected_of(run, paths))


@pytest.mark.parametrize('format', ['npz', 'parquet'])
@pytest.mark.parametrize('name, kwargs', [('test_resnet', {}), ('flatten_deit_t', {'img_size': 32, 'depth': 1})])
@torch.no_grad()
def test_embeddings_are_pooled_features(name, kwargs, format, pictures, tmp_path):
    model = write_run(tmp_path / 'last.pth.tar', name=name, kwargs=kwargs)
    path = tmp_path / f'new.{format}'
    paths = sorted(pictures.glob('validation/*/*'))
    assert predict('--checkpoint', tmp_path / 'last.pth.tar', '-b', 5, '--embeddings', path, *paths) == 0
    if format == 'npz':
        arrays = np.load(path)
        names, actual = arrays['filename'].tolist(), arrays['embedding']
    else:
        table = pyarrow.parquet.read_table(path)
        names, actual = table['filename'].to_pylist(), np.array(table['embedding'].to_pylist(), np.float32)
    assert names == list(map(str, paths)) and actual.dtype == np.float32
    transform = create_transform((3, 32, 32), crop_pct=0.9, mean=(0.4, 0.5, 0.6), interpolation='bicubic')
    images = torch.stack([transform(open_image(path)) for path in paths])
    model.reset_classifier(0)
    np.testing.assert_allclose(actual, model(images), atol=1e-4)


@pytest.mark.parametrize('source', ['folder', 'address', 'onnx', 'batched onnx'])
def test_where_a_run_goes_its_classes_and_preprocessing_go(source, run, pictures, tmp_path):
    """As the run's output folder, converted, and exported: the same predictions."""
    path, folder = tmp_path / 'model_best.pth.tar', tmp_path / 'hub'
    shutil.copy(run[0], path)
    arguments = ['--checkpoint', tmp_path]
    if source == 'address':
        model = write_run(path, name='ea_resnet50', kwargs={'layers': (1, 1, 1, 1)})
        run = path, model, run[2]
        assert main(['convert', str(path), '-o', str(folder)]) == 0
        arguments = ['--model', f'local-dir:{folder}']
    elif source.endswith('onnx'):
        onnx = tmp_path / 'run.onnx'
        dynamic = ['--dynamic', 'batch'] if source.startswith('batched') else []
        assert main(['export', 'test_resnet', '--checkpoint', str(path), *dynamic, '-o', str(onnx)]) == 0
        arguments = ['--model', onnx]
    paths = sorted(pictures.glob('validation/*/*'))
    assert_same(predicted(tmp_path, *arguments, *paths), expected_of(run, paths))
