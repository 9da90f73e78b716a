"""Writing files and folders whole or not at all."""
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ['write_beside']


@contextmanager
def write_beside(path: Path) -> Iterator[Path]:
    """A temporary file or folder's path next to `path`, moved there if all goes well and removed if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f'.{path.name}.') as folder:
        temporary = Path(folder) / path.name
        yield temporary
        os.replace(temporary, path)
