"""Small data for training tests: images that any network learns in an epoch or two."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

COLOURS = {'blue': (20, 30, 220), 'green': (30, 200, 40), 'red': (220, 30, 20)}


def write_images(root: Path, train: int = 12, validation: int = 5, classes: tuple[str, ...] = tuple(COLOURS)) -> Path:
    """Write `root/SPLIT/CLASS/*.png`, noisy 20 × 24 images of the class's colour."""
    random = np.random.default_rng(0)
    for split, number in (('train', train), ('validation', validation)):
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(number):
                noise = random.integers(-20, 20, (20, 24, 3))
                pixels = np.clip(np.array(COLOURS[name]) + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f'{index}.png')
    return root


def write_tars(root: Path, images: Path) -> Path:
    """Write `root/SPLIT.tar` from a folder made by `write_images`."""
    root.mkdir()
    for split in ('train', 'validation'):
        with tarfile.open(root / f'{split}.tar', 'w') as tar:
            tar.add(images / split, arcname='.')
    return root


def write_shards(root: Path, images: Path, shards: int = 4) -> Path:
    """Write WebDataset shards `root/SPLIT-N.tar` and their `_info.json` from a folder made by `write_images`."""
    pytest.importorskip('webdataset')
    root.mkdir()
    splits = {}
    for split in ('train', 'validation'):
        files = _labelled(images / split)
        names = [f'{split}-{number}.tar' for number in range(shards)]
        for number, name in enumerate(names):
            with tarfile.open(root / name, 'w') as tar:
                for path, label in files[number::shards]:
                    for extension, content in ((path.suffix[1:], path.read_bytes()), ('cls', str(label).encode())):
                        member = tarfile.TarInfo(f'{path.parent.name}{path.stem}.{extension}')
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
        lengths = [len(files[number::shards]) for number in range(shards)]
        splits[split] = {'name': split, 'filenames': names, 'shard_lengths': lengths, 'num_samples': sum(lengths)}
    (root / '_info.json').write_text(json.dumps({'splits': splits}))
    return root


def write_parquet(root: Path, images: Path, shards: int = 4) -> Path:
    """Write a Hugging Face dataset as `root/data/SPLIT-N-of-SHARDS.parquet` from a folder made by `write_images`."""
    datasets = pytest.importorskip('datasets')
    features = datasets.Features({'image': datasets.Image(), 'label': datasets.ClassLabel(names=sorted(COLOURS))})
    (root / 'data').mkdir(parents=True)
    for split in ('train', 'validation'):
        files = _labelled(images / split)
        for number in range(shards):
            part = files[number::shards]
            columns = {
                'image': [{'bytes': path.read_bytes(), 'path': path.name} for path, _ in part],
                'label': [label for _, label in part],
            }
            datasets.Dataset.from_dict(columns, features=features).to_parquet(
                root / 'data' / f'{split}-{number:05d}-of-{shards:05d}.parquet'
            )
    return root


def _labelled(split: Path) -> list[tuple[Path, int]]:
    classes = sorted(folder.name for folder in split.iterdir())
    return [(path, classes.index(path.parent.name)) for path in sorted(split.glob('*/*.*'))]
