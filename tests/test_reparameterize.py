"""Folding by `timm.utils.reparameterize_model`: outputs stay, what is constant is gone, training is refused."""

import copy

import pytest
import timm
import torch
from timm.layers import FrozenBatchNormAct2d
from timm.models.resnet import BasicBlock
from timm.utils import reparameterize_model
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from flatten_zoo import FocusedLinearAttention, replace_attention
from flatten_zoo.dense import isa_net
from flatten_zoo.errors import UsageError
from flatten_zoo.layers import FocusedLinearCore
from flatten_zoo.visualize.reading import attention_layers, read_attention

from .marks import slow_but
from .networks import FIXED_SIZE, SHALLOW, SMALL, create_shallow, dynamic

networks = pytest.mark.parametrize('name', SHALLOW)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 2e-2}


def trained(model: nn.Module) -> nn.Module:
    """The model with the constants of its norms and linear attention away from where they start."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.weight, module.running_var):
                    tensor.uniform_(0.5, 1.5, generator=generator)
                for tensor in (module.bias, module.running_mean):
                    tensor.normal_(std=0.3, generator=generator)
            elif isinstance(module, FocusedLinearCore):
                module.scale.normal_(std=0.7, generator=generator)
                module.positional_encoding.normal_(std=0.3, generator=generator)
    return model.eval()


def small(name: str, **kwargs) -> nn.Module:
    return trained(create_shallow(name, **kwargs))


def outputs(network: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = network(x)
    if isinstance(y, dict):
        return list(y.values())
    return [y] if isinstance(y, torch.Tensor) else list(y)


@torch.no_grad()
def assert_same(folded, network, *shape, dtype=torch.float32, tolerance=None):
    x = torch.randn(shape or (2, 3, 64, 64), dtype=dtype, generator=torch.Generator().manual_seed(1))
    for actual, expected in zip(outputs(folded, x), outputs(network, x), strict=True):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        assert (actual - expected).abs().max() <= (tolerance or TOLERANCE[dtype]) * expected.abs().max()


def assert_nothing_left(folded: nn.Module, *shape) -> None:
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert not any(name.endswith('scale') and 'inverse' not in name for name in folded.state_dict())
    linear = [module for module in folded.modules() if isinstance(module, FocusedLinearCore)]
    assert not any(getattr(module, 'get_v', None) for module in linear)  # CSwin's LePE
    program = torch.export.export(folded, (torch.randn(shape or (2, 3, 64, 64)),))
    for node in program.graph.nodes:
        assert not any(operation in str(node.target) for operation in ('softplus', 'batch_norm'))
        # of weights; CSwin also repeats the masks of its stripes
        assert 'repeat' not in str(node.target) or node.args[0].op != 'placeholder'


@pytest.mark.parametrize(
    'name',
    slow_but('flatten_deit_t', of=SHALLOW),  # tracing takes long
)
def test_every_network(name):
    model = small(name)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 64, 64)
    y = model(x)
    folded = reparameterize_model(model)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(x), y)  # the original is as it was
    assert_nothing_left(folded)
    assert_same(folded, model)
    assert_same(reparameterize_model(folded), model)  # folded once
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        low = copy.deepcopy(model).to(dtype)
        assert_same(reparameterize_model(low), low, dtype=dtype)
        assert_same(copy.deepcopy(folded).to(dtype), low, dtype=dtype, tolerance=1e-5 if dtype.itemsize > 4 else None)
    assert_same(torch.compile(folded, fullgraph=True, backend='eager'), model)

    image = x[:1].clone().requires_grad_()  # as for saliency maps
    (expected,) = torch.autograd.grad(model(image).square().sum(), image)
    (actual,) = torch.autograd.grad(folded(image).square().sum(), image)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert reparameterize_model(model, inplace=True) is model
    assert_same(model, folded, tolerance=1e-12)


@networks
def test_frozen_stays_frozen(name):
    folded = reparameterize_model(small(name).requires_grad_(False))
    assert not any(parameter.requires_grad for parameter in folded.parameters())
    assert not any(module.training for module in folded.modules())


@networks
def test_features_and_other_sizes(name):
    options = dynamic(name)
    backbone = small(name, features_only=True, **options)
    folded = reparameterize_model(backbone)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())  # the stem is as deep here
    assert_same(folded, backbone)
    assert_same(folded, backbone, 1, 3, 70, 101)
    if name in FIXED_SIZE:
        model = small(name)
        folded = reparameterize_model(model)
        for network in (model, folded):
            network.set_input_size((96, 64))
        assert_same(folded, model, 1, 3, 96, 64)


@networks
def test_training_is_refused(name):
    model = small(name)
    in_training = reparameterize_model(model.train())
    x = torch.randn(2, 3, 64, 64)
    with pytest.raises(RuntimeError, match='cannot be trained: .* as it was before reparameterize_model'):
        in_training(x)
    assert_same(in_training.eval(), model.eval())  # a mode is not what is folded
    model.train()(x).sum().backward()
    folded = reparameterize_model(model.eval())
    with pytest.raises(RuntimeError, match='cannot be trained'):
        folded.train()(x)
    assert_same(folded.train(False), model)


@networks
def test_checkpoints_do_not_cross(name):
    """Neither way, rather than giving wrong outputs."""
    model = small(name)
    folded = reparameterize_model(model)
    for target, source in ((folded, model), (model, folded)):
        with pytest.raises(RuntimeError, match='Missing key|Unexpected key'):
            copy.deepcopy(target).load_state_dict(source.state_dict())
    twin = reparameterize_model(small(name))
    twin.load_state_dict(folded.state_dict())
    assert_same(twin, model)


@pytest.mark.parametrize('name', [*SMALL, 'issa_resnet50'])
def test_torchvisions_feature_extractor(name):
    """It traces the network in training mode too."""
    model = small(name)
    folded = reparameterize_model(model)
    extractor = create_feature_extractor(folded, {get_graph_node_names(model)[1][-1]: 'logits'}).eval()
    assert_same(extractor, model)


@pytest.mark.parametrize(
    'options',
    [{'qkv_bias': False}, {'num_heads': 1, 'kernel_size': 1, 'focusing_factor': 9}, {'dynamic_grid_size': True}],
    ids=str,
)
def test_the_operator_by_itself(options):
    torch.manual_seed(0)
    network = trained(nn.Sequential(FocusedLinearAttention(16, **{'num_heads': 2, 'grid_size': (6, 5), **options})))
    folded = reparameterize_model(network)
    assert_same(folded, network, 2, 6, 5, 16)
    assert_same(folded.double(), network.double(), 2, 6, 5, 16, dtype=torch.float64, tolerance=1e-6)
    network.float()
    folded = reparameterize_model(network)
    x = torch.randn(2, 6, 5, 16)
    torch.testing.assert_close(torch.jit.script(folded)(x), network(x))
    for attention, other in zip(folded, network, strict=True):
        matrices = []
        for attn in (attention, other):
            q, k, _ = attn.qkv(x).chunk(3, dim=-1)
            matrices.append((attn.attention_matrix(q, k), attn.depthwise_matrix(9, (6, 5))))
        torch.testing.assert_close(*matrices)
    zeros = torch.zeros(1, 6, 5, 16)
    assert folded(zeros).isfinite().all()
    torch.testing.assert_close(folded(zeros), network(zeros))


def test_a_projection_of_another_kind_is_left_alone():
    network = trained(nn.Sequential(FocusedLinearAttention(16, num_heads=2, grid_size=4)))
    nn.utils.parametrizations.weight_norm(network[0].qkv)
    assert_same(reparameterize_model(network), network, 1, 4, 4, 16, tolerance=1e-12)


@pytest.mark.parametrize(
    'name, kwargs, folds',
    [
        ('vit_tiny_patch16_224', {'class_token': False, 'global_pool': 'avg'}, True),
        ('deit_tiny_distilled_patch16_224', {}, True),
        ('vit_tiny_patch16_224', {'qk_norm': True}, False),
        ('eva02_tiny_patch14_224', {'patch_size': 16}, False),
    ],
    ids=str,
)
def test_replaced_attention(name, kwargs, folds):
    model = trained(replace_attention(timm.create_model(name, img_size=64, depth=2, **kwargs)))
    folded = reparameterize_model(model)
    if folds:
        assert_nothing_left(folded)
    else:  # a norm or a rotation is between the projection and the scale
        assert folded.blocks[0].attn.scale is not None
    assert_same(folded, model)


@pytest.mark.parametrize(
    'options',
    [
        {'stem_type': 'deep', 'avg_down': True},
        {'block': BasicBlock, 'block_args': {'attn_layer': 'se'}},
        {'output_stride': 8, 'cardinality': 2, 'base_width': 32},
    ],
    ids=str,
)
def test_forms_of_resnets(options):
    model = small('ea_resnet50', **options)
    folded = reparameterize_model(model)
    assert_nothing_left(folded)
    assert_same(folded, model)


def test_nothing_is_folded_where_a_layer_has_been_replaced():
    model = small('ea_resnet50')
    model.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
    model.layer1[0].bn1 = FrozenBatchNormAct2d(8, apply_act=False)
    folded = reparameterize_model(model)
    assert isinstance(folded.bn1, nn.BatchNorm2d) and isinstance(folded.layer1[0].bn1, FrozenBatchNormAct2d)
    assert not isinstance(folded.layer1[0].bn2, nn.BatchNorm2d)
    assert_same(folded, model)


def test_segmentation_head():
    torch.manual_seed(0)
    model = trained(
        isa_net(
            'issa_resnet50',
            5,
            backbone_kwargs={'layers': (1, 1, 1, 1), 'channels': (8, 16, 24, 32), 'zero_init_last': False},
        )
    )
    folded = reparameterize_model(model)
    assert_nothing_left(folded)
    assert_same(folded, model)


def test_pictures_are_of_what_is_not_folded():
    folded = reparameterize_model(small('flatten_pvt_t'))
    with pytest.raises(UsageError, match='is folded: show the model as it was before reparameterize_model'):
        read_attention(folded, torch.randn(1, 3, 64, 64), next(iter(attention_layers(folded))))
