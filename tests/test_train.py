"""train.py: what it writes, what it shows, how it ends, and how it refuses."""

import csv
import fcntl
import json
import os
import pty
import runpy
import shlex
import struct
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from timm.models import create_model
from timm.scheduler import CosineLRScheduler

from flatten_zoo.errors import report_usage_errors
from flatten_zoo.training.report import draw_curves
from flatten_zoo.training.train import main

from .tiny_images import write_images, write_tars

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures('no_pictures')
TINY = shlex.split('--model test_resnet --num-classes 3 --img-size 32 -b 6 -j 0 --epochs 1 --lr 0.02 --warmup-epochs 0')


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp('data'))


def train(tmp_path, *argv) -> Path:
    """Train in this process; returns the output folder."""
    assert main([*TINY, '--output', str(tmp_path), '--experiment', 'run', *map(str, argv)]) == 0
    return tmp_path / 'run'


def summary(folder) -> list[dict[str, str]]:
    with (folder / 'summary.csv').open(newline='') as file:
        return list(csv.DictReader(file))


def refused(capsys, *argv) -> str:
    """The one line that a command which cannot work prints."""
    capsys.readouterr()
    assert report_usage_errors(lambda: main([*TINY, *map(str, argv)])) == 2
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if 'running on the CPU' not in line]
    assert output.out == ''
    assert len(lines) == 1, lines
    return lines[0]


def weights(path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)['state_dict']


# A run


def test_command_writes_everything_and_learns_and_the_next_one_validates(tmp_path, images):
    def run(command):
        environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    options = (images, '--epochs', 4, '-j', 2, '--log-interval', 2, '--output', tmp_path, '--experiment', 'a run')
    _, log = run([ROOT / 'train.py', *TINY, *map(str, options)])
    folder = tmp_path / 'a run'
    rows = summary(folder)
    assert [row['epoch'] for row in rows] == ['0', '1', '2', '3']
    assert list(rows[0]) == ['epoch', 'train_loss', 'eval_loss', 'eval_top1', 'eval_top5', 'lr']
    assert float(rows[-1]['train_loss']) < float(rows[0]['train_loss'])
    best = max(rows, key=lambda row: float(row['eval_top1']))
    assert float(best['eval_top1']) > 60
    assert (folder / 'curves.png').read_bytes().startswith(b'\x89PNG')
    assert {p.name for p in folder.iterdir()} == {
        '.lock',
        'args.yaml',
        'summary.csv',
        'curves.png',
        'last.pth.tar',
        'model_best.pth.tar',
        *(f'checkpoint-{epoch}.pth.tar' for epoch in range(4)),
    }
    assert 'epoch 0/4  batch 2/6  loss ' in log
    assert '\r' not in log
    assert f'at epoch {best["epoch"]}' in log
    assert str(folder) in log
    (command,) = [line for line in log.splitlines() if line.startswith('next: python ')]
    output, log = run(shlex.split(command.removeprefix('next: python ')))
    results = json.loads(output.removeprefix('--result\n'))  # and nothing else
    assert (results['model'], results['top1']) == ('test_resnet', round(float(best['eval_top1']), 4))
    assert 'images/s' in log


def test_bar_on_a_terminal(tmp_path, images, monkeypatch):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 120, 0, 0))
    with ThreadPoolExecutor() as pool, os.fdopen(theirs, 'w') as terminal:
        shown = pool.submit(shown_on, ours)
        with monkeypatch.context() as patch:
            patch.setattr(sys, 'stderr', terminal)
            train(tmp_path, images)
        terminal.close()
        text = shown.result()
    assert '\repoch 0/1: ' in text
    for figure in ('loss=', 'lr=', 'images/s=', '<00:0'):
        assert figure in text


def shown_on(terminal: int) -> str:
    """All that is written to the other end until that is closed."""
    shown = b''
    try:
        while part := os.read(terminal, 4096):
            shown += part
    except OSError:
        pass
    os.close(terminal)
    return shown.decode()


@pytest.mark.parametrize('epochs', [1, 2, 3, 30])
def test_curves_have_whole_epochs(epochs, tmp_path, monkeypatch):
    summary = tmp_path / 'summary.csv'
    summary.write_text('epoch,train_loss\n' + ''.join(f'{epoch},1.0\n' for epoch in range(epochs)))

    def check(figure, path, **kwargs):
        path.touch()
        ticks = figure.axes[0].get_xticks()
        assert len(ticks) and all(tick == int(tick) for tick in ticks)

    monkeypatch.setattr('matplotlib.figure.Figure.savefig', check)
    draw_curves(summary, tmp_path / 'curves.png')


def test_arguments_reproduce_the_run(tmp_path, images):
    first = train(tmp_path / 'a', images, '--epochs', 2, '-j', 1, '--mixup', 0.2, '--reprob', 0.5, '--drop', 0.1)
    argv = ['--config', str(first / 'args.yaml'), '--output', str(tmp_path / 'b')]
    assert main(argv) == 0
    second = tmp_path / 'b' / 'run'
    assert (first / 'summary.csv').read_text() == (second / 'summary.csv').read_text()
    ours, theirs = weights(first / 'last.pth.tar'), weights(second / 'last.pth.tar')
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert main([*argv, '--seed', '43', '--experiment', 'other']) == 0
    others = weights(tmp_path / 'b' / 'other' / 'last.pth.tar')
    assert not torch.equal(ours['fc.weight'], others['fc.weight'])


def test_checkpoint_is_plain_and_complete(tmp_path, images):
    folder = train(tmp_path, images, '--model-ema', '--model-ema-decay', 0.5)
    checkpoint = torch.load(folder / 'last.pth.tar', weights_only=True)
    assert checkpoint['arch'] == 'test_resnet'
    assert checkpoint['epoch'] == 0
    assert checkpoint['label_names'] == ['blue', 'green', 'red']
    assert checkpoint['args'] == yaml.safe_load((folder / 'args.yaml').read_text())
    model = create_model('test_resnet', num_classes=3)
    for key in ('state_dict', 'state_dict_ema'):
        model.load_state_dict(checkpoint[key])
    assert checkpoint['metric'] == float(summary(folder)[0]['eval_top1'])
    assert not torch.equal(checkpoint['state_dict']['fc.weight'], checkpoint['state_dict_ema']['fc.weight'])


def test_average_is_what_counts(tmp_path, images):
    """An average that never moves keeps the figures of the untrained model."""
    folder = train(tmp_path, images, '--epochs', 3, '--model-ema', '--model-ema-decay', 1.0)
    assert len({row['eval_loss'] for row in summary(folder)}) == 1
    assert len({row['train_loss'] for row in summary(folder)}) == 3


def test_learning_rates_follow_the_schedule(tmp_path, images):
    folder = train(tmp_path, images, '--epochs', 3, '--sched', 'step', '--decay-epochs', 1, '--opt', 'adamw')
    np.testing.assert_allclose([float(row['lr']) for row in summary(folder)], [0.02, 0.002, 0.0002])
    folder = train(tmp_path / 'b', images, '--epochs', 2, '--sched-on-updates')
    schedule = CosineLRScheduler(torch.optim.SGD([torch.zeros(1)], lr=0.02), t_initial=12, t_in_epochs=False)
    expected = [schedule._get_lr(step)[0] for step in (6, 12)]
    np.testing.assert_allclose([float(row['lr']) for row in summary(folder)], expected)


def test_later_start_continues_the_schedule(tmp_path, images, capsys):
    options = ('--epochs', 3, '--sched', 'step', '--decay-epochs', 1)
    folder = train(tmp_path, images, *options, '--start-epoch', 1)
    assert [row['epoch'] for row in summary(folder)] == ['1', '2']
    np.testing.assert_allclose([float(row['lr']) for row in summary(folder)], [0.002, 0.0002])
    assert '--start-epoch 3' in refused(capsys, images, *options, '--start-epoch', 3)


def test_learning_rate_scales_with_the_batch(tmp_path, images):
    argv = [word for word in TINY if word not in ('--lr', '0.02')]
    for opt, expected in (('sgd', 0.1 * 6 / 24), ('adamw', 0.1 * (6 / 24) ** 0.5)):
        assert (
            main(
                [
                    *argv,
                    str(images),
                    '--opt',
                    opt,
                    '--lr-base-size',
                    '24',
                    '--output',
                    str(tmp_path),
                    '--experiment',
                    opt,
                ]
            )
            == 0
        )
        assert yaml.safe_load((tmp_path / opt / 'args.yaml').read_text())['lr'] == pytest.approx(expected)


@pytest.mark.filterwarnings('ignore:PlateauLRScheduler', 'ignore:Using backward', "ignore:'pin_memory'")
@pytest.mark.parametrize(
    'argv',
    [
        '--mixup 0.8 --cutmix 1.0 --smoothing 0.1 --mixup-off-epoch 1 --epochs 2',
        '--mixup 0.8 --no-prefetcher --bce-loss --bce-target-thresh 0.2',
        '--aug-splits 2 --jsd-loss --split-bn --resplit --reprob 0.5 --aa rand-m9-mstd0.5-inc1',
        '--bce-loss --bce-sum --bce-pos-weight 2',
        '--opt lookahead_adamw --layer-decay 0.7 --clip-grad 1 --clip-mode agc --model-ema --model-ema-warmup',
        '--opt adahessian --clip-grad 1 --clip-mode value',
        '--model-ema --model-ema-force-cpu --sched plateau --eval-metric loss',
        '--in-chans 1 --no-prefetcher --train-crop-mode rkrc --scale 0.8 1 --ratio 0.9 1.1',
        '--no-aug --head-init-scale 0.1 --head-init-bias -1 --drop-path 0.1 --gp max '
        '--model-kwargs zero_init_last=False',
        '--train-interpolation bicubic --color-jitter-prob 0.5 --grayscale-prob 0.5 --gaussian-blur-prob 0.5 '
        '--vflip 0.5',
        '--opt adamw --opt-eps 1e-6 --opt-betas 0.8 0.99 --opt-kwargs amsgrad=True --layer-decay 0.5 '
        '--layer-decay-min-scale 0.2 --layer-decay-no-opt-scale 0.3 --model test_efficientnet --bn-momentum 0.2 '
        '--bn-eps 1e-3',
        '--mixup 0.2 --cutmix-minmax 0.2 0.8 --mixup-prob 0.7 --mixup-switch-prob 0.3 --mixup-mode elem --pin-mem',
        '--input-img-mode RGB --hflip 0 --color-jitter 0 --reprob 1 --remode const --recount 2 '
        '--drop-connect 0.1 --worker-seeding part -j 1',
    ],
)
def test_options_train(tmp_path, images, argv):
    folder = train(tmp_path, images, *argv.split())
    losses = [[float(row['train_loss']), float(row['eval_loss'])] for row in summary(folder)]
    assert np.isfinite(losses).all()


def test_images_that_are_not_square(tmp_path, images):
    argv = [word for word in TINY if word not in ('--img-size', '32')]
    assert (
        main(
            [
                *argv,
                '--input-size',
                '3',
                '24',
                '40',
                str(images),
                '--output',
                str(tmp_path),
                '--experiment',
                'run',
                '--save-images',
            ]
        )
        == 0
    )
    with Image.open(tmp_path / 'run' / 'train-batch-0.jpg') as grid:
        assert grid.size == (6 * 40, 24)


def test_images_can_be_saved(tmp_path, images):
    folder = train(tmp_path, images, '--save-images', '--log-interval', 4)
    assert {p.name for p in folder.glob('*.jpg')} == {'train-batch-0.jpg', 'train-batch-4.jpg'}


def test_validation_only_now_and_then_or_never(tmp_path, images):
    folder = train(tmp_path, images, '--epochs', 4, '--val-interval', 3, '--checkpoint-hist', 2)
    assert [bool(row['eval_top1']) for row in summary(folder)] == [False, False, True, True]
    assert all(float(row['lr']) > 0 for row in summary(folder))
    assert sum(1 for _ in folder.glob('checkpoint-*.pth.tar')) == 2
    folder = train(tmp_path / 'b', images, '--val-split', '')
    assert list(summary(folder)[0]) == ['epoch', 'train_loss', 'lr']
    assert not (folder / 'model_best.pth.tar').exists()


def test_initial_checkpoint_is_where_training_starts(tmp_path, images):
    first = train(tmp_path / 'a', images)
    second = train(tmp_path / 'b', images, '--initial-checkpoint', first / 'last.pth.tar', '--lr', 0)
    ours, theirs = weights(first / 'last.pth.tar'), weights(second / 'last.pth.tar')
    assert torch.equal(ours['fc.weight'], theirs['fc.weight'])


def test_pretrained_path_is_where_all_but_the_classifier_starts(tmp_path, images):
    first = train(tmp_path / 'a', images) / 'last.pth.tar'
    second = train(tmp_path / 'b', images, '--pretrained-path', first, '--lr', 0) / 'last.pth.tar'
    ours, theirs = weights(first), weights(second)
    assert torch.equal(ours['conv1.0.weight'], theirs['conv1.0.weight'])
    assert not torch.equal(ours['fc.weight'], theirs['fc.weight'])


# Data


def test_tar_files(tmp_path, images):
    tars = write_tars(tmp_path / 'tars', images)
    folder = train(tmp_path / 'a', tars)
    other = train(tmp_path / 'b', images)
    assert (folder / 'summary.csv').read_text() == (other / 'summary.csv').read_text()


def test_torchvision_datasets(tmp_path, images):
    raw = tmp_path / 'FashionMNIST' / 'raw'
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for split, number in (('train', 30), ('t10k', 10)):
        header = np.array([number, 28, 28], '>i4').tobytes()
        pixels = random.integers(0, 256, (number, 28, 28), np.uint8).tobytes()
        (raw / f'{split}-images-idx3-ubyte').write_bytes(b'\0\0\x08\x03' + header + pixels)
        labels = (np.arange(number) % 10).astype(np.uint8).tobytes()
        (raw / f'{split}-labels-idx1-ubyte').write_bytes(b'\0\0\x08\x01' + header[:4] + labels)
    train(tmp_path / 'a', tmp_path, '--dataset', 'torch/fashion_mnist', '--num-classes', 10, '--in-chans', 1)
    train(tmp_path / 'b', images, '--dataset', 'torch/image_folder')


def test_class_map_orders_and_completes_the_classes(tmp_path, images):
    class_map = tmp_path / 'classes.txt'
    class_map.write_text('red\nblack\ngreen\nblue\n')
    folder = train(tmp_path, images, '--class-map', class_map, '--num-classes', 4)
    assert weights(folder / 'last.pth.tar')['fc.weight'].shape[0] == 4
    checkpoint = torch.load(folder / 'last.pth.tar', weights_only=True)
    assert checkpoint['label_names'] == ['red', 'black', 'green', 'blue']


# Refusals


def test_missing_or_empty_data(tmp_path, capsys, images):
    assert 'no data: give its folder with --data-dir' in refused(capsys)
    assert f"--data-dir '{tmp_path}/none' does not exist" in refused(capsys, tmp_path / 'none')
    assert f"--data-dir '{tmp_path}' is empty" in refused(capsys, tmp_path)
    (tmp_path / 'train' / 'red').mkdir(parents=True)
    assert refused(capsys, tmp_path) == f"error: there are no images in '{tmp_path}/train'"
    line = refused(capsys, images, '--val-split', 'test')
    assert f"no split 'test' in '{images}', which has train, validation" in line
    assert "no split 'train'" in refused(capsys, images / 'train')
    (tmp_path / 'train' / 'red').rmdir()
    (tmp_path / 'train').rmdir()
    (tmp_path / 'mine').symlink_to(images / 'train')
    assert "no split 'yours'" in refused(capsys, tmp_path, '--train-split', 'mine', '--val-split', 'yours')


def test_wrong_number_of_classes(tmp_path, capsys, images):
    assert 'the data has 3 classes but test_resnet has 4: give --num-classes 3' in refused(
        capsys, images, '--num-classes', 4
    )
    assert 'the data has 3 classes but test_resnet has 2' in refused(capsys, images, '--num-classes', 2)
    few = write_images(tmp_path / 'data')
    for path in (few / 'validation' / 'green').iterdir():
        path.unlink()
    assert 'different classes, green for one' in refused(capsys, few)


@pytest.mark.parametrize('split', ['train', 'validation'])
@pytest.mark.parametrize('workers', [0, 1])
def test_unreadable_image_is_named(tmp_path, capsys, split, workers):
    root = write_images(tmp_path / 'data')
    bad = root / split / 'green' / '3.png'
    bad.write_bytes(bad.read_bytes()[:200] if workers else b'nothing')
    line = refused(capsys, root, '--output', tmp_path, '-j', workers)
    assert line == f"error: cannot read the image '{bad}'; remove or replace it"


def test_unreadable_image_in_a_torchvision_folder_is_named(tmp_path, capsys):
    root = write_images(tmp_path / 'data')
    bad = root / 'train' / 'green' / '3.png'
    bad.write_bytes(b'nothing')
    assert f"'{bad}'" in refused(capsys, root, '--output', tmp_path, '--dataset', 'torch/image_folder')


def test_models_that_do_not_exist(capsys, images):
    assert "unknown model 'test_resnt'; did you mean test_resnet" in refused(capsys, images, '--model', 'test_resnt')
    assert "model 'someone/model': " in refused(capsys, images, '--model', 'someone/model')
    assert "unknown model 'resnet18.nobody'; did you mean resnet18." in refused(
        capsys, images, '--model', 'resnet18.nobody'
    )
    line = refused(capsys, images, '--model-kwargs', 'depth=3')
    assert "cannot build 'test_resnet' --num-classes" in line
    assert "'depth'" in line


def test_checkpoints_that_do_not_fit(tmp_path, capsys, images):
    folder = train(tmp_path, images)
    whole = folder / 'last.pth.tar'
    line = refused(capsys, images, '--model', 'test_vit', '--img-size', 64, '--initial-checkpoint', whole)
    assert f"'{whole}' of 'test_resnet' does not fit the model 'test_vit': " in line
    half = tmp_path / 'half.pth.tar'
    half.write_bytes(whole.read_bytes()[:100_000])
    assert f"'{half}' is incomplete" in refused(capsys, images, '--initial-checkpoint', half)


def test_earlier_runs_are_not_overwritten(tmp_path, capsys, images):
    folder = train(tmp_path, images)
    before = (folder / 'last.pth.tar').read_bytes()
    line = refused(capsys, images, '--output', tmp_path, '--experiment', 'run')
    assert f"'{folder}' holds an earlier run" in line
    assert (folder / 'last.pth.tar').read_bytes() == before


def test_refusal_leaves_no_output(tmp_path, capsys, images):
    refused(capsys, images, '--num-classes', 4, '--output', tmp_path / 'out')
    refused(capsys, images, '-b', 1000, '--output', tmp_path / 'out')
    refused(capsys, images, '--sched', 'wsd', '--decay-epochs', 9, '--output', tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_devices(capsys, images):
    assert "--device 'gpu'" in refused(capsys, images, '--device', 'gpu')
    if not torch.accelerator.is_available():
        for device in ('cuda:0', 'mps'):
            assert f"--device '{device}': this machine has none" in refused(capsys, images, '--device', device)
        assert 'the data has 3 classes' in refused(capsys, images, '--num-classes', 4, '--device', 'cuda')


def test_command_reports_a_mistake_on_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['train.py', '--epoch', '3'])
    with pytest.raises(SystemExit) as e:
        runpy.run_path(str(ROOT / 'train.py'), run_name='__main__')
    assert e.value.code == 2
    assert capsys.readouterr() == (
        '',
        "error: unknown option '--epoch'; did you mean --epochs, --start-epoch, --reprob?\n",
    )


def test_one_of_several_processes_alone(capsys, images, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert 'the 2 processes of this run cannot join: Error initializing' in refused(capsys, images)
