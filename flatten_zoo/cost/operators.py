"""Cost of the attention operators in closed form, by the equations of their papers.

Multiply-accumulates leave out biases, softmax and element-wise work, as the papers' counts do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ..layers import EfficientAttention, InterlacedSparseAttention, NonLocalAttention

__all__ = ['Cost', 'closed_form', 'efficient_attention_cost', 'interlaced_attention_cost', 'non_local_attention_cost']


@dataclass(frozen=True)
class Cost:
    """Cost of one operator for one image.

    Attributes:
        parameters: Number of parameters.
        macs: Multiply-accumulates.
        memory: Bytes of the input, the output and everything between, all held at once as in training.
    """

    parameters: int
    macs: int
    memory: int


def efficient_attention_cost(operator: EfficientAttention, spatial: tuple[int, ...]) -> Cost:
    """Closed form of efficient attention (arXiv 1812.01243, section 3.5 and Table 2).

    With n positions, h heads, d channels, d_k and d_v of keys and values:

        macs     n·d·(2·d_k + 2·d_v) + 2·n·d_k·d_v / h
        memory   2·d·n + 2·d_k·n + 2·d_v·n + d_k·d_v / h floats

    Without reprojection a term n·d·d_v and d·n floats are not there.

    Args:
        operator: The operator, on any device.
        spatial: Size of the map.
    """
    context_macs = 2 * math.prod(spatial) * _product_of_widths(operator)
    return _projected_attention_cost(operator, spatial, context_macs, _product_of_widths(operator))


def non_local_attention_cost(operator: NonLocalAttention, spatial: tuple[int, ...]) -> Cost:
    """Closed form of dot-product attention (arXiv 1812.01243, section 3.5 and Table 2).

    With n positions, h heads, d channels, d_k and d_v of keys and values:

        macs     n·d·(2·d_k + 2·d_v) + n²·(d_k + d_v)
        memory   2·d·n + 2·d_k·n + 2·d_v·n + h·n² floats

    Without reprojection a term n·d·d_v and d·n floats are not there. The memory is that of the equation: fused kernels
    do without the n × n matrix.

    Args:
        operator: The operator, on any device.
        spatial: Size of the map.
    """
    n = math.prod(spatial)
    attention_macs = n * n * (operator.keys.out_channels + operator.values.out_channels)
    return _projected_attention_cost(operator, spatial, attention_macs, operator.num_heads * n * n)


def _product_of_widths(operator: EfficientAttention) -> int:
    """d_k·d_v / h: entries of the contexts of all heads."""
    return operator.keys.out_channels * operator.values.out_channels // operator.num_heads


def _projected_attention_cost(operator, spatial: tuple[int, ...], attention_macs: int, attention_floats: int) -> Cost:
    """What efficient and non-local attention share: the four projections around the attention."""
    n, d = math.prod(spatial), operator.keys.in_channels
    d_k, d_v = operator.keys.out_channels, operator.values.out_channels
    reproject = not isinstance(operator.reprojection, nn.Identity)
    return Cost(
        parameters=(2 * d_k + d_v) * (d + 1) + reproject * d * (d_v + 1),
        macs=n * d * (2 * d_k + d_v + reproject * d_v) + attention_macs,
        memory=_bytes(operator, (1 + reproject) * d * n + 2 * d_k * n + 2 * d_v * n + attention_floats),
    )


def interlaced_attention_cost(operator: InterlacedSparseAttention, spatial: tuple[int, ...]) -> Cost:
    """Closed form of interlaced sparse attention (arXiv 1907.12273, section 3, batch norms included as parameters).

    With n positions after padding, P = Ph·Pw, Q = n / P, widths d in, d_k, d_v and d_out, a step on c channels whose
    groups have m positions (c = d and m = Q for the long-range step, c = d_out and m = P for the short-range one) costs

        macs     n·(2·(c·d_k + d_k²) + c·d_v + d_v·d_out) + n·m·(d_k + d_v)
        memory   n·(4·d_k + 2·d_v + d_out) + n·m floats

    to which the memory of the input adds d·n. The attention's share is n²·(1/P + 1/Q)·(d_k + d_v) in place of
    non-local attention's n²·(d_k + d_v).

    Args:
        operator: The operator, on any device.
        spatial: Height and width of the map.
    """
    step = operator.long_range_sa
    d, d_k = step.f_key[0].in_channels, step.f_key[0].out_channels
    d_v, d_out = step.W[0].in_channels, step.W[0].out_channels
    group_size = math.prod(operator.group_size)
    groups = math.prod(math.ceil(side / p) for side, p in zip(spatial, operator.group_size, strict=True))
    n = group_size * groups
    parameters, macs, floats = 0, 0, d * n
    for c, m in ((d, groups), (d_out, group_size)):
        weights = 2 * (c * d_k + d_k * d_k) + c * d_v + d_v * d_out
        parameters += weights + 2 * (4 * d_k + d_out)
        macs += n * weights + n * m * (d_k + d_v)
        floats += n * (4 * d_k + 2 * d_v + d_out) + n * m
    return Cost(parameters, macs, _bytes(operator, floats))


def _bytes(operator: nn.Module, elements: int) -> int:
    return elements * next(operator.parameters()).element_size()


_CLOSED_FORMS: dict[type[nn.Module], Callable[..., Cost]] = {
    EfficientAttention: efficient_attention_cost,
    InterlacedSparseAttention: interlaced_attention_cost,
    NonLocalAttention: non_local_attention_cost,
}


def closed_form(operator: nn.Module, spatial: tuple[int, ...]) -> Cost:
    """Cost of an operator by the equations of its paper: `efficient_attention_cost` and its like.

    Args:
        operator: One of the three operators, on any device.
        spatial: Size of the map.
    """
    return _CLOSED_FORMS[type(operator)](operator, spatial)
