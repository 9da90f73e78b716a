"""Models timed side by side."""

import csv
import functools
import itertools
import json
import sys
from importlib.metadata import version

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from flatten_zoo.bench import measuring, modes, picture
from flatten_zoo.bench.alternating import in_turn
from flatten_zoo.bench.modes import MODES
from flatten_zoo.cli import main

TINY = ['bench', 'test_vit', 'test_resnet', '--img-size', '32', '--seconds', '0.01', '--device', 'cpu']


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(path) -> tuple[list[str], list[dict]]:
    lines = path.read_text().splitlines()
    comments = [line for line in lines if line[0] == '#']
    return comments, list(csv.DictReader(lines[len(comments) :]))


def test_table_csv_and_json_agree(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('os.getloadavg', lambda: (7.46, 1.0, 1.0), raising=False)
    for path in (tmp_path / 'a.csv', tmp_path / 'a.json'):
        assert main([*TINY, '--batch-size', '1', '3', '--threads', '1', '--results', str(path)]) == 0
        printed = capsys.readouterr().out.splitlines()
        about = [line for line in printed if line[0] == '#']
        table = [line.split() for line in printed[len(about) + 1 :]]
        if path.suffix == '.csv':
            comments, rows = rows_of(path)
            assert comments == about
        else:
            found = json.loads(path.read_text())
            rows = found['results']
            assert [f'# {key}: {value}' for key, value in found['machine'].items()] == about and not found['failures']
        assert {f'# torch: {version("torch")}', '# threads: 1', '# device: cpu', '# measured: inference'} <= set(about)
        assert any(line.startswith('# cpu: ') and len(line) > 7 for line in about)
        assert '# load before: 7.5' in about
        assert [(row['model'], int(row['batch_size'])) for row in rows] == [
            ('test_vit', 1),
            ('test_resnet', 1),
            ('test_vit', 3),
            ('test_resnet', 3),
        ]
        for row, cells, first in zip(rows, table, [rows[0], rows[0], rows[2], rows[2]], strict=True):
            ms, low, high = (float(row[f'milliseconds{q}']) for q in ('', '_q1', '_q3'))
            assert 0 < low <= ms <= high and int(row['runs']) >= 5
            assert float(row['images_per_second']) == pytest.approx(1e3 * int(row['batch_size']) / ms)
            assert float(row['speed_ratio']) == pytest.approx(float(first['milliseconds']) / ms)
            assert cells[:4] == [row['model'], 'eager', str(row['batch_size']), '32']
            assert float(cells[4]) == pytest.approx(float(row['images_per_second']), rel=0.01)
            assert cells[-1] == f'{float(row["speed_ratio"]):.2f}×' and int(row['peak_memory']) > 1e6


@pytest.mark.parametrize(
    'mode', [pytest.param(m, marks=pytest.mark.slow) if m in ('compile', 'int8') else m for m in MODES]
)
def test_every_mode(mode, tmp_path, capsys):
    if mode in ('onnx', 'int8'):
        pytest.importorskip('onnxruntime.quantization')
    path = tmp_path / 'a.csv'
    arguments = ['bench', 'test_vit', '--img-size', '32', '--seconds', '0.01', '--modes', mode, '--device', 'cpu']
    assert main([*arguments, '--results', str(path)]) == 0, capsys.readouterr().err
    comments, rows = rows_of(path)
    assert [row['mode'] for row in rows] == [mode]
    assert bool(rows[0]['peak_memory']) == (mode not in ('compile', 'onnx', 'int8'))
    assert any('speed alone is meant' in line for line in comments) == (mode == 'int8')


def test_training_step_needs_more_memory_and_time(tmp_path):
    memory = {}
    for train in ([], ['--train']):
        path = tmp_path / 'a.json'
        assert main([*TINY, '--batch-size', '4', '--modes', 'eager', 'bfloat16', *train, '--results', str(path)]) == 0
        found = json.loads(path.read_text())
        memory[len(train)] = [row['peak_memory'] for row in found['results']]
        assert found['machine']['measured'].startswith('training' if train else 'inference')
    assert all(trained > 1.3 * inferred for inferred, trained in zip(memory[0], memory[1], strict=True))
    assert memory[1][2] < 0.7 * memory[1][0]  # bfloat16


def test_models_take_turns_and_the_time_is_bounded():
    seen = [name for name, _ in in_turn({'a': None, 'b': None, 'c': None}, seconds=0)]
    assert seen == ['a', 'b', 'c'] * 5
    assert len(list(itertools.islice(in_turn({'a': None}, seconds=60), 50))) == 50


def test_a_model_that_fails_leaves_the_others(tmp_path, capsys):
    path = tmp_path / 'a.csv'
    arguments = [*TINY, '--img-size', '40', '48', '--results', str(path)]
    assert main(arguments) == 1  # test_vit has patches of 16
    captured = capsys.readouterr()
    failed = [line for line in captured.err.splitlines() if line.startswith('failed: ')]
    assert len(failed) == 1 and failed[0].count('test_vit') == 1
    assert 'test_vit, eager, batch 1, size 40: does not take' in failed[0] and 'patch size' in failed[0]
    comments, rows = rows_of(path)
    assert [(row['model'], row['img_size'], bool(row['speed_ratio'])) for row in rows] == [
        ('test_resnet', '40', False),
        ('test_vit', '48', True),
        ('test_resnet', '48', True),
    ]
    assert comments[-1] == f'# {failed[0]}'


class Network(torch.nn.Conv2d):
    """With a step, it would have to be compiled at every call."""

    def __init__(self, step=0):
        super().__init__(3, 2, 1)
        self.calls, self.step = 1, step

    def forward(self, x):
        self.calls += self.step
        return super().forward(x).mean((2, 3)) * self.calls


@pytest.mark.parametrize('train', [[], ['--train']])
def test_nothing_is_compiled_while_it_is_timed(train, capsys, monkeypatch):
    timed, counter, compiled = measuring.timed, CompileCounter(), []

    def watched(run):
        before = counter.frame_count
        seconds = timed(run)
        compiled.append(counter.frame_count - before)
        return seconds

    monkeypatch.setattr(measuring, 'timed', watched)
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend=counter))
    monkeypatch.setattr(modes, 'build_at', lambda *args: (Network(), None))
    monkeypatch.setattr(modes, 'count_affordable', lambda name, size, *args: (None, (1, 3, size, size), None))
    settings = ['--modes', 'eager', 'compile', '--batch-size', '1', '2', '--img-size', '32', '64']
    assert main(['bench', 'test_vit', 'test_vit2', 'test_vit3', *settings, *TINY[5:], *train]) == 0
    assert counter.frame_count == 2 * 2  # batch sizes and image sizes: models of one class share what is compiled
    assert len(compiled) >= 5 * 2 * 3 * 2 * 2 and not any(compiled)


def test_what_compiles_at_every_run_has_no_figure(capsys, monkeypatch):
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='eager'))
    monkeypatch.setattr(modes, 'build_at', lambda *args: (Network(step=1), None))
    assert main([*TINY, '--modes', 'compile']) == 1
    captured = capsys.readouterr()
    assert captured.err.count('failed: ') == captured.err.count('Detected recompile') == 2
    assert 'test_' not in captured.out


def test_no_memory_is_one_line(capsys, monkeypatch):
    assert main([*TINY, '--batch-size', '1', '1000000000']) == 1
    captured = capsys.readouterr()
    assert captured.err.count('GB of memory') == 2 and '--batch-size' in captured.err
    assert captured.out.count('test_') == 2


def test_failure_while_timing(capsys, monkeypatch):
    timed, calls = measuring.timed, itertools.count()

    def fails_at_the_fourth(run):
        if next(calls) == 3:
            raise RuntimeError('out of memory\nand more')
        return timed(run)

    monkeypatch.setattr(measuring, 'timed', fails_at_the_fourth)
    assert main(TINY) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == 'failed: test_resnet, eager, batch 1, size 32: out of memory'
    assert captured.out.count('test_vit') == 1 and 'test_resnet' not in captured.out


@pytest.mark.parametrize('after, rows', [(0, 0), (1, 1), (4, 2)])
def test_ctrl_c_prints_what_there_is(after, rows, tmp_path, capsys, monkeypatch):
    timed, calls = measuring.timed, itertools.count()

    def interrupted(run):
        if next(calls) == after:
            raise KeyboardInterrupt
        return timed(run)

    monkeypatch.setattr(measuring, 'timed', interrupted)
    path = tmp_path / 'a.csv'
    assert main([*TINY, '--results', str(path)]) == 130
    assert len(rows_of(path)[1]) == capsys.readouterr().out.count('test_') == rows


def test_ctrl_c_before_anything_could_be_drawn(tmp_path, capsys, monkeypatch):
    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, 'timed', interrupted)
    monkeypatch.setattr('flatten_zoo.bench.command.check_accuracies', lambda *args: [])
    assert main([*TINY, '--plot', str(tmp_path / 'a.png')]) == 130
    assert '--plot: nothing was measured' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'family, models',
    [
        ('swin', ['flatten_swin_b', 'flatten_swin_b_384', 'flatten_swin_s', 'flatten_swin_t']),
        ('pvt', ['flatten_pvt_b', 'flatten_pvt_m', 'flatten_pvt_s', 'flatten_pvt_t']),
    ],
)
def test_family(family, models):
    assert measuring.family_models(family) == models


def test_plot(tmp_path, capsys, monkeypatch):
    timings = [
        measuring.Timing(name, mode, 1, 384 if name.endswith('384') else 224, (0.1, 0.1), None, 1.0)
        for mode in ('eager', 'compile')
        for name in [*picture.RELEASES, 'resnet18']
    ]  # the worst case: all in a line
    figures = []
    monkeypatch.setattr(picture, 'save_figure', lambda figure, path: figures.append(figure))
    picture.plot(timings, tmp_path / 'a.png', train=False)
    for axes in figures[0].axes:
        boxes = {label.get_text(): label.get_window_extent() for label in axes.texts}
        assert boxes.keys() == picture.RELEASES.keys()
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes.values(), 2))
        colours = {line.get_label(): line.get_color() for line in axes.lines}
        assert colours.keys() == {'pvt', 'pvt_v2', 'swin', 'cswin'} and len(set(colours.values())) == 4
        points = axes.transData.transform([xy for line in axes.lines for xy in line.get_xydata()])
        assert len(points) == 7 and not any(box.contains(*xy) for box in boxes.values() for xy in points)


def test_plot_of_a_run(tmp_path, capsys):
    path = tmp_path / 'a.png'
    assert main(['bench', 'flatten_pvt_v2_b0', 'test_vit', '--seconds', '0.01', '--plot', str(path)]) == 0
    assert path.stat().st_size > 1000
    assert '--plot: no accuracy is reported for test_vit' in capsys.readouterr().err


@pytest.mark.parametrize(
    'arguments, message',
    [
        ([], 'name models, or a family of the zoo with --family'),
        (['restnet18'], "unknown model 'restnet18'; did you mean"),
        (['--family', 'swan'], "unknown family 'swan'; did you mean swin"),
        (['--family', 'x'], '--family is one of attention_resnet, cswin, deit, pvt, pvt_v2, swin'),
        (['test_vit', '--batch-size', '0'], '--batch-size 0: must be positive'),
        (['test_vit', '--img-size', '-1'], '--img-size -1: must be positive'),
        (['test_vit', '--threads', '0'], '--threads 0: must be positive'),
        (['test_vit', '--seconds', 'nan'], '--seconds nan: must be positive'),
        (['test_vit', '--device', 'gpu'], "--device 'gpu': no such kind of device"),
        (
            ['test_vit', '--train', '--modes', 'eager', 'onnx', 'reparameterized'],
            '--modes onnx reparameterized: cannot',
        ),
        (['test_vit', '--results', 'a.xls'], "cannot write results to 'a.xls': its name must end in one of csv, json"),
        (['test_vit', '--results', '/none/a.csv'], "there is no folder '/none'"),
        (['test_vit', '--plot', 'a.xyz'], "cannot write a picture to 'a.xyz'"),
        (['test_vit', '--plot', 'a.png'], '--plot: no accuracy is reported for any of these models'),
        (['flatten_swin_t', '--plot', 'a.png', '--img-size', '384'], '--plot: no accuracy is reported for any'),
        (['test_vit', '--loader', '--model', 'x'], '--loader takes the options of train.py after it, and none before'),
        (['--seconds', '2', '--loader', '--model', 'x'], 'none before: seconds'),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, message, capsys):
    assert main(['bench', *arguments]) == 2
    captured = capsys.readouterr()
    before, error = captured.err.splitlines()
    assert before == 'measuring …' and message in error and not captured.out


def test_unknown_mode(capsys):
    with pytest.raises(SystemExit) as e:
        main(['bench', 'test_vit', '--modes', 'fast'])
    assert e.value.code == 2 and "invalid choice: 'fast'" in capsys.readouterr().err


def test_missing_onnxruntime(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'onnxruntime', None)
    assert main(['bench', 'test_vit', '--modes', 'eager', 'onnx']) == 2
    captured = capsys.readouterr()
    assert '--modes onnx: ' in captured.err and "pip install 'flatten_zoo[export]'" in captured.err


def test_every_mode_is_an_option(capsys):
    with pytest.raises(SystemExit):
        main(['bench', '--help'])
    assert ', '.join(MODES[:-1]) in ' '.join(capsys.readouterr().out.split())
