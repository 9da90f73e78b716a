"""Generated clips, and the reader of videos annotated as ActivityNet's are."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from flatten_zoo.dense import ActivityNetClips, write_clips
from flatten_zoo.errors import UsageError
from flatten_zoo.samples import clips


@pytest.fixture(scope='module')
def generated(tmp_path_factory):
    folder = tmp_path_factory.mktemp('clips') / 'data'
    assert write_clips(folder, 6, 3, 32, 32, fps=4)
    return folder


def grey_frames(count):
    """Frames whose brightness is their number."""
    return np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None] * 10, (count, 16, 16, 3))


def write_images(folder, count):
    folder.mkdir(parents=True)
    for i, frame in enumerate(grey_frames(count)):
        Image.fromarray(frame).save(folder / f'frame{i}.png')  # without leading zeros


def write_video(path, count, rate, codec='ffv1'):
    av = pytest.importorskip('av')
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), 'w') as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width = stream.height = 16
        stream.pix_fmt = {'ffv1': 'bgr0', 'mpeg4': 'yuv420p'}[codec]
        for frame in grey_frames(count):
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format='rgb24')):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def annotate(folder, **entries):
    database = {name: {'subset': 'training', **entry} for name, entry in entries.items()}
    (folder / 'annotations.json').write_text(json.dumps({'database': database}))


def action(start, end, label='jump'):
    return {'segment': [start, end], 'label': label}


def numbers(clip):
    """The numbers of a clip's frames."""
    return (clip[0, :, 8, 8] * 25.5).round().int().tolist()


def test_generated_clips_are_what_they_say(generated):
    """Between two frames pixels change more where a shape acts than where all rest."""
    data = ActivityNetClips(generated)
    assert data.classes == ['background', *sorted(clips.ACTIONS)] and len(data) == 6
    assert len(ActivityNetClips(generated, 'validation')) == 3
    acting, resting = [], []
    for clip, target in data:
        assert clip.shape == (3, 32, 32, 32) and clip.dtype == torch.float32 and 0 <= clip.min() < clip.max() <= 1
        assert target['fps'] == 4 and target['start'] == 0 and target['segments'].dtype == torch.float32
        busy = torch.zeros(32, dtype=torch.bool)
        for start, end in target['segments'].tolist():
            assert start == int(start) and 0 <= start < end <= 32
            busy[int(start) : int(end)] = True
        change = clip.diff(dim=1).abs().mean((0, 2, 3))
        still = ~(busy[1:] | busy[:-1])
        resting += change[still].tolist()
        acting += change[busy[1:] & busy[:-1]].tolist()
    assert max(resting) < np.mean(acting)


def test_generated_clips_are_the_same_whatever_their_number(generated, tmp_path):
    assert not write_clips(generated, 6, 3, 32, 32, fps=4)
    write_clips(tmp_path / 'fewer', 2, 1, 32, 32, fps=4)
    name = 'videos/training_00001/00007.png'
    assert (tmp_path / 'fewer' / name).read_bytes() == (generated / name).read_bytes()
    write_clips(tmp_path / 'other', 2, 1, 32, 32, fps=4, seed=1)
    assert (tmp_path / 'other' / name).read_bytes() != (generated / name).read_bytes()
    with pytest.raises(UsageError, match='exists but does not hold these clips'):
        write_clips(generated, 6, 3, 32, 32, fps=5)


@pytest.mark.parametrize(
    'kwargs, message',
    [
        ({'num_clips': 0}, 'num_clips must be at least 1, got 0'),
        ({'num_frames': 15}, 'num_frames must be at least 16, got 15'),
        ({'image_size': 31}, 'image_size must be at least 32, got 31'),
        ({'fps': 0}, 'fps must be positive, got 0'),
    ],
)
def test_bad_arguments_of_generated_clips(tmp_path, kwargs, message):
    with pytest.raises(UsageError, match=message):
        write_clips(tmp_path / 'data', **kwargs)


def test_command(tmp_path, capsys):
    clips.main([str(tmp_path / 'data'), '--clips', '1', '--held-out', '1', '--frames', '16', '--image-size', '32'])
    assert '1 training and 1 held-out clips written to' in capsys.readouterr().out
    assert len(ActivityNetClips(tmp_path / 'data', 'validation')) == 1


@pytest.mark.parametrize('kind', ['images', 'ffv1', 'mpeg4'])
def test_frames_and_actions(tmp_path, kind):
    """23 frames at 8 a second, as images and as a file, whole and in clips, at other rates too."""
    if kind == 'images':
        write_images(tmp_path / 'videos' / 'a', 23)
    else:
        write_video(tmp_path / 'videos' / ('v_a.mkv' if kind == 'ffv1' else 'a.mp4'), 23, 8, kind)
    entry = {'duration': 23 / 8, 'annotations': [action(0.25, 1), action(1.5, 9 / 4, 'run'), action(0, 1, 'Ambiguous')]}
    annotate(tmp_path, a=entry)
    data = ActivityNetClips(tmp_path)
    assert data.classes == ['background', 'jump', 'run'] and data.videos == ['a']
    ((clip, target),) = data
    assert clip.shape == (3, 23, 16, 16) and numbers(clip) == list(range(23))
    assert target['segments'].tolist() == [[2, 8], [12, 18]] and target['labels'].tolist() == [1, 2]
    truth = data.truth('a')
    assert truth['segments'].tolist() == [[0.25, 1], [1.5, 2.25]] and truth['ambiguous'].tolist() == [[0, 1]]
    assert data.duration('a') == pytest.approx(23 / 8)

    data = ActivityNetClips(tmp_path, num_frames=10)
    assert [numbers(clip) for clip, _ in data] == [list(range(s, s + 10)) for s in (0, 10, 13)]
    assert [target['start'] for _, target in data] == [0, 10 / 8, 13 / 8]
    # the first action is in the first clip, the second in both others, of the last one cut
    assert [target['segments'].tolist() for _, target in data] == [[[2, 8]], [[2, 8]], [[0, 5]]]
    assert [len(ActivityNetClips(tmp_path, num_frames=n, step=s)) for n, s in ((10, 5), (23, 1), (99, 7))] == [4, 1, 1]

    ((clip, target),) = ActivityNetClips(tmp_path, fps=4)
    assert numbers(clip)[:11] == list(range(1, 22, 2)) and clip.shape[1] in (11, 12)
    assert target['segments'].tolist() == [[1, 4], [6, 9]]
    ((clip, _),) = ActivityNetClips(tmp_path, fps=16, transforms=v2.Resize(8))
    assert clip.shape == (3, 46, 8, 8)
    clip, _ = ActivityNetClips(tmp_path, num_frames=6, fps=16)[3]
    assert numbers(clip * 1) == [9, 9, 10, 10, 11, 11]


def test_segments_at_the_borders(tmp_path):
    """Half a second beyond the clip is cut off; a clip without actions has none."""
    for name in 'ab':
        write_images(tmp_path / 'videos' / name, 8)
    annotate(tmp_path, a={'duration': 2, 'annotations': [action(-0.4, 2.4)]}, b={'duration': 2})
    first, second = (target for _, target in ActivityNetClips(tmp_path))
    assert first['segments'].tolist() == [[0, 8]]
    assert second['segments'].shape == (0, 2) and second['labels'].shape == (0,)


ENTRY = {'duration': 2, 'annotations': [action(0, 1)]}
# what is done to the folder, and the line that names what is wrong
DAMAGE = {
    'no annotations': (lambda f: (f / 'annotations.json').unlink(), "cannot read annotations '{f}/annotations.json'"),
    'no JSON': (lambda f: (f / 'annotations.json').write_text('{'), "cannot read annotations '{f}/annotations.json'"),
    'nested JSON': (
        lambda f: (f / 'annotations.json').write_text('[' * 100_000),
        "cannot read annotations '{f}/annotations.json'",
    ),
    'no videos': (lambda f: annotate(f), "'{f}/annotations.json' has no videos under 'database'"),
    'no subset': (lambda f: annotate(f, a={'subset': 7}), "json': video 'a' has no subset"),
    'another subset': (
        lambda f: annotate(f, a={'subset': 'test'}),
        "'{f}/annotations.json' has no videos of subset 'training', only of test",
    ),
    'no label': (lambda f: annotate(f, a={'annotations': [{}]}), "video 'a' has an annotation without a label"),
    'no segment': (
        lambda f: annotate(f, a={**ENTRY, 'annotations': [action(0, None)]}),
        r"'{f}/annotations.json': video 'a' has segment \[0, None\], not a start and an end",
    ),
    'beyond the end': (
        lambda f: annotate(f, a={**ENTRY, 'annotations': [action(0, 2.6)]}),
        r"'{f}/annotations.json': segment \[0, 2.6\] of video 'a' is not within its 2.00 seconds \('{f}/videos/a'\)",
    ),
    'before the start': (lambda f: annotate(f, a={**ENTRY, 'annotations': [action(-1, 1)]}), r'segment \[-1, 1\] of'),
    'backwards': (lambda f: annotate(f, a={**ENTRY, 'annotations': [action(1, 0.5)]}), r'segment \[1, 0.5\] of'),
    'no duration': (lambda f: annotate(f, a={}), "json': the duration of video 'a' is 0"),
    'no video': (lambda f: shutil.rmtree(f / 'videos' / 'a'), "there is no video 'a' in '{f}/videos'"),
    'two videos': (lambda f: (f / 'videos' / 'a.mp4').touch(), "both '{f}/videos/a' and '{f}/videos/a.mp4' are video"),
    'no frames': (
        lambda f: [path.unlink() for path in (f / 'videos' / 'a').iterdir()],
        "cannot read '{f}/videos/a': it has no frames: there are no images in it",
    ),
    'no picture': (lambda f: (f / 'videos/a/frame0.png').write_bytes(b'0'), "cannot read '{f}/videos/a': cannot ident"),
    'empty file': (lambda f: as_file(f), "cannot read '{f}/videos/a.mp4': "),
    'no video file': (lambda f: as_file(f, b'no video at all' * 99), "cannot read '{f}/videos/a.mp4': Invalid data"),
    'sound': (
        lambda f: (as_file(f), write_sound(f / 'videos/a.mp4')),
        "'{f}/videos/a.mp4': it has no frames: there is no video in it",
    ),
}


def as_file(folder, content=b''):
    pytest.importorskip('av')
    shutil.rmtree(folder / 'videos' / 'a')
    (folder / 'videos' / 'a.mp4').write_bytes(content)


def write_sound(path):
    av = pytest.importorskip('av')
    with av.open(str(path), 'w') as container:
        stream = container.add_stream('aac', rate=8000, layout='mono')
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format='fltp', layout='mono')
        frame.sample_rate = 8000
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)


@pytest.mark.parametrize('damage', DAMAGE)
def test_damage(tmp_path, damage):
    """Found when the data are opened, in one line."""
    write_images(tmp_path / 'videos' / 'a', 8)
    annotate(tmp_path, a=ENTRY)
    change, message = DAMAGE[damage]
    change(tmp_path)
    with pytest.raises(UsageError, match=message.replace('{f}', str(tmp_path))) as e:
        ActivityNetClips(tmp_path)
    assert '\n' not in str(e.value)


def test_damage_of_later_frames(tmp_path):
    """Found when they are read."""
    write_images(tmp_path / 'videos' / 'a', 8)
    annotate(tmp_path, a=ENTRY)
    data, path = ActivityNetClips(tmp_path), tmp_path / 'videos' / 'a' / 'frame5.png'
    Image.new('RGB', (16, 17)).save(path)
    with pytest.raises(UsageError, match=f"'{path}' is 17 × 16, but '.*frame0.png' is 16 × 16"):
        data[0]
    path.write_bytes(b'')
    with pytest.raises(UsageError, match=f"cannot read '{path}'"):
        data[0]


def test_file_that_breaks_off(tmp_path):
    path = tmp_path / 'videos' / 'a.mkv'
    write_video(path, 40, 8)
    annotate(tmp_path, a={'annotations': [action(0, 5)]})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=f"'{path}'") as e:
        ActivityNetClips(tmp_path)[0]
    assert '\n' not in str(e.value)


def test_without_pyav(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'av', None)
    write_images(tmp_path / 'videos' / 'a', 8)
    annotate(tmp_path, a=ENTRY)
    ActivityNetClips(tmp_path)[0]  # images do without
    as_file(tmp_path)
    with pytest.raises(UsageError, match=r"av is missing: pip install 'flatten_zoo\[video\]'"):
        ActivityNetClips(tmp_path)


@pytest.mark.parametrize('name', ['num_frames', 'step', 'fps'])
def test_numbers_must_be_positive(generated, name):
    with pytest.raises(ValueError, match=f'{name} must be positive, got 0'):
        ActivityNetClips(generated, **{name: 0})
