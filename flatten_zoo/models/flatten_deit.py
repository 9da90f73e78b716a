"""FLatten-DeiT: DeiT with focused linear attention.

Papers:
    * `FLatten Transformer: Vision Transformer using Focused Linear Attention` (ICCV 2023)
        - https://arxiv.org/abs/2308.00442
    * `Training data-efficient image transformers & distillation through attention` (ICML 2021)
        - https://arxiv.org/abs/2012.12877
"""

from collections.abc import Sequence
from typing import Literal

import torch
from timm.layers import global_pool_nlc, resample_abs_pos_embed
from timm.models import build_model_with_cfg, checkpoint_seq, generate_default_cfgs, register_model, vision_transformer
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from ..layers.position_tensors import resample_positions
from ._arguments import CheckedClassifier, check_arguments
from ._features import check_feature_cls, check_out_indices
from ._flatten import fit_position_tensors, flatten_cfg, focused_twin, resolve_attn_types, unwrap_state_dict
from ._patch_embed import PatchEmbed

__all__ = ['FlattenViT']

torch.fx.wrap('resample_positions')  # branches on sizes


class FlattenViTBlock(nn.Module):
    """A ViT block over (B, H, W, dim) maps, with focused linear attention or its own."""

    linear: torch.jit.Final[bool]

    def __init__(
        self,
        block: nn.Module,
        attn_type: str,
        grid_size: tuple[int, int],
        dynamic_grid_size: bool = False,
        focusing_factor: float = 3,
        kernel_size: int = 5,
    ):
        """
        Args:
            block: timm's Block to take over: its norms, MLP and projections become part of this one.
            attn_type: 'linear' for focused linear attention, 'softmax' for the block's own.
            grid_size: Native grid of the tokens.
            dynamic_grid_size: Accept any grid.
            focusing_factor: Power of the focused function.
            kernel_size: Size of the attention's depthwise convolution.
        """
        super().__init__()
        self.linear = attn_type == 'linear'
        self.norm1 = block.norm1
        self.attn = block.attn
        if self.linear:
            self.attn = focused_twin(
                block.attn, grid_size, dynamic_grid_size, focusing_factor=focusing_factor, kernel_size=kernel_size
            )
        self.ls1 = block.ls1
        self.drop_path1 = block.drop_path1
        self.norm2 = block.norm2
        self.mlp = block.mlp
        self.ls2 = block.ls2
        self.drop_path2 = block.drop_path2

    def _attn(self, x: torch.Tensor) -> torch.Tensor:
        if self.linear:
            return self.attn(x)
        B, H, W, C = x.shape
        return self.attn(x.reshape(B, H * W, C)).reshape(B, H, W, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path1(self.ls1(self._attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class FlattenViT(CheckedClassifier, VisionTransformer):
    """Vision Transformer with focused linear attention, which needs to know the grid of its tokens.

    From patch embedding to pooling the tokens therefore stay a (B, H, W, C) map, which is also what `forward_features`
    returns. There are no prefix tokens.

    Weight decay spares biases, norms and, as in DeiT, `pos_embed`; not `scale` and `positional_encoding`, which the
    authors of focused linear attention decay.
    """

    output_fmt = 'NHWC'

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        *,
        attn_types: str | Sequence[str] = 'linear',
        focusing_factor: float = 3,
        kernel_size: int = 5,
        global_pool: Literal['', 'avg', 'avgmax', 'max', 'map', 'prr'] = 'avg',
        class_token: bool = False,
        embed_layer: type[nn.Module] = PatchEmbed,
        **kwargs,
    ):
        """
        Args:
            img_size: Image size (H, W).
            attn_types: 'linear' or 'softmax', for all blocks or for each.
            focusing_factor: Power of the focused function, linear blocks only.
            kernel_size: Size of the attention's depthwise convolution, linear blocks only.
            global_pool: As in timm, but not 'token'.
            class_token: False, the only possibility.
            embed_layer: Patch embedding layer.
            **kwargs: Arguments of timm's VisionTransformer. `attn_drop_rate` concerns the softmax blocks alone.

        Raises:
            ValueError: The arguments ask for prefix tokens, or for what the linear attention can't keep.
        """
        check_arguments(**kwargs)
        super().__init__(img_size, global_pool=global_pool, class_token=class_token, embed_layer=embed_layer, **kwargs)
        attn_types = resolve_attn_types(attn_types, len(self.blocks), 'blocks')
        flatten_blocks(self, attn_types, focusing_factor=focusing_factor, kernel_size=kernel_size)

    @torch.jit.ignore
    def set_input_size(self, img_size=None, patch_size=None) -> None:
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        for block in self.blocks:
            if block.linear:
                block.attn.set_grid_size(self.patch_embed.grid_size)

    def _pos_embed(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, W, C) map with position embedding, of the patch embedding's tokens or map."""
        grid_size = self.patch_embed.grid_size
        if not self.dynamic_img_size:
            x = x.reshape(x.shape[0], grid_size[0], grid_size[1], x.shape[-1])
        if self.pos_embed is not None:
            x = x + resample_positions(self.pos_embed, grid_size, x.shape[1], x.shape[2])
        return self.pos_drop(x)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """(B, H, W, C) map after the final norm. timm's attention masks make no sense here: no matrix to mask."""
        x = self.norm_pre(self._pos_embed(self.patch_embed(x)))
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq(self.blocks, x)
        else:
            x = self.blocks(x)
        return self.norm(x)

    def pool(self, x: torch.Tensor, pool_type: str | None = None) -> torch.Tensor:
        """Pool a (B, H, W, C) map to (B, C), or leave it as it is if the pooling is ''."""
        pool_type = self.global_pool if pool_type is None else pool_type
        if self.attn_pool is not None:
            return self.attn_pool(x.flatten(1, 2))
        if not pool_type:
            return x
        return global_pool_nlc(x.flatten(1, 2), pool_type=pool_type, num_prefix_tokens=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.forward_head(self.forward_features(x))

    @torch.jit.ignore
    def forward_intermediates(self, x: torch.Tensor, *args, output_fmt: str = 'NCHW', **kwargs):
        """timm's, whose 'NLC' means tokens."""
        out = super().forward_intermediates(x, *args, output_fmt=output_fmt, **kwargs)  # type: ignore[misc]  # not in args
        if output_fmt == 'NLC':
            maps = out if isinstance(out, list) else out['image_intermediates'] if isinstance(out, dict) else out[1]
            maps[:] = [y.flatten(1, 2) for y in maps]
        return out


def flatten_blocks(model: VisionTransformer, attn_types: Sequence[str], **kwargs) -> None:
    """Give the linear blocks of a ViT focused linear attention, and all of them tokens as maps, in place.

    Args:
        model: The network.
        attn_types: 'linear' or 'softmax' for each block.
        **kwargs: focusing_factor and kernel_size.

    Raises:
        ValueError: The model cannot be converted; the message says why, and the model is as it was.
    """
    check_grid(model)
    for block, attn_type in zip(model.blocks, attn_types, strict=True):
        if attn_type == 'linear':
            check_plain_attention(block.attn)
    model.blocks = nn.Sequential(
        *[
            FlattenViTBlock(block, attn_type, model.patch_embed.grid_size, model.dynamic_img_size, **kwargs)
            for block, attn_type in zip(model.blocks, attn_types, strict=True)
        ]
    )


def check_plain_attention(attn: nn.Module) -> None:
    """Raise a ValueError unless `attn` is timm's Attention with nothing but its projections."""
    if type(attn) is not vision_transformer.Attention:
        raise ValueError(f"cannot replace a {type(attn).__name__}: only timm's Attention")
    extras = {'q_norm': attn.q_norm, 'k_norm': attn.k_norm, 'norm': attn.norm, 'gate': attn.gate}
    extras = [name for name, module in extras.items() if not isinstance(module, nn.Identity | None)]
    if extras:
        raise ValueError(f'cannot replace an attention that has {", ".join(extras)}: linear attention has no such part')


def check_grid(model: VisionTransformer) -> None:
    """Raise a ValueError unless the model's tokens are a whole grid, in plain blocks."""
    if model.num_prefix_tokens:
        raise ValueError(
            f'focused linear attention needs tokens on a grid, and this ViT has {model.num_prefix_tokens} prefix '
            f'tokens; build it with class_token=False, reg_tokens=0'
        )
    if not isinstance(model.patch_drop, nn.Identity):
        raise ValueError('focused linear attention needs all tokens of the grid; build the ViT with patch_drop_rate=0')
    for block in model.blocks:
        if type(block) is not Block:
            raise ValueError(f"cannot convert a {type(block).__name__}: only timm's plain pre-norm ViT Block")


def checkpoint_filter_fn(checkpoint: dict, model: VisionTransformer) -> dict[str, torch.Tensor]:
    """timm's or the zoo's own checkpoint of a ViT without prefix tokens, to a state dict that fits the model."""
    state_dict = dict(unwrap_state_dict(checkpoint))
    grids = [value.shape[1:3] for key, value in state_dict.items() if key.endswith('.positional_encoding')]
    known = {}
    if grids and 'pos_embed' in state_dict:
        # timm must guess the grid behind a row of position embeddings; the zoo's encodings tell it
        known['pos_embed'] = resample_abs_pos_embed(
            state_dict.pop('pos_embed'), model.patch_embed.grid_size, grids[0], num_prefix_tokens=0
        )
    state_dict = vision_transformer.checkpoint_filter_fn(state_dict, model)
    return fit_position_tensors({**state_dict, **known}, model)


def _create_flatten_deit(variant: str, pretrained: bool = False, **kwargs) -> FlattenViT:
    check_arguments(**kwargs)
    check_feature_cls(kwargs.get('feature_cls', 'getter'))
    out_indices = kwargs.pop('out_indices', min(3, kwargs['depth']))
    check_out_indices(out_indices, kwargs['depth'])
    return build_model_with_cfg(
        FlattenViT,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),
        **kwargs,
    )


def _cfg(**kwargs) -> dict:
    return flatten_cfg(
        fixed_input_size=True, pool_size=(14, 14), first_conv='patch_embed.proj', classifier='head', **kwargs
    )


default_cfgs = generate_default_cfgs({'flatten_deit_t.untrained': _cfg(), 'flatten_deit_s.untrained': _cfg()})


@register_model
def flatten_deit_t(pretrained=False, **kwargs) -> FlattenViT:
    """FLatten-DeiT-T @ 224x224"""
    model_args = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
    return _create_flatten_deit('flatten_deit_t', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_deit_s(pretrained=False, **kwargs) -> FlattenViT:
    """FLatten-DeiT-S @ 224x224"""
    model_args = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
    return _create_flatten_deit('flatten_deit_s', pretrained=pretrained, **dict(model_args, **kwargs))
