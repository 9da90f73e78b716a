"""`flatten-zoo predict-dense`: pictures of one's own images with what a trained network finds in them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torchvision.transforms.v2 import functional as F
from torchvision.utils import save_image
from tqdm import tqdm

from flatten_zoo.errors import UsageError
from flatten_zoo.figures import written_whole
from flatten_zoo.images import naming, open_image
from flatten_zoo.predict.pictures import find_pictures
from flatten_zoo.training.loop.model import resolve_device

from .trained import open_run

__all__ = ['predict']


@torch.inference_mode()
def predict(folder: Path, sources: Sequence[Path], output: Path, device: str) -> tuple[list[Path], list[str]]:
    """Draw what a network finds in images.

    Args:
        folder: Output folder of train-dense.
        sources: Images, and folders of them.
        output: Folder for the pictures, each with its image's name (in folders: its path there) and `.png` after it.
        device: Where to run.

    Returns:
        The pictures, and what could not be read.

    Raises:
        UsageError: What was asked for cannot be done; then nothing is written.
    """
    places: dict[Path, Path] = {}
    for source in sources:
        for path in find_pictures([source]):
            name = path.relative_to(source) if source.is_dir() else Path(path.name)
            place = output / name.with_name(f'{name.name}.png')
            if places.setdefault(place, path) != path:
                raise UsageError(f"'{places[place]}' and '{path}' would be the same picture '{place}'")
    task = open_run(folder)
    where = resolve_device(device)
    network = task.network.to(where)
    failures = []
    for place, path in tqdm(list(places.items()), unit='image', leave=False, disable=None):
        try:
            with naming(path):
                image = F.to_dtype(F.to_image(open_image(path)), torch.float32, scale=True)
        except UsageError as e:
            failures.append(str(e))
            del places[place]
            continue
        picture = task.picture(network, image.as_subclass(torch.Tensor).to(where))
        with written_whole(place) as temporary:
            save_image(picture, temporary)
    return list(places), failures
