"""validate.py: the figures of a model, of a checkpoint, of a run."""

import csv
import json
import os
import shlex

import numpy as np
import pytest
import torch
from timm.data import create_dataset, create_transform, resolve_data_config
from timm.layers import set_fast_norm
from timm.models import create_model

from flatten_zoo.errors import UsageError, report_usage_errors
from flatten_zoo.models import RELEASES, Release
from flatten_zoo.training import validate as validation
from flatten_zoo.training.data.imagenet_labels import averaged_metrics
from flatten_zoo.training.loop.model import build_model, shared_by_gpus
from flatten_zoo.training.train import main as train
from flatten_zoo.training.validate import main, parse

from .tiny_images import COLOURS, write_images

pytestmark = pytest.mark.usefixtures('no_pictures')
MODEL = shlex.split('--model test_resnet --num-classes 3 --img-size 32 -b 4 -j 0')


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp('data'), classes=tuple(COLOURS))


@pytest.fixture(scope='module')
def run(tmp_path_factory, images):
    """Output folder of a run whose best epoch is not its last and whose options are not the defaults."""
    output = tmp_path_factory.mktemp('output')
    options = (
        '--epochs 3 --lr .02 --warmup-epochs 0 --model-ema --model-ema-decay .8 --crop-pct .9 --mean .5 '
        '--std .3 --tta 3'
    )
    argv = [*MODEL, str(images), *options.split(), '--output', str(output), '--experiment', 'run']
    assert train(argv) == 0
    return output / 'run'


def results(capsys, *argv) -> dict:
    capsys.readouterr()
    assert main([str(word) for word in argv]) == 0
    return json.loads(capsys.readouterr().out.removeprefix('--result\n'))


def refused(capsys, *argv) -> str:
    capsys.readouterr()
    assert report_usage_errors(lambda: main([str(word) for word in argv])) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if 'running on the CPU' not in line]
    assert len(lines) == 1, lines
    return lines[0]


def summary(run) -> list[dict[str, str]]:
    with (run / 'summary.csv').open(newline='') as file:
        return list(csv.DictReader(file))


def test_run_has_the_figures_of_its_best_epoch(capsys, run):
    figures = results(capsys, '--checkpoint', run)
    best = max(summary(run), key=lambda row: float(row['eval_top1']))
    for name in ('loss', 'top1', 'top5'):
        assert figures[name] == pytest.approx(float(best[f'eval_{name}']), abs=1e-4)
    assert figures['images'] == 15
    assert figures['throughput'] > 0
    assert figures['checkpoint'] == str(run / 'model_best.pth.tar')
    assert figures['crop_pct'] == 0.9


def test_command_line_overrides_the_run(run, tmp_path):
    args = parse(['--checkpoint', str(run)])
    assert (args.batch_size, args.workers, args.mean, args.split, args.use_ema) == (4, 0, [0.5], 'validation', True)
    args = parse([str(tmp_path), '--checkpoint', str(run), '-b', '7', '--split', 'train'])
    assert (args.batch_size, args.split, args.data) == (7, 'train', str(tmp_path))


def test_checkpoint_file_has_the_figures_computed_by_hand(capsys, run, images):
    argv = [*MODEL, images, '--checkpoint', run / 'last.pth.tar', '--crop-mode', 'squash', '--interpolation', 'bicubic']
    figures = results(capsys, *argv)
    checkpoint = torch.load(run / 'last.pth.tar', weights_only=True)
    model = create_model('test_resnet', num_classes=3).eval()
    config = resolve_data_config({'img_size': 32, 'crop_mode': 'squash', 'interpolation': 'bicubic'}, model=model)
    dataset = create_dataset('', images, split='validation')
    dataset.transform = create_transform(**config)
    pixels, target = map(torch.stack, zip(*[(x, torch.tensor(y)) for x, y in dataset], strict=True))
    for ema, key in ((False, 'state_dict'), (True, 'state_dict_ema')):
        model.load_state_dict(checkpoint[key])
        with torch.no_grad():
            logits = model(pixels)
        loss = torch.nn.functional.cross_entropy(logits, target).item()
        figures = results(capsys, *argv, *(['--use-ema'] if ema else []))
        assert figures['loss'] == pytest.approx(loss, abs=2e-4)
        assert figures['top1'] == pytest.approx(100 * (logits.argmax(1) == target).float().mean().item(), abs=1e-4)
        assert figures['top1_err'] == pytest.approx(100 - figures['top1'])


def test_top5_of_three_classes_is_everything(capsys, run):
    assert results(capsys, '--checkpoint', run)['top5'] == 100


@pytest.mark.parametrize('file_format', ['csv', 'json'])
def test_results_file(capsys, run, tmp_path, file_format):
    path = tmp_path / 'below' / f'results.{file_format}'
    printed = results(capsys, '--checkpoint', run, '--results-file', path, '--results-format', file_format)
    if file_format == 'json':
        written = json.loads(path.read_text())
    else:
        (row,) = csv.DictReader(path.open(newline=''))
        written = {key: type(printed[key])(value) for key, value in row.items()}
    assert written == printed
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_split_folder_may_be_given_itself(capsys, run, images):
    whole = results(capsys, '--checkpoint', run)
    itself = results(capsys, images / 'validation', '--checkpoint', run)
    assert itself['loss'] == whole['loss']


@pytest.mark.parametrize(
    'argv',
    [
        '--test-pool --img-size 192',
        '--use-train-size --fast-norm',
        '--crop-mode border --crop-border-pixels 2 --no-prefetcher --gp max',
    ],
)
def test_options_validate(capsys, request, run, argv):
    request.addfinalizer(lambda: set_fast_norm(False))  # it is for the whole process
    figures = results(capsys, '--checkpoint', run, *argv.split())
    assert 0 <= figures['top1'] <= 100


def test_folded_branches_change_nothing(capsys, images, tmp_path):
    path = tmp_path / 'model.pth'
    torch.save(create_model('test_byobnet', num_classes=3).state_dict(), path)
    argv = [images, '--model', 'test_byobnet', '--num-classes', 3, '--img-size', 32, '-j', 0, '--checkpoint', path]
    assert results(capsys, *argv, '--reparam')['loss'] == pytest.approx(results(capsys, *argv)['loss'], abs=2e-4)


# Several models


@pytest.fixture
def untrained(monkeypatch):
    """Models with the weights that they are made with, in place of released ones."""
    monkeypatch.setattr(validation, 'build_model', lambda args, pretrained: build_model(args, pretrained=False))


def test_wildcards_and_files_stand_for_several_models(capsys, images, tmp_path, untrained):
    names = tmp_path / 'names.txt'
    names.write_text('test_resnet\n\ntest_byobnet\nno_such_model\n')
    output = tmp_path / 'results.csv'
    options = [images, '--num-classes', 3, '--img-size', 32, '-b', 8, '-j', 0, '--results-file', output]
    argv = [str(word) for word in ('--model', names, *options)]
    capsys.readouterr()
    assert report_usage_errors(lambda: main(argv)) == 2
    printed = capsys.readouterr()
    assert '1 of 3 models could not be validated: no_such_model' in printed.err
    rows = json.loads(printed.out.removeprefix('--result\n'))
    assert {row['model'] for row in rows} == {'test_resnet', 'test_byobnet'}
    assert rows[0]['top1'] >= rows[1]['top1']
    with output.open(newline='') as file:
        assert [row['model'] for row in csv.DictReader(file)] == [row['model'] for row in rows]
    row = results(capsys, '--model', 'test_byob*', *options)
    assert row['model'].startswith('test_byobnet.')


def test_several_models_that_cannot_be(capsys, images, run, tmp_path):
    assert "'nothing*': no model with released weights fits" in refused(capsys, images, '--model', 'nothing*')
    assert 'but --checkpoint is of one' in refused(
        capsys, images, '--model', 'flatten_*', '--checkpoint', run / 'last.pth.tar'
    )
    (tmp_path / 'empty.txt').write_text('\n')
    assert 'the file names no model' in refused(capsys, images, '--model', tmp_path / 'empty.txt')


def test_every_official_model_fits_a_wildcard():
    names = validation.model_names(parse(['--model', 'flatten_*']))
    assert {name.partition('.')[0] for name in names} == set(RELEASES)


def test_official_accuracy_is_compared_with_on_imagenet_only(capsys, images, monkeypatch, untrained):
    with torch.device('meta'):
        model = create_model('flatten_pvt_v2_b0')
        other = create_model('flatten_pvt_v2_b0', num_classes=10)
    assert validation.expected_top1(model, 50_000) == 71.098
    assert validation.expected_top1(model, 49_999) is None
    assert validation.expected_top1(other, 50_000) is None
    assert validation.expected_top1(create_model('test_resnet'), 50_000) is None
    argv = [*MODEL, images]
    assert 'expected_top1' not in results(capsys, *argv)
    monkeypatch.setattr(validation, 'IMAGENET_IMAGES', 15)
    monkeypatch.setattr(validation, 'IMAGENET_CLASSES', 3)
    monkeypatch.setattr(validation, 'TAG', 'r160_in1k')
    monkeypatch.setitem(RELEASES, 'test_resnet', Release('', 50.0))
    figures = results(capsys, *argv)
    assert figures['expected_top1'] == 50
    assert figures['difference'] == pytest.approx(figures['top1'] - 50)


# Other labels, and too little memory


def test_some_of_the_classes(capsys, images, tmp_path):
    """A model of five classes whose second, third and fifth are those of the data."""
    model = create_model('test_resnet', num_classes=5)
    torch.save(model.state_dict(), tmp_path / 'five.pth')
    three = create_model('test_resnet', num_classes=3)
    state = model.state_dict()
    three.load_state_dict({**state, **{f'fc.{name}': state[f'fc.{name}'][[1, 2, 4]] for name in ('weight', 'bias')}})
    torch.save(three.state_dict(), tmp_path / 'three.pth')
    (tmp_path / 'labels.txt').write_text('1\n2\n4\n')
    options = [images, *MODEL]
    five = [*options, '--num-classes', 5, '--checkpoint', tmp_path / 'five.pth', '--valid-labels']
    figures = results(capsys, *five, tmp_path / 'labels.txt')
    expected = results(capsys, *options, '--checkpoint', tmp_path / 'three.pth')
    assert (figures['loss'], figures['top1']) == (expected['loss'], expected['top1'])
    for text in ('1\n2\n5\n', 'one\n', ''):
        (tmp_path / 'wrong.txt').write_text(text)
        assert "--valid-labels '" in refused(capsys, *five, tmp_path / 'wrong.txt')
    assert 'No such file' in refused(capsys, *five, tmp_path / 'none.txt')


def test_reassessed_labels(capsys, tmp_path):
    """Every image's reassessed labels hold all classes, but those of two hold none (left out) and a wrong one."""
    folder = write_images(tmp_path / 'data', classes=('blue',)) / 'validation'
    for index in range(5):
        (folder / 'blue' / f'{index}.png').rename(folder / 'blue' / f'ILSVRC2012_val_{index + 1:08d}.JPEG')
    (tmp_path / 'classes.txt').write_text('blue\ngreen\nred\nwhite\nblack\ngrey\n')
    model = create_model('test_resnet', num_classes=6)
    model.fc.bias.data[5] = -1e3
    torch.save(model.state_dict(), tmp_path / 'six.pth')
    every = list(range(6))
    (tmp_path / 'real.json').write_text(json.dumps([every, every, [], every, [5]]))
    argv = [
        folder,
        *MODEL,
        '--num-classes',
        6,
        '--class-map',
        tmp_path / 'classes.txt',
        '--checkpoint',
        tmp_path / 'six.pth',
        '--real-labels',
        tmp_path / 'real.json',
    ]
    figures = results(capsys, *argv)
    assert (figures['top1'], figures['top5'], figures['images']) == (75, 75, 5)
    (tmp_path / 'real.json').write_text(json.dumps([every]))
    assert 'another number of images' in refused(capsys, *argv)
    (tmp_path / 'real.json').write_text('[')
    assert "real.json'" in refused(capsys, *argv)
    (folder / 'blue' / 'ILSVRC2012_val_00000005.JPEG').rename(folder / 'blue' / 'other.JPEG')
    (tmp_path / 'real.json').write_text(json.dumps([every] * 5))
    assert "no labels for the image 'other.JPEG'" in refused(capsys, *argv)


@pytest.mark.parametrize('average', ['micro', 'macro', 'weighted'])
def test_averaged_metrics_are_scikit_learns(average):
    random = np.random.default_rng(0)
    target = random.choice([0, 1, 2, 5], 60, p=[0.6, 0.2, 0.1, 0.1])  # 3 is only predicted, 4 does not occur
    predicted = np.where(random.random(60) < 0.6, target, random.choice([0, 1, 3], 60))
    ours = averaged_metrics(torch.tensor(predicted), torch.tensor(target), average)
    metrics = pytest.importorskip('sklearn.metrics')
    theirs = metrics.precision_recall_fscore_support(target, predicted, average=average, zero_division=0)[:3]
    np.testing.assert_allclose(list(ours.values()), 100 * np.array(theirs))


def test_averaged_metrics_of_a_run(capsys, run):
    figures = results(capsys, '--checkpoint', run, '--metrics-avg', 'micro')
    assert figures['precision'] == figures['recall'] == figures['f1_score'] == figures['top1']
    assert 'precision' not in results(capsys, '--checkpoint', run)


def test_smaller_batches_where_memory_does_not_suffice(capsys, images, run, monkeypatch):
    original, sizes = validation.validate, []

    def validate(args):
        sizes.append(args.batch_size)
        if args.batch_size > 3:
            raise torch.OutOfMemoryError('CUDA out of memory')
        return original(args)

    monkeypatch.setattr(validation, 'validate', validate)
    assert results(capsys, '--checkpoint', run, '-b', 8, '--retry')['images'] == 15
    assert sizes[0] == 8
    assert sizes[-1] <= 3
    assert 'the memory does not suffice for --batch-size 8: give a smaller' in refused(
        capsys, '--checkpoint', run, '-b', 8
    )


def test_refusals(capsys, run, images, tmp_path):
    whole = run / 'model_best.pth.tar'
    half = tmp_path / 'half.pth.tar'
    half.write_bytes(whole.read_bytes()[:-1000])
    assert 'no split' in refused(capsys, *MODEL, images, '--checkpoint', whole, '--split', 'test')
    torch.save(create_model('test_resnet', num_classes=5).state_dict(), tmp_path / 'five.pth')
    assert 'has 3 classes but test_resnet has 5' in refused(
        capsys, *MODEL, images, '--num-classes', 5, '--checkpoint', tmp_path / 'five.pth'
    )
    assert 'does not fit the model' in refused(capsys, *MODEL, images, '--checkpoint', whole, '--num-classes', 5)
    assert f"'{half}' is incomplete" in refused(capsys, *MODEL, images, '--checkpoint', half)
    assert 'no output folder of train.py' in refused(capsys, '--checkpoint', tmp_path)
    assert "unknown model 'resnt50'; did you mean" in refused(capsys, images, '--model', 'resnt50')
    torch.save({'state_dict': create_model('test_resnet', num_classes=3).state_dict()}, tmp_path / 'plain.pth')
    assert 'there are no averaged (EMA) weights' in refused(
        capsys, *MODEL, images, '--checkpoint', tmp_path / 'plain.pth', '--use-ema'
    )


def test_checkpoint_that_would_run_code_is_refused(capsys, images, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'ran'),)

    torch.save({'state_dict': {}, 'x': Evil()}, tmp_path / 'evil.pth')
    assert 'cannot be read safely' in refused(capsys, *MODEL, images, '--checkpoint', tmp_path / 'evil.pth')
    assert not (tmp_path / 'ran').exists()


def test_several_gpus_share_a_batch(monkeypatch, capsys, images, untrained):
    model = torch.nn.Identity()
    assert shared_by_gpus(model, 1, torch.device('cpu')) is model
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 3)
    monkeypatch.setattr(torch.nn, 'DataParallel', lambda model, device_ids: (model, device_ids))
    assert shared_by_gpus(model, 2, torch.device('cuda')) == (model, [0, 1])
    with pytest.raises(UsageError, match='--num-gpu 4 --device cuda: takes the first GPUs of a machine, which has 3'):
        shared_by_gpus(model, 4, torch.device('cuda'))
    assert '--num-gpu 2 --device cpu: takes the first GPUs' in refused(
        capsys, *MODEL, images, '--num-gpu', 2, '--device', 'cpu'
    )
    assert '--num-gpu 2 does not go with --torchcompile' in refused(
        capsys, *MODEL, images, '--num-gpu', 2, '--torchcompile'
    )


def test_several_processes_are_refused(capsys, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert 'validate.py is one process: start it without torchrun' in refused(capsys, 'data', '--model', 'test_resnet')
