"""What modules cost: multiply-accumulates counted, memory followed or measured.

Multiply-accumulates leave out biases, softmax and element-wise work, as the papers' counts do and torch's flop counter
does; one is two of torch's flops.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from .._torch import TorchDispatchMode, tree_leaves

__all__ = ['Measurement', 'available_memory', 'count', 'peak_memory', 'training_memory', 'training_peak_memory']


class _Tracker(TorchDispatchMode):
    """Follows the tensors that operations make: bytes alive at the worst moment, and outputs of matrix products."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        super().__init__()
        self.alive = WeakIdKeyDictionary()
        self.peak = 0
        self.activations = 0
        self._record(tensors)

    def _record(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.alive[storage] = storage.nbytes()
        self.peak = max(self.peak, sum(self.alive.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._record(tensors)
        if func.overloadpacket in flop_registry:
            self.activations += sum(tensor.numel() for tensor in tensors)
        return out


def _own_tensors(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers(), x]


@dataclass(frozen=True)
class Measurement:
    """Counted and measured cost of a module in inference, for one image.

    Attributes:
        parameters: Number of parameters.
        macs: Multiply-accumulates, counted by torch's flop counter.
        activations: Elements that convolutions and matrix products put out.
        peak_memory: Bytes of weights, input and everything alive at the worst moment of a forward pass.
    """

    parameters: int
    macs: int
    activations: int
    peak_memory: int


@torch.no_grad()
def count(module: nn.Module, shape: tuple[int, ...]) -> Measurement:
    """Counts on the meta device: nothing is computed or allocated, so that any size can be asked for.

    Args:
        module: The module, with its weights on the meta device.
        shape: Shape of the input.

    Returns:
        The counts; attention appears as its equations have it, fused kernels need less memory.
    """
    x = torch.empty(shape, device='meta', dtype=next((p.dtype for p in module.parameters()), None))
    tracker, counter = _Tracker(_own_tensors(module, x)), FlopCounterMode(display=False)
    with counter, tracker:
        module(x)
    parameters = sum(p.numel() for p in module.parameters())
    return Measurement(parameters, counter.get_total_flops() // 2, tracker.activations, tracker.peak)


@torch.no_grad()
def peak_memory(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes held at the worst moment of a real forward pass: weights, input and what the pass allocates.

    On a GPU this is what its allocator says. On a CPU it is followed operation by operation, so that a kernel's
    own scratch space is not seen.

    Args:
        module: The module, on the device of `x`.
        x: The input.
    """
    if x.is_cuda:
        own = _Tracker(_own_tensors(module, x)).peak
        before = torch.cuda.memory_allocated(x.device)
        torch.cuda.reset_peak_memory_stats(x.device)
        module(x)
        return own + torch.cuda.max_memory_allocated(x.device) - before
    with _Tracker(_own_tensors(module, x)) as tracker:
        module(x)
    return tracker.peak


def training_memory(module: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Bytes that a real training step holds beside the weights: between its two passes, and at the worst moment.

    The first is what the closed forms count: the input, the output, and what the backward pass needs of all between.
    The second adds what lives for a moment only, and the gradients. They are measured as in `peak_memory`.

    Args:
        module: The module, on the device of `x`; its output is one tensor.
        x: The input.

    Returns:
        Bytes held after the forward pass, and bytes at the worst moment of forward and backward pass.
    """
    x = x.detach().requires_grad_()
    inputs = [x, *(p for p in module.parameters() if p.requires_grad)]

    def step(allocated: Callable[[], int]) -> int:
        y = module(x)
        held = allocated()
        torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)
        return held

    if x.is_cuda:

        def allocated() -> int:
            return torch.cuda.memory_allocated(x.device)

        step(allocated)  # libraries take their workspaces at the first call
        before = allocated() - x.untyped_storage().nbytes()
        torch.cuda.reset_peak_memory_stats(x.device)
        return step(allocated) - before, torch.cuda.max_memory_allocated(x.device) - before
    with _Tracker(_own_tensors(module, x)) as tracker:
        before = tracker.peak - x.untyped_storage().nbytes()
        held = step(lambda: sum(tracker.alive.values()))
    return held - before, tracker.peak - before


def training_peak_memory(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes held at the worst moment of forward and backward pass, with the weights: see `training_memory`."""
    own = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    return own + training_memory(module, x)[1]


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device; on a CPU without swapping, and within a container's limit."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path('/proc/meminfo')
    if not meminfo.is_file():  # not Linux: what is installed is all that the standard library knows
        return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    values = dict(line.split(':') for line in meminfo.read_text().splitlines())
    available = int(values['MemAvailable'].split()[0]) * 1024
    limit, used = Path('/sys/fs/cgroup/memory.max'), Path('/sys/fs/cgroup/memory.current')
    if limit.is_file() and (value := limit.read_text().strip()) != 'max':
        available = min(available, int(value) - int(used.read_text()))
    return available
