"""Timm's ViTs, telling linear attention the grid of their patch tokens.

Blocks work on (B, N, C) tokens, whose number does not tell the grid. A network for one size of images has one grid,
which its attentions hold and `set_input_size` changes. In one for any size (`dynamic_img_size`) each forward pass has
its own, so that it must come with every call, and come again where gradient checkpointing calls a block once more: it
is bound to the blocks when the pass begins, and kept nowhere else.
"""

from collections.abc import Callable
from typing import Any

import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ..layers import FocusedLinearCore
from ._token_attention import Grid, check_unmasked

__all__ = ['tell_grids']

torch.fx.wrap('check_unmasked')


def on_grid(block: nn.Module, grid: Grid) -> Callable[..., torch.Tensor]:
    """A block with a grid bound to its attention, if that is linear."""
    if not any(isinstance(module, FocusedLinearCore) for module in block.modules()):
        return block

    # Dynamo of torch 2.9 cannot make a function with `torch.Tensor | None` in its annotations
    def call(x: torch.Tensor, attn_mask: Any = None, is_causal: bool = False, **kwargs) -> torch.Tensor:
        check_unmasked(attn_mask, is_causal)
        return block(x, attn_mask=grid, **kwargs)

    return call


class Blocks(list):
    """Blocks as functions, which timm calls one by one, or one after the other."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x)
        return x


class Pass:
    """A network in one forward pass: as it is, but with its blocks on the grid of the pass."""

    def __init__(self, network: nn.Module):
        self.network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def _pos_embed(self, x: torch.Tensor) -> Any:
        grid = Grid(x.shape[1], x.shape[2])
        self.blocks = Blocks([on_grid(block, grid) for block in self.network.blocks])
        return self.network._pos_embed(x)


class GridNetwork(nn.Module):
    """Mixin of networks whose attentions hold their grid."""

    @torch.jit.ignore
    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        super().set_input_size(img_size=img_size, patch_size=patch_size)  # type: ignore[misc]  # of the network beside the mixin
        for module in self.modules():
            if isinstance(module, FocusedLinearCore):
                module.set_grid_size(self.patch_embed.grid_size)


class AnyGridNetwork(GridNetwork):
    """Mixin of networks for any grid; `timm_class` is the network without it."""

    timm_class: Any

    def forward_features(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.timm_class.forward_features(Pass(self), x, *args, **kwargs)

    @torch.jit.ignore
    def forward_intermediates(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.timm_class.forward_intermediates(Pass(self), x, *args, **kwargs)


class GridViT(GridNetwork, VisionTransformer):
    """VisionTransformer for one size of images."""


class GridDistilledViT(GridNetwork, VisionTransformerDistilled):
    """VisionTransformerDistilled for one size of images."""


class GridEva(GridNetwork, Eva):
    """Eva for one size of images."""


class AnyGridViT(AnyGridNetwork, VisionTransformer):
    """VisionTransformer for any size of images."""

    timm_class = VisionTransformer


class AnyGridDistilledViT(AnyGridNetwork, VisionTransformerDistilled):
    """VisionTransformerDistilled for any size of images."""

    timm_class = VisionTransformerDistilled


class AnyGridEva(AnyGridNetwork, Eva):
    """Eva for any size of images."""

    timm_class = Eva


NETWORKS = {
    VisionTransformer: (GridViT, AnyGridViT),
    VisionTransformerDistilled: (GridDistilledViT, AnyGridDistilledViT),
    Eva: (GridEva, AnyGridEva),
}


def tell_grids(model: nn.Module) -> None:
    """Have a network tell its attentions their grid, in place. A BEiT does so by itself."""
    if type(model) in NETWORKS:
        model.__class__ = NETWORKS[type(model)][model.dynamic_img_size]
