"""Encoders with strides 4 to 32 for segmentation-models-pytorch, from plain vision transformers too."""

from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from .optional_packages import dense_extra
from .pyramid import PyramidBackbone, build_body

__all__ = ['PyramidEncoder', 'pyramid_encoder']


class PyramidEncoder(nn.Module):
    """A `PyramidBackbone` as the encoders of segmentation-models-pytorch are.

    Args:
        name: Name of the backbone.
        kwargs: Arguments of the backbone, `pretrained` among them.
        out_channels: Channels of every level of the pyramid.
        depth: Number of strides, from 2 on; 5 reaches stride 32.
        output_stride: 32, the only possibility.

    Shape:
        - input: B×C×H×W, H and W multiples of 32
        - output: a list of the image, an empty map of stride 2, and depth - 1 maps of strides 4, 8, 16 and 32

    Raises:
        ValueError: An argument is out of its range, or the backbone has no such pyramid.
    """

    def __init__(self, name: str, kwargs: dict[str, Any], out_channels: int, depth: int = 5, output_stride: int = 32):
        super().__init__()
        if not 2 <= depth <= 5:
            raise ValueError(f'encoder_depth must be from 2 to 5, got {depth}')
        if output_stride != 32:
            raise ValueError(f'a pyramid has output stride 32, got encoder_output_stride={output_stride}')
        self.pyramid = PyramidBackbone(build_body(name, **kwargs), out_channels=out_channels)
        if self.pyramid.strides != [4, 8, 16, 32, 64]:
            raise ValueError(f"'{name}' gives a pyramid of strides {self.pyramid.strides[:-1]}, not 4, 8, 16 and 32")
        self.out_channels = [kwargs.get('in_chans', 3), 0] + (depth - 1) * [out_channels]
        self.output_stride = 2**depth

    def set_in_channels(self, in_channels: int, pretrained: bool = True) -> None:
        """What smp calls with its `in_channels`: the backbone has its channels from the beginning."""
        if in_channels != self.out_channels[0]:
            raise ValueError(
                f'in_channels={in_channels}, but the encoder has {self.out_channels[0]}: give in_chans={in_channels} '
                'to pyramid_encoder'
            )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        maps = list(self.pyramid(x).values())
        B, _, H, W = x.shape
        return [x, x.new_empty(B, 0, H // 2, W // 2), *maps[: len(self.out_channels) - 2]]


def pyramid_encoder(backbone: str, pretrained: bool = False, out_channels: int = 256, **kwargs: Any) -> str:
    """Makes a backbone with a feature pyramid known to segmentation-models-pytorch.

    `smp.UPerNet(pyramid_encoder('flatten_deit_s'), encoder_weights=None, classes=150)`. It is for plain vision
    transformers, which have no stages: they have the pyramid of ViTDet. Reading a saved model needs the same call
    before. A later call for the same backbone takes the place of the earlier one.

    Args:
        backbone: Name of a model of the zoo or of timm.
        pretrained: Load its pretrained weights.
        out_channels: Channels of every level of the pyramid.
        **kwargs: More arguments of the backbone, such as `in_chans`.

    Returns:
        The encoder's name.

    Raises:
        UsageError: segmentation-models-pytorch is missing.
    """
    if out_channels < 1:
        raise UsageError(f'out_channels must be positive, got {out_channels}')
    with dense_extra():
        from segmentation_models_pytorch.encoders import encoders
    name = f'pyramid-{backbone}'
    encoders[name] = {
        'encoder': PyramidEncoder,
        'params': {'name': backbone, 'kwargs': {'pretrained': pretrained, **kwargs}, 'out_channels': out_channels},
        'pretrained_settings': {},
    }
    return name
