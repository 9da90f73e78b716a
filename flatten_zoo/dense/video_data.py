"""Videos with actions from a moment to another, annotated as ActivityNet's are."""

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from ..errors import UsageError, first_line, shown
from ..images import image_suffixes, naming, open_image
from .optional_packages import dense_extra

__all__ = ['ActivityNetClips']

_AMBIGUOUS = 'Ambiguous'  # THUMOS14's label of what may or may not be an action
_TOLERANCE = 0.5  # seconds: annotations and the ends of files are this exact
_MIN_INSIDE = 0.5  # of an action, in a clip that is to learn it


class _Video(NamedTuple):
    """A video as it is found when the data are opened.

    Attributes:
        name: In the annotations.
        path: A file, or a folder of images.
        images: Those of the folder, in their order; empty of a file.
        duration: In seconds.
        fps: Its own frames a second.
        actions: Start and end in seconds and label of each, inside the video.
    """

    name: str
    path: Path
    images: list[Path]
    duration: float
    fps: float
    actions: list[tuple[float, float, str]]


class _Span(NamedTuple):
    """Frames of a video, counted at the frame rate of the data."""

    video: _Video
    start: int
    end: int


class ActivityNetClips(Dataset):
    """Clips of videos, and the actions in them, from a folder with annotations in ActivityNet's format.

    `FOLDER/annotations.json` has under 'database', by the name of each video, its 'subset', 'duration' in seconds and
    'annotations', a list of 'segment' (start and end in seconds) and 'label'. The videos are in `FOLDER/videos`: a file
    `NAME.mp4` of any format that PyAV reads, or a folder `NAME` of images, which take the video's duration together;
    before NAME there may be `v_` as in ActivityNet.

    An item is a clip and a dictionary, as `rc3d` takes them. The clip is 3×T×H×W, float32, from 0 to 1. The dictionary
    has `segments` (N×2, float32, start and end in frames of the clip) and `labels` (N, int64, from 1: 0 is the
    background) of the actions that are at least half inside, cut where the clip ends; and `video`, `start` and `fps`:
    the clip's frame t is at `start + t / fps` seconds of that video. N may be 0. Segments with THUMOS14's label
    'Ambiguous' are no actions; `truth` has them.

    That every video is there and has a frame that can be read, and that its annotations lie inside it (half a second is
    let pass and cut off), is checked when the data are opened.

    Attributes:
        classes: Name of each label, 'background' first, in the order of the alphabet: the labels of all subsets.
        videos: Names of the subset's videos.

    Args:
        folder: The folder.
        subset: 'training', 'validation' or what else the annotations have.
        num_frames: Frames of a clip; a shorter video is one shorter clip. None for whole videos.
        step: Frames from one clip's start to the next one's, the last clip ending with the video; `num_frames` by
            default.
        fps: Frames a second, taken from the middle of equal parts of time; each video's own by default.
        transforms: Called with the T×3×H×W clip, as the transforms of `torchvision.transforms.v2`; what changes the
            number of frames is not for this.

    Raises:
        UsageError: A file is missing or is not what it should be, or PyAV, which video files need, is missing; the
            message names the file and the video. So does that of an item whose file turns out to be damaged.
        ValueError: `num_frames`, `step` or `fps` is not positive.
    """

    def __init__(
        self,
        folder: str | Path,
        subset: str = 'training',
        num_frames: int | None = None,
        step: int | None = None,
        fps: float | None = None,
        transforms: Callable | None = None,
    ):
        for name, value in (('num_frames', num_frames), ('step', step), ('fps', fps)):
            if value is not None and not value > 0:
                raise ValueError(f'{name} must be positive, got {value}')
        self.transforms = transforms
        path = Path(folder) / 'annotations.json'
        database = _read(path)
        subsets = {entry['subset'] for entry in database.values()}
        if subset not in subsets:
            raise UsageError(f"'{path}' has no videos of subset {shown(subset)}, only of {', '.join(sorted(subsets))}")
        labels = {annotation['label'] for entry in database.values() for annotation in entry['annotations']}
        self.classes = ['background', *sorted(labels - {_AMBIGUOUS})]
        self._labels = {name: label for label, name in enumerate(self.classes) if label}
        places = _places(Path(folder) / 'videos')
        self._videos = {
            name: _open(name, entry, places, path) for name, entry in database.items() if entry['subset'] == subset
        }
        self.videos = list(self._videos)
        self._rate = {name: fps or video.fps for name, video in self._videos.items()}
        self._spans = []
        for video in self._videos.values():
            # what is left of half a frame and less is none
            count = max(1, math.ceil(video.duration * self._rate[video.name] - 0.5))
            length = min(num_frames or count, count)
            starts = range(0, count - length + (step or length), step or length)
            self._spans += [
                _Span(video, start, start + length) for start in sorted({min(s, count - length) for s in starts})
            ]

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, Any]]:
        video, start, end = self._spans[index]
        fps = self._rate[video.name]
        moments = (np.arange(start, end) + 0.5) / fps
        with naming(video.path):
            frames = _images(video, moments) if video.images else _frames(video.path, moments)
        clip = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255
        if self.transforms is not None:
            clip = self.transforms(clip)
        segments, labels = [], []
        for first, last, label in video.actions:
            inside = [min(max(moment * fps, start), end) - start for moment in (first, last)]
            if label != _AMBIGUOUS and inside[1] - inside[0] >= _MIN_INSIDE * (last - first) * fps:
                segments.append(inside)
                labels.append(self._labels[label])
        return clip.transpose(0, 1), {
            'segments': torch.tensor(segments, dtype=torch.float32).reshape(-1, 2),
            'labels': torch.tensor(labels, dtype=torch.int64),
            'video': video.name,
            'start': start / fps,
            'fps': fps,
        }

    def duration(self, video: str) -> float:
        """Seconds of a video."""
        return self._videos[video].duration

    def truth(self, video: str) -> dict[str, torch.Tensor]:
        """What is in a video, in seconds, as `TemporalScores` takes it: `segments`, `labels` and `ambiguous`."""
        actions = self._videos[video].actions
        known = [action for action in actions if action[2] != _AMBIGUOUS]
        unclear = [action for action in actions if action[2] == _AMBIGUOUS]
        return {
            'segments': torch.tensor([action[:2] for action in known], dtype=torch.float64).reshape(-1, 2),
            'labels': torch.tensor([self._labels[action[2]] for action in known], dtype=torch.int64),
            'ambiguous': torch.tensor([action[:2] for action in unclear], dtype=torch.float64).reshape(-1, 2),
        }


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The videos of a file of annotations, whose entries are of the right kinds."""
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError) as e:
        raise UsageError(f"cannot read annotations '{path}': {first_line(e)}") from e
    database = content.get('database') if isinstance(content, dict) else None
    if not isinstance(database, dict) or not database:
        raise UsageError(f"'{path}' has no videos under 'database', as ActivityNet's format has")
    for name, entry in database.items():
        if not isinstance(entry, dict) or not isinstance(entry.get('subset'), str):
            raise UsageError(f"'{path}': video {shown(name)} has no subset")
        annotations = entry.setdefault('annotations', [])
        if not isinstance(annotations, list):
            raise UsageError(f"'{path}': the annotations of video {shown(name)} are no list")
        for annotation in annotations:
            if not isinstance(annotation, dict) or not isinstance(annotation.get('label'), str):
                raise UsageError(f"'{path}': video {shown(name)} has an annotation without a label")
            segment = annotation.get('segment')
            if not isinstance(segment, list) or len(segment) != 2 or not all(map(_is_number, segment)):
                raise UsageError(f"'{path}': video {shown(name)} has segment {shown(segment)}, not a start and an end")
    return database


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9


def _places(folder: Path) -> dict[str, Path]:
    """Files and folders of videos by the names that annotations may give them."""
    places: dict[str, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = path.name if path.is_dir() else path.stem
        for key in {name, name.removeprefix('v_')}:
            if key in places:
                raise UsageError(f"both '{places[key]}' and '{path}' are video {shown(key)}")
            places[key] = path
    return places


def _open(name: str, entry: dict[str, Any], places: dict[str, Path], annotations: Path) -> _Video:
    if name not in places:
        raise UsageError(f"there is no video {shown(name)} in '{annotations.parent / 'videos'}' (of '{annotations}')")
    path, images = places[name], []
    with naming(path):
        if path.is_dir():
            suffixes = image_suffixes()
            images = sorted((p for p in path.iterdir() if p.suffix.lower() in suffixes), key=_in_order)
            if not images:
                raise ValueError('it has no frames: there are no images in it')
            with Image.open(images[0]):
                pass
            duration = entry.get('duration', 0)
            if not _is_number(duration) or duration <= 0:
                raise UsageError(f"'{annotations}': the duration of video {shown(name)} is {shown(duration)}")
            fps = len(images) / duration
        else:
            duration, fps = _length(path)
    actions = []
    for annotation in entry['annotations']:
        start, end = annotation['segment']
        if start < -_TOLERANCE or end > duration + _TOLERANCE or not start < end:
            raise UsageError(
                f"'{annotations}': segment {shown([start, end])} of video {shown(name)} is not within its "
                f"{duration:.2f} seconds ('{path}')"
            )
        start, end = max(start, 0), min(end, duration)
        if start < end:
            actions.append((start, end, annotation['label']))
    return _Video(name, path, images, duration, fps, actions)


def _in_order(path: Path) -> list[str | int]:
    """Numbers in names by their value: frame9 before frame10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r'(\d+)', path.name)]


def _images(video: _Video, moments: np.ndarray) -> np.ndarray:
    """T×H×W×3 pixels of the images that are shown at moments in seconds."""
    indices = np.minimum((moments * video.fps).astype(int), len(video.images) - 1)
    frames: dict[int, np.ndarray] = {}
    for index in indices.tolist():
        if index not in frames:
            with naming(video.images[index]):
                frames[index] = np.asarray(open_image(video.images[index]))
            size, first = frames[index].shape[:2], frames[int(indices[0])].shape[:2]
            if size != first:
                raise UsageError(
                    f"'{video.images[index]}' is {size[0]} × {size[1]}, but '{video.images[indices[0]]}' is "
                    f'{first[0]} × {first[1]}'
                )
    return np.stack([frames[index] for index in indices.tolist()])


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """A video file and the first video in it, by PyAV, with a `ValueError` for what it cannot read."""
    with dense_extra('video'):
        import av
    try:
        with av.open(path) as container:
            if not container.streams.video:
                raise ValueError('it has no frames: there is no video in it')
            yield container, container.streams.video[0]
    except av.FFmpegError as e:
        raise ValueError(e.strerror or first_line(e)) from e


def _length(path: Path) -> tuple[float, float]:
    """Seconds and frames a second of a video file, of which one frame is decoded."""
    with _opened(path) as (container, stream):
        frame = next(container.decode(stream), None)
        if frame is None:
            raise ValueError('it has no frames')
        seconds = stream.duration * stream.time_base if stream.duration else (container.duration or 0) / 1e6
        rate = stream.average_rate
        if frame.time is None or not rate or not seconds > 0:
            raise ValueError('it does not say how long it is and when its frames are shown')
        return float(seconds), float(rate)


def _frames(path: Path, moments: np.ndarray) -> np.ndarray:
    """T×H×W×3 pixels of the frames of a video file that are shown at moments in seconds, which ascend."""
    chosen: list[np.ndarray] = []
    with _opened(path) as (container, stream):
        stream.thread_type = 'AUTO'
        begin = float((stream.start_time or 0) * stream.time_base)
        container.seek(int((moments[0] + begin) / stream.time_base), stream=stream)  # to the key frame before it
        last = None
        for frame in container.decode(stream):
            # a frame is shown until the next one is
            while last is not None and len(chosen) < len(moments) and moments[len(chosen)] < frame.time - begin:
                chosen.append(last.to_ndarray(format='rgb24'))
            if len(chosen) == len(moments):
                break
            last = frame
        if last is None or (len(chosen) < len(moments) and moments[-1] > last.time - begin + _TOLERANCE):
            raise ValueError(f'it has no frame at {moments[-1]:.2f} seconds, though it says that it is longer')
        chosen += [last.to_ndarray(format='rgb24')] * (len(moments) - len(chosen))
    return np.stack(chosen)
