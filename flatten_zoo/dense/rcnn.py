"""torchvision's detection networks on backbones of the zoo and of timm, with attention on the feature pyramid."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from torchvision.models.detection import FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign

from .cascade import CASCADE_STAGES, CascadeRoIHeads
from .pyramid import LEVELS, PyramidBackbone, build_body, freeze_norms, freeze_stages

__all__ = ['cascade_mask_rcnn', 'faster_rcnn', 'mask_rcnn', 'retinanet']

_ANCHOR_SCALE = 8  # side of the anchors in strides: 32 pixels at stride 4, as in torchvision
_OF_EACH_STAGE = {  # arguments of torchvision's Mask R-CNN that are the cascade's own
    'bbox_reg_weights',
    'box_bg_iou_thresh',
    'box_fg_iou_thresh',
    'box_head',
    'box_predictor',
    'mask_head',
    'mask_predictor',
}


def mask_rcnn(
    backbone: str | nn.Module,
    num_classes: int,
    attention: str | None = None,
    attention_levels: str | Sequence[str] = tuple(LEVELS),
    attention_kwargs: dict[str, Any] | None = None,
    pretrained_backbone: bool = False,
    trainable_backbone_layers: int | None = None,
    freeze_norm: bool | None = None,
    backbone_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> MaskRCNN:
    """torchvision's Mask R-CNN on any backbone, with attention after chosen levels of its feature pyramid.

    `mask_rcnn('resnet50', 91)` is torchvision's `maskrcnn_resnet50_fpn`: state dicts go both ways. With attention,
    exactly the attention's tensors are new, and it starts as the identity. With `backbone='ea_resnet50'` and
    `attention='ea'` it is the "res3-4+fpn1-5" model of the efficient attention paper (arXiv 1812.01243, Tables 2 and
    9). A plain vision transformer has the feature pyramid of ViTDet. Inputs, targets, losses and predictions are
    torchvision's.

    Args:
        backbone: Name of a model of the zoo or of timm, or a model that timm built with `features_only=True`.
        num_classes: Number of classes, the background included.
        attention: 'ea' (efficient), 'nl' (non-local) or 'issa' (interlaced sparse) attention, or None.
        attention_levels: Level or levels that attention comes after: 'fpn1' to 'fpn5', of strides 4 to 64.
        attention_kwargs: Arguments of the attention operator; key and value width are 64 by default.
        pretrained_backbone: Load the backbone's pretrained weights.
        trainable_backbone_layers: Number of parts of the backbone that are trained, counted from its end, 5 being all
            as a rule; None for torchvision's habit: 3 of a pretrained backbone, else all, and all of a plain vision
            transformer, as in ViTDet. See `freeze_stages`.
        freeze_norm: Freeze the backbone's batch norms, see `freeze_norms`; None for torchvision's habit: those of a
            pretrained backbone.
        backbone_kwargs: More arguments of the backbone.
        **kwargs: Arguments of torchvision's `MaskRCNN`. The anchors' default side is 8 strides, and images are
            normalised as the backbone wants it.

    Raises:
        ValueError: An argument is out of its range, or the backbone has no feature pyramid.
    """
    pyramid = _build_pyramid(
        backbone,
        attention,
        attention_levels,
        attention_kwargs,
        pretrained_backbone,
        trainable_backbone_layers,
        freeze_norm,
        backbone_kwargs,
    )
    return MaskRCNN(pyramid, num_classes, **_arguments(MaskRCNN, pyramid, num_classes, kwargs))


def faster_rcnn(
    backbone: str | nn.Module,
    num_classes: int,
    attention: str | None = None,
    attention_levels: str | Sequence[str] = tuple(LEVELS),
    attention_kwargs: dict[str, Any] | None = None,
    pretrained_backbone: bool = False,
    trainable_backbone_layers: int | None = None,
    freeze_norm: bool | None = None,
    backbone_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> FasterRCNN:
    """torchvision's Faster R-CNN on any backbone: `mask_rcnn` without masks, with the same arguments and errors.

    `faster_rcnn('resnet50', 91)` is torchvision's `fasterrcnn_resnet50_fpn`.
    """
    pyramid = _build_pyramid(
        backbone,
        attention,
        attention_levels,
        attention_kwargs,
        pretrained_backbone,
        trainable_backbone_layers,
        freeze_norm,
        backbone_kwargs,
    )
    return FasterRCNN(pyramid, num_classes, **_arguments(FasterRCNN, pyramid, num_classes, kwargs))


def cascade_mask_rcnn(
    backbone: str | nn.Module,
    num_classes: int,
    attention: str | None = None,
    attention_levels: str | Sequence[str] = tuple(LEVELS),
    attention_kwargs: dict[str, Any] | None = None,
    pretrained_backbone: bool = False,
    trainable_backbone_layers: int | None = None,
    freeze_norm: bool | None = None,
    backbone_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> MaskRCNN:
    """Cascade Mask R-CNN (arXiv 1712.00726, 1906.09756): `mask_rcnn` with three heads, each on the boxes of the last.

    Arguments and errors are those of `mask_rcnn`, but for what differs from head to head: the overlaps, 0.5, 0.6 and
    0.7, the box coders' weights, and the heads themselves. See `CascadeRoIHeads` for the losses and the scores.
    """
    if own := _OF_EACH_STAGE & kwargs.keys():
        raise ValueError(f'the heads of a cascade have their own {", ".join(sorted(own))}: leave it to them')
    pyramid = _build_pyramid(
        backbone,
        attention,
        attention_levels,
        attention_kwargs,
        pretrained_backbone,
        trainable_backbone_layers,
        freeze_norm,
        backbone_kwargs,
    )
    kwargs = _arguments(MaskRCNN, pyramid, num_classes, kwargs)
    stages = [
        MaskRCNN(
            pyramid,
            num_classes,
            box_fg_iou_thresh=overlap,
            box_bg_iou_thresh=overlap,
            bbox_reg_weights=weights,
            **kwargs,
        )
        for overlap, weights in CASCADE_STAGES
    ]
    model = stages[0]
    model.roi_heads = CascadeRoIHeads([stage.roi_heads for stage in stages])
    return model


def retinanet(
    backbone: str | nn.Module,
    num_classes: int,
    attention: str | None = None,
    attention_levels: str | Sequence[str] = tuple(LEVELS),
    attention_kwargs: dict[str, Any] | None = None,
    pretrained_backbone: bool = False,
    trainable_backbone_layers: int | None = None,
    freeze_norm: bool | None = None,
    backbone_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> RetinaNet:
    """torchvision's RetinaNet (arXiv 1708.02002) on any backbone, with the arguments and errors of `mask_rcnn`.

    `retinanet('resnet50', 91)` is torchvision's `retinanet_resnet50_fpn`: state dicts go both ways. Its levels 'fpn1'
    to 'fpn5' have strides 8 to 128; `**kwargs` are those of torchvision's `RetinaNet` (`score_thresh`, …).
    """
    pyramid = _build_pyramid(
        backbone,
        attention,
        attention_levels,
        attention_kwargs,
        pretrained_backbone,
        trainable_backbone_layers,
        freeze_norm,
        backbone_kwargs,
        p6_p7=True,
    )
    return RetinaNet(pyramid, num_classes, **_arguments(RetinaNet, pyramid, num_classes, kwargs))


def _build_pyramid(
    backbone: str | nn.Module,
    attention: str | None,
    attention_levels: str | Sequence[str],
    attention_kwargs: dict[str, Any] | None,
    pretrained_backbone: bool,
    trainable_backbone_layers: int | None,
    freeze_norm: bool | None,
    backbone_kwargs: dict[str, Any] | None,
    p6_p7: bool = False,
) -> PyramidBackbone:
    if isinstance(backbone, str):
        body = build_body(backbone, pretrained_backbone, **(backbone_kwargs or {}))
    elif pretrained_backbone or backbone_kwargs:
        raise ValueError('pretrained_backbone and backbone_kwargs are for a backbone that is given by its name')
    else:
        body = backbone
    pyramid = PyramidBackbone(body, attention, attention_levels, attention_kwargs, p6_p7=p6_p7)
    if trainable_backbone_layers is None and pretrained_backbone and len(pyramid.indices) > 1:
        trainable_backbone_layers = 3
    if trainable_backbone_layers is not None:
        freeze_stages(body, trainable_backbone_layers)
    if pretrained_backbone if freeze_norm is None else freeze_norm:
        freeze_norms(body)
    return pyramid


def _arguments(
    network: type[nn.Module], pyramid: PyramidBackbone, num_classes: int, given: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of one of torchvision's networks: those that depend on the backbone, and those given."""
    if num_classes < 2:
        raise ValueError(f'num_classes includes the background and must be at least 2, got {num_classes}')
    known = {name for kind in (network, GeneralizedRCNNTransform) for name in inspect.signature(kind).parameters}
    if unknown := given.keys() - known:  # torchvision takes no notice of them
        raise ValueError(f'{network.__name__} has no argument {", ".join(sorted(unknown))}')
    cfg = getattr(pyramid.body, 'pretrained_cfg', None) or {}
    arguments = {'image_mean': cfg.get('mean'), 'image_std': cfg.get('std')}
    if network is RetinaNet:
        # three to an octave, as in torchvision
        sizes = [tuple(int(stride * 4 * 2 ** (i / 3)) for i in range(3)) for stride in pyramid.strides]
        return {**arguments, 'anchor_generator': _anchors(sizes), **given}
    # all maps but the last one, which is for proposals alone
    names = [str(i) for i in range(len(pyramid.strides) - 1)]
    arguments['rpn_anchor_generator'] = _anchors([(_ANCHOR_SCALE * stride,) for stride in pyramid.strides])
    arguments['box_roi_pool'] = MultiScaleRoIAlign(names, output_size=7, sampling_ratio=2)
    if network is MaskRCNN:
        arguments['mask_roi_pool'] = MultiScaleRoIAlign(names, output_size=14, sampling_ratio=2)
    return {**arguments, **given}


def _anchors(sizes: list[tuple[int, ...]]) -> AnchorGenerator:
    return AnchorGenerator(tuple(sizes), aspect_ratios=((0.5, 1.0, 2.0),) * len(sizes))
