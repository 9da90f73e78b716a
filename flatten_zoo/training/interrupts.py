"""Ctrl-C and termination that take effect between two batches.

Raised just anywhere, a KeyboardInterrupt may land in a destructor of the data loader, where Python drops it and the
run goes on; and the loader's processes, which a terminal interrupts as well, would die under the batch in the making.
"""
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from .logs import log

__all__ = ['Terminated', 'exit_status', 'interrupts_between_batches', 'raise_if_interrupted']


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which clusters announce that they take the machine away."""


_pending: type[KeyboardInterrupt] | None = None


@contextmanager
def interrupts_between_batches() -> Iterator[None]:
    """Within, the first Ctrl-C or SIGTERM waits for the next `raise_if_interrupted`; a second one acts at once."""
    global _pending

    def note(number, frame):
        global _pending
        if _pending is not None:
            raise _pending
        _pending = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        log.info('stopping after this batch; a second signal stops at once')

    _pending = None
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except RuntimeError:  # anywhere in a batch: a signal to all processes has ended those of the loader
        raise_if_interrupted()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _pending = None


def raise_if_interrupted() -> None:
    """Raise the KeyboardInterrupt or Terminated that is waiting, if one is."""
    if _pending is not None:
        raise _pending


def exit_status(interruption: KeyboardInterrupt) -> int:
    """Exit status after an interruption, as shells have it."""
    return 128 + (signal.SIGTERM if isinstance(interruption, Terminated) else signal.SIGINT)
