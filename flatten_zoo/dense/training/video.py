"""Actions in videos: what is done, from when to when."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torchvision.transforms import v2

from flatten_zoo.errors import UsageError, first_line
from flatten_zoo.figures import save_figure
from flatten_zoo.training.options.definitions import COUNT, FRACTION, POSITIVE
from flatten_zoo.training.options.parser import OptionParser

from ...samples.clips import write_clips
from ..pictures import colour_of
from ..rc3d import rc3d, temporal_nms
from ..temporal_scores import TemporalScores
from ..video_data import ActivityNetClips
from .task import Task, check_folder, optional

__all__ = ['Video']

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
        found = {name: x.cpu() for name, x in found.items()}
        found['segments'] = found['segments'].double() / target['fps'] + target['start']
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
    defaults = {'epochs': 4, 'batch_size': 2, 'lr': 5e-4, 'clip_grad': 5.0}

    @classmethod
    def add_options(cls, parser: OptionParser) -> None:
        group = parser.add_argument_group('model')
        group.add_argument(
            '--backbone', default='r3d_18', choices=('r3d_18', 'mc3_18', 'r2plus1d_18'), help='video network'
        )
        group.add_argument(
            '--attention', default='ea', choices=('ea', 'nl', 'none'), help='after its third and fourth stage'
        )
        group.add_argument('--pretrained', action='store_true', help='start from its Kinetics weights')
        group.add_argument(
            '--anchor-scales',
            nargs='+',
            type=POSITIVE,
            default=[2.0, 4.0, 5.0, 6.0, 8.0, 9.0, 10.0, 12.0, 14.0, 16.0],
            metavar='X',
            help='lengths of the anchors in strides of 8 frames',
        )
        group.add_argument(
            '--nms-thresh', type=FRACTION, default=0.4, metavar='X', help='overlap of detections that is too much'
        )
        group = parser.add_argument_group('data')
        group.add_argument('--data', metavar='FOLDER', help="videos as ActivityNet's; None: generated clips")
        group.add_argument('--clips', type=COUNT, default=240, metavar='N', help='generated clips to train on')
        group.add_argument('--frames', type=COUNT, default=64, metavar='N', help='of a clip')
        group.add_argument('--fps', type=POSITIVE, metavar='X', help="frames a second; None: each video's own")
        group.add_argument('--image-size', type=COUNT, default=48, metavar='N', help='side of the frames')

    def __init__(self, args: argparse.Namespace, trained: bool = False):
        self.args = args
        self.folder = check_folder(args.data) if args.data else self._generated()
        self.val_data = self._open('validation', v2.CenterCrop(args.image_size))
        try:
            self.network = rc3d(
                args.backbone,
                len(self.val_data.classes),
                optional(args.attention),
                weights_backbone='DEFAULT' if args.pretrained and not trained else None,
                anchor_scales=args.anchor_scales,
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

    def _open(self, subset: str, *transforms: Callable) -> ActivityNetClips:
        args = self.args
        resized = v2.Compose([v2.Resize(args.image_size), *transforms])
        return ActivityNetClips(self.folder, subset, args.frames, fps=args.fps, transforms=resized)

    def train_data(self) -> ActivityNetClips:
        return self._open('training', v2.RandomCrop(self.args.image_size), v2.RandomHorizontalFlip())

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
        """True actions and those found in the first videos, along their time."""
        network.eval()
        data, scores, videos = self.val_data, self.new_scores(), self.val_data.videos[:count]
        for index in range(len(data)):
            clip, target = data[index]
            if target['video'] not in videos:  # they are in the order of the videos
                break
            scores.add(target, network([clip.to(device)])[0])
        figure = Figure(figsize=(10, 1.2 * len(videos)), layout='constrained')
        for ax, video in zip(figure.subplots(len(videos), squeeze=False)[:, 0], videos, strict=True):
            found = scores.found(video)
            found = {name: x[found['scores'] > 0.5] for name, x in found.items()}
            for row, actions in enumerate((found, data.truth(video))):
                for (start, end), label in zip(actions['segments'].tolist(), actions['labels'].tolist(), strict=True):
                    colour = [c / 255 for c in colour_of(label)]
                    ax.broken_barh([(start, end - start)], (row - 0.4, 0.8), color=colour, alpha=0.7)
                    ax.text(start, row, data.classes[label], va='center', fontsize='small')
            ax.set(yticks=[0, 1], yticklabels=['predicted', 'true'], ylim=(-0.6, 1.6), title=video)
        figure.axes[-1].set_xlabel('time / s')
        save_figure(figure, path)
