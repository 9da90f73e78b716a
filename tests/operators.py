"""What the tests of the attention operators share."""

import copy

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatten_zoo.layers import (
    CompactGeneralizedNonLocal,
    DualAttention,
    EfficientAttention,
    InterlacedSparseAttention,
    LatentGNN,
    NonLocalAttention,
    PyramidPooling,
    RecurrentCrissCrossAttention,
)

# small forms of every operator that has `residual` and `zero_init_last`, for maps of 16 channels
SMALL = {
    'ea': lambda **kw: EfficientAttention(16, 8, 8, num_heads=2, **kw),
    'ea_scaling': lambda **kw: EfficientAttention(16, 8, 12, num_heads=4, normalization='scaling', **kw),
    'nl': lambda **kw: NonLocalAttention(16, 8, 8, num_heads=2, **kw),
    'nl_scaling': lambda **kw: NonLocalAttention(16, 8, 12, num_heads=4, normalization='scaling', **kw),
    'issa': lambda **kw: InterlacedSparseAttention(16, 8, 8, **kw),
}

ZERO_STARTS = ('alpha', 'beta', 'gamma', 'norm.weight')


def opened(module: nn.Module, names: tuple[str, ...] = ZERO_STARTS) -> nn.Module:
    """The module with parameters at one that are zero at the start."""
    for name, parameter in module.named_parameters():
        if name.endswith(names):
            nn.init.ones_(parameter)
    return module


# small forms of the operators whose residual and start are those of their papers
CONTEXT = {
    'ppm': lambda **kw: PyramidPooling(16, **kw),
    'danet': lambda **kw: opened(DualAttention(16, 4, **kw)),
    'rcca': lambda **kw: opened(RecurrentCrissCrossAttention(16, 4, **kw)),
    'cgnl': lambda **kw: opened(CompactGeneralizedNonLocal(16, 8, groups=2, **kw)),
    # with open nodes: a position at which all are zero has no direction
    'latent_gnn': lambda **kw: opened(
        LatentGNN(16, 8, latent_dims=(5, 3), **kw), (*ZERO_STARTS, 'psi_v2l.1.bias', 'psi_l2v.1.bias')
    ),
}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def output_and_gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output of `module(x)`, and the gradients of half its square with respect to the input and each parameter.

    The output is first divided by its largest value, so that the gradients are in the range of half precision, as the
    scaling of a loss sees to in training.
    """
    x = x.detach().requires_grad_()
    y = module(x)
    (y.double() / y.detach().abs().max().clamp_min(1e-3)).square().sum().div(2).backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the module in another type, with the same weights."""
    return copy.deepcopy(module).to(dtype)


class LargestTensor(TorchDispatchMode):
    """Records the element count of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)), 0)
        return out


class Maps(TorchDispatchMode):
    """Records the operations that make a tensor of a type with at least so many elements."""

    def __init__(self, dtype: torch.dtype, numel: int):
        super().__init__()
        self.dtype = dtype
        self.numel = numel
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += [
            func.overloadpacket.__name__
            for t in tree_leaves(out)
            if isinstance(t, torch.Tensor) and t.dtype == self.dtype and t.numel() >= self.numel
        ]
        return out
