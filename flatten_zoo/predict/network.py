"""A network to predict with: a model of timm, or an exported ONNX file, with its preprocessing and its classes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_data_config, resolve_model_data_config
from timm.data.loader import adapt_to_chs
from timm.models import split_model_name_tag
from torch import nn

from ..errors import UsageError, first_line, printable
from ..export import check_onnx_packages, description_of, load_onnx
from ..images import two_sides
from ..models.linearized import name_of
from ..models.recorded import check_settings
from ..training.continuing import run_checkpoint
from ..weights import open_model
from .labels import class_labels

__all__ = ['Network', 'open_network']

IMAGE_MODES = {1: 'L', 3: 'RGB'}  # by the channels that a network takes
PREPROCESSING = ('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode')


@dataclass
class Network:
    """What maps images to class scores or features.

    Attributes:
        run: From normalised images B × C × H × W to scores B × classes or features B × channels, in float32 on the
            CPU as they are.
        config: Preprocessing, as `timm.data.create_transform` takes it.
        labels: Names of the classes; empty for features.
        origin: What it is, and where its weights come from, in words.
    """

    run: Callable[[torch.Tensor], torch.Tensor]
    config: dict[str, Any]
    labels: list[str]
    origin: str

    def __post_init__(self):
        channels = self.config['input_size'][0]
        if channels not in IMAGE_MODES:
            raise UsageError(f'the network takes images of {channels} channels; pictures have 1 or 3')
        self.config |= {key: adapt_to_chs(self.config[key], channels) for key in ('mean', 'std')}
        self.mode = IMAGE_MODES[channels]

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        outputs = self.run(images)
        shape = tuple(outputs.shape[1:])
        if len(shape) != 1 or self.labels and shape[0] != len(self.labels):
            expected = f'scores of {len(self.labels)} classes' if self.labels else 'one vector of features'
            raise UsageError(f'{self.origin} gives values of shape {shape} for an image, not {expected}')
        return outputs


def open_network(
    name: str | None,
    pretrained: bool,
    checkpoint: Path | None,
    img_size: Sequence[int] | None,
    device: torch.device,
    features: bool,
) -> Network:
    """The network that the options name.

    Args:
        name: A model name of timm, an address, or an ONNX file of `flatten-zoo export`; None if the checkpoint says.
        pretrained: Load the released weights; an address has its own in any case.
        checkpoint: Checkpoint, or output folder of train.py, of which the best one is taken.
        img_size: Side, or height and width; the network's own for evaluation if None.
        device: Where a model of timm is to run; ONNX files run on the CPU.
        features: Give pooled features in place of class scores.

    Raises:
        UsageError: There is no such network, it has no weights, or it does not give that.
    """
    if checkpoint and checkpoint.suffix == '.onnx':
        raise UsageError(f"--checkpoint '{checkpoint}': an exported file is a network by itself: give it as --model")
    if name and name.endswith('.onnx'):
        if pretrained or checkpoint:
            raise UsageError(f"--model '{name}' has its weights: leave out --pretrained and --checkpoint")
        return _exported(Path(name), img_size, features)
    if not name and not checkpoint:
        raise UsageError('name a model with --model, or a checkpoint of train.py with --checkpoint')
    pretrained = pretrained or not checkpoint and ':' in (name or '')
    if not pretrained and not checkpoint:
        raise UsageError(f"--model '{name}' alone has random weights: add --pretrained, or --checkpoint FILE")
    if checkpoint and checkpoint.is_dir():
        checkpoint = run_checkpoint(checkpoint)
    model, weights = open_model(name, img_size, pretrained=pretrained, checkpoint=checkpoint)
    if not model.num_classes and not features:
        raise UsageError(f"'{name or checkpoint}' has no classes: --embeddings FILE writes its features")
    cfg = model.pretrained_cfg
    config = resolve_model_data_config(model, use_test_size=True)
    if img_size:
        config['input_size'] = (config['input_size'][0], *two_sides(img_size))
    model = model.to(device)
    return Network(
        lambda images: _outputs(model, images.to(device), features).float().cpu(),
        config,
        [] if features else class_labels(cfg, model.num_classes),
        f'{name_of(model)} ({weights})',
    )


def _outputs(model: nn.Module, images: torch.Tensor, features: bool) -> torch.Tensor:
    try:
        if features:
            return model.forward_head(model.forward_features(images), pre_logits=True)
        return model(images)
    except torch.OutOfMemoryError as e:
        raise UsageError(f'the memory does not suffice for {len(images)} images: give a smaller --batch-size') from e
    except (AssertionError, RuntimeError) as e:  # sizes that it does not take
        size = ' × '.join(map(str, images.shape[2:]))
        raise UsageError(f'the network does not take images of {size}: {first_line(e)}; give another --img-size') from e


def _exported(path: Path, img_size: Sequence[int] | None, features: bool) -> Network:
    """An ONNX file, which the JSON file beside it describes; that file is input and may say anything."""
    if not path.is_file():
        raise UsageError(f"--model '{path}': there is no such file")
    check_onnx_packages(f"--model '{path}'")
    source = f"'{description_of(path)}'"
    try:
        about = json.loads(description_of(path).read_text(encoding='utf-8'))
        batch, channels, *sides = about['input']['shape']
        dtype = {'float32': torch.float32, 'float16': torch.float16}[about['input']['dtype']]
        output = about['outputs'][0]
        classes = output.get('classes', 0)
        config = {'input_size': (channels, *about['input']['size']), 'num_classes': classes}
        config |= {key: about['preprocessing'][key] for key in PREPROCESSING}
        check_settings(config, source)
        tag = split_model_name_tag(about['model'])[1]
        weights = printable(about['weights'])
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as e:
        raise UsageError(
            f"--model '{path}': {source} beside it does not describe it: {first_line(e)}; "
            f'write both with `flatten-zoo export`'
        ) from e
    if weights == 'untrained':
        raise UsageError(f"--model '{path}' has random weights: export it with --pretrained or --checkpoint FILE")
    if about.get('task') == 'segmentation':
        raise UsageError(f"--model '{path}' gives a class for each pixel, not for the picture")
    if features != (output['name'] == 'embedding') or not features and not classes:
        what = 'one vector of features' if features else 'class scores'
        raise UsageError(f"--model '{path}' gives '{output['name']}', not {what}")
    if img_size:
        config['input_size'] = (channels, *two_sides(img_size))
        if any(isinstance(side, int) for side in sides) and list(two_sides(img_size)) != sides:
            raise UsageError(f"--img-size: '{path}' takes images of {' × '.join(map(str, sides))} only")
    session = load_onnx(path)

    def run(images: torch.Tensor) -> torch.Tensor:
        at_once = 1 if isinstance(batch, int) else len(images)
        try:
            return torch.cat([session(part)[0] for part in images.to(dtype).split(at_once)]).float()
        except Exception as e:  # what runtimes raise is theirs
            raise UsageError(f"'{path}' does not run on images of {tuple(images.shape)}: {first_line(e)}") from e

    own = {'label_names': output.get('label_names'), 'tag': tag}
    return Network(
        run,
        resolve_data_config(pretrained_cfg=config),
        [] if features else class_labels(own, classes),
        f'{path} ({weights})',
    )
