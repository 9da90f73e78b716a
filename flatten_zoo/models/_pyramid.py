"""What the zoo's own four-stage networks share: timm's contract around a sequence of stages."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import get_device_dtype, trunc_normal_
from timm.models import checkpoint_seq
from torch import nn

from .._timm import feature_take_indices
from ..layers.position_tensors import resample_positions
from ._arguments import check_arguments
from ._dilation import dilate

__all__ = ['PyramidStage', 'PyramidTransformer']

torch.fx.wrap('resample_positions')  # branches on sizes


class PyramidStage(nn.Module):
    """Patch embedding, position embedding if there is one, and blocks.

    Shape:
        - input: (B, C, H, W)
        - output: (B, C', H', W')
    """

    def __init__(self, patch_embed: nn.Module, blocks: Sequence[nn.Module], pos_embed: nn.Parameter | None = None):
        """
        Args:
            patch_embed: Maps (B, C, H, W) to (B, H', W', C').
            blocks: Each maps (B, H', W', C') to the same shape.
            pos_embed: Position embedding (1, H', W', C') of the native grid, resampled for others; None for none.
        """
        super().__init__()
        self.grad_checkpointing = False
        self.patch_embed = patch_embed
        self.pos_embed = pos_embed
        self.blocks = nn.Sequential(*blocks)
        if pos_embed is not None:
            trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(x)
        if self.pos_embed is not None:
            grid_size = (self.pos_embed.shape[1], self.pos_embed.shape[2])
            x = x + resample_positions(self.pos_embed, grid_size, x.shape[1], x.shape[2])
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq(self.blocks, x)
        else:
            x = self.blocks(x)
        return x.permute(0, 3, 1, 2)


class PyramidTransformer(nn.Module):
    """Stages of strides 4, 8, 16, … or less, a final norm, average pooling and a linear classifier."""

    def __init__(
        self,
        stages: Sequence[PyramidStage],
        dims: Sequence[int],
        strides: Sequence[int],
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        norm: nn.Module | None = None,
        device=None,
        dtype=None,
    ):
        """
        Args:
            stages: The stages, the first one taking the image.
            dims: Number of output channels of each stage.
            strides: Of the stages; where one is that of the stage before, the patch embedding is dilated.
            num_classes: Number of classes, 0 for no classifier.
            in_chans: Number of image channels.
            global_pool: 'avg', or '' for none.
            drop_rate: Dropout rate before the classifier.
            norm: Norm of the last stage's channels-last map, None for none.

        Raises:
            ValueError: Unknown global_pool.
        """
        super().__init__()
        self.num_classes = num_classes
        self.in_chans = in_chans
        self._set_global_pool(global_pool)
        self.num_features = self.head_hidden_size = dims[-1]
        self.feature_info: list[dict[str, Any]] = [
            dict(num_chs=dim, reduction=stride, module=f'stages.{i}')
            for i, (dim, stride) in enumerate(zip(dims, strides, strict=True))
        ]
        dilate([stage.patch_embed for stage in stages], strides)

        self.stages = nn.Sequential(*stages)
        self.norm = nn.Identity() if norm is None else norm
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._create_head(device=device, dtype=dtype)
        self.apply(self._init_weights)

    def _init_weights(self, m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            trunc_normal_(m.weight, std=0.02)
            if m.bias is not None:
                nn.init.zeros_(m.bias)

    def _set_global_pool(self, global_pool: str) -> None:
        if global_pool not in ('avg', ''):
            raise ValueError(f"global_pool must be 'avg' or '' (none), got '{global_pool}'")
        self.global_pool = global_pool

    def _create_head(self, **dd) -> nn.Module:
        return nn.Linear(self.num_features, self.num_classes, **dd) if self.num_classes > 0 else nn.Identity()

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """None but biases and norms, which timm exempts by itself: the authors decay position tensors and `scale`."""
        return set()

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        return dict(
            stem=r'^stages\.0\.(?:patch_embed|pos_embed)',
            blocks=r'^stages\.(\d+)'
            if coarse
            else [
                (r'^stages\.(\d+)\.(?:patch_embed|pos_embed)', (0,)),
                (r'^stages\.(\d+)\.blocks\.(\d+)', None),
                (r'^norm', (99999,)),
            ],
        )

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        stage: Any
        for stage in self.stages:
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a fresh one.

        Args:
            num_classes: Number of classes, 0 for no classifier.
            global_pool: 'avg' or '', None to keep.

        Raises:
            ValueError: One of them is none.
        """
        check_arguments(num_classes=num_classes)
        if global_pool is not None:
            self._set_global_pool(global_pool)
        self.num_classes = num_classes
        self.head = self._create_head(**get_device_dtype(self)).train(self.training)

    def forward_intermediates(
        self,
        x: torch.Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> list[torch.Tensor] | tuple[torch.Tensor, list[torch.Tensor]]:
        """Forward features that returns the maps of chosen stages.

        Args:
            x: Images, shape (B, C, H, W).
            indices: Last n stages if int, all if None, the named ones if a sequence.
            norm: Apply the final norm to the last stage's map.
            stop_early: Stop after the last stage that is asked for.
            output_fmt: 'NCHW', the only one.
            intermediates_only: Return the maps alone.

        Returns:
            The final features and the list of maps, or the maps alone.
        """
        assert output_fmt == 'NCHW', 'Output shape must be NCHW.'
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        last = len(self.stages) - 1
        intermediates = []
        for i, stage in enumerate(self.stages[: max_index + 1] if stop_early else self.stages):
            x = stage(x)
            final = self._norm(x) if i == last else x
            if i in take_indices:
                intermediates.append(final if norm else x)
        if intermediates_only:
            return intermediates
        return final, intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the intermediates at `indices` don't need; returns the indices of the stages kept."""
        kept, last = feature_take_indices(len(self.stages), indices)
        shorter = last + 1 < len(self.stages)
        if shorter:
            del self.stages[last + 1 :]
            self.num_features = self.head_hidden_size = self.feature_info[last]['num_chs']
        if shorter or prune_norm:
            self.norm = nn.Identity()
        if shorter or prune_head:
            self.reset_classifier(0, '')
        return kept

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Last stage's map, shape (B, C, H / 32, W / 32), or of the output stride."""
        return self._norm(self.stages(x))

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        """Logits (B, num_classes), or pooled features (B, C), of the last stage's map."""
        if self.global_pool == 'avg':
            x = x.mean(dim=(-2, -1))
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))
