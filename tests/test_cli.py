import csv
import os
import subprocess
import sys

import matplotlib.image
import pytest
import torch

from flatten_zoo.cli import COMMANDS, PROGRAMS, main


def test_help_lists_every_command():
    done = subprocess.run([sys.executable, '-m', 'flatten_zoo', '--help'], capture_output=True, text=True, check=True)
    assert all(name in done.stdout and command.__doc__ for name, command in COMMANDS.items())


STARTS = {
    'module': "import runpy; sys.argv = ['-m', *sys.argv[1:]]; sys.orig_argv = ['python', '-m', 'flatten_zoo', "
    "*sys.argv[1:]]; runpy.run_module('flatten_zoo', run_name='__main__', alter_sys=True)",
    'script': "sys.argv[0] = '/bin/flatten-zoo'; from flatten_zoo.cli import main; sys.exit(main())",
}


@pytest.mark.parametrize('start', STARTS)
@pytest.mark.parametrize(
    'arguments, status',
    [
        *(([*command, '--help'], 0) for command in ([], *([name] for name in COMMANDS if name not in PROGRAMS))),
        ([], 2),
        (['nonsense'], 2),
        (['list', '--nonsense'], 2),
        (['info'], 2),
        (['export', 'm', '--format', 'x'], 2),
    ],
)
def test_help_and_mistakes_do_not_import_torch(arguments, status, start):
    code = f"""import atexit, sys
atexit.register(lambda: print('torch' in sys.modules))
{STARTS[start]}"""
    done = subprocess.run([sys.executable, '-c', code, *arguments], capture_output=True, text=True)
    assert done.returncode == status and done.stdout.splitlines()[-1] == 'False', done.stderr


@pytest.mark.parametrize(
    'arguments, announcement',
    [
        (['complexity', 'ea'], 'measuring …'),
        (['bench', 'm'], 'measuring …'),
        (['predict', 'a.png'], 'predicting …'),
        (['visualize', 'a.png', '--model', 'm', '-o', 'b.png'], 'drawing a.png with m …'),
        (['export', 'm', '-o', 'm.onnx'], 'exporting m to m.onnx …'),
        (['list'], ''),
    ],
)
def test_what_takes_long_is_announced_before_the_imports(arguments, announcement, monkeypatch, capsys):
    monkeypatch.setattr('flatten_zoo.cli.importlib', None)
    with pytest.raises(AttributeError):
        main(arguments)
    assert capsys.readouterr().err.strip() == announcement


def test_no_command(capsys):
    with pytest.raises(SystemExit) as e:
        main([])
    assert e.value.code == 2 and 'COMMAND' in capsys.readouterr().err


@pytest.mark.parametrize(
    'table, cell, format',
    [
        ('ea-table2', '41.3 M', 'table'),
        ('ea-section3.5', '513×', 'table'),
        ('ea-section3.5', '513×', 'csv'),
        ('ea-mask-rcnn', '+5.3 %', 'csv'),
        ('stereo', '9.68 TB', 'table'),
        ('stereo', '9.68 TB', 'csv'),
    ],
)
def test_paper_table(table, cell, format, capsys):
    assert main(['complexity', '--table', table, *(['--format', 'csv'] if format == 'csv' else [])]) == 0
    printed = capsys.readouterr().out
    assert cell in (printed.replace(',', '\n').splitlines() if format == 'csv' else printed)


def test_every_paper_table_has_its_option(capsys):
    from flatten_zoo.cost.paper_tables import PAPER_TABLES

    with pytest.raises(SystemExit):
        main(['complexity', '--help'])
    assert '{' + ','.join([*PAPER_TABLES, 'issa-efficiency']) + '}' in capsys.readouterr().out


@pytest.mark.slow
def test_issa_efficiency(tmp_path, capsys):
    from flatten_zoo.dense import isa_net
    from flatten_zoo.dense.isa_net import CONTEXTS

    picture = tmp_path / 'cost.png'
    arguments = ['complexity', '--table', 'issa-efficiency', '--img-size', '6', '9', '--format', 'csv']
    assert main([*arguments, '--plot', str(picture)]) == 0
    assert matplotlib.image.imread(picture).std() > 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [(row['name'], row['size']) for row in rows] == [
        (name, size) for size in ('6', '9') for name in (*CONTEXTS, '3×3 conv')
    ]
    by_name = {row['name']: row for row in rows[: len(CONTEXTS) + 1]}
    assert int(by_name['3×3 conv']['macs']) == 36 * 9 * 2048 * 512
    assert all(float(row['seconds']) > 0 and int(row['peak_memory']) > 4 * int(row['parameters']) for row in rows)
    for context in ('issa', 'ppm'):
        with torch.device('meta'):
            head = isa_net('resnet50', context=context).isa_head
        assert int(by_name[context]['parameters']) == sum(p.numel() for p in head.parameters())


def test_operators_and_models(capsys):
    assert main(['complexity', 'ea', 'resnet18', '--img-size', '32', '64', '--format', 'csv']) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [(row['name'], row['size']) for row in rows] == [
        ('ea', '32'),
        ('ea', '64'),
        ('resnet18', '32'),
        ('resnet18', '64'),
    ]
    assert rows[0]['macs'] == rows[0]['closed_form_macs'] == str(32 * 32 * (256 * 256 + 2 * 64 * 64))
    assert rows[2]['closed_form_macs'] == ''
    assert main(['complexity', 'resnet18', '--img-size', '32']) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ['name', 'size', 'params', '(M)', 'GMACs', 'activations', '(M)', 'peak', 'memory', '(MB)']
    assert row.split()[:3] == ['resnet18', '32', '11.7']
    assert main(['complexity', 'nl', '--img-size', '8']) == 0
    assert 'fused kernel never holds that matrix' in capsys.readouterr().err


def test_plot(tmp_path, capsys):
    picture = tmp_path / 'cost.png'
    assert main(['complexity', 'ea', 'nl', '--img-size', '8', '16', '24', '--plot', str(picture)]) == 0
    assert matplotlib.image.imread(picture).std() > 0
    assert [path.name for path in tmp_path.iterdir()] == ['cost.png']
    assert len(capsys.readouterr().out.splitlines()) == 7


@pytest.mark.parametrize(
    'arguments, message',
    [
        ([], 'name models or operators to compare, or a paper table with --table'),
        (['ea', '--table', 'stereo'], 'name models or operators to compare, or a paper table with --table'),
        (['--table', 'stereo', '--plot', 'cost.png'], '--table stereo has the sizes of its paper and is not drawn'),
        (['--table', 'issa-efficiency', '--stages'], '--stages is for models: leave it out with --table'),
        (['--table', 'issa-efficiency', '--img-size', '0'], '--img-size must be positive, got 0'),
        (['--table', 'issa-efficiency', '--img-size', '8', '4096'], "'issa' at size 4096 needs"),
        (['ea_resnet500'], "unknown model 'ea_resnet500'; did you mean"),
        (['nl', '--img-size', '2048'], "'nl' at size 2048 needs"),
        (['ea', '--plot', 'cost.xyz'], "cannot write a picture to 'cost.xyz'"),
        (['ea', '--plot', 'no/such/folder/cost.png'], "there is no folder 'no/such/folder'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, message, capsys):
    assert main(['complexity', *arguments]) == 2
    captured = capsys.readouterr()
    before, error = captured.err.splitlines()
    assert before == 'measuring …' and message in error and not captured.out


@pytest.mark.parametrize('wanted, shown', [('', False), ('0', False), ('1', True)])
def test_traceback_behind_a_line(wanted, shown, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv('FLATTEN_ZOO_TRACEBACK', wanted)
    damaged = tmp_path / 'damaged.safetensors'
    damaged.write_bytes(b'no safetensors')
    assert main(['convert', str(damaged), '--model', 'flatten_pvt_t', '-o', str(tmp_path / 'out')]) == 2
    *before, line = capsys.readouterr().err.splitlines()
    assert line.startswith('error: ') and 'damaged.safetensors' in line
    assert bool(before) is shown
    if shown:  # with its cause
        assert before[0].startswith('Traceback') and any('SafetensorError' in text for text in before)


@pytest.mark.parametrize(
    'arguments',
    [
        'complexity ea --img-size 8 --plot {}.png',
        'convert {} -o out',
        'export test_resnet --checkpoint {} --format pt2 -o out.pt2',
        'export test_resnet --format pt2 -o {}.pt2',
        'predict {} --model test_resnet',
        'push {} --repo me/x --dry-run',
        'run {}',
        'train {} --model test_resnet',
        'train --config {}',
        'train-dense detection --data {}',
        'validate --checkpoint {}',
        'validate-dense {}',
    ],
)
def test_names_that_the_file_system_does_not_take(arguments, tmp_path, monkeypatch, capsys):
    if 'dense' in arguments:
        pytest.importorskip('accelerate')
    monkeypatch.chdir(tmp_path)
    assert main(arguments.format('x' * 300).split()) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith('error: ') and 'xxx' in line and line.endswith(': File name too long')


@pytest.mark.parametrize('error', [ZeroDivisionError('a bug'), BrokenPipeError('of another pipe')])
def test_an_unexpected_error_keeps_its_traceback(error, monkeypatch):
    def bug(*args, **kwargs):
        raise error

    monkeypatch.setattr('flatten_zoo.weights.list_table', bug)
    with pytest.raises(type(error), match=str(error)):
        main(['list'])


@pytest.mark.parametrize(
    'arguments, unbuffered',
    [('list', '1'), pytest.param('info flatten_pvt_v2_b0', '', marks=pytest.mark.slow), ('--help', '')],
)
def test_ends_quietly_where_nobody_reads_on(arguments, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, '-m', 'flatten_zoo', *arguments.split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, 'PYTHONUNBUFFERED': unbuffered},
    )
    os.close(writer)
    assert done.returncode == 141 and not done.stderr
