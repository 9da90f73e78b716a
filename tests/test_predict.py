"""Predictions and features of pictures: against the network's own, in every format, and what can't be read."""

import csv
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset
from timm.models import list_pretrained

from flatten_zoo.cli import main
from flatten_zoo.export import description_of
from flatten_zoo.images import open_image
from flatten_zoo.predict.labels import IMAGENET_TAG, class_labels
from flatten_zoo.predict.network import Network

from .tiny_images import write_images, write_parquet, write_shards, write_tars

SMALL = {'img_size': 32, 'depths': (1, 1, 1, 1), 'embed_dims': (16, 32, 40, 64)}
NAMES = ['café', 'dog, with a comma', '=emu']


def write_run(path, num_classes=3, name='test_resnet', in_chans=3, **changes):
    """A checkpoint as a run of train.py writes it; its size is not the model's own."""
    torch.manual_seed(0)
    kwargs = changes.pop('kwargs', {})
    model = timm.create_model(name, num_classes=num_classes, in_chans=in_chans, **kwargs).eval()
    for parameter in model.parameters():  # so that images differ
        parameter.data += 0.05 * torch.randn_like(parameter)
    args = {
        'img_size': 32,
        'in_chans': in_chans,
        'crop_pct': 0.7,
        'crop_mode': 'center',
        'interpolation': 'nearest',
        'mean': [0.4, 0.5, 0.6][:in_chans],
        'std': [0.2, 0.3, 0.4][:in_chans],
    }
    torch.save(
        {
            'arch': name,
            'state_dict': model.state_dict(),
            'label_names': NAMES,
            'args': {**args, 'model_kwargs': kwargs},
            **changes,
        },
        path,
    )
    return model


read = create_transform((3, 32, 32), crop_pct=0.7, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), interpolation='nearest')


@torch.no_grad()
def outputs_of(model, paths):
    return model(torch.stack([read(open_image(path)) for path in paths]))


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run's checkpoint and its network."""
    path = tmp_path_factory.mktemp('run') / 'last.pth.tar'
    return path, write_run(path)


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


def expected_of(model, paths, topk=3):
    probabilities, indices = outputs_of(model, paths).softmax(1).topk(topk)
    return [
        {'filename': str(path), 'index': i.tolist(), 'label': [NAMES[n] for n in i], 'prob': p.tolist()}
        for path, i, p in zip(paths, indices, probabilities, strict=True)
    ]


def assert_same(actual, expected):
    assert len(actual) == len(expected) > 0
    for a, b in zip(actual, expected, strict=True):
        assert a == {**b, 'prob': pytest.approx(b['prob'], abs=1e-5)}


def read_csv(text):
    """The records of CSV."""
    rows = list(csv.DictReader(io.StringIO(text)))
    ranks = range(1, (len(rows[0]) - 1) // 3 + 1)
    return [
        {
            'filename': row['filename'],
            'index': [int(row[f'index_{n}']) for n in ranks],
            'label': [row[f'label_{n}'] for n in ranks],
            'prob': [float(row[f'prob_{n}']) for n in ranks],
        }
        for row in rows
    ]


READERS = {'csv': read_csv, 'json': json.loads, 'jsonl': lambda text: [json.loads(line) for line in text.splitlines()]}


def test_every_format(run, pictures, tmp_path, capsys):
    """In the order of the folder; to files and to the terminal."""
    parquet = pytest.importorskip('pyarrow.parquet')
    expected = expected_of(run[1], sorted(pictures.rglob('*.png')), topk=2)
    arguments = '--checkpoint', run[0], '--topk', 2, '-b', 4, '-j', 0, pictures
    for format, read in READERS.items():
        path = tmp_path / f'new.{format}'
        assert predict(*arguments, '--results-file', path) == 0
        assert capsys.readouterr().out == f'{path}: {len(expected)} images\n'
        assert_same(read(path.read_text(encoding='utf-8')), expected)
        assert predict(*arguments, '--results-format', format) == 0
        assert_same(read(capsys.readouterr().out), expected)
    assert predict(*arguments, '--results-file', tmp_path / 'results', '--results-format', 'parquet') == 0
    assert_same(parquet.read_table(tmp_path / 'results').to_pylist(), expected)
    capsys.readouterr()
    assert predict(*arguments) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ['image', 'rank', 'probability', 'class']
    for record, first, second in zip(expected, lines[::2], lines[1::2], strict=True):
        assert first.split() == [record['filename'], '1', f'{record["prob"][0]:.1%}', *record['label'][0].split()]
        assert second.split() == ['2', f'{record["prob"][1]:.1%}', *record['label'][1].split()]


def test_at_most_all_classes(run, pictures, tmp_path):
    paths = sorted(pictures.glob('train/*/*'))
    assert_same(predicted(tmp_path, '--checkpoint', run[0], '--topk', 99, *paths), expected_of(run[1], paths))


@pytest.mark.parametrize('format', ['npz', 'parquet'])
@pytest.mark.parametrize('name, kwargs', [('test_resnet', {}), ('flatten_deit_t', {'img_size': 32, 'depth': 1})])
def test_embeddings_are_pooled_features(name, kwargs, format, pictures, tmp_path):
    if format == 'parquet':
        parquet = pytest.importorskip('pyarrow.parquet')
    model = write_run(tmp_path / 'last.pth.tar', name=name, kwargs=kwargs)
    path = tmp_path / f'new.{format}'
    paths = sorted(pictures.glob('validation/*/*'))
    assert predict('--checkpoint', tmp_path / 'last.pth.tar', '-b', 5, '--embeddings', path, *paths) == 0
    if format == 'npz':
        arrays = np.load(path)
        names, actual = arrays['filename'].tolist(), arrays['embedding']
    else:
        table = parquet.read_table(path)
        names, actual = table['filename'].to_pylist(), np.array(table['embedding'].to_pylist(), np.float32)
    assert names == list(map(str, paths)) and actual.dtype == np.float32
    model.reset_classifier(0)
    np.testing.assert_allclose(actual, outputs_of(model, paths), atol=1e-4)


@pytest.mark.parametrize('source', ['folder', 'address'])
def test_where_a_run_goes_its_classes_and_preprocessing_go(source, pictures, tmp_path):
    """As the run's output folder, and converted: the same predictions, at the run's size, not the model's test size."""
    path, folder = tmp_path / 'model_best.pth.tar', tmp_path / 'hub'
    arguments = ['--checkpoint', tmp_path]
    model = write_run(path, name='ea_resnet50', kwargs={'layers': (1, 1, 1, 1), 'base_width': 8})
    if source == 'address':
        assert main(['convert', str(path), '-o', str(folder)]) == 0
        arguments = ['--model', f'local-dir:{folder}']
    paths = sorted(pictures.glob('validation/*/*'))
    assert_same(predicted(tmp_path, *arguments, *paths), expected_of(model, paths))


@pytest.fixture(scope='module')
def onnx_file(run, tmp_path_factory):
    pytest.importorskip('onnxscript')
    pytest.importorskip('onnxruntime')
    path = tmp_path_factory.mktemp('onnx') / 'run.onnx'
    assert main(['export', 'test_resnet', '--checkpoint', str(run[0]), '--dynamic', 'batch', '-o', str(path)]) == 0
    return path


@pytest.fixture
def described(onnx_file, tmp_path):
    """An exported file, its description and what writes another one."""
    path = tmp_path / 'run.onnx'
    shutil.copy(onnx_file, path)
    about = json.loads(description_of(onnx_file).read_text())

    def describe(text=None, **changes):
        description_of(path).write_text(json.dumps(about | changes) if text is None else text)

    describe()
    return path, about, describe


@pytest.mark.parametrize('one_by_one', [False, True])
def test_exported_file(one_by_one, run, described, pictures, tmp_path):
    path, about, describe = described
    if one_by_one:
        onnx = pytest.importorskip('onnx')
        graph = onnx.load(path)
        graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
        onnx.save(graph, path)
        describe(input=about['input'] | {'shape': [1, *about['input']['shape'][1:]]})
    paths = sorted(pictures.glob('validation/*/*'))
    assert_same(predicted(tmp_path, '--model', path, *paths), expected_of(run[1], paths))


def test_exported_file_of_features(run, described, pictures, tmp_path):
    path, _, describe = described
    describe(outputs=[{'name': 'embedding', 'channels': 3}])
    paths = sorted(pictures.glob('validation/*/*'))
    assert predict('--model', path, '--embeddings', tmp_path / 'new.npz', *paths) == 0
    np.testing.assert_allclose(np.load(tmp_path / 'new.npz')['embedding'], outputs_of(run[1], paths), atol=1e-4)


@pytest.mark.parametrize(
    'changes, arguments, message',
    [
        ({'weights': 'untrained'}, (), 'has random weights: export it with --pretrained or --checkpoint FILE'),
        ({'outputs': [{'name': 'embedding', 'channels': 3}]}, (), "gives 'embedding', not class scores"),
        ({'outputs': [{'name': 'feature_1', 'channels': 3}]}, ('--embeddings', 'x.npz'), 'not one vector of features'),
        ({}, ('--embeddings', 'x.npz'), "gives 'logits', not one vector of features"),
        ({}, ('--img-size', '64'), '--img-size: '),
        ({}, ('--pretrained',), 'has its weights: leave out'),
        ({'outputs': [{'name': 'logits', 'classes': 0}]}, (), "gives 'logits', not class scores"),
        ({'weights': 3}, (), 'does not describe it'),
        ({'outputs': []}, (), 'does not describe it'),
        ({'input': 3}, (), 'does not describe it'),
        ({'model': 3}, (), 'does not describe it'),
        ({'preprocessing': {}}, (), "does not describe it: 'mean'"),
        ({'preprocessing': dict.fromkeys(('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode'), 'x')}, (), 'mean'),
        ({'outputs': [{'name': 'logits', 'classes': 10**12}]}, (), 'num_classes'),
        ({'outputs': [{'name': 'logits', 'classes': 7}]}, (), 'of shape (3,) for an image, not scores of 7 classes'),
        ({'text': '{'}, (), 'does not describe it'),
    ],
)
def test_exported_files_that_will_not_do(changes, arguments, message, described, pictures, capsys):
    path, _, describe = described
    describe(**changes)
    assert predict(pictures, '--model', path, *arguments) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


INDICES = ['0', '1', '2']


@pytest.mark.parametrize(
    'cfg, labels',
    [
        ({'label_names': ['a', 'b', 'c']}, ['a', 'b', 'c']),
        (
            {'label_names': ('n1', 'n2', 'n3'), 'label_descriptions': {'n1': 'cat', 'n2': 'dog', 'n3': 'emu'}},
            ['cat', 'dog', 'emu'],
        ),
        ({'label_names': {'2': 'c', '0': 'a'}}, ['a', '1', 'c']),
        ({'label_names': ['a', 'b', 'c'], 'label_descriptions': {'a': 1, 'b': '', 'c': ['x']}}, ['1', '', "['x']"]),
        ({'label_names': ['a\x1b[2J', 'b\nc', 'd\u202ee']}, ['a\\x1b[2J', 'b\\nc', 'd\\u202ee']),
        ({'label_names': ['a', 'b']}, INDICES),
        ({'label_names': ['a', 'b', 'c', 'd']}, INDICES),
        ({'label_names': {'0': 'a', '3': 'd'}}, INDICES),
        ({'label_names': ['a', 'b', 3]}, INDICES),
        ({'label_names': {'x': 'a'}}, INDICES),
        ({'label_names': 'abc'}, INDICES),
        ({'label_names': ['a', 'b', 'c'], 'label_descriptions': {'a': 'cat'}}, INDICES),
        ({'label_names': None, 'tag': 'a1_in1k'}, INDICES),
        ({}, INDICES),
    ],
)
def test_names_of_classes(cfg, labels):
    assert class_labels(cfg, 3) == labels


def test_imagenet_names_only_for_weights_of_imagenet():
    imagenet = ImageNetInfo().label_descriptions()
    assert class_labels({'tag': 'leaplab_in1k'}, 1000) == imagenet
    own = list(map(str, range(1000)))
    for tag in (None, '', 'untrained', 'begin1k', 'in1kb'):
        assert class_labels({'tag': tag}, 1000) == own
    names = [f'own {i}' for i in range(1000)]
    assert class_labels({'tag': 'leaplab_in1k', 'label_names': names}, 1000) == names
    assert class_labels({'tag': 'leaplab_in1k', 'label_names': names[:999]}, 1000) == own
    for name in list_pretrained(exclude_filters='*.fb_dino'):  # weights without a classifier
        cfg = timm.get_pretrained_cfg(name).to_dict()
        if infer_imagenet_subset(cfg):
            assert IMAGENET_TAG.search(cfg['tag']), name


def test_names_of_checkpoints(pictures, tmp_path):
    """ImageNet's for the released weights, by their tag; a run with as many classes of its own has only its own."""
    path, hub = tmp_path / 'last.pth.tar', tmp_path / 'hub'
    picture = next(pictures.rglob('*.png'))
    info = ImageNetInfo()

    def labels(*arguments):
        (record,) = predicted(tmp_path, *arguments, picture)
        return record['index'], record['label']

    write_run(path, 1000, 'flatten_pvt_v2_b0', kwargs=SMALL, label_names=None)
    indices, names = labels('--checkpoint', path)
    assert names == list(map(str, indices)) and len(names) == 5
    released = '--checkpoint', path, '--model', 'flatten_pvt_v2_b0.leaplab_in1k'
    assert labels(*released) == (indices, [info.index_to_description(i) for i in indices])
    assert main(['convert', str(path), '--model', released[-1], '-o', str(hub)]) == 0
    assert labels('--model', f'local-dir:{hub}') == labels(*released)
    write_run(path, label_names=['\x1b]0;x\x07', 'a', 'b'])
    indices, names = labels('--checkpoint', path)
    assert names == list(map(str, indices))


def write_kinds(root):
    """Pictures of many kinds, all of the same scene where the kind can hold it."""
    root.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)
    picture = Image.fromarray(noise).resize((40, 48), Image.Resampling.NEAREST)
    picture.save(root / 'a.png')
    picture.quantize(30).save(root / 'palette.png')
    picture.convert('CMYK').save(root / 'cmyk.tif')
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.transpose(Image.Transpose.ROTATE_90).save(root / 'turned.png', exif=exif)
    Image.fromarray(np.asarray(picture.convert('L')).astype(np.uint16) * 257).save(root / 'deep.png')
    picture.convert('L').save(root / 'grey.png')
    Image.new('RGB', (1, 1)).save(root / 'dot.bmp')
    picture.save(root / 'NAME.PNG')
    return root


def test_kinds_of_pictures(run, tmp_path):
    root = write_kinds(tmp_path / 'kinds')
    records = predicted(tmp_path, '--checkpoint', run[0], root)
    assert_same(records, expected_of(run[1], sorted(root.iterdir())))
    prob = {Path(record['filename']).name: record['prob'] for record in records}
    for name in ('palette.png', 'cmyk.tif', 'turned.png', 'NAME.PNG'):
        assert prob[name] == pytest.approx(prob['a.png'], abs=1e-6)
    assert prob['deep.png'] == pytest.approx(prob['grey.png'], abs=1e-6) != pytest.approx(prob['a.png'], abs=1e-6)


def test_network_for_one_channel(pictures, tmp_path):
    model = write_run(tmp_path / 'last.pth.tar', in_chans=1)
    picture = next(pictures.rglob('*.png'))
    grey = create_transform((1, 32, 32), crop_pct=0.7, mean=(0.4,), std=(0.2,), interpolation='nearest')(
        open_image(picture, 'L')
    )
    (record,) = predicted(tmp_path, '--checkpoint', tmp_path / 'last.pth.tar', picture)
    with torch.no_grad():
        expected = model(grey[None]).softmax(1)[0]
    assert record['prob'] == pytest.approx(expected.sort(descending=True).values.tolist(), abs=1e-5)


@pytest.mark.parametrize('workers', [0, 2])
def test_unreadable_pictures_are_named_and_the_others_kept(run, tmp_path, caplog, workers):
    root = write_kinds(tmp_path / 'kinds')
    good = sorted(root.iterdir())
    content = (root / 'a.png').read_bytes()
    bad = {'b.png': content[: len(content) // 2], 'c.jpg': b'', 'd.png': b'words', 'e\n.png': b'\x89PNG\r\n\x1a\n'}
    Image.new('RGB', (1, 1001)).save(root / 'f.png')
    for name, content in bad.items():
        (root / name).write_bytes(content)
    arguments = '--checkpoint', run[0], '-b', 3, '-j', workers, root
    assert_same(predicted(tmp_path, *arguments, status=1), expected_of(run[1], good))
    said, *lines = caplog.messages[-6:]
    assert said == f'5 of {len(good) + 5} images failed:'
    for name, line in zip(bad, lines[:-1], strict=True):
        path = str(root / name).replace('\n', '\\n')
        assert line.startswith(f"  cannot read '{path}': ") and '\n' not in line
    assert lines[-1] == f"  '{root}/f.png' is too narrow: 1 × 1001"


def test_only_unreadable_pictures(run, tmp_path, caplog):
    (tmp_path / 'a.png').write_bytes(b'words')
    for path in ('new.csv', 'new.npz'):
        option = '--results-file' if path.endswith('csv') else '--embeddings'
        assert predict('--checkpoint', run[0], tmp_path / 'a.png', option, tmp_path / path) == 1
        assert '1 of 1 images failed:' in caplog.messages and not (tmp_path / path).exists()


def test_folders(run, pictures, tmp_path, caplog):
    """Folders in folders and links, sorted; not what is hidden, or no picture; named files whatever their suffix."""
    root, picture = tmp_path / 'root', next(pictures.rglob('*.png'))
    for name in (
        'b/c/2.png',
        'b/1.JPG',
        'a.png',
        '.hidden.png',
        '.folder/a.png',
        '__MACOSX/a.png',
        'x.txt',
        'b/y',
        'b/z',
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, path)
    (root / 'b' / 'loop').symlink_to(root)
    (root / 'd').symlink_to(pictures / 'train' / 'red')
    records = predicted(tmp_path, '--checkpoint', run[0], root / 'x.txt', root, root / 'a.png')
    names = [os.path.relpath(record['filename'], root) for record in records]
    assert names == ['x.txt', 'a.png', 'b/1.JPG', 'b/c/2.png', 'd/0.png']
    said, left_out = caplog.messages[0].split(': files left out: ')
    assert said == f"'{root}'"
    assert set(left_out.split(', ')) == {'2 without suffix', '1 *.txt', '1 .hidden.png', '1 .folder', '1 __MACOSX'}


def test_names_that_are_hard_to_write(run, pictures, tmp_path, capsys):
    """Control characters do not reach the terminal, and what is not Unicode is in the files as escapes."""
    names = ['a\nb.png', 'c\x1b[2J.png', os.fsdecode(b'd\xff.png'), 'e\u202e.png']
    for name in names:
        shutil.copy(next(pictures.rglob('*.png')), tmp_path / name)
    written = [f'{tmp_path}/{name}' for name in names[:2] + ['d\\udcff.png'] + names[3:]]
    arguments = '--checkpoint', run[0], '--topk', 1, tmp_path
    for format, read in READERS.items():
        path = tmp_path / f'new.{format}'
        assert predict(*arguments, '--results-file', path) == 0
        assert [record['filename'] for record in read(path.read_text())] == written
    capsys.readouterr()
    assert predict(*arguments) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines()) and 'a\\nb.png' in out and len(out.splitlines()) == 5


@pytest.mark.parametrize('kind', ['folder', 'tar', 'torch', 'hfds', 'wds'])
@pytest.mark.parametrize('workers', [0, 2])
def test_data_sets(kind, workers, run, pictures, tmp_path):
    paths = sorted(pictures.glob('validation/*/*'))
    names = [str(path) for path in paths]
    if kind == 'folder':
        arguments = '--data-dir', pictures
    elif kind == 'tar':
        arguments = '--data-dir', write_tars(tmp_path / 'tars', pictures)
        names = [f'{path.parent.name}/{path.name}' for path in paths]
    elif kind == 'torch':
        arguments = '--dataset', 'torch/image_folder', '--data-dir', pictures
    elif kind == 'hfds':
        pytest.importorskip('datasets')
        parquet = write_parquet(tmp_path / 'parquet', pictures, 1)
        arguments = '--dataset', f'hfds/{parquet}', '--data-dir', tmp_path / 'cache'
        names = [path.name for path in paths]
    else:
        pytest.importorskip('webdataset')
        arguments = '--dataset', 'wds/x', '--data-dir', write_shards(tmp_path / 'shards', pictures, 1)
        names = [str(number) for number in range(len(paths))]
    records = predicted(tmp_path, '--checkpoint', run[0], *arguments, '-b', 5, '-j', workers)
    expected = expected_of(run[1], paths)
    for record, name in zip(expected, names, strict=True):
        record['filename'] = name
    assert_same([r | {'filename': r['filename'].removeprefix('./')} for r in records], expected)


def test_unreadable_picture_of_a_data_set(run, tmp_path, caplog):
    images = write_images(tmp_path / 'images', train=1, validation=2)
    bad = images / 'validation' / 'green' / '1.png'
    bad.write_bytes(b'words')
    good = [path for path in sorted(images.glob('validation/*/*')) if path != bad]
    records = predicted(tmp_path, '--checkpoint', run[0], '--data-dir', images, status=1)
    assert_same(records, expected_of(run[1], good))
    assert caplog.messages[-2:] == ['1 of 6 images failed:', f"  cannot read the image '{bad}'; remove or replace it"]


@pytest.mark.parametrize('workers', [0, 2])
def test_what_a_stream_passes_over_is_counted(workers, run, tmp_path, caplog):
    pytest.importorskip('webdataset')
    images = write_images(tmp_path / 'images', train=1, validation=2)
    (images / 'validation' / 'green' / '1.png').write_bytes(b'words')
    shards = '--dataset', 'wds/x', '--data-dir', write_shards(tmp_path / 'shards', images, 1)
    assert len(predicted(tmp_path, '--checkpoint', run[0], *shards, '-j', workers, status=1)) == 5
    assert caplog.messages[-1] == ('1 of 6 images are missing: the stream has passed over what it could not read')


@pytest.mark.parametrize(
    'arguments, message',
    [
        ((), 'name pictures or folders of them, or a data set with --dataset and --data-dir'),
        (('a.png', '--data-dir', '.'), 'name pictures or folders of them, or a data set'),
        (('a.png', '--checkpoint', 'run'), "there is no file or folder 'a.png'"),
        (('empty', '--checkpoint', 'run'), "there are no images in 'empty'"),
        (('good.png',), 'name a model with --model, or a checkpoint of train.py with --checkpoint'),
        (
            ('good.png', '--model', 'test_resnet'),
            "--model 'test_resnet' alone has random weights: add --pretrained, or --checkpoint FILE",
        ),
        (('good.png', '--model', 'test_resnetx', '--pretrained'), "unknown model 'test_resnetx'"),
        (('good.png', '--model', 'none.onnx'), "--model 'none.onnx': there is no such file"),
        (('good.png', '--checkpoint', 'x.onnx'), 'give it as --model'),
        (('good.png', '--checkpoint', 'none'), "there is no file 'none'"),
        (('good.png', '--checkpoint', 'empty'), "in 'empty': give the output folder of a run"),
        (('good.png', '--checkpoint', 'run', '--topk', '0'), '--topk 0: must be positive'),
        (('good.png', '--checkpoint', 'run', '-b', '0'), '--batch-size 0: must be positive'),
        (('good.png', '--checkpoint', 'run', '--num-samples', '0'), '--num-samples 0: must be positive'),
        (('good.png', '--checkpoint', 'run', '-j', '-1'), '--workers -1: must not be negative'),
        (('good.png', '--checkpoint', 'run', '--device', 'tpu9'), "--device 'tpu9'"),
        (
            ('good.png', '--checkpoint', 'run', '--img-size', '0'),
            '--img-size must be one or two positive numbers, got 0',
        ),
        (
            ('good.png', '--checkpoint', 'run', '--results-file', 'x.xls'),
            "--results-file to 'x.xls': its name must end in one of csv, json, jsonl, parquet",
        ),
        (('good.png', '--checkpoint', 'run', '--results-file', 'no/x.csv'), "there is no folder 'no'"),
        (('good.png', '--checkpoint', 'run', '--results-format', 'parquet'), 'needs a --results-file'),
        (('good.png', '--checkpoint', 'run', '--embeddings', 'x.csv'), 'its name must end in one of npz, parquet'),
        (('good.png', '--checkpoint', 'run', '--embeddings', 'x.npz', '--results-file', 'x.csv'), 'leave out'),
        (('--checkpoint', 'run', '--data-dir', 'none'), "--data-dir 'none' does not exist"),
        (('--checkpoint', 'run', '--dataset', 'x', '--data-dir', '.'), "--dataset 'x': must be PREFIX/NAME"),
        (('--checkpoint', 'run', '--data-dir', '.', '--split', 'x'), 'put each into a folder'),
    ],
)
def test_bad_arguments(arguments, message, run, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty').mkdir()
    shutil.copy(run[0], 'run')
    shutil.copy(next(pictures.rglob('*.png')), 'good.png')
    assert predict(*arguments) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {'empty', 'run', 'good.png'}


def test_parquet_without_its_package(run, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
    for option in ('--results-file', '--embeddings'):
        assert predict(pictures, '--checkpoint', run[0], option, tmp_path / 'x.parquet') == 2
        assert f"{option} '{tmp_path}/x.parquet' needs pyarrow: pip install 'flatten_zoo[parquet]'" in (
            capsys.readouterr().err
        )


def test_networks_that_give_no_classes(pictures, tmp_path, capsys, caplog):
    path = tmp_path / 'last.pth.tar'
    model = write_run(path, num_classes=0)
    picture = next(pictures.rglob('*.png'))
    assert predict('--checkpoint', path, picture) == 2
    assert 'has no classes: --embeddings FILE writes its features' in capsys.readouterr().err
    assert predict('--checkpoint', path, picture, '--embeddings', tmp_path / 'x.npz') == 0
    np.testing.assert_allclose(np.load(tmp_path / 'x.npz')['embedding'], outputs_of(model, [picture]), atol=1e-4)
    weights = {key: value * float('nan') for key, value in write_run(path).state_dict().items()}
    write_run(path, state_dict=weights)
    assert predict('--checkpoint', path, picture) == 1
    assert caplog.messages[-1] == f"  '{picture}' gives values that are infinite or not a number"


def test_ctrl_c_leaves_nothing(run, pictures, tmp_path, monkeypatch, caplog):
    def interrupted(self, images):
        os.kill(os.getpid(), signal.SIGINT)
        return torch.zeros(len(images), 3)

    monkeypatch.setattr(Network, '__call__', interrupted)
    path = tmp_path / 'x.csv'
    assert predict(pictures, '--checkpoint', run[0], '-b', 2, '-j', 0, '--results-file', path) == 130
    assert caplog.messages[-1] == 'interrupted: nothing is written' and not path.exists()
