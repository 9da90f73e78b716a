"""What the options may say: alone, together, and in the file of an earlier run."""

import argparse
import importlib.util
import re
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import auto_augment, create_transform
from timm.models import split_model_name_tag
from timm.optim import list_optimizers
from timm.utils.distributed import is_distributed_env
from torch import nn

from flatten_zoo.errors import UsageError, first_line, shown, unknown_name
from flatten_zoo.models.linearized import with_attention
from flatten_zoo.models.recorded import check_arguments, check_model, check_settings

from .definitions import train_parser
from .parser import OptionParser, flag, read_options_file

__all__ = ['check_files', 'check_train_options', 'check_validate_options', 'recorded_options']

NOT_RECORDED = (  # how a run began, and what would fetch or run something: for the command line to say
    'pretrained',
    'pretrained_path',
    'initial_checkpoint',
    'start_epoch',
    'no_resume_opt',
    'dataset_download',
    'dataset_trust_remote_code',
    'device_modules',
    'log_wandb',
)


def recorded_options(folder: Path, option: str, parser: OptionParser, named: argparse.Namespace) -> dict[str, Any]:
    """The options of a training run, as far as a file may say them.

    Args:
        folder: Its output folder.
        option: The option that names the folder, for messages.
        parser: Parser of the command line.
        named: What the command line says.

    Raises:
        UsageError: There are none, they are not those of `train.py`, or they would fetch or open more than a folder's
            data and weights.
    """
    path = folder / 'args.yaml'
    if not path.is_file():
        raise UsageError(f"{option} '{folder}' is no output folder of train.py: it has no args.yaml")
    run = train_parser().check(read_options_file(path), source=path)
    run = {name: value for name, value in run.items() if name not in NOT_RECORDED}
    model, source = named.model, f"'{path}'"
    if model == parser.get_default('model') and 'model' in run:
        model = run['model']
        check_model(model, source)
    if not named.dataset and run.get('dataset', '').partition('/')[0] not in ('', 'torch'):
        raise UsageError(
            f'{source} records the data set {shown(run["dataset"])}, which may be fetched from anywhere; '
            f'name it with --dataset'
        )
    check_settings(run, source)
    if timm.is_model(split_model_name_tag(model)[0]):
        arguments = {**run.get('model_kwargs', {}), 'global_pool': run.get('gp')}
        model = with_attention(model, run.get('attention'), run.get('attention_where'), source)
        check_arguments(model, arguments, f'{source}: model_kwargs')
    return run


def check_train_options(args: argparse.Namespace) -> None:
    """Refuse values and combinations that cannot work.

    Raises:
        UsageError: The option, its value and what would be right.
    """
    _check_pair(args, 'scale', 'ratio', 'cutmix_minmax')
    check_files(args, 'pretrained_path')
    _check_input(args)
    _check_policy(args.aa)
    _check_schedule(args)
    _check_numerics(args)
    _check_sizes(args)
    _check_distribution(args)
    if args.model_dtype == 'float16' and args.model_ema:
        raise UsageError('--model-dtype float16 is too coarse for --model-ema: use bfloat16, or --amp in its place')
    experiment = Path(args.experiment)
    if args.experiment and (experiment.is_absolute() or '..' in experiment.parts or not experiment.name):
        raise UsageError(f"--experiment '{args.experiment}' is no folder in --output: give its name there")
    if args.log_tensorboard and importlib.util.find_spec('tensorboard') is None:
        raise UsageError("--log-tensorboard needs the package tensorboard: pip install 'flatten_zoo[tensorboard]'")
    optimizer = args.opt.lower().removeprefix('lookahead_')
    if optimizer not in list_optimizers():
        raise UsageError(f'--opt: {unknown_name("optimizer", args.opt, map(str, list_optimizers()))}')
    mixing = args.mixup > 0 or args.cutmix > 0 or args.cutmix_minmax is not None
    if args.aug_splits == 1:
        raise UsageError('--aug-splits 1: a split needs at least 2, and 0 means none')
    if args.aug_splits and mixing:
        raise UsageError('--aug-splits does not go with --mixup and --cutmix')
    if (args.jsd_loss or args.split_bn) and not args.aug_splits:
        raise UsageError(f'--{"jsd-loss" if args.jsd_loss else "split-bn"} needs --aug-splits 2 or more')
    if mixing and args.batch_size % 2:
        raise UsageError(f'--batch-size {args.batch_size}: --mixup and --cutmix pair images, so it must be even')


def check_validate_options(args: argparse.Namespace) -> None:
    """Refuse values that cannot work.

    Raises:
        UsageError: The option, its value and what would be right.
    """
    check_files(args, 'checkpoint')
    _check_input(args)
    _check_numerics(args)
    if args.tta and args.tf_preprocessing:
        raise UsageError(f'--tta {args.tta} does not go with --tf-preprocessing')
    if args.num_gpu > 1 and args.torchcompile:
        raise UsageError(f'--num-gpu {args.num_gpu} does not go with --torchcompile')


def check_files(args: argparse.Namespace, *names: str) -> None:
    """Refuse options that name files which are not there."""
    for name in names:
        value = getattr(args, name)
        if value and not Path(value).is_file():
            raise UsageError(f"{flag(name)} '{value}': there is no such file")


def _check_pair(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and (len(value) != 2 or value[0] > value[1]):
            raise UsageError(f'{flag(name)} {value}: must be two numbers, the smaller one first')


def _check_input(args: argparse.Namespace) -> None:
    channels = args.input_size[0] if args.input_size else args.in_chans or 3
    for name in ('input_key', 'target_key'):
        if getattr(args, name) and args.dataset.partition('/')[0] in ('', 'torch'):
            raise UsageError(f'{flag(name)} {getattr(args, name)}: only the records of a --dataset have keys')
    for name in ('mean', 'std'):
        value = getattr(args, name)
        if value is not None and len(value) not in (1, channels):
            raise UsageError(f'{flag(name)} {value}: must be one value, or one for each of {channels} channels')


def _check_schedule(args: argparse.Namespace) -> None:
    if args.sched == 'plateau' and (not args.val_split or args.val_interval > 1):
        raise UsageError('--sched plateau needs a validation after every epoch: --val-split and --val-interval 1')
    if args.decay_rate > 1 and args.sched != 'poly' or args.decay_rate == 1 and args.sched == 'plateau':
        raise UsageError(f'--decay-rate {args.decay_rate:g}: must be below 1, but for the power of --sched poly')
    if args.decay_milestones != sorted(args.decay_milestones):
        raise UsageError(f'--decay-milestones {args.decay_milestones}: must be in order')
    if args.lr_noise is not None and len(args.lr_noise) > 2:
        raise UsageError(f'--lr-noise {args.lr_noise}: must be where it begins, or where it begins and ends')


def _check_sizes(args: argparse.Namespace) -> None:
    sizes = args.train_img_sizes
    dependent = ('train_batch_sizes', 'train_size_probs', 'train_batches_per_epoch')
    for name in dependent if not sizes else ():
        if getattr(args, name) is not None:
            raise UsageError(f'{flag(name)} needs --train-img-sizes')
    if args.variable_batch_loss_scale != 'none' and not args.train_batch_sizes:
        raise UsageError('--variable-batch-loss-scale needs --train-batch-sizes: all batches have one size without')
    if not sizes:
        return
    for name in dependent[:2]:
        value = getattr(args, name)
        if value is not None and len(value) != len(sizes):
            raise UsageError(f'{flag(name)} {value}: must be one value for each of {len(sizes)} --train-img-sizes')
    if args.train_size_probs and not sum(args.train_size_probs):
        raise UsageError('--train-size-probs: one of them must be positive')
    if args.train_size_schedule == 'progressive' and len(sizes) < 2:
        raise UsageError('--train-size-schedule progressive needs two or more --train-img-sizes')
    if args.aug_splits or args.use_multi_epochs_loader:
        other = '--aug-splits' if args.aug_splits else '--use-multi-epochs-loader'
        raise UsageError(f'--train-img-sizes does not go with {other}')
    if (args.mixup > 0 or args.cutmix > 0 or args.cutmix_minmax) and any(n % 2 for n in args.train_batch_sizes or []):
        raise UsageError('--train-batch-sizes: --mixup and --cutmix pair images, so they must be even')


def _check_distribution(args: argparse.Namespace) -> None:
    if 0 < args.aug_repeats < 1:
        raise UsageError(f'--aug-repeats {args.aug_repeats}: must be at least 1, or 0 for none')
    if args.aug_repeats and not is_distributed_env():
        raise UsageError(
            f'--aug-repeats {args.aug_repeats:g} gives the augmentations of an image to different processes: '
            f'start several with torchrun'
        )
    if args.sync_bn and args.split_bn:
        raise UsageError('--sync-bn does not go with --split-bn')


def _check_numerics(args: argparse.Namespace) -> None:
    if args.amp and args.model_dtype not in (None, 'float32'):
        raise UsageError(f'--amp keeps the weights in float32: leave out --model-dtype {args.model_dtype}, or --amp')
    _check_compilation(args)


def _check_policy(policy: str | None) -> None:
    """Refuse a policy of `--aa` that timm does not have, or a section of it that timm would pass over.

    Raises:
        UsageError: The policy, and what is wrong.
    """
    if not policy:
        return
    name, *sections = policy.split('-')
    try:
        create_transform(32, is_training=True, auto_augment=policy)
    except (AssertionError, IndexError, KeyError, TypeError, ValueError) as e:
        raise UsageError(f"--aa '{policy}': no policy of timm's ({first_line(e)}); {_POLICIES}") from e
    for section in sections:
        if name == 'rand' and section.startswith('t'):  # a set of transforms
            passed_over = auto_augment.rand_augment_choices(section[1:]) is auto_augment.rand_augment_choices('')
        else:
            passed_over = not re.search(r'\d', section)
        if passed_over:
            raise UsageError(f"--aa '{policy}': timm passes over '{section}'; {_POLICIES}")


_POLICIES = "such as 'rand-m9-mstd0.5-inc1', 'augmix-m5-w4-d2' or 'original-mstd0.5'"


def _check_compilation(args: argparse.Namespace) -> None:
    """Refuse a backend or mode that `torch.compile` does not have.

    Raises:
        UsageError: The options, and what there is.
    """
    if args.torchcompile is None:
        if args.torchcompile_mode:
            raise UsageError(f'--torchcompile-mode {args.torchcompile_mode} needs --torchcompile')
        return
    try:
        torch.compile(nn.Identity(), backend=args.torchcompile, mode=args.torchcompile_mode)
    except RuntimeError as e:
        mode = f' --torchcompile-mode {args.torchcompile_mode}' if args.torchcompile_mode else ''
        backends = ', '.join(torch.compiler.list_backends())
        raise UsageError(f'--torchcompile {args.torchcompile}{mode}: {first_line(e)} Backends: {backends}') from e
