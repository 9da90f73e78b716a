"""Timing several things in turn, so that a machine that is busy for a while is busy for all of them."""

import time
from collections.abc import Callable, Iterator

import torch

__all__ = ['ROUNDS', 'in_turn', 'timed']

ROUNDS = 5  # at least

Run = Callable[[], object]


def in_turn(runs: dict[str, Run], seconds: float) -> Iterator[tuple[str, Run]]:
    """Each of them, over and over until the time is over, at least `ROUNDS` times.

    Args:
        runs: By name; those taken out on the way do not come again.
        seconds: Time for all of them together.
    """
    end = time.perf_counter() + seconds
    rounds = 0
    while runs and (rounds < ROUNDS or time.perf_counter() < end):
        yield from list(runs.items())
        rounds += 1


def timed(run: Run) -> float:
    """Seconds that it takes; on an accelerator it has to wait for the device itself.

    Raises:
        RuntimeError: It is compiled, and would compile again: its time would be that of the compiler.
    """
    with torch.compiler.set_stance('fail_on_recompile'):
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
