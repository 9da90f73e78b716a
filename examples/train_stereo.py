"""Train stereo matching with efficient attention on the cost volume, and without it.

Without --data a PSMNet learns generated pairs, which takes minutes on a CPU. Otherwise --data is a folder in the layout
of FlyingThings3D, with TRAIN and TEST; the paper has --image-size 256 512 --max-disparity 192.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from dense_training import add_option, add_training_options, check_options, one_at_a_time, save_network, train
from matplotlib.figure import Figure
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn
from torch.utils.data import default_collate
from torchvision.transforms import v2

from flatten_zoo.dense import DisparityScores, SceneFlowPairs, psmnet, stereo_losses, write_stereo_pairs
from flatten_zoo.errors import UsageError, report_usage_errors
from flatten_zoo.figures import save_figure
from flatten_zoo.tables import as_text


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = partial(add_option, parser.add_argument_group('model'))
    choices = ['ea', 'nl', 'none']
    add(
        '--attention', 'one network each, of the same first weights', nargs='+', default=['ea', 'none'], choices=choices
    )
    add('--max-disparity', 'a multiple of 4', type=int, default=16, metavar='D')
    add('--image-size', 'of generated pairs, and of the parts trained on', type=int, nargs=2, default=[64, 128])
    add_training_options(
        parser, 'the layout of FlyingThings3D', 'pairs', 400, epochs=4, batch_size=2, lr=1e-3, output='output/stereo'
    )
    return parser.parse_args(argv)


def load_data(args: argparse.Namespace) -> tuple[SceneFlowPairs, SceneFlowPairs]:
    """Pairs to train on, cut at random to one size, and others as they are."""
    folder = args.data
    if folder is None:
        height, width = args.image_size
        folder = args.output / f'pairs-{height}-{width}-{args.max_disparity}-{args.pairs}'
        write_stereo_pairs(folder, args.pairs, max(1, args.pairs // 8), (height, width), args.max_disparity)
    held_out = SceneFlowPairs(folder, 'TEST')
    size = held_out[0][0].shape[1:]
    if any(part > side for part, side in zip(args.image_size, size, strict=True)):
        part = ' '.join(map(str, args.image_size))
        raise UsageError(f"--image-size {part} is more than the {size[0]} × {size[1]} of the images in '{folder}'")
    return SceneFlowPairs(folder, 'TRAIN', transforms=v2.RandomCrop(args.image_size)), held_out


class Network(nn.Module):
    """Images from 0 to 1 in, disparities out."""

    def __init__(self, args: argparse.Namespace, attention: str):
        super().__init__()
        self.model = psmnet(args.max_disparity, None if attention == 'none' else attention)
        self.normalize = v2.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.model(self.normalize(left), self.normalize(right))


@torch.inference_mode()
def evaluate(network: Network, data: SceneFlowPairs, args: argparse.Namespace) -> dict[str, float]:
    scores = DisparityScores(args.max_disparity)
    network.eval()
    for left, right, target in one_at_a_time(data, args.workers, default_collate):
        scores.add(network(left.to(args.device), right.to(args.device)).cpu(), target['disparity'])
    return scores.compute()


def in_pixels(scores: dict[str, float]) -> str:
    return f'EPE {scores["EPE"]:.2f} px  off by > 3 px {scores[">3 px"]:.1%}'


@torch.inference_mode()
def draw_predictions(network: Network, data: SceneFlowPairs, path: Path, args: argparse.Namespace) -> None:
    """A picture of the first pairs: left image, true disparities, those found, and how far off these are."""
    count = min(4, len(data))
    figure = Figure(figsize=(10, 1.5 * count), layout='constrained')
    axes = figure.subplots(count, 4, squeeze=False)
    for row, i in zip(axes, range(count), strict=True):
        left, right, target = data[i]
        found = network.eval()(left[None].to(args.device), right[None].to(args.device))[0].cpu().numpy()
        truth = target['disparity'].numpy()
        row[0].imshow(left.permute(1, 2, 0).numpy())
        row[1].imshow(truth, vmin=0, vmax=args.max_disparity)
        disparity = row[2].imshow(found, vmin=0, vmax=args.max_disparity)
        error = row[3].imshow(abs(found - truth), cmap='magma', vmin=0, vmax=3)
        figure.colorbar(disparity, ax=row[2])
        figure.colorbar(error, ax=row[3])
    for ax, title in zip(axes[0], ('left image', 'true disparity', 'predicted', 'error'), strict=True):
        ax.set_title(title)
    for ax in axes.flat:
        ax.axis('off')
    save_figure(figure, path)


def build_network(args: argparse.Namespace, attention: str) -> Network:
    torch.manual_seed(args.seed)
    try:
        return Network(args, attention).to(args.device)
    except ValueError as e:
        raise UsageError(f'--max-disparity: {e}') from e


def train_network(args: argparse.Namespace, network: Network, data: SceneFlowPairs, held_out: SceneFlowPairs) -> dict:
    """Train, write weights and a picture, and return the last scores."""
    torch.manual_seed(args.seed)

    def losses(left: torch.Tensor, right: torch.Tensor, target: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = network(left.to(args.device), right.to(args.device))
        return stereo_losses(outputs, target['disparity'].to(args.device), args.max_disparity)

    scores = train(
        args,
        network,
        losses,
        lambda: evaluate(network, held_out, args),
        data,
        default_collate,
        clip=5.0,
        show=in_pixels,
    )
    save_network(args, network.model, scores=scores)
    draw_predictions(network, held_out, args.output / 'predictions.png', args)
    return scores


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Trains and returns the last scores of each network."""
    args = parse_args(argv)
    runs = {name: argparse.Namespace(**{**vars(args), 'output': args.output / name}) for name in args.attention}
    for run in runs.values():
        check_options(run, 'pairs', 'max_disparity')
    networks = {name: build_network(args, name) for name in runs}
    data = load_data(args)
    scores = {}
    for name, run in runs.items():
        print(f'attention {name}')
        scores[name] = train_network(run, networks[name], *data)
    rows = [[name, f'{s["EPE"]:.2f} px', f'{s[">3 px"]:.1%}'] for name, s in scores.items()]
    print(as_text(['attention', 'EPE', 'off by > 3 px'], rows))
    print(f'weights and pictures of predictions are in {args.output}')
    return scores


if __name__ == '__main__':
    sys.exit(report_usage_errors(lambda: main() and None))
