"""The operators that ISSA is measured against, beside their equations written out position by position."""

import math

import pytest
import torch
import torch.nn.functional as F

from flatten_zoo import CompactGeneralizedNonLocal, LatentGNN, PyramidPooling, RecurrentCrissCrossAttention
from flatten_zoo.layers.interlaced_attention import GroupedSelfAttention

from .operators import CONTEXT, ZERO_STARTS, LargestTensor, opened

maps = pytest.mark.parametrize('h, w', [(4, 3), (2, 5), (1, 4), (3, 1), (1, 1)])


def example(name: str, h: int, w: int, **kwargs):
    """An operator in float64, its batch norms away from where they start, and a map of two images."""
    torch.manual_seed(0)
    module = CONTEXT[name](dtype=torch.float64, **kwargs).eval()
    for m in module.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(m.running_mean, std=0.3)
            torch.nn.init.uniform_(m.running_var, 0.5, 1.5)
            torch.nn.init.normal_(m.bias, std=0.3)
    return module, torch.randn(2, 16, h, w, dtype=torch.float64)


@maps
def test_criss_cross(h, w):
    module, x = example('rcca', h, w)
    torch.nn.init.constant_(module.gamma, 0.7)
    expected = x
    for _ in range(2):
        q, k, v = module.queries(expected), module.keys(expected), module.values(expected)
        y = torch.zeros_like(x)
        for b in range(2):
            for r in range(h):
                for c in range(w):
                    cross = {(r, i) for i in range(w)} | {(i, c) for i in range(h)}
                    assert len(cross) == h + w - 1
                    weights = torch.stack([q[b, :, r, c] @ k[b, :, i, j] for i, j in cross]).softmax(0)
                    y[b, :, r, c] = sum(a * v[b, :, i, j] for a, (i, j) in zip(weights, cross, strict=True))
        expected = 0.7 * y + expected
    torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)


def test_two_rounds_connect_all_positions_and_one_does_not():
    torch.manual_seed(0)
    x = torch.randn(1, 16, 4, 5, dtype=torch.float64)
    row, col = torch.arange(20) // 5, torch.arange(20) % 5
    cross = (row[:, None] == row) | (col[:, None] == col)
    for rounds, connected in ((1, cross), (2, torch.ones_like(cross))):
        module = opened(RecurrentCrissCrossAttention(16, 4, rounds, dtype=torch.float64))

        def flat(z, module=module):
            return module(z.view_as(x)).sum(1).flatten()

        jacobian = torch.autograd.functional.jacobian(flat, x.flatten(), vectorize=True)
        assert torch.equal(jacobian.view(20, 16, 20).abs().sum(1) > 0, connected)


def test_criss_cross_makes_no_matrix_of_all_positions():
    module, x = CONTEXT['rcca'](), torch.randn(1, 16, 24, 20)
    with LargestTensor() as largest:
        module(x).sum().backward()
    assert largest.numel == 480 * (24 + 20)  # affinities of a round


@maps
def test_one_group_is_dense_self_attention(h, w):
    torch.manual_seed(0)
    module = GroupedSelfAttention(16, 4, 6, 16, (1, 1), long_range=True, dtype=torch.float64).eval()
    x = torch.randn(2, 16, h, w, dtype=torch.float64)
    theta, phi, g = (layer(x).flatten(2) for layer in (module.f_query, module.f_key, module.f_value))
    weights = (theta.transpose(1, 2) @ phi / 2).softmax(2)
    expected = module.W((g @ weights.transpose(1, 2)).view(2, 6, h, w))
    torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)


@maps
def test_dual_attention(h, w):
    module, x = example('danet', h, w)
    torch.nn.init.constant_(module.alpha, 0.7)
    torch.nn.init.constant_(module.beta, 1.3)
    a = x.flatten(2)  # 2 × C × n
    b, c, d = (layer(x).flatten(2) for layer in (module.position.queries, module.position.keys, module.position.values))
    position, channel = torch.empty_like(a), torch.empty_like(a)
    for image in range(2):
        for j in range(h * w):
            s = torch.stack([b[image, :, j] @ c[image, :, i] for i in range(h * w)]).softmax(0)
            position[image, :, j] = 0.7 * d[image] @ s + a[image, :, j]
        for j in range(16):
            s = torch.stack([a[image, j] @ a[image, i] for i in range(16)]).softmax(0)
            channel[image, j] = 1.3 * s @ a[image] + a[image, j]
    expected = module.position_conv(position.view_as(x)) + module.channel_conv(channel.view_as(x))
    torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)


@maps
@pytest.mark.parametrize('groups, order', [(1, 1), (2, 3), (4, 5)])
def test_compact_non_local(h, w, groups, order):
    torch.manual_seed(0)
    module = opened(CompactGeneralizedNonLocal(16, 8, groups, order, dtype=torch.float64))
    x = 5 * torch.randn(2, 16, h, w, dtype=torch.float64)
    y = []
    for t, p, g in zip(*(layer(x).chunk(groups, 1) for layer in (module.theta, module.phi, module.g)), strict=True):
        t, p, g = t.flatten(1), p.flatten(1), g.flatten(1)  # vec, of all positions and channels of the group
        alpha = [math.exp(-2e-4) * 2e-4**i / math.factorial(i) for i in range(order + 1)]
        affinity = sum(a * (t[:, :, None] * p[:, None]) ** i for i, a in enumerate(alpha))
        y.append((affinity @ g[:, :, None]).view(2, -1, h, w) / g.shape[1] ** 0.5)
    expected = F.group_norm(F.conv2d(torch.cat(y, 1), module.z.weight, groups=groups), groups) + x
    torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)


def test_taylor_expansion_is_of_the_kernel():
    """With normalised vectors, whose squares the constant β stands for, the sum over powers is the RBF kernel."""
    module = CompactGeneralizedNonLocal(16, 8, 1, 4, dtype=torch.float64)
    theta = torch.tensor([1.0, -1.0], dtype=torch.float64)[None, None]
    phi = torch.tensor([1.0, -1.0], dtype=torch.float64)[None, None]
    for j in range(2):
        g = F.one_hot(torch.tensor(j), 2).double()[None, None]
        kernel = torch.exp(-1e-4 * (theta - phi[..., j]) ** 2)
        torch.testing.assert_close(2**0.5 * module.attend(theta, phi, g), kernel, rtol=1e-12, atol=0)


@maps
@pytest.mark.parametrize('latent_dims', [(5,), (5, 3)])
def test_latent_gnn(h, w, latent_dims):
    torch.manual_seed(0)
    module = LatentGNN(16, 8, latent_dims, dtype=torch.float64).eval()
    torch.nn.init.constant_(module.gamma, 0.7)
    x = torch.randn(2, 16, h, w, dtype=torch.float64)
    mixture = []
    x1, x2 = (F.normalize(down(x), dim=1, eps=1e-3).flatten(2) for down in (module.down_v2l, module.down_l2v))
    for kernel in module.kernels:
        psi1 = F.normalize(kernel.psi_v2l(x1.view(2, 8, h, w)).flatten(2), dim=2, eps=1e-3)
        psi2 = F.normalize(kernel.psi_l2v(x2.view(2, 8, h, w)).flatten(2), dim=1, eps=1e-3)
        z = torch.einsum('bkj,bcj->bkc', psi1, x1)
        nodes = F.normalize(z, dim=2, eps=1e-3)
        adjacency = torch.einsum('bkc,blc->bkl', nodes, nodes).softmax(2)
        affinity = torch.einsum('bki,bkl,blj->bij', psi2, adjacency, psi1)  # the n × n matrix that it stands for
        mixture.append(torch.einsum('bij,bcj->bci', affinity, x1).view(2, 8, h, w))
    expected = x + 0.7 * module.up(torch.cat(mixture, 1))
    torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)


@maps
@pytest.mark.parametrize('bins', [(1, 2, 3, 6), (1,), (2, 4, 5)])
def test_pyramid_pooling(h, w, bins):
    torch.manual_seed(0)
    module = PyramidPooling(16, bins, dtype=torch.float64).eval()
    x = torch.randn(2, 16, h, w, dtype=torch.float64)
    expected = [x]
    for size, (_, conv, norm, act) in zip(bins, module.levels, strict=True):
        rows, cols = ([slice(i * side // size, -(-(i + 1) * side // size)) for i in range(size)] for side in (h, w))
        pooled = torch.stack([torch.stack([x[:, :, r, c].mean((2, 3)) for c in cols], -1) for r in rows], -2)
        y = act(norm(conv(pooled)))
        for dim, side in ((2, h), (3, w)):  # bilinear, with corners on corners
            at = torch.linspace(0, size - 1, side, dtype=torch.float64) if side > 1 else torch.zeros(1)
            low = at.long().clamp(max=max(size - 2, 0))
            high, part = (low + 1).clamp(max=size - 1), (at - low).view(-1, *[1] * (3 - dim))
            y = y.index_select(dim, low) * (1 - part) + y.index_select(dim, high) * part
        expected.append(y)
    expected = torch.cat(expected, 1)
    assert expected.shape[1] == module.out_dim
    torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('make', CONTEXT.values(), ids=CONTEXT)
def test_starts_as_in_the_paper_and_learns(make):
    """Without what the factors that are zero at the start let through; and these are the first to learn."""
    torch.manual_seed(0)
    module, x = make(), torch.randn(2, 16, 6, 5)
    starts = {name: p for name, p in module.named_parameters() if name.endswith(ZERO_STARTS)}
    fresh = type(module)(16).state_dict()
    for name, parameter in starts.items():
        assert not fresh[name].any()
        torch.nn.init.zeros_(parameter)
    y = module(x)
    if hasattr(module, 'position_conv'):
        torch.testing.assert_close(y, module.position_conv(x) + module.channel_conv(x))
    elif starts:
        assert torch.equal(y, x)
    (y - torch.randn_like(y)).square().mean().backward()
    assert all(p.grad.any() for p in starts.values())


@pytest.mark.parametrize(
    'name, args, message',
    [
        ('RecurrentCrissCrossAttention', {'dim': 0}, 'dim must be positive, got 0'),
        ('RecurrentCrissCrossAttention', {'key_dim': -1}, 'key_dim must be positive, got -1'),
        ('RecurrentCrissCrossAttention', {'rounds': 0}, 'rounds must be positive, got 0'),
        ('DualAttention', {'key_dim': 0}, 'key_dim must be positive, got 0'),
        ('CompactGeneralizedNonLocal', {'order': 0}, 'order must be positive, got 0'),
        ('CompactGeneralizedNonLocal', {'groups': 3}, 'dim 16 must be divisible by groups 3'),
        ('CompactGeneralizedNonLocal', {'hidden_dim': 12}, 'hidden_dim 12 must be divisible by groups 8'),
        ('LatentGNN', {'hidden_dim': 0}, 'hidden_dim must be positive, got 0'),
        ('LatentGNN', {'latent_dims': ()}, r'latent_dims must be one or more positive integers, got \(\)'),
        ('LatentGNN', {'latent_dims': (5, 0)}, r'latent_dims must be .*, got \(5, 0\)'),
        ('PyramidPooling', {'bins': (0, 1)}, r'bins must be one or more positive integers, got \(0, 1\)'),
        ('PyramidPooling', {'dim': 3}, 'dim must be at least the number of bins, 4, got 3'),
    ],
)
def test_bad_arguments(name, args, message):
    import flatten_zoo

    with pytest.raises(ValueError, match=message):
        getattr(flatten_zoo, name)(**{'dim': 16, **args})
