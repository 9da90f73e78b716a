"""Data sets: timm's, with what they pass over in silence said, or turned into errors."""

import argparse
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import ImageMode
from timm.data import ImageDataset, create_dataset
from timm.data.readers.class_map import load_class_map
from timm.data.readers.reader import Reader
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.data.readers.reader_image_in_tar import ReaderImageInTar, TarState
from timm.utils.misc import natural_key
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.images import IMAGE_ERRORS, eight_bits, image_suffixes, open_image

from ..report import log
from .streams import CheckedStream, LoadingError, check_columns, check_source, default_key

__all__ = ['Images', 'Split', 'check_classes', 'check_same_classes', 'class_names', 'open_dataset', 'open_splits']

SPLIT_NAMES = (('train', 'training'), ('validation', 'val', 'valid', 'eval', 'evaluation'), ('test', 'testing'))


class CheckedImages(Dataset):
    """A map-style data set where an unreadable image is an error that names the file.

    On its own, timm goes on with the next image, and torchvision fails without the name. The images are converted as
    in `flatten_zoo.images.eight_bits`.

    Args:
        dataset: Data set of timm or torchvision that leaves the images as they are.
        mode: Pillow's mode to convert to.
    """

    def __init__(self, dataset: Any, mode: str):
        self.dataset = dataset
        self.dataset._max_retries = 1  # timm's own: no second image in place of the first
        self.mode = mode
        self.transform: Any = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        try:
            image, target = self.dataset[index]
            image = eight_bits(image, self.mode)
        except (RuntimeError, *IMAGE_ERRORS) as e:
            if isinstance(e, RuntimeError) and not str(e).startswith('Failed to load'):  # timm's words for it
                raise
            reason = f' ({first_line(e)})' if type(e) is ValueError else ''
            raise LoadingError(f"cannot read the image '{self.name(index)}'{reason}; remove or replace it") from e
        return self.transform(image) if self.transform else image, target

    def name(self, index: int) -> str:
        """The file of an image, or its number where the data set does not say."""
        samples = getattr(self.dataset, 'samples', None)  # of torchvision
        file = self.dataset.filename(index, absolute=True) if hasattr(self.dataset, 'filename') else None
        return file or (samples[index][0] if samples else f'number {index} of {type(self.dataset).__name__}')


Images = CheckedImages | CheckedStream


def open_dataset(
    args: argparse.Namespace,
    split: str,
    channels: int,
    batch_size: int,
    num_samples: int | None,
    is_training: bool = False,
    alone_is_fine: bool = False,
) -> Images:
    """The data set that the options name.

    Args:
        args: Options of `train.py` or `validate.py`.
        split: Name of the split.
        channels: Image channels, which decide the colour mode if none is given.
        batch_size: Images per batch, for streams.
        num_samples: Number of images, for streams that do not know it.
        is_training: Whether streams are shuffled and repeated.
        alone_is_fine: Whether the data folder may itself be the split, if it holds no other.

    Raises:
        UsageError: No such data, no such split, nothing in it, or a missing package.
    """
    root = args.data or args.data_dir
    kind = args.dataset.lower()
    if kind:
        check_source(args.dataset, root, split)
    if is_folder := not kind or kind in ('torch/image_folder', 'torch/folder'):
        option = '--train-split' if is_training else '--split' if alone_is_fine else '--val-split'
        root = find_split(root, split, alone_is_fine, option)
    mode = _image_mode(args.input_img_mode, channels)
    try:
        if is_folder:
            dataset = open_folder(kind, root, args.class_map, args.input_key)
        else:
            dataset = create_dataset(
                args.dataset,
                root=root,
                split=split,
                search_split=False,
                is_training=is_training,
                class_map=args.class_map,
                download=args.dataset_download,
                batch_size=batch_size,
                seed=args.seed,
                repeats=args.epoch_repeats if is_training else 0,
                num_samples=num_samples,
                input_img_mode=mode if kind.startswith('tfds/') else '',  # TensorFlow decodes, others leave it to us
                input_key=args.input_key or default_key(kind),
                target_key=args.target_key,
                trust_remote_code=args.dataset_trust_remote_code,
            )
    except UsageError:
        raise
    except Exception as e:
        name = f"--dataset {args.dataset} in '{root}'" if args.dataset else f"'{root}'"
        mapped = f" with --class-map '{args.class_map}'" if args.class_map else ''
        raise UsageError(f'cannot read the data {name}{mapped}: {first_line(e)}') from e
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return CheckedStream(dataset, args.dataset, mode)  # type: ignore[arg-type]  # timm's, as all streams
    if kind.startswith('hfds/'):
        check_columns(dataset, args.dataset)
    return CheckedImages(dataset, mode)


def find_split(root: str | None, split: str, alone_is_fine: bool, option: str) -> str:
    """The folder or tar file of a split: `root/SPLIT`, a synonym of it as timm has them, or `root/SPLIT.tar`.

    Args:
        root: Folder (or tar file) of the data.
        split: Name of the split.
        alone_is_fine: Whether `root` may itself be the split, if it holds no other.
        option: What names the split, for messages.
    """
    if not root:
        raise UsageError('no data: give its folder with --data-dir, or a data set of another kind with --dataset')
    path = Path(root)
    if not path.exists():
        raise UsageError(f"--data-dir '{root}' does not exist")
    synonyms = next((names for names in SPLIT_NAMES if split in names), ())
    for name in (split, *synonyms):
        for candidate in (path / name, path / f'{name}.tar'):
            if name and candidate.exists():
                return str(candidate)
    if path.is_file():
        if alone_is_fine:
            return root
        raise UsageError(f"--data-dir '{root}' is a file: give the folder that holds one tar file per split")
    inside = sorted(entry.name for entry in path.iterdir() if entry.is_dir() or entry.suffix == '.tar')
    if not inside:
        raise UsageError(f"--data-dir '{root}' is empty")
    others = [name for name in inside if any(name.removesuffix('.tar') in names for names in SPLIT_NAMES)]
    if alone_is_fine and not others:
        return root
    raise UsageError(f"{option}: no split '{split}' in '{root}', which has {', '.join((others or inside)[:5])}")


def _image_mode(mode: str | None, channels: int) -> str:
    """The mode of PIL that images are converted to: the given one, or that of so many channels."""
    mode = mode or {1: 'L', 3: 'RGB'}.get(channels)
    if mode is None:
        raise UsageError(
            f'--in-chans or --input-size of {channels} channels: images have 1 or 3; --input-img-mode names a mode of '
            f'others, such as RGBA'
        )
    try:
        bands = len(ImageMode.getmode(mode).bands)
    except KeyError as e:
        raise UsageError(f"--input-img-mode '{mode}': PIL has no such mode; RGB, L, RGBA, CMYK, …") from e
    if bands != channels:
        raise UsageError(f'--input-img-mode {mode} has {bands} channels where the model takes {channels}: --in-chans')
    return mode


def class_index(dataset: Dataset) -> dict[str, int] | None:
    """Index of each class of a data set by its name, or None where it does not say."""
    source = getattr(dataset, 'dataset', dataset)
    source = getattr(source, 'reader', source)
    index = getattr(source, 'class_to_idx', None) or getattr(source, 'class_name_to_idx', None)
    return dict(index) if index else None


def class_names(dataset: Dataset) -> list[str] | None:
    """Names of the classes in order of index, or None where the data set does not name each of them."""
    index = class_index(dataset) or {}
    names = sorted(index, key=index.__getitem__)
    return names if names and [index[name] for name in names] == list(range(len(names))) else None


def check_classes(dataset: Dataset, num_classes: int, model: str) -> None:
    """Refuse data whose number of classes is not the model's.

    Raises:
        UsageError: Both numbers, and what to do.
    """
    index = class_index(dataset)
    found = max(index.values()) + 1 if index else num_classes
    if found != num_classes:
        raise UsageError(
            f'the data has {found} classes but {model} has {num_classes}: give --num-classes {found}, '
            f'or name all classes in --class-map'
        )


def check_same_classes(train: Dataset, validation: Dataset) -> None:
    """Refuse a validation split whose classes are others than in training.

    A class without images would otherwise shift the index of all that follow.
    """
    ours, theirs = class_index(train), class_index(validation)
    if ours is not None and theirs is not None and ours != theirs:
        different = sorted(set(ours) ^ set(theirs))
        raise UsageError(
            f'the training and validation splits have different classes, {", ".join(different[:5])} for one: '
            f'name all classes in --class-map'
        )


def open_splits(args: argparse.Namespace, num_classes: int, channels: int) -> tuple[Images, Images | None]:
    """The training split, and the validation split unless `--val-split ''`; both with the model's classes."""
    train_set = open_dataset(
        args, args.train_split, channels, args.batch_size, args.train_num_samples, is_training=True
    )
    check_classes(train_set, num_classes, args.model)
    if not args.val_split:
        return train_set, None
    eval_set = open_dataset(
        args, args.val_split, channels, args.validation_batch_size or args.batch_size, args.val_num_samples
    )
    check_same_classes(train_set, eval_set)
    return train_set, eval_set


# Hidden files and folders, and others that systems and their programs leave; './' and '../' are none.
SYSTEM = re.compile(
    r'(?:^|[/\\])(\._|\.(?!\.?(?:[/\\]|$))[^/\\]*|(?:__macosx|(?:eh)?thumbs\.db|desktop\.ini|\$recycle\.bin'
    r'|system volume information|lost\+found|@eadir)(?=[/\\]|$))',
    re.IGNORECASE,
)
MOST_NAMED = 8


class Split:
    """Which files of a split are images, and of which class: timm's rules, but nothing is left out without a word.

    Args:
        root: Folder or tar file, for messages.
        suffixes: Suffixes of images with semicolons between them; all that Pillow decodes if None.
        class_map: File with the classes in order of index; if None they are the folders' names in natural order.
    """

    def __init__(self, root: str, suffixes: str | None, class_map: str | None = None):
        self.root = root
        self.suffixes = set(suffixes.split(';')) if suffixes else image_suffixes()
        self.class_map = load_class_map(class_map, root) if class_map else None
        self.left_out: Counter[str] = Counter()

    def is_image(self, path: str) -> bool:
        """Whether a file is to be read, by its path within the split; one that is not is counted."""
        if of_system := SYSTEM.search(path):
            self.left_out['._*' if of_system[1] == '._' else of_system[1]] += 1
            return False
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in self.suffixes:
            self.left_out[f'*{suffix}' if suffix else 'without suffix'] += 1
            return False
        return True

    def say_left_out(self) -> None:
        """Say which files are no images, and how many."""
        if left_out := (+self.left_out).most_common():
            kinds = [f'{number} {ascii(kind)[1:-1]}' for kind, number in left_out]
            log.info("'%s': files left out: %s", self.root, _some(kinds))

    def index_classes(self, labels: list[str], leaves: Iterable[str] = ()) -> dict[str, int]:
        """Index of each class, once all files are seen; says what is left out and which classes are empty.

        Args:
            labels: Name of the folder of each image, '' for those in no folder.
            leaves: Paths of the folders that have no others in them.

        Raises:
            UsageError: There is no image, or none in a folder.
        """
        found = Counter(labels)
        self.left_out['in no class folder'] = found.pop('', 0)
        index = self.class_map or {name: i for i, name in enumerate(sorted(found, key=natural_key))}
        self.left_out['of no class in --class-map'] = sum(n for name, n in found.items() if name not in index)
        self.say_left_out()
        expected = self.class_map or [os.path.basename(path) for path in leaves if not SYSTEM.search(path)]
        if empty := sorted(set(expected) - found.keys(), key=natural_key):
            names = _some([ascii(name) for name in empty])
            hint = '' if self.class_map else ', which does not count: if it should, name all classes in --class-map'
            log.info("'%s': there is no image of class %s%s", self.root, names, hint)
        if found.keys() & index.keys():
            return index
        if labels:
            raise UsageError(
                f"the images in '{self.root}' are not in class folders{' that --class-map names' if found else ''}: "
                f'put each into a folder with the name of its class'
            )
        raise UsageError(f"there are no images in '{self.root}'")


def _some(names: list[str]) -> str:
    return ', '.join(names[:MOST_NAMED]) + (f' and {len(names) - MOST_NAMED} more' if len(names) > MOST_NAMED else '')


class FolderReader(ReaderImageFolder):
    """timm's reader of a folder, for the images of `Split`."""

    def __init__(self, root: str, class_map: str | None, suffixes: str | None):
        Reader.__init__(self)
        self.root = root
        split = Split(root, suffixes, class_map)
        files, leaves = [], []
        for folder, subfolders, names in os.walk(root, followlinks=True, onerror=_raise):
            inside = '' if folder == root else os.path.relpath(folder, root)
            files += [path for name in names if split.is_image(path := os.path.join(inside, name))]
            if inside and not subfolders:
                leaves.append(inside)
        labels = [_label(path) for path in files]
        self.class_to_idx = split.index_classes(labels, leaves)
        self.samples = sorted(
            (
                (os.path.join(root, path), self.class_to_idx[label])
                for path, label in zip(files, labels, strict=True)
                if label in self.class_to_idx
            ),
            key=lambda sample: natural_key(sample[0]),
        )


def _raise(error: OSError) -> None:
    raise error


def _label(path: str) -> str:
    return os.path.basename(os.path.dirname(path))


class TarReader(ReaderImageInTar):
    """timm's reader of a tar file, which may hold others, for the images of `Split`."""

    def __init__(self, root: str, class_map: str | None, suffixes: str | None):
        Reader.__init__(self)
        self.root, self.root_is_tar, self.cache_tarfiles, self.tar_state = root, True, True, TarState()
        split = Split(root, suffixes, class_map)
        files, folders = [], set()
        with tarfile.open(root) as tar:
            for path, member, inner in _members(tar):
                if member.isdir():
                    folders.add(path)
                elif member.isfile() and split.is_image(path):
                    files.append((_label(path), member, inner))
                    if inner:
                        self.tar_state.children[inner.name] = TarState(ti=inner)
        leaves = folders - {os.path.dirname(path) for path in folders} - {'.'}
        self.class_name_to_idx = split.index_classes([label for label, *_ in files], leaves)
        files = sorted(
            (file for file in files if file[0] in self.class_name_to_idx), key=lambda file: natural_key(file[1].path)
        )
        self.samples = [(member, None, inner) for _, member, inner in files]
        self.targets = [self.class_name_to_idx[label] for label, *_ in files]


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo, tarfile.TarInfo | None]]:
    """Path, entry and the tar file that it is in, where it is in one of those in the tar file; those are folders."""
    for member in tar:
        path = os.path.normpath(member.path)
        if member.isfile() and path.lower().endswith('.tar') and not SYSTEM.search(path):
            with tarfile.open(fileobj=tar.extractfile(member), mode='r|') as inner:
                for entry in inner:
                    yield os.path.normpath(os.path.join(path[: -len('.tar')], entry.path)), entry, member
        else:
            yield path, member, None


class TorchvisionFolder(ImageFolder):
    """torchvision's data set of a folder, where the classes are the folders of the first level, for those images."""

    def __init__(self, root: str, suffixes: str | None):
        split = Split(root, suffixes)
        super().__init__(
            root, loader=open_image, is_valid_file=lambda path: split.is_image(os.path.relpath(path, root))
        )
        loose = [name for name in os.listdir(root) if name not in self.class_to_idx and split.is_image(name)]
        split.index_classes([self.classes[target] for target in self.targets] + [''] * len(loose))

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        classes = [name for name in super().find_classes(directory)[0] if not SYSTEM.search(name)]
        return classes, {name: i for i, name in enumerate(classes)}


def open_folder(kind: str, root: str, class_map: str | None, suffixes: str | None) -> ImageDataset | ImageFolder:
    """The data set of a folder or tar file, with its images as they are in their files.

    Args:
        kind: `torch/…` for torchvision's, empty for timm's.
        root: Folder, or for timm's also a tar file.
        class_map: File that `--class-map` names, for timm's.
        suffixes: Suffixes of images with semicolons between them; all that Pillow decodes if None.

    Raises:
        UsageError: There is no image, or none in a class folder.
    """
    if kind:
        return TorchvisionFolder(root, suffixes)
    reader = TarReader if os.path.isfile(root) else FolderReader
    return ImageDataset(root, reader(root, class_map, suffixes), input_img_mode='')
