"""ResNets with attention at the end of their later stages.

Efficient attention (arXiv 1812.01243), interlaced sparse attention (arXiv 1907.12273) or non-local attention after
`layer3` and `layer4`, the "res3-4" of the papers. An attention module is the last child, `attn`, of its stage, so that
stages, features and plain ResNet weights stay what they are in timm.

The pretrained tags `*_untrained_attn` are timm's ImageNet weights of the plain ResNet. THE ATTENTION IN THEM IS
UNTRAINED: its branch starts at zero, and the outputs are the plain ResNet's, bit for bit, until it is trained.
"""

from dataclasses import replace
from typing import Any

import torch
from timm.models import ResNet, build_model_with_cfg, generate_default_cfgs, get_pretrained_cfg, register_model
from timm.models.resnet import BasicBlock, Bottleneck
from torch import nn

from .._timm import MATCH_PREV_GROUP
from ..layers import EfficientAttention, InterlacedSparseAttention, NonLocalAttention
from ..layers.folding import make_norms_foldable
from ._arguments import CheckedClassifier, check_arguments
from ._features import check_out_indices
from ._flatten import unwrap_state_dict

__all__ = ['OPERATORS', 'AttentionResNet']

OPERATORS = {'ea': EfficientAttention, 'issa': InterlacedSparseAttention, 'nl': NonLocalAttention}
_ARCHITECTURES = {
    'resnet50': {'block': Bottleneck, 'layers': (3, 4, 6, 3)},
    'resnet101': {'block': Bottleneck, 'layers': (3, 4, 23, 3)},
    'resnext101_32x4d': {'block': Bottleneck, 'layers': (3, 4, 23, 3), 'cardinality': 32, 'base_width': 4},
}


class AttentionResNet(CheckedClassifier, ResNet):
    """timm's `ResNet` with an attention module at the end of chosen stages.

    Args:
        block: Residual block, as in `ResNet`.
        layers: Number of blocks of each stage, as in `ResNet`.
        attn_layer: Operator class of the attention; built with the stage's channels and `attn_kwargs`.
        attn_stages: Stage or stages to end in attention, of 'layer1', 'layer2', 'layer3' and 'layer4'.
        attn_kwargs: Arguments of the operator; what is left out has the operator's default (key and value width 64,
            one head, 8 × 8 groups for interlaced attention). The module's input is always added to its output.
        zero_init_last: Start every residual branch at zero, those of the attention included.
        **kwargs: All other arguments of `ResNet`.

    Raises:
        ValueError: A stage does not exist, or an argument of the operator is out of its range.
    """

    def __init__(
        self,
        block: type[nn.Module],
        layers: tuple[int, ...],
        attn_layer: type[nn.Module] = EfficientAttention,
        attn_stages: str | tuple[str, ...] = ('layer3', 'layer4'),
        attn_kwargs: dict[str, Any] | None = None,
        zero_init_last: bool = True,
        device=None,
        dtype=None,
        **kwargs,
    ):
        check_arguments(**kwargs)
        super().__init__(block, layers, zero_init_last=zero_init_last, device=device, dtype=dtype, **kwargs)  # type: ignore[arg-type]  # timm means the classes
        # attention comes after the plain network is complete: with the same seed its weights are the plain ResNet's
        stage_channels = {info['module']: info['num_chs'] for info in self.feature_info[1:]}
        for stage in (attn_stages,) if isinstance(attn_stages, str) else attn_stages:
            if stage not in stage_channels:
                raise ValueError(f'attn_stages must be of {tuple(stage_channels)}, got {attn_stages!r}')
            attn = attn_layer(
                stage_channels[stage], **{**(attn_kwargs or {}), 'residual': True, 'device': device, 'dtype': dtype}
            )
            if zero_init_last:
                attn.zero_init_last()
            self.get_submodule(stage).add_module('attn', attn)
        make_norms_foldable(self.conv1, self.bn1)
        for block in self.modules():
            if type(block) in (BasicBlock, Bottleneck):
                make_norms_foldable(*(layer for name, layer in block.named_children() if name != 'se'))

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameter groups as in `ResNet`; an attention module belongs to the block before it."""
        matcher = super().group_matcher(coarse)
        if not coarse:
            matcher['blocks'] = [(matcher['blocks'], None), (r'^layer(\d+)\.attn', MATCH_PREV_GROUP)]
        return matcher


def checkpoint_filter_fn(state_dict: dict[str, torch.Tensor], model: AttentionResNet) -> dict[str, torch.Tensor]:
    """Completes plain ResNet weights with an attention that starts at zero; passes the zoo's own weights through.

    Args:
        state_dict: Weights of the plain ResNet or of this network.
        model: The network that they are for.

    Raises:
        RuntimeError: Tensors are missing or left over, other than the attention's (all of them) and the classifier's.
    """
    state_dict = unwrap_state_dict(state_dict)

    def is_attention(name: str) -> bool:
        return '.attn.' in name

    if not any(map(is_attention, state_dict)):
        for name, module in model.named_modules():
            if name.endswith('.attn'):
                module.zero_init_last()
        state_dict = {**state_dict, **{k: v for k, v in model.state_dict().items() if is_attention(k)}}
    # timm loads leniently when the number of classes differs, hence the check here. Classifiers are timm's business,
    # and batch counters are not in older files.
    names = {
        k
        for k in state_dict.keys() ^ model.state_dict().keys()
        if not k.startswith('fc.') and not k.endswith('.num_batches_tracked')
    }
    if names:
        missing, unexpected = sorted(names - state_dict.keys()), sorted(names & state_dict.keys())
        raise RuntimeError(
            f'weights do not belong to this network: {len(missing)} tensors missing {missing[:3]}, '
            f'{len(unexpected)} unexpected {unexpected[:3]}'
        )
    return state_dict


def _create_attention_resnet(variant: str, pretrained: bool = False, **kwargs) -> AttentionResNet:
    kind, architecture = variant.split('_', 1)
    kwargs = {**_ARCHITECTURES[architecture], 'attn_layer': OPERATORS[kind], **kwargs}
    if 'out_indices' in kwargs:
        check_out_indices(kwargs['out_indices'], 1 + len(kwargs['layers']))
    return build_model_with_cfg(
        AttentionResNet, variant, pretrained, pretrained_filter_fn=checkpoint_filter_fn, **kwargs
    )


def _default_cfgs() -> dict[str, Any]:
    """timm's own default configuration of each plain ResNet, under a tag that says what is untrained."""
    cfgs = {}
    for architecture in _ARCHITECTURES:
        plain: Any = get_pretrained_cfg(architecture)
        for kind in OPERATORS:
            cfgs[f'{kind}_{architecture}.{plain.tag}_untrained_attn'] = replace(
                plain, description=f'ImageNet weights of {architecture}.{plain.tag}; the attention is untrained'
            )
    return generate_default_cfgs(cfgs)


default_cfgs = _default_cfgs()


@register_model
def ea_resnet50(pretrained: bool = False, **kwargs) -> AttentionResNet:
    """ResNet-50 with efficient attention. Pretrained: a plain ResNet-50, the attention untrained."""
    return _create_attention_resnet('ea_resnet50', pretrained, **kwargs)


@register_model
def ea_resnet101(pretrained: bool = False, **kwargs) -> AttentionResNet:
    """ResNet-101 with efficient attention. Pretrained: a plain ResNet-101, the attention untrained."""
    return _create_attention_resnet('ea_resnet101', pretrained, **kwargs)


@register_model
def ea_resnext101_32x4d(pretrained: bool = False, **kwargs) -> AttentionResNet:
    """ResNeXt-101 32x4d with efficient attention. Pretrained: a plain ResNeXt-101, the attention untrained."""
    return _create_attention_resnet('ea_resnext101_32x4d', pretrained, **kwargs)


@register_model
def issa_resnet50(pretrained: bool = False, **kwargs) -> AttentionResNet:
    """ResNet-50 with interlaced sparse attention. Pretrained: a plain ResNet-50, the attention untrained."""
    return _create_attention_resnet('issa_resnet50', pretrained, **kwargs)


@register_model
def issa_resnet101(pretrained: bool = False, **kwargs) -> AttentionResNet:
    """ResNet-101 with interlaced sparse attention. Pretrained: a plain ResNet-101, the attention untrained."""
    return _create_attention_resnet('issa_resnet101', pretrained, **kwargs)


@register_model
def issa_resnext101_32x4d(pretrained: bool = False, **kwargs) -> AttentionResNet:
    """ResNeXt-101 32x4d with interlaced sparse attention. Pretrained: a plain ResNeXt-101, the attention untrained."""
    return _create_attention_resnet('issa_resnext101_32x4d', pretrained, **kwargs)


@register_model
def nl_resnet50(pretrained: bool = False, **kwargs) -> AttentionResNet:
    """ResNet-50 with non-local attention. Pretrained: a plain ResNet-50, the attention untrained."""
    return _create_attention_resnet('nl_resnet50', pretrained, **kwargs)


@register_model
def nl_resnet101(pretrained: bool = False, **kwargs) -> AttentionResNet:
    """ResNet-101 with non-local attention. Pretrained: a plain ResNet-101, the attention untrained."""
    return _create_attention_resnet('nl_resnet101', pretrained, **kwargs)


@register_model
def nl_resnext101_32x4d(pretrained: bool = False, **kwargs) -> AttentionResNet:
    """ResNeXt-101 32x4d with non-local attention. Pretrained: a plain ResNeXt-101, the attention untrained."""
    return _create_attention_resnet('nl_resnext101_32x4d', pretrained, **kwargs)
