"""Several processes that train together, and signals to them.

As torchrun starts them, processes join, agree, share, and end as one. Ctrl-C and termination take effect between two
batches, and in all processes at the same place: raised just anywhere, a KeyboardInterrupt may land in a destructor of
the data loader, where Python drops it and the run goes on; the loader's processes, which a terminal interrupts as well,
would die under the batch in the making; and of several training processes, those that go on would wait for the others
for ever.
"""

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from timm.task import TrainingTask
from timm.utils import distribute_bn
from timm.utils.distributed import init_distributed_device_so, is_distributed_env, world_info_from_env
from torch import nn

from flatten_zoo._torch import default_store
from flatten_zoo.errors import UsageError, first_line

__all__ = [
    'Terminated',
    'as_one',
    'check_alone',
    'distribute_batch_norm',
    'exit_status',
    'first_of_machine_ahead',
    'from_first',
    'gathered',
    'highest',
    'interrupts_between_batches',
    'is_first',
    'is_first_to_fail',
    'join',
    'lay_out_gradients',
    'raise_if_interrupted',
    'rank',
    'total',
    'until_interrupted',
    'wait_for_all',
    'world_size',
]

_log = logging.getLogger(__name__)

T = TypeVar('T')


def world_size() -> int:
    """Number of processes that have joined, 1 if there is only this one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Number of this process among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this process is the one that writes and reports."""
    return rank() == 0


def join(device: torch.device) -> torch.device:
    """Join the other processes, if this one was started as one of several.

    NCCL (or what the device has in its place) connects the devices, Gloo the CPUs.

    Args:
        device: Device that all of them were told to use.

    Returns:
        The device of this process: on GPUs the one with its number on the machine.

    Raises:
        UsageError: There are more processes than devices, or they cannot join.
    """
    if not is_distributed_env():
        return device
    local_rank, _, processes = world_info_from_env()
    backend = 'gloo'
    if device.type != 'cpu':
        devices = torch.accelerator.device_count()
        if int(os.environ.get('LOCAL_WORLD_SIZE', local_rank + 1)) > devices:  # in all of them, also those with one
            raise UsageError(f'--nproc_per_node: there are more processes than the {devices} {device.type} devices')
        backend = f'cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}'
    try:
        return torch.device(init_distributed_device_so(device.type, dist_backend=backend)['device'])
    except (RuntimeError, ValueError) as e:
        raise UsageError(f'the {processes} processes of this run cannot join: {first_line(e)}') from e


def check_alone(program: str) -> None:
    """Refuse torchrun's several processes for a program that is one.

    Raises:
        UsageError: The program has been started several times.
    """
    processes = os.environ.get('WORLD_SIZE', '1')
    if processes != '1':
        raise UsageError(f'{program} is one process: start it without torchrun (WORLD_SIZE={processes})')


@contextmanager
def as_one() -> Iterator[None]:
    """Within, what ends one process ends all, and is said once.

    A `UsageError` that several processes make is raised in one of them; the others exit. A process that another has
    left alone exits with one line.
    """
    try:
        yield
    except UsageError:
        if is_first_to_fail():
            raise
        sys.exit(2)
    except RuntimeError as e:
        if not _is_of_communication(e):
            raise
        if is_first_to_fail(report=False):
            reason = re.sub(r'\[\S+\.cc:\d+\] ', '', first_line(e))
            print(f'error: another process of this run has ended or is out of reach: {reason}', file=sys.stderr)
        sys.exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


_FAILURES = 'flatten_zoo/failures'


def is_first_to_fail(report: bool = True) -> bool:
    """Whether no other process has reported an error; with `report`, this one has from now on."""
    if not dist.is_initialized():  # still at the command line, which is the same for all
        if world_info_from_env()[0] == 0:
            return True
        time.sleep(10)  # torchrun ends all with the first that ends, which has to be the one that reports
        return False
    try:
        return default_store().add(_FAILURES, int(report)) == int(report)
    except RuntimeError:  # the process that keeps the store is gone
        return True


def _is_of_communication(error: RuntimeError) -> bool:
    return world_size() > 1 and (isinstance(error, dist.DistError) or 'gloo' in str(error))


def highest(value: int) -> int:
    """The highest of the processes' values."""
    if world_size() == 1:
        return value
    values = torch.tensor(value)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return int(values)


def total(*values: float) -> list[float]:
    """Sums over the processes."""
    if world_size() == 1:
        return list(values)
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def from_first(value: T | None) -> T:
    """The first process's value."""
    values: list[Any] = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def gathered(value: Any) -> list[Any]:
    """On the first process the values of all, in their order; on the others nothing."""
    if world_size() == 1:
        return [value]
    values = [None] * world_size() if is_first() else None
    dist.gather_object(value, values)
    return values or []


def wait_for_all() -> None:
    """Go on when every process has come here."""
    highest(0)


@contextmanager
def first_of_machine_ahead(wanted: bool = True) -> Iterator[None]:
    """Within, the first process of each machine goes ahead of its others, to download for them."""
    ahead = world_info_from_env()[0] == 0
    if wanted and not ahead:
        wait_for_all()
    yield
    if wanted and ahead:
        wait_for_all()


def distribute_batch_norm(task: TrainingTask, how: str) -> None:
    """Give all processes the same statistics of batch norm, in the model and in its average.

    Args:
        task: The processes' task.
        how: 'reduce' for the mean of their statistics, 'broadcast' for those of the first process, '' for no change.
    """
    if world_size() == 1 or not how:
        return
    for ema in (False, True):
        model = task.get_trainable_module(ema=ema)
        if model is not None:
            distribute_bn(model, world_size(), reduce=how == 'reduce')


def lay_out_gradients(model: nn.Module) -> None:
    """Give gradients their parameters' strides where size 1 leaves them open, as in a depthwise convolution's weight.

    DistributedDataParallel compares them, and warns of a difference that is none in memory.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and 1 in parameter.shape:
            parameter.register_hook(partial(_laid_out, sizes=parameter.shape, strides=parameter.stride()))


def _laid_out(gradient: torch.Tensor, sizes: torch.Size, strides: tuple[int, ...]) -> torch.Tensor:
    same = all(ours == theirs for size, ours, theirs in zip(sizes, gradient.stride(), strides, strict=True) if size > 1)
    return gradient.as_strided(sizes, strides) if same else gradient


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which clusters announce that they take the machine away."""


_KINDS: tuple[Any, ...] = (None, KeyboardInterrupt, Terminated)
_pending = 0  # index of what is waiting in this process
_parent = os.getppid()


def _waiting() -> int:
    """What is waiting in this process. When torchrun is killed, it cannot terminate its processes, but is missed."""
    global _pending
    if not _pending and 'TORCHELASTIC_RUN_ID' in os.environ and os.getppid() != _parent:
        _log.info('torchrun has ended: stopping after this batch')
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
            _log.info('stopping after this batch; Ctrl-C stops at once')
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
