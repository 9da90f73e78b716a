import pytest
import torch

from flatten_zoo import NonLocalAttention
from flatten_zoo.cost.counting import peak_memory


@pytest.mark.parametrize('normalization', ['softmax', 'scaling'])
@pytest.mark.parametrize('num_heads', [1, 4])
def test_matrix_times_values_is_the_output(normalization, num_heads):
    module = NonLocalAttention(16, 8, 12, num_heads, normalization, dtype=torch.float64)
    x = torch.randn(2, 16, 5, 6, dtype=torch.float64)
    q, k, v = (y.unflatten(0, (2, num_heads)) for y in module.project(x))
    matrix = module.attention_matrix(x)
    affinity = q.transpose(2, 3) @ k  # the equation, without a factor 1/√d
    torch.testing.assert_close(matrix, affinity.softmax(-1) if normalization == 'softmax' else affinity / 30)
    y = (matrix @ v.transpose(2, 3)).transpose(2, 3).reshape(2, 12, 5, 6)
    torch.testing.assert_close(x + module.reprojection(y), module(x))


@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('num_heads', [1, 2])
def test_softmax_holds_no_matrix(memory_format, num_heads):
    """The fused kernel is really taken: the whole pass needs less than one n × n matrix."""
    module = NonLocalAttention(16, 16, 16, num_heads).eval()
    x = torch.randn(1, 16, 48, 48).to(memory_format=memory_format)
    assert peak_memory(module, x) < 4 * 48**4 / 4
