"""Models to the files that others load: timm's Hub layout, bare safetensors, official files."""

import json
import os
import tempfile
from pathlib import Path

import torch
from timm.models import save_for_hf
from torch import nn

from ..errors import UsageError
from ..files import write_beside
from .card import model_card
from .checkpoint import write_safetensors
from .official_names import to_official

__all__ = ['HUB_FILES', 'save_model', 'write_weights']

HUB_FILES = ('README.md', 'config.json', 'model.safetensors')


def save_model(model: nn.Module, folder: Path, name: str) -> None:
    """Write a model in timm's Hub layout: `model.safetensors`, `config.json` and a model card.

    Args:
        model: The model.
        folder: Where to write; other files there are left alone.
        name: Title of the model card.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f'.{folder.name}.') as temporary:
        cfg = model.pretrained_cfg
        save_for_hf(
            model,
            temporary,
            safe_serialization=True,
            model_config={'pretrained_cfg': {'tag': cfg.get('tag')}, 'label_names': cfg.get('label_names')},
        )
        config = json.loads(Path(temporary, 'config.json').read_text())
        config['pretrained_cfg'].pop('label_names', None)  # they stand above it
        config['model_args'].pop('num_classes')  # stands above them, and transformers takes it from there
        Path(temporary, 'config.json').write_text(json.dumps(config, indent=2) + '\n')
        parameters = sum(p.numel() for p in model.parameters())
        Path(temporary, 'README.md').write_text(model_card(config, parameters, name), encoding='utf-8')
        folder.mkdir(exist_ok=True)
        for file in HUB_FILES:
            os.replace(Path(temporary, file), folder / file)


def write_weights(model: nn.Module, output: Path, official: bool = False) -> None:
    """Write a model's weights.

    Args:
        model: The model.
        output: File that ends in `.safetensors` for the tensors alone, or in `.pth` for a checkpoint of the official
            repository, otherwise a folder for timm's Hub layout.
        official: Use the names and shapes of the official repository.

    Raises:
        UsageError: The output can't be of that kind, or be written.
    """
    if official != (output.suffix == '.pth') and output.suffix != '.safetensors':
        raise UsageError(
            f"-o '{output}': official checkpoints are files, with --to official and a name that ends in .pth or "
            f'.safetensors; everything else is a folder, or a file that ends in .safetensors'
        )
    try:
        if output.suffix == '.safetensors':
            write_safetensors(to_official(model) if official else model.state_dict(), output)
        elif official:
            with write_beside(output) as temporary:
                torch.save({'model': to_official(model)}, temporary)
        else:
            save_model(model, output, name=output.resolve().name)
    except OSError as e:
        raise UsageError(f"-o '{output}': {e}") from e
