"""Mean average precision of actions in time, as THUMOS14's evaluation kit computes it."""

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ['TemporalScores']


class TemporalScores:
    """Collects the detections of videos and scores them by THUMOS14's protocol.

    It is that of the kit's last version (`TH14evalDet_Updated`), for each class and IoU threshold:

    - In each video, true segments in the order given each take the free detection of their class that overlaps them
      most (of equal ones that of the highest score), if its IoU is above the threshold. So each truth and each
      detection is matched once at most; detections that none takes are wrong. (ActivityNet's protocol goes by the
      detections instead, the highest score first.)
    - Wrong detections that overlap an ambiguous segment of their video at all do not count.
    - Average precision is the sum, over right detections, of the precision at their place in the order of all videos'
      scores, divided by the number of true segments: not interpolated. Without detections it is 0.
    - Classes are averaged, all that have a true segment.

    Args:
        num_classes: Number of classes, the background included.
        thresholds: IoU thresholds.
    """

    def __init__(self, num_classes: int, thresholds: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)):
        self.num_classes = num_classes
        self.thresholds = tuple(thresholds)
        self._truths = np.zeros(num_classes, int)
        # of each class and video: scores, and which are right and which count, thresholds × detections
        self._found: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in range(num_classes)]

    def add(self, found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
        """Adds the detections of a video; segments are in one unit, N×2.

        Args:
            found: `segments`, `labels` and `scores`.
            truth: `segments`, `labels`, and if there are any `ambiguous` segments.

        Raises:
            ValueError: The numbers of segments, labels and scores differ, or a label is out of range.
        """
        segments, labels, scores = (found[name].cpu().numpy() for name in ('segments', 'labels', 'scores'))
        true_segments, true_labels = (truth[name].cpu().numpy() for name in ('segments', 'labels'))
        if not len(segments) == len(labels) == len(scores) or len(true_segments) != len(true_labels):
            raise ValueError(
                f'there are {len(segments)} segments, {len(labels)} labels and {len(scores)} scores, and '
                f'{len(true_segments)} true segments with {len(true_labels)} labels'
            )
        for label in (*labels, *true_labels):
            if not 1 <= label < self.num_classes:
                raise ValueError(f'labels must be from 1 to {self.num_classes - 1}, got {label}')
        ambiguous = truth['ambiguous'].cpu().numpy() if 'ambiguous' in truth else np.zeros((0, 2))
        unclear: np.ndarray = np.any(_overlaps(ambiguous, segments) > 0, axis=0)
        order = np.argsort(-scores, kind='stable')
        for label in range(1, self.num_classes):
            truths = true_segments[true_labels == label]
            self._truths[label] += len(truths)
            mine = order[labels[order] == label]
            right = _match(_overlaps(truths, segments[mine]), self.thresholds)
            self._found[label].append((scores[mine], right, right | ~unclear[mine]))

    def average_precisions(self) -> np.ndarray:
        """Thresholds × classes without the background, from 0 to 1; NaN of classes without true segments."""
        result = np.full((len(self.thresholds), self.num_classes - 1), np.nan)
        for column, (truths, found) in enumerate(zip(self._truths[1:], self._found[1:], strict=True)):
            if not truths:
                continue
            scores, right, counts = (np.concatenate(parts, axis=-1) for parts in zip(*found, strict=True))
            order = np.argsort(-scores, kind='stable')
            right, counts = right[:, order], counts[:, order]
            precisions = right.cumsum(axis=1) / counts.cumsum(axis=1).clip(1)
            result[:, column] = (precisions * right).sum(axis=1) / truths
        return result

    def compute(self) -> dict[str, float]:
        """Mean average precision at each threshold, 'mAP@0.1' …, from 0 to 1; NaN where there is no true segment."""
        precisions = self.average_precisions()[:, self._truths[1:] > 0]
        means = precisions.mean(axis=1) if precisions.size else np.full(len(self.thresholds), np.nan)
        return {f'mAP@{threshold:g}': float(mean) for threshold, mean in zip(self.thresholds, means, strict=True)}


def _overlaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Temporal IoU of N×2 and M×2 segments, N×M."""
    a, b = a.reshape(-1, 1, 2).astype(float), b.reshape(1, -1, 2).astype(float)
    shared = np.minimum(a[..., 1], b[..., 1]) - np.maximum(a[..., 0], b[..., 0])
    together = np.maximum(a[..., 1], b[..., 1]) - np.minimum(a[..., 0], b[..., 0])
    return np.divide(shared, together, out=np.zeros(shared.shape), where=shared > 0)


def _match(overlaps: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """Which detections are right, thresholds × detections, of IoUs with the truths, the highest scores first."""
    right = np.zeros((len(thresholds), overlaps.shape[1]), bool)
    for taken, threshold in zip(right, thresholds, strict=True):
        for row in overlaps:
            free = np.where(taken, -1, row)
            if free.size and free.max() > threshold:
                taken[free.argmax()] = True
    return right
