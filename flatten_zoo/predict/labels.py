"""What the classes of a network are called."""

import re
from collections.abc import Mapping
from typing import Any

from timm.data import CustomDatasetInfo, ImageNetInfo, infer_imagenet_subset
from timm.data.dataset_info import DatasetInfoLabelMapper

from ..errors import printable

__all__ = ['class_labels']

IMAGENET_TAG = re.compile(r'(?:^|_)in(?:1|12|21|22)k(?:_|$)')  # as in 'leaplab_in1k' or 'fb_in22k_ft_in1k'


def class_labels(cfg: Mapping[str, Any], num_classes: int) -> list[str]:
    """A name for each class, on one line and without characters that steer a terminal.

    They are the network's own `label_names` if it has them, or what its `label_descriptions` say of them. Otherwise
    they are ImageNet's if the weights are: if their tag says so, and the number of classes is that of timm's list.
    Otherwise, and for classes that names of one's own leave out, they are the index.

    Args:
        cfg: A network's `pretrained_cfg`, or the same entries of a description.
        num_classes: Number of classes.
    """
    mapper = DatasetInfoLabelMapper(_dataset_info(cfg, num_classes), fallback_format='{index}')
    return [printable(str(mapper(index))) for index in range(num_classes)]


def _dataset_info(cfg: Mapping[str, Any], num_classes: int) -> CustomDatasetInfo | ImageNetInfo:
    indices = CustomDatasetInfo([str(index) for index in range(num_classes)])
    names = cfg.get('label_names')
    if names:
        try:
            info = CustomDatasetInfo(names, cfg.get('label_descriptions'))
        except (TypeError, ValueError):  # no names, or not for each a description
            return indices
        found = DatasetInfoLabelMapper(info).coverage(num_classes)
        return indices if found.extra or found.missing and not isinstance(names, dict) else info
    subset = infer_imagenet_subset({'num_classes': num_classes})
    return ImageNetInfo(subset) if subset and IMAGENET_TAG.search(cfg.get('tag') or '') else indices
