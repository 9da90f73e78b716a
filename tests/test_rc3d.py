"""R-C3D with attention in its trunk, and THUMOS14's scores."""

import copy
import math
import random

import pytest
import torch
from torchvision.models import get_model
from torchvision.models.video import R3D_18_Weights

from flatten_zoo import EfficientAttention, NonLocalAttention
from flatten_zoo.dense import TemporalScores, rc3d, temporal_nms
from flatten_zoo.dense.training.video import small_trunk

NONE = {'segments': torch.zeros(0, 2), 'labels': torch.zeros(0, dtype=torch.int64)}


def small(attention=None, **kwargs):
    torch.manual_seed(0)
    return rc3d(small_trunk(4), 3, attention, anchor_scales=(1, 2, 4), **kwargs)


@pytest.fixture(scope='module')
def network():
    return small('ea')


def target(*segments, label=1):
    return {'segments': torch.tensor(segments, dtype=torch.float32), 'labels': torch.full([len(segments)], label)}


@pytest.mark.parametrize('backbone', ['r3d_18', 'mc3_18', 'r2plus1d_18'])
def test_backbones(backbone):
    """Attention after the third and fourth stages adds its own tensors only; features have a stride of 8 frames."""
    with torch.device('meta'):
        plain, ea, nl = (rc3d(backbone, 21, attention) for attention in (None, 'ea', 'nl'))
        names = get_model(backbone).state_dict().keys()
        clip = torch.zeros(1, 3, 13, 32, 32)
        assert plain.eval().backbone(clip).shape == ea.eval().backbone(clip).shape == (1, 512, 2, 2, 2)
    assert {f'backbone.{name}' for name in names if not name.startswith('fc.')} < plain.state_dict().keys()
    for model, operator in ((ea, EfficientAttention), (nl, NonLocalAttention)):
        assert isinstance(model.backbone.layer3[2], operator) and isinstance(model.backbone.layer4[2], operator)
        assert [m.keys.in_channels for m in (model.backbone.layer3[2], model.backbone.layer4[2])] == [256, 512]
        new = model.state_dict().keys() - plain.state_dict().keys()
        assert len(new) == 16 and all(name.startswith(('backbone.layer3.2.', 'backbone.layer4.2.')) for name in new)
        assert plain.state_dict().keys() < model.state_dict().keys()


def test_kinetics_weights(monkeypatch):
    """As torchvision loads them, by name and by member; and a state dict of its network."""
    source = get_model('r3d_18')
    monkeypatch.setattr(R3D_18_Weights, 'get_state_dict', lambda *args, **kwargs: source.state_dict())
    for weights in ('DEFAULT', R3D_18_Weights.KINETICS400_V1):
        model = rc3d('r3d_18', 3, 'ea', weights_backbone=weights)
        assert torch.equal(model.backbone.layer4[1].conv2[0].weight, source.layer4[1].conv2[0].weight)
    missing, unexpected = model.backbone.load_state_dict(source.state_dict(), strict=False)
    assert unexpected == ['fc.weight', 'fc.bias'] and {name[:9] for name in missing} == {'layer3.2.', 'layer4.2.'}


def test_attention_starts_as_the_identity():
    plain, clip = small().eval(), torch.rand(1, 3, 32, 32, 32)
    with torch.no_grad():
        (expected,) = plain(clip)
        for attention in ('ea', 'nl'):
            model = small(attention).eval()
            model.load_state_dict(plain.state_dict(), strict=False)
            (found,) = model(clip)
            assert len(found['scores']) and all(torch.equal(found[name], x) for name, x in expected.items())
            torch.nn.init.normal_(model.backbone.layer3[-1].reprojection.weight)
            assert not torch.equal(model.backbone(clip), plain.backbone(clip))


@pytest.mark.parametrize('frames', [(32,), (13, 13), (1, 7, 40), (9, 64)])
def test_any_number_of_frames(network, frames):
    """What is found lies inside its clip, whose padding in the batch holds nothing."""
    clips = [torch.rand(3, n, 32, 24) for n in frames]
    with torch.no_grad():
        found = network.eval()(clips)
    for one, n in zip(found, frames, strict=True):
        start, end = one['segments'].unbind(1)
        assert len(start) and (start >= 0).all() and (start < end).all() and (end <= n).all()
        assert one['labels'].min() >= 1 and one['labels'].max() <= 2
        assert one['scores'].min() >= 0.005 and (one['scores'].diff() <= 0).all() and len(start) <= 100


def test_losses_and_gradients(network):
    """Of clips with an action, of the whole clip, and without one; everything learns."""
    model = copy.deepcopy(network).train()
    for module in model.modules():
        if isinstance(module, EfficientAttention):
            torch.nn.init.normal_(module.reprojection.weight, std=0.1)
    clips = torch.rand(3, 3, 41, 32, 32)
    losses = model(clips, [target([3, 20], [25, 41]), target([0, 41], label=2), NONE])
    assert list(losses) == ['loss_objectness', 'loss_rpn_box_reg', 'loss_classifier', 'loss_box_reg']
    assert all(loss.isfinite() and loss > 0 for loss in losses.values())
    sum(losses.values()).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert all(name.endswith('keys.bias') for name in without)  # a softmax over positions does without it
    losses = model(clips[:1], [NONE])
    assert losses['loss_rpn_box_reg'] == losses['loss_box_reg'] == 0 and losses['loss_objectness'] > 0


def test_learns_one_clip():
    """What it was trained on is what it finds, to a frame."""
    torch.manual_seed(0)
    clip, model = torch.rand(1, 3, 48, 32, 32), small('ea')
    clip[:, :, 10:34] *= 0.2
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(60):
        loss = sum(model(clip, [target([10, 34], label=2)]).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        (found,) = model.eval()(clip)
    assert found['labels'][0] == 2 and found['scores'][0] > 0.8
    assert (found['segments'][0] - torch.tensor([10, 34])).abs().max() < 2


def test_half_precision(network):
    """Frames stay exact to a fraction: half precision has 8 bits, late frames need more."""
    model, clip = copy.deepcopy(network), torch.rand(1, 3, 600, 16, 16)
    with torch.autocast('cpu', torch.bfloat16):
        losses = model.train()(clip, [target([500, 530])])
        assert all(loss.isfinite() for loss in losses.values())
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        mixed = model.eval()(clip)[0]
    with torch.no_grad():
        low = model.bfloat16()(clip.bfloat16())[0]
    for found in (mixed, low):
        assert found['segments'].dtype == found['scores'].dtype == torch.float32
        late = found['segments'][found['segments'] > 300]
        assert len(late) and (late % 1 != 0).any() and found['segments'].max() <= 600


def test_temporal_nms():
    segments = torch.tensor([[0, 10], [1, 10], [1, 10], [20, 30], [0, 4]], dtype=torch.float32)
    scores, labels = torch.tensor([0.9, 0.8, 0.7, 0.95, 0.1]), torch.tensor([1, 1, 2, 1, 1])
    assert temporal_nms(segments, scores, labels, 0.5).tolist() == [3, 0, 2, 4]
    assert temporal_nms(segments, scores, labels, 0.3).tolist() == [3, 0, 2]
    assert temporal_nms(segments[:0], scores[:0], labels[:0], 0.3).tolist() == []


@pytest.mark.parametrize(
    'args, kwargs, message',
    [
        (('resnet50', 3), {}, r"backbone must be one of \('r3d_18', 'mc3_18', 'r2plus1d_18'\) or a module, got"),
        (('r3d_18', 1), {}, 'num_classes includes the background and must be at least 2, got 1'),
        (('r3d_18', 3, 'issa'), {}, r"attention must be None or one of \('ea', 'nl'\), got 'issa'"),
        (('r3d_18', 3), {'anchor_scales': (1, 0)}, r'anchor_scales must be positive numbers, got \(1, 0\)'),
        (('r3d_18', 3), {'weights_backbone': 'ImageNet'}, r"must be None or one of \['KINETICS400_V1'\], got 'ImageN"),
        ((torch.nn.Identity(), 3), {'weights_backbone': 'DEFAULT'}, 'weights_backbone is for a backbone that is given'),
    ],
)
def test_bad_arguments(args, kwargs, message):
    with torch.device('meta'), pytest.raises(ValueError, match=message):
        rc3d(*args, **kwargs)


@pytest.mark.parametrize(
    'clips, targets, message',
    [
        (torch.rand(3, 8, 16, 16), None, 'clips must be 3×T×H×W of one height and width'),
        ([torch.rand(3, 8, 16, 16), torch.rand(3, 8, 16, 17)], [NONE, NONE], 'clips must be 3×T×H×W of one height'),
        ([], [], 'clips must be 3×T×H×W'),
        (torch.rand(1, 3, 8, 16, 16), None, 'training needs as many targets as clips, 1, got 0'),
        (torch.rand(1, 3, 8, 16, 16), [target([5, 5])], 'segments must end after they start'),
        (torch.rand(1, 3, 8, 16, 16), [{**NONE, 'segments': torch.zeros(4)}], 'segments must be N×2 and labels N'),
    ],
)
def test_bad_clips_and_targets(network, clips, targets, message):
    with pytest.raises(ValueError, match=message):
        network.train()(clips, targets)


def detections(*rows):
    segments, labels, scores = zip(*rows, strict=True) if rows else ((), (), ())
    return {
        'segments': torch.tensor(segments, dtype=torch.float64).reshape(-1, 2),
        'labels': torch.tensor(labels, dtype=torch.int64),
        'scores': torch.tensor(scores, dtype=torch.float64),
    }


def truths(*rows, ambiguous=()):
    found = detections(*((*row, 1.0) for row in rows))
    return {**found, 'ambiguous': torch.tensor(ambiguous, dtype=torch.float64).reshape(-1, 2)}


def test_scores_by_hand():
    """Two videos and two classes, the second of which nothing is found of."""
    scores = TemporalScores(4, thresholds=(0.5,))
    first = detections(
        ((0, 6), 1, 0.9),  # overlaps the truth 0-10 by 0.6, but the next one does more: wrong
        ((0, 9), 1, 0.8),  # right
        ((20, 30), 1, 0.7),  # overlaps what is ambiguous: does not count
        ((50, 60), 1, 0.6),  # right
        ((100, 105), 1, 0.5),  # overlaps 100-110 by just 0.5, which is not above it: wrong
    )
    scores.add(first, truths(((0, 10), 1), ((50, 60), 1), ((100, 110), 1), ((0, 5), 2), ambiguous=[(29, 40)]))
    scores.add(detections(((0, 1), 1, 0.95), ((0, 1), 3, 0.99)), truths())  # wrong, before all others
    # of the first class wrong, wrong, right, (not counted), right, wrong: (1/3 + 2/4) / 3; the third has no truths
    assert scores.average_precisions()[0, :2].tolist() == pytest.approx([(1 / 3 + 2 / 4) / 3, 0])
    assert math.isnan(scores.average_precisions()[0, 2])
    assert scores.compute() == {'mAP@0.5': pytest.approx((1 / 3 + 2 / 4) / 6)}


def brute_force(videos, label, threshold):
    """The protocol in loops."""
    outcomes, count = [], 0
    for found, truth, ambiguous in videos:
        mine = sorted((row for row in found if row[1] == label), key=lambda row: -row[2])
        states = ['wrong'] * len(mine)
        for segment in (row[0] for row in truth if row[1] == label):
            count += 1
            best, best_overlap = None, threshold
            for i, row in enumerate(mine):
                if states[i] == 'wrong' and overlap(segment, row[0]) > best_overlap:
                    best, best_overlap = i, overlap(segment, row[0])
            if best is not None:
                states[best] = 'right'
        for row, state in zip(mine, states, strict=True):
            if state == 'right' or not any(overlap(row[0], other) > 0 for other in ambiguous):
                outcomes.append((row[2], state))
    right = result = 0
    for total, (_, state) in enumerate(sorted(outcomes, key=lambda outcome: -outcome[0]), start=1):
        if state == 'right':
            right += 1
            result += right / total
    return result / count if count else None


def overlap(a, b):
    shared = min(a[1], b[1]) - max(a[0], b[0])
    return shared / (a[1] - a[0] + b[1] - b[0] - shared) if shared > 0 else 0


@pytest.mark.parametrize('seed', range(6))
def test_scores_are_those_of_loops(seed):
    generator = random.Random(seed)

    def segment():
        start = generator.randrange(20)
        return start, start + generator.randrange(1, 12)

    videos = []
    scores = TemporalScores(4)
    for _ in range(generator.randrange(1, 6)):
        found = [(segment(), generator.randrange(1, 4), generator.random()) for _ in range(generator.randrange(15))]
        truth = [(segment(), generator.randrange(1, 3)) for _ in range(generator.randrange(6))]
        ambiguous = [segment() for _ in range(generator.randrange(2))]
        videos.append((found, truth, ambiguous))
        scores.add(detections(*found), truths(*truth, ambiguous=ambiguous))
    result = scores.compute()
    assert list(result) == [f'mAP@{i / 10:g}' for i in range(1, 8)]
    for (name, mean), threshold in zip(result.items(), scores.thresholds, strict=True):
        expected = [brute_force(videos, label, threshold) for label in (1, 2, 3)]
        expected = [x for x in expected if x is not None]
        assert mean == pytest.approx(sum(expected) / len(expected), rel=1e-12), name


def test_scores_without_truths_and_of_other_shapes():
    scores = TemporalScores(3)
    assert all(math.isnan(x) for x in scores.compute().values())
    scores.add(detections(((0, 1), 1, 0.5)), truths())
    assert all(math.isnan(x) for x in scores.compute().values())
    scores.add(detections(), truths(((0, 1), 2)))
    assert set(scores.compute().values()) == {0}
    with pytest.raises(ValueError, match='labels must be from 1 to 2, got 3'):
        scores.add(detections(((0, 1), 3, 0.5)), truths())
    with pytest.raises(ValueError, match='there are 1 segments, 1 labels and 0 scores'):
        scores.add({**detections(((0, 1), 1, 0.5)), 'scores': torch.zeros(0)}, truths())
