"""Networks of train-dense on images of one's own: pictures, and exported files."""

import json

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from flatten_zoo.cli import main
from flatten_zoo.dense.training.options import TASKS, task_parser
from flatten_zoo.export import description_of, load_onnx

pytest.importorskip('accelerate')
from flatten_zoo.dense.training.trained import open_run  # noqa: E402

CLASSES = ['background', 'circle', 'square', 'triangle']
OPTIONS = {
    'segmentation': {'model': 'isa_net', 'image_size': 32, 'crop_size': [32, 32]},
    'detection': {'backbone': 'test_resnet', 'image_size': [32], 'regions': 8, 'levels': ['fpn4']},
}


def write_run(folder, task, facts):
    """What `train-dense` leaves of a run, whose data have gone."""
    folder.mkdir()
    parser = task_parser(TASKS[task])
    parser.set_defaults(**OPTIONS[task])
    torch.manual_seed(0)
    network = TASKS[task](parser.parse_with_config([]), trained=True, facts=facts).network
    torch.save({'model': network.state_dict(), 'task': task, 'scores': {}, **facts}, folder / 'best.pth')
    (folder / 'args.yaml').write_text(yaml.safe_dump({'task': task, **OPTIONS[task], 'data': 'gone'}))
    return folder


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')
    return {task: write_run(folder / task, task, {'classes': CLASSES}) for task in OPTIONS}


@pytest.fixture
def images(tmp_path):
    (tmp_path / 'images' / 'deep').mkdir(parents=True)
    for name, size in (('a.jpg', (40, 30)), ('deep/a.png', (300, 20))):
        values = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(values).save(tmp_path / 'images' / name)
    return tmp_path / 'images'


@pytest.mark.parametrize('task', OPTIONS)
def test_pictures(runs, images, tmp_path, capsys, task):
    (images / 'deep' / 'b.png').write_bytes(b'damaged')
    out = tmp_path / 'out'
    assert main(['predict-dense', str(runs[task]), str(images), '--device', 'cpu', '-o', str(out)]) == 1
    said = capsys.readouterr()
    assert '2 pictures' in said.out and "deep/b.png'" in said.err and 'Traceback' not in said.err
    assert sorted(str(path.relative_to(out)) for path in out.rglob('*.png')) == ['a.jpg.png', 'deep/a.png.png']
    small, large = (np.array(Image.open(out / name)) for name in ('a.jpg.png', 'deep/a.png.png'))
    assert small.shape[1] == 7 * 30 and large.shape[1] == 20
    if task == 'detection':
        assert small.shape[0] == 7 * 40 and large.shape[0] == 300
        return
    assert small.shape[0] > 7 * 40, 'a legend below'
    # the colours are those of the classes that the network finds, at the image's own size
    run = open_run(runs[task])
    image = torch.from_numpy(np.array(Image.open(images / 'a.jpg'))).permute(2, 0, 1) / 255
    with torch.no_grad():
        expected = run.picture(run.network, image)
    assert np.array_equal((255 * expected + 0.5).clamp(0, 255).byte().permute(1, 2, 0), small)


def test_pictures_with_one_name(runs, images, tmp_path, capsys):
    arguments = [str(runs['segmentation']), str(images / 'a.jpg'), str(tmp_path / 'more' / 'a.jpg')]
    (tmp_path / 'more').mkdir()
    Image.new('RGB', (8, 8)).save(tmp_path / 'more' / 'a.jpg')
    assert main(['predict-dense', *arguments, '-o', str(tmp_path / 'out')]) == 2
    assert "would be the same picture '" in capsys.readouterr().err and not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    'command', [['predict-dense', '{}', '{images}'], ['export', '--task', 'segmentation', '{}', '-o', '{out}']]
)
def test_other_folders(runs, images, tmp_path, capsys, command):
    if command[0] == 'export':
        pytest.importorskip('onnxscript')

    def said(folder):
        argv = [x.format(folder, images=images, out=tmp_path / 'x.onnx') for x in command]
        assert main(argv) == 2
        return capsys.readouterr().err

    assert 'is no output folder of flatten-zoo train-dense' in said(images)
    stereo = tmp_path / 'stereo'
    stereo.mkdir()
    torch.save({'model': {}, 'task': 'stereo', 'scores': {}}, stereo / 'best.pth')
    (stereo / 'args.yaml').write_text('task: stereo')
    assert 'was trained for stereo, which finds no classes' in said(stereo)
    if command[0] == 'export':
        assert 'was trained for detection, not for segmentation' in said(runs['detection'])


def test_export_of_a_run(runs, images, tmp_path, capsys):
    pytest.importorskip('onnxscript')
    path = tmp_path / 'x.onnx'
    argv = ['export', str(runs['segmentation']), '--task', 'segmentation', '-o', str(path), '--dynamic', 'batch']
    assert main(argv) == 0, capsys.readouterr().err
    about = json.loads(description_of(path).read_text())
    assert about['task'] == 'segmentation' and about['model'] == 'ISANet'
    assert about['input']['shape'] == ['batch', 3, 32, 32]
    assert about['outputs'] == [{'name': 'logits', 'classes': 4, 'label_names': CLASSES}]
    network = open_run(runs['segmentation']).network
    x = torch.rand(3, 3, 32, 32)
    mean, std = (torch.tensor(about['preprocessing'][key]).view(3, 1, 1) for key in ('mean', 'std'))
    with torch.no_grad():
        expected = network(x)['out']
    (found,) = load_onnx(path)((x - mean) / std)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert main(['predict', str(images), '--model', str(path)]) == 2
    assert 'gives a class for each pixel' in capsys.readouterr().err
    assert main([*argv, '--pretrained', '--force']) == 2
    assert 'leave out --pretrained' in capsys.readouterr().err
