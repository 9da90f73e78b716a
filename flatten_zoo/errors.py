"""Errors that a person can act on, and how commands report them."""

import difflib
import errno
import os
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable

__all__ = ['UsageError', 'first_line', 'printable', 'report_usage_errors', 'show_traceback', 'shown', 'unknown_name']


class UsageError(ValueError):
    """What was asked for cannot be done.

    The message is one line that names the argument, its value and the way out. Characters that steer a terminal are
    in it as Python writes them.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """Text on one line, with the characters that steer a terminal as Python writes them."""
    return ''.join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def shown(value: object) -> str:
    """A value as Python writes it, shortened."""
    try:
        return _repr.repr(value)
    except ValueError:  # whole numbers of thousands of digits
        return f'a {type(value).__name__}'


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Error for a name that does not exist, with the nearest names that do.

    Args:
        kind: What the name stands for, for example 'model'.
        name: The name that was asked for.
        known: Every name that exists.
    """
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return UsageError(f"unknown {kind} '{name}'" + (f'; did you mean {", ".join(near)}?' if near else ''))


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def show_traceback(error: BaseException) -> None:
    """Print what is behind an error that a person sees as one line, if `FLATTEN_ZOO_TRACEBACK=1` asks for it."""
    if os.environ.get('FLATTEN_ZOO_TRACEBACK', '0') not in ('', '0'):
        traceback.print_exception(error, file=sys.stderr)


_OF_A_NAME = {errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG}  # which even asking for a file of that name raises


def report_usage_errors(command: Callable[[], int | None]) -> int:
    """Run a command and turn a `UsageError` into one line on standard error; any other keeps its traceback.

    Names that the file system does not take are mistakes as well: too long, in a closed folder, or links without end.

    Returns:
        The command's own exit status (None counts as 0), or 2 after a mistake.
    """
    try:
        return command() or 0
    except (UsageError, OSError) as e:
        if isinstance(e, OSError) and (e.errno not in _OF_A_NAME or e.filename is None):
            raise
        show_traceback(e)
        print(f'error: {e if isinstance(e, UsageError) else f"{shown(e.filename)}: {e.strerror}"}', file=sys.stderr)
        return 2
