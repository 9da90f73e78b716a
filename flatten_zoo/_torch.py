"""Private names of torch's that have no public twin, for the one place to mend when an upgrade moves them.

`tests/test_house.py` fails by the name of what is gone.
"""

from torch._C import _are_functorch_transforms_active  # within torch.func: a custom backward must be differentiable
from torch._C._functorch import is_legacy_batchedtensor  # the same for `torch.autograd.grad(is_grads_batched=True)`
from torch._decomp import get_decompositions  # operators in terms of older ones, for older opsets of ONNX
from torch._dynamo import config as dynamo_config  # how often it compiles a function anew before it gives up
from torch.nn.modules.batchnorm import _BatchNorm  # batch norm of any number of dimensions
from torch.utils._python_dispatch import TorchDispatchMode  # follows every operation; torch documents it in notes only
from torch.utils._pytree import tree_leaves  # the tensors in whatever an operation takes or gives

__all__ = [
    'TorchDispatchMode',
    '_BatchNorm',
    '_are_functorch_transforms_active',
    'default_store',
    'dynamo_config',
    'get_decompositions',
    'is_legacy_batchedtensor',
    'tree_leaves',
]


def default_store():
    """Where processes that have joined can leave a word for the others, also when collectives fail."""
    from torch.distributed.distributed_c10d import _get_default_store  # not in every build of torch

    return _get_default_store()
