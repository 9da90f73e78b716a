"""Semantic segmentation: the class of every pixel."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import get_pretrained_cfg
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.utils import draw_segmentation_masks, make_grid, save_image

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.files import write_beside
from flatten_zoo.training.options.definitions import COUNT, FRACTION, POSITIVE
from flatten_zoo.training.options.parser import OptionParser
from flatten_zoo.weights.open import check_model_name

from ..coco import CocoSemantic, coco_split
from ..isa_net import isa_net
from ..optional_packages import dense_extra
from ..segmentation import SegmentationScores, segmentation_losses
from .detection import generated_shapes
from .task import COLOURS, Task, check_folder, enlarge

__all__ = ['Segmentation']

IGNORE = 255


class Network(nn.Module):
    """Images from 0 to 1 in, logits out, under torchvision's names whichever library the network is of."""

    def __init__(self, args: argparse.Namespace, backbone: str, num_classes: int, pretrained: bool):
        super().__init__()
        kwargs: dict[str, Any] = {'drop_path_rate': args.drop_path} if args.drop_path else {}
        cfg = get_pretrained_cfg(backbone)
        if getattr(cfg, 'fixed_input_size', False):
            kwargs['dynamic_img_size'] = True
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
        logits = self.model(self.normalize(images))
        return logits if isinstance(logits, dict) else {'out': logits}


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
        group.add_argument(
            '--data',
            metavar='FOLDER',
            help='COCO 2017 as it is unpacked, or train/ and val/, each with images/ and instances.json in COCO '
            'format; None: generated shapes',
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
        group.add_argument(
            '--distort-colours', action='store_true', help='change brightness, contrast, hue, saturation'
        )

    def __init__(self, args: argparse.Namespace, trained: bool = False):
        self.args = args
        if args.scale[0] > args.scale[1]:
            raise UsageError(f'--scale {args.scale}: must be two numbers, the smaller one first')
        self.backbone = args.backbone or ('test_resnet' if args.model == 'isa_net' else 'flatten_pvt_v2_b0')
        check_model_name(self.backbone)
        self.folder = check_folder(args.data) if args.data else generated_shapes(args, args.image_size)
        self.val_data = self._open('val', v2.Resize(args.image_size))
        try:
            self.network = Network(args, self.backbone, len(self.val_data.classes), args.pretrained and not trained)
        except (RuntimeError, TypeError, ValueError) as e:
            raise UsageError(f'cannot build {args.model} with --backbone {self.backbone}: {first_line(e)}') from e
        self.facts = {'classes': self.val_data.classes}

    def _open(self, split: str, transforms: Callable) -> CocoSemantic:
        return CocoSemantic(**coco_split(self.folder, split), transforms=transforms)

    def train_data(self) -> CocoSemantic:
        args = self.args
        smallest, largest = (round(factor * args.image_size) for factor in args.scale)
        crop = args.crop_size or [args.image_size, args.image_size]
        transforms = [
            v2.RandomResize(smallest, largest + 1),
            v2.RandomCrop(crop, pad_if_needed=True, fill={tv_tensors.Mask: IGNORE, 'others': 0}),
            v2.RandomHorizontalFlip(),
        ]
        if args.distort_colours:
            transforms.append(v2.RandomPhotometricDistort(p=1))
        data = self._open('train', v2.Compose(transforms))
        if data.category_ids != self.val_data.category_ids:
            raise UsageError(f"training and validation data in '{self.folder}' do not have the same categories")
        return data

    @staticmethod
    def collate(items: list[Any]) -> tuple:
        """A batch of the largest height and width, rounded up to the multiples of 32 that pyramids need."""
        height, width = (-(-max(image.shape[side] for image, _ in items) // 32) * 32 for side in (1, 2))

        def pad(x: torch.Tensor, value: int) -> torch.Tensor:
            return F.pad(x.as_subclass(torch.Tensor), [0, width - x.shape[-1], 0, height - x.shape[-2]], value=value)

        images = torch.stack([pad(image, 0) for image, _ in items])
        return images, torch.stack([pad(label, IGNORE) for _, label in items])

    def losses(self, network: Callable, batch: tuple) -> dict[str, torch.Tensor]:
        images, labels = batch
        return segmentation_losses(network(images), labels, ignore_index=IGNORE)

    def new_scores(self) -> SegmentationScores:
        return SegmentationScores(self.val_data.classes, ignore_index=IGNORE)

    def score(self, network: Callable, batch: tuple, scores: SegmentationScores) -> None:
        images, labels = batch
        scores.add(network(images)['out'], labels)

    def show(self, scores: dict[str, float]) -> str:
        return '  '.join(f'{name} {100 * score:.1f}' for name, score in scores.items() if not name.startswith('IoU '))

    @torch.inference_mode()
    def draw(self, network: nn.Module, device: torch.device, path: Path, count: int = 8) -> None:
        """Each image as it is, with its true classes, and with those found in it."""
        classes = self.val_data.classes
        images, labels = self.collate([self.val_data[i] for i in range(min(count, len(self.val_data)))])
        found = network.eval()(images.to(device))['out'].argmax(1).cpu()
        found[labels == IGNORE] = 0
        colours = [COLOURS[i % len(COLOURS)] for i in range(len(classes) - 1)]
        pictures = []
        for image, *maps in zip(images, labels, found, strict=True):
            masks = [torch.stack([c == i for i in range(1, len(classes))]) for c in maps]
            pictures += [image, *(draw_segmentation_masks(image, m, alpha=0.6, colors=colours) for m in masks)]
        with write_beside(path) as temporary:
            save_image(make_grid([enlarge(p, math.ceil(192 / max(p.shape))) for p in pictures], nrow=6), temporary)
