"""Looking at sizes without tying a graph for several sizes to those that it was first made with."""

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ['surely_equal']


def surely_equal(a: int, b: int) -> bool:
    """Whether two sizes are equal; False where a compiled or exported graph leaves that open.

    A plain `a == b` would hold the graph to the answer, and the next size would need another one.
    """
    if not torch.jit.is_scripting():
        return bool(a == b) if torch.jit.is_tracing() else statically_known_true(a == b)
    return a == b
