"""Zoo encoders in segmentation-models-pytorch and in transformers, as these libraries build them."""

import itertools

import pytest
import timm
import torch
import torch.nn.functional as F

import flatten_zoo  # noqa: F401  registers the encoders
from flatten_zoo.dense import pyramid_encoder

smp = pytest.importorskip('segmentation_models_pytorch')
transformers = pytest.importorskip('transformers')

# a small model of each family, what lets it take any size, and its channels at strides 4, 8, 16 and 32
FAMILIES = [
    ('flatten_pvt_t', {}, [64, 128, 320, 512]),
    ('flatten_pvt_v2_b0', {}, [32, 64, 160, 256]),
    ('flatten_swin_t', {'dynamic_img_size': True}, [96, 192, 384, 768]),
    ('flatten_cswin_t', {}, [64, 128, 256, 512]),
    ('ea_resnet50', {}, [256, 512, 1024, 2048]),
    ('issa_resnet50', {}, [256, 512, 1024, 2048]),
    ('nl_resnet50', {}, [256, 512, 1024, 2048]),
]
QUICK = [('FPN', 'flatten_pvt_v2_b0'), ('UPerNet', 'flatten_swin_t')]  # the others are larger


def train_step(model: torch.nn.Module, x: torch.Tensor, classes: int) -> None:
    """One step; every tensor that the output depends on must get a gradient."""
    logits = model.train()(x)
    F.cross_entropy(logits, torch.randint(classes, (x.shape[0], *x.shape[2:]))).backward()
    assert logits.shape == (x.shape[0], classes, *x.shape[2:])
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
    assert not without


@pytest.mark.parametrize(
    'architecture, name, kwargs, channels',
    [
        (architecture, *family)
        if (architecture, family[0]) in QUICK
        else pytest.param(architecture, *family, marks=pytest.mark.slow)
        for architecture in ('FPN', 'UPerNet')
        for family in FAMILIES
    ],
)
def test_smp(tmp_path, architecture, name, kwargs, channels):
    torch.manual_seed(0)
    build = {'FPN': smp.FPN, 'UPerNet': smp.UPerNet}[architecture]
    model = build(f'tu-{name}', encoder_weights=None, classes=4, **kwargs)
    assert model.encoder.out_channels[-4:] == channels
    features = model.encoder(torch.randn(1, 3, 96, 32))
    assert [tuple(f.shape) for f in features[-4:]] == [
        (1, c, 96 // stride, 32 // stride) for c, stride in zip(channels, (4, 8, 16, 32), strict=True)
    ]
    train_step(model, torch.randn(2, 3, 96, 64), 4)

    x = torch.randn(1, 3, 32, 160)
    expected = model.predict(x)
    model.save_pretrained(tmp_path)
    assert torch.equal(smp.from_pretrained(tmp_path).eval()(x), expected)
    with pytest.raises(RuntimeError, match='divisible by 32'):  # smp's own rule
        model(torch.randn(1, 3, 75, 90))


def test_smp_with_fixed_sizes():
    """Swin and DeiT are built for one size, as in timm."""
    model = smp.UPerNet('tu-flatten_swin_t', encoder_weights=None, classes=4, img_size=(64, 96))
    train_step(model, torch.randn(2, 3, 64, 96), 4)
    with pytest.raises(AssertionError, match='img_size=.*dynamic_img_size=True'):
        model(torch.randn(1, 3, 96, 96))


def test_smp_depth_and_input_channels():
    model = smp.UPerNet('tu-flatten_pvt_v2_b0', encoder_weights=None, encoder_depth=4, in_channels=5, classes=2)
    assert model.encoder.out_channels == [5, 0, 32, 64, 160]
    train_step(model, torch.randn(2, 5, 64, 48), 2)


def test_smp_frozen_encoder():
    model = smp.FPN('tu-flatten_pvt_v2_b0', encoder_weights=None, classes=2)
    model.freeze_encoder()
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(p.grad is None for p in model.encoder.parameters())
    assert all(p.grad is not None for p in model.decoder.parameters())


SMALL_PVT = dict(depths=(1, 1, 2, 1), embed_dims=(16, 32, 40, 64))
SMALL_SWIN = dict(depths=(1, 1, 2, 1), embed_dim=16, num_heads=(1, 2, 4, 8), window_size=2, dynamic_img_size=True)
SMALL_CSWIN = dict(depths=(1, 1, 2, 1), embed_dim=16, num_heads=(2, 2, 4, 8), split_sizes=2)


@pytest.mark.parametrize(
    'architecture, output_stride, name, kwargs',
    [
        ('DeepLabV3', 8, 'flatten_pvt_v2_b0', SMALL_PVT),
        ('PAN', 16, 'flatten_swin_t', SMALL_SWIN),
        *(
            pytest.param(*decoder, *encoder, marks=pytest.mark.slow)
            for decoder, encoder in itertools.product(
                [('DeepLabV3', 8), ('PAN', 16)],
                [('ea_resnet50', {}), ('flatten_pvt_t', SMALL_PVT), ('flatten_cswin_t', SMALL_CSWIN)],
            )
        ),
    ],
)
def test_smp_dilated(architecture, output_stride, name, kwargs):
    """Networks that take an output stride serve smp's dilated decoders."""
    model = getattr(smp, architecture)(
        f'tu-{name}', encoder_weights=None, classes=3, encoder_output_stride=output_stride, **kwargs
    )
    x = torch.randn(2, 3, 128, 128)
    assert [f.shape[-1] for f in model.encoder(x)] == [128, 64, 32, 16, 128 // output_stride, 128 // output_stride]
    train_step(model, x, 3)


def test_smp_deit():
    """A column of maps, not a pyramid: for smp's DPT."""
    model = smp.DPT(
        'tu-flatten_deit_t', encoder_weights=None, classes=4, decoder_readout='ignore', dynamic_img_size=True
    )
    x = torch.randn(2, 3, 64, 96)
    logits = model(x)
    logits.sum().backward()
    assert logits.shape == (2, 4, 64, 96)
    with pytest.raises(ValueError, match='downsampling pattern'):
        smp.UPerNet('tu-flatten_deit_t', encoder_weights=None)


@pytest.mark.parametrize('name, kwargs', [('flatten_deit_t', {}), ('vit_tiny_patch16_224', {'in_chans': 5})])
def test_smp_plain_vision_transformer_with_a_pyramid(tmp_path, name, kwargs):
    channels = kwargs.get('in_chans', 3)
    encoder = pyramid_encoder(name, out_channels=32, depth=3, **kwargs)
    model = smp.UPerNet(encoder, encoder_weights=None, in_channels=channels, classes=4)
    features = model.encoder(torch.randn(1, channels, 96, 64))
    assert [f.shape[1:] for f in features] == [
        (channels, 96, 64),
        (0, 48, 32),
        (32, 24, 16),
        (32, 12, 8),
        (32, 6, 4),
        (32, 3, 2),
    ]
    train_step(model, torch.randn(2, channels, 64, 96), 4)
    x = torch.randn(1, channels, 32, 160)
    expected = model.predict(x)
    model.save_pretrained(tmp_path)
    assert torch.equal(smp.from_pretrained(tmp_path).eval()(x), expected)
    assert smp.UPerNet(encoder, encoder_depth=4, encoder_weights=None, in_channels=channels)(
        torch.randn(2, channels, 64, 64)
    ).shape == (2, 1, 64, 64)
    with pytest.raises(ValueError, match='give in_chans=4 to pyramid_encoder'):
        smp.UPerNet(encoder, encoder_weights=None, in_channels=4)
    with pytest.raises(ValueError, match='encoder_output_stride=16'):
        smp.DeepLabV3Plus(encoder, encoder_weights=None, in_channels=channels)


def transformers_upernet(name: str, out_indices: tuple[int, ...] = (0, 1, 2, 3)) -> torch.nn.Module:
    backbone = transformers.TimmBackboneConfig(backbone=name, out_indices=out_indices)
    return transformers.UperNetForSemanticSegmentation(
        transformers.UperNetConfig(backbone_config=backbone, hidden_size=32, auxiliary_channels=32, num_labels=5)
    )


@pytest.mark.parametrize(
    'name, channels, size',
    [
        ('flatten_pvt_v2_b0', [32, 64, 160, 256], (75, 90)),
        ('flatten_deit_t', [192] * 4, (224, 224)),  # its configuration has no place for img_size
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ('flatten_pvt_t', [64, 128, 320, 512], (75, 90)),
                ('flatten_swin_t', [96, 192, 384, 768], (224, 224)),
                ('flatten_cswin_t', [64, 128, 256, 512], (75, 90)),
                ('ea_resnet50', [256, 512, 1024, 2048], (75, 90)),
            )
        ),
    ],
)
def test_transformers(tmp_path, name, channels, size):
    torch.manual_seed(0)
    indices = {'ea_resnet50': (1, 2, 3, 4), 'flatten_deit_t': (2, 5, 8, 11)}.get(name, (0, 1, 2, 3))
    model = transformers_upernet(name, indices)
    assert list(model.backbone.channels) == channels
    labels = torch.randint(5, (2, *size))
    labels[:, :8] = 255
    output = model.train()(torch.randn(2, 3, *size), labels=labels)
    output.loss.backward()
    assert output.logits.shape == (2, 5, *size) and output.loss.isfinite()
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
    assert not without

    model.eval().save_pretrained(tmp_path)
    x = torch.randn(1, 3, *size)
    again = transformers.UperNetForSemanticSegmentation.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(x).logits, model(x).logits)


def test_transformers_other_out_indices():
    model = transformers_upernet('flatten_pvt_v2_b0', (1, 2, 3)).eval()
    assert list(model.backbone.channels) == [64, 160, 256]
    assert model(torch.randn(1, 3, 64, 64)).logits.shape == (1, 5, 64, 64)


def test_transformers_other_size_of_a_fixed_family():
    model = transformers_upernet('flatten_swin_t').eval()
    x = torch.randn(1, 3, 64, 96)
    with pytest.raises(AssertionError, match='is not the model'):
        model(x)
    model.backbone._backbone.model.set_input_size((64, 96))
    assert model(x).logits.shape == (1, 5, 64, 96)


def test_smp_pretrained(tmp_path):
    """`encoder_weights=True` is timm's pretrained, from where the model's configuration says."""
    plain = timm.create_model('flatten_pvt_v2_b0', num_classes=10)
    torch.save(plain.state_dict(), tmp_path / 'weights.pth')
    model = smp.FPN(
        'tu-flatten_pvt_v2_b0',
        encoder_weights=True,
        classes=2,
        pretrained_cfg_overlay={'file': str(tmp_path / 'weights.pth'), 'num_classes': 10},
    )
    features = timm.create_model('flatten_pvt_v2_b0', features_only=True)
    features.load_state_dict(model.encoder.model.state_dict())
    x = torch.randn(1, 3, 64, 64)
    for theirs, ours in zip(features.eval()(x), plain.eval().forward_intermediates(x)[1], strict=True):
        torch.testing.assert_close(theirs, ours)
