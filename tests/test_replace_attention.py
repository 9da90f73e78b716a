"""replace_attention: linear attention for timm transformers that already exist."""

import pytest
import timm
import torch
from timm.models._features import FeatureGetterNet

from flatten_zoo import EfficientAttention, FocusedLinearAttention, replace_attention

SMALL = {
    'deit_tiny_patch16_224': dict(img_size=64, depth=3, embed_dim=48, class_token=False, global_pool='avg'),
    'swin_tiny_patch4_window7_224': dict(img_size=64, depths=(1, 1, 2, 1), embed_dim=16, num_heads=(1, 2, 4, 8)),
    'pvt_v2_b0': dict(depths=(1, 1, 2, 1), embed_dims=(16, 32, 40, 64)),
}
TWINS = {
    'deit_tiny_patch16_224': 'flatten_deit_t',
    'swin_tiny_patch4_window7_224': 'flatten_swin_t',
    'pvt_v2_b0': 'flatten_pvt_v2_b0',
}
sources = pytest.mark.parametrize('name', SMALL)


def create(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL[name], 'num_classes': 10, **kwargs}).eval()


def size_for(name):
    return {'img_size': 64} if 'pvt' in name else {}


def projections(model):
    """q, k, v and output projections of every block's attention, as one list of weights per block."""
    weights = []
    for module in model.modules():
        if hasattr(module, 'proj') and hasattr(module, 'qkv'):
            weights.append((module.qkv.weight, module.qkv.bias, module.proj.weight, module.proj.bias))
        elif hasattr(module, 'proj') and hasattr(module, 'kv'):
            q, kv = module.q, module.kv
            weights.append(
                (torch.cat([q.weight, kv.weight]), torch.cat([q.bias, kv.bias]), module.proj.weight, module.proj.bias)
            )
    return [[w.detach().clone() for w in block] for block in weights]


@sources
def test_keeps_projections_and_becomes_the_zoos_network(name):
    model = create(name)
    before, config = projections(model), model.pretrained_cfg
    assert replace_attention(model, **size_for(name)) is model
    after = projections(model)
    assert len(after) == len(before)
    assert all(torch.equal(a, b) for x, y in zip(after, before, strict=True) for a, b in zip(x, y, strict=True))
    assert sum(isinstance(module, FocusedLinearAttention) for module in model.modules()) == len(before)
    assert model.pretrained_cfg == config | {'architecture': 'linearized'} and not any(
        module.training for module in model.modules()
    )

    twin = timm.create_model(TWINS[name], attn_types='linear', **{**SMALL[name], 'img_size': 64, 'num_classes': 10})
    twin.eval().load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(x), twin(x))


@sources
@pytest.mark.parametrize('training', [True, False])
def test_modes_stay(name, training):
    model = create(name).train(training)
    frozen = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    for module in frozen:
        module.train(not training)
    replace_attention(model, **size_for(name))
    assert all(module.training == (training != (module in frozen)) for module in model.modules())


@sources
def test_chosen_parts_only_and_timms_api_afterwards(name):
    model = replace_attention(create(name), where=[0, 2], focusing_factor=4, kernel_size=3, **size_for(name))
    linear = [module for module in model.modules() if isinstance(module, FocusedLinearAttention)]
    assert len(linear) == (2 if 'deit' in name else 3)
    assert all(attn.focusing_factor == 4 and attn.dwc.kernel_size == (3, 3) for attn in linear)
    x = torch.randn(2, 3, 64, 64)
    maps = model.forward_intermediates(x, intermediates_only=True)
    assert all(y.ndim == 4 and y.shape[1] == info['num_chs'] for y, info in zip(maps, model.feature_info, strict=True))
    model.set_grad_checkpointing()
    model.train()
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    if hasattr(model, 'set_input_size'):
        model.set_input_size((96, 32))
        assert model(torch.randn(2, 3, 96, 32)).shape == (2, 3)


def test_vit_with_free_sizes():
    model = replace_attention(create('deit_tiny_patch16_224', dynamic_img_size=True), where=[1])
    assert model(torch.randn(2, 3, 32, 96)).shape == (2, 10)
    tokens = model.forward_intermediates(torch.randn(2, 3, 32, 96), output_fmt='NLC', intermediates_only=True)
    assert [t.shape for t in tokens] == [(2, 12, 48)] * 3


@pytest.mark.parametrize('class_token', [True, False])
@pytest.mark.parametrize('qkv_bias', [True, False])
def test_efficient_attention_in_a_vit(class_token, qkv_bias):
    model = create(
        'deit_tiny_patch16_224',
        class_token=class_token,
        global_pool='token' if class_token else 'avg',
        qkv_bias=qkv_bias,
    )
    attn = model.blocks[1].attn
    x = torch.randn(2, 9, 48)
    q, k, v = attn.qkv(x).reshape(2, 9, 3, 3, 16).permute(2, 0, 3, 1, 4)
    expected = q.softmax(dim=-1) @ (k.softmax(dim=-2).transpose(-2, -1) @ v)
    expected = attn.proj(expected.transpose(1, 2).flatten(2))
    replace_attention(model, 'efficient', where=[1])
    assert [isinstance(block.attn, EfficientAttention) for block in model.blocks] == [False, True, False]
    torch.testing.assert_close(model.blocks[1].attn(x), expected)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)
    with pytest.raises(ValueError, match='attn_mask'):
        model(torch.randn(1, 3, 64, 64), is_causal=True)


@pytest.mark.parametrize(
    ('name', 'model_kwargs', 'kwargs', 'reason'),
    [
        ('deit_tiny_patch16_224', dict(class_token=True, global_pool='token'), {}, 'class_token=False'),
        ('deit_tiny_patch16_224', dict(patch_drop_rate=0.5), {}, 'patch_drop_rate=0'),
        ('deit_tiny_patch16_224', dict(qk_norm=True), {}, 'q_norm, k_norm'),
        ('deit_tiny_patch16_224', {}, dict(where=[3]), r'0 to 2, got \[3\]'),
        ('deit_tiny_patch16_224', {}, dict(where=[-1]), r'got \[-1\]'),
        ('deit_tiny_patch16_224', {}, dict(attention='nystrom'), "'nystrom'"),
        ('deit_tiny_patch16_224', {}, dict(kernel_size=4), 'kernel_size.*4'),
        ('swin_tiny_patch4_window7_224', {}, dict(kernel_size=4), 'kernel_size.*4'),
        ('swin_tiny_patch4_window7_224', {}, dict(img_size=96), 'img_size'),
        ('swin_tiny_patch4_window7_224', {}, dict(attention='efficient'), 'SwinTransformer$'),
        ('pvt_v2_b0', {}, dict(attention='efficient'), 'PyramidVisionTransformerV2$'),
        (
            'deit_tiny_patch16_224',
            {},
            dict(attention='efficient', img_size=64, kernel_size=3),
            'img_size, kernel_size$',
        ),
        ('pvt_v2_b0', {}, dict(kernel_size=4), 'kernel_size.*4'),
    ],
)
def test_what_cannot_be_converted_says_why_and_stays(name, model_kwargs, kwargs, reason):
    model = create(name, **model_kwargs)
    size = 64 if 'img_size' in SMALL[name] else 224
    x = torch.randn(1, 3, size, size)
    keys, y = set(model.state_dict()), model(x)
    with pytest.raises(ValueError, match=reason):
        replace_attention(model, **kwargs)
    assert set(model.state_dict()) == keys and torch.equal(model(x), y)


def test_efficient_attention_without_biases_frozen_and_scripted():
    model = create('deit_tiny_patch16_224', qkv_bias=False, proj_bias=False).requires_grad_(False)
    replace_attention(model, 'efficient')
    assert not any(p.requires_grad for p in model.parameters())
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))


@sources
@pytest.mark.parametrize('attention', ['focused_linear', 'efficient'])
def test_networks_for_features_are_named_and_can_be_made_afterwards(name, attention):
    backbone = create(name, features_only=True)
    with pytest.raises(ValueError, match=f'{type(backbone).__name__}.*features_only.*FeatureGetterNet'):
        replace_attention(backbone, attention)
    if attention == 'focused_linear':
        backbone = FeatureGetterNet(replace_attention(create(name), **size_for(name)), out_indices=(0, 2))
        channels = backbone.feature_info.channels()
        assert [y.shape[1] for y in backbone(torch.randn(1, 3, 64, 64))] == channels and len(channels) == 2


def test_unknown_networks_are_refused():
    with pytest.raises(ValueError, match='ResNet.*VisionTransformer'):
        replace_attention(timm.create_model('test_resnet'))
    with pytest.raises(ValueError, match='ParallelScalingBlock'):
        replace_attention(
            timm.models.vision_transformer.VisionTransformer(
                img_size=32,
                depth=1,
                embed_dim=48,
                num_heads=3,
                class_token=False,
                global_pool='avg',
                block_fn=timm.models.vision_transformer.ParallelScalingBlock,
            )
        )
    with pytest.raises(ValueError, match='ParallelScalingBlock'):
        replace_attention(
            timm.models.vision_transformer.VisionTransformer(
                img_size=32,
                depth=1,
                embed_dim=48,
                num_heads=3,
                block_fn=timm.models.vision_transformer.ParallelScalingBlock,
            ),
            'efficient',
        )
    with pytest.raises(ValueError, match='efficient.*ResNet'):
        replace_attention(timm.create_model('test_resnet'), 'efficient')
    for name in SMALL:
        with pytest.raises(ValueError, match='cannot|already'):
            replace_attention(replace_attention(create(name)))
