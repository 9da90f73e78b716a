"""Detection and segmentation with the zoo's backbones, and data to try them on."""
from .coco import CocoInstances, CocoSemantic, coco_split, semantic_labels
from .cost import rcnn_cost
from .evaluation import CocoScores
from .pyramid import LEVELS, PyramidBackbone, freeze_norms, freeze_stages
from .rcnn import faster_rcnn, mask_rcnn
from .shapes import write_shapes

__all__ = [
    'LEVELS', 'CocoInstances', 'CocoScores', 'CocoSemantic', 'PyramidBackbone', 'coco_split', 'faster_rcnn',
    'freeze_norms', 'freeze_stages', 'mask_rcnn', 'rcnn_cost', 'semantic_labels', 'write_shapes',
]
