"""FocusedLinearAttention against its equation written out, at the edges, and under torch's transformations."""
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flatten_zoo.layers import FocusedLinearAttention
from flatten_zoo.layers.focused_linear_function import depthwise_and_focused_attention, plain_attention

from .operators import LargestTensor


def make_attention(dim=32, num_heads=2, grid_size=(6, 5), seed=0, dtype=torch.float64, **kwargs):
    """An attention whose zero-initialised parameters are away from zero, as after training."""
    torch.manual_seed(seed)
    attn = FocusedLinearAttention(dim, num_heads=num_heads, grid_size=grid_size, **kwargs)
    torch.nn.init.normal_(attn.scale, std=0.5)
    torch.nn.init.normal_(attn.positional_encoding, std=0.2)
    return attn.to(dtype)


def attention_matrices(attn, x):
    """Eq. of the operator, written out: linear attention (B, heads, N, N), depthwise convolution (d, N, N)."""
    B, H, W, _ = x.shape
    N, p = H * W, attn.focusing_factor
    q, k, _ = attn.qkv(x).reshape(B, N, -1).chunk(3, dim=-1)
    k = k + attn.positional_encoding.reshape(1, N, -1)

    def f(y):
        phi = (y.relu() + 1e-6) / F.softplus(attn.scale)
        return phi ** p * phi.norm(dim=-1, keepdim=True) / (phi ** p).norm(dim=-1, keepdim=True)

    q, k = (f(y).reshape(B, N, attn.num_heads, attn.head_dim).transpose(1, 2) for y in (q, k))
    linear = (q @ k.transpose(-2, -1) / N) / (q @ k.mean(dim=-2).unsqueeze(-1) + 1e-6)

    basis = torch.eye(N, dtype=x.dtype).reshape(N, 1, H, W).expand(-1, attn.head_dim, -1, -1)
    depthwise = F.conv2d(basis, attn.dwc.weight, padding=attn.dwc.padding, groups=attn.head_dim)
    return linear, depthwise.flatten(2).permute(1, 2, 0)


def quadratic_forward(attn, x):
    B, H, W, _ = x.shape
    linear, depthwise = attention_matrices(attn, x)
    v = attn.qkv(x).reshape(B, H * W, -1).chunk(3, dim=-1)[2]
    v = v.reshape(B, H * W, attn.num_heads, attn.head_dim).transpose(1, 2)
    out = linear @ v + torch.einsum('dnm,bhmd->bhnd', depthwise, v) + attn.dwc.bias
    return attn.proj(out.transpose(1, 2).reshape(B, H, W, -1))


def transcribed_forward(attn, x):
    """The operator as the paper prints it, without a thought for memory."""
    B, H, W, _ = x.shape
    q, k, v = attn.qkv(x).reshape(B, H * W, -1).chunk(3, dim=-1)
    k = k + attn.positional_encoding.reshape(1, H * W, -1)

    def f(y):
        phi = (y.relu() + 1e-6) / F.softplus(attn.scale)
        return phi ** 3 * phi.norm(dim=-1, keepdim=True) / (phi ** 3).norm(dim=-1, keepdim=True)

    q, k, v = (y.reshape(B, H * W, attn.num_heads, -1).transpose(1, 2) for y in (f(q), f(k), v))
    out = q @ (k.transpose(-2, -1) @ v / (H * W)) / (q @ k.mean(dim=-2).unsqueeze(-1) + 1e-6)
    grid = v.transpose(-2, -1).reshape(B * attn.num_heads, -1, H, W)
    out = out.transpose(1, 2).reshape(B, H, W, -1) + attn.dwc(grid).reshape(B, -1, H, W).permute(0, 2, 3, 1)
    return attn.proj(out)


@pytest.mark.parametrize('kwargs', [
    dict(),
    dict(num_heads=1),
    dict(num_heads=8),
    dict(head_dim=12),
    dict(focusing_factor=1),
    dict(focusing_factor=8, kernel_size=3),
    dict(grid_size=(1, 1)),
    dict(grid_size=(1, 9), kernel_size=7),
    dict(qkv_bias=False),
], ids=str)
@pytest.mark.parametrize('batch_size', [1, 3])
def test_equals_the_quadratic_form(kwargs, batch_size):
    attn = make_attention(**kwargs)
    x = torch.randn(batch_size, *attn.grid_size, 32, dtype=torch.float64)
    torch.testing.assert_close(attn(x), quadratic_forward(attn, x), rtol=1e-9, atol=1e-12)


def test_gradients():
    attn = make_attention(dim=4, num_heads=2, grid_size=(2, 3), kernel_size=3)
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*attn.named_parameters(), strict=True)

    def forward(x, *values):
        return torch.func.functional_call(attn, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(forward, (x, *parameters))


def make_inputs(grid=(2, 3), channels=8, kernel_size=3, batch_size=2):
    """q, k and v, which are views of one tensor, inverse scale, kernels and biases."""
    torch.manual_seed(0)
    qkv = torch.randn(batch_size, *grid, 3 * channels, dtype=torch.float64, requires_grad=True)
    inverse_scale = torch.rand(1, 1, channels, dtype=torch.float64) + 0.5
    weight = torch.randn(channels, 1, kernel_size, kernel_size, dtype=torch.float64)
    bias = torch.randn(channels, dtype=torch.float64)
    return [*qkv.chunk(3, dim=-1), *(x.requires_grad_() for x in (inverse_scale, weight, bias))]


@pytest.mark.parametrize('grid', [(1, 1), (3, 4)], ids=str)
@pytest.mark.parametrize('p', [0.5, 1, 3, 40])
@pytest.mark.parametrize('num_heads', [1, 4])
def test_own_backward_pass_equals_autograd(grid, p, num_heads):
    for kernel_size, batch_size in itertools.product([1, 5], [1, 2]):
        inputs = make_inputs(grid, kernel_size=kernel_size, batch_size=batch_size)
        gradient = torch.randn_like(inputs[0])

        def run(function, needed, inputs=inputs, gradient=gradient):
            leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needed, strict=True)]
            y = function(*leaves, p, num_heads)
            y.backward(gradient)
            return [y] + [x.grad for x in leaves if x.requires_grad]

        for needed in [(True,) * 6, (True,) * 3 + (False,) * 3] + [tuple(i == j for j in range(6)) for i in range(6)]:
            actual, expected = run(depthwise_and_focused_attention, needed), run(plain_attention, needed)
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
        with torch.no_grad():
            torch.testing.assert_close(depthwise_and_focused_attention(*inputs, p, num_heads), expected[0])


def test_second_derivatives():
    inputs = make_inputs(batch_size=1, channels=4)
    leaves = [x.detach().requires_grad_() for x in inputs]
    assert torch.autograd.gradgradcheck(lambda *x: depthwise_and_focused_attention(*x, 3., 2), leaves)
    x, *others = leaves[2:]  # also where queries, keys and values are one tensor, or made of one another
    assert torch.autograd.gradgradcheck(lambda x: depthwise_and_focused_attention(x, 2 * x, x, *others, 3., 2), [x])


def test_function_transforms_and_forward_mode():
    *inputs, p, heads = *(x.detach() for x in make_inputs()), 3., 2

    def loss(function, *inputs):
        return function(*inputs, p, heads).square().sum()

    for transform in (
            lambda f: torch.func.grad(f, argnums=tuple(range(6)))(*inputs),
            lambda f: torch.func.vmap(torch.func.grad(f), in_dims=(0, 0, 0, None, None, None))(
                *(x[:, None] for x in inputs[:3]), *inputs[3:]),
            lambda f: torch.func.jvp(f, tuple(inputs), tuple(inputs)),
    ):
        actual, expected = (
            transform(lambda *x, f=f: loss(f, *x)) for f in (depthwise_and_focused_attention, plain_attention))
        torch.testing.assert_close(actual, expected)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(
        lambda *x: depthwise_and_focused_attention(*x, p, heads), leaves, fast_mode=True,
        check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize('use_reentrant', [False, True])
def test_gradient_checkpointing(use_reentrant):
    attn, x = make_attention(), torch.randn(2, 6, 5, 32, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(attn(x).square().sum(), x)[0]
    checkpoint(attn, x, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_keeps_few_activations(dtype):
    """q, k with its encoding, and v are kept, and little beyond; autograd of the equation keeps several maps more."""
    attn, x = make_attention(dtype=dtype, grid_size=16), torch.randn(2, 16, 16, 32, dtype=dtype)

    def kept(forward):
        storages = {}
        parameters = {p.untyped_storage().data_ptr() for p in attn.parameters()}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = forward(x)
        assert y.requires_grad
        return sum(t.untyped_storage().nbytes() for pointer, t in storages.items() if pointer not in parameters)

    assert kept(attn) < 7 * x.nbytes  # input, q, k, v, k with its encoding, and the input of the projection
    if dtype == torch.float32:
        assert kept(attn) < 0.6 * kept(lambda x: transcribed_forward(attn, x))


def test_depthwise_term_makes_the_attention_full_rank():
    """Section 4.3 and figure 5 of the paper, on its 14 × 14 grid."""
    attn = make_attention(dim=64, num_heads=2, grid_size=14)
    linear, depthwise = attention_matrices(attn, torch.randn(1, 14, 14, 64, dtype=torch.float64))
    assert torch.linalg.matrix_rank(linear[0]).tolist() == [32, 32]
    full = torch.linalg.matrix_rank(linear[0, :, None] + depthwise)  # every head with every channel's kernel
    assert (full == 196).all()


def test_cost_is_linear_in_positions():
    def cost(side):
        attn = FocusedLinearAttention(8, num_heads=2, grid_size=side)
        x = torch.randn(1, side, side, 8, requires_grad=True)
        with FlopCounterMode(display=False) as flops, LargestTensor() as largest:
            attn(x).sum().backward()
        assert largest.numel == 3 * side ** 2 * 8  # q, k and v, and nothing beyond
        return flops.get_total_flops()

    assert cost(32) == 4 * cost(16)


@pytest.mark.parametrize(('dtype', 'autocast'), [
    (torch.float32, False),
    (torch.bfloat16, False),
    (torch.float16, False),
    (torch.bfloat16, True),
    (torch.float16, True),
], ids=str)
@pytest.mark.parametrize('make_input', [
    torch.zeros_like,
    torch.ones_like,
    lambda x: x,
    lambda x: 1e-4 * x,
    lambda x: 1e4 * x,
    lambda x: torch.where(torch.arange(5)[:, None] == 2, 0., x),
], ids=['zero', 'constant', 'normal', 'tiny', 'huge', 'some zero tokens'])
def test_low_precision_is_finite_and_close(dtype, autocast, make_input):
    exact = make_attention()
    x = make_input(torch.randn(2, 6, 5, 32))
    gradient = torch.randn(2, 6, 5, 32) / x.abs().max().clamp(min=1)
    attn = copy.deepcopy(exact).to(torch.float32 if autocast else dtype)

    def run(attn, x):
        x = x.detach().clone().requires_grad_()
        with torch.autocast('cpu', dtype, enabled=autocast and attn is not exact):
            y = attn(x)
        y.backward(gradient.to(y.dtype))
        return y.double(), torch.cat([t.grad.double().flatten() for t in (x, *attn.parameters())])

    epsilon = torch.finfo(dtype).eps
    for actual, expected in zip(run(attn, x.to(attn.scale.dtype)), run(exact, x.double()), strict=True):
        assert actual.isfinite().all()
        assert (actual - expected).norm() <= 8 * epsilon * expected.norm()


def test_resamples_its_encoding_only_where_allowed():
    x = torch.randn(1, 7, 10, 32, dtype=torch.float64)
    with pytest.raises(AssertionError, match=r'\(7\) is not 6; .*img_size=.*dynamic_img_size=True'):
        make_attention()(x)
    with pytest.raises(AssertionError, match=r'\(10\) is not 5'):
        make_attention()(x[:, :6])
    with pytest.raises(AssertionError, match='3 dimensions'):
        make_attention()(x[0])
    dynamic = make_attention(dynamic_grid_size=True)
    fixed = copy.deepcopy(dynamic)
    fixed.positional_encoding.requires_grad_(False)
    encoding = fixed.positional_encoding
    fixed.set_grid_size((6, 5))
    assert fixed.positional_encoding is encoding  # an optimizer may know it
    fixed.set_grid_size((7, 10))
    assert fixed.positional_encoding.shape == (1, 7, 10, 32) and not fixed.positional_encoding.requires_grad
    torch.testing.assert_close(dynamic(x), fixed(x), rtol=1e-9, atol=1e-12)
    for grid in [(1, 1), (1, 3), (13, 2), (6, 5)]:
        assert dynamic(torch.randn(2, *grid, 32, dtype=torch.float64)).shape == (2, *grid, 32)


@pytest.mark.parametrize('dynamic', [False, True], ids=['fixed', 'dynamic'])
def test_torch_transformations_change_nothing(dynamic):
    attn = make_attention(dtype=torch.float32, dynamic_grid_size=dynamic).eval()
    x = torch.randn(2, 6, 5, 32)
    y = attn(x)
    torch.testing.assert_close(torch.compile(attn, fullgraph=True, backend='aot_eager')(x), y)
    torch.testing.assert_close(torch.jit.script(attn)(x), y)
    torch.testing.assert_close(torch.fx.symbolic_trace(attn)(x), y)


@pytest.mark.parametrize('dynamic', [False, True], ids=['fixed', 'dynamic'])
def test_exported_program_serves_other_sizes(dynamic):
    attn = make_attention(dtype=torch.float32, dynamic_grid_size=dynamic).eval()
    auto = torch.export.Dim.AUTO
    shapes = ({0: auto, 1: auto, 2: auto} if dynamic else {0: auto},)
    program = torch.export.export(attn, (torch.randn(2, 6, 5, 32),), dynamic_shapes=shapes).module()
    for shape in [(2, 6, 5, 32), (5, 6, 5, 32)] + ([(3, 9, 4, 32), (1, 2, 7, 32)] if dynamic else []):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x), attn(x))


def test_compiles_with_inductor():
    attn = make_attention(dtype=torch.float32)
    x = torch.randn(2, 6, 5, 32)
    torch.testing.assert_close(torch.compile(attn, fullgraph=True)(x), attn(x), rtol=1e-4, atol=1e-5)


def test_meta_device():
    attn = FocusedLinearAttention(32, num_heads=2, grid_size=(6, 5), device='meta', dtype=torch.bfloat16)
    y = attn(torch.empty(2, 6, 5, 32, device='meta', dtype=torch.bfloat16))
    assert y.shape == (2, 6, 5, 32) and y.is_meta and y.dtype == torch.bfloat16


@pytest.mark.parametrize(('name', 'value'), [
    ('num_heads', 3),
    ('num_heads', 0),
    ('dim', -4),
    ('head_dim', 0),
    ('grid_size', (0, 4)),
    ('grid_size', (2, 3, 4)),
    ('focusing_factor', 0),
    ('kernel_size', 4),
    ('kernel_size', -1),
])
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=name) as error:
        FocusedLinearAttention(**{'dim': 32, 'num_heads': 4, name: value})
    assert str(value) in str(error.value)
