"""Loss and scores of semantic segmentation."""

import torch
import torch.nn.functional as F

__all__ = ['SegmentationScores', 'segmentation_losses']


def segmentation_losses(
    outputs: dict[str, torch.Tensor], labels: torch.Tensor, aux_weight: float = 0.4, ignore_index: int = 255
) -> dict[str, torch.Tensor]:
    """Cross-entropy of each output of a segmentation model of torchvision's form, weighted: their sum is the loss.

    Args:
        outputs: 'out' and perhaps 'aux', (B, classes, H, W) logits.
        labels: Class of every pixel, (B, H, W).
        aux_weight: Weight of 'aux': 0.4 in the official ISANet, 0.5 in torchvision's training script.
        ignore_index: Label of pixels that do not count; where a batch has no others the losses are 0.

    Returns:
        A loss for each output, under its name.
    """
    counted = (labels != ignore_index).sum().clamp_min(1)
    losses = {
        name: F.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction='sum') / counted
        for name, logits in outputs.items()
    }
    if 'aux' in losses:
        losses['aux'] = aux_weight * losses['aux']
    return losses


class SegmentationScores:
    """Intersection over union and accuracy of predicted classes, over the pixels of all images together.

    Args:
        classes: Name of each class, in the order of the labels.
        ignore_index: Label of pixels that do not count.
    """

    def __init__(self, classes: list[str], ignore_index: int = 255):
        self.classes = classes
        self.ignore_index = ignore_index
        self.confusion = torch.zeros(len(classes), len(classes), dtype=torch.int64)

    def add(self, predicted: torch.Tensor, labels: torch.Tensor) -> None:
        """Counts pixels.

        Args:
            predicted: Class of every pixel, or logits with one more dimension, the second, for the classes.
            labels: True class of every pixel.

        Raises:
            ValueError: The shapes differ, or a label is that of no class.
        """
        if predicted.ndim == labels.ndim + 1:
            predicted = predicted.argmax(1)
        if predicted.shape != labels.shape:
            raise ValueError(f'predicted is of shape {tuple(predicted.shape)}, labels of {tuple(labels.shape)}')
        counted = labels != self.ignore_index
        number = len(self.classes)
        pairs = torch.stack([labels[counted], predicted[counted]]).cpu()
        if pairs.numel() and not 0 <= pairs.min() <= pairs.max() < number:
            raise ValueError(
                f'labels must lie in [0, {number}) or be {self.ignore_index}, got {pairs.min()} to {pairs.max()}'
            )
        self.confusion += torch.bincount(number * pairs[0] + pairs[1], minlength=number**2).view(number, number)

    def state(self) -> torch.Tensor:
        """What has been counted, to send to another process for `merge`."""
        return self.confusion

    def merge(self, state: torch.Tensor) -> None:
        """Counts what another process has counted."""
        self.confusion += state

    def compute(self) -> dict[str, float]:
        """The scores, from 0 to 1.

        Returns:
            The mean of the classes' IoU ('mIoU'), the share of all pixels that are right ('accuracy'), the mean of the
            classes' shares ('mean accuracy'), and for each class 'IoU NAME' and 'accuracy NAME', the share of its
            pixels that are right. Classes that are neither in the images nor predicted have no IoU, those that are not
            in the images no accuracy: NaN, and no part in the mean.
        """
        right, true, predicted = self.confusion.diag(), self.confusion.sum(1), self.confusion.sum(0)
        iou, accuracy = right / (true + predicted - right), right / true
        return {
            'mIoU': iou.nanmean().item(),
            'accuracy': (right.sum() / self.confusion.sum()).item(),
            'mean accuracy': accuracy.nanmean().item(),
            **{f'IoU {name}': value for name, value in zip(self.classes, iou.tolist(), strict=True)},
            **{f'accuracy {name}': value for name, value in zip(self.classes, accuracy.tolist(), strict=True)},
        }
