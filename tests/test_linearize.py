"""flatten-zoo linearize: attention transfer, layer by layer and whole; hybrids; runs that end early, in one or two."""

import copy
import dataclasses
import itertools
import json
import random
import shlex
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from flatten_zoo.cli import main
from flatten_zoo.cost.counting import count
from flatten_zoo.errors import UsageError
from flatten_zoo.linearize import linearize
from flatten_zoo.linearize import transfer as program
from flatten_zoo.linearize.hybrid import at_size, choose_kept, converted_copy, costs, part_of
from flatten_zoo.linearize.layers import LayerErrors, trainable
from flatten_zoo.linearize.report import Report, Speed, draw
from flatten_zoo.linearize.tasks import NetworkTask
from flatten_zoo.training.validate import main as validate

from .marks import slow_but
from .processes import in_processes, next_run
from .runs import assert_same
from .tiny_images import write_images

pytestmark = pytest.mark.usefixtures('no_pictures')
VIT = {'img_size': 32, 'patch_size': 8, 'depth': 3, 'embed_dim': 32, 'num_heads': 2}
PYRAMID = {'depths': (1, 1, 2, 1), 'embed_dims': (16, 32, 40, 64)}
SWIN = {'img_size': 64, 'depths': (1, 1, 2, 1), 'embed_dim': 16, 'num_heads': (1, 2, 4, 8)}
NETWORKS = {
    'deit': ('deit_tiny_patch16_224', VIT),
    'registers': ('vit_base_patch16_224', VIT | {'reg_tokens': 2, 'qk_norm': True, 'dynamic_img_size': True}),
    'eva': ('eva02_tiny_patch14_224', VIT),
    'beit': ('beit_base_patch16_224', VIT),
    'parallel': ('vit_base_patch16_224', VIT | {'block_fn': timm.models.vision_transformer.ParallelScalingBlock}),
    'swin': ('swin_tiny_patch4_window7_224', SWIN),
    'swin_v2': ('swinv2_tiny_window8_256', SWIN | {'window_size': 4}),
    'pvt': ('pvt_v2_b0', PYRAMID),
}
TINY = {'batch_size': 6, 'workers': 0, 'device': 'cpu', 'sizes': (), 'augment': False}


def create(kind: str = 'deit', **kwargs):
    """A network whose attention matters: layers are far from zero, as after training."""
    name, arguments = NETWORKS[kind]
    torch.manual_seed(0)
    model = timm.create_model(name, **{**arguments, 'num_classes': 3, **kwargs})
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith('weight') and parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model.eval()


def size_of(kind: str) -> int:
    return NETWORKS[kind][1].get('img_size', 64)


@pytest.fixture(scope='module')
def images(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp('data'), train=8, validation=3)


# Layers


@pytest.mark.parametrize('kind', NETWORKS)
def test_layers_learn_what_they_may_and_nothing_else(kind):
    teacher = create(kind).requires_grad_(False)
    passes = []
    teacher.patch_embed.register_forward_hook(lambda *_: passes.append(1))
    x = torch.randn(3, 3, size_of(kind), size_of(kind))
    before = teacher(x)
    passes.clear()
    student = converted_copy(teacher, 'focused_linear', None, (size_of(kind),) * 2)
    errors = LayerErrors(teacher, student).train()
    assert len(errors.names) == {'swin': 5, 'swin_v2': 5, 'pvt': 5}.get(kind, 3) and not teacher.training
    found = [errors(x).mean().item()]
    assert len(passes) == 1 and errors(x).shape == (3, len(errors.names))
    for what in ('new', 'queries-keys'):
        kept = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
        with trainable(student, errors.names, what) as chosen:
            optimizer = torch.optim.AdamW([student.get_parameter(name) for name in chosen], 5e-3, weight_decay=0)
            for _ in range(12):
                optimizer.zero_grad()
                errors(x).mean().backward()
                optimizer.step()
        changed = {n for n, p in student.named_parameters() if not torch.equal(p, kept[n])}
        assert changed == set(chosen)
        for name in changed:
            if '.qkv.' in name:
                values, values_before = (t.chunk(3)[2] for t in (student.get_parameter(name), kept[name]))
                assert torch.equal(values, values_before)
                assert what == 'queries-keys'
        found.append(errors(x).mean().item())
    assert found[0] > found[1] > found[2] * (kind != 'parallel')
    assert all(parameter.requires_grad for parameter in student.parameters())
    torch.testing.assert_close(teacher(x), before)  # nothing listens any more, and nothing has changed


@pytest.mark.parametrize('kind', ['deit', 'swin'])
def test_error_is_that_of_the_blocks_attention(kind):
    """With other attention in a first block alone, what the residual branch of that block gives differs by so much."""
    teacher = create(kind)
    student = converted_copy(teacher, 'focused_linear', [0], (size_of(kind),) * 2)
    blocks = [m.blocks[0] if kind == 'deit' else m.layers[0].blocks[0] for m in (teacher, student)]
    branches = []
    for block in blocks:
        block.register_forward_pre_hook(lambda _, args: branches.append([args[0].flatten(1)]))
        block.norm2.register_forward_pre_hook(lambda _, args: branches[-1].append(args[0].flatten(1)))
    x = torch.randn(2, 3, size_of(kind), size_of(kind))
    with torch.no_grad():
        teacher(x), student(x)
        theirs, ours = (after - before for before, after in branches[:2])
        expected = (ours - theirs).square().sum(1) / theirs.square().sum(1)
        torch.testing.assert_close(LayerErrors(teacher, student)(x)[:, 0], expected, rtol=1e-4, atol=1e-6)


def test_choice_is_the_best_there_is():
    generator = random.Random(0)
    for _ in range(50):
        errors = {part: generator.random() for part in range(6)}
        savings = {part: generator.choice([-2, 1, 1, 3, 5]) for part in errors}
        sets = [kept for number in range(7) for kept in itertools.combinations(errors, number)]
        least = min(sum(savings[part] for part in kept) for kept in sets)
        affordable = least + generator.random() * 6
        best = max(
            sum(errors[part] for part in kept) for kept in sets if sum(savings[part] for part in kept) <= affordable
        )
        kept = choose_kept(errors, savings, affordable)
        assert sum(savings[part] for part in kept) <= affordable
        assert sum(errors[part] for part in kept) == pytest.approx(best)


# The whole


def report_of(folder: Path) -> dict:
    return json.loads((folder / 'report.json').read_text())


def report_fields(report: dict) -> dict:
    return {field.name: report[field.name] for field in dataclasses.fields(Report)}


def test_all_phases_and_what_they_leave(tmp_path, images, capsys):
    teacher = create()
    kept = copy.deepcopy(teacher.state_dict())
    settings = TINY | {'sizes': (32, 64), 'seconds': 0.01, 'epochs': (2, 1, 2)}
    student = linearize(teacher, images, tmp_path / 'out', **settings)
    assert_same(teacher.state_dict(), kept)
    report = report_of(tmp_path / 'out')
    for figures in report['layers'].values():
        assert figures['converted'] > figures['layers'] > 0
    assert set(report['agreement']) == {'converted', 'layers', 'network'}
    assert set(report['accuracy']) == {'teacher', 'converted', 'layers', 'network'}
    assert [row['size'] for row in report['speeds']] == [32, 64]
    for row in report['speeds']:
        assert all(seconds > 0 for seconds in row['seconds'])
    for phase in program.PHASES:
        columns = (tmp_path / 'out' / phase / 'summary.csv').read_text().splitlines()[0]
        assert ('eval_blocks.1.attn' in columns) == (phase != 'network')
        assert (tmp_path / 'out' / phase / 'curves.png').is_file()
    assert validate(['--checkpoint', str(tmp_path / 'out' / 'network'), '-j', '0', '--device', 'cpu']) == 0
    assert '"model": "deit_tiny_patch16_224+focused_linear"' in capsys.readouterr().out
    for speeds in (report['speeds'], []):
        draw(Report(**report_fields(report) | {'speeds': [Speed(**row) for row in speeds]})).draw_without_rendering()
    again = timm.create_model(f'local-dir:{tmp_path / "out" / "model"}', pretrained=True).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(x), student(x)) and not torch.allclose(student(x), teacher(x), atol=1e-3)


@pytest.mark.parametrize('choice', ['keep', 'budget'])
def test_hybrids(tmp_path, images, choice):
    """What is kept is the teacher's own, bit for bit, and errs most; the rest has learned."""
    teacher = create()
    before, savings = costs(teacher, 'focused_linear', range(3), (32, 32), 64)
    options = {'keep': 2} if choice == 'keep' else {'budget': (before - 1.5 * savings[0]) / 1e9, 'budget_size': 64}
    student = linearize(teacher, images, tmp_path, **TINY | options | {'epochs': (2, 1, 0)})
    report = report_of(tmp_path)
    errors = {part_of(name): figures['layers'] for name, figures in report['layers'].items()}
    assert len(report['kept']) == (2 if choice == 'keep' else 1)
    assert min(errors[part] for part in report['kept']) >= max(e for p, e in errors.items() if p not in report['kept'])
    for part, block in enumerate(student.blocks):
        if part in report['kept']:
            assert_same(block.state_dict(), teacher.blocks[part].state_dict())
        else:
            assert block.attn.positional_encoding.any()
    if choice == 'budget':
        assert count(at_size(student, 64).to('meta'), (1, 3, 64, 64)).macs <= options['budget'] * 1e9


def test_images_without_classes_and_networks_without(tmp_path, images):
    """A folder of images, whatever folders they are in; and a network that has features alone."""
    for index in range(12):
        Image.new('RGB', (20, 24), (20 * index, 0, 0)).save(tmp_path / f'{index}.png')
    settings = TINY | {'epochs': (1, 1, 2), 'attention': 'efficient'}  # which has nothing new to learn
    student = linearize(create(num_classes=0), tmp_path, tmp_path / 'out', **settings)
    report = report_of(tmp_path / 'out')
    assert [phase for phase in program.PHASES if (tmp_path / 'out' / phase).exists()] == ['queries-keys', 'network']
    assert report['images'] == {'learned': 11, 'held_out': 1}
    assert report['feature_error']['network'] < report['feature_error']['converted'] and not report['agreement']
    assert student(torch.randn(1, 3, 32, 32)).shape == (1, 32)
    with pytest.raises(UsageError, match='this network is made for 32 × 32; build it for the other'):
        linearize(create(), tmp_path, tmp_path / 'other', img_size=[64], **TINY)
    with pytest.raises(UsageError, match='--label-weight 1: the network has 3 classes, and .* none'):
        linearize(create(), tmp_path, tmp_path / 'other', label_weight=1, **TINY)


def test_labels_count_where_they_are_to(tmp_path, images):
    teacher, student = create(), converted_copy(create(), 'focused_linear', None, (32, 32))
    x, target = torch.randn(2, 3, 32, 32), torch.tensor([0, 2])
    with torch.no_grad():
        losses = [NetworkTask(teacher, student, torch.device('cpu'), 2.0, w)(x, target)['loss'] for w in (0, 0.5)]
        expected = torch.nn.functional.cross_entropy(student(x), target) / 2
        torch.testing.assert_close(losses[1] - losses[0], expected)
        same = NetworkTask(teacher, copy.deepcopy(teacher), torch.device('cpu'), 2.0, 0)(x, target)['loss']
    assert same < 1e-9


def steps_from_conversion(kind: str, dtype: torch.dtype, steps: int = 50) -> list[float]:
    """Losses of so many steps of plain training from converted weights."""
    student = converted_copy(create(kind), 'focused_linear', None, (size_of(kind),) * 2).train()
    optimizer = torch.optim.AdamW(student.parameters(), 3e-4)
    x, target = torch.randn(8, 3, size_of(kind), size_of(kind)), torch.arange(8) % 3
    losses = []
    for _ in range(steps):
        with torch.autocast('cpu', dtype, enabled=dtype != torch.float32):
            loss = torch.nn.functional.cross_entropy(student(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize('kind', NETWORKS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_training_from_converted_weights_is_finite_and_falls(kind, dtype):
    losses = torch.tensor(steps_from_conversion(kind, dtype))
    assert losses.isfinite().all() and losses[-5:].mean() < losses[:5].mean() / 2


# Several processes, and runs that end early


def transfer_twice(folder: Path, images: Path, batch: int) -> None:
    next_run()
    linearize(create(), images, folder, **TINY | {'batch_size': batch, 'epochs': (1, 1, 1), 'lr': (1e-2, 1e-3, 1e-3)})


def test_two_processes_find_what_one_finds(tmp_path, images, monkeypatch):
    """With all of the images in one batch, so that their order does not matter."""
    outcomes = in_processes(tmp_path, transfer_twice, tmp_path / 'two', images, 12)
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    transfer_twice(tmp_path / 'one', images, 24)
    one, two = (report_of(tmp_path / name) for name in ('one', 'two'))
    for name, figures in one['layers'].items():
        assert two['layers'][name] == pytest.approx(figures, rel=1e-3)
    assert one['agreement'] == two['agreement'] and one['accuracy'] == two['accuracy']


class Killed(Exception):
    """The end of a process."""


@pytest.mark.parametrize('calls', slow_but(7, of=[2, 7, 11]))
def test_continues_where_it_ended(tmp_path, images, monkeypatch, calls):
    """In each phase, in the middle of its second epoch or at its first update: it ends like one that was not."""
    settings = TINY | {'epochs': (2, 2, 2), 'batch_size': 12, 'augment': True}
    whole = linearize(create(), images, tmp_path / 'whole', **settings)
    seen, kinds = [], (program.LayersTask, program.NetworkTask)

    def dying(original):
        def forward(self, *args):
            seen.append(1)
            if len(seen) == calls:
                raise Killed
            return original(self, *args)

        return forward

    with monkeypatch.context() as patch:
        for kind in kinds:
            patch.setattr(kind, 'forward', dying(kind.forward))
        with pytest.raises(Killed):
            linearize(create(), images, tmp_path / 'ended', **settings)
    continued = linearize(create(), images, tmp_path / 'ended', **settings)
    assert_same(continued.state_dict(), whole.state_dict())
    assert report_of(tmp_path / 'ended')['layers'] == report_of(tmp_path / 'whole')['layers']
    for phase in program.PHASES:
        rows = [(tmp_path / name / phase / 'summary.csv').read_text() for name in ('whole', 'ended')]
        assert rows[0] == rows[1]
    with pytest.raises(UsageError, match=r"'.*ended' has begun with --batch-size 12, not 6: choose another folder"):
        linearize(create(), images, tmp_path / 'ended', **settings | {'batch_size': 6})


# The command


@pytest.mark.parametrize(
    'options, message',
    [
        ('--epochs 1 1', 'expected 3 arguments'),
        ('--epochs 0 0 0', '--epochs 0 0 0: leaves nothing to learn'),
        ('--lr 1 0 1', '--lr 1.0 0.0 1.0: must be three, and positive'),
        ('--keep 2', '--keep 2: there are 2 parts to convert, and one at least has to be'),
        ('--keep 1 --budget 1', '--keep 1: does not go with --budget'),
        ('--budget 5', '--budget 5: at 160 pixels the network costs'),
        ('--budget-size 5', '--budget-size 5: needs --budget'),
        ('--attention-where 0-1,9', 'where must be indices from 0 to'),
        ('--attention-where x', "--attention-where 'x': must be indices"),
        ('--label-weight 1', '--label-weight 1: the network has 1000 classes, and'),
        ('--data nowhere', "--data 'nowhere': there is no such folder"),
        ('--scale 1 0.5', '--scale 1.0 0.5: must be the least and the most'),
        ('-b 1000', '--batch-size 1000 is too many: there are 24 training images'),
        ('--checkpoint nowhere.pth', "there is no file 'nowhere.pth'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, images, capsys, monkeypatch, options, message):
    small = timm.create_model('test_vit', depth=2)
    if 'checkpoint' not in options:
        monkeypatch.setattr(program, 'open_model', lambda *_: (small, ''))
    argv = shlex.split(f'linearize test_vit --data {images} -o {tmp_path / "out"} -j 0 --device cpu {options}')
    try:
        assert main(argv) == 2
    except SystemExit as e:  # argparse's own
        assert e.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1], said
    assert not (tmp_path / 'out').exists()
