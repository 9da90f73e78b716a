"""Writing files and folders whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ['remove_temporaries', 'write_beside']

SUFFIX = '.part'  # of temporary folders


@contextmanager
def write_beside(path: Path) -> Iterator[Path]:
    """A temporary file or folder's path next to `path`, moved there if all goes well and removed if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f'.{path.name}.', suffix=SUFFIX) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        os.replace(temporary, path)


def remove_temporaries(folder: Path) -> None:
    """Remove what `write_beside` left in a folder when its process was killed; nobody may be writing there."""
    for path in folder.glob(f'.*{SUFFIX}'):
        shutil.rmtree(path)
