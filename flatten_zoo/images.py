"""Pictures in files as the networks take them: upright, opaque, eight bits a channel."""

import contextlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from .errors import UsageError, first_line

__all__ = ['IMAGE_ERRORS', 'eight_bits', 'image_suffixes', 'naming', 'open_image', 'two_sides']

# What Pillow raises for files that are no pictures or damaged ones, and `eight_bits` for values out of range.
IMAGE_ERRORS = (EOFError, OSError, SyntaxError, ValueError, struct.error, zlib.error, Image.DecompressionBombError)

# Formats that Pillow only identifies, or that another program draws.
_NOT_DECODED = {'BUFR', 'EPS', 'GRIB', 'HDF5', 'MPEG', 'WMF'}
_BITS_PER_SAMPLE, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0  # of TIFF


def image_suffixes() -> set[str]:
    """Suffixes of the files that Pillow decodes, in lower case."""
    return {
        suffix
        for suffix, name in Image.registered_extensions().items()
        if name in Image.OPEN and name not in _NOT_DECODED
    }


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Around the reading of a file: what is wrong with it becomes one line that names it.

    Raises:
        UsageError: An error of `IMAGE_ERRORS` came up.
    """
    try:
        yield
    except UsageError:
        raise
    except IMAGE_ERRORS as e:
        raise UsageError(f"cannot read '{path}': {first_line(e)}") from e


def open_image(path: str | Path, mode: str = 'RGB') -> Image.Image:
    """The picture in a file, as `eight_bits` has it; the first one of several.

    Raises:
        IMAGE_ERRORS: There is no such file, it is no picture, or one without a range of values.
    """
    with Image.open(path) as image:
        return eight_bits(image, mode)


def eight_bits(image: Image.Image, mode: str = 'RGB') -> Image.Image:
    """A picture as one sees it, with 8 bits a channel.

    It is turned as its EXIF orientation says. What is transparent shows white, unless the mode has transparency itself.
    Greyscale of more than 8 bits, which Pillow would cut off at 255, is scaled by the range of its format: 16 bits from
    0 to 65535 (12 bits in TIFF to 4095), 32-bit integers the same, floating-point numbers from 0 to 1.

    Args:
        image: Any picture of Pillow's, which may be changed.
        mode: Pillow's mode to convert to.

    Raises:
        ValueError: Its values are not in that range, or there is no way from its mode to the other.
    """
    image.load()
    with contextlib.suppress(Exception):  # damaged metadata, which say nothing; the pixels are loaded
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith(('I', 'F')):
        image = _scaled(image)
    elif image.has_transparency_data and not mode.endswith('A'):
        image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image.convert('RGBA'))
    return image.convert(mode)


def _scaled(image: Image.Image) -> Image.Image:
    """Greyscale of more than 8 bits in 8 bits."""
    tags = getattr(image, 'tag_v2', {})
    if image.mode.startswith('I;'):
        white = 2 ** tags.get(_BITS_PER_SAMPLE, (16,))[0] - 1
    else:
        white = 65535 if image.mode == 'I' else 1
    values = np.asarray(image, np.float64)
    low, high = values.min(), values.max()
    if not 0 <= low <= high <= white:
        raise ValueError(
            f'its values are from {low:g} to {high:g}, where black is 0 and white {white}; save it with 8 bits'
        )
    values = np.rint(values * (255 / white)).astype(np.uint8)
    return Image.fromarray(255 - values if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else values)


def two_sides(img_size: Sequence[int]) -> tuple[int, int]:
    """Height and width, from one number or two.

    Raises:
        UsageError: There are more, or they are not positive.
    """
    if len(img_size) > 2 or min(img_size) < 1:
        raise UsageError(f'--img-size must be one or two positive numbers, got {" ".join(map(str, img_size))}')
    return img_size[0], img_size[-1]
