"""Detection: boxes, and the masks of objects."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision.transforms import v2
from torchvision.utils import make_grid, save_image

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.files import write_beside
from flatten_zoo.models.attention_resnet import OPERATORS
from flatten_zoo.training.options.definitions import COUNT, FRACTION, WHOLE
from flatten_zoo.training.options.parser import OptionParser

from ...samples.shapes import write_shapes
from ..coco import CocoInstances, coco_split
from ..evaluation import CocoScores
from ..pictures import draw_detections
from ..pyramid import LEVELS
from ..rcnn import cascade_mask_rcnn, faster_rcnn, mask_rcnn, retinanet
from .task import Task, check_folder, optional

__all__ = ['Detection', 'generated_shapes']

MODELS = {
    'mask_rcnn': mask_rcnn,
    'faster_rcnn': faster_rcnn,
    'cascade_mask_rcnn': cascade_mask_rcnn,
    'retinanet': retinanet,
}


class Detection(Task):
    """Train a detector with an efficient-attention backbone and attention on its feature pyramid.

    Without --data it learns generated shapes, which takes minutes on a CPU. Otherwise --data is a folder with COCO 2017
    as it is unpacked, or with train/ and val/, each with images/ and instances.json in COCO's format.
    """

    name = 'detection'
    best = 'box AP'
    defaults = {'epochs': 4, 'batch_size': 4, 'lr': 5e-4, 'clip_grad': 5.0}

    @classmethod
    def add_options(cls, parser: OptionParser) -> None:
        group = parser.add_argument_group('model')
        group.add_argument('--model', default='mask_rcnn', choices=tuple(MODELS), help='the network')
        group.add_argument(
            '--backbone', default='flatten_pvt_v2_b0', metavar='NAME', help='any model of timm with stages or plain ViT'
        )
        group.add_argument(
            '--attention', default='ea', choices=('none', *OPERATORS), help='attention on the feature pyramid'
        )
        group.add_argument(
            '--levels', nargs='+', default=list(LEVELS), metavar='LEVEL', help='levels that attention comes after'
        )
        group.add_argument(
            '--pretrained', action='store_true', help="start from the backbone's pretrained weights, with norms frozen"
        )
        group.add_argument(
            '--trainable-layers',
            type=WHOLE,
            metavar='N',
            help='parts of the backbone that are trained, from its end, 5: all; None: 3 of a pretrained one, else all',
        )
        group.add_argument('--drop-path', type=FRACTION, default=0.0, metavar='P', help='of the backbone')
        group.add_argument(
            '--regions', type=COUNT, default=16, metavar='N', help='of an image that the heads learn from; COCO: 512'
        )
        group = parser.add_argument_group('data')
        group.add_argument('--data', metavar='FOLDER', help='data in COCO format; None: generated shapes')
        group.add_argument('--shapes', type=COUNT, default=800, metavar='N', help='generated images to train on')
        group.add_argument(
            '--image-size',
            nargs='+',
            type=COUNT,
            default=[96],
            metavar='N',
            help='shorter side of the images, COCO: 800; of several, one at random, and the last one in validation',
        )

    def __init__(self, args: argparse.Namespace, trained: bool = False, facts: dict[str, Any] | None = None):
        self.args = args
        if facts is None:
            self.folder = check_folder(args.data) if args.data else generated_shapes(args, args.image_size[-1])
            self.val_data = self._open('val')
            facts = {'classes': self.val_data.classes}
        self.facts = facts
        self.network = self._build(trained)

    def _open(self, split: str, transforms: Callable | None = None) -> CocoInstances:
        masks = 'mask' in self.args.model
        return CocoInstances(**coco_split(self.folder, split), transforms=transforms, masks=masks)

    def train_data(self) -> CocoInstances:
        data = self._open('train', v2.Compose([v2.RandomHorizontalFlip(), v2.ToPureTensor()]))
        if data.category_ids != self.val_data.category_ids:
            raise UsageError(f"training and validation data in '{self.folder}' do not have the same categories")
        return data

    def _build(self, trained: bool) -> nn.Module:
        args = self.args
        unknown = set(args.levels) - set(LEVELS)
        if unknown:
            raise UsageError(f'--levels: there is no {unknown.pop()}, only {", ".join(LEVELS)}')
        kwargs: dict[str, Any] = {
            # the proportions of torchvision's defaults
            'min_size': tuple(args.image_size),
            'max_size': max(args.image_size) * 5 // 3,
        }
        if args.model != 'retinanet':  # which has no regions
            kwargs |= {
                'box_batch_size_per_image': args.regions,
                'rpn_post_nms_top_n_train': 4 * args.regions,
                'rpn_post_nms_top_n_test': 2 * args.regions,
            }
        # torchvision's habits for a pretrained backbone, also where its weights come from a checkpoint
        layers = args.trainable_layers
        if layers is None and args.pretrained:
            layers = 3
        try:
            return MODELS[args.model](
                args.backbone,
                len(self.facts['classes']),
                optional(args.attention),
                args.levels,
                pretrained_backbone=args.pretrained and not trained,
                trainable_backbone_layers=layers,
                freeze_norm=args.pretrained,
                backbone_kwargs={'drop_path_rate': args.drop_path} if args.drop_path else None,
                **kwargs,
            )
        except (RuntimeError, ValueError) as e:
            raise UsageError(f'cannot build {args.model} with --backbone {args.backbone}: {first_line(e)}') from e

    @staticmethod
    def collate(items: list[Any]) -> tuple:
        return tuple(zip(*items, strict=True))

    def losses(self, network: Callable, batch: tuple) -> dict[str, torch.Tensor]:
        images, targets = batch
        return network(list(images), list(targets))

    def new_scores(self) -> CocoScores:
        return CocoScores(self.val_data)

    def score(self, network: Callable, batch: tuple, scores: CocoScores) -> None:
        images, targets = batch
        scores.add([target['image_id'] for target in targets], network(list(images)))

    def show(self, scores: dict[str, float]) -> str:
        return '  '.join(f'{name} {100 * score:.1f}' for name, score in scores.items())

    @torch.inference_mode()
    def draw(self, network: nn.Module, device: torch.device, path: Path, count: int = 8) -> None:
        network.eval()
        pictures = []
        for index in range(min(count, len(self.val_data))):
            image, _ = self.val_data[index]
            pictures.append(self.picture(network, image.to(device)))
        height, width = (max(picture.shape[side] for picture in pictures) for side in (1, 2))
        pictures = [v2.functional.pad(p, [0, 0, width - p.shape[2], height - p.shape[1]]) for p in pictures]
        with write_beside(path) as temporary:
            save_image(make_grid(pictures, nrow=4), temporary)

    def picture(self, network: Callable, image: torch.Tensor) -> torch.Tensor:
        (found,) = network([image])
        scale = math.ceil(256 / max(image.shape))  # small images are enlarged for their captions
        return draw_detections(image, found, self.facts['classes'], enlarge=scale)


def generated_shapes(args: argparse.Namespace, size: int) -> Path:
    """The folder of generated shapes in `--output`, which are written if they are not there yet."""
    folder = Path(args.output) / f'shapes-{size}-{args.shapes}'
    for seed, (split, number) in enumerate((('train', args.shapes), ('val', max(1, args.shapes // 8)))):
        write_shapes(folder / split, number, size, seed=seed)
    return folder
