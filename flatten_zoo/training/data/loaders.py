"""Data sets and loaders: timm's, with their silent failures turned into errors."""
import argparse
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import ImageMode
from timm.data import AugMixDataset, FastCollateMixup, create_dataset, create_loader, resolve_data_config
from timm.data.loader import PrefetchLoader, adapt_to_chs
from torch.utils.data import DataLoader, Dataset

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.images import IMAGE_ERRORS, eight_bits

from ..loop.precision import Numerics
from ..processes.distributed import world_size
from .augmentation import allow_strongest_posterize
from .folders import open_folder
from .streams import CheckedStream, LoadingError, check_columns, check_source, default_key
from .test_time_views import Views

__all__ = [
    'check_classes', 'check_same_classes', 'class_names', 'evaluation_loader', 'input_config', 'mixup_arguments',
    'open_dataset', 'open_splits', 'training_loader',
]

SPLIT_NAMES = (('train', 'training'), ('validation', 'val', 'valid', 'eval', 'evaluation'), ('test', 'testing'))


class CheckedImages(Dataset):
    """A map-style data set where an unreadable image is an error that names the file.

    On its own, timm goes on with the next image, and torchvision fails without the name. The images are converted as
    in `flatten_zoo.images.eight_bits`.

    Args:
        dataset: Data set of timm or torchvision that leaves the images as they are.
        mode: Pillow's mode to convert to.
    """

    def __init__(self, dataset: Dataset, mode: str):
        self.dataset = dataset
        self.dataset._max_retries = 1  # timm's own: no second image in place of the first
        self.mode = mode
        self.transform = None

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


def open_dataset(
        args: argparse.Namespace,
        split: str,
        channels: int,
        batch_size: int,
        num_samples: int | None,
        is_training: bool = False,
        alone_is_fine: bool = False,
) -> Dataset:
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
    root = args.data_dir
    kind = args.dataset.lower()
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
                args.dataset, root=root, split=split, search_split=False, is_training=is_training,
                class_map=args.class_map, download=args.dataset_download, batch_size=batch_size, seed=args.seed,
                repeats=args.epoch_repeats if is_training else 0, num_samples=num_samples,
                input_img_mode=mode if kind.startswith('tfds/') else '',  # TensorFlow decodes, others leave it to us
                input_key=args.input_key or default_key(kind), target_key=args.target_key,
                trust_remote_code=args.dataset_trust_remote_code)
    except UsageError:
        raise
    except Exception as e:
        name = f"--dataset {args.dataset} in '{root}'" if args.dataset else f"'{root}'"
        mapped = f" with --class-map '{args.class_map}'" if args.class_map else ''
        raise UsageError(f'cannot read the data {name}{mapped}: {first_line(e)}') from e
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return CheckedStream(dataset, args.dataset, mode)
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
            f'others, such as RGBA')
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
    names = sorted(index, key=index.get)
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
            f'or name all classes in --class-map')


def check_same_classes(train: Dataset, validation: Dataset) -> None:
    """Refuse a validation split whose classes are others than in training.

    A class without images would otherwise shift the index of all that follow.
    """
    ours, theirs = class_index(train), class_index(validation)
    if ours is not None and theirs is not None and ours != theirs:
        different = sorted(set(ours) ^ set(theirs))
        raise UsageError(
            f'the training and validation splits have different classes, {", ".join(different[:5])} for one: '
            f'name all classes in --class-map')


def open_splits(args: argparse.Namespace, channels: int) -> tuple[Dataset, Dataset | None]:
    """The training split, and the validation split unless `--val-split ''`; both with the model's classes."""
    train_set = open_dataset(
        args, args.train_split, channels, args.batch_size, args.train_num_samples, is_training=True)
    check_classes(train_set, args.num_classes, args.model)
    if not args.val_split:
        return train_set, None
    eval_set = open_dataset(
        args, args.val_split, channels, args.validation_batch_size or args.batch_size, args.val_num_samples)
    check_same_classes(train_set, eval_set)
    return train_set, eval_set


def input_config(args: argparse.Namespace, model: torch.nn.Module, use_test_size: bool = False) -> dict[str, Any]:
    """Image size, interpolation, normalization and crop: from the options, else from the model."""
    config = resolve_data_config(vars(args), model=model, use_test_size=use_test_size)
    channels = config['input_size'][0]
    return {**config, 'mean': adapt_to_chs(config['mean'], channels), 'std': adapt_to_chs(config['std'], channels)}


def mixup_arguments(args: argparse.Namespace) -> dict[str, Any] | None:
    """Arguments of timm's `Mixup`, or None when nothing is mixed."""
    if not (args.mixup > 0 or args.cutmix > 0 or args.cutmix_minmax is not None):
        return None
    return {
        'mixup_alpha': args.mixup,
        'cutmix_alpha': args.cutmix,
        'cutmix_minmax': args.cutmix_minmax,
        'prob': args.mixup_prob,
        'switch_prob': args.mixup_switch_prob,
        'mode': args.mixup_mode,
        'label_smoothing': args.smoothing,
        'num_classes': args.num_classes,
    }


def training_loader(
        args: argparse.Namespace,
        dataset: Dataset,
        config: dict[str, Any],
        numerics: Numerics,
):
    """This process's share of the images, shuffled and augmented, in batches of a fixed size.

    Each image is in the share of one process. Where the images do not divide evenly, some are in two, so that all
    processes have the same number of batches; as on one process, images that do not fill a last batch are left out.

    Raises:
        UsageError: There are fewer images than one batch takes, or they are a stream and cannot be repeated.
    """
    _check_batch_is_filled('--batch-size', args.batch_size, dataset)
    if args.aug_repeats and isinstance(dataset, torch.utils.data.IterableDataset):
        raise UsageError(f'--aug-repeats {args.aug_repeats:g} needs data that can be read in any order, not a stream')
    allow_strongest_posterize()
    mixup = mixup_arguments(args)
    prefetch = not args.no_prefetcher
    interpolation = config['interpolation'] if args.no_aug or not args.train_interpolation else args.train_interpolation
    if args.aug_splits:
        dataset = AugMixDataset(dataset, num_splits=args.aug_splits)
    return _apart(create_loader(
        dataset, input_size=config['input_size'], batch_size=args.batch_size, is_training=True, no_aug=args.no_aug,
        re_prob=args.reprob, re_mode=args.remode, re_count=args.recount, re_split=args.resplit,
        train_crop_mode=args.train_crop_mode, scale=args.scale, ratio=args.ratio, hflip=args.hflip, vflip=args.vflip,
        color_jitter=args.color_jitter, color_jitter_prob=args.color_jitter_prob, grayscale_prob=args.grayscale_prob,
        gaussian_blur_prob=args.gaussian_blur_prob, auto_augment=args.aa, num_aug_splits=args.aug_splits,
        num_aug_repeats=args.aug_repeats, distributed=world_size() > 1,
        interpolation=interpolation, mean=config['mean'], std=config['std'], num_workers=args.workers,
        collate_fn=FastCollateMixup(**mixup) if mixup and prefetch else None, pin_memory=args.pin_mem,
        device=numerics.device, img_dtype=numerics.dtype, use_prefetcher=prefetch, persistent_workers=False,
        worker_seeding=args.worker_seeding, use_multi_epochs_loader=args.use_multi_epochs_loader,
        **scheduled_sizes(args, dataset)))


def _check_batch_is_filled(option: str, batch_size: int, dataset: Dataset) -> None:
    processes = world_size()
    if not isinstance(dataset, torch.utils.data.IterableDataset) and math.ceil(len(dataset) / processes) < batch_size:
        where = f' in {processes} processes' if processes > 1 else ''
        raise UsageError(f'{option} {batch_size}{where} is too many: there are {len(dataset)} training images')


def scheduled_sizes(args: argparse.Namespace, dataset: Dataset) -> dict[str, Any]:
    """Arguments of timm's loader for `--train-img-sizes`.

    Raises:
        UsageError: The data is a stream, or too small for any of the batches.
    """
    if not args.train_img_sizes:
        return {}
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise UsageError('--train-img-sizes needs data with a length, not a stream')
    _check_batch_is_filled('--train-batch-sizes', max(args.train_batch_sizes or [0]), dataset)
    return {
        'input_size_choices': args.train_img_sizes,
        'batch_size_choices': args.train_batch_sizes,
        'batch_choice_weights': args.train_size_probs,
        'batch_choice_seed': args.seed,
        'batch_choice_schedule': args.train_size_schedule,
        'batch_schedule_epochs': args.epochs,
        'batch_schedule_spread': args.train_size_schedule_spread,
        'batch_schedule_random_mix': args.train_size_random_mix,
        'num_batches': args.train_batches_per_epoch,
    }


def _apart(loader: DataLoader | PrefetchLoader) -> DataLoader | PrefetchLoader:
    """Keep signals to the group of this process, such as Ctrl-C or torchrun's, from those of its loader."""
    inner = loader.loader if isinstance(loader, PrefetchLoader) else loader
    if hasattr(os, 'setpgid'):
        inner.worker_init_fn = partial(_start_apart, inner.worker_init_fn)
    return loader


def _start_apart(initialize: Callable[[int], None], worker: int) -> None:
    os.setpgid(0, 0)
    initialize(worker)


def evaluation_loader(
        args: argparse.Namespace,
        dataset: Dataset,
        config: dict[str, Any],
        numerics: Numerics,
        batch_size: int,
        crop_border_pixels: int | None = None,
        tf_preprocessing: bool = False,
        views: int = 0,
):
    """Every image once, in order; of several processes, each has its share.

    Shares of one size may need images of another share at the end: timm's `evaluation_sample_limit` tells where.
    With `views` a batch is (B, views, C, H, W), of as many views as it has images otherwise.
    """
    batch_size = max(batch_size // max(views, 1), 1)
    loader = create_loader(
        dataset, input_size=config['input_size'], batch_size=batch_size, interpolation=config['interpolation'],
        mean=config['mean'], std=config['std'], crop_pct=config['crop_pct'], crop_mode=config['crop_mode'],
        crop_border_pixels=crop_border_pixels, num_workers=args.workers, pin_memory=args.pin_mem,
        device=numerics.device, img_dtype=numerics.dtype, use_prefetcher=not args.no_prefetcher,
        tf_preprocessing=tf_preprocessing, persistent_workers=False, distributed=world_size() > 1)
    if views:
        dataset.transform = Views(dataset.transform, views)
    return _apart(loader)
