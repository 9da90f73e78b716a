import pytest
import torch

from flatten_zoo import EfficientAttention, NonLocalAttention

from .operators import LargestTensor, in_dtype, output_and_gradients, relative_error
from .reference import load_reference

SHAPES = {1: (19,), 2: (5, 6), 3: (3, 4, 5)}


@pytest.mark.parametrize('name', ['efficient_attention_1head', 'efficient_attention_4heads'])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_official_output(name, dtype, tolerance):
    reference = load_reference(name)
    args = reference.description['arguments']
    module = EfficientAttention(
        args['in_channels'], args['key_channels'], args['value_channels'], num_heads=args['head_count'], dtype=dtype
    )
    module.load_state_dict(reference.state_dict)  # the names are the official ones
    assert relative_error(module(reference.input.to(dtype)), reference.outputs['output']) < tolerance


@pytest.mark.parametrize('spatial_dims', [1, 3])
def test_official_weights_in_other_dimensions(spatial_dims):
    """The documented conversion: singleton dimensions added to, or taken from, the end of each weight."""
    flat, other = EfficientAttention(16, 8, 8), EfficientAttention(16, 8, 8, spatial_dims=spatial_dims)
    shapes = {name: p.shape for name, p in other.named_parameters()}
    other.load_state_dict({name: p.reshape(shapes[name]) for name, p in flat.state_dict().items()})
    x = torch.randn(2, 16, 24)
    y = other(x.unflatten(2, {1: (24,), 3: (2, 3, 4)}[spatial_dims])).flatten(2)
    torch.testing.assert_close(y, flat(x.unflatten(2, (4, 6))).flatten(2))


@pytest.mark.parametrize('spatial_dims', [1, 2, 3])
@pytest.mark.parametrize('num_heads', [1, 2, 4])
def test_scaling_equals_non_local_with_scaling(num_heads, spatial_dims):
    kwargs = {'num_heads': num_heads, 'normalization': 'scaling', 'spatial_dims': spatial_dims, 'dtype': torch.float64}
    efficient, non_local = EfficientAttention(24, 16, 8, **kwargs), NonLocalAttention(24, 16, 8, **kwargs)
    non_local.load_state_dict(efficient.state_dict())
    x = torch.randn(2, 24, *SHAPES[spatial_dims], dtype=torch.float64)
    for a, b in zip(output_and_gradients(efficient, x), output_and_gradients(non_local, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize('num_heads', [1, 4])
def test_softmax_implies_an_attention_matrix_with_rows_that_sum_to_one(num_heads):
    module = EfficientAttention(16, 8, 12, num_heads=num_heads, dtype=torch.float64)
    x = torch.randn(2, 16, 5, 6, dtype=torch.float64)
    rho_k = module.attention_maps(x).flatten(3)
    assert rho_k.shape == (2, num_heads, 8 // num_heads, 30)
    torch.testing.assert_close(rho_k.sum(-1), torch.ones_like(rho_k[..., 0]))
    q, _, v = (y.unflatten(0, (2, num_heads)) for y in module.project(x))
    matrix = q.softmax(dim=2).transpose(2, 3) @ rho_k
    torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))
    assert (matrix > 0).all()
    # and it is the module's own: times V it gives the output
    y = (matrix @ v.transpose(2, 3)).transpose(2, 3).reshape(2, 12, 5, 6)
    torch.testing.assert_close(x + module.reprojection(y), module(x))


def test_heads_are_those_of_separate_modules():
    module = EfficientAttention(12, 8, 12, num_heads=2, reproject=False, residual=False)
    x = torch.randn(1, 12, 3, 5)
    for head in range(2):
        one = EfficientAttention(12, 4, 6, residual=False)
        for name in ('keys', 'queries', 'values'):
            getattr(one, name).load_state_dict(
                {n: p.chunk(2)[head] for n, p in getattr(module, name).state_dict().items()}
            )
        one.reprojection = torch.nn.Identity()
        torch.testing.assert_close(one(x), module(x).chunk(2, dim=1)[head])


@pytest.mark.parametrize('normalization', ['softmax', 'scaling'])
def test_large_maps_in_float16(normalization):
    """With weights 1/n below the normal numbers of float16, and sums over n above its range."""
    torch.manual_seed(0)
    module = EfficientAttention(16, 8, 8, normalization=normalization, residual=False, dtype=torch.float16)
    x = (2 * torch.randn(1, 16, 400, 500)).half()
    expected = in_dtype(module, torch.float64)(x.double())
    assert relative_error(module(x), expected) < 2e-3
    with torch.autocast('cpu', torch.float16):
        assert relative_error(in_dtype(module, torch.float32)(x.float()), expected) < 2e-3


def test_memory_is_linear_in_positions():
    """No tensor of the forward or backward pass has more elements than a few maps of the input's size."""
    x = torch.randn(1, 16, 40, 50, requires_grad=True)
    with LargestTensor() as largest:
        EfficientAttention(16, 8, 8, num_heads=2)(x).sum().backward()
    assert largest.numel == x.numel()


@pytest.mark.parametrize('cls', [EfficientAttention, NonLocalAttention])
@pytest.mark.parametrize(
    'kwargs, message',
    [
        ({'dim': 0}, 'dim must be positive, got 0'),
        ({'key_dim': -8}, 'key_dim must be positive, got -8'),
        ({'value_dim': 0}, 'value_dim must be positive, got 0'),
        ({'num_heads': 0}, 'num_heads must be positive, got 0'),
        ({'num_heads': 3}, 'key_dim 64 must be divisible by num_heads 3'),
        ({'key_dim': 12, 'num_heads': 3}, 'value_dim 64 must be divisible by num_heads 3'),
        ({'normalization': 'sigmoid'}, "normalization must be one of .*, got 'sigmoid'"),
        ({'spatial_dims': 4}, 'spatial_dims must be one of .*, got 4'),
        ({'reproject': False}, 'reproject=False needs value_dim equal to dim 32, got 64'),
    ],
)
def test_bad_arguments(cls, kwargs, message):
    with pytest.raises(ValueError, match=message):
        cls(**{'dim': 32, **kwargs})


def test_without_reprojection_the_values_carry_the_zero_start():
    module = EfficientAttention(16, 8, 16, reproject=False)
    assert set(dict(module.named_children())) == {'keys', 'queries', 'values', 'reprojection'}
    assert not list(module.reprojection.parameters())
    module.zero_init_last()
    x = torch.randn(2, 16, 4, 5)
    assert torch.equal(module(x), x)
    module(x).square().mean().backward()
    assert module.values.weight.grad.abs().max() > 0
