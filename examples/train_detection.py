"""Train a Mask or Faster R-CNN with an efficient-attention backbone and attention on its feature pyramid.

Without --data it learns generated shapes, which takes minutes on a CPU. Otherwise --data is a folder with COCO 2017 as
it is unpacked, or with train/ and val/, each with images/ and instances.json in COCO's format.
"""
import argparse
import math
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision.models.detection import FasterRCNN
from torchvision.transforms import v2
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks, make_grid, save_image
from tqdm import tqdm

from flatten_zoo.dense import LEVELS, CocoInstances, CocoScores, coco_split, faster_rcnn, mask_rcnn, write_shapes
from flatten_zoo.errors import UsageError, first_line, report_usage_errors
from flatten_zoo.files import write_beside
from flatten_zoo.models.attention_resnet import OPERATORS

COLOURS = ['red', 'lime', 'dodgerblue', 'yellow', 'magenta', 'cyan']


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    def add(group, name: str, text: str, **kwargs) -> None:
        group.add_argument(name, help=f'{text} (default: %(default)s)', **kwargs)

    parser = argparse.ArgumentParser(description=__doc__)
    model = parser.add_argument_group('model')
    add(model, '--backbone', 'any model of timm with stages or plain ViT', default='flatten_pvt_v2_b0', metavar='NAME')
    add(model, '--attention', 'on the feature pyramid', default='ea', choices=['none', *OPERATORS])
    model.add_argument(
        '--levels', nargs='+', default=list(LEVELS), choices=LEVELS, metavar='LEVEL',
        help=f'levels that attention comes after (default: {" ".join(LEVELS)})')
    model.add_argument('--boxes-only', action='store_true', help='Faster R-CNN in place of Mask R-CNN')
    model.add_argument(
        '--pretrained', action='store_true', help="start from the backbone's pretrained weights, with norms frozen")
    add(model, '--image-size', 'shorter side of the images, 800 for COCO', type=int, default=96, metavar='N')
    add(model, '--regions', 'regions of an image that the heads learn from, 512 for COCO', type=int, default=16,
        metavar='N')
    data = parser.add_argument_group('data')
    data.add_argument('--data', type=Path, metavar='FOLDER', help='data in COCO format (default: generated shapes)')
    add(data, '--shapes', 'generated images to train on', type=int, default=800, metavar='N')
    add(data, '--workers', 'processes that load data', type=int, default=0, metavar='N')
    training = parser.add_argument_group('training')
    add(training, '--epochs', 'passes over the data', type=int, default=4, metavar='N')
    add(training, '--batch-size', 'images of a step', type=int, default=4, metavar='N')
    add(training, '--lr', 'highest learning rate, of AdamW', type=float, default=5e-4)
    add(training, '--weight-decay', 'of AdamW', type=float, default=0.05)
    add(training, '--seed', 'of weights and order', type=int, default=0)
    add(training, '--device', 'where to compute', default='cuda' if torch.cuda.is_available() else 'cpu')
    add(training, '--output', 'folder for everything written', type=Path, default=Path('output/detection'),
        metavar='FOLDER')
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """Finds what would go wrong later, and makes the output folder."""
    for name in ('image_size', 'regions', 'shapes', 'epochs', 'batch_size', 'lr'):
        if not getattr(args, name) > 0:
            raise UsageError(f'--{name.replace("_", "-")} must be positive, got {getattr(args, name)}')
    if args.workers < 0:
        raise UsageError(f'--workers must not be negative, got {args.workers}')
    try:
        torch.empty(0, device=args.device)
    except (AssertionError, RuntimeError) as e:
        raise UsageError(f'--device {args.device}: {first_line(e)}') from e
    if (args.output / 'last.pth').exists():
        raise UsageError(f"'{args.output}' holds a trained network already: give another folder with --output")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write to '{args.output}' (--output): {e}") from e


def load_data(args: argparse.Namespace) -> tuple[CocoInstances, CocoInstances]:
    """Training and validation data; generated shapes, written if they are not there yet, where none is given."""
    folder = args.data
    if folder is None:
        folder = args.output / f'shapes-{args.image_size}-{args.shapes}'
        write_shapes(folder / 'train', args.shapes, args.image_size, seed=0)
        write_shapes(folder / 'val', max(1, args.shapes // 8), args.image_size, seed=1)
    elif not folder.is_dir():
        raise UsageError(f"there is no folder '{folder}' (--data)")
    flip = v2.Compose([v2.RandomHorizontalFlip(), v2.ToPureTensor()])
    train_data = CocoInstances(**coco_split(folder, 'train'), transforms=flip, masks=not args.boxes_only)
    val_data = CocoInstances(**coco_split(folder, 'val'), masks=not args.boxes_only)
    if train_data.category_ids != val_data.category_ids:
        raise UsageError(f"training and validation data in '{folder}' do not have the same categories")
    if len(train_data) < args.batch_size:
        raise UsageError(f'--batch-size {args.batch_size} is more than the {len(train_data)} training images')
    return train_data, val_data


def build_model(args: argparse.Namespace, num_classes: int) -> FasterRCNN:
    attention = None if args.attention == 'none' else args.attention
    try:
        return (faster_rcnn if args.boxes_only else mask_rcnn)(
            args.backbone, num_classes, attention, args.levels, pretrained_backbone=args.pretrained,
            # the proportions of torchvision's defaults
            min_size=args.image_size, max_size=args.image_size * 5 // 3, box_batch_size_per_image=args.regions,
            rpn_post_nms_top_n_train=4 * args.regions, rpn_post_nms_top_n_test=2 * args.regions)
    except (RuntimeError, ValueError) as e:
        raise UsageError(f'cannot build the network with --backbone {args.backbone}: {first_line(e)}') from e


def train_epoch(model: FasterRCNN, loader: DataLoader, optimizer, schedule, device: str) -> float:
    """One pass over the data; returns the mean loss."""
    model.train()
    total = 0
    progress = tqdm(loader, desc='training', unit='batch', leave=False)
    for step, (images, targets) in enumerate(progress, start=1):
        images, targets = to_device(images, targets, device)
        loss = sum(model(images, targets).values())
        if not loss.isfinite():
            raise UsageError(f'the loss is {loss.item()}: try a lower --lr')
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        progress.set_postfix(loss=f'{total / step:.3f}')
    return total / len(loader)


@torch.inference_mode()
def evaluate(model: FasterRCNN, data: CocoInstances, device: str, workers: int = 0) -> dict[str, float]:
    """Scores, of one image at a time: attention sees the padding of a batch of images of different sizes."""
    scores = CocoScores(data)
    loader = DataLoader(data, batch_size=1, num_workers=workers, collate_fn=collate)
    model.eval()
    for images, targets in tqdm(loader, desc='validation', unit='image', leave=False):
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
        found, = model([image.to(device)])
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
                for label, score in zip(found['labels'].tolist(), found['scores'].tolist(), strict=True)]
            picture = draw_bounding_boxes(picture, scale * found['boxes'], captions, colors=colours, width=2)
        pictures.append(picture)
    height, width = (max(picture.shape[side] for picture in pictures) for side in (1, 2))
    pictures = [v2.functional.pad(p, [0, 0, width - p.shape[2], height - p.shape[1]]) for p in pictures]
    with write_beside(path) as unfinished:
        save_image(make_grid(pictures, nrow=4), unfinished)


def enlarge(x: torch.Tensor, scale: int) -> torch.Tensor:
    return x.repeat_interleave(scale, -1).repeat_interleave(scale, -2)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains and returns the last scores."""
    args = parse_args(argv)
    check_args(args)
    torch.manual_seed(args.seed)
    train_data, val_data = load_data(args)
    model = build_model(args, len(train_data.classes)).to(args.device)
    train_loader = DataLoader(
        train_data, batch_size=args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers,
        collate_fn=collate)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], args.lr, weight_decay=args.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.epochs * len(train_loader), pct_start=0.1)
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(model, train_loader, optimizer, schedule, args.device)
        scores = evaluate(model, val_data, args.device, args.workers)
        figures = '  '.join(f'{name} {100 * score:.1f}' for name, score in scores.items())
        print(f'epoch {epoch}/{args.epochs}  loss {loss:.3f}  {figures}', flush=True)
    with write_beside(args.output / 'last.pth') as unfinished:
        torch.save({'model': model.state_dict(), 'classes': train_data.classes, 'scores': scores}, unfinished)
    draw_predictions(model, val_data, args.output / 'predictions.png', args.device)
    print(f'weights and a picture of predictions are in {args.output}')
    return scores


def collate(batch):
    return tuple(zip(*batch, strict=True))


if __name__ == '__main__':
    sys.exit(report_usage_errors(lambda: main() and None))
