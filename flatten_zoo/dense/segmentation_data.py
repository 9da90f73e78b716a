"""Pairs of images and label maps in folders, whose layout a YAML file says."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import ExifTags, Image
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from ..errors import UsageError, first_line, shown, unknown_name
from ..images import image_suffixes, naming, open_image

__all__ = ['SegmentationPairs', 'segmentation_layouts', 'segmentation_split']

_LAYOUTS = Path(__file__).parent / 'layouts'
_KEYS = ('images', 'labels', 'list', 'splits', 'classes', 'ignored', 'ignore_index')
_VALUES = 2**16  # that a pixel of a PNG file can have
_TURNED = {5, 6, 7, 8}  # orientations of EXIF that make a standing image of a lying one


@dataclass
class _Layout:
    """What a YAML file of a layout says.

    Attributes:
        images, labels: Where the files are, with '{name}' for what those of a pair share and perhaps '{split}'.
        names: File of the names of a split, if there is one.
        splits: What stands for a split in these, where it is not its name.
        classes: Name of each label.
        ignore_index: Label of pixels that do not count.
        table: Label of each value in the files, -1 for those that must not be there.
    """

    images: str
    labels: str
    names: str | None
    splits: dict[str, str]
    classes: list[str]
    ignore_index: int
    table: np.ndarray


class SegmentationPairs(Dataset):
    """Images with the class of every pixel, from pairs of files: see `segmentation_split`, which opens them.

    An item is an image, 3×H×W, float32, from 0 to 1, and a `Mask` of H×W labels, int64, as those of `CocoSemantic`.
    Images are turned as their EXIF orientation says, and what is transparent is white.

    That both files of a pair are there and of one size is checked when the data are opened, from the files' headers;
    the values of label maps, for which all of a file has to be decoded, when an item is read.

    Attributes:
        classes: Name of each label.
        ignore_index: Label of pixels that do not count.
    """

    def __init__(self, pairs: list[tuple[Path, Path]], layout: _Layout, transforms: Callable | None = None):
        self.classes = layout.classes
        self.ignore_index = layout.ignore_index
        self.transforms = transforms
        self._pairs = pairs
        self._table = layout.table
        for pair in pairs:
            with naming(pair[0]), Image.open(pair[0]) as image:
                turned = 'exif' in image.info and image.getexif().get(ExifTags.Base.Orientation) in _TURNED
                size = image.size[::-1] if turned else image.size
            with naming(pair[1]), _open_labels(pair[1]) as labels:
                _check_sizes(pair, size, labels.size)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        pair = self._pairs[index]
        with naming(pair[0]):
            picture = open_image(pair[0])
        with naming(pair[1]), _open_labels(pair[1]) as file:
            values = np.asarray(file).astype(np.int64)
        _check_sizes(pair, picture.size, values.shape[::-1])
        labels = self._table[values]
        if labels.min() < 0:
            raise UsageError(
                f"'{pair[1]}' has label {values[labels < 0].min()}, which is none of the {len(self.classes)} classes "
                'of the layout and not ignored'
            )
        image = F.to_dtype(F.to_image(picture), torch.float32, scale=True)
        mask = tv_tensors.Mask(torch.from_numpy(labels))
        return self.transforms(image, mask) if self.transforms else (image, mask)


def segmentation_layouts() -> list[str]:
    """Names of the layouts that need no file."""
    return sorted(path.stem for path in _LAYOUTS.glob('*.yaml'))


def segmentation_split(
    layout: str | Path, folder: str | Path, split: str, transforms: Callable | None = None
) -> SegmentationPairs:
    """Open images and label maps in a layout.

    A layout of one's own is a YAML file. Label maps are PNG files of one channel, of up to 16 bits or with a palette.

        images: images/{split}/{name}.*           # in the folder; {name} may reach over several folders
        labels: labels/{split}/{name}_classes.png
        splits: {train: training}                 # what {split} is where it is not 'train' or 'val' itself
        list: lists/{split}.txt                   # names of a split, one a line; without, all that there are
        classes: {1: road, 2: road, 7: sky}       # name of each value in the files; or a list, from 0 on
        ignored: [0, 255]                         # values of pixels that do not count
        ignore_index: 255                         # their label

    Labels are numbered in the order of the classes, values with one name have one label: 0, 0 and 1 here. Of these
    `images`, `labels` and `classes` must be there, and {split} in `images` or `list`.

    Args:
        layout: A YAML file, or one of `segmentation_layouts`: 'ade20k', 'cityscapes', 'coco_stuff', 'lip',
            'pascal_context', 'voc2012'.
        folder: The folder.
        split: 'train', 'val', or another that the folder has.
        transforms: Called with the image and the label map, as the transforms of `torchvision.transforms.v2`.

    Raises:
        UsageError: There is no such layout or no pair, a file is missing or cannot be read, or the files of a pair
            differ in size; the message names the file. So does that of an item with a label that the layout does not
            have.
    """
    folder = Path(folder)
    path = Path(layout)
    if path.suffix not in ('.yaml', '.yml'):
        if layout not in segmentation_layouts():
            raise unknown_name('layout', str(layout), segmentation_layouts())
        path = _LAYOUTS / f'{layout}.yaml'
    content = _read_layout(path)
    split = content.splits.get(split, split)
    templates = [template.replace('{split}', split) for template in (content.images, content.labels)]
    images, labels = (_files(folder, template) for template in templates)
    if content.names:
        file = folder / content.names.replace('{split}', split)
        try:
            names = [line.strip() for line in file.read_text(encoding='utf-8').splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"cannot read '{file}', the list of images: {first_line(e)}") from e
    else:
        names = sorted(images.keys() | labels.keys())
    if not names:
        raise UsageError(f"there are no pairs such as '{templates[0]}' and '{templates[1]}' in '{folder}'")
    for name in names:
        for found, template in zip((images, labels), templates, strict=True):
            if name not in found:
                raise UsageError(f"there is no '{folder / template.replace('{name}', name)}', which is part of a pair")
    return SegmentationPairs([(images[name], labels[name]) for name in names], content, transforms)


def _files(folder: Path, template: str) -> dict[str, Path]:
    """The files that a template describes, by what its '{name}' stands for."""
    parts = re.split(r'(\{name\}|\*)', template)
    pattern = re.compile(''.join({'{name}': '(.+)', '*': '[^/]*'}.get(part, re.escape(part)) for part in parts))
    found: dict[str, Path] = {}
    suffixes = image_suffixes()
    for path in sorted((folder / parts[0].rpartition('/')[0]).rglob('*')):
        match = pattern.fullmatch(path.relative_to(folder).as_posix())
        if match and path.suffix.lower() in suffixes and not path.name.startswith('.'):
            if match[1] in found:
                raise UsageError(f"'{found[match[1]]}' and '{path}' have the same name, so that the pair is not clear")
            found[match[1]] = path
    return found


def _read_layout(path: Path) -> _Layout:
    def wrong(problem: str) -> UsageError:
        return UsageError(f"the layout '{path}' {problem}")

    try:
        content = yaml.safe_load(path.read_text(encoding='utf-8'))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError) as e:
        raise wrong(f'cannot be read: {" ".join(str(e).split())}') from e
    if not isinstance(content, dict):
        raise wrong(f'has no keys such as images, labels and classes: {shown(content)}')
    for key in content:
        if key not in _KEYS:
            raise wrong(f'has an {unknown_name("key", str(key), _KEYS)}')
    for key in ('images', 'labels', 'classes'):
        if key not in content:
            raise wrong(f'has no {key}')
    for key in ('images', 'labels'):
        if not isinstance(content[key], str) or content[key].count('{name}') != 1:
            raise wrong(f'has {key} {shown(content[key])}, not a path with {{name}} once')
    names = content.get('list')
    if names is not None and not isinstance(names, str):
        raise wrong(f'has list {shown(names)}, which is no path')
    if '{split}' not in (names or content['images']):
        raise wrong(f'has no {{split}} in {"list" if names else "images"}, so that all splits would be the same')
    splits = content.get('splits', {})
    if not isinstance(splits, dict) or not all(isinstance(x, str) for item in splits.items() for x in item):
        raise wrong(f'has splits {shown(splits)}, not a name for each split')
    classes, ignored = content['classes'], content.get('ignored', [])
    if isinstance(classes, list):
        classes = dict(enumerate(classes))
    if not isinstance(classes, dict) or not classes or not all(isinstance(x, str) for x in classes.values()):
        raise wrong(f'has classes {shown(classes)}, neither names nor a name for each value')
    if not isinstance(ignored, list):
        raise wrong(f'has ignored {shown(ignored)}, which is no list of values')
    for value in (*classes, *ignored):
        if type(value) is not int or not 0 <= value < _VALUES:
            raise wrong(f'has value {shown(value)}, which is not a whole number from 0 to {_VALUES - 1}')
    if both := [value for value in ignored if value in classes]:
        raise wrong(f'has value {both[0]} in classes and in ignored')
    names_of_labels = list(dict.fromkeys(classes.values()))
    ignore_index = content.get('ignore_index', 255)
    if type(ignore_index) is not int or ignore_index < len(names_of_labels):
        raise wrong(f'has ignore_index {shown(ignore_index)}, not a number beyond the {len(names_of_labels)} labels')
    table = np.full(_VALUES, -1)
    table[list(classes)] = [names_of_labels.index(name) for name in classes.values()]
    table[ignored] = ignore_index
    return _Layout(content['images'], content['labels'], names, splits, names_of_labels, ignore_index, table)


def _open_labels(path: Path) -> Image.Image:
    image = Image.open(path, formats=['PNG'])
    if image.mode not in ('1', 'L', 'P', 'I', 'I;16'):
        raise ValueError(f'it is a picture of mode {image.mode}, not one number or colour of a palette for each pixel')
    return image


def _check_sizes(pair: tuple[Path, Path], image: tuple[int, ...], labels: tuple[int, ...]) -> None:
    """Raise a `UsageError` unless widths and heights are the same."""
    if image != labels:
        raise UsageError(
            f"'{pair[1]}' is {labels[1]} × {labels[0]}, but its image '{pair[0]}' is {image[1]} × {image[0]}"
        )
