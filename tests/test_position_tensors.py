import copy
import subprocess
import sys

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed_nhwc
from torch import nn

from flatten_zoo.layers.position_tensors import resample_positions

CHANGES = {
    'in place': lambda p: p.add_(1),
    'through .data': lambda p: p.data.mul_(2),
    'another .data': lambda p: setattr(p, 'data', torch.randn_like(p)),
    'another type': lambda p: setattr(p, 'data', p.data.double()),
    'another type and back': lambda p: setattr(p, 'data', p.data.bfloat16().float()),
}


@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize('change', CHANGES)
def test_a_kept_result_follows_the_tensor(change, mode):
    p = nn.Parameter(torch.randn(1, 3, 4, 2))
    with mode():
        torch.testing.assert_close(resample_positions(p.flatten(1, 2), (3, 4), 3, 4), p)
        torch.testing.assert_close(resample_positions(p, (3, 4), 6, 5), resample_abs_pos_embed_nhwc(p, [6, 5]))
        kept = resample_positions(p, (3, 4), 5, 6)
        assert resample_positions(p, (3, 4), 5, 6) is kept
    with torch.no_grad():
        CHANGES[change](p)
    with mode():
        expected = resample_abs_pos_embed_nhwc(p, [5, 6])
        torch.testing.assert_close(resample_positions(p, (3, 4), 5, 6), expected, rtol=0, atol=0)


def test_gradients_flow_after_inference_at_the_same_size():
    p = nn.Parameter(torch.randn(1, 3, 4, 2))
    with torch.inference_mode():
        resample_positions(p, (3, 4), 5, 6)
    resample_positions(p, (3, 4), 5, 6).square().sum().backward()
    assert p.grad.abs().min() > 0
    p.requires_grad_(False)
    x = torch.ones(1, 5, 6, 2, requires_grad=True)
    (resample_positions(p, (3, 4), 5, 6) * x).sum().backward()
    torch.testing.assert_close(x.grad, resample_abs_pos_embed_nhwc(p, [5, 6]))


@pytest.mark.parametrize('backend', ['aot_eager', pytest.param('inductor', marks=pytest.mark.slow)])
def test_gradients_compiled_at_changing_sizes(backend):
    torch.compiler.reset()
    compiled = torch.compile(resample_positions, backend=backend, fullgraph=True)
    p = nn.Parameter(torch.randn(1, 3, 4, 2))
    for height, width in ((5, 6), (7, 8), (6, 9), (2, 3)):
        weights = torch.randn(1, height, width, 2)
        gradients = [
            torch.autograd.grad((resample(p, (3, 4), height, width) * weights).sum(), p)
            for resample in (compiled, resample_positions)
        ]
        torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.xfail(
    raises=subprocess.CalledProcessError, strict=True, reason='PyTorch has no shape for it: when it does, ours can go'
)
def test_pytorch_compiles_that_gradient_by_itself():
    subprocess.run(
        [
            sys.executable,
            '-c',
            """
import torch
resize = torch.compile(torch.nn.functional.interpolate, backend='aot_eager', dynamic=True)
resize(torch.randn(1, 2, 3, 4, requires_grad=True), size=(5, 6), mode='bicubic', antialias=True).sum().backward()
""",
        ],
        check=True,
    )


def test_networks_of_one_origin_do_not_share_results():
    model = timm.create_model('flatten_pvt_t', img_size=32, depths=(1, 1, 1, 1), embed_dims=(8, 16, 40, 64)).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        before = model(x)
        other = copy.deepcopy(model)
        for p in other.parameters():
            p.mul_(1.5)
        assert not torch.allclose(other(x), before)
        torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), other(x), rtol=0, atol=0)
