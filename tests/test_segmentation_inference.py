"""Sliding windows and several scales, against the sums written out."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from flatten_zoo.dense import isa_net, multi_scale, sliding_window


def network(images):
    """One that sees all of a window: logits depend on its mean and on the place in it."""
    ramp = torch.linspace(-1, 1, images.shape[-1], dtype=images.dtype)
    x = images[:, :1] - images.mean((1, 2, 3), keepdim=True)
    return {'out': torch.cat([x, x * ramp, -x], 1), 'aux': None}


@pytest.fixture
def images():
    return torch.randn(2, 3, 13, 21, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize('window', [(13, 21), (64, 64)])
def test_a_window_of_the_whole_size_is_the_plain_network(images, window):
    assert torch.equal(sliding_window(network, images, window, (5, 7)), network(images)['out'])


@pytest.mark.parametrize(
    'window, stride, starts',
    [
        ((8, 8), (8, 8), ([0, 5], [0, 8, 13])),
        ((8, 8), (5, 6), ([0, 5], [0, 6, 12, 13])),
        ((7, 9), (3, 9), ([0, 3, 6], [0, 9, 12])),
        ((20, 10), (1, 4), ([0], [0, 4, 8, 11])),  # higher than the image
        ((1, 1), (1, 1), (range(13), range(21))),
    ],
)
def test_windows_are_averaged(images, window, stride, starts):
    total, counts = torch.zeros(2, 3, 13, 21, dtype=torch.float64), torch.zeros(13, 21)
    for top in starts[0]:
        for left in starts[1]:
            part = images[:, :, top : top + window[0], left : left + window[1]]
            total[:, :, top : top + window[0], left : left + window[1]] += network(part)['out']
            counts[top : top + window[0], left : left + window[1]] += 1
    assert counts.min() > 0
    torch.testing.assert_close(sliding_window(network, images, window, stride), total / counts, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('divisor', [1, 4])
@pytest.mark.parametrize('flip', [False, True])
def test_scales_are_averaged(images, flip, divisor):
    expected = []
    for scale in (0.5, 1, 1.75):
        size = [round(scale * side / divisor) * divisor for side in (13, 21)]
        resized = F.interpolate(images, size, mode='bilinear', antialias=True)
        logits = [network(resized)['out']]
        if flip:
            logits.append(network(resized.flip(3))['out'].flip(3))
        expected += [F.interpolate(y, (13, 21), mode='bilinear', antialias=True).softmax(1) for y in logits]
    found = multi_scale(network, images, (0.5, 1, 1.75), flip, divisor)
    torch.testing.assert_close(found, torch.stack(expected).mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.sum(1), torch.ones(2, 13, 21, dtype=torch.float64))


def test_the_plain_size_alone_is_the_plain_network(images):
    torch.testing.assert_close(multi_scale(network, images, [1], flip=False), network(images)['out'].softmax(1))


def test_constant_networks_and_half_precision(images):
    def constant(images):
        return torch.tensor([1, 2, 3], dtype=images.dtype).view(1, 3, 1, 1).expand(len(images), 3, *images.shape[2:])

    windows = partial(sliding_window, constant, window=(5, 4), stride=(2, 3))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        found = multi_scale(windows, images.to(dtype))
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        expected = torch.tensor([1.0, 2, 3], dtype=found.dtype).softmax(0).view(1, 3, 1, 1)
        torch.testing.assert_close(found, expected.expand_as(found))


def test_a_network_sees_multiples_and_is_seen_whole():
    torch.manual_seed(0)
    model = isa_net('test_resnet', 3, context='ea').eval()
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    with torch.inference_mode():
        found = multi_scale(
            partial(sliding_window, model, window=(32, 32), stride=(32, 32)),
            torch.randn(1, 3, 33, 40),
            [1, 2],
            divisor=32,
        )
    assert found.shape == (1, 3, 33, 40) and set(seen) == {(1, 3, 32, 32)}
    assert len(seen) == 2 * (1 * 1 + 2 * 2)


@pytest.mark.parametrize('stride', [(0, 3), (3, 9), (-1, 1)])
def test_windows_that_leave_pixels_out(images, stride):
    with pytest.raises(ValueError, match=r'stride must be from 1 to the window \(8, 8\)'):
        sliding_window(network, images, (8, 8), stride)


@pytest.mark.parametrize('scales, divisor', [([], 1), ([1, 0], 1), ([-1], 1), ([1], 0)])
def test_bad_scales(images, scales, divisor):
    with pytest.raises(ValueError, match='scales and divisor must be positive'):
        multi_scale(network, images, scales, divisor=divisor)
