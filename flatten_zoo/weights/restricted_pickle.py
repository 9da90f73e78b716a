"""An unpickler for checkpoints from strangers: it builds tensors and plain containers, and calls nothing else.

Takes the place of the `pickle` module in `torch.load`. A class that it doesn't know becomes an inert placeholder, which
forgets what it is given; calling one, as `__reduce__` makes a pickle do, is refused. No name is ever imported.
"""
import argparse
import collections
import pickle
import pickletools
from collections.abc import Callable
from typing import IO

import torch

__all__ = ['Unpickler', 'load']


class _Function:
    """A function that a pickle may call, but not change."""
    __slots__ = ('_function',)

    def __init__(self, function: Callable):
        self._function = function

    def __call__(self, *args):
        return self._function(*args)

    def __setstate__(self, state):
        raise pickle.UnpicklingError(f'it sets attributes of the function {self._function.__name__}')


class _Refusing(type):
    def __call__(cls, *args, **kwargs):
        raise pickle.UnpicklingError(f'it calls {cls.__name__}')


class _Placeholder(metaclass=_Refusing):
    """Stands for an object of an unknown class: takes any arguments, items and state, and keeps none."""
    __slots__ = ()

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __setitem__(self, key, value):
        pass

    def _ignore(self, value):
        pass

    append = extend = add = __setstate__ = _ignore


def _no_value(*args) -> _Placeholder:
    return _Placeholder.__new__(_Placeholder)


_REBUILD = ('_rebuild_tensor', '_rebuild_tensor_v2', '_rebuild_parameter')
_KNOWN = {
    **{(module, 'set'): set for module in ('builtins', '__builtin__')},  # the latter in protocol 2, torch's default
    ('collections', 'OrderedDict'): collections.OrderedDict,
    ('torch', 'Size'): torch.Size,
    **{('torch', str(dtype).removeprefix('torch.')): dtype for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)},
    **{('torch._utils', name): _Function(getattr(torch._utils, name)) for name in _REBUILD},
    # calls that make data which is not needed, common in training logs: without effect
    **{name: _Function(_no_value) for name in (
        ('_codecs', 'encode'), ('collections', 'defaultdict'), ('numpy', 'dtype'),
        ('numpy.core.multiarray', 'scalar'), ('numpy._core.multiarray', 'scalar'))},
}


class Unpickler(pickle.Unpickler):
    """`pickle.Unpickler` that looks names up in a short list instead of importing them."""

    def __init__(self, file: IO[bytes], **kwargs):
        start = file.tell()
        # extension codes stand for names too, but those in a cache don't come by `find_class`
        if any(opcode.name.startswith('EXT') for opcode, _, _ in pickletools.genops(file)):
            raise pickle.UnpicklingError('it uses extension codes')
        file.seek(start)
        super().__init__(file, **kwargs)

    def find_class(self, module: str, name: str):
        if (module, name) == ('argparse', 'Namespace'):  # the options that timm keeps in its checkpoints
            return type(name, (argparse.Namespace,), {})
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        return _Refusing(f'{module}.{name}', (_Placeholder,), {'__slots__': ()})


def load(file: IO[bytes], **kwargs):
    """`pickle.load` with the restricted `Unpickler`."""
    return Unpickler(file, **kwargs).load()
