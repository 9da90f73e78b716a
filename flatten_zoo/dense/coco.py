"""Data in COCO's format, as targets for detection and for semantic segmentation."""
import contextlib
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.datasets import CocoDetection, wrap_dataset_for_transforms_v2
from torchvision.ops import box_area, clip_boxes_to_image
from torchvision.transforms.v2 import functional as F

from ..errors import UsageError, first_line
from .extras import dense_extra

__all__ = ['CocoInstances', 'CocoSemantic', 'coco_split', 'semantic_labels']


class CocoInstances(Dataset):
    """Images and their objects from a folder in COCO's format.

    An item is an image and a dictionary, as torchvision's detection models take them. The image is 3×H×W, float32, from
    0 to 1. The dictionary has `image_id`, and of the N objects `boxes` (N×4: left, top, right, bottom in pixels),
    `labels` (N, from 1: 0 is the background) and `masks` (N×H×W, 0 or 1). N may be 0. Crowds and boxes without an area
    are left out: they are no examples to learn from. All are `tv_tensors` where there is one.

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
        UsageError: A file is missing or is not what COCO's format says, or pycocotools is missing.
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
        dataset = _open(Path(folder) / images, Path(folder) / annotations)
        self.coco = dataset.coco
        _check(self.coco.dataset, Path(folder) / images, Path(folder) / annotations, masks)
        categories = sorted(self.coco.dataset['categories'], key=lambda category: category['id'])
        self.category_ids = [None, *(category['id'] for category in categories)]
        self.classes = ['background', *(category['name'] for category in categories)]
        self._label = {category_id: label for label, category_id in enumerate(self.category_ids)}
        keys = ['boxes', 'labels', 'iscrowd'] + masks * ['masks']
        self._ids = dataset.ids
        self._folder = Path(folder) / images
        self._dataset = wrap_dataset_for_transforms_v2(dataset, target_keys=keys)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> tuple[tv_tensors.Image, dict[str, Any]]:
        """An item before the transforms, crowds included, with their `iscrowd`."""
        info = self.coco.imgs[self._ids[index]]
        try:
            image, target = self._dataset[index]
        except OSError as e:
            raise UsageError(f"cannot read image '{self._folder / info['file_name']}': {first_line(e)}") from e
        size = (info['height'], info['width'])
        if (image.height, image.width) != size:
            raise UsageError(
                f"'{self._folder / info['file_name']}' is {image.height} × {image.width}, its annotations are for "
                f'{size[0]} × {size[1]}')
        boxes = clip_boxes_to_image(torch.as_tensor(target.get('boxes', torch.zeros(0, 4))), size)
        target = {
            'image_id': info['id'],
            'boxes': tv_tensors.BoundingBoxes(boxes.float(), format='XYXY', canvas_size=size),
            'labels': torch.tensor([self._label[int(i)] for i in target.get('labels', [])], dtype=torch.int64),
            'masks': target.get('masks', tv_tensors.Mask(torch.zeros(0, *size, dtype=torch.uint8))),
            'iscrowd': torch.tensor(target.get('iscrowd', []), dtype=torch.bool),
        }
        if not self.masks:
            del target['masks']
        return F.to_dtype(F.to_image(image), torch.float32, scale=True), target

    def __getitem__(self, index: int) -> tuple[tv_tensors.Image, dict[str, Any]]:
        image, target = self.read(index)
        keep = ~target.pop('iscrowd') & (box_area(target['boxes']) > 0)
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


def _open(images: Path, annotations: Path) -> CocoDetection:
    if not annotations.is_file():
        raise UsageError(f"there is no file of annotations '{annotations}'")
    try:
        # pycocotools tells its progress on standard output, which belongs to the program
        with dense_extra(), contextlib.redirect_stdout(io.StringIO()):
            return CocoDetection(images, str(annotations))
    except UsageError:
        raise
    except (AssertionError, KeyError, TypeError, ValueError) as e:
        raise UsageError(f"'{annotations}' is not in COCO's format: {type(e).__name__} {first_line(e)}") from e


def _check(content: dict[str, Any], images: Path, annotations: Path, masks: bool) -> None:
    """Raises a `UsageError` at the first thing that is not as COCO's format has it."""
    for name, keys in {'images': ('id', 'file_name', 'height', 'width'), 'categories': ('id', 'name'),
                       'annotations': ('id', 'image_id', 'category_id', 'bbox')}.items():
        if not isinstance(content.get(name), list):
            raise UsageError(f"'{annotations}' is not in COCO's format: it has no list '{name}'")
        for entry in content[name]:
            if lacking := [key for key in keys if key not in entry]:
                raise UsageError(f"'{annotations}': an entry of '{name}' has no {lacking[0]}: {str(entry)[:80]}")
    for image in content['images']:
        if not (images / image['file_name']).is_file():
            raise UsageError(f"there is no image '{images / image['file_name']}' (of '{annotations}')")
    image_ids = {image['id'] for image in content['images']}
    category_ids = {category['id'] for category in content['categories']}
    for annotation in content['annotations']:
        if problem := _problem(annotation, image_ids, category_ids, masks):
            raise UsageError(f"'{annotations}': annotation {annotation['id']} {problem}")
        annotation.setdefault('iscrowd', 0)
        # pycocotools' evaluation wants both
        annotation.setdefault('area', math.prod(annotation['bbox'][2:]))


def _problem(annotation: dict[str, Any], image_ids: set[int], category_ids: set[int], masks: bool) -> str | None:
    """What is wrong with an annotation."""
    if annotation['image_id'] not in image_ids:
        return f"is of image {annotation['image_id']}, which is not among the images"
    if annotation['category_id'] not in category_ids:
        return f"is of category {annotation['category_id']}, which is not among the categories"
    box = annotation['bbox']
    if len(box) != 4 or not all(math.isfinite(x) for x in box):
        return f'has bbox {box}, not left, top, width and height'
    if not masks:
        return None
    segmentation = annotation.get('segmentation')
    if isinstance(segmentation, dict) and {'size', 'counts'} <= segmentation.keys():
        return None
    if isinstance(segmentation, list) and segmentation and all(
            isinstance(polygon, list) and len(polygon) >= 6 and not len(polygon) % 2 for polygon in segmentation):
        return None
    return 'has no segmentation, neither polygons of three points or more nor run lengths (masks=False reads boxes)'
