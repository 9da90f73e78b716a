"""Detection and segmentation with the zoo's backbones, stereo matching, actions in videos, and data to try them on."""

from ..cost.dense import rcnn_cost
from ..samples.clips import write_clips
from ..samples.shapes import write_shapes
from ..samples.stereo import write_stereo_pairs
from .coco import CocoInstances, CocoSemantic, coco_split, semantic_labels
from .evaluation import CocoScores
from .isa_net import ISANet, isa_net
from .psmnet import PSMNet, psmnet
from .pyramid import LEVELS, PyramidBackbone, freeze_norms, freeze_stages
from .rc3d import RC3D, rc3d, temporal_nms
from .rcnn import faster_rcnn, mask_rcnn
from .segmentation import SegmentationScores, segmentation_losses
from .smp import pyramid_encoder
from .stereo import DisparityScores, stereo_losses
from .stereo_data import KittiPairs, SceneFlowPairs, occluded_pixels
from .temporal_scores import TemporalScores
from .video_data import ActivityNetClips

__all__ = [
    'LEVELS',
    'ActivityNetClips',
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
    'SegmentationScores',
    'TemporalScores',
    'coco_split',
    'faster_rcnn',
    'freeze_norms',
    'freeze_stages',
    'isa_net',
    'mask_rcnn',
    'occluded_pixels',
    'psmnet',
    'pyramid_encoder',
    'rc3d',
    'rcnn_cost',
    'segmentation_losses',
    'semantic_labels',
    'stereo_losses',
    'temporal_nms',
    'write_clips',
    'write_shapes',
    'write_stereo_pairs',
]
