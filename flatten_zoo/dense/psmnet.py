"""PSMNet: disparity from a pair of images, with efficient attention on its cost volume.

Papers:
    * `Pyramid Stereo Matching Network`
        - https://arxiv.org/abs/1803.08669
    * `Efficient Attention: Attention with Linear Complexities` (EA-PSMNet: section 5.1, Tables 7 and 8)
        - https://arxiv.org/abs/1812.01243
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops.misc import Conv2dNormActivation, Conv3dNormActivation

from ..cost.operators import closed_form
from ..cost.paper_tables import three_digits
from ..layers import EfficientAttention, NonLocalAttention

__all__ = ['PSMNet', 'cost_volume', 'psmnet', 'soft_argmin']

_ATTENTION = {'ea': EfficientAttention, 'nl': NonLocalAttention}
_DIM = 32  # channels of the features and of the regularized cost volume
_STRIDE = 4  # of the features
_MAX_MEMORY = 10**12  # bytes of an attention module by its closed form, for one pair


class _ResidualBlock(nn.Module):
    """Two 3×3 convolutions and the input, without an activation after the sum."""

    def __init__(self, dim: int, out_dim: int, stride: int, dilation: int):
        super().__init__()
        self.conv1 = Conv2dNormActivation(dim, out_dim, 3, stride, dilation=dilation)
        self.conv2 = Conv2dNormActivation(out_dim, out_dim, 3, dilation=dilation, activation_layer=None)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and dim == out_dim
            else Conv2dNormActivation(dim, out_dim, 1, stride, activation_layer=None)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.conv2(self.conv1(x))


class _Features(nn.Module):
    """Features of an image at a quarter of its size, with spatial pyramid pooling.

    Shape:
        - input: (B, 3, H, W)
        - output: (B, 32, ⌈H/4⌉, ⌈W/4⌉)
    """

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            *(Conv2dNormActivation(dim, 32, 3, stride) for dim, stride in ((3, 2), (32, 1), (32, 1)))
        )
        self.stages = nn.ModuleList()
        dim = 32
        for out_dim, depth, stride, dilation in ((32, 3, 1, 1), (64, 16, 2, 1), (128, 3, 1, 2), (128, 3, 1, 4)):
            blocks = [_ResidualBlock(dim, out_dim, stride, dilation)]
            blocks += [_ResidualBlock(out_dim, out_dim, 1, dilation) for _ in range(depth - 1)]
            self.stages.append(nn.Sequential(*blocks))
            dim = out_dim
        self.pool_sizes = (64, 32, 16, 8)
        self.branches = nn.ModuleList(Conv2dNormActivation(128, 32, 1) for _ in self.pool_sizes)
        self.fusion = nn.Sequential(
            Conv2dNormActivation(64 + 128 + 4 * 32, 128, 3), nn.Conv2d(128, _DIM, 1, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages[0](self.stem(x))
        early = self.stages[1](x)
        late = self.stages[3](self.stages[2](early))
        size = late.shape[2:]
        maps = [early, late]
        for pool_size, branch in zip(self.pool_sizes, self.branches, strict=True):
            # what is smaller than a window is pooled as a whole
            pooled = F.avg_pool2d(late, [min(pool_size, side) for side in size])
            maps.append(F.interpolate(branch(pooled), size=size, mode='bilinear'))
        return self.fusion(torch.cat(maps, dim=1))


class _Hourglass(nn.Module):
    """3-D convolutions down to a quarter of the volume and back, with shortcuts to and from the other hourglasses.

    Shape:
        - input, output: (B, 32, D, H, W), any sizes; the two maps beside it have twice the channels and half the size
    """

    def __init__(self):
        super().__init__()
        conv = partial(Conv3dNormActivation, out_channels=2 * _DIM, kernel_size=3)
        self.conv1 = conv(_DIM, stride=2)
        self.conv2 = conv(2 * _DIM, activation_layer=None)
        self.conv3 = conv(2 * _DIM, stride=2)
        self.conv4 = conv(2 * _DIM)
        self.conv5 = _up_conv(2 * _DIM, 2 * _DIM)
        self.conv6 = _up_conv(2 * _DIM, _DIM)

    def forward(
        self, x: torch.Tensor, before: torch.Tensor | None = None, after: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            x: The volume.
            before: The map of half the size on the first hourglass's way down, added on the way up; this one's own if
                None.
            after: That on the last hourglass's way up, added on the way down.

        Returns:
            The volume, and this hourglass's maps of half the size on the way down and on the way up.
        """
        down = self.conv2(self.conv1(x))
        down = F.relu(down if after is None else down + after)
        up = _cut(self.conv5(self.conv4(self.conv3(down))), down)
        up = F.relu(up + (down if before is None else before))
        return _cut(self.conv6(up), x), down, up


def _up_conv(dim: int, out_dim: int) -> nn.Module:
    """Transposed convolution to twice the size."""
    conv = nn.ConvTranspose3d(dim, out_dim, 3, stride=2, padding=1, output_padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm3d(out_dim))


def _cut(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a volume that another one has: of odd sizes half is rounded up, and twice that is one too many."""
    depth, height, width = like.shape[2:]
    return x[:, :, :depth, :height, :width]


def cost_volume(left: torch.Tensor, right: torch.Tensor, num_disparities: int) -> torch.Tensor:
    """Features of the left image beside those of the right one moved by every disparity.

    What the right image does not hold, the positions x < d, is zero.

    Args:
        left: Features of the left images, B×C×H×W.
        right: Features of the right images, B×C×H×W.
        num_disparities: Number D of disparities, from 0.

    Returns:
        B×2C×D×H×W.
    """
    # of each position the one itself and those to its left, which are the last ones of a window
    moved = F.pad(right, [num_disparities - 1, 0]).unfold(3, num_disparities, 1).flip(4).permute(0, 1, 4, 2, 3)
    x = torch.arange(left.shape[3], device=left.device)
    seen = x >= torch.arange(num_disparities, device=left.device)[:, None]
    left = torch.where(seen[:, None], left[:, :, None], left.new_zeros(()))
    return torch.cat([left, moved], dim=1)


def soft_argmin(cost: torch.Tensor) -> torch.Tensor:
    """The mean of the disparities, weighted by the softmax over them (of matching scores: the higher, the likelier).

    Half precision, which cannot tell 191 from 190.5, becomes single precision.

    Args:
        cost: B×D×H×W.

    Returns:
        B×H×W disparities, from 0 to D - 1.
    """
    weights = cost.to(torch.promote_types(cost.dtype, torch.float32)).softmax(dim=1)
    disparities = torch.arange(cost.shape[1], device=cost.device, dtype=weights.dtype)
    return (weights * disparities[:, None, None]).sum(dim=1)


class PSMNet(nn.Module):
    """Shared features of two images, their cost volume, and a stacked hourglass with three outputs.

    Batch norms of the features see the left and the right images together.

    Shape:
        - left, right: (B, 3, H, W) normalized images, any H and W
        - output: (B, H, W) disparities d in pixels, from 0 to max_disparity - 1: pixel x of the left image is pixel
          x - d of the right one. In training a tuple of three, of one hourglass after the other; in inference the last.
    """

    def __init__(self, max_disparity: int = 192, attention: str | None = None):
        """
        Args:
            max_disparity: Number of disparities in pixels, from 0; a multiple of 4.
            attention: 'ea' or 'nl': a module with 16 channels of keys and of values after the last hourglass, which
                starts as the identity; or None.

        Raises:
            ValueError: An argument is out of its range.
        """
        super().__init__()
        if max_disparity < 1 or max_disparity % _STRIDE:
            raise ValueError(f'max_disparity must be a positive multiple of {_STRIDE}, got {max_disparity}')
        if attention is not None and attention not in _ATTENTION:
            raise ValueError(f'attention must be None or one of {tuple(_ATTENTION)}, got {attention!r}')
        self.max_disparity = max_disparity
        conv = partial(Conv3dNormActivation, out_channels=_DIM, kernel_size=3)
        self.features = _Features()
        self.volume1 = nn.Sequential(conv(2 * _DIM), conv(_DIM))
        self.volume2 = nn.Sequential(conv(_DIM), conv(_DIM, activation_layer=None))
        self.hourglasses = nn.ModuleList(_Hourglass() for _ in range(3))
        self.heads = nn.ModuleList(
            nn.Sequential(conv(_DIM), nn.Conv3d(_DIM, 1, 3, padding=1, bias=False)) for _ in range(3)
        )
        for module in self.modules():
            # the heads' last ones keep small weights: of scores that are far apart a softmax passes no gradients
            if isinstance(module, nn.Conv2d | nn.Conv3d) and module.out_channels > 1:
                nn.init.kaiming_normal_(module.weight, mode='fan_out', nonlinearity='relu')
        # every residual branch starts at zero: the first steps are those of a much shallower network
        blocks = [m.conv2 for m in self.features.modules() if isinstance(m, _ResidualBlock)]
        for branch in (*blocks, self.volume2[-1], *(hourglass.conv6 for hourglass in self.hourglasses)):
            nn.init.zeros_(branch[1].weight)
        self.attention = None
        if attention is not None:
            self.attention = _ATTENTION[attention](_DIM, key_dim=_DIM // 2, value_dim=_DIM // 2, spatial_dims=3)
            self.attention.zero_init_last()

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if left.ndim != 4 or left.shape != right.shape:
            raise ValueError(
                f'left and right must be B×3×H×W of one size, got {tuple(left.shape)} and {tuple(right.shape)}'
            )
        height, width = left.shape[2:]
        self._check_size(left.shape[0], height, width)
        rows, columns = ((side + _STRIDE - 1) // _STRIDE * _STRIDE for side in (height, width))
        images = F.pad(torch.cat([left, right]), [0, columns - width, 0, rows - height])
        left, right = self.features(images).chunk(2)
        volume = self.volume1(cost_volume(left, right, self.max_disparity // _STRIDE))
        volume = volume + self.volume2(volume)
        x, first, after = self.hourglasses[0](volume)
        outputs = [x + volume]
        for hourglass in self.hourglasses[1:]:
            x, _, after = hourglass(outputs[-1], first, after)
            outputs.append(x + volume)
        if self.attention is not None:
            outputs[-1] = self.attention(outputs[-1])
        costs = [self.heads[0](outputs[0])]
        for head, x in zip(self.heads[1:], outputs[1:], strict=True):
            costs.append(costs[-1] + head(x))
        size = [self.max_disparity, rows, columns]
        disparities = tuple(
            soft_argmin(F.interpolate(cost, size=size, mode='trilinear')[:, 0])[:, :height, :width]
            for cost in (costs if self.training else costs[-1:])
        )
        return disparities if self.training else disparities[0]

    def _check_size(self, batch_size: int, height: int, width: int) -> None:
        """Refuse what batch norm cannot train on, and non-local attention where it does not fit."""
        volume = (self.max_disparity // _STRIDE, -(-height // _STRIDE), -(-width // _STRIDE))
        if self.training and batch_size == 1 and max(volume) <= 4:
            raise ValueError(
                f'one pair of {height} × {width} leaves the batch norms a single position to train on; give it more or '
                f'larger ones'
            )
        if isinstance(self.attention, NonLocalAttention):
            memory = closed_form(self.attention, volume).memory
            if memory > _MAX_MEMORY:
                raise ValueError(
                    f"attention='nl' on a cost volume of {' × '.join(map(str, volume))} would take "
                    f"{three_digits(memory, 'B')} for each pair; use attention='ea' or smaller images"
                )


def psmnet(max_disparity: int = 192, attention: str | None = None) -> PSMNet:
    """Build a PSMNet, or the EA-PSMNet of the efficient attention paper.

    The network is that of the paper's Table 1, with dilations 2 and 4 in the last two stages (the published code has 1
    and 2), 5.2 M parameters without attention; the module of Table 8 adds 2128.

    Args:
        max_disparity: Number of disparities in pixels, from 0; a multiple of 4.
        attention: 'ea' for efficient and 'nl' for non-local attention after the last hourglass, starting as the
            identity; None for the plain network, whose state dict loads into the others with `strict=False`.

    Raises:
        ValueError: An argument is out of its range. So does a forward pass whose non-local attention would take more
            than 1 TB for a pair by its closed form.
    """
    return PSMNet(max_disparity, attention)
