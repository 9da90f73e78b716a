"""Runs that are interrupted and go on: nothing is lost, and the end is the same."""

import argparse
import csv
import os
import random
import shlex
import signal

import numpy as np
import pytest
import torch
import yaml

from flatten_zoo.errors import report_usage_errors
from flatten_zoo.training import continuing as checkpoints
from flatten_zoo.training import processes as interrupts
from flatten_zoo.training import train as training
from flatten_zoo.training.continuing import last_checkpoint, random_state, set_random_state
from flatten_zoo.training.loop import trainer
from flatten_zoo.training.options.definitions import train_parser
from flatten_zoo.training.train import main

from .marks import slow_but
from .runs import assert_same_end
from .tiny_images import write_images, write_parquet, write_shards

pytestmark = pytest.mark.usefixtures('no_pictures')
TINY = shlex.split(
    '--model test_resnet --num-classes 3 --img-size 32 -b 6 -j 0 --epochs 4 --lr 0.02 --warmup-epochs 1 --device cpu '
    '--experiment run --checkpoint-hist 2'
)
RANDOM = '--mixup 0.4 --drop 0.2 --reprob 0.5 --model-ema --model-ema-decay 0.9 --model-ema-warmup'


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp('data'), train=8)


def train(output, images, *argv) -> int:
    return main([*TINY, str(images), '--output', str(output), *map(str, argv)])


def interrupt(monkeypatch, epoch: int) -> None:
    """Let the next run end before that epoch."""
    original = trainer.Trainer.train_epoch

    def train_epoch(self, current, *args):
        if current == epoch:
            raise KeyboardInterrupt
        return original(self, current, *args)

    monkeypatch.setattr(trainer.Trainer, 'train_epoch', train_epoch)


def terminate_at(monkeypatch, owner, name: str, call: int) -> None:
    """Send SIGTERM to this process at the beginning of a call of a function."""
    original, calls = getattr(owner, name), []

    def function(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, function)


def refused(capsys, *argv) -> str:
    capsys.readouterr()
    assert report_usage_errors(lambda: train(*argv)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.filterwarnings('ignore:PlateauLRScheduler')
@pytest.mark.parametrize(
    'options',
    [
        RANDOM,
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                RANDOM + ' --no-prefetcher --amp --clip-grad 1 --grad-accum-steps 3 --sched-on-updates --epochs 3',
                '--opt lookahead_adamw --sched plateau --patience-epochs 0 --lr-noise 0.2 --eval-metric loss --lr 0.5',
                '--model-dtype bfloat16 --model-ema -j 1 --sched step --decay-epochs 1 --epochs 3 --val-split ""',
            )
        ),
        '--train-img-sizes 24 32 --train-batch-sizes 8 4 --variable-batch-loss-scale sqrt --model-ema-force-cpu '
        '--model-ema --tta 2 --no-prefetcher',
    ],
)
def test_interrupted_run_ends_like_one_that_was_not(tmp_path, images, monkeypatch, options):
    options = shlex.split(options)
    assert train(tmp_path / 'whole', images, *options) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        assert train(tmp_path / 'parts', images, *options, '--resume', 'auto') == 130
    assert main(['--resume', str(tmp_path / 'parts' / 'run')]) == 0
    assert_same_end(tmp_path / 'whole' / 'run', tmp_path / 'parts' / 'run')


def test_folder_to_continue_has_the_options(tmp_path):
    folder = tmp_path / 'run'
    folder.mkdir()
    (folder / 'args.yaml').write_text(
        yaml.safe_dump(
            {
                'model': 'test_vit',
                'epochs': 7,
                'lr': 0.5,
                'output': 'elsewhere',
                'experiment': '',
                'resume': 'a.pth.tar',
                'start_epoch': 3,
                'no_resume_opt': True,
                'pretrained': True,
                'initial_checkpoint': 'a.pth.tar',
                'dataset_download': True,
                'dataset_trust_remote_code': True,
                'device_modules': ['antigravity'],
            }
        )
    )
    args = training.parse(['--resume', str(folder), '--lr', '0.25'])
    theirs = {'model': 'test_vit', 'epochs': 7, 'lr': 0.25, 'output': str(tmp_path), 'experiment': 'run'}
    assert vars(args) == vars(train_parser().parse_with_config([])) | theirs | {'resume': str(folder)}


@pytest.mark.parametrize(
    'data, before, after, anew',
    [
        pytest.param('images', '-b 6', '-b 8', True, marks=pytest.mark.slow),
        ('images', '--grad-accum-steps 2', '--grad-accum-steps 1', True),
        pytest.param('images', '--epochs 3', '--epochs 4', False, marks=pytest.mark.slow),
        pytest.param('images', '-j 0', '-j 1', False, marks=pytest.mark.slow),
        pytest.param(
            'images',
            *(f'--train-img-sizes 24 32 --train-batch-sizes {sizes}' for sizes in ('8 4', '6 3')),
            True,
            marks=pytest.mark.slow,
        ),
        ('shards', '-j 0', '-j 2', True),
        pytest.param('parquet', '--epoch-repeats 0', '--epoch-repeats 2', True, marks=pytest.mark.slow),
    ],
)
def test_changed_batches_updates_and_epochs(tmp_path, images, monkeypatch, caplog, data, before, after, anew):
    """From where it goes on, the run has the rates and batches of one that had the new options all along."""
    monkeypatch.setattr(training, 'draw_curves', lambda *args: None)
    stream = []
    if data == 'shards':
        images, stream = write_shards(tmp_path / 'shards', images), ['--dataset', 'wds/tiny']
    elif data == 'parquet':
        write_parquet(tmp_path / 'parquet', images)
        monkeypatch.setattr('datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN', 0.1)
        images, stream = tmp_path / 'cache', ['--dataset', f'hfids/{tmp_path}/parquet', '--train-num-samples', 24]
    batches, backward = [], trainer.Trainer._backward

    def recorded(self, images, *args):
        batches.append((len(images), self.learning_rate(), self.updates))
        return backward(self, images, *args)

    def run(options: str, status: int = 0) -> list[tuple[int, float, int]]:
        """Images, learning rate, and updates before, of every batch that a run trains on."""
        batches.clear()
        fixed = (*stream, '--epochs', 3, '--val-split', '', '--sched-on-updates', '--log-interval', 1)
        assert train(tmp_path, images, *fixed, *options.split()) == status
        return list(batches)

    monkeypatch.setattr(trainer.Trainer, '_backward', recorded)
    whole = run(f'{after} --experiment whole')
    epochs = 4 if after == '--epochs 4' else 3
    length = len(whole) // epochs

    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        run(before, 130)
    assert run(f'{after} --resume auto') == whole[2 * length :]

    with monkeypatch.context() as patch:
        terminate_at(patch, trainer.Trainer, '_update', 2)
        done = len(run(f'{before} --experiment within', 143))
    first = 0 if anew else done
    caplog.clear()
    assert run(f'{after} --experiment within --resume auto') == whole[first:]
    assert ('divided into other batches or updates: it starts anew' in caplog.text) == anew
    progress = [line.split('  loss')[0] for line in caplog.messages if line.startswith(f'epoch 0/{epochs}  batch')]
    assert progress == [f'epoch 0/{epochs}  batch {number}/{length}' for number in range(first + 1, length + 1)]


@pytest.mark.parametrize('workers', [0, pytest.param(2, marks=pytest.mark.slow)])
def test_interrupted_stream_ends_like_one_that_was_not(tmp_path, images, monkeypatch, workers):
    shards = write_shards(tmp_path / 'shards', images)
    options = ('--dataset', 'wds/tiny', '-j', workers)
    assert train(tmp_path / 'whole', shards, *options) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        assert train(tmp_path / 'parts', shards, *options, '--resume', 'auto') == 130
    assert train(tmp_path / 'parts', shards, *options, '--resume', 'auto') == 0
    assert_same_end(tmp_path / 'whole' / 'run', tmp_path / 'parts' / 'run')


@pytest.mark.parametrize('failing', slow_but('replace', of=['save', 'replace', 'link']))
def test_interruption_while_saving_leaves_whole_files_and_changes_nothing(tmp_path, images, monkeypatch, failing):
    options = ('--opt', 'adamw', '--no-prefetcher', '--drop', 0.2)
    assert train(tmp_path / 'whole', images, *options) == 0
    owner = checkpoints.torch if failing == 'save' else checkpoints.os
    original, calls = getattr(owner, failing), []

    def interrupted(*args, **kwargs):
        if str(args[0]).endswith('.pth.tar') or failing == 'save':
            calls.append(args)
        if len(calls) == 4:
            if failing == 'save':
                args[1].write(b'half')
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, failing, interrupted)
        assert train(tmp_path / 'parts', images, *options) == 130
    files = list((tmp_path / 'parts' / 'run').glob('*.pth.tar'))
    assert {'last.pth.tar', 'model_best.pth.tar'} <= {path.name for path in files}
    assert all(torch.load(path, weights_only=True)['state_dict'] for path in files)
    assert train(tmp_path / 'parts', images, *options, '--resume', 'auto') == 0
    assert_same_end(tmp_path / 'whole' / 'run', tmp_path / 'parts' / 'run')


@pytest.mark.parametrize(
    'owner, name, call',
    [
        (trainer.Trainer, '_update', 6),  # the second of epoch 1
        (trainer.ClassificationEvaluator, 'update', 8),  # the second of the validation of epoch 1
    ],
)
def test_termination_saves_what_the_epoch_has_come_to(tmp_path, images, monkeypatch, owner, name, call):
    options = ('--no-prefetcher', '--drop', 0.2, '--model-ema', '--sched-on-updates')
    assert train(tmp_path / 'whole', images, *options) == 0
    with monkeypatch.context() as patch:
        terminate_at(patch, owner, name, call)
        assert train(tmp_path / 'parts', images, *options) == 143
    folder = tmp_path / 'parts' / 'run'
    done = 2 if name == '_update' else 4
    assert last_checkpoint(folder) == folder / f'recovery-1-{done}.pth.tar'
    assert torch.load(last_checkpoint(folder), weights_only=True)['run']['position']['batches'] == done
    updates = []
    with monkeypatch.context() as patch:
        original = trainer.Trainer._update
        patch.setattr(trainer.Trainer, '_update', lambda self: (updates.append(1), original(self)))
        assert train(tmp_path / 'parts', images, *options, '--resume', 'auto') == 0
    assert len(updates) == 16 - 4 - done
    assert_same_end(tmp_path / 'whole' / 'run', folder)


def test_end_of_torchrun_ends_its_processes(tmp_path, images, monkeypatch):
    update = trainer.Trainer._update
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')
    monkeypatch.setattr(
        trainer.Trainer, '_update', lambda self: (update(self), monkeypatch.setattr(interrupts, '_parent', 0))
    )
    assert train(tmp_path, images) == 143
    assert last_checkpoint(tmp_path / 'run').name == 'recovery-0-1.pth.tar'


def torchs_error(cause: Exception | None = None) -> RuntimeError:
    """What torch raises when it cannot write."""
    error = RuntimeError('unexpected pos 704 vs 598\nfile 3')
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    'error, reason',
    [
        (OSError(28, 'No space left on device'), 'No space left on device'),
        (torchs_error(OSError(28, 'No space left on device')), 'No space left on device'),
        (torchs_error(), 'unexpected pos 704 vs 598'),
    ],
)
def test_full_disk_is_said_and_loses_nothing(tmp_path, images, monkeypatch, capsys, error, reason):
    assert train(tmp_path, images, '--epochs', 1) == 0
    folder = tmp_path / 'run'
    before = {path.name: path.read_bytes() for path in folder.glob('*.pth.tar')}

    def save(state, file):
        file.write(b'half')
        raise error

    monkeypatch.setattr(checkpoints.torch, 'save', save)
    capsys.readouterr()
    assert report_usage_errors(lambda: train(tmp_path, images, '--epochs', 3, '--resume', 'auto')) == 2
    assert f"error: cannot write a checkpoint in '{folder}': {reason}; the earlier" in capsys.readouterr().err
    after = {path.name for path in folder.glob('*.pth.tar')}
    assert after == set(before)
    assert torch.load(folder / 'last.pth.tar', weights_only=True)['epoch'] == 0
    assert report_usage_errors(lambda: train(tmp_path, images, '--epochs', 1, '--experiment', 'new')) == 2
    assert capsys.readouterr().err.endswith(f"in '{tmp_path}/new': {reason}; there is no earlier one\n")


@pytest.mark.parametrize('name', ['update_summary', 'draw_curves', 'write_options_file'])
def test_full_disk_in_other_files(tmp_path, images, monkeypatch, capsys, name):
    options = ('--opt', 'adamw', '--epochs', 2, '--resume', 'auto')
    assert train(tmp_path, images, *options, '--epochs', 1, '--warmup-epochs', 0) == 0
    last = tmp_path / 'run' / 'last.pth.tar'

    def full(*args, **kwargs):
        raise OSError(28, 'No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(training, name, full)
        capsys.readouterr()
        assert report_usage_errors(lambda: train(tmp_path, images, *options)) == 2
        begun = name != 'write_options_file'
        left = f'the last complete checkpoint is {last}' if begun else 'training had not begun'
        assert f'error: cannot write the output: No space left on device; {left}\n' in capsys.readouterr().err
    assert train(tmp_path, images, *options) == 0
    with (last.parent / 'summary.csv').open(newline='') as file:
        assert [row['epoch'] for row in csv.DictReader(file)] == ['0', '1']


def test_unreadable_image_costs_no_earlier_checkpoint(tmp_path, capsys):
    options = ('--epochs', 2, '--no-prefetcher', '--warmup-epochs', 0)
    data = write_images(tmp_path / 'data', train=8)
    assert train(tmp_path / 'whole', data, *options) == 0
    image = data / 'train' / 'green' / '3.png'
    content = image.read_bytes()

    def damage(self, epoch, *args):
        if epoch == 1:
            image.write_bytes(content[:100])
        return original(self, epoch, *args)

    original = trainer.Trainer.train_epoch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, 'train_epoch', damage)
        capsys.readouterr()
        assert report_usage_errors(lambda: train(tmp_path / 'parts', data, *options)) == 2
    assert f"error: cannot read the image '{image}'; remove or replace it\n" in capsys.readouterr().err
    image.write_bytes(content)
    assert train(tmp_path / 'parts', data, *options, '--resume', 'auto') == 0
    assert_same_end(tmp_path / 'whole' / 'run', tmp_path / 'parts' / 'run')


def test_recovery_checkpoints_come_and_go(tmp_path, images, monkeypatch):
    seen = []
    original = training.Run._validate

    def validate(self, epoch, label):
        seen.append(sorted(path.name for path in self.folder.glob('recovery*')))
        return original(self, epoch, label)

    monkeypatch.setattr(training.Run, '_validate', validate)
    assert train(tmp_path, images, '--recovery-interval', 1, '--epochs', 2) == 0
    assert seen == [[f'recovery-{epoch}-{batch}.pth.tar' for batch in (3, 4)] for epoch in (0, 1)]
    assert not list((tmp_path / 'run').glob('recovery*'))


def test_finished_run_has_nothing_left_to_do(tmp_path, images):
    assert train(tmp_path, images, '--epochs', 2) == 0
    before = (tmp_path / 'run' / 'summary.csv').read_bytes()
    assert train(tmp_path, images, '--epochs', 2, '--resume', 'auto') == 0
    assert (tmp_path / 'run' / 'summary.csv').read_bytes() == before


def test_another_experiment_starts_its_own_history(tmp_path, images):
    assert train(tmp_path, images, '--epochs', 3, '--decay-epochs', 1, '--sched', 'step') == 0
    last = tmp_path / 'run' / 'last.pth.tar'
    assert (
        train(
            tmp_path,
            images,
            '--resume',
            last,
            '--experiment',
            'other',
            '--decay-epochs',
            1,
            '--sched',
            'step',
            '--lr',
            1,
        )
        == 0
    )
    with (tmp_path / 'other' / 'summary.csv').open(newline='') as file:
        rows = list(csv.DictReader(file))
    assert [row['epoch'] for row in rows] == ['3']
    assert float(rows[0]['lr']) == pytest.approx(1e-3)


def test_checkpoint_of_timms_own_script_is_continued(tmp_path, images):
    """It has no random numbers, no counts of updates, and the options as a Namespace."""
    assert train(tmp_path, images, '--epochs', 2, '--sched-on-updates') == 0
    last = tmp_path / 'run' / 'last.pth.tar'
    checkpoint = torch.load(last, weights_only=True)
    plain = {key: value for key, value in checkpoint.items() if key not in ('run', 'saver')}
    torch.save({**plain, 'args': argparse.Namespace(**checkpoint['args'])}, last)
    assert train(tmp_path, images, '--epochs', 3, '--sched-on-updates', '--resume', 'auto') == 0
    assert torch.load(last, weights_only=True)['run']['updates'] == 12
    with (last.parent / 'summary.csv').open(newline='') as file:
        assert [row['epoch'] for row in csv.DictReader(file)] == ['0', '1', '2']


def test_new_optimizer_on_old_weights(tmp_path, images, capsys):
    assert train(tmp_path, images, '--epochs', 1, '--warmup-epochs', 0) == 0
    last = tmp_path / 'run' / 'last.pth.tar'
    other = (tmp_path, images, '--epochs', 2, '--warmup-epochs', 0, '--resume', last, '--experiment')
    assert '--no-resume-opt continues with a new one' in refused(
        capsys, *other, 'a', '--opt', 'adamw', '--layer-decay', 0.5
    )
    assert not (tmp_path / 'a').exists()
    assert train(*other, 'a', '--opt', 'adamw', '--layer-decay', 0.5, '--no-resume-opt') == 0
    assert train(*other, 'b', '--lr', 0) == 0
    ours, theirs = (
        torch.load(path, weights_only=True)['state_dict']['fc.weight']
        for path in (last, tmp_path / 'b' / 'last.pth.tar')
    )
    assert torch.equal(ours, theirs)


def test_average_begins_where_the_checkpoint_has_none(tmp_path, images):
    assert train(tmp_path, images, '--epochs', 1) == 0
    last = tmp_path / 'run' / 'last.pth.tar'
    assert (
        train(
            tmp_path,
            images,
            '--epochs',
            2,
            '--resume',
            last,
            '--experiment',
            'b',
            '--model-ema',
            '--model-ema-decay',
            1,
        )
        == 0
    )
    average = torch.load(tmp_path / 'b' / 'last.pth.tar', weights_only=True)['state_dict_ema']
    assert torch.equal(average['fc.weight'], torch.load(last, weights_only=True)['state_dict']['fc.weight'])


def test_what_cannot_be_continued_is_refused(tmp_path, images, capsys):
    assert train(tmp_path, images, '--epochs', 2) == 0
    folder = tmp_path / 'run'
    assert 'no such file' in refused(capsys, tmp_path, images, '--resume', tmp_path / 'none.pth.tar')
    assert 'no such file' in refused(capsys, tmp_path, images, '--resume', 'long' * 100)
    assert 'cannot make the output folder' in refused(
        capsys, tmp_path, images, '--resume', 'auto', '--experiment', 'long' * 100
    )
    (tmp_path / 'empty').mkdir()
    assert 'it has no args.yaml' in refused(capsys, tmp_path, images, '--resume', tmp_path / 'empty')
    (tmp_path / 'empty' / 'args.yaml').write_bytes((folder / 'args.yaml').read_bytes())
    assert 'there is no checkpoint in this folder' in refused(capsys, tmp_path, images, '--resume', tmp_path / 'empty')
    assert '--resume auto needs --experiment' in refused(
        capsys, tmp_path, images, '--resume', 'auto', '--experiment', ''
    )
    assert 'holds an earlier run' in refused(capsys, tmp_path, images, '--resume', folder / 'checkpoint-0.pth.tar')
    assert 'does not fit the model' in refused(
        capsys, tmp_path, images, '--resume', 'auto', '--model', 'test_vit', '--img-size', 64
    )


@pytest.mark.parametrize('recovery', [False, True])
def test_truncated_checkpoint_names_one_that_is_whole(tmp_path, images, capsys, recovery):
    options = ('--opt', 'adamw', '--no-prefetcher', '--drop', 0.2, '--epochs', 3)
    assert train(tmp_path / 'whole', images, *options) == 0
    assert train(tmp_path / 'parts', images, *options, '--epochs', 2, '--sched', 'cosine') == 0
    folder = tmp_path / 'parts' / 'run'
    last, before, best = (folder / f'{name}.pth.tar' for name in ('last', 'checkpoint-0', 'model_best'))
    content = last.read_bytes()
    last.write_bytes(content[: len(content) // 2])  # and with it the other names of the same file
    best.unlink()
    if recovery:
        (folder / 'recovery-2-1.pth.tar').write_bytes(content[:1000])
    line = refused(capsys, tmp_path / 'parts', images, *options, '--resume', 'auto')
    damaged = folder / 'recovery-2-1.pth.tar' if recovery else last
    assert line.startswith(f"error: '{last}' is incomplete")
    assert line.endswith(f"or move it away and continue with --resume '{before}', which is whole")
    for path in {last, damaged}:
        path.unlink()
    assert train(tmp_path / 'parts', images, *options, '--resume', before) == 0
    with (folder / 'summary.csv').open(newline='') as file:
        assert [row['epoch'] for row in csv.DictReader(file)] == ['0', '1', '2']
    assert torch.load(last, weights_only=True)['epoch'] == 2


def test_random_generators_continue():
    def draw():
        return random.random(), np.random.standard_normal(), torch.rand(1).item()

    np.random.standard_normal()  # every second one is kept in the state
    state = random_state(torch.device('cpu'))
    expected = draw()
    draw()
    set_random_state(state, torch.device('cpu'))
    assert draw() == expected
