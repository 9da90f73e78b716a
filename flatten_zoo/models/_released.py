"""The released models: where their official weights are, what these reach, and how `pretrained=True` gets them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from timm.models import PretrainedCfg, build_model_with_cfg, resolve_pretrained_cfg
from torch import nn

from ..errors import UsageError

__all__ = ['RELEASES', 'TAG', 'Release', 'build_released_model', 'hub_repository', 'official_url', 'use_hub']

Network = TypeVar('Network', bound=nn.Module)
TAG = 'leaplab_in1k'
HUB_VARIABLE = 'FLATTEN_ZOO_HUB'
SHARE = 'https://cloud.tsinghua.edu.cn/f/{}/?dl=1'


@dataclass(frozen=True)
class Release:
    """Official ImageNet-1K weights of a model, and the accuracy in percent that the authors report for them."""

    address: str
    top1: float
    top5: float | None = None


RELEASES = {
    'flatten_pvt_t': Release(SHARE.format('3ab1d773f19d45648690'), 77.758, 93.910),
    'flatten_pvt_v2_b0': Release(SHARE.format('5d1f01532b104da28e7b'), 71.098, 90.596),
    'flatten_swin_t': Release(SHARE.format('e1518e76703e4e57a7f2'), 82.106, 95.900),
    'flatten_swin_s': Release(SHARE.format('94188e52af354bf4a88b'), 83.5),
    'flatten_swin_b': Release(SHARE.format('7a9e5186bad04e7fb3a9'), 83.8),
    'flatten_swin_b_384': Release(SHARE.format('0d0330cf2e5249f1abb6'), 85.0),
    'flatten_cswin_t': Release(SHARE.format('48ba765ba8b0451d9d5a'), 83.130, 96.376),
}
"""Models with official weights: the file's `address`, and the authors' `top1` and `top5` (None if they say none)."""


def official_url(model_name: str) -> tuple[str, str]:
    """A released model's `url` in its pretrained configuration: (address, file name), as the address has no name."""
    return RELEASES[model_name].address, f'{model_name}.{TAG}.pth'


def use_hub(account: str | None) -> None:
    """Take the released weights from an account's copies on the Hub, as `FLATTEN_ZOO_HUB=account` does.

    Args:
        account: The account that has a repository `<model>.<tag>` for each; None for the official files again.

    Raises:
        UsageError: That is no account's name.
    """
    if account is None:
        os.environ.pop(HUB_VARIABLE, None)
        return
    _check_account(account)
    os.environ[HUB_VARIABLE] = account


def _check_account(account: str) -> None:
    if not account or '/' in account or ':' in account:
        raise UsageError(f"{HUB_VARIABLE}='{account}' must be the name of one account on the Hub, without '/'")


def hub_repository(cfg: PretrainedCfg) -> str | None:
    """The Hub repository that has a released model's weights: its own, or that of `FLATTEN_ZOO_HUB`; None if neither"""
    account = os.environ.get(HUB_VARIABLE)
    if cfg.hf_hub_id or not account or not _is_official(cfg.url):
        return cfg.hf_hub_id
    _check_account(account)
    return f'{account}/{cfg.architecture}.{cfg.tag}'


def _is_official(url: str | tuple[str, str] | None) -> bool:
    return isinstance(url, (tuple, list))  # timm itself loads plain addresses alone


def _weights_source(cfg: PretrainedCfg, cache_dir: str | Path | None) -> dict:
    """What to overlay on a pretrained configuration for timm to find its weights; timm's own sources come first."""
    if cfg.state_dict or cfg.file or cfg.hf_hub_id or not _is_official(cfg.url):
        return {}
    if repository := hub_repository(cfg):
        return {'hf_hub_id': repository}
    from ..weights import official_weights  # only here, and late: reading and converting files builds on the networks

    return {'file': str(official_weights(cfg, cache_dir))}


def build_released_model(
    model_cls: type[Network],
    variant: str,
    pretrained: bool,
    pretrained_cfg: Any = None,  # as in timm: a tag, a dictionary or a PretrainedCfg
    pretrained_cfg_overlay: dict | None = None,
    cache_dir: str | Path | None = None,
    **kwargs,
) -> Network:
    """timm's `build_model_with_cfg`, for families some of whose weights are official files."""
    if pretrained:
        cfg = resolve_pretrained_cfg(variant, pretrained_cfg, pretrained_cfg_overlay)
        pretrained_cfg_overlay = {**(pretrained_cfg_overlay or {}), **_weights_source(cfg, cache_dir)}
    return build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        pretrained_cfg=pretrained_cfg,
        pretrained_cfg_overlay=pretrained_cfg_overlay,
        cache_dir=cache_dir,
        **kwargs,
    )
