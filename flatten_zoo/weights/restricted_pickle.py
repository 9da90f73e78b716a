"""An unpickler for checkpoints from strangers: it builds tensors, arrays of numbers and plain containers.

It walks the opcodes itself, so that there is nothing which it could be made to do besides. No name is ever imported,
and no function called but those below. An object of an unknown class becomes an inert placeholder, which forgets what
it is given; calling anything unknown, as `__reduce__` makes a pickle do, is refused. What it builds takes memory and
time in proportion to the file: sizes that a file declares are held against what is there, and steps are counted.

`torch.load(weights_only=True)` cannot do this, with every name that a file holds registered by `safe_globals` either:
it reads no pickle protocol above 2, sets no items of a class derived from dict, as the official configurations are,
compares no checksums, and a few bytes keep it busy for ever (the hash of nested tuples) or take all memory (a
`bytearray`, copies of text). What `safe_globals` registers holds for all threads, and what the user had registered
himself is forgotten when it ends.
"""

import argparse
import collections
import pickle
import pickletools
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch

__all__ = ['Unknown', 'load']

MAX_STEPS = 1_000_000  # opcodes, and items that calls copy: five times what a large network and its optimizer need
MAX_COPIES = 4  # of the file, by calls that copy text or bytes, which pickled arrays need


class _Name:
    """A class or function that a pickle names."""

    def __init__(self, name: str):
        self.name = name


class Unknown(_Name):
    """Stands for an object of a class that has this name."""


class _DType:
    """A NumPy type of numbers, or None for another: text, dates, objects."""

    def __init__(self, code: str, *_):
        self.value = np.dtype(code) if re.fullmatch(r'[biufc]\d\d?', code) else None

    def numbers(self) -> np.dtype:
        if self.value is None:
            raise pickle.UnpicklingError('it holds a NumPy array of something else than numbers')
        return self.value


def _check_keys(keys: Iterable) -> None:
    # the hash of anything else may take for ever: of nested tuples, and of many numbers with the same one
    for key in keys:
        if not isinstance(key, str | bytes | int | float | None) or isinstance(key, int) and abs(key) >= 2**60:
            raise pickle.UnpicklingError(f'it has a {type(key).__name__} as a key, expected text')


def _set(items: Iterable = ()) -> set:
    _check_keys(items)
    return set(items)


def _ordered_dict(pairs: Iterable = ()) -> collections.OrderedDict:
    _check_keys(key for key, _ in pairs)
    return collections.OrderedDict(pairs)


def _counter(counts: dict) -> collections.Counter:
    _check_keys(counts)
    return collections.Counter(counts)


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes."""
    if encoding != 'latin1':
        raise pickle.UnpicklingError(f'it encodes text as {encoding}')
    return text.encode('latin1')


def _tensor(storage: torch.Tensor, offset: int, size: tuple, stride: tuple, *_) -> torch.Tensor:
    return storage.as_strided(size, stride, offset)  # within the storage, or an error


def _tensor_of_type(storage: torch.Tensor, offset: int, size: tuple, stride: tuple, *more) -> torch.Tensor:
    return _tensor(storage.view(more[2]), offset, size, stride)  # after what gradients need


def _not_dense(kind: str) -> Callable:
    return lambda *_: Unknown(f'{kind} tensor')


def _subclass(function: _Name, cls: _Name, args: tuple, state: Any) -> torch.Tensor:
    """A tensor with attributes or of a class of its own, without these."""
    return _TENSORS[function.name](*args)


def _array(cls: _Name, *_) -> np.ndarray | Unknown:
    return np.empty(0) if cls.name == 'numpy.ndarray' else Unknown(cls.name)


def _array_of_buffer(data: bytes, dtype: _DType, shape: tuple, order: Literal['C', 'F']) -> np.ndarray:
    return np.frombuffer(data, dtype.numbers()).reshape(shape, order=order)


def _scalar(dtype: _DType, data: bytes) -> Any:
    return Unknown('numpy.generic') if dtype.value is None else np.frombuffer(data, dtype.value, count=1)[0].item()


_TENSORS: dict[str, Any] = {
    f'torch._utils._rebuild_{name}': function
    for name, function in {
        'tensor': _tensor,
        'tensor_v2': _tensor,
        'tensor_v3': _tensor_of_type,
        'sparse_tensor': _not_dense('sparse'),
        'qtensor': _not_dense('quantized'),
        'nested_tensor': _not_dense('nested'),
        'meta_tensor_no_storage': _not_dense('meta'),
        'parameter': lambda tensor, *_: tensor,
        'parameter_with_state': lambda tensor, *_: tensor,
    }.items()
}
_CALLS: dict[str, Any] = {
    **_TENSORS,
    'torch._tensor._rebuild_from_type_v2': _subclass,
    'torch.serialization._get_layout': lambda *_: Unknown('torch.layout'),
    'torch.Size': torch.Size,
    'torch.device': torch.device,
    '_codecs.encode': _encode,
    'collections.OrderedDict': _ordered_dict,
    'collections.Counter': _counter,
    'collections.defaultdict': lambda *_: {},
    'numpy.dtype': _DType,
    **{
        f'{module}.{name}': function  # the latter module in protocol 2, torch's default
        for module in ('builtins', '__builtin__')
        for name, function in {'set': _set, 'bytes': lambda: b''}.items()
    },
    **{
        f'numpy.{core}.{name}': function
        for core in ('core', '_core')
        for name, function in {
            'multiarray._reconstruct': _array,
            'multiarray.scalar': _scalar,
            'numeric._frombuffer': _array_of_buffer,
        }.items()
    },
}
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.bool,
    )
}
_STORAGES = {
    f'torch.{name}Storage': dtype
    for name, dtype in {
        'Double': torch.float64,
        'Float': torch.float32,
        'Half': torch.float16,
        'BFloat16': torch.bfloat16,
        'ComplexFloat': torch.complex64,
        'ComplexDouble': torch.complex128,
        'Long': torch.int64,
        'Int': torch.int32,
        'Short': torch.int16,
        'Char': torch.int8,
        'Byte': torch.uint8,
        'Bool': torch.bool,
        'QInt8': torch.int8,
        'QUInt8': torch.uint8,
        'QInt32': torch.int32,
    }.items()
} | {'torch.storage.UntypedStorage': torch.uint8}
_CONSTANTS = {'NONE': None, 'NEWTRUE': True, 'NEWFALSE': False, 'EMPTY_TUPLE': ()}
_CONTAINERS = {'EMPTY_LIST': list, 'EMPTY_DICT': dict, 'EMPTY_SET': set}
_LITERALS = {
    'INT',
    'BININT',
    'BININT1',
    'BININT2',
    'LONG',
    'LONG1',
    'LONG4',
    'BINFLOAT',
    'BINSTRING',
    'SHORT_BINSTRING',
    'SHORT_BINUNICODE',
    'BINUNICODE',
    'BINUNICODE8',
    'SHORT_BINBYTES',
    'BINBYTES',
    'BINBYTES8',
    'BYTEARRAY8',
}  # of protocols 1 to 5; 0 cannot hold tensors

Storage = Callable[..., torch.Tensor]


class _Machine:
    """The state of an unpickler: its stack, where marks are on it, and what is kept for later."""

    def __init__(self, storage: Storage | None, length: int):
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.storage = storage
        self.steps = MAX_STEPS
        self.copies = MAX_COPIES * length

    def spend(self, values: Iterable) -> None:
        """Count what a call may copy."""
        for value in values:
            if isinstance(value, str | bytes | bytearray):
                self.copies -= len(value)
            elif isinstance(value, list | tuple | dict | set):
                self.steps -= len(value)
        if self.steps < 0 or self.copies < 0:
            raise pickle.UnpicklingError(f'it takes more than {MAX_STEPS} steps to build, or copies itself')

    def pop_mark(self) -> list:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def add(self, items: list) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, set):
            target |= _set(items)
        elif not isinstance(target, Unknown):
            raise pickle.UnpicklingError(f'it appends to a {type(target).__name__}')

    def set_items(self, items: list) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            _check_keys(items[::2])
            target.update(zip(items[::2], items[1::2], strict=True))
        elif not isinstance(target, Unknown):
            raise pickle.UnpicklingError(f'it sets items of a {type(target).__name__}')

    def call(self, function: Any, args: tuple) -> Any:
        if type(function) is not _Name or function.name not in _CALLS:
            raise pickle.UnpicklingError(f'it calls {getattr(function, "name", type(function).__name__)}')
        self.spend(args)
        return _CALLS[function.name](*args)

    def new(self, cls: Any) -> argparse.Namespace | Unknown:
        if type(cls) is not _Name:
            raise pickle.UnpicklingError(f'it makes an object of a {type(cls).__name__}')
        # the options that timm keeps in its checkpoints
        return argparse.Namespace() if cls.name == 'argparse.Namespace' else Unknown(cls.name)

    def build(self, target: Any, state: Any) -> None:
        """Set an object's state, where it has one that is needed."""
        if isinstance(target, np.ndarray):
            self.spend(state)
            _, shape, dtype, fortran, data = state
            if not isinstance(data, bytes):
                raise pickle.UnpicklingError('it holds a NumPy array of objects')
            target.__setstate__((1, shape, dtype.numbers(), bool(fortran), data))  # type: ignore[arg-type]  # no np.bool
        elif isinstance(target, _DType):
            if target.value is not None and state[1] in ('<', '>'):
                target.value = target.value.newbyteorder(state[1])
        elif isinstance(target, argparse.Namespace):
            self.spend([state])
            _check_keys(state)
            vars(target).update(state)
        elif not isinstance(target, Unknown | dict):  # torch leaves a note on state dicts, which is not needed
            raise pickle.UnpicklingError(f'it sets attributes of {getattr(target, "name", type(target).__name__)}')

    def find_storage(self, saved_id: tuple) -> torch.Tensor:
        kind, storage_type, key, _, numel, *view = saved_id
        if kind != 'storage' or not isinstance(storage_type, _Name) or storage_type.name not in _STORAGES:
            raise pickle.UnpicklingError(f'it holds a {getattr(storage_type, "name", kind)}')
        if self.storage is None or not isinstance(key, str) or not isinstance(numel, int) or numel < 0:
            raise ValueError('it holds a tensor in a wrong place')
        return self.storage(key, _STORAGES[storage_type.name], numel, *view)

    def step(self, name: str, argument: Any) -> None:
        """Do what an opcode says."""
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _CONTAINERS:
            stack.append(_CONTAINERS[name]())
        elif name in ('BINPUT', 'LONG_BINPUT'):
            self.memo[argument] = stack[-1]
        elif name == 'MEMOIZE':
            self.memo[len(self.memo)] = stack[-1]
        elif name in ('BINGET', 'LONG_BINGET'):
            stack.append(self.memo[argument])
        elif name == 'MARK':
            self.marks.append(len(stack))
        elif name in ('TUPLE1', 'TUPLE2', 'TUPLE3'):
            size = int(name[-1])
            stack[-size:] = [tuple(stack[-size:])]
        elif name == 'TUPLE':
            stack.append(tuple(self.pop_mark()))
        elif name == 'APPEND':
            self.add([stack.pop()])
        elif name in ('APPENDS', 'ADDITEMS'):
            self.add(self.pop_mark())
        elif name == 'SETITEM':
            value, key = stack.pop(), stack.pop()
            self.set_items([key, value])
        elif name == 'SETITEMS':
            self.set_items(self.pop_mark())
        elif name in ('GLOBAL', 'STACK_GLOBAL'):
            if name == 'STACK_GLOBAL':
                argument = f'{stack.pop(-2)} {stack.pop()}'
            full_name = argument.replace(' ', '.', 1)
            stack.append(_DTYPES.get(full_name) or _Name(full_name))
        elif name == 'REDUCE':
            args = stack.pop()
            stack.append(self.call(stack.pop(), args))
        elif name in ('NEWOBJ', 'NEWOBJ_EX'):
            del stack[-1 if name == 'NEWOBJ' else -2 :]
            stack.append(self.new(stack.pop()))
        elif name == 'BUILD':
            state = stack.pop()
            self.build(stack[-1], state)
        elif name == 'BINPERSID':
            stack.append(self.find_storage(stack.pop()))
        elif name not in ('PROTO', 'FRAME'):
            raise pickle.UnpicklingError(f'it uses the opcode {name}')


def load(file: Any, length: int, storage: Storage | None = None) -> Any:
    """What the next pickle in a file holds.

    Args:
        file: Has `read`, `readline` and `tell`, and takes no memory for bytes that it does not have.
        length: Number of bytes in the file.
        storage: Returns the numbers of a tensor, in one dimension, for a key, a type, how many they are, and for very
            old files the key, offset and length of a part of them; None where no tensors are expected.

    Raises:
        pickle.UnpicklingError: It asks to run code, or for more than a checkpoint needs.
        Exception: Any other, for bytes that are no pickle.
    """
    machine = _Machine(storage, length)
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name == 'STOP':
            break
        machine.steps -= 1
        machine.spend(())
        machine.step(opcode.name, argument)
    return machine.stack.pop()
