"""torch.compile: whole graphs, and how many of them."""

import pytest
import timm
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flatten_zoo.weights import zoo_models

from .marks import slow_but
from .networks import SHALLOW, dynamic

FAMILIES = SHALLOW | {'issa_resnet50': SHALLOW['issa_resnet50'] | {'attn_kwargs': {'group_size': 2}}}
QUICK = ('flatten_pvt_v2_b0',)
families = pytest.mark.parametrize('name', FAMILIES)
# A map or a row of windows that is a single one gets a graph of its own, as every size of 1 does: none here does
SIZES = [(128, 128), (96, 96), (96, 128), (130, 90), (160, 96), (128, 128)]


def create(name, **kwargs):
    return timm.create_model(name, **FAMILIES[name], num_classes=10, **kwargs)


class Counted:
    """A network compiled with `fullgraph=True`, which raises at a graph break, and the number of its graphs."""

    def __init__(self, model, backend='eager'):
        torch.compiler.reset()
        self.counter = CompileCounterWithBackend(backend)
        self.model = torch.compile(model, backend=self.counter, fullgraph=True)

    def infer(self, batch_size=2, size=(64, 64), context=torch.no_grad):
        self.model.eval()
        with context():
            assert self.model(torch.randn(batch_size, 3, *size)).isfinite().all()
        return self.counter.frame_count

    def train(self, batch_size=2, size=(64, 64), autocast=False):
        self.model.train()
        self.model.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            y = self.model(torch.randn(batch_size, 3, *size))
        y.float().square().sum().backward()
        # the 'eager' backend leaves no gradient on what the output does not depend on
        assert all(p.grad.isfinite().all() for p in self.model.parameters() if p.grad is not None)
        return self.counter.frame_count


@pytest.mark.parametrize('name', slow_but(*QUICK, of=FAMILIES))
def test_one_graph_for_training_and_one_for_inference(name):
    counted = Counted(create(name, drop_path_rate=0.1))
    assert [counted.train(), counted.train(), counted.infer(), counted.infer()] == [1, 1, 2, 2]
    assert [counted.train(), counted.infer()] == [2, 2]  # there and back


@pytest.mark.slow
@families
def test_one_more_graph_for_all_batch_sizes(name):
    counted = Counted(create(name))
    assert [counted.train(n) for n in (2, 3, 4, 2)] == [1, 2, 2, 2]


@pytest.mark.slow
@families
@pytest.mark.parametrize('training', [False, True])
def test_one_more_graph_for_all_image_sizes(name, training):
    counted = Counted(create(name, **dynamic(name)))
    run = counted.train if training else counted.infer
    assert [run(size=size) for size in SIZES] == [1] + [2] * (len(SIZES) - 1)


@pytest.mark.slow
@families
def test_a_graph_for_each_way_to_run(name):
    counted = Counted(create(name))
    runs = [
        counted.infer,
        lambda: counted.infer(context=torch.inference_mode),
        lambda: counted.infer(context=torch.enable_grad),
        counted.train,
        lambda: counted.train(autocast=True),
    ]
    for _ in range(2):
        counts = [run() for run in runs]
    assert counts == [5] * 5


@pytest.mark.slow
@families
def test_gradient_checkpointing_compiles(name):
    model = create(name, **dynamic(name))
    model.set_grad_checkpointing()
    # the 'eager' backend cannot checkpoint a batch norm's counter
    counted = Counted(model, 'aot_eager')
    assert [counted.train(size=size) for size in ((96, 96), (96, 96), (128, 128), (160, 96))] == [1, 1, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted(zoo_models()))
def test_every_network_is_one_graph(name):
    counted = Counted(timm.create_model(name, **({} if 'resne' in name else {'img_size': 64})))
    assert [counted.train(), counted.train(), counted.infer(), counted.infer()] == [1, 1, 2, 2]


@pytest.mark.slow
@families
def test_max_autotune_is_the_same_network(name):
    model = create(name).eval()
    compiled = torch.compile(model, mode='max-autotune', fullgraph=True)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)
