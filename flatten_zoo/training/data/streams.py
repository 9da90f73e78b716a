"""Kinds of data set: what each needs, and streams whose silent failures are errors."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageDataset, IterableImageDataset
from timm.data.readers.reader_wds import ReaderWds
from torch.utils.data import get_worker_info

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.images import IMAGE_ERRORS, eight_bits, image_suffixes

__all__ = ['CheckedStream', 'LoadingError', 'check_columns', 'check_source', 'default_key']

# prefix of --dataset: the package that reads it, and what to install for it
KINDS = {
    'torch': ('torchvision', 'torchvision'),
    'hfds': ('datasets', "'flatten_zoo[hfds]'"),
    'hfids': ('datasets', "'flatten_zoo[hfds]'"),
    'tfds': ('tensorflow_datasets', 'tensorflow tensorflow-datasets'),
    'wds': ('webdataset', "'flatten_zoo[wds]'"),
}
INFO_FILES = ('_info.json', 'info.json')


class LoadingError(UsageError):
    """Data that cannot be read.

    A loader's process hands an exception over as text, the traceback first and the message as its last line.
    """

    def __init__(self, message: str):
        super().__init__(message.strip().splitlines()[-1].removeprefix(f'{__name__}.{type(self).__name__}: '))


def check_source(name: str, root: str | None, split: str) -> None:
    """Refuse a kind of data set that there is not, whose package is missing, or that is not told where its data are.

    Args:
        name: `--dataset`.
        root: `--data-dir`.
        split: Name of the split.

    Raises:
        UsageError: What is wrong, and what to do.
    """
    prefix, separator, _ = name.partition('/')
    kind = prefix.lower()
    if not separator or kind not in KINDS:
        raise UsageError(
            f"--dataset '{name}': must be PREFIX/NAME with prefix {', '.join(KINDS)}; "
            f'leave it out for folders of images'
        )
    package, install = KINDS[kind]
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"--dataset '{name}' needs the package {package}: pip install {install}")
    if kind == 'wds':
        _check_shards_are_named(root, split)


def _check_shards_are_named(root: str | None, split: str) -> None:
    if not root:
        raise UsageError('no data: give the folder (or address) of the shards with --data-dir')
    if _is_remote(root) or 'tar' in split or '..' in split:  # timm's test for a list of shards
        return
    if not any((Path(root) / name).is_file() for name in INFO_FILES):
        raise UsageError(
            f"no {INFO_FILES[0]} in '{root}' says which shards are '{split}': write one, or name the shards, as in "
            f"--train-split 'train-{{0000..0145}}.tar' --train-num-samples 1281167"
        )


def check_columns(dataset: ImageDataset, name: str) -> None:
    """Refuse a Hugging Face dataset without the columns that are to be read, which would fail at the first image.

    Raises:
        UsageError: The columns that there are.
    """
    reader = dataset.reader
    if not len(reader):
        return
    row = reader.dataset[0]
    columns = [column for column, value in row.items() if value is not None]  # timm adds an empty one of images
    for option, key in (('--input-key', reader.image_key), ('--target-key', reader.label_key)):
        if key not in columns and key.partition('/')[0] not in columns:  # a path into a column
            raise UsageError(f"{option} {key}: '{name}' has no such column, but {', '.join(columns)}")


def default_key(kind: str) -> str | None:
    """What `--input-key` is if not given: in shards any kind of image; else timm's."""
    if not kind.startswith('wds/'):
        return None
    return ';'.join(['jpg', *sorted(suffix[1:] for suffix in image_suffixes() - {'.jpg'})])


def _is_remote(path: str) -> bool:
    return '://' in path or path.startswith('pipe:')


class CheckedStream(IterableImageDataset):
    """A stream where missing shards, processes without data and failures while reading are errors of one line.

    On its own, WebDataset goes on without a missing shard, and an epoch is shorter when there are too few for all
    processes. In validation, timm's readers let each of several processes give the same number of images, some of them
    twice or not at all; here each gives all of its part, and may give more than another.
    """

    def __init__(self, dataset: IterableImageDataset, name: str, mode: str):
        """
        Args:
            dataset: Stream as timm opens it.
            name: Its name, for messages.
            mode: Pillow's mode to convert images to, as in `flatten_zoo.images.eight_bits`.

        Raises:
            UsageError: A local shard is missing.
        """
        super().__init__(None, reader=dataset.reader)
        self.name = name
        self.mode = mode
        for shard in self._shards():
            path = os.path.join(self.reader.root, shard)
            if not _is_remote(path) and not os.path.isfile(path):
                raise UsageError(f"--dataset '{name}': there is no shard '{path}'")

    def _shards(self) -> list[str]:
        return list(self.reader.split_info.filenames) if isinstance(self.reader, ReaderWds) else []

    def set_loader_cfg(self, num_workers: int | None = None) -> None:
        super().set_loader_cfg(num_workers=num_workers)
        shards = len(self._shards())
        if shards and self.reader.is_training and shards < self.reader.global_num_workers:
            processes = self.reader.dist_num_replicas
            raise UsageError(
                f"--workers {num_workers}: '{self.name}' has {shards} shards for {processes} training process"
                f'{"es" if processes > 1 else ""}, so at most {shards // processes} workers have one to read'
            )

    def _give_each_image_once(self) -> None:
        if self.reader.ds is None:
            self.reader._lazy_init()  # decides which part is whose
        self.reader.dist_num_replicas = 1  # no others whose number of images to match

    def _seed_epoch(self) -> None:
        """Shuffle WebDataset's buffer by random numbers that a continued run has again, as a loader's process does."""
        if isinstance(self.reader, ReaderWds) and get_worker_info() is None:
            self.reader.worker_seed = int(torch.randint(2**63 - 1, ()))
            self.reader.ds = None

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        if self.reader.is_training:
            self._seed_epoch()
        else:
            self._give_each_image_once()
        empty = True
        try:
            for image, target in self.reader:
                empty = False
                yield self.transform(eight_bits(image, self.mode)), target
        except KeyError as e:
            raise LoadingError(f"'{self.name}' has no column {e}: name others by --input-key and --target-key") from e
        except (RuntimeError, *IMAGE_ERRORS) as e:
            raise LoadingError(f"cannot read on in '{self.name}': {first_line(e)}") from e
        if empty and self.reader.is_training:
            raise LoadingError(f"no image in '{self.name}' can be read")
