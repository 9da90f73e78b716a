"""Detection and segmentation with the zoo's backbones, and data to try them on."""
from .coco import CocoInstances, CocoSemantic, coco_split, semantic_labels
from .isa_net import ISANet, isa_net
from .segmentation import SegmentationScores, segmentation_losses
from .shapes import write_shapes

__all__ = [
    'CocoInstances', 'CocoSemantic', 'ISANet', 'SegmentationScores', 'coco_split', 'isa_net', 'segmentation_losses',
    'semantic_labels', 'write_shapes',
]
