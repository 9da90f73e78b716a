"""The trainer of the dense tasks: as good in two processes as in one, and whole after any end."""

import csv
import json
import os
import runpy
import signal
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from flatten_zoo.cli import main as cli
from flatten_zoo.dense import segmentation_layouts, write_shapes
from flatten_zoo.dense.training.data import Batches, SeededItems
from flatten_zoo.dense.training.options import TASKS, check_options, task_parser
from flatten_zoo.errors import UsageError, report_usage_errors
from flatten_zoo.training import processes as distributed
from flatten_zoo.training.options.parser import recipes

from .processes import in_processes, next_run
from .runs import assert_same

pytest.importorskip('accelerate')
from flatten_zoo.dense.training import train, trainer, validate  # noqa: E402

from .marks import slow_but

pytestmark = pytest.mark.usefixtures('no_pictures')

COMMON = '--device cpu --clip-grad 1 --warmup-updates 1 --log-interval 1 --lr 1e-3'
TINY = {
    'segmentation': '--model isa_net --image-size 32 --shapes 8 -b 4 --epochs 2 --scale 1 1.5',
    'detection': '--backbone test_resnet --image-size 32 --shapes 8 -b 2 --updates 2 --regions 8 --levels fpn4',
    'stereo': '--image-size 32 32 --max-disparity 8 --pairs 8 -b 2 --updates 2',
    'video': '--image-size 32 --frames 16 --clips 4 -b 2 --updates 2 --anchor-scales 1',
}


def run(task: str, output: Path, options: str = '') -> int:
    next_run()
    argv = f'{task} {COMMON} {TINY[task]} {options}'.split()
    return report_usage_errors(lambda: train.main([*argv, '--output', str(output)]))


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / 'summary.csv').open(newline='') as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def saved(folder: Path, name: str = 'last.pth') -> dict:
    return torch.load(folder / name, weights_only=True)


def without_dropout() -> None:
    """Its random numbers are those of a process."""
    nn.Dropout.forward = nn.Dropout2d.forward = lambda self, x: x


# Order and augmentation


class Noise(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return index, torch.rand(()).item()


def test_order_and_augmentation_follow_from_seed_and_place():
    data = SeededItems(Noise(), 5)

    def items(updates, batch_size, per_update, seed=5):
        batches = Batches(23, batch_size, per_update, seed)
        batches.updates = updates
        assert len(list(batches)) == len(batches)
        return [data[place] for batch in batches for place in batch]

    whole = items(range(10), 4, 1)
    assert items(range(10), 2, 2) == items(range(10), 1, 4) == whole  # processes or accumulation in place of a batch
    assert items(range(7), 4, 1) + items(range(7, 10), 4, 1) == whole
    first, second = whole[:20], whole[20:]
    assert len({index for index, _ in first}) == len({index for index, _ in second}) == 20
    assert len(set(whole)) == 40  # the same item is another one in another pass
    assert items(range(10), 4, 1, seed=6) != whole


# Several processes


def train_in_process(task: str, output: Path, options: str) -> int:
    without_dropout()
    return run(task, output, options)


@pytest.mark.parametrize(
    'task, options',
    [
        ('segmentation', '--opt sgd --sync-bn --model-ema --model-ema-decay 0.5 --grad-accum-steps 2 --shapes 24'),
        pytest.param('stereo', '--opt sgd --sync-bn --sched poly', marks=pytest.mark.slow),
    ],
)
def test_two_processes_learn_what_one_learns(tmp_path, monkeypatch, task, options):
    """Weights, averages, losses and scores, with random augmentation and an odd number of validation images."""
    outcomes = in_processes(tmp_path, train_in_process, task, tmp_path / 'two', f'{options} -b 1')
    assert [outcome.result for outcome in outcomes] == [0, 0], outcomes
    monkeypatch.setattr(nn.Dropout, 'forward', lambda self, x: x)
    monkeypatch.setattr(nn.Dropout2d, 'forward', lambda self, x: x)
    assert run(task, tmp_path / 'one', f'{options} -b 2') == 0
    for key, value in saved(tmp_path / 'one').items():
        if key.startswith('model'):
            torch.testing.assert_close(saved(tmp_path / 'two')[key], value, rtol=1e-4, atol=2e-5)
    for row, other in zip(rows(tmp_path / 'two'), rows(tmp_path / 'one'), strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5, nan_ok=True)


def validate_in_processes(folders: list[Path]) -> list[dict[str, float]]:
    scores = []
    for folder in folders:
        next_run()
        with distributed.as_one():
            scores.append(validate.validate(folder, []))
    return scores


@pytest.mark.parametrize(
    'numbers',
    [
        pytest.param({'segmentation': '--shapes 24', 'detection': '--shapes 24'}, marks=pytest.mark.slow),
        pytest.param({'stereo': '--pairs 24', 'video': '--clips 12'}, marks=pytest.mark.slow),
    ],
    ids=' '.join,
)
def test_validation_in_two_processes_is_that_of_one(tmp_path, capsys, numbers):
    """Each image counts once: three of them do not divide evenly."""
    for task, number in numbers.items():
        assert run(task, tmp_path / task, number) == 0
    folders = [tmp_path / task for task in numbers]
    outcomes = in_processes(tmp_path, validate_in_processes, folders)
    capsys.readouterr()
    for i, folder in enumerate(folders):
        assert cli(['validate-dense', str(folder)]) == 0
        alone = json.loads(capsys.readouterr().out)
        for outcome in outcomes:
            assert outcome.result[i] == pytest.approx(alone, nan_ok=True)
        best = saved(folder, 'best.pth')['scores']
        assert alone == pytest.approx({name: best[name] for name in alone}, nan_ok=True)


def test_validation_with_other_options(tmp_path, whole, capsys):
    assert cli(['validate-dense', str(whole), '--picture', str(tmp_path / 'p.png'), '--image-size', '64']) == 0
    assert Image.open(tmp_path / 'p.png').mode == 'RGB'
    assert cli(['validate-dense', str(whole), '--backbone', 'resnet18']) == 2
    assert 'does not fit the network of these options' in capsys.readouterr().err


# Ends


def assert_same_end(folder: Path, other: Path) -> None:
    for name in ('last.pth', 'best.pth'):
        ours, theirs = saved(folder, name), saved(other, name)
        for checkpoint in (ours, theirs):
            for scores in ('rows', 'scores'):  # NaN in some places; they are in the table
                checkpoint.pop(scores, None)
        assert_same(ours, theirs)
    assert (folder / 'summary.csv').read_bytes() == (other / 'summary.csv').read_bytes()


def killed(output: Path, options: str, number: int, save: int) -> None:
    """A run that SIGKILL ends within an update, or in the middle of writing a checkpoint."""
    update, write, done, written = trainer.Trainer._update, torch.save, [], []

    def updating(self, batches):
        done.append(1)
        update(self, batches)
        if len(done) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def saving(state, file):
        written.append(1)
        write(state, file)
        if len(written) == save:
            file.truncate(file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.Trainer._update, torch.save = updating, saving
    run('segmentation', output, options)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """A run that nothing happens to."""
    folder = tmp_path_factory.mktemp('whole')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('matplotlib.figure.Figure.savefig', lambda figure, path, **kwargs: path.write_bytes(b'a picture'))
        assert run('segmentation', folder, OPTIONS) == 0
    return folder


OPTIONS = '--save-interval 1 --model-ema --model-ema-decay 0.5 --grad-accum-steps 2 -b 1 --opt sgd'


@pytest.mark.parametrize('number, save', slow_but((3, 0), of=[(3, 0), (2, 0), (0, 1), (0, 5)]))
def test_killed_run_ends_like_one_that_was_not(tmp_path, whole, number, save):
    """Dropout and augmentation included; what has its final name is whole."""
    (outcome,) = in_processes(tmp_path, killed, tmp_path / 'run', OPTIONS, number, save, count=1)
    assert outcome.status == -signal.SIGKILL, outcome.said
    for path in (tmp_path / 'run').glob('*.pth'):
        assert saved(tmp_path / 'run', path.name)['model']
    assert run('segmentation', tmp_path / 'run', f'{OPTIONS} --resume auto') == 0
    assert_same_end(whole, tmp_path / 'run')
    assert not list((tmp_path / 'run').glob('.*.part'))


def interrupted(output: Path, options: str) -> list[int]:
    """SIGTERM to the second process within an update, and the rest of the run."""
    update, done = trainer.Trainer._update, []

    def updating(self, batches):
        done.append(1)
        if len(done) == 3 and distributed.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        update(self, batches)

    statuses = [run('segmentation', output / 'whole', options)]
    done.clear()
    trainer.Trainer._update = updating
    statuses.append(run('segmentation', output / 'parts', options))
    updates = saved(output / 'parts')['updates']
    return [*statuses, updates, run('segmentation', output / 'parts', f'{options} --resume auto')]


def test_terminated_run_ends_like_one_that_was_not(tmp_path):
    outcomes = in_processes(tmp_path, interrupted, tmp_path, '--grad-accum-steps 2 -b 1')
    assert [outcome.result for outcome in outcomes] == [[0, 143, 3, 0]] * 2, outcomes
    assert_same(saved(tmp_path / 'whole')['model'], saved(tmp_path / 'parts')['model'])
    for row, other in zip(rows(tmp_path / 'parts'), rows(tmp_path / 'whole'), strict=True):
        assert row == pytest.approx(other, nan_ok=True)


def test_only_the_same_training_is_continued(tmp_path, whole, capsys):
    options = f'{OPTIONS} --output {whole}'
    for change, message in {
        '': 'holds a trained network already: give another --output, or --resume auto',
        '--resume auto -b 2': 'is of 8 training images, 2 in an update, and this run of 8 and 4: continue with',
        '--resume auto --backbone resnet18': 'is of other options than these: Error(s) in loading state_dict',
    }.items():
        assert run('segmentation', whole, f'{options} {change}') == 2
        assert message in capsys.readouterr().err


# Options


@pytest.mark.parametrize('task', TASKS)
def test_examples_are_the_command(task, monkeypatch):
    """A few lines each; that of stereo trains with attention and without."""
    calls = []
    monkeypatch.setattr('flatten_zoo.cli.main', lambda argv: calls.append(argv))
    monkeypatch.setattr('sys.argv', ['example', '--epochs', '1'])
    script = Path(__file__).parents[1] / 'examples' / f'train_{task}.py'
    try:
        runpy.run_path(str(script), run_name='__main__')
    except SystemExit as e:
        assert not e.code
    assert [argv[:2] for argv in calls] == [['train-dense', task]] * (1 + (task == 'stereo'))
    assert all(argv[-2:] == ['--epochs', '1'] for argv in calls)


@pytest.mark.slow
def test_mixed_precision_tensorboard_and_schedules(tmp_path):
    """Whatever the length is given in, rates follow the schedule."""
    options = '--sched step --milestones 1 2 --epochs 3 --warmup-updates 0 --amp --log-tensorboard'
    assert run('segmentation', tmp_path / 'step', options) == 0
    assert [row['lr'] for row in rows(tmp_path / 'step')] == pytest.approx([1e-3, 1e-4, 1e-5])
    assert list((tmp_path / 'step').glob('events.out.tfevents.*'))
    options = '--sched poly --power 0.9 --min-lr 1e-5 --updates 4 --warmup-updates 2 --warmup-ratio 0.5'
    assert run('segmentation', tmp_path / 'poly', options) == 0
    expected = [5e-4, 7.5e-4, *(1e-5 + 9.9e-4 * (1 - t / 4) ** 0.9 for t in (2, 3))]
    assert [row['lr'] for row in rows(tmp_path / 'poly')] == pytest.approx(expected)
    assert [row['update'] for row in rows(tmp_path / 'poly')] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    'options, message',
    [
        ('segmentation --epochs 0', 'argument --epochs: expects an integer of at least 1, not 0'),
        ('segmentation -b 9', '--batch-size 9 is more than the 8 training images'),
        (
            'segmentation -b 3 --grad-accum-steps 3',
            '--batch-size 3 with --grad-accum-steps 3 is more than the 8 training images',
        ),
        ('segmentation --sched step', '--sched step needs --milestones'),
        ('segmentation --milestones 3', '--milestones are for --sched step, not for cosine'),
        ('segmentation --opt adamm', "--opt: unknown optimizer 'adamm'; did you mean adam"),
        ('segmentation --warmup-updates 4', '--warmup-updates 4 leaves nothing of the 4 updates'),
        ('segmentation --amp float16', '--amp float16 needs a GPU: give --amp bfloat16 on the CPU'),
        ('segmentation --scale 2 1', '--scale [2.0, 1.0]: must be two numbers, the smaller one first'),
        ('segmentation --data nowhere', "there is no folder 'nowhere' (--data)"),
        ('segmentation --modle x', "unknown option '--modle'; did you mean --model"),
        ('segmentation --config ade', "--config: unknown recipe 'ade'"),
        ('detection --levels fpn6', '--levels: there is no fpn6, only fpn1, fpn2, fpn3, fpn4, fpn5'),
        ('detection --backbone flatten_pvt_v2_b9', "unknown model 'flatten_pvt_v2_b9'"),
        (
            'detection --backbone vit_small_patch14_dinov2',
            'with --backbone vit_small_patch14_dinov2: a feature pyramid needs',
        ),
        ('detection --device abacus', "--device 'abacus': no such kind of device"),
        ('detection --lr 1e20 --updates 3 --val-interval 3', 'try a lower --lr'),
        ('stereo --max-disparity 10', 'max_disparity must be a positive multiple of 4, got 10'),
        ('stereo --image-size 16 32', 'image_size must be at least 32 × 32, got 16 × 32'),
        ('stereo --data {tmp}', 'there are no pairs'),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, capsys, options, message):
    task, _, options = options.partition(' ')
    assert run(task, tmp_path / 'out', options.replace('{tmp}', str(tmp_path))) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith('error: ')
    assert message in error
    assert not (tmp_path / 'out' / 'last.pth').exists()


@pytest.mark.parametrize(
    'words, message',
    [
        ('train-dense', 'error: name a task: detection, segmentation, stereo, video'),
        ('train-dense detektion', "error: unknown task 'detektion'; did you mean detection"),
        ('validate-dense', 'error: name the output folder of flatten-zoo train-dense first'),
        ('validate-dense nowhere', "error: 'nowhere' is no output folder of flatten-zoo train-dense: it has no args"),
    ],
)
def test_first_words(words, message, capsys):
    assert cli(words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    'recorded, message',
    [
        ('model: resnet50', 'is of no task of flatten-zoo train-dense'),
        ('{task: detection, backbone: hf-hub:somebody/model}', "the backbone 'hf-hub:somebody/model', which is no reg"),
        ('{task: detection, nonsense: 1}', "args.yaml: unknown option 'nonsense'"),
        ('task: detection', 'there is no file .*best.pth'),
    ],
)
def test_run_that_is_not_validated(tmp_path, recorded, message):
    (tmp_path / 'args.yaml').write_text(recorded)
    with pytest.raises(UsageError, match=message):
        validate.validate(tmp_path, [])


def test_unlike_categories(tmp_path, capsys):
    for split in ('train', 'val'):
        write_shapes(tmp_path / split, 2, 64)
    path = tmp_path / 'val' / 'instances.json'
    path.write_text(path.read_text().replace('"categories": [', '"categories": [{"id": 9, "name": "star"}, '))
    for task in ('detection', 'segmentation'):
        assert run(task, tmp_path / 'out', f'--data {tmp_path}') == 2
        assert 'do not have the same categories' in capsys.readouterr().err


@pytest.mark.parametrize('task', TASKS)
def test_recipes_are_options(task):
    found = recipes(f'dense/{task}')
    assert found or task == 'video'
    for name, path in found.items():
        args = task_parser(TASKS[task]).parse_with_config(['--config', name])
        check_options(args)
        assert args.output == f'output/{name}'
        assert path.read_text().startswith('# ')
        if getattr(args, 'data_layout', 'coco') != 'coco':
            assert args.data_layout in segmentation_layouts()
        if task != 'stereo':
            assert timm.is_model(args.backbone)


RATES = {  # learning rate after so many updates (of 118 287 images of COCO, 16 in an update), worked out by hand
    'detection/mask_rcnn_1x_flatten_swin_t': {
        0: 1e-7,
        500: 5.005e-5,
        1000: 1e-4,
        59135: 1e-4,
        59136: 1e-5,
        81312: 1e-6,
    },
    'detection/mask_rcnn_3x_flatten_swin_t': {0: 1e-7, 500: 1e-4, 199583: 1e-4, 199584: 1e-5, 243936: 1e-6},
    'segmentation/upernet_160k_flatten_swin_t_ade20k': {0: 6e-11, 750: 3.000003e-5, 1500: 5.94375e-5, 80000: 3e-5},
    'segmentation/fpn_40k_flatten_pvt_t_ade20k': {0: 2e-4, 20000: 2e-4 * 0.5**0.9},
    'segmentation/isa_net_ade20k': {0: 0.02, 75000: 0.02 * 0.5**0.9},
    'stereo/ea_psmnet_sceneflow': {0: 1e-3, 1000: 1e-3},
}


@pytest.mark.parametrize('name', RATES)
def test_rates_of_recipes(name):
    task, _, recipe = name.partition('/')
    args = task_parser(TASKS[task]).parse_with_config(['--config', recipe])
    epoch = 118287 // 16
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], args.lr)
    updates, unit = (args.updates, 1) if args.updates else (args.epochs * epoch, epoch)
    scheduler = trainer._build_scheduler(args, optimizer, updates, unit)
    for update, rate in RATES[name].items():
        scheduler.step_update(update)
        assert optimizer.param_groups[0]['lr'] == pytest.approx(rate, rel=1e-6), update
