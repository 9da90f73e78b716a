"""The libraries of the `dense` and the `video` extra, imported where they are used."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import UsageError

__all__ = ['dense_extra']


@contextmanager
def dense_extra(extra: str = 'dense') -> Iterator[None]:
    """Around imports: says how to install what is missing.

    Args:
        extra: Name of the extra that has it.

    Raises:
        UsageError: An import failed.
    """
    try:
        yield
    except ImportError as e:
        raise UsageError(f"{e.name or e} is missing: pip install 'flatten_zoo[{extra}]'") from e
