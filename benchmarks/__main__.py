"""Times the zoo against the transcription, alternating in one process: `python -m benchmarks`, or `make bench`.

Ratios of medians; above 1 the zoo is faster, or keeps less. "projections" is the time of an operator in projections
alone, which is its floor. An idle machine is needed: another program changes even ratios.
"""

import argparse
import contextlib
import copy
import functools
import math
import statistics
from collections.abc import Callable, Iterable
from unittest import mock

import timm
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import flatten_zoo  # noqa: F401  registers the networks
from flatten_zoo.bench.alternating import in_turn, timed
from flatten_zoo.layers import EfficientAttention, FocusedLinearAttention, InterlacedSparseAttention, NonLocalAttention
from flatten_zoo.tables import as_text

from .transcription import TRANSCRIPTIONS

# side of the map, channels, heads: PVT's, Swin's and CSwin's linear stages
OPERATORS = [
    (56, 64, 1),
    (56, 96, 3),
    (56, 64, 2),
    (28, 128, 2),
    (28, 192, 6),
    (28, 128, 4),
    (14, 320, 5),
    (14, 192, 3),
]
MODULES = [EfficientAttention, NonLocalAttention, InterlacedSparseAttention]  # at 256 channels, on maps of a side of
MODULE_SIDE = 64
NETWORKS = [
    'flatten_pvt_t',
    'flatten_pvt_v2_b0',
    'flatten_swin_t',
    'flatten_cswin_t',
    'flatten_deit_t',
    'ea_resnet50',
    'nl_resnet50',
    'issa_resnet50',
]
HALVED = ['flatten_pvt_t', 'flatten_pvt_v2_b0', 'ea_resnet50']  # each takes minutes where bfloat16 is slow
RESOLUTIONS = [256, 512, 1024, 2048]
AT_RESOLUTIONS = {  # networks for any size, beside those that they replace
    'flatten_pvt_t': {},
    'flatten_pvt_t, softmax attention': {'attn_types': 'softmax'},
    'flatten_pvt_v2_b0': {},
    'pvt_v2_b0': {},
    'flatten_swin_t': {'dynamic_img_size': True},
}
PRECISIONS = ['bfloat16', 'autocast', 'channels-last', 'bfloat16, channels-last']


def transcribed(run: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    """The same network or operator, with the transcriptions for its attention."""

    @functools.wraps(run)
    def with_transcription(x: torch.Tensor) -> object:
        with contextlib.ExitStack() as patches:
            for (cls, method), function in TRANSCRIPTIONS.items():
                patches.enter_context(mock.patch.object(cls, method, function))
            return run(x)

    return with_transcription


class Wrapped(nn.Module):
    """Another one to torch.compile, which would not notice the transcription and take what it has compiled before."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def medians(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median time of each run in seconds, all of them in turn until the time is over."""
    times = {name: [] for name in runs}
    for run in runs.values():
        run()
    for name, run in in_turn(runs, seconds):
        times[name].append(timed(run))
    return {name: statistics.median(values) for name, values in times.items()}


def kept(run: Callable, x: torch.Tensor, parameters: Iterable[nn.Parameter]) -> int:
    """Bytes that a forward pass keeps for the backward pass, without parameters."""
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run(x)  # keeps the storages, so that no two have one address
    for parameter in parameters:
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    del output
    return sum(storages.values())


def inference(run: Callable, x: torch.Tensor) -> Callable[[], None]:
    def infer() -> None:
        with torch.inference_mode():
            run(x)

    return infer


def training_step(run: Callable, x: torch.Tensor) -> Callable[[], None]:
    gradient = torch.ones_like(run(x))
    return lambda: run(x).backward(gradient)


def compare(
    module: nn.Module, x: torch.Tensor, seconds: float, compiled: bool = True, **more: Callable
) -> dict[str, float]:
    """Medians and bytes of a module and its transcription.

    Args:
        module: Network or operator.
        x: Its input.
        seconds: Time for inference, and for training.
        compiled: Compile both too.
        **more: Further runs beside inference, by name.
    """
    torch.compiler.reset()
    module.eval()
    runs = {'eager': module, 'eager_literal': transcribed(module), **more}
    if compiled:
        runs['compiled'] = torch.compile(module, fullgraph=True, dynamic=False)
        runs['compiled_literal'] = transcribed(torch.compile(Wrapped(module), fullgraph=True, dynamic=False))
    times = medians({name: inference(run, x) for name, run in runs.items()}, seconds)
    module.train()
    runs = {'': module, '_literal': transcribed(module)}
    times |= medians({f'step{name}': training_step(run, x) for name, run in runs.items()}, seconds)
    return times | {f'kept{name}': kept(run, x, module.parameters()) for name, run in runs.items()}


def ratios(figures: dict[str, float]) -> list[str]:
    """How often a module's figures are in those of its transcription."""
    return [
        f'{figures[f"{name}_literal"] / figures[name]:.2f}' if name in figures else ''
        for name in ('eager', 'compiled', 'step', 'kept')
    ]


def operators(args: argparse.Namespace) -> None:
    rows = []
    for side, dim, num_heads in OPERATORS:
        module = FocusedLinearAttention(dim, num_heads, side)
        x = torch.randn(args.batch_size, side, side, dim)
        figures = compare(module, x, args.seconds, projections=lambda x, m=module: m.proj(m.qkv(x)[..., : x.shape[-1]]))
        rows.append(
            [
                f'{side}² × {dim}, {num_heads} heads',
                *ratios(figures),
                *(f'{figures[name] / figures["projections"]:.2f}' for name in ('eager', 'compiled')),
            ]
        )
    for cls in MODULES:
        x = torch.randn(args.batch_size, 256, MODULE_SIDE, MODULE_SIDE)
        rows.append([f'{cls.__name__} {MODULE_SIDE}² × 256', *ratios(compare(cls(256), x, args.seconds)), '', ''])
    print(as_text(['operator', 'eager', 'compiled', 'training', 'kept', 'projections', 'projections, compiled'], rows))


def networks(args: argparse.Namespace) -> None:
    rows = []
    for name in NETWORKS:
        x = torch.randn(args.batch_size, 3, 224, 224)
        compiled = args.compile and name.startswith('flatten')  # attention is a fiftieth of a ResNet
        rows.append([name, *ratios(compare(timm.create_model(name), x, args.seconds, compiled))])
    print(as_text(['network', 'eager', 'compiled', 'training', 'kept'], rows))


def autocast(run: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    def with_autocast(x: torch.Tensor) -> object:
        with torch.autocast(x.device.type, torch.bfloat16):
            return run(x)

    return with_autocast


def precision(args: argparse.Namespace) -> None:
    """Inference in other types and layouts, in the speed of float32."""
    side, dim = 28, 128
    modules = {
        FocusedLinearAttention.__name__: (FocusedLinearAttention(dim, 2, side), (side, side, dim)),
        **{cls.__name__: (cls(dim), (dim, side, side)) for cls in MODULES},
        **{name: (timm.create_model(name), (3, 224, 224)) for name in HALVED},
    }
    rows = []
    for name, (module, shape) in modules.items():
        module, x = module.eval(), torch.randn(args.batch_size, *shape)
        half = copy.deepcopy(module).bfloat16()
        runs = {
            'float32': inference(module, x),
            'bfloat16': inference(half, x.bfloat16()),
            'autocast': inference(autocast(module), x),
        }
        if name != FocusedLinearAttention.__name__:  # takes channels-last maps as it is
            last = copy.deepcopy(module).to(memory_format=torch.channels_last)
            x = x.contiguous(memory_format=torch.channels_last)
            half_last = copy.deepcopy(half).to(memory_format=torch.channels_last)
            runs |= {'channels-last': inference(last, x), 'bfloat16, channels-last': inference(half_last, x.bfloat16())}
        times = medians(runs, args.seconds)
        rows.append(
            [
                name,
                f'{times["float32"] * 1000:.1f}',
                *(f'{times["float32"] / times[run]:.2f}' if run in times else '' for run in PRECISIONS),
            ]
        )
    print(as_text(['inference', 'float32, ms', *PRECISIONS], rows))


def resolutions(args: argparse.Namespace) -> None:
    """Inference on one image, in milliseconds, and the power of the number of pixels that it grows with."""
    models = {
        name: timm.create_model(name.partition(',')[0], **kwargs).eval() for name, kwargs in AT_RESOLUTIONS.items()
    }
    times = {name: [] for name in models}
    for side in RESOLUTIONS:
        x = torch.randn(1, 3, side, side)
        for name, seconds in medians({name: inference(m, x) for name, m in models.items()}, args.seconds).items():
            times[name].append(seconds)
    rows = []
    for name, seconds in times.items():
        exponent = statistics.linear_regression(
            [2 * math.log(side) for side in RESOLUTIONS], [math.log(t) for t in seconds]
        ).slope
        rows.append([name, *(f'{t * 1000:.0f}' for t in seconds), f'{exponent:.2f}'])
    print(as_text(['one image, ms', *(f'{side}²' for side in RESOLUTIONS), 'exponent'], rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks', description=__doc__)
    tables = {'operators': operators, 'networks': networks, 'precision': precision, 'resolutions': resolutions}
    parser.add_argument(
        '--only', choices=tables, help='one table; the last two, which take minutes, are printed only when asked for'
    )
    parser.add_argument('--compile', action='store_true', help='compile the FLatten networks too, which takes minutes')
    parser.add_argument('--batch-size', type=int, default=4, metavar='N', help='images (default: 4)')
    parser.add_argument('--seconds', type=float, default=4, metavar='S', help='for each comparison (default: 4)')
    args = parser.parse_args()
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads, float32, batch {args.batch_size}')
    for name in [args.only] if args.only else ['operators', 'networks']:
        tables[name](args)


if __name__ == '__main__':
    main()
