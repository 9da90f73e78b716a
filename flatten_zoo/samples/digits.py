"""The embedded data: scikit-learn's handwritten digits as an image folder.

1797 images of 8 × 8 pixels in ten classes, from the test part of the UCI data set 'Optical Recognition of Handwritten
Digits'. They ship inside scikit-learn, so nothing is downloaded.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from flatten_zoo.errors import UsageError, report_usage_errors
from flatten_zoo.files import write_beside

__all__ = ['main', 'write_digits']

HELD_OUT = 360
TOTAL = 1797


def write_digits(folder: str | Path) -> bool:
    """Write the digits to `FOLDER/train/CLASS/*.png` and `FOLDER/validation/CLASS/*.png`.

    The split is always the same: 360 held-out images, from each class its share. The folder appears whole or not at
    all, and one that is already there is left as it is.

    Args:
        folder: Folder to make.

    Returns:
        Whether it was written now.

    Raises:
        UsageError: scikit-learn is missing, or the folder exists and holds something else.
    """
    folder = Path(folder)
    if folder.exists():
        found = [len(list(folder.glob(f'{split}/?/*.png'))) for split in ('train', 'validation')]
        if found != [TOTAL - HELD_OUT, HELD_OUT]:
            raise UsageError(f"'{folder}' exists but does not hold the digits: remove it or give another folder")
        return False
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as e:
        raise UsageError("the digits come with scikit-learn: pip install 'flatten_zoo[demo]'") from e
    digits = load_digits()
    splits = train_test_split(np.arange(TOTAL), test_size=HELD_OUT, stratify=digits.target, random_state=0)
    with write_beside(folder) as temporary:
        for split, indices in zip(('train', 'validation'), splits, strict=True):
            for index in indices:
                path = temporary / split / str(digits.target[index]) / f'{index:04d}.png'
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.rint(digits.images[index] * (255 / 16)).astype(np.uint8)).save(path)
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Write the digits where the command line says."""
    parser = argparse.ArgumentParser(
        prog='python -m flatten_zoo.samples.digits', description='Write the handwritten digits as an image folder.'
    )
    parser.add_argument('folder', nargs='?', default='data/digits', help='folder to make (default: %(default)s)')
    folder = parser.parse_args(argv).folder
    done = 'written to' if write_digits(folder) else 'already in'
    print(f'{TOTAL - HELD_OUT} training and {HELD_OUT} validation images of digits {done} {folder}')


if __name__ == '__main__':
    sys.exit(report_usage_errors(main))
