"""Progress of a long loop: a bar on a terminal, a line now and then elsewhere."""
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

from ..processes.distributed import is_first, world_size
from ..processes.interrupts import until_interrupted
from .logs import log

__all__ = ['Progress']


class Progress:
    """Iterates over batches and shows how far it is.

    Args:
        batches: What to iterate over; its length, if known, gives the time left.
        label: What the loop does.
        interval: Batches between two lines when standard error is not a terminal.
        in_step: Whether all processes have the same number of batches and go through them together.
    """

    REFRESH = 0.5  # seconds between two figures on a bar

    def __init__(self, batches: Iterable, label: str, interval: int, in_step: bool = True):
        self.batches = batches
        self.label = label
        self.interval = interval
        self.in_step = in_step
        self.total = len(batches) or None
        self.on_terminal = sys.stderr.isatty() and is_first()
        self.done = 0
        self.skipped = 0
        self.images = 0
        self.started = self.shown = time.monotonic()

    def __iter__(self) -> Iterator[Any]:
        with tqdm(
                total=self.total, desc=self.label, unit='batch', leave=False, dynamic_ncols=True,
                disable=not self.on_terminal,
        ) as self.bar:
            self.started = time.monotonic()
            for batch in until_interrupted(self.batches, self.in_step):
                yield batch
                self.bar.update()

    def skip(self) -> None:
        """Pass over a batch that an earlier process has finished; it counts for the place, not for the speed."""
        self.done += 1
        self.skipped += 1
        self.started = time.monotonic()

    def advance(self, images: int) -> bool:
        """Count a finished batch.

        Returns:
            Whether figures are wanted now: they cost a wait for the device, so they are not computed every time.
        """
        self.done += 1
        self.images += images
        if self.on_terminal:
            return self.done == self.total or time.monotonic() - self.shown > self.REFRESH
        return self.done % self.interval == 0

    def show(self, **figures: str) -> None:
        """Show figures, the speed and the time left."""
        self.shown = time.monotonic()
        elapsed = self.shown - self.started
        figures['images/s'] = f'{self.rate:.0f}'
        if self.on_terminal:
            self.bar.set_postfix(figures)
            return
        if self.total:
            figures['left'] = tqdm.format_interval(elapsed / (self.done - self.skipped) * (self.total - self.done))
        text = '  '.join(f'{name} {value}' for name, value in figures.items())
        log.info('%s  batch %d/%s  %s', self.label, self.done, self.total or '?', text)

    @property
    def rate(self) -> float:
        """Images per second of all processes so far."""
        return world_size() * self.images / max(time.monotonic() - self.started, 1e-9)
