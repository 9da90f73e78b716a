"""Images to learn from, with labels or without."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from torch.utils.data import Dataset

from ..errors import UsageError
from ..images import open_image
from ..predict.pictures import find_pictures
from ..training.data.datasets import CheckedImages, check_same_classes, class_names, find_split, open_dataset
from ..training.data.streams import CheckedStream

__all__ = ['open_images']

Images = CheckedImages | CheckedStream
HELD_OUT = 10  # every so many images, where the folder does not say which


class Pictures(Dataset):
    """Image files as torchvision's data sets have them, all with the label 0."""

    def __init__(self, paths: Sequence[Path]):
        self.samples = [(str(path), 0) for path in paths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.samples[index]
        return open_image(path), label


def open_images(args: argparse.Namespace, channels: int) -> tuple[Images, Images, list[str] | None]:
    """Images to learn from, others that are held out, and the names of their classes if they have any.

    Args:
        args: Options of `train.py`, of which `data_dir` names the folder: one with a folder (or tar file) for training
            and one for validation, each with a folder per class; or one with images in it, and in its folders, of which
            every tenth is held out.
        channels: Channels of an image.

    Raises:
        UsageError: There is no such folder, or it has too few images.
    """
    if not Path(args.data_dir).is_dir():
        raise UsageError(f"--data '{args.data_dir}': there is no such folder")
    root = args.data_dir
    if any(entry.is_dir() or entry.suffix == '.tar' for entry in Path(root).iterdir()):
        root = find_split(root, args.train_split, alone_is_fine=True, option='--data')
    if root != args.data_dir:
        splits = [open_dataset(args, split, channels, args.batch_size, None) for split in ('train', 'validation')]
        check_same_classes(*splits)
        return splits[0], splits[1], class_names(splits[0])
    paths = find_pictures([Path(root)])
    if len(paths) < HELD_OUT:
        raise UsageError(f"--data '{root}': {len(paths)} images are too few, as every tenth is held out")
    held_out = paths[HELD_OUT - 1 :: HELD_OUT]
    learned = sorted(set(paths) - set(held_out))
    mode = 'L' if channels == 1 else 'RGB'
    return CheckedImages(Pictures(learned), mode), CheckedImages(Pictures(held_out), mode), None
