"""Models by name, with the options that shape them, and the device they run on."""

import argparse
import copy
import importlib
from pathlib import Path
from typing import Any

import torch
from timm.layers import convert_splitbn_model, set_fast_norm
from timm.models import get_model_traits
from torch import nn

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.models.linearized import with_attention
from flatten_zoo.models.recorded import check_size
from flatten_zoo.weights.open import check_model_name, create_model

from ..options.parser import as_given
from ..report import log

__all__ = [
    'build_model',
    'build_training_model',
    'check_batch_norm',
    'check_fits',
    'import_device_modules',
    'resolve_device',
    'shared_by_gpus',
]


def import_device_modules(names: list[str] | None) -> None:
    """Import the modules that bring devices to torch, such as `torch_npu`.

    Raises:
        UsageError: One of them cannot be imported.
    """
    for name in names or ():
        try:
            importlib.import_module(name)
        except ImportError as e:
            raise UsageError(f'--device-modules {name}: {first_line(e)}') from e


def resolve_device(name: str) -> torch.device:
    """The device of that name; for 'cuda', the default, the CPU where there is no accelerator.

    Raises:
        UsageError: It is no device, or one that this machine lacks.
    """
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise UsageError(f"--device '{name}': no such kind of device; cuda, cuda:0, mps or cpu") from e
    if device.type == 'cpu':
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None and name != 'cuda':
        raise UsageError(f"--device '{name}': this machine has none; give --device cpu")
    if accelerator is None:
        log.info('no %s device here: running on the CPU', device.type)
        return torch.device('cpu')
    if device.type != accelerator.type or (device.index or 0) >= torch.accelerator.device_count():
        raise UsageError(f"--device '{name}': this machine has {torch.accelerator.device_count()} {accelerator.type}")
    if device.type == 'cuda':
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    return device


_SHAPING = (
    'attention',
    'attention_where',
    'num_classes',
    'gp',
    'img_size',
    'in_chans',
    'input_size',
    'drop',
    'drop_connect',
    'drop_path',
    'drop_block',
    'bn_momentum',
    'bn_eps',
    'model_kwargs',
)


def build_model(args: argparse.Namespace, pretrained: bool, **kwargs: Any) -> nn.Module:
    """The model that the options name.

    Args:
        args: Options of `train.py` or `validate.py`.
        pretrained: Whether to load its released weights.
        kwargs: More arguments of timm's `create_model`; None stands for the model's own default.

    Raises:
        UsageError: There is no such model, it does not take an argument, or its weights cannot be had.
    """
    try:
        check_model_name(args.model)
    except UsageError as e:
        raise UsageError(f'--model: {e}') from e
    if args.fast_norm:
        set_fast_norm()
    return create_model(
        with_attention(args.model, args.attention, args.attention_where),
        vars(args),
        args.model_kwargs,
        given=as_given(args, *_SHAPING),
        pretrained=pretrained,
        in_chans=args.in_chans,
        num_classes=args.num_classes,
        global_pool=args.gp,
        **kwargs,
    )


def check_batch_norm(model: nn.Module, input_size: tuple[int, int, int]) -> None:
    """Refuse to train on one image at a time where batch norm then has one value of each channel.

    Args:
        model: The model.
        input_size: Channels, height and width.
    """
    model = copy.deepcopy(model).to('meta').train()  # runs without memory or computation
    try:
        model(torch.empty(1, *input_size, device='meta'))
    except ValueError as e:
        if 'more than 1 value per channel' in str(e):
            raise UsageError(
                f"--batch-size 1: '{type(model).__name__}' has a batch norm over one position of images of "
                f'{input_size[1]} × {input_size[2]}; give it 2 images or more, or larger ones'
            ) from e
    except (NotImplementedError, RuntimeError):  # operators that 'meta' does not have
        pass


def check_fits(args: argparse.Namespace, checkpoint: Path) -> None:
    """Refuse options that a file has recorded, of a network that its checkpoint is too small for."""
    with torch.device('meta'):
        model = build_model(args, pretrained=False)
    check_size(model, checkpoint.stat().st_size, f"'{checkpoint}'")


def shared_by_gpus(model: nn.Module, number: int, device: torch.device) -> nn.Module:
    """The model so that it shares each batch among the machine's first GPUs.

    Args:
        model: Model on the first of them.
        number: How many; with 1 the model stays as it is.
        device: Where the model is.

    Raises:
        UsageError: There are not so many.
    """
    if number == 1:
        return model
    there = torch.cuda.device_count()
    if device.type != 'cuda' or device.index or number > there:
        raise UsageError(f'--num-gpu {number} --device {device}: takes the first GPUs of a machine, which has {there}')
    return nn.DataParallel(model, device_ids=list(range(number)))


def build_training_model(args: argparse.Namespace) -> nn.Module:
    """A model to train: with its drop rates, start weights and classifier initialisation."""
    overlay = {'file': args.pretrained_path, 'num_classes': -1} if args.pretrained_path else None
    model = build_model(
        args,
        pretrained=args.pretrained or bool(args.pretrained_path),
        pretrained_cfg_overlay=overlay,
        drop_rate=args.drop,
        drop_path_rate=args.drop_connect if args.drop_path is None else args.drop_path,
        drop_block_rate=args.drop_block,
        bn_momentum=args.bn_momentum,
        bn_eps=args.bn_eps,
    )
    if args.train_img_sizes and get_model_traits(model)['fixed_input_size']:
        raise UsageError(
            f"--train-img-sizes: '{args.model}' takes images of one size; "
            f'--model-kwargs dynamic_img_size=True lets it take others, where it knows that argument'
        )
    with torch.no_grad():
        classifier = model.get_classifier()
        if args.head_init_scale is not None:
            classifier.weight.mul_(args.head_init_scale)
            classifier.bias.mul_(args.head_init_scale)
        if args.head_init_bias is not None:
            classifier.bias.fill_(args.head_init_bias)
    if args.grad_checkpointing:
        try:
            model.set_grad_checkpointing(True)
        except (AssertionError, AttributeError) as e:
            raise UsageError(f"--grad-checkpointing: '{args.model}' does not have it") from e
    if args.split_bn:
        model = convert_splitbn_model(model, args.aug_splits)
    return model
