"""Models made to run in the modes of the benchmark."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.utils import reparameterize_model
from torch import nn

from ..cost.comparison import build_at, count_affordable
from ..cost.counting import peak_memory, training_peak_memory
from ..export import INT8_OPSET, OPSET, load_onnx, output_names, save_onnx, trace
from ..quantize import quantize

__all__ = ['MODES', 'ONNX_MODES', 'TRAINING_MODES', 'Prepared', 'prepare']

MODES = ('eager', 'compile', 'channels-last', 'bfloat16', 'reparameterized', 'onnx', 'int8')
TRAINING_MODES = MODES[:4]
ONNX_MODES = MODES[5:]


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to be timed.

    Attributes:
        run: Runs it once on its batch, and waits for the device.
        peak_memory: Bytes at the worst moment; None where nothing says it.
    """

    run: Callable[[], object]
    peak_memory: int | None


def prepare(name: str, mode: str, batch_size: int, size: int, device: torch.device, train: bool) -> Prepared:
    """A model with random weights, to run on a batch of random images.

    Args:
        name: Any model name of timm.
        mode: One of `MODES`.
        batch_size: Number of images.
        size: Side of the images.
        device: Where it runs.
        train: Run a training step (forward, cross-entropy, backward, SGD with momentum) in place of a forward pass.

    Raises:
        UsageError: The model does not take that size or mode, or there is no memory for it.
    """
    dtype = torch.bfloat16 if mode == 'bfloat16' else torch.float32
    _, shape, _ = count_affordable(name, size, device, batch_size, train, dtype)
    model = build_at(name, size, device)[0].to(dtype)
    x = torch.randn(batch_size, *shape[1:], generator=torch.Generator().manual_seed(0)).to(device, dtype)
    if mode in ONNX_MODES:
        return Prepared(_onnx_run(model, x, int8=mode == 'int8'), None)
    if mode == 'reparameterized':
        model = reparameterize_model(model)
    elif mode == 'channels-last':
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    if train:
        model.train().requires_grad_()
    network: Any = torch.compile(model, dynamic=False) if mode == 'compile' else model
    run = _synchronised(_training_step(model, network, x) if train else _inference(network, x), device)
    run()
    run()  # libraries choose their kernels, and the optimizer makes its state, at the first
    if mode == 'compile' and device.type == 'cpu':
        return Prepared(run, None)  # following its operations would have it run without being compiled
    return Prepared(run, (training_peak_memory if train else peak_memory)(network, x))


def _inference(network: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            network(x)

    return run


def _training_step(model: nn.Module, network: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    optimizer = create_optimizer_v2(model, opt='sgd', lr=1e-4)
    target = torch.zeros(len(x), dtype=torch.long, device=x.device)

    def run() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), target).backward()
        optimizer.step()

    return run


def _synchronised(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    if device.type == 'cpu':
        return run

    def run_and_wait() -> None:
        run()
        torch.accelerator.synchronize(device)

    return run_and_wait


def _onnx_run(model: nn.Module, x: torch.Tensor, int8: bool) -> Callable[[], object]:
    """The model in onnxruntime; in 8 bits the ranges are those of random images, which is enough for its speed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'model.onnx'
        program = trace(reparameterize_model(model), x, None)  # as `flatten-zoo export` writes it
        save_onnx(program, path, output_names(model), None, INT8_OPSET if int8 else OPSET)
        if int8:
            quantize(path, path, [x])
        session = load_onnx(path)
    session(x)
    return lambda: session(x)
