"""Semantic segmentation: the class of every pixel."""

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import get_pretrained_cfg
from torch import nn
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.utils import make_grid, save_image

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.files import write_beside
from flatten_zoo.training.options.definitions import COUNT, FRACTION, POSITIVE
from flatten_zoo.training.options.parser import OptionParser
from flatten_zoo.weights.open import check_model_name

from ..coco import CocoSemantic, coco_split
from ..isa_net import isa_net
from ..optional_packages import dense_extra
from ..pictures import draw_labels, draw_legend
from ..segmentation import SegmentationScores, segmentation_losses
from ..segmentation_data import SegmentationPairs, segmentation_layouts, segmentation_split
from ..segmentation_inference import multi_scale, sliding_window
from .detection import generated_shapes
from .task import Task, check_folder

__all__ = ['Segmentation']


class Network(nn.Module):
    """Images from 0 to 1 of any size in, logits out, under torchvision's names whichever library the network is of."""

    def __init__(self, args: argparse.Namespace, backbone: str, num_classes: int, pretrained: bool):
        super().__init__()
        kwargs: dict[str, Any] = {'drop_path_rate': args.drop_path} if args.drop_path else {}
        cfg = get_pretrained_cfg(backbone)
        if getattr(cfg, 'fixed_input_size', False):
            kwargs['dynamic_img_size'] = True
        self.divisor = 1 if args.model == 'isa_net' else 32  # of height and width
        channels = args.decoder_channels
        if args.model == 'isa_net':
            self.model = isa_net(backbone, num_classes, pretrained, backbone_kwargs=kwargs)
        else:
            with dense_extra():
                import segmentation_models_pytorch as smp
            kwargs |= {'encoder_weights': pretrained or None, 'classes': num_classes}
            if args.model == 'upernet':
                self.model = smp.UPerNet(f'tu-{backbone}', decoder_channels=channels, **kwargs)
            else:
                self.model = smp.FPN(
                    f'tu-{backbone}',
                    decoder_pyramid_channels=channels,
                    decoder_segmentation_channels=channels,
                    **kwargs,
                )
        self.normalize = v2.Normalize(  # as the backbone wants it
            getattr(cfg, 'mean', IMAGENET_DEFAULT_MEAN), getattr(cfg, 'std', IMAGENET_DEFAULT_STD)
        )

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        height, width = images.shape[-2:]
        padding = [0, -width % self.divisor, 0, -height % self.divisor]
        logits = self.model(F.pad(self.normalize(images), padding))
        if not isinstance(logits, dict):
            logits = {'out': logits}
        return {name: x[..., :height, :width] for name, x in logits.items()}


class Segmentation(Task):
    """Train a semantic segmentation network with an efficient-attention encoder or head.

    UPerNet and Semantic FPN are those of segmentation-models-pytorch, with an encoder of the zoo or any other of timm;
    isa_net is the zoo's own. Without --data they learn generated shapes, which takes minutes on a CPU.
    """

    name = 'segmentation'
    best = 'mIoU'
    defaults = {'epochs': 5, 'batch_size': 16, 'lr': 1.5e-3, 'clip_grad': 1.0}

    @classmethod
    def add_options(cls, parser: OptionParser) -> None:
        group = parser.add_argument_group('model')
        group.add_argument('--model', default='upernet', choices=('upernet', 'fpn', 'isa_net'), help='the network')
        group.add_argument(
            '--backbone',
            metavar='NAME',
            help='any model of timm with stages, for isa_net one that can be dilated; None: flatten_pvt_v2_b0, for '
            'isa_net test_resnet',
        )
        group.add_argument('--pretrained', action='store_true', help="start from the backbone's pretrained weights")
        group.add_argument(
            '--decoder-channels', type=COUNT, default=64, metavar='N', help='of upernet and fpn; papers: 512, 256'
        )
        group.add_argument('--drop-path', type=FRACTION, default=0.0, metavar='P', help='of the backbone')
        group = parser.add_argument_group('data')
        group.add_argument('--data', metavar='FOLDER', help='data in --data-layout; None: generated shapes')
        group.add_argument(
            '--data-layout',
            default='coco',
            metavar='NAME',
            help='coco: COCO 2017 as it is unpacked, or train/ and val/, each with images/ and instances.json in its '
            f'format; pairs of files: {", ".join(segmentation_layouts())}, or a YAML file that says where they are',
        )
        group.add_argument('--shapes', type=COUNT, default=5120, metavar='N', help='generated images to train on')
        group.add_argument('--image-size', type=COUNT, default=64, metavar='N', help='shorter side of the images')
        group.add_argument(
            '--crop-size',
            nargs=2,
            type=COUNT,
            metavar='N',
            help='height and width of the parts that are trained on; None: a square of --image-size',
        )
        group.add_argument(
            '--scale',
            nargs=2,
            type=POSITIVE,
            default=[1.0, 1.0],
            metavar='X',
            help='images to train on are between so many times as large, at random',
        )
        group.add_argument('--hflip', type=FRACTION, default=0.5, metavar='P', help='probability of a mirror image')
        group.add_argument('--distort-colours', action='store_true', help='of images to train on, at random')
        group = parser.add_argument_group('validation')
        group.add_argument(
            '--window', nargs=2, type=COUNT, metavar='N', help='height and width of windows that slide over an image'
        )
        group.add_argument(
            '--window-stride', nargs=2, type=COUNT, metavar='N', help='from one to the next; None: two thirds of them'
        )
        group.add_argument(
            '--test-scales', nargs='+', type=POSITIVE, default=[], metavar='X', help='mean over images of these scales'
        )
        group.add_argument('--test-flip', action='store_true', help='and over their mirror images')

    def __init__(self, args: argparse.Namespace, trained: bool = False, facts: dict[str, Any] | None = None):
        self.args = args
        if args.scale[0] > args.scale[1]:
            raise UsageError(f'--scale {args.scale}: must be two numbers, the smaller one first')
        self._check_windows()
        self.backbone = args.backbone or ('test_resnet' if args.model == 'isa_net' else 'flatten_pvt_v2_b0')
        check_model_name(self.backbone)
        if facts is None:
            self.folder = check_folder(args.data) if args.data else generated_shapes(args, args.image_size)
            self.val_data = self._open('val')
            self.ignore_index = getattr(self.val_data, 'ignore_index', 255)
            facts = {'classes': self.val_data.classes}
        self.facts = facts
        try:
            self.network = Network(args, self.backbone, len(facts['classes']), args.pretrained and not trained)
        except (RuntimeError, TypeError, ValueError) as e:
            raise UsageError(f'cannot build {args.model} with --backbone {self.backbone}: {first_line(e)}') from e

    def _check_windows(self) -> None:
        window, stride = self.args.window, self.args.window_stride
        if stride and not window:
            raise UsageError('--window-stride needs --window')
        self.window = window
        self.stride = stride or (window and [max(2 * side // 3, 1) for side in window])
        if window and any(step > side for step, side in zip(self.stride, window, strict=True)):
            raise UsageError(f'--window-stride {stride} leaves pixels out between windows of {window}')

    def _open(self, split: str, transforms: Callable | None = None) -> CocoSemantic | SegmentationPairs:
        if self.args.data_layout == 'coco' or not self.args.data:
            return CocoSemantic(**coco_split(self.folder, split), transforms=transforms)
        return segmentation_split(self.args.data_layout, self.folder, split, transforms)

    def train_data(self) -> CocoSemantic | SegmentationPairs:
        args = self.args
        smallest, largest = (round(factor * args.image_size) for factor in args.scale)
        crop = args.crop_size or [args.image_size, args.image_size]
        fill = {tv_tensors.Mask: self.ignore_index, 'others': 0}
        transforms = [
            v2.RandomResize(smallest, largest + 1),
            v2.RandomCrop(crop, pad_if_needed=True, fill=fill),
            v2.RandomHorizontalFlip(args.hflip),
        ]
        if args.distort_colours:
            transforms.append(v2.RandomPhotometricDistort())
        data = self._open('train', v2.Compose(transforms))
        if data.classes != self.val_data.classes:
            raise UsageError(f"training and validation data in '{self.folder}' do not have the same categories")
        return data

    @staticmethod
    def collate(items: list[Any]) -> tuple:
        return tuple(default_collate(items))

    def losses(self, network: Callable, batch: tuple) -> dict[str, torch.Tensor]:
        images, labels = batch
        return segmentation_losses(network(images), labels, ignore_index=self.ignore_index)

    def new_scores(self) -> SegmentationScores:
        return SegmentationScores(self.val_data.classes, ignore_index=self.ignore_index)

    def score(self, network: Callable, batch: tuple, scores: SegmentationScores) -> None:
        images, labels = batch
        scores.add(self.predict(network, images), labels)

    def predict(self, network: Callable, images: torch.Tensor) -> torch.Tensor:
        """Logits, or probabilities at several scales, of images as they are in their files."""
        logits = partial(_logits, network)
        if self.window:
            logits = partial(sliding_window, logits, window=tuple(self.window), stride=tuple(self.stride))
        if self.args.test_scales or self.args.test_flip:
            logits = partial(multi_scale, logits, scales=self.args.test_scales or [1.0], flip=self.args.test_flip)
        found = logits(v2.functional.resize(images, [self.args.image_size]))
        return F.interpolate(found, images.shape[-2:], mode='bilinear', align_corners=False)

    def main_scores(self, scores: dict[str, float]) -> dict[str, float]:
        return {name: scores[name] for name in ('mIoU', 'accuracy', 'mean accuracy')}

    def show(self, scores: dict[str, float]) -> str:
        return '  '.join(f'{name} {100 * score:.1f}' for name, score in self.main_scores(scores).items())

    @torch.inference_mode()
    def draw(self, network: nn.Module, device: torch.device, path: Path, count: int = 8) -> None:
        """Each image as it is, with its true classes, and with those found in it, and a legend."""
        network.eval()
        classes, pictures, seen = self.val_data.classes, [], []
        for index in range(min(count, len(self.val_data))):
            image, labels = self.val_data[index]
            found = self.predict(network, image[None].to(device))[0].argmax(0).cpu()
            found[labels == self.ignore_index] = self.ignore_index
            maps = [draw_labels(image, x, classes, self.ignore_index) for x in (labels, found)]
            seen += [labels.flatten(), found.flatten()]
            pictures += [v2.functional.resize(x, [192], v2.InterpolationMode.NEAREST) for x in (image, *maps)]
        height, width = (max(picture.shape[side] for picture in pictures) for side in (1, 2))
        pictures = [v2.functional.pad(p, [0, 0, width - p.shape[2], height - p.shape[1]]) for p in pictures]
        grid = make_grid(pictures, nrow=6)
        legend = draw_legend(torch.cat(seen), classes, grid.shape[2], self.ignore_index)
        with write_beside(path) as temporary:
            save_image(torch.cat([grid, legend / 255], dim=1), temporary)

    def picture(self, network: Callable, image: torch.Tensor) -> torch.Tensor:
        classes = self.facts['classes']
        labels = self.predict(network, image[None])[0].argmax(0).cpu()
        picture = draw_labels(image, labels, classes, ignore_index=-1, enlarge=math.ceil(256 / max(image.shape)))
        legend = draw_legend(labels, classes, picture.shape[2], ignore_index=-1)
        return torch.cat([picture, legend / 255], dim=1)


def _logits(network: Callable, images: torch.Tensor) -> torch.Tensor:
    return network(images)['out'].float()
