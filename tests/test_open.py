"""One door to a model: every kind of address, and one text for weights that do not fit."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from flatten_zoo import cli
from flatten_zoo.dense.pyramid import build_body
from flatten_zoo.errors import UsageError, report_usage_errors
from flatten_zoo.training.loop.model import build_training_model
from flatten_zoo.training.options.definitions import train_parser
from flatten_zoo.training.validate import main as validate
from flatten_zoo.weights import open_model, save_model

NAME = 'flatten_pvt_v2_b0'


@pytest.mark.parametrize('kind', ['name and file', 'file', 'tag and file', 'folder', 'size and file'])
def test_every_address_gives_the_same_model(kind, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=5).eval()
    path = tmp_path / 'c.pth'
    torch.save({'arch': NAME, 'state_dict': model.state_dict()}, path)
    save_model(model, tmp_path / 'folder', 'x')
    opened, words = {
        'name and file': lambda: open_model(NAME, checkpoint=path),
        'file': lambda: open_model(checkpoint=path),
        'tag and file': lambda: open_model(f'{NAME}.leaplab_in1k', checkpoint=path),
        'folder': lambda: open_model(f'local-dir:{tmp_path / "folder"}', pretrained=True),
        'size and file': lambda: open_model(NAME, [224], checkpoint=path),
    }[kind]()
    assert words == ('pretrained' if kind == 'folder' else 'c.pth') and not opened.training
    assert all(torch.equal(value, opened.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_checkpoint_with_a_classifier_for_a_network_that_has_none_by_default(tmp_path):
    model = timm.create_model('eva02_tiny_patch14_224', num_classes=5)
    torch.save({'arch': 'eva02_tiny_patch14_224', 'state_dict': model.state_dict()}, tmp_path / 'c.pth')
    opened, _ = open_model(checkpoint=tmp_path / 'c.pth')
    assert opened.num_classes == 5 and torch.equal(opened.head.weight, model.head.weight)


def test_a_model_must_be_named():
    with pytest.raises(UsageError, match='name a model'):
        open_model()


def test_every_command_says_the_same_of_weights_that_do_not_fit(tmp_path, capsys):
    path, picture, images = tmp_path / 'c.pth', tmp_path / 'p.png', tmp_path / 'validation' / 'a'
    state_dict = timm.create_model(NAME).state_dict()
    torch.save({**state_dict, 'more': state_dict.pop('head.bias')}, path)
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(picture)
    images.mkdir(parents=True)
    said = set()
    for command, argv in (
        (cli.main, ['convert', path, '--model', NAME, '-o', tmp_path / 'out']),
        (cli.main, ['push', path, '--model', NAME, '--repo', 'me/x', '--dry-run']),
        (cli.main, ['export', NAME, '--checkpoint', path, '--format', 'pt2', '-o', tmp_path / 'x.pt2']),
        (cli.main, ['visualize', picture, '--model', NAME, '--checkpoint', path, '-o', tmp_path / 'v.png']),
        (validate, [tmp_path, '--model', NAME, '--checkpoint', path, '--device', 'cpu']),
    ):
        assert report_usage_errors(lambda: command([str(word) for word in argv])) == 2  # noqa: B023
        said.update(line for line in capsys.readouterr().err.splitlines() if line.startswith('error: '))
    assert len(said) == 1 and f"'{path}' does not fit the model '{NAME}': " in said.pop()


@pytest.mark.parametrize('name', ['flatten_pvt_v2_b0', 'flatten_pvt_t', 'flatten_deit_t'])
def test_a_run_is_of_the_image_size_that_its_model_arguments_say_and_so_is_its_checkpoint(name, tmp_path):
    """Those that take other sizes have position tensors of one, too."""
    with torch.device('meta'):
        expected = {key: value.shape for key, value in timm.create_model(name, img_size=64).state_dict().items()}
    args = train_parser().parse_with_config(['data', '--model', name, '--model-kwargs', 'img_size=64'])
    model = build_training_model(args)
    assert {key: value.shape for key, value in model.state_dict().items()} == expected
    torch.save({'arch': name, 'args': vars(args), 'state_dict': model.state_dict()}, tmp_path / 'c.pth')
    opened, _ = open_model(checkpoint=tmp_path / 'c.pth')
    assert {key: value.shape for key, value in opened.state_dict().items()} == expected


def test_the_body_of_a_detector_is_of_the_image_size_that_its_arguments_say():
    body = build_body('flatten_pvt_v2_b0', img_size=64)
    size_64 = timm.create_model('flatten_pvt_v2_b0', img_size=64, features_only=True)
    assert {k: v.shape for k, v in body.state_dict().items()} == {k: v.shape for k, v in size_64.state_dict().items()}
