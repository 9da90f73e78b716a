"""Average precision of boxes and masks, as pycocotools computes it."""
import contextlib
import io
from collections.abc import Sequence

import numpy as np
import torch

from .coco import CocoInstances
from .extras import dense_extra

__all__ = ['CocoScores']

_FIGURES = {'AP': 0, 'AP50': 1, 'AP75': 2}  # places in pycocotools' list


class CocoScores:
    """Collects the detections of images and scores them against their annotations.

    Args:
        dataset: The images' data; detections are for its images as they are in their files.
    """

    def __init__(self, dataset: CocoInstances):
        self._dataset = dataset
        self._image_ids: list[int] = []
        self._results: dict[str, list[dict]] = {'box': []}

    def add(self, image_ids: Sequence[int], detections: Sequence[dict[str, torch.Tensor]]) -> None:
        """Adds what torchvision's Faster or Mask R-CNN found in some images.

        Args:
            image_ids: The images' ids.
            detections: Of each image `boxes`, `labels`, `scores` and, if masks are to be scored too, `masks`.
        """
        for image_id, found in zip(image_ids, detections, strict=True):
            self._image_ids.append(image_id)
            labels, scores = found['labels'].tolist(), found['scores'].tolist()
            boxes = found['boxes'].cpu()
            boxes = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1)
            for kind, key, shapes in (
                    ('box', 'bbox', boxes.tolist()),
                    ('mask', 'segmentation', _encode(found['masks']) if 'masks' in found else None)):
                if shapes is not None:
                    self._results.setdefault(kind, []).extend(
                        {'image_id': image_id, 'category_id': self._dataset.category_ids[label], 'score': score,
                         key: shape}
                        for label, score, shape in zip(labels, scores, shapes, strict=True))

    def compute(self) -> dict[str, float]:
        """The scores of the images added, from 0 to 1 (-1 where these have no objects).

        Returns:
            'box AP' (the mean over overlaps of 50 % to 95 %), 'box AP50' and 'box AP75'; with masks also 'mask AP' …
        """
        with dense_extra():
            from pycocotools.cocoeval import COCOeval
        scores = {}
        for kind, results in self._results.items():
            with contextlib.redirect_stdout(io.StringIO()):  # pycocotools tells its progress
                # it cannot index an empty list, but evaluates one
                found = self._dataset.coco.loadRes(results) if results else type(self._dataset.coco)()
                evaluation = COCOeval(self._dataset.coco, found, {'box': 'bbox', 'mask': 'segm'}[kind])
                evaluation.params.imgIds = self._image_ids
                evaluation.evaluate()
                evaluation.accumulate()
                evaluation.summarize()
            scores.update({f'{kind} {name}': float(evaluation.stats[i]) for name, i in _FIGURES.items()})
        return scores


def _encode(masks: torch.Tensor) -> list[dict]:
    """Run lengths of N×1×H×W masks of probabilities."""
    with dense_extra():
        from pycocotools import mask
    pixels = (masks[:, 0] >= 0.5).permute(1, 2, 0).cpu().numpy()
    return mask.encode(np.asfortranarray(pixels, dtype=np.uint8))
