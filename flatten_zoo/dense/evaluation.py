"""Average precision of boxes and masks, as pycocotools computes it."""

import contextlib
import io
from collections.abc import Sequence

import numpy as np
import torch

from .coco import CocoInstances, coco_index
from .optional_packages import dense_extra

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
            detections: Of each image `boxes`, `labels`, `scores` and, if masks are to be scored too, `masks`; these
                are not scored where the data set is read without masks.
        """
        for image_id, found in zip(image_ids, detections, strict=True):
            self._image_ids.append(image_id)
            labels, scores = found['labels'].tolist(), found['scores'].tolist()
            masks = _encode(found['masks']) if 'masks' in found and self._dataset.masks else None
            boxes = found['boxes'].cpu()
            boxes = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1)
            for kind, key, shapes in (('box', 'bbox', boxes.tolist()), ('mask', 'segmentation', masks)):
                if shapes is not None:
                    self._results.setdefault(kind, []).extend(
                        {
                            'image_id': image_id,
                            'category_id': self._dataset.category_ids[label],
                            'score': score,
                            key: shape,
                        }
                        for label, score, shape in zip(labels, scores, shapes, strict=True)
                    )

    def state(self) -> dict[str, list]:
        """What has been added, to send to another process for `merge`."""
        return {'images': self._image_ids, **self._results}

    def merge(self, state: dict[str, list]) -> None:
        """Adds what another process has added, of other images."""
        for name, entries in state.items():
            (self._image_ids if name == 'images' else self._results.setdefault(name, [])).extend(entries)

    def compute(self) -> dict[str, float]:
        """The scores of the images added, from 0 to 1 (-1 where these have no objects).

        Returns:
            'box AP' (the mean over overlaps of 50 % to 95 %), 'box AP50' and 'box AP75'; with masks also 'mask AP' …
        """
        with dense_extra():
            from pycocotools.cocoeval import COCOeval
        content, scores = self._dataset.coco.dataset, {}
        for kind, results in self._results.items():
            # pycocotools writes into annotations and results, and takes an annotation's id 0 for no match
            annotations = [{**annotation, 'id': i} for i, annotation in enumerate(content['annotations'], start=1)]
            truth = coco_index({**content, 'annotations': annotations})
            with contextlib.redirect_stdout(io.StringIO()):  # pycocotools tells its progress
                # it cannot index an empty list, but evaluates one
                found = truth.loadRes([dict(result) for result in results]) if results else type(truth)()
                evaluation = COCOeval(truth, found, {'box': 'bbox', 'mask': 'segm'}[kind])
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
