"""Exported files: outputs as of the model, also at sizes that the export has not seen, and what is beside them."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from flatten_zoo import export as export_module
from flatten_zoo.cli import main
from flatten_zoo.dense import isa_net
from flatten_zoo.errors import UsageError
from flatten_zoo.export import (
    OPSET,
    OPSETS,
    Logits,
    check_shapes,
    description_of,
    export,
    feature_network,
    load_onnx,
    load_program,
    save_onnx,
    trace,
)
from flatten_zoo.samples.digits import write_digits
from flatten_zoo.training.train import main as train
from flatten_zoo.weights import open_model, zoo_models

from .marks import slow_but
from .networks import RESNETS, SMALL, create_shallow, create_small, dynamic

onnx = pytest.importorskip('onnx')
quant_pre_process = pytest.importorskip('onnxruntime.quantization.shape_inference').quant_pre_process
LOAD = {'onnx': load_onnx, 'pt2': load_program}
UNSEEN = [(1, 33, 47), (2, 64, 64), (3, 70, 101)]  # batch, height, width


def outputs(network, x):
    y = network(x)
    return [y] if isinstance(y, torch.Tensor) else list(y)


@torch.no_grad()
def assert_same(path, network, shapes, tolerance=1e-4):
    run = LOAD[path.suffix[1:]](path)
    for batch, height, width in shapes:
        x = torch.randn(batch, 3, height, width)
        for actual, expected in zip(run(x), outputs(network, x), strict=True):
            assert actual.shape == expected.shape
            assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


# what traces quickly; the others take seconds each
BATCHES = [('nl_resnet50', 'classification', 'pt2')]


@pytest.mark.parametrize(
    ('name', 'task', 'format'),
    [
        case if case in BATCHES else pytest.param(*case, marks=pytest.mark.slow)
        for name in (*SMALL, *RESNETS)
        for case in ((name, 'features', 'onnx'), (name, 'classification', 'pt2'))
    ],
)
def test_one_file_for_many_batches(name, task, format, tmp_path):
    model = create_shallow(name)
    path = tmp_path / f'model.{format}'
    assert export(model, path, task, format, (64, 64), 'batch') < 1e-4
    network = feature_network(model) if task == 'features' else model
    assert_same(path, network, [(batch, 64, 64) for batch in (1, 2, 5)])


CONTEXTS = ('issa', 'self', 'danet', 'rcca', 'cgnl', 'latent_gnn', 'ea', 'ppm', 'aspp')


def segmentation_network(name, backbone):
    torch.manual_seed(0)
    if name in CONTEXTS:
        return isa_net(backbone, 3, context=name).eval()
    smp = pytest.importorskip('segmentation_models_pytorch')
    kwargs: dict = {'dynamic_img_size': True} if 'swin' in backbone else {}
    if name == 'UPerNet':
        kwargs['decoder_channels'] = 16
    return getattr(smp, name)(f'tu-{backbone}', encoder_weights=None, classes=3, **kwargs).eval()


@pytest.mark.parametrize(
    ('name', 'backbone'),
    [
        pytest.param('UPerNet', 'test_resnet', marks=pytest.mark.slow),
        *(pytest.param(name, 'test_resnet', marks=pytest.mark.slow) for name in CONTEXTS),
        pytest.param('issa', 'ea_resnet50', marks=pytest.mark.slow),
        pytest.param('FPN', 'flatten_pvt_v2_b0', marks=pytest.mark.slow),
        pytest.param('UPerNet', 'flatten_swin_t', marks=pytest.mark.slow),
        pytest.param('UPerNet', 'flatten_pvt_v2_b0', marks=pytest.mark.slow),
    ],
)
def test_segmentation(name, backbone, tmp_path):
    network = segmentation_network(name, backbone)
    path = tmp_path / 'model.onnx'
    assert export(network, path, 'segmentation', 'onnx', (64, 96), 'batch', classes=['a', 'b', 'c']) < 1e-3
    assert json.loads(description_of(path).read_text())['outputs'][0]['label_names'] == ['a', 'b', 'c']
    assert_same(path, Logits(network), [(batch, 64, 96) for batch in (1, 2, 3)], 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['issa', 'ea'])
def test_segmentation_of_images_of_any_size(name, tmp_path):
    network = segmentation_network(name, 'resnet26')
    path = tmp_path / 'model.pt2'
    assert export(network, path, 'segmentation', 'pt2', (64, 64), 'both') < 1e-3
    assert_same(path, Logits(network), UNSEEN, 1e-3)


@pytest.mark.parametrize(
    ('name', 'task', 'format'),
    [
        case if case == ('flatten_deit_t', 'features', 'onnx') else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product((*SMALL, *RESNETS), ('classification', 'features'), ('onnx', 'pt2'))
    ],
)
def test_one_file_for_many_sizes(name, task, format, tmp_path):
    model = create_shallow(name, **dynamic(name))
    path = tmp_path / f'model.{format}'
    assert export(model, path, task, format, (50, 76), 'both') < 1e-4
    assert_same(path, feature_network(model) if task == 'features' else model, UNSEEN)


@pytest.mark.parametrize(
    ('name', 'opset'),
    [
        case if case == ('ea_resnet50', 17) else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product((*SMALL, *RESNETS), OPSETS)
    ],
)
def test_opsets(name, opset, tmp_path):
    """Each in the file format of its time, and as onnxruntime's tools expect."""
    path = tmp_path / 'model.onnx'
    assert export(create_shallow(name), path, img_size=(64, 64), opset=opset) < 1e-4
    graph = onnx.load(path)
    onnx.checker.check_model(graph, full_check=True)
    assert {o.domain: o.version for o in graph.opset_import} == {'': opset}
    assert graph.ir_version == {17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10}[opset]
    assert json.loads(description_of(path).read_text())['opset'] == opset
    # its symbolic inference does not read the axes of ReduceMax and ReduceL2 from opset 18 on
    quant_pre_process(path, tmp_path / 'prepared.onnx', skip_symbolic_shape=opset > 17)


@pytest.mark.parametrize('task', [pytest.param('classification', marks=pytest.mark.slow), 'features'])
def test_reparameterized_unless_told_otherwise(task, tmp_path):
    path = tmp_path / 'model.pt2'
    for options in ((), ('--no-reparameterize',)):
        arguments = ('test_resnet', *options, '--task', task, '--format', 'pt2', '--img-size', 32, '--force')
        assert run_export(*arguments, '-o', path) == 0
    for reparameterize in (True, False):
        export(create_shallow('ea_resnet50'), path, task, 'pt2', (64, 64), force=True, reparameterize=reparameterize)
        operations = {str(node.target) for node in torch.export.load(path).graph.nodes}
        assert any('batch_norm' in operation for operation in operations) != reparameterize


def test_another_opset_than_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, 'opset_of', lambda path: 18)
    with pytest.raises(UsageError, match='--opset 21: the network could only be written with opset 18'):
        export(timm.create_model('test_resnet').eval(), tmp_path / 'model.onnx', img_size=(32, 32))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_shifted_windows_leave_the_size_open(tmp_path):
    model = create_small('flatten_swin_t', depths=(2,), num_heads=(1,), attn_types='softmax', dynamic_img_size=True)
    path = tmp_path / 'swin.pt2'
    assert export(model, path, 'classification', 'pt2', (50, 76), 'both') < 1e-4
    assert_same(path, model, UNSEEN)


@pytest.mark.slow
@pytest.mark.parametrize('name', zoo_models())
def test_every_model_exports(name, tmp_path):
    size = (64, 64)
    for task, format in (('classification', 'onnx'), ('features', 'pt2')):
        model, _ = open_model(name, size)
        path = tmp_path / f'{name}.{format}'
        export(model, path, task, format, size, dynamic='batch')
        network = feature_network(model) if task == 'features' else model
        assert_same(path, network, [(1, *size), (3, *size)])
        path.unlink()


def test_features_are_those_of_timm():
    for name in (*SMALL, *RESNETS):
        expected = create_shallow(name, features_only=True)
        network = feature_network(create_shallow(name))
        assert network.feature_info.channels() == expected.feature_info.channels()
        assert network.feature_info.reduction() == expected.feature_info.reduction()
        x = torch.randn(1, 3, 64, 64)
        assert [y.shape for y in network(x)] == [y.shape for y in expected(x)]


@pytest.mark.parametrize('name', [*SMALL, *RESNETS])
def test_feature_extractor_of_torchvision(name):
    """Traced without a size, and so for every size that the network takes; nothing about it has to be passed."""
    model = create_shallow(name, **dynamic(name))
    extractor = create_feature_extractor(model, {get_graph_node_names(model)[1][-1]: 'logits'}).eval()
    for batch, height, width in UNSEEN:
        x = torch.randn(batch, 3, height, width)
        torch.testing.assert_close(extractor(x)['logits'], model(x))


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', slow_but('flatten_pvt_v2_b0', 'flatten_deit_t', of=SMALL))
def test_traced_by_torchscript_for_one_size(name):
    model = create_shallow(name, **dynamic(name))
    for size in (64, 96):
        traced = torch.jit.trace(model, torch.randn(1, 3, size, size), check_trace=False)
        x = torch.randn(1, 3, size, size)
        torch.testing.assert_close(traced(x), model(x))


@pytest.mark.filterwarnings('ignore')  # torch.jit's deprecation, and what is right here at more sizes than it knows
@pytest.mark.parametrize('name', ['flatten_cswin_t', 'issa_resnet50'])
def test_traced_by_torchscript(name):
    """Stripes and groups are those of each image, not of the one traced."""
    kwargs = {'split_sizes': (1, 2, 7, 7), 'attn_types': 'softmax'} if 'cswin' in name else {}
    model = create_shallow(name, **kwargs)
    traced = torch.jit.trace(model, torch.randn(1, 3, 96, 96), check_trace=False)
    for shape in ((1, 224, 160), *UNSEEN):
        x = torch.randn(shape[0], 3, *shape[1:])
        torch.testing.assert_close(traced(x), model(x))


def write_images(folder, number=8):
    generator = np.random.default_rng(0)
    for i in range(number):
        (folder / str(i % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(folder / str(i % 2) / f'{i}.png')


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        ('flatten_pvt_v2_b0', ()),
        *(
            pytest.param(name, options, marks=pytest.mark.slow)
            for name in (*SMALL, *RESNETS)
            for options in (('--opset', 17), ('--task', 'features', '--dynamic', 'both'))
        ),
    ],
)
def test_int8(name, options, tmp_path, capsys, monkeypatch):
    """Products with weights have both inputs in 8 bits, with scales as TensorRT wants them; nothing else is rounded."""
    kwargs = dynamic(name) if 'both' in options else {}
    monkeypatch.setattr('flatten_zoo.weights.open_model', lambda *args: (create_shallow(name, **kwargs), 'untrained'))
    write_images(tmp_path / 'images')
    path = tmp_path / 'model.onnx'
    arguments = ('--img-size', 64, '--int8', tmp_path / 'images', '-o', path)
    assert run_export(name, *options, *arguments) == 0
    int8 = json.loads(description_of(path).read_text())['int8']
    assert int8['images'] == 4 and 0 < int8['largest_difference'] < 1  # random weights make much of rounding
    features = 'features' in options
    assert ('top1_agreement' in int8) != features
    assert ('the same class for' in capsys.readouterr().out) != features
    graph = onnx.load(path)
    onnx.checker.check_model(graph, full_check=True)
    assert {o.domain for o in graph.opset_import if o.domain} <= {'com.microsoft'}
    assert all(not node.domain for node in graph.graph.node)
    constants = {i.name: onnx.numpy_helper.to_array(i) for i in graph.graph.initializer}
    made_by = {output: node for node in graph.graph.node for output in node.output}
    rounded = set()
    for node in graph.graph.node:
        quantised = [made_by[i] for i in node.input[:2] if i in made_by and made_by[i].op_type == 'DequantizeLinear']
        if node.op_type in ('Conv', 'Gemm') or node.op_type == 'MatMul' and quantised[1:]:
            activation, weight = quantised
            assert weight.input[0] in constants and constants[weight.input[1]].size > 1
            assert constants[activation.input[1]].ndim == 0
            assert all((constants[q.input[2]] == 0).all() and constants[q.input[2]].dtype == np.int8 for q in quantised)
            rounded.add(activation.input[0])
    assert rounded == {node.output[0] for node in graph.graph.node if node.op_type == 'QuantizeLinear'}


@pytest.mark.slow
def test_int8_of_a_trained_network(tmp_path):
    data, output = tmp_path / 'digits', tmp_path / 'output'
    write_digits(data)
    train(
        [
            '--config',
            str(Path(__file__).parent.parent / 'configs/quickstart.yaml'),
            '--model',
            'flatten_pvt_v2_b0',
            '--data-dir',
            str(data),
            '--output',
            str(output),
            '--experiment',
            'run',
            '--epochs',
            '4',
            '--workers',
            '0',
        ]
    )
    path = tmp_path / 'model.onnx'
    assert (
        run_export(
            'flatten_pvt_v2_b0',
            '--checkpoint',
            output / 'run' / 'model_best.pth.tar',
            '--int8',
            data / 'train',
            '--img-size',
            32,
            '-o',
            path,
        )
        == 0
    )
    about = json.loads(description_of(path).read_text())
    assert about['outputs'] == [{'name': 'logits', 'classes': 10, 'label_names': [str(i) for i in range(10)]}]
    assert about['int8']['images'] == 256
    assert about['int8']['top1_agreement'] >= 0.97 and about['int8']['largest_difference'] < 0.1


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ((), 'must hold at least two images'),
        (('--opset', 21), '--opset 21: files of --int8 run with opset 20 or less'),
        (('--half',), '--int8 starts from --format onnx in float32'),
        (('--format', 'pt2'), '--int8 starts from --format onnx in float32'),
    ],
)
def test_int8_of_what_cannot_be(options, message, tmp_path, capsys):
    write_images(tmp_path / 'images', number=1)
    path = tmp_path / f'model.{"pt2" if "pt2" in options else "onnx"}'
    assert run_export('test_resnet', *options, '--int8', tmp_path / 'images', '-o', path) == 2
    assert message in capsys.readouterr().err and not path.exists()


def test_sizes_to_compare_at():
    assert check_shapes((1, 3, 64, 96), None) == [(1, 3, 64, 96)]
    assert check_shapes((1, 3, 64, 96), 'batch') == [(1, 3, 64, 96), (3, 3, 64, 96)]
    both = check_shapes((1, 3, 64, 96), 'both')
    assert {shape[0] for shape in both} == {1, 3}
    sizes = {shape[2:] for shape in both}
    assert len(sizes) == 3 and any(h % 2 and h > 64 for h, _ in sizes) and any(h % 2 and h < 64 for h, _ in sizes)


def run_export(*arguments):
    return main(['export', *map(str, arguments)])


def test_command_and_description(tmp_path, capsys):
    path = tmp_path / 'resnet.onnx'
    arguments = ('resnet18', '--task', 'features', '--dynamic', 'both', '--img-size', 64, 96, '-o', path)
    assert run_export(*arguments) == 0
    assert capsys.readouterr().out.startswith(f'{path}: differs from the model by ')
    assert sorted(file.name for file in tmp_path.iterdir()) == ['resnet.onnx', 'resnet.onnx.json']
    about = json.loads(description_of(path).read_text())
    model = timm.create_model('resnet18', features_only=True)
    config = timm.data.resolve_model_data_config(timm.create_model('resnet18'))
    assert about['model'].startswith('resnet18') and about['weights'] == 'untrained'
    assert about['task'] == 'features' and about['largest_difference'] < 1e-4
    assert about['input'] == {
        'name': 'image',
        'shape': ['batch', 3, 'height', 'width'],
        'size': [64, 96],
        'dtype': 'float32',
    }
    assert [(o['name'], o['channels'], o['stride']) for o in about['outputs']] == [
        (f'feature_{i}', c, s)
        for i, (c, s) in enumerate(
            zip(model.feature_info.channels(), model.feature_info.reduction(), strict=True), start=1
        )
    ]
    assert about['preprocessing'] == {
        'mean': list(config['mean']),
        'std': list(config['std']),
        'interpolation': config['interpolation'],
        'crop_pct': config['crop_pct'],
        'crop_mode': config['crop_mode'],
    }
    assert about['versions']['torch'] == torch.__version__.partition('+')[0] and 'onnxruntime' in about['versions']
    graph = onnx.load(path)
    assert about['opset'] == next(o.version for o in graph.opset_import if not o.domain)
    assert [i.name for i in graph.graph.input] == ['image']
    assert [o.name for o in graph.graph.output] == [o['name'] for o in about['outputs']]
    axes = graph.graph.input[0].type.tensor_type.shape.dim
    assert [axis.dim_param or axis.dim_value for axis in axes] == ['batch', 3, 'height', 'width']

    before = path.read_bytes()
    assert run_export(*arguments) == 2
    error = capsys.readouterr().err
    assert f"'{path}' is there already" in error and '--force' in error and path.read_bytes() == before
    assert run_export('test_resnet', '--force', '--img-size', 32, '-o', path) == 0
    about = json.loads(description_of(path).read_text())
    assert about['outputs'] == [{'name': 'logits', 'classes': 1000}]


@pytest.mark.parametrize('format', [pytest.param('onnx', marks=pytest.mark.slow), 'pt2'])
def test_checkpoint(format, tmp_path):
    """The classes are those of the checkpoint, and position tensors come to another image size."""
    torch.manual_seed(0)
    trained = timm.create_model('flatten_deit_t', num_classes=7, depth=2).eval()
    torch.nn.init.normal_(trained.pos_embed)
    names = list('abcdefg')
    torch.save(
        {'state_dict': trained.state_dict(), 'args': {'model_kwargs': {'depth': 2}}, 'label_names': names},
        tmp_path / 'last.pth.tar',
    )
    path = tmp_path / f'deit.{format}'
    assert (
        run_export(
            'flatten_deit_t',
            '--checkpoint',
            tmp_path / 'last.pth.tar',
            '--img-size',
            64,
            '--format',
            format,
            '-o',
            path,
        )
        == 0
    )
    about = json.loads(description_of(path).read_text())
    assert about['outputs'] == [{'name': 'logits', 'classes': 7, 'label_names': names}]
    assert about['weights'] == 'last.pth.tar'
    trained.set_input_size((64, 64))
    assert_same(path, trained, [(1, 64, 64)])


def test_checkpoint_of_a_model_of_timm(tmp_path):
    torch.manual_seed(0)
    trained = timm.create_model('test_resnet', num_classes=4).eval()
    torch.save(trained.state_dict(), tmp_path / 'weights.pth')
    path = tmp_path / 'model.pt2'
    weights = tmp_path / 'weights.pth'
    assert run_export('test_resnet', '--checkpoint', weights, '--format', 'pt2', '--img-size', 32, '-o', path) == 0
    assert_same(path, trained, [(1, 32, 32)], tolerance=1e-6)
    assert run_export('resnet18', '--checkpoint', weights, '--format', 'pt2', '-o', tmp_path / 'other.pt2') == 2


@pytest.mark.parametrize(
    ('name', 'format'),
    [
        ('ea_resnet50', 'pt2'),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (('flatten_pvt_t', 'onnx'), ('flatten_pvt_t', 'pt2'), ('ea_resnet50', 'onnx'))
        ),
    ],
)
def test_half(name, format, tmp_path):
    path = tmp_path / f'half.{format}'
    model = create_shallow(name)
    x = torch.randn(1, 3, 64, 64)
    full = model(x)
    export(model, path, format=format, img_size=(64, 64), half=True)
    actual = LOAD[format](path)(x.half())
    assert actual[0].dtype == torch.float16
    assert (actual[0].float() - full).norm() <= 2e-2 * full.norm()
    assert json.loads(description_of(path).read_text())['input']['dtype'] == 'float16'


def test_many_weights_are_a_file_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, 'ONE_FILE', 0)
    model = timm.create_model('test_resnet').eval()
    export(model, tmp_path / 'model.onnx', img_size=(32, 32))
    assert sorted(file.name for file in tmp_path.iterdir()) == ['model.onnx', 'model.onnx.data', 'model.onnx.json']
    assert_same(tmp_path / 'model.onnx', model, [(1, 32, 32)])
    monkeypatch.undo()
    export(model, tmp_path / 'model.onnx', img_size=(32, 32), force=True)  # leaves none that is no longer of it
    assert sorted(file.name for file in tmp_path.iterdir()) == ['model.onnx', 'model.onnx.json']


@pytest.mark.parametrize(('wrong', 'format'), [(float('nan'), 'onnx'), (0.1, 'pt2')])
def test_a_wrong_file_does_not_stay(wrong, format, tmp_path, monkeypatch):
    loader = {'onnx': 'load_onnx', 'pt2': 'load_program'}[format]
    load = getattr(export_module, loader)
    monkeypatch.setattr(export_module, loader, lambda path: lambda x: [y + wrong for y in load(path)(x)])
    model = timm.create_model('test_resnet').eval()
    with pytest.raises(UsageError, match='the file differs from the model by'):
        export(model, tmp_path / f'model.{format}', format=format, img_size=(32, 32))
    assert list(tmp_path.iterdir()) == []


def test_graph_that_depends_on_the_size(tmp_path):
    """timm's own Swin; that of the zoo has no such limit."""
    model = timm.create_model(
        'swin_tiny_patch4_window7_224',
        depths=(2,),
        num_heads=(1,),
        embed_dim=8,
        window_size=2,
        img_size=64,
        strict_img_size=False,
    ).eval()
    with pytest.raises(UsageError, match="--dynamic size: the graph of 'swin_tiny_.*' depends on the .*--img-size"):
        export(model, tmp_path / 'swin.pt2', format='pt2', img_size=(64, 64), dynamic='size')
    assert list(tmp_path.iterdir()) == []


def test_no_feature_maps():
    """A network that somebody registered with timm, without timm's `forward_intermediates`."""
    model = torch.nn.Identity()
    model.pretrained_cfg = {'architecture': 'test_resnet'}
    with pytest.raises(UsageError, match="--task features: 'test_resnet' gives no feature maps"):
        feature_network(model)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (('test_resnet', '-o', 'model.pt2'), "-o 'model.pt2': the name of a file of --format onnx ends in .onnx"),
        (('test_resnet', '-o', 'model.onnx', '--img-size', 0), '--img-size must be one or two positive numbers, got 0'),
        (('test_resnet', '-o', 'model.onnx', '--img-size', 40, 31, '--dynamic', 'size'), 'needs at least 32 each way'),
        (
            ('test_resnet', '--format', 'pt2', '-o', '/proc/model.pt2', '--img-size', 32),
            "cannot write '/proc/model.pt2': ",
        ),
        (('test_resne', '-o', 'model.onnx'), "unknown model 'test_resne'; did you mean test_resnet"),
        (('flatten_swin_t', '-o', 'model.onnx', '--img-size', 3), "cannot build 'flatten_swin_t'"),
        (('test_resnet', '-o', 'model.onnx', '--checkpoint', 'none.pth'), "there is no file 'none.pth'"),
        (('test_efficientnet', '-o', 'model.onnx', '--pretrained', '--checkpoint', 'none.pth'), 'not allowed with'),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = run_export(*arguments)
    except SystemExit as e:
        status = e.code
    assert status == 2 and message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_the_way(tmp_path, capsys):
    for name in ('a.onnx.data', 'a.onnx.json'):
        (tmp_path / name).write_text('precious')
        assert run_export('test_resnet', '-o', tmp_path / 'a.onnx') == 2
        assert f"{name}' is there already" in capsys.readouterr().err and (tmp_path / name).read_text() == 'precious'
        (tmp_path / name).unlink()
    (tmp_path / 'b.onnx').mkdir()
    assert run_export('test_resnet', '--force', '-o', tmp_path / 'b.onnx') == 2
    assert "b.onnx' is a folder" in capsys.readouterr().err


def test_missing_runtime_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'onnxruntime', None)
    with pytest.raises(UsageError, match=r"--format onnx: .*onnxruntime.*pip install 'flatten_zoo\[export\]'"):
        export(timm.create_model('test_resnet'), tmp_path / 'model.onnx')


def test_operations_that_onnx_does_not_have(tmp_path):
    class Network(torch.nn.Module):
        def forward(self, image):
            return torch.linalg.eigvals(image).real

    program = trace(Network(), torch.zeros(1, 3, 4, 4), None)
    with pytest.raises(UsageError, match='--format onnx: .*--format pt2 is the other way'):
        save_onnx(program, tmp_path / 'model.onnx', ['logits'], None, OPSET)
    assert not list(tmp_path.iterdir())
