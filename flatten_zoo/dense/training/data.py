"""Which images come when: an order and augmentations that depend on the seed and the place in training alone.

They are the same for any number of processes and of loading workers, and for a run that was stopped and continued.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset

__all__ = ['Batches', 'SeededItems', 'seed_of']


def seed_of(*numbers: int) -> int:
    """A seed of 32 bits from numbers of which none is negative."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class Batches(BatchSampler):
    """Batches of places, each a pass over the data and the index of an item, for some of the batches of a training.

    In every pass each item comes at most once, in an order of its own. What does not fill the last update is left out.

    Args:
        items: Number of items.
        batch_size: Items of a batch.
        per_update: Batches of an update of the weights, of all processes together.
        seed: Of the order.
    """

    def __init__(self, items: int, batch_size: int, per_update: int, seed: int):
        self.items = items
        self.batch_size = batch_size
        self.drop_last = True
        self.per_update = per_update
        self.updates_per_pass = items // (batch_size * per_update)
        self.seed = seed
        self.updates = range(0)

    def __len__(self) -> int:
        return len(self.updates) * self.per_update

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order, ordered = torch.empty(0), -1
        for update in self.updates:
            number, place = divmod(update, self.updates_per_pass)
            if number != ordered:
                generator = torch.Generator().manual_seed(seed_of(self.seed, number))
                order, ordered = torch.randperm(self.items, generator=generator), number
            images = self.batch_size * self.per_update
            for batch in order[place * images : (place + 1) * images].view(-1, self.batch_size).tolist():
                yield [(number, index) for index in batch]


class SeededItems(Dataset):
    """Items whose random transforms depend on the pass over the data and the item alone.

    Args:
        data: The data, whose transforms take their random numbers from torch.
        seed: Of the transforms.
    """

    def __init__(self, data: Dataset, seed: int):
        self.data = data
        self.seed = seed

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]  # torch's Dataset declares no length

    def __getitem__(self, place: tuple[int, int]) -> Any:
        number, index = place
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_of(self.seed, number, index))
            return self.data[index]
