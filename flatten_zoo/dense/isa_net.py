"""ISANet: semantic segmentation with interlaced sparse self-attention, or with what its paper measures that against.

Paper:
    * `Interlaced Sparse Self-Attention for Semantic Segmentation`
        - https://arxiv.org/abs/1907.12273
"""

from collections import OrderedDict
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.segmentation.deeplabv3 import ASPP

from ..errors import unknown_name
from ..layers import (
    CompactGeneralizedNonLocal,
    DualAttention,
    EfficientAttention,
    InterlacedSparseAttention,
    LatentGNN,
    PyramidPooling,
    RecurrentCrissCrossAttention,
)
from ..layers.folding import make_norms_foldable
from ..layers.interlaced_attention import GroupedSelfAttention
from ..weights.open import check_model_name

__all__ = ['CONTEXTS', 'ISANet', 'context_head', 'isa_net']

_CONTEXT_BLOCKS = {  # at 512 channels, by name; of the groups of ISSA alone
    'issa': lambda dim, group_size: InterlacedSparseAttention(dim, 256, dim, group_size=group_size, residual=False),
    'self': lambda dim, _: GroupedSelfAttention(dim, 256, dim, dim, (1, 1), long_range=True),  # one group: dense
    'danet': lambda dim, _: DualAttention(dim),
    'rcca': lambda dim, _: RecurrentCrissCrossAttention(dim),
    'cgnl': lambda dim, _: CompactGeneralizedNonLocal(dim),
    'latent_gnn': lambda dim, _: LatentGNN(dim),
    'ea': lambda dim, _: EfficientAttention(dim, 256, dim, residual=False),
}
CONTEXTS = (*_CONTEXT_BLOCKS, 'ppm', 'aspp')


class InterlacedContext(nn.Module):
    """The interlaced or another block, its output beside its input, and a 1×1 convolution over both.

    Shape:
        - input, output: (B, dim, H, W)
    """

    def __init__(self, dim: int, block: nn.Module, drop_rate: float):
        super().__init__()
        # one block here; the official module may hold several, of different group sizes
        self.stages = nn.ModuleList([block])
        self.conv_bn = nn.Sequential(*_conv_norm_act(2 * dim, dim, 1), nn.Dropout2d(drop_rate))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_bn(torch.cat([x, self.stages[0](x)], dim=1))


def context_head(
    context: str, dim: int, group_size: int | tuple[int, int] = 8, drop_rate: float = 0.05
) -> nn.Sequential:
    """The head of `isa_net` on a map of `dim` channels, without its classifier; 512 channels, 256 of 'aspp'."""
    if context not in CONTEXTS:
        raise ValueError(f'{unknown_name("context", context, CONTEXTS)}; choose one of {", ".join(CONTEXTS)}')
    if context == 'aspp':
        head = nn.Sequential(ASPP(dim, (12, 24, 36), 256))
    elif context == 'ppm':
        pooling = PyramidPooling(dim)
        head = nn.Sequential(pooling, *_conv_norm_act(pooling.out_dim, 512, 3), nn.Dropout2d(drop_rate))
    else:
        block = _CONTEXT_BLOCKS[context](512, group_size)
        head = nn.Sequential(*_conv_norm_act(dim, 512, 3), InterlacedContext(512, block, drop_rate))
    make_norms_foldable(head)
    return head


class ISANet(nn.Module):
    """A backbone of output stride 8, the context head on its last map and an auxiliary head on the one before.

    Names are those of the official network: `isa_head` and its classifier `cls_head`, the auxiliary `dsn_head`.

    Shape:
        - input: (B, C, H, W), any H and W
        - output: a dictionary as that of torchvision's segmentation models: 'out', and 'aux' with an auxiliary head,
          both (B, num_classes, H, W) logits
    """

    def __init__(
        self,
        backbone: nn.Module,
        channels: tuple[int, int],
        num_classes: int,
        aux_loss: bool = True,
        group_size: int | tuple[int, int] = 8,
        drop_rate: float = 0.05,
        context: str = 'issa',
    ):
        """
        Args:
            backbone: Maps images to two maps, of the last stage but one and of the last.
            channels: Channels of the two maps.
            num_classes: Number of classes, the background among them.
            aux_loss: Have the auxiliary head.
            group_size: Groups (Ph, Pw) of the interlaced block.
            drop_rate: Dropout rate of whole channels before the classifiers.
            context: What gathers context in the head, as in `isa_net`.

        Raises:
            ValueError: An argument is out of its range.
        """
        super().__init__()
        if num_classes < 1:
            raise ValueError(f'num_classes must be positive, got {num_classes}')
        self.backbone = backbone
        self.isa_head = context_head(context, channels[1], group_size, drop_rate)
        self.pools_globally = context in ('ppm', 'aspp')
        self.cls_head = nn.Conv2d(256 if context == 'aspp' else 512, num_classes, 1)
        self.dsn_head = (
            nn.Sequential(*_conv_norm_act(channels[0], 512, 3), nn.Dropout2d(drop_rate), nn.Conv2d(512, num_classes, 1))
            if aux_loss
            else None
        )
        if self.dsn_head is not None:
            make_norms_foldable(self.dsn_head)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training and x.shape[0] == 1:
            if self.pools_globally:
                raise ValueError('one image leaves the batch norm of its average a single position; give two or more')
            if x.shape[2] <= 8 and x.shape[3] <= 8:
                raise ValueError(
                    f'one image of {x.shape[2]} × {x.shape[3]} leaves its batch norms a single position to train on; '
                    f'give it more or larger ones'
                )
        features = self.backbone(x)
        result = OrderedDict()
        result['out'] = _upsample(self.cls_head(self.isa_head(features[1])), x)
        if self.dsn_head is not None:
            result['aux'] = _upsample(self.dsn_head(features[0]), x)
        return result


def _upsample(logits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Logits at the size of the image, with corners aligned as in the official network: position i is pixel 8·i."""
    return F.interpolate(logits, size=x.shape[2:], mode='bilinear', align_corners=True)


def _conv_norm_act(dim: int, out_dim: int, kernel_size: int) -> list[nn.Module]:
    """Convolution, then batch norm and ReLU nested in one module as in the official tensor names."""
    return [
        nn.Conv2d(dim, out_dim, kernel_size, padding=kernel_size // 2, bias=False),
        nn.Sequential(nn.BatchNorm2d(out_dim), nn.ReLU(inplace=True)),
    ]


def isa_net(
    backbone: str = 'resnet101',
    num_classes: int = 21,
    pretrained_backbone: bool = False,
    aux_loss: bool = True,
    group_size: int | tuple[int, int] = 8,
    drop_rate: float = 0.05,
    backbone_kwargs: dict[str, Any] | None = None,
    context: str = 'issa',
) -> ISANet:
    """Build an ISANet on a timm backbone whose last stages are dilated to output stride 8.

    The interlaced head is the official one: a 3×3 convolution to 512 channels, the interlaced block with d_k = 256 and
    d_v = 512, its output beside its input, a 1×1 convolution to 512. The official backbone
    has a stem of three 3×3 convolutions: that of timm's `resnet101s`.

    With `context` the head has another block in the place of the interlaced one, of those that the paper measures that
    against and of efficient attention:

    - 'self': dense self-attention, with the convolutions of the interlaced block and a single group
    - 'danet': `DualAttention`; 'rcca': `RecurrentCrissCrossAttention`; 'cgnl': `CompactGeneralizedNonLocal`;
      'latent_gnn': `LatentGNN`
    - 'ea': `EfficientAttention` with the same d_k and d_v

    Two are as in their papers a head by themselves, on the backbone's channels: 'ppm' is `PyramidPooling` and a 3×3
    convolution to 512 channels (PSPNet), 'aspp' torchvision's with rates 12, 24 and 36 and 256 channels (DeepLabv3).
    Both train on two images or more.

    Args:
        backbone: Name of a timm model that takes `output_stride`: the zoo's but FLatten-DeiT, the ResNets and most
            other convolutional networks.
        num_classes: Number of classes, the background among them.
        pretrained_backbone: Load the backbone's pretrained weights.
        aux_loss: Have an auxiliary head on the last stage but one.
        group_size: Groups (Ph, Pw) of the interlaced block; 8 × 8 in every experiment of the paper. Others have none.
        drop_rate: Dropout rate of whole channels before the classifiers.
        backbone_kwargs: Arguments of `timm.create_model` for the backbone, such as `in_chans`.
        context: What gathers context in the head: 'issa', 'self', 'danet', 'rcca', 'cgnl', 'latent_gnn', 'ea', 'ppm'
            or 'aspp'.

    Raises:
        ValueError: There is no such backbone, it cannot be dilated, or an argument is out of its range.
    """
    check_model_name(backbone)
    try:
        features = timm.create_model(
            backbone,
            pretrained=pretrained_backbone,
            features_only=True,
            output_stride=8,
            out_indices=(-2, -1),
            **(backbone_kwargs or {}),
        )
    except (AssertionError, TypeError, NotImplementedError) as e:  # the ways that timm's networks refuse a stride
        if isinstance(e, TypeError) and 'output_stride' not in str(e):
            raise
        raise ValueError(_cannot_dilate(backbone, str(e))) from e
    reduction = features.feature_info.reduction()
    if reduction != [8, 8]:
        raise ValueError(_cannot_dilate(backbone, f'its last maps have strides {reduction}'))
    return ISANet(features, features.feature_info.channels(), num_classes, aux_loss, group_size, drop_rate, context)


def _cannot_dilate(backbone: str, reason: str) -> str:
    return (
        f"cannot build backbone '{backbone}' with output_stride=8{reason and ': '}{reason}; "
        f"choose a network that can be dilated, such as 'resnet101' or 'ea_resnet50'"
    )
