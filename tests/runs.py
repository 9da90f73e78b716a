"""Runs of training: what they draw, and comparing what they left."""

from pathlib import Path

import torch
from matplotlib.figure import Figure


def save_no_picture(figure: Figure, path: Path, **kwargs) -> None:
    """In place of `Figure.savefig`: drawing the curves is most of a short training."""
    path.write_bytes(b'a picture')


def assert_same(ours, theirs, name='checkpoint'):
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), name
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), name
        for key in ours:
            if (name, key) != ('checkpoint', 'args'):
                assert_same(ours[key], theirs[key], f'{name}.{key}')
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), name
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same(*pair, f'{name}.{index}')
    else:
        assert ours == theirs, name


def assert_same_end(folder, other) -> None:
    """Both runs left the same checkpoints, bit by bit, and the same table."""
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    assert (folder / 'summary.csv').read_bytes() == (other / 'summary.csv').read_bytes()
    for name in names:
        if name.endswith('.pth.tar'):
            assert_same(*(checkpoint_of(f / name) for f in (folder, other)))


def checkpoint_of(path) -> dict:
    checkpoint = torch.load(path, weights_only=True)
    history = checkpoint['saver']['checkpoint_files']  # may name a file that the same save went on to remove
    checkpoint['saver']['checkpoint_files'] = [entry for entry in history if (path.parent / entry[0]).exists()]
    return checkpoint
