"""The embedded data set."""

import hashlib
import sys
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from flatten_zoo.errors import UsageError
from flatten_zoo.samples.digits import main, write_digits

load_digits = pytest.importorskip('sklearn.datasets').load_digits


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data') / 'below' / 'digits'
    assert write_digits(folder)
    return folder


def test_images_are_the_digits(folder):
    digits = load_digits()
    seen = set()
    for path in folder.glob('*/*/*.png'):
        index = int(path.stem)
        seen.add(index)
        assert int(path.parent.name) == digits.target[index]
        np.testing.assert_array_equal(np.rint(np.asarray(Image.open(path)) / 255 * 16), digits.images[index])
    assert seen == set(range(1797))


def test_split_is_stratified_and_fixed(folder):
    held_out = sorted(folder.glob('validation/*/*.png'))
    assert len(held_out) == 360
    held, total = Counter(p.parent.name for p in held_out), Counter(map(str, load_digits().target))
    assert all(abs(held[name] - total[name] * 360 / 1797) < 1 for name in total)
    names = ' '.join(sorted(p.stem for p in held_out))
    assert hashlib.sha256(names.encode()).hexdigest()[:16] == 'abcdf9424d8b6a3c'


def test_second_time_changes_nothing(folder, capsys):
    before = {p: p.stat().st_mtime_ns for p in folder.rglob('*')}
    main([str(folder)])
    assert 'already in' in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in folder.rglob('*')} == before


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(UsageError, match='does not hold the digits'):
        write_digits(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ['file']


def test_failure_leaves_nothing(tmp_path, monkeypatch):
    saved = []

    def save(self, path):
        saved.append(path)
        if len(saved) == 100:
            raise OSError('disk full')

    monkeypatch.setattr(Image.Image, 'save', save)
    with pytest.raises(OSError, match='disk full'):
        write_digits(tmp_path / 'digits')
    assert len(saved) == 100
    assert not list(tmp_path.iterdir())


def test_without_scikit_learn_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    with pytest.raises(UsageError, match=r"pip install 'flatten_zoo\[demo\]'"):
        write_digits(tmp_path / 'digits')
