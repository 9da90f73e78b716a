"""Detection and segmentation with the zoo's backbones, and data to try them on."""
from .coco import CocoInstances, CocoSemantic, coco_split, semantic_labels
from .shapes import write_shapes

__all__ = ['CocoInstances', 'CocoSemantic', 'coco_split', 'semantic_labels', 'write_shapes']
