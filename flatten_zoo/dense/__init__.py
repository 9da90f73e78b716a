"""Detection and segmentation with the zoo's backbones, stereo matching, actions in videos, and data to try them on."""

from ..cost.dense import rcnn_cost
from ..samples.clips import write_clips
from ..samples.shapes import write_shapes
from ..samples.stereo import write_stereo_pairs
from .cascade import CascadeRoIHeads
from .coco import CocoInstances, CocoSemantic, coco_split, semantic_labels
from .evaluation import CocoScores
from .isa_net import ISANet, isa_net
from .pictures import colour_of, draw_detections, draw_labels, draw_legend
from .psmnet import PSMNet, psmnet
from .pyramid import LEVELS, PyramidBackbone, freeze_norms, freeze_stages
from .rc3d import RC3D, rc3d, temporal_nms
from .rcnn import cascade_mask_rcnn, faster_rcnn, mask_rcnn, retinanet
from .segmentation import SegmentationScores, segmentation_losses
from .segmentation_data import SegmentationPairs, segmentation_layouts, segmentation_split
from .segmentation_inference import multi_scale, sliding_window
from .smp import pyramid_encoder
from .stereo import DisparityScores, stereo_losses
from .stereo_data import KittiPairs, SceneFlowPairs, occluded_pixels
from .temporal_scores import TemporalScores
from .video_data import ActivityNetClips

__all__ = [
    'LEVELS',
    'ActivityNetClips',
    'CascadeRoIHeads',
    'CocoInstances',
    'CocoScores',
    'CocoSemantic',
    'DisparityScores',
    'ISANet',
    'KittiPairs',
    'PSMNet',
    'PyramidBackbone',
    'RC3D',
    'SceneFlowPairs',
    'SegmentationPairs',
    'SegmentationScores',
    'TemporalScores',
    'cascade_mask_rcnn',
    'coco_split',
    'colour_of',
    'draw_detections',
    'draw_labels',
    'draw_legend',
    'faster_rcnn',
    'freeze_norms',
    'freeze_stages',
    'isa_net',
    'mask_rcnn',
    'multi_scale',
    'occluded_pixels',
    'psmnet',
    'pyramid_encoder',
    'rc3d',
    'rcnn_cost',
    'retinanet',
    'segmentation_layouts',
    'segmentation_losses',
    'segmentation_split',
    'semantic_labels',
    'sliding_window',
    'stereo_losses',
    'temporal_nms',
    'write_clips',
    'write_shapes',
    'write_stereo_pairs',
]
