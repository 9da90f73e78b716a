"""What a network learns: the part of training that differs from task to task."""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.utils.data import Dataset

from flatten_zoo.errors import UsageError
from flatten_zoo.training.options.parser import OptionParser

__all__ = ['Scores', 'Task', 'check_folder', 'optional']


class Scores(Protocol):
    """Scores of what has been seen so far."""

    def compute(self) -> dict[str, float]:
        """The scores by name."""

    def state(self) -> Any:
        """What has been seen, to send to another process."""

    def merge(self, state: Any) -> None:
        """Count what another process has seen."""


class Task(ABC):
    """Data, network, losses, scores and pictures of one task.

    Attributes:
        name: Its name on the command line.
        best: The score that says which weights are the best.
        best_is_low: Whether a low one is good.
        defaults: Of options of training that all tasks have.
        args: The options.
        val_data: What to validate on.
        network: The network; in training it returns what `losses` takes.
        facts: What else to write into checkpoints, such as the names of classes.
    """

    name: ClassVar[str]
    best: ClassVar[str]
    best_is_low: ClassVar[bool] = False
    defaults: ClassVar[dict[str, Any]]

    args: argparse.Namespace
    val_data: Dataset
    network: nn.Module
    facts: dict[str, Any]

    @classmethod
    @abstractmethod
    def add_options(cls, parser: OptionParser) -> None:
        """Options that this task alone has: of model and data."""

    @abstractmethod
    def __init__(self, args: argparse.Namespace, trained: bool = False, facts: dict[str, Any] | None = None):
        """Opens the validation data and builds the network.

        Args:
            args: The options.
            trained: The weights will come from a checkpoint: none are fetched.
            facts: Those of the checkpoint, in place of data, which need not be there.

        Raises:
            UsageError: That cannot be done with these options.
        """

    @abstractmethod
    def train_data(self) -> Dataset:
        """Opens what to learn from.

        Raises:
            UsageError: It is not as it should be.
        """

    @staticmethod
    @abstractmethod
    def collate(items: list[Any]) -> tuple:
        """A batch of some items."""

    @abstractmethod
    def losses(self, network: Callable, batch: tuple) -> dict[str, torch.Tensor]:
        """The losses of a batch, to be summed.

        Args:
            network: `network`, perhaps wrapped, in training.
            batch: On its device.
        """

    @abstractmethod
    def new_scores(self) -> Scores:
        """Scores of nothing yet."""

    @abstractmethod
    def score(self, network: Callable, batch: tuple, scores: Any) -> None:
        """Count a batch of one validation item.

        Args:
            network: `network` or its average, in inference.
            batch: On its device.
            scores: What `new_scores` returned.
        """

    def main_scores(self, scores: dict[str, float]) -> dict[str, float]:
        """Those of the scores that say most."""
        return scores

    @abstractmethod
    def show(self, scores: dict[str, float]) -> str:
        """Scores in words."""

    @abstractmethod
    def draw(self, network: Callable, device: torch.device, path: Path) -> None:
        """A picture of what the network makes of the first validation items."""

    def picture(self, network: Callable, image: torch.Tensor) -> torch.Tensor:
        """An image with what the network finds in it.

        Args:
            network: `network`, in inference.
            image: 3×H×W, from 0 to 1, on its device.

        Returns:
            3×H'×W', from 0 to 1.
        """
        raise NotImplementedError  # of tasks that find no classes in images


def optional(name: str) -> str | None:
    """What stands for nothing on the command line, as what it is."""
    return None if name == 'none' else name


def check_folder(folder: str) -> Path:
    """The folder that `--data` names.

    Raises:
        UsageError: It is not there.
    """
    if not Path(folder).is_dir():
        raise UsageError(f"there is no folder '{folder}' (--data)")
    return Path(folder)
