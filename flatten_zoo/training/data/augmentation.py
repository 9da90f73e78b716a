"""timm's augmentations: policies that it would fail on late, and where Pillow has become stricter than they are."""
import re

from PIL import Image
from timm.data import auto_augment, create_transform

from flatten_zoo.errors import UsageError, first_line

__all__ = ['allow_strongest_posterize', 'check_policy']


def check_policy(policy: str | None) -> None:
    """Refuse a policy of `--aa` that timm does not have, or a section of it that timm would pass over.

    Raises:
        UsageError: The policy, and what is wrong.
    """
    if not policy:
        return
    name, *sections = policy.split('-')
    try:
        create_transform(32, is_training=True, auto_augment=policy)
    except Exception as e:  # assertions, missing keys and numbers that are none
        raise UsageError(f"--aa '{policy}': no policy of timm's ({first_line(e)}); {_POLICIES}") from e
    for section in sections:
        if name == 'rand' and section.startswith('t'):  # a set of transforms
            passed_over = auto_augment.rand_augment_choices(section[1:]) is auto_augment.rand_augment_choices('')
        else:
            passed_over = not re.search(r'\d', section)
        if passed_over:
            raise UsageError(f"--aa '{policy}': timm passes over '{section}'; {_POLICIES}")


_POLICIES = "such as 'rand-m9-mstd0.5-inc1', 'augmix-m5-w4-d2' or 'original-mstd0.5'"


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
