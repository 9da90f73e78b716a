"""Accuracy and speed of a model or of a training run: `validate.py`."""
import argparse
import csv
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm.layers import apply_test_time_pool
from timm.task.evaluator import ClassificationEvaluator
from timm.utils import random_seed, reparameterize_model

from flatten_zoo.errors import UsageError
from flatten_zoo.files import write_beside

from .checkpoints import load_weights, run_checkpoint
from .config import OptionParser, read_options_file
from .data import check_classes, evaluation_loader, input_config, open_dataset
from .engine import evaluate
from .interrupts import interrupts_between_batches
from .logs import log, setup_logging
from .models import build_model, resolve_device
from .options import check_validate_options, train_parser, validate_parser
from .report import figures_text

__all__ = ['main']


def main(argv: Sequence[str] | None = None) -> int:
    """Validate as the command line says.

    Args:
        argv: Command line without the program's name; `sys.argv` if None.

    Returns:
        Exit status: 0, or 130 after Ctrl-C.

    Raises:
        UsageError: What was asked for cannot be done.
    """
    setup_logging()
    try:
        args = parse(argv)
        with interrupts_between_batches():
            results = validate(args)
    except KeyboardInterrupt:
        log.info('interrupted')
        return 130
    log.info('%s: %s  %.1f images/s', results['model'], figures_text({k: results[k] for k in FIGURES}),
             results['throughput'])
    if args.results_file:
        write_results(Path(args.results_file), results, args.results_format)
        log.info('written to %s', args.results_file)
    print(f'--result\n{json.dumps(results, indent=4)}')
    return 0


FIGURES = ('loss', 'top1', 'top5')


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; where `--checkpoint` is a run's folder, those that are not given are the run's."""
    parser = validate_parser()
    args = parser.parse_with_config(argv)
    if Path(args.checkpoint).is_dir() and args.checkpoint:
        folder = Path(args.checkpoint)
        parser.set_defaults(**run_options(folder, parser))
        args = parser.parse_with_config(argv)
        args.checkpoint = str(run_checkpoint(folder))
    args.data_dir = args.data or args.data_dir
    check_validate_options(args)
    return args


def run_options(folder: Path, parser: OptionParser) -> dict[str, Any]:
    """Options of `validate.py` that repeat the last validation of a training run.

    Args:
        folder: Output folder of `train.py`.
        parser: Parser of `validate.py`.
    """
    path = folder / 'args.yaml'
    if not path.is_file():
        raise UsageError(f"--checkpoint '{folder}' is no output folder of train.py: it has no args.yaml")
    run = vars(train_parser().parse_args([])) | train_parser().check(read_options_file(path), source=path)
    shared = {name: run[name] for name in vars(parser.parse_args([])) if name in run}
    return shared | {
        'pretrained': False,
        'split': run['val_split'],
        'num_samples': run['val_num_samples'],
        'batch_size': run['validation_batch_size'] or run['batch_size'],
        'use_train_size': True,
        'use_ema': run['model_ema'] and not run['model_ema_force_cpu'],
    }


def validate(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a model on all of a split.

    Returns:
        What was evaluated and how, loss, accuracies and errors in percent, and images per second.
    """
    device = resolve_device(args.device)
    random_seed(args.seed)
    model = build_model(args, pretrained=args.pretrained or not args.checkpoint)
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
        args, args.split, config['input_size'][0], args.batch_size, args.num_samples, alone_is_fine=True)
    check_classes(dataset, num_classes, args.model)
    loader = evaluation_loader(args, dataset, config, device, args.batch_size, args.crop_border_pixels)
    evaluator = ClassificationEvaluator(device=device)
    started = time.monotonic()
    figures = evaluate(model.to(device), loader, device, evaluator, args.model, args.log_freq)
    elapsed = time.monotonic() - started
    return {
        'model': args.model,
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
    }


def write_results(path: Path, results: dict[str, Any], file_format: str) -> None:
    """Write the results as a JSON object or a CSV table of one row.

    Raises:
        UsageError: The file cannot be written.
    """
    text = io.StringIO()
    if file_format == 'json':
        json.dump(results, text, indent=4)
    else:
        writer = csv.DictWriter(text, fieldnames=results)
        writer.writeheader()
        writer.writerow(results)
    try:
        with write_beside(path) as temporary:
            temporary.write_text(text.getvalue())
    except OSError as e:
        raise UsageError(f"--results-file '{path}' cannot be written: {e.strerror}") from e
