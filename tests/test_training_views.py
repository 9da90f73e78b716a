"""Validation on several views of each image."""

import csv
import shlex

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import functional as F

from flatten_zoo.training.data.loaders import Views
from flatten_zoo.training.options.checks import check_train_options
from flatten_zoo.training.options.definitions import train_parser
from flatten_zoo.training.train import main, prepare

from .tiny_images import write_images, write_shards

pytestmark = pytest.mark.usefixtures('no_pictures')
TINY = shlex.split(
    '--model test_resnet --num-classes 3 --img-size 32 -b 6 -vb 7 -j 0 --epochs 1 --lr 0.02 --warmup-epochs 0 '
    '--device cpu --experiment run --crop-pct 0.8'
)


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp('data'))


def picture(width: int, height: int, mode: str = 'RGB') -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def transform(**kwargs):
    return create_transform((3, 16, 24), use_prefetcher=True, crop_pct=0.8, **kwargs)


def test_ten_views_are_the_centre_the_corners_and_their_mirror_images():
    single = transform()
    image = picture(50, 31)
    views = Views(single, 10)(image)
    assert views.shape == (10, 3, 16, 24)
    assert torch.equal(views[0], single(image))
    resized = F.pil_to_tensor(single.transforms[0](image))
    for number, view in enumerate(
        (resized[:, :16, :24], resized[:, :16, -24:], resized[:, -16:, :24], resized[:, -16:, -24:]), 1
    ):
        assert torch.equal(views[2 * number], view)
    assert torch.equal(views[1::2], views[::2].flip(-1))
    assert len({view.numpy().tobytes() for view in views}) == 10


@pytest.mark.parametrize('number', range(1, 10))
def test_fewer_views_are_the_first_of_them(number):
    assert torch.equal(Views(transform(), number)(picture(40, 40)), Views(transform(), 10)(picture(40, 40))[:number])


@pytest.mark.parametrize('crop_mode', ['squash', 'border', 'center'])
@pytest.mark.parametrize('width, height', [(24, 16), (9, 60), (61, 7)])
@pytest.mark.parametrize('crop_pct', [0.8, 1.0, 1.3])
def test_every_way_to_crop(crop_mode, width, height, crop_pct):
    """Also those where the image is smaller than the crop and gets borders."""
    single = create_transform((3, 16, 24), use_prefetcher=True, crop_pct=crop_pct, crop_mode=crop_mode)
    views = Views(single, 10)(picture(width, height))
    assert views.shape == (10, 3, 16, 24)
    assert torch.equal(views[0], single(picture(width, height)))


@pytest.mark.parametrize('options', ['', '--no-prefetcher', '--channels-last -j 1', '--amp --amp-dtype bfloat16'])
def test_outputs_of_the_views_are_averaged(tmp_path, images, options):
    args = train_parser().parse_args([*TINY, str(images), '--output', str(tmp_path), '--tta', '4', *options.split()])
    check_train_options(args)
    run = prepare(args)
    model = run.trainer.task.get_eval_model()
    torch.nn.init.normal_(model.fc.weight, std=3)
    seen = []
    hook = model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    figures = run._validate(0, '')
    hook.remove()
    assert set(seen) == {(4, 3, 32, 32)}  # one image at a time: a batch has at most seven views
    assert len(seen) == 15
    dataset = run.loader_eval.dataset
    losses = []
    for views, target in (dataset[index] for index in range(len(dataset))):
        if '--no-prefetcher' not in options:
            views = (views - run.loader_eval.mean) / run.loader_eval.std
        with torch.no_grad(), run.trainer.numerics.autocast():
            output = model(views).float().mean(0)
        losses.append(torch.nn.functional.cross_entropy(output, torch.tensor(target)).item())
    assert figures['loss'] == pytest.approx(np.mean(losses), rel=2e-3 if 'amp' in options else 1e-4)


def loss(folder) -> float:
    with (folder / 'run' / 'summary.csv').open(newline='') as file:
        return float(next(csv.DictReader(file))['eval_loss'])


def test_what_training_makes_of_it(tmp_path, images):
    """One view is the usual one; more are other figures of the same weights; streams have them too."""
    shards = write_shards(tmp_path / 'shards', images)
    runs = {
        'plain': [str(images)],
        'one': [str(images), '--tta', '1'],
        'ten': [str(images), '--tta', '10', '--model-ema'],
        'stream': [str(shards), '--dataset', 'wds/tiny', '--tta', '10'],
    }
    for name, argv in runs.items():
        assert main([*TINY, *argv, '--output', str(tmp_path / name)]) == 0
    assert loss(tmp_path / 'one') == loss(tmp_path / 'plain') != loss(tmp_path / 'ten')
    assert np.isfinite(loss(tmp_path / 'stream'))
