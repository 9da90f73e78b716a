"""Files that commands write beside what they print: pictures and arrays, whole or not at all."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from .errors import UsageError
from .files import write_beside

__all__ = ['check_arrays_path', 'check_path', 'check_picture_path', 'save_arrays', 'save_figure', 'written_whole']


def check_picture_path(path: Path) -> None:
    """Raises a `UsageError` where no picture can be written, before hours of work are lost on it."""
    check_path('a picture', path, FigureCanvasAgg.get_supported_filetypes())


def check_arrays_path(path: Path) -> None:
    """Raises a `UsageError` where no arrays can be written."""
    check_path('arrays', path, ['npz'])


def check_path(what: str, path: Path, formats: Collection[str]) -> None:
    """Raises a `UsageError` where something can't be written, or its suffix is none of the formats."""
    if path.suffix[1:].lower() not in formats:
        raise UsageError(f"cannot write {what} to '{path}': its name must end in one of {', '.join(formats)}")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {what} to '{path}': there is no folder '{path.parent}'")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"cannot write {what} to '{path}': it is a folder, or its folder is not open to writing")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """`files.write_beside`, with a `UsageError` where the file can't be written."""
    try:
        with write_beside(path) as unfinished:
            yield unfinished
    except OSError as e:  # a full disk, for one
        raise UsageError(f"cannot write '{path}': {e}") from e


def save_figure(figure: Figure, path: Path, dpi: int = 150, palette: bool = False) -> None:
    """Writes a figure; the suffix names the format.

    Args:
        figure: What to write.
        path: The file.
        dpi: Pixels per inch.
        palette: Give a PNG file 256 colours only, which makes one with photographs several times smaller.

    Raises:
        UsageError: The file cannot be written.
    """
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, dpi=dpi)
        if palette and path.suffix.lower() == '.png':
            # chosen for its coverage, so that small marks keep their colours
            picture = Image.open(unfinished).convert('RGB').quantize(method=Image.Quantize.MAXCOVERAGE, kmeans=3)
            picture.save(unfinished, format='png', optimize=True)


def save_arrays(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Writes arrays under their names, as `numpy.load` reads them.

    Raises:
        UsageError: The file cannot be written.
    """
    with written_whole(path) as unfinished, unfinished.open('wb') as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # none has the name of its option
