"""ONNX files in 8-bit integers, calibrated with images."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from timm.data import create_transform

from .errors import UsageError, first_line
from .images import IMAGE_ERRORS, image_suffixes, open_image

__all__ = ['MOST_IMAGES', 'agreement', 'quantize', 'read_images']

MOST_IMAGES = 512  # that are read; half of them calibrate
WEIGHTED = ['Conv', 'Gemm', 'MatMul']


def read_images(folder: Path, config: dict, size: Sequence[int]) -> list[torch.Tensor]:
    """Images of a folder, spread evenly over it, as a model is to see them.

    Args:
        folder: Images, in any number of folders; at most `MOST_IMAGES` are read.
        config: The model's, of `timm.data.resolve_model_data_config`.
        size: Channels, height and width.

    Returns:
        Normalised images, each 1 × channels × height × width.

    Raises:
        UsageError: There are not at least two images, or one can't be read.
    """
    mode = 'L' if size[0] == 1 else 'RGB'
    transform = create_transform(**{**config, 'input_size': tuple(size)})
    paths = sorted(
        path for path in folder.rglob('*') if path.suffix.lower() in image_suffixes() and path.name[0] != '.'
    )
    if len(paths) < 2:
        raise UsageError(
            f"--int8 '{folder}' must hold at least two images, some to calibrate and others to compare; it has "
            f'{len(paths)}'
        )
    chosen = min(len(paths), MOST_IMAGES)
    images = []
    for i in range(chosen):
        path = paths[i * len(paths) // chosen]
        try:
            images.append(transform(open_image(path, mode))[None])
        except IMAGE_ERRORS as e:
            raise UsageError(f"--int8: cannot read the image '{path}': {first_line(e)}") from e
    return images


def quantize(source: Path, output: Path, images: Sequence[torch.Tensor]) -> None:
    """Write an ONNX file with convolutions and linear layers in 8-bit integers, as QuantizeLinear and DequantizeLinear.

    Their inputs have one symmetric scale each, as TensorRT asks for, their weights one for each output channel. All
    else is in float32: products of two activations, powers and norms in attention have ranges too wide for 8 bits.
    What shares its input with a quantised layer, as residual connections may, reads it rounded.

    Args:
        source: File with weights in float32.
        output: File to write.
        images: What to measure the ranges of activations with.

    Raises:
        UsageError: onnxruntime can't quantise it.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self):
            self.images = iter(images)

        def get_next(self):
            image = next(self.images, None)
            return None if image is None else {'image': image.numpy()}

    graph = onnx.load(source, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    excluded = [  # the option for it, MatMulConstBOnly, does nothing in this format
        node.name for node in graph.node if node.op_type in WEIGHTED and node.input[1] not in weights
    ]
    logging.disable(logging.WARNING)  # that weights of one dimension have no channels, for example
    try:
        quantize_static(
            source,
            output,
            Reader(),
            op_types_to_quantize=WEIGHTED,
            nodes_to_exclude=excluded,
            per_channel=True,
            extra_options={'ActivationSymmetric': True, 'OpTypesToExcludeOutputQuantization': WEIGHTED},
        )
    except Exception as e:  # weights of more than 2 GB, for example
        raise UsageError(f'--int8: {first_line(e)}') from e
    finally:
        logging.disable(logging.NOTSET)


@torch.no_grad()
def agreement(
    run: Callable[[torch.Tensor], list[torch.Tensor]],
    network: Callable[[torch.Tensor], list[torch.Tensor]],
    images: Sequence[torch.Tensor],
) -> dict:
    """How far a quantised network agrees with the one that it was made from.

    Args:
        run: The quantised network.
        network: The network in float32.
        images: Images that have not calibrated it.

    Returns:
        `images`, their number; `top1_agreement`, the share with the same largest output, for class scores only;
        `largest_difference` of outputs, relative to the largest output.
    """
    pairs = [(a, b) for image in images for a, b in zip(run(image), network(image), strict=True)]
    worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    same = [a.argmax(-1) == b.argmax(-1) for a, b in pairs if b.ndim == 2]
    top1 = {'top1_agreement': torch.cat(same).double().mean().item()} if same else {}
    return {'images': len(images), **top1, 'largest_difference': worst}
