import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flatten_zoo import EfficientAttention, InterlacedSparseAttention, NonLocalAttention
from flatten_zoo.cost.comparison import compare, count_affordable, default_size
from flatten_zoo.cost.counting import available_memory, count, peak_memory
from flatten_zoo.cost.operators import closed_form
from flatten_zoo.cost.paper_tables import PAPER_TABLES, three_digits
from flatten_zoo.errors import UsageError

CPU = torch.device('cpu')


@pytest.mark.parametrize('cls', [EfficientAttention, NonLocalAttention])
@pytest.mark.parametrize(
    'kwargs',
    [{}, {'num_heads': 4}, {'normalization': 'scaling', 'key_dim': 32}, {'value_dim': 48, 'reproject': False}],
    ids=str,
)
@pytest.mark.parametrize('spatial', [(50,), (12, 17), (3, 4, 5), (1, 1)])
def test_closed_form_equals_the_counts(cls, kwargs, spatial):
    operator = cls(48, spatial_dims=len(spatial), device='meta', **kwargs)
    counted, closed = count(operator, (1, 48, *spatial)), closed_form(operator, spatial)
    assert (closed.parameters, closed.macs) == (counted.parameters, counted.macs)


@pytest.mark.parametrize('size', [(16, 24), (20, 27), (3, 3), (1, 1)])
def test_closed_form_of_interlaced_attention_equals_the_counts(size):
    operator = InterlacedSparseAttention(48, 24, 32, out_dim=40, group_size=(8, 4), residual=False, device='meta')
    counted, closed = count(operator.eval(), (1, 48, *size)), closed_form(operator, size)
    assert (closed.parameters, closed.macs) == (counted.parameters, counted.macs)


def test_counts_are_those_of_a_real_pass():
    operator, x = EfficientAttention(48), torch.randn(1, 48, 12, 17)
    with FlopCounterMode(display=False) as counter:
        operator(x)
    assert counter.get_total_flops() == 2 * closed_form(operator, (12, 17)).macs
    assert count(operator.to('meta'), x.shape).peak_memory == peak_memory(EfficientAttention(48), x)


@pytest.mark.parametrize('cls, attention', [(EfficientAttention, 64 * 64), (NonLocalAttention, 400 * 400)])
def test_closed_form_of_memory_adds_up_the_tensors(cls, attention):
    """Input, three projections, context or matrix, what it attends to, and output."""
    operator = cls(256, normalization='scaling', residual=False)
    made = []
    hooks = [
        m.register_forward_hook(lambda m, args, out: made.append(out))
        for m in (operator.keys, operator.queries, operator.values, operator.reprojection)
    ]
    hooks.append(operator.reprojection.register_forward_pre_hook(lambda m, args: made.append(args[0])))
    x = torch.randn(1, 256, 20, 20)
    operator(x)
    assert 4 * (sum(t.numel() for t in [x, *made]) + attention) == closed_form(operator, (20, 20)).memory
    for hook in hooks:
        hook.remove()


def test_memory_follows_the_element_size():
    half = EfficientAttention(64, device='meta', dtype=torch.float16)
    full = EfficientAttention(64, device='meta')
    assert 2 * closed_form(half, (9, 9)).memory == closed_form(full, (9, 9)).memory


def test_peak_memory_of_a_known_pass():
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 1, bias=False),
        torch.nn.ReLU(inplace=True),
        torch.nn.Flatten(),
        torch.nn.Linear(800, 10, bias=False),
    )
    x = torch.randn(1, 4, 10, 10)
    weights = 4 * (32 + 8000)
    # at the convolution: input and output; at the end: what the convolution made, and ten numbers more
    assert peak_memory(layers, x) == weights + 4 * (400 + 800 + 10)


def test_memory_of_the_machine():
    assert 1e6 < available_memory(CPU) < 1e15


# papers.md, as printed: efficient attention's Table 2
TABLE_2 = """
res3           1024  56 × 80    41.3 M  1.21 G  122 M   3.74 G
res4           2048  28 × 40    19.5 M  596 M   24.5 M  748 M
fpn1           256   224 × 320  220 M   5.28 G  20.8 G  662 G
fpn2           256   112 × 160  55.1 M  1.32 G  1.34 G  42.3 G
fpn3           256   56 × 80    13.8 M  330 M   94.0 M  2.86 G
fpn4           256   28 × 40    3.46 M  82.6 M  8.46 M  234 M
fpn5           256   14 × 20    877 K   20.6 M  1.17 M  28.4 M
res3-4+fpn3-5                   78.9 M  2.24 G  250 M   7.62 G
res3-4+fpn1-5                   354 M   8.85 G  22.4 G  712 G
"""


def test_table_2():
    header, rows = PAPER_TABLES['ea-table2']()
    assert header == ['where', 'channels', 'input', 'EA memory', 'EA MACC', 'non-local memory', 'non-local MACC']
    assert [' '.join(' '.join(row).split()) for row in rows] == [
        ' '.join(line.split()) for line in TABLE_2.strip().splitlines()
    ]


def test_section_3_5():
    header, rows = PAPER_TABLES['ea-section3.5']()
    cells = {row[0]: dict(zip(header, row, strict=True)) for row in rows}

    def savings(size):
        return cells[size]['memory saving'], cells[size]['computation saving']

    assert savings('64 × 64') == ('17×', '33×')
    assert savings('256 × 256') == ('257×', '513×')
    assert (cells['256 × 256']['non-local memory'], cells['256 × 256']['non-local MACC']) == ('17.2 GB', '413 G')
    assert all(int(saving.rstrip('×')) > 10 for saving in savings('28 × 28 × 4'))
    assert savings('64 × 64 × 32') == ('513×', '1025×')


def test_stereo():
    _, rows = PAPER_TABLES['stereo']()
    assert rows == [['48 × 135 × 240', '796 MB', '9.68 TB']]


@pytest.mark.parametrize(
    'value, printed',
    [
        (7, '7.00 '),
        (999, '999 '),
        (999.6, '1.00 K'),
        (1e3, '1.00 K'),
        (94.04e6, '94.0 M'),
        (9.6765e12, '9.68 T'),
        (999.9e9, '1.00 T'),
        (1.5e15, '1.50 P'),
    ],
)
def test_three_digits(value, printed):
    assert three_digits(value) == printed


def test_compare_counts_a_model():
    row = compare('resnet18', 224, CPU)
    # as in timm's table of inference, whose 1.82 GMACs count the pooling too
    assert (row.measured.parameters, round(row.measured.macs / 1e9, 2)) == (11689512, 1.81)
    assert round(row.measured.activations / 1e6, 2) == 2.48
    assert row.measured.peak_memory > 4 * row.measured.parameters
    assert row.closed_form is None and default_size('resnet18') == 224


def test_compare_builds_models_of_fixed_size_for_the_size():
    assert compare('test_vit', 96, CPU).measured.macs < compare('test_vit', 192, CPU).measured.macs


def test_compare_measures_what_runs_here():
    """Counting has the n × n matrix of the equation, the real pass the fused kernel without it."""
    row = compare('nl', 64, CPU)
    assert row.closed_form.memory > 4 * 64**4 > row.measured.peak_memory > 0
    assert row.closed_form.macs == row.measured.macs


@pytest.mark.parametrize('train', [False, True])
def test_bfloat16_needs_half_the_memory(train):
    float32, bfloat16 = (
        count_affordable('test_vit', 32, CPU, 2, train, dtype)[2].peak_memory
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert bfloat16 == pytest.approx(float32 / 2, rel=0.05)


@pytest.mark.parametrize(
    'name, size, message',
    [
        ('ea_resnet5', 64, "unknown model 'ea_resnet5'; did you mean ea_resnet50"),
        ('ea_resnet50.a1', 64, "unknown model 'ea_resnet50.a1'; did you mean ea_resnet50.a1_in1k_untrained_attn"),
        (
            'nl',
            4096,
            r"'nl' at size 4096 needs \d+\.\d GB of memory by its equations.* GB are free \(cpu\).*--img-size",
        ),
        ('botnet26t_256', 100, "'botnet26t_256' does not take size 100: AssertionError"),
        ('ea', 1 << 17, "'ea' at size 131072 needs"),
        ('ea', 0, '--img-size must be positive, got 0'),
        ('test_vit', 7, "'test_vit' does not take size 7"),
    ],
)
def test_compare_refuses(name, size, message):
    with pytest.raises(UsageError, match=message):
        compare(name, size, CPU)
