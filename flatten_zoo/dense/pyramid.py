"""Backbones as feature pyramids for detection: stages, top-down pathway, attention on its levels, freezing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import Format, LayerNorm2d
from timm.utils import freeze
from torch import nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool, LastLevelP6P7

from ..models._features import check_out_indices
from ..models.attention_resnet import OPERATORS
from ..weights.open import create_model

__all__ = [
    'LEVELS',
    'PyramidBackbone',
    'SimpleFeaturePyramid',
    'build_body',
    'freeze_norms',
    'freeze_stages',
    'pyramid_stages',
]

LEVELS = {'fpn1': 4, 'fpn2': 8, 'fpn3': 16, 'fpn4': 32, 'fpn5': 64}
"""Levels of the feature pyramid that attention may come after, 'fpn1' to 'fpn5', and their strides, 4 to 64."""
_STRIDES = (4, 8, 16, 32)  # of the stages
_BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)  # timm's own are subclasses


class Stage(NamedTuple):
    """A stage of a timm backbone built with `features_only=True`: which of its outputs, and what that is."""

    output: int
    stride: int
    channels: int
    module: str


class SimpleFeaturePyramid(nn.ModuleDict):
    """ViTDet's pyramid on the one map of a plain vision transformer (arXiv 2203.16527, "simple feature pyramid").

    Transposed convolutions of stride 2 and max pooling bring the map to other strides. A 1×1 and a 3×3 convolution,
    each with a layer norm, follow on each; nothing goes from one level to another, but to those of `extra_blocks`.

    Args:
        channels: Channels of the map.
        stride: Its stride, of 4, 8, 16 and 32.
        out_channels: Channels of every level.
        strides: Strides of the levels.
        extra_blocks: What makes coarser levels of these.

    Shape:
        - input: a dictionary that holds the map, B×channels×h×w, as '0'
        - output: a dictionary of the levels '0', '1' … and those of `extra_blocks`
    """

    def __init__(
        self, channels: int, stride: int, out_channels: int, strides: Sequence[int], extra_blocks: ExtraFPNBlock
    ):
        super().__init__()
        for level, level_stride in enumerate(strides):
            layers, width = [], channels
            for finer in range((stride // level_stride).bit_length() - 1):
                layers += [LayerNorm2d(width), nn.GELU()] if finer else []
                layers.append(nn.ConvTranspose2d(width, width // 2, 2, stride=2))
                width //= 2
            if level_stride > stride:
                layers.append(nn.MaxPool2d(level_stride // stride))
            self[str(level)] = nn.Sequential(
                *layers,
                nn.Conv2d(width, out_channels, 1, bias=False),
                LayerNorm2d(out_channels),
                nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
                LayerNorm2d(out_channels),
            )
        self.extra_blocks = extra_blocks

    def forward(self, maps: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [name for name in self if name != 'extra_blocks']
        levels, names = self.extra_blocks([self[name](maps['0']) for name in names], [maps['0']], names)
        return dict(zip(names, levels, strict=True))


class PyramidBackbone(nn.Module):
    """A timm backbone, torchvision's feature pyramid on it, and attention after chosen levels of the pyramid.

    A plain vision transformer, whose maps all have one stride, has ViTDet's `SimpleFeaturePyramid` on its last map.

    As torchvision's `BackboneWithFPN` it maps B×3×H×W to a dictionary of maps, '0', '1' … 'pool', each of half the size
    of the one before, and has its parameters under the same names: `body` and `fpn`. The arrangement is that of Tables
    2 and 9 of the efficient attention paper (arXiv 1812.01243): levels fpn1 to fpn5 have strides 4 to 64, each with a
    module of its own. Attention acts on the finished pyramid, so that the last level, which is the one before
    subsampled, does not pass through two modules. Its modules start as the identity.

    With `p6_p7` it has RetinaNet's levels instead, of strides 8 to 128, as torchvision: the maps '0', '1', '2', 'p6'
    and 'p7', the last two by convolutions of stride 2. The names 'fpn1' to 'fpn5' are then of these.

    Attributes:
        out_channels: Channels of every map.
        strides: Strides of the maps.
        map_names: Of each level that there is the name of its map.

    Args:
        body: Backbone that timm built with `features_only=True`; its stages of strides 4 to 32 are used (8 to 32 with
            `p6_p7`), or the last of maps of one stride, which must be one of these.
        attention: 'ea', 'nl', 'issa', or None for a plain pyramid.
        attention_levels: Level or levels that attention comes after, of `LEVELS`.
        attention_kwargs: Arguments of the attention operator; what is left out has the operator's default.
        out_channels: Channels of every map.
        p6_p7: Levels of strides 8 to 128.

    Raises:
        ValueError: An argument is out of its range, or the backbone has no such level or no pyramid.
    """

    def __init__(
        self,
        body: nn.Module,
        attention: str | None = None,
        attention_levels: str | Sequence[str] = tuple(LEVELS),
        attention_kwargs: dict[str, Any] | None = None,
        out_channels: int = 256,
        p6_p7: bool = False,
    ):
        super().__init__()
        stages = pyramid_stages(body)
        plain = len(stages) == 1
        strides = _STRIDES[1:] if p6_p7 else _STRIDES
        if not plain:
            stages = [stage for stage in stages if stage.stride in strides]
            strides = tuple(stage.stride for stage in stages)
        self.body = body
        self.channels_last = getattr(body, 'output_fmt', Format.NCHW) == Format.NHWC
        self.indices = [stage.output for stage in stages]
        extra_names = ['p6', 'p7'] if p6_p7 else ['pool']
        extra_blocks = LastLevelP6P7(out_channels, out_channels) if p6_p7 else LastLevelMaxPool()
        self.strides = [*strides, *(strides[-1] * 2**i for i in range(1, len(extra_names) + 1))]
        names = dict(zip(self.strides, [*map(str, range(len(strides))), *extra_names], strict=True))
        level_strides = zip(LEVELS, (stride * (2 if p6_p7 else 1) for stride in LEVELS.values()), strict=True)
        self.map_names = {level: names[stride] for level, stride in level_strides if stride in names}
        self.out_channels = out_channels
        self.fpn = (
            SimpleFeaturePyramid(stages[0].channels, stages[0].stride, out_channels, strides, extra_blocks)
            if plain
            else FeaturePyramidNetwork([stage.channels for stage in stages], out_channels, extra_blocks)
        )
        self.attention = nn.ModuleDict()
        if attention is None:
            if attention_kwargs:
                raise ValueError(f'attention_kwargs need an attention, one of {tuple(OPERATORS)}; got attention=None')
            return
        if attention not in OPERATORS:
            raise ValueError(f'attention must be None or one of {tuple(OPERATORS)}, got {attention!r}')
        attention_levels = (attention_levels,) if isinstance(attention_levels, str) else attention_levels
        if not attention_levels or not set(attention_levels) <= self.map_names.keys():
            raise ValueError(
                f'attention_levels must be of {list(self.map_names)} for this backbone, got {attention_levels!r}'
            )
        for level in self.map_names:
            if level in attention_levels:
                module = OPERATORS[attention](out_channels, **{**(attention_kwargs or {}), 'residual': True})
                module.zero_init_last()
                self.attention[level] = module

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Maps B×3×H×W to a dictionary of B×out_channels×h×w maps, the finest first."""
        outputs = self.body(x)
        maps: dict[str, torch.Tensor] = {}
        for i, index in enumerate(self.indices):
            maps[str(i)] = outputs[index].permute(0, 3, 1, 2) if self.channels_last else outputs[index]
        maps = self.fpn(maps)
        for level, attention in self.attention.items():
            name = self.map_names[level]
            maps[name] = attention(maps[name])
        return maps


def build_body(name: str, pretrained: bool = False, **kwargs) -> nn.Module:
    """A backbone for images of any size, by its timm name.

    Args:
        name: Any model of the zoo or of timm, or a 'hf-hub:…' address.
        pretrained: Load its pretrained weights.
        **kwargs: Arguments of the model. A network that is built for one size is built for all sizes
            (`dynamic_img_size=True`), unless they have one.

    Raises:
        UsageError: There is no such model or argument, or the network takes images of one size alone.
    """
    given = f' with out_indices {kwargs["out_indices"]!r}' if 'out_indices' in kwargs else ''
    return create_model(
        name,
        model_kwargs=kwargs,
        dynamic_size='img_size' not in kwargs,
        given=given,
        pretrained=pretrained,
        features_only=True,
    )


def pyramid_stages(body: nn.Module) -> list[Stage]:
    """The stages of strides 4, 8, 16 and 32 of a backbone, as far as it has them; of several of a stride the last.

    A single one is that of a plain vision transformer.

    Raises:
        ValueError: It is no backbone that timm built with `features_only=True`, or its strides are no pyramid.
    """
    if not hasattr(body, 'feature_info'):
        raise ValueError(
            f'backbone must be a model name or a timm model built with features_only=True, got {type(body).__name__}'
        )
    info = body.feature_info
    check_out_indices(info.out_indices, len(info))
    by_stride = {
        stride: Stage(index, stride, channels, module)
        for index, (stride, channels, module) in enumerate(
            zip(info.reduction(), info.channels(), info.module_name(), strict=True)
        )
    }
    stages = [by_stride[stride] for stride in _STRIDES if stride in by_stride]
    one_stride = len(by_stride) == len(stages) == 1
    if (
        not one_stride
        and len(stages) < 2
        or any(b.stride != 2 * a.stride for a, b in zip(stages, stages[1:], strict=False))
    ):
        raise ValueError(
            f'a feature pyramid needs maps of strides such as 4, 8, 16 and 32, and this backbone has '
            f'{info.reduction()}: choose one with stages, or a plain vision transformer with patches of 8, 16 or 32'
        )
    return stages


def freeze_stages(body: nn.Module, trainable_layers: int) -> None:
    """Freezes the first parts of a backbone, weights and norm statistics, in training mode too.

    The parts are counted as torchvision does for `trainable_backbone_layers`: from the end, the stages of strides 32 to
    4 (as far as the backbone has them), and at last what comes before them. Those of a plain vision transformer are its
    blocks, and at last its embedding.

    Args:
        body: Backbone that timm built with `features_only=True`; batch norms of frozen parts are replaced in place by
            timm's frozen ones, which have the same tensors.
        trainable_layers: Number of parts that are trained, from 0 to all (5 as a rule).

    Raises:
        ValueError: The number is out of range, or the backbone's stages are not modules of their own.
    """
    stages = pyramid_stages(body)
    if len(stages) == 1:
        info = body.feature_info
        stages = [
            Stage(i, entry['reduction'], entry['num_chs'], entry['module'])
            for i, entry in enumerate(info.info[: info.info.index(info.get_dicts()[-1]) + 1])
        ]
    if not 0 <= trainable_layers <= len(stages) + 1:
        raise ValueError(f'trainable_layers must be from 0 to {len(stages) + 1}, got {trainable_layers}')
    if trainable_layers > len(stages):
        return
    names = [name for name, _ in body.named_parameters()]
    frozen = names[: _end_of_frozen(names, stages, trainable_layers)]
    for name in frozen:
        body.get_parameter(name).requires_grad_(False)
    owners = {name.rpartition('.')[0] for name in frozen}
    _freeze_modules(body, [name for name, m in body.named_modules() if name in owners and isinstance(m, _BATCH_NORMS)])


def _end_of_frozen(names: list[str], stages: list[Stage], trainable_layers: int) -> int:
    """How many of a backbone's parameters, in their order, belong to its frozen parts."""
    if not trainable_layers:
        return len(names)
    stage = stages[-trainable_layers]
    first_stage_trained = trainable_layers == len(stages)
    # what lies between two stages belongs to the later one
    boundary = stage if first_stage_trained else stages[-trainable_layers - 1]
    # timm's feature extractors wrap a network (`model.layers.0`) or flatten it (`layers_0`)
    prefix = boundary.module.replace('_', '.') + '.'
    inside = [i for i, name in enumerate(names) if name.removeprefix('model.').replace('_', '.').startswith(prefix)]
    if not inside:
        raise ValueError(
            f"the stages of this backbone cannot be told apart (no module '{boundary.module}'): train all of it, or "
            f'freeze parameters before passing it'
        )
    return inside[0] if first_stage_trained else inside[-1] + 1


def freeze_norms(body: nn.Module) -> None:
    """Freezes a backbone's batch norms, statistics and weights, in training mode too, as is usual in detection.

    Those of attention modules are left alone: attention starts with the last one at zero and is trained from there.

    Args:
        body: Any network; batch norms are replaced in place by timm's frozen ones, which have the same tensors.
    """
    attention = tuple(f'{name}.' for name, m in body.named_modules() if isinstance(m, tuple(OPERATORS.values())))
    _freeze_modules(
        body,
        [name for name, m in body.named_modules() if isinstance(m, _BATCH_NORMS) and not name.startswith(attention)],
    )


def _freeze_modules(body: nn.Module, names: list[str]) -> None:
    if names:  # timm takes none for all
        freeze(body, names)
