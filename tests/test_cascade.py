"""Cascade R-CNN's heads: samples, boxes, losses and scores of the stages, on numbers that can be written out."""

import math

import pytest
import torch
from torch import nn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.ops import MultiScaleRoIAlign

from flatten_zoo.dense import CascadeRoIHeads, cascade_mask_rcnn, mask_rcnn
from flatten_zoo.dense.cascade import CASCADE_STAGES
from tests.test_dense_detection import CLASSES, FEW, SIZES, SMALL, images, same_detections, small_targets

SIDE = 128


def tiny_heads(masks=True):
    """On maps of 4 channels. Nothing is left to chance: every box is drawn in training and kept in inference."""
    torch.manual_seed(0)
    stages = []
    for overlap, weights in CASCADE_STAGES:
        stage = RoIHeads(
            MultiScaleRoIAlign(['0'], 7, 2),
            TwoMLPHead(4 * 49, 16),
            FastRCNNPredictor(16, CLASSES),
            overlap,
            overlap,
            batch_size_per_image=40,
            positive_fraction=0.5,
            bbox_reg_weights=weights,
            score_thresh=0,
            nms_thresh=1,
            detections_per_img=100,
        )
        if masks:
            stage.mask_roi_pool = MultiScaleRoIAlign(['0'], 14, 2)
            stage.mask_head = MaskRCNNHeads(4, (4,), 1)
            stage.mask_predictor = MaskRCNNPredictor(4, 4, CLASSES)
        stages.append(stage)
    return CascadeRoIHeads(stages)


def constant(layer, values=0.0):
    """Makes a layer say the same of everything."""
    nn.init.zeros_(layer.weight)
    with torch.no_grad():
        layer.bias.copy_(torch.as_tensor(values))


def constant_heads(codes=0.0, logits=0.0, masks=0.0):
    heads = tiny_heads()
    for stage, of_stage in zip(heads.stages, torch.as_tensor(logits).expand(3, CLASSES), strict=True):
        constant(stage.box_predictor.cls_score, of_stage)
        constant(stage.box_predictor.bbox_pred, codes)
    for stage, mask in zip(heads.stages, torch.as_tensor(masks).expand(3), strict=True):
        constant(stage.mask_predictor.mask_fcn_logits, mask)
    return heads


def features(number=1):
    return {'0': torch.randn(number, 4, 16, 16, generator=torch.Generator().manual_seed(0))}


def target(*boxes, label=2):
    masks = torch.zeros(len(boxes), SIDE, SIDE, dtype=torch.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes, strict=True):
        mask[y1:y2, x1:x2] = 1
    return {
        'boxes': torch.tensor(boxes, dtype=torch.float).reshape(-1, 4),
        'labels': torch.full((len(boxes),), label),
        'masks': masks,
    }


def record_samples(heads, monkeypatch):
    """What each stage samples from, and what it gets."""
    records = []
    for stage in heads.stages:

        def select(boxes, targets, stage=stage):
            sample = RoIHeads.select_training_samples(stage, [*boxes], targets)
            records.append((boxes, *sample))
            return sample

        monkeypatch.setattr(stage, 'select_training_samples', select)
    return records


def run(heads, boxes, targets=None, maps=None):
    maps = maps or features(len(boxes))
    boxes = [torch.tensor(b, dtype=maps['0'].dtype).reshape(-1, 4) for b in boxes]
    return heads.train(targets is not None)(maps, boxes, [(SIDE, SIDE)] * len(boxes), targets)


def test_each_stage_has_its_own_threshold_and_weights(monkeypatch):
    heads = constant_heads()  # boxes stay as they are
    records = record_samples(heads, monkeypatch)
    heights = (45, 55, 65, 75)  # of an object of 100: the overlaps in percent
    run(heads, [[(0, 0, 100, height) for height in heights]], [target((0, 0, 100, 100))])
    for (_, boxes, _, labels, codes), positives, weight in zip(
        records, ({55, 65, 75, 100}, {65, 75, 100}, {75, 100}), (5, 10, 15), strict=True
    ):
        found = {box[3].item(): (label.item(), code) for box, label, code in zip(*boxes, *labels, *codes, strict=True)}
        assert {height for height, (label, _) in found.items() if label} == positives
        assert {label for label, _ in found.values()} == {0, 2}
        for height, (_, code) in found.items():
            centre = 2 * weight * (50 - height / 2) / height
            expected = [0, centre, 0, weight * math.log(100 / height)]
            torch.testing.assert_close(code, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_boxes_of_a_stage_are_those_that_the_one_before_refined(monkeypatch):
    heads = constant_heads(codes=[1.0, 0, 0, 2])
    records = record_samples(heads, monkeypatch)
    run(heads, [[(20, 40, 60, 60)], [(100, 10, 120, 126)]], [target((20, 40, 60, 60)), target()])
    for (_, drawn, *_), (offered, *_), (_, weights) in zip(records, records[1:], CASCADE_STAGES, strict=False):
        for before, after in zip(drawn, offered, strict=True):
            x1, y1, x2, y2 = before.T
            shift, grow = (x2 - x1) / weights[0], (math.exp(2 / weights[3]) - 1) * (y2 - y1) / 2
            expected = torch.stack([x1 + shift, y1 - grow, x2 + shift, y2 + grow], 1).clamp(0, SIDE)
            torch.testing.assert_close(after, expected)
            assert not after.requires_grad
    assert [len(boxes[0]) for _, boxes, *_ in records] == [2, 3, 4], 'the true box is offered to every stage'


def test_losses_of_the_stages_are_weighted():
    detections, losses = run(constant_heads(), [[(0, 0, 100, 100)]], [target((0, 0, 100, 80))])
    assert detections == []
    names = ('classifier', 'box_reg', 'mask')
    assert set(losses) == {f'loss_{name}_{number}' for name in names for number in (1, 2, 3)}
    for number, factor, (_, weights) in zip((1, 2, 3), (1, 0.5, 0.25), CASCADE_STAGES, strict=True):
        assert losses[f'loss_classifier_{number}'].item() == pytest.approx(factor * math.log(CLASSES))
        assert losses[f'loss_mask_{number}'].item() == pytest.approx(factor * math.log(2))
        # centre and height of the proposal are to change; the true box, which each stage adds, is right
        codes = (weights[1] * 10 / 100, -weights[3] * math.log(80 / 100))
        regression = sum(code - 1 / 18 for code in codes) / (1 + number)
        assert losses[f'loss_box_reg_{number}'].item() == pytest.approx(factor * regression)


def test_scores_and_masks_are_the_mean_of_the_stages():
    logits, masks = [[3.0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 4]], [-1.0, 0, 3]
    (found,), losses = run(constant_heads([1.0, 0, 0, 0], logits, masks), [[(20, 20, 80, 80)]])
    assert not losses
    expected = torch.tensor(logits).softmax(1).mean(0)
    assert found['labels'].tolist() == [3, 1, 2]
    torch.testing.assert_close(found['scores'], expected[[3, 1, 2]])
    shift = 60 * (1 / 10 + 1 / 20 + 1 / 30)
    torch.testing.assert_close(found['boxes'], torch.tensor([[20.0 + shift, 20, 80 + shift, 80]]).expand(3, 4))
    torch.testing.assert_close(found['masks'], torch.tensor(masks).sigmoid().mean().expand(3, 1, 28, 28))


def test_scores_are_those_of_the_last_boxes():
    heads = tiny_heads(masks=False).eval()
    (found,), _ = run(heads, [[(20, 20, 80, 80), (30, 0, 90, 50)]])
    boxes = [torch.tensor([[20.0, 20, 80, 80], [30, 0, 90, 50]])]
    with torch.no_grad():
        for stage in heads.stages[:2]:
            _, codes = stage.box_predictor(stage.box_head(stage.box_roi_pool(features(), boxes, [(SIDE, SIDE)])))
            boxes = [stage.box_coder.decode(codes, boxes)[:, 0]]
        regions = heads.stages[2].box_roi_pool(features(), boxes, [(SIDE, SIDE)])
        scores = sum(stage.box_predictor(stage.box_head(regions))[0].softmax(-1) for stage in heads.stages) / 3
    torch.testing.assert_close(found['scores'].sort().values, scores[:, 1:].flatten().sort().values)
    assert 'masks' not in found


@pytest.mark.parametrize('codes', [(0, 0, -1e4, -1e4), (1e4, 0, 0, 0)], ids=['to nothing', 'out of the image'])
def test_boxes_that_collapse(codes):
    heads = constant_heads(codes)
    _, losses = run(heads, [[(20, 20, 80, 80)], [(0, 0, 9, 9)]], [target((20, 20, 80, 80)), target()])
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad.isfinite().all() for p in heads.parameters() if p.grad is not None)
    assert [len(found['boxes']) for found in run(heads, [[(20, 20, 80, 80)]])[0]] == [0]


def test_no_proposals():
    heads = tiny_heads()
    for targets in ([target()], [target((5, 5, 50, 50))], [target(), target((5, 5, 50, 50))]):
        _, losses = run(heads, [[]] * len(targets), targets)
        assert all(loss.isfinite() for loss in losses.values()) and len(losses) == 9
        sum(losses.values()).backward()
    found, _ = run(heads, [[], [(5, 5, 50, 50)]])
    assert [len(f['boxes']) for f in found] == [0, 3] and found[0]['masks'].shape == (0, 1, 28, 28)
    assert [len(f['boxes']) for f in run(heads, [[]])[0]] == [0]


def test_gradients():
    heads = tiny_heads().double()
    for stage in heads.stages:
        constant(stage.box_predictor.bbox_pred)  # boxes have no gradient, so they must not depend on the maps
    boxes, targets = [[(20, 20, 80, 80), (30, 0, 90, 50)]], [target((22, 18, 85, 80))]
    maps = features()['0'].double().requires_grad_()

    def losses(x):
        return tuple(run(heads, boxes, targets, {'0': x})[1].values())

    assert torch.autograd.gradcheck(losses, maps, fast_mode=True)


@pytest.mark.parametrize('autocast', [True, False])
def test_half_precision_holds_coordinates(autocast):
    heads, maps = constant_heads(), {'0': features()['0'].bfloat16()}
    if not autocast:
        heads.bfloat16()
    box, side = (1001.0, 3.0, 1301.0, 299.0), 1333  # bfloat16 has no 1001 and no 1301
    for targets in (None, [{**target((0, 0, 9, 9)), 'boxes': torch.tensor([box])}]):
        with torch.autocast('cpu', enabled=autocast):
            (*found, losses) = heads.train(targets is not None)(maps, [torch.tensor([box])], [(side, side)], targets)
        assert all(loss.dtype == torch.float and loss.isfinite() for loss in losses.values())
        if targets is None:
            assert found[0][0]['boxes'].tolist() == [[*box]] * (CLASSES - 1)


def test_bad_arguments():
    with pytest.raises(ValueError, match='targets must be given in training'):
        tiny_heads().train()(features(), [torch.zeros(1, 4)], [(SIDE, SIDE)])
    for stages in ([], [*tiny_heads().stages, *tiny_heads().stages]):
        with pytest.raises(ValueError, match=f'stages must be one to 3, got {len(stages)}'):
            CascadeRoIHeads(stages)


@pytest.mark.slow
def test_with_equal_heads_is_torchvisions_mask_rcnn():
    torch.manual_seed(0)
    cascade = cascade_mask_rcnn(SMALL, CLASSES, box_score_thresh=0.001, **SIZES, **FEW)
    plain = mask_rcnn(SMALL, CLASSES, box_score_thresh=0.001, bbox_reg_weights=(30, 30, 15, 15), **SIZES, **FEW)
    first, second, last = cascade.roi_heads.stages
    overlaps = [(s.proposal_matcher.low_threshold, s.proposal_matcher.high_threshold) for s in (first, second, last)]
    assert overlaps == [(0.5, 0.5), (0.6, 0.6), (0.7, 0.7)]
    assert [tuple(stage.box_coder.weights) for stage in (first, second, last)] == [
        (10, 10, 5, 5),
        (20, 20, 10, 10),
        (30, 30, 15, 15),
    ]
    assert len({p.data_ptr() for p in cascade.roi_heads.parameters()}) == len([*last.parameters()]) * 3
    for stage in (first, second):
        stage.load_state_dict(last.state_dict())
        constant(stage.box_predictor.bbox_pred)
    tensors = {key.replace('.stages.2.', '.'): x for key, x in cascade.state_dict().items()}
    tensors = {key: x for key, x in tensors.items() if '.stages.' not in key}
    for kind in ('weight', 'bias'):
        key = f'roi_heads.box_predictor.bbox_pred.{kind}'
        tensors[key] = torch.cat([tensors[key]] * CLASSES)
    plain.load_state_dict(tensors)
    x = images((48, 80), (70, 50))
    with torch.no_grad():
        expected, actual = plain.eval()(x), cascade.eval()(x)
    assert len(expected[0]['boxes']) > 5
    same_detections(actual, expected)
    # the first stage learns as torchvision's only one
    plain.roi_heads.box_coder.weights = first.box_coder.weights
    constant(plain.roi_heads.box_predictor.bbox_pred)
    losses = []
    for model in (plain, cascade):
        torch.manual_seed(0)
        losses.append(model.train()(images((48, 80), (48, 80)), small_targets()))
    for name, loss in losses[0].items():
        same = name if 'objectness' in name or 'rpn' in name else f'{name}_1'
        torch.testing.assert_close(losses[1][same], loss)


@pytest.mark.parametrize('name', ['bbox_reg_weights', 'box_bg_iou_thresh', 'box_head', 'mask_predictor'])
def test_arguments_of_the_stages(name):
    with pytest.raises(ValueError, match=f'the heads of a cascade have their own {name}'):
        cascade_mask_rcnn(SMALL, 2, **{name: 0.5})
