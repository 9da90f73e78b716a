"""Models as files that run without their code: ONNX, and programs of `torch.export`.

What is written is read again and compared with the model, at sizes that the export has not seen too where sizes are
left open. Beside it stands a JSON file with what its user must know.
"""

import inspect
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_model_data_config
from timm.utils import reparameterize_model
from torch import nn

from ._timm import FeatureGetterNet
from ._torch import get_decompositions
from .errors import UsageError, first_line
from .files import write_beside
from .images import two_sides
from .models.linearized import base_of, name_of
from .quantize import agreement, quantize, read_images

__all__ = ['DYNAMIC', 'FORMATS', 'OPSET', 'OPSETS', 'TASKS', 'export']

TASKS = ('classification', 'features', 'segmentation')
FORMATS = ('onnx', 'pt2')
DYNAMIC = {'batch': (0,), 'size': (2, 3), 'both': (0, 2, 3)}  # the axes of the images that are left open
OPSETS = range(17, 23)  # from 23 on, attention is one operator, whose masks onnxruntime does not broadcast
OPSET = 21  # what onnxruntime 1.20 of 2024 reads
INT8_OPSET = 20  # from 21 on, QuantizeLinear names its type, which onnxruntime 1.32 then contradicts as it optimises
AXES = {0: ('batch', 1), 2: ('height', 32), 3: ('width', 32)}  # of images: name, and the least that a program takes
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2}  # of the largest difference, relative to the largest output
ONE_FILE = 2**31 - 2**24  # bytes of weights that fit into an ONNX file, which ends at 2 GiB, with their graph

Run = Callable[[torch.Tensor], list[torch.Tensor]]


def export(
    model: nn.Module,
    output: Path,
    task: str = 'classification',
    format: str = 'onnx',
    img_size: Sequence[int] | None = None,
    dynamic: str | None = None,
    half: bool = False,
    force: bool = False,
    weights: str = '',
    opset: int | None = None,
    int8: Path | None = None,
    reparameterize: bool = True,
    classes: Sequence[str] = (),
) -> float:
    """Write a model and its description, after the file has been compared with the model.

    Args:
        model: A model on the CPU, in inference mode: one of timm or, for segmentation, any that returns logits, or a
            dictionary with logits as 'out'. It is used up: it may lose its head and become half.
        output: File to write, which ends in `.onnx` or `.pt2`; the description is `OUTPUT.json`.
        task: 'classification', 'features' for the maps that timm's `features_only=True` gives, or 'segmentation'.
        format: 'onnx', or 'pt2' for a program of `torch.export`.
        img_size: Side, or height and width, of the images; the model's own if None.
        dynamic: One of `DYNAMIC`: what the file leaves open; None for nothing, with one image at a time.
        half: Weights, images and outputs in float16.
        force: Overwrite files.
        weights: Where the model's weights come from, for the description.
        opset: Version of ONNX's operators, of `OPSETS`; older runtimes need older ones. `OPSET` if None, and
            `INT8_OPSET`, the newest possible, with `int8`.
        int8: Folder of images. The file is compared, then quantised: every other image calibrates it, the rest measure
            how far it agrees with the model; that is the description's `int8`, as `quantize.agreement` gives it.
        reparameterize: Write what `timm.utils.reparameterize_model` makes of the model, folded in float32.
        classes: Their names for the description, of segmentation networks; timm's models have them themselves.

    Returns:
        The largest difference between outputs of the file (before it is quantised) and of the model, relative to the
        model's largest output.

    Raises:
        UsageError: Something is in the way, the model can't be exported like that, or the difference is too large.
    """
    description = description_of(output)
    check_output(output, format, force)
    config = resolve_model_data_config(_timm_model(model))
    shape = (1, config['input_size'][0], *(two_sides(img_size) if img_size else config['input_size'][1:]))
    if dynamic in ('size', 'both') and min(shape[2:]) < AXES[2][1]:
        raise UsageError(f'--img-size {shape[2]} {shape[3]}: --dynamic {dynamic} needs at least {AXES[2][1]} each way')
    if int8 and (half or format != 'onnx'):
        raise UsageError('--int8 starts from --format onnx in float32: leave out --half and --format pt2')
    opset = opset or (INT8_OPSET if int8 else OPSET)
    if int8 and opset > INT8_OPSET:
        raise UsageError(f'--opset {opset}: files of --int8 run with opset {INT8_OPSET} or less')
    images = read_images(int8, config, shape[1:]) if int8 else []
    dtype = torch.float16 if half else torch.float32

    def to_export(model: nn.Module) -> nn.Module:
        wrapped = {'features': feature_network, 'segmentation': Logits}.get(task, lambda model: model)
        return wrapped(model).to(dtype)

    folded = to_export(reparameterize_model(model)) if reparameterize else None
    network = to_export(model)  # what the file is compared with
    names = output_names(network)
    program = trace(folded or network, torch.zeros(shape, dtype=dtype), dynamic)
    try:
        with write_beside(description) as temporary_description, write_beside(output) as temporary:
            if format == 'onnx':
                save_onnx(program, temporary, names, dynamic, opset)
                run = load_onnx(temporary)
            else:
                torch.export.save(program, temporary)
                run = load_program(temporary)
            difference = compare(run, network, check_shapes(shape, dynamic), dtype)
            about = describe(network, config, shape, dynamic, dtype, names, opset if format == 'onnx' else None)
            about |= {'weights': weights, 'reparameterized': reparameterize, 'largest_difference': difference}
            if classes:
                about['outputs'][0]['label_names'] = list(classes)
            if int8:
                quantize(temporary, temporary, images[::2])
                about['int8'] = agreement(load_onnx(temporary), lambda x: _as_list(network(x)), images[1::2])
            if format == 'onnx' and (written := opset_of(temporary)) != opset:
                raise UsageError(f'--opset {opset}: the network could only be written with opset {written}')
            temporary_description.write_text(json.dumps(about, indent=2) + '\n')
            if external_data(temporary).is_file():
                os.replace(external_data(temporary), external_data(output))
            elif format == 'onnx':
                external_data(output).unlink(missing_ok=True)  # of the file that is overwritten
    except OSError as e:  # a full disk, a folder that is not ours
        raise UsageError(f"cannot write '{output}': {e.strerror or first_line(e)}") from e
    return difference


def description_of(output: Path) -> Path:
    """The JSON file beside an exported one."""
    return output.with_name(f'{output.name}.json')


def check_output(output: Path, format: str, force: bool) -> None:
    """Raise a `UsageError` unless files of that format can be written there."""
    if output.suffix != f'.{format}':
        raise UsageError(f"-o '{output}': the name of a file of --format {format} ends in .{format}")
    for path in (output, description_of(output), external_data(output)):
        if path.is_dir():
            raise UsageError(f"'{path}' is a folder: choose another name")
        if path.exists() and not force:
            raise UsageError(f"'{path}' is there already: choose another name, or --force to overwrite it")
    if format == 'onnx':
        check_onnx_packages('--format onnx')


def check_onnx_packages(option: str) -> None:
    """Raise a `UsageError` that names the option if ONNX files can't be written and run here."""
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as e:
        raise UsageError(f"{option}: {first_line(e)}; pip install 'flatten_zoo[export]'") from e


def feature_network(model: nn.Module) -> nn.Module:
    """A model's feature maps, those that `features_only=True` chooses, as a network.

    Raises:
        UsageError: The model gives no feature maps.
    """
    try:
        with torch.device('meta'):
            info = timm.create_model(base_of(model), features_only=True).feature_info
        from_the_end = tuple(i - len(info.info) for i in info.out_indices)  # the model may be of another depth
        return FeatureGetterNet(model, out_indices=from_the_end)
    except Exception as e:  # any network of timm's has its own way to have no features
        raise UsageError(f"--task features: '{name_of(model)}' gives no feature maps: {first_line(e)}") from e


class Logits(nn.Module):
    """A segmentation network that returns its logits alone, also where they are in a dictionary."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        outputs = self.model(image)
        return outputs['out'] if isinstance(outputs, dict) else outputs


def output_names(network: nn.Module) -> list[str]:
    """Names of a network's outputs."""
    if isinstance(network, FeatureGetterNet):
        return [f'feature_{i}' for i, _ in enumerate(network.feature_info.channels(), start=1)]
    return ['logits' if isinstance(network, Logits) or network.num_classes else 'embedding']


def trace(network: nn.Module, image: torch.Tensor, dynamic: str | None) -> torch.export.ExportedProgram:
    """The network as a graph that holds for every size left open: torch refuses rather than assume a size.

    Args:
        network: The network.
        image: An image of its size.
        dynamic: As in `export`.

    Raises:
        UsageError: The network can't be exported like that.
    """
    shapes = None
    if dynamic:
        try:
            from torch.fx.experimental.dynamic_spec import ParamsSpec, ShapesSpec, ShapeVar, TensorSpec
        except ImportError as e:
            raise UsageError("--dynamic needs torch 2.14 or later; pip install 'flatten_zoo[export]'") from e
        sides = [
            ShapeVar(AXES[axis][0], min=AXES[axis][1]) if axis in DYNAMIC[dynamic] else side
            for axis, side in enumerate(image.shape)
        ]
        parameter = next(iter(inspect.signature(network.forward).parameters))
        shapes = ShapesSpec(params=ParamsSpec({parameter: TensorSpec(sides)}))
    try:
        with _quiet():
            return torch.export.export(network, (image,), dynamic_shapes=shapes)
    except Exception as e:  # it runs the code of any network of timm's on symbols
        name = type(network.model).__name__ if isinstance(network, Logits) else name_of(_timm_model(network))
        if dynamic in ('size', 'both'):
            raise UsageError(
                f"--dynamic {dynamic}: the graph of '{name}' depends on the image size; export it for one size, "
                f'with --img-size and at most --dynamic batch'
            ) from e
        raise UsageError(f"cannot export '{name}' at {image.shape[2]} × {image.shape[3]}: {first_line(e)}") from e


def _timm_model(network: nn.Module) -> nn.Module:
    """The model of timm in a network, or the network itself where there is none."""
    return next((module for module in network.modules() if hasattr(module, 'pretrained_cfg')), network)


@contextmanager
def _quiet():
    """Without the exporters' remarks and dumps, which are for the people who work on them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.disable(before)


def save_onnx(
    program: torch.export.ExportedProgram, path: Path, names: list[str], dynamic: str | None, opset: int
) -> None:
    """Write a program as ONNX: one file, and one more for weights of 2 GB and more."""
    from onnx.helper import find_min_ir_version_for, make_operatorsetid
    from onnx_ir.passes.common import LiftConstantsToInitializersPass
    from onnxscript.optimizer import fold_constants, remove_unused_nodes

    axes = {axis: AXES[axis][0] for axis in DYNAMIC[dynamic]} if dynamic else {}
    with _quiet():
        if opset < 20:  # before Gelu was an operator
            program = program.run_decompositions(get_decompositions([torch.ops.aten.gelu.default]))
        try:
            # the exporter's own optimizer takes time quadratic in the slices of a network; runtimes have theirs
            converted: Any = torch.onnx.export(  # not None, which the older exporter returns
                program,
                input_names=['image'],
                output_names=names,
                dynamic_shapes=(axes,),
                verbose=False,
                optimize=False,
                opset_version=max(opset, 18),
            )
        except torch.onnx.OnnxExporterError as e:  # operations that ONNX does not have
            raise UsageError(f'--format onnx: {first_line(e)}; --format pt2 is the other way') from e
        fold_constants(converted.model)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(converted.model)  # as tools expect
        remove_unused_nodes(converted.model)
        if opset == 17:
            to_opset_17(converted.model)
        # what ends at an opset ends at the file format of its time too
        converted.model.ir_version = find_min_ir_version_for([make_operatorsetid('', opset)])
    weights = sum(tensor.nbytes for tensor in program.state_dict.values())
    converted.save(path, external_data=weights > ONE_FILE)


def to_opset_17(model) -> None:
    """Write operators of opset 18 as those of 17, in place: the exporter and ONNX's converter end at 18.

    Raises:
        UsageError: An operator has no counterpart.
    """
    from onnx_ir import AttrInt64s

    for node in model.graph.all_nodes():
        if node.op_type == 'Split':
            node.attributes.pop('num_outputs', None)  # equal parts, as many as there are outputs
        elif node.op_type.startswith('Reduce') and node.op_type != 'ReduceSum' and len(node.inputs) > 1:
            node.attributes['axes'] = AttrInt64s('axes', node.inputs[1].const_value.numpy().tolist())
            node.attributes.pop('noop_with_empty_axes', None)
            node.resize_inputs(1)
        elif node.op_type == 'Resize' and 'antialias' in node.attributes and node.attributes['antialias'].value:
            raise UsageError('--opset 17: resampling without aliasing is newer; leave the size fixed, or --opset 18')
    model.opset_imports[''] = 17


def opset_of(path: Path) -> int:
    """The version of ONNX's own operators that a file says it uses."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    return next(opset.version for opset in model.opset_import if not opset.domain)


def external_data(path: Path) -> Path:
    """The file beside an ONNX file that has the weights, if they are many."""
    return path.with_name(f'{path.name}.data')


def load_onnx(path: Path) -> Run:
    """An ONNX file in onnxruntime, on the CPU; a `UsageError` if it does not take it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
    except Exception as e:  # what runtimes raise is theirs
        raise UsageError(f'the file cannot be read by onnxruntime: {first_line(e)}') from e
    return lambda image: [torch.from_numpy(y) for y in session.run(None, {'image': image.numpy()})]


def load_program(path: Path) -> Run:
    """A program of `torch.export`."""
    module = torch.export.load(path).module()
    return lambda image: _as_list(module(image))


def _as_list(outputs: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def check_shapes(shape: tuple[int, ...], dynamic: str | None) -> list[tuple[int, ...]]:
    """Shapes of images to compare at: that of the export, and for axes left open others, larger, smaller and odd."""
    batch, channels, height, width = shape
    batches = [batch, 3] if dynamic in ('batch', 'both') else [batch]
    sizes = [(height, width)]
    if dynamic in ('size', 'both'):
        sizes += [(height + 21, width + 6), (max(height // 2 | 1, 33), max(width // 3, 32))]
    return [(b, channels, *size) for b in batches for size in sizes]


@torch.no_grad()
def compare(run: Run, network: nn.Module, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> float:
    """The largest difference of outputs on random images, relative to the largest output of the network.

    Raises:
        UsageError: It is above `TOLERANCE`, or the file does not run.
    """
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for shape in shapes:
        image = torch.randn(shape, generator=generator).to(dtype)
        expected = _as_list(network(image))
        try:
            actual = run(image)
        except Exception as e:  # what runtimes raise is theirs
            raise UsageError(f'the file does not run on images of shape {shape}: {first_line(e)}') from e
        for a, b in zip(actual, expected, strict=True):
            scale = b.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
            difference = ((a.float() - b.float()).abs().max() / scale).item()
            if not difference <= TOLERANCE[dtype]:  # also if it is not a number
                raise UsageError(
                    f'the file differs from the model by {difference:.1e} of the largest output, on images of shape '
                    f'{shape}; at most {TOLERANCE[dtype]:.0e} is right, so nothing is written'
                )
            worst = max(worst, difference)
    return worst


def describe(
    network: nn.Module,
    config: dict,
    shape: tuple[int, ...],
    dynamic: str | None,
    dtype: torch.dtype,
    names: list[str],
    opset: int | None,
) -> dict:
    """What the user of a file must know, as plain values."""
    model = _timm_model(network)
    cfg = getattr(model, 'pretrained_cfg', {})
    open_axes = DYNAMIC[dynamic] if dynamic else ()
    outputs: list[dict[str, Any]] = [{'name': name} for name in names]
    if isinstance(network, Logits):
        name, task = type(network.model).__name__, 'segmentation'
        with torch.no_grad():
            outputs[0]['classes'] = network(torch.zeros(shape, dtype=dtype)).shape[1]
    else:
        name = f'{name_of(model)}.{cfg["tag"]}' if cfg.get('tag') else name_of(model)
        task = 'classification' if network is model else 'features'
    if task == 'features':
        for output, channels, stride in zip(
            outputs, network.feature_info.channels(), network.feature_info.reduction(), strict=True
        ):
            output |= {'channels': channels, 'stride': stride}
    elif task == 'classification':
        outputs[0]['classes' if model.num_classes else 'channels'] = model.num_classes or model.num_features
        if model.num_classes and cfg.get('label_names'):
            outputs[0]['label_names'] = cfg['label_names']
    packages = ['torch', 'timm', 'flatten_zoo'] + (['onnx', 'onnxscript', 'onnxruntime'] if opset else [])
    return {
        'model': name,
        'task': task,
        'input': {
            'name': 'image',
            'shape': [AXES[axis][0] if axis in open_axes else side for axis, side in enumerate(shape)],
            'size': list(shape[2:]),
            'dtype': str(dtype).removeprefix('torch.'),
        },
        'outputs': outputs,
        'preprocessing': {key: config[key] for key in ('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode')},
        **({'opset': opset} if opset else {}),
        'versions': {package: version(package) for package in packages},
    }
