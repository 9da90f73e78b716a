"""Efficient attention where non-local attention does not fit: on a stereo cost volume and on the maps of a video.

    python examples/attention_in_3d.py

prints the memory that a module needs at the paper's two three-dimensional places, stereo and video (arXiv 1812.01243,
section 4): in closed form, and measured in a training step, what it holds between its passes and at its worst moment.
Then it trains a small stereo network with attention on its cost volume.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.video import r3d_18
from tqdm import trange

from flatten_zoo import EfficientAttention, NonLocalAttention
from flatten_zoo.cost.counting import training_memory
from flatten_zoo.cost.operators import closed_form
from flatten_zoo.cost.paper_tables import three_digits
from flatten_zoo.tables import as_text


def memory_table() -> str:
    """Memory of a module in a training step; measured beside the closed form where the map is small enough."""
    volume, video = {'dim': 32, 'key_dim': 16, 'value_dim': 16}, {'dim': 256}
    rows = [
        memory_row('cost volume of PSMNet', (48, 135, 240), volume),
        memory_row('a small one', (8, 24, 40), volume, measure=True),
        memory_row('video, layer3 of r3d_18', (16, 28, 28), video),  # of 64 frames of 224 × 224 pixels
        memory_row('a small one', (8, 14, 14), video, measure=True),
    ]
    return as_text(['', 'positions', 'EA', 'held', 'peak', 'non-local', 'held', 'peak'], rows)


def memory_row(name: str, size: tuple[int, int, int], widths: dict[str, int], measure: bool = False) -> list[str]:
    row = [name, ' × '.join(map(str, size))]
    for operator in (EfficientAttention, NonLocalAttention):
        # with 'scaling', non-local attention writes out the matrix that fused softmax kernels do without
        module = operator(**widths, normalization='scaling', spatial_dims=3)
        measured = training_memory(module, torch.randn(1, widths['dim'], *size)) if measure else ()
        costs = [three_digits(memory, 'B') for memory in (closed_form(module, size).memory, *measured)]
        row += costs if measure else [*costs, '', '']
    return row


def video_network(num_classes: int) -> nn.Module:
    """torchvision's 3-D ResNet-18 with efficient attention after its last two stages.

    Shape:
        - input: (B, 3, T, H, W)
        - output: (B, num_classes)
    """
    model = r3d_18(num_classes=num_classes)
    for stage in (model.layer3, model.layer4):
        attention = EfficientAttention(stage[-1].conv2[0].out_channels, spatial_dims=3)
        attention.zero_init_last()
        stage.append(attention)
    return model


class StereoNet(nn.Module):
    """Disparity from a cost volume, with efficient attention on the volume as in the paper's EA-PSMNet.

    Shape:
        - left, right: (B, 3, H, W)
        - output: (B, H, W) disparities in pixels, from 0 to max_disparity - 1
    """

    def __init__(self, max_disparity: int = 8, dim: int = 16):
        super().__init__()
        self.max_disparity = max_disparity
        self.features = nn.Sequential(
            nn.Conv2d(3, dim, 3, padding=1), nn.ReLU(), nn.Conv2d(dim, dim // 2, 3, padding=1)
        )
        self.volume = nn.Sequential(
            nn.Conv3d(dim, dim, 3, padding=1),
            nn.BatchNorm3d(dim),
            nn.ReLU(),
            EfficientAttention(dim, dim // 2, dim // 2, spatial_dims=3),
            nn.Conv3d(dim, 1, 3, padding=1),
        )

    def cost_volume(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Left features beside the right ones moved by every disparity: (B, dim, max_disparity, H, W)."""
        left, right = self.features(left), self.features(right)
        moved = [F.pad(right, [d, 0])[..., : right.shape[-1]] for d in range(self.max_disparity)]
        return torch.stack([torch.cat([left, r], dim=1) for r in moved], dim=2)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        weights = self.volume(self.cost_volume(left, right)).squeeze(1).softmax(dim=1)
        disparities = torch.arange(self.max_disparity, device=left.device, dtype=left.dtype)
        return torch.einsum('bdhw,d->bhw', weights, disparities)


def stereo_pairs(batch_size: int, size: tuple[int, int], max_disparity: int) -> tuple[torch.Tensor, ...]:
    """Textured planes before a textured background.

    Returns:
        Left and right images, (B, 3, H, W), and the disparity of every pixel of the left one, (B, H, W).
    """
    coarse = torch.randint(max_disparity, (batch_size, 1, 3, 4)).float()
    disparity = F.interpolate(coarse, size=size, mode='nearest')[:, 0]
    right = torch.rand(batch_size, 3, *size)
    # the pixel x of the left image shows what the right image has at x - d; what is outside is seen by the left alone
    source = torch.arange(size[1]) - disparity.long()
    left = right.gather(3, source.clamp_min(0)[:, None].expand(-1, 3, -1, -1))
    return torch.where(source[:, None] >= 0, left, torch.rand_like(left)), right, disparity


def train_stereo(steps: int, size: tuple[int, int] = (24, 48), batch_size: int = 4) -> tuple[float, float]:
    """End-point errors in pixels on pairs that are new every time, before and after training."""
    model = StereoNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    @torch.no_grad()
    def end_point_error() -> float:
        left, right, disparity = stereo_pairs(16, size, model.max_disparity)
        return (model.eval()(left, right) - disparity).abs().mean().item()

    before = end_point_error()
    for _ in (bar := trange(steps, desc='stereo')):
        left, right, disparity = stereo_pairs(batch_size, size, model.max_disparity)
        loss = F.smooth_l1_loss(model.train()(left, right), disparity)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f'{loss.item():.3f}')
    return before, end_point_error()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=int, default=200, help='training steps of the stereo network')
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args(arguments)
    torch.manual_seed(args.seed)
    print(memory_table())
    clip = torch.randn(1, 3, 8, 56, 56)
    print(f'a clip of {tuple(clip.shape[2:])} gives logits of shape {tuple(video_network(10)(clip).shape)}')
    before, after = train_stereo(args.steps)
    print(f'end-point error of the stereo network: {before:.2f} pixels before, {after:.2f} after {args.steps} steps')


if __name__ == '__main__':
    main()
