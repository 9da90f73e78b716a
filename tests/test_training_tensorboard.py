"""Logging for TensorBoard: the figures of the summary, read back with TensorBoard's own reader."""

import csv
import shlex
import sys

import pytest

from flatten_zoo.errors import UsageError
from flatten_zoo.training.train import main

from .tiny_images import write_images

pytestmark = pytest.mark.usefixtures('no_pictures')
EventAccumulator = pytest.importorskip('tensorboard.backend.event_processing.event_accumulator').EventAccumulator

TINY = shlex.split(
    '--model test_resnet --num-classes 3 --img-size 32 -b 6 -j 0 --epochs 3 --lr 0.02 --warmup-epochs 0 --device cpu '
    '--experiment run --log-tensorboard'
)


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    return str(write_images(tmp_path_factory.mktemp('data')))


def logged(folder) -> dict[str, dict[int, float]]:
    """Values by column and epoch."""
    events = EventAccumulator(str(folder), purge_orphaned_data=True).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()['scalars']}


def in_summary(folder) -> dict[str, dict[int, float]]:
    with (folder / 'summary.csv').open(newline='') as file:
        rows = list(csv.DictReader(file))
    return {
        name: {int(row['epoch']): pytest.approx(float(row[name])) for row in rows if row[name]}
        for name in rows[0]
        if name != 'epoch'
    }


def test_every_row_is_logged(tmp_path, images):
    assert main([*TINY, images, '--output', str(tmp_path), '--val-interval', '2']) == 0
    figures = logged(tmp_path / 'run')
    assert figures == in_summary(tmp_path / 'run')
    assert set(figures) == {'train_loss', 'eval_loss', 'eval_top1', 'eval_top5', 'lr'}
    assert list(figures['train_loss']) == [0, 1, 2]
    assert list(figures['eval_top1']) == [1, 2]


def test_continued_run_continues_the_steps(tmp_path, images, monkeypatch):
    """What an epoch logged that was done again counts no more."""
    original = sys.modules[main.__module__].Checkpoints.save_checkpoint

    def save_checkpoint(self, epoch, metric):
        if epoch == 1:
            raise KeyboardInterrupt
        return original(self, epoch, metric)

    argv = [*TINY, images, '--output', str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr('flatten_zoo.training.train.Checkpoints.save_checkpoint', save_checkpoint)
        assert main(argv) == 130
    assert list(logged(tmp_path / 'run')['lr']) == [0, 1]
    assert main([*argv, '--resume', 'auto', '--lr', '0.01']) == 0
    figures = logged(tmp_path / 'run')
    assert figures == in_summary(tmp_path / 'run')
    assert list(figures['lr']) == [0, 1, 2]


def test_missing_package_is_named_and_leaves_no_output(tmp_path, images, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tensorboard', None)
    with pytest.raises(UsageError, match=r"needs the package tensorboard: pip install 'flatten_zoo\[tensorboard\]'"):
        main([*TINY, images, '--output', str(tmp_path / 'out')])
    assert not (tmp_path / 'out').exists()
