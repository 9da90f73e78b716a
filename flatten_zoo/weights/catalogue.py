"""What models there are, and where their weights come from."""

from pathlib import Path
from typing import Any

import timm
from huggingface_hub import try_to_load_from_cache
from timm.models import PretrainedCfg, get_arch_pretrained_cfgs, model_entrypoint
from torch.overrides import TorchFunctionMode

from ..models import RELEASES
from ..models._released import TAG, hub_repository
from ..models.linearized import LINEARIZED, name_of, resolve_arguments
from ..models.recorded import building
from .card import accuracy_text
from .official import cached_files

__all__ = ['describe', 'list_table', 'zoo_models']

PACKAGE = __name__.partition('.')[0]

# Building all of the networks to count would take `list` ten seconds; a test holds these against them.
PARAMETERS = {
    'ea_resnet50': 26_346_920,
    'ea_resnet101': 45_339_048,
    'ea_resnext101_32x4d': 44_967_592,
    'flatten_cswin_b': 74_867_032,
    'flatten_cswin_b_384': 78_369_112,
    'flatten_cswin_s': 35_451_752,
    'flatten_cswin_t': 21_201_768,
    'flatten_deit_s': 22_977_640,
    'flatten_deit_t': 6_190_888,
    'flatten_pvt_b': 50_648_168,
    'flatten_pvt_m': 37_241_192,
    'flatten_pvt_s': 21_669_224,
    'flatten_pvt_t': 12_149_480,
    'flatten_pvt_v2_b0': 3_594_824,
    'flatten_pvt_v2_b1': 12_931_240,
    'flatten_pvt_v2_b2': 22_548_264,
    'flatten_pvt_v2_b3': 38_273_832,
    'flatten_pvt_v2_b4': 51_836_968,
    'flatten_pvt_v2_b5': 67_061_544,
    'flatten_swin_b': 88_972_488,
    'flatten_swin_b_384': 91_433_928,
    'flatten_swin_s': 50_510_288,
    'flatten_swin_t': 29_192_384,
    'issa_resnet50': 27_177_000,
    'issa_resnet101': 46_169_128,
    'issa_resnext101_32x4d': 45_797_672,
    'nl_resnet50': 26_346_920,
    'nl_resnet101': 45_339_048,
    'nl_resnext101_32x4d': 44_967_592,
}


def zoo_models() -> list[str]:
    """Names of the zoo's models."""
    names = timm.list_models(exclude_filters=LINEARIZED)  # which stands for timm's own
    return [name for name in names if model_entrypoint(name).__module__.startswith(f'{PACKAGE}.')]


def list_table() -> tuple[list[str], list[list[str]]]:
    """Header and rows: every model, with parameters, native image size, tag, and the source of its weights."""
    rows = []
    for name in zoo_models():
        parameters = _millions(PARAMETERS[name])
        for cfg in get_arch_pretrained_cfgs(name).values():
            size = ' × '.join(map(str, cfg.input_size[1:]))
            rows.append([name, parameters, size, cfg.tag or '', weights_source(cfg)])
    return ['model', 'parameters', 'image', 'tag', 'weights'], rows


def _millions(count: int) -> str:
    return f'{count / 1e6:.2f} M'


def weights_source(cfg: PretrainedCfg) -> str:
    """Where `pretrained=True` takes weights from, in words."""
    repository = hub_repository(cfg)
    if repository:
        return f'hf-hub:{repository}'
    return cfg.url[0] if isinstance(cfg.url, tuple) else cfg.url or 'none'


class _Uninitialised(TorchFunctionMode):
    """Tensors stay as they are made: most of the time that a network on the meta device takes is its initialisation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        in_place = func.__name__.endswith('_') and not func.__name__.endswith('__')
        kwargs = kwargs or {}
        return (*args, *kwargs.values())[0] if in_place else func(*args, **kwargs)


def describe(name: str) -> list[tuple[str, str]]:
    """A model in pairs of what and how: its configuration, its weights, what of them is cached, reported accuracy."""
    with building(f"'{name}'"), _Uninitialised():
        arguments = resolve_arguments(name, device='meta')
        model = timm.create_model(**arguments)
    cfg: Any = PretrainedCfg(**arguments['pretrained_cfg'])
    release = RELEASES.get(model.pretrained_cfg['architecture']) if cfg.tag == TAG else None
    settings = cfg.to_dict(remove_source=True)
    facts = [
        ('model', '.'.join(filter(None, (name_of(model), cfg.tag)))),
        ('parameters', _millions(sum(p.numel() for p in model.parameters()))),
        ('feature maps', ', '.join(f'{f["num_chs"]} at stride {f["reduction"]}' for f in model.feature_info)),
        *(
            (key.replace('_', ' '), _text(value))
            for key, value in settings.items()
            if key not in ('architecture', 'tag', 'custom_load') and value not in (None, '')
        ),
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
