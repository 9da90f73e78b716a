import itertools

import pytest
import torch
import torch.nn.functional as F

from flatten_zoo import InterlacedSparseAttention

from .operators import relative_error
from .reference import load_reference


@pytest.mark.parametrize('name', ['interlaced_attention_exact', 'interlaced_attention_padded'])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_official_output(name, dtype, tolerance):
    reference = load_reference(name)
    args = reference.description['arguments']
    module = InterlacedSparseAttention(
        args['in_channels'],
        args['key_channels'],
        args['value_channels'],
        args['out_channels'],
        group_size=tuple(args['down_factor']),
        residual=False,
        dtype=dtype,
    ).eval()
    missing, unexpected = module.load_state_dict(reference.state_dict, strict=False)
    assert not unexpected and all(name.endswith('num_batches_tracked') for name in missing)
    assert relative_error(module(reference.input.to(dtype)), reference.outputs['output']) < tolerance


def test_residual_form_has_the_same_tensors():
    official, residual = (InterlacedSparseAttention(16, 8, 8, residual=r).state_dict() for r in (False, True))
    assert {n: t.shape for n, t in official.items()} == {n: t.shape for n, t in residual.items()}


def dependencies(function, x: torch.Tensor) -> torch.Tensor:
    """(output positions × input positions) of a function of one map: where an input reaches an output."""

    def flat(z):
        return function(z.view_as(x)).sum(1).flatten()

    jacobian = torch.autograd.functional.jacobian(flat, x.flatten(), vectorize=True)
    return jacobian.view(-1, *x.shape[1:]).abs().sum(1).flatten(1) > 0


def test_both_steps_connect_all_positions_and_one_step_does_not():
    torch.manual_seed(0)
    # a ReLU can be silent by chance, which is no missing connection: many channels, and float64
    module = InterlacedSparseAttention(24, 24, 24, group_size=(2, 3), residual=False, dtype=torch.float64).eval()
    x = torch.randn(1, 24, 4, 6, dtype=torch.float64)
    assert dependencies(module, x).all()
    row, col = torch.arange(24) // 6, torch.arange(24) % 6
    same_place = (row[:, None] % 2 == row % 2) & (col[:, None] % 3 == col % 3)
    same_block = (row[:, None] // 2 == row // 2) & (col[:, None] // 3 == col // 3)
    assert torch.equal(dependencies(module.long_range_sa, x), same_place)
    assert torch.equal(dependencies(module.short_range_sa, x), same_block)
    # the matrices handed out have the same patterns
    assert torch.equal(module.attention_matrix(x, step='long_range')[0, 0] > 0, same_place)
    assert torch.equal(module.attention_matrix(x, step='short_range')[0, 0] > 0, same_block)


@pytest.mark.parametrize('h, w', [*itertools.product(range(4, 8), range(3, 6)), (1, 1), (1, 7), (9, 1), (2, 2)])
def test_every_remainder_is_padded_and_cropped(h, w):
    """Like zero-padding by hand, half on each side with the odd one at the end, and cropping what comes out."""
    torch.manual_seed(0)
    module = InterlacedSparseAttention(6, 4, 4, group_size=(4, 3), residual=False, dtype=torch.float64).eval()
    x = torch.randn(2, 6, h, w, dtype=torch.float64)
    rows, cols = -h % 4, -w % 3
    top, left = rows // 2, cols // 2
    padded = F.pad(x, (left, cols - left, top, rows - top))
    assert padded.shape[2] % 4 == 0 and padded.shape[3] % 3 == 0
    y = module(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y, module(padded)[:, :, top : top + h, left : left + w])


def test_matrix_is_the_product_of_the_two_steps():
    torch.manual_seed(0)
    module = InterlacedSparseAttention(16, 8, 8, group_size=(4, 3), dtype=torch.float64).eval()
    x = torch.randn(2, 16, 8, 9, dtype=torch.float64)
    long, short, both = (module.attention_matrix(x, step=step) for step in ('long_range', 'short_range', None))
    torch.testing.assert_close(short @ long, both)
    for matrix in (long, short, both):
        assert matrix.shape == (2, 1, 72, 72)
        torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))
    # a step's matrix times its values is what the step passes on
    step = module.long_range_sa
    attended = (long[:, 0] @ step.f_value(x).flatten(2).transpose(1, 2)).transpose(1, 2).reshape(2, 8, 8, 9)
    torch.testing.assert_close(step.W(attended), step(x))


def test_matrix_of_a_padded_map():
    module = InterlacedSparseAttention(16, 8, 8, group_size=(4, 3)).eval()
    matrix = module.attention_matrix(torch.randn(1, 16, 5, 7))
    assert matrix.shape == (1, 1, 35, 35)
    assert (matrix > 0).all() and (matrix.sum(-1) < 1).all()


def test_another_output_width():
    module = InterlacedSparseAttention(16, 8, 8, out_dim=24, residual=False).eval()
    assert module(torch.randn(2, 16, 9, 10)).shape == (2, 24, 9, 10)


@pytest.mark.parametrize(
    'kwargs, message',
    [
        ({'dim': 0}, 'dim must be positive, got 0'),
        ({'key_dim': 0}, 'key_dim must be positive, got 0'),
        ({'value_dim': -1}, 'value_dim must be positive, got -1'),
        ({'out_dim': 0}, 'out_dim must be positive, got 0'),
        ({'out_dim': 8}, 'residual=True needs out_dim equal to dim 16, got 8'),
        ({'group_size': (8, 0)}, r'group_size must be two positive integers, got \(8, 0\)'),
        ({'group_size': (8,)}, r'group_size must be two positive integers, got \(8,\)'),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        InterlacedSparseAttention(**{'dim': 16, **kwargs})


def test_zero_start_needs_the_residual_form():
    with pytest.raises(ValueError, match='residual=True'):
        InterlacedSparseAttention(16, residual=False).zero_init_last()
    with pytest.raises(ValueError, match="step must be None or one of .*, got 'middle'"):
        InterlacedSparseAttention(16).attention_matrix(torch.randn(1, 16, 8, 8), step='middle')
