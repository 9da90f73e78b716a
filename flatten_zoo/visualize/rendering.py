"""From a model's name and a picture's file to a figure's file."""
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from timm.data import create_transform, resolve_model_data_config
from timm.models import get_pretrained_cfg, model_entrypoint
from torch import nn

from ..errors import UsageError, first_line
from ..figures import check_arrays_path, check_picture_path, save_arrays, save_figure
from ..images import IMAGE_ERRORS, open_image
from ..models.build import build_model, check_model_name, two_sides
from ..weights import read_checkpoint, select_state_dict
from .drawing import draw
from .reading import DEFAULT_POINTS, EnergyMaps, GlobalMaps, QueryMaps, attention_layers, read_attention, read_energy

__all__ = ['build', 'load_picture', 'render']


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
        img_size, pretrained, checkpoint: As in `build`.

    Returns:
        What was drawn, in a few words.

    Raises:
        UsageError: One of the arguments can't be followed.
    """
    check_picture_path(output)
    if arrays:
        check_arrays_path(arrays)
    model, weights = build(model_name, img_size, pretrained, checkpoint)
    image, seen = load_picture(picture, model, img_size)
    pyramid = pyramid or layer is None and not attention_layers(model)
    try:
        maps = read_energy(model, image) if pyramid else read_attention(model, image, layer, points, head)
    except (AssertionError, RuntimeError) as e:
        raise UsageError(
            f"'{model_name}' does not take a {image.shape[2]} × {image.shape[3]} image: {first_line(e)}") from e
    save_figure(draw(maps, seen, f'{model_name} ({weights})'), output, dpi=100, palette=True)
    if arrays:
        save_arrays({'picture': seen.numpy(), **_as_arrays(maps)}, arrays)
    if pyramid:
        return f'feature pyramid of {model_name} ({weights})'
    return f'{maps.operator} of {model_name} ({weights}), {maps.layer}, head {maps.head}'


def build(
        name: str,
        img_size: Sequence[int] | None = None,
        pretrained: bool = False,
        checkpoint: Path | None = None,
) -> tuple[nn.Module, str]:
    """A model in inference mode.

    Args:
        name: Any model name of timm.
        img_size: Side, or height and width, of the images; the model's own if None.
        pretrained: Load timm's weights for it.
        checkpoint: Load this file's weights.

    Returns:
        The model and where its weights come from, in words. Without any they are random, but always the same.

    Raises:
        UsageError: There is no such model, it does not take that size, or the weights can't be had.
    """
    if pretrained and checkpoint:
        raise UsageError('choose one of --pretrained and --checkpoint')
    check_model_name(name)
    cfg = get_pretrained_cfg(name)
    kwargs = {'img_size': two_sides(img_size)} if img_size and cfg and cfg.fixed_input_size else {}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build_model(name, pretrained=pretrained, **kwargs).eval()
    except UsageError:
        raise
    except Exception as e:  # sizes that do not fit, no weights, no network
        raise UsageError(f"cannot build '{name}': {first_line(e)}") from e
    if checkpoint:
        _load_checkpoint(model, name, checkpoint)
        return model, checkpoint.name
    if not pretrained:
        return model, 'untrained'
    untrained_attention = (model.pretrained_cfg.get('tag') or '').endswith('untrained_attn')
    return model, 'pretrained, but the attention untrained' if untrained_attention else 'pretrained'


def _load_checkpoint(model: nn.Module, name: str, checkpoint: Path) -> None:
    """Loads a checkpoint, official or of timm's kinds, without its classifier, which pictures don't need."""
    state_dict = select_state_dict(read_checkpoint(checkpoint), use_ema=None)
    classifier = model.pretrained_cfg['classifier']
    classifiers = tuple(f'{c}.' for c in ([classifier] if isinstance(classifier, str) else classifier or []))
    family = sys.modules[model_entrypoint(model.pretrained_cfg['architecture']).__module__]
    try:
        model.reset_classifier(0)
        if hasattr(family, 'checkpoint_filter_fn'):
            state_dict = family.checkpoint_filter_fn(state_dict, model)
        model.load_state_dict({k: v for k, v in state_dict.items() if not k.startswith(classifiers)})
    except Exception as e:  # a checkpoint of another model fails in many ways
        raise UsageError(f"cannot load '{checkpoint}' into '{name}': {first_line(e)}") from e


def load_picture(
        path: Path,
        model: nn.Module,
        img_size: Sequence[int] | None = None,
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
    image = create_transform(**{**config, 'crop_pct': 1., 'crop_mode': 'squash'})(picture)
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
        if form.matrix is not None:
            arrays |= {
                f'{name}.matrix': form.matrix.numpy(), f'{name}.singular_values': form.singular_values.numpy(),
                f'{name}.rank': np.array(form.rank)}
    return arrays
