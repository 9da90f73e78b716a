"""What `train_detection.py`, `train_segmentation.py` and `train_stereo.py` share: options, data, and the loop."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from flatten_zoo.dense import write_shapes
from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.files import write_beside

COLOURS = ['red', 'lime', 'dodgerblue', 'yellow', 'magenta', 'cyan']


def add_option(group: argparse._ArgumentGroup, name: str, text: str, **kwargs) -> None:
    """An option whose default is in its help."""
    group.add_argument(name, help=f'{text} (default: %(default)s)', **kwargs)


def add_training_options(
    parser: argparse.ArgumentParser,
    layout: str,
    generated: str,
    number: int,
    epochs: int,
    batch_size: int,
    lr: float,
    output: str,
) -> None:
    """Options of the data and of training.

    Args:
        parser: Where to add them.
        layout: Of data that are given.
        generated: What there is where none are given, 'shapes' or 'pairs': the option `--shapes` says how many.
        number: Default of that option.
        epochs, batch_size, lr, output: Defaults of those.
    """
    data = parser.add_argument_group('data')
    data.add_argument('--data', type=Path, metavar='FOLDER', help=f'data in {layout} (default: generated {generated})')
    add = partial(add_option, data)
    add(f'--{generated}', 'generated images to train on', type=int, default=number, metavar='N')
    add('--workers', 'processes that load data', type=int, default=0, metavar='N')
    add = partial(add_option, parser.add_argument_group('training'))
    add('--epochs', 'passes over the data', type=int, default=epochs, metavar='N')
    add('--batch-size', 'images of a step', type=int, default=batch_size, metavar='N')
    add('--lr', 'highest learning rate, of AdamW', type=float, default=lr)
    add('--weight-decay', 'of AdamW', type=float, default=0.05)
    add('--seed', 'of weights and order', type=int, default=0)
    add('--device', 'where to compute', default='cuda' if torch.cuda.is_available() else 'cpu')
    add('--output', 'folder for everything written', type=Path, default=Path(output), metavar='FOLDER')


def check_options(args: argparse.Namespace, *positive: str) -> None:
    """Find what would go wrong later, and make the output folder.

    Args:
        args: The options.
        positive: Names of those that must be positive besides the common ones.
    """
    for name in (*positive, 'epochs', 'batch_size', 'lr'):
        if not getattr(args, name) > 0:
            raise UsageError(f'--{name.replace("_", "-")} must be positive, got {getattr(args, name)}')
    if args.workers < 0:
        raise UsageError(f'--workers must not be negative, got {args.workers}')
    try:
        torch.empty(0, device=args.device)
    except (AssertionError, RuntimeError) as e:
        raise UsageError(f'--device {args.device}: {first_line(e)}') from e
    if (args.output / 'last.pth').exists():
        raise UsageError(f"'{args.output}' holds a trained network already: give another folder with --output")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write to '{args.output}' (--output): {e}") from e


def load_splits(args: argparse.Namespace, train: Callable[[Path], Dataset], val: Callable[[Path], Dataset]) -> tuple:
    """Training and validation data; of generated shapes, written if they are not there yet, where none is given.

    Args:
        args: The options.
        train: Opens the training data in a folder.
        val: Opens the validation data in it.
    """
    folder = args.data
    if folder is None:
        folder = args.output / f'shapes-{args.image_size}-{args.shapes}'
        write_shapes(folder / 'train', args.shapes, args.image_size, seed=0)
        write_shapes(folder / 'val', max(1, args.shapes // 8), args.image_size, seed=1)
    elif not folder.is_dir():
        raise UsageError(f"there is no folder '{folder}' (--data)")
    train_data, val_data = train(folder), val(folder)
    if train_data.category_ids != val_data.category_ids:
        raise UsageError(f"training and validation data in '{folder}' do not have the same categories")
    return train_data, val_data


def in_percent(scores: dict[str, float]) -> str:
    return '  '.join(f'{name} {100 * score:.1f}' for name, score in scores.items())


def train(
    args: argparse.Namespace,
    model: nn.Module,
    losses: Callable[[Any, Any], dict[str, torch.Tensor]],
    evaluate: Callable[[], dict[str, float]],
    data: Dataset,
    collate: Callable,
    clip: float,
    show: Callable[[dict[str, float]], str] = in_percent,
) -> dict[str, float]:
    """Train with AdamW and one cycle of the learning rate.

    Args:
        args: The options.
        model: The network.
        losses: The losses of a batch, to be summed.
        evaluate: Scores after an epoch.
        data: Training data.
        collate: Makes batches of it.
        clip: Largest norm of the gradients.
        show: Scores in words.

    Returns:
        The last scores.

    Raises:
        UsageError: There is less than a batch of data, or the loss is not finite.
    """
    if len(data) < args.batch_size:
        raise UsageError(f'--batch-size {args.batch_size} is more than the {len(data)} training images')
    loader = DataLoader(
        data, batch_size=args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers, collate_fn=collate
    )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], args.lr, weight_decay=args.weight_decay
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.epochs * len(loader), pct_start=0.1
    )
    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0
        progress = tqdm(loader, desc='training', unit='batch', leave=False)
        for step, batch in enumerate(progress, start=1):
            loss = sum(losses(*batch).values())
            if not loss.isfinite():
                raise UsageError(f'the loss is {loss.item()}: try a lower --lr')
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            total += loss.item()
            progress.set_postfix(loss=f'{total / step:.3f}')
        scores = evaluate()
        print(f'epoch {epoch}/{args.epochs}  loss {total / len(loader):.3f}  {show(scores)}', flush=True)
    return scores


def one_at_a_time(data: Dataset, workers: int, collate: Callable) -> tqdm:
    """Validation data: attention would see the padding of a batch of images of different sizes."""
    loader = DataLoader(data, batch_size=1, num_workers=workers, collate_fn=collate)
    return tqdm(loader, desc='validation', unit='image', leave=False)


def save_network(args: argparse.Namespace, model: nn.Module, **more: Any) -> None:
    """Write weights, and what else is given by name, to `last.pth`."""
    with write_beside(args.output / 'last.pth') as unfinished:
        torch.save({'model': model.state_dict(), **more}, unfinished)


def enlarge(x: torch.Tensor, scale: int) -> torch.Tensor:
    """A small picture several times as large, for the eye and for captions."""
    return x.repeat_interleave(scale, -1).repeat_interleave(scale, -2)
