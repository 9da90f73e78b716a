"""Actions in videos: what is done, from when to when."""

import argparse
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torchvision.models.video.resnet import BasicBlock, Conv3DSimple
from torchvision.ops.misc import Conv3dNormActivation
from torchvision.transforms import v2

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.figures import save_figure
from flatten_zoo.training.options.definitions import COUNT, FRACTION, POSITIVE
from flatten_zoo.training.options.parser import OptionParser

from ...samples.clips import write_clips
from ..rc3d import rc3d, temporal_nms
from ..temporal_scores import TemporalScores
from ..video_data import ActivityNetClips
from .task import Task, check_folder, optional

__all__ = ['Video']

THUMOS_SCALES = (2, 4, 5, 6, 8, 9, 10, 12, 14, 16)  # those of `rc3d`
GENERATED_SCALES = (1, 1.5, 2, 3, 4)

Found = dict[str, torch.Tensor]  # segments in seconds, labels, scores


class VideoScores:
    """Scores of videos, whose clips may have been looked at by several processes.

    Args:
        data: The clips.
        nms_thresh: Of two detections of a class in a video that overlap more, the weaker one is left out.
    """

    def __init__(self, data: ActivityNetClips, nms_thresh: float):
        self.data = data
        self.nms_thresh = nms_thresh
        self._found: dict[str, list[Found]] = {}

    def add(self, target: dict[str, Any], found: Found) -> None:
        """Adds what was found in a clip, in its frames."""
        found = {name: x.cpu() if name == 'labels' else x.double().cpu() for name, x in found.items()}
        found['segments'] = found['segments'] / target['fps'] + target['start']
        self._found.setdefault(target['video'], []).append(found)

    def state(self) -> dict[str, list[Found]]:
        """What has been added, to send to another process for `merge`."""
        return self._found

    def merge(self, state: dict[str, list[Found]]) -> None:
        """Adds what another process has added, of other clips."""
        for video, found in state.items():
            self._found.setdefault(video, []).extend(found)

    def found(self, video: str) -> Found:
        """What there is in a video, of all its clips together."""
        whole = {name: torch.cat([clip[name] for clip in self._found[video]]) for name in self._found[video][0]}
        kept = temporal_nms(whole['segments'], whole['scores'], whole['labels'], self.nms_thresh)
        return {name: x[kept] for name, x in whole.items()}

    def compute(self) -> dict[str, float]:
        """Those of `TemporalScores`."""
        scores = TemporalScores(len(self.data.classes))
        for video in sorted(self._found):
            scores.add(self.found(video), self.data.truth(video))
        return scores.compute()


class Video(Task):
    """Train an R-C3D with efficient attention on the maps of its trunk to find actions in videos.

    Without --data it learns generated clips. Otherwise --data is a folder with videos/ and annotations.json in
    ActivityNet's format.
    """

    name = 'video'
    best = 'mAP@0.5'
    defaults = {'epochs': 6, 'batch_size': 2, 'lr': 1e-3, 'clip_grad': 5.0}

    @classmethod
    def add_options(cls, parser: OptionParser) -> None:
        group = parser.add_argument_group('model')
        group.add_argument(
            '--backbone',
            default='small',
            choices=('small', 'r3d_18', 'mc3_18', 'r2plus1d_18'),
            help='video network of torchvision, or a small one of their make',
        )
        group.add_argument(
            '--attention', default='ea', choices=('ea', 'nl', 'none'), help='after its third and fourth stage'
        )
        group.add_argument('--pretrained', action='store_true', help='start from its Kinetics weights')
        group.add_argument(
            '--anchor-scales',
            nargs='+',
            type=POSITIVE,
            metavar='X',
            help="lengths of the anchors in strides of 8 frames; None: R-C3D's for THUMOS14, 2 4 5 6 8 9 10 12 14 16, "
            'for generated clips 1 1.5 2 3 4',
        )
        group.add_argument(
            '--nms-thresh', type=FRACTION, default=0.4, metavar='X', help='overlap of detections that is too much'
        )
        group = parser.add_argument_group('data')
        group.add_argument('--data', metavar='FOLDER', help="videos as ActivityNet's; None: generated clips")
        group.add_argument('--clips', type=COUNT, default=240, metavar='N', help='generated clips to train on')
        group.add_argument('--frames', type=COUNT, default=64, metavar='N', help='of a clip')
        group.add_argument('--fps', type=POSITIVE, metavar='X', help="frames a second; None: each video's own")
        group.add_argument('--image-size', type=COUNT, default=32, metavar='N', help='height and width of the frames')
        group.add_argument('--train-subset', default='training', metavar='NAME', help='of the annotations')
        group.add_argument('--val-subset', default='validation', metavar='NAME', help='of the annotations')

    def __init__(self, args: argparse.Namespace, trained: bool = False):
        self.args = args
        self.folder = check_folder(args.data) if args.data else self._generated()
        # clips that overlap by half
        self.val_data = self._open(args.val_subset, max(1, args.frames // 2))
        if args.backbone == 'small' and args.pretrained:
            raise UsageError('--backbone small has no pretrained weights: leave out --pretrained')
        scales = args.anchor_scales or (THUMOS_SCALES if args.data else GENERATED_SCALES)
        try:
            self.network = rc3d(
                small_trunk() if args.backbone == 'small' else args.backbone,
                len(self.val_data.classes),
                optional(args.attention),
                weights_backbone='DEFAULT' if args.pretrained and not trained else None,
                anchor_scales=scales,
                nms_thresh=args.nms_thresh,
            )
        except ValueError as e:
            raise UsageError(f'cannot build the network with --backbone {args.backbone}: {first_line(e)}') from e
        self.facts = {'classes': self.val_data.classes}

    def _generated(self) -> Path:
        args = self.args
        folder = Path(args.output) / f'clips-{args.image_size}-{args.frames}-{args.clips}'
        write_clips(folder, args.clips, max(1, args.clips // 4), args.frames, args.image_size)
        return folder

    def _open(self, subset: str, step: int | None = None) -> ActivityNetClips:
        args = self.args
        size = v2.Resize((args.image_size, args.image_size))
        return ActivityNetClips(self.folder, subset, args.frames, step, args.fps, transforms=size)

    def train_data(self) -> ActivityNetClips:
        return self._open(self.args.train_subset)

    @staticmethod
    def collate(items: list[Any]) -> tuple:
        return tuple(zip(*items, strict=True))

    def losses(self, network: Callable, batch: tuple) -> dict[str, torch.Tensor]:
        clips, targets = batch
        return network(list(clips), list(targets))

    def new_scores(self) -> VideoScores:
        return VideoScores(self.val_data, self.args.nms_thresh)

    def score(self, network: Callable, batch: tuple, scores: VideoScores) -> None:
        clips, targets = batch
        for target, found in zip(targets, network(list(clips)), strict=True):
            scores.add(target, found)

    def show(self, scores: dict[str, float]) -> str:
        return '  '.join(f'{name} {100 * score:.1f}' for name, score in scores.items())

    @torch.inference_mode()
    def draw(self, network: nn.Module, device: torch.device, path: Path, count: int = 6) -> None:
        """True actions and those found in the first videos on a time line, a row for each class."""
        network.eval()
        data, scores, videos = self.val_data, self.new_scores(), self.val_data.videos[:count]
        for index in range(len(data)):
            clip, target = data[index]
            if target['video'] not in videos:  # clips are in the order of the videos
                break
            scores.add(target, network([clip.to(device)])[0])
        figure = Figure(figsize=(9, 0.4 + 1.1 * len(videos)), layout='constrained')
        for ax, video in zip(figure.subplots(len(videos), squeeze=False)[:, 0], videos, strict=True):
            found = scores.found(video)
            found = {name: x[found['scores'] > 0.5] for name, x in found.items()}
            for name, actions, shift, colour in (
                ('true', data.truth(video), -0.2, 'tab:green'),
                ('predicted', found, 0.2, 'tab:blue'),
            ):
                starts, ends = actions['segments'].T
                ax.barh(actions['labels'] + shift, ends - starts, 0.35, starts, color=colour, label=name)
            ax.set_yticks(range(1, len(data.classes)), data.classes[1:])
            ax.set(ylim=(len(data.classes) - 0.4, 0.4), xlim=(0, data.duration(video)))
            ax.set_title(video, fontsize='small', loc='left')
        figure.axes[-1].set_xlabel('seconds')
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc='outside upper right', ncols=2)
        save_figure(figure, path)


class Differences(nn.Module):
    """From one frame to the next, of B×3×T×H×W; 0 of the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.diff(dim=2, prepend=x[:, :, :1])


def small_trunk(width: int = 16) -> nn.Module:
    """torchvision's `r3d_18`, narrower, with one block a stage and a smaller stem, on differences of frames.

    From nothing and in minutes only these are learned from: of shapes of any colour a frame says little.
    """
    stem = nn.Sequential(Differences(), *Conv3dNormActivation(3, width, (3, 5, 5), (1, 2, 2)))
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    dim = width
    for stage in range(1, 5):
        out_dim, stride = width * 2 ** (stage - 1), 1 if stage == 1 else 2
        shortcut = None
        if stage > 1:
            shortcut = nn.Sequential(nn.Conv3d(dim, out_dim, 1, stride, bias=False), nn.BatchNorm3d(out_dim))
        parts[f'layer{stage}'] = nn.Sequential(BasicBlock(dim, out_dim, Conv3DSimple, stride, shortcut))
        dim = out_dim
    return nn.Sequential(parts)
