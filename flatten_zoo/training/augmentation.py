"""timm's augmentations, where Pillow has become stricter than they are."""
from PIL import Image
from timm.data import auto_augment

__all__ = ['allow_strongest_posterize']


def allow_strongest_posterize() -> None:
    """Let RandAugment and AutoAugment posterize down to 0 bits, their strongest level, which Pillow 13 refuses.

    With `rand-m9-mstd0.5-inc1` it is drawn for about 3 images in 1000, and then ends the run.
    """
    for name in ('Posterize', 'PosterizeIncreasing', 'PosterizeOriginal'):
        auto_augment.NAME_TO_OP[name] = _posterize


def _posterize(image: Image.Image, bits_to_keep: int, **kwargs) -> Image.Image:
    if bits_to_keep < 1:
        return image.point(lambda _: 0)
    return auto_augment.posterize(image, bits_to_keep, **kwargs)
