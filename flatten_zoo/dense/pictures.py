"""Pictures of what networks find in images: boxes and masks of objects, label maps and their legend."""

import colorsys
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from torchvision.transforms.v2 import functional as F
from torchvision.utils import draw_bounding_boxes

from ..errors import printable

__all__ = ['colour_of', 'draw_detections', 'draw_labels', 'draw_legend']

_FONT = 'DejaVu Sans'  # which matplotlib brings along
_FONT_SIZE = 12
_GAP = 4  # pixels, in the legend
_OPACITY = 0.5


def colour_of(label: int) -> tuple[int, int, int]:
    """Red, green and blue, from 0 to 255, of a label: neighbours differ much, and it is the same in every picture."""
    # steps of the golden ratio never come close to an earlier hue soon
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, (1, 0.55, 0.8)[label % 3], (1, 0.95, 0.65)[label % 3])
    return round(255 * red), round(255 * green), round(255 * blue)


@torch.no_grad()
def draw_detections(
    image: torch.Tensor,
    found: dict[str, torch.Tensor],
    classes: Sequence[str],
    threshold: float = 0.5,
    enlarge: int = 1,
) -> torch.Tensor:
    """An image with the objects found in it: boxes, masks where there are some, and captions of class and score.

    Args:
        image: 3×H×W, uint8, or floating-point from 0 to 1.
        found: What torchvision's detection models return for it: 'boxes', 'labels', 'scores' and perhaps 'masks'.
        classes: Name of each label.
        threshold: Objects of at least this score are drawn, those of higher scores over the others.
        enlarge: How many times as high and wide the picture is: captions of small images need it.

    Returns:
        3 × (enlarge · H) × (enlarge · W), as the image is.
    """
    picture = _larger(image.detach().cpu().as_subclass(torch.Tensor), enlarge)
    order = found['scores'].argsort()
    found = {key: found[key][order[found['scores'][order] >= threshold]].cpu() for key in found}
    labels = found['labels'].tolist()
    if not labels:
        return picture
    colours = [colour_of(label) for label in labels]
    if 'masks' in found:
        painted = F.to_dtype(picture, torch.float32, scale=True)
        for mask, colour in zip(_larger(found['masks'][:, 0].float(), enlarge) > 0.5, colours, strict=True):
            painted[:, mask] = painted[:, mask].lerp(torch.tensor(colour)[:, None] / 255, _OPACITY)
        picture = F.to_dtype(painted, picture.dtype, scale=True)
    captions = [
        printable(f'{classes[label]} {score:.2f}')
        for label, score in zip(labels, found['scores'].tolist(), strict=True)
    ]
    boxes = enlarge * found['boxes'].float()
    return draw_bounding_boxes(
        picture, boxes, captions, colours, width=2, font=findfont(_FONT), font_size=_FONT_SIZE, fill_labels=True
    )


@torch.no_grad()
def draw_labels(
    image: torch.Tensor, labels: torch.Tensor, classes: Sequence[str], ignore_index: int = 255, enlarge: int = 1
) -> torch.Tensor:
    """An image with the colours of its pixels' classes; a class named 'background' has none.

    Args:
        image: 3×H×W, uint8, or floating-point from 0 to 1.
        labels: H×W.
        classes: Name of each label.
        ignore_index: Label of pixels that are left as they are.
        enlarge: How many times as high and wide the picture is.

    Returns:
        3 × (enlarge · H) × (enlarge · W), as the image is.
    """
    picture = image.detach().cpu().as_subclass(torch.Tensor)
    labels = labels.cpu().as_subclass(torch.Tensor)
    counted = labels != ignore_index
    colours = torch.tensor([colour_of(label) for label in range(len(classes))]) / 255
    painted = F.to_dtype(picture, torch.float32, scale=True)
    painted = painted.lerp(colours[labels.where(counted, 0)].permute(2, 0, 1), _OPACITY)
    if 'background' in classes:
        counted &= labels != classes.index('background')
    return _larger(F.to_dtype(painted, picture.dtype, scale=True).where(counted, picture), enlarge)


def draw_legend(labels: torch.Tensor, classes: Sequence[str], width: int, ignore_index: int = 255) -> torch.Tensor:
    """Colours and names of the classes in a label map, to stand below its picture.

    Args:
        labels: Label maps of any shape.
        classes: Name of each label.
        width: Of the picture.
        ignore_index: Label of pixels without a class.

    Returns:
        3×h×width, uint8, on white; h is what the names take.
    """
    font = ImageFont.truetype(findfont(_FONT), _FONT_SIZE)
    line = _FONT_SIZE + _GAP
    left, top, places = _GAP, _GAP, []
    for label in labels.unique().tolist():
        if label == ignore_index or classes[label] == 'background':
            continue
        name = printable(classes[label])
        extent = line + round(font.getlength(name)) + 3 * _GAP
        if left > _GAP and left + extent > width:
            left, top = _GAP, top + line
        places.append((left, top, name, colour_of(label)))
        left += extent
    legend = Image.new('RGB', (width, top + line if places else 0), 'white')
    draw = ImageDraw.Draw(legend)
    for x, y, name, colour in places:
        draw.rectangle((x, y, x + _FONT_SIZE, y + _FONT_SIZE), fill=colour)
        draw.text((x + line, y + _FONT_SIZE), name, fill='black', font=font, anchor='ls')
    return torch.from_numpy(np.array(legend)).permute(2, 0, 1)


def _larger(x: torch.Tensor, times: int) -> torch.Tensor:
    return x.repeat_interleave(times, -1).repeat_interleave(times, -2)
