"""`pretrained=True`: official files from a server on this machine, and timm's options around them."""

import io
import os
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from timm.models._hub import get_cache_dir

from flatten_zoo.errors import UsageError
from flatten_zoo.weights import RELEASES, download, to_official, use_hub

from .marks import slow_but
from .servers import file_server

NAME = 'flatten_pvt_v2_b0'  # the smallest
FILE = f'{NAME}.leaplab_in1k.pth'
CONVERTED = f'{NAME}.leaplab_in1k.safetensors'
ADDRESSES = {
    'flatten_pvt_t': '3ab1d773f19d45648690',
    'flatten_pvt_v2_b0': '5d1f01532b104da28e7b',
    'flatten_swin_t': 'e1518e76703e4e57a7f2',
    'flatten_swin_s': '94188e52af354bf4a88b',
    'flatten_swin_b': '7a9e5186bad04e7fb3a9',
    'flatten_swin_b_384': '0d0330cf2e5249f1abb6',
    'flatten_cswin_t': '48ba765ba8b0451d9d5a',
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of one's own, and no waiting between tries."""
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'torch'))
    monkeypatch.delenv('FLATTEN_ZOO_HUB', raising=False)
    monkeypatch.setattr(download.time, 'sleep', lambda seconds: None)
    return Path(get_cache_dir())


def randomised(model):
    """The model with every parameter and statistic away from its initial value."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.05)
    return model.eval()


def official_file(model, **extras):
    buffer = io.BytesIO()
    torch.save({'model': to_official(model), **extras}, buffer)
    return buffer.getvalue()


@pytest.fixture(scope='module')
def model():
    return randomised(timm.create_model(NAME))


@pytest.fixture(scope='module')
def content(model):
    return official_file(model)


def create(server, name=NAME, file=FILE, **kwargs):
    return timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=dict(url=(f'{server.address}/f/0/?dl=1', file)), **kwargs
    ).eval()


def assert_same(actual, expected, but=()):
    expected = {key: value for key, value in expected.state_dict().items() if not key.startswith(but)}
    actual = {key: value for key, value in actual.state_dict().items() if not key.startswith(but)}
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], value) for key, value in expected.items())


def test_released_models():
    assert set(timm.list_pretrained('flatten_*')) == {f'{name}.leaplab_in1k' for name in ADDRESSES}
    assert RELEASES.keys() == ADDRESSES.keys()
    for name, share in ADDRESSES.items():
        cfg = timm.get_pretrained_cfg(name)
        assert cfg.url == (f'https://cloud.tsinghua.edu.cn/f/{share}/?dl=1', f'{name}.leaplab_in1k.pth')
        assert timm.is_model_pretrained(name) and cfg.tag == 'leaplab_in1k'
    assert RELEASES['flatten_swin_t'].top1 == 82.106 and RELEASES['flatten_cswin_t'].top5 == 96.376


def test_download_conversion_and_offline_reuse(model, content, cache, capfd):
    with file_server(content) as server:
        assert_same(create(server), model)
        assert server.requests == [('/f/0/?dl=1', 0)]
        assert FILE in capfd.readouterr().err, 'no progress bar'
        assert sorted(os.listdir(cache)) == [FILE, CONVERTED]
        assert (cache / FILE).read_bytes() == content
        assert_same(create(server), model)
        assert len(server.requests) == 1
    # without the server: from the conversion, from the official file alone, and by the plain name
    assert_same(create(server), model)
    (cache / CONVERTED).unlink()
    assert_same(timm.create_model(NAME, pretrained=True), model)
    (cache / FILE).unlink()
    assert_same(timm.create_model(f'{NAME}.leaplab_in1k', pretrained=True), model)
    assert os.listdir(cache) == [CONVERTED]


def test_cache_dir(model, content, cache, tmp_path):
    with file_server(content) as server:
        create(server, cache_dir=tmp_path / 'elsewhere')
    assert sorted(os.listdir(tmp_path / 'elsewhere')) == [FILE, CONVERTED] and not os.listdir(cache)
    assert_same(create(server, cache_dir=str(tmp_path / 'elsewhere')), model)


def test_adaptations_of_timm(model, content, cache):
    (cache / FILE).write_bytes(content)
    x = torch.randn(1, 3, 224, 224)
    assert torch.equal(timm.create_model(NAME, pretrained=True).eval()(x), model(x))
    for classes in (0, 7):
        other = timm.create_model(NAME, pretrained=True, num_classes=classes)
        assert other.num_classes == classes
        assert_same(other, model, but='head')
    grey = timm.create_model(NAME, pretrained=True, in_chans=1)
    assert_same(grey, model, but='patch_embed.proj.weight')
    torch.testing.assert_close(grey.patch_embed.proj.weight, model.patch_embed.proj.weight.sum(1, keepdim=True))
    large = timm.create_model(NAME, pretrained=True, img_size=(256, 192)).eval()
    x = torch.randn(1, 3, 256, 192)
    torch.testing.assert_close(large(x), model(x), rtol=1e-4, atol=1e-5)
    backbone = timm.create_model(NAME, pretrained=True, features_only=True, out_indices=(1, 3)).eval()
    expected_features = model.forward_intermediates(x, [1, 3], intermediates_only=True)
    for feature, expected in zip(backbone(x), expected_features, strict=True):
        torch.testing.assert_close(feature, expected)


def test_swin(cache, tmp_path):
    model = randomised(timm.create_model('flatten_swin_t'))
    file = 'flatten_swin_t.leaplab_in1k.pth'
    with file_server(official_file(model, epoch=299)) as server:
        assert_same(create(server, 'flatten_swin_t', file), model)
        grown = create(server, 'flatten_swin_t', file, img_size=256, window_size=8)
        assert grown.layers[0].blocks[0].attn.positional_encoding.shape == (1, 64, 64, 96)
        with pytest.raises(ValueError, match='attn_types'):
            create(server, 'flatten_swin_t', file, attn_types='linear')
        assert sorted(os.listdir(cache))[0] == file, 'a good file was removed for what was asked of the model'
        # a file for another size or another variant is not the released one
        for overlay in (dict(file='b.pth'), dict(file='c.pth', name='flatten_swin_s')):
            with pytest.raises(UsageError, match=r'does not fit the model .*tensors'):
                create(server, **{'name': 'flatten_swin_b', **overlay})
    assert len(os.listdir(cache)) == 2


def test_averaged_weights_come_first(model, cache):
    official = to_official(model)
    torch.save({'state_dict': {k: v + 1 for k, v in official.items()}, 'state_dict_ema': official}, cache / FILE)
    assert_same(timm.create_model(NAME, pretrained=True), model)


def test_precedence_of_timm(model, content, cache, tmp_path):
    own = {key: value + 1 for key, value in model.state_dict().items()}
    safetensors.torch.save_file(own, tmp_path / 'own.safetensors')
    (cache / FILE).write_bytes(content)
    with file_server(b'never asked') as server:
        overlay = dict(file=str(tmp_path / 'own.safetensors'), url=(server.address, 'x.pth'))
        loaded = timm.create_model(NAME, pretrained=True, pretrained_cfg_overlay=overlay)
        assert all(torch.equal(value, own[key]) for key, value in loaded.state_dict().items())
        overlay['state_dict'] = model.state_dict()
        assert_same(timm.create_model(NAME, pretrained=True, pretrained_cfg_overlay=overlay), model)
        assert server.requests == []
        server.content = io.BytesIO()
        torch.save(own, server.content)
        server.content = server.content.getvalue()
        plain = timm.create_model(NAME, pretrained=True, pretrained_cfg_overlay=dict(url=f'{server.address}/mine.pth'))
        assert all(torch.equal(value, own[key]) for key, value in plain.state_dict().items())
    timm.create_model(NAME)  # nothing is needed, so nothing is asked


@pytest.mark.parametrize('ranges', [True, False], ids=['resumed', 'restarted'])
def test_broken_connections_are_taken_up_again(ranges, model, content, cache):
    with file_server(content, faults=[1000, '503', 500_000], ranges=ranges) as server:
        assert_same(create(server), model)
        starts = [start for _, start in server.requests]
    assert starts[:2] == [0, 1000] and len(starts) == 4
    assert (cache / FILE).read_bytes() == content


@pytest.mark.parametrize(
    ('fault', 'message', 'tries'), [(1000, '1000 of', 5), ('503', '503', 5), ('404', '404', 1)], ids=str
)
def test_failed_downloads_leave_nothing(fault, message, tries, content, cache):
    with file_server(content, faults=[fault] * 9, ranges=False) as server:
        with pytest.raises(UsageError, match=f'{message}.*browser'):
            create(server)
        assert len(server.requests) == tries
    assert os.listdir(cache) == []
    with pytest.raises(UsageError, match='cannot download'):  # the server is gone
        create(server)


BAD = {
    'page': (b'<!DOCTYPE html><html>share expired</html>', 'web page'),
    'cut': (lambda content: content[:-1000], 'incomplete'),
    'bytes': (b'\0' * 1000, 'no checkpoint'),
    'other': (lambda content: official_file(timm.create_model('flatten_pvt_v2_b1')), 'does not fit .*pvt_v2_b0'),
    'shape': (lambda content: official_file(timm.create_model(NAME, num_classes=10)), r'head.weight \(10, 256\)'),
    'size': (lambda content: official_file(timm.create_model(NAME, img_size=256)), 'positional_encoding'),
    'code': (lambda content: official_file(timm.create_model(NAME), config=Evil()), 'calls'),
}


class Evil:
    def __reduce__(self):
        return print, ('run',)


@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('kind', slow_but('page', 'cut', 'bytes', 'shape', 'code', of=BAD))
def test_bad_files_are_not_kept(kind, model, content, cache, capfd):
    bad, message = BAD[kind]
    bad = bad(content) if callable(bad) else bad
    with file_server(bad) as server:
        with pytest.raises(UsageError, match=f'{message}.*browser') as e:
            create(server)
        assert '\n' not in str(e.value) and server.address in str(e.value)
        assert os.listdir(cache) == []
        # one that is in the cache already, from elsewhere
        (cache / FILE).write_bytes(bad)
        with pytest.raises(UsageError, match=f'{message}.*removed from the cache'):
            create(server)
        assert os.listdir(cache) == []
        server.content = content
        assert_same(create(server), model)
    (cache / CONVERTED).write_bytes((cache / CONVERTED).read_bytes()[:-9])
    assert_same(create(server), model)
    assert 'run' not in capfd.readouterr().out


def test_interrupted_download_leaves_nothing(content, cache, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(download, '_receive', interrupt)
    with file_server(content) as server, pytest.raises(KeyboardInterrupt):
        create(server)
    assert os.listdir(cache) == []


def test_hub_account(monkeypatch):
    asked = []
    monkeypatch.setattr(
        'timm.models._builder.load_state_dict_from_hf', lambda name, **kwargs: asked.append(name) or 1 / 0
    )

    def ask(name, **kwargs):
        with pytest.raises(ZeroDivisionError):
            timm.create_model(name, pretrained=True, **kwargs)
        return asked.pop()

    use_hub('someone')
    assert os.environ['FLATTEN_ZOO_HUB'] == 'someone'
    assert ask('flatten_swin_t') == ask('flatten_swin_t.leaplab_in1k') == 'someone/flatten_swin_t.leaplab_in1k'
    assert ask(NAME, pretrained_cfg_overlay=dict(hf_hub_id='other/one')) == 'other/one'
    monkeypatch.setenv('FLATTEN_ZOO_HUB', 'other')
    assert ask(NAME) == f'other/{NAME}.leaplab_in1k'
    with pytest.raises(RuntimeError, match='No pretrained weights'):
        timm.create_model('flatten_pvt_v2_b1', pretrained=True)
    with pytest.raises(UsageError, match='FLATTEN_ZOO_HUB'):
        use_hub('a/b')
    use_hub(None)
    assert 'FLATTEN_ZOO_HUB' not in os.environ
