"""Which attention becomes linear: converting a network in parts, and choosing them by error and cost."""

import copy
from collections.abc import Mapping, Sequence

from timm.models.pvt_v2 import PyramidVisionTransformerV2
from torch import nn

from ..cost.counting import count
from ..errors import UsageError
from ..models import replace_attention

__all__ = ['at_size', 'choose_kept', 'converted_copy', 'costs', 'keep_costliest', 'part_of']


def converted_copy(
    teacher: nn.Module, attention: str, where: Sequence[int] | None, img_size: tuple[int, int]
) -> nn.Module:
    """A copy of a network, with other attention in some of its parts, all of it to be trained.

    Args:
        teacher: The network.
        attention, where: As in `replace_attention`.
        img_size: Size (H, W) of the images, which the teacher takes.

    Raises:
        UsageError: It cannot be converted.
    """
    size = {'img_size': img_size} if isinstance(teacher, PyramidVisionTransformerV2) else {}
    try:
        student = replace_attention(copy.deepcopy(teacher), attention, where, **size)
    except ValueError as e:
        raise UsageError(str(e)) from e
    return student.requires_grad_()


def part_of(name: str) -> int:
    """Index of the part, a block of a ViT or a stage of the others, that a module is in; as in `where`."""
    return int(next(part for part in name.split('.') if part.isdigit()))


def at_size(model: nn.Module, size: int) -> nn.Module:
    """A copy of a network for square images of that size."""
    model = copy.deepcopy(model)
    if hasattr(model, 'set_input_size'):
        model.set_input_size((size, size))
    return model


def costs(
    teacher: nn.Module, attention: str, parts: Sequence[int], img_size: tuple[int, int], size: int
) -> tuple[int, dict[int, int]]:
    """Multiply-accumulates for an image: of the teacher, and how many fewer if one part has linear attention.

    Args:
        teacher, attention, img_size: As in `converted_copy`.
        parts: Which to look at.
        size: Side of the image.
    """

    def macs(model: nn.Module) -> int:
        return count(at_size(model, size).to('meta'), (1, teacher.in_chans, size, size)).macs

    before = macs(teacher)
    return before, {part: before - macs(converted_copy(teacher, attention, [part], img_size)) for part in parts}


def keep_costliest(errors: Mapping[int, float], number: int) -> list[int]:
    """The parts whose error is largest, so many of them, in order."""
    return sorted(sorted(errors, key=errors.__getitem__, reverse=True)[:number])


def choose_kept(errors: Mapping[int, float], savings: Mapping[int, int], affordable: float) -> list[int]:
    """The parts that stay as they are, so that those which do not err least altogether; exact, not greedy.

    Args:
        errors: What each part errs by with linear attention.
        savings: What each part saves with it, in multiply-accumulates.
        affordable: What may be left unsaved, altogether.

    Returns:
        Their indices, in order.
    """
    best: list[tuple[int, float, tuple[int, ...]]] = [
        (0, 0.0, ())
    ]  # unsaved cost, error avoided, parts: of the sets that no other beats in both
    for part, error in errors.items():
        further = [(cost + savings[part], avoided + error, (*kept, part)) for cost, avoided, kept in best]
        best, sets = [], sorted([*best, *further], key=lambda entry: (entry[0], -entry[1]))
        for entry in sets:
            if not best or entry[1] > best[-1][1]:
                best.append(entry)
    return sorted(max((entry for entry in best if entry[0] <= affordable), key=lambda entry: entry[1])[2])
