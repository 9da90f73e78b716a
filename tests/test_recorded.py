"""What a file says of its network is checked: nothing is fetched, opened or written that was not asked for."""

import json
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

from flatten_zoo import cli
from flatten_zoo.errors import report_usage_errors
from flatten_zoo.training.train import main as train
from flatten_zoo.training.validate import main as validate
from flatten_zoo.weights import load_model, save_model

from .tiny_images import write_images

NAME = 'flatten_pvt_t'
SMALL = dict(img_size=32, depths=(1, 1, 1, 1), embed_dims=(16, 16, 40, 64))
SETTINGS = dict(crop_pct=0.9, mean=[0.5], std=[0.5], interpolation='bicubic', crop_mode='squash')
ARGUMENTS = {
    'pretrained': True,
    'pretrained_cfg': {'url': 'http://127.0.0.1:9/x'},
    'pretrained_cfg_overlay': {'file': '/x'},
    'checkpoint_path': '/x',
    'cache_dir': '/x',
    'features_only': True,
    'device': 'cpu',
    'dtype': 'float16',
    'scriptable': True,
    'unknown': 1,
    'depths': 10**9,
    'embed_dims': 10**7,
    'depths ': 1,
    'mlp_ratios': float('nan'),
    'img_size': [[[1]]],
    'attn_types': '\x1b[31m',
    'num_heads': [1] * 1000,
    'kernel_size': {'a': 1},
}
WRONG = {
    'mean': 'abc',
    'std': [0.0],
    'crop_pct': float('nan'),
    'interpolation': {'a': 1},
    'input_size': [3, 10**6, 1],
    'crop_mode': '\n---\nlicense: mit\n',
    'img_size': -1,
    'in_chans': 10**9,
}
watched = None  # what is opened for writing or because a file says so, or sent, while somebody wants to know


def hook(event, arguments):
    if watched is None:
        return
    written = event == 'open' and isinstance(arguments[0], str | bytes) and arguments[2] & 3
    named = event == 'open' and str(arguments[0]).startswith('/x')  # by a hostile file
    if (
        written
        or named
        or event in ('os.mkdir', 'os.rename', 'socket.connect', 'socket.getaddrinfo', 'subprocess.Popen')
    ):
        watched.append((event, str(arguments[0])))


sys.addaudithook(hook)


@pytest.fixture
def writes(tmp_path, monkeypatch):
    """What was done outside a folder of output, with sockets refused."""

    def refuse(*args, **kwargs):
        raise AssertionError('a socket was opened')

    monkeypatch.setattr(socket.socket, 'connect', refuse)
    monkeypatch.setattr(socket, 'getaddrinfo', refuse)
    global watched
    watched = []
    try:
        places = str(tmp_path / 'out'), '/dev/null', '__pycache__', '/tmp/tmp', 'torchinductor'
        yield lambda: [what for what in watched if not any(place in what[1] for place in places)]
    finally:
        watched = None


def model():
    torch.manual_seed(0)
    return timm.create_model(NAME, **SMALL, num_classes=3).eval()


def checkpoint(path, arguments=None, arch=NAME, **settings):
    torch.save(
        {
            'arch': arch,
            'state_dict': model().state_dict(),
            'args': {'model': NAME, 'gp': None, 'model_kwargs': {**SMALL, **(arguments or {})}, **settings},
        },
        path,
    )
    return path


def refused(capsys, argv, command=cli.main) -> str:
    capsys.readouterr()
    argv = [str(word) for word in argv]
    status = report_usage_errors(lambda: command(argv))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith('error: ')]
    assert status == 2 and len(lines) == 1 and lines[0].isprintable(), lines
    return lines[0]


@pytest.mark.parametrize('key', ARGUMENTS)
def test_arguments_that_a_file_may_not_give(tmp_path, capsys, writes, key):
    path = checkpoint(tmp_path / 'c.pth', {key: ARGUMENTS[key]})
    for argv in (
        ['convert', path, '-o', tmp_path / 'out'],
        ['push', path, '--repo', 'me/x', '--dry-run'],
        ['export', NAME, '--format', 'pt2', '--checkpoint', path, '-o', tmp_path / 'out' / 'x.pt2'],
    ):
        assert key in refused(capsys, argv)
    save_model(model(), tmp_path / 'out' / 'folder', 'x')
    config = tmp_path / 'out' / 'folder' / 'config.json'
    content = json.loads(config.read_text())
    content['model_args'][key] = ARGUMENTS[key]
    config.write_text(json.dumps(content))
    assert key in refused(capsys, ['push', config.parent, '--repo', 'me/x', '--dry-run'])
    assert writes() == []


@pytest.mark.parametrize('key', WRONG)
def test_settings_that_are_none(tmp_path, capsys, key):
    path = checkpoint(tmp_path / 'c.pth', **{**SETTINGS, key: WRONG[key]})
    assert f'records {key} = ' in refused(capsys, ['convert', path, '-o', tmp_path / 'out'])
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('arch', ['hf-hub:me/x', 'local-dir:/x', '\x1b[31mred', 3])
def test_a_recorded_model_is_a_registered_one(tmp_path, capsys, arch):
    line = refused(capsys, ['convert', checkpoint(tmp_path / 'c.pth', arch=arch), '-o', tmp_path / 'out'])
    assert 'records the model' in line


def test_a_network_that_its_file_cannot_hold(tmp_path, capsys):
    path = checkpoint(tmp_path / 'c.pth', {'embed_dims': [2**16, 2**16, 65520, 2**16]})
    assert 'cannot hold' in refused(capsys, ['convert', path, '-o', tmp_path / 'out'])


def test_weights_that_are_no_numbers(tmp_path, capsys):
    content = torch.load(checkpoint(tmp_path / 'c.pth'), weights_only=True)
    content['state_dict']['head.bias'][0] = float('nan')
    torch.save(content, tmp_path / 'c.pth')
    argv = ['convert', tmp_path / 'c.pth', '-o', tmp_path / 'out']
    assert 'head.bias' in refused(capsys, argv)
    assert cli.main([str(word) for word in [*argv, '--allow-non-finite']]) == 0
    push = ['push', tmp_path / 'out', '--repo', 'me/x', '--dry-run']
    assert 'head.bias' in refused(capsys, push)
    assert cli.main([str(word) for word in [*push, '--allow-non-finite']]) == 0


def test_published_files_are_no_links(tmp_path, capsys):
    save_model(model(), tmp_path / 'x', 'x')
    (tmp_path / 'secret').write_text('secret')
    (tmp_path / 'x' / 'README.md').unlink()
    (tmp_path / 'x' / 'README.md').symlink_to(tmp_path / 'secret')
    assert 'is a link' in refused(capsys, ['push', tmp_path / 'x', '--repo', 'me/x', '--dry-run'])


def test_a_card_shows_text_as_it_is(tmp_path):
    save_model(model(), tmp_path / 'x', '<img src=x>\n---\nlicense: mit')
    card = (tmp_path / 'x' / 'README.md').read_text()
    _, front, text = card.split('---\n', 2)
    assert yaml.safe_load(front)['license'] == 'unknown'
    assert r'\<img src=x\>' in text and '\n---\nlicense' not in text


def test_no_way_in_touches_the_network_or_other_files(tmp_path, capsys, writes):
    path, picture, out = checkpoint(tmp_path / 'c.pth'), tmp_path / 'p.png', tmp_path / 'out'
    out.mkdir()
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(picture)
    images = write_images(tmp_path / 'out' / 'images', train=4)
    plain = torch.save(timm.create_model('test_resnet', num_classes=3).state_dict(), out / 'r.pth') or out / 'r.pth'
    watched.clear()
    torch.save(timm.create_model(NAME).state_dict(), out / 'whole.pth')
    for argv in (
        ['convert', path, '-o', out / 'folder'],
        ['push', path, '--repo', 'me/x', '--dry-run'],
        ['push', out / 'folder', '--repo', 'me/x', '--dry-run'],
        ['export', NAME, '--checkpoint', path, '--format', 'pt2', '-o', out / 'x.pt2'],
        ['visualize', picture, '--model', NAME, '--checkpoint', out / 'whole.pth', '-o', out / 'v.png'],
    ):
        assert cli.main([str(word) for word in argv]) == 0
    tiny = ['--model', 'test_resnet', '--num-classes', '3', '--img-size', '32', '-b', '4', '-j', '0', '--device', 'cpu']
    run = [*tiny, str(images), '--output', str(out), '--experiment', 'run', '--lr', '.01', '--warmup-epochs', '0']
    assert train([*run, '--epochs', '1', '--initial-checkpoint', str(plain)]) == 0
    assert train([*run, '--epochs', '2', '--resume', str(out / 'run' / 'last.pth.tar')]) == 0
    assert validate(['--checkpoint', str(out / 'run')]) == 0
    assert writes() == []
    recorded = out / 'run' / 'args.yaml'
    legitimate = yaml.safe_load(recorded.read_text())
    recorded.write_text(yaml.safe_dump(legitimate | {'pretrained': True, 'initial_checkpoint': '/x'}))
    assert validate(['--checkpoint', str(out / 'run')]) == 0, 'its weights are those of its checkpoint'
    for wrong in (
        {'model': 'hf-hub:me/x'},
        {'dataset': 'hfds/me/x'},
        {'model_kwargs': {'cache_dir': '/x'}},
        {'model_kwargs': {'layers': [10**9]}},
        {'workers': 10**9},
        {'mean': [float('nan')]},
        {'num_classes': 2**24},
    ):
        recorded.write_text(yaml.safe_dump(legitimate | wrong))
        refused(capsys, ['--checkpoint', out / 'run'], validate)
    assert writes() == []


def test_legitimate_files_pass(tmp_path):
    path = checkpoint(tmp_path / 'c.pth', {'attn_types': ('linear', 'linear', 'softmax', 'softmax')}, **SETTINGS)
    with pytest.raises(ValueError, match='does not fit'):  # other tensors, but nothing is wrong with its arguments
        load_model(path)
    assert load_model(checkpoint(Path(tmp_path, 'd.pth'), **SETTINGS)).pretrained_cfg['crop_pct'] == 0.9
