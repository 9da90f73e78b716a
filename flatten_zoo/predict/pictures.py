"""Pictures to predict on: which there are, and reading them."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import UsageError
from ..images import naming, open_image
from ..training.data.datasets import CheckedImages, Images, Split

__all__ = ['Batch', 'Files', 'batches', 'find_pictures']

NARROWEST = 1000  # sides of a picture to each other; the shorter is brought to the network's size

Transform = Callable[[Image.Image], torch.Tensor]
Batch = tuple[list[str], torch.Tensor | None, list[str]]  # names, images B × C × H × W, and what could not be read


def find_pictures(sources: Sequence[Path]) -> list[Path]:
    """Files, each once: those that are named, and the images in folders and theirs, sorted by path within each.

    Raises:
        UsageError: There is no such file, or no image in a folder.
    """
    paths = []
    for source in sources:
        if source.is_dir():
            split = Split(str(source), suffixes=None)
            found = sorted(path for path in _files(source) if split.is_image(os.path.relpath(path, source)))
            split.say_left_out()
            if not found:
                raise UsageError(f"there are no images in '{source}'")
            paths += found
        elif source.is_file():
            paths.append(source)
        else:
            raise UsageError(f"there is no file or folder '{source}'")
    return list(dict.fromkeys(paths))


def _files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_refuse):
        here = Path(folder)
        # a link to a folder that it is in has no end
        subfolders[:] = [name for name in subfolders if not here.resolve().is_relative_to((here / name).resolve())]
        yield from (here / name for name in names)


def _refuse(error: OSError) -> None:
    raise UsageError(f"cannot read the folder '{error.filename}': {error.strerror}")


class Files(Dataset):
    """Image files, in the manner of `training.data.datasets.CheckedImages`.

    Args:
        paths: The files.
        mode: Pillow's mode to convert to.
    """

    def __init__(self, paths: Sequence[Path], mode: str):
        self.paths = paths
        self.mode = mode
        self.transform: Any = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, None]:
        with naming(self.paths[index]):
            image = open_image(self.paths[index], self.mode)
        if max(image.size) > NARROWEST * min(image.size):
            raise UsageError(f"'{self.paths[index]}' is too narrow: {image.width} × {image.height}")
        return self.transform(image), None

    def name(self, index: int) -> str:
        return str(self.paths[index])


class _Attempts(Dataset):
    """Name and image for each picture of a data set, or in place of the image why it cannot be read."""

    def __init__(self, dataset: Files | CheckedImages):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[str, torch.Tensor | str]:
        name = self.dataset.name(index).encode(errors='backslashreplace').decode()  # files need not be in UTF-8
        try:
            return name, self.dataset[index][0]
        except UsageError as e:
            return name, str(e)


class _Numbered(IterableDataset):
    """A stream's images, named by their numbers; one that cannot be read ends it with a `UsageError`."""

    def __init__(self, stream: IterableDataset):
        self.stream = stream

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((str(number), image) for number, (image, _) in enumerate(self.stream))


def batches(dataset: Files | Images, transform: Transform, batch_size: int, workers: int) -> DataLoader:
    """The pictures of a data set as `Batch`es, in their order.

    Args:
        dataset: `Files`, or what `training.data.datasets.open_dataset` opens.
        transform: From a picture to what the network takes.
        batch_size: Pictures in a batch.
        workers: Processes that read; a single batch is read in this one, and a stream in one at most.
    """
    dataset.transform = transform
    if isinstance(dataset, IterableDataset):
        return DataLoader(_Numbered(dataset), batch_size, num_workers=min(workers, 1), collate_fn=_collate)
    workers = min(workers, (len(dataset) - 1) // batch_size)
    return DataLoader(_Attempts(dataset), batch_size, num_workers=workers, collate_fn=_collate)


def _collate(items: list[tuple[str, torch.Tensor | str]]) -> Batch:
    read = [(name, image) for name, image in items if isinstance(image, torch.Tensor)]
    images = torch.stack([image for _, image in read]) if read else None
    return [name for name, _ in read], images, [reason for _, reason in items if isinstance(reason, str)]
