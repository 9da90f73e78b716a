import copy

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.optim import param_groups_layer_decay

import flatten_zoo
from flatten_zoo.models import AttentionResNet
from flatten_zoo.weights import zoo_models
from flatten_zoo.weights.catalogue import PARAMETERS

from .networks import seeded

KINDS = {
    'ea': flatten_zoo.EfficientAttention,
    'issa': flatten_zoo.InterlacedSparseAttention,
    'nl': flatten_zoo.NonLocalAttention,
}
ARCHITECTURES = ('resnet50', 'resnet101', 'resnext101_32x4d')

kinds = pytest.mark.parametrize('kind', KINDS)


@pytest.fixture(scope='module')
def plain():
    """A plain ResNet-50 whose residual branches are at work."""
    return seeded('resnet50', zero_init_last=False)


@pytest.fixture(scope='module')
def plain_file(plain, tmp_path_factory):
    path = tmp_path_factory.mktemp('weights') / 'resnet50.safetensors'
    save_file(plain.state_dict(), path)
    return str(path)


def from_file(name: str, path: str, **kwargs) -> torch.nn.Module:
    return seeded(name, pretrained=True, pretrained_cfg_overlay={'file': path}, **kwargs)


def image(size: int = 64, chans: int = 3) -> torch.Tensor:
    return torch.randn(2, chans, size, size, generator=torch.Generator().manual_seed(1))


@kinds
@pytest.mark.parametrize('architecture', ARCHITECTURES)
def test_same_tensors_as_the_plain_network_but_for_the_attention(kind, architecture):
    model = timm.create_model(f'{kind}_{architecture}', device='meta')
    tensors = {n: t.shape for n, t in model.state_dict().items()}
    attention = {n for n in tensors if n.startswith(('layer3.attn.', 'layer4.attn.'))}
    assert attention
    expected = {n: t.shape for n, t in timm.create_model(architecture, device='meta').state_dict().items()}
    assert {n: s for n, s in tensors.items() if n not in attention} == expected
    for stage in (model.layer3, model.layer4):
        assert isinstance(list(stage)[-1], KINDS[kind]) and stage.attn.residual


@pytest.mark.parametrize('architecture', ARCHITECTURES)
def test_only_the_attention_differs_between_kinds(architecture):
    for kind in KINDS:
        model = timm.create_model(f'{kind}_{architecture}', device='meta')
        for stage in (model.layer3, model.layer4):
            if kind == 'issa':
                assert stage.attn.group_size == (8, 8)
                assert stage.attn.long_range_sa.f_key[0].out_channels == 64
                assert stage.attn.long_range_sa.f_value.out_channels == 64
            else:
                assert (stage.attn.keys.out_channels, stage.attn.values.out_channels) == (64, 64)
                assert (stage.attn.num_heads, stage.attn.normalization) == (1, 'softmax')


@kinds
@pytest.mark.parametrize('training', [False, True])
def test_fresh_model_is_the_plain_network(kind, training):
    a, b = seeded(f'{kind}_resnet50').train(training), seeded('resnet50').train(training)
    assert torch.equal(a(image()), b(image()))


@kinds
def test_init_weights_leaves_the_attention_at_zero(kind):
    model = seeded(f'{kind}_resnet50')
    model.init_weights()
    x = torch.randn(1, 128, 3, 3)
    assert torch.equal(model.layer4.attn(x), x)
    assert not torch.equal(seeded(f'{kind}_resnet50', zero_init_last=False).layer4.attn(x), x)


@kinds
def test_plain_weights_load_and_give_the_plain_output(kind, plain, plain_file):
    model = from_file(f'{kind}_resnet50', plain_file)
    assert torch.equal(model(image()), plain(image()))
    # also where the branch would not start at zero by itself
    model = from_file(f'{kind}_resnet50', plain_file, zero_init_last=False)
    assert torch.equal(model(image()), plain(image()))


def test_plain_weights_with_other_channels_and_classes(plain, plain_file):
    model = from_file('ea_resnet50', plain_file, in_chans=1, num_classes=7)
    expected = copy.deepcopy(plain)
    expected.conv1 = torch.nn.Conv2d(1, 64, 7, 2, 3, bias=False)
    expected.conv1.weight.data = plain.conv1.weight.data.sum(1, keepdim=True)
    assert model(image(chans=1)).shape == (2, 7)
    torch.testing.assert_close(model.forward_features(image(chans=1)), expected.forward_features(image(chans=1)))
    headless = from_file('ea_resnet50', plain_file, num_classes=0)
    assert torch.equal(headless(image()), plain.forward_head(plain.forward_features(image()), pre_logits=True))


@kinds
def test_plain_weights_as_features(kind, plain, plain_file):
    features = from_file(f'{kind}_resnet50', plain_file, features_only=True)(image())
    expected = plain.forward_intermediates(image(), intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(features, expected, strict=True))


@pytest.mark.parametrize(
    'change',
    [
        lambda s: s.pop('layer3.0.conv1.weight'),
        lambda s: [s.pop(n) for n in list(s) if n.startswith('layer4.')],
        lambda s: s.update({'layer5.weight': torch.zeros(1)}),
        lambda s: s.update({'layer3.attn.keys.bias': torch.zeros(64)}),
    ],
    ids=['one missing', 'stage missing', 'unexpected', 'part of the attention'],
)
@pytest.mark.parametrize('kwargs', [{}, {'num_classes': 5}, {'features_only': True}], ids=str)
def test_other_missing_or_unexpected_tensors_are_refused(plain, tmp_path, change, kwargs):
    state_dict = plain.state_dict()
    change(state_dict)
    save_file(state_dict, tmp_path / 'weights.safetensors')
    with pytest.raises(RuntimeError, match='do not belong to this network.*(missing|unexpected)'):
        from_file('ea_resnet50', str(tmp_path / 'weights.safetensors'), **kwargs)


def test_weights_of_the_network_itself_load_strictly(tmp_path):
    model = seeded('nl_resnet50', zero_init_last=False)
    path = str(tmp_path / 'model.safetensors')
    save_file(model.state_dict(), path)
    assert torch.equal(from_file('nl_resnet50', path)(image()), model(image()))
    assert torch.equal(seeded('nl_resnet50', checkpoint_path=path)(image()), model(image()))
    features = from_file('nl_resnet50', path, features_only=True)(image())
    assert torch.equal(features[-1], model.forward_features(image()))
    with pytest.raises(RuntimeError, match='do not belong to this network'):
        from_file('nl_resnet50', path, attn_stages=('layer4',))


@pytest.mark.parametrize('architecture', ARCHITECTURES)
@kinds
def test_configuration_is_that_of_the_plain_network(kind, architecture):
    plain = timm.get_pretrained_cfg(architecture)
    ours = timm.get_pretrained_cfg(f'{kind}_{architecture}')
    assert ours.tag == f'{plain.tag}_untrained_attn' and 'untrained' in ours.description
    assert ours.architecture == f'{kind}_{architecture}'
    differing = {k for k in vars(plain) if getattr(plain, k) != getattr(ours, k)}
    assert differing == {'architecture', 'tag', 'description'}
    assert f'{kind}_{architecture}.{ours.tag}' in timm.list_pretrained(f'{kind}_*')


def test_features_include_the_attention():
    model = seeded('ea_resnet50', features_only=True, attn_stages=('layer2', 'layer4'), zero_init_last=False)
    assert model.feature_info.channels() == [64, 32, 64, 96, 128]
    assert model.feature_info.reduction() == [2, 4, 8, 16, 32]
    before = model(image())
    torch.nn.init.zeros_(model.layer2.attn.reprojection.weight)
    after = model(image())
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False, False]


@kinds
@pytest.mark.parametrize('output_stride', [8, 16, 32])
def test_resnet_arguments_keep_working(kind, output_stride):
    model = seeded(
        f'{kind}_resnet50',
        output_stride=output_stride,
        stem_type='deep',
        stem_width=32,
        avg_down=True,
        in_chans=4,
        num_classes=3,
        drop_path_rate=0.1,
        drop_rate=0.1,
        global_pool='avgmax',
        zero_init_last=False,
        act_layer='silu',
    )
    x = image(65, chans=4)
    assert model.forward_features(x).shape[2] == -(-65 // output_stride)
    y = model.train()(x)
    assert y.shape == (2, 3) and y.isfinite().all()


def test_attention_arguments():
    model = timm.create_model(
        'ea_resnet50',
        attn_stages=['layer1'],
        device='meta',
        attn_kwargs={'key_dim': 32, 'num_heads': 4, 'normalization': 'scaling'},
    )
    assert isinstance(model, AttentionResNet)
    assert model.layer1.attn.keys.out_channels == 32 and model.layer1.attn.values.out_channels == 64
    assert model.layer1.attn.num_heads == 4 and model.layer1.attn.normalization == 'scaling'
    assert not hasattr(model.layer3, 'attn')
    model = timm.create_model('issa_resnet50', attn_kwargs={'group_size': (4, 2)}, device='meta')
    assert model.layer4.attn.short_range_sa.group_size == (4, 2)


@pytest.mark.parametrize(
    'kwargs, error, message',
    [
        ({'attn_stages': ('layer5',)}, ValueError, r"attn_stages must be of .*, got \('layer5',\)"),
        ({'attn_kwargs': {'num_heads': 5}}, ValueError, 'key_dim 64 must be divisible by num_heads 5'),
        ({'attn_kwargs': {'heads': 2}}, TypeError, "'heads'"),
        ({'no_such_argument': 1}, TypeError, "'no_such_argument'"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        timm.create_model('ea_resnet50', device='meta', **kwargs)


def test_layer_decay_groups_the_attention_with_the_block_before_it():
    model = timm.create_model('ea_resnet50', device='meta')
    names = {p: name for name, p in model.named_parameters()}
    scale = {
        names[p]: group['lr_scale']
        for group in param_groups_layer_decay(model, layer_decay=0.5)
        for p in group['params']
    }
    assert scale['layer3.attn.keys.weight'] == scale['layer3.5.conv1.weight'] == scale['layer4.0.conv1.weight'] / 2
    assert scale['fc.weight'] == 2 * scale['layer4.attn.values.weight'] == 1


@kinds
def test_gradient_checkpointing(kind):
    model = seeded(f'{kind}_resnet50', zero_init_last=False)
    expected = model(image())
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(image()), expected)
    model.train()(image()).sum().backward()
    assert all(p.grad is not None for p in model.layer3.attn.parameters())


@pytest.mark.parametrize('name', [name for name in zoo_models() if 'resn' in name])
def test_listed_parameters(name):
    assert sum(p.numel() for p in timm.create_model(name, device='meta').parameters()) == PARAMETERS[name]


def test_every_model_has_its_parameters_listed():
    assert sorted(PARAMETERS) == sorted(zoo_models())
