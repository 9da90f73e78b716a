"""Train a semantic segmentation network with an efficient-attention encoder or head.

UPerNet and Semantic FPN are those of segmentation-models-pytorch, with an encoder of the zoo or any other of timm;
isa_net is the zoo's own. Without --data they learn generated shapes, which takes minutes on a CPU. Otherwise --data is
a folder with COCO 2017 as it is unpacked, or with train/ and val/, each with images/ and instances.json in COCO's
format.
"""

import argparse
import math
import sys
from functools import partial
from pathlib import Path

import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from dense_training import (
    COLOURS,
    add_option,
    add_training_options,
    check_options,
    enlarge,
    load_splits,
    one_at_a_time,
    save_network,
    train,
)
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import get_pretrained_cfg
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.utils import draw_segmentation_masks, make_grid, save_image

from flatten_zoo.dense import CocoSemantic, SegmentationScores, coco_split, isa_net, segmentation_losses
from flatten_zoo.errors import UsageError, first_line, report_usage_errors
from flatten_zoo.files import write_beside
from flatten_zoo.weights.open import check_model_name

DEFAULT_BACKBONES = {'upernet': 'flatten_pvt_v2_b0', 'fpn': 'flatten_pvt_v2_b0', 'isa_net': 'test_resnet'}
IGNORE = 255


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    model = parser.add_argument_group('model')
    add = partial(add_option, model)
    add('--model', 'the network', default='upernet', choices=['upernet', 'fpn', 'isa_net'])
    model.add_argument(
        '--backbone',
        metavar='NAME',
        help='any model of timm with stages, for isa_net one that can be dilated '
        f'(default: {DEFAULT_BACKBONES["upernet"]}, for isa_net {DEFAULT_BACKBONES["isa_net"]})',
    )
    model.add_argument('--pretrained', action='store_true', help="start from the backbone's pretrained weights")
    add('--decoder-channels', 'of upernet and fpn, 256 in the papers', type=int, default=64, metavar='N')
    add('--image-size', 'shorter side of the images, 512 for COCO', type=int, default=64, metavar='N')
    add_training_options(
        parser, 'COCO format', 'shapes', 5120, epochs=5, batch_size=16, lr=1.5e-3, output='output/segmentation'
    )
    args = parser.parse_args(argv)
    args.backbone = args.backbone or DEFAULT_BACKBONES[args.model]
    return args


def load_data(args: argparse.Namespace) -> tuple[CocoSemantic, CocoSemantic]:
    def data(folder: Path, split: str, transforms) -> CocoSemantic:
        return CocoSemantic(**coco_split(folder, split), transforms=transforms)

    resize = v2.Resize(args.image_size)
    augment = v2.Compose(
        [
            resize,
            v2.RandomCrop(args.image_size, pad_if_needed=True, fill={tv_tensors.Mask: IGNORE, 'others': 0}),
            v2.RandomHorizontalFlip(),
        ]
    )
    return load_splits(
        args, partial(data, split='train', transforms=augment), partial(data, split='val', transforms=resize)
    )


def collate(batch: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of the largest height and width, rounded up to the multiples of 32 that pyramids need."""
    height, width = (-(-max(image.shape[side] for image, _ in batch) // 32) * 32 for side in (1, 2))

    def pad(x: torch.Tensor, value: int) -> torch.Tensor:
        return F.pad(x.as_subclass(torch.Tensor), [0, width - x.shape[-1], 0, height - x.shape[-2]], value=value)

    return torch.stack([pad(image, 0) for image, _ in batch]), torch.stack([pad(label, IGNORE) for _, label in batch])


class Network(nn.Module):
    """Images from 0 to 1 in, logits out, under torchvision's names whichever library the network is of."""

    def __init__(self, args: argparse.Namespace, num_classes: int):
        super().__init__()
        common = {'encoder_weights': args.pretrained or None, 'classes': num_classes}
        cfg = get_pretrained_cfg(args.backbone)
        if getattr(cfg, 'fixed_input_size', False):
            common['dynamic_img_size'] = True
        channels = args.decoder_channels
        if args.model == 'isa_net':
            self.model = isa_net(args.backbone, num_classes, args.pretrained)
        elif args.model == 'upernet':
            self.model = smp.UPerNet(f'tu-{args.backbone}', decoder_channels=channels, **common)
        else:
            self.model = smp.FPN(
                f'tu-{args.backbone}',
                decoder_pyramid_channels=channels,
                decoder_segmentation_channels=channels,
                **common,
            )
        self.normalize = v2.Normalize(  # as the backbone wants it
            getattr(cfg, 'mean', IMAGENET_DEFAULT_MEAN), getattr(cfg, 'std', IMAGENET_DEFAULT_STD)
        )

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(self.normalize(images))
        return logits if isinstance(logits, dict) else {'out': logits}


def build_network(args: argparse.Namespace, num_classes: int) -> Network:
    try:
        return Network(args, num_classes).to(args.device)
    except (RuntimeError, TypeError, ValueError) as e:
        raise UsageError(f'cannot build {args.model} with --backbone {args.backbone}: {first_line(e)}') from e


@torch.inference_mode()
def evaluate(network: Network, data: CocoSemantic, device: str, workers: int = 0) -> dict[str, float]:
    scores = SegmentationScores(data.classes, ignore_index=IGNORE)
    network.eval()
    for images, labels in one_at_a_time(data, workers, collate):
        scores.add(network(images.to(device))['out'], labels.to(device))
    return scores.compute()


@torch.inference_mode()
def draw_predictions(network: Network, data: CocoSemantic, path: Path, device: str, count: int = 8) -> None:
    """A picture of the first images: each one as it is, with its true classes, and with those found in it."""
    images, labels = collate([data[i] for i in range(min(count, len(data)))])
    found = network.eval()(images.to(device))['out'].argmax(1).cpu()
    found[labels == IGNORE] = 0
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(data.classes) - 1)]
    pictures = []
    for image, *classes in zip(images, labels, found, strict=True):
        masks = [torch.stack([c == i for i in range(1, len(data.classes))]) for c in classes]
        pictures += [image, *(draw_segmentation_masks(image, m, alpha=0.6, colors=colours) for m in masks)]
    with write_beside(path) as unfinished:
        save_image(make_grid([enlarge(p, math.ceil(192 / max(p.shape))) for p in pictures], nrow=6), unfinished)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains and returns the last scores."""
    args = parse_args(argv)
    check_model_name(args.backbone)
    check_options(args, 'decoder_channels', 'image_size', 'shapes')
    torch.manual_seed(args.seed)
    train_data, val_data = load_data(args)
    network = build_network(args, len(train_data.classes))

    def losses(images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return segmentation_losses(network(images.to(args.device)), labels.to(args.device), ignore_index=IGNORE)

    scores = train(
        args,
        network,
        losses,
        lambda: evaluate(network, val_data, args.device, args.workers),
        train_data,
        collate,
        clip=1.0,
    )
    save_network(args, network.model, classes=train_data.classes, scores=scores)
    draw_predictions(network, val_data, args.output / 'predictions.png', args.device)
    print(f'weights and a picture of predictions are in {args.output}')
    return scores


if __name__ == '__main__':
    sys.exit(report_usage_errors(lambda: main() and None))
