"""What models there are, and where their weights come from."""
from pathlib import Path

import timm
from huggingface_hub import try_to_load_from_cache
from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg, model_entrypoint
from timm.models._pretrained import PretrainedCfg
from torch import nn

from ..models import RELEASES
from ..models._released import TAG, hub_repository
from .card import accuracy_text
from .official import cached_files

__all__ = ['describe', 'list_table', 'zoo_models']

PACKAGE = __name__.partition('.')[0]


def zoo_models() -> list[str]:
    """Names of the zoo's models."""
    return [name for name in timm.list_models() if model_entrypoint(name).__module__.startswith(f'{PACKAGE}.')]


def list_table() -> tuple[list[str], list[list[str]]]:
    """Header and rows: every model, with parameters, native image size, tag, and the source of its weights."""
    rows = []
    for name in zoo_models():
        parameters = _parameters(timm.create_model(name, device='meta'))
        for cfg in get_arch_pretrained_cfgs(name).values():
            size = ' × '.join(map(str, cfg.input_size[1:]))
            rows.append([name, parameters, size, cfg.tag or '', weights_source(cfg)])
    return ['model', 'parameters', 'image', 'tag', 'weights'], rows


def _parameters(model: nn.Module) -> str:
    return f'{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M'


def weights_source(cfg: PretrainedCfg) -> str:
    """Where `pretrained=True` takes weights from, in words."""
    repository = hub_repository(cfg)
    if repository:
        return f'hf-hub:{repository}'
    return cfg.url[0] if isinstance(cfg.url, tuple) else cfg.url or 'none'


def describe(name: str) -> list[tuple[str, str]]:
    """A model in pairs of what and how: its configuration, its weights, what of them is cached, reported accuracy."""
    cfg = get_pretrained_cfg(name)
    model = timm.create_model(name, device='meta')
    release = RELEASES.get(cfg.architecture) if cfg.tag == TAG else None
    settings = cfg.to_dict(remove_source=True)
    facts = [
        ('model', '.'.join(filter(None, (cfg.architecture, cfg.tag)))),
        ('parameters', _parameters(model)),
        ('feature maps', ', '.join(f'{f["num_chs"]} at stride {f["reduction"]}' for f in model.feature_info)),
        *((key.replace('_', ' '), _text(value)) for key, value in settings.items()
          if key not in ('architecture', 'tag', 'custom_load') and value not in (None, '')),
        ('weights', weights_source(cfg)),
        ('cached', ', '.join(f'{path} ({path.stat().st_size / 1e6:.1f} MB)' for path in _cached(cfg)) or 'nothing'),
    ]
    if release:
        facts.append(('reported accuracy', f'{accuracy_text(release)} on ImageNet-1K'))
    return facts


def _text(value: object) -> str:
    return ', '.join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _cached(cfg: PretrainedCfg) -> list[Path]:
    repository = hub_repository(cfg)
    if repository:
        path = try_to_load_from_cache(repository, 'model.safetensors')
        return [Path(path)] if isinstance(path, str) else []
    files = cached_files(cfg) if isinstance(cfg.url, tuple) else ()
    return [path for path in files if path.exists()]
