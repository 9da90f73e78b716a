"""Parameters and computation of the detection networks, and what attention adds to them."""

import copy
import math

import torch
from torch import nn
from torchvision.models.detection import FasterRCNN

from .counting import Measurement, count

__all__ = ['rcnn_cost']


class _Counted(nn.Module):
    """Everything of an R-CNN that computes with weights, with as many proposals and detections as it has at most."""

    def __init__(self, model: FasterRCNN):
        super().__init__()
        self.backbone, self.rpn, self.roi_heads = model.backbone, model.rpn, model.roi_heads

    def forward(self, x: torch.Tensor) -> None:
        features = list(self.backbone(x).values())
        self.rpn.head(features)
        heads, channels = self.roi_heads, self.backbone.out_channels
        regions = x.new_empty(self.rpn.post_nms_top_n(), channels, *heads.box_roi_pool.output_size)
        heads.box_predictor(heads.box_head(regions))
        if heads.has_mask():
            regions = x.new_empty(heads.detections_per_img, channels, *heads.mask_roi_pool.output_size)
            heads.mask_predictor(heads.mask_head(regions))


def rcnn_cost(model: FasterRCNN, image_size: tuple[int, int]) -> Measurement:
    """Counts what a Faster or Mask R-CNN costs in inference, for one image.

    Nothing is computed: any size can be asked for. Its heads are counted with all proposals (1000 by default) and
    detections (100 by default) that it can have; pooling of regions and suppression have no multiply-accumulates.

    Args:
        model: The network; left as it is.
        image_size: Height and width of the image after resizing; padded as the network pads it.
    """
    multiple = model.transform.size_divisible
    height, width = (math.ceil(side / multiple) * multiple for side in image_size)
    counted = _Counted(copy.deepcopy(model).to('meta').eval())
    return count(counted, (1, len(model.transform.image_mean), height, width))
