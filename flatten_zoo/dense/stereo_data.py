"""Pairs of images with true disparities, in the layouts of Scene Flow and of KITTI."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from ..errors import UsageError
from ..images import image_suffixes, naming, open_image

__all__ = ['KittiPairs', 'SceneFlowPairs', 'StereoPairs', 'occluded_pixels']

# Of a file of one channel; the sign of the scale says in which order the bytes of the numbers after it are.
_PFM_HEADER = re.compile(rb'Pf\s+(\d{1,9})\s+(\d{1,9})\s+([-+]?[\d.]{1,40}(?:[eE][-+]?\d{1,9})?)[ \t]*\r?\n')


class StereoPairs(Dataset):
    """Base of the readers, which differ in where the files of a pair are and in what its disparities are made of.

    An item is the left image, the right one, and a dictionary. The images are 3×H×W, float32, from 0 to 1. The
    dictionary has `disparity`, H×W, float32, in pixels of the left image: its pixel x is pixel x - disparity of the
    right one; NaN where that is not known; and `occluded`, H×W, bool: which of these the right image does not show.
    All are `tv_tensors`.

    That all files of a pair are there and of one size is checked when the data are opened.

    Args:
        pairs: The files of each pair: 'left', 'right', 'disparity' and others.
        transforms: Called with the two images and the dictionary, as the transforms of `torchvision.transforms.v2`.

    Raises:
        UsageError: A file is missing, cannot be read or has another size than the left image; the message names it. So
            does that of an item whose file turns out to be damaged.
    """

    def __init__(self, pairs: list[dict[str, Path]], transforms: Callable | None = None):
        self.transforms = transforms
        self._pairs = pairs
        for pair in pairs:
            for path in pair.values():
                if not path.is_file():
                    raise UsageError(f"there is no '{path}', which is part of a pair")
            _check_sizes(pair, [_size(path, is_picture=name in ('left', 'right')) for name, path in pair.items()])

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[Any, Any, dict[str, Any]]:
        pair = self._pairs[index]
        read = {name: _picture(path) if name in ('left', 'right') else _disparity(path) for name, path in pair.items()}
        _check_sizes(pair, [tuple(x.shape[-2:]) for x in read.values()])
        left, right = read.pop('left'), read.pop('right')
        target = {name: tv_tensors.Mask(x) for name, x in self._target(read).items()}
        return (left, right, target) if self.transforms is None else self.transforms(left, right, target)

    def _target(self, disparities: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """An item's dictionary, from the disparities in the files of its pair."""
        raise NotImplementedError


class SceneFlowPairs(StereoPairs):
    """Pairs in the layout of the Scene Flow data sets: FlyingThings3D, Monkaa, Driving, and generated ones.

    A pair is `FRAMES/SCENE/left/NAME.png` and `FRAMES/SCENE/right/NAME.png`, its disparities
    `disparity/SCENE/left/NAME.pfm` and `disparity/SCENE/right/NAME.pfm`; SCENE may have several parts. The disparities
    of a file have one sign, which is left out; infinities and NaN are pixels that are not known. The dictionary of an
    item also has `right_disparity`, of the pixels of the right image: pixel x is pixel x + right_disparity of the left
    one. `occluded` is computed from both.

    Args:
        folder: The folder.
        part: A folder of scenes: of FlyingThings3D 'TRAIN' or 'TEST'; by default all scenes.
        frames: Folder of the images in `folder`: 'frames_cleanpass' or 'frames_finalpass'.
        transforms: As of `StereoPairs`.

    Raises:
        UsageError: There are no pairs, or a file is not as it should be (see `StereoPairs`).
    """

    def __init__(
        self, folder: str | Path, part: str = '', frames: str = 'frames_cleanpass', transforms: Callable | None = None
    ):
        images, suffixes = Path(folder) / frames, image_suffixes()
        names = {  # of pairs: of some only the right image may be there
            path.parents[1] / path.name
            for path in (images / part).rglob('*')
            if path.parent.name in ('left', 'right') and path.suffix.lower() in suffixes
        }
        pairs = []
        for name in sorted(names):
            pair = {}
            for side, disparity in (('left', 'disparity'), ('right', 'right_disparity')):
                pair[side] = name.parent / side / name.name
                file = Path(folder) / 'disparity' / pair[side].relative_to(images)
                pair[disparity] = file.with_suffix('.pfm')
            pairs.append(pair)
        if not pairs:
            raise UsageError(f"there are no pairs such as left/0000.png and right/0000.png in '{images / part}'")
        super().__init__(pairs, transforms)

    def _target(self, disparities: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**disparities, 'occluded': occluded_pixels(disparities['disparity'], disparities['right_disparity'])}


class KittiPairs(StereoPairs):
    """Pairs in the layout of KITTI 2015's `training` folder.

    A pair is `image_2/NAME.png` and `image_3/NAME.png`, its disparities `disp_occ_0/NAME.png`: 16 bits, 256 a pixel, 0
    where nothing was measured. An item's dictionary has `occluded` where there is a folder `disp_noc_0`, which lacks
    the disparities of occluded pixels. The second images of sequences, `*_11.png`, have none and are left out.

    Args:
        folder: The folder.
        transforms: As of `StereoPairs`.

    Raises:
        UsageError: There are no pairs, or a file is not as it should be (see `StereoPairs`).
    """

    def __init__(self, folder: str | Path, transforms: Callable | None = None):
        folder = Path(folder)
        places = {'left': 'image_2', 'right': 'image_3', 'disparity': 'disp_occ_0'}
        if (folder / 'disp_noc_0').is_dir():
            places['visible'] = 'disp_noc_0'
        names = {path.name for place in places.values() for path in (folder / place).glob('*_10.png')}
        names |= {path.name for path in (folder / 'disp_occ_0').glob('*.png')}
        pairs = [{key: folder / place / name for key, place in places.items()} for name in sorted(names)]
        if not pairs:
            raise UsageError(
                f"there are no pairs such as image_2/000000_10.png and image_3/000000_10.png in '{folder}'"
            )
        super().__init__(pairs, transforms)

    def _target(self, disparities: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        disparity = disparities['disparity']
        if 'visible' not in disparities:
            return {'disparity': disparity}
        return {'disparity': disparity, 'occluded': disparity.isfinite() & disparities['visible'].isnan()}


def occluded_pixels(disparity: torch.Tensor, right_disparity: torch.Tensor) -> torch.Tensor:
    """Pixels of the left image that the right one does not show, because something is before them or it ends there.

    There the right image's disparity is not within one pixel of the left one's.

    Args:
        disparity: Of the pixels of the left image, …×H×W.
        right_disparity: Of the pixels of the right image, …×H×W.

    Returns:
        …×H×W, bool; False where the disparity is not known.
    """
    x = (torch.arange(disparity.shape[-1], device=disparity.device) - disparity).round()
    there = right_disparity.gather(-1, x.nan_to_num(0).clamp(0, disparity.shape[-1] - 1).long())
    seen = (x >= 0) & ((there - disparity).abs() <= 1)
    return disparity.isfinite() & ~seen


def _size(path: Path, is_picture: bool) -> tuple[int, int]:
    """Height and width of what is in a file, by its header."""
    with naming(path):
        if path.suffix == '.pfm':
            return _pfm_header(path)[0]
        with Image.open(path) if is_picture else _open_png(path) as image:
            return image.height, image.width


def _picture(path: Path) -> tv_tensors.Image:
    with naming(path):
        return F.to_dtype(F.to_image(open_image(path)), torch.float32, scale=True)


def _disparity(path: Path) -> torch.Tensor:
    """H×W disparities, NaN where they are not known."""
    with naming(path):
        if path.suffix == '.pfm':
            return _read_pfm(path)
        with _open_png(path) as image:
            values = torch.from_numpy(np.array(image, np.float32))
        return (values / 256).where(values > 0, torch.nan)


def _open_png(path: Path) -> Image.Image:
    image = Image.open(path, formats=['PNG'])
    if image.mode not in ('I;16', 'I'):
        raise ValueError('it is not a greyscale PNG file of 16 bits')
    return image


def _pfm_header(path: Path) -> tuple[tuple[int, int], str, int]:
    """Height and width, numpy's name of the numbers and where they begin."""
    with path.open('rb') as file:
        header = _PFM_HEADER.match(file.read(128))
    if not header:
        raise ValueError('it does not begin as a PFM file of one channel does')
    width, height, scale = int(header[1]), int(header[2]), float(header[3])
    if not (width and height and scale):
        raise ValueError(f'its width {width}, height {height} and scale {scale:g} must not be 0')
    there, needed = path.stat().st_size, header.end() + 4 * width * height
    if there < needed:
        raise ValueError(f'it has {there} bytes, {height} × {width} pixels need {needed}')
    return (height, width), '<f4' if scale < 0 else '>f4', header.end()


def _read_pfm(path: Path) -> torch.Tensor:
    (height, width), dtype, start = _pfm_header(path)
    values = np.fromfile(path, dtype, height * width, offset=start)
    values = torch.from_numpy(values.reshape(height, width)[::-1].astype(np.float32))  # the last row is the first
    values = values.where(values.isfinite(), torch.nan)
    if (values < 0).any() and (values > 0).any():
        raise ValueError('it holds disparities of both signs')
    return values.abs()


def _check_sizes(pair: dict[str, Path], sizes: list[tuple[int, int]]) -> None:
    for path, size in zip(pair.values(), sizes, strict=True):
        if size != sizes[0]:
            raise UsageError(
                f"'{path}' is {size[0]} × {size[1]}, but '{pair['left']}' is {sizes[0][0]} × {sizes[0][1]}"
            )
