"""The FLatten networks: official outputs, conversion of official checkpoints, and timm's ways of using a model."""

import inspect
import math
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import timm
import torch
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch.utils.flop_counter import FlopCounterMode

from flatten_zoo.errors import UsageError
from flatten_zoo.layers import FocusedLinearCore
from flatten_zoo.models import FlattenCSwin, FlattenPVT, flatten_swin
from flatten_zoo.models._patch_embed import PatchEmbed
from flatten_zoo.models.flatten_cswin import StripeBranch
from flatten_zoo.weights import to_official
from flatten_zoo.weights.catalogue import PARAMETERS

from .marks import slow_but
from .networks import FIXED_SIZE, SMALL, create_shallow, create_small, dynamic
from .operators import Maps
from .reference import load_reference

# official parameters in millions (less PVT's unused norm) and multiply-accumulates in billions
COSTS = {
    'flatten_pvt_t': (12.15, 2.04),
    'flatten_pvt_s': (21.67, 4.03),
    'flatten_pvt_m': (37.24, 7.04),
    'flatten_pvt_b': (50.65, 10.38),
    'flatten_pvt_v2_b0': (3.59, 0.58),
    'flatten_pvt_v2_b1': (12.93, 2.22),
    'flatten_pvt_v2_b2': (22.55, 4.25),
    'flatten_pvt_v2_b3': (38.27, 7.28),
    'flatten_pvt_v2_b4': (51.84, 10.68),
    'flatten_pvt_v2_b5': (67.06, 12.44),
    'flatten_swin_t': (29.19, 4.48),
    'flatten_swin_s': (50.51, 8.73),
    'flatten_swin_b': (88.97, 15.42),
    'flatten_swin_b_384': (91.43, 46.38),
    'flatten_cswin_t': (21.20, 4.32),
    'flatten_cswin_s': (35.45, 6.78),
    'flatten_cswin_b': (74.87, 14.91),
    'flatten_cswin_b_384': (78.37, 46.30),
    'flatten_deit_t': (6.19, 1.14),
    'flatten_deit_s': (22.98, 4.36),  # not official
}
RELEASED = {
    'flatten_pvt_t',
    'flatten_pvt_v2_b0',
    'flatten_swin_t',
    'flatten_swin_s',
    'flatten_swin_b',
    'flatten_swin_b_384',
    'flatten_cswin_t',
}
families = pytest.mark.parametrize('name', SMALL)
official_families = pytest.mark.parametrize('name', [name for name in SMALL if 'deit' not in name])
fixed_size_families = pytest.mark.parametrize('name', sorted(FIXED_SIZE))


def filter_for(name):
    return sys.modules[timm.model_entrypoint(name).__module__].checkpoint_filter_fn


def linear_by_default(name):
    """Of the small network's five blocks, how many have linear attention."""
    return 2 if 'swin' in name else 5


def blocks_of(model):
    if hasattr(model, 'blocks'):
        return list(model.blocks)
    return [block for stage in getattr(model, 'layers', getattr(model, 'stages', ())) for block in stage.blocks]


def has_linear_attention(block):
    return any(isinstance(module, FocusedLinearCore) for module in block.modules())


@contextmanager
def saved_tensors():
    """What a forward pass keeps for the backward pass."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        yield saved


@pytest.mark.parametrize(
    'name',
    [
        'flatten_pvt_t',
        'flatten_pvt_v2_b0',
        'flatten_swin_t',
        'flatten_cswin_t',
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ('flatten_pvt_s', 'flatten_pvt_v2_b1', 'flatten_swin_b_384')
        ),
    ],
)
def test_official_outputs(name):
    reference = load_reference(name)
    model = timm.create_model(name).eval().double()
    model.load_state_dict(filter_for(name)(reference.state_dict, model))
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        with torch.no_grad():
            features, stages = model.to(dtype).forward_intermediates(reference.input.to(dtype))
            actual = {'logits': model.forward_head(features)}
        for i, stage in enumerate(stages, start=1):
            assert list(stage.shape) == reference.outputs[f'stage{i}_shape'].tolist()
            actual |= {f'stage{i}_mean': stage.mean(dim=(2, 3)), f'stage{i}_corner': stage[:, :16, :7, :7]}
        for key, value in actual.items():
            expected = reference.outputs[key]
            assert (value - expected).abs().max() <= tolerance * expected.abs().max(), (key, dtype)


@pytest.mark.parametrize('name', slow_but(*SMALL, 'flatten_swin_b_384', of=COSTS))
def test_multiply_accumulates(name):
    model = timm.create_model(name, device='meta').eval()
    with FlopCounterMode(display=False) as flops:
        model(torch.empty(1, *model.default_cfg['input_size'], device='meta'))
    assert flops.get_total_flops() / 2e9 == pytest.approx(COSTS[name][1], abs=0.015)


@pytest.mark.parametrize('name', COSTS)
def test_parameters_and_evaluation_settings(name):
    model = timm.create_model(name, device='meta')
    assert all(p.is_meta for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    assert round(count / 1e6, 2) == COSTS[name][0] and count == PARAMETERS[name]
    config = timm.data.resolve_data_config({}, model=model)
    size = 384 if name.endswith('384') else 224
    assert config['input_size'] == (3, size, size)
    assert config['interpolation'] == 'bicubic' and config['crop_mode'] == 'squash'
    resized = {'flatten_swin_b_384': 384, 'flatten_cswin_b_384': 438}.get(name, 256)
    assert math.floor(size / config['crop_pct']) == resized  # timm's side of the square
    assert config['mean'] == timm.data.IMAGENET_DEFAULT_MEAN and config['std'] == timm.data.IMAGENET_DEFAULT_STD
    assert timm.get_pretrained_cfg(name).tag == ('leaplab_in1k' if name in RELEASED else 'untrained')


@families
def test_own_checkpoint_passes_unchanged(name):
    model = create_small(name)
    state_dict = model.state_dict()
    for checkpoint in (state_dict, {'state_dict': state_dict}, {'model': state_dict, 'epoch': 3}):
        unchanged = filter_for(name)(checkpoint, model)
        assert unchanged.keys() == state_dict.keys()
        assert all(torch.equal(unchanged[key], value) for key, value in state_dict.items())


@official_families
def test_official_checkpoint_is_converted(name):
    model = create_small(name)
    state_dict = model.state_dict()
    official = to_official(model)
    assert official.keys() != state_dict.keys()
    for checkpoint in (official, {'model': official, 'optimizer': {}, 'config': None}, {'state_dict': official}):
        converted = filter_for(name)(checkpoint, model)
        assert converted.keys() == state_dict.keys()
        assert all(torch.equal(converted[key], value) for key, value in state_dict.items())


@families
@pytest.mark.parametrize('img_size', [96, (32, 128)], ids=str)
def test_checkpoint_for_another_size(name, img_size):
    small = create_small(name, **dynamic(name))
    target = create_small(name, img_size=img_size, **({'window_size': (2, 3)} if name == 'flatten_swin_t' else {}))
    x = torch.randn(2, 3, *timm.layers.to_2tuple(img_size))
    own = small.state_dict()
    for state_dict in [own] + ([to_official(small)] if 'deit' not in name else []):
        target.load_state_dict(filter_for(name)(state_dict, target))
        if name == 'flatten_swin_t':  # its windows change too
            assert target(x).isfinite().all()
        else:  # what resamples on loading is what resamples on the fly
            torch.testing.assert_close(target(x), small(x), rtol=1e-4, atol=1e-5)


def test_window_checkpoint_for_a_linear_stage_is_refused():
    plain = create_small('flatten_swin_t', attn_types='softmax')
    with pytest.raises(ValueError, match=r'layers\.0\.blocks\.0.*attn_types'):
        flatten_swin.checkpoint_filter_fn(plain.state_dict(), create_small('flatten_swin_t'))


@pytest.mark.parametrize('window_size', [2, 3])
def test_all_softmax_swin_is_timm_swin(window_size):
    """Also where maps are padded for the windows and for merging."""
    for kwargs, sizes in ({}, [(64, 64)]), ({'strict_img_size': False}, [(64, 64), (100, 52)]):
        kwargs = {**SMALL['flatten_swin_t'], 'window_size': window_size, **kwargs}
        plain = SwinTransformer(**kwargs).eval()
        model = timm.create_model('flatten_swin_t', attn_types='softmax', **kwargs).eval()
        model.load_state_dict(plain.state_dict())
        for size in sizes:
            x = torch.randn(2, 3, *size)
            assert torch.equal(model.forward_features(x), plain.forward_features(x))


@families
@pytest.mark.parametrize(
    'attn_types',
    ['linear', 'softmax', ('softmax', 'linear', 'softmax', 'linear'), ['linear', 'softmax', 'softmax', 'softmax']],
    ids=str,
)
def test_any_mix_of_attention_types(name, attn_types):
    model = create_small(name, attn_types=attn_types, **({'depth': 4} if 'deit' in name else {}))
    types = [attn_types] * 4 if isinstance(attn_types, str) else list(attn_types)
    if 'deit' not in name:
        types.insert(2, types[2])  # the third stage has two blocks
    assert [has_linear_attention(block) for block in blocks_of(model)] == [t == 'linear' for t in types]
    model(torch.randn(1, 3, 64, 64)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@families
@pytest.mark.parametrize('attn_types', ['performer', ('linear', 'softmax'), ('linear',) * 3 + ('Linear',)], ids=str)
def test_unknown_attention_types_are_refused(name, attn_types):
    with pytest.raises(ValueError, match='attn_types'):
        create_small(name, attn_types=attn_types)


@pytest.mark.parametrize(
    ('cls', 'without'),
    [
        (FlattenPVT, {'linear'}),  # PVTv2's own linear attention, by pooling
        (FlattenCSwin, {'linear', 'embed_dims', 'sr_ratios', 'mlp_ratios'}),  # has embed_dim, split_sizes, mlp_ratio
    ],
)
def test_own_networks_take_the_arguments_of_timms_closest_family(cls, without):
    ours = set(inspect.signature(cls).parameters)
    assert set(inspect.signature(PyramidVisionTransformerV2).parameters) - without <= ours


@families
def test_unknown_arguments_are_refused(name):
    with pytest.raises(TypeError, match='no_such'):
        create_small(name, no_such=1)


@pytest.mark.parametrize('name', ['flatten_pvt_t', 'flatten_cswin_t'])
def test_unknown_pooling_is_refused(name):
    with pytest.raises(ValueError, match="'max'"):
        create_small(name, global_pool='max')
    with pytest.raises(ValueError, match="'max'"):
        create_small(name).reset_classifier(3, 'max')


@families
def test_constructor_arguments_take_effect(name):
    model = create_small(
        name,
        in_chans=5,
        num_classes=0,
        drop_rate=0.1,
        proj_drop_rate=0.2,
        drop_path_rate=0.3,
        qkv_bias=False,
        focusing_factor=4,
        kernel_size=7,
        norm_layer=torch.nn.RMSNorm,
        dtype=torch.bfloat16,
    )
    blocks = blocks_of(model)
    linear = [module for module in model.modules() if isinstance(module, FocusedLinearCore)]
    assert len(linear) == linear_by_default(name)
    assert all(attn.focusing_factor == 4 and attn.dwc.kernel_size == (7, 7) for attn in linear)
    drops = [module.p for module in blocks[0].modules() if isinstance(module, torch.nn.Dropout)]
    assert drops == [0.2, 0.2, 0.2] if 'pvt_v2' not in name else [0.2, 0.2]
    projections = [module for block in blocks for key, module in block.named_modules() if key.endswith('qkv')]
    assert len(projections) == 5 and all(projection.bias is None for projection in projections)
    assert all(isinstance(block.norm1, torch.nn.RMSNorm) for block in blocks)
    rates = [getattr(block.drop_path2, 'drop_prob', 0.0) for block in blocks]
    assert rates == pytest.approx([0, 0.075, 0.15, 0.225, 0.3])
    assert model.head_drop.p == 0.1 if hasattr(model, 'head_drop') else model.head.drop.p == 0.1
    assert model(torch.randn(1, 5, 64, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


@families
@pytest.mark.parametrize('size', [(32, 32), (33, 47), (64, 64), (101, 32), (64, 224)], ids=str)
def test_any_size_in_dynamic_mode(name, size):
    model = create_small(name, **dynamic(name))
    x = torch.randn(2, 3, *size)
    assert model(x).shape == (2, 10)
    backbone = create_small(name, features_only=True, out_indices=(0, 2, 3), **dynamic(name))
    strides = [16, 16, 16] if 'deit' in name else [4, 16, 32]
    assert backbone.feature_info.reduction() == strides
    for feature, channels, stride in zip(backbone(x), backbone.feature_info.channels(), strides, strict=True):
        assert feature.shape == (2, channels, *(-(-s // stride) for s in size))


@pytest.mark.parametrize('name', sorted({*SMALL} - FIXED_SIZE))
def test_networks_for_any_size_say_so(name):
    plain, asked = create_small(name), create_small(name, dynamic_img_size=True)
    x = torch.randn(1, 3, 40, 96)
    assert torch.equal(plain(x), asked(x))
    with pytest.raises(ValueError, match='dynamic_img_size=False.*any size'):
        create_small(name, dynamic_img_size=False)


@pytest.mark.parametrize('feature_cls', ['getter', 'list', 'dict', 'hook', 'fx', timm.models.FeatureListNet], ids=str)
@pytest.mark.parametrize('name', [*SMALL, 'ea_resnet50'])
def test_feature_maps_are_nchw_however_they_are_taken(name, feature_cls):
    kwargs = {**SMALL.get(name, {}), 'features_only': True, 'out_indices': (1, 3)}
    if name in FIXED_SIZE and feature_cls != 'getter':
        with pytest.raises(ValueError, match='feature_cls.*getter.*channels last'):
            timm.create_model(name, feature_cls=feature_cls, **kwargs)
        return
    backbone = timm.create_model(name, feature_cls=feature_cls, **kwargs).eval()
    maps = backbone(torch.randn(1, 3, 64, 64))
    maps = maps.values() if isinstance(maps, dict) else maps
    info = backbone.feature_info
    assert [tuple(y.shape[1:]) for y in maps] == [
        (channels, 64 // stride, 64 // stride)
        for channels, stride in zip(info.channels(), info.reduction(), strict=True)
    ]


@official_families
@pytest.mark.parametrize('output_stride', [8, 16, 32])
def test_output_stride(name, output_stride):
    plain = create_small(name, features_only=True, attn_types='linear', **dynamic(name))
    backbone = create_small(name, features_only=True, attn_types='linear', output_stride=output_stride, **dynamic(name))
    strides = [min(stride, output_stride) for stride in (4, 8, 16, 32)]
    assert backbone.feature_info.reduction() == strides
    for size in (64, 64), (101, 52):
        assert [y.shape[2:] for y in backbone(torch.randn(1, 3, *size))] == [
            tuple(-(-s // stride) for s in size) for stride in strides
        ]

    x = torch.randn(1, 3, 64, 64)
    model = create_small(name, output_stride=output_stride)
    model.load_state_dict(filter_for(name)(create_small(name).state_dict(), model))  # positions are resampled
    y = model(x)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(torch.jit.script(model)(x), y)
    torch.testing.assert_close(
        create_small(name, output_stride=output_stride, **dynamic(name))(x),
        create_small(name, output_stride=output_stride)(x),
    )

    # at the positions of the undilated network, every embedding gives what it gives there
    stages = [getattr(network, 'model', network) for network in (plain, backbone)]
    stages = [getattr(network, 'layers', None) or list(network.children())[-4:] for network in stages]
    for i, (before, after) in enumerate(zip(*stages, strict=True)):
        embeddings = [getattr(stage, 'patch_embed', getattr(stage, 'downsample', None)) for stage in (before, after)]
        if i == 0 or embeddings[0] is None:
            continue
        fine, step = (2 * 2**i // strides[i - 1], 4 * 2**i // strides[i])
        channels = backbone.feature_info.channels()[i - 1]
        y = torch.randn(1, 8 * fine, 4 * fine, channels)
        inputs = [y[:, ::fine, ::fine], y]
        if name != 'flatten_swin_t':
            inputs = [z.permute(0, 3, 1, 2) for z in inputs]
        embeddings[1].load_state_dict(embeddings[0].state_dict())
        expected, dilated = (embedding(z) for embedding, z in zip(embeddings, inputs, strict=True))
        assert expected.shape[1:3] == (4, 2)
        torch.testing.assert_close(dilated[:, ::step, ::step], expected)


@official_families
def test_output_strides_that_are_none(name):
    for output_stride in 4, 12, 64:
        with pytest.raises(ValueError, match=f'output_stride must be.*got {output_stride}'):
            create_small(name, output_stride=output_stride)
    if name == 'flatten_swin_t':
        with pytest.raises(ValueError, match='output_stride.*img_size=.*dynamic_img_size=True'):
            create_small(name, output_stride=16).set_input_size((96, 96))
        with pytest.raises(ValueError, match='patch size of 16, got 8'):
            create_small(name, patch_size=16, output_stride=8)


@fixed_size_families
def test_strict_mode_says_what_it_expects(name):
    model = create_small(name)
    for size, wrong in (((48, 64), 48), ((64, 80), 80)):
        with pytest.raises(AssertionError, match=rf'\({wrong}\).*\(64\).*img_size=.*dynamic_img_size=True'):
            model(torch.randn(1, 3, *size))


@fixed_size_families
def test_native_size_can_be_changed(name):
    model = create_small(name, attn_types='linear')
    free = create_small(name, attn_types='linear', dynamic_img_size=True)
    model.set_input_size((96, 32))
    assert blocks_of(model)[0].attn.grid_size == ((24, 8) if 'swin' in name else (6, 2))
    x = torch.randn(2, 3, 96, 32)
    torch.testing.assert_close(model(x), free(x), rtol=1e-4, atol=1e-5)
    assert not free.load_state_dict(filter_for(name)(model.state_dict(), free)).missing_keys


@families
def test_training_uses_of_timm(name):
    model = create_small(name)
    parameters = dict(model.named_parameters())
    # positions and scales are decayed, as in the official recipe; norms, biases and window tables are not, nor is what
    # the authors of DeiT exempt
    assert model.no_weight_decay() & parameters.keys() == {
        key
        for key in parameters
        if key.endswith('relative_position_bias_table') or 'deit' in name and key == 'pos_embed'
    }
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    decayed = {id(p) for group in groups if group['weight_decay'] for p in group['params']}
    for key, parameter in parameters.items():
        plain = parameter.ndim <= 1 or key in model.no_weight_decay()
        assert (id(parameter) in decayed) != plain, key
    scales = {g['lr_scale'] for g in param_groups_layer_decay(model, 0.05, layer_decay=0.7)}
    assert len(scales) >= 6  # stem, five blocks, head

    x = torch.randn(2, 3, 64, 64)
    with saved_tensors() as saved_without:
        y = model(x)
    y.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.set_grad_checkpointing()
    with saved_tensors() as saved:
        model(x).sum().backward()
    assert len(saved) < len(saved_without) / 2
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)

    model.requires_grad_(False)
    assert torch.equal(model(x), y)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)


@families
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(name, dtype):
    model = create_small(name)
    with torch.no_grad():  # weights so large that the attention matters
        for key, parameter in model.named_parameters():
            if key.endswith(('qkv.weight', 'proj.weight')) and '.attn' in key:
                parameter.mul_(10)
    x = torch.randn(2, 3, 64, 64)
    y = model.forward_features(x)
    with torch.autocast('cpu', dtype):
        autocast = model.forward_features(x).float()
    pure = model.to(dtype).forward_features(x.to(dtype)).float()
    for actual in (autocast, pure):
        assert (actual - y).norm() <= 8 * torch.finfo(dtype).eps * y.norm()


@pytest.mark.parametrize(
    'name',
    slow_but(
        'flatten_deit_t', of=SMALL
    ),  # the others are compiled and exported in test_compile.py and test_export.py too
)
def test_torch_transformations(name):
    model = create_shallow(name)
    x = torch.randn(2, 3, 64, 64)
    y = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend='aot_eager')(x), y)
    torch.testing.assert_close(torch.jit.script(model)(x), y)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module()
    torch.testing.assert_close(program(x[:1]), y[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ('direction', 'size'),
    slow_but(
        ('vertical', (7, 8)), of=[('vertical', (6, 9)), ('vertical', (7, 8)), ('horizontal', (7, 8)), ('whole', (6, 9))]
    ),
    ids=str,
)
def test_exported_stripes_serve_sizes_that_pad_or_not(direction, size):
    branch = StripeBranch(2, 8, 3, direction).eval()
    dynamic_shapes = (dict.fromkeys(range(3), torch.export.Dim.DYNAMIC),)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        program = torch.export.export(branch, (torch.randn(2, *size, 3, 16),), dynamic_shapes=dynamic_shapes).module()
    for shape in [(2, 6, 9), (3, 7, 8), (2, 13, 12), (2, 4, 5)]:
        x = torch.randn(*shape, 3, 16)
        torch.testing.assert_close(program(x), branch(x))


@families
def test_maps_are_padded_and_positions_resampled_only_where_they_must(name):
    model = create_small(name, **dynamic(name)).eval()

    def operations(height, width):
        with torch.no_grad(), Maps(torch.float32, 1) as maps:
            model(torch.randn(1, 3, height, width))
        return [operation for operation in maps.operations if 'pad' in operation or 'bicubic' in operation]

    assert not operations(64, 64)
    first, second = operations(70, 101), operations(70, 101)
    assert '_upsample_bicubic2d_aa' in first and '_upsample_bicubic2d_aa' not in second
    assert ('constant_pad_nd' in first) == ('constant_pad_nd' in second) == ('v2' not in name)  # whose patches overlap


def test_padded_positions_are_not_attended_to():
    """A map that stripes of 3 do not divide: the same as attention inside its own columns."""
    branch = StripeBranch(1, 4, 3, 'vertical').eval()
    x = torch.randn(1, 2, 4, 3, 4)
    torch.testing.assert_close(branch(x)[:, :, :3], branch(x[:, :, :3]))
    alone = StripeBranch(1, 4, 1, 'vertical').eval()
    alone.load_state_dict(branch.state_dict())
    torch.testing.assert_close(branch(x)[:, :, 3:], alone(x[:, :, 3:]))


def test_convolutions_of_pvt_v2_are_initialised_alike():
    model = timm.create_model('flatten_pvt_v2_b0')
    for stage in model.stages:
        for block in stage.blocks:
            dwc = block.attn.dwc
            assert dwc.bias.abs().max() == 0
            assert dwc.weight.std().item() == pytest.approx(math.sqrt(2 / 25), rel=0.2)


def test_patch_embedding_is_channels_last():
    for kwargs in (dict(output_fmt='NCHW'), dict(flatten=False)):
        with pytest.raises(ValueError, match='output_fmt'):
            PatchEmbed(32, 4, **kwargs)


def test_odd_position_tensors_are_named():
    model = create_small('flatten_swin_t')
    state_dict = model.state_dict()
    state_dict['layers.0.blocks.0.attn.positional_encoding'] = torch.zeros(1, 250, 16)
    with pytest.raises(ValueError, match=r'positional_encoding.*250 positions.*16 × 16.*img_size'):
        flatten_swin.checkpoint_filter_fn(state_dict, model)
    official = to_official(create_small('flatten_pvt_t'))
    del official['block1.0.attn.kv.weight']
    with pytest.raises(ValueError, match='block1|stages.0.*q and kv'):
        filter_for('flatten_pvt_t')(official, create_small('flatten_pvt_t'))
    with pytest.raises(UsageError, match='square img_size'):
        to_official(create_small('flatten_pvt_t', img_size=(32, 128)))


@pytest.mark.parametrize('name', ['flatten_pvt_t', 'flatten_pvt_v2_b0', 'flatten_cswin_t'])
def test_features_of_fewer_stages(name):
    sizes = dict(embed_dims=(16, 32)) if 'pvt' in name else dict(embed_dim=16)
    sizes |= dict(sr_ratios=(2, 1), mlp_ratios=(2, 2)) if 'pvt' in name else dict(split_sizes=2)
    backbone = timm.create_model(
        name, features_only=True, depths=(1, 1), num_heads=(2, 2), attn_types='linear', **sizes
    )
    assert [tuple(f.shape[2:]) for f in backbone(torch.randn(1, 3, 64, 64))] == [(16, 16), (8, 8)]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'num_classes': -1}, 'num_classes'),
        *[({'depths': depths}, 'depths') for depths in ((), (2, -1, 2, 2), (2, 0.5, 2, 2), 3)],
        *[({'depth': depth}, 'depth') for depth in (-1, 0, 1.5)],
        ({'num_classes': 2.5}, 'num_classes'),
        ({'focusing_factor': math.inf}, 'focusing_factor'),
        ({'focusing_factor': math.nan}, 'focusing_factor'),
        *[
            ({f'{name}_rate': rate}, f'{name}_rate')
            for name, rate in zip(
                ('drop', 'proj_drop', 'attn_drop', 'drop_path'), (-0.1, 1.5, math.nan, 'a'), strict=True
            )
        ],
    ],
    ids=str,
)
@pytest.mark.parametrize('name', [*SMALL, 'ea_resnet50'])
def test_arguments_out_of_range(name, arguments, message):
    known = {'num_classes', 'drop_rate', 'drop_path_rate', *SMALL.get(name, {})}
    if name == 'ea_resnet50' and not {*arguments} <= known or {*arguments} & {'depth', 'depths'} - known:
        pytest.skip('has no such argument')
    for wrapping in {}, {'features_only': True}:
        with pytest.raises(ValueError, match=f'{message} must'):
            timm.create_model(name, **{**SMALL.get(name, {}), **arguments}, **wrapping, device='meta')
    if 'num_classes' in arguments:
        model = timm.create_model(name, **SMALL.get(name, {}), device='meta')
        with pytest.raises(ValueError, match=f'{message} must'):
            model.reset_classifier(arguments['num_classes'])
        model.reset_classifier(np.int64(3))
        assert model.get_classifier().out_features == model.num_classes == 3


@pytest.mark.parametrize(
    ('name', 'argument'),
    [
        *[('flatten_pvt_t', argument) for argument in ('embed_dims', 'num_heads', 'sr_ratios', 'mlp_ratios')],
        *[('flatten_pvt_v2_b0', argument) for argument in ('embed_dims', 'num_heads', 'sr_ratios', 'mlp_ratios')],
        ('flatten_swin_t', 'num_heads'),
        ('flatten_cswin_t', 'num_heads'),
        ('flatten_cswin_t', 'split_sizes'),
    ],
)
def test_one_value_for_each_stage(name, argument):
    for values in ((8,) * 3, [8] * 5):
        with pytest.raises(ValueError, match=f'{argument} must have one value for each of the 4 depths'):
            timm.create_model(name, **{argument: values}, device='meta')
