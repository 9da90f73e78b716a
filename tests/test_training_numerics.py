"""Number formats, memory layout, accumulation, checkpointing of activations, and compilation."""

import csv
import json
import shlex

import pytest
import torch
from timm.models import create_model

from flatten_zoo.errors import UsageError
from flatten_zoo.training.loop.optimization import Numerics
from flatten_zoo.training.options.checks import check_train_options, check_validate_options
from flatten_zoo.training.options.definitions import train_parser, validate_parser
from flatten_zoo.training.train import main, prepare
from flatten_zoo.training.validate import main as validate

from .tiny_images import write_images

pytestmark = pytest.mark.usefixtures('no_pictures')
TINY = shlex.split(
    '--model test_resnet --num-classes 3 --img-size 32 -b 6 -j 0 --epochs 1 --lr 0.02 --warmup-epochs 0 --no-aug '
    '--device cpu'
)


@pytest.fixture
def small_scale(monkeypatch):
    """Scale losses so that the first updates of a large learning rate do not overflow."""
    monkeypatch.setattr(
        Numerics,
        'scaler',
        lambda self: torch.amp.GradScaler('cpu', init_scale=256, enabled=self.amp_dtype == torch.float16),
    )


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp('data'))


def prepared(tmp_path, *argv):
    args = train_parser().parse_args([*TINY, '--output', str(tmp_path), '--experiment', 'run', *map(str, argv)])
    check_train_options(args)
    return prepare(args)


def loss(folder) -> float:
    with (folder / 'summary.csv').open(newline='') as file:
        return float(list(csv.DictReader(file))[-1]['train_loss'])


def train(folder, *argv):
    assert main([*TINY, '--output', str(folder), '--experiment', 'run', *map(str, argv)]) == 0
    return folder / 'run'


def test_lower_precision_trains_like_full_precision(tmp_path, images, small_scale):
    full = loss(train(tmp_path / 'full', images))
    for options in ('--amp --amp-dtype bfloat16', '--amp', '--model-dtype bfloat16', '--channels-last'):
        folder = train(tmp_path / options, images, *options.split())
        assert loss(folder) == pytest.approx(full, rel=0.03)
        dtype = torch.load(folder / 'last.pth.tar', weights_only=True)['state_dict']['fc.weight'].dtype
        assert dtype == (torch.bfloat16 if 'model-dtype' in options else torch.float32)


@pytest.mark.parametrize(
    'options, autocast, weights, scaled',
    [
        ('--amp', torch.float16, torch.float32, True),
        ('--amp --amp-dtype bfloat16 --channels-last', torch.bfloat16, torch.float32, False),
        ('--model-dtype bfloat16', None, torch.bfloat16, False),
    ],
)
def test_what_the_model_computes_in(tmp_path, images, options, autocast, weights, scaled):
    run = prepared(tmp_path, images, *options.split())
    seen = {}
    model = run.trainer.task.get_eval_model()
    model.conv1[0].register_forward_hook(
        lambda module, inputs, output: seen.update(
            output=output.dtype,
            weights=module.weight.dtype,
            layout=inputs[0].is_contiguous(memory_format=torch.channels_last),
        )
    )
    run.trainer.train_epoch(0, '')
    assert seen['output'] == (autocast or weights)
    assert seen['weights'] == weights
    assert seen['layout'] == ('channels-last' in options)
    assert run.trainer.scaler.is_enabled() == scaled
    seen.clear()
    run._validate(0, '')
    assert seen['output'] == (autocast or weights)


def test_overflow_skips_the_update_and_lowers_the_scale(tmp_path, images):
    run = prepared(tmp_path, images, '--amp')
    before = {name: tensor.clone() for name, tensor in run.trainer.task.trainable_module.named_parameters()}
    run.trainer.scaler = torch.amp.GradScaler('cpu', init_scale=2.0**120)
    run.trainer.train_epoch(0, '')
    assert run.trainer.scaler.get_scale() < 2.0**120
    after = dict(run.trainer.task.trainable_module.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_clipping_sees_unscaled_gradients(tmp_path, images, small_scale):
    """With momentum-free SGD, an update is the learning rate times a gradient of at most the limit."""
    run = prepared(
        tmp_path,
        images,
        '--amp',
        '--clip-grad',
        0.1,
        '--opt',
        'momentum',
        '--momentum',
        0,
        '-b',
        36,
        '--weight-decay',
        0,
        '--lr',
        1,
    )
    before = [p.detach().clone() for p in run.trainer.task.trainable_module.parameters()]
    run.trainer.train_epoch(0, '')
    after = run.trainer.task.trainable_module.parameters()
    step = torch.cat([(a - b).detach().flatten() for a, b in zip(after, before, strict=True)])
    assert step.norm().item() == pytest.approx(0.1, rel=0.01)


def test_accumulated_batches_are_one_large_batch(tmp_path, images):
    """A model without batch norm, and epochs that end in a short window."""
    options = ('--model', 'test_vit', '--img-size', 64, '--no-prefetcher', '--epochs', 2)
    one = train(tmp_path / 'one', images, *options, '-b', 18)
    many = train(tmp_path / 'many', images, *options, '-b', 6, '--grad-accum-steps', 3)
    ours, theirs = (torch.load(f / 'last.pth.tar', weights_only=True)['state_dict'] for f in (one, many))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    run = prepared(tmp_path, images, *options, '-b', 5, '--grad-accum-steps', 3, '--sched-on-updates')
    assert [run.trainer._place_in_update(index) for index in range(7)] == [
        (3, False),
        (3, False),
        (3, True),
        (3, False),
        (3, False),
        (3, True),
        (1, True),
    ]
    run.trainer.train_epoch(0, '')
    assert run.trainer.updates == 3


def test_images_per_update_set_the_learning_rate(tmp_path, images):
    argv = [word for word in TINY if word not in ('--lr', '0.02')]
    args = train_parser().parse_args([*argv, str(images), '--grad-accum-steps', '4', '--output', str(tmp_path)])
    assert prepare(args).settled.lr == pytest.approx(0.1 * 24 / 256)


def test_checkpointed_activations_change_nothing(tmp_path, images):
    options = (images, '--model', 'test_vit', '--img-size', 64)
    plain = train(tmp_path / 'a', *options)
    checkpointed = train(tmp_path / 'b', *options, '--grad-checkpointing')
    assert loss(checkpointed) == pytest.approx(loss(plain), rel=1e-5)
    with pytest.raises(UsageError, match="--grad-checkpointing: 'selecsls42' does not have it"):
        prepared(tmp_path, images, '--model', 'selecsls42', '--grad-checkpointing')


@pytest.mark.slow
def test_compiled_run_has_plain_checkpoints(tmp_path, images):
    plain = train(tmp_path / 'plain', images, '--model-ema')
    compiled = train(tmp_path / 'compiled', images, '--model-ema', '--torchcompile', 'eager')
    assert loss(compiled) == pytest.approx(loss(plain), rel=1e-4)
    checkpoint = torch.load(compiled / 'last.pth.tar', weights_only=True)
    for key in ('state_dict', 'state_dict_ema'):
        create_model('test_resnet', num_classes=3).load_state_dict(checkpoint[key])


def test_validation_in_every_format(tmp_path, images, capsys):
    folder = train(tmp_path, images)
    figures = {}
    for options in (
        '',
        '--amp',
        '--amp --amp-dtype bfloat16',
        '--model-dtype bfloat16 --channels-last',
        '--torchcompile eager --no-prefetcher',
    ):
        capsys.readouterr()
        assert validate(['--checkpoint', str(folder), *options.split()]) == 0
        figures[options] = json.loads(capsys.readouterr().out.removeprefix('--result\n'))['loss']
    assert all(value == pytest.approx(figures[''], rel=0.02) for value in figures.values())
    assert figures['--amp --amp-dtype bfloat16'] != figures['']


def test_images_take_the_models_type_and_layout():
    numerics = Numerics(torch.device('cpu'), torch.bfloat16, memory_format=torch.channels_last)
    images = numerics.images(torch.rand(2, 3, 4, 5))
    assert images.dtype == torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    'argv, message',
    [
        ('--amp --model-dtype bfloat16', '--amp keeps the weights in float32'),
        ('--torchcompile inducter', '--torchcompile inducter: Invalid backend'),
        ('--torchcompile inductor --torchcompile-mode fast', '--torchcompile-mode fast: Unrecognized mode'),
        ('--torchcompile-mode default', '--torchcompile-mode default needs --torchcompile'),
    ],
)
def test_impossible_numerics_are_refused(argv, message):
    for parser, check in ((train_parser, check_train_options), (validate_parser, check_validate_options)):
        with pytest.raises(UsageError) as e:
            check(parser().parse_args(argv.split()))
        assert message in str(e.value)
        assert '\n' not in str(e.value)


def test_more_refusals(tmp_path, images):
    with pytest.raises(UsageError, match='float16 is too coarse for --model-ema'):
        prepared(tmp_path, images, '--model-dtype', 'float16', '--model-ema')
    with pytest.raises(UsageError, match='--device-modules no_such_module: No module named'):
        prepared(tmp_path, images, '--device-modules', 'no_such_module')
    with pytest.raises(UsageError, match='--grad-accum-steps: expects an integer of at least 1, not 0'):
        prepared(tmp_path, images, '--grad-accum-steps', 0)
