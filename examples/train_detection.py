"""Train a Mask or Faster R-CNN with an efficient-attention backbone and attention on its feature pyramid.

Without --data it learns generated shapes, which takes minutes on a CPU. Otherwise --data is a folder with COCO 2017 as
it is unpacked, or with train/ and val/, each with images/ and instances.json in COCO's format.
"""

import argparse
import math
import sys
from functools import partial
from pathlib import Path

import torch
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
from torchvision.models.detection import FasterRCNN
from torchvision.transforms import v2
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks, make_grid, save_image

from flatten_zoo.dense import LEVELS, CocoInstances, CocoScores, coco_split, faster_rcnn, mask_rcnn
from flatten_zoo.errors import UsageError, first_line, report_usage_errors
from flatten_zoo.files import write_beside
from flatten_zoo.models.attention_resnet import OPERATORS


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    model = parser.add_argument_group('model')
    add = partial(add_option, model)
    add('--backbone', 'any model of timm with stages or plain ViT', default='flatten_pvt_v2_b0', metavar='NAME')
    add('--attention', 'on the feature pyramid', default='ea', choices=['none', *OPERATORS])
    model.add_argument(
        '--levels',
        nargs='+',
        default=list(LEVELS),
        choices=LEVELS,
        metavar='LEVEL',
        help=f'levels that attention comes after (default: {" ".join(LEVELS)})',
    )
    model.add_argument('--boxes-only', action='store_true', help='Faster R-CNN in place of Mask R-CNN')
    model.add_argument(
        '--pretrained', action='store_true', help="start from the backbone's pretrained weights, with norms frozen"
    )
    add('--image-size', 'shorter side of the images, 800 for COCO', type=int, default=96, metavar='N')
    add('--regions', 'regions of an image that the heads learn from, 512 for COCO', type=int, default=16, metavar='N')
    add_training_options(
        parser, 'COCO format', 'shapes', 800, epochs=4, batch_size=4, lr=5e-4, output='output/detection'
    )
    return parser.parse_args(argv)


def load_data(args: argparse.Namespace) -> tuple[CocoInstances, CocoInstances]:
    def data(folder: Path, split: str, transforms=None) -> CocoInstances:
        return CocoInstances(**coco_split(folder, split), transforms=transforms, masks=not args.boxes_only)

    flip = v2.Compose([v2.RandomHorizontalFlip(), v2.ToPureTensor()])
    return load_splits(args, partial(data, split='train', transforms=flip), partial(data, split='val'))


def build_model(args: argparse.Namespace, num_classes: int) -> FasterRCNN:
    attention = None if args.attention == 'none' else args.attention
    try:
        return (faster_rcnn if args.boxes_only else mask_rcnn)(
            args.backbone,
            num_classes,
            attention,
            args.levels,
            pretrained_backbone=args.pretrained,
            # the proportions of torchvision's defaults
            min_size=args.image_size,
            max_size=args.image_size * 5 // 3,
            box_batch_size_per_image=args.regions,
            rpn_post_nms_top_n_train=4 * args.regions,
            rpn_post_nms_top_n_test=2 * args.regions,
        )
    except (RuntimeError, ValueError) as e:
        raise UsageError(f'cannot build the network with --backbone {args.backbone}: {first_line(e)}') from e


@torch.inference_mode()
def evaluate(model: FasterRCNN, data: CocoInstances, device: str, workers: int = 0) -> dict[str, float]:
    scores = CocoScores(data)
    model.eval()
    for images, targets in one_at_a_time(data, workers, collate):
        images, _ = to_device(images, (), device)
        scores.add([target['image_id'] for target in targets], model(images))
    return scores.compute()


def to_device(images, targets, device: str) -> tuple[list, list]:
    def move(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    return [move(image) for image in images], [{k: move(v) for k, v in target.items()} for target in targets]


@torch.inference_mode()
def draw_predictions(model: FasterRCNN, data: CocoInstances, path: Path, device: str, count: int = 8) -> None:
    """A picture of the first images with what is found in them."""
    model.eval()
    pictures = []
    for index in range(min(count, len(data))):
        image, _ = data[index]
        (found,) = model([image.to(device)])
        found = {key: x[found['scores'] > 0.5].cpu() for key, x in found.items()}
        scale = math.ceil(256 / max(image.shape))  # small images are enlarged for their captions
        picture = enlarge(image.as_subclass(torch.Tensor), scale)
        if len(found['labels']):
            colours = [COLOURS[(label - 1) % len(COLOURS)] for label in found['labels'].tolist()]
            if 'masks' in found:
                masks = enlarge(found['masks'][:, 0], scale) > 0.5
                picture = draw_segmentation_masks(picture, masks, alpha=0.5, colors=colours)
            captions = [
                f'{data.classes[label]} {score:.2f}'
                for label, score in zip(found['labels'].tolist(), found['scores'].tolist(), strict=True)
            ]
            picture = draw_bounding_boxes(picture, scale * found['boxes'], captions, colors=colours, width=2)
        pictures.append(picture)
    height, width = (max(picture.shape[side] for picture in pictures) for side in (1, 2))
    pictures = [v2.functional.pad(p, [0, 0, width - p.shape[2], height - p.shape[1]]) for p in pictures]
    with write_beside(path) as unfinished:
        save_image(make_grid(pictures, nrow=4), unfinished)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains and returns the last scores."""
    args = parse_args(argv)
    check_options(args, 'regions', 'image_size', 'shapes')
    torch.manual_seed(args.seed)
    train_data, val_data = load_data(args)
    model = build_model(args, len(train_data.classes)).to(args.device)
    scores = train(
        args,
        model,
        lambda images, targets: model(*to_device(images, targets, args.device)),
        lambda: evaluate(model, val_data, args.device, args.workers),
        train_data,
        collate,
        clip=5.0,
    )
    save_network(args, model, classes=train_data.classes, scores=scores)
    draw_predictions(model, val_data, args.output / 'predictions.png', args.device)
    print(f'weights and a picture of predictions are in {args.output}')
    return scores


def collate(batch):
    return tuple(zip(*batch, strict=True))


if __name__ == '__main__':
    sys.exit(report_usage_errors(lambda: main() and None))
