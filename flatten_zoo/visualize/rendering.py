"""From a model's name and a picture's file to a figure's file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from timm.data import create_transform, resolve_model_data_config
from torch import nn

from ..errors import UsageError, first_line
from ..figures import check_arrays_path, check_picture_path, save_arrays, save_figure
from ..images import IMAGE_ERRORS, open_image, two_sides
from ..weights import open_model
from .drawing import draw
from .reading import DEFAULT_POINTS, EnergyMaps, GlobalMaps, QueryMaps, attention_layers, read_attention, read_energy

__all__ = ['load_picture', 'render']


def render(
    picture: Path,
    model_name: str,
    output: Path,
    arrays: Path | None = None,
    layer: str | None = None,
    points: Sequence[tuple[float, float]] = DEFAULT_POINTS,
    head: int = 0,
    pyramid: bool = False,
    img_size: Sequence[int] | None = None,
    pretrained: bool = False,
    checkpoint: Path | None = None,
) -> str:
    """Draw the attention of a model, or the energy of its feature pyramid, for a picture.

    Args:
        picture: The picture's file.
        model_name: Any model name of timm.
        output: File to write; its suffix names the format.
        arrays: Where to write the numbers, a .npz file.
        layer, points, head: As in `read_attention`.
        pyramid: Draw the energy of the feature pyramid, which is what a model without attention that can be read gets
            in any case (unless a layer is named).
        img_size, pretrained, checkpoint: As in `open_model`.

    Returns:
        What was drawn, in a few words.

    Raises:
        UsageError: One of the arguments can't be followed.
    """
    check_picture_path(output)
    if arrays:
        check_arrays_path(arrays)
    model, weights = open_model(model_name, img_size, pretrained=pretrained, checkpoint=checkpoint)
    image, seen = load_picture(picture, model, img_size)
    pyramid = pyramid or layer is None and not attention_layers(model)
    try:
        maps = read_energy(model, image) if pyramid else read_attention(model, image, layer, points, head)
    except (AssertionError, RuntimeError) as e:
        raise UsageError(
            f"'{model_name}' does not take a {image.shape[2]} × {image.shape[3]} image: {first_line(e)}"
        ) from e
    save_figure(draw(maps, seen, f'{model_name} ({weights})'), output, dpi=100, palette=True)
    if arrays:
        save_arrays({'picture': seen.numpy(), **_as_arrays(maps)}, arrays)
    if isinstance(maps, EnergyMaps):
        return f'feature pyramid of {model_name} ({weights})'
    return f'{maps.operator} of {model_name} ({weights}), {maps.layer}, head {maps.head}'


def load_picture(
    path: Path, model: nn.Module, img_size: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A picture as the model is to see it: all of it, resized with the model's interpolation and normalised its way.

    Args:
        path: The file.
        model: A model of timm.
        img_size: Side, or height and width, to resize to; the size of the model's configuration if None.

    Returns:
        The normalised image 1 × 3 × height × width, and the same as a picture height × width × 3 from 0 to 1.

    Raises:
        UsageError: There is no such file or it is no picture.
    """
    try:
        picture = open_image(path)
    except FileNotFoundError as e:
        raise UsageError(f"there is no picture '{path}'") from e
    except IMAGE_ERRORS as e:
        raise UsageError(f"cannot read '{path}' as a picture: {first_line(e)}") from e
    config = resolve_model_data_config(model)
    if img_size:
        config['input_size'] = (3, *two_sides(img_size))
    image = create_transform(**{**config, 'crop_pct': 1.0, 'crop_mode': 'squash'})(picture)
    mean, std = (torch.tensor(config[key]) for key in ('mean', 'std'))
    return image[None], (image.permute(1, 2, 0) * std + mean).clamp(0, 1)


def _as_arrays(maps: QueryMaps | GlobalMaps | EnergyMaps) -> dict[str, np.ndarray]:
    """What was drawn, as arrays with names."""
    if isinstance(maps, EnergyMaps):
        return {f'energy.{name}': energy.numpy() for name, energy in maps.maps.items()}
    if isinstance(maps, GlobalMaps):
        return {name: getattr(maps, name).numpy() for name in ('maps', 'channels', 'shares')}
    arrays = {'queries': np.array(maps.cells)}
    for name, form in maps.forms.items():
        arrays[name] = form.rows.numpy()
        if form.matrix is not None and form.singular_values is not None:
            arrays |= {
                f'{name}.matrix': form.matrix.numpy(),
                f'{name}.singular_values': form.singular_values.numpy(),
                f'{name}.rank': np.array(form.rank),
            }
    return arrays
