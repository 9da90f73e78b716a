"""Several image sizes in one run, and the loader that lives through all epochs."""

import copy
import shlex

import pytest
import torch

from flatten_zoo.errors import UsageError
from flatten_zoo.training.options.checks import check_train_options
from flatten_zoo.training.options.definitions import train_parser
from flatten_zoo.training.train import main, prepare

from .tiny_images import write_images

pytestmark = pytest.mark.usefixtures('no_pictures')
TINY = shlex.split(
    '--model test_resnet --num-classes 3 --img-size 32 -b 6 -j 0 --epochs 2 --lr 0.02 --warmup-epochs 0 --device cpu '
    '--experiment run'
)


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp('data'))


def shapes_seen(tmp_path, images, options, epochs=2) -> list[list[tuple[int, int]]]:
    """Number and side of the images of every batch, by epoch."""
    args = train_parser().parse_args([*TINY, str(images), '--output', str(tmp_path), *options.split()])
    check_train_options(args)
    trainer = prepare(args).trainer
    seen = []
    trainer.task.trainable_module.register_forward_pre_hook(
        lambda module, inputs: seen[-1].append((len(inputs[0]), inputs[0].shape[-1]))
    )
    for epoch in range(epochs):
        seen.append([])
        trainer.position = None
        trainer.train_epoch(epoch, '')
        assert len(seen[-1]) == len(trainer.loader)
    return seen


def test_batches_of_several_sizes(tmp_path, images):
    epochs = shapes_seen(tmp_path, images, '--train-img-sizes 24 32 40 --train-batch-sizes 8 6 4 --mixup 0.2')
    for seen in epochs:
        assert set(seen) <= {(8, 24), (6, 32), (4, 40)}
        assert len(set(seen)) > 1
        assert 32 < sum(number for number, _ in seen) <= 36
    assert epochs[0] != epochs[1]


def test_sizes_grow_over_the_epochs(tmp_path, images):
    options = '--train-img-sizes 24 40 --train-size-schedule progressive --train-size-schedule-spread 0 '
    first, last = shapes_seen(
        tmp_path, images, options + '--train-size-random-mix 0 --train-batches-per-epoch 3 --no-prefetcher'
    )
    assert first == [(6, 24)] * 3
    assert last == [(6, 40)] * 3


def test_weights_of_the_sizes(tmp_path, images):
    (seen,) = shapes_seen(tmp_path, images, '--train-img-sizes 24 40 --train-size-probs 0 2', epochs=1)
    assert seen == [(6, 40)] * 6


def test_sizes_that_cannot_be(tmp_path, images):
    for options, message in (
        ('--train-img-sizes 24 32 --train-batch-sizes 4 400', 'there are 36 training images'),
        (
            '--train-img-sizes 64 96 --model test_vit --model-kwargs dynamic_img_size=False',
            "'test_vit' takes images of one size",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            shapes_seen(tmp_path, images, options)


def test_loader_for_all_epochs(tmp_path, images):
    argv = [*TINY, str(images), '--output', str(tmp_path), '--use-multi-epochs-loader', '-j', '1']
    assert main(argv) == 0
    rows = (tmp_path / 'run' / 'summary.csv').read_text().splitlines()
    assert len(rows) == 3
    assert float(rows[2].split(',')[1]) < float(rows[1].split(',')[1])


@pytest.mark.parametrize('scale, exponent', [('none', 0), ('sqrt', 0.5), ('linear', 1)])
def test_gradient_of_a_batch_is_weighed_by_its_size(tmp_path, images, scale, exponent):
    """With plain SGD, an update is the learning rate times that gradient; the loss that is shown is as it is."""
    args = train_parser().parse_args(
        [
            *TINY,
            str(images),
            '--output',
            str(tmp_path),
            '--opt',
            'momentum',
            '--momentum',
            '0',
            '--weight-decay',
            '0',
            '--train-img-sizes',
            '32',
            '--train-batch-sizes',
            '36',
            '--variable-batch-loss-scale',
            scale,
        ]
    )
    check_train_options(args)
    trainer = prepare(args).trainer
    before, (weights, *_) = copy.deepcopy(trainer.task), trainer.task.trainable_module.parameters()
    seen = []
    trainer.task.register_forward_pre_hook(lambda module, inputs: seen.extend(inputs))
    figures = trainer.train_epoch(0, '')
    loss = before(*seen)['loss']
    (start, *_) = before.trainable_module.parameters()
    gradient = torch.autograd.grad(loss, start)[0]
    assert figures['loss'] == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(start - weights, 0.02 * (36 / 6) ** exponent * gradient, rtol=1e-3, atol=1e-7)
