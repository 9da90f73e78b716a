"""The FLatten networks: official outputs, conversion of official checkpoints, and timm's ways of using a model."""
import copy
import inspect

import pytest
import timm
import torch
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

from flatten_zoo.models import FlattenPVT, flatten_pvt, flatten_swin

from .reference import load_reference

FILTERS = {'pvt': flatten_pvt.checkpoint_filter_fn, 'swin': flatten_swin.checkpoint_filter_fn}
# parameters (the official count less PVT's unused norm)
PARAMETERS = {
    'flatten_pvt_t': 12.15, 'flatten_pvt_s': 21.67, 'flatten_pvt_m': 37.24, 'flatten_pvt_b': 50.65,
    'flatten_swin_t': 29.19, 'flatten_swin_s': 50.51, 'flatten_swin_b': 88.97, 'flatten_swin_b_384': 91.43,
}
# one small network of each family
SMALL = {
    'flatten_pvt_t': dict(img_size=64, depths=(1, 1, 2, 1), embed_dims=(16, 32, 40, 64)),
    'flatten_swin_t': dict(img_size=64, depths=(1, 1, 2, 1), embed_dim=16, num_heads=(1, 2, 4, 8), window_size=2),
}
families = pytest.mark.parametrize('name', SMALL)


def filter_for(name):
    return FILTERS[name.split('_')[1]]


def create_small(name, **kwargs):
    """A small network with its zero-initialised parameters away from zero, as after training."""
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL[name], 'num_classes': 10, **kwargs}).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(('positional_encoding', 'scale')):
                parameter.normal_(std=0.2)
    return model


def to_official(name, state_dict):
    """The zoo's state dict under official names and shapes, with what official files carry besides."""
    official = {}
    for key, value in state_dict.items():
        if key.endswith(('positional_encoding', 'pos_embed')):
            value = value.flatten(1, 2)
        if 'pvt' in name:
            stage = int(key.split('.')[1]) + 1 if key.startswith('stages') else None
            key = key.replace(f'stages.{stage and stage - 1}.', '').replace('blocks.', f'block{stage}.')
            key = key.replace('patch_embed', f'patch_embed{stage}').replace('pos_embed', f'pos_embed{stage}')
            if '.attn.qkv.' in key:
                q, k, v = value.chunk(3)
                official[key.replace('qkv', 'q')], official[key.replace('qkv', 'kv')] = q, torch.cat([k, v])
                continue
        else:
            key = key.replace('head.fc', 'head')
            if '.downsample.' in key:
                index = int(key.split('.')[1])
                key = key.replace(f'layers.{index}', f'layers.{index - 1}')
        official[key] = value
    if 'pvt' in name:
        return {**official, 'norm.weight': torch.ones(64), 'norm.bias': torch.zeros(64)}
    return {
        **official,
        'layers.2.blocks.0.attn.relative_position_index': torch.zeros(4, 4),
        'layers.2.blocks.1.attn_mask': torch.zeros(4, 4, 4),
    }


@pytest.mark.parametrize('name', ['flatten_pvt_t', 'flatten_pvt_s', 'flatten_swin_t', 'flatten_swin_b_384'])
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


@pytest.mark.parametrize('name', PARAMETERS)
def test_parameter_counts(name):
    model = timm.create_model(name, device='meta')
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == PARAMETERS[name]
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize('name', PARAMETERS)
def test_evaluation_settings(name):
    config = timm.data.resolve_data_config({}, model=timm.create_model(name, device='meta'))
    size = 384 if name.endswith('384') else 224
    assert config['input_size'] == (3, size, size)
    assert config['interpolation'] == 'bicubic' and config['crop_mode'] == 'squash'
    assert config['crop_pct'] == (1.0 if size == 384 else 0.875)
    assert config['mean'] == timm.data.IMAGENET_DEFAULT_MEAN and config['std'] == timm.data.IMAGENET_DEFAULT_STD
    released = name in ('flatten_pvt_t', 'flatten_swin_t', 'flatten_swin_s', 'flatten_swin_b', 'flatten_swin_b_384')
    assert timm.get_pretrained_cfg(name).tag == ('leaplab_in1k' if released else 'untrained')


@families
def test_checkpoint_conversion(name):
    model = create_small(name)
    state_dict = model.state_dict()
    for checkpoint in (state_dict, {'state_dict': state_dict}, {'model': state_dict, 'epoch': 3}):
        unchanged = filter_for(name)(checkpoint, model)
        assert unchanged.keys() == state_dict.keys()
        assert all(torch.equal(unchanged[key], value) for key, value in state_dict.items())
    official = to_official(name, state_dict)
    for checkpoint in (official, {'model': official, 'optimizer': {}, 'config': None}, {'state_dict': official}):
        converted = filter_for(name)(checkpoint, model)
        assert converted.keys() == state_dict.keys()
        assert all(torch.equal(converted[key], value) for key, value in state_dict.items())


@families
@pytest.mark.parametrize('img_size', [96, (32, 128)], ids=str)
@pytest.mark.parametrize('source', ['official', 'own'])
def test_checkpoint_for_another_size(name, img_size, source):
    small = create_small(name)
    target = create_small(name, img_size=img_size, **({'window_size': (2, 3)} if 'swin' in name else {}))
    state_dict = small.state_dict()
    state_dict = filter_for(name)(to_official(name, state_dict) if source == 'official' else state_dict, target)
    target.load_state_dict(state_dict)
    height, width = timm.layers.to_2tuple(img_size)
    assert target(torch.randn(2, 3, height, width)).isfinite().all()
    if name == 'flatten_pvt_t':  # windows apart, the network is the one that resamples on the fly
        x = torch.randn(2, 3, height, width)
        torch.testing.assert_close(target(x), small(x), rtol=1e-4, atol=1e-5)


def test_window_checkpoint_for_a_linear_stage_is_refused():
    plain = create_small('flatten_swin_t', attn_types='softmax')
    with pytest.raises(ValueError, match=r'layers\.0\.blocks\.0.*attn_types'):
        flatten_swin.checkpoint_filter_fn(plain.state_dict(), create_small('flatten_swin_t'))


def test_all_softmax_swin_is_timm_swin():
    plain = SwinTransformer(**SMALL['flatten_swin_t']).eval()
    model = timm.create_model('flatten_swin_t', attn_types='softmax', **SMALL['flatten_swin_t']).eval()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(x), plain(x))


@families
@pytest.mark.parametrize('attn_types', [
    'linear', 'softmax', ('softmax', 'linear', 'softmax', 'linear'), ['linear', 'softmax', 'softmax', 'softmax'],
], ids=str)
def test_any_mix_of_attention_types(name, attn_types):
    model = create_small(name, attn_types=attn_types)
    stages = model.layers if 'swin' in name else model.stages
    types = [attn_types] * 4 if isinstance(attn_types, str) else attn_types
    for stage, attn_type in zip(stages, types, strict=True):
        assert all(hasattr(block.attn, 'dwc') == (attn_type == 'linear') for block in stage.blocks)
    model(torch.randn(1, 3, 64, 64)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@families
@pytest.mark.parametrize('attn_types', ['performer', ('linear', 'softmax'), ('linear',) * 3 + ('Linear',)], ids=str)
def test_unknown_attention_types_are_refused(name, attn_types):
    with pytest.raises(ValueError, match='attn_types'):
        create_small(name, attn_types=attn_types)


def test_arguments_of_timms_closest_family():
    ours = inspect.signature(FlattenPVT).parameters
    # PVTv2's `linear` is its own linear attention, by pooling
    assert set(inspect.signature(PyramidVisionTransformerV2).parameters) - {'linear'} <= set(ours)
    with pytest.raises(TypeError, match='no_such'):
        timm.create_model('flatten_pvt_t', no_such=1)
    with pytest.raises(TypeError, match='no_such'):
        timm.create_model('flatten_swin_t', no_such=1)
    with pytest.raises(ValueError, match="'max'"):
        timm.create_model('flatten_pvt_t', global_pool='max')


@families
def test_constructor_arguments_take_effect(name):
    model = create_small(
        name, in_chans=5, num_classes=0, drop_rate=0.1, proj_drop_rate=0.2, drop_path_rate=0.3, qkv_bias=False,
        focusing_factor=4, kernel_size=7, norm_layer=torch.nn.RMSNorm, dtype=torch.bfloat16)
    blocks = [block for stage in (model.layers if 'swin' in name else model.stages) for block in stage.blocks]
    linear = [block.attn for block in blocks if hasattr(block.attn, 'dwc')]
    assert len(linear) == (2 if 'swin' in name else 5)
    assert all(a.focusing_factor == 4 and a.dwc.kernel_size == (7, 7) and a.proj_drop.p == 0.2 for a in linear)
    assert all(block.attn.qkv.bias is None for block in blocks if hasattr(block.attn, 'qkv'))
    assert all(isinstance(block.norm1, torch.nn.RMSNorm) for block in blocks)
    rates = [getattr(block.drop_path2, 'drop_prob', 0.) for block in blocks]
    assert rates == pytest.approx([0, 0.075, 0.15, 0.225, 0.3])
    assert model(torch.randn(1, 5, 64, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


@families
@pytest.mark.parametrize('size', [(32, 32), (33, 47), (64, 64), (101, 32), (64, 224)], ids=str)
def test_any_size_in_dynamic_mode(name, size):
    model = create_small(name, **({'dynamic_img_size': True} if 'swin' in name else {}))
    x = torch.randn(2, 3, *size)
    assert model(x).shape == (2, 10)
    backbone = create_small(
        name, features_only=True, out_indices=(0, 2, 3), **({'dynamic_img_size': True} if 'swin' in name else {}))
    assert backbone.feature_info.reduction() == [4, 16, 32]
    for feature, channels, stride in zip(
            backbone(x), backbone.feature_info.channels(), backbone.feature_info.reduction(), strict=True):
        assert feature.shape == (2, channels, *(-(-s // stride) for s in size))


def test_strict_mode_says_what_it_expects():
    model = create_small('flatten_swin_t')
    for size, wrong in (((48, 64), 48), ((64, 80), 80)):
        with pytest.raises(AssertionError, match=rf'\({wrong}\).*\(64\).*img_size=.*dynamic_img_size=True'):
            model(torch.randn(1, 3, *size))


def test_swin_changes_its_native_size():
    dynamic = create_small('flatten_swin_t', dynamic_img_size=True, attn_types='linear')
    strict = copy.deepcopy(dynamic)
    strict.set_input_size((96, 32))
    assert strict.layers[0].blocks[0].attn.grid_size == (24, 8)
    x = torch.randn(2, 3, 96, 32)
    torch.testing.assert_close(strict(x), dynamic(x), rtol=1e-4, atol=1e-5)


@families
def test_training_uses_of_timm(name):
    model = create_small(name)
    # positions and scales are decayed, as in the official recipe; norms, biases and window tables are not
    groups = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    decayed = {id(p) for group in groups if group['weight_decay'] for p in group['params']}
    for key, parameter in model.named_parameters():
        plain = parameter.ndim <= 1 or key.endswith('relative_position_bias_table')
        assert (id(parameter) in decayed) != plain, key
    scales = {g['lr_scale'] for g in param_groups_layer_decay(model, 0.05, layer_decay=0.7)}
    assert len(scales) >= 6  # stem, five blocks, head

    x = torch.randn(2, 3, 64, 64)
    y = model(x)
    y.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.set_grad_checkpointing()
    model(x).sum().backward()
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
    x = torch.randn(2, 3, 64, 64)
    y = model(x)
    with torch.autocast('cpu', dtype):
        torch.testing.assert_close(model(x).float(), y, rtol=0.05, atol=0.05)
    torch.testing.assert_close(model.to(dtype)(x.to(dtype)).float(), y, rtol=0.05, atol=0.05)


@families
def test_torch_transformations(name):
    model = create_small(name)
    x = torch.randn(2, 3, 64, 64)
    y = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend='aot_eager')(x), y)
    torch.testing.assert_close(torch.jit.script(model)(x), y)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module()
    torch.testing.assert_close(program(x[:1]), y[:1], rtol=1e-4, atol=1e-5)
