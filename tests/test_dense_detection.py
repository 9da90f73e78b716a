"""Faster and Mask R-CNN on backbones of the zoo and of timm."""

import importlib
import sys

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d, FrozenBatchNormAct2d
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.detection import fasterrcnn_resnet50_fpn, maskrcnn_resnet50_fpn, retinanet_resnet50_fpn
from torchvision.ops import FrozenBatchNorm2d

import flatten_zoo
from flatten_zoo import EfficientAttention, InterlacedSparseAttention, NonLocalAttention
from flatten_zoo.cost.operators import closed_form
from flatten_zoo.dense import (
    PyramidBackbone,
    cascade_mask_rcnn,
    faster_rcnn,
    freeze_norms,
    freeze_stages,
    mask_rcnn,
    rcnn_cost,
    retinanet,
)

from .marks import slow_but

LEVELS = ['fpn1', 'fpn2', 'fpn3', 'fpn4', 'fpn5']
SMALL = 'flatten_pvt_v2_b0'
SIZES = {'min_size': 64, 'max_size': 96}
FEW = {'box_detections_per_img': 8}  # each has a mask to compute
CLASSES = 4


def small_targets():
    masks = torch.zeros(1, 48, 80, dtype=torch.uint8)
    masks[:, 5:30, 10:40] = 1
    full = {'boxes': torch.tensor([[10.0, 5.0, 40.0, 30.0]]), 'labels': torch.tensor([2]), 'masks': masks}
    empty = {'boxes': torch.zeros(0, 4), 'labels': torch.zeros(0, dtype=torch.int64), 'masks': masks[:0]}
    return [full, empty]


def images(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(3, *size, generator=generator) for size in sizes]


def randomize_norms(model):
    """Norm statistics unlike those of a new network."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)


def same_detections(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key in x:
            torch.testing.assert_close(x[key], y[key])


@pytest.mark.parametrize(
    'ours, theirs, few',
    [
        (mask_rcnn, maskrcnn_resnet50_fpn, {'box_score_thresh': 0.001, **FEW}),
        pytest.param(
            *(faster_rcnn, fasterrcnn_resnet50_fpn, {'box_score_thresh': 0.001, **FEW}), marks=pytest.mark.slow
        ),
        (retinanet, retinanet_resnet50_fpn, {'score_thresh': 0.001, 'detections_per_img': 8}),
    ],
    ids=['mask', 'faster', 'retinanet'],
)
def test_is_torchvisions_own(ours, theirs, few):
    a = ours('resnet50', 91, **SIZES, **few).eval()
    b = theirs(weights=None, weights_backbone=None, **SIZES, **few).eval()
    b.load_state_dict(a.state_dict())
    randomize_norms(b)
    a.load_state_dict(b.state_dict())
    x = images((48, 80), (70, 50))
    with torch.no_grad():
        expected, actual = b(x), a(x)
    assert len(expected[0]['boxes']) > 5
    same_detections(actual, expected)
    losses = []
    for model in (a, b):
        torch.manual_seed(0)
        losses.append(model.train()(images((48, 80), (48, 80)), small_targets()))
    torch.testing.assert_close(*losses)


def test_frozen_norms_exchange_with_torchvision():
    plain = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    frozen = mask_rcnn('resnet50', 91, freeze_norm=True)
    frozen.load_state_dict(plain.state_dict())
    plain.load_state_dict(frozen.state_dict())
    # torchvision's published weights come without batch counters
    published = {k: v for k, v in plain.state_dict().items() if not k.endswith('num_batches_tracked')}
    frozen.load_state_dict(published)
    assert frozen.state_dict().keys() == published.keys()


def test_attention_tensors_alone_are_new():
    plain = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, box_score_thresh=0.001, **SIZES, **FEW).eval()
    model = mask_rcnn('ea_resnet50', 91, attention='ea', box_score_thresh=0.001, **SIZES, **FEW).eval()
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    places = ['body.layer3.attn', 'body.layer4.attn', *(f'attention.{level}' for level in LEVELS)]
    assert not unexpected
    assert set(missing) == {
        f'backbone.{place}.{part}.{kind}'
        for place in places
        for part in ('keys', 'queries', 'values', 'reprojection')
        for kind in ('weight', 'bias')
    }
    x = images((48, 80))
    with torch.no_grad():
        expected = plain(x)
        assert len(expected[0]['boxes'])
        same_detections(model(x), expected)  # attention starts as the identity


@pytest.mark.parametrize(
    'name, operator', [('ea', EfficientAttention), ('nl', NonLocalAttention), ('issa', InterlacedSparseAttention)]
)
def test_attention_comes_after_its_level(name, operator):
    torch.manual_seed(0)
    body = timm.create_model('resnet18', features_only=True)
    plain = PyramidBackbone(body).eval()
    model = PyramidBackbone(body, name, ['fpn5', 'fpn2']).eval()
    model.load_state_dict(plain.state_dict(), strict=False)
    assert list(model.attention) == ['fpn2', 'fpn5']
    assert all(type(module) is operator for module in model.attention.values())
    x = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        before = plain(x)
        for module in model.attention.values():
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.1)
        after = model(x)
    assert list(before) == list(after) == ['0', '1', '2', '3', 'pool']
    levels = dict(zip(LEVELS, before, strict=True))
    for level, key in levels.items():
        if level in model.attention:
            assert not torch.equal(after[key], before[key])
            torch.testing.assert_close(after[key], model.attention[level](before[key]))
        else:
            assert torch.equal(after[key], before[key])


def test_attention_arguments():
    model = mask_rcnn(SMALL, 2, 'ea', 'fpn3', {'key_dim': 32, 'num_heads': 2})
    (module,) = model.backbone.attention.values()
    assert module.keys.out_channels == 32 and module.num_heads == 2
    for arguments, message in [
        (('ae',), 'attention must be None or one of'),
        (('ea', 'fpn6'), 'attention_levels must be of .*fpn6'),
        (('ea', ()), 'attention_levels must be of'),
        (('ea', ('fpn1', 'fpn0')), 'attention_levels must be of'),
        ((None, 'fpn1', {'key_dim': 3}), 'attention_kwargs need an attention'),
        (('ea', 'fpn1', {'key_dim': 0}), 'key_dim must be positive, got 0'),
    ]:
        with pytest.raises(ValueError, match=message):
            mask_rcnn(SMALL, 2, *arguments)


OF_PROPOSALS = {'loss_objectness', 'loss_rpn_box_reg'}
OF_REGIONS = {'loss_classifier', 'loss_box_reg', 'loss_mask'}


@pytest.mark.parametrize(
    'build, names',
    [
        (mask_rcnn, OF_PROPOSALS | OF_REGIONS),
        (cascade_mask_rcnn, OF_PROPOSALS | {f'{name}_{stage}' for name in OF_REGIONS for stage in (1, 2, 3)}),
        (retinanet, {'classification', 'bbox_regression'}),
    ],
    ids=['mask', 'cascade', 'retinanet'],
)
def test_trains_and_detects_at_odd_sizes(build, names):
    torch.manual_seed(0)
    few = (
        {'detections_per_img': 8, 'score_thresh': 0.001}
        if build is retinanet
        else {**FEW, 'rpn_post_nms_top_n_train': 100, 'box_score_thresh': 0.001}
    )
    model = build(SMALL, CLASSES, 'ea', min_size=71, max_size=97, **few)
    full, empty = small_targets()
    losses = model(images((48, 80), (48, 80)), [full, empty])
    without_objects = model(images((48, 80)), [empty])
    assert set(losses) == set(without_objects) == names
    assert all(loss.isfinite() for loss in without_objects.values())
    sum(losses.values()).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not without
    model.eval()
    x = images((33, 35), (100, 31))
    with torch.no_grad():
        for image, found in zip(x, model(x), strict=True):
            assert set(found) == {'boxes', 'labels', 'scores', *(() if build is retinanet else ('masks',))}
            if 'masks' in found:
                assert found['masks'].shape[1:] == (1, *image.shape[1:])
            assert len(found['boxes']) and found['boxes'].isfinite().all()


@pytest.mark.parametrize(
    'name',
    [
        'flatten_pvt_t',
        'flatten_swin_t',
        'flatten_cswin_t',
        'swin_tiny_patch4_window7_224',
        'convnext_atto',
        'efficientnet_b0',
        'regnety_002',
    ],
)
def test_any_backbone(name):
    model = faster_rcnn(name, 3, **SIZES)
    assert model.backbone.strides == [4, 8, 16, 32, 64]
    with torch.no_grad():
        maps = model.backbone(torch.randn(1, 3, 64, 160))
        assert {key: x.shape[1:] for key, x in maps.items()} == {
            '0': (256, 16, 40),
            '1': (256, 8, 20),
            '2': (256, 4, 10),
            '3': (256, 2, 5),
            'pool': (256, 1, 3),
        }
        assert len(model.eval()(images((48, 80)))) == 1


@pytest.mark.parametrize(
    'name, kwargs, stride',
    [
        ('flatten_deit_t', {}, 16),
        ('vit_tiny_patch16_224', {'patch_size': 8}, 8),
        ('vit_tiny_patch16_224', {'patch_size': 32}, 32),
    ],
)
def test_plain_vision_transformer(name, kwargs, stride):
    torch.manual_seed(0)
    model = mask_rcnn(name, CLASSES, 'ea', backbone_kwargs={'depth': 4, **kwargs}, **SIZES)
    pyramid = model.backbone
    assert pyramid.strides == [4, 8, 16, 32, 64]
    x = torch.randn(1, 3, 64, 160)
    with torch.no_grad():
        maps = pyramid(x)
        assert {key: y.shape[1:] for key, y in maps.items()} == {
            '0': (256, 16, 40),
            '1': (256, 8, 20),
            '2': (256, 4, 10),
            '3': (256, 2, 5),
            'pool': (256, 1, 3),
        }
        last = pyramid.body(x)[-1]
        assert last.shape[-1] == 160 // stride
        same_stride = pyramid.fpn[str([4, 8, 16, 32].index(stride))]
        torch.testing.assert_close(maps[str([4, 8, 16, 32].index(stride))], same_stride(last))
    if stride != 16:
        return
    losses = model(images((48, 80), (48, 80)), small_targets())
    sum(losses.values()).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]


def test_freezing_counts_the_blocks_of_a_plain_vision_transformer():
    def build(**kwargs):
        model = faster_rcnn('flatten_deit_t', 2, backbone_kwargs={'depth': 4}, **kwargs)
        return {name.removeprefix('model.') for name, p in model.backbone.body.named_parameters() if p.requires_grad}

    everything = build()
    assert build(trainable_backbone_layers=2) == {n for n in everything if n.startswith(('blocks.2.', 'blocks.3.'))}
    assert build(trainable_backbone_layers=4) == {n for n in everything if n.startswith('blocks.')}
    assert build(trainable_backbone_layers=5) == everything and not build(trainable_backbone_layers=0)


def test_plain_vision_transformer_of_another_patch_size():
    with pytest.raises(ValueError, match=r'this backbone has \[14, 14, 14\].*patches of 8, 16 or 32'):
        mask_rcnn('vit_tiny_patch16_224', 2, backbone_kwargs={'patch_size': 14, 'depth': 3})


@pytest.mark.parametrize(
    'name, kwargs, strides',
    [
        ('resnet18', {}, [8, 16, 32, 64, 128]),
        ('resnet18', {'out_indices': (1, 2)}, [8, 16, 32]),
        ('resnet18', {'out_indices': (3, 4)}, [16, 32, 64, 128]),
        ('flatten_deit_t', {'depth': 2}, [8, 16, 32, 64, 128]),
    ],
)
def test_levels_of_retinanet(name, kwargs, strides):
    levels = LEVELS[len(strides) - 5 or None :] if strides[0] == 16 else LEVELS[: len(strides)]
    model = retinanet(name, 3, 'ea', levels, backbone_kwargs=kwargs, **SIZES)
    pyramid = model.backbone
    assert pyramid.strides == strides and list(pyramid.attention) == levels
    assert [sizes[0] for sizes in model.anchor_generator.sizes] == [4 * stride for stride in strides]
    with torch.no_grad():
        plain = pyramid(torch.randn(1, 3, 128, 256))
    assert [*plain] == [*pyramid.map_names.values()]
    assert [x.shape[1:] for x in plain.values()] == [(256, 128 // stride, 256 // stride) for stride in strides]


@pytest.mark.parametrize('build', [mask_rcnn, faster_rcnn, cascade_mask_rcnn, retinanet])
def test_arguments_of_no_network(build):
    name = 'box_score_thresh' if build is retinanet else 'score_thresh'
    with pytest.raises(ValueError, match=f'R[-a-zA-Z]+ has no argument {name}'):
        build(SMALL, 2, **{name: 0.1})
    with pytest.raises(ValueError, match='num_classes includes the background'):
        build(SMALL, 1)
    assert build(SMALL, 2, size_divisible=64).transform.size_divisible == 64


@pytest.mark.parametrize('name', [SMALL, 'flatten_swin_t', 'flatten_deit_t', 'ea_resnet50', 'resnet18'])
@pytest.mark.parametrize('indices', [(0, 99), (-99,), (0, 1.5), 'ab', (), 0, 99, (1, 1), (-1, 0), (2, 1)])
def test_wrong_out_indices(name, indices):
    with torch.device('meta'), pytest.raises(ValueError, match='out_indices|list indices|not'):
        mask_rcnn(name, 2, backbone_kwargs={'out_indices': indices})


def test_right_out_indices():
    with torch.device('meta'):
        for name in ('flatten_pvt_t', 'flatten_cswin_t', 'flatten_swin_t', 'flatten_deit_t', 'nl_resnet50'):
            body = timm.create_model(name, features_only=True, out_indices=[1, -1])
            assert len(body.feature_info.channels()) == 2
            assert len(timm.create_model(name, features_only=True, out_indices=2).feature_info.channels()) == 2


def test_backbone_without_the_finest_level():
    body = timm.create_model('resnet18', features_only=True, out_indices=(2, 3, 4))
    model = faster_rcnn(body, CLASSES, 'ea', ['fpn2', 'fpn5'], **SIZES)
    assert model.backbone.strides == [8, 16, 32, 64]
    assert model.rpn.anchor_generator.sizes == ((64,), (128,), (256,), (512,))
    assert list(model.backbone(torch.randn(1, 3, 64, 64))) == ['0', '1', '2', 'pool']
    model(images((48, 80), (48, 80)), small_targets())
    with pytest.raises(ValueError, match=r"attention_levels must be of \['fpn2', 'fpn3', 'fpn4', 'fpn5'\]"):
        faster_rcnn(body, 2, 'ea', 'fpn1')


@pytest.mark.parametrize(
    'arguments, message',
    [
        (('flatten_pvt_v2_b9', 2), "unknown model 'flatten_pvt_v2_b9'; did you mean flatten_pvt_v2_b"),
        (('hiera_tiny_224', 2), "cannot build 'hiera_tiny_224'.*dynamic_img_size"),
        ((nn.Identity(), 2), 'timm model built with features_only=True, got Identity'),
        ((SMALL, 1), 'num_classes includes the background and must be at least 2, got 1'),
    ],
)
def test_bad_backbones(arguments, message):
    with pytest.raises(ValueError, match=message):
        mask_rcnn(*arguments)


def test_arguments_of_the_backbone():
    model = faster_rcnn(SMALL, 2, backbone_kwargs={'drop_path_rate': 0.2, 'attn_types': 'softmax'})
    assert not any('positional' in name for name, _ in model.named_parameters())
    with pytest.raises(ValueError, match='for a backbone that is given by its name'):
        faster_rcnn(model.backbone.body, 2, pretrained_backbone=True)
    with pytest.raises(ValueError, match=f"cannot build '{SMALL}'.*nonsense"):
        faster_rcnn(SMALL, 2, backbone_kwargs={'nonsense': 1})


def test_normalises_as_the_backbone_wants_it():
    assert faster_rcnn('mobilevit_xxs', 2).transform.image_mean == (0.0, 0.0, 0.0)
    assert faster_rcnn('mobilevit_xxs', 2, image_mean=[0.5] * 3).transform.image_mean == [0.5] * 3


def trained_parts(body):
    return {name.split('.')[0] for name, p in body.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    'trainable, parts',
    {
        0: set(),
        1: {'layer4'},
        3: {'layer2', 'layer3', 'layer4'},
        4: {'layer1', 'layer2', 'layer3', 'layer4'},
        5: {'conv1', 'bn1', 'layer1', 'layer2', 'layer3', 'layer4'},
    }.items(),
)
def test_frozen_parts_are_torchvisions(trainable, parts):
    body = timm.create_model('resnet18', features_only=True)
    freeze_stages(body, trainable)
    assert trained_parts(body) == parts
    frozen = {name.split('.')[0] for name, m in body.named_modules() if isinstance(m, FrozenBatchNorm2d)}
    assert frozen == {'bn1', 'layer1', 'layer2', 'layer3', 'layer4'} - parts


@pytest.mark.parametrize(
    'name, stages',
    {
        'flatten_pvt_t': 'stages_{}.',
        'flatten_pvt_v2_b0': 'stages_{}.',
        'flatten_swin_t': 'model.layers.{}.',
        'flatten_cswin_t': 'stages_{}.',
        'convnext_atto': 'stages_{}.',
        'swin_tiny_patch4_window7_224': 'layers_{}.',
    }.items(),
)
def test_frozen_parts_of_other_families(name, stages):
    body = timm.create_model(name, features_only=True)
    names = {name for name, _ in body.named_parameters()}
    for trainable in (4, 2, 0):
        freeze_stages(body, trainable)
        expected = {n for n in names if any(n.startswith(stages.format(i)) for i in range(4 - trainable, 4))}
        trained = {n for n, p in body.named_parameters() if p.requires_grad}
        assert trained == expected


def test_bad_freezing():
    with pytest.raises(ValueError, match='trainable_layers must be from 0 to 5, got 6'):
        mask_rcnn(SMALL, 2, trainable_backbone_layers=6)
    body = timm.create_model('resnet18', features_only=True)
    for info in body.feature_info.info:
        info['module'] = 'elsewhere'
    with pytest.raises(ValueError, match="cannot be told apart .*'elsewhere'"):
        freeze_stages(body, 2)


@pytest.mark.parametrize('name', slow_but('resnet18', of=['resnet18', 'efficientnet_b0', 'issa_resnet50']))
def test_frozen_stay_frozen_in_training(name):
    torch.manual_seed(0)
    model = faster_rcnn(name, CLASSES, trainable_backbone_layers=2, freeze_norm=True, **SIZES).train()
    body = model.backbone.body
    before = {key: value.clone() for key, value in body.state_dict().items()}
    trained = {key for key, p in body.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    sum(model(images((48, 80), (48, 80)), small_targets()).values()).backward()
    optimizer.step()
    changed = {key for key, value in body.state_dict().items() if not torch.equal(value, before[key])}
    attention = {key for key in before if '.attn.' in key}
    assert changed - attention <= trained and changed & trained
    norms = (nn.BatchNorm2d, BatchNormAct2d)
    assert all('.attn.' in key for key, module in body.named_modules() if isinstance(module, norms))
    assert any(isinstance(module, (FrozenBatchNorm2d, FrozenBatchNormAct2d)) for module in body.modules())
    if attention:  # the last norm starts at zero: frozen, it would silence the attention for ever
        assert {key for key in changed if key.endswith('attn.short_range_sa.W.1.0.weight')} == {
            f'layer{i}.attn.short_range_sa.W.1.0.weight' for i in (3, 4)
        }


def test_freezing_changes_no_output():
    body = timm.create_model('efficientnet_b0', features_only=True).eval()
    randomize_norms(body)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = body(x)
        freeze_stages(body, 2)
        torch.testing.assert_close(body(x), expected)
        freeze_norms(body)
        torch.testing.assert_close(body.train()(x), expected)


def test_defaults_of_freezing_are_torchvisions(monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(timm, 'create_model', lambda pretrained, **kwargs: create(**kwargs))
    body = faster_rcnn('resnet18', 2, pretrained_backbone=True).backbone.body
    assert trained_parts(body) == {'layer2', 'layer3', 'layer4'}
    assert not any(isinstance(module, nn.BatchNorm2d) for module in body.modules())
    body = faster_rcnn('resnet18', 2).backbone.body
    assert trained_parts(body) == {'conv1', 'bn1', 'layer1', 'layer2', 'layer3', 'layer4'}
    assert not any(isinstance(module, FrozenBatchNorm2d) for module in body.modules())


@pytest.mark.filterwarnings('ignore')  # scripting is deprecated
def test_scripts_as_torchvisions_own():
    model = faster_rcnn('resnet18', CLASSES, 'ea', box_score_thresh=0.001, **SIZES).eval()
    with torch.no_grad():
        _, detections = torch.jit.script(model)(images((48, 80)))
        same_detections(detections, model(images((48, 80))))


@pytest.mark.parametrize('build', [pytest.param(mask_rcnn, marks=pytest.mark.slow), cascade_mask_rcnn])
def test_cost_is_that_of_a_real_pass(build):
    # everything is kept, so that there are as many proposals and detections as are counted
    model = build(
        SMALL,
        CLASSES,
        'ea',
        min_size=64,
        max_size=96,
        rpn_pre_nms_top_n_test=40,
        rpn_post_nms_top_n_test=30,
        rpn_nms_thresh=1.0,
        box_score_thresh=0.0,
        box_nms_thresh=1.0,
        box_detections_per_img=7,
    ).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        (found,) = model(images((64, 96)))
    assert len(found['boxes']) == 7
    cost = rcnn_cost(model, (64, 96))
    assert cost.macs == counter.get_total_flops() // 2
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    assert rcnn_cost(model, (50, 70)).macs == cost.macs, 'padded'
    assert next(model.parameters()).device.type == 'cpu'


def test_cost_of_retinanet_is_that_of_a_real_pass():
    model = retinanet(SMALL, CLASSES, 'ea', **SIZES).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images((64, 96)))
    assert rcnn_cost(model, (64, 96)).macs == counter.get_total_flops() // 2


def test_attention_adds_what_its_equations_say():
    size = (896, 1280)
    plain = rcnn_cost(mask_rcnn('resnet50', 81), size)
    model = mask_rcnn('ea_resnet50', 81, 'ea')
    attention = {
        'body.layer3.attn': 16,
        'body.layer4.attn': 32,
        **{f'attention.{level}': stride for level, stride in zip(LEVELS, (4, 8, 16, 32, 64), strict=True)},
    }
    costs = [
        closed_form(model.backbone.get_submodule(name), (size[0] // stride, size[1] // stride))
        for name, stride in attention.items()
    ]
    assert f'{sum(cost.macs for cost in costs):.2e}' == '8.85e+09', 'Table 2 of the efficient attention paper'
    cost = rcnn_cost(model, size)
    assert cost.macs - plain.macs == sum(cost.macs for cost in costs)
    assert cost.parameters - plain.parameters == sum(cost.parameters for cost in costs)


def test_importing_needs_no_extra(monkeypatch):
    monkeypatch.setattr('flatten_zoo.dense', flatten_zoo.dense)  # for the tests that come after this one
    for name in [name for name in sys.modules if name.startswith('flatten_zoo.dense')]:
        monkeypatch.delitem(sys.modules, name)
    for name in ('accelerate', 'av', 'pycocotools', 'segmentation_models_pytorch', 'transformers'):
        monkeypatch.setitem(sys.modules, name, None)
    importlib.import_module('flatten_zoo.dense').faster_rcnn('resnet18', 2)
