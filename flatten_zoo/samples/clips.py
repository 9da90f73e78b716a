"""Generated clips in which shapes move, turn and blink for a while, annotated as ActivityNet's videos are.

A square and a triangle before a mottled background rest, except while one of them acts: a class is what is done,
whichever shape does it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flatten_zoo.errors import UsageError, report_usage_errors
from flatten_zoo.files import write_beside
from flatten_zoo.samples.shapes import far_colour, mottle, shape_mask

__all__ = ['ACTIONS', 'main', 'write_clips']

ACTIONS = ('move', 'turn', 'blink')
_CORNERS = (3, 4)  # of a clip's shapes
_MIN_FRAMES, _MIN_SIDE = 16, 32


def write_clips(
    folder: str | Path,
    num_clips: int = 240,
    held_out: int = 60,
    num_frames: int = 64,
    image_size: int = 48,
    fps: float = 8,
    seed: int = 0,
) -> bool:
    """Write `FOLDER/videos/NAME/*.png` and `FOLDER/annotations.json`, for `ActivityNetClips`.

    The clips to train on are the subset 'training', the others 'validation'; each has one to four actions, one after
    another, that take an eighth to a third of it. The same arguments always give the same data, and clip I is the same
    however many there are. The folder appears whole or not at all, and one that already holds this very data is left as
    it is.

    Args:
        folder: Folder to make.
        num_clips: Clips to train on.
        held_out: Other clips.
        num_frames: Frames of a clip, at least 16.
        image_size: Height and width of the frames in pixels, at least 32.
        fps: Frames a second.
        seed: Two seeds have no clip in common.

    Returns:
        Whether it was written now.

    Raises:
        UsageError: An argument is out of its range, or the folder exists and holds something else.
    """
    folder = Path(folder)
    for name, value, lowest in (
        ('num_clips', num_clips, 1),
        ('held_out', held_out, 1),
        ('num_frames', num_frames, _MIN_FRAMES),
        ('image_size', image_size, _MIN_SIDE),
        ('seed', seed, 0),
    ):
        if value < lowest:
            raise UsageError(f'{name} must be at least {lowest}, got {value}')
    if not fps > 0:
        raise UsageError(f'fps must be positive, got {fps}')
    info = {
        'description': 'generated clips',
        'num_clips': num_clips,
        'held_out': held_out,
        'num_frames': num_frames,
        'image_size': image_size,
        'fps': fps,
        'seed': seed,
    }
    if folder.exists():
        if _info(folder) != info:
            raise UsageError(f"'{folder}' exists but does not hold these clips: remove it or give another folder")
        return False
    database = {}
    with write_beside(folder) as temporary:
        for split, (subset, count) in enumerate((('training', num_clips), ('validation', held_out))):
            for i in range(count):
                frames, actions = _draw(np.random.default_rng([seed, split, i]), num_frames, image_size)
                name = f'{subset}_{i:05d}'
                (temporary / 'videos' / name).mkdir(parents=True)
                for j, pixels in enumerate(frames):
                    Image.fromarray(pixels).save(temporary / 'videos' / name / f'{j:05d}.png')
                database[name] = {
                    'subset': subset,
                    'duration': num_frames / fps,
                    'annotations': [
                        {'segment': [start / fps, end / fps], 'label': label} for start, end, label in actions
                    ],
                }
        (temporary / 'annotations.json').write_text(json.dumps({'info': info, 'database': database}))
    return True


def _info(folder: Path) -> dict[str, Any] | None:
    """What the folder's annotations say of themselves; None where there are none that can be read."""
    try:
        return json.loads((folder / 'annotations.json').read_text())['info']
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _draw(rng: np.random.Generator, num_frames: int, side: int) -> tuple[np.ndarray, list[tuple[int, int, str]]]:
    """One clip.

    Returns:
        Its T×H×W×3 pixels of 8 bits, and first frame, frame after the last one and name of each action.
    """
    background = rng.uniform(0.2, 0.8, size=3)
    frames = np.broadcast_to(background + mottle(rng, side, side), (num_frames, side, side, 3))
    actions = _schedule(rng, num_frames)
    actors = rng.integers(len(_CORNERS), size=len(actions))
    for shape, corners in enumerate(_CORNERS):
        colour = far_colour(rng, background)
        radius = rng.uniform(0.14, 0.22) * side
        own = [action for action, actor in zip(actions, actors, strict=True) if actor == shape]
        places, angles, seen = _act(rng, own, num_frames, radius, side)
        masks = np.stack(
            [
                shown & shape_mask(corners, place, radius, angle, side, side)
                for place, angle, shown in zip(places, angles, seen, strict=True)
            ]
        )
        frames = np.where(masks[..., None], colour, frames)
    frames = frames + rng.normal(scale=0.03, size=frames.shape)
    return np.rint(frames.clip(0, 1) * 255).astype(np.uint8), actions


def _schedule(rng: np.random.Generator, num_frames: int) -> list[tuple[int, int, str]]:
    """Actions one after another, with rests between them, as many as there is time for."""
    actions: list[tuple[int, int, str]] = []
    time = 0
    while True:
        length = int(rng.integers(num_frames // 8, num_frames // 3 + 1))
        start = time + int(rng.integers(num_frames // 6 + 1))
        end = start + length
        if end > num_frames:
            return actions
        actions.append((start, end, str(rng.choice(ACTIONS))))
        time = end + num_frames // 16


def _act(
    rng: np.random.Generator, schedule: list[tuple[int, int, str]], num_frames: int, radius: float, side: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Centre, angle and whether it is there of a shape in every frame."""
    steps, turns = np.zeros((num_frames, 2)), np.zeros(num_frames)
    seen = np.ones(num_frames, bool)
    for start, end, label in schedule:
        if label == 'move':
            direction = rng.uniform(0, 2 * np.pi)
            steps[start:end] = rng.uniform(0.04, 0.08) * side * np.array([np.sin(direction), np.cos(direction)])
        elif label == 'turn':
            turns[start:end] = rng.choice([-1, 1]) * rng.uniform(0.2, 0.4)
        else:
            period = rng.integers(2, 4)
            seen[start:end] = np.arange(end - start) // period % 2 == 1
    room = side - 2 * radius
    places = rng.uniform(0, room, size=2) + steps.cumsum(axis=0)
    places = radius + room - np.abs(places % (2 * room) - room)  # it turns back at the edges
    return places, rng.uniform(0, 2 * np.pi) + turns.cumsum(), seen


def main(argv: Sequence[str] | None = None) -> None:
    """Write clips where the command line says."""
    parser = argparse.ArgumentParser(
        prog='python -m flatten_zoo.samples.clips',
        description='Write generated clips of shapes that move, turn and blink, with their annotations.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument('folder', help='folder to make')
    parser.add_argument('--clips', type=int, default=240, metavar='N', help='clips to train on')
    parser.add_argument('--held-out', type=int, default=60, metavar='N', help='other clips')
    parser.add_argument('--frames', type=int, default=64, metavar='T', help='of a clip')
    parser.add_argument('--image-size', type=int, default=48, metavar='SIDE', help='of the frames in pixels')
    parser.add_argument('--fps', type=float, default=8, help='frames a second')
    parser.add_argument('--seed', type=int, default=0, help='of everything')
    args = parser.parse_args(argv)
    written = write_clips(args.folder, args.clips, args.held_out, args.frames, args.image_size, args.fps, args.seed)
    done = 'written to' if written else 'already in'
    print(f'{args.clips} training and {args.held_out} held-out clips {done} {args.folder}')


if __name__ == '__main__':
    sys.exit(report_usage_errors(main))
