"""Segmentation of whole images by windows that slide over them, and at several scales: the protocols of the papers."""

from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.nn.functional as F

__all__ = ['SCALES', 'multi_scale', 'sliding_window']

SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # of most papers, ISANet's among them

Network = Callable[[torch.Tensor], torch.Tensor | dict[str, torch.Tensor]]


def sliding_window(
    network: Network, images: torch.Tensor, window: tuple[int, int], stride: tuple[int, int]
) -> torch.Tensor:
    """Logits of images of any size from windows of one size: the mean of the windows that a pixel is in.

    Windows begin every `stride` pixels; the last of a row or column ends where the image does, as in mmsegmentation's
    'slide' mode. Images that are smaller than the window are one window of their own size.

    Args:
        network: Takes images and returns logits, or a dictionary with logits as 'out', of the same height and width.
        images: (B, C, H, W).
        window: Height and width.
        stride: In both directions, from 1 to the window's height and width.

    Returns:
        (B, classes, H, W), in float32 at least.

    Raises:
        ValueError: The stride is not in this range, so that pixels would be left out.
    """
    if not all(0 < step <= side for step, side in zip(stride, window, strict=True)):
        raise ValueError(f'stride must be from 1 to the window {tuple(window)} in both directions, got {tuple(stride)}')
    sides = images.shape[-2:]
    rows, columns = map(_windows, sides, window, stride)
    counts = torch.zeros(sides, device=images.device)
    total = torch.zeros(())
    for row, column in product(rows, columns):
        logits = _logits(network, images[..., row, column])
        if not total.ndim:
            total = logits.new_zeros(*logits.shape[:2], *sides)
        total[..., row, column] += logits
        counts[row, column] += 1
    return total / counts


def multi_scale(
    network: Network, images: torch.Tensor, scales: Sequence[float] = SCALES, flip: bool = True, divisor: int = 1
) -> torch.Tensor:
    """Probabilities of the classes, the mean over sizes of the images and, flipped back, of their mirror images.

    With windows: `multi_scale(partial(sliding_window, network, window=(512, 512), stride=(341, 341)), images)`.

    Args:
        network: As in `sliding_window`.
        images: (B, C, H, W).
        scales: How many times as high and wide the network sees the images.
        flip: Let it see their mirror images, left to right, as well.
        divisor: Heights and widths that it sees are the nearest multiples of this, for networks that need them.

    Returns:
        (B, classes, H, W), in float32 at least.

    Raises:
        ValueError: There are no scales, or they or the divisor are not positive.
    """
    if not scales or min(scales) <= 0 or divisor < 1:
        raise ValueError(f'scales and divisor must be positive, got {scales} and {divisor}')
    sides = images.shape[-2:]
    wide = torch.promote_types(images.dtype, torch.float32)  # there is no resampling with antialiasing in half
    total = torch.zeros((), device=images.device)
    for scale in scales:
        size = [max(round(scale * side / divisor), 1) * divisor for side in sides]
        resized = _resize(images.to(wide), size).to(images.dtype)
        for axes in ((), (-1,)) if flip else ((),):
            logits = _logits(network, resized.flip(axes)).flip(axes)
            total = total + _resize(logits, sides).softmax(1)
    return total / (len(scales) * (1 + flip))


def _windows(side: int, window: int, stride: int) -> list[slice]:
    last = max(side - window, 0)
    return [slice(start, start + window) for start in (min(i, last) for i in range(0, last + stride, stride))]


def _logits(network: Network, images: torch.Tensor) -> torch.Tensor:
    outputs = network(images)
    logits = outputs['out'] if isinstance(outputs, dict) else outputs
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _resize(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """As torchvision's transforms resize images in training."""
    if list(x.shape[-2:]) == list(size):
        return x
    return F.interpolate(x, list(size), mode='bilinear', align_corners=False, antialias=True)
