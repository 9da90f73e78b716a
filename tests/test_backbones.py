"""Every model as a backbone at the sizes of detection and segmentation: maps, their cost, and frozen parts."""

import csv
import math

import pytest
import timm
import torch
from timm.utils import freeze

from flatten_zoo.cli import main
from flatten_zoo.cost.comparison import compare_stages
from flatten_zoo.cost.counting import count
from flatten_zoo.weights import zoo_models

from .marks import slow_but
from .networks import FIXED_SIZE, RESNETS, SHALLOW, SMALL, create_small, dynamic, seeded

DENSE_SIZES = [(512, 512), (1024, 2048), (257, 333)]
ONE_OF_EACH = (
    'flatten_pvt_t',
    'flatten_pvt_v2_b0',
    'flatten_swin_t',
    'flatten_cswin_t',
    'flatten_deit_t',
    'ea_resnet50',
    'issa_resnet50',
    'nl_resnet50',
)
every_model = pytest.mark.parametrize('name', slow_but(*ONE_OF_EACH, of=zoo_models()))


def any_size(name):
    """What lets a model take any size, where it is made for one."""
    return {'dynamic_img_size': True} if timm.get_pretrained_cfg(name).fixed_input_size else {}


def small(name, **kwargs):
    if name in RESNETS:
        return seeded(name, zero_init_last=False, **kwargs)
    return create_small(name, **dynamic(name), **kwargs)


def check_maps(backbone, x):
    """NCHW maps of the channels and strides that `feature_info` tells; at odd sizes the last cell is a partial one."""
    info = backbone.feature_info
    maps = backbone(x)
    assert [tuple(y.shape) for y in maps] == [
        (x.shape[0], channels, *(math.ceil(side / stride) for side in x.shape[2:]))
        for channels, stride in zip(info.channels(), info.reduction(), strict=True)
    ]
    return maps


@every_model
def test_strides_and_channels(name):
    backbone = timm.create_model(name, features_only=True, device='meta', **any_size(name)).eval()
    strides = [16] * 3 if 'deit' in name else [4, 8, 16, 32] if name.startswith('flatten') else [2, 4, 8, 16, 32]
    assert backbone.feature_info.reduction() == strides
    check_maps(backbone, torch.empty(2, 3, 800, 1333, device='meta'))


@every_model
def test_maps_at_dense_sizes(name):
    """The maps, all of them or some, from `features_only` and from `forward_intermediates`."""
    kwargs = {'device': 'meta', **any_size(name), **SHALLOW.get(name, {})}
    model = timm.create_model(name, **kwargs).eval()
    backbone = timm.create_model(name, features_only=True, out_indices=(0, 2), **kwargs).eval()
    for size in DENSE_SIZES:
        x = torch.empty(1, 3, *size, device='meta')
        every = model.forward_intermediates(x, intermediates_only=True)
        assert [y.shape for y in check_maps(backbone, x)] == [every[i].shape for i in (0, 2)]


@pytest.mark.parametrize('name', [*SMALL, *RESNETS])
@pytest.mark.parametrize('size', [(257, 333), pytest.param((800, 1333), marks=pytest.mark.slow)], ids=str)
def test_values_of_maps(name, size):
    """A batch's maps are those of its images, however they are asked for."""
    backbone, model = small(name, features_only=True), small(name)
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        maps = check_maps(backbone, x)
        indices = [i - len(backbone.feature_info.info) for i in backbone.feature_info.out_indices]
        again = model.forward_intermediates(x, indices=indices, intermediates_only=True)
        alone = backbone(x[1:])
    for y, same, one in zip(maps, again, alone, strict=True):
        assert y.isfinite().all() and y.std() > 0
        torch.testing.assert_close(same, y)
        torch.testing.assert_close(one, y[1:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('name', sorted(FIXED_SIZE))
def test_native_dense_size(name):
    """Models that are made for one size can be made for a dense one."""
    for kwargs in ({'img_size': (512, 1024)}, {'img_size': (512, 1024), 'dynamic_img_size': True}):
        backbone = timm.create_model(name, features_only=True, device='meta', **kwargs).eval()
        check_maps(backbone, torch.empty(1, 3, 512, 1024, device='meta'))


def linear_stages(name):
    """The stages of a model that have linear attention, or none at all."""
    if 'swin' in name:
        return [f'{"stages" if "cswin" in name else "layers"}.{i}' for i in range(2)]
    if 'deit' in name:
        return ['blocks.0']
    return [f'stages.{i}' for i in range(4)] if 'pvt' in name else [f'layer{i}' for i in range(1, 5)]


@pytest.mark.parametrize(
    'name',
    [
        name if name in ONE_OF_EACH else pytest.param(name, marks=pytest.mark.slow)
        for name in zoo_models()
        if not name.startswith(('nl_', 'issa_'))
    ],
)
def test_linear_stages_grow_linearly(name):
    """Computation, activations and memory are a + b · pixels; computation has no constant part."""
    model = timm.create_model(name, device='meta', **any_size(name), **SHALLOW.get(name, {})).eval()
    shapes = {stage: [] for stage in linear_stages(name)}
    hooks = [
        model.get_submodule(stage).register_forward_pre_hook(
            lambda _, args, stage=stage: shapes[stage].append(args[0].shape)
        )
        for stage in shapes
    ]
    for size in ((256, 256), (512, 512), (1024, 2048)):
        model(torch.empty(1, 3, *size, device='meta'))
    for hook in hooks:
        hook.remove()
    for stage, of_stage in shapes.items():
        rows = [count(model.get_submodule(stage), shape) for shape in of_stage]
        assert [row.macs / rows[0].macs for row in rows] == [1, 4, 32]
        for quantity in ('activations', 'peak_memory'):
            first, second, third = (getattr(row, quantity) for row in rows)
            assert (third - first) / (second - first) == pytest.approx((32 - 1) / (4 - 1), rel=1e-3), (stage, quantity)
            assert second > first


def test_other_stages_do_not():
    by_stage = {}
    for size in (128, 256):
        for row in compare_stages('nl_resnet50', size, torch.device('cpu')):
            by_stage.setdefault(row.name, []).append(row.measured.macs)
    assert list(by_stage) == [f'nl_resnet50 {m}' for m in ('act1', 'layer1', 'layer2', 'layer3', 'layer4')]
    growth = {name.split()[1]: b / a for name, (a, b) in by_stage.items() if a}
    assert growth['layer1'] == growth['layer2'] == 4
    assert growth['layer3'] > 4 and growth['layer4'] > 4


def test_command_shows_linear_growth(capsys):
    assert main(['complexity', 'flatten_pvt_v2_b0', '--stages', '--img-size', '64', '128', '--format', 'csv']) == 0
    header, *rows = csv.reader(capsys.readouterr().out.splitlines())
    macs = {(row[0], row[1]): int(row[header.index('macs')]) for row in rows}
    for stage in range(4):
        name = f'flatten_pvt_v2_b0 stages.{stage}'
        assert macs[name, '128'] == 4 * macs[name, '64'] > 0


@pytest.mark.parametrize('name', ['ea', 'pit_ti_224', 'xcit_nano_12_p16_224'])
def test_models_without_stages_of_their_own(name, capsys):
    assert main(['complexity', name, '--stages']) == 2
    assert f"error: --stages: '{name}' " in capsys.readouterr().err


FROZEN = {  # what detection freezes: the stem and the first stage
    'flatten_pvt_t': ['stages_0'],
    'flatten_pvt_v2_b0': ['patch_embed', 'stages_0'],
    'flatten_swin_t': ['model.patch_embed', 'model.layers.0'],
    'flatten_cswin_t': ['stages_0'],
    'flatten_deit_t': ['model.patch_embed', 'model.blocks.0'],
    **{name: ['conv1', 'bn1', 'layer1'] for name in RESNETS},
}


@pytest.mark.parametrize('name', FROZEN)
def test_frozen_stages(name):
    """timm's `freeze`: no gradients and fixed statistics in the frozen part, both as ever in the rest."""
    backbone = small(name, features_only=True).train()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    freeze(backbone, FROZEN[name])
    sum(y.float().square().mean() for y in backbone(torch.randn(2, 3, 64, 96))).backward()

    def is_frozen(key):
        return key.startswith(tuple(f'{module}.' for module in FROZEN[name]))

    frozen = [key for key, p in backbone.named_parameters() if is_frozen(key)]
    # timm's frozen norms keep their parameters as buffers
    assert frozen and all(backbone.get_parameter(key).grad is None for key in frozen)
    learning = [p for key, p in backbone.named_parameters() if not is_frozen(key) and 'norm' not in key]
    assert learning and sum(p.grad is not None for p in learning) > 0.9 * len(learning)
    statistics = [key for key in before if key.endswith('running_mean')]
    for key in statistics:
        assert torch.equal(backbone.state_dict()[key], before[key]) == is_frozen(key), key
    assert bool(statistics) == (name in RESNETS)


@pytest.mark.parametrize('name', RESNETS)
def test_frozen_statistics(name):
    """Norms in eval mode keep their statistics, those of the attention too, and still learn their scale."""
    backbone = small(name, features_only=True).train()
    norms = [module for module in backbone.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    before = [norm.running_mean.clone() for norm in norms]
    for norm in norms:
        norm.eval()
    sum(y.square().mean() for y in backbone(torch.randn(2, 3, 64, 96))).backward()
    assert all(torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, before, strict=True))
    assert all(norm.weight.grad is not None for norm in norms)
