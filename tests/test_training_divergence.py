"""Losses and weights that are no longer finite: a clear end, and nothing broken is saved."""

import math
import os
import shlex
import signal

import pytest
import torch
from timm.task import ClassificationTask

from flatten_zoo.errors import report_usage_errors
from flatten_zoo.training.loop.trainer import Divergence, EpochLoss, Trainer, check_weights, remedies
from flatten_zoo.training.options.definitions import train_parser
from flatten_zoo.training.train import main, prepare

from .tiny_images import write_images

pytestmark = pytest.mark.usefixtures('no_pictures')
TINY = shlex.split(
    '--model test_resnet --num-classes 3 --img-size 32 -b 6 -j 0 --epochs 3 --lr 0.02 --warmup-epochs 0 --device cpu '
    '--experiment run'
)


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp('data'), train=8)


def train(output, images, *argv) -> int:
    return main([*TINY, str(images), '--output', str(output), *map(str, argv)])


def diverged(capsys, *argv) -> str:
    """The message of a run that must fail."""
    capsys.readouterr()
    assert report_usage_errors(lambda: train(*argv)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith('error: epoch ')
    return line


def break_loss(monkeypatch, batch: int, value: float) -> None:
    """Give the loss of one batch, counted over all epochs, another value; its gradients follow."""
    original, calls = ClassificationTask.forward, []

    def forward(self, *args):
        calls.append(1)
        result = original(self, *args)
        return {**result, 'loss': result['loss'] * value} if len(calls) == batch else result

    monkeypatch.setattr(ClassificationTask, 'forward', forward)


def test_the_highest_rate_is_to_be_lowered():
    for argv, said in (
        ('', '--lr than 0.1'),
        ('--warmup-lr 1e6', '--warmup-lr than 1e+06'),
        ('--warmup-lr 1e6 --warmup-epochs 0', '--lr than 0.1'),
        ('--min-lr 9', '--min-lr than 9'),
    ):
        assert remedies(train_parser().parse_args(argv.split()), lr=0.1).startswith(f'try a lower {said}, ')


@pytest.mark.parametrize(
    'options, value',
    [
        ('', math.nan),
        ('--amp --amp-dtype bfloat16 --clip-grad 1', math.inf),
        *(pytest.param(options, math.inf, marks=pytest.mark.slow) for options in ('', '--amp', '--model-ema')),
    ],
)
def test_loss_that_is_not_finite_ends_the_run(tmp_path, images, monkeypatch, capsys, options, value):
    break_loss(monkeypatch, 6, value)
    line = diverged(capsys, tmp_path, images, '--recovery-interval', 1, *options.split())
    folder = tmp_path / 'run'
    assert line.startswith(f'error: epoch 1/3: the loss of batch 2 is {value}; try a lower --lr than 0.02')
    assert ('--clip-grad 1' in line) == ('clip' not in options)
    assert ('--amp-dtype bfloat16' in line) == (options == '--amp')
    assert line.endswith(f'; the last complete checkpoint is {folder}/recovery-1-1.pth.tar')
    for path in folder.glob('*.pth.tar'):
        checkpoint = torch.load(path, weights_only=True)
        for key in {'state_dict', 'state_dict_ema'} & set(checkpoint):
            assert all(tensor.isfinite().all() for tensor in checkpoint[key].values())
    monkeypatch.undo()
    assert train(tmp_path, images, *options.split(), '--resume', 'auto') == 0
    rows = (folder / 'summary.csv').read_text().splitlines()
    assert [row.split(',')[0] for row in rows] == ['epoch', '0', '1', '2']
    assert 'nan' not in ''.join(rows)


def test_figures_on_the_way_notice_it(tmp_path, images, monkeypatch, capsys):
    break_loss(monkeypatch, 1, float('nan'))
    updates = []
    original = Trainer._update
    monkeypatch.setattr(Trainer, '_update', lambda self: (updates.append(1), original(self)))
    line = diverged(capsys, tmp_path, images, '--log-interval', 2)
    assert 'epoch 0/3: the loss of batch 1 is nan' in line
    assert line.endswith('there is no checkpoint yet')
    assert len(updates) == 2
    assert not list((tmp_path / 'run').glob('*.pth.tar*'))


@pytest.mark.parametrize(
    'options, update',
    [('-b 24', 1), ('-b 12 --recovery-interval 2', 2), ('-b 12 --grad-accum-steps 2', 1), ('--recovery-interval 1', 1)],
)
def test_weights_broken_by_the_latest_update_are_not_saved(tmp_path, images, monkeypatch, capsys, options, update):
    """Every loss is finite: only the weights say it."""
    original = Trainer._update

    def broken_update(self):
        original(self)
        if self.updates == update:
            self.task.trainable_module.fc.bias.data[1] = float('inf')

    monkeypatch.setattr(Trainer, '_update', broken_update)
    line = diverged(capsys, tmp_path, images, *options.split())
    assert line.startswith('error: epoch 0/3: the weights are no longer finite (fc.bias for one); try ')
    assert not list((tmp_path / 'run').glob('*.pth.tar*'))
    assert not (tmp_path / 'run' / 'summary.csv').exists()


def test_earlier_checkpoint_stays(tmp_path, images, capsys):
    assert train(tmp_path, images, '--epochs', 1) == 0
    last = tmp_path / 'run' / 'last.pth.tar'
    before = torch.load(last, weights_only=True)
    line = diverged(capsys, tmp_path, images, '--lr', 1e30, '--resume', 'auto')
    assert line.endswith(f'the last complete checkpoint is {last}')
    after = torch.load(last, weights_only=True)
    assert after['epoch'] == 0
    assert all(torch.equal(before['state_dict'][name], tensor) for name, tensor in after['state_dict'].items())
    assert train(tmp_path, images, '--resume', 'auto') == 0
    assert torch.load(last, weights_only=True)['epoch'] == 2


def test_termination_does_not_save_what_is_broken(tmp_path, images, monkeypatch, capsys):
    break_loss(monkeypatch, 6, float('nan'))
    original, calls = Trainer._update, []

    def update(self):
        original(self)
        calls.append(1)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, '_update', update)
    line = diverged(capsys, tmp_path, images)
    assert 'epoch 1/3: the loss of batch 2 is nan' in line
    assert sorted(path.name for path in (tmp_path / 'run').glob('*.pth.tar')) == [
        'checkpoint-0.pth.tar',
        'last.pth.tar',
        'model_best.pth.tar',
    ]


def test_gradient_that_overflows_is_no_failure(tmp_path, images, monkeypatch):
    """float16's loss scaling begins too high on purpose, and skips updates until it fits."""
    monkeypatch.setattr(
        'flatten_zoo.training.loop.optimization.Numerics.scaler',
        lambda self: torch.amp.GradScaler('cpu', init_scale=2.0**60),
    )
    assert train(tmp_path, images, '--amp', '--epochs', 2) == 0
    assert torch.load(tmp_path / 'run' / 'last.pth.tar', weights_only=True)['amp_scaler']['scale'] < 2.0**60


def test_no_wait_for_the_device_between_figures(tmp_path, images, monkeypatch):
    args = train_parser().parse_args([*TINY, str(images), '--output', str(tmp_path), '--log-interval', '3', '--no-aug'])
    trainer = prepare(args).trainer
    calls = []

    def counted(original):
        def call(self, *rest):
            if self.dtype.is_floating_point or self.dtype == torch.bool:
                calls.append(trainer.loss.batches)
            return original(self, *rest)

        return call

    for name in ('item', '__bool__', '__float__', 'tolist'):
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    trainer.train_epoch(0, '')
    assert set(calls) == {3, 4}


def test_buffers_may_be_infinite_but_not_nan():
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer('limit', torch.tensor([float('inf'), -float('inf')]))
    check_weights(model, 'epoch 0')
    model.running_var[1] = float('nan')
    with pytest.raises(Divergence, match=r'epoch 0: the weights are no longer finite \(running_var for one\)'):
        check_weights(model, 'epoch 0')


def test_mean_is_over_images_and_names_the_first_bad_batch():
    loss = EpochLoss('epoch 0', torch.device('cpu'), batches=10, images=2, total=3.0)
    loss.add(torch.tensor(4.0), 6)
    assert loss.mean() == 27 / 8
    for value in (1.0, float('inf'), float('nan')):
        loss.add(torch.tensor(value, dtype=torch.bfloat16), 1)
    with pytest.raises(Divergence, match='epoch 0: the loss of batch 13 is inf'):
        loss.mean()


def test_validation_that_is_not_a_number_is_never_the_best(tmp_path, images, monkeypatch):
    original, calls = ClassificationTask.create_evaluator, []

    def evaluator(self, **kwargs):
        calls.append(1)
        made = original(self, **kwargs)
        if len(calls) == 2:  # the first asks for the columns' names only
            made.loss_sum.fill_(float('nan'))
        return made

    monkeypatch.setattr(ClassificationTask, 'create_evaluator', evaluator)
    assert train(tmp_path, images, '--eval-metric', 'loss') == 0
    best = torch.load(tmp_path / 'run' / 'model_best.pth.tar', weights_only=True)
    assert best['metric'] > 0
