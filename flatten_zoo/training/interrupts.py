"""Ctrl-C that takes effect between two batches.

Raised just anywhere, a KeyboardInterrupt may land in a destructor of the data loader, where Python drops it and the
run goes on; and the loader's processes, which a terminal interrupts as well, would die under the batch in the making.
"""
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from .logs import log

__all__ = ['interrupts_between_batches', 'raise_if_interrupted']

_pending = False


@contextmanager
def interrupts_between_batches() -> Iterator[None]:
    """Within, the first Ctrl-C waits for the next `raise_if_interrupted`; a second one acts at once."""
    global _pending

    def note(number, frame):
        global _pending
        if _pending:
            raise KeyboardInterrupt
        _pending = True
        log.info('stopping after this batch; Ctrl-C again stops at once')

    _pending = False
    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _pending = False


def raise_if_interrupted() -> None:
    """Raise the KeyboardInterrupt that is waiting, if one is."""
    if _pending:
        raise KeyboardInterrupt
