"""FocusedLinearAttention against its equation written out, at the edges, and under torch's transformations."""

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from flatten_zoo.layers import FocusedLinearAttention

from .operators import LargestTensor, Maps


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
        return phi**p * phi.norm(dim=-1, keepdim=True) / (phi**p).norm(dim=-1, keepdim=True)

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


@pytest.mark.parametrize(
    'kwargs',
    [
        dict(),
        dict(num_heads=1),
        dict(num_heads=8),
        dict(head_dim=12),
        dict(focusing_factor=1),
        dict(focusing_factor=8, kernel_size=3),
        dict(grid_size=(1, 1)),
        dict(grid_size=(1, 9), kernel_size=7),
        dict(qkv_bias=False),
    ],
    ids=str,
)
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

    assert torch.autograd.gradcheck(forward, (x, *parameters), check_batched_grad=True)


def test_gradients_of_gradients():
    attn = make_attention(dim=4, num_heads=2, grid_size=(2, 2), kernel_size=3)
    x = torch.randn(1, 2, 2, 4, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*attn.named_parameters(), strict=True)

    def forward(x, *values):
        return torch.func.functional_call(attn, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradgradcheck(forward, (x, *parameters))


@pytest.mark.parametrize(
    'kwargs',
    [
        dict(),
        dict(num_heads=8),
        dict(focusing_factor=1),
        dict(focusing_factor=8, kernel_size=3),
        dict(grid_size=(1, 1)),
    ],
    ids=str,
)
def test_eager_form_equals_the_plain_one(kwargs):
    """The backward pass by hand against that of autograd, whichever parameters are frozen."""
    attn = make_attention(**kwargs)
    x = torch.randn(2, *attn.grid_size, 32, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn_like(x)
    everything = dict(attn.named_parameters()) | {'x': x}
    for frozen in [(), ('x', 'qkv.weight', 'qkv.bias'), ('scale',), ('dwc.weight',), ('dwc.bias', 'scale')]:
        wanted = [tensor.requires_grad_(name not in frozen) for name, tensor in everything.items()]
        wanted = [tensor for tensor in wanted if tensor.requires_grad]
        y = attn(x)
        gradients = torch.autograd.grad(y, wanted, gradient)
        with mock.patch.object(torch.compiler, 'is_compiling', return_value=True):  # takes the plain form
            plain = attn(x)
        assert not any('_Attention' in type(node).__name__ for node in nodes(plain.grad_fn))
        assert any('_Attention' in type(node).__name__ for node in nodes(y.grad_fn))
        torch.testing.assert_close(y, plain, rtol=1e-12, atol=1e-14)
        expected = torch.autograd.grad(plain, wanted, gradient)
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(attn(x), y, rtol=0, atol=0)


def nodes(node, seen=None):
    """All nodes of an autograd graph."""
    seen = set() if seen is None else seen
    if node is not None and node not in seen:
        seen.add(node)
        for next_node, _ in node.next_functions:
            nodes(next_node, seen)
    return seen


@pytest.mark.parametrize('reentrant', [False, True])
def test_gradient_checkpointing(reentrant):
    attn = make_attention()
    x = torch.randn(2, 6, 5, 32, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(attn(x).square().sum(), [x, *attn.parameters()])
    y = torch.utils.checkpoint.checkpoint(attn, x, use_reentrant=reentrant)
    y.square().sum().backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in attn.parameters())], list(expected))


def test_function_transforms():
    attn = make_attention(grid_size=(2, 3))
    x, direction = torch.randn(2, 3, 1, 2, 3, 32, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(attn, x[0], vectorize=False)
    tangent = (expected * direction[0]).sum(dim=(-4, -3, -2, -1))
    torch.testing.assert_close(torch.func.jvp(attn, (x[0],), (direction[0],))[1], tangent)
    with torch.autograd.forward_ad.dual_level():
        y = attn(torch.autograd.forward_ad.make_dual(x[0], direction[0]))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(y).tangent, tangent)
    torch.testing.assert_close(torch.vmap(attn)(x), torch.stack([attn(image) for image in x]))
    gradient = torch.func.vmap(torch.func.grad(lambda image: attn(image).square().sum()))(x)
    single = x[1].clone().requires_grad_()
    attn(single).square().sum().backward()
    torch.testing.assert_close(gradient[1], single.grad)


def test_memory_kept_for_the_backward_pass():
    """The input, q, k, v and the output of the attention, and small change; autograd keeps three times as much."""
    attn = make_attention(dim=64, num_heads=2, grid_size=28, dtype=torch.float32)
    x = torch.randn(2, 28, 28, 64)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = attn(x)
    parameters = sum(p.nbytes for p in attn.parameters()) + attn.positional_encoding.nbytes
    assert sum(kept.values()) - parameters < 1.15 * 5 * x.nbytes, y.shape


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
        assert largest.numel == 3 * side**2 * 8  # q, k and v, and nothing beyond
        return flops.get_total_flops()

    assert cost(32) == 4 * cost(16)


@pytest.mark.parametrize(
    ('dtype', 'autocast'),
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.bfloat16, True),
        (torch.float16, True),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    'make_input',
    [
        torch.zeros_like,
        torch.ones_like,
        lambda x: x,
        lambda x: 1e-4 * x,
        lambda x: 1e4 * x,
        lambda x: torch.where(torch.arange(5)[:, None] == 2, 0.0, x),
    ],
    ids=['zero', 'constant', 'normal', 'tiny', 'huge', 'some zero tokens'],
)
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


def test_bfloat16_is_left_for_the_feature_map_alone():
    """q and k to float32 and their features back; in the backward pass the same, and the gradients of both."""
    attn = make_attention(grid_size=12, dtype=torch.bfloat16)
    x = torch.randn(2, 12, 12, 32, dtype=torch.bfloat16, requires_grad=True)
    with Maps(torch.float32, x.numel()) as to_float32, Maps(torch.bfloat16, x.numel()) as to_bfloat16:
        y = attn(x)
        y.backward(torch.ones_like(y))
    assert [m.operations.count('_to_copy') for m in (to_float32, to_bfloat16)] == [6, 6]
    assert not {'mm', 'addmm', 'bmm', 'baddbmm', 'convolution', 'convolution_backward'} & {*to_float32.operations}


def test_compiles_with_inductor():
    attn = make_attention(dtype=torch.float32)
    x = torch.randn(2, 6, 5, 32)
    torch.testing.assert_close(torch.compile(attn, fullgraph=True)(x), attn(x), rtol=1e-4, atol=1e-5)


def test_meta_device():
    attn = FocusedLinearAttention(32, num_heads=2, grid_size=(6, 5), device='meta', dtype=torch.bfloat16)
    y = attn(torch.empty(2, 6, 5, 32, device='meta', dtype=torch.bfloat16))
    assert y.shape == (2, 6, 5, 32) and y.is_meta and y.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('num_heads', 3),
        ('num_heads', 0),
        ('dim', -4),
        ('head_dim', 0),
        ('grid_size', (0, 4)),
        ('grid_size', (2, 3, 4)),
        ('focusing_factor', 0),
        ('kernel_size', 4),
        ('kernel_size', -1),
    ],
)
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=name) as error:
        FocusedLinearAttention(**{'dim': 32, 'num_heads': 4, name: value})
    assert str(value) in str(error.value)
