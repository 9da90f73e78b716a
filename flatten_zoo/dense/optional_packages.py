"""The libraries of the `dense` extra, imported where they are used."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import UsageError

__all__ = ['dense_extra']


@contextmanager
def dense_extra() -> Iterator[None]:
    """Around imports: says how to install what is missing.

    Raises:
        UsageError: An import failed.
    """
    try:
        yield
    except ImportError as e:
        raise UsageError(f"{e.name or e} is missing: pip install 'flatten_zoo[dense]'") from e
