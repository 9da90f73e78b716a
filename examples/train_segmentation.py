"""Train a semantic segmentation network with an efficient-attention encoder or head.

UPerNet and Semantic FPN are those of segmentation-models-pytorch, with an encoder of the zoo or any other of timm;
isa_net is the zoo's own. Without --data they learn generated shapes, which takes minutes on a CPU. Otherwise --data is
a folder with COCO 2017 as it is unpacked, or with train/ and val/, each with images/ and instances.json in COCO's
format.
"""
import argparse
import math
import sys
from pathlib import Path

import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import get_pretrained_cfg
from torch import nn
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.utils import draw_segmentation_masks, make_grid, save_image
from tqdm import tqdm

from flatten_zoo.dense import CocoSemantic, SegmentationScores, coco_split, isa_net, segmentation_losses, write_shapes
from flatten_zoo.errors import UsageError, first_line, report_usage_errors
from flatten_zoo.files import write_beside
from flatten_zoo.weights.open import check_model_name

DEFAULT_BACKBONES = {'upernet': 'flatten_pvt_v2_b0', 'fpn': 'flatten_pvt_v2_b0', 'isa_net': 'test_resnet'}
IGNORE = 255
COLOURS = ['red', 'lime', 'dodgerblue', 'yellow', 'magenta', 'cyan']


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    def add(group, name: str, text: str, **kwargs) -> None:
        group.add_argument(name, help=f'{text} (default: %(default)s)', **kwargs)

    parser = argparse.ArgumentParser(description=__doc__)
    model = parser.add_argument_group('model')
    add(model, '--model', 'the network', default='upernet', choices=['upernet', 'fpn', 'isa_net'])
    model.add_argument(
        '--backbone', metavar='NAME', help='any model of timm with stages, for isa_net one that can be dilated '
        f'(default: {DEFAULT_BACKBONES["upernet"]}, for isa_net {DEFAULT_BACKBONES["isa_net"]})')
    model.add_argument('--pretrained', action='store_true', help="start from the backbone's pretrained weights")
    add(model, '--decoder-channels', 'of upernet and fpn, 256 in the papers', type=int, default=64, metavar='N')
    add(model, '--image-size', 'shorter side of the images, 512 for COCO', type=int, default=64, metavar='N')
    data = parser.add_argument_group('data')
    data.add_argument('--data', type=Path, metavar='FOLDER', help='data in COCO format (default: generated shapes)')
    add(data, '--shapes', 'generated images to train on', type=int, default=5120, metavar='N')
    add(data, '--workers', 'processes that load data', type=int, default=0, metavar='N')
    training = parser.add_argument_group('training')
    add(training, '--epochs', 'passes over the data', type=int, default=5, metavar='N')
    add(training, '--batch-size', 'images of a step', type=int, default=16, metavar='N')
    add(training, '--lr', 'highest learning rate, of AdamW', type=float, default=1.5e-3)
    add(training, '--weight-decay', 'of AdamW', type=float, default=0.05)
    add(training, '--seed', 'of weights and order', type=int, default=0)
    add(training, '--device', 'where to compute', default='cuda' if torch.cuda.is_available() else 'cpu')
    add(training, '--output', 'folder for everything written', type=Path, default=Path('output/segmentation'),
        metavar='FOLDER')
    args = parser.parse_args(argv)
    args.backbone = args.backbone or DEFAULT_BACKBONES[args.model]
    return args


def check_args(args: argparse.Namespace) -> None:
    """Finds what would go wrong later, and makes the output folder."""
    for name in ('decoder_channels', 'image_size', 'shapes', 'epochs', 'batch_size', 'lr'):
        if not getattr(args, name) > 0:
            raise UsageError(f'--{name.replace("_", "-")} must be positive, got {getattr(args, name)}')
    if args.workers < 0:
        raise UsageError(f'--workers must not be negative, got {args.workers}')
    try:
        torch.empty(0, device=args.device)
    except (AssertionError, RuntimeError) as e:
        raise UsageError(f'--device {args.device}: {first_line(e)}') from e
    check_model_name(args.backbone)
    if (args.output / 'last.pth').exists():
        raise UsageError(f"'{args.output}' holds a trained network already: give another folder with --output")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write to '{args.output}' (--output): {e}") from e


def load_data(args: argparse.Namespace) -> tuple[CocoSemantic, CocoSemantic]:
    """Training and validation data; generated shapes, written if they are not there yet, where none is given."""
    folder = args.data
    if folder is None:
        folder = args.output / f'shapes-{args.image_size}-{args.shapes}'
        write_shapes(folder / 'train', args.shapes, args.image_size, seed=0)
        write_shapes(folder / 'val', max(1, args.shapes // 8), args.image_size, seed=1)
    elif not folder.is_dir():
        raise UsageError(f"there is no folder '{folder}' (--data)")
    resize = v2.Resize(args.image_size)
    augment = v2.Compose([
        resize,
        v2.RandomCrop(args.image_size, pad_if_needed=True, fill={tv_tensors.Mask: IGNORE, 'others': 0}),
        v2.RandomHorizontalFlip(),
    ])
    train_data = CocoSemantic(**coco_split(folder, 'train'), transforms=augment)
    val_data = CocoSemantic(**coco_split(folder, 'val'), transforms=resize)
    if train_data.category_ids != val_data.category_ids:
        raise UsageError(f"training and validation data in '{folder}' do not have the same categories")
    if len(train_data) < args.batch_size:
        raise UsageError(f'--batch-size {args.batch_size} is more than the {len(train_data)} training images')
    return train_data, val_data


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
                f'tu-{args.backbone}', decoder_pyramid_channels=channels, decoder_segmentation_channels=channels,
                **common)
        self.normalize = v2.Normalize(  # as the backbone wants it
            getattr(cfg, 'mean', IMAGENET_DEFAULT_MEAN), getattr(cfg, 'std', IMAGENET_DEFAULT_STD))

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(self.normalize(images))
        return logits if isinstance(logits, dict) else {'out': logits}


def build_network(args: argparse.Namespace, num_classes: int) -> Network:
    try:
        return Network(args, num_classes).to(args.device)
    except (RuntimeError, TypeError, ValueError) as e:
        raise UsageError(f'cannot build {args.model} with --backbone {args.backbone}: {first_line(e)}') from e


def train_epoch(network: Network, loader: DataLoader, optimizer, schedule, device: str) -> float:
    """One pass over the data; returns the mean loss."""
    network.train()
    total = 0
    progress = tqdm(loader, desc='training', unit='batch', leave=False)
    for step, (images, labels) in enumerate(progress, start=1):
        loss = sum(segmentation_losses(network(images.to(device)), labels.to(device), ignore_index=IGNORE).values())
        if not loss.isfinite():
            raise UsageError(f'the loss is {loss.item()}: try a lower --lr')
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        total += loss.item()
        progress.set_postfix(loss=f'{total / step:.3f}')
    return total / len(loader)


@torch.inference_mode()
def evaluate(network: Network, data: CocoSemantic, device: str, workers: int = 0) -> dict[str, float]:
    """Scores, of one image at a time: attention sees the padding of a batch of images of different sizes."""
    scores = SegmentationScores(data.classes, ignore_index=IGNORE)
    loader = DataLoader(data, batch_size=1, num_workers=workers, collate_fn=collate)
    network.eval()
    for images, labels in tqdm(loader, desc='validation', unit='image', leave=False):
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
        save_image(make_grid([enlarge(picture) for picture in pictures], nrow=6), unfinished)


def enlarge(picture: torch.Tensor) -> torch.Tensor:
    """Small pictures several times as large, for the eye."""
    scale = math.ceil(192 / max(picture.shape))
    return picture.repeat_interleave(scale, -1).repeat_interleave(scale, -2)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains and returns the last scores."""
    args = parse_args(argv)
    check_args(args)
    torch.manual_seed(args.seed)
    train_data, val_data = load_data(args)
    network = build_network(args, len(train_data.classes))
    train_loader = DataLoader(
        train_data, batch_size=args.batch_size, shuffle=True, drop_last=True, num_workers=args.workers,
        collate_fn=collate)
    optimizer = torch.optim.AdamW(network.parameters(), args.lr, weight_decay=args.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.epochs * len(train_loader), pct_start=0.1)
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(network, train_loader, optimizer, schedule, args.device)
        scores = evaluate(network, val_data, args.device, args.workers)
        figures = '  '.join(f'{name} {100 * score:.1f}' for name, score in scores.items())
        print(f'epoch {epoch}/{args.epochs}  loss {loss:.3f}  {figures}', flush=True)
    with write_beside(args.output / 'last.pth') as unfinished:
        torch.save({'model': network.model.state_dict(), 'classes': train_data.classes, 'scores': scores}, unfinished)
    draw_predictions(network, val_data, args.output / 'predictions.png', args.device)
    print(f'weights and a picture of predictions are in {args.output}')
    return scores


if __name__ == '__main__':
    sys.exit(report_usage_errors(lambda: main() and None))
