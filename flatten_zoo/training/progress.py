"""Progress of a long loop: a bar on a terminal, a line now and then elsewhere."""
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

from .interrupts import raise_if_interrupted
from .logs import log

__all__ = ['Progress']

class Progress:
    """Iterates over batches and shows how far it is.

    Args:
        batches: What to iterate over; its length, if known, gives the time left.
        label: What the loop does.
        interval: Batches between two lines when standard error is not a terminal.
    """

    REFRESH = 0.5  # seconds between two figures on a bar

    def __init__(self, batches: Iterable, label: str, interval: int):
        self.batches = batches
        self.label = label
        self.interval = interval
        self.total = len(batches) or None
        self.on_terminal = sys.stderr.isatty()
        self.done = 0
        self.images = 0
        self.started = self.shown = time.monotonic()

    def __iter__(self) -> Iterator[Any]:
        with tqdm(
                total=self.total, desc=self.label, unit='batch', leave=False, dynamic_ncols=True,
                disable=not self.on_terminal,
        ) as self.bar:
            self.started = time.monotonic()
            try:
                for batch in self.batches:
                    yield batch
                    self.bar.update()
                    raise_if_interrupted()
            except RuntimeError:
                raise_if_interrupted()  # it took the loader's processes along
                raise

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
            figures['left'] = tqdm.format_interval(elapsed / self.done * (self.total - self.done))
        text = '  '.join(f'{name} {value}' for name, value in figures.items())
        log.info('%s  batch %d/%s  %s', self.label, self.done, self.total or '?', text)

    @property
    def rate(self) -> float:
        """Images per second so far."""
        return self.images / max(time.monotonic() - self.started, 1e-9)
