"""Data in COCO's format, as targets for detection and for semantic segmentation."""

import contextlib
import io
import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.ops import box_convert, clip_boxes_to_image
from torchvision.transforms.v2 import functional as F

from ..errors import UsageError, first_line
from ..images import IMAGE_ERRORS, open_image
from .optional_packages import dense_extra

__all__ = ['CocoInstances', 'CocoSemantic', 'coco_index', 'coco_split', 'semantic_labels']

_logger = logging.getLogger(__name__)

# What is narrower has no extent: in single precision flips and changes of size may make its two sides one.
_MIN_EXTENT = 0.01  # pixels
_KEYS = {
    'images': ('id', 'file_name', 'height', 'width'),
    'categories': ('id', 'name'),
    'annotations': ('id', 'image_id', 'category_id', 'bbox'),
}


class CocoInstances(Dataset):
    """Images and their objects from a folder in COCO's format.

    An item is an image and a dictionary, as torchvision's detection models take them. The image is 3×H×W, float32, from
    0 to 1. The dictionary has `image_id`, and of the N objects `boxes` (N×4: left, top, right, bottom in pixels),
    `labels` (N, from 1: 0 is the background) and `masks` (N×H×W, 0 or 1). N may be 0. All are `tv_tensors` where there
    is one.

    Every annotation is checked when the file is opened. Crowds are no examples to learn from and are left out. So are
    objects without extent, which COCO itself has: boxes of no width or height inside their image, and with masks
    polygons whose points lie on one line and masks without a pixel. They are logged as a warning that names them.

    Attributes:
        classes: Name of each label, 'background' first.
        category_ids: The file's own id of each label, None for the background.
        coco: pycocotools' index of the annotations.

    Args:
        folder: The folder.
        transforms: Called with the image and the dictionary, as the transforms of `torchvision.transforms.v2`.
        images: Folder of the images in `folder`.
        annotations: File of the annotations in `folder`.
        masks: Read masks too; without, annotations need no segmentation.

    Raises:
        UsageError: A file is missing or is not what COCO's format says, or pycocotools is missing. The message names
            the file, the entry and what is wrong with it.
    """

    def __init__(
        self,
        folder: str | Path,
        transforms: Callable | None = None,
        images: str = 'images',
        annotations: str = 'instances.json',
        masks: bool = True,
    ):
        self.transforms = transforms
        self.masks = masks
        self._folder = Path(folder) / images
        content = _read(Path(folder) / annotations)
        self._without_extent = _check(content, self._folder, Path(folder) / annotations, masks)
        self.coco = coco_index(content)
        categories = sorted(content['categories'], key=lambda category: category['id'])
        self.category_ids = [None, *(category['id'] for category in categories)]
        self.classes = ['background', *(category['name'] for category in categories)]
        self._label = {category_id: label for label, category_id in enumerate(self.category_ids)}
        self._ids = sorted(self.coco.imgs)

    def __len__(self) -> int:
        return len(self._ids)

    def _annotations(self, index: int) -> list[dict[str, Any]]:
        return self.coco.loadAnns(self.coco.getAnnIds(self._ids[index]))

    def read(self, index: int) -> tuple[tv_tensors.Image, dict[str, Any]]:
        """An item before the transforms, with everything that is left out of it, and with `iscrowd`."""
        info = self.coco.imgs[self._ids[index]]
        path = self._folder / info['file_name']
        try:
            image = open_image(path)
        except IMAGE_ERRORS as e:
            raise UsageError(f'cannot read image {str(path)!r}: {first_line(e)}') from e
        size = (info['height'], info['width'])
        if (image.height, image.width) != size:
            raise UsageError(
                f'{str(path)!r} is {image.height} × {image.width}, its annotations are for {size[0]} × {size[1]}'
            )
        annotations = self._annotations(index)
        boxes = torch.tensor([a['bbox'] for a in annotations], dtype=torch.float64).reshape(-1, 4)
        boxes = clip_boxes_to_image(box_convert(boxes, 'xywh', 'xyxy'), size)
        target = {
            'image_id': info['id'],
            'boxes': tv_tensors.BoundingBoxes(boxes.float(), format='XYXY', canvas_size=size),
            'labels': torch.tensor([self._label[a['category_id']] for a in annotations], dtype=torch.int64),
            'iscrowd': torch.tensor([a['iscrowd'] for a in annotations], dtype=torch.bool),
        }
        if self.masks:
            masks = [torch.from_numpy(self.coco.annToMask(a)) for a in annotations]
            target['masks'] = tv_tensors.Mask(torch.stack(masks) if masks else torch.zeros(0, *size, dtype=torch.uint8))
        return F.to_dtype(F.to_image(image), torch.float32, scale=True), target

    def __getitem__(self, index: int) -> tuple[tv_tensors.Image, dict[str, Any]]:
        image, target = self.read(index)
        without_extent = [a['id'] in self._without_extent for a in self._annotations(index)]
        keep = ~(target.pop('iscrowd') | torch.tensor(without_extent, dtype=torch.bool))
        for key, value in target.items():
            if isinstance(value, torch.Tensor):
                target[key] = tv_tensors.wrap(value[keep], like=value) if key != 'labels' else value[keep]
        return self.transforms(image, target) if self.transforms else (image, target)


class CocoSemantic(CocoInstances):
    """The same images with the class of every pixel, from the same annotations, for semantic segmentation.

    An item is the image, as in `CocoInstances`, and a `Mask` of H×W labels, int64: see `semantic_labels`. Crowds are
    part of it. Arguments and errors are those of `CocoInstances`; masks are always read.
    """

    def __init__(
        self,
        folder: str | Path,
        transforms: Callable | None = None,
        images: str = 'images',
        annotations: str = 'instances.json',
    ):
        super().__init__(folder, transforms, images, annotations)

    def __getitem__(self, index: int) -> tuple[tv_tensors.Image, tv_tensors.Mask]:
        image, target = self.read(index)
        labels = tv_tensors.Mask(semantic_labels(target['masks'], target['labels']))
        return self.transforms(image, labels) if self.transforms else (image, labels)


def semantic_labels(masks: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Class of every pixel from the masks of objects: where they overlap, the smaller one, and of equals the later one.

    Args:
        masks: N×H×W, 0 or 1; N may be 0.
        labels: N classes.

    Returns:
        H×W, int64; 0 where no object is.
    """
    semantic = torch.zeros(masks.shape[1:], dtype=torch.int64)
    areas = masks.flatten(1).sum(1, dtype=torch.int64)
    for i in areas.argsort(descending=True, stable=True):
        semantic[masks[i].bool()] = labels[i]
    return semantic


def coco_split(folder: str | Path, split: str) -> dict[str, Any]:
    """Where a split is, as arguments of `CocoInstances` and `CocoSemantic`.

    Args:
        folder: Folder with COCO 2017 as it is unpacked (`train2017`, `annotations/instances_train2017.json`), or with
            one folder for each split (`train/images`, `train/instances.json`).
        split: 'train' or 'val'.
    """
    if (Path(folder) / 'annotations').is_dir():
        return {'folder': folder, 'images': f'{split}2017', 'annotations': f'annotations/instances_{split}2017.json'}
    return {'folder': Path(folder) / split}


def coco_index(content: dict[str, Any]):
    """pycocotools' index of the content of a file.

    Raises:
        UsageError: pycocotools is missing.
    """
    with dense_extra():
        from pycocotools.coco import COCO
    coco = COCO()
    coco.dataset = content
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools tells its progress there, which is the program's
        coco.createIndex()
    return coco


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"there is no file of annotations '{path}'")
    try:
        content = json.loads(path.read_bytes())
    except OSError as e:
        raise UsageError(f"cannot read '{path}': {e}") from e
    except (RecursionError, ValueError) as e:
        raise UsageError(f"'{path}' is not in COCO's format: {type(e).__name__} {first_line(e)}") from e
    if not isinstance(content, dict):
        raise UsageError(f"'{path}' is not in COCO's format: it holds a {type(content).__name__}, no dictionary")
    return content


def _check(content: dict[str, Any], folder: Path, path: Path, masks: bool) -> set[int]:
    """Checks every entry, and completes annotations with what pycocotools' evaluation wants, `iscrowd` and `area`.

    Returns:
        Ids of the annotations that are right but have no extent; a warning names them.

    Raises:
        UsageError: Names the first entry that is not as COCO's format has it.
    """

    def wrong(what: str) -> UsageError:
        return UsageError(f"'{path}': {what}")

    for name, keys in _KEYS.items():
        if not isinstance(content.get(name), list):
            raise UsageError(f"'{path}' is not in COCO's format: it has no list '{name}'")
        for entry in content[name]:
            if not isinstance(entry, dict):
                raise wrong(f"an entry of '{name}' is no dictionary: {_short(entry)}")
            if lacking := [key for key in keys if key not in entry]:
                raise wrong(f"an entry of '{name}' has no {lacking[0]}: {_short(entry)}")
            if type(entry['id']) is not int:
                raise wrong(f"an entry of '{name}' has id {_short(entry['id'])}, which is no whole number")
        for entry_id, number in Counter(entry['id'] for entry in content[name]).most_common(1):
            if number > 1:
                raise wrong(f"{number} entries of '{name}' have id {entry_id}")
    for category in content['categories']:
        if not isinstance(category['name'], str):
            raise wrong(f'category {category["id"]} has name {_short(category["name"])}, which is no text')
    for image in content['images']:
        if not isinstance(image['file_name'], str):
            raise wrong(f'image {image["id"]} has file_name {_short(image["file_name"])}, which is no text')
        if not all(type(image[side]) is int and image[side] > 0 for side in ('height', 'width')):
            raise wrong(f'image {image["id"]} is of {_short(image["height"])} × {_short(image["width"])} pixels')
        if not (folder / image['file_name']).is_file():
            raise UsageError(f"there is no image {str(folder / image['file_name'])!r} (of '{path}')")

    images = {image['id']: image for image in content['images']}
    category_ids = {category['id'] for category in content['categories']}
    without_extent = {}
    for annotation in content['annotations']:
        if problem := _problem(annotation, images, category_ids, masks):
            raise wrong(f'annotation {annotation["id"]} {problem}')
        annotation.setdefault('iscrowd', 0)
        annotation.setdefault('area', math.prod(annotation['bbox'][2:]))
        image = images[annotation['image_id']]
        if not annotation['iscrowd'] and not _has_extent(annotation, image['height'], image['width'], masks):
            without_extent[annotation['id']] = image['file_name']
    if without_extent:
        names = [f'{i} of image {ascii(file_name)}' for i, file_name in without_extent.items()]
        _logger.warning(
            "'%s': objects without width, height or area inside their image are left out of detection: annotation %s",
            path,
            ', '.join(names[:5]) + (f' and {len(names) - 5} more' if len(names) > 5 else ''),
        )
    return set(without_extent)


def _problem(
    annotation: dict[str, Any], images: dict[int, dict[str, Any]], category_ids: set[int], masks: bool
) -> str | None:
    """What is wrong with an annotation."""
    image_id, category_id, box = annotation['image_id'], annotation['category_id'], annotation['bbox']
    if type(image_id) is not int or image_id not in images:
        return f'is of image {_short(image_id)}, which is not among the images'
    if type(category_id) is not int or category_id not in category_ids:
        return f'is of category {_short(category_id)}, which is not among the categories'
    if annotation.get('iscrowd', 0) not in (0, 1):
        return f'has iscrowd {_short(annotation["iscrowd"])}, neither 0 nor 1'
    if not _are_finite([annotation.get('area', 0)]) or annotation.get('area', 0) < 0:
        return f'has area {_short(annotation["area"])}, no number of pixels'
    if not isinstance(box, list) or len(box) != 4 or not _are_finite(box):
        return f'has bbox {_short(box)}, not left, top, width and height'
    left, top, box_width, box_height = box
    if box_width < 0 or box_height < 0:
        return f'has bbox {_short(box)}, of negative width or height'
    height, width = images[image_id]['height'], images[image_id]['width']
    if _is_far([left, left + box_width], width) or _is_far([top, top + box_height], height):
        return f'has bbox {_short(box)}, far outside its image of {height} × {width}'
    if not masks:
        return None
    segmentation = annotation.get('segmentation')
    if isinstance(segmentation, dict):
        return _run_length_problem(segmentation, height, width)
    if (
        not isinstance(segmentation, list)
        or not segmentation
        or not all(isinstance(polygon, list) and len(polygon) >= 6 and not len(polygon) % 2 for polygon in segmentation)
    ):
        return 'has no segmentation, neither polygons of three points or more nor run lengths (masks=False reads boxes)'
    for polygon in segmentation:
        if not _are_finite(polygon):
            return f'has a polygon with other things than finite numbers: {_short(polygon)}'
        # pycocotools walks along each edge pixel by pixel
        if _is_far(polygon[::2], width) or _is_far(polygon[1::2], height):
            return f'has a polygon far outside its image of {height} × {width}: {_short(polygon)}'
    return None


def _run_length_problem(segmentation: dict[str, Any], height: int, width: int) -> str | None:
    size = segmentation.get('size')
    if size != [height, width] or set(map(type, size)) != {int}:
        return f'has run lengths of size {_short(size)}, its image has [{height}, {width}]'
    runs = _runs(segmentation.get('counts'))
    if runs is None:
        return f'has counts that are no run lengths: {_short(segmentation.get("counts"))}'
    if (pixels := sum(runs)) != height * width:  # pycocotools reads and writes beyond its memory then
        return f'has run lengths of {pixels} pixels, its image of {height} × {width} has {height * width}'
    return None


def _runs(counts: Any) -> list[int] | None:
    """Lengths of the runs, from a list or compressed; None where it is neither."""
    if isinstance(counts, list):
        return counts if set(map(type, counts)) <= {int} and min(counts, default=0) >= 0 else None
    if not isinstance(counts, str) or not counts.isascii():
        return None
    # six bits a character, from '0' on: five of a number, the lowest first, and one that says that it goes on
    code = np.frombuffer(counts.encode(), np.uint8).astype(np.int64) - ord('0')
    ends = np.flatnonzero(code < 32)
    if not len(ends) or ends[-1] != len(code) - 1 or code.min() < 0 or code.max() > 63:
        return None
    digits = np.diff(ends, prepend=-1)
    starts = ends - digits + 1
    if digits.max() > 7:  # more than 32 bits
        return None
    place = 5 * (np.arange(len(code)) - np.repeat(starts, digits))
    runs = np.add.reduceat((code & 31) << place, starts)
    runs -= (code[ends] >> 4) << 5 * digits  # the highest bit is the sign
    # from the fourth on they are differences from the last but one
    runs[1::2] = runs[1::2].cumsum()
    runs[2::2] = runs[2::2].cumsum()
    return runs.tolist() if runs.min() >= 0 else None


def _has_extent(annotation: dict[str, Any], height: int, width: int, masks: bool) -> bool:
    """Whether a right annotation has a box and, with masks, a shape to learn from."""
    left, top, box_width, box_height = annotation['bbox']
    if min(left + box_width, width) - max(left, 0) < _MIN_EXTENT:
        return False
    if min(top + box_height, height) - max(top, 0) < _MIN_EXTENT:
        return False
    if not masks:
        return True
    segmentation = annotation['segmentation']
    if isinstance(segmentation, dict):
        with dense_extra():
            from pycocotools import mask
        counts = segmentation['counts']
        return any(counts[1::2]) if isinstance(counts, list) else bool(mask.area(segmentation))
    return not all(map(_is_line, segmentation))


def _is_line(polygon: list[float]) -> bool:
    """Whether all points of a polygon lie on one line."""
    left, top = polygon[:2]
    points = [(x - left, y - top) for x, y in zip(polygon[::2], polygon[1::2], strict=True)]
    dx, dy = max(points, key=lambda point: math.hypot(*point))
    bound = _MIN_EXTENT * math.hypot(dx, dy)
    return all(abs(dx * y - dy * x) <= bound for x, y in points)


def _are_finite(values: list) -> bool:
    """Whether all are numbers, none of them a truth value, infinite or NaN."""
    try:
        return set(map(type, values)) <= {int, float} and all(map(math.isfinite, values))
    except OverflowError:  # a whole number beyond all floating-point ones
        return False


def _is_far(values: list[float], side: int) -> bool:
    """Whether positions lie more than an image's side before or behind it."""
    return min(values) < -side or max(values) > 2 * side


def _short(value: Any) -> str:
    """A value of the file for a message: not all of it, and nothing that a terminal acts on."""
    return ascii(value)[:80]
