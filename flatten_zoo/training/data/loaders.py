"""From data sets to batches: timm's loaders, and several views of each image in evaluation."""

import argparse
import math
import os
from functools import partial
from typing import Any

import torch
from PIL import Image
from timm.data import AugMixDataset, FastCollateMixup, auto_augment, create_loader, resolve_data_config
from timm.data.loader import PrefetchLoader, adapt_to_chs
from timm.data.transforms import CenterCropOrPad, center_crop_or_pad
from torch.utils.data import DataLoader
from torchvision.transforms import CenterCrop, Compose
from torchvision.transforms import functional as F

from flatten_zoo.errors import UsageError

from ..loop.optimization import Numerics, mixup_arguments
from ..processes import world_size
from .datasets import Images

__all__ = ['Views', 'evaluation_loader', 'input_config', 'training_loader']


def input_config(args: argparse.Namespace, model: torch.nn.Module, use_test_size: bool = False) -> dict[str, Any]:
    """Image size, interpolation, normalization and crop: from the options, else from the model."""
    config = resolve_data_config(vars(args), model=model, use_test_size=use_test_size)
    channels = config['input_size'][0]
    return {**config, 'mean': adapt_to_chs(config['mean'], channels), 'std': adapt_to_chs(config['std'], channels)}


def training_loader(
    args: argparse.Namespace, num_classes: int, dataset: Images, config: dict[str, Any], numerics: Numerics
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
    mixup = mixup_arguments(args, num_classes)
    prefetch = not args.no_prefetcher
    interpolation = config['interpolation'] if args.no_aug or not args.train_interpolation else args.train_interpolation
    if args.aug_splits:
        dataset = AugMixDataset(dataset, num_splits=args.aug_splits)
    loader = create_loader(
        dataset,  # type: ignore[arg-type]  # timm takes any with a `transform`
        input_size=config['input_size'],
        batch_size=args.batch_size,
        is_training=True,
        no_aug=args.no_aug,
        re_prob=args.reprob,
        re_mode=args.remode,
        re_count=args.recount,
        re_split=args.resplit,
        train_crop_mode=args.train_crop_mode,
        scale=args.scale,
        ratio=args.ratio,
        hflip=args.hflip,
        vflip=args.vflip,
        color_jitter=args.color_jitter,
        color_jitter_prob=args.color_jitter_prob,
        grayscale_prob=args.grayscale_prob,
        gaussian_blur_prob=args.gaussian_blur_prob,
        auto_augment=args.aa,
        num_aug_splits=args.aug_splits,
        num_aug_repeats=args.aug_repeats,
        distributed=world_size() > 1,
        interpolation=interpolation,
        mean=config['mean'],
        std=config['std'],
        num_workers=args.workers,
        collate_fn=FastCollateMixup(**mixup) if mixup and prefetch else None,
        pin_memory=args.pin_mem,
        device=numerics.device,
        img_dtype=numerics.dtype,
        use_prefetcher=prefetch,
        persistent_workers=False,
        worker_seeding=args.worker_seeding,
        use_multi_epochs_loader=args.use_multi_epochs_loader,
        **scheduled_sizes(args, dataset),
    )
    _allow_strongest_posterize(loader.dataset)
    return _apart(loader)


def _allow_strongest_posterize(dataset: Any) -> None:
    """Let RandAugment and AutoAugment posterize down to 0 bits, their strongest level, which Pillow 13 refuses.

    With `rand-m9-mstd0.5-inc1` it is drawn for about 3 images in 1000, and then ends the run.
    """
    if isinstance(dataset, AugMixDataset):
        transforms: list[Any] = [dataset.augmentation]
    else:
        transforms = getattr(dataset, 'transforms', None) or [dataset.transform]  # one of each size, or one
    for step in (step for transform in transforms for step in transform.transforms):
        if isinstance(step, auto_augment.AutoAugment):
            ops = [op for policy in step.policy for op in policy]
        else:
            ops = getattr(step, 'ops', ())  # of RandAugment and AugMix
        for op in ops:
            if op.aug_fn is auto_augment.posterize:
                op.aug_fn = _posterize


def _posterize(image: Image.Image, bits_to_keep: int, **kwargs) -> Image.Image:
    if bits_to_keep < 1:
        return image.point(lambda _: 0)
    return auto_augment.posterize(image, bits_to_keep, **kwargs)


def _check_batch_is_filled(option: str, batch_size: int, dataset: Images | AugMixDataset) -> None:
    processes = world_size()
    if not isinstance(dataset, torch.utils.data.IterableDataset) and math.ceil(len(dataset) / processes) < batch_size:
        where = f' in {processes} processes' if processes > 1 else ''
        raise UsageError(f'{option} {batch_size}{where} is too many: there are {len(dataset)} training images')


def scheduled_sizes(args: argparse.Namespace, dataset: Images | AugMixDataset) -> dict[str, Any]:
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


def _start_apart(initialize: Any, worker: int) -> None:
    os.setpgid(0, 0)
    initialize(worker)


def evaluation_loader(
    args: argparse.Namespace,
    dataset: Images,
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
        dataset,  # type: ignore[arg-type]
        input_size=config['input_size'],
        batch_size=batch_size,
        interpolation=config['interpolation'],
        mean=config['mean'],
        std=config['std'],
        crop_pct=config['crop_pct'],
        crop_mode=config['crop_mode'],
        crop_border_pixels=crop_border_pixels,
        num_workers=args.workers,
        pin_memory=args.pin_mem,
        device=numerics.device,
        img_dtype=numerics.dtype,
        use_prefetcher=not args.no_prefetcher,
        tf_preprocessing=tf_preprocessing,
        persistent_workers=False,
        distributed=world_size() > 1,
    )
    if views:
        dataset.transform = Views(dataset.transform, views)
    return _apart(loader)


class Views:
    """timm's evaluation transform, but with several crops of the resized image.

    They are the first of: the central crop, the top left, top right, bottom left and bottom right one, each followed
    by its mirror image; all ten together are those of Krizhevsky et al., 2012, Section 4.1.

    Args:
        transform: What `timm.data.create_transform` returns for evaluation.
        number: How many views, 1 to 10.
    """

    def __init__(self, transform: Compose, number: int):
        steps = transform.transforms
        place = next(i for i, step in enumerate(steps) if isinstance(step, CenterCrop | CenterCropOrPad))
        self.resize, self.crop, self.finish = Compose(steps[:place]), steps[place], Compose(steps[place + 1 :])
        self.number = number

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """The views (number, C, H, W) of an image."""
        image = self.resize(image)
        crops = [self.crop(image)]
        if self.number > 2:
            crops += self._corners(image)
        views = [view for crop in crops for view in (crop, F.hflip(crop))]
        return torch.stack([self.finish(view) for view in views[: self.number]])

    def _corners(self, image: Image.Image) -> tuple[Image.Image, ...]:
        _, height, width = F.get_dimensions(image)
        at_least = [max(sides) for sides in zip(self.crop.size, (height, width), strict=True)]
        padded: Any = center_crop_or_pad(image, at_least, fill=getattr(self.crop, 'fill', 0))  # type: ignore[arg-type]
        return F.five_crop(padded, self.crop.size)[:4]
