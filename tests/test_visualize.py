"""Pictures of attention: the numbers against what the layers put out, the figures, and the command."""

import math
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import timm
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image
from safetensors.torch import save_file

from flatten_zoo import EfficientAttention, replace_attention, visualize
from flatten_zoo.cli import main
from flatten_zoo.errors import UsageError
from flatten_zoo.layers.focused_linear_attention import focused_feature_map
from flatten_zoo.weights import open_model

from .networks import SMALL, create_small, seeded
from .operators import LargestTensor

DOCS = Path(__file__).parents[1] / 'docs'
families = pytest.mark.parametrize('name', SMALL)


def resnet(name, **kwargs):
    """A small attention ResNet whose attention is at work, in float64."""
    return seeded(name, zero_init_last=False, **kwargs).double()


def image(*size, dtype=torch.float64):
    return torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1), dtype=dtype)


def all_points(height, width):
    """The middle of every position, so that all rows of the matrix are read."""
    return [((col + 0.5) / width, (row + 0.5) / height) for row in range(height) for col in range(width)]


def input_and_output(model, layer, x):
    calls = []
    hook = model.get_submodule(layer).register_forward_hook(lambda module, args, out: calls.append((args, out)))
    with torch.no_grad():
        model(x)
    hook.remove()
    return calls[0]


@families
@torch.no_grad()
def test_focused_linear_rows_times_values_are_the_output(name):
    model = create_small(name, img_size=(32, 48)).double()
    x = image(32, 48)
    layer = next(iter(visualize.attention_layers(model)))
    attn = model.get_submodule(layer)
    inputs, expected = input_and_output(model, layer, x)
    assert all(
        a is b or torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(inputs, visualize.layer_inputs(model, layer, x), strict=True)
    )
    q, k, v = visualize.queries_keys_values(attn, *inputs)
    height, width = q.shape[1:3]
    v, out = v.flatten(1, 2)[0], torch.empty_like(v.flatten(1, 2)[0])
    for head in range(attn.num_heads):
        for channel in range(attn.head_dim):
            forms = visualize.focused_linear_forms(attn, q, k, range(height * width), head, channel)
            rows = forms['depthwise'].rows.flatten(1)
            i = head * attn.head_dim + channel
            out[:, i] = rows @ v[:, i] + attn.dwc.bias[channel]
            if hasattr(attn, 'get_v'):  # CSwin's LePE
                out[:, i] += attn.get_v.bias[i]
    if hasattr(attn, 'proj'):
        out = attn.proj(out)
    torch.testing.assert_close(out.reshape(expected.shape), expected, rtol=1e-9, atol=1e-12)


@families
def test_what_is_read_by_default(name):
    """A grid of 9 queries in the last linear block, rows that are rows of the matrices, and softmax beside them."""
    model = create_small(name, img_size=128)
    maps = visualize.read_attention(model, image(128, 128, dtype=torch.float32))
    assert maps.layer == list(visualize.attention_layers(model))[-1]
    height, width = maps.forms['linear'].rows.shape[1:]
    assert list(maps.forms) == ['linear', 'depthwise', 'softmax'] and len(maps.cells) == 9
    attn = model.get_submodule(maps.layer)
    for key, form in maps.forms.items():
        for (row, col), weights in zip(maps.cells, form.rows, strict=True):
            assert torch.equal(weights.flatten(), form.matrix[row * width + col])
        torch.testing.assert_close(form.singular_values, torch.linalg.svdvals(form.matrix))
        assert form.rank == torch.linalg.matrix_rank(form.matrix)
        if key != 'depthwise':
            assert (form.rows >= 0).all() and (form.rows.sum((1, 2)) < 1 + 1e-9).all()
    # figure 5 of the paper
    assert maps.forms['linear'].rank <= min(attn.head_dim, height * width)
    assert maps.forms['depthwise'].rank == height * width
    # the twin, written out
    inputs = visualize.layer_inputs(model, maps.layer, image(128, 128, dtype=torch.float32))
    q, k, _ = (y[..., : attn.head_dim].flatten(1, 2)[0].double() for y in visualize.queries_keys_values(attn, *inputs))
    torch.testing.assert_close(maps.forms['softmax'].matrix, (q @ k.T / math.sqrt(attn.head_dim)).softmax(-1))


@pytest.mark.parametrize('name', ['vit_small_patch14_reg4_dinov2', 'eva02_tiny_patch14_224'])
@torch.no_grad()
def test_converted_vits_are_read_between_their_patches(name):
    kwargs = dict(embed_dim=48, depth=1, num_heads=3, img_size=56, dynamic_img_size=True)
    model = replace_attention(timm.create_model(name, **kwargs).eval())
    x = image(42, 70, dtype=torch.float32)
    maps = visualize.read_attention(model, x, head=1)
    attn, prefix = model.get_submodule(maps.layer), model.num_prefix_tokens
    assert f'{prefix} prefix' in maps.note and maps.forms['linear'].rows.shape == (9, 3, 5)
    q, k, _ = attn.project(*visualize.layer_inputs(model, maps.layer, x)[:2])
    q, k = (focused_feature_map(y, attn.scale, attn.focusing_factor)[0, :, 16:32].double() for y in (q, k))
    weights = (q @ k.T)[prefix:, prefix:]
    expected = weights / (weights.sum(dim=1, keepdim=True) + 15e-6)
    torch.testing.assert_close(maps.forms['linear'].matrix, expected, rtol=1e-3, atol=1e-5)


def test_the_kernel_is_placed_at_the_query():
    model = create_small('flatten_pvt_t')
    maps = visualize.read_attention(model, image(64, 64, dtype=torch.float32), 'stages.0.blocks.0.attn', [(0.5, 0.4)])
    ((row, col),) = maps.cells
    attn = model.get_submodule(maps.layer)
    norms = attn.dwc.weight.flatten(1).norm(dim=1)
    typical = norms.argsort()[len(norms) // 2]
    kernel = (maps.forms['depthwise'].rows - maps.forms['linear'].rows)[0]
    torch.testing.assert_close(
        kernel[row - 2 : row + 3, col - 2 : col + 3].float(), attn.dwc.weight[typical, 0], rtol=1e-5, atol=1e-6
    )
    kernel[row - 2 : row + 3, col - 2 : col + 3] = 0
    assert not kernel.any()
    assert f'channel {typical}' in maps.forms['depthwise'].label


@pytest.mark.parametrize(
    'create, layer',
    [
        (lambda: create_small('flatten_pvt_t'), 'stages.0.blocks.0.attn'),
        (lambda: create_small('flatten_cswin_t'), 'stages.0.blocks.0.attns.0'),
        (lambda: seeded('ea_resnet50', attn_stages=('layer1',)), 'layer1.attn'),
        (lambda: seeded('issa_resnet50', attn_stages=('layer1',)), 'layer1.attn'),
        (lambda: seeded('nl_resnet50', attn_stages=('layer1',)), 'layer1.attn'),
    ],
    ids=['pvt', 'cswin', 'ea', 'issa', 'nl'],
)
def test_large_maps_form_no_square_matrix(create, layer):
    model, x = create(), image(192, 256, dtype=torch.float32)
    n = 48 * 64
    with LargestTensor() as largest:
        maps = visualize.read_attention(model, x, layer)
    assert largest.numel < n * n / 10
    if 'resnet' not in type(model).__name__.lower():
        assert all(form.matrix is None and form.rank is None for form in maps.forms.values())
        assert str(n) in maps.note and '--img-size' in maps.note
        # the same rows as those of the whole matrix
        attn = model.get_submodule(layer)
        q, k, _ = visualize.queries_keys_values(attn, *visualize.layer_inputs(model, layer, x))
        row, col = maps.cells[4]
        with torch.no_grad():
            expected = attn.attention_matrix(q.double(), k.double())[0, 0, row * 64 + col]
        torch.testing.assert_close(maps.forms['linear'].rows[4].flatten(), expected)


@pytest.mark.parametrize('kwargs', [{}, {'num_heads': 2}, {'num_heads': 2, 'normalization': 'scaling'}], ids=str)
@torch.no_grad()
def test_efficient_attention_maps_carry_the_output(kwargs):
    model = resnet('ea_resnet50', attn_kwargs={'key_dim': 8, 'value_dim': 12, **kwargs})
    x = image(64, 96)
    (y,), expected = input_and_output(model, 'layer3.attn', x)
    attn = model.get_submodule('layer3.attn')
    q, _, v = attn.project(y)
    q = q.softmax(dim=1) if attn.normalization == 'softmax' else q * q.shape[2] ** -0.5
    heads = []
    for head in range(attn.num_heads):
        maps = visualize.read_attention(model, x, 'layer3.attn', head=head)
        assert maps.maps.shape == (8 // attn.num_heads, 4, 6)
        summands = [
            torch.outer(q[head, channel], weights.flatten() @ v[head].T)
            for weights, channel in zip(maps.maps, maps.channels, strict=True)
        ]
        norms = torch.stack([summand.norm() for summand in summands])
        torch.testing.assert_close(maps.shares, norms / norms.sum())
        assert (maps.shares.diff() <= 0).all() and sorted(maps.channels.tolist()) == list(range(len(summands)))
        heads.append(sum(summands).T)
    out = y + attn.reprojection(torch.cat(heads).reshape(1, -1, 4, 6))
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('normalization', ['softmax', 'scaling'])
@torch.no_grad()
def test_non_local_rows_times_values_are_the_output(normalization):
    model = resnet(
        'nl_resnet50', attn_kwargs={'key_dim': 8, 'value_dim': 8, 'num_heads': 2, 'normalization': normalization}
    )
    x = image(64, 96)
    (y,), expected = input_and_output(model, 'layer3.attn', x)
    attn = model.get_submodule('layer3.attn')
    v = attn.project(y)[2]
    heads = []
    for head in range(2):
        maps = visualize.read_attention(model, x, 'layer3.attn', all_points(4, 6), head)
        assert maps.cells == [(row, col) for row in range(4) for col in range(6)]
        heads.append(v[head] @ maps.forms['attention'].rows.flatten(1).T)
    out = y + attn.reprojection(torch.cat(heads).reshape(1, -1, 4, 6))
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_interlaced_rows_times_values_are_the_output():
    model = resnet('issa_resnet50', attn_stages=('layer2',), attn_kwargs={'group_size': (4, 4)})
    x = image(64, 96)
    (y,), expected = input_and_output(model, 'layer2.attn', x)
    attn = model.get_submodule('layer2.attn')
    maps = visualize.read_attention(model, x, 'layer2.attn', all_points(8, 12))
    long_range, short_range, combined = (form.rows.flatten(1) for form in maps.forms.values())
    z = y
    for rows, step in ((long_range, attn.long_range_sa), (short_range, attn.short_range_sa)):
        z = step.W((step.f_value(z).flatten(2) @ rows.T).unflatten(2, (8, 12)))
    torch.testing.assert_close(y + z, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(combined, short_range @ long_range)


@pytest.mark.parametrize(
    'name, kwargs, stages',
    [
        ('flatten_pvt_t', SMALL['flatten_pvt_t'], [(f'stages.{i}', 16 >> i) for i in range(4)]),
        ('flatten_swin_t', SMALL['flatten_swin_t'], [(f'layers.{i}', 16 >> i) for i in range(4)]),
        ('resnet10t', {}, [('act1', 32), *((f'layer{i + 1}', 16 >> i) for i in range(4))]),
        ('vit_tiny_patch16_224', {'img_size': 64, 'depth': 2}, [('blocks.0', 4), ('blocks.1', 4)]),
    ],
)
@torch.no_grad()
def test_energy(name, kwargs, stages):
    model, x = timm.create_model(name, **kwargs).eval(), image(64, 64, dtype=torch.float32)
    energy = visualize.read_energy(model, x)
    assert [(stage, len(values)) for stage, values in energy.maps.items()] == stages
    maps = model.forward_intermediates(x, intermediates_only=True)
    for (stage, values), y in zip(energy.maps.items(), maps, strict=True):
        assert energy.channels[stage] == y.shape[1]
        torch.testing.assert_close(values, (y[0] ** 2).sum(0).div(y.shape[1]).sqrt())


@torch.no_grad()
def test_energy_of_pvt_v2_is_that_before_the_norms():
    model, x = create_small('flatten_pvt_v2_b0').double(), image(64, 64)
    energy = visualize.read_energy(model, x)
    outputs = model.forward_intermediates(x, intermediates_only=True)
    for i, (values, y) in enumerate(zip(energy.maps.values(), outputs, strict=True)):
        (tokens,), normed = input_and_output(model, f'stages.{i}.norm', x)
        torch.testing.assert_close(normed.mT.reshape_as(y), y)
        torch.testing.assert_close(values.flatten(), tokens[0].square().mean(1).sqrt())
        assert values.std() > 1e-3 * values.mean()


def test_a_map_without_structure_says_so():
    energy = {'flat': 1 + 1e-7 * torch.randn(4, 4), 'other': torch.rand(4, 4)}
    maps = visualize.EnergyMaps(energy, dict.fromkeys(energy, 8))
    written = texts(visualize.draw(maps, torch.rand(32, 32, 3), 'a model'))
    assert written.count('everywhere 1') == 1 and written.count('positions, mean') == 1


@pytest.mark.parametrize(
    'img_size, layer, expected',
    [
        ((224, 224), None, 'layer3.attn'),
        ((288, 224), None, 'layer3.attn'),
        ((288, 288), None, 'layer4.attn'),
        ((64, 64), None, 'layer4.attn'),
        ((224, 224), 'layer4.attn', 'layer4.attn'),
    ],
)
def test_interlaced_attention_is_shown_where_its_groups_fit(img_size, layer, expected):
    maps = visualize.read_attention(seeded('issa_resnet50'), image(*img_size, dtype=torch.float32), layer, [(0.5, 0.5)])
    fits = min(maps.forms['combined'].rows.shape[1:]) > 8
    assert maps.layer == expected and ('--img-size' in maps.note) == (not fits)


def test_points_that_share_a_position_are_shown_once():
    maps = visualize.read_attention(
        create_small('flatten_pvt_t'),
        image(64, 32, dtype=torch.float32),
        points=[(0, 0), (0.01, 0.2), (1, 1), (0.5, 0.9)],
    )
    assert maps.cells == [(0, 0), (1, 0)]


def test_one_dimensional_attention_is_not_offered():
    model = torch.nn.Sequential(EfficientAttention(8, spatial_dims=1), EfficientAttention(8))
    assert list(visualize.attention_layers(model)) == ['1']


@pytest.fixture(scope='module')
def photo(tmp_path_factory):
    load_sample_image = pytest.importorskip('sklearn.datasets').load_sample_image
    path = tmp_path_factory.mktemp('photo') / 'china.png'
    Image.fromarray(load_sample_image('china.jpg')[::4, ::4]).save(path)
    return path


def run(photo, output, model, *arguments):
    return main(['visualize', str(photo), '--model', model, '-o', str(output), *map(str, arguments)])


def texts(figure):
    """Everything that is written in a figure."""
    return '\n'.join(text.get_text() for text in figure.findobj(Text))


@pytest.mark.parametrize(
    'model, arguments, drawn, arrays',
    [
        (
            'flatten_pvt_v2_b0',
            ['--layer', 'stages.2.blocks.1.attn', '--head', 4, '--img-size', 64, 96],
            'focused linear attention of flatten_pvt_v2_b0 (untrained), stages.2.blocks.1.attn, head 4',
            {
                'queries': (9, 2),
                'linear': (9, 4, 6),
                'depthwise': (9, 4, 6),
                'softmax': (9, 4, 6),
                'softmax.matrix': (24, 24),
                'linear.singular_values': (24,),
                'linear.rank': (),
            },
        ),
        pytest.param(
            'flatten_deit_t',
            ['--img-size', 64, '--query', 0.5, 0.5],
            'focused linear attention of flatten_deit_t (untrained), blocks.11.attn, head 0',
            {'linear': (1, 4, 4)},
            marks=pytest.mark.slow,
        ),
        (
            'ea_resnet50',
            ['--img-size', 64],
            'efficient attention of ea_resnet50 (untrained), layer4.attn, head 0',
            {'maps': (64, 2, 2), 'channels': (64,), 'shares': (64,)},
        ),
        (
            'issa_resnet50',
            ['--img-size', 96, '--layer', 'layer3.attn'],
            'interlaced sparse attention of issa_resnet50 (untrained), layer3.attn, head 0',
            {'long_range': (9, 6, 6), 'short_range': (9, 6, 6), 'combined': (9, 6, 6)},
        ),
        pytest.param(
            'nl_resnet50',
            ['--img-size', 64, '--layer', 'layer3.attn'],
            'non-local attention of nl_resnet50 (untrained), layer3.attn, head 0',
            {'attention': (9, 4, 4)},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            'flatten_pvt_v2_b0',
            ['--img-size', 64, '--pyramid'],
            'feature pyramid of flatten_pvt_v2_b0 (untrained)',
            {'energy.stages.0': (16, 16), 'energy.stages.3': (2, 2)},
            marks=pytest.mark.slow,
        ),
        (
            'resnet10t',
            [],
            'feature pyramid of resnet10t (untrained)',
            {'picture': (176, 176, 3), 'energy.act1': (88, 88)},
        ),
    ],
)
def test_command(model, arguments, drawn, arrays, photo, tmp_path, capsys):
    output, numbers = tmp_path / 'out.png', tmp_path / 'out.npz'
    assert run(photo, output, model, *arguments, '--save-arrays', numbers) == 0
    assert capsys.readouterr().out == f'{output}: {drawn}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['out.npz', 'out.png']
    assert matplotlib.image.imread(output).std() > 0
    with np.load(numbers) as saved:
        assert {name: saved[name].shape for name in arrays} == arrays
        assert all(np.isfinite(saved[name]).all() for name in saved)


@pytest.mark.parametrize(
    'layer, words',
    [
        (
            'stages.2.blocks.0.attn',
            ['4 × 4 positions', 'head 0 of 5', 'of 16', 'singular values', 'with the depthwise'],
        ),
        ('stages.0.blocks.0.attn', ['16 × 16 positions', 'one head', 'softmax of the', 'row 2, col 2']),
    ],
)
def test_figure_says_what_it_shows(layer, words):
    maps = visualize.read_attention(create_small('flatten_pvt_t'), image(64, 64, dtype=torch.float32), layer)
    figure = visualize.draw(maps, torch.rand(64, 64, 3), 'a model')
    written = texts(figure)
    for word in ('a model', layer, 'image 64 × 64', 'attention weight', *words):
        assert word in written
    panels = [ax for ax in figure.axes if ax.images and ax.lines]
    assert len(panels) == 27
    height, width = maps.forms['linear'].rows.shape[1:]
    for i, ax in enumerate(panels):  # each with its query marked
        x, y = ax.lines[0].get_xdata()[0], ax.lines[1].get_ydata()[0]
        assert (int((y + 0.5) / 64 * height), int((x + 0.5) / 64 * width)) == maps.cells[i % 9]


def test_marks_hide_nothing_of_the_maps():
    maps = visualize.read_attention(
        create_small('flatten_swin_t', img_size=224),
        image(224, 224, dtype=torch.float32),
        'layers.0.blocks.0.attn',
        [(0.3, 0.6)],
    )
    figure = visualize.draw(maps, torch.rand(224, 224, 3), 'a model')
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    figure.set_layout_engine('none')
    panels = [ax for ax in figure.axes if ax.images and ax.lines]
    with_marks = np.array(canvas.buffer_rgba()).astype(int)
    for ax in panels:
        for line in ax.lines:
            line.set_visible(False)
    canvas.draw()
    changed = (with_marks != canvas.buffer_rgba()).any(axis=2)[::-1]  # from below, as the extents of the panels
    assert changed.any()
    for ax in panels:
        left, bottom, right, top = (round(side) for side in ax.bbox.extents)
        assert not changed[bottom + 2 : top - 2, left + 2 : right - 2].any()  # within the frame


def test_pdf(photo, tmp_path):
    assert run(photo, tmp_path / 'out.PDF', 'resnet10t', '--img-size', 64) == 0
    assert (tmp_path / 'out.PDF').read_bytes().startswith(b'%PDF')


@pytest.mark.parametrize('suffix', ['.safetensors', '.pth'])
def test_checkpoint(suffix, photo, tmp_path):
    """Weights of a run with other classes; the picture is that of the trained network."""
    model = timm.create_model('flatten_pvt_v2_b0', num_classes=10).eval()
    for key, parameter in model.named_parameters():
        if key.endswith(('positional_encoding', 'scale')):
            torch.nn.init.normal_(parameter, std=0.5)
    checkpoint = tmp_path / f'best{suffix}'
    if suffix == '.pth':
        torch.save({'state_dict': model.state_dict(), 'epoch': 3}, checkpoint)
    else:
        save_file(model.state_dict(), checkpoint)
    arrays = tmp_path / 'out.npz'
    assert (
        run(
            photo,
            tmp_path / 'out.png',
            'flatten_pvt_v2_b0',
            '--img-size',
            64,
            '--query',
            0.5,
            0.5,
            '--checkpoint',
            checkpoint,
            '--save-arrays',
            arrays,
        )
        == 0
    )
    x, _ = visualize.load_picture(photo, model, [64])
    expected = visualize.read_attention(model, x, points=[(0.5, 0.5)])
    np.testing.assert_allclose(np.load(arrays)['linear'], expected.forms['linear'].rows.numpy(), rtol=1e-6)


def test_same_picture_every_time_and_no_effect_on_the_random_state(photo):
    state = torch.get_rng_state()
    (first, _), (second, _) = open_model('resnet10t'), open_model('resnet10t')
    assert torch.equal(first.conv1[0].weight, second.conv1[0].weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_picture_is_what_the_model_sees(tmp_path):
    model = timm.create_model('resnet10t')
    Image.new('RGB', (50, 30), (255, 0, 127)).save(tmp_path / 'plain.png')
    x, seen = visualize.load_picture(tmp_path / 'plain.png', model, [32, 48])
    assert x.shape == (1, 3, 32, 48) and seen.shape == (32, 48, 3)
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ('mean', 'std'))
    torch.testing.assert_close(x[0] * std + mean, torch.tensor([1, 0, 127 / 255])[:, None, None].expand(3, 32, 48))
    torch.testing.assert_close(seen, torch.tensor([1, 0, 127 / 255]).expand(32, 48, 3))


def test_unsuited_checkpoints(photo, tmp_path, capsys):
    save_file({'weight': torch.zeros(2)}, tmp_path / 'other.safetensors')
    (tmp_path / 'broken.pth').write_bytes(b'no checkpoint')
    for name, message in (
        ('other.safetensors', 'does not fit'),
        ('broken.pth', 'no checkpoint'),
        ('none.pth', 'there is no file'),
    ):
        assert run(photo, tmp_path / 'out.png', 'flatten_pvt_v2_b0', '--checkpoint', tmp_path / name) == 2
        captured = capsys.readouterr().err
        assert message in captured and name in captured and len(captured.splitlines()) == 2
    assert not (tmp_path / 'out.png').exists()


@pytest.mark.parametrize(
    'model, arguments, message',
    [
        ('flatten_pvt_v9', [], "unknown model 'flatten_pvt_v9'; did you mean flatten_pvt"),
        (
            'flatten_pvt_v2_b0',
            ['--layer', 'stages.3.blocks.1.atn'],
            "unknown layer 'stages.3.blocks.1.atn'; did you mean stages.3.blocks.1.attn, ",
        ),
        (
            'flatten_pvt_v2_b0',
            ['--layer', 'x'],
            'layers that can be shown: stages.0.blocks.0.attn, stages.0.blocks.1.attn',
        ),
        (
            'flatten_pvt_v2_b0',
            ['--layer', 'stages.0.blocks.0.mlp'],
            '(MlpWithDepthwiseConv) is no attention that can be ',
        ),
        (
            'flatten_swin_t',
            ['--layer', 'layers.3.blocks.0.attn'],
            '(WindowAttention) is no attention that can be shown',
        ),
        (
            'resnet10t',
            ['--layer', 'layer1'],
            'no attention that can be shown, only the energy of its features (--pyramid)',
        ),
        ('flatten_pvt_v2_b0', ['--head', '8'], "head must be 0 to 7 in 'stages.3.blocks.1.attn', got 8"),
        (
            'flatten_pvt_v2_b0',
            ['--query', '0.5', '64'],
            'two fractions from 0 to 1 of width and height, got (0.5, 64.0)',
        ),
        ('flatten_pvt_v2_b0', ['--img-size', '0'], '--img-size must be one or two positive numbers, got 0'),
        (
            'flatten_pvt_v2_b0',
            ['--img-size', '8', '8', '8'],
            '--img-size must be one or two positive numbers, got 8 8 8',
        ),
        ('flatten_deit_t', ['--img-size', '8'], "'flatten_deit_t'"),
        ('flatten_pvt_s', ['--pretrained'], "cannot build 'flatten_pvt_s': No pretrained weights exist"),
        ('resnet10t', ['-o', 'out.xyz'], "cannot write a picture to 'out.xyz': its name must end in one of"),
        ('resnet10t', ['-o', 'no/folder/out.png'], "there is no folder 'no/folder'"),
        (
            'resnet10t',
            ['--save-arrays', 'out.txt'],
            "cannot write arrays to 'out.txt': its name must end in one of npz",
        ),
    ],
)
def test_mistakes_are_one_line_and_status_2(model, arguments, message, photo, tmp_path, capsys):
    assert run(photo, tmp_path / 'out.png', model, *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.splitlines()) == 2 and not captured.out
    assert not list(tmp_path.iterdir())


def test_unsuited_pictures(photo, tmp_path, capsys):
    (tmp_path / 'text.png').write_text('no picture')
    (tmp_path / 'half.png').write_bytes(photo.read_bytes()[:5000])
    Image.fromarray(np.full((9, 9), 300, np.float32)).save(tmp_path / 'deep.tif')
    for name, message in (
        ('none.png', 'there is no picture'),
        ('text.png', 'cannot read'),
        ('half.png', 'cannot read'),
        ('', 'cannot read'),
        ('deep.tif', 'its values are from 300 to 300'),
    ):
        assert run(tmp_path / name, tmp_path / 'out.png', 'resnet10t') == 2
        captured = capsys.readouterr().err
        assert message in captured and name in captured and len(captured.splitlines()) == 2
    assert not (tmp_path / 'out.png').exists()


def test_a_figure_is_written_whole_or_not_at_all(photo, tmp_path, monkeypatch, capsys):
    output = tmp_path / 'out.png'
    output.write_text('the last one')

    def fail(figure, path, **kwargs):
        path.write_text('half of it')
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('matplotlib.figure.Figure.savefig', fail)
    assert run(photo, output, 'resnet10t', '--img-size', 64) == 2
    assert 'No space left on device' in capsys.readouterr().err
    assert output.read_text() == 'the last one' and list(tmp_path.iterdir()) == [output]


def test_functions_name_what_is_wrong():
    with pytest.raises(UsageError, match='no attention that can be shown'):
        visualize.read_attention(timm.create_model('resnet10t'), image(64, 64))
    with pytest.raises(UsageError, match='Linear gives no feature maps'):
        visualize.read_energy(torch.nn.Linear(3, 3), image(64, 64))
    with pytest.raises(TypeError, match='cannot draw a int'):
        visualize.draw(3, torch.rand(8, 8, 3), 'a model')


def documented_commands():
    """Arguments of the commands in the documentation that make its pictures."""
    lines = (DOCS / 'visualize.md').read_text().replace('\\\n', ' ').splitlines()
    return [line.split()[1:] for line in lines if line.strip().startswith('flatten-zoo visualize china.png')]


def test_documentation_has_its_pictures():
    outputs = [arguments[-1] for arguments in documented_commands()]
    pictures = {path.name: path.stat().st_size for path in (DOCS / 'images').glob('*.png')}
    assert len(outputs) == 3 and set(outputs) <= pictures.keys() and max(pictures.values()) < 200_000
    pages = ''.join(path.read_text() for path in DOCS.glob('*.md'))
    assert all(f'images/{name})' in pages for name in pictures)


@pytest.mark.slow
@pytest.mark.parametrize('arguments', documented_commands(), ids=lambda arguments: arguments[-1])
def test_documented_commands_make_the_pictures(arguments, tmp_path):
    load_sample_image = pytest.importorskip('sklearn.datasets').load_sample_image
    Image.fromarray(load_sample_image('china.jpg')).save(tmp_path / 'china.png')
    command, _, *options, output = arguments
    assert main([command, str(tmp_path / 'china.png'), *options, str(tmp_path / 'out.png')]) == 0
    made, printed = (
        np.asarray(Image.open(path).convert('RGB'), float) for path in (tmp_path / 'out.png', DOCS / 'images' / output)
    )
    assert made.shape == printed.shape and np.abs(made - printed).mean() < 2
