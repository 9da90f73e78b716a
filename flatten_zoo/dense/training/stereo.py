"""Stereo matching."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn
from torch.utils.data import default_collate
from torchvision.transforms import v2

from flatten_zoo.errors import UsageError
from flatten_zoo.figures import save_figure
from flatten_zoo.training.options.definitions import COUNT
from flatten_zoo.training.options.parser import OptionParser

from ...samples.stereo import write_stereo_pairs
from ..psmnet import psmnet
from ..stereo import DisparityScores, stereo_losses
from ..stereo_data import SceneFlowPairs
from .task import Task, check_folder, optional

__all__ = ['Stereo']


class Network(nn.Module):
    """Images from 0 to 1 in, disparities out."""

    def __init__(self, max_disparity: int, attention: str | None):
        super().__init__()
        self.model = psmnet(max_disparity, attention)
        self.normalize = v2.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.model(self.normalize(left), self.normalize(right))


class Stereo(Task):
    """Train a PSMNet with efficient attention on its cost volume.

    Without --data it learns generated pairs, which takes minutes on a CPU. Otherwise --data is a folder in the layout
    of FlyingThings3D, with TRAIN and TEST.
    """

    name = 'stereo'
    best, best_is_low = 'EPE', True
    defaults = {'epochs': 4, 'batch_size': 2, 'lr': 1e-3, 'clip_grad': 5.0}

    @classmethod
    def add_options(cls, parser: OptionParser) -> None:
        group = parser.add_argument_group('model')
        group.add_argument('--attention', default='ea', choices=('ea', 'nl', 'none'), help='on the cost volume')
        group.add_argument('--max-disparity', type=COUNT, default=16, metavar='D', help='a multiple of 4')
        group = parser.add_argument_group('data')
        group.add_argument('--data', metavar='FOLDER', help='pairs as in FlyingThings3D; None: generated ones')
        group.add_argument('--pairs', type=COUNT, default=400, metavar='N', help='generated pairs to train on')
        group.add_argument(
            '--image-size',
            nargs=2,
            type=COUNT,
            default=[64, 128],
            metavar='N',
            help='height and width of generated pairs, and of the parts of pairs that are trained on',
        )

    def __init__(self, args: argparse.Namespace, trained: bool = False):
        self.args = args
        try:
            self.network = Network(args.max_disparity, optional(args.attention))
        except ValueError as e:
            raise UsageError(f'--max-disparity: {e}') from e
        self.folder = check_folder(args.data) if args.data else self._generated()
        self.val_data = SceneFlowPairs(self.folder, 'TEST')
        self.facts = {}

    def _generated(self) -> Path:
        args = self.args
        height, width = args.image_size
        folder = Path(args.output) / f'pairs-{height}-{width}-{args.max_disparity}-{args.pairs}'
        write_stereo_pairs(folder, args.pairs, max(1, args.pairs // 8), (height, width), args.max_disparity)
        return folder

    def train_data(self) -> SceneFlowPairs:
        data = SceneFlowPairs(self.folder, 'TRAIN', transforms=v2.RandomCrop(self.args.image_size))
        size = self.val_data[0][0].shape[1:]
        if any(part > side for part, side in zip(self.args.image_size, size, strict=True)):
            part = ' '.join(map(str, self.args.image_size))
            raise UsageError(
                f"--image-size {part} is more than the {size[0]} × {size[1]} of the images in '{self.folder}'"
            )
        return data

    @staticmethod
    def collate(items: list[Any]) -> tuple:
        return tuple(default_collate(items))

    def losses(self, network: Callable, batch: tuple) -> dict[str, torch.Tensor]:
        left, right, target = batch
        return stereo_losses(network(left, right), target['disparity'], self.args.max_disparity)

    def new_scores(self) -> DisparityScores:
        return DisparityScores(self.args.max_disparity)

    def score(self, network: Callable, batch: tuple, scores: DisparityScores) -> None:
        left, right, target = batch
        scores.add(network(left, right), target['disparity'])

    def show(self, scores: dict[str, float]) -> str:
        return f'EPE {scores["EPE"]:.2f} px  off by > 3 px {scores[">3 px"]:.1%}'

    @torch.inference_mode()
    def draw(self, network: nn.Module, device: torch.device, path: Path, count: int = 4) -> None:
        """Left images, true disparities, those found, and how far off these are."""
        count = min(count, len(self.val_data))
        figure = Figure(figsize=(10, 1.5 * count), layout='constrained')
        axes = figure.subplots(count, 4, squeeze=False)
        for row, i in zip(axes, range(count), strict=True):
            left, right, target = self.val_data[i]
            found = network.eval()(left[None].to(device), right[None].to(device))[0].float().cpu().numpy()
            truth = target['disparity'].numpy()
            row[0].imshow(left.permute(1, 2, 0).numpy())
            row[1].imshow(truth, vmin=0, vmax=self.args.max_disparity)
            disparity = row[2].imshow(found, vmin=0, vmax=self.args.max_disparity)
            error = row[3].imshow(abs(found - truth), cmap='magma', vmin=0, vmax=3)
            figure.colorbar(disparity, ax=row[2])
            figure.colorbar(error, ax=row[3])
        for ax, title in zip(axes[0], ('left image', 'true disparity', 'predicted', 'error'), strict=True):
            ax.set_title(title)
        for ax in axes.flat:
            ax.axis('off')
        save_figure(figure, path)
