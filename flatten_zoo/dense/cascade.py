"""The heads of Cascade R-CNN (arXiv 1712.00726, 1906.09756), each one of torchvision's."""

from collections.abc import Sequence

import torch
from torch import nn
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_inference, maskrcnn_loss
from torchvision.ops import clip_boxes_to_image

__all__ = ['CASCADE_STAGES', 'CascadeRoIHeads']

CASCADE_STAGES = ((0.5, (10, 10, 5, 5)), (0.6, (20, 20, 10, 10)), (0.7, (30, 30, 15, 15)))
"""Of each stage the overlap that makes a box a positive, and the weights of its box coder."""
_LOSS_WEIGHTS = (1.0, 0.5, 0.25)  # not in the papers, but in the authors' code

Boxes = list[torch.Tensor]
Shapes = list[tuple[int, int]]
Detections = list[dict[str, torch.Tensor]]


class CascadeRoIHeads(nn.Module):
    """A cascade of torchvision's heads in the place of one: the boxes that a stage refined are those of the next.

    In training each stage draws its own sample of its boxes and the objects' true ones, by its own threshold, and
    learns classes, boxes and masks; the losses of the stages count 1, 0.5 and 0.25. No gradient goes through boxes.

    In inference the class probabilities are the mean of what the heads of all stages say of the last stage's boxes,
    which only its own regression refines further. The masks of what is then found are the mean of the probabilities of
    all stages' masks, as in the paper on Cascade Mask R-CNN (arXiv 1906.09756).

    Args:
        stages: The heads, of up to three stages, with masks or all without; their box regression is made
            class-agnostic. Thresholds for scores and suppression are those of the last one.

    Shape:
        - input: as of torchvision's `RoIHeads`: maps by name, N×4 boxes and the size of each image, and targets
        - output: of each image `boxes`, `labels`, `scores` and `masks` in inference; in training the losses
          `loss_classifier_1`, `loss_box_reg_1`, `loss_mask_1`, `loss_classifier_2` …
    """

    def __init__(self, stages: Sequence[RoIHeads]):
        super().__init__()
        if not 0 < len(stages) <= len(_LOSS_WEIGHTS):
            raise ValueError(f'stages must be one to {len(_LOSS_WEIGHTS)}, got {len(stages)}')
        self.stages = nn.ModuleList(stages)
        for stage in stages:
            stage.box_predictor.bbox_pred = nn.Linear(stage.box_predictor.bbox_pred.in_features, 4)

    def forward(
        self,
        features: dict[str, torch.Tensor],
        proposals: Boxes,
        image_shapes: Shapes,
        targets: Detections | None = None,
    ) -> tuple[Detections, dict[str, torch.Tensor]]:
        """Detections, none in training, and losses, none in inference."""
        proposals = [_full_precision(boxes) for boxes in proposals]
        if self.training:
            return [], self._losses(features, proposals, image_shapes, targets)
        return self._detect(features, proposals, image_shapes), {}

    def _losses(
        self, features: dict[str, torch.Tensor], boxes: Boxes, image_shapes: Shapes, targets: Detections | None
    ) -> dict[str, torch.Tensor]:
        losses = {}
        for number, (stage, weight) in enumerate(zip(self.stages, _LOSS_WEIGHTS, strict=False), start=1):
            boxes, matches, labels, codes = stage.select_training_samples(boxes, targets)
            logits, regression = _predict(stage, stage.box_roi_pool(features, boxes, image_shapes))
            found = {}
            if len(logits):
                of_classes = regression.repeat(1, logits.shape[1])
                found['classifier'], found['box_reg'] = fastrcnn_loss(logits, of_classes, labels, codes)
            else:  # no proposals and no objects, of which torchvision's loss would be 0 / 0
                found['classifier'], found['box_reg'] = logits.sum(), regression.sum()
            if stage.has_mask():
                positive = [label > 0 for label in labels]
                inside = [b[chosen] for b, chosen in zip(boxes, positive, strict=True)]
                masks = stage.mask_predictor(stage.mask_head(stage.mask_roi_pool(features, inside, image_shapes)))
                found['mask'] = maskrcnn_loss(
                    masks,
                    inside,
                    [target['masks'] for target in targets],
                    [target['labels'] for target in targets],
                    [match[chosen] for match, chosen in zip(matches, positive, strict=True)],
                )
            losses.update({f'loss_{name}_{number}': weight * loss for name, loss in found.items()})
            boxes = _refine(stage, regression, boxes, image_shapes)
        return losses

    def _detect(self, features: dict[str, torch.Tensor], boxes: Boxes, image_shapes: Shapes) -> Detections:
        *earlier, last = self.stages
        for stage in earlier:
            _, regression = _predict(stage, stage.box_roi_pool(features, boxes, image_shapes))
            boxes = _refine(stage, regression, boxes, image_shapes)
        regions = last.box_roi_pool(features, boxes, image_shapes)
        logits, regressions = zip(*(_predict(stage, regions) for stage in self.stages), strict=True)
        probabilities = torch.stack(logits).softmax(-1).mean(0)
        of_classes = regressions[-1].repeat(1, probabilities.shape[1])
        # the softmax of logarithms of probabilities is the probabilities
        boxes, scores, labels = last.postprocess_detections(probabilities.log(), of_classes, boxes, image_shapes)
        detections = [
            {'boxes': b, 'labels': label, 'scores': score}
            for b, label, score in zip(boxes, labels, scores, strict=True)
        ]
        if last.has_mask():
            regions = last.mask_roi_pool(features, boxes, image_shapes)
            of_stages = [
                maskrcnn_inference(stage.mask_predictor(stage.mask_head(regions)), labels) for stage in self.stages
            ]
            for found, masks in zip(detections, zip(*of_stages, strict=True), strict=True):
                found['masks'] = torch.stack(masks).mean(0)
        return detections


def _predict(stage: RoIHeads, regions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Class logits, N×classes, and box regression, N×4, of regions."""
    logits, regression = stage.box_predictor(stage.box_head(regions))
    return _full_precision(logits), _full_precision(regression)


def _refine(stage: RoIHeads, regression: torch.Tensor, boxes: Boxes, image_shapes: Shapes) -> Boxes:
    refined = stage.box_coder.decode_single(regression.detach(), torch.cat(boxes)).split([len(b) for b in boxes])
    return [clip_boxes_to_image(b, shape) for b, shape in zip(refined, image_shapes, strict=True)]


def _full_precision(x: torch.Tensor) -> torch.Tensor:
    """At least single precision: half holds no coordinates of large images."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
