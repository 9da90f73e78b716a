"""FLatten-Swin: Swin Transformer with focused linear attention in its first stages.

Papers:
    * `FLatten Transformer: Vision Transformer using Focused Linear Attention` (ICCV 2023)
        - https://arxiv.org/abs/2308.00442
    * `Swin Transformer: Hierarchical Vision Transformer using Shifted Windows` (ICCV 2021)
        - https://arxiv.org/abs/2103.14030
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import generate_default_cfgs, register_model, swin_transformer
from timm.models.swin_transformer import PatchMerging, SwinTransformer, SwinTransformerBlock
from torch import nn

from ._arguments import CheckedClassifier, check_arguments
from ._dilation import dilations, stage_strides
from ._features import check_feature_cls, check_out_indices
from ._flatten import (
    fit_position_tensors,
    flatten_cfg,
    flatten_position_tensors,
    focused_twin,
    resolve_attn_types,
    unwrap_state_dict,
)
from ._padding import crop_windows, pad_to_windows
from ._patch_embed import PatchEmbed
from ._released import build_released_model, official_url

__all__ = ['FlattenSwin']

torch.fx.wrap('pad_to_windows')  # these look at sizes
torch.fx.wrap('crop_windows')


class FlattenSwinBlock(nn.Module):
    """A Swin block whose attention is focused linear: over the whole (B, H, W, dim) map, no window, shift or mask."""

    def __init__(self, block: SwinTransformerBlock, focusing_factor: float = 3, kernel_size: int = 5):
        """
        Args:
            block: The block to take over: its norms, MLP and projections become part of this one.
            focusing_factor: Power of the focused function.
            kernel_size: Size of the attention's depthwise convolution.
        """
        super().__init__()
        self.norm1 = block.norm1
        self.attn = focused_twin(
            block.attn,
            block.input_resolution,
            block.dynamic_mask,
            focusing_factor=focusing_factor,
            kernel_size=kernel_size,
        )
        self.drop_path1 = block.drop_path1
        self.norm2 = block.norm2
        self.mlp = block.mlp
        self.drop_path2 = block.drop_path2

    @torch.jit.ignore
    def set_input_size(
        self, feat_size: tuple[int, int], window_size: tuple[int, int], always_partition: bool | None = None
    ) -> None:
        """Resample the positional encoding; windows are those of the softmax stages."""
        self.attn.set_grid_size(feat_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


def shift_regions(size: int, window: int, shift: int, device: torch.device) -> torch.Tensor:
    """Windows × positions: which of the regions that a shift brings together a position along one side is from."""
    positions = torch.arange(size, device=device)
    return ((positions >= size - window).int() + (positions >= size - shift).int()).reshape(-1, window)


def shift_mask(x: torch.Tensor, window_size: tuple[int, int], shift_size: tuple[int, int]) -> torch.Tensor:
    """timm's attention mask of shifted windows over a (B, H, W, C) map, in a form that symbolic tracing follows.

    In the last windows, positions that the shift brought together from opposite borders do not attend to each other.
    """
    rows = shift_regions(x.shape[1], window_size[0], shift_size[0], x.device)
    columns = shift_regions(x.shape[2], window_size[1], shift_size[1], x.device)
    region = 3 * rows[:, None, :, None] + columns[None, :, None, :]
    region = region.flatten(2).flatten(0, 1)
    return (region[:, None] != region[:, :, None]).to(x.dtype) * -100


class WindowBlock(SwinTransformerBlock):
    """timm's Swin block, with its windows laid out so that a graph can leave the image size open."""

    def __init__(self, block: SwinTransformerBlock):
        """
        Args:
            block: The block to take over: all that it has becomes this one's.
        """
        nn.Module.__init__(self)
        vars(self).update(vars(block))

    def _attn(self, x: torch.Tensor) -> torch.Tensor:
        B, H, W, C = x.shape
        rows = (H + self.window_size[0] - 1) // self.window_size[0]
        columns = (W + self.window_size[1] - 1) // self.window_size[1]
        H_padded, W_padded = rows * self.window_size[0], columns * self.window_size[1]
        has_shift = any(self.shift_size)
        if has_shift:
            x = torch.roll(x, shifts=(-self.shift_size[0], -self.shift_size[1]), dims=(1, 2))
        unpadded = x
        x = pad_to_windows(x, [self.window_size[0], self.window_size[1]])
        if has_shift and self.dynamic_mask:
            attn_mask = shift_mask(x, self.window_size, self.shift_size)
        else:
            attn_mask = self.attn_mask
        x = x.reshape(B, rows, self.window_size[0], columns, self.window_size[1], C).transpose(2, 3)
        x = self.attn(x.reshape(B * rows * columns, self.window_area, C), mask=attn_mask)
        x = x.reshape(B, rows, columns, self.window_size[0], self.window_size[1], C).transpose(2, 3)
        x = crop_windows(x.reshape(B, H_padded, W_padded, C), unpadded)
        if has_shift:
            x = torch.roll(x, shifts=(self.shift_size[0], self.shift_size[1]), dims=(1, 2))
        return x


class FlattenPatchMerging(nn.Module):
    """timm's patch merging, with a padded size that stays a short expression in such a graph, and dilation."""

    def __init__(self, merging: PatchMerging, dilation: int | None = None):
        """
        Args:
            merging: The patch merging to take over.
            dilation: Merge positions that far apart, at every position; None for neighbours, at every other one.
        """
        super().__init__()
        self.norm = merging.norm
        self.reduction = merging.reduction
        self.dilation = dilation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, H, W, C = x.shape
        if self.dilation is not None:
            d = self.dilation
            x = F.pad(x, (0, 0, 0, d, 0, d))
            x = torch.cat([x[:, :H, :W], x[:, d:, :W], x[:, :H, d:], x[:, d:, d:]], dim=-1)
        else:
            rows, columns = (H + 1) // 2, (W + 1) // 2
            x = pad_to_windows(x, [2, 2])
            x = x.reshape(B, rows, 2, columns, 2, C).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduction(self.norm(x))


def dilate_stages(model: SwinTransformer, output_stride: int) -> None:
    """Let the stages of a fresh Swin stride no further than `output_stride`, in place; windows are of as many positions

    Raises:
        ValueError: output_stride is not 8, 16 or 32.
    """
    patch_size = model.feature_info[0]['reduction']
    strides = stage_strides(len(model.layers), output_stride, patch_size)
    for i, dilation in dilations(strides).items():
        stage: Any = model.layers[i]
        stage.downsample = FlattenPatchMerging(stage.downsample, dilation)
        scale = strides[i] // patch_size
        stage.input_resolution = stage.output_resolution = tuple(-(-n // scale) for n in model.patch_embed.grid_size)
        for block in stage.blocks:
            block.set_input_size(stage.output_resolution, model._ref_window_sizes[i])
        model.feature_info[i]['reduction'] = strides[i]


def flatten_stages(model: SwinTransformer, attn_types: Sequence[str], **kwargs) -> None:
    """Give the linear stages of a Swin focused linear attention, in place.

    Args:
        model: The network.
        attn_types: 'linear' or 'softmax' for each stage.
        **kwargs: focusing_factor and kernel_size.

    Raises:
        ValueError: A linear stage has other blocks than Swin's; the model is as it was.
    """
    linear_stages = [stage for stage, attn_type in zip(model.layers, attn_types, strict=True) if attn_type == 'linear']
    for stage in linear_stages:
        for block in stage.blocks:
            if type(block) not in (SwinTransformerBlock, WindowBlock):
                raise ValueError(f'cannot convert a {type(block).__name__}: only a SwinTransformerBlock')
    for stage in linear_stages:
        stage.blocks = nn.Sequential(*[FlattenSwinBlock(block, **kwargs) for block in stage.blocks])


class FlattenSwin(CheckedClassifier, SwinTransformer):
    """Swin Transformer with focused linear attention over the whole grid in its linear stages.

    It is built for one size of images, `img_size`, and windows of `window_size`. The two ways to other sizes give
    different results, as their windows differ:

    * `set_input_size` changes the one size, and the windows of the softmax stages with it, in proportion: 7 × 7 at 224
      become 12 × 12 at 384. Position tensors and window tables are resampled. This is how the authors fine-tune at a
      larger size: meant for training and evaluating at one other size.
    * `dynamic_img_size=True` takes images of any size, in the windows that the network was built with, padded where
      they do not fit; position tensors are resampled on the fly. This is how Swin serves detection and segmentation:
      meant for images whose sizes vary.

    Weight decay spares biases, norms and window tables; as in the official training not `scale` and
    `positional_encoding`.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        *,
        attn_types: str | Sequence[str] = ('linear', 'linear', 'softmax', 'softmax'),
        focusing_factor: float = 3,
        kernel_size: int = 5,
        embed_layer: type[nn.Module] = PatchEmbed,
        output_stride: int = 32,
        **kwargs,
    ):
        """
        Args:
            img_size: Image size (H, W).
            attn_types: 'linear' or 'softmax', for all stages or for each.
            focusing_factor: Power of the focused function, linear stages only.
            kernel_size: Size of the attention's depthwise convolution, linear stages only.
            embed_layer: Patch embedding layer.
            output_stride: 32, or 8 or 16: then the last patch mergings are dilated instead of striding further, and the
                image size cannot be set later.
            **kwargs: Arguments of timm's SwinTransformer. Those of windows and attention dropout concern the softmax
                stages alone.
        """
        check_arguments(**{'depths': (2, 2, 6, 2), **kwargs})
        super().__init__(img_size, embed_layer=embed_layer, **kwargs)
        dilate_stages(self, output_stride)
        attn_types = resolve_attn_types(attn_types, self.num_layers)
        flatten_stages(self, attn_types, focusing_factor=focusing_factor, kernel_size=kernel_size)
        for stage, attn_type in zip(self.layers, attn_types, strict=True):  # timm's have no argument for these classes
            if attn_type == 'softmax':
                stage.blocks = nn.Sequential(*map(WindowBlock, stage.blocks))
            if isinstance(stage.downsample, PatchMerging):
                stage.downsample = FlattenPatchMerging(stage.downsample)

    @torch.jit.ignore
    def set_input_size(self, *args, **kwargs) -> None:
        """timm's; a ValueError where patch mergings are dilated."""
        if any(getattr(stage.downsample, 'dilation', None) is not None for stage in self.layers):
            raise ValueError(
                'this Swin has an output_stride below 32, and keeps its image size; build it with img_size=, or with '
                'dynamic_img_size=True for any'
            )
        super().set_input_size(*args, **kwargs)


def checkpoint_filter_fn(checkpoint: dict, model: nn.Module) -> dict[str, torch.Tensor]:
    """Official FLatten-Swin checkpoint, or the zoo's own, to a state dict that fits the model.

    Raises:
        ValueError: The checkpoint has window attention in a stage where the model has linear attention.
    """
    state_dict = unwrap_state_dict(checkpoint)
    parameters = dict(model.named_parameters())
    for key in state_dict:
        if key.endswith('relative_position_bias_table') and key not in parameters:
            raise ValueError(
                f"the checkpoint has window attention where the model has none ('{key}'); "
                f'build the model with the attn_types of the checkpoint'
            )
    return fit_position_tensors(swin_transformer.checkpoint_filter_fn(state_dict, model), model)


def official_state_dict(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The zoo's state dict under official names and shapes."""
    official = {}
    for key, value in flatten_position_tensors(state_dict).items():
        key = re.sub(r'^head\.fc\.', 'head.', key)
        # patch merging is the start of a stage in timm, the end of the one before in the official network
        key = re.sub(r'^layers\.(\d)\.downsample\.', lambda m: f'layers.{int(m[1]) - 1}.downsample.', key)
        official[key] = value
    return official


def official_extras(model: FlattenSwin) -> dict[str, torch.Tensor]:
    """What official checkpoints hold besides: the buffers of window attention."""
    return {
        key: value for key, value in model.named_buffers() if key.endswith(('relative_position_index', 'attn_mask'))
    }


def _create_flatten_swin(variant: str, pretrained: bool = False, **kwargs) -> FlattenSwin:
    check_arguments(**kwargs)
    check_feature_cls(kwargs.get('feature_cls', 'getter'))
    out_indices = kwargs.pop('out_indices', tuple(range(len(kwargs['depths']))))
    check_out_indices(out_indices, len(kwargs['depths']))
    return build_released_model(
        FlattenSwin,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls='getter'),  # maps in NCHW, like every other backbone
        **kwargs,
    )


def _cfg(**kwargs) -> dict:
    return flatten_cfg(fixed_input_size=True, first_conv='patch_embed.proj', classifier='head.fc', **kwargs)


default_cfgs = generate_default_cfgs(
    {
        'flatten_swin_t.leaplab_in1k': _cfg(url=official_url('flatten_swin_t')),
        'flatten_swin_s.leaplab_in1k': _cfg(url=official_url('flatten_swin_s')),
        'flatten_swin_b.leaplab_in1k': _cfg(url=official_url('flatten_swin_b')),
        'flatten_swin_b_384.leaplab_in1k': _cfg(
            url=official_url('flatten_swin_b_384'), input_size=(3, 384, 384), pool_size=(12, 12), crop_pct=1.0
        ),
    }
)


@register_model
def flatten_swin_t(pretrained=False, **kwargs) -> FlattenSwin:
    """FLatten-Swin-T @ 224x224"""
    model_args = dict(window_size=7, embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24))
    return _create_flatten_swin('flatten_swin_t', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_swin_s(pretrained=False, **kwargs) -> FlattenSwin:
    """FLatten-Swin-S @ 224x224"""
    model_args = dict(window_size=7, embed_dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24))
    return _create_flatten_swin('flatten_swin_s', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_swin_b(pretrained=False, **kwargs) -> FlattenSwin:
    """FLatten-Swin-B @ 224x224"""
    model_args = dict(window_size=7, embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32))
    return _create_flatten_swin('flatten_swin_b', pretrained=pretrained, **dict(model_args, **kwargs))


@register_model
def flatten_swin_b_384(pretrained=False, **kwargs) -> FlattenSwin:
    """FLatten-Swin-B @ 384x384"""
    model_args = dict(window_size=12, embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32))
    return _create_flatten_swin('flatten_swin_b_384', pretrained=pretrained, **dict(model_args, **kwargs))
