"""Linear attention in place of the softmax attention of timm's ViTs, over their (B, N, C) tokens."""

from typing import Any, NamedTuple

import torch
from timm.layers import apply_rot_embed_cat, get_device_dtype
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn

from ..layers import EfficientAttention, FocusedLinearAttention, FocusedLinearCore

__all__ = ['EfficientTokenAttention', 'FocusedTokenAttention', 'Grid', 'LinearParallelScalingBlock', 'check_unmasked']


class Grid(NamedTuple):
    """Grid of the patch tokens, which the blocks of a network for images of any size hand on as `attn_mask`: linear
    attention has no matrix to mask.
    """

    height: int
    width: int


@torch.fx.wrap  # timm's networks have masks as arguments, of which symbolic tracing does not know that they are None
def check_unmasked(attn_mask: torch.Tensor | None, is_causal: bool) -> None:
    """Raises a ValueError if attention is to be masked."""
    if attn_mask is not None or is_causal:
        raise ValueError('linear attention has no attention matrix: attn_mask and is_causal must be unset')


def joint_projection(attn: nn.Module) -> nn.Linear:
    """The projection to queries, keys and values of any attention of timm's, as one layer.

    It is the attention's own if that is one. Otherwise it has the same weights, and biases if any of the three has;
    keys and values that several heads share are laid out once for each.
    """
    joint = attn.qkv is not None
    parts = [attn.qkv] if joint else [attn.q_proj, attn.k_proj, attn.v_proj]
    biases = [part.bias for part in parts]
    if joint and getattr(attn, 'q_bias', None) is not None:
        biases = [attn.q_bias, attn.k_bias, attn.v_bias]
    elif joint:
        return attn.qkv
    weights = [weight for part in parts for weight in part.weight.chunk(3 if joint else 1)]
    has_bias = any(bias is not None for bias in biases)
    attn_dim, head_dim = attn.proj.in_features, attn.proj.in_features // attn.num_heads
    qkv = nn.utils.skip_init(nn.Linear, parts[0].in_features, 3 * attn_dim, bias=has_bias, **get_device_dtype(attn))

    def for_each_head(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, [-1, head_dim]).repeat_interleave(attn_dim // len(x), dim=0).flatten(0, 1)

    with torch.no_grad():
        qkv.weight.copy_(torch.cat([for_each_head(weight) for weight in weights]))
        if has_bias:
            biases = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
            qkv.bias.copy_(torch.cat([for_each_head(bias) for bias in biases]))
    return qkv.requires_grad_(parts[0].weight.requires_grad)


def linear_part(linear: nn.Linear, part: int, parts: int = 3) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Weight, bias (zero if there is none) and whether both are trainable, of one of the fused parts of a linear."""
    weight = linear.weight.chunk(parts)[part]
    bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.chunk(parts)[part]
    return weight, bias, linear.weight.requires_grad


def take_over(new: Any, attn: nn.Module) -> None:
    """Give a new attention what another one has around its projections."""
    for name in ('q_norm', 'k_norm', 'norm'):
        setattr(new, name, getattr(attn, name, nn.Identity()))
    new.gate = getattr(attn, 'gate', None)
    new.rotate_half = getattr(attn, 'rotate_half', False)
    new.proj_drop = attn.proj_drop


def rotate_patches(x: torch.Tensor, rope: torch.Tensor, num_prefix_tokens: int, half: bool) -> torch.Tensor:
    """Rotary embedding of (B, heads, N, d) queries or keys but for the first tokens."""
    patches = apply_rot_embed_cat(x[:, :, num_prefix_tokens:], rope, half=half)
    return torch.cat([x[:, :, :num_prefix_tokens], patches], dim=2)


def find_grid(
    grid_size: tuple[int, int], dynamic_grid_size: bool, attn_mask: torch.Tensor | None, is_causal: bool
) -> tuple[int, int]:
    """The grid that comes in the place of a mask, or the only one that there is.

    Raises:
        ValueError: Attention is to be masked, or the grid is missing.
    """
    if not torch.jit.is_scripting() and isinstance(attn_mask, Grid):
        return attn_mask
    check_unmasked(attn_mask, is_causal)
    if dynamic_grid_size:
        raise ValueError(
            'the grid of these tokens is not known: call forward_features or forward_intermediates of the network, not '
            'its blocks'
        )
    return grid_size


class FocusedTokenAttention(FocusedLinearAttention):
    """Focused linear attention over the tokens of a ViT: (B, num_prefix_tokens + H · W, dim) to the same shape.

    Prefix tokens attend and are attended to like the others; positional encoding and depthwise convolution are of the
    patches alone. Norms of queries and keys and the rotary embedding come before the focused function.
    """

    def __init__(
        self,
        attn: nn.Module,
        grid_size: tuple[int, int],
        num_prefix_tokens: int = 0,
        dynamic_grid_size: bool = False,
        rotary: bool = False,
        **kwargs,
    ):
        """
        Args:
            attn: The attention to take over: its projections, norms, gate and dropout become those of this one.
            grid_size: Native grid of the patches.
            num_prefix_tokens: Number of first tokens that are no patches.
            dynamic_grid_size: Accept any grid, which must then come with every call.
            rotary: A rotary embedding will come with every call.
            **kwargs: focusing_factor and kernel_size.
        """
        qkv = joint_projection(attn)
        super().__init__(
            qkv.in_features,
            num_heads=attn.num_heads,
            head_dim=attn.proj.in_features // attn.num_heads,
            grid_size=grid_size,
            dynamic_grid_size=dynamic_grid_size,
            **kwargs,
            **get_device_dtype(attn),
        )
        self.num_prefix_tokens = num_prefix_tokens
        self.rotary = rotary
        self.qkv = qkv
        take_over(self, attn)
        self.proj = attn.proj

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """What a BEiT calls when its grid changes."""
        self.set_grid_size(window_size)

    def project(
        self, x: torch.Tensor, rope: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of all tokens, (B, N, num_heads · head_dim) each."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = self.q_norm(q.unflatten(-1, [self.num_heads, -1])), self.k_norm(k.unflatten(-1, [self.num_heads, -1]))
        if rope is not None:
            q = rotate_patches(q.transpose(1, 2), rope, self.num_prefix_tokens, self.rotate_half).transpose(1, 2)
            k = rotate_patches(k.transpose(1, 2), rope, self.num_prefix_tokens, self.rotate_half).transpose(1, 2)
        return q.flatten(2), k.flatten(2), v

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        shared_rel_pos_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps tokens to tokens.

        Args:
            x: (B, num_prefix_tokens + H · W, dim).
            rope: Rotary embedding of an Eva.
            attn_mask: None, or the `Grid`.
            is_causal: False.
            shared_rel_pos_bias: Of a BEiT, whose other blocks may want it: ignored.
        """
        height, width = find_grid(self.grid_size, self.dynamic_grid_size, attn_mask, is_causal)
        q, k, v = self.project(x, rope)
        out = self.norm(self.attend_tokens(q, k, v, height, width, self.num_prefix_tokens))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    @torch.jit.ignore
    def patch_maps(self, x: torch.Tensor, rope: Any = None, attn_mask: Any = None, *_: Any) -> list[torch.Tensor]:
        """Queries, keys and values of the patches, each (B, H, W, channels), in a call with these arguments."""
        grid_size = find_grid(self.grid_size, self.dynamic_grid_size, attn_mask, False)
        return [y[:, self.num_prefix_tokens :].unflatten(1, grid_size) for y in self.project(x, rope)]

    def reparameterize(self) -> None:
        """Folds what can be: the scale is no part of a projection that something else follows."""
        if not self.rotary and all(isinstance(norm, nn.Identity) for norm in (self.q_norm, self.k_norm)):
            super().reparameterize()


class EfficientTokenAttention(EfficientAttention):
    """Efficient attention over the tokens of a ViT: (B, N, dim) to the same shape.

    Norms of queries and keys and the rotary embedding come before the softmax functions.
    """

    def __init__(self, attn: nn.Module, num_prefix_tokens: int = 0):
        """
        Args:
            attn: The attention to take over: weights of its projections, its norms, gate and dropout.
            num_prefix_tokens: Number of first tokens that are no patches.
        """
        qkv, attn_dim = joint_projection(attn), attn.proj.in_features
        super().__init__(
            qkv.in_features,
            key_dim=attn_dim,
            value_dim=attn_dim,
            num_heads=attn.num_heads,
            residual=False,
            spatial_dims=1,
            **get_device_dtype(attn),
        )
        q, k, v = (linear_part(qkv, part) for part in range(3))
        convs = {self.queries: q, self.keys: k, self.values: v, self.reprojection: linear_part(attn.proj, 0, 1)}
        for conv, (weight, bias, trainable) in convs.items():
            with torch.no_grad():
                conv.weight.copy_(weight.unsqueeze(-1))
                conv.bias.copy_(bias)  # type: ignore[union-attr]  # all have one
            conv.requires_grad_(trainable)
        self.num_prefix_tokens = num_prefix_tokens
        take_over(self, attn)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """What a BEiT calls when its grid changes, which is nothing here."""

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        shared_rel_pos_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps tokens to tokens; arguments as in `FocusedTokenAttention`."""
        check_unmasked(attn_mask, is_causal)
        q, k, v = self.project(x.transpose(1, 2))
        heads = [x.shape[0], self.num_heads]
        q, k = self.q_norm(q.unflatten(0, heads).transpose(2, 3)), self.k_norm(k.unflatten(0, heads).transpose(2, 3))
        if rope is not None:
            q = rotate_patches(q, rope, self.num_prefix_tokens, self.rotate_half)
            k = rotate_patches(k, rope, self.num_prefix_tokens, self.rotate_half)
        out = self.attend(q.transpose(2, 3).flatten(0, 1), k.transpose(2, 3).flatten(0, 1), v)
        out = self.norm(out.reshape(x.shape[0], -1, x.shape[1]).transpose(1, 2))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.reprojection(out.transpose(1, 2)).transpose(1, 2))


class LinearParallelScalingBlock(ParallelScalingBlock):
    """timm's block whose attention and MLP share projections, with focused linear attention."""

    def __init__(self, block: ParallelScalingBlock, attn: FocusedLinearCore, num_prefix_tokens: int):
        """
        Args:
            block: The block to take over: all that it has becomes this one's.
            attn: What attends between the block's queries, keys and values.
            num_prefix_tokens: Number of first tokens that are no patches.
        """
        nn.Module.__init__(self)
        vars(self).update(vars(block))
        self.attn = attn
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        height, width = find_grid(self.attn.grid_size, self.attn.dynamic_grid_size, attn_mask, is_causal)
        mlp, q, k, v = self.in_proj(self.in_norm(x)).split(self.in_split, dim=-1)
        heads = [self.num_heads, self.head_dim]
        q, k = self.q_norm(q.unflatten(-1, heads)).flatten(2), self.k_norm(k.unflatten(-1, heads)).flatten(2)
        attended = self.attn.attend_tokens(q, k, v, height, width, self.num_prefix_tokens)
        if self.mlp_bias is not None:
            mlp = mlp + self.mlp_bias
        mlp = self.mlp_drop(self.mlp_act(mlp))
        if self.out_proj is not None:
            y = self.out_proj(torch.cat([attended, mlp], dim=-1))
        else:
            y = self.attn_out_proj(attended) + self.mlp_out_proj(mlp)
        return x + self.drop_path(self.ls(y))
