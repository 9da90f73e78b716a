"""Parameters and computation of the detection networks, and what attention adds to them."""

import copy
import math

import torch
from torch import nn
from torchvision.models.detection import FasterRCNN, RetinaNet

from .counting import Measurement, count

__all__ = ['rcnn_cost']


class _Counted(nn.Module):
    """What of a detection network computes with weights, with as many proposals and detections as it has at most."""

    def __init__(self, model: FasterRCNN | RetinaNet):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> None:
        model = self.model
        features = list(model.backbone(x).values())
        if isinstance(model, RetinaNet):
            model.head(features)
            return
        model.rpn.head(features)
        stages, channels = getattr(model.roi_heads, 'stages', [model.roi_heads]), model.backbone.out_channels
        last = stages[-1]
        regions = x.new_empty(model.rpn.post_nms_top_n(), channels, *last.box_roi_pool.output_size)
        for heads in (*stages[:-1], *stages):  # on the way to a cascade's last boxes, and on these
            heads.box_predictor(heads.box_head(regions))
        if last.has_mask():
            regions = x.new_empty(last.detections_per_img, channels, *last.mask_roi_pool.output_size)
            for heads in stages:
                heads.mask_predictor(heads.mask_head(regions))


def rcnn_cost(model: FasterRCNN | RetinaNet, image_size: tuple[int, int]) -> Measurement:
    """Counts what a Faster, Mask or Cascade R-CNN or a RetinaNet costs in inference, for one image.

    Nothing is computed: any size can be asked for. The heads on regions are counted with all proposals (1000 by
    default) and detections (100 by default) that there can be: of a cascade those of the first two stages twice, on
    their own boxes and on the last. Pooling of regions and suppression have no multiply-accumulates.

    Args:
        model: The network; left as it is.
        image_size: Height and width of the image after resizing; padded as the network pads it.
    """
    multiple = model.transform.size_divisible
    height, width = (math.ceil(side / multiple) * multiple for side in image_size)
    counted = _Counted(copy.deepcopy(model).to('meta').eval())
    return count(counted, (1, len(model.transform.image_mean), height, width))
