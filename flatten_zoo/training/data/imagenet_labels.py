"""Other labels of ImageNet's validation images: reassessed ones, and subsets of the classes."""

import argparse
from collections import OrderedDict
from pathlib import Path

import torch
from timm.data import RealLabelsImagenet
from timm.task.evaluator import ClassificationEvaluator
from torch.utils.data import Dataset

from flatten_zoo.errors import UsageError, first_line

__all__ = ['LabelledEvaluator', 'averaged_metrics', 'read_real_labels', 'read_valid_labels']


class LabelledEvaluator(ClassificationEvaluator):
    """timm's evaluator with a subset of the classes, or with the reassessed labels in place of the given ones.

    Args:
        device: Where the model is.
        valid_labels: Classes to choose among; targets count within them. None for all.
        real_labels: timm's keeper of the reassessed labels, which then give the accuracies; the loss stays that of
            the given labels.
        average: How to average precision, recall and F1 over the classes: 'micro', 'macro' or 'weighted' (by the
            images of a class); None leaves them out.
    """

    def __init__(
        self,
        device: torch.device,
        valid_labels: list[int] | None = None,
        real_labels: RealLabelsImagenet | None = None,
        average: str | None = None,
    ):
        super().__init__(device)
        self.valid_labels = valid_labels
        self.real_labels = real_labels
        self.average = average
        self.pairs: list[torch.Tensor] = []  # of prediction and target

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        if self.valid_labels is not None:
            output = output[:, self.valid_labels]
        if self.real_labels is not None:
            self.real_labels.add_result(output)
        if self.average is not None:
            self.pairs.append(torch.stack([output.argmax(1), target]).cpu())
        super().update(output, target)

    def compute(self, distributed: bool = False) -> OrderedDict[str, float]:
        figures = super().compute(distributed)
        if self.real_labels is not None:
            figures |= {f'top{k}': accuracy for k, accuracy in self.real_labels.get_accuracy().items()}
        if self.average and self.pairs:
            predictions, targets = torch.cat(self.pairs, 1)
            figures |= averaged_metrics(predictions, targets, self.average)
        return figures


def averaged_metrics(predicted: torch.Tensor, target: torch.Tensor, average: str) -> dict[str, float]:
    """Precision, recall and F1 in percent over the classes that occur among predictions or targets.

    Args:
        predicted: Class indices, N.
        target: Class indices, N.
        average: 'micro', 'macro' or 'weighted'.
    """
    size = int(max(predicted.max(), target.max())) + 1
    hits, guesses, images = (
        torch.bincount(classes, minlength=size).double() for classes in (target[predicted == target], predicted, target)
    )
    occurs = guesses + images > 0
    hits, guesses, images = hits[occurs], guesses[occurs], images[occurs]
    if average == 'micro':
        hits, guesses, images = (count.sum(0, keepdim=True) for count in (hits, guesses, images))
    weight = images / images.sum() if average == 'weighted' else torch.full_like(hits, 1 / len(hits))
    metrics = {'precision': hits / guesses, 'recall': hits / images, 'f1_score': 2 * hits / (guesses + images)}
    return {name: 100 * (value.nan_to_num(0) * weight).sum().item() for name, value in metrics.items()}


def read_valid_labels(args: argparse.Namespace, num_classes: int) -> list[int] | None:
    """The classes in the file that `--valid-labels` names, an index on each line; None if none is given.

    Raises:
        UsageError: The file cannot be read, or holds something else than indices of classes.
    """
    if not args.valid_labels:
        return None
    try:
        labels = [int(line) for line in Path(args.valid_labels).read_text().split()]
    except (OSError, ValueError) as e:
        raise UsageError(f"--valid-labels '{args.valid_labels}': {getattr(e, 'strerror', None) or e}") from e
    if not labels or not all(0 <= label < num_classes for label in labels):
        raise UsageError(f"--valid-labels '{args.valid_labels}': expected indices from 0 to {num_classes - 1}")
    return labels


def read_real_labels(args: argparse.Namespace, dataset: Dataset, num_classes: int) -> RealLabelsImagenet | None:
    """The reassessed labels in the JSON file that `--real-labels` names; None if none is given.

    Raises:
        UsageError: The file cannot be read, or is not of these images.
    """
    if not args.real_labels:
        return None
    filenames = getattr(getattr(dataset, 'dataset', None), 'filenames', None)
    if filenames is None or num_classes < 5:
        raise UsageError("--real-labels needs images by their names in ImageNet's validation split, and its classes")
    try:
        names = filenames(basename=True)
        labels = RealLabelsImagenet(names, real_json=args.real_labels)
    except (OSError, ValueError, AssertionError) as e:
        reason = getattr(e, 'strerror', None) or str(e) and first_line(e) or 'it has labels of another number of images'
        raise UsageError(f"--real-labels '{args.real_labels}': {reason}") from e
    unknown = [name for name in names if name not in labels.real_labels]
    if unknown:
        raise UsageError(f"--real-labels '{args.real_labels}': it has no labels for the image '{unknown[0]}'")
    return labels
