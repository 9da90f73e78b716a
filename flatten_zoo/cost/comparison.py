"""Cost of operators and models by name, side by side, as numbers and as a picture."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

from ..errors import UsageError, first_line
from ..figures import check_picture_path, save_figure
from ..models.attention_resnet import OPERATORS
from ..models.linearized import resolve_arguments
from ..tables import Table
from ..weights.open import check_model_name, create_model
from .counting import Measurement, available_memory, count, peak_memory, training_peak_memory
from .operators import Cost, closed_form

__all__ = [
    'MEMORY_NOTE',
    'OPERATORS',
    'Comparison',
    'build_at',
    'compare',
    'compare_all',
    'compare_stages',
    'comparison_table',
    'count_affordable',
    'default_size',
    'plot',
]

OPERATOR_DIM = 256  # channels at which operators are compared: those of a feature pyramid
OPERATOR_SIZE = 32  # default side of their map

MEMORY_NOTE = (
    "closed-form memory: all tensors of the equations, nl's n × n matrix among them, held at once as in training; "
    "peak memory: measured in inference, in which nl's fused kernel never holds that matrix, so that the worst moment "
    'of ea and nl is one that they share, the sum with the input'
)

_COLUMNS = {  # of a table: heading and unit for people
    'parameters': ('params (M)', 1e6),
    'macs': ('GMACs', 1e9),
    'activations': ('activations (M)', 1e6),
    'peak_memory': ('peak memory (MB)', 1e6),
    'seconds': ('time (ms)', 1e-3),
    'closed_form_macs': ('closed-form GMACs', 1e9),
    'closed_form_memory': ('closed-form memory (MB)', 1e6),
}


@dataclass(frozen=True)
class Comparison:
    """Cost of an operator or model at one size.

    Attributes:
        name: What was measured.
        size: Side of the square map (operator) or image (model).
        measured: Counted and measured cost.
        closed_form: Cost by the equations, for an operator.
        seconds: Of one pass, where it was timed.
    """

    name: str
    size: int
    measured: Measurement
    closed_form: Cost | None
    seconds: float | None = None


def default_size(name: str) -> int:
    """Side of the map (operator) or image (model: that of its configuration) at which a thing is compared."""
    if name in OPERATORS:
        return OPERATOR_SIZE
    check_model_name(name)
    return resolve_arguments(name)['pretrained_cfg']['input_size'][-1]


def compare_all(
    names: list[str], sizes: list[int] | None = None, picture: Path | None = None, stages: bool = False
) -> list[Comparison]:
    """Compares several operators and models, each at several sizes, on the GPU if there is one.

    Args:
        names: Operators (`OPERATORS`) and model names.
        sizes: Sides of the square maps or images; `default_size` if None, and up to four times it for a picture.
        picture: Where the comparison is to be drawn, checked before anything is measured.
        stages: Compare each stage of the models, not the whole of them.

    Raises:
        UsageError: As in `compare`, `compare_stages` and `plot`.
    """
    if picture:
        check_picture_path(picture)
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    multiples = (1, 2, 3, 4) if picture else (1,)
    todo = [(name, size) for name in names for size in sizes or [m * default_size(name) for m in multiples]]
    if stages:
        todo = tqdm(todo, leave=False, disable=None)
        return [row for name, size in todo for row in compare_stages(name, size, device)]
    return [compare(name, size, device) for name, size in tqdm(todo, leave=False, disable=None)]


def comparison_table(comparisons: list[Comparison], exact: bool) -> Table:
    """Comparisons as a table; columns without an entry are left out.

    Args:
        comparisons: The rows.
        exact: Plain numbers and bytes, for programs, in place of rounded ones with units, for people.
    """
    values = [
        {
            **asdict(c.measured),
            'seconds': c.seconds,
            'closed_form_macs': c.closed_form and c.closed_form.macs,
            'closed_form_memory': c.closed_form and c.closed_form.memory,
        }
        for c in comparisons
    ]
    columns = [column for column in _COLUMNS if any(row[column] is not None for row in values)]

    def cell(value: float | None, column: str) -> str:
        if value is None:
            return ''
        if exact:
            return str(value)
        value /= _COLUMNS[column][1]
        return f'{value:.3g}' if value < 999.5 else f'{value:.0f}'

    header = ['name', 'size', *(column if exact else _COLUMNS[column][0] for column in columns)]
    return header, [
        [c.name, str(c.size), *(cell(row[column], column) for column in columns)]
        for c, row in zip(comparisons, values, strict=True)
    ]


def compare(name: str, size: int, device: torch.device) -> Comparison:
    """Counts and measures an operator (one of `OPERATORS`, at 256 channels) or a model on one image.

    Args:
        name: An operator or any model name of timm.
        size: Side of the square map or image.
        device: Where the memory is measured.

    Raises:
        UsageError: The name is unknown, it cannot have that size, or it would not fit in the free memory.
    """
    module, shape, counted = count_affordable(name, size, device)
    closed = closed_form(module, shape[2:]) if name in OPERATORS else None
    module, _ = build_at(name, size, device)
    measured = replace(counted, peak_memory=peak_memory(module, torch.randn(shape, device=device)))
    return Comparison(name, size, measured, closed)


def compare_stages(name: str, size: int, device: torch.device) -> list[Comparison]:
    """Counts and measures every stage of a model: the modules that its feature maps come from, each by itself.

    Args:
        name: Any model name of timm.
        size: Side of the square image.
        device: Where the memory is measured.

    Raises:
        UsageError: As in `compare`, or there are no stages.
    """
    if name in OPERATORS:
        raise UsageError(f"--stages: '{name}' is an operator and has no stages")
    module, shape, _ = count_affordable(name, size, device)
    try:
        inputs = _stage_inputs(module, shape)
        counts = {stage: count(module.get_submodule(stage), x) for stage, x in inputs.items()}
    except (AttributeError, IndexError, TypeError) as e:  # stages that are no modules, or take more than one map
        raise UsageError(f"--stages: '{name}' has no stages that can be run by themselves") from e
    real, _ = build_at(name, size, device)
    rows = []
    for stage, counted in counts.items():
        peak = peak_memory(real.get_submodule(stage), torch.randn(inputs[stage], device=device))
        rows.append(Comparison(f'{name} {stage}', size, replace(counted, peak_memory=peak), None))
    return rows


def _stage_inputs(module: nn.Module, shape: tuple[int, ...]) -> dict[str, torch.Size]:
    """Shapes of the inputs of a model's stages, by their modules, for an image of that shape on the meta device."""
    inputs: dict[str, torch.Size] = {}
    hooks = [
        module.get_submodule(info['module']).register_forward_pre_hook(
            lambda _, args, stage=info['module']: inputs.update({stage: args[0].shape})
        )
        for info in module.feature_info
    ]
    module(torch.empty(shape, device='meta'))
    for hook in hooks:
        hook.remove()
    if inputs.keys() != {info['module'] for info in module.feature_info}:
        raise AttributeError('a stage that is not called as a module')
    return inputs


def count_affordable(
    name: str,
    size: int,
    device: torch.device,
    batch_size: int = 1,
    train: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, tuple[int, ...], Measurement]:
    """An operator or model on the meta device, the shape of its input and its cost, if there is memory for it.

    Args:
        name: An operator or any model name of timm.
        size: Side of the square map or image.
        device: Where the memory must be free.
        batch_size: Number of maps or images.
        train: The memory must do for a training step.
        dtype: Of weights and input.

    Raises:
        UsageError: It cannot have that size, or there is no memory for it.
    """
    try:
        module, (_, *image) = build_at(name, size, 'meta')
        module = module.to(dtype)
        shape = batch_size, *image
        counted = count(module, shape)
        if train:
            x = torch.empty(shape, device='meta', dtype=dtype)
            counted = replace(counted, peak_memory=training_peak_memory(module.train().requires_grad_(), x))
    except UsageError:
        raise
    except (AssertionError, RuntimeError, ValueError) as e:
        raise UsageError(f"'{name}' does not take size {size}: {first_line(e)}") from e
    available = available_memory(device)
    if counted.peak_memory > available:  # by the equations: fused kernels can need less, but would take hours
        raise UsageError(
            f"'{name}' at size {size} needs {counted.peak_memory / 1e9:.1f} GB of memory by its equations, and "
            f'{available / 1e9:.1f} GB are free ({device.type}): choose smaller sizes with --img-size'
            + (' or --batch-size' if batch_size > 1 else '')
        )
    return module, shape, counted


def build_at(name: str, size: int, device: str | torch.device) -> tuple[nn.Module, tuple[int, ...]]:
    """An operator or model in inference mode, and the shape of an input of the given size."""
    if size < 1:
        raise UsageError(f'--img-size must be positive, got {size}')
    if name in OPERATORS:
        operator = OPERATORS[name](OPERATOR_DIM, device=device).eval()
        return operator.requires_grad_(False), (1, OPERATOR_DIM, size, size)
    model = create_model(name, img_size=size, given=f' at size {size}', device=device).eval().requires_grad_(False)
    return model, (1, model.pretrained_cfg['input_size'][0], size, size)


def plot(comparisons: list[Comparison], path: Path) -> None:
    """Draws cost against resolution, with time where it was measured, one line for each name, with logarithmic axes.

    Args:
        comparisons: What to draw.
        path: File to write; its suffix names the format.

    Raises:
        UsageError: There is no such format or folder.
    """
    check_picture_path(path)
    timed = any(c.seconds for c in comparisons)
    figure = Figure(figsize=(15 if timed else 10, 4.5), layout='constrained')
    compute, memory, *time = figure.subplots(1, 3 if timed else 2)
    for i, name in enumerate(dict.fromkeys(c.name for c in comparisons)):
        rows = sorted((c for c in comparisons if c.name == name), key=lambda c: c.size)
        sizes = [c.size for c in rows]
        style = {'marker': 'o', 'markersize': max(3, 9 - 2 * i)}  # what lies under another line can be seen
        (line,) = compute.plot(sizes, [c.measured.macs / 1e9 for c in rows], label=name, **style)
        memory.plot(sizes, [c.measured.peak_memory / 1e6 for c in rows], label=f'{name}, inference peak', **style)
        for axes in time:
            axes.plot(sizes, [c.seconds * 1e3 for c in rows if c.seconds], label=name, **style)
        if rows[0].closed_form:
            memory.plot(
                sizes,
                [c.closed_form.memory / 1e6 for c in rows if c.closed_form],
                linestyle='--',
                color=line.get_color(),
                label=f'{name}, closed form (all held at once)',
            )
    compute.set(title='Computation per image', ylabel='multiply-accumulates (G)')
    memory.set(title='Memory per image', ylabel='memory (MB)')
    for axes in time:
        axes.set(title='Time per image', ylabel='time (ms)')
    for axes in (compute, memory, *time):
        axes.set(xscale='log', yscale='log', xlabel='side of the image (models) or map (operators)')
        sizes = sorted({c.size for c in comparisons})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize='small')
    save_figure(figure, path)
