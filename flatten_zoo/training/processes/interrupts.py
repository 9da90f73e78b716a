"""Ctrl-C and termination that take effect between two batches, and in all processes at the same place.

Raised just anywhere, a KeyboardInterrupt may land in a destructor of the data loader, where Python drops it and the
run goes on; the loader's processes, which a terminal interrupts as well, would die under the batch in the making; and
of several training processes, those that go on would wait for the others for ever.
"""
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..output.logs import log
from .distributed import highest

__all__ = ['Terminated', 'exit_status', 'interrupts_between_batches', 'raise_if_interrupted', 'until_interrupted']


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which clusters announce that they take the machine away."""


_KINDS = (None, KeyboardInterrupt, Terminated)
_pending = 0  # index of what is waiting in this process
_parent = os.getppid()


def _waiting() -> int:
    """What is waiting in this process. When torchrun is killed, it cannot terminate its processes, but is missed."""
    global _pending
    if not _pending and 'TORCHELASTIC_RUN_ID' in os.environ and os.getppid() != _parent:
        log.info('torchrun has ended: stopping after this batch')
        _pending = _KINDS.index(Terminated)
    return _pending


@contextmanager
def interrupts_between_batches() -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM wait for the next `raise_if_interrupted`; a second Ctrl-C acts at once."""
    global _pending
    process = os.getpid()

    def note(number, frame):
        global _pending
        if os.getpid() != process:  # one of the loader's, which have inherited this
            return
        if not _pending:
            if hasattr(signal, 'SIGCHLD'):  # the end of the loader's processes matters when their batch is missing
                before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
            _pending = _KINDS.index(Terminated if number == signal.SIGTERM else KeyboardInterrupt)
            log.info('stopping after this batch; Ctrl-C stops at once')
        elif number == signal.SIGINT:  # SIGTERM may come twice, from the batch system and from torchrun
            raise KeyboardInterrupt

    _pending = 0
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except RuntimeError as e:  # of what the same signal has ended, such as another training process
        if _pending:
            raise _KINDS[_pending] from e
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _pending = 0


def raise_if_interrupted() -> None:
    """Raise the KeyboardInterrupt or Terminated that is waiting here or in another process; all have to ask."""
    interruption = _KINDS[highest(_waiting())]
    if interruption is not None:
        raise interruption


def until_interrupted(batches: Iterable, in_step: bool) -> Iterator[Any]:
    """Batches, up to an interruption, which is raised in all processes.

    Args:
        batches: A loader's batches.
        in_step: The processes go through their batches together, and stop after the same one. Otherwise each may have
            another number of them and stops on its own, and they meet after their last.
    """
    end = object()
    iterator = iter(batches)
    batch = None
    while batch is not end:
        try:
            batch = next(iterator, end)
        except RuntimeError:
            if not _pending:
                raise
            batch = end  # the signal has ended the loader's processes, too
        if in_step or _waiting() or batch is end:
            raise_if_interrupted()
        if batch is not end:
            yield batch


def exit_status(interruption: KeyboardInterrupt) -> int:
    """Exit status after an interruption, as shells have it."""
    return 128 + (signal.SIGTERM if isinstance(interruption, Terminated) else signal.SIGINT)
