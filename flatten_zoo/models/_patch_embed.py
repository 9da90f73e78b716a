"""Non-overlapping patch embedding for every input size."""

import timm.layers
import torch

from .._timm import _assert
from ._padding import pad_for_convolution

__all__ = ['PatchEmbed']

torch.fx.wrap('pad_for_convolution')  # looks at sizes


class PatchEmbed(timm.layers.PatchEmbed):
    """timm's patch embedding, which also pads the right and bottom edge of any size where sizes are free.

    Takes timm's arguments, but that the output is channels last. With `strict_img_size` the input must have the native
    size, and the error says how to get around it; without, the grid is ⌈H / patch⌉ × ⌈W / patch⌉.

    Shape:
        - input: (B, in_chans, H, W)
        - output: (B, H', W', embed_dim), or (B, H' · W', embed_dim) if no `output_fmt` is asked for
    """

    __constants__ = ['strict_img_size']  # of TorchScript

    def __init__(self, *args, strict_img_size: bool = True, dynamic_img_pad: bool = False, **kwargs):
        if kwargs.get('output_fmt') not in (None, 'NHWC') or not kwargs.get('flatten', True):
            raise ValueError("output_fmt must be 'NHWC', or None with flatten=True for tokens")
        # timm leaves padding to a second flag; here free sizes always mean any size
        kwargs |= {'strict_img_size': strict_img_size, 'dynamic_img_pad': dynamic_img_pad or not strict_img_size}
        super().__init__(*args, **kwargs)

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """The grid of an image, as timm computes it but in whole numbers: exported programs cannot hold `math.ceil`."""
        short = 1 if self.dynamic_img_pad else 0  # a patch that is short of pixels counts where sizes are free
        return (
            (img_size[0] + short * (self.patch_size[0] - 1)) // self.patch_size[0],
            (img_size[1] + short * (self.patch_size[1] - 1)) // self.patch_size[1],
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        H, W = x.shape[-2], x.shape[-1]
        if self.strict_img_size:
            way_out = 'build it with img_size= for this size, or with dynamic_img_size=True for any'
            _assert(H == self.img_size[0], f"Input height ({H}) is not the model's ({self.img_size[0]}); {way_out}.")
            _assert(W == self.img_size[1], f"Input width ({W}) is not the model's ({self.img_size[1]}); {way_out}.")
        else:
            stride, dilation = self.proj.stride, self.proj.dilation
            reach = [dilation[0] * (self.patch_size[0] - 1) + 1, dilation[1] * (self.patch_size[1] - 1) + 1]
            x = pad_for_convolution(x, [stride[0], stride[1]], reach)
        x = self.norm(self.proj(x).permute(0, 2, 3, 1))
        return x.flatten(1, 2) if self.flatten else x
