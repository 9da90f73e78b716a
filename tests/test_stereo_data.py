"""Generated stereo pairs, and the readers of Scene Flow's and KITTI's layouts."""

import json
import pickle
import re
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from flatten_zoo.dense import KittiPairs, SceneFlowPairs, occluded_pixels, write_stereo_pairs
from flatten_zoo.errors import UsageError
from flatten_zoo.samples import stereo


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """The same pairs in both layouts."""
    folder = tmp_path_factory.mktemp('pairs')
    for layout in stereo.LAYOUTS:
        assert write_stereo_pairs(folder / layout, 6, 2, (40, 64), 24, layout)
    return folder


@pytest.fixture
def scene_flow(tmp_path):
    write_stereo_pairs(tmp_path / 'data', 2, 1, (32, 40), 16)
    return tmp_path / 'data'


@pytest.fixture
def kitti(tmp_path):
    write_stereo_pairs(tmp_path / 'data', 2, 1, (32, 40), 16, 'kitti')
    return tmp_path / 'data' / 'training'


def pfm(values, order='<', scale='1.0'):
    """A PFM file, rows from the bottom up."""
    values = np.asarray(values, f'{order}f4')
    sign = {'<': '-', '>': ''}[order]
    return f'Pf\n{values.shape[1]} {values.shape[0]}\n{sign}{scale}\n'.encode() + values[::-1].tobytes()


def test_generated_pairs_are_what_they_say(folders):
    """What the left image shows at x, and the right one shows too, is there at x - d."""
    for data in (SceneFlowPairs(folders / 'sceneflow', 'TRAIN'), KittiPairs(folders / 'kitti' / 'training')):
        assert len(data) == 6
        errors, occluded = [], []
        for left, right, target in data:
            disparity, seen = target['disparity'], ~target['occluded']
            assert left.shape == right.shape == (3, 40, 64) and left.dtype == torch.float32 and left.max() <= 1
            assert disparity.dtype == torch.float32 and 0 < disparity.min() <= disparity.max() < 24
            x = torch.arange(64) - disparity
            assert (x[seen] > -1).all()
            first = x.floor().clamp(0, 62).long()
            there = [right.gather(2, i.expand(3, -1, -1)) for i in (first, first + 1)]
            expected = torch.lerp(*there, (x - first).clamp(0, 1).expand(3, -1, -1))
            errors.append((left - expected).abs().mean(0)[seen])
            occluded.append((left - expected).abs().mean(0)[~seen])
        errors, occluded = torch.cat(errors), torch.cat(occluded)
        assert errors.mean() < 0.05 < 0.15 < occluded.mean()
        assert 0.02 < len(occluded) / len(errors) < 0.4


def test_both_layouts_hold_the_same(folders):
    pairs = [SceneFlowPairs(folders / 'sceneflow', 'TEST'), KittiPairs(folders / 'kitti' / 'testing')]
    differing = 0
    for one, other in zip(*pairs, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert (one[2]['disparity'] - other[2]['disparity']).abs().max() <= 1 / 512
        # the generator knows which plane is seen, the reader the disparities alone
        differing += (one[2]['occluded'] != other[2]['occluded']).float().mean() / 2
    assert differing < 0.02
    assert len(SceneFlowPairs(folders / 'sceneflow')) == 8, 'all parts'
    assert set(one[2]) == {'disparity', 'right_disparity', 'occluded'} and set(other[2]) == {'disparity', 'occluded'}


def test_generated_pairs_are_always_the_same(folders, tmp_path):
    def files(folder):
        return {p.relative_to(folder): p.read_bytes() for p in folder.rglob('*.p?[gm]')}

    write_stereo_pairs(tmp_path / 'again', 2, 1, (40, 64), 24)
    write_stereo_pairs(tmp_path / 'other', 2, 1, (40, 64), 24, seed=1)
    first, again, other = (files(folder) for folder in (folders / 'sceneflow', tmp_path / 'again', tmp_path / 'other'))
    assert len(again) == 12 and all(first[name] == content for name, content in again.items())
    assert all(other[name] != content for name, content in again.items())
    assert len(set(again.values())) == 12


def test_folder_is_left_alone(scene_flow, tmp_path, capsys):
    before = {p: p.stat().st_mtime_ns for p in scene_flow.rglob('*')}
    command = [str(scene_flow), '--pairs', '2', '--held-out', '1', '--image-size', '32', '40', '--max-disparity', '16']
    stereo.main(command)
    assert capsys.readouterr().out == f'2 training and 1 held-out stereo pairs already in {scene_flow}\n'
    stereo.main([str(tmp_path / 'new'), *command[1:], '--layout', 'kitti'])
    assert 'written to' in capsys.readouterr().out and len(KittiPairs(tmp_path / 'new' / 'training')) == 2
    with pytest.raises(UsageError, match='exists but does not hold these pairs'):
        stereo.main([*command, '--seed', '1'])
    assert {p: p.stat().st_mtime_ns for p in scene_flow.rglob('*')} == before


@pytest.mark.parametrize(
    'arguments, message',
    [
        ({'num_pairs': 0}, 'num_pairs must be at least 1, got 0'),
        ({'held_out': 0}, 'held_out must be at least 1, got 0'),
        ({'seed': -1}, 'seed must be at least 0, got -1'),
        ({'image_size': (16, 64)}, 'image_size must be at least 32 × 32, got 16 × 64'),
        ({'max_disparity': 200}, 'max_disparity must be from 8 to the width 128, got 200'),
        ({'layout': 'middlebury'}, "layout must be one of .*, got 'middlebury'"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    with pytest.raises(UsageError, match=message):
        write_stereo_pairs(tmp_path / 'pairs', **arguments)
    assert not list(tmp_path.iterdir())


def test_failure_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(json, 'dumps', lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_stereo_pairs(tmp_path / 'pairs', 1, 1, (32, 32), 8)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('order', ['<', '>'])
@pytest.mark.parametrize('scale', ['1', '1.000000', '0.00392156862745098', '3.9e-3'])
def test_pfm(scene_flow, order, scale):
    """Both byte orders; infinities and NaN are not known, and the sign is that of the direction."""
    values = np.random.default_rng(0).uniform(0, 16, (32, 40)).astype(np.float32)
    unknown = values.copy()
    unknown[3, 4], unknown[5, 6], unknown[7, 8] = np.inf, -np.inf, np.nan
    path = scene_flow / 'disparity' / 'TRAIN' / 'A'
    (path / 'left' / '0001.pfm').write_bytes(pfm(unknown, order, scale))
    (path / 'right' / '0001.pfm').write_bytes(pfm(-values, order, scale))
    _, _, target = SceneFlowPairs(scene_flow, 'TRAIN')[1]
    known = np.isfinite(unknown)
    assert known.sum() == 32 * 40 - 3
    np.testing.assert_array_equal(np.where(known, target['disparity'], 0), np.where(known, values, 0))
    np.testing.assert_array_equal(target['disparity'].isfinite(), known)
    np.testing.assert_array_equal(target['right_disparity'], values)
    assert not target['occluded'][~known].any()


def test_kitti_png(kitti):
    values = np.random.default_rng(0).integers(0, 2**16, (32, 40), dtype=np.uint16)
    values[:4] = 0
    Image.fromarray(values).save(kitti / 'disp_occ_0' / '000001_10.png')
    visible = values.copy()
    visible[:8] = 0
    Image.fromarray(visible).save(kitti / 'disp_noc_0' / '000001_10.png')
    Image.new('RGB', (7, 7)).save(kitti / 'image_2' / '000001_11.png')  # the second image of a sequence
    data = KittiPairs(kitti)
    assert len(data) == 2
    _, _, target = data[1]
    assert target['disparity'][:4].isnan().all()
    np.testing.assert_array_equal(target['disparity'][4:].nan_to_num(0), values[4:] / 256)
    np.testing.assert_array_equal(target['occluded'], (values > 0) & (visible == 0))
    for path in (kitti / 'disp_noc_0').iterdir():
        path.unlink()
    (kitti / 'disp_noc_0').rmdir()
    assert set(KittiPairs(kitti)[0][2]) == {'disparity'}


def test_occluded_pixels():
    """A square of disparity 3 before a wall of 1: hidden are what it covers in the right image, and what ends there."""
    left, right = torch.ones(2, 5, 12).unbind()
    left[1:4, 5:8], right[1:4, 2:5] = 3, 3
    expected = torch.zeros(5, 12, dtype=torch.bool)
    expected[:, 0] = True
    expected[1:4, 3:5] = True  # the wall at x is in the right image at x - 1, where the square is
    assert torch.equal(occluded_pixels(left, right), expected)
    left[0, 0] = torch.nan
    assert not occluded_pixels(left, right)[0, 0]
    assert torch.equal(occluded_pixels(left[None], right[None])[0], occluded_pixels(left, right))


def test_transforms_cut_everything_alike(scene_flow):
    plain = SceneFlowPairs(scene_flow, 'TRAIN')[0]
    left, right, target = SceneFlowPairs(scene_flow, 'TRAIN', transforms=v2.CenterCrop((8, 12)))[0]
    cut = (..., slice(12, 20), slice(14, 26))
    assert torch.equal(left, plain[0][cut]) and torch.equal(right, plain[1][cut])
    assert all(torch.equal(x, plain[2][name][cut]) for name, x in target.items()) and len(target) == 3


def test_reads_in_other_processes_and_other_folders(scene_flow):
    (scene_flow / 'frames_cleanpass').rename(scene_flow / 'frames_finalpass')
    data = pickle.loads(pickle.dumps(SceneFlowPairs(scene_flow, frames='frames_finalpass')))
    left, right, target = next(iter(torch.utils.data.DataLoader(data, 3)))
    assert left.shape == right.shape == (3, 3, 32, 40) and target['disparity'].shape == (3, 32, 40)


# what is done to a file, and the line that names it
DAMAGE = {
    'missing': (lambda path: path.unlink(), "there is no '{path}', which is part of a pair"),
    'another size': (lambda path: write(path, np.ones((32, 41))), "'{path}' is 32 × 41, but '.*' is 32 × 40"),
    'no file of its kind': (lambda path: path.write_bytes(b'\0' * 99), 'cannot identify|it does not begin'),
    'empty': (lambda path: path.write_bytes(b''), 'cannot identify|it does not begin'),
    'gigantic': (lambda path: path.write_bytes(gigantic(path)), 'Image size .* exceeds|it has 1.. bytes, .* need'),
    # the header of a PNG file says nothing of it
    'truncated': (lambda path: path.write_bytes(path.read_bytes()[:-300]), 'trunc|it has .* bytes, .* need'),
}
PFM_DAMAGE = {
    'colour': (b'PF\n40 32\n-1\n' + bytes(4 * 3 * 40 * 32), 'it does not begin as a PFM file of one channel'),
    'greyscale of 8 bits': (b'P5\n40 32\n255\n' + bytes(40 * 32), 'it does not begin'),
    'no size': (b'Pf\n40\n', 'it does not begin'),
    'size in words': (b'Pf\nforty 32\n-1\n', 'it does not begin'),
    'size 0': (b'Pf\n0 32\n-1\n', 'its width 0, height 32 and scale -1 must not be 0'),
    'scale 0': (b'Pf\n40 32\n0\n' + bytes(4 * 40 * 32), 'its width 40, height 32 and scale 0 must not be 0'),
    'scale NaN': (b'Pf\n40 32\nnan\n' + bytes(4 * 40 * 32), 'it does not begin'),
    'scale of two points': (b'Pf\n40 32\n-1.0.0\n' + bytes(4 * 40 * 32), 'could not convert'),
    'negative size': (b'Pf\n-40 -32\n-1\n' + bytes(4 * 40 * 32), 'it does not begin'),
    'an endless number': (b'Pf\n' + b'9' * 5000, 'it does not begin'),
    'a picture': (None, 'it does not begin'),
}


def write(path, values):
    if path.suffix == '.pfm':
        path.write_bytes(pfm(values))
    else:
        Image.fromarray(values.astype(np.uint16 if 'disp' in str(path) else np.uint8)).save(path)


def gigantic(path):
    if path.suffix == '.pfm':
        return b'Pf\n100000 100000\n-1\n' + bytes(100)
    content = bytearray(path.read_bytes())
    content[16:24] = np.array([100_000, 100_000], '>u4').tobytes()
    content[29:33] = np.array([zlib.crc32(content[12:29])], '>u4').tobytes()
    return bytes(content)


def check(open_data, path, message):
    """Opening the data, or reading the pair, ends with one line that names the file."""
    with pytest.raises(UsageError) as e:
        open_data()[0]
    text = str(e.value)
    assert re.search(message.replace('{path}', re.escape(str(path))), text) and str(path) in text and '\n' not in text


@pytest.mark.parametrize('place', ['frames_cleanpass', 'disparity'])
@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('damage', DAMAGE)
def test_damaged_scene_flow(scene_flow, place, side, damage):
    path = scene_flow / place / 'TRAIN' / 'A' / side / f'0000.{"pfm" if place == "disparity" else "png"}'
    change, message = DAMAGE[damage]
    change(path)
    if damage == 'another size' and place != 'disparity' and side == 'left':
        message = "is 32 × 40, but '{path}' is 32 × 41"
    check(lambda: SceneFlowPairs(scene_flow, 'TRAIN'), path, message)
    if damage != 'truncated' or place == 'disparity':
        with pytest.raises(UsageError):  # already when they are opened
            SceneFlowPairs(scene_flow, 'TRAIN')


@pytest.mark.parametrize('content', PFM_DAMAGE)
def test_damaged_pfm(scene_flow, content):
    path = scene_flow / 'disparity' / 'TRAIN' / 'A' / 'left' / '0000.pfm'
    data, message = PFM_DAMAGE[content]
    path.write_bytes(data or (scene_flow / 'frames_cleanpass/TRAIN/A/left/0000.png').read_bytes())
    check(lambda: SceneFlowPairs(scene_flow, 'TRAIN'), path, message)


def test_disparities_of_both_signs(scene_flow):
    path = scene_flow / 'disparity' / 'TRAIN' / 'A' / 'left' / '0000.pfm'
    values = np.ones((32, 40))
    values[0, 0] = -1
    path.write_bytes(pfm(values))
    check(lambda: SceneFlowPairs(scene_flow, 'TRAIN'), path, "cannot read '{path}': it holds disparities of both signs")


@pytest.mark.parametrize(
    'place, damage',
    [(place, damage) for place in ('image_2', 'image_3', 'disp_occ_0', 'disp_noc_0') for damage in DAMAGE],
)
def test_damaged_kitti(kitti, place, damage):
    path = kitti / place / '000000_10.png'
    change, message = DAMAGE[damage]
    change(path)
    if (place, damage) == ('image_2', 'another size'):
        message = "is 32 × 40, but '{path}' is 32 × 41"
    check(lambda: KittiPairs(kitti), path, message)


def test_kitti_disparities_of_8_bits(kitti):
    path = kitti / 'disp_occ_0' / '000000_10.png'
    Image.new('L', (40, 32), 7).save(path)
    check(lambda: KittiPairs(kitti), path, "cannot read '{path}': it is not a greyscale PNG file of 16 bits")


def test_no_pairs(tmp_path, folders):
    for data, place in (
        (lambda: SceneFlowPairs(tmp_path), tmp_path / 'frames_cleanpass'),
        (
            lambda: SceneFlowPairs(folders / 'sceneflow', 'VALIDATION'),
            folders / 'sceneflow/frames_cleanpass/VALIDATION',
        ),
        (lambda: KittiPairs(tmp_path), tmp_path),
    ):
        with pytest.raises(UsageError, match=f"there are no .* in '{place}'"):
            data()


def test_command_says_mistakes_in_one_line(tmp_path, monkeypatch, capsys):
    from flatten_zoo.errors import report_usage_errors

    monkeypatch.setattr(sys, 'argv', ['stereo', str(tmp_path)])
    assert report_usage_errors(stereo.main) == 2
    assert (
        capsys.readouterr().err
        == f"error: '{tmp_path}' exists but does not hold these pairs: remove it or give another folder\n"
    )
