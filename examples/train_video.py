"""Train temporal action detection with efficient attention in the trunk.

Without --data an R-C3D learns generated clips, in which shapes move, turn and blink for a while; it takes minutes on a
CPU. Otherwise --data is a folder with videos/ and annotations.json in ActivityNet's format. The paper's setting on
THUMOS14 is --backbone r3d_18 --weights DEFAULT --frames 768 --fps 25.
"""

import argparse
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path

import torch
from dense_training import add_option, add_training_options, check_options, one_at_a_time, save_network, train
from matplotlib.figure import Figure
from torch import nn
from torchvision.models.video.resnet import BasicBlock, Conv3DSimple
from torchvision.ops.misc import Conv3dNormActivation
from torchvision.transforms import v2

from flatten_zoo.dense import RC3D, ActivityNetClips, TemporalScores, rc3d, temporal_nms, write_clips
from flatten_zoo.errors import UsageError, report_usage_errors
from flatten_zoo.figures import save_figure

NMS_THRESH = 0.4


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = partial(add_option, parser.add_argument_group('model'))
    add('--backbone', 'a video network of torchvision, or a small one of their make', default='small', metavar='NAME')
    add('--weights', "the backbone's Kinetics weights, as torchvision names them", metavar='NAME')
    add('--attention', 'after the third and fourth stage', default='ea', choices=['ea', 'nl', 'none'])
    add('--frames', 'of a clip, and of generated ones', type=int, default=64, metavar='T')
    add('--fps', "frames a second; each video's own by default", type=float)
    add('--image-size', 'height and width of the frames, and of generated ones', type=int, default=32, metavar='SIDE')
    add('--train-subset', 'of the annotations', default='training', metavar='NAME')
    add('--val-subset', 'of the annotations', default='validation', metavar='NAME')
    add_training_options(
        parser, "ActivityNet's format", 'clips', 240, epochs=8, batch_size=2, lr=2e-3, output='output/video'
    )
    return parser.parse_args(argv)


def load_data(args: argparse.Namespace) -> tuple[ActivityNetClips, ActivityNetClips]:
    """Clips to train on, and others that overlap by half."""
    folder = args.data
    if folder is None:
        folder = args.output / f'clips-{args.frames}-{args.image_size}-{args.clips}'
        write_clips(folder, args.clips, max(1, args.clips // 4), args.frames, args.image_size)
    size = v2.Resize((args.image_size, args.image_size))
    data = ActivityNetClips(folder, args.train_subset, args.frames, fps=args.fps, transforms=size)
    step = max(1, args.frames // 2)
    return data, ActivityNetClips(folder, args.val_subset, args.frames, step, args.fps, transforms=size)


class Differences(nn.Module):
    """From one frame to the next, of B×3×T×H×W; 0 of the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.diff(dim=2, prepend=x[:, :, :1])


def small_trunk(width: int = 16) -> nn.Module:
    """torchvision's `r3d_18`, narrower, with one block a stage and a smaller stem, on differences of frames.

    From nothing and in minutes only these are learned from: of shapes of any colour a frame says little.
    """
    stem = nn.Sequential(Differences(), *Conv3dNormActivation(3, width, (3, 5, 5), (1, 2, 2)))
    parts = OrderedDict(stem=stem)
    dim = width
    for stage in range(1, 5):
        out_dim, stride = width * 2 ** (stage - 1), 1 if stage == 1 else 2
        shortcut = None
        if stage > 1:
            shortcut = nn.Sequential(nn.Conv3d(dim, out_dim, 1, stride, bias=False), nn.BatchNorm3d(out_dim))
        parts[f'layer{stage}'] = nn.Sequential(BasicBlock(dim, out_dim, Conv3DSimple, stride, shortcut))
        dim = out_dim
    return nn.Sequential(parts)


def build_network(args: argparse.Namespace, num_classes: int) -> RC3D:
    torch.manual_seed(args.seed)
    kwargs = {} if args.data else {'anchor_scales': (1, 1.5, 2, 3, 4)}  # of clips that are some seconds long
    try:
        return rc3d(
            small_trunk() if args.backbone == 'small' else args.backbone,
            num_classes,
            None if args.attention == 'none' else args.attention,
            weights_backbone=args.weights,
            nms_thresh=NMS_THRESH,
            **kwargs,
        ).to(args.device)
    except ValueError as e:
        raise UsageError(f'--backbone {args.backbone}: {e}') from e


@torch.inference_mode()
def detect(model: RC3D, data: ActivityNetClips, args: argparse.Namespace) -> dict[str, dict[str, torch.Tensor]]:
    """What is found in each video, in seconds: detections of its clips together, suppressed where they overlap."""
    model.eval()
    parts: dict[str, list[dict[str, torch.Tensor]]] = {video: [] for video in data.videos}
    for (clip,), (target,) in one_at_a_time(data, args.workers, collate):
        (found,) = model([clip.to(args.device)])
        found = {name: x.cpu() for name, x in found.items()}
        found['segments'] = found['segments'] / target['fps'] + target['start']
        parts[target['video']].append(found)
    result = {}
    for video, some in parts.items():
        found = {name: torch.cat([one[name] for one in some]) for name in ('segments', 'labels', 'scores')}
        keep = temporal_nms(found['segments'], found['scores'], found['labels'], NMS_THRESH)
        result[video] = {name: x[keep] for name, x in found.items()}
    return result


def evaluate(model: RC3D, data: ActivityNetClips, args: argparse.Namespace) -> dict[str, float]:
    scores = TemporalScores(len(data.classes))
    for video, found in detect(model, data, args).items():
        scores.add(found, data.truth(video))
    return scores.compute()


def draw_predictions(model: RC3D, data: ActivityNetClips, path: Path, args: argparse.Namespace) -> None:
    """A picture of the first videos: true intervals and those found on a time line, a line for each class."""
    videos = data.videos[:6]
    found = detect(model, data, args)
    figure = Figure(figsize=(9, 0.4 + 1.1 * len(videos)), layout='constrained')
    axes = figure.subplots(len(videos), 1, squeeze=False)[:, 0]
    rows = len(data.classes) - 1
    for ax, video in zip(axes, videos, strict=True):
        truth = data.truth(video)
        for (start, end), label in zip(truth['segments'].tolist(), truth['labels'].tolist(), strict=True):
            ax.barh(label - 0.2, end - start, 0.35, start, color='tab:green', label='true')
        some = found[video]
        for (start, end), label, score in zip(
            some['segments'].tolist(), some['labels'].tolist(), some['scores'].tolist(), strict=True
        ):
            if score > 0.5:
                ax.barh(label + 0.2, end - start, 0.35, start, color='tab:blue', label='predicted')
                ax.text(start, label + 0.2, f' {score:.2f}', va='center', fontsize='x-small', color='white')
        ax.set_yticks(range(1, rows + 1), data.classes[1:])
        ax.set(ylim=(rows + 0.6, 0.4), xlim=(0, data.duration(video)))
        ax.set_title(video, fontsize='small', loc='left')
    axes[-1].set_xlabel('seconds')
    names = {name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(names.values(), names.keys(), loc='outside upper right', ncols=2)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains and returns the last scores."""
    args = parse_args(argv)
    check_options(args, 'clips', 'frames', 'image_size', *(['fps'] if args.fps is not None else []))
    data, held_out = load_data(args)
    model = build_network(args, len(data.classes))
    torch.manual_seed(args.seed)

    def losses(clips: tuple[torch.Tensor, ...], targets: tuple[dict, ...]) -> dict[str, torch.Tensor]:
        moved = [{name: target[name].to(args.device) for name in ('segments', 'labels')} for target in targets]
        return model([clip.to(args.device) for clip in clips], moved)

    scores = train(args, model, losses, lambda: evaluate(model, held_out, args), data, collate, clip=5.0)
    save_network(args, model, classes=data.classes, scores=scores)
    draw_predictions(model, held_out, args.output / 'predictions.png', args)
    print(f'weights and a picture of predictions are in {args.output}')
    return scores


def collate(batch):
    return tuple(zip(*batch, strict=True))


if __name__ == '__main__':
    sys.exit(report_usage_errors(lambda: main() and None))
