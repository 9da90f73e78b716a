"""Generated images of shapes in COCO's format, for trying detection and segmentation without any download.

Circles, squares and triangles of any colour and orientation before a mottled background: the classes differ in their
outline alone. Shapes may hide a part of those before them; boxes and masks are those of what can be seen.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import UsageError
from ..files import write_beside

__all__ = ['SHAPES', 'far_colour', 'mottle', 'shape_mask', 'write_shapes']

SHAPES = {'circle': None, 'square': 4, 'triangle': 3}  # corners
_MAX_SHAPES = 4
_MIN_VISIBLE = 0.6  # of each shape's area


def write_shapes(folder: str | Path, num_images: int, image_size: int | tuple[int, int] = 128, seed: int = 0) -> bool:
    """Write `FOLDER/images/*.png` and `FOLDER/instances.json`.

    The same arguments always give the same data, and image I is the same however many there are. The folder appears
    whole or not at all, and one that already holds this very data is left as it is.

    Args:
        folder: Folder to make.
        num_images: Number of images, each with one to four shapes.
        image_size: Side, or height and width, of the images in pixels; at least 32.
        seed: Two seeds have no image in common.

    Returns:
        Whether it was written now.

    Raises:
        UsageError: An argument is out of its range, pycocotools is missing, or the folder exists and holds something
            else.
    """
    folder = Path(folder)
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if num_images < 1:
        raise UsageError(f'num_images must be positive, got {num_images}')
    if min(height, width) < 32:
        raise UsageError(f'image_size must be at least 32, got {image_size}')
    if seed < 0:
        raise UsageError(f'seed must not be negative, got {seed}')
    info = {'description': 'generated shapes', 'num_images': num_images, 'image_size': [height, width], 'seed': seed}
    if folder.exists():
        if _info(folder) != info:
            raise UsageError(f"'{folder}' exists but does not hold these shapes: remove it or give another folder")
        return False
    images = []
    annotations: list[dict[str, Any]] = []
    with write_beside(folder) as temporary:
        (temporary / 'images').mkdir(parents=True)
        for image_id in range(num_images):
            pixels, objects = _draw(np.random.default_rng([seed, image_id]), height, width)
            file_name = f'{image_id:06d}.png'
            Image.fromarray(pixels).save(temporary / 'images' / file_name)
            images.append({'id': image_id, 'file_name': file_name, 'height': height, 'width': width})
            for category_id, visible in objects:
                annotations.append(
                    {
                        'id': len(annotations) + 1,  # pycocotools takes 0 for no match
                        'image_id': image_id,
                        'category_id': category_id,
                        'iscrowd': 0,
                        **_annotate(visible),
                    }
                )
        categories = [{'id': i, 'name': name} for i, name in enumerate(SHAPES, start=1)]
        content = {'info': info, 'images': images, 'annotations': annotations, 'categories': categories}
        (temporary / 'instances.json').write_text(json.dumps(content))
    return True


def _info(folder: Path) -> dict[str, Any] | None:
    """What the folder's annotations say of themselves; None where there are none that can be read."""
    try:
        return json.loads((folder / 'instances.json').read_text())['info']
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _annotate(visible: np.ndarray) -> dict[str, Any]:
    """Box (left, top, width, height), area and run-length encoding of a mask."""
    from ..dense.optional_packages import dense_extra  # that package imports this module

    with dense_extra():
        from pycocotools import mask
    encoded = mask.encode(np.asfortranarray(visible, dtype=np.uint8))
    return {
        'bbox': mask.toBbox(encoded).tolist(),
        'area': int(mask.area(encoded)),
        'segmentation': {'size': encoded['size'], 'counts': encoded['counts'].decode('ascii')},
    }


def _draw(rng: np.random.Generator, height: int, width: int) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
    """One image.

    Returns:
        Its H×W×3 pixels of 8 bits, and of each shape the category (from 1) and the H×W mask of what can be seen of it.
    """
    background = rng.uniform(0.2, 0.8, size=3)
    pixels = background + mottle(rng, height, width)
    objects: list[tuple[int, np.ndarray]] = []
    areas: list[int] = []
    for _ in range(rng.integers(1, _MAX_SHAPES + 1)):
        category = int(rng.integers(len(SHAPES)))
        shape = _shape_mask(rng, list(SHAPES.values())[category], height, width)
        colour = far_colour(rng, background)
        uncovered = [(other, mask & ~shape) for other, mask in objects]
        if any(mask.sum() < _MIN_VISIBLE * area for (_, mask), area in zip(uncovered, areas, strict=True)):
            continue  # it would hide too much of another one
        objects = [*uncovered, (category + 1, shape)]
        areas.append(shape.sum())
        pixels = np.where(shape[..., None], colour, pixels)
    pixels = pixels + rng.normal(scale=0.03, size=pixels.shape)
    return np.rint(pixels.clip(0, 1) * 255).astype(np.uint8), objects


def mottle(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A smooth H×W×1 texture: a few plane waves, between -0.15 and 0.15 together."""
    y, x = np.mgrid[:height, :width] / min(height, width)
    waves = [
        np.sin(2 * np.pi * (frequency @ [y.ravel(), x.ravel()] + phase))
        for frequency, phase in zip(rng.normal(scale=2, size=(3, 2)), rng.uniform(size=3), strict=True)
    ]
    return 0.05 * sum(waves).reshape(height, width, 1)


def _shape_mask(rng: np.random.Generator, corners: int | None, height: int, width: int) -> np.ndarray:
    """H×W mask of a disc (no corners) or regular polygon at a random place that lies inside the image."""
    radius = rng.uniform(0.12, 0.24) * min(height, width)
    centre = [rng.uniform(radius, side - radius) for side in (height, width)]
    return shape_mask(corners, centre, radius, rng.uniform(0, 2 * np.pi), height, width)


def shape_mask(
    corners: int | None, centre: Sequence[float], radius: float, angle: float, height: int, width: int
) -> np.ndarray:
    """H×W mask of a disc (no corners) or regular polygon with a circle around it; the centre is row and column."""
    y, x = np.mgrid[:height, :width] + 0.5  # centres of the pixels
    y, x = y - centre[0], x - centre[1]
    if corners is None:
        return np.hypot(y, x) <= radius
    normals = angle + 2 * np.pi * np.arange(corners) / corners
    distances = [np.cos(normal) * x + np.sin(normal) * y for normal in normals]
    return np.max(distances, axis=0) <= radius * np.cos(np.pi / corners)


def far_colour(rng: np.random.Generator, background: np.ndarray) -> np.ndarray:
    """A colour that stands out from the background."""
    while True:
        colour = rng.uniform(size=3)
        if np.linalg.norm(colour - background) > 0.5:
            return colour
