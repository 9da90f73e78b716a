"""Conversion of checkpoints: official names and back for every family, train.py's checkpoints, the Hub's layout."""

import argparse
import json
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from timm.models import load_checkpoint

from flatten_zoo import cli
from flatten_zoo.errors import UsageError
from flatten_zoo.weights import describe, from_official, load_model, read_checkpoint, to_official, use_hub

from .marks import slow_but
from .reference import load_reference

SMALL = {
    'flatten_pvt_t': dict(img_size=64, depths=(1, 1, 2, 1), embed_dims=(16, 32, 40, 64)),
    'flatten_pvt_v2_b0': dict(img_size=64, depths=(1, 1, 2, 1), embed_dims=(16, 32, 40, 64)),
    'flatten_swin_t': dict(img_size=64, depths=(1, 1, 2, 1), embed_dim=16, num_heads=(1, 2, 4, 8), window_size=2),
    'flatten_cswin_t': dict(img_size=64, depths=(1, 1, 2, 1), embed_dim=16, num_heads=(1, 2, 4, 8), split_sizes=2),
}
EXTRAS = {'flatten_pvt_t': {'norm.weight', 'norm.bias'}}
families = pytest.mark.parametrize('name', SMALL)


def create(name, **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL[name], 'num_classes': 10, **kwargs}).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.1)
    return model


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], value) for key, value in expected.items())


def run(*argv):
    return cli.main([str(word) for word in argv])


def kwargs_of(name, **kwargs):
    return ['--model-kwargs', *(f'{key}={value}' for key, value in {**SMALL[name], **kwargs}.items())]


@pytest.mark.parametrize('name', [*SMALL, 'flatten_swin_b_384'])
def test_official_names_and_shapes(name):
    expected = {key: list(value.shape) for key, value in load_reference(name).state_dict.items()}
    official = {key: list(value.shape) for key, value in to_official(timm.create_model(name, device='meta')).items()}
    buffers = {key for key in official if key.endswith(('relative_position_index', 'attn_mask'))}
    assert bool(buffers) == ('_swin' in name)
    assert {key: shape for key, shape in official.items() if key not in buffers} == expected


@families
def test_round_trip(name):
    model = create(name)
    official = to_official(model)
    assert_same(from_official(official, model), model.state_dict())
    assert_same(from_official(model.state_dict(), model), model.state_dict())
    needed = {
        key: value
        for key, value in official.items()
        if key not in EXTRAS.get(name, ()) and not key.endswith(('relative_position_index', 'attn_mask'))
    }
    assert_same(from_official(needed, model), model.state_dict())
    assert_same(from_official({**official, 'layers.0.blocks.0.attn_mask': torch.zeros(1)}, model), model.state_dict())


@families
@pytest.mark.parametrize('official', [True, False])
def test_only_exact_fits_are_accepted(name, official):
    model = create(name)
    state_dict = to_official(model) if official else model.state_dict()
    key = next(key for key in state_dict if key.endswith('positional_encoding'))
    with pytest.raises(UsageError, match=f"{name}': 1 tensors missing, such as {key}"):
        from_official({k: v for k, v in state_dict.items() if k != key}, model)
    with pytest.raises(UsageError, match='1 tensors unknown, such as more'):
        from_official({**state_dict, 'more': torch.ones(1)}, model)
    larger = create(name, img_size=128)
    with pytest.raises(UsageError, match='of another shape'):
        from_official(to_official(larger) if official else larger.state_dict(), model)


def test_models_without_official_code():
    model = timm.create_model('flatten_deit_t', depth=1, embed_dim=32, num_heads=2)
    assert_same(from_official(model.state_dict(), model), model.state_dict())
    with pytest.raises(UsageError, match='--to official'):
        to_official(model)


@pytest.mark.parametrize('name', slow_but('flatten_pvt_v2_b0', of=SMALL))
def test_convert_command_both_ways(name, tmp_path, capsys):
    model = create(name)
    source = tmp_path / 'official.pth'
    torch.save({'model': to_official(model), 'epoch': 299, 'max_accuracy': 80.0}, source)
    assert run('convert', source, '--model', name, '-o', tmp_path / 'folder', *kwargs_of(name)) == 0
    loaded = timm.create_model(f'local-dir:{tmp_path / "folder"}', pretrained=True).eval()
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(loaded(x), model(x))
    files = sorted(path.name for path in (tmp_path / 'folder').iterdir())
    assert files == ['README.md', 'config.json', 'model.safetensors']

    weights = tmp_path / 'weights.safetensors'
    assert run('convert', source, '--model', name, '-o', weights, *kwargs_of(name)) == 0
    assert_same(safetensors.torch.load_file(weights), model.state_dict())
    fresh = timm.create_model(name, num_classes=10, **SMALL[name])
    load_checkpoint(fresh, str(weights))
    assert_same(fresh.state_dict(), model.state_dict())

    for back in (tmp_path / 'back.pth', tmp_path / 'back.safetensors'):
        assert run('convert', weights, '--model', name, '--to', 'official', '-o', back, *kwargs_of(name)) == 0
        official = read_checkpoint(back)
        assert_same(official.get('model', official), to_official(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'back.pth',
        'back.safetensors',
        'folder',
        'official.pth',
        'weights.safetensors',
    ]
    assert capsys.readouterr().err == ''


def test_released_weights(tmp_path):
    model = timm.create_model('flatten_pvt_v2_b0')
    source = tmp_path / 'official.pth'
    torch.save({'model': to_official(model)}, source)
    assert run('convert', source, '--model', 'flatten_pvt_v2_b0.leaplab_in1k', '-o', tmp_path / 'b0') == 0
    config = json.loads((tmp_path / 'b0' / 'config.json').read_text())
    assert config['architecture'] == 'flatten_pvt_v2_b0' and config['num_classes'] == 1000
    cfg = config['pretrained_cfg']
    assert cfg['tag'] == 'leaplab_in1k' and cfg['crop_pct'] == 0.875 and cfg['crop_mode'] == 'squash'
    assert not {'url', 'file', 'hf_hub_id'} & cfg.keys()
    card = (tmp_path / 'b0' / 'README.md').read_text()
    for text in (
        'license: unknown',
        'not known',
        'crop_pct 0.875, mode squash',
        '71.098 % top-1, 90.596 % top-5',
        'Han, Dongchen',
        'arXiv:2308.00442',
        '3.59 M',
        'import flatten_zoo',
    ):
        assert text in card
    assert run('convert', source, '--model', 'flatten_pvt_v2_b0', '-o', tmp_path / 'own') == 0
    card = (tmp_path / 'own' / 'README.md').read_text()
    assert '71.098' not in card and 'not stated' in card
    assert json.loads((tmp_path / 'own' / 'config.json').read_text())['pretrained_cfg']['tag'] is None


@pytest.mark.parametrize('as_namespace', [True, False])
def test_training_checkpoints(as_namespace, tmp_path):
    name = 'flatten_swin_t'
    model = create(name, num_classes=4, in_chans=1)
    kwargs = {key: value for key, value in SMALL[name].items() if key != 'img_size'}
    args = dict(model=name, num_classes=4, in_chans=1, img_size=64, gp=None, mean=[0.3], model_kwargs=kwargs, lr=0.1)
    averaged = {key: value * 2 for key, value in model.state_dict().items()}
    path = tmp_path / 'last.pth.tar'
    torch.save(
        {
            'arch': name,
            'epoch': 1,
            'version': 2,
            'metric': 50.0,
            'optimizer': {},
            'state_dict': model.state_dict(),
            'state_dict_ema': averaged,
            'args': argparse.Namespace(**args) if as_namespace else args,
        },
        path,
    )
    assert_same(load_model(path).state_dict(), model.state_dict())
    assert_same(load_model(path, use_ema=True).state_dict(), averaged)
    assert run('convert', path, '--use-ema', '-o', tmp_path / 'folder') == 0
    loaded = timm.create_model(f'local-dir:{tmp_path / "folder"}', pretrained=True)
    assert_same(loaded.state_dict(), averaged)
    config = timm.data.resolve_model_data_config(loaded)
    assert config['input_size'] == (1, 64, 64) and list(config['mean']) == [0.3]


def test_a_run_from_released_weights_is_not_the_release(tmp_path):
    model = timm.create_model('flatten_pvt_v2_b0')
    name = 'flatten_pvt_v2_b0.leaplab_in1k'
    torch.save({'arch': name, 'state_dict': model.state_dict(), 'args': dict(model=name)}, tmp_path / 'c.pth.tar')
    assert run('convert', tmp_path / 'c.pth.tar', '-o', tmp_path / 'own') == 0
    assert json.loads((tmp_path / 'own' / 'config.json').read_text())['pretrained_cfg']['tag'] is None
    assert '71.098' not in (tmp_path / 'own' / 'README.md').read_text()


def test_a_run_at_another_size_of_a_network_for_any_size(tmp_path):
    model = create('flatten_pvt_t', img_size=64)
    kwargs = {key: value for key, value in SMALL['flatten_pvt_t'].items() if key != 'img_size'}
    torch.save(
        {
            'arch': 'flatten_pvt_t',
            'state_dict': model.state_dict(),
            'args': dict(model='flatten_pvt_t', img_size=96, model_kwargs=kwargs),
        },
        tmp_path / 'c.pth.tar',
    )
    assert run('convert', tmp_path / 'c.pth.tar', '-o', tmp_path / 'out', '--model-kwargs', 'img_size=64') == 0
    config = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert config['pretrained_cfg']['input_size'] == [3, 96, 96] and config['model_args']['img_size'] == [64, 64]
    loaded = timm.create_model(f'local-dir:{tmp_path / "out"}', pretrained=True).eval()
    x = torch.randn(1, 3, 96, 96)
    assert torch.equal(loaded(x), model(x))


def test_headless_and_failing_conversions(tmp_path, capsys):
    name = 'flatten_pvt_t'
    model = create(name, num_classes=0)
    path = tmp_path / 'c.pth'
    torch.save(model.state_dict(), path)
    assert load_model(path, name, model_kwargs=SMALL[name]).num_classes == 0
    out = tmp_path / 'out'
    for argv, message in (
        ([path, '-o', out], '--model'),
        ([path, '--model', 'flatten_pvt_x', '-o', out], 'did you mean flatten_pvt_'),
        ([path, '--model', f'{name}.nobody', '-o', out], 'did you mean'),
        ([path, '--model', 'resnet50', '-o', out], 'flatten-zoo list'),
        ([path, '--model', name, '-o', out], 'of another shape'),
        ([path, '--model', name, '-o', out, '--model-kwargs', 'depth=3'], 'depth'),
        ([path, '--model', name, '-o', out, '--use-ema'], 'averaged'),
        ([tmp_path / 'no.pth', '--model', name, '-o', out], 'no file'),
        ([path, '--model', name, '-o', tmp_path / 'x.pth', *kwargs_of(name)], '--to official'),
        ([path, '--model', name, '-o', out, '--to', 'official', *kwargs_of(name)], '.pth'),
        ([path, '--model', name, '-o', path / 'out', *kwargs_of(name)], "-o '"),
    ):
        assert run('convert', *argv) == 2
        err = capsys.readouterr().err
        assert err.startswith('error: ') and err.count('\n') == 1 and message in err, err
    assert [p.name for p in tmp_path.iterdir()] == ['c.pth']
    with pytest.raises(SystemExit):
        run('convert', path, '-o', out, '--model-kwargs', 'depth')


def test_an_interrupted_conversion_leaves_what_was_there(tmp_path, monkeypatch):
    name = 'flatten_pvt_t'
    torch.save(create(name).state_dict(), tmp_path / 'c.pth')
    out = tmp_path / 'out.safetensors'
    out.write_bytes(b'before')

    def fill_the_disk(tensors, path, **kwargs):
        Path(path).write_bytes(b'half')
        raise OSError('No space left on device')

    monkeypatch.setattr(safetensors.torch, 'save_file', fill_the_disk)
    assert run('convert', tmp_path / 'c.pth', '--model', name, '-o', out, *kwargs_of(name)) == 2
    assert run('convert', tmp_path / 'c.pth', '--model', name, '-o', tmp_path / 'folder', *kwargs_of(name)) == 2
    assert out.read_bytes() == b'before'
    assert sorted(p.name for p in tmp_path.iterdir()) == ['c.pth', 'out.safetensors']


def test_info_initialises_nothing(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError('a network of which only shapes are shown is initialised')

    plain = dict(describe('flatten_pvt_v2_b0'))
    monkeypatch.setattr('torch.nn.init._no_grad_trunc_normal_', fail)
    assert dict(describe('flatten_pvt_v2_b0')) == plain


def test_list_and_info_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    monkeypatch.delenv('FLATTEN_ZOO_HUB', raising=False)
    assert run('list') == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1:]} >= set(timm.list_models('flatten_*'))
    line = next(line for line in lines if line.startswith('flatten_swin_b_384 '))
    for text in ('91.43 M', '384 × 384', 'leaplab_in1k', 'https://cloud.tsinghua.edu.cn/f/0d0330cf2e5249f1abb6/?dl=1'):
        assert text in line

    assert run('info', 'flatten_swin_t') == 0
    out = capsys.readouterr().out
    for text in ('29.19 M', 'flatten_swin_t.leaplab_in1k', 'squash', '0.875', '82.106 % top-1, 95.9 %', 'nothing'):
        assert text in out
    cached = tmp_path / 'hub' / 'checkpoints' / 'flatten_swin_t.leaplab_in1k.pth'
    cached.write_bytes(b'0' * 2_000_000)
    use_hub('me')
    assert run('info', 'flatten_swin_t') == 0
    out = capsys.readouterr().out
    assert 'hf-hub:me/flatten_swin_t.leaplab_in1k' in out and 'nothing' in out
    use_hub(None)
    assert run('info', 'flatten_swin_t.leaplab_in1k') == 0
    assert f'{cached} (2.0 MB)' in capsys.readouterr().out
    assert run('info', 'flatten_pvt_s') == 0
    out = capsys.readouterr().out
    assert 'top-1' not in out and 'none' in out
    assert run('info', 'flatten_swim_t') == 2
    assert 'did you mean flatten_swin_t' in capsys.readouterr().err
    monkeypatch.setenv('FLATTEN_ZOO_HUB', 'a/b')
    assert run('info', 'flatten_pvt_t') == 2
    assert capsys.readouterr().err.startswith('error: FLATTEN_ZOO_HUB')
