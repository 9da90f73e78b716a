"""Small data for training tests: images that any network learns in an epoch or two."""
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {'blue': (20, 30, 220), 'green': (30, 200, 40), 'red': (220, 30, 20)}


def write_images(root: Path, train: int = 12, validation: int = 5, classes: tuple[str, ...] = tuple(COLOURS)) -> Path:
    """Write `root/SPLIT/CLASS/*.png`, noisy 20 × 24 images of the class's colour."""
    random = np.random.default_rng(0)
    for split, number in (('train', train), ('validation', validation)):
        for name in classes:
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(number):
                noise = random.integers(-20, 20, (20, 24, 3))
                pixels = np.clip(np.array(COLOURS[name]) + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f'{index}.png')
    return root


def write_tars(root: Path, images: Path) -> Path:
    """Write `root/SPLIT.tar` from a folder made by `write_images`."""
    root.mkdir()
    for split in ('train', 'validation'):
        with tarfile.open(root / f'{split}.tar', 'w') as tar:
            tar.add(images / split, arcname='.')
    return root
