"""Output strides below 32, as timm's convolutional networks take them."""

from collections.abc import Sequence

from torch import nn

__all__ = ['dilate', 'dilations', 'stage_strides']


def stage_strides(num_stages: int, output_stride: int, patch_size: int = 4) -> list[int]:
    """Strides of a pyramid's stages: `patch_size` and its doubles, none above an output stride of 8 or 16.

    Raises:
        ValueError: The output stride is not 8, 16 or 32, the last of which is the network as it is, or below the first.
    """
    if output_stride not in (8, 16, 32) or output_stride < patch_size:
        raise ValueError(
            f'output_stride must be 8, 16 or 32, not below the patch size of {patch_size}, got {output_stride!r}'
        )
    strides = [patch_size * 2**i for i in range(num_stages)]
    return strides if output_stride == 32 else [min(stride, output_stride) for stride in strides]


def dilations(strides: Sequence[int]) -> dict[int, int]:
    """How far apart the taps of a patch embedding are, for the stages whose embedding does not stride.

    A stage that has the stride of the one before takes every position, and its taps lie as far apart in the image as in
    the undilated network: at the positions that it has there, the embedding gives what it gives there.
    """
    return {
        i: strides[0] * 2 ** (i - 1) // stride for i, stride in enumerate(strides) if i and stride == strides[i - 1]
    }


def dilate(embeddings: Sequence[nn.Module], strides: Sequence[int]) -> None:
    """Let patch embeddings stride no further than `strides`, in place, with the same weights.

    Args:
        embeddings: Those of the stages, each with a convolution `proj`.
        strides: Of the stages, from `stage_strides`.
    """
    for i, dilation in dilations(strides).items():
        proj = embeddings[i].proj
        proj.stride = (1, 1)
        proj.dilation = (dilation, dilation)
        proj.padding = tuple(dilation * padding for padding in proj.padding)
