"""PSMNet with attention on its cost volume, and the loss and scores of disparities."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from flatten_zoo import EfficientAttention
from flatten_zoo.cost.counting import training_memory
from flatten_zoo.cost.operators import closed_form
from flatten_zoo.dense import DisparityScores, psmnet, stereo_losses
from flatten_zoo.dense.psmnet import cost_volume, soft_argmin


@pytest.fixture(scope='module')
def network():
    torch.manual_seed(0)
    return psmnet(16, 'ea')


def pair(*size, batch_size=1, dtype=torch.float32):
    return torch.randn(2, batch_size, 3, *size, dtype=dtype).unbind()


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_parameters():
    """5.2 M as in the paper, whatever the number of disparities."""
    with torch.device('meta'):
        assert parameters(psmnet()) == parameters(psmnet(16)) == 5_224_768
        assert [parameters(psmnet(attention=kind)) - 5_224_768 for kind in ('ea', 'nl')] == [2128, 2128]


@pytest.mark.parametrize('size', [(2, 3, 5, 9, 4), (1, 2, 1, 4, 1), (1, 1, 3, 2, 6)])
def test_cost_volume_is_that_of_a_loop(size):
    """Also where there are more disparities than columns."""
    batch_size, channels, height, width, disparities = size
    left, right = torch.randn(2, batch_size, channels, height, width, dtype=torch.float64, requires_grad=True)
    expected = left.new_zeros(batch_size, 2 * channels, disparities, height, width)
    for d in range(disparities):
        for x in range(d, width):
            expected[:, :channels, d, :, x] = left[..., x]
            expected[:, channels:, d, :, x] = right[..., x - d]
    volume = cost_volume(left, right, disparities)
    assert torch.equal(volume, expected)
    weights = torch.randn_like(volume)
    for actual, reference in zip(
        *(torch.autograd.grad((y * weights).sum(), (left, right)) for y in (volume, expected)), strict=True
    ):
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_soft_argmin_of_one_disparity(dtype):
    disparity = torch.randint(192, (2, 3, 4))
    found = soft_argmin(1e4 * F.one_hot(disparity, 192).permute(0, 3, 1, 2).to(dtype))
    assert torch.equal(found, disparity.to(found.dtype))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    even = torch.zeros(1, 192, 1, 1, dtype=dtype)
    assert soft_argmin(even).item() == pytest.approx(95.5, rel=1e-6)


def test_layers_are_those_of_the_paper():
    """Table 1: sizes at a quarter, dilations, and 64, 32, 16 and 8 squared windows of the pooling."""
    with torch.device('meta'):
        model, shapes = psmnet(192).eval(), {}
        for name, module in model.named_modules():
            module.register_forward_hook(
                lambda module, _, y, name=name: shapes.update({name: y[0] if isinstance(y, tuple) else y})
            )
        model(*pair(256, 512))
    shapes = {name: tuple(y.shape[1:]) for name, y in shapes.items()}
    assert [shapes[f'features.stages.{i}'] for i in range(4)] == [
        (32, 128, 256),
        (64, 64, 128),
        (128, 64, 128),
        (128, 64, 128),
    ]
    assert [shapes[f'features.branches.{i}'][1:] for i in range(4)] == [(1, 2), (2, 4), (4, 8), (8, 16)]
    assert shapes['features'] == (32, 64, 128)
    assert shapes['volume1'] == shapes['hourglasses.2'] == (32, 48, 64, 128)
    assert shapes['hourglasses.0.conv2'] == (64, 24, 32, 64) and shapes['hourglasses.0.conv4'] == (64, 12, 16, 32)
    assert shapes['heads.2'] == (1, 48, 64, 128) and shapes[''] == (256, 512)
    stages = [[m for m in stage.modules() if isinstance(m, torch.nn.Conv2d)] for stage in model.features.stages]
    assert [len([m for m in stage if m.kernel_size == (3, 3)]) for stage in stages] == [6, 32, 6, 6]
    assert [{m.dilation for m in stage if m.kernel_size == (3, 3)} for stage in stages] == [
        {(1, 1)},
        {(1, 1)},
        {(2, 2)},
        {(4, 4)},
    ]


def test_attention_starts_as_the_identity():
    images, networks = pair(20, 40), {}
    for kind in (None, 'ea', 'nl'):
        torch.manual_seed(0)
        networks[kind] = psmnet(16, kind).eval()
    plain = networks.pop(None)
    with torch.no_grad():
        expected = plain(*images)
        for model in networks.values():
            assert torch.equal(model(*images), expected), 'the same first weights'
            torch.nn.init.zeros_(model.heads[0][1].weight)
            missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
            assert not unexpected and len(missing) == 8 and all(name.startswith('attention.') for name in missing)
            assert torch.equal(model(*images), expected)
            torch.nn.init.normal_(model.attention.reprojection.weight)
            assert not torch.equal(model(*images), expected)


@pytest.mark.parametrize('size', [(16, 32), (13, 39), (1, 1), (33, 18)])
def test_any_size(network, size):
    images = pair(*size, batch_size=2)
    with torch.no_grad():
        outputs = network.train()(*images)
        assert len(outputs) == 3
        for y in (*outputs, network.eval()(*images)):
            assert y.shape == (2, *size) and 0 <= y.min() <= y.max() <= 15


def test_padding_is_that_of_zeros_at_the_end(network):
    network.eval()
    left, right = pair(13, 39)
    with torch.no_grad():
        padded = network(*(F.pad(x, [0, 1, 0, 3]) for x in (left, right)))
        torch.testing.assert_close(network(left, right), padded[:, :13, :39])


def test_batch_of_one_and_gradients(network):
    """Every parameter learns, those of branches that start at zero once their last layer is not zero any more."""
    model = copy.deepcopy(network)
    torch.nn.init.normal_(model.attention.reprojection.weight, std=0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d | torch.nn.BatchNorm3d):
            torch.nn.init.ones_(module.weight)
    losses = stereo_losses(model.train()(*pair(20, 40)), 15 * torch.rand(1, 20, 40), 16)
    sum(losses.values()).backward()
    assert all(
        p.grad.isfinite().all() and p.grad.any()
        for name, p in model.named_parameters()
        if name != 'attention.keys.bias'
    )
    with pytest.raises(ValueError, match='one pair of 16 × 16 leaves the batch norms a single position to train on'):
        model(*pair(16, 16))
    model(*pair(16, 17))
    model(*pair(16, 16, batch_size=2))


def test_frozen_parts_stay(network):
    model = copy.deepcopy(network).train()
    model.features.requires_grad_(False).eval()
    before = copy.deepcopy(model.features.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sum(stereo_losses(model(*pair(20, 40)), torch.rand(1, 20, 40), 16).values()).backward()
    optimizer.step()
    assert all(p.grad is None for p in model.features.parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.features.state_dict().items())
    assert all(p.grad is not None for p in model.hourglasses.parameters())


def test_bfloat16(network):
    model, images = copy.deepcopy(network).eval(), pair(20, 40)
    with torch.no_grad():
        expected = model(*images)
        with torch.autocast('cpu', torch.bfloat16):
            mixed = model(*images)
        low = model.bfloat16()(*(x.bfloat16() for x in images))
    for found in (low, mixed):
        assert found.dtype == torch.float32
        assert (found - expected).abs().mean() < 0.3


class Volume(torch.nn.Module):
    def forward(self, left, right):
        return cost_volume(left, right, 4)


def test_cost_volume_compiles_and_exports_for_all_sizes():
    model, maps = Volume(), torch.randn(2, 1, 8, 6, 10).unbind()
    sizes = dict.fromkeys((2, 3), torch.export.Dim.DYNAMIC)
    exported = torch.export.export(model, maps, dynamic_shapes=(sizes, sizes)).module()
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True, dynamic=True)
    for other in (maps, torch.randn(2, 1, 8, 5, 7).unbind()):
        assert torch.equal(exported(*other), model(*other)) and torch.equal(compiled(*other), model(*other))


@pytest.mark.slow
@pytest.mark.parametrize('size', [(24, 40), (13, 39)])
def test_compiles_and_exports(network, size):
    model, images = copy.deepcopy(network).eval(), pair(*size)
    with torch.no_grad():
        expected = model(*images)
        torch.testing.assert_close(torch.export.export(model, images).module()(*images), expected)
        torch.testing.assert_close(torch.compile(model, backend='aot_eager', fullgraph=True)(*images), expected)


def test_memory_at_the_papers_size():
    """796 MB of efficient attention at 540 × 960, where non-local attention is refused with its 9.68 TB."""
    seen = []
    with torch.device('meta'):
        images = pair(540, 960)
        model = psmnet(192, 'ea').eval()
        model.attention.register_forward_hook(lambda module, args, y: seen.append(args[0].shape))
        assert model(*images).shape == (1, 540, 960)
        assert seen == [(1, 32, 48, 135, 240)]
        assert f'{closed_form(model.attention, seen[0][2:]).memory / 1e6:.0f}' == '796'
        message = (
            r"attention='nl' on a cost volume of 48 × 135 × 240 would take 9\.68 TB for each pair; use attention='ea'"
        )
        with pytest.raises(ValueError, match=message):
            psmnet(192, 'nl')(*images)
        psmnet(192, 'nl')(*pair(240, 320))


def test_memory_of_the_module(network):
    """What the network's module keeps in a training step is what its closed form counts."""
    held, peak = training_memory(network.attention, torch.randn(1, 32, 4, 17, 30))
    closed = closed_form(network.attention, (4, 17, 30)).memory
    assert isinstance(network.attention, EfficientAttention)
    assert held <= closed < peak and held == pytest.approx(closed, rel=1e-3)


@pytest.mark.parametrize(
    'args, message',
    [
        ((30,), 'max_disparity must be a positive multiple of 4, got 30'),
        ((0,), 'max_disparity must be a positive multiple of 4, got 0'),
        ((16, 'issa'), r"attention must be None or one of \('ea', 'nl'\), got 'issa'"),
    ],
)
def test_bad_arguments(args, message):
    with torch.device('meta'), pytest.raises(ValueError, match=message):
        psmnet(*args)


def test_images_that_are_no_pair(network):
    for left, right in (((1, 3, 8, 8), (1, 3, 8, 9)), ((3, 8, 8), (3, 8, 8))):
        with pytest.raises(ValueError, match='left and right must be B×3×H×W of one size, got'):
            network(torch.zeros(left), torch.zeros(right))


def test_losses():
    torch.manual_seed(0)
    truth = torch.tensor([[[0.0, 3, 15.9, 16, 200, -1, math.nan, math.inf]]], dtype=torch.float64)
    outputs = [(20 * torch.rand_like(truth)).requires_grad_() for _ in range(3)]
    losses = stereo_losses(outputs, truth, 16)
    assert list(losses) == ['hourglass1', 'hourglass2', 'hourglass3']
    for loss, output, weight in zip(losses.values(), outputs, (0.5, 0.7, 1), strict=True):
        torch.testing.assert_close(loss, weight * F.smooth_l1_loss(output[..., :3], truth[..., :3]))
        (gradient,) = torch.autograd.grad(loss, output)
        assert gradient[..., :3].all() and not gradient[..., 3:].any()
    none = sum(stereo_losses(outputs, torch.full_like(truth, math.nan), 16).values())
    none.backward()
    assert none == 0 and all(not y.grad.any() for y in outputs)


@pytest.mark.parametrize(
    'outputs, message',
    [
        (torch.zeros(3, 4, 5), 'outputs must be 3 tensors'),
        ([torch.zeros(3, 4, 5)] * 2, 'outputs must be 3 tensors'),
        ([torch.zeros(4, 5)] * 3, r'are of shape \(4, 5\), true ones of \(3, 4, 5\)'),
    ],
)
def test_losses_of_something_else(outputs, message):
    with pytest.raises(ValueError, match=message):
        stereo_losses(outputs, torch.zeros(3, 4, 5))


def test_scores_are_exact_over_batches():
    torch.manual_seed(0)
    truth = (60 * torch.rand(6, 5, 7)).where(torch.rand(6, 5, 7) > 0.3, math.nan)
    truth[0] = math.nan
    found = truth.nan_to_num(3) + 4 * torch.randn(truth.shape)
    expected = (found - truth)[truth < 50].abs().double()
    for parts in (1, 2, 6):
        scores = DisparityScores(50)
        for some, true in zip(found.chunk(parts), truth.chunk(parts), strict=True):
            scores.add(some, true)
        assert scores.compute() == {
            'EPE': pytest.approx(expected.mean().item(), rel=1e-6),
            '>3 px': pytest.approx((expected > 3).double().mean().item(), rel=1e-12),
        }
    scores = DisparityScores()
    scores.add(torch.tensor([3.0, 3.5, 7.0]), torch.tensor([0.0, 0.0, 400.0]))
    assert scores.compute() == {'EPE': (3 + 3.5 + 393) / 3, '>3 px': 2 / 3}
    assert all(math.isnan(x) for x in DisparityScores().compute().values())
    with pytest.raises(ValueError, match=r'are of shape \(1, 2\), true ones of \(2,\)'):
        scores.add(torch.zeros(1, 2), torch.zeros(2))
