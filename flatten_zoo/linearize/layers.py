"""The attention of two networks side by side: the teacher's softmax, and the student's that is to take its place."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..models._token_attention import FocusedTokenAttention, Grid, LinearParallelScalingBlock

__all__ = ['LayerErrors', 'converted', 'relative_error', 'trainable']

NEW = r'(attn\.)?(positional_encoding|scale|dwc\.(weight|bias))'  # besides projections
QUERIES_KEYS = r'((qkv|q|k|kv|queries|keys|q_proj|k_proj|q_norm|k_norm)\.(weight|bias)|[qk]_bias)'

Call = tuple[tuple, dict[str, Any], torch.Tensor]  # arguments, keyword arguments and output


def converted(teacher: nn.Module, student: nn.Module) -> list[str]:
    """Names of the attention modules that are other ones in the student than in the teacher, in order."""
    before = dict(teacher.named_modules())
    names = [name for name, module in student.named_modules() if type(module) is not type(before.get(name, module))]
    return [name for name in names if name and not any(other.startswith(f'{name}.') for other in names)]


def relative_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """‖output − target‖² / ‖target‖² for each image, in float32.

    Args:
        output: (B, …).
        target: As many values of each image, perhaps in another shape.

    Returns:
        (B,).
    """
    output, target = output.flatten(1).float(), target.flatten(1).float()
    return (output - target).square().sum(1) / target.square().sum(1).clamp(min=torch.finfo(torch.float32).tiny)


@contextmanager
def listening(network: nn.Module, names: list[str]) -> Iterator[dict[str, Call]]:
    """Within, what attention modules are called with and return, by name, with each pass of the network.

    Swin's attention is over windows of shifted maps; there it is what surrounds it, the block's `_attn`, from map to
    map.
    """
    heard, hooks, blocks = {}, [], []

    def hear(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: torch.Tensor) -> None:
        heard[name] = args, kwargs, output

    def attend(name: str, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output = type(block)._attn(block, x)  # type: ignore[attr-defined]  # of Swin's blocks
        heard[name] = (x,), {}, output
        return output

    for name in names:
        block = network.get_submodule(name.rpartition('.')[0])
        if hasattr(block, '_attn'):
            block._attn = partial(attend, name, block)  # type: ignore[assignment]  # in the place of a method
            blocks.append(block)
        else:
            hook = network.get_submodule(name).register_forward_hook(partial(hear, name), with_kwargs=True)
            hooks.append(hook)
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()
        for block in blocks:
            del block._attn


def attend_alike(
    attention: nn.Module, args: tuple, kwargs: dict[str, Any], grid: tuple[int, int] | None
) -> torch.Tensor:
    """What the student's attention makes of what the teacher's was called with.

    Args:
        attention: The student's.
        args, kwargs: Of the call.
        grid: Of the patches, in a ViT for images of any size; its attentions get it in the place of a mask.
    """
    if grid and isinstance(attention, FocusedTokenAttention | LinearParallelScalingBlock):
        kwargs = {**kwargs, 'attn_mask': Grid(*grid)}
    return attention(*args, **kwargs)


class LayerErrors(nn.Module):
    """Maps images (B, C, H, W) to the relative squared error of every converted attention, (B, layers).

    One pass of the teacher serves all: each attention of the student gets what the teacher's own gets, and is to give
    what that gives. No gradient goes from one to another.
    """

    def __init__(self, teacher: nn.Module, student: nn.Module):
        """
        Args:
            teacher: The network as it was trained, which stays in inference mode.
            student: The same with other attention.
        """
        super().__init__()
        self.teacher = teacher
        self.student = student
        self.names = converted(teacher, student)

    def train(self, mode: bool = True) -> 'LayerErrors':
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), listening(self.teacher, self.names) as heard:
            self.teacher(images)
        dynamic = getattr(self.student, 'dynamic_img_size', False)
        grid = self.student.patch_embed.dynamic_feat_size(images.shape[-2:]) if dynamic else None
        errors = []
        for name in self.names:
            args, kwargs, target = heard[name]
            output = attend_alike(self.student.get_submodule(name), args, kwargs, grid)
            errors.append(relative_error(output, target))
        return torch.stack(errors, dim=1)


@contextmanager
def trainable(student: nn.Module, names: list[str], what: str) -> Iterator[list[str]]:
    """Within, some parameters alone are trained.

    Args:
        student: The network.
        names: Its converted attention modules.
        what: 'new' for what they have besides projections, 'queries-keys' for these and the projections to queries and
            keys, 'attention' for all that they have, 'all' for all of the network. Where values share a matrix with
            queries and keys, 'queries-keys' keeps its part for them as it is.

    Returns:
        The names of the parameters.
    """
    pattern = {'new': NEW, 'queries-keys': f'{NEW}|{QUERIES_KEYS}', 'attention': '.+', 'all': '.+'}[what]
    before = {name: parameter.requires_grad for name, parameter in student.named_parameters()}
    chosen, hooks = [], []
    for name, parameter in student.named_parameters():
        owner = '' if what == 'all' else next((f'{n}.' for n in names if name.startswith(f'{n}.')), None)
        parameter.requires_grad_(owner is not None and bool(re.fullmatch(pattern, name.removeprefix(owner))))
        if parameter.requires_grad:
            chosen.append(name)
            if what == 'queries-keys' and re.search(r'\b(qkv|kv)\.', name):
                hooks.append(parameter.register_hook(partial(_without_values, 3 if 'qkv' in name else 2)))
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(before[name])


def _without_values(parts: int, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a fused projection of which the values, its last part, stay as they are."""
    *others, values = gradient.chunk(parts)
    return torch.cat([*others, torch.zeros_like(values)])
