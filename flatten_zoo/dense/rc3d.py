"""R-C3D: actions in long videos, with efficient attention on the maps of its trunk.

Papers:
    * `R-C3D: Region Convolutional 3D Network for Temporal Activity Detection`
        - https://arxiv.org/abs/1703.07814
    * `Efficient Attention: Attention with Linear Complexities` (EA R-C3D: section 5.2, Table 6)
        - https://arxiv.org/abs/1812.01243

Time is one axis of what torchvision's two-stage detectors do in two: a clip is an image one unit high, whose width are
its frames, and an interval a box of full height, so that overlaps, targets, losses and suppression are theirs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import get_model, get_model_weights
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.video import R3D_18_Weights
from torchvision.ops import batched_nms, roi_align

from ..layers import EfficientAttention, NonLocalAttention

__all__ = ['RC3D', 'rc3d', 'temporal_nms']

_BACKBONES = ('r3d_18', 'mc3_18', 'r2plus1d_18')
_ATTENTION = {'ea': EfficientAttention, 'nl': NonLocalAttention}
_STRIDE = 8  # of the features, in frames
_PARTS = (4, 2, 2)  # that a region is pooled to: time, height, width


def _at_least_single(x: torch.Tensor) -> torch.Tensor:
    """Half precision, which cannot tell one late frame from the next, becomes single precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _as_boxes(segments: torch.Tensor) -> torch.Tensor:
    """Starts and ends, …×2, as boxes of full height, …×4."""
    start, end = segments.unbind(-1)
    return torch.stack([start, torch.zeros_like(start), end, torch.ones_like(end)], dim=-1)


def _as_box_changes(changes: torch.Tensor, dim: int) -> torch.Tensor:
    """Changes of centre and length, along a dimension, with those of a box's other axis, which are 0, after each."""
    return torch.stack([changes, torch.zeros_like(changes)], dim + 1).flatten(dim, dim + 1)


class _Anchors(nn.Module):
    """Intervals of every scale around every position of the features."""

    def __init__(self, scales: Sequence[float]):
        super().__init__()
        self.scales = tuple(scales)

    def forward(self, clips: ImageList, features: list[torch.Tensor]) -> list[torch.Tensor]:
        device = features[0].device
        centres = _STRIDE * torch.arange(features[0].shape[2], device=device, dtype=torch.float32)[:, None]
        halves = _STRIDE / 2 * torch.tensor(self.scales, device=device)
        boxes = _as_boxes(torch.stack([centres - halves, centres + halves], dim=-1).flatten(0, 1))
        return [boxes] * len(clips.image_sizes)


class _ProposalHead(nn.Module):
    """Of every anchor the score of holding an action, and changes of its centre and length."""

    def __init__(self, dim: int, num_anchors: int):
        super().__init__()
        self.conv = nn.Conv3d(dim, dim, 3, padding=1)
        self.scores = nn.Conv1d(dim, num_anchors, 1)
        self.changes = nn.Conv1d(dim, 2 * num_anchors, 1)
        for layer in self.children():
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)

    def forward(self, features: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        x = self.conv(features[0]).relu().amax((3, 4))
        scores, changes = _at_least_single(self.scores(x)), _at_least_single(self.changes(x))
        changes = _as_box_changes(changes.unflatten(1, [-1, 2]), 2).flatten(1, 2)
        return [scores[:, :, None]], [changes[:, :, None]]


class _RegionPool(nn.Module):
    """Features of intervals at one size: in space the maxima of parts, in time torchvision's `roi_align`."""

    def forward(
        self, features: dict[str, torch.Tensor], boxes: list[torch.Tensor], sizes: list[tuple[int, int]]
    ) -> torch.Tensor:
        (x,) = features.values()
        dtype = x.dtype
        x = F.adaptive_max_pool3d(_at_least_single(x), (x.shape[2], *_PARTS[1:]))
        x = x.permute(0, 1, 3, 4, 2).flatten(1, 3)[:, :, None]  # parts of the image are channels
        boxes = [b.to(x.dtype) for b in boxes]
        return roi_align(x, boxes, (1, _PARTS[0]), 1 / _STRIDE, sampling_ratio=2).to(dtype)


class _Predictor(nn.Module):
    """Scores of the classes, and for each class changes of centre and length."""

    def __init__(self, dim: int, num_classes: int):
        super().__init__()
        self.scores = nn.Linear(dim, num_classes)
        self.changes = nn.Linear(dim, 2 * num_classes)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, changes = _at_least_single(self.scores(x)), _at_least_single(self.changes(x))
        return scores, _as_box_changes(changes, 1)


class RC3D(nn.Module):
    """A trunk of 3-D convolutions, temporal proposals, and a head that classifies and refines them.

    Its calls are those of torchvision's detectors. `model(clips, targets)` is a dictionary of losses in training,
    'loss_objectness', 'loss_rpn_box_reg', 'loss_classifier' and 'loss_box_reg'; in inference `model(clips)` is a list
    of a dictionary for each clip: `segments` (N×2, start and end in frames of the clip, 0 ≤ start < end ≤ T), `labels`
    (N, from 1) and `scores` (N, from 0 to 1, the highest first).

    Clips of a batch may differ in their number of frames; shorter ones are padded at their end, where nothing is found,
    but which attention sees.

    Shape:
        - clips: (B, 3, T, H, W), or a list of (3, T, H, W) of one height and width; values from 0 to 1, which the
          network normalizes as torchvision's Kinetics weights want it
        - targets: of each clip `segments` (N×2, in frames), N may be 0, and `labels` (N, int64, from 1)

    Args:
        trunk: Maps (B, 3, T, H, W) to (B, dim, ⌈T/8⌉, …).
        dim: Channels of its output.
        num_classes: Number of classes, the background included.
        anchor_scales: Lengths of the anchors in strides of 8 frames.
        score_thresh: Detections of a lower score are left out.
        nms_thresh: Of two detections of a class that overlap more, the weaker one is left out.
        detections_per_clip: Most detections of a clip.
    """

    def __init__(
        self,
        trunk: nn.Module,
        dim: int,
        num_classes: int,
        anchor_scales: Sequence[float],
        score_thresh: float,
        nms_thresh: float,
        detections_per_clip: int,
    ):
        super().__init__()
        self.backbone = trunk
        self.rpn = RegionProposalNetwork(
            _Anchors(anchor_scales),
            _ProposalHead(dim, len(anchor_scales)),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=64,
            positive_fraction=0.5,
            pre_nms_top_n={'training': 2000, 'testing': 1000},
            post_nms_top_n={'training': 2000, 'testing': 300},
            nms_thresh=0.7,
        )
        width = 1024
        parts = _PARTS[0] * _PARTS[1] * _PARTS[2]
        self.roi_heads = RoIHeads(
            _RegionPool(),
            TwoMLPHead(parts * dim, width),
            _Predictor(width, num_classes),
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.5,
            batch_size_per_image=128,
            positive_fraction=0.25,
            bbox_reg_weights=None,
            score_thresh=score_thresh,
            nms_thresh=nms_thresh,
            detections_per_img=detections_per_clip,
        )
        preset = R3D_18_Weights.DEFAULT.transforms()
        for name, values in (('mean', preset.mean), ('std', preset.std)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1, 1), persistent=False)

    def forward(
        self, clips: torch.Tensor | Sequence[torch.Tensor], targets: Sequence[dict[str, torch.Tensor]] | None = None
    ) -> dict[str, torch.Tensor] | list[dict[str, torch.Tensor]]:
        """
        Raises:
            ValueError: Clips or targets are not of the shapes above, or there are no targets in training.
        """
        if not len(clips) or any(
            clip.ndim != 4 or clip.shape[0] != 3 or clip.shape[2:] != clips[0].shape[2:] for clip in clips
        ):
            raise ValueError(
                f'clips must be 3×T×H×W of one height and width, got {[tuple(clip.shape) for clip in clips]}'
            )
        boxes = _check_targets(targets, len(clips)) if self.training else None
        frames = [clip.shape[1] for clip in clips]
        longest = max(frames)
        x = torch.stack(
            [F.pad((clip - self.mean) / self.std, [0, 0, 0, 0, 0, longest - clip.shape[1]]) for clip in clips]
        )
        features = {'0': self.backbone(x)}
        positions = -(-longest // _STRIDE)
        if features['0'].shape[2] != positions:
            raise ValueError(
                f'the trunk must have a temporal stride of {_STRIDE}: {longest} frames are to give {positions} '
                f'positions, not {features["0"].shape[2]}'
            )
        sizes = [(1, n) for n in frames]
        proposals, losses = self.rpn(ImageList(x, sizes), features, boxes)
        found, head_losses = self.roi_heads(features, proposals, sizes, boxes)
        if self.training:
            return {**losses, **head_losses}
        return [{'segments': one['boxes'][:, 0::2], 'labels': one['labels'], 'scores': one['scores']} for one in found]


def _check_targets(targets: Sequence[dict[str, torch.Tensor]] | None, num_clips: int) -> list[dict[str, torch.Tensor]]:
    """Targets as torchvision's detectors take them."""
    if targets is None or len(targets) != num_clips:
        raise ValueError(f'training needs as many targets as clips, {num_clips}, got {len(targets or ())}')
    boxes = []
    for target in targets:
        segments, labels = target['segments'], target['labels']
        if segments.ndim != 2 or segments.shape[1] != 2 or labels.shape != segments.shape[:1]:
            raise ValueError(
                f'segments must be N×2 and labels N, got {tuple(segments.shape)} and {tuple(labels.shape)}'
            )
        if not (segments[:, 0] < segments[:, 1]).all():
            raise ValueError(f'segments must end after they start, got {segments.tolist()}')
        boxes.append({'boxes': _as_boxes(segments.float()), 'labels': labels})
    return boxes


def temporal_nms(segments: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor, nms_thresh: float) -> torch.Tensor:
    """Non-maximum suppression in time, of each class for itself: for detections of several clips of one video.

    Args:
        segments: Starts and ends, N×2, in one unit.
        scores: N.
        labels: N.
        nms_thresh: Of two segments of a class whose temporal IoU is above it the weaker one is left out.

    Returns:
        Indices of those that stay, the highest scores first.
    """
    return batched_nms(_as_boxes(_at_least_single(segments)), _at_least_single(scores), labels, nms_thresh)


def _build_trunk(
    backbone: str | nn.Module, weights: Any, attention: str | None, attention_kwargs: dict[str, Any] | None
) -> tuple[nn.Module, int]:
    """What comes before the classifier of a video network, with attention; and its channels."""
    if isinstance(backbone, nn.Module):
        if weights is not None:
            raise ValueError('weights_backbone is for a backbone that is given by its name')
        network = backbone
    elif backbone not in _BACKBONES:
        raise ValueError(f'backbone must be one of {_BACKBONES} or a module, got {backbone!r}')
    else:
        known = get_model_weights(backbone)
        try:
            weights = known.verify(weights)
        except (KeyError, TypeError) as e:
            raise ValueError(
                f'weights_backbone of {backbone} must be None or one of {[w.name for w in known]}, got {weights!r}'
            ) from e
        network = get_model(backbone, weights=weights)
    trunk = nn.Sequential()
    for name, part in network.named_children():
        if name not in ('avgpool', 'fc'):
            trunk.add_module(name, part)
    dim = trunk.layer4[-1].conv2[1].num_features
    if attention is not None:
        for stage in (trunk.layer3, trunk.layer4):
            module = _ATTENTION[attention](stage[-1].conv2[1].num_features, spatial_dims=3, **(attention_kwargs or {}))
            module.zero_init_last()
            stage.append(module)
    if backbone == 'mc3_18':  # all of its strides are in space: means around every eighth frame
        trunk.add_module('pool', nn.AvgPool3d((7, 1, 1), (_STRIDE, 1, 1), (3, 0, 0), count_include_pad=False))
    return trunk, dim


def rc3d(
    backbone: str | nn.Module,
    num_classes: int,
    attention: str | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    weights_backbone: Any = None,
    anchor_scales: Sequence[float] = (2, 4, 5, 6, 8, 9, 10, 12, 14, 16),
    score_thresh: float = 0.005,
    nms_thresh: float = 0.4,
    detections_per_clip: int = 100,
) -> RC3D:
    """Build an R-C3D on a video network of torchvision, or the EA R-C3D of the efficient attention paper.

    As in R-C3D, the features that proposals and regions are taken from have a stride of 8 frames: that of `r3d_18` and
    `r2plus1d_18`; the maps of `mc3_18`, which has no stride in time, are averaged to it. Scales are those of R-C3D for
    THUMOS14: anchors of 16 to 128 frames. An anchor's score is the logit of one of two classes, which is the difference
    of R-C3D's two. Regions are pooled to four parts in time and 2 × 2 in space.

    Args:
        backbone: 'r3d_18', 'mc3_18' or 'r2plus1d_18'; or a network of the same make (`stem`, `layer1` … `layer4` of
            torchvision's `BasicBlock`) with a stride of 8 frames, a wider or narrower one for example.
        num_classes: Number of classes, the background included.
        attention: 'ea' for efficient and 'nl' for non-local attention after the third and the fourth stage, starting as
            the identity; None for the plain network, whose state dict loads into the others with `strict=False`.
        attention_kwargs: Arguments of the attention operator; key and value width are 64 by default.
        weights_backbone: Kinetics weights of the backbone, as torchvision's models take them ('DEFAULT',
            `R3D_18_Weights.KINETICS400_V1`). State dicts of torchvision's video networks load into `model.backbone`
            with `strict=False`, all but their `fc`.
        anchor_scales: Lengths of the anchors in strides of 8 frames.
        score_thresh: Detections of a lower score are left out.
        nms_thresh: Of two detections of a class whose temporal IoU is above it, the weaker one is left out. R-C3D takes
            0.1 less than the IoU at which it is scored.
        detections_per_clip: Most detections of a clip.

    Raises:
        ValueError: An argument is out of its range.
    """
    if num_classes < 2:
        raise ValueError(f'num_classes includes the background and must be at least 2, got {num_classes}')
    if attention is not None and attention not in _ATTENTION:
        raise ValueError(f'attention must be None or one of {tuple(_ATTENTION)}, got {attention!r}')
    if not anchor_scales or min(anchor_scales) <= 0:
        raise ValueError(f'anchor_scales must be positive numbers, got {anchor_scales}')
    trunk, dim = _build_trunk(backbone, weights_backbone, attention, attention_kwargs)
    return RC3D(trunk, dim, num_classes, anchor_scales, score_thresh, nms_thresh, detections_per_clip)
