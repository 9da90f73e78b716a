"""replace_attention: linear attention for timm transformers that already exist."""

import pickle
import re
from copy import deepcopy

import pytest
import timm
import torch
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat, build_rotary_pos_embed, create_feature_extractor
from timm.models import beit
from timm.models._features import FeatureGetterNet
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer

from flatten_zoo import EfficientAttention, FocusedLinearAttention, replace_attention
from flatten_zoo.layers.focused_linear_attention import focused_feature_map
from flatten_zoo.models._token_attention import FocusedTokenAttention
from flatten_zoo.models.replace_attention import REFUSED

from .marks import slow_but

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
        ('deit_tiny_patch16_224', dict(patch_drop_rate=0.5), {}, 'patch_drop_rate=0'),
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


def test_unknown_networks_and_attentions_are_refused():
    for attention in ('focused_linear', 'efficient'):
        with pytest.raises(ValueError, match='ResNet.*VisionTransformer|VisionTransformer.*ResNet'):
            replace_attention(timm.create_model('test_resnet'), attention)
        with pytest.raises(ValueError, match='DiffAttention'):
            replace_attention(create('deit_tiny_patch16_224', attn_layer='diff', num_heads=2), attention)
    with pytest.raises(ValueError, match='ParallelScalingBlock'):
        replace_attention(create('deit_tiny_patch16_224', block_fn=ParallelScalingBlock), 'efficient')
    with pytest.raises(ValueError, match='OwnViT'):
        replace_attention(type('OwnViT', (VisionTransformer,), {})(img_size=32, embed_dim=48, depth=1, num_heads=3))
    with pytest.raises(ValueError, match='FlattenViT.*attn_types'):
        replace_attention(timm.create_model('flatten_deit_t', img_size=32, depth=1))
    with pytest.raises(ValueError, match='patch_drop_rate=0'):
        replace_attention(create_vit('eva02_tiny_patch14_224', patch_drop_rate=0.5)[0])
    for name in SMALL:
        with pytest.raises(ValueError, match='cannot replace|cannot convert'):
            replace_attention(replace_attention(create(name)))


def test_what_the_docstring_refuses_is_refused_with_its_reason():
    listed = re.search(r'Refused, with the reason: (.*?);', replace_attention.__doc__, re.DOTALL)[1]
    assert [name for name, _ in REFUSED.values()] == re.split(r',\s+', listed)
    for kind, (name, reason) in REFUSED.items():
        network = vars(timm.models)[kind].__new__(vars(timm.models)[kind])
        torch.nn.Module.__init__(network)
        for attention in ('focused_linear', 'efficient'):
            with pytest.raises(ValueError, match=re.escape(f'{kind} ({name}): {reason}')):
                replace_attention(network, attention)


# Any ViT

TINY = dict(embed_dim=48, depth=2, num_heads=3, num_classes=7)
VITS = {  # by name, with what is different
    'vit_tiny_patch16_224': {},
    'deit_tiny_distilled_patch16_224': {},
    'deit3_small_patch16_224': {},
    'vit_small_patch14_dinov2': {},
    'vit_small_patch14_reg4_dinov2': {},
    'vit_base_patch16_clip_224': {},
    'vit_base_patch16_siglip_224': {},  # pools with attention
    'res_post_norm': dict(name='vit_tiny_patch16_224', block_fn=ResPostBlock, qk_norm=True, scale_attn_norm=True),
    'vit_base_patch16_xp_224': {},  # ParallelScalingBlock, queries and keys with norm
    'vit_small_patch16_18x2_224': {},  # ParallelThingsBlock, layer scale
    'eva02_tiny_patch14_224': {},
    'eva02_base_patch14_224': {},  # separate projections, norm before the last one
    'vit_small_patch16_dinov3': dict(dynamic_img_size=False),
    'post_norm_patch14': dict(name='eva02_tiny_patch14_224', use_post_norm=True),
    'vit_base_patch16_rope_mixed_ape_224': {},
    'vit_medium_patch16_rope_reg1_gap_256': {},  # AttentionRope
    'beit_base_patch16_224': {},
    'beitv2_base_patch16_224': {},
}
DISTILLED = 'deit_tiny_distilled_patch16_224'
ANY_SIZE = ['vit_tiny_patch16_224', 'vit_base_patch16_xp_224', 'vit_small_patch16_18x2_224', 'eva02_tiny_patch14_224']


def create_vit(name, grid_size=(4, 6), **kwargs):
    torch.manual_seed(0)
    kwargs = {'name': name, **TINY, **VITS[name], **kwargs}
    patch_size = 14 if 'patch14' in name else 16
    model = timm.create_model(kwargs.pop('name'), img_size=tuple(patch_size * n for n in grid_size), **kwargs)
    return model.eval(), lambda *grid, batch_size=2: torch.randn(batch_size, 3, *(patch_size * n for n in grid))


def randomized(model):
    """Other weights than those that say nothing: zero encodings, ones of norms and of layer scale."""
    torch.manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model.double().eval()


@pytest.mark.parametrize('attention', ['focused_linear', 'efficient'])
@pytest.mark.parametrize('name', VITS)
def test_vits_by_name_with_all_of_timms_api(name, attention):
    model, images = create_vit(name)
    if attention == 'efficient' and isinstance(model.blocks[0], ParallelScalingBlock):
        pytest.skip('has no attention of its own')
    x = images(4, 6)
    shapes = [y.shape for y in (model(x), model.forward_features(x))]
    weights = {key: value for key, value in model.state_dict().items() if '.attn' not in key}
    assert replace_attention(model, attention) is model
    assert [y.shape for y in (model(x), model.forward_features(x))] == shapes
    assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items() if 'rel_pos' not in key)

    features, maps = model.forward_intermediates(x, norm=True, output_fmt='NLC')
    tokens = model.forward_features(x)
    torch.testing.assert_close(features, tokens)
    torch.testing.assert_close(maps[-1], tokens[:, model.num_prefix_tokens :])
    assert [y.shape for y in FeatureGetterNet(deepcopy(model), out_indices=(0, 1))(x)] == [(2, 48, 4, 6)] * 2
    if name in ANY_SIZE and attention == 'focused_linear':
        torch.testing.assert_close(torch.jit.script(model)(x), model(x))
        traced = create_feature_extractor(model, ['blocks.1'])(x)['blocks.1']
        torch.testing.assert_close(model.norm(traced), tokens)
    if hasattr(model, 'get_intermediate_layers') and model.num_prefix_tokens:
        ((patches, prefix),) = model.get_intermediate_layers(x, 1, return_prefix_tokens=True, norm=True)
        torch.testing.assert_close(torch.cat([prefix, patches], dim=1), tokens)

    model.set_input_size(images(6, 3).shape[2:])
    model.train()
    y = model(images(6, 3))
    y.sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert y.shape == shapes[0] and all(grad is not None and grad.isfinite().all() for grad in grads.values())


def softmax_free(attn, x, grid_size, num_prefix_tokens, rope, new):
    """The equation of a converted attention, of timm's own and the parameters that only the new one has."""
    if attn.qkv is None:
        q, k, v = attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)
    else:
        q, k, v = attn.qkv(x).chunk(3, dim=-1)
        if getattr(attn, 'q_bias', None) is not None:
            q, v = q + attn.q_bias, v + attn.v_bias
    heads, d = attn.num_heads, attn.proj.in_features // attn.num_heads
    q, k, v = (y.unflatten(-1, (-1, d)).transpose(1, 2) for y in (q, k, v))
    k, v = (y.repeat_interleave(heads // y.shape[1], dim=1) for y in (k, v))
    q, k = getattr(attn, 'q_norm', lambda y: y)(q), getattr(attn, 'k_norm', lambda y: y)(k)
    if rope is not None:
        q, k = (
            torch.cat(
                [
                    y[:, :, :num_prefix_tokens],
                    apply_rot_embed_cat(y[:, :, num_prefix_tokens:], rope, half=attn.rotate_half),
                ],
                dim=2,
            )
            for y in (q, k)
        )
    maps = v[:, :, num_prefix_tokens:].transpose(2, 3).reshape(-1, d, *grid_size)
    depthwise = new.dwc(maps).reshape(len(x), heads, d, -1).transpose(2, 3)
    k = torch.cat(
        [
            k[:, :, :num_prefix_tokens],
            k[:, :, num_prefix_tokens:] + new.positional_encoding.reshape(1, -1, heads, d).transpose(1, 2),
        ],
        dim=2,
    )
    q, k = (focused_feature_map(y.transpose(1, 2).flatten(2), new.scale, new.focusing_factor) for y in (q, k))
    q, k = (y.unflatten(-1, (heads, d)).transpose(1, 2) for y in (q, k))
    weights = q @ k.transpose(2, 3)
    out = weights / (weights.sum(dim=-1, keepdim=True) + 1e-6 * x.shape[1]) @ v
    out[:, :, num_prefix_tokens:] += depthwise
    out = getattr(attn, 'norm', lambda y: y)(out.transpose(1, 2).flatten(2))
    if getattr(attn, 'gate', None) is not None:
        out = out * attn.gate(x).sigmoid()
    return attn.proj(out)


ALL = dict(num_heads=3, qk_norm=True, scale_norm=True, gated=True, norm_layer=torch.nn.LayerNorm)


@pytest.mark.parametrize('num_prefix_tokens', [0, 1, 5])
@pytest.mark.parametrize(
    'attn',
    [
        Attention(20, num_heads=2, qkv_bias=True),
        Attention(20, attn_head_dim=7, dim_out=18, proj_bias=False, **ALL),
        EvaAttention(24, scale_norm=False, num_heads=2),
        EvaAttention(24, qkv_fused=False, **ALL),
        AttentionRope(24, rotate_half=True, **ALL),
        AttentionRope(24, qkv_fused=False, num_kv_heads=2, qkv_bias=False, **{**ALL, 'num_heads': 6}),
        beit.Attention(24, num_heads=2, qkv_bias=True, window_size=(3, 5)),
    ],
    ids=lambda attn: type(attn).__name__,
)
def test_the_equation_over_all_tokens(attn, num_prefix_tokens):
    attn = randomized(attn)
    attn.num_prefix_tokens = num_prefix_tokens
    new = randomized(FocusedTokenAttention(deepcopy(attn), (3, 5), num_prefix_tokens))
    new.load_state_dict(
        FocusedTokenAttention(deepcopy(attn), (3, 5)).state_dict()
        | {key: value for key, value in new.state_dict().items() if key.startswith(('positional', 'scale', 'dwc'))}
    )
    x = torch.randn(2, num_prefix_tokens + 15, new.qkv.in_features).double()
    rope = None
    if hasattr(attn, 'rotate_half'):
        rope = build_rotary_pos_embed((3, 5), dim=attn.proj.in_features // attn.num_heads)
        rope = torch.cat(rope, dim=-1).double()

    out = new(x.requires_grad_(), rope=rope)
    expected = softmax_free(attn, x, (3, 5), num_prefix_tokens, rope, new)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    wanted, along = [x, new.positional_encoding, new.scale, *new.dwc.parameters()], torch.randn_like(out)
    gradients = (torch.autograd.grad(y, wanted, along, retain_graph=True) for y in (out, expected))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)

    order = torch.randperm(num_prefix_tokens)
    permuted = torch.cat([order, torch.arange(num_prefix_tokens, x.shape[1])])
    torch.testing.assert_close(new(x[:, permuted], rope=rope), expected[:, permuted])
    # a change of a prefix token reaches every token, through attention alone
    if num_prefix_tokens:
        changed = x + torch.eye(x.shape[1])[0, :, None]
        assert (new(changed, rope=rope) - expected).abs().amax(dim=(0, 2)).min() > 1e-6


def test_without_prefix_tokens_it_is_focused_linear_attention():
    plain = randomized(FocusedLinearAttention(20, num_heads=2, grid_size=(3, 5)))
    tokens = FocusedTokenAttention(Attention(20, num_heads=2, qkv_bias=True), (3, 5)).double()
    tokens.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 5, 20).double()
    assert torch.equal(tokens(x.flatten(1, 2)), plain(x).flatten(1, 2))


@pytest.mark.parametrize(
    ('name', 'where'),
    [(ANY_SIZE[0], None), (ANY_SIZE[0], [1]), ('eva02_tiny_patch14_224', [1])]
    + [
        pytest.param(name, None, marks=pytest.mark.slow)
        for name in ANY_SIZE[1:] + ['vit_base_patch16_rope_mixed_ape_224', 'vit_small_patch16_dinov3', DISTILLED]
    ],
)
def test_any_size_gives_what_a_network_for_that_size_gives(name, where):
    model, images = create_vit(name, dynamic_img_size=True)
    randomized(replace_attention(model, where=where))
    sizes = [(6, 3), (3, 6), (4, 6), (5, 5)]
    x = [images(*size).double() for size in sizes]
    for size, y in zip(sizes, x, strict=True):
        fixed = replace_attention(create_vit(name, dynamic_img_size=False)[0], where=where).double()
        fixed.load_state_dict(model.state_dict())
        fixed.set_input_size(y.shape[2:])
        torch.testing.assert_close(model(y), fixed(y))
        assert model.forward_intermediates(y, intermediates_only=True)[1].shape == (2, 48, *size)
    for network in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(network(x[0]), model(x[0]))

    def gradients(checkpointing):
        """Of passes on two grids of the same number of tokens, both before the backward pass."""
        model.train().set_grad_checkpointing(checkpointing)
        model.zero_grad()
        passes = [forward(y) for y in x[:2] for forward in (model, lambda y: model.forward_intermediates(y)[1][0])]
        sum(y.square().sum() for y in passes).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    kept, recomputed = gradients(False), gradients(True)
    assert len(kept) == len(recomputed) and all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))

    model.eval().set_grad_checkpointing(False)
    with pytest.raises(ValueError, match='attn_mask'):
        model(x[0], is_causal=True)
    with pytest.raises(ValueError, match='forward_features'):
        model.blocks[1](torch.randn(2, 24, 48).double())


@pytest.mark.parametrize('name', slow_but(ANY_SIZE[0], of=ANY_SIZE))
def test_any_size_in_one_graph(name):
    model, images = create_vit(name, dynamic_img_size=True, depth=1)
    replace_attention(model).double()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend='eager')
    patch_size = model.patch_embed.patch_size[0]
    sides = [torch.export.Dim(name, min=2, max=20) for name in ('height', 'width')]
    shapes = ({2: patch_size * sides[0], 3: patch_size * sides[1]},)
    program = torch.export.export(model, (images(4, 5).double(),), dynamic_shapes=shapes).module()
    for size in [(4, 6), (6, 3), (5, 5)]:
        x = images(*size).double()
        torch.testing.assert_close(program(x), model(x))
    torch.testing.assert_close(compiled(x), model(x))
    traced = create_feature_extractor(model, ['blocks.0'])(x)['blocks.0']
    torch.testing.assert_close(model.norm(traced), model.forward_features(x))
    model.train().set_grad_checkpointing()
    compiled(images(6, 3).double()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize('name', ['vit_small_patch14_reg4_dinov2', 'eva02_tiny_patch14_224', 'beit_base_patch16_224'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    model, images = create_vit(name)
    replace_attention(model)
    x = images(4, 6)
    expected = model(x)
    with torch.autocast('cpu', dtype):
        y = model(x)
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)
    y.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(model.to(dtype)(x.to(dtype)).float(), expected, rtol=0.05, atol=0.05)


def test_the_bias_of_beit_is_dropped_where_it_has_no_place(caplog):
    model, images = create_vit('beit_base_patch16_224', use_rel_pos_bias=False, use_shared_rel_pos_bias=True)
    replace_attention(model, where=[0])
    assert 'relative position bias' in caplog.text and model.rel_pos_bias is not None
    model(images(4, 6)).sum().backward()
    assert model.rel_pos_bias.relative_position_bias_table.grad is not None
    caplog.clear()
    model, images = create_vit('beit_base_patch16_224', use_rel_pos_bias=False, use_shared_rel_pos_bias=True)
    replace_attention(model, 'efficient')
    assert 'relative position bias' in caplog.text and model.rel_pos_bias is None
    assert model(images(4, 6)).shape == (2, 7)
    caplog.clear()
    replace_attention(create_vit('vit_tiny_patch16_224')[0])
    replace_attention(create_vit('beit_base_patch16_224', use_rel_pos_bias=False)[0])
    assert not caplog.text


def test_swin_v2_attends_by_direction(caplog):
    torch.manual_seed(0)
    options = dict(embed_dim=16, depths=(1, 2), num_heads=(2, 4), window_size=4, num_classes=7)
    model = timm.create_model('swinv2_tiny_window8_256', img_size=(64, 32), **options).eval()
    qkv = model.layers[1].blocks[1].attn.qkv.weight
    replace_attention(randomized(model), where=[1]).double()
    assert 'temperature' in caplog.text
    attn = model.layers[1].blocks[1].attn
    assert torch.equal(attn.qkv.weight, qkv)
    x = torch.randn(2, 8, 4, 32).double()
    q, k, v = attn.qkv(x).chunk(3, dim=-1)
    q, k = ((y.unflatten(-1, (4, 8)) / y.unflatten(-1, (4, 8)).norm(dim=-1, keepdim=True)).flatten(3) for y in (q, k))
    torch.testing.assert_close(attn(x), attn.proj(attn.attend(q, k, v)))
    model.set_input_size((96, 64))
    x = torch.randn(2, 3, 96, 64).double()
    y = model.train()(x)
    y.sum().backward()
    assert all(p.grad is not None for p in model.layers[1].parameters())
    assert [m.shape[2:] for m in model.forward_intermediates(x, intermediates_only=True)] == [(24, 16), (12, 8)]
    free = timm.create_model(
        'swinv2_tiny_window8_256', img_size=64, dynamic_img_size=True, strict_img_size=False, **options
    )
    assert replace_attention(free.eval().half())(torch.zeros(1, 3, 72, 40).half()).isfinite().all()
