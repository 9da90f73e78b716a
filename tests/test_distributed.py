"""Two processes that train together: as good as one, exact, and never hanging."""

import csv
import os
import shlex
import signal
import subprocess
import sys
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from timm.task.evaluator import evaluation_sample_limit
from timm.utils import unwrap_model
from torch.utils.data import RandomSampler

from flatten_zoo.errors import UsageError, report_usage_errors
from flatten_zoo.training import processes as distributed
from flatten_zoo.training.continuing import last_checkpoint
from flatten_zoo.training.data.datasets import open_splits
from flatten_zoo.training.data.loaders import evaluation_loader, training_loader
from flatten_zoo.training.loop import trainer
from flatten_zoo.training.loop.optimization import Numerics
from flatten_zoo.training.options.definitions import train_parser
from flatten_zoo.training.train import main

from .processes import in_processes, next_run
from .runs import assert_same_end
from .tiny_images import write_images, write_parquet, write_shards, write_tars

ROOT = Path(__file__).parents[1]
TINY = shlex.split(
    '--num-classes 3 --img-size 32 -j 0 --epochs 3 --warmup-epochs 1 --device cpu --experiment run --checkpoint-hist 2'
)
RESNET = ('--model', 'test_resnet', '-b', '6', '--lr', '0.02')
RANDOM = shlex.split('--mixup 0.4 --drop 0.2 --reprob 0.5 --model-ema --model-ema-decay 0.9')


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """24 images to train on, and 15 for validation, which do not divide evenly."""
    return write_images(tmp_path_factory.mktemp('data'), train=8)


def train(output, images, *argv) -> int:
    next_run()
    return report_usage_errors(lambda: main([*TINY, str(images), '--output', str(output), *map(str, argv)]))


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / 'summary.csv').open(newline='') as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def epochs_permutation(self):
    """The order in which torch's DistributedSampler gives out the images."""
    generator = torch.Generator().manual_seed(self.epoch)
    return iter(torch.randperm(len(self.data_source), generator=generator).tolist())


# The same as one process


def train_all(output: Path, images: Path, runs: dict[str, str]) -> list[int]:
    return [train(output / name, images, *shlex.split(options)) for name, options in runs.items()]


def test_two_processes_learn_what_one_learns(tmp_path, images, monkeypatch):
    """Weights, averages, and figures, of training and of an uneven validation, with half of a batch in each process."""
    runs = {
        'vit': '--model test_vit --opt adamw --lr 1e-3 --clip-grad 1 --model-ema --model-ema-decay 0.9',
        'accumulated': '--model test_vit --lr 0.02 --grad-accum-steps 2 --sched-on-updates --no-ddp-bb -j 1',
        'sync-bn': '--model test_resnet --sync-bn --lr 0.001 --model-ema --model-ema-decay 0.9',
        'rate': '--model test_vit --lr-base 0.1 --warmup-epochs 0',
    }
    alike = '--no-aug --synchronize-step --epochs 2 -b'
    outcomes = in_processes(
        tmp_path, train_all, tmp_path / 'two', images, {n: f'{o} {alike} 3' for n, o in runs.items()}
    )
    assert [outcome.result for outcome in outcomes] == [[0] * len(runs)] * 2, outcomes
    monkeypatch.setattr(RandomSampler, 'set_epoch', lambda self, epoch: setattr(self, 'epoch', epoch), raising=False)
    monkeypatch.setattr(RandomSampler, '__iter__', epochs_permutation)
    for name, options in runs.items():
        options = options.replace('--lr-base 0.1', '--lr 0.00234375')  # six images of 256
        assert train(tmp_path / 'one', images, *shlex.split(f'{options} {alike} 6')) == 0
        one, two = ((tmp_path / folder / 'run') for folder in ('one', f'two/{name}'))
        ours, theirs = (torch.load(folder / 'last.pth.tar', weights_only=True) for folder in (two, one))
        kinds = ['state_dict'] + ['state_dict_ema'] * ('--model-ema' in options)
        for kind in kinds:
            assert list(ours[kind]) == list(theirs[kind])
            for key in ours[kind]:
                said = partial('{} {}: {}'.format, name, key)
                torch.testing.assert_close(ours[kind][key], theirs[kind][key], rtol=1e-4, atol=2e-5, msg=said)
        for ours, theirs in zip(rows(two), rows(one), strict=True):
            assert ours['eval_top1'] == theirs['eval_top1']
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
        (tmp_path / 'one').rename(tmp_path / f'one-{name}')


def changes_of_statistics(output: Path, images: Path, hows: tuple[str, ...]) -> list[torch.Tensor]:
    """Running means before and after they are distributed, of the model and its average, for each way to do so."""
    seen = []

    def statistics(task) -> torch.Tensor:
        modules = [unwrap_model(task.get_trainable_module(ema=ema)) for ema in (False, True)]
        return torch.stack([module.bn1.running_mean.clone() for module in modules])

    def distribute(task, how):
        before = statistics(task)
        original(task, how)
        seen.append(torch.stack([before, statistics(task)]).tolist())

    original, trainer.distribute_batch_norm = trainer.distribute_batch_norm, distribute
    for how in hows:
        argv = ('--epochs', 1, '--model-ema', '--model-ema-decay', 0.5, '--no-ddp-bb', '--dist-bn', how)
        assert train(output / f'bn-{how}', images, *RESNET, *argv) == 0
    return seen


def test_statistics_of_batch_norm(tmp_path, images):
    outcomes = in_processes(tmp_path, changes_of_statistics, tmp_path, images, ('reduce', 'broadcast', ''))
    first, second = (torch.tensor(outcome.result) for outcome in outcomes)  # each ways × (before, after) × models × C
    assert not torch.isclose(first[:, 0], second[:, 0]).all(-1).any()
    for after in (first[0, 1], second[0, 1]):
        torch.testing.assert_close(after, (first[0, 0] + second[0, 0]) / 2)
    assert torch.equal(first[1:, 0], first[1:, 1])
    assert torch.equal(second[1, 1], first[1, 0])
    assert torch.equal(second[2, 1], second[2, 0])


# Data


def seen(root: Path, layouts: dict[str, list[str]], more: list[str]) -> dict[str, list[list[int]]]:
    """What this process gets of the images of each layout, in an epoch of training and in validation."""
    with suppress(ImportError):
        import datasets

        datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.1  # seconds, after a shuffled stream left before its end
    distributed.join(torch.device('cpu'))
    found = {}
    for name, options in layouts.items():
        argv = ['--num-classes', '3', '--img-size', '24', '-b', '3', '--no-prefetcher', *options, *more]
        args = train_parser().parse_with_config(argv)
        train_set, eval_set = open_splits(args, 3, channels=3)
        config = {
            'input_size': (3, 24, 24),
            'mean': (0,),
            'std': (1,),
            'crop_pct': 1,
            'crop_mode': 'center',
            'interpolation': 'nearest',
        }
        loaders = [
            training_loader(args, 3, train_set, config, Numerics(torch.device('cpu'))),
            evaluation_loader(args, eval_set, config, Numerics(torch.device('cpu')), args.batch_size),
        ]
        found[name] = []
        for loader in loaders:
            limit = evaluation_sample_limit(loader)
            images = [zlib.crc32(image.numpy().tobytes()) for batch, _ in loader for image in batch]
            found[name].append(images[:limit])
    return found


@pytest.mark.filterwarnings('ignore:Length of IterableDataset')
@pytest.mark.parametrize('workers', ['0', pytest.param('2', marks=pytest.mark.slow)])
def test_every_reader_gives_every_image_to_one_process(tmp_path, images, workers):
    """24 images in shards of six for training, 15 in shards of four and three for validation."""
    write_tars(tmp_path / 'tars', images)
    write_shards(tmp_path / 'shards', images)
    write_parquet(tmp_path / 'parquet', images)
    cache, lengths = str(tmp_path / 'cache'), ['--train-num-samples', '24', '--val-num-samples', '15']
    layouts = {
        'folder': [str(images)],
        'tar': [str(tmp_path / 'tars')],
        'torchvision': [str(images), '--dataset', 'torch/image_folder'],
        'wds': [str(tmp_path / 'shards'), '--dataset', 'wds/tiny'],
        'hfds': [cache, '--dataset', f'hfds/{tmp_path}/parquet'],
        'hfids': [cache, '--dataset', f'hfids/{tmp_path}/parquet', *lengths],
    }
    more = ['--no-aug', '-j', workers]
    expected = seen(tmp_path, {'folder': layouts['folder']}, more)['folder']
    assert [len(set(part)) for part in expected] == [24, 15]
    outcomes = in_processes(tmp_path, seen, tmp_path, layouts, more)
    for name in layouts:
        first, second = (outcome.result[name] for outcome in outcomes)
        for ours, theirs, whole in zip(first, second, expected, strict=True):
            assert sorted(ours + theirs) == sorted(whole), name
            assert ours, name
            assert theirs, name
        assert len(first[0]) == len(second[0])


def test_repeated_augmentation_shows_an_image_to_both_processes(tmp_path, images):
    more = ['--no-aug', '-j', '0', '--aug-repeats', '3']
    outcomes = in_processes(tmp_path, seen, tmp_path, {'folder': [str(images)]}, more)
    first, second = (outcome.result['folder'][0] for outcome in outcomes)
    assert len(first) == len(second) == 12
    together = [set(first[i : i + 3]) | set(second[i : i + 3]) for i in range(0, 12, 3)]
    assert [len(batch) for batch in together] == [2] * 4  # six places for two images, three times each
    assert len(set(first + second)) == 8
    assert len(set(first) & set(second)) == 8


# Files


def train_watched(output: Path, images: Path) -> list[str]:
    """What this process writes while it trains."""
    written = []

    def watch(event, args):
        if event in ('os.mkdir', 'os.rename', 'os.link', 'os.remove') or (event == 'open' and args[2] & os.O_ACCMODE):
            written.append(str(args[0]))

    sys.addaudithook(watch)
    argv = ('--recovery-interval', 1, '--save-images', '--log-interval', 1, *RANDOM, '--no-prefetcher')
    assert train(output, images, *RESNET, *argv) == 0
    return [path for path in written if path.startswith(str(output))]


def test_only_the_first_process_writes(tmp_path, images):
    first, second = in_processes(tmp_path, train_watched, tmp_path / 'output', images)
    assert first.status == second.status == 0, second.said
    assert second.result == []
    assert len(first.result) > 10
    names = {path.name for path in (tmp_path / 'output' / 'run').iterdir()}
    assert {'args.yaml', 'summary.csv', 'curves.png', 'last.pth.tar', 'model_best.pth.tar', 'train-batch-0.jpg'} < names
    assert [row['epoch'] for row in rows(tmp_path / 'output' / 'run')] == [0, 1, 2]


# Interruptions


def whole_and_in_parts(output: Path, images: Path, options: list[str], rank: int, update: int) -> list[int]:
    """A run, and the same one that SIGTERM to one of its processes interrupts at an update, and that goes on."""
    original, updates = trainer.Trainer._update, []

    def counted(self):
        updates.append(1)
        if len(updates) == update and distributed.rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self)

    statuses = [train(output / 'whole', images, *options)]
    trainer.Trainer._update = counted
    statuses.append(train(output / 'parts', images, *options))
    recovered = last_checkpoint(output / 'parts' / 'run').name
    statuses.append(train(output / 'parts', images, *options, '--resume', 'auto'))
    return [*statuses, recovered, len(updates)]


@pytest.mark.parametrize(
    'options, rank, update, recovered',
    [
        (['--model', 'test_convnext', *RANDOM], 1, 3, 'recovery-1-1.pth.tar'),
        pytest.param(
            *(
                ['--drop', '0.2', '--no-ddp-bb', '--dist-bn', '', '--model-ema', '-j', '1'],
                0,
                4,
                'recovery-1-2.pth.tar',
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_interrupted_run_ends_like_one_that_was_not(tmp_path, images, options, rank, update, recovered):
    """Also the statistics and random numbers of the second process, whose BN layers and dropout are its own."""
    outcomes = in_processes(tmp_path, whole_and_in_parts, tmp_path, images, [*RESNET, *options], rank, update)
    for outcome in outcomes:
        assert outcome.result == [0, 143, 0, recovered, 6], outcome.said
        assert 'Grad strides do not match' not in outcome.said
    assert_same_end(tmp_path / 'whole' / 'run', tmp_path / 'parts' / 'run')


def stopped_in_validation(output: Path, images: Path) -> list[int]:
    """SIGTERM to the second process during its validation, then the epochs that are left on one process."""
    original, updates = trainer.ClassificationEvaluator.update, []

    def update(self, *args):
        updates.append(1)
        if len(updates) == 1 and distributed.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, *args)

    trainer.ClassificationEvaluator.update = update
    return [train(output, images, *RESNET, '--sched-on-updates'), len(updates)]


def test_interruption_in_validation_and_another_number_of_processes(tmp_path, images, caplog):
    first, second = in_processes(tmp_path, stopped_in_validation, tmp_path, images)
    assert (first.result, second.result) == ([143, 2], [143, 1])  # a process does not wait for the next one's batch
    folder = tmp_path / 'run'
    assert last_checkpoint(folder) == folder / 'recovery-0-2.pth.tar'
    assert train(tmp_path, images, *RESNET, '--sched-on-updates', '--resume', 'auto') == 0
    assert 'the checkpoint is of 2 processes and this run of 1: the epoch starts anew, with other random' in caplog.text
    assert train(tmp_path / 'whole', images, *RESNET, '--sched-on-updates') == 0
    for ours, theirs in zip(rows(folder), rows(tmp_path / 'whole' / 'run'), strict=True):
        assert (ours['epoch'], ours['lr']) == (theirs['epoch'], theirs['lr'])


# Failures


def exits(output: Path, images: Path, *argv) -> None:
    distributed.time.sleep = lambda seconds: None
    sys.exit(train(output, images, *RESNET, *argv))


@pytest.mark.parametrize(
    'argv, message',
    [
        (('--epoch', 3), "unknown option '--epoch'; did you mean --epochs, --start-epoch, --reprob?"),
        (
            ('--num-classes', 4),
            'the data has 3 classes but test_resnet has 4: give --num-classes 3, or name all classes in --class-map',
        ),
        (('-b', 13), '--batch-size 13 in 2 processes is too many: there are 24 training images'),
        (
            ('--opt', 'adahessian'),
            '--opt adahessian needs second derivatives, which DistributedDataParallel does not have',
        ),
    ],
)
def test_mistake_of_all_processes_is_reported_once(tmp_path, images, argv, message):
    outcomes = in_processes(tmp_path, exits, tmp_path / 'output', images, *argv)
    assert [outcome.status for outcome in outcomes] == [2, 2]
    assert ''.join(outcome.said for outcome in outcomes) == f'error: {message}\n'
    assert not (tmp_path / 'output').exists()


def test_mistake_that_only_the_first_process_sees(tmp_path, images):
    first, second = in_processes(tmp_path, exits, tmp_path / 'output', images, '--resume', 'none.pth.tar')
    assert (first.status, second.status) == (2, 1)
    assert first.said.startswith("error: --resume 'none.pth.tar': there is no such file")
    assert 'error: ' not in second.said
    assert 'Traceback' not in second.said


def test_unreadable_image_of_one_process_ends_both(tmp_path, images):
    bad = write_images(tmp_path / 'images', train=8)
    (bad / 'train' / 'red' / '3.png').write_bytes(b'nothing')
    outcomes = in_processes(tmp_path, exits, tmp_path / 'output', bad)
    assert sorted(outcome.status for outcome in outcomes) == [1, 2]
    lines = ''.join(outcome.said for outcome in outcomes).splitlines()
    assert not any('Traceback' in line for line in lines)
    assert [line for line in lines if line.startswith('error')] == [
        f"error: cannot read the image '{bad}/train/red/3.png'; remove or replace it"
    ]


def diverges(output: Path, images: Path) -> None:
    """Training in which a loss of the second process alone is not finite."""
    original, batches = trainer.Trainer._backward, []

    def backward(self, *args):
        batches.append(1)
        loss = original(self, *args)
        return loss * float('nan') if len(batches) == 3 and distributed.rank() == 1 else loss

    trainer.Trainer._backward = backward
    exits(output, images)


def test_divergence_of_one_process_ends_both(tmp_path, images):
    outcomes = in_processes(tmp_path, diverges, tmp_path / 'output', images)
    assert [outcome.status for outcome in outcomes] == [1, 2]
    assert not any('Traceback' in outcome.said for outcome in outcomes)
    last = tmp_path / 'output' / 'run' / 'last.pth.tar'
    assert [line for outcome in outcomes for line in outcome.said.splitlines() if line.startswith('error')] == [
        'error: epoch 1/3: the loss of batch 1 is nan; try a lower --lr than 0.02, more --warmup-epochs or '
        f'--clip-grad 1; the last complete checkpoint is {last}'
    ]
    assert torch.load(last, weights_only=True)['epoch'] == 0


def dies(output: Path, images: Path, rank: int, how: str) -> None:
    """Training in which a process dies at the second update of epoch 1, and torchrun may terminate the other."""
    original, updates = trainer.Trainer._update, []

    def update(self):
        updates.append(1)
        if len(updates) == 4 and distributed.rank() == rank:
            if how != 'failed':
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError('unforeseen')
        if len(updates) == 4 and how == 'killed, the other terminated':
            os.kill(os.getpid(), signal.SIGTERM)
        original(self)

    trainer.Trainer._update = update
    exits(output, images)


@pytest.mark.parametrize('rank', [0, 1])
@pytest.mark.parametrize('how', ['killed', 'failed', 'killed, the other terminated'])
def test_end_of_one_process_ends_the_other(tmp_path, images, rank, how):
    outcomes = in_processes(tmp_path, dies, tmp_path / 'output', images, rank, how)
    died, other = outcomes[rank], outcomes[1 - rank]
    status, message = 1, 'error: another process of this run has ended or is out of reach: '
    if how.endswith('terminated'):
        status, message = 143, 'interrupted as another process has ended; the last complete checkpoint is '
    assert (other.status, died.status) == (status, 1 if how == 'failed' else -signal.SIGKILL)
    assert sum(line.startswith(message) for line in other.said.splitlines()) == 1, other.said
    assert 'Traceback' not in other.said
    assert ("KeyError: 'unforeseen'" in died.said) == (how == 'failed')


def exits_with_one_device(output: Path, images: Path) -> None:
    os.environ['LOCAL_WORLD_SIZE'] = os.environ['WORLD_SIZE']
    torch.accelerator.current_accelerator = lambda check_available: torch.device('cuda')
    torch.accelerator.device_count = lambda: 1
    exits(output, images, '--device', 'cuda')


def test_more_processes_than_devices(tmp_path, images):
    """The process that has a device does not wait for the one that has none."""
    outcomes = in_processes(tmp_path, exits_with_one_device, tmp_path / 'output', images)
    assert [outcome.status for outcome in outcomes] == [2, 2]
    message = 'error: --nproc_per_node: there are more processes than the 1 cuda devices\n'
    assert ''.join(outcome.said for outcome in outcomes) == message


def test_more_processes_than_devices_without_torchrun(monkeypatch):
    for name, value in {'WORLD_SIZE': '8', 'LOCAL_RANK': '4'}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, 'device_count', lambda: 4)
    with pytest.raises(UsageError, match='--nproc_per_node: there are more processes than the 4 cuda devices'):
        distributed.join(torch.device('cuda'))


# torchrun itself


def torchrun(*argv) -> subprocess.Popen:
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    launcher = [Path(sys.executable).with_name('torchrun'), '--standalone', '--nproc_per_node', 2]
    command = map(str, [*launcher, ROOT / 'train.py', *TINY, *RESNET, *argv])
    return subprocess.Popen(list(command), env=environment, text=True, stderr=subprocess.PIPE)


def log_up_to(process: subprocess.Popen, text: str) -> str:
    """What a process says up to a line with this text."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return ''.join(lines)
    raise AssertionError(''.join(lines))


def long_run(folder: Path) -> list:
    """Options of epochs of 60 batches."""
    images = write_images(folder / 'images', train=80)
    return [images, '--output', folder, *shlex.split('--epochs 1000 -j 1 -b 2 --resume auto --log-interval 20')]


@pytest.mark.slow
def test_torchrun_terminated(tmp_path):
    folder = tmp_path / 'run'
    process = torchrun(*long_run(tmp_path))
    log_up_to(process, 'epoch 0/1000  batch 20/60')
    process.send_signal(signal.SIGTERM)
    log = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    recovered = last_checkpoint(folder)
    assert recovered.name.startswith('recovery-0-'), log
    assert log.count(f'interrupted; the last complete checkpoint is {recovered}') == 1


@pytest.mark.slow
def test_torchrun_killed_and_continued(tmp_path):
    """The processes notice it."""
    options, folder = long_run(tmp_path), tmp_path / 'run'
    process = torchrun(*options)
    log_up_to(process, 'epoch 1/1000  batch 20/60')
    process.kill()
    log = process.communicate(timeout=60)[1]  # up to the end of the processes, which have its standard error
    assert log.splitlines()[-1] == f'interrupted; the last complete checkpoint is {last_checkpoint(folder)}'
    recovered = last_checkpoint(folder)
    assert recovered.name.startswith('recovery-1-')
    process = torchrun(*options)
    assert f'continuing from {recovered} at epoch 1' in log_up_to(process, 'batch 20/60')
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
