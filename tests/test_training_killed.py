"""Runs that are killed, also in the middle of writing, or interrupted: each goes on and ends like one that was not.

The processes are forked from one that has everything loaded already, so that a life costs a second and not five.
"""

import csv
import io
import itertools
import multiprocessing
import os
import random
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from flatten_zoo.errors import report_usage_errors
from flatten_zoo.training import continuing as checkpoints
from flatten_zoo.training.train import claim, main

from .runs import assert_same_end, save_no_picture
from .tiny_images import write_images

pytestmark = pytest.mark.usefixtures('no_pictures')
TINY = shlex.split(
    '--model test_resnet --num-classes 3 --img-size 32 -b 6 -j 0 --lr 0.02 --warmup-epochs 1 --device cpu '
    '--experiment run --checkpoint-hist 2 --resume auto --no-prefetcher --mixup 0.4 --drop 0.2 --opt adamw '
    '--model-ema --model-ema-decay 0.9'
)
FILE_OPERATIONS = {'open', 'os.link', 'os.mkdir', 'os.remove', 'os.rename', 'os.rmdir'}

processes = multiprocessing.get_context('forkserver')
processes.set_forkserver_preload([__name__])


# In the process that dies


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_file_operation(number: int) -> None:
    """Die before a file of the output folder is opened, renamed, linked or removed; `number` counts from 1."""
    done = []

    def hook(event, args):
        if event in FILE_OPERATIONS and f'{os.sep}run{os.sep}' in str(args[0]):
            done.append(event)
            if len(done) == number:
                die()

    sys.addaudithook(hook)


def within_checkpoint(number: int, part: float) -> None:
    """Die when part of a checkpoint has been written; `number` counts from 1."""
    original, calls = torch.save, []

    def save(state, file):
        calls.append(1)
        if len(calls) < number:
            return original(state, file)
        content = io.BytesIO()
        original(state, content)
        file.write(content.getvalue()[: int(part * content.tell())])
        file.flush()
        return die()

    checkpoints.torch.save = save


def live(argv: list[str], arrange_death: Callable | None, *args) -> None:
    """A run in a process of its own."""
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # not one that outlives the process
    Figure.savefig = save_no_picture
    if arrange_death:
        arrange_death(*args)
    sys.exit(report_usage_errors(lambda: main(argv)))


# Outside


class Life:
    """A process that trains in a folder, anew or from where an earlier one was killed."""

    def __init__(self, images: Path, output: Path, options: str, *death):
        argv = [*TINY, str(images), '--output', str(output), *options.split()]
        self.process = processes.Process(target=live, args=(argv, *(death or (None,))))
        self.folder = output / 'run'
        self.process.start()

    def end(self, kill_after: float | None = None) -> bool:
        """Wait for the end; whether it was a violent one."""
        self.process.join(kill_after)
        self.process.kill()
        self.process.join()
        assert self.process.exitcode in (0, -signal.SIGKILL)
        self.assert_nothing_is_lost()
        return self.process.exitcode != 0

    def assert_nothing_is_lost(self) -> None:
        """Whatever has its final name is whole, and the table has all epochs up to the last checkpoint."""
        for path in self.folder.glob('*.pth.tar'):
            if 'tmp' not in path.name:
                assert torch.load(path, weights_only=True)['state_dict']
        last = self.folder / 'last.pth.tar'
        if last.exists():
            epochs = torch.load(last, weights_only=True)['epoch'] + 1
            with (self.folder / 'summary.csv').open(newline='') as file:
                assert [row['epoch'] for row in csv.DictReader(file)][:epochs] == list(map(str, range(epochs)))


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp('data'), train=8)


def whole_run(images, output, options) -> tuple[Path, float]:
    """A run that nothing happens to, and how long it takes."""
    started = time.monotonic()
    life = Life(images, output, options)
    assert not life.end(kill_after=120)
    return life.folder, time.monotonic() - started


@pytest.mark.slow
def test_killed_twenty_times(tmp_path, images):
    options = '--epochs 3 --recovery-interval 3'
    whole_run(images, tmp_path / 'first', options)  # which waits for the parent of all to load everything
    whole, duration = whole_run(images, tmp_path / 'whole', options)
    choice = random.Random(0)
    kills, number = 0, itertools.count()
    while kills < 20:
        output = tmp_path / str(next(number))
        alive = True
        while alive:
            cause = choice.choice(['clock', 'clock', 'file operation', 'checkpoint']) if kills < 20 else 'none'
            if cause == 'file operation':
                death = (before_file_operation, choice.randint(1, 40))
            elif cause == 'checkpoint':
                death = (within_checkpoint, choice.randint(1, 3), choice.random())
            else:
                death = ()
            life = Life(images, output, options, *death)
            alive = life.end(kill_after=choice.uniform(0, duration) if cause == 'clock' else 120)
            kills += alive
        assert_same_end(whole, life.folder)


@pytest.mark.parametrize('recovery_interval', [pytest.param(0, marks=pytest.mark.slow), 3])
def test_killed_in_the_first_checkpoint(tmp_path, images, recovery_interval):
    """There may be a row of the table, but nothing to go on from."""
    options = f'--epochs 1 --recovery-interval {recovery_interval}'
    whole, _ = whole_run(images, tmp_path / 'whole', options)
    assert Life(images, tmp_path, options, within_checkpoint, 1, 0.5).end(120)
    life = Life(images, tmp_path, options)
    assert not life.end(120)
    assert_same_end(whole, life.folder)


@pytest.mark.slow
def test_killed_before_every_single_file_operation(tmp_path, images):
    options = '--epochs 2 --recovery-interval 3'
    whole, _ = whole_run(images, tmp_path / 'whole', options)
    for number in itertools.count(1):
        output = tmp_path / str(number)
        if not Life(images, output, options, before_file_operation, number).end(120):
            break
        life = Life(images, output, options)
        assert not life.end(120)
        assert_same_end(whole, life.folder)
    assert number > 30


def live_in_a_group(said: Path, argv: list[str]) -> None:
    os.setsid()
    multiprocessing.set_start_method('fork', force=True)  # of the loader's processes, as on Linux in a command
    with said.open('w') as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = open(2, 'w', closefd=False)  # noqa: SIM115
    live(argv, None)


@pytest.mark.parametrize('number, status', [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_to_a_run_and_its_loaders_keeps_the_last_checkpoint(tmp_path, images, number, status):
    """As a terminal sends Ctrl-C, and a batch system SIGTERM."""
    argv = [*TINY, str(images), '--output', str(tmp_path), '-j', '2', '--epochs']
    process = processes.Process(target=live_in_a_group, args=(tmp_path / 'said', [*argv, '1000']))
    process.start()
    folder = tmp_path / 'run'
    deadline = time.monotonic() + 60
    while not (folder / 'last.pth.tar').exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, number)
    process.join(60)
    log = (tmp_path / 'said').read_text()
    assert process.exitcode == status, log
    assert 'Traceback' not in log
    assert log.splitlines()[-1] == f'interrupted; the last complete checkpoint is {checkpoints.last_checkpoint(folder)}'
    with (folder / 'summary.csv').open(newline='') as file:
        *_, row = csv.DictReader(file)
    epoch = torch.load(folder / 'last.pth.tar', weights_only=True)['epoch']
    assert epoch == int(row['epoch'])
    assert main([*argv, str(epoch + 2), '-j', '0']) == 0


def stay(folder: Path, sender) -> None:
    """Claim a folder for good, with a process that survives this one, as a loader's does for some seconds."""
    lock = claim(folder)
    child = os.fork()
    if child:
        sender.send(child)
    while not lock.closed:
        signal.pause()


def test_second_process_is_refused_until_the_first_ends(tmp_path, images, capsys):
    folder = tmp_path / 'run'
    receiver, sender = processes.Pipe(duplex=False)
    first = processes.Process(target=stay, args=(folder, sender))
    first.start()
    child = receiver.recv()
    argv = [*TINY, str(images), '--output', str(tmp_path), '--epochs', '1', '--warmup-epochs', '0']
    try:
        assert report_usage_errors(lambda: main(argv)) == 2
        assert capsys.readouterr().err.endswith(
            f"error: another process is training in '{folder}': wait for its end, or choose another folder\n"
        )
        assert [path.name for path in folder.iterdir()] == ['.lock']
        first.kill()
        first.join()
        assert main(argv) == 0
    finally:
        first.kill()
        os.kill(child, signal.SIGKILL)
