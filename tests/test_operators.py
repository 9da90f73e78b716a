"""What holds for every attention operator: shapes, errors, numerics, identity start, compilation and export."""

import itertools
from functools import partial

import pytest
import torch
import torch.fx.experimental._config as export_config

from flatten_zoo import CompactGeneralizedNonLocal, DualAttention, NonLocalAttention, PyramidPooling

from .operators import CONTEXT, SMALL, Maps, in_dtype, output_and_gradients, relative_error

ALL = {**SMALL, **CONTEXT}
operators = pytest.mark.parametrize('make', ALL.values(), ids=ALL)
branches = pytest.mark.parametrize(  # without what the residual adds, which would hide errors, where it can be left out
    'make', [*(partial(make, residual=False) for make in SMALL.values()), *CONTEXT.values()], ids=ALL
)
compilation = pytest.mark.parametrize(
    'make',
    [
        pytest.param(make, id=name, marks=() if name in ('ea', 'issa', 'rcca') else pytest.mark.slow)
        for name, make in ALL.items()
    ],
)
with_zero_init_last = pytest.mark.parametrize('make', SMALL.values(), ids=SMALL)


def channels(module) -> int:
    return 32 if isinstance(module, PyramidPooling) else 16


@operators
@pytest.mark.parametrize('shape', [(2, 16, 8, 9), (1, 16, 1, 1), (3, 16, 1, 7), (1, 16, 13, 1), (2, 16, 2, 2)])
def test_shape_is_kept(make, shape):
    module, x = make().eval(), torch.randn(shape)
    y = module(x)
    assert y.shape == (shape[0], channels(module), *shape[2:]) and y.isfinite().all() and not torch.equal(x, y)


@operators
def test_channels_last_gives_the_same(make):
    module, x = make().eval(), torch.randn(2, 16, 8, 9)
    y = module.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(y, module(x))


@operators
@pytest.mark.parametrize('shape', [(16, 8, 9), (2, 16, 72), (2, 16, 1, 8, 9)])
def test_other_number_of_dimensions(make, shape):
    with pytest.raises(ValueError, match='must have 4 dimensions'):
        make()(torch.randn(shape))


@operators
def test_device_and_dtype(make):
    module = make(device='meta', dtype=torch.float16)
    assert all(p.is_meta and p.dtype == torch.float16 for p in module.parameters())
    y = module(torch.empty(2, 16, 8, 9, device='meta', dtype=torch.float16))
    assert y.shape == (2, channels(module), 8, 9)


@operators
def test_gradcheck(make):
    torch.manual_seed(0)
    module = make(dtype=torch.float64)
    x = torch.randn(2, 16, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, x, fast_mode=True)


BOUNDED = {'ea_scaling', 'nl_scaling', 'danet', 'rcca', 'cgnl'}


@pytest.mark.parametrize('make, bounded', [(make, name in BOUNDED) for name, make in ALL.items()], ids=ALL)
@pytest.mark.parametrize('value', [0.0, 1.0, 1e4])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_zero_constant_and_huge_inputs_stay_finite(make, bounded, value, dtype):
    torch.manual_seed(0)
    module = make(dtype=dtype).eval()
    if dtype == torch.float16 and bounded:
        value = min(value, 50.0)  # the equation's own terms, quadratic or cubic in the input, exceed the type's range
    for tensor in output_and_gradients(module, torch.full((2, 16, 9, 10), value, dtype=dtype)):
        assert tensor.isfinite().all()


@operators
def test_one_zero_image_and_one_zero_position(make):
    torch.manual_seed(0)
    x = torch.randn(2, 16, 9, 10)
    x[0], x[1, :, 3, 4] = 0, 0
    for tensor in output_and_gradients(make(), x):
        assert tensor.isfinite().all()


@branches
@pytest.mark.parametrize('dtype, tolerance', [(torch.bfloat16, 0.04), (torch.float16, 0.005)])
@pytest.mark.parametrize('autocast', [False, True], ids=['pure', 'autocast'])
def test_half_precision_is_close_to_float64(make, dtype, tolerance, autocast):
    torch.manual_seed(0)
    module, x = make().eval(), torch.randn(2, 16, 12, 10).to(dtype).float()
    module = in_dtype(in_dtype(module, dtype), torch.float32)
    expected = output_and_gradients(in_dtype(module, torch.float64), x.double())
    with torch.autocast('cpu', dtype, enabled=autocast):
        actual = output_and_gradients(module if autocast else in_dtype(module, dtype), x if autocast else x.to(dtype))
    assert relative_error(actual[0], expected[0]) < tolerance
    # gradients as a whole, and with room: a ReLU near zero is open in one precision and closed in another
    tolerance = 0.1 if any(isinstance(m, torch.nn.ReLU) for m in module.modules()) else 2 * tolerance
    if isinstance(module, CompactGeneralizedNonLocal):
        tolerance = 0.5  # the norm takes out most of what the sums over positions pass on: what is left are differences
    for a, e in zip(actual[1:], expected[1:], strict=True):
        assert a.isfinite().all()
        # zero: the bias of keys, which does not move a softmax over positions
        assert (a - e).norm() < tolerance * e.norm() or e.norm() < 1e-9


@operators
def test_half_precision_makes_no_map_in_float32(make):
    if isinstance(make(), DualAttention):
        pytest.skip("no fused kernel on CPUs has keys and values of different widths, and torch's other one is float32")
    module, x = make().bfloat16(), torch.randn(2, 16, 16, 16, dtype=torch.bfloat16, requires_grad=True)
    with Maps(torch.float32, 2 * 8 * 16 * 16) as maps:  # as large as queries, keys and values
        module(x).sum().backward()
    assert not maps.operations


@with_zero_init_last
@pytest.mark.parametrize('training', [False, True])
def test_starts_as_the_identity_and_learns(make, training):
    torch.manual_seed(0)
    module = make().train(training)
    module.zero_init_last()
    x, target = torch.randn(2, 16, 8, 9), torch.randn(2, 16, 8, 9)
    assert torch.equal(module(x), x)

    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    learned, losses = set(), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        learned |= {n for n, p in module.named_parameters() if p.grad.abs().max() > 0}
        optimizer.step()
        assert not torch.equal(module(x), x)
    assert losses[2] < losses[1] < losses[0]
    # a softmax over positions does not change with a key's bias: its gradient is zero, or what rounding leaves of it
    assert learned >= {n for n, _ in module.named_parameters() if n != 'keys.bias'}


@compilation
def test_compiles_without_a_break(make):
    torch.compiler.reset()
    module = make().eval()
    compiled = torch.compile(module, backend='aot_eager', fullgraph=True, dynamic=False)
    for shape in [(2, 16, 9, 10), (1, 16, 8, 16)]:
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), module(x))


# Inductor of torch 2.14 cannot sort the symbolic strides of a view that a convolution saves for its gradient
# (pytorch issue 185510), unless it leaves the layout of convolutions as it is.
ANY_SIZE = {'layout_optimization': False}


@pytest.mark.slow
@operators
@pytest.mark.parametrize('options, dynamic, training', [({}, False, True), ({}, None, False), (ANY_SIZE, None, True)])
def test_compiles_for_several_sizes(make, options, dynamic, training):
    torch.compiler.reset()
    torch.manual_seed(0)
    module = make().eval()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, options=options)
    for shape in [(2, 16, 9, 10), (2, 16, 8, 9), (2, 16, 17, 30)]:
        x = torch.randn(shape)
        if training:
            module.zero_grad()
            expected = output_and_gradients(in_dtype(module, x.dtype), x)
            for a, e in zip(output_and_gradients(compiled, x), expected, strict=True):
                torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-4)
        else:
            with torch.inference_mode():
                torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


@operators
def test_scripts(make):
    module = make().eval()
    scripted = torch.jit.script(module)
    for shape in [(2, 16, 9, 10), (1, 16, 8, 9)]:
        x = torch.randn(shape)
        torch.testing.assert_close(scripted(x), module(x))


@compilation
def test_exports_for_any_size(make):
    module = make().eval()
    dims = {i: torch.export.Dim(f'dim{i}', min=1) for i in (0, 2, 3)}
    # a graph that also holds for sizes of 1, which a tracer otherwise singles out
    with export_config.patch(backed_size_oblivious=True):
        program = torch.export.export(module, (torch.randn(2, 16, 9, 10),), dynamic_shapes=(dims,))
    for shape in [(2, 16, 9, 10), (1, 16, 8, 9), (3, 16, 17, 30), (2, 16, 3, 40), (1, 16, 1, 1)]:
        if shape == (1, 16, 1, 1) and isinstance(module, NonLocalAttention | DualAttention | PyramidPooling):
            continue  # whether transposed keys are contiguous depends on there being more than one; corners do too
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.parametrize('name', ['nl', 'nl_scaling', 'issa'])
def test_attention_rows(name):
    torch.manual_seed(0)
    module, x = SMALL[name]().eval(), torch.randn(2, 16, 7, 5)
    matrix = module.attention_matrix(x)
    assert matrix.shape[0] == 2 and matrix.shape[2:] == (35, 35)
    rows = module.attention_matrix(x, queries=[34, 0, 17])
    torch.testing.assert_close(rows, matrix[:, :, [34, 0, 17]])
    for outside in ([35], [-1], torch.tensor([3, 99])):
        with pytest.raises(ValueError, match=r'queries must lie in \[0, 35\)'):
            module.attention_matrix(x, outside)


@pytest.mark.parametrize('name', ['nl', 'issa'])
def test_dense_matrix_of_a_large_map_is_refused(name):
    module, x = SMALL[name]().eval(), torch.randn(1, 16, 130, 130)
    with pytest.raises(ValueError, match='16900 positions.*queries='):
        module.attention_matrix(x)
    assert module.attention_matrix(x, [0, 16899]).shape == (1, getattr(module, 'num_heads', 1), 2, 16900)


@pytest.mark.parametrize('name, residual', list(itertools.product(SMALL, [True, False])))
def test_residual_adds_the_input(name, residual):
    module, x = SMALL[name](residual=residual).eval(), torch.randn(2, 16, 8, 9)
    if name == 'issa':  # the two forms differ in the last ReLU, which non-negative values hide
        torch.nn.init.constant_(module.short_range_sa.W[1][0].bias, 100.0)
    branch = module(x) - x if residual else module(x)
    module.residual = not residual
    torch.testing.assert_close(module(x) if residual else module(x) - x, branch)
