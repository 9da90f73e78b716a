"""Efficient attention on cost volumes and on the maps of videos, and the example that shows it."""

import pytest
import torch

from flatten_zoo import EfficientAttention, NonLocalAttention
from flatten_zoo.cost.counting import training_memory
from flatten_zoo.cost.operators import closed_form
from tests.examples import load_example

# channels, arguments and size of a cost volume (depth, height, width) and of a video's map (time, height, width)
PLACES = {
    'cost volume': (32, {'key_dim': 16, 'value_dim': 16}, (12, 17, 30)),
    'video': (64, {'num_heads': 2}, (8, 14, 11)),
    'scaling': (32, {'normalization': 'scaling', 'key_dim': 8}, (6, 20, 20)),
}


@pytest.fixture(scope='module')
def example():
    return load_example('attention_in_3d')


@pytest.mark.parametrize('place', PLACES)
def test_memory_of_a_training_step(place):
    """A forward pass leaves what the closed form counts; gradients take no more than that once again."""
    dim, kwargs, size = PLACES[place]
    module = EfficientAttention(dim, spatial_dims=3, **kwargs)
    closed = closed_form(module, size).memory
    held, peak = training_memory(module, torch.randn(1, dim, *size))
    assert held <= closed
    assert held == pytest.approx(closed, rel=1e-3)
    assert closed < peak < 2 * closed
    assert all(p.grad is None for p in module.parameters())


def test_memory_is_linear_and_that_of_non_local_attention_is_not():
    small, large = (4, 10, 10), (8, 20, 20)
    module = EfficientAttention(32, 16, 16, spatial_dims=3)
    memory = [training_memory(module, torch.randn(1, 32, *size)) for size in (small, large)]
    assert memory[1][0] == pytest.approx(8 * memory[0][0], rel=1e-2)
    assert memory[1][1] == pytest.approx(8 * memory[0][1], rel=2e-2)

    module = NonLocalAttention(32, 16, 16, normalization='scaling', spatial_dims=3)
    held, peak = training_memory(module, torch.randn(1, 32, *large))
    assert held == pytest.approx(closed_form(module, large).memory, rel=1e-2)
    assert peak > 30 * memory[1][1]


def test_training_memory_sees_what_a_layer_keeps():
    """A linear layer keeps its input and makes its output; the gradient of the output is a third tensor of a kind."""
    layer, x = torch.nn.Linear(100, 200, bias=False), torch.randn(50, 100)
    held, peak = training_memory(layer, x)
    assert held == 4 * 50 * (100 + 200)
    # gradients of output and weight, then of the input
    assert peak == held + 4 * (50 * 200 + 100 * 200 + 50 * 100)
    assert x.grad is None and not x.requires_grad


@pytest.mark.slow
def test_the_papers_cost_volume():
    """EA-PSMNet's volume at full size: 796 MB where non-local attention would need 9.68 TB."""
    torch.manual_seed(0)
    size = (48, 135, 240)
    module, x = EfficientAttention(32, 16, 16, spatial_dims=3), torch.randn(1, 32, *size)
    closed = closed_form(module, size).memory
    held, peak = training_memory(module, x)
    assert f'{closed / 1e6:.0f}' == '796'
    assert held <= closed < peak < 2 * closed


@pytest.mark.parametrize('size', [(8, 24, 24), (5, 33, 47), (1, 16, 16)])
def test_video_network(example, size):
    torch.manual_seed(0)
    model, plain = example.video_network(7), torch.nn.Module()
    clip = torch.randn(1, 3, *size)
    attention = [m for m in model.modules() if isinstance(m, EfficientAttention)]
    assert [(m.keys.in_channels, m.spatial_dims) for m in attention] == [(256, 3), (512, 3)]

    logits = model.eval()(clip)
    for stage in ('layer3', 'layer4'):
        setattr(plain, stage, model.get_submodule(stage).pop(-1))
    assert torch.equal(model(clip), logits)  # starts as the plain network
    for stage in ('layer3', 'layer4'):
        model.get_submodule(stage).append(plain.get_submodule(stage))

    if size[0] > 1:  # batch norm needs more than one value a channel
        torch.nn.init.normal_(attention[0].reprojection.weight, std=0.01)
        model.train()(clip).logsumexp(1).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert attention[0].queries.weight.grad.any() and attention[1].reprojection.weight.grad.any()


def test_cost_volume(example):
    model = example.StereoNet(max_disparity=4, dim=8)
    left, right = torch.randn(2, 3, 9, 13), torch.randn(2, 3, 9, 13)
    volume = model.cost_volume(left, right)
    assert volume.shape == (2, 8, 4, 9, 13)
    for d in range(4):
        torch.testing.assert_close(volume[:, :4, d], model.features(left))
        torch.testing.assert_close(volume[:, 4:, d, :, d:], model.features(right)[..., : 13 - d])
        assert not volume[:, 4:, d, :, :d].any()
    disparity = model(left, right)
    assert disparity.shape == (2, 9, 13) and disparity.min() >= 0 and disparity.max() <= 3
    disparity.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_stereo_pairs(example):
    torch.manual_seed(0)
    left, right, disparity = example.stereo_pairs(3, (12, 20), 6)
    for b, y, x in torch.cartesian_prod(torch.arange(3), torch.arange(12), torch.arange(20)):
        source = x - int(disparity[b, y, x])
        if source >= 0:
            assert torch.equal(left[b, :, y, x], right[b, :, y, source])


def test_example_runs(example, capsys):
    example.main(['--steps', '2'])
    printed = capsys.readouterr().out
    assert '796 MB' in printed and '9.68 TB' in printed and 'after 2 steps' in printed


@pytest.mark.slow
def test_stereo_network_learns(example):
    torch.manual_seed(0)
    before, after = example.train_stereo(200)
    assert before > 1 and after < 0.4
