"""Which is the limit, the loader or the model? `flatten-zoo bench --loader` and the options of `train.py`."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.data import Mixup
from timm.utils import random_seed

from flatten_zoo.errors import UsageError

from .data.datasets import open_splits
from .data.loaders import input_config, training_loader
from .loop.model import build_training_model, resolve_device
from .loop.optimization import Numerics, build_optimizer, build_task, mixup_arguments
from .loop.trainer import Trainer
from .options.checks import check_train_options
from .options.definitions import train_parser
from .options.parser import Options
from .processes import as_one, check_alone, interrupts_between_batches
from .report import Progress, setup_logging

__all__ = ['bench', 'main']

WARM_UP = 0.25  # share of the measured time that goes before it


def main(argv: Sequence[str]) -> int:
    """Measure as the command line says.

    Args:
        argv: Options of `train.py`, and `--seconds`.

    Returns:
        Exit status: 0, or 130 after Ctrl-C.

    Raises:
        UsageError: What was asked for cannot be done.
    """
    setup_logging()
    with as_one():
        check_alone('bench')
    parser = train_parser()
    parser.prog = 'flatten-zoo bench --loader'
    parser.description = 'Images per second of the loader alone and of the model alone, with the options of train.py.'
    parser.add_argument('--seconds', type=float, default=20, metavar='X', help='to measure each of the two')
    args = parser.parse_with_config(argv)
    if not args.seconds > 0:
        raise UsageError(f'--seconds {args.seconds}: must be positive')
    check_train_options(args)
    args = args.replace(device=str(resolve_device(args.device)), val_split='')
    try:
        with interrupts_between_batches():
            loader, model = bench(args, args.seconds)
    except KeyboardInterrupt:
        return 130
    print(f'loader alone  {loader:8.1f} images/s  {args.workers} workers, {os.cpu_count()} CPU cores')
    print(f'model alone   {model:8.1f} images/s  training on {args.device}, {args.batch_size} images at a time')
    print(f'limit: the {"loader" if loader < model else "model"}')
    return 0


def bench(args: Options, seconds: float) -> tuple[float, float]:
    """Images per second of the training loader alone, and of training on one batch over and over.

    Args:
        args: Options of `train.py`.
        seconds: Time to measure each of the two.
    """
    numerics = Numerics.from_options(args, torch.device(args.device))
    random_seed(args.seed)
    model = build_training_model(args)
    config = input_config(args, model)
    dataset, _ = open_splits(args, model.num_classes, channels=config['input_size'][0])
    loader = training_loader(args, model.num_classes, dataset, config, numerics)
    task = build_task(args, numerics.place(model), numerics.device)
    optimizer = build_optimizer(args, model, lr=0.0)  # at the full rate without warm-up, one batch may diverge
    mixup = mixup_arguments(args, model.num_classes)
    loading_rate, batch = _loading_rate(loader, args, seconds)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            args,
            args.dist_bn,
            numerics,
            task,
            optimizer,
            None,
            loader=None,
            mixup=Mixup(**mixup) if mixup and args.no_prefetcher else None,
            folder=Path(folder),
        )
        _training_rate(trainer, batch, loader, WARM_UP * seconds)
        return loading_rate, _training_rate(trainer, batch, loader, seconds)


def _loading_rate(loader: Any, args: Options, seconds: float) -> tuple[float, tuple[torch.Tensor, ...]]:
    """Images per second, epoch after epoch if the data are few, and the last batch."""
    images = 0
    started = time.monotonic()
    counted_from = None
    while True:
        for batch in Progress(loader, 'loader alone', args.log_interval):
            now = time.monotonic()
            if counted_from is not None:
                images += len(batch[0])
                if now - counted_from >= seconds:
                    return images / (now - counted_from), batch
            elif now - started >= WARM_UP * seconds:
                counted_from = now


def _training_rate(trainer: Trainer, batch: tuple[torch.Tensor, ...], loader: Any, seconds: float) -> float:
    """Images per second of the trainer itself, fed with one batch."""
    trainer.loader, trainer.position = _Repeated(batch, loader, seconds), None
    started = time.monotonic()
    trainer.train_epoch(0, 'model alone')  # it waits for the device at its end
    return trainer.loader.images / (time.monotonic() - started)


@dataclass
class _Repeated:
    """One batch over and over, otherwise the loader that it is from.

    Attributes:
        batch: Images and targets.
        loader: Where they are from.
        seconds: How long.
        images: Number of images given.
    """

    batch: tuple[torch.Tensor, ...]
    loader: Any
    seconds: float
    images: int = 0

    def __len__(self) -> int:
        return 0  # nobody knows before

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        end = time.monotonic() + self.seconds
        while not self.images or time.monotonic() < end:
            self.images += len(self.batch[0])
            yield self.batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
