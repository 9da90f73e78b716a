"""Publishing to the Hub and loading from it, by the real clients, against a server on this machine."""

import json
import os
import subprocess
import sys

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from huggingface_hub import HfApi, constants
from PIL import Image

from flatten_zoo import cli, replace_attention
from flatten_zoo.errors import UsageError
from flatten_zoo.weights import dry_run, load_model, push, save_model, use_hub

from .marks import slow_but
from .networks import SHALLOW
from .servers import hub_server

SMALL = dict(img_size=64, depths=(1, 1, 1, 1), embed_dims=(16, 16, 40, 64), num_classes=3)
REPO = 'me/flatten_pvt_t.mine'


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub that this process takes for the real one, with a token that it accepts."""
    with hub_server() as server:
        monkeypatch.setattr(constants, 'ENDPOINT', server.address)
        template = server.address + '/{repo_id}/resolve/{revision}/{filename}'
        monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template)
        monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
        monkeypatch.setattr(constants, 'HF_TOKEN_PATH', str(tmp_path / 'token'))
        monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
        monkeypatch.setattr(huggingface_hub.utils._http.time, 'sleep', lambda seconds: None)
        monkeypatch.setenv('HF_TOKEN', 'hf_right')
        monkeypatch.delenv('FLATTEN_ZOO_HUB', raising=False)
        yield server


def small_model(seed=0, **kwargs):
    torch.manual_seed(seed)
    model = timm.create_model('flatten_pvt_t', **{**SMALL, **kwargs}).eval()
    model.pretrained_cfg['tag'] = None
    return model


@pytest.fixture
def folder(tmp_path):
    save_model(small_model(), tmp_path / 'model', name='flatten_pvt_t.mine')
    return tmp_path / 'model'


def load(repo=REPO, **kwargs):
    return timm.create_model(f'hf-hub:{repo}', pretrained=True, **kwargs).eval()


def test_round_trip(hub, folder, monkeypatch):
    url = push(folder, REPO)
    assert url.startswith(f'{hub.address}/{REPO}/commit/')
    assert sorted(hub.repositories[REPO][0]) == ['README.md', 'config.json', 'model.safetensors']
    assert f"create_model('hf-hub:{REPO}'" in hub.repositories[REPO][0]['README.md'].decode()
    loaded, model = load(), small_model()
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(loaded(x), model(x))
    assert loaded.num_classes == 3 and 'tag' not in loaded.pretrained_cfg
    fine_tuned = load(num_classes=5, in_chans=1)
    assert fine_tuned(torch.randn(1, 1, 64, 64)).shape == (1, 5)
    assert torch.equal(fine_tuned.stages[0].pos_embed, model.stages[0].pos_embed)
    hub.requests.clear()
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    assert torch.equal(load()(x), model(x))
    assert hub.requests == []


def test_revisions_and_updates(hub, folder, tmp_path):
    first = push(folder, REPO).rpartition('/')[2]
    save_model(small_model(seed=1), folder, name='x')
    (folder / 'notes.txt').write_text('not for the Hub')
    push(folder, REPO)
    assert len(hub.repositories[REPO]) == 2 and 'notes.txt' not in hub.repositories[REPO][1]
    for model, revision in ((small_model(), f'@{first}'), (small_model(seed=1), '')):
        assert torch.equal(load(REPO + revision).head.weight, model.head.weight)
    with pytest.raises(huggingface_hub.errors.RevisionNotFoundError):
        load(f'{REPO}@nothing')


def test_published_by_an_account_for_the_released_tags(hub, tmp_path):
    model = timm.create_model('flatten_pvt_v2_b0')
    save_model(model, tmp_path / 'b0', name='b0')
    push(tmp_path / 'b0', 'me/flatten_pvt_v2_b0.leaplab_in1k')
    use_hub('me')
    try:
        loaded = timm.create_model('flatten_pvt_v2_b0', pretrained=True, cache_dir=tmp_path / 'cache')
    finally:
        use_hub(None)
    assert torch.equal(loaded.head.weight, model.head.weight)
    assert (tmp_path / 'cache' / 'models--me--flatten_pvt_v2_b0.leaplab_in1k').is_dir()


def test_private(hub, folder, monkeypatch):
    push(folder, REPO, private=True)
    assert hub.private[REPO]
    assert load().num_classes == 3
    monkeypatch.setenv('HF_TOKEN', 'hf_wrong')
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(folder.parent / 'other'))
    with pytest.raises(huggingface_hub.errors.RepositoryNotFoundError):
        load()
    monkeypatch.setenv('HF_TOKEN', 'hf_right')
    push(folder, 'me/public')
    with pytest.raises(UsageError, match='--private.*public'):
        push(folder, 'me/public', private=True)
    assert len(hub.repositories['me/public']) == 1


def test_missing_repository(hub):
    with pytest.raises(huggingface_hub.errors.RepositoryNotFoundError):
        load('me/nothing')


def test_tokens(hub, folder, monkeypatch):
    monkeypatch.setenv('HF_TOKEN', 'hf_wrong')
    with pytest.raises(UsageError, match='401.*token that may write'):
        push(folder, REPO)
    monkeypatch.delenv('HF_TOKEN')
    with pytest.raises(UsageError, match='hf auth login'):
        push(folder, REPO)
    assert hub.repositories == {}


def test_server_errors_are_retried(hub, folder):
    hub.faults[('POST', 'preupload')] = [503]
    hub.faults[('POST', 'batch')] = [500, 'break']
    hub.faults[('PUT', 'lfs')] = [500]
    hub.faults[('GET', 'resolve')] = ['break']
    push(folder, REPO)
    assert torch.equal(load().head.weight, small_model().head.weight)
    assert not any(hub.faults.values())


@pytest.mark.parametrize(
    'step', [('POST', 'create'), ('POST', 'preupload'), ('PUT', 'lfs'), ('POST', 'commit')], ids=str
)
@pytest.mark.parametrize('fault', [pytest.param(500, marks=pytest.mark.slow), 'break'])
def test_interrupted_upload(step, fault, hub, folder):
    hub.faults[step] = [fault] * 20
    with pytest.raises(UsageError, match=f"push to '{REPO}'.*same command") as e:
        push(folder, REPO)
    assert '\n' not in str(e.value)
    assert not hub.repositories.get(REPO), 'a part of the model was published'
    hub.faults.clear()
    push(folder, REPO)
    assert torch.equal(load().head.weight, small_model().head.weight)


def test_interrupt_by_the_user(hub, folder, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(HfApi, 'create_commit', interrupt)
    with pytest.raises(KeyboardInterrupt):
        push(folder, REPO)
    assert hub.repositories[REPO] == []


def test_what_cannot_be_published(hub, folder):
    for repo in ('name', 'a/b/c', 'me/in valid', 'me/--'):
        with pytest.raises(UsageError, match='--repo'):
            push(folder, repo)
    other = {'architecture': 'flatten_pvt_v2_b0', 'model_args': {'depths': [1, 1, 1, 1], 'num_heads': [1, 1, 1, 1]}}
    for config, message in (
        ({'architecture': 'flatten_pvt_s'}, 'which it cannot hold'),
        (other, "does not fit the model 'flatten_pvt_v2_b0'"),
    ):
        (folder / 'config.json').write_text(json.dumps({'pretrained_cfg': {}, **config}))
        with pytest.raises(UsageError, match=message):
            push(folder, REPO)
    (folder / 'config.json').unlink()
    with pytest.raises(UsageError, match=r'no config\.json'):
        dry_run(folder, REPO)
    assert hub.requests == []


@pytest.mark.parametrize('name', slow_but('flatten_deit_t', 'pvt_v2_b0', of=[*SHALLOW, 'pvt_v2_b0']))
def test_transformers(name, hub, tmp_path):
    """The weights, the preprocessing and the class names of a run, from a folder and from the Hub."""
    transformers = pytest.importorskip('transformers')
    kwargs = SHALLOW.get(name, dict(depths=(1, 1, 1, 1), embed_dims=(8, 16, 40, 64)))
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **kwargs).eval()
    converted = {} if name in SHALLOW else {'attention': 'focused_linear', 'attention_where': '0,2-3'}
    if converted:
        replace_attention(model, where=[0, 2, 3])
    names = ['cat', 'dog', 'emu']
    torch.save(
        {
            'arch': name,
            'state_dict': model.state_dict(),
            'label_names': names,
            'args': {'img_size': 64, 'crop_pct': 0.8, 'mean': [0.1, 0.2, 0.3], 'model_kwargs': kwargs, **converted},
        },
        tmp_path / 'last.pth.tar',
    )
    folder = tmp_path / 'folder'
    assert cli.main(['convert', str(tmp_path / 'last.pth.tar'), '-o', str(folder)]) == 0
    push(folder, REPO)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 70, 3), np.uint8))
    loaded = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    config = timm.data.resolve_model_data_config(loaded)
    assert config['input_size'] == (3, 64, 64) and config['mean'] == [0.1, 0.2, 0.3] and config['crop_pct'] == 0.8
    assert list(loaded.pretrained_cfg['label_names']) == names
    expected = timm.data.create_transform(**config)(image)[None]
    assert torch.equal(load()(expected), model(expected)) and torch.equal(loaded(expected), model(expected))
    for source in (folder, REPO):
        theirs = transformers.AutoModelForImageClassification.from_pretrained(source).eval()
        pixels = transformers.AutoImageProcessor.from_pretrained(source)(image)['pixel_values']
        assert torch.equal(pixels, expected)
        with torch.no_grad():
            torch.testing.assert_close(theirs(pixels).logits, model(expected))
        assert theirs.config.id2label == dict(enumerate(names))


def run_checkpoint(path, model, **options):
    """A checkpoint as training writes it."""
    averaged = {key: value + 1 for key, value in model.state_dict().items()}
    kwargs = {key: value for key, value in SMALL.items() if key != 'num_classes'}
    torch.save(
        {
            'epoch': 2,
            'arch': 'flatten_pvt_t',
            'state_dict': model.state_dict(),
            'state_dict_ema': averaged,
            'version': 2,
            'args': {'model': 'flatten_pvt_t', 'num_classes': 3, 'gp': None, 'model_kwargs': kwargs, **options},
        },
        path,
    )
    return path


def test_push_command(hub, tmp_path, capsys):
    model = small_model()
    path = run_checkpoint(tmp_path / 'last.pth.tar', model, img_size=64, crop_pct=0.9, mean=[0.5, 0.5, 0.5])
    assert cli.main(['push', str(path), '--repo', REPO, '--dry-run']) == 0
    out = capsys.readouterr().out
    assert f'{hub.address}/{REPO}' in out and 'public' in out and 'model.safetensors' in out
    assert hub.requests == []
    assert cli.main(['push', str(path), '--repo', REPO]) == 0
    assert f'{hub.address}/{REPO}/commit/' in capsys.readouterr().out
    loaded = load()
    assert torch.equal(loaded.head.weight, model.head.weight)
    config = timm.data.resolve_model_data_config(loaded)
    assert config['input_size'] == (3, 64, 64) and config['crop_pct'] == 0.9 and list(config['mean']) == [0.5, 0.5, 0.5]
    assert f'hf-hub:{REPO}' in hub.repositories[REPO][0]['README.md'].decode()

    # a card that somebody has edited on the Hub stays, averaged weights come on demand
    hub.repositories[REPO][0]['README.md'] = b'edited'
    assert cli.main(['push', str(path), '--repo', REPO, '--use-ema', '--private']) == 2
    assert cli.main(['push', str(path), '--repo', REPO, '--use-ema']) == 0
    assert hub.repositories[REPO][-1]['README.md'] == b'edited'
    torch.testing.assert_close(load().head.weight, model.head.weight + 1)
    err = capsys.readouterr().err
    assert err.startswith('error: --private') and '\n' not in err.partition('another name')[0]


@pytest.mark.slow
def test_other_processes_by_the_environment(tmp_path):
    """Push and pull as people do: commands, and nothing but the environment that says where the Hub is."""
    path = run_checkpoint(tmp_path / 'last.pth.tar', small_model())
    with hub_server() as server:
        env = {
            **os.environ,
            'HF_ENDPOINT': server.address,
            'HF_HOME': str(tmp_path / 'home'),
            'HF_TOKEN': 'hf_right',
            'HF_HUB_DISABLE_XET': '1',
            'OMP_NUM_THREADS': '1',
        }

        code = (
            'import sys, timm; from flatten_zoo.cli import main; assert main(sys.argv[1:]) == 0; '
            f'model = timm.create_model("hf-hub:{REPO}", pretrained=True); print(model.head.weight.sum().item())'
        )
        push = [sys.executable, '-c', code, 'push', str(path), '--repo', REPO]
        printed = subprocess.check_output(push, env=env, text=True).splitlines()
        assert printed[-1] == str(load_model(path).head.weight.sum().item())
    assert (tmp_path / 'home').is_dir()
