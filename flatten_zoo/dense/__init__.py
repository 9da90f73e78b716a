"""Detection and segmentation with the zoo's backbones, and data to try them on."""

from ..cost.dense import rcnn_cost
from ..samples.shapes import write_shapes
from .coco import CocoInstances, CocoSemantic, coco_split, semantic_labels
from .evaluation import CocoScores
from .isa_net import ISANet, isa_net
from .pyramid import LEVELS, PyramidBackbone, freeze_norms, freeze_stages
from .rcnn import faster_rcnn, mask_rcnn
from .segmentation import SegmentationScores, segmentation_losses
from .smp import pyramid_encoder

__all__ = [
    'LEVELS',
    'CocoInstances',
    'CocoScores',
    'CocoSemantic',
    'ISANet',
    'PyramidBackbone',
    'SegmentationScores',
    'coco_split',
    'faster_rcnn',
    'freeze_norms',
    'freeze_stages',
    'isa_net',
    'mask_rcnn',
    'pyramid_encoder',
    'rcnn_cost',
    'segmentation_losses',
    'semantic_labels',
    'write_shapes',
]
