"""Accuracy and speed of a model or of a training run: `validate.py`."""

import csv
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import apply_test_time_pool
from timm.utils import decay_batch_step, random_seed, reparameterize_model
from torch import nn

from flatten_zoo.errors import UsageError
from flatten_zoo.files import write_beside
from flatten_zoo.models import RELEASES
from flatten_zoo.models._released import TAG
from flatten_zoo.models.linearized import with_attention
from flatten_zoo.weights.open import load_weights

from .continuing import run_checkpoint
from .data.datasets import check_classes, open_dataset
from .data.imagenet_labels import LabelledEvaluator, read_real_labels, read_valid_labels
from .data.loaders import evaluation_loader, input_config
from .loop.model import build_model, check_fits, resolve_device, shared_by_gpus
from .loop.optimization import Numerics
from .loop.trainer import evaluate
from .options.checks import check_validate_options, recorded_options
from .options.definitions import train_parser, validate_parser
from .options.parser import OptionParser, Options
from .processes import as_one, check_alone, exit_status, interrupts_between_batches
from .report import figures_text, log, setup_logging

__all__ = ['main']


def main(argv: Sequence[str] | None = None) -> int:
    """Validate as the command line says.

    Args:
        argv: Command line without the program's name; `sys.argv` if None.

    Returns:
        Exit status: 0, or 130 after Ctrl-C, or 143 after SIGTERM.

    Raises:
        UsageError: What was asked for cannot be done.
    """
    setup_logging()
    with as_one():
        check_alone('validate.py')
    try:
        args = parse(argv)
        names = model_names(args)
        with interrupts_between_batches():
            results, failed = validate_all(args, names)
    except KeyboardInterrupt as e:
        log.info('interrupted')
        return exit_status(e)
    if args.results_file and results:
        log.info('written to %s', args.results_file)
    print(f'--result\n{json.dumps(results if len(names) > 1 else results[0], indent=4)}')
    if failed:
        raise UsageError(f'{len(failed)} of {len(names)} models could not be validated: {", ".join(failed)}')
    return 0


FIGURES = ('loss', 'top1', 'top5')
IMAGENET_IMAGES, IMAGENET_CLASSES = 50_000, 1000


def model_names(args: Options) -> list[str]:
    """The models that `--model` stands for: one, all released ones that fit a wildcard, or those that a file lists.

    Raises:
        UsageError: No model fits, or a checkpoint is given for several.
    """
    if set('*?[') & set(args.model) or args.model == 'all':
        names = timm.list_models('' if args.model == 'all' else args.model, pretrained=True)
        if not names:
            raise UsageError(f"--model '{args.model}': no model with released weights fits")
    elif not timm.is_model(args.model) and Path(args.model).is_file():
        names = [line.strip() for line in Path(args.model).read_text().splitlines() if line.strip()]
        if not names:
            raise UsageError(f"--model '{args.model}': the file names no model")
    else:
        return [args.model]
    if args.checkpoint:
        raise UsageError(f"--model '{args.model}' stands for {len(names)} models, but --checkpoint is of one")
    return names


def validate_all(args: Options, names: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Evaluate models one after the other, and write the results so far after each.

    Among several, one that cannot be evaluated does not keep the others from it.

    Returns:
        Results, the best top-1 first, and the names of those that failed.
    """
    results: list[dict[str, Any]] = []
    failed = []
    for name in names:
        try:
            result = validate_with_retries(args.replace(model=name))
        except UsageError as e:
            if len(names) == 1:
                raise
            log.info('%s: %s', name, e)
            failed.append(name)
            continue
        log.info('%s: %s  %.1f images/s', name, figures_text({k: result[k] for k in FIGURES}), result['throughput'])
        if 'expected_top1' in result:
            log.info('%s: top1 %.3f expected, difference %+.3f', name, result['expected_top1'], result['difference'])
        results = sorted([*results, result], key=lambda row: -row['top1'])
        if args.results_file:
            write_results(Path(args.results_file), results, args.results_format, several=len(names) > 1)
    return results, failed


def validate_with_retries(args: Options) -> dict[str, Any]:
    """`validate`, where `--retry` is given with ever smaller batches until the device's memory suffices."""
    while True:
        try:
            return validate(args)
        except torch.OutOfMemoryError as e:
            smaller = decay_batch_step(args.batch_size)
            if not args.retry or not smaller:
                hint = 'give a smaller --batch-size, or --retry' if smaller else 'the model is too large'
                raise UsageError(f'the memory does not suffice for --batch-size {args.batch_size}: {hint}') from e
        log.info('the memory does not suffice for batches of %d: trying %d', args.batch_size, smaller)
        args = args.replace(batch_size=smaller)


def expected_top1(model: nn.Module, images: int) -> float | None:
    """The top-1 in percent that a released model's authors report, where it was measured on all of ImageNet-1K."""
    cfg = model.pretrained_cfg
    if cfg.get('tag') != TAG or images != IMAGENET_IMAGES or model.num_classes != IMAGENET_CLASSES:
        return None
    release = RELEASES.get(cfg.get('architecture'))
    return release.top1 if release else None


def parse(argv: Sequence[str] | None) -> Options:
    """The options; where `--checkpoint` is a run's folder, those that are not given are the run's."""
    parser = validate_parser()
    args = parser.parse_with_config(argv)
    if Path(args.checkpoint).is_dir() and args.checkpoint:
        folder = Path(args.checkpoint)
        parser.set_defaults(**run_options(folder, parser, named=args))
        args = parser.parse_with_config(argv)
        args = args.replace(checkpoint=str(run_checkpoint(folder)))
        check_fits(args, Path(args.checkpoint))
    check_validate_options(args)
    return args


def run_options(folder: Path, parser: OptionParser, named: Options) -> dict[str, Any]:
    """Options of `validate.py` that repeat the last validation of a training run.

    Args:
        folder: Output folder of `train.py`.
        parser: Parser of `validate.py`.
        named: What the command line says.

    Raises:
        UsageError: There are none, or they would fetch or open more than a folder's data and weights.
    """
    run = vars(train_parser().parse_args([])) | recorded_options(folder, '--checkpoint', parser, named)
    shared = {name: run[name] for name in vars(parser.parse_args([])) if name in run}
    return shared | {
        'split': run['val_split'],
        'num_samples': run['val_num_samples'],
        'batch_size': run['validation_batch_size'] or run['batch_size'],
        'use_train_size': True,
        'torchcompile': None,
        'torchcompile_mode': None,
        'use_ema': run['model_ema'] and not run['model_ema_force_cpu'],
    }


def validate(args: Options) -> dict[str, Any]:
    """Evaluate a model on all of a split.

    Returns:
        What was evaluated and how, loss, accuracies and errors in percent, images per second, and for official
        weights on ImageNet-1K the authors' top-1 and how far this one is from it.
    """
    numerics = Numerics.from_options(args, resolve_device(args.device))
    random_seed(args.seed)
    model: Any
    model = released = build_model(args, pretrained=args.pretrained or not args.checkpoint)
    if args.checkpoint:
        load_weights(model, args.checkpoint, use_ema=args.use_ema)
    if args.reparam:
        model = reparameterize_model(model)
    config = input_config(args, model, use_test_size=not args.use_train_size)
    num_classes = model.num_classes
    if args.test_pool:
        model, pooled = apply_test_time_pool(model, config)
        config['crop_pct'] = 1.0 if pooled else config['crop_pct']
    dataset = open_dataset(
        args, args.split, config['input_size'][0], args.batch_size, args.num_samples, alone_is_fine=True
    )
    valid_labels = read_valid_labels(args, num_classes)
    if valid_labels is not None:
        num_classes = len(valid_labels)
    check_classes(dataset, num_classes, args.model)
    loader = evaluation_loader(
        args, dataset, config, numerics, args.batch_size, args.crop_border_pixels, args.tf_preprocessing, args.tta
    )
    real_labels = read_real_labels(args, dataset, num_classes)
    evaluator = LabelledEvaluator(numerics.device, valid_labels, real_labels, args.metrics_avg)
    model = numerics.place(model)
    if args.torchcompile:
        model = torch.compile(model, backend=args.torchcompile, mode=args.torchcompile_mode)
    model = shared_by_gpus(model, args.num_gpu, numerics.device)
    started = time.monotonic()
    figures = evaluate(model, loader, numerics, evaluator, args.model, args.log_freq)
    elapsed = time.monotonic() - started
    expected = None if args.checkpoint or real_labels else expected_top1(released, evaluator.num_samples)
    comparison = (
        {} if expected is None else {'expected_top1': expected, 'difference': round(figures['top1'] - expected, 4)}
    )
    return {
        'model': with_attention(args.model, args.attention, args.attention_where),
        'checkpoint': args.checkpoint,
        'loss': round(figures['loss'], 4),
        'top1': round(figures['top1'], 4),
        'top1_err': round(100 - figures['top1'], 4),
        'top5': round(figures['top5'], 4),
        'top5_err': round(100 - figures['top5'], 4),
        'images': evaluator.num_samples,
        'throughput': round(evaluator.num_samples / elapsed, 2),
        'param_count': round(sum(p.numel() for p in model.parameters()) / 1e6, 2),
        'img_size': config['input_size'][-1],
        'crop_pct': config['crop_pct'],
        'crop_mode': config['crop_mode'],
        'interpolation': config['interpolation'],
        **{name: round(figures[name], 4) for name in ('precision', 'recall', 'f1_score') if name in figures},
        **comparison,
    }


def write_results(path: Path, results: list[dict[str, Any]], file_format: str, several: bool) -> None:
    """Write the results as a JSON list, or an object where there is only one model, or a CSV table.

    Raises:
        UsageError: The file cannot be written.
    """
    text = io.StringIO()
    if file_format == 'json':
        json.dump(results if several else results[0], text, indent=4)
    else:
        writer = csv.DictWriter(text, fieldnames=dict.fromkeys(name for row in results for name in row))
        writer.writeheader()
        writer.writerows(results)
    try:
        with write_beside(path) as temporary:
            temporary.write_text(text.getvalue())
    except OSError as e:
        raise UsageError(f"--results-file '{path}' cannot be written: {e.strerror}") from e
