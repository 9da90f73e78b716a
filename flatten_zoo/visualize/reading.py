"""Attention and features of a model, as numbers.

The arguments of a layer are caught by a hook, and the layer is asked about them through its inspection methods;
nothing in its forward pass is there for this.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.models.pvt_v2 import PyramidVisionTransformerStage
from torch import nn

from ..errors import UsageError, unknown_name
from ..layers import EfficientAttention, FocusedLinearCore, InterlacedSparseAttention, NonLocalAttention

__all__ = [
    'DEFAULT_POINTS',
    'EnergyMaps',
    'Form',
    'GlobalMaps',
    'QueryMaps',
    'attention_layers',
    'efficient_attention_maps',
    'focused_linear_forms',
    'interlaced_attention_forms',
    'layer_inputs',
    'non_local_attention_forms',
    'queries_keys_values',
    'read_attention',
    'read_energy',
]

DEFAULT_POINTS = tuple((x / 6, y / 6) for y in (1, 3, 5) for x in (1, 3, 5))
MAX_SPECTRUM_POSITIONS = 1024  # a second or two for the singular values of each matrix

OPERATORS: dict[type[nn.Module], str] = {
    FocusedLinearCore: 'focused linear attention',
    EfficientAttention: 'efficient attention',
    InterlacedSparseAttention: 'interlaced sparse attention',
    NonLocalAttention: 'non-local attention',
}


@dataclass(frozen=True)
class Form:
    """One form of an attention: what some positions, the queries, take from every position.

    Attributes:
        label: What it is, in words.
        rows: Weights, queries × H × W.
        matrix: The whole matrix, n × n for the n = H · W positions, or None.
        singular_values: Of the matrix, from the largest down, or None.
        rank: How many singular values exceed the largest one times n times the precision of float64, or None.
    """

    label: str
    rows: torch.Tensor
    matrix: torch.Tensor | None = None
    singular_values: torch.Tensor | None = None
    rank: int | None = None


@dataclass(frozen=True)
class QueryMaps:
    """The attention of query positions, in one or several forms.

    Attributes:
        operator: What the layer does.
        layer: Its name in the model.
        head: Index of the head.
        num_heads: Number of heads.
        cells: Row and column of each query in the layer's grid.
        forms: The forms, by short name.
        note: What the reader of a picture must know besides.
    """

    operator: str
    layer: str
    head: int
    num_heads: int
    cells: list[tuple[int, int]]
    forms: dict[str, Form]
    note: str = ''


@dataclass(frozen=True)
class GlobalMaps:
    """The global attention maps ρk(K) of one head of efficient attention, from the one that carries most down.

    Attributes:
        operator, layer, head, num_heads: As in `QueryMaps`.
        maps: d_k × H × W.
        channels: Key channel of each map.
        shares: How much of the output each map carries; they sum to 1.
    """

    operator: str
    layer: str
    head: int
    num_heads: int
    maps: torch.Tensor
    channels: torch.Tensor
    shares: torch.Tensor


@dataclass(frozen=True)
class EnergyMaps:
    """Energy of a feature pyramid.

    Attributes:
        maps: For each stage the root mean square over the channels, H × W.
        channels: For each stage the number of channels.
    """

    maps: dict[str, torch.Tensor]
    channels: dict[str, int]


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model whose attention can be read, by name, from the first to the last."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(isinstance(module, kind) for kind in OPERATORS)
        and getattr(module, 'spatial_dims', 2) == 2
        and type(module) is not FocusedLinearCore  # which is called in parts, by a block
    }


def layer_inputs(model: nn.Module, layer: str, image: torch.Tensor) -> tuple:
    """The arguments with which a layer is called when the model sees the image, in order.

    Args:
        model: The model, in inference mode.
        layer: Name of the layer in it.
        image: Normalised image, 1 × channels × height × width.
    """
    calls = []
    attn = model.get_submodule(layer)
    hook = attn.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    try:
        with torch.no_grad():
            model(image)
    finally:
        hook.remove()
    args, kwargs = calls[0]
    call = inspect.signature(attn.forward).bind(*args, **kwargs)
    call.apply_defaults()
    return call.args


@torch.no_grad()
def read_attention(
    model: nn.Module,
    image: torch.Tensor,
    layer: str | None = None,
    points: Sequence[tuple[float, float]] = DEFAULT_POINTS,
    head: int = 0,
) -> QueryMaps | GlobalMaps:
    """Read the attention of one head of one layer.

    Args:
        model: The model, in inference mode.
        image: Normalised image, 1 × channels × height × width.
        layer: One of `attention_layers`. If None the last of them; of interlaced sparse attention the last whose map
            is larger than a block of its groups, as in a single block the long-range step has nothing to attend to.
        points: Query points (x, y) as fractions of the image's width and height, each of which falls into a position of
            the layer's grid. Efficient attention has no use for them: its maps belong to no query.
        head: Index of the head.

    Returns:
        Maps of efficient attention, otherwise rows for the query points.

    Raises:
        UsageError: There is no such layer, head or point, or the layer has no attention that can be read.
    """
    layers = attention_layers(model)
    layer = _check_layer(model, layers, layer, image)
    attn: Any = layers[layer]
    num_heads = getattr(attn, 'num_heads', 1)
    if not 0 <= head < num_heads:
        raise UsageError(f"head must be 0 to {num_heads - 1} in '{layer}', got {head}")
    for point in points:
        if not all(0 <= value <= 1 for value in point):
            raise UsageError(f'a query point is two fractions from 0 to 1 of width and height, got {point}')
    if getattr(attn, 'inverse_scale', None) is not None:  # softmax of such queries and keys would say nothing
        raise UsageError(f"'{layer}' is folded: show the model as it was before reparameterize_model")
    inputs = layer_inputs(model, layer, image)
    operator = next(name for kind, name in OPERATORS.items() if isinstance(attn, kind))
    about: dict[str, Any] = {'operator': operator, 'layer': layer, 'head': head, 'num_heads': num_heads}
    if isinstance(attn, EfficientAttention):
        maps, channels, shares = efficient_attention_maps(attn, inputs[0], head)
        return GlobalMaps(**about, maps=maps, channels=channels, shares=shares)
    if isinstance(attn, FocusedLinearCore):
        q, k, _ = queries_keys_values(attn, *inputs)
        (height, width), read = q.shape[1:3], partial(focused_linear_forms, attn, q, k, head=head)
    elif isinstance(attn, InterlacedSparseAttention):
        (height, width), read = inputs[0].shape[2:], partial(interlaced_attention_forms, attn, *inputs)
    else:
        (height, width), read = inputs[0].shape[2:], partial(non_local_attention_forms, attn, inputs[0], head=head)
    cells = [(min(int(y * height), height - 1), min(int(x * width), width - 1)) for x, y in points]
    cells = list(dict.fromkeys(cells))  # on a small grid points can share a position
    forms = read([row * width + col for row, col in cells])
    note = ''
    if prefix := getattr(attn, 'num_prefix_tokens', 0):
        note = f'Of the patches alone: what they take from the {prefix} prefix tokens is left out. '
    if isinstance(attn, InterlacedSparseAttention) and not _has_blocks(attn, inputs[0]):
        block = ' × '.join(map(str, attn.group_size))
        note = (
            f'The map is not larger than a block of {block} positions, beyond which the long-range step has little '
            'to attend to. A larger image (--img-size) or an earlier layer shows more.'
        )
    if isinstance(attn, FocusedLinearCore) and height * width > MAX_SPECTRUM_POSITIONS:
        note += (
            f'Rank and singular values are left out: they need the matrix of all {height * width} positions, more '
            f'than {MAX_SPECTRUM_POSITIONS}. A smaller image (--img-size) or a later layer shows them.'
        )
    return QueryMaps(**about, cells=cells, forms=forms, note=note.strip())


def _has_blocks(attn: nn.Module, x: torch.Tensor) -> bool:
    """Whether a map is larger, in both directions, than a block of an interlaced sparse attention."""
    return all(side > block for side, block in zip(x.shape[2:], attn.group_size, strict=True))


def _check_layer(model: nn.Module, layers: dict[str, nn.Module], layer: str | None, image: torch.Tensor) -> str:
    if not layers:
        raise UsageError('the model has no attention that can be shown, only the energy of its features (--pyramid)')
    if layer is None:
        return next(
            (
                name
                for name, attn in reversed(layers.items())
                if not isinstance(attn, InterlacedSparseAttention)
                or _has_blocks(attn, layer_inputs(model, name, image)[0])
            ),
            list(layers)[-1],
        )
    if layer in layers:
        return layer
    way_out = f'; layers that can be shown: {", ".join(layers)}'
    if layer in dict(model.named_modules()):
        kind = type(model.get_submodule(layer)).__name__
        raise UsageError(f"layer '{layer}' ({kind}) is no attention that can be shown{way_out}")
    raise UsageError(f'{unknown_name("layer", layer, layers)}{way_out}')


def queries_keys_values(attn: FocusedLinearCore, x: torch.Tensor, *further: Any) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of focused linear attention, from the arguments that its layer is called with.

    Args:
        attn: A layer of any family, with or without projections of its own.
        x: Its input, a map or tokens.
        *further: What else it is called with, such as the grid of the tokens.

    Returns:
        Each B × H × W × channels, of the patches.
    """
    if hasattr(attn, 'patch_maps'):
        return attn.patch_maps(x, *further)
    if not hasattr(attn, 'qkv'):
        return x.unbind(-2)
    x = attn.qkv(x)
    if further:
        x = x.unflatten(1, tuple(further[0]))
    return x.chunk(3, dim=-1)


def focused_linear_forms(
    attn: FocusedLinearCore,
    q: torch.Tensor,
    k: torch.Tensor,
    queries: Sequence[int],
    head: int = 0,
    channel: int | None = None,
) -> dict[str, Form]:
    """The equivalent attention of focused linear attention, and what softmax makes of the same queries and keys.

    'linear' is the operator without its depthwise term. 'depthwise' is the sum of that and of the depthwise term's own
    matrix, which is another one for every channel of the values. 'softmax' is softmax(q kᵀ / √d) over the whole grid,
    of the queries and keys before the focused function and without the positional encoding, neither of which softmax
    attention has. (A softmax network would have learned other queries and keys, and Swin's and CSwin's look at windows
    and stripes; this shows the operator's part alone.)

    The matrices of grids up to `MAX_SPECTRUM_POSITIONS` positions are written out for rank and singular values. On
    larger ones only the rows of the queries ever exist. All of it in float64.

    Args:
        attn: The layer.
        q, k: What `queries_keys_values` gives for one image.
        queries: Flat indices (row · W + column).
        head: Index of the head.
        channel: Channel of the head whose depthwise term is shown; None for the one of median norm, a typical one.
    """
    height, width = q.shape[1:3]
    if channel is None:
        norms = attn.dwc.weight.flatten(1).norm(dim=1)
        channel = norms.argsort()[len(norms) // 2].item()
    q, k = q.double(), k.double()
    wanted = None if height * width <= MAX_SPECTRUM_POSITIONS else queries
    linear = attn.attention_matrix(q, k, wanted)[0, head]
    depthwise = attn.depthwise_matrix(head * attn.head_dim + channel, (height, width), wanted)
    q, k = (y.flatten(1, 2).unflatten(2, (attn.num_heads, -1))[0, :, head] for y in (q, k))
    q = q if wanted is None else q[wanted]
    softmax = (q @ k.T * attn.head_dim**-0.5).softmax(dim=-1)

    def form(label: str, weights: torch.Tensor) -> Form:
        if wanted is not None:
            return Form(label, weights.unflatten(1, (height, width)))
        values = torch.linalg.svdvals(weights)
        rank = (values > values[0] * len(values) * torch.finfo(values.dtype).eps).sum().item()
        return Form(label, weights[queries].unflatten(1, (height, width)), weights, values, rank)

    return {
        'linear': form('without the depthwise term', linear),
        'depthwise': form(f'with the depthwise term (channel {channel})', linear + depthwise),
        'softmax': form('softmax of the same q and k', softmax),
    }


def interlaced_attention_forms(
    attn: InterlacedSparseAttention, x: torch.Tensor, queries: Sequence[int]
) -> dict[str, Form]:
    """Affinity of interlaced sparse attention: of its long-range step, of its short-range step, and of both combined.

    Args:
        attn: The layer, in inference mode.
        x: Its input, one image.
        queries: Flat indices (row · W + column).
    """
    labels = {'long_range': 'long-range step', 'short_range': 'short-range step', 'combined': 'both steps combined'}
    steps = {'long_range': 'long_range', 'short_range': 'short_range', 'combined': None}
    return {
        name: Form(label, attn.attention_matrix(x, queries, steps[name])[0, 0].unflatten(1, x.shape[2:]))
        for name, label in labels.items()
    }


def non_local_attention_forms(
    attn: NonLocalAttention, x: torch.Tensor, queries: Sequence[int], head: int = 0
) -> dict[str, Form]:
    """Attention of non-local attention.

    Args:
        attn: The layer.
        x: Its input, one image.
        queries: Flat indices (row · W + column).
        head: Index of the head.
    """
    rows = attn.attention_matrix(x, queries)[0, head]
    return {'attention': Form('attention', rows.unflatten(1, x.shape[2:]))}


def efficient_attention_maps(
    attn: EfficientAttention, x: torch.Tensor, head: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The global attention maps of one head, ordered by how much of the output they carry.

    The output of the head, before the reprojection, is the sum over its key channels i of ρq(Q)_i G_i: a column of
    ρq(Q), times a row of the context G = ρk(K)ᵀ V, which map i has gathered. What map i carries is the Frobenius norm
    of its summand, ‖ρq(Q)_i‖ ‖G_i‖; its share is that divided by the sum over all maps.

    Args:
        attn: The layer, for two spatial dimensions.
        x: Its input, one image.
        head: Index of the head.

    Returns:
        Maps d_k × H × W, the key channel of each, and its share.
    """
    maps = attn.attention_maps(x)[0, head]
    q, _, v = (y[head] for y in attn.project(x))
    q = q.softmax(dim=0) if attn.normalization == 'softmax' else q * q.shape[1] ** -0.5
    carried = q.norm(dim=1) * (maps.flatten(1) @ v.T).norm(dim=1)
    channels = carried.argsort(descending=True)
    return maps[channels], channels, carried[channels] / carried.sum().clamp_min(1e-30)


@torch.no_grad()
def read_energy(model: nn.Module, image: torch.Tensor) -> EnergyMaps:
    """Energy of the feature pyramid: the root mean square over the channels, at every position of every stage.

    PVTv2's stages are read before the norm that they end in, behind which all positions have about the same energy.

    Args:
        model: Any model of timm that gives feature maps, in inference mode.
        image: Normalised image, 1 × channels × height × width.

    Raises:
        UsageError: The model gives no feature maps.
    """
    if not hasattr(model, 'forward_intermediates'):
        raise UsageError(f'a {type(model).__name__} gives no feature maps (it has no forward_intermediates)')
    before_norm = []
    hooks = [
        stage.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
        for stage in model.modules()
        if isinstance(stage, PyramidVisionTransformerStage)
    ]
    try:
        stages = model.forward_intermediates(image, intermediates_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    if before_norm:
        stages = [tokens.mT.reshape_as(y) for tokens, y in zip(before_norm, stages, strict=True)]
    names = [info['module'] for info in model.feature_info]
    return EnergyMaps(
        maps={name: y[0].square().mean(dim=0).sqrt() for name, y in zip(names, stages, strict=True)},
        channels={name: y.shape[1] for name, y in zip(names, stages, strict=True)},
    )
