"""A network whose attention was replaced is a network: recorded, saved, published, trained and loaded as others are."""

import copy
import json
import pickle
import shlex

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from timm.models import get_model_args, save_for_hf
from timm.utils import ModelEmaV3

from flatten_zoo import FocusedLinearAttention, cli, replace_attention
from flatten_zoo.errors import UsageError, report_usage_errors
from flatten_zoo.models.linearized import name_of, with_attention
from flatten_zoo.models.replace_attention import LINEAR_ATTENTIONS
from flatten_zoo.training.loop.trainer import Trainer
from flatten_zoo.training.options.definitions import train_parser
from flatten_zoo.training.train import main as train
from flatten_zoo.training.validate import main as validate
from flatten_zoo.weights import load_model, open_model, save_model, zoo_models

from .runs import assert_same_end
from .tiny_images import write_images

pytestmark = pytest.mark.usefixtures('no_pictures')
VIT = dict(img_size=32, depth=3, embed_dim=48, num_heads=3)
CONVERTED = {  # base, its arguments, and those of the conversion
    'vit': ('deit_tiny_patch16_224', VIT, dict(where=[0, 2], kernel_size=3)),
    'vit, efficient': ('vit_tiny_patch16_224', VIT, dict(attention='efficient', where=[1])),
    'eva': ('vit_small_patch16_dinov3', VIT, {}),
    'beit': ('beit_base_patch16_224', VIT, dict(where=[2])),
    'swin v2': ('swinv2_tiny_window8_256', dict(img_size=64, depths=(1, 1), embed_dim=24), dict(where=[0])),
    'swin': ('swin_tiny_patch4_window7_224', dict(img_size=64, depths=(1, 1, 2, 1), embed_dim=24), dict(where=[2])),
    'pvt': ('pvt_v2_b0', dict(depths=(1, 1, 2, 1), embed_dims=(8, 16, 40, 64)), dict(img_size=(64, 96))),
}


def create(case):
    """A network with its new attention away from its initial values."""
    base, kwargs, conversion = CONVERTED[case]
    torch.manual_seed(0)
    model = replace_attention(timm.create_model(base, num_classes=5, **kwargs), **conversion).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def images_of(model):
    return torch.randn(2, 3, *get_model_args(model).get('img_size', (64, 96)))


def assert_same_network(ours, theirs):
    assert name_of(ours) == name_of(theirs)
    for key, value in (theirs := theirs.state_dict()).items():
        assert torch.equal(ours.state_dict()[key], value), key
    assert list(ours.state_dict()) == list(theirs)


@pytest.mark.parametrize('case', CONVERTED)
def test_round_trips(case, tmp_path):
    """What was done stays with the network, and what is saved of it by timm or by the zoo is loaded bit for bit."""
    model = create(case)
    model.reset_classifier(3)
    if case == 'vit':
        model.set_input_size((64, 32))
    average = ModelEmaV3(model).module
    for kept in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), average):
        base, _, conversion = CONVERTED[case]
        record = get_model_args(kept)
        assert record['base'] == base and record.get('where') == conversion.get('where')
        assert record['attention'] == conversion.get('attention', 'focused_linear')
        further = {key: value for key, value in conversion.items() if key not in ('attention', 'where')}
        assert record.get('attention_kwargs', {}) == further
    save_model(average, tmp_path / 'zoo', 'x')
    save_for_hf(model, tmp_path / 'timm', safe_serialization=True)
    x = images_of(model)
    for folder in ('zoo', 'timm'):
        address = f'local-dir:{tmp_path / folder}'
        for loaded in (timm.create_model(address, pretrained=True).eval(), open_model(address, pretrained=True)[0]):
            assert_same_network(loaded, model)
            assert torch.equal(loaded(x), model(x))
            for key in ('tag', 'crop_pct', 'interpolation', 'first_conv', 'classifier'):
                assert loaded.pretrained_cfg[key] == model.pretrained_cfg[key]
    maps = timm.create_model(address, pretrained=True, features_only=True).eval()
    base = timm.create_model(base, features_only=True, **CONVERTED[case][1])
    assert maps.feature_info.channels() == base.feature_info.channels() == [y.shape[1] for y in maps(x)]
    text = (tmp_path / 'zoo' / 'README.md').read_text()
    assert name_of(model) in text and ('shen2021' if 'efficient' in case else 'han2023') in text


def test_other_sizes_and_classes_from_a_folder(tmp_path):
    save_model(create('vit'), tmp_path / 'x', 'x')
    larger = timm.create_model(f'local-dir:{tmp_path / "x"}', pretrained=True, img_size=64, num_classes=2)
    assert larger.blocks[0].attn.positional_encoding.shape[1:3] == (4, 4) and larger.head.out_features == 2
    assert torch.equal(larger.blocks[1].attn.qkv.weight, create('vit').blocks[1].attn.qkv.weight)


def test_weights_of_the_base_come_before_the_conversion(tmp_path):
    base, kwargs, conversion = CONVERTED['vit']
    torch.manual_seed(1)
    source = timm.create_model(base, **kwargs)
    torch.save(source.state_dict(), tmp_path / 'base.pth')
    model = timm.create_model(
        'linearized',
        pretrained=True,
        pretrained_cfg_overlay={'file': str(tmp_path / 'base.pth')},
        base=f'{base}.fb_in1k',
        where=conversion['where'],
        **kwargs,
    )
    assert torch.equal(model.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight)
    assert isinstance(model.blocks[0].attn, FocusedLinearAttention) and name_of(model) == f'{base}+focused_linear[0,2]'
    assert model.pretrained_cfg['tag'] == 'fb_in1k' and model.pretrained_cfg['crop_pct'] == 0.9


def test_addresses_are_bases_for_those_who_name_them(tmp_path):
    base = timm.create_model(CONVERTED['vit'][0], **VIT)
    save_for_hf(base, tmp_path, safe_serialization=True)
    model, words = open_model(with_attention(f'local-dir:{tmp_path}', 'efficient', '0'), pretrained=True)
    assert name_of(model) == 'deit_tiny_patch16_224+efficient[0]' and 'attention untrained' in words
    assert torch.equal(model.blocks[1].attn.qkv.weight, base.blocks[1].attn.qkv.weight)
    save_model(model, tmp_path / 'x', 'x')
    with pytest.raises(UsageError, match='not converted yet'):
        open_model(with_attention(f'local-dir:{tmp_path / "x"}', 'efficient', '1'), pretrained=True)


def test_bases_that_are_none():
    assert name_of(timm.create_model('linearized')) == 'pvt_v2_b0+focused_linear' and 'linearized' not in zoo_models()
    for base in ('hf-hub:me/x', 'local-dir:/x', 'linearized', 'vit_huge', 'vit_tiny_patch16_224_in21k'):
        with pytest.raises(ValueError, match=f"got '{base}'"):
            timm.create_model('linearized', base=base)
    with pytest.raises(ValueError, match='name all its parts at once'):
        replace_attention(create('vit, efficient'), 'efficient', where=[0])


def test_names():
    name = with_attention('vit.x', 'efficient', '7,0-2,1')
    assert name == 'vit.x+efficient[0-2,7]' and name.arguments['where'] == [0, 1, 2, 7]
    for attention, where in ((None, '1'), ('softmax', None), ('efficient', '1-'), ('efficient', '9' * 9), (1, [2])):
        with pytest.raises(UsageError, match='--attention'):
            with_attention('vit', attention, where, 'x')
    with pytest.raises(UsageError, match='--model'):
        with_attention(None, 'efficient', None)
    choices = {tuple(action.choices) for action in train_parser()._actions if action.dest == 'attention'}
    assert choices == {LINEAR_ATTENTIONS}


TRAIN_EPOCH = Trainer.train_epoch
TINY = shlex.split('--model test_vit --model-kwargs depth=3 --num-classes 3 --img-size 32 -b 6 -j 0 --device cpu')
LEARNING = shlex.split('--lr .01 --opt adamw --warmup-epochs 0 --epochs 2 --model-ema')
ATTENTION = ['--attention', 'focused_linear', '--attention-where', '0-1']


def run(command, *argv) -> int:
    return report_usage_errors(lambda: command([str(word) for word in argv]))


def training(folder) -> list:
    start = ['--pretrained-path', folder / 'base.pth', folder / 'images', '--experiment', 'run']
    return [*TINY, *LEARNING, *ATTENTION, *start]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Data, weights of a base, and a run that has converted it."""
    folder = tmp_path_factory.mktemp('trained')
    write_images(folder / 'images', train=6)
    torch.manual_seed(0)
    torch.save(timm.create_model('test_vit', img_size=32, depth=3, num_classes=3).state_dict(), folder / 'base.pth')
    assert run(train, *training(folder), '--output', folder) == 0
    return folder


def test_training_continues_and_its_checkpoints_say_all(trained, tmp_path, monkeypatch, capsys):
    options = yaml.safe_load((trained / 'run' / 'args.yaml').read_text())
    assert [options[name] for name in ('model', 'attention', 'attention_where')] == [TINY[1], *ATTENTION[1::2]]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, 'train_epoch', lambda self, epoch, *_: epoch and 1 / 0 or TRAIN_EPOCH(self, epoch, *_))
        with pytest.raises(ZeroDivisionError):
            run(train, *training(trained), '--output', tmp_path)
    assert run(train, '--resume', tmp_path / 'run') == 0
    assert_same_end(tmp_path / 'run', trained / 'run')

    best = trained / 'run' / 'model_best.pth.tar'
    checkpoint = torch.load(best, weights_only=True)
    for use_ema, entry in ((False, 'state_dict'), (True, 'state_dict_ema')):
        model = load_model(best, use_ema=use_ema)
        assert name_of(model) == 'test_vit+focused_linear[0-1]'
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in checkpoint[entry].items())
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / 'p.png')
    assert run(cli.main, 'convert', best, '-o', tmp_path / 'folder', '--use-ema') == 0
    assert_same_network(timm.create_model(f'local-dir:{tmp_path / "folder"}', pretrained=True), model)
    assert run(cli.main, 'push', tmp_path / 'folder', '--repo', 'me/x', '--dry-run') == 0
    assert run(cli.main, 'predict', tmp_path / 'p.png', '--checkpoint', trained / 'run', '-j', 0) == 0
    for argv in (
        ['export', TINY[1], '--format', 'pt2', '-o', tmp_path / 'x.pt2', '--checkpoint', best],
        ['visualize', tmp_path / 'p.png', '--model', TINY[1], '-o', tmp_path / 'v.svg', '--checkpoint', best],
    ):
        assert run(cli.main, *argv) == 0
    described = json.loads((tmp_path / 'x.pt2.json').read_text())
    assert described['model'] == 'test_vit+focused_linear[0-1]'
    assert 'focused linear attention of' in capsys.readouterr().out

    results = []
    for argv in (
        ['--checkpoint', trained / 'run', '--use-ema'],
        [*TINY, *ATTENTION, '--checkpoint', best, '--use-ema', trained / 'images'],
        ['--model', f'local-dir:{tmp_path / "folder"}', trained / 'images', '--pretrained', '-j', 0, '--device', 'cpu'],
    ):
        assert run(validate, *argv) == 0
        results.append(json.loads(capsys.readouterr().out.partition('--result\n')[2]))
    assert len({result['loss'] for result in results}) == 1
    assert results[0]['model'] == 'test_vit+focused_linear[0-1]'


def test_commands_show_it_beside_the_base(tmp_path, capsys):
    named = ['test_vit', '--attention', 'focused_linear', '--attention-where', '1-2']
    assert run(cli.main, 'info', *named) == 0
    assert 'test_vit+focused_linear[1-2]' in capsys.readouterr().out
    assert run(cli.main, 'complexity', *named, '--img-size', 32) == 0
    assert run(cli.main, 'bench', *named, '--img-size', 32, '--seconds', 0.01, '--device', 'cpu') == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith('test_vit')]
    assert [words[0] for words in lines] == ['test_vit', 'test_vit+focused_linear[1-2]'] * 2
    assert lines[0][2:] != lines[1][2:]


@pytest.mark.parametrize(
    'argv, part',
    [
        (['info', 'pvt_v2_b0', '--attention-where', '1'], "--attention-where '1' needs --attention"),
        (['complexity', 'test_resnet', '--attention', 'efficient'], 'got a ResNet'),
        (['info', 'pvt_v2_b0', '--attention', 'focused_linear', '--attention-where', '4'], 'from 0 to 3'),
        (['export', 'pvt_v2_b0', '--attention', 'efficient', '-o', 'x.pt2', '--format', 'pt2'], 'Pyramid'),
        (['convert', 'x.pth', '--attention', 'efficient', '-o', 'x'], '--attention efficient needs --model'),
        (['predict', 'x.png', '--attention', 'efficient', '--checkpoint', 'x'], 'needs --model'),
        (['info', 'pvt_v2', '--attention', 'efficient'], "unknown model 'pvt_v2'"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(argv, part, capsys):
    assert run(cli.main, *argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.endswith('…')]
    assert len(lines) == 1 and part in lines[0]


@pytest.mark.parametrize(
    'entry',
    [
        {'base': 'hf-hub:me/x'},
        {'base': 'local-dir:/x'},
        {'base': 'linearized'},
        {'base': 'vit_huge'},
        {'base': 3},
        {'base': 'resnet50'},
        {'attention': 'softmax'},
        {'attention': ['efficient']},
        {'where': [10**9]},
        {'where': 3},
        {'where': [[0]]},
        {'where': [0] * 1000},
        {'attention_kwargs': 3},
        {'attention_kwargs': {'device': 'cuda'}},
        {'attention_kwargs': {'model': 3}},
        {'attention_kwargs': {'kernel_size': 10**9}},
        {'attention_kwargs': {'kernel_size': 65535}},
        {'attention_kwargs': {'focusing_factor': float('nan')}},
        {'checkpoint_path': '/x'},
        {'unknown': 1},
    ],
    ids=str,
)
def test_what_files_may_not_say(entry, tmp_path, capsys):
    """Of a folder in timm's layout, and of a checkpoint with the same arguments."""
    save_model(create('vit'), tmp_path / 'folder', 'x')
    path = tmp_path / 'folder' / 'config.json'
    config = json.loads(path.read_text())
    config['model_args'] |= entry
    path.write_text(json.dumps(config))
    checkpoint = {'arch': 'linearized', 'state_dict': create('vit').state_dict()}
    torch.save({**checkpoint, 'args': {'model_kwargs': config['model_args']}}, tmp_path / 'c.pth')
    for argv in (
        ['push', path.parent, '--repo', 'me/x', '--dry-run'],
        ['convert', tmp_path / 'c.pth', '-o', tmp_path / 'out'],
    ):
        assert run(cli.main, *argv) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith('error: ') and lines[0].isprintable()
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('entry', [{'attention': 'softmax'}, {'attention': {}}, {'attention_where': '0-' + '9' * 9}])
def test_what_runs_may_not_say(entry, trained, tmp_path, capsys):
    checkpoint = torch.load(trained / 'run' / 'last.pth.tar', weights_only=True)
    checkpoint['args'] |= entry
    torch.save(checkpoint, tmp_path / 'last.pth.tar')
    (tmp_path / 'args.yaml').write_text(yaml.safe_dump(checkpoint['args']))
    assert run(cli.main, 'convert', tmp_path / 'last.pth.tar', '-o', tmp_path / 'out') == 2
    assert run(validate, '--checkpoint', tmp_path) == 2
    assert run(train, '--resume', tmp_path) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith('error: ')]
    assert len(lines) == 3 and all(str(tmp_path) in line and 'attention' in line for line in lines)
