import pytest
import timm
import torch
import torch.nn.functional as F
from timm.utils import reparameterize_model
from torchvision.models.segmentation import fcn_resnet50

from flatten_zoo.dense import ISANet, isa_net, segmentation_losses
from flatten_zoo.dense.isa_net import CONTEXTS

from .marks import slow_but
from .operators import opened


@pytest.fixture(scope='module')
def small() -> ISANet:
    torch.manual_seed(0)
    return isa_net('resnet18', num_classes=5)


def test_head_has_the_official_names_and_widths(small):
    names = {
        'isa_head.0': (512, 512, 3, 3),
        'isa_head.2.conv_bn.0': (512, 1024, 1, 1),
        'cls_head': (5, 512, 1, 1),
        'dsn_head.0': (512, 256, 3, 3),
        'dsn_head.3': (5, 512, 1, 1),
    }
    norms = {'isa_head.1.0': 512, 'isa_head.2.conv_bn.1.0': 512, 'dsn_head.1.0': 512}
    for step in ('isa_head.2.stages.0.long_range_sa', 'isa_head.2.stages.0.short_range_sa'):
        names |= {f'{step}.f_value': (512, 512, 1, 1), f'{step}.W.0': (512, 512, 1, 1)}
        norms |= {f'{step}.W.1.0': 512}
        for which in ('f_query', 'f_key'):
            names |= {f'{step}.{which}.0': (256, 512, 1, 1), f'{step}.{which}.2': (256, 256, 1, 1)}
            norms |= {f'{step}.{which}.1.0': 256, f'{step}.{which}.3.0': 256}
    expected = {f'{name}.weight': shape for name, shape in names.items()}
    expected |= {f'{name}.bias': (5,) for name in ('cls_head', 'dsn_head.3')}
    for name, width in norms.items():
        expected |= {f'{name}.{entry}': (width,) for entry in ('weight', 'bias', 'running_mean', 'running_var')}
        expected[f'{name}.num_batches_tracked'] = ()
    head = {key: tuple(value.shape) for key, value in small.state_dict().items() if not key.startswith('backbone.')}
    assert head == expected


def test_default_is_a_dilated_resnet101_with_both_heads():
    with torch.device('meta'):
        model = isa_net().eval()
        output = model(torch.empty(2, 3, 97, 65))
        early, late = model.backbone(torch.empty(2, 3, 97, 65))
    assert {name: y.shape for name, y in output.items()} == {'out': (2, 21, 97, 65), 'aux': (2, 21, 97, 65)}
    assert (early.shape, late.shape) == ((2, 1024, 13, 9), (2, 2048, 13, 9))
    plain = timm.create_model('resnet101', features_only=True, out_indices=(-2, -1), device='meta')
    assert model.backbone.state_dict().keys() == plain.state_dict().keys()
    assert len(model.backbone.layer3) == 23


def test_outputs_are_what_torchvisions_models_return(small):
    x = torch.randn(2, 3, 40, 56)
    theirs = fcn_resnet50(weights=None, weights_backbone=None, num_classes=5, aux_loss=True)
    for mode in (True, False):
        output, reference = small.train(mode)(x), theirs.train(mode)(x)
        assert type(output) is type(reference)
        assert [(k, v.shape) for k, v in output.items()] == [(k, v.shape) for k, v in reference.items()]
    assert list(isa_net('resnet18', 5, aux_loss=False)(x)) == ['out']


def test_forward_is_the_written_out_network(small):
    torch.manual_seed(0)
    small.double().eval()
    x = torch.randn(1, 3, 65, 57, dtype=torch.float64)
    early, late = small.backbone(x)
    y = F.relu(small.isa_head[1][0](F.conv2d(late, small.isa_head[0].weight, padding=1)))
    context = small.isa_head[2]
    y = torch.cat([y, context.stages[0](y)], dim=1)
    y = F.relu(context.conv_bn[1][0](F.conv2d(y, context.conv_bn[0].weight)))
    logits = F.conv2d(y, small.cls_head.weight, small.cls_head.bias)
    aux = F.relu(small.dsn_head[1][0](F.conv2d(early, small.dsn_head[0].weight, padding=1)))
    aux = F.conv2d(aux, small.dsn_head[3].weight, small.dsn_head[3].bias)
    output = small(x)
    for name, expected in {'out': logits, 'aux': aux}.items():
        # 65 = 8·8 + 1 and 57 = 8·7 + 1: position i lands on pixel 8·i
        torch.testing.assert_close(output[name][:, :, ::8, ::8], expected)
    small.float()


@pytest.mark.parametrize('size', [(33, 47), (8, 8), (1, 1), (130, 17)])
def test_any_size_and_a_batch_of_one(small, size):
    x = torch.randn(1, 3, *size)
    if max(size) <= 8:  # training needs more than one value for each channel's statistics
        with pytest.raises(ValueError, match=f'one image of {size[0]} × {size[1]} leaves its batch norms a single'):
            small.train()(x)
    for mode in (True, False) if min(size) > 8 else (False,):
        output = small.train(mode)(x)
        assert output['out'].shape == output['aux'].shape == (1, 5, *size)
        assert output['out'].isfinite().all()
    sum(segmentation_losses(output, torch.randint(5, (1, *size))).values()).backward()


@pytest.mark.parametrize(
    'backbone, kwargs',
    [
        ('resnet50', {'in_chans': 4}),
        ('ea_resnet50', {}),
        ('issa_resnet50', {'attn_kwargs': {'group_size': 4}}),
        ('flatten_pvt_v2_b0', {'depths': (1, 1, 1, 1)}),
        pytest.param('convnext_atto', {'drop_path_rate': 0.1}, marks=pytest.mark.slow),
        pytest.param('flatten_swin_t', {'depths': (1, 1, 2, 1), 'dynamic_img_size': True}, marks=pytest.mark.slow),
    ],
)
def test_backbones(backbone, kwargs):
    model = isa_net(backbone, 3, group_size=(4, 2), backbone_kwargs=kwargs)
    output = model(torch.randn(2, kwargs.get('in_chans', 3), 41, 32))
    sum(segmentation_losses(output, torch.randint(3, (2, 41, 32))).values()).backward()
    unused = {name for name, p in model.named_parameters() if p.grad is None}
    assert not unused
    assert model.isa_head[2].stages[0].group_size == (4, 2)
    features = timm.create_model(backbone, features_only=True, output_stride=8, **kwargs)
    model.backbone.load_state_dict(features.state_dict())


@pytest.mark.parametrize('aux_loss', [True, False])
def test_scripts_as_torchvisions_models_do(aux_loss):
    model = isa_net('resnet18', 3, aux_loss=aux_loss).eval()
    scripted, x = torch.jit.script(model), torch.randn(1, 3, 75, 90)
    with torch.no_grad():
        for actual, expected in zip(scripted(x).values(), model(x).values(), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize('context', slow_but('rcca', 'ppm', of=CONTEXTS))
def test_contexts_train_script_and_fold(context):
    torch.manual_seed(0)
    model = isa_net('test_resnet', 3, context=context, aux_loss=False)
    x = torch.randn(2, 3, 40, 56)
    model(x)['out'].square().mean().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    opened(model).eval()
    with torch.no_grad():
        expected = model(x)['out']
        assert expected.shape == (2, 3, 40, 56)
        torch.testing.assert_close(torch.jit.script(model)(x)['out'], expected)
        folded = reparameterize_model(model)
        torch.testing.assert_close(folded(x)['out'], expected, rtol=1e-3, atol=1e-4)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.isa_head.modules())


@pytest.mark.parametrize('context', ['ppm', 'aspp'])
def test_averages_of_a_single_image_are_refused(context):
    model = isa_net('test_resnet', 3, context=context)
    with pytest.raises(ValueError, match='one image leaves the batch norm of its average a single position'):
        model(torch.randn(1, 3, 40, 56))
    assert model.eval()(torch.randn(1, 3, 40, 56))['out'].isfinite().all()


def test_pretrained_backbone(tmp_path):
    plain = timm.create_model('test_resnet', num_classes=10)
    torch.save(plain.state_dict(), tmp_path / 'weights.pth')
    model = isa_net(
        'test_resnet',
        3,
        pretrained_backbone=True,
        backbone_kwargs={'pretrained_cfg_overlay': {'file': str(tmp_path / 'weights.pth'), 'num_classes': 10}},
    )
    weights = plain.state_dict()
    assert len(model.backbone.state_dict()) > 50
    assert all(torch.equal(value, weights[name]) for name, value in model.backbone.state_dict().items())


@pytest.mark.parametrize('dtype', slow_but(torch.bfloat16, of=[torch.float16, torch.bfloat16]))
def test_half_precision(small, dtype):
    torch.manual_seed(0)
    model = isa_net('resnet18', 5).eval()
    x, labels = torch.randn(2, 3, 24, 20), torch.randint(5, (2, 24, 20))
    with torch.no_grad():
        expected = model(x)
    model.to(dtype)
    output = model(x.to(dtype))
    losses = segmentation_losses(output, labels)
    assert output['out'].dtype == dtype and losses['out'].dtype == torch.float32
    sum(losses.values()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    for name in expected:
        assert (output[name] - expected[name]).norm() < 0.05 * expected[name].norm()


def test_training_fits_a_picture():
    torch.manual_seed(0)
    model = isa_net('resnet18', 3, drop_rate=0.0)
    labels = torch.zeros(2, 48, 48, dtype=torch.long)
    labels[0, :24], labels[1, :, 24:] = 1, 2
    x = F.one_hot(labels, 3).permute(0, 3, 1, 2).float() + 0.1 * torch.randn(2, 3, 48, 48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = sum(segmentation_losses(model(x), labels).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert (model(x)['out'].argmax(1) == labels).float().mean() > 0.9


@pytest.mark.parametrize(
    'args, message',
    [
        ({'backbone': 'pvt_v2_b0'}, "backbone 'pvt_v2_b0' with output_stride=8: .*; choose a network"),
        ({'backbone': 'vgg11'}, "backbone 'vgg11' with output_stride=8; choose a network"),
        ({'num_classes': 0}, 'num_classes must be positive, got 0'),
        ({'context': 'isa'}, "unknown context 'isa'; did you mean issa.*; choose one of issa, self, danet, rcca, cgnl"),
        ({'group_size': 0}, r'group_size must be two positive integers, got \(0, 0\)'),
    ],
)
def test_bad_arguments(args, message):
    with torch.device('meta'), pytest.raises(ValueError, match=message):
        isa_net(**{'backbone': 'resnet18', **args})


def test_other_errors_are_not_taken_for_a_backbone_that_cannot_be_dilated():
    with pytest.raises(TypeError, match='in_chan'):
        isa_net('resnet18', backbone_kwargs={'in_chan': 3})
    with pytest.raises(ValueError, match="unknown model 'resnet19'; did you mean resnet18"):
        isa_net('resnet19')
