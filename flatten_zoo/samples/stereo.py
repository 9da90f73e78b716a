"""Generated pairs of images with true disparities, in the layout of Scene Flow or of KITTI.

Textured discs and rectangles before a textured background, all of them slanted planes. Both images are drawn from the
planes, so that disparities are exact to a fraction of a pixel, and so is what one image shows and the other does not.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from flatten_zoo.errors import UsageError, report_usage_errors
from flatten_zoo.files import write_beside

__all__ = ['LAYOUTS', 'main', 'write_stereo_pairs']

LAYOUTS = ('sceneflow', 'kitti')
_MIN_SIDE = 32
_MAX_SLANT = 0.1  # change of a disparity from one pixel to the next


class Scene(NamedTuple):
    """One pair as it is drawn.

    Attributes:
        left, right: Images, H×W×3 of 8 bits.
        disparity, right_disparity: Of the pixels of either image, H×W.
        occluded: Which pixels of the left image the right one does not show, H×W.
    """

    left: np.ndarray
    right: np.ndarray
    disparity: np.ndarray
    right_disparity: np.ndarray
    occluded: np.ndarray


def write_stereo_pairs(
    folder: str | Path,
    num_pairs: int = 240,
    held_out: int = 40,
    image_size: tuple[int, int] = (64, 128),
    max_disparity: int = 32,
    layout: str = 'sceneflow',
    seed: int = 0,
) -> bool:
    """Write pairs to train on and others, each with its disparities.

    With the layout 'sceneflow' they are in `TRAIN` and `TEST` as those of FlyingThings3D, for `SceneFlowPairs`; with
    'kitti' in `training` and `testing` as those of KITTI 2015, for `KittiPairs` (to a 256th of a pixel). The same
    arguments always give the same data, and pair I is the same however many there are. The folder appears whole or not
    at all, and one that already holds this very data is left as it is.

    Args:
        folder: Folder to make.
        num_pairs: Pairs to train on.
        held_out: Other pairs.
        image_size: Height and width of the images in pixels, at least 32.
        max_disparity: All disparities are below it; from 8 to the width.
        layout: 'sceneflow' or 'kitti'.
        seed: Two seeds have no pair in common.

    Returns:
        Whether it was written now.

    Raises:
        UsageError: An argument is out of its range, or the folder exists and holds something else.
    """
    folder = Path(folder)
    for name, value, lowest in (('num_pairs', num_pairs, 1), ('held_out', held_out, 1), ('seed', seed, 0)):
        if value < lowest:
            raise UsageError(f'{name} must be at least {lowest}, got {value}')
    if min(image_size) < _MIN_SIDE:
        raise UsageError(
            f'image_size must be at least {_MIN_SIDE} × {_MIN_SIDE}, got {image_size[0]} × {image_size[1]}'
        )
    if not 8 <= max_disparity <= image_size[1]:
        raise UsageError(f'max_disparity must be from 8 to the width {image_size[1]}, got {max_disparity}')
    if layout not in LAYOUTS:
        raise UsageError(f'layout must be one of {LAYOUTS}, got {layout!r}')
    info = {
        'description': 'generated stereo pairs',
        'num_pairs': num_pairs,
        'held_out': held_out,
        'image_size': list(image_size),
        'max_disparity': max_disparity,
        'layout': layout,
        'seed': seed,
    }
    if folder.exists():
        if _info(folder) != info:
            raise UsageError(f"'{folder}' exists but does not hold these pairs: remove it or give another folder")
        return False
    write = _write_scene_flow if layout == 'sceneflow' else _write_kitti
    with write_beside(folder) as temporary:
        for split, count in enumerate((num_pairs, held_out)):
            for i in range(count):
                scene = _draw(np.random.default_rng([seed, split, i]), image_size, max_disparity)
                write(temporary, split, i, scene)
        (temporary / 'pairs.json').write_text(json.dumps(info))
    return True


def _info(folder: Path) -> dict[str, Any] | None:
    """What the folder says of itself; None where it says nothing."""
    try:
        return json.loads((folder / 'pairs.json').read_text())
    except (OSError, ValueError):
        return None


def _write_scene_flow(folder: Path, split: int, index: int, scene: Scene) -> None:
    place = Path(('TRAIN', 'TEST')[split], 'A')
    for side, image, disparity in (
        ('left', scene.left, scene.disparity),
        ('right', scene.right, scene.right_disparity),
    ):
        name = place / side / f'{index:04d}'
        _save(image, folder / 'frames_cleanpass' / name.with_suffix('.png'))
        path = folder / 'disparity' / name.with_suffix('.pfm')
        path.parent.mkdir(parents=True, exist_ok=True)
        header = b'Pf\n%d %d\n-1.0\n' % disparity.shape[::-1]  # negative: little-endian
        path.write_bytes(header + disparity[::-1].astype('<f4').tobytes())  # the last row is the first


def _write_kitti(folder: Path, split: int, index: int, scene: Scene) -> None:
    # 0 stands for what was not measured: the least disparity that can be told from it is that of 1
    values = np.rint(scene.disparity * 256).clip(1, 65535).astype(np.uint16)
    files = {
        'image_2': scene.left,
        'image_3': scene.right,
        'disp_occ_0': values,
        'disp_noc_0': np.where(scene.occluded, 0, values).astype(np.uint16),
    }
    for place, pixels in files.items():
        _save(pixels, folder / ('training', 'testing')[split] / place / f'{index:06d}_10.png')


def _save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def _draw(rng: np.random.Generator, image_size: tuple[int, int], max_disparity: int) -> Scene:
    """One pair: planes over each other, the nearer ones on top, seen from the left and from the right.

    A plane has disparity a + b·x + c·y at its coordinates (x, y), which are those of the left image.
    """
    height, width = image_size
    y, x = np.mgrid[:height, :width].astype(float)
    # of both images the colours, disparities and numbers of the planes that they show
    left, right = ([np.zeros((height, width, 3)), np.zeros((height, width)), np.zeros((height, width))] for _ in '12')
    near = np.sort(rng.uniform(0.15, 0.85, size=rng.integers(3, 7)))
    for number, share in enumerate([rng.uniform(0, 0.1), *near]):
        centre = rng.uniform(0, [width, height])
        radius = rng.uniform(0.2, 0.4) * min(height, width)
        b, c = rng.uniform(-1, 1, size=2) * min(_MAX_SLANT, 0.07 * max_disparity / radius) * (number > 0)
        a = share * max_disparity - b * centre[0] - c * centre[1]
        texture = _texture(rng, height, width + max_disparity)
        shape = _shape(rng, centre, radius) if number else None
        # pixel x' of the right image shows the plane at x = x' + a + b·x + c·y
        for view, u in ((left, x), (right, (x + a + c * y) / (1 - b))):
            shown = np.full(u.shape, True) if shape is None else shape(u, y)
            for layer, values in zip(
                view, (_sample(texture, u), a + b * u + c * y, np.full_like(u, number)), strict=True
            ):
                layer[shown] = values[shown]
    images = np.stack([left[0], right[0]])
    images = np.rint((images + rng.normal(scale=0.01, size=images.shape)).clip(0, 1) * 255).astype(np.uint8)
    there = np.rint(x - left[1]).astype(int)
    occluded = (there < 0) | (np.take_along_axis(right[2], there.clip(0), axis=1) != left[2])
    return Scene(images[0], images[1], left[1], right[1], occluded)


def _texture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Random colours in small and in large squares, H×W×3."""
    texture = np.broadcast_to(rng.uniform(0.3, 0.7, size=3), (height, width, 3))
    for side in (4, 16):
        squares = rng.uniform(-0.25, 0.25, size=(height // side + 1, width // side + 1, 3))
        texture = texture + squares.repeat(side, 0).repeat(side, 1)[:height, :width]
    return texture


def _sample(texture: np.ndarray, u: np.ndarray) -> np.ndarray:
    """A texture's colours at the columns u, H×W, of its rows: between two columns their mean by distance."""
    first = np.floor(u).astype(int).clip(0, texture.shape[1] - 2)
    share = (u - first).clip(0, 1)[..., None]
    row = np.arange(len(u))[:, None]
    return (1 - share) * texture[row, first] + share * texture[row, first + 1]


def _shape(
    rng: np.random.Generator, centre: np.ndarray, radius: float
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Which points lie in a disc or a rotated rectangle around a centre, none of it further away than the radius."""
    x, y = centre
    angle = rng.uniform(0, 2 * np.pi) if rng.integers(2) else None
    half_height = rng.uniform(0.4, 0.7) * radius

    def inside(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        if angle is None:
            return np.hypot(u - x, v - y) <= radius
        along = np.cos(angle) * (u - x) + np.sin(angle) * (v - y)
        across = np.cos(angle) * (v - y) - np.sin(angle) * (u - x)
        return (np.abs(along) <= 0.7 * radius) & (np.abs(across) <= half_height)

    return inside


def main(argv: Sequence[str] | None = None) -> None:
    """Write pairs where the command line says."""
    parser = argparse.ArgumentParser(
        prog='python -m flatten_zoo.samples.stereo',
        description='Write generated stereo pairs with their disparities.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument('folder', help='folder to make')
    parser.add_argument('--pairs', type=int, default=240, metavar='N', help='pairs to train on')
    parser.add_argument('--held-out', type=int, default=40, metavar='N', help='other pairs')
    parser.add_argument('--image-size', type=int, nargs=2, default=[64, 128], metavar=('H', 'W'), help='in pixels')
    parser.add_argument('--max-disparity', type=int, default=32, metavar='D', help='all disparities are below it')
    parser.add_argument('--layout', choices=LAYOUTS, default='sceneflow', help='as which data set')
    parser.add_argument('--seed', type=int, default=0, help='of everything')
    args = parser.parse_args(argv)
    written = write_stereo_pairs(
        args.folder, args.pairs, args.held_out, tuple(args.image_size), args.max_disparity, args.layout, args.seed
    )
    done = 'written to' if written else 'already in'
    print(f'{args.pairs} training and {args.held_out} held-out stereo pairs {done} {args.folder}')


if __name__ == '__main__':
    sys.exit(report_usage_errors(main))
