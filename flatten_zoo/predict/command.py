"""The way from the options of `flatten-zoo predict` to what it prints and writes."""

import argparse
import itertools

import torch
from timm.data import create_transform
from tqdm import tqdm

from ..errors import UsageError, printable
from ..tables import as_text
from ..training.data.datasets import Images, open_dataset
from ..training.loop.model import resolve_device
from ..training.options.definitions import validate_parser
from ..training.processes import exit_status, interrupts_between_batches, until_interrupted
from ..training.report import log, setup_logging
from .network import Network, open_network
from .pictures import Files, batches, find_pictures
from .results import (
    EMBEDDING_FORMATS,
    FORMATS,
    Record,
    check_file,
    features,
    predictions,
    predictions_table,
    predictions_text,
    save_embeddings,
    save_predictions,
)

__all__ = ['run']


def run(args: argparse.Namespace) -> int:
    """Predict as the command line says.

    Returns:
        Exit status: 0, 1 if a picture could not be read, or 130 after Ctrl-C, which leaves nothing written.

    Raises:
        UsageError: What was asked for cannot be done.
    """
    setup_logging()
    format = _check(args)
    try:
        files = find_pictures(args.images)
        network = open_network(
            args.model,
            args.pretrained,
            args.checkpoint,
            args.img_size,
            resolve_device(args.device),
            features=bool(args.embeddings),
        )
        dataset = Files(files, network.mode) if args.images else _dataset(args, network)
        log.info('%s, images of %d × %d', network.origin, *network.config['input_size'][1:])
        with interrupts_between_batches():
            records, failures = _run_over(dataset, network, args)
    except KeyboardInterrupt as e:
        log.info('interrupted: nothing is written')
        return exit_status(e)
    if records:
        _write(records, args, format)
    if failures:
        log.info('%d of %d images failed:', len(failures), len(records) + len(failures))
        for failure in failures:
            log.info('  %s', failure)
    lost = len(dataset) - len(records) - len(failures)
    if lost > 0:
        log.info('%d of %d images are missing: the stream has passed over what it could not read', lost, len(dataset))
    return int(bool(failures) or lost > 0)


def _check(args: argparse.Namespace) -> str:
    """The format of the results; raises a `UsageError` for what can be seen to be wrong at once."""
    if bool(args.images) == bool(args.dataset or args.data_dir):
        raise UsageError('name pictures or folders of them, or a data set with --dataset and --data-dir')
    for option in ('batch_size', 'topk', 'num_samples'):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UsageError(f'--{option.replace("_", "-")} {value}: must be positive')
    if args.workers < 0:
        raise UsageError(f'--workers {args.workers}: must not be negative')
    if args.embeddings:
        if args.results_file or args.results_format:
            raise UsageError('--embeddings is written in place of classes: leave out --results-file, --results-format')
        return check_file('--embeddings', args.embeddings, EMBEDDING_FORMATS)
    if args.results_file:
        return check_file('--results-file', args.results_file, FORMATS, args.results_format)
    if args.results_format == 'parquet':
        raise UsageError('--results-format parquet needs a --results-file')
    return args.results_format or 'table'


def _dataset(args: argparse.Namespace, network: Network) -> Images:
    options = validate_parser().parse_args([])
    for name in ('dataset', 'data_dir', 'dataset_download', 'input_key', 'target_key'):
        setattr(options, name, getattr(args, name))
    return open_dataset(
        options, args.split, network.config['input_size'][0], args.batch_size, args.num_samples, alone_is_fine=True
    )


def _run_over(dataset: Files | Images, network: Network, args: argparse.Namespace) -> tuple[list[Record], list[str]]:
    """What there is to say of each picture, and why there is nothing of some."""
    records, failures = [], []
    loader = batches(dataset, create_transform(**network.config), args.batch_size, args.workers)
    with torch.inference_mode(), tqdm(total=len(dataset), unit='image', leave=False, disable=None) as bar:
        for names, images, unreadable in until_interrupted(loader, in_step=False):
            bar.update(len(names) + len(unreadable))
            failures += unreadable
            if not names:
                continue
            outputs = network(images)
            finite = outputs.isfinite().all(1)
            failures += [
                f"'{printable(name)}' gives values that are infinite or not a number"
                for name in itertools.compress(names, ~finite)
            ]
            names, outputs = list(itertools.compress(names, finite)), outputs[finite]
            records += (
                features(names, outputs) if args.embeddings else predictions(names, outputs, network.labels, args.topk)
            )
    return records, failures


def _write(records: list[Record], args: argparse.Namespace, format: str) -> None:
    if args.embeddings:
        save_embeddings(records, args.embeddings, format)
    elif args.results_file:
        save_predictions(records, args.results_file, format)
    elif format == 'table':
        print(as_text(*predictions_table(records)))
    else:
        print(predictions_text(records, format))
    if path := args.embeddings or args.results_file:
        print(f'{path}: {len(records)} images')
