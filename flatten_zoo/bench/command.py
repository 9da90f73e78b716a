"""The way from the options of `flatten-zoo bench` to what it prints and writes."""

import argparse
import sys

import torch

from ..errors import UsageError
from ..export import check_onnx_packages
from ..tables import as_text
from ..training.loop.model import resolve_device
from ..weights.open import check_model_name
from .measuring import bench, family_models
from .modes import ONNX_MODES, TRAINING_MODES
from .picture import check_accuracies, plot
from .results import check_results_path, machine, save_results, timings_table

__all__ = ['run']


def run(args: argparse.Namespace) -> int:
    """Measure as the command line says.

    Returns:
        Exit status: 0, 1 if a model failed, or 130 after Ctrl-C.

    Raises:
        UsageError: What was asked for cannot be done.
    """
    names = list(dict.fromkeys([*args.names, *(family_models(args.family) if args.family else [])]))
    device = resolve_device(args.device)
    _check(args, names, device)
    if args.plot and (without := check_accuracies(args.plot, names, args.img_size)):
        print(f'--plot: no accuracy is reported for {", ".join(without)}', file=sys.stderr)
    if args.threads:
        torch.set_num_threads(args.threads)
    about = machine(device, args.modes, args.train)
    report = bench(names, args.modes, args.batch_size, args.img_size, args.seconds, device, args.train)
    for what, value in about.items():
        print(f'# {what}: {value}')
    print(as_text(*timings_table(report.timings)))
    if args.results:
        save_results(args.results, about, report)
    for failure in report.failures:
        print(f'failed: {failure}', file=sys.stderr)
    if args.plot and not plot(report.timings, args.plot, args.train):
        print('--plot: nothing was measured that could be drawn', file=sys.stderr)
    return 130 if report.interrupted else int(bool(report.failures))


def _check(args: argparse.Namespace, names: list[str], device: torch.device) -> None:
    """Raises a `UsageError` for what can be seen to be wrong before anything is measured."""
    if not names:
        raise UsageError('name models, or a family of the zoo with --family')
    for name in names:
        check_model_name(name)
    for option in ('batch_size', 'img_size', 'threads'):
        values = getattr(args, option)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and value < 1:
                raise UsageError(f'--{option.replace("_", "-")} {value}: must be positive')
    if not 0 < args.seconds < float('inf'):
        raise UsageError(f'--seconds {args.seconds}: must be positive')
    untrained = [mode for mode in args.modes if args.train and mode not in TRAINING_MODES]
    if untrained:
        raise UsageError(f'--modes {" ".join(untrained)}: cannot train; with --train: {", ".join(TRAINING_MODES)}')
    if onnx := [mode for mode in args.modes if mode in ONNX_MODES]:
        check_onnx_packages(f'--modes {" ".join(onnx)}')
        if device.type != 'cpu':
            raise UsageError(f'--modes {" ".join(onnx)}: run on the CPU; give --device cpu')
    if args.results:
        check_results_path(args.results)
