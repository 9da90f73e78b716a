"""The benchmark: models side by side in every mode, batch size and image size."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.models import model_entrypoint, split_model_name_tag
from tqdm import tqdm

from .._torch import dynamo_config
from ..cost.comparison import default_size
from ..errors import UsageError, first_line, unknown_name
from ..weights.catalogue import zoo_models
from .alternating import in_turn, timed
from .modes import prepare

__all__ = ['Report', 'Timing', 'bench', 'family', 'family_models']


@dataclass(frozen=True)
class Timing:
    """How fast a model runs.

    Attributes:
        model: Its name.
        mode: One of `MODES`.
        batch_size: Images at a time.
        img_size: Side of the images.
        seconds: Of one batch, for every run.
        peak_memory: Bytes at the worst moment; None where nothing says it.
        ratio: How many times as fast as the first model, by medians; None where that one failed.
    """

    model: str
    mode: str
    batch_size: int
    img_size: int
    seconds: tuple[float, ...]
    peak_memory: int | None
    ratio: float | None

    @property
    def quartiles(self) -> tuple[float, ...]:
        """Seconds of one batch: lower quartile, median, upper quartile."""
        if len(self.seconds) == 1:  # Ctrl-C was quick
            return self.seconds * 3
        return tuple(statistics.quantiles(self.seconds, n=4, method='inclusive'))


def family(name: str) -> str:
    """The family of a model: the module that it is from, without 'flatten_'; 'swin' for flatten_swin_t."""
    module = model_entrypoint(split_model_name_tag(name)[0]).__module__
    return module.rpartition('.')[2].removeprefix('flatten_')


def family_models(name: str) -> list[str]:
    """The zoo's models of a family.

    Raises:
        UsageError: There is no such family.
    """
    families = {model: family(model) for model in zoo_models()}
    if name not in families.values():
        raise UsageError(
            f'{unknown_name("family", name, set(families.values()))}; '
            f'--family is one of {", ".join(sorted(set(families.values())))}'
        )
    return [model for model, its in families.items() if its == name]


@dataclass
class Report:
    """What came out of a benchmark.

    Attributes:
        timings: What ran.
        failures: What did not, in one line each.
        interrupted: Whether Ctrl-C ended it; the timings are then those that there was time for.
    """

    timings: list[Timing] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False


def bench(
    names: Sequence[str],
    modes: Sequence[str],
    batch_sizes: Sequence[int],
    sizes: Sequence[int] | None,
    seconds: float,
    device: torch.device,
    train: bool = False,
) -> Report:
    """Time models; those of one mode, batch size and image size take turns.

    Args:
        names: Any model names of timm.
        modes: Of `MODES`; with `train`, of `TRAINING_MODES`.
        batch_sizes: Numbers of images at a time.
        sizes: Sides of the images; each model's own if None.
        seconds: Time for each figure.
        device: Where the models run.
        train: Time a training step in place of a forward pass.
    """
    report = Report()
    own = {name: default_size(name) for name in names} if sizes is None else {}
    choices: tuple[Sequence[Any], ...] = (modes, batch_sizes, sizes or [None])
    settings = list(itertools.product(*map(dict.fromkeys, choices)))
    limit = max(dynamo_config.recompile_limit, 2 * len(names))  # models of one class share it
    with (
        tqdm(total=len(settings) * len(names), unit='figure', leave=False, disable=None) as bar,
        dynamo_config.patch(recompile_limit=limit),
    ):
        try:
            for mode, batch_size, size in settings:
                sides = {name: size or own[name] for name in names}
                _measure(report, bar, sides, mode, batch_size, seconds, device, train)
        except KeyboardInterrupt:
            report.interrupted = True
    return report


def _measure(
    report: Report,
    bar: tqdm,
    sides: dict[str, int],
    mode: str,
    batch_size: int,
    seconds: float,
    device: torch.device,
    train: bool,
) -> None:
    """Time models side by side, by their names and image sizes; what was timed is reported after Ctrl-C too."""
    prepared = {}
    times: dict[str, list[float]] = {}

    def fail(name: str, error: Exception) -> None:
        message = first_line(error).removeprefix(f"'{name}' ")
        report.failures.append(f'{name}, {mode}, batch {batch_size}, size {sides[name]}: {message}')

    torch.compiler.reset()
    try:
        for name, side in sides.items():
            bar.set_description(f'preparing {name}, {mode}')
            try:
                prepared[name] = prepare(name, mode, batch_size, side, device, train)
            except Exception as e:  # what models, compilers and runtimes raise is theirs
                fail(name, e)
        bar.set_description(f'timing {mode}, batch {batch_size}')
        runs = {name: model.run for name, model in prepared.items()}
        for name, run in in_turn(runs, seconds * len(runs)):
            try:
                times.setdefault(name, []).append(timed(run))
            except Exception as e:  # memory that others took meanwhile, for one
                fail(name, e)
                del runs[name], times[name], prepared[name]
        bar.update(len(sides))
    finally:
        medians = {name: statistics.median(seen) for name, seen in times.items() if seen}
        first = medians.get(next(iter(sides)))
        report.timings += [
            Timing(
                name,
                mode,
                batch_size,
                sides[name],
                tuple(times[name]),
                prepared[name].peak_memory,
                first and first / median,
            )
            for name, median in medians.items()
        ]
