"""Every kind of data set: the same images through each reader, with and without loader processes."""

import csv
import json
import shlex
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import ExifTags, Image

from flatten_zoo.errors import UsageError, report_usage_errors
from flatten_zoo.training.data import streams
from flatten_zoo.training.data.datasets import open_splits
from flatten_zoo.training.data.loaders import evaluation_loader, training_loader
from flatten_zoo.training.loop.optimization import Numerics
from flatten_zoo.training.options.definitions import train_parser
from flatten_zoo.training.train import main as train
from flatten_zoo.training.validate import main as validate
from flatten_zoo.visualize import load_picture

from .marks import slow_but
from .tiny_images import write_images, write_parquet, write_shards, write_tars

pytestmark = pytest.mark.usefixtures('no_pictures')
TINY = shlex.split('--model test_resnet --num-classes 3 --img-size 32 -b 6')
BRIEF = shlex.split('--epochs 2 --lr 0.02 --warmup-epochs 0')
LENGTHS = shlex.split('--train-num-samples 36 --val-num-samples 15')
SHARD_NAMES = ['--train-split', 'train-{0..3}.tar|36', '--val-split', 'validation-{0..3}.tar|15']


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A shuffled stream of `datasets` that is left before its end sleeps for 5 seconds."""
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr(datasets.config, 'SLEEP_TIME_ON_THREADS_SHUTDOWN', 0.1)


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


@pytest.mark.parametrize('workers', ['0', pytest.param('2', marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', NAMES)
def test_every_reader_gives_every_image_once_with_its_class(root, checkpoint, capsys, name, workers):
    expected = validated(capsys, checkpoint, str(root / 'images'), '-j', '0')
    found = validated(capsys, checkpoint, *for_validation(layouts(root)[name]), '-j', workers)
    assert found['images'] == expected['images'] == 15
    assert found['loss'] == pytest.approx(expected['loss'], abs=2e-4)
    assert found['top1'] == expected['top1'] > 60


@pytest.mark.parametrize('name', slow_but(NAMES[0], NAMES[-1], of=NAMES))
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


@pytest.mark.parametrize(
    'name, message',
    [
        ('imagenet', "--dataset 'imagenet': must be PREFIX/NAME with prefix torch, hfds, hfids, tfds, wds"),
        ('tf/imagenet', "--dataset 'tf/imagenet': must be PREFIX/NAME"),
        ('torch/imagenette3', 'Unknown torchvision dataset imagenette3'),
        ('wds/tiny', 'no _info.json in'),
    ],
)
def test_unknown_kinds_and_names(root, capsys, name, message):
    assert message in refused(capsys, root / 'images', '--dataset', name, '-j', 0)


@pytest.mark.parametrize(
    'name, install',
    [
        ('hfds/x', "'flatten_zoo[hfds]'"),
        ('HFIDS/x', "'flatten_zoo[hfds]'"),
        ('wds/x', "'flatten_zoo[wds]'"),
        ('tfds/x', 'tensorflow tensorflow-datasets'),
    ],
)
def test_missing_packages(capsys, monkeypatch, name, install):
    monkeypatch.setattr(streams.importlib.util, 'find_spec', lambda package: None)
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
    line = refused(capsys, tmp_path / 'cache', '--dataset', f'hfds/{parquet}', '-j', 0, '--output', tmp_path / 'output')
    assert line == "error: cannot read the image '3.png'; remove or replace it"


@pytest.mark.parametrize(
    'options, message',
    [
        ('wds/x --input-key tiff', "error: no image in 'wds/x' can be read"),
        ('wds/x --target-key kind', "error: cannot read on in 'wds/x': Target key(s) ['kind'] require a json sidecar"),
        (
            'hfds/{root}/parquet --input-key photo',
            "error: --input-key photo: 'hfds/{root}/parquet' has no such column, but image, label",
        ),
        ('hfds/{root}/parquet --target-key kind', 'error: --target-key kind: '),
        (
            'hfids/{root}/parquet --input-key photo',
            "error: 'hfids/{root}/parquet' has no column 'photo': name others by",
        ),
    ],
)
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


# Modes of pictures

GREY = np.arange(1024, dtype=np.uint8).reshape(32, 32) // 4 * 4 + np.arange(32, dtype=np.uint8) // 8
COLOUR = np.stack([GREY, GREY.T, 255 - GREY], 2)
ALPHA = np.where(np.arange(32)[:, None] < 16, 255, 0) + np.zeros_like(GREY)
OVER_WHITE = np.where(ALPHA[..., None] == 255, COLOUR, 255)


def save_12_bits(grey: np.ndarray, path: Path) -> None:
    """Pillow reads such a TIFF file, of one strip, but does not write one."""
    values = np.rint(grey / 255 * 4095).astype(int).reshape(-1, 2)
    pixels = np.stack([values[:, 0] >> 4, (values[:, 0] & 15) << 4 | values[:, 1] >> 8, values[:, 1] & 255], 1)
    entries = {256: 32, 257: 32, 258: 12, 259: 1, 262: 1, 273: 128, 277: 1, 278: 32, 279: pixels.size}
    directory = b''.join(struct.pack('<HHII', tag, 4, 1, value) for tag, value in entries.items())
    start = b'II*\0\x08\0\0\0' + struct.pack('<H', len(entries)) + directory + bytes(4)
    path.write_bytes(start.ljust(128, b'\0') + pixels.astype(np.uint8).tobytes())


def save_turned(orientation: int, path: Path) -> None:
    """Save `COLOUR` so that its metadata turn it back."""
    turns = {
        2: np.fliplr,
        3: lambda x: np.rot90(x, 2),
        4: np.flipud,
        5: lambda x: x.swapaxes(0, 1),
        6: np.rot90,
        7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
        8: lambda x: np.rot90(x, -1),
    }
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(np.ascontiguousarray(turns[orientation](COLOUR))).save(path, exif=exif)


def palette() -> Image.Image:
    return Image.fromarray(COLOUR // 64 * 64).quantize(64, dither=Image.Dither.NONE)


def save_palette_with_transparency(path: Path) -> None:
    image = palette()
    image.save(path, transparency=bytes(255 * (index % 2) for index in range(64)))


WIDE = GREY * np.uint16(257)
PICTURES = {
    '8-bit grey.png': (GREY, Image.fromarray(GREY).save),
    '16-bit.png': (GREY, Image.fromarray(WIDE).save),
    '16-bit.tif': (GREY, Image.fromarray(WIDE).save),
    '16-bit big-endian.tiff': (GREY, Image.fromarray(WIDE.astype('>u2')).save),
    '16-bit white is 0.tif': (GREY, lambda path: Image.fromarray(65535 - WIDE).save(path, tiffinfo={262: 0})),
    '16-bit.pgm': (GREY, Image.fromarray(WIDE).save),
    '12-bit.tif': (GREY, lambda path: save_12_bits(GREY, path)),
    '32-bit.tif': (GREY, Image.fromarray(WIDE.astype(np.int32)).save),
    'floating point.tif': (GREY, Image.fromarray(GREY / np.float32(255)).save),
    '1-bit.png': ((GREY > 99) * np.uint8(255), Image.fromarray(GREY > 99).save),
    '1-bit.tif': ((GREY > 99) * np.uint8(255), Image.fromarray(GREY > 99).save),
    'palette.gif': (palette().convert('RGB'), palette().save),
    'palette with transparency.png': (
        np.where(np.asarray(palette())[..., None] % 2, palette().convert('RGB'), 255),
        save_palette_with_transparency,
    ),
    'palette with transparency.gif': (
        np.where(np.asarray(palette())[..., None] == 7, 255, palette().convert('RGB')),
        lambda path: palette().save(path, transparency=7),
    ),
    'LA.png': (np.where(ALPHA == 255, GREY, 255), Image.fromarray(np.dstack([GREY, ALPHA.astype(np.uint8)])).save),
    'RGBA.webp': (
        OVER_WHITE,
        lambda path: Image.fromarray(np.dstack([COLOUR, ALPHA.astype(np.uint8)])).save(path, lossless=True, exact=True),
    ),
    'CMYK.tif': (COLOUR, Image.fromarray(COLOUR).convert('CMYK').save),
    'CMYK.jpg': (COLOUR, lambda path: Image.fromarray(COLOUR).convert('CMYK').save(path, quality=100)),
    'RGB.bmp': (COLOUR, Image.fromarray(COLOUR).save),
    'damaged metadata.png': (COLOUR, lambda path: Image.fromarray(COLOUR).save(path, exif=b'Exif\0\0nothing')),
    **{f'turned {n}.png': (COLOUR, partial(save_turned, n)) for n in range(2, 9)},
    'turned.tif': (COLOUR, partial(save_turned, 6)),
}


def loaded(split: str, *options, num_classes: int = 1) -> np.ndarray:
    """The images of an epoch as `train.py` or its validation load them, from 0 to 255."""
    argv = ['--img-size', '32', '-b', '1', '-j', '0', '--no-prefetcher', '--num-classes', str(num_classes), *options]
    args = train_parser().parse_with_config(argv)
    train_set, eval_set = open_splits(args, num_classes, channels=3)
    config = {
        'input_size': (3, 32, 32),
        'mean': (0,) * 3,
        'std': (1,) * 3,
        'crop_pct': 1.0,
        'crop_mode': 'center',
        'interpolation': 'bilinear',
    }
    numerics = Numerics(torch.device('cpu'))
    loader = (
        training_loader(args, num_classes, train_set, config, numerics)
        if split == 'train'
        else evaluation_loader(args, eval_set, config, numerics, batch_size=1)
    )
    return torch.cat([batch for batch, _ in loader]).permute(0, 2, 3, 1).numpy() * 255


@pytest.mark.filterwarnings('error::UserWarning')
@pytest.mark.parametrize('name', PICTURES)
def test_every_mode_is_read_as_the_picture_in_8_bits(tmp_path, name):
    expected, save = PICTURES[name]
    expected = np.broadcast_to(np.asarray(expected).reshape(32, 32, -1), (32, 32, 3))
    for split in ('train', 'validation'):
        (tmp_path / split / 'a').mkdir(parents=True)
        save(tmp_path / split / 'a' / name)
    _, seen = load_picture(tmp_path / 'train' / 'a' / name, timm.create_model('test_resnet'), [32])
    for found in (loaded('train', str(tmp_path), '--no-aug')[0], loaded('validation', str(tmp_path))[0], seen * 255):
        np.testing.assert_allclose(found, expected, atol=6 if name.endswith('jpg') else 1e-3)


@pytest.mark.parametrize('name', ['folder', 'tar', 'torchvision', 'wds', 'hfds parquet', 'hfids parquet'])
def test_every_reader_scales_16_bits(tmp_path, name):
    for split in ('train', 'validation'):
        (tmp_path / 'images' / split / 'blue').mkdir(parents=True)
        Image.fromarray(WIDE).save(tmp_path / 'images' / split / 'blue' / '0.tif')
    write = {'tar': write_tars, 'wds': write_shards, 'hfds parquet': write_parquet, 'hfids parquet': write_parquet}
    if name in write:
        write[name](tmp_path / {'tar': 'tars', 'wds': 'shards'}.get(name, 'parquet'), tmp_path / 'images')
    lengths = ['--train-num-samples', '1', '--val-num-samples', '1'] if name.startswith('hfids') else []
    options = [*layouts(tmp_path)[name], *lengths]
    found = loaded('validation', *options, num_classes=3 if 'parquet' in name else 1)
    np.testing.assert_allclose(found[0], np.broadcast_to(GREY[..., None], (32, 32, 3)), atol=1e-3)


@pytest.mark.parametrize(
    'values, message',
    [
        (np.full((32, 32), -1000, np.int32), 'its values are from -1000 to -1000, where black is 0 and white 65535'),
        (np.full((32, 32), 255, np.float32), 'its values are from 255 to 255, where black is 0 and white 1'),
        (np.full((32, 32), np.nan, np.float32), 'its values are from nan to nan'),
    ],
)
def test_values_without_a_range_are_refused(tmp_path, capsys, values, message):
    for split in ('train', 'validation'):
        (tmp_path / split / 'a').mkdir(parents=True)
        Image.fromarray(values).save(tmp_path / split / 'a' / '0.tif')
    path = tmp_path / 'train' / 'a' / '0.tif'
    options = '--num-classes', 1, '-b', 1, '-j', 0, '--img-size', 64
    line = refused(capsys, tmp_path, *options, '--output', tmp_path / 'output')
    assert line.startswith(f"error: cannot read the image '{path}' ({message}")
    with pytest.raises(UsageError, match=message):
        load_picture(path, timm.create_model('test_resnet'))


# What is left out


def clutter(split: Path) -> None:
    """Put into a split of 3 classes what is no image of a class, and one image of each of 4 more kinds."""
    for name in (
        '.DS_Store',
        'red/._0.png',
        'red/Thumbs.db',
        '__MACOSX/red/._0.png',
        '.ipynb_checkpoints/0.png',
        'red/notes.txt',
        'red/more.txt',
        'blue/list',
        'loose.png',
    ):
        path = split / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes((split / 'red' / '0.png').read_bytes() if path.suffix == '.png' else b'')
    for kind in ('gif', 'webp', 'TIFF', 'bmp'):
        Image.new('RGB', (9, 9)).save(split / 'green' / f'more.{kind}')


@pytest.mark.parametrize('name', ['folder', 'tar', 'torchvision'])
def test_what_is_no_image_of_a_class_is_left_out_and_said(tmp_path, caplog, name):
    images = write_images(tmp_path / 'images', train=1, validation=1)
    clutter(images / 'train')
    if name != 'torchvision':  # where it is an error
        (images / 'train' / 'void').mkdir()
    write_tars(tmp_path / 'tars', images)
    with caplog.at_level('INFO'):
        assert len(loaded('train', *layouts(tmp_path)[name], num_classes=3)) == 3 + 4
    split = tmp_path / 'tars' / 'train.tar' if name == 'tar' else images / 'train'
    line, *empty = caplog.messages
    start, kinds = line.split(': files left out: ')
    assert start == f"'{split}'"
    assert set(kinds.split(', ')) == {
        '2 *.txt',
        '1 without suffix',
        '1 in no class folder',
        '1 .DS_Store',
        '1 ._*',
        '1 Thumbs.db',
        '1 __MACOSX',
        '1 .ipynb_checkpoints',
    }
    if name != 'torchvision':
        assert empty == [
            f"'{split}': there is no image of class 'void', which does not count: if it should, name all "
            f'classes in --class-map'
        ]


def test_classes_without_images_and_images_without_classes(tmp_path, capsys, caplog):
    images = write_images(tmp_path / 'images', train=6, validation=1)
    (tmp_path / 'classes.txt').write_text('blue\nblack\nred\n')
    with caplog.at_level('INFO'):
        loaded('train', str(images), '--class-map', str(tmp_path / 'classes.txt'), num_classes=3)
    assert f"'{images}/train': files left out: 6 of no class in --class-map" in caplog.messages
    assert f"'{images}/train': there is no image of class 'black'" in caplog.messages
    (tmp_path / 'classes.txt').write_text('cat\n')
    line = refused(capsys, images, '--class-map', tmp_path / 'classes.txt', '--num-classes', 1)
    assert f"the images in '{images}/train' are not in class folders that --class-map names" in line
    for path in (images / 'validation').glob('*/*.png'):
        path.rename(images / 'validation' / f'{path.parent.name}{path.name}')
    assert refused(capsys, images) == (
        f"error: the images in '{images}/validation' are not in class folders: put each into a folder with the name of "
        f'its class'
    )
    write_tars(tmp_path / 'tars', images)
    line = refused(capsys, tmp_path / 'tars')
    assert line.startswith(f"error: the images in '{tmp_path}/tars/validation.tar' are not in class folders")
