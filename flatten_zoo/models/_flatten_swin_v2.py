"""Swin Transformer V2 with focused linear attention."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import get_device_dtype
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Block, WindowAttention
from torch import nn

from ..layers import FocusedLinearAttention
from ._token_attention import joint_projection

__all__ = ['flatten_stages']


class FocusedCosineAttention(FocusedLinearAttention):
    """Focused linear attention between the directions of queries and keys: (B, H, W, dim) to the same shape.

    As in cosine attention, each head's queries and keys have norm 1 before anything else. Its temperature has no
    counterpart: a factor of all logits is one of all queries, which the normalizer cancels.
    """

    def __init__(self, attn: WindowAttention, grid_size: tuple[int, int], dynamic_grid_size: bool, **kwargs):
        """
        Args:
            attn: The attention to take over: its projections and dropout become those of this one.
            grid_size: Native grid.
            dynamic_grid_size: Accept any grid.
            **kwargs: focusing_factor and kernel_size.
        """
        super().__init__(
            attn.dim,
            num_heads=attn.num_heads,
            grid_size=grid_size,
            dynamic_grid_size=dynamic_grid_size,
            **kwargs,
            **get_device_dtype(attn),
        )
        self.qkv = joint_projection(attn)
        self.proj, self.proj_drop = attn.proj, attn.proj_drop

    def _directions(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, [self.num_heads, -1])
        return F.normalize(heads, dim=-1, eps=1e-6).flatten(-2)  # timm's 1e-12 is none in half precision

    def patch_maps(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each (B, H, W, dim)."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self._directions(q), self._directions(k), v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.patch_maps(x)
        return self.proj_drop(self.proj(self.attend(q, k, v)))

    def reparameterize(self) -> None:
        """Folds nothing: the scale is no part of a projection that a norm follows."""


class FlattenSwinV2Block(nn.Module):
    """A Swin V2 block whose attention is focused linear: over the whole (B, H, W, dim) map, no windows or mask."""

    def __init__(self, block: SwinTransformerV2Block, attn: FocusedCosineAttention):
        """
        Args:
            block: The block to take over: its norms and MLP become part of this one.
            attn: Its attention.
        """
        super().__init__()
        self.attn = attn
        self.norm1 = block.norm1
        self.drop_path1 = block.drop_path1
        self.mlp = block.mlp
        self.norm2 = block.norm2
        self.drop_path2 = block.drop_path2

    @torch.jit.ignore
    def set_input_size(
        self, feat_size: tuple[int, int], window_size: tuple[int, int], always_partition: bool | None = None
    ) -> None:
        """Resample the positional encoding; windows are those of the softmax stages."""
        self.attn.set_grid_size(feat_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path1(self.norm1(self.attn(x)))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


def flatten_stages(model: SwinTransformerV2, attn_types: Sequence[str], **kwargs) -> None:
    """Give the linear stages of a Swin V2 focused linear attention, in place.

    Args:
        model: The network.
        attn_types: 'linear' or 'softmax' for each stage.
        **kwargs: focusing_factor and kernel_size.

    Raises:
        ValueError: A linear stage has other blocks than Swin V2's; the model is as it was.
    """
    linear_stages = [stage for stage, attn_type in zip(model.layers, attn_types, strict=True) if attn_type == 'linear']
    for stage in linear_stages:
        for block in stage.blocks:
            if type(block) is not SwinTransformerV2Block:
                raise ValueError(f'cannot convert a {type(block).__name__}: only a SwinTransformerV2Block')
    for stage in linear_stages:
        stage.blocks = nn.ModuleList(
            [
                FlattenSwinV2Block(
                    block, FocusedCosineAttention(block.attn, block.input_resolution, block.dynamic_mask, **kwargs)
                )
                for block in stage.blocks
            ]
        )
