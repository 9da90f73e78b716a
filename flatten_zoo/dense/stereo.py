"""Loss and scores of disparities."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

__all__ = ['DisparityScores', 'stereo_losses']


def stereo_losses(
    outputs: Sequence[torch.Tensor],
    disparity: torch.Tensor,
    max_disparity: float = 192,
    weights: Sequence[float] = (0.5, 0.7, 1.0),
) -> dict[str, torch.Tensor]:
    """Smooth L1 of each output of a PSMNet, weighted: their sum is the loss.

    Args:
        outputs: The three outputs in training, B×H×W each.
        disparity: True disparity of every pixel, B×H×W. Pixels that are NaN, infinite, negative or at `max_disparity`
            and beyond do not count; where a batch has no others the losses are 0.
        max_disparity: That of the network.
        weights: Of the outputs, the last hourglass's at the end.

    Returns:
        A loss for each output: 'hourglass1' …

    Raises:
        ValueError: There are not as many outputs as weights, or an output has another shape than the truth.
    """
    if isinstance(outputs, torch.Tensor) or len(outputs) != len(weights):
        raise ValueError(f'outputs must be {len(weights)} tensors, as many as weights: those of a network in training')
    counted = (disparity >= 0) & (disparity < max_disparity)
    truth = disparity.where(counted, 0)
    losses = {}
    for i, (output, weight) in enumerate(zip(outputs, weights, strict=True), start=1):
        _check_shapes(output, disparity)
        loss = F.smooth_l1_loss(output, truth, reduction='none').where(counted, 0).sum()
        losses[f'hourglass{i}'] = weight * loss / counted.sum().clamp_min(1)
    return losses


class DisparityScores:
    """End-point error and share of wrong disparities, over the pixels of all images together.

    Args:
        max_disparity: Pixels whose true disparity is not below it do not count; neither do those that are NaN, infinite
            or negative. By default all disparities count, as in KITTI's scores.
    """

    def __init__(self, max_disparity: float = math.inf):
        self.max_disparity = max_disparity
        self.pixels = 0
        self.wrong = 0
        self.error = 0.0

    def add(self, predicted: torch.Tensor, disparity: torch.Tensor) -> None:
        """Counts pixels.

        Args:
            predicted: Disparity of every pixel, of any shape.
            disparity: The true one.

        Raises:
            ValueError: The shapes differ.
        """
        _check_shapes(predicted, disparity)
        counted = (disparity >= 0) & (disparity < self.max_disparity)
        errors = (predicted[counted].double() - disparity[counted]).abs()
        self.pixels += errors.numel()
        self.wrong += int((errors > 3).sum())
        self.error += errors.sum().item()

    def state(self) -> tuple[int, int, float]:
        """What has been counted, to send to another process for `merge`."""
        return self.pixels, self.wrong, self.error

    def merge(self, state: tuple[int, int, float]) -> None:
        """Counts what another process has counted."""
        pixels, wrong, error = state
        self.pixels += pixels
        self.wrong += wrong
        self.error += error

    def compute(self) -> dict[str, float]:
        """The mean error in pixels ('EPE') and the share of pixels that are off by more than 3 ('>3 px', from 0 to 1).

        Both are NaN where no pixel counts.
        """
        pixels = self.pixels or math.nan
        return {'EPE': self.error / pixels, '>3 px': self.wrong / pixels}


def _check_shapes(predicted: torch.Tensor, disparity: torch.Tensor) -> None:
    if predicted.shape != disparity.shape:
        raise ValueError(
            f'predicted disparities are of shape {tuple(predicted.shape)}, true ones of {tuple(disparity.shape)}'
        )
