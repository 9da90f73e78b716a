"""Reading checkpoints: every layout that there is, damaged files, and files that try to run code."""

import argparse
import codecs
import collections
import copyreg
import io
import pickle
import re
import subprocess
import sys
import tarfile
import types
import zipfile

import numpy as np
import pytest
import safetensors.torch
import timm
import torch

from flatten_zoo.errors import UsageError
from flatten_zoo.weights import load_model, read_checkpoint, restricted_pickle, select_state_dict
from flatten_zoo.weights.official_names import family_of

STATE_DICT = {'weight': torch.arange(6.0).reshape(2, 3), 'half': torch.ones(2, dtype=torch.bfloat16)}
formats = pytest.mark.parametrize('zip_format', [True, False], ids=['zip', 'legacy'])


@pytest.fixture
def yacs(monkeypatch):
    """A module like yacs, there while a checkpoint is written and gone when it is read."""
    module = types.ModuleType('yacs.config')

    class CfgNode(dict):
        def __init__(self, *args):
            super().__init__(*args)
            self.__dict__['__immutable__'] = True
            self.__dict__['__deprecated_keys__'] = set()

    class Slots:
        __slots__ = ('value',)

    class Names(list):
        pass

    for cls in (CfgNode, Slots, Names):
        cls.__module__, cls.__qualname__ = 'yacs.config', cls.__name__
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, 'yacs', types.ModuleType('yacs'))
    monkeypatch.setitem(sys.modules, 'yacs.config', module)
    yield module
    assert 'yacs' not in sys.modules, 'reading has imported what the file names'


def write(path, value, zip_format, monkeypatch=None):
    torch.save(value, path, _use_new_zipfile_serialization=zip_format)
    if monkeypatch:
        monkeypatch.delitem(sys.modules, 'yacs')
        monkeypatch.delitem(sys.modules, 'yacs.config')


def assert_state_dict(checkpoint, use_ema=False):
    state_dict = select_state_dict(checkpoint, use_ema)
    assert state_dict.keys() == STATE_DICT.keys()
    assert all(torch.equal(value, STATE_DICT[key]) for key, value in state_dict.items())


@formats
def test_official_trainer_checkpoint(zip_format, yacs, tmp_path, monkeypatch):
    slots = yacs.Slots()
    slots.value = 3
    parameter = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    config = yacs.CfgNode({'MODEL': yacs.CfgNode({'TYPE': 'swin', 'SIZES': [1, 2]}), 'RATE': 0.1})
    write(
        tmp_path / 'c.pth',
        {
            'model': collections.OrderedDict(STATE_DICT),
            'optimizer': optimizer.state_dict(),
            'config': config,
            'lr_scheduler': {'base': [0.1]},
            'max_accuracy': np.float64(82.1),
            'epoch': 299,
            'loader': slots,
            'names': yacs.Names(['a', 'b']),
            'seen': {1, 2},
            'parameter': parameter,
        },
        zip_format,
        monkeypatch,
    )
    checkpoint = read_checkpoint(tmp_path / 'c.pth')
    assert_state_dict(checkpoint)
    assert checkpoint['epoch'] == 299 and checkpoint['seen'] == {1, 2}
    torch.testing.assert_close(checkpoint['optimizer']['state'][0]['exp_avg'], torch.full((3,), 0.1))
    assert checkpoint['max_accuracy'] == 82.1
    for key in ('config', 'loader', 'names'):
        assert not isinstance(checkpoint[key], (dict, list, float)), 'an inert placeholder'


@formats
@pytest.mark.parametrize('key', ['model', 'state_dict', None])
def test_plain_checkpoints(zip_format, key, tmp_path):
    write(tmp_path / 'c.pth', {key: STATE_DICT, 'epoch': 3} if key else STATE_DICT, zip_format)
    assert_state_dict(read_checkpoint(tmp_path / 'c.pth'))


def test_timm_checkpoint_with_averaged_weights(tmp_path):
    averaged = {f'module.{key}': value for key, value in STATE_DICT.items()}
    other = {key: value + 1 for key, value in STATE_DICT.items()}
    for key in ('state_dict_ema', 'model_ema'):
        write(tmp_path / 'c.pth', {'state_dict': other, key: averaged, 'args': argparse.Namespace(model='x')}, True)
        checkpoint = read_checkpoint(tmp_path / 'c.pth')
        assert checkpoint['args'].model == 'x'
        assert_state_dict(checkpoint, use_ema=True)
        assert_state_dict(checkpoint, use_ema=None)
        assert torch.equal(select_state_dict(checkpoint, False)['weight'], other['weight'])
    assert_state_dict({'model': STATE_DICT}, use_ema=None)
    with pytest.raises(UsageError, match='no averaged'):
        select_state_dict({'model': STATE_DICT}, use_ema=True)


def test_timm_options_beside_an_unknown_class(yacs, tmp_path, monkeypatch):
    args = argparse.Namespace(model='x', lr=0.1)
    write(tmp_path / 'c.pth', {'state_dict': STATE_DICT, 'args': args, 'cfg': yacs.CfgNode()}, True, monkeypatch)
    checkpoint = read_checkpoint(tmp_path / 'c.pth')
    assert (checkpoint['args'].model, checkpoint['args'].lr) == ('x', 0.1)


def test_safetensors(tmp_path):
    safetensors.torch.save_file(STATE_DICT, tmp_path / 'c.safetensors')
    assert_state_dict(read_checkpoint(tmp_path / 'c.safetensors'))


@pytest.mark.parametrize('checkpoint', [{}, {'model': {}}, {'model': 3}, {'model': {'a': 'b'}}, {'epoch': 3}], ids=str)
def test_no_weights(checkpoint):
    with pytest.raises(UsageError):
        select_state_dict(checkpoint)


def sample(suffix='pth'):
    buffer = io.BytesIO()
    if suffix == 'safetensors':
        return safetensors.torch.save(STATE_DICT)
    torch.save(STATE_DICT, buffer, _use_new_zipfile_serialization=suffix == 'pth')
    return buffer.getvalue()


def script_module():
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), buffer)
    return buffer.getvalue()


def tar():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as archive:
        for name in ('storages', 'tensors', 'pickle'):
            archive.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


@pytest.mark.filterwarnings('ignore:.*torch.*:UserWarning', 'ignore:.*torch.*:DeprecationWarning')
@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (b'  <!DOCTYPE html><html>no such share</html>', 'web page'),
        (b'<html><body>sign in</body></html>', 'web page'),
        (b'', 'damaged'),
        (b'not a checkpoint at all', 'no checkpoint'),
        (sample()[:-200], 'incomplete'),
        (sample('legacy')[:-6], 'incomplete'),
        (sample('legacy')[:60], 'incomplete'),
        (pickle.dumps([1, 2]), 'does not begin as one'),
        (script_module(), 'TorchScript'),
        (tar(), 'no checkpoint'),
    ],
    ids=['page', 'html', 'empty', 'text', 'cut zip', 'cut legacy', 'cut start', 'plain pickle', 'script', 'tar'],
)
def test_no_checkpoints(content, message, tmp_path):
    path = tmp_path / 'c.pth'
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as e:
        read_checkpoint(path)
    assert str(path) in str(e.value) and '\n' not in str(e.value)


def test_no_safetensors(tmp_path):
    path = tmp_path / 'c.safetensors'
    path.write_bytes(sample('safetensors')[:-4])
    with pytest.raises(UsageError, match='incomplete'):
        read_checkpoint(path)
    with pytest.raises(UsageError, match='no file'):
        read_checkpoint(tmp_path / 'none.pth')
    torch.save([torch.ones(1)], tmp_path / 'list.pth')
    with pytest.raises(UsageError, match='list'):
        read_checkpoint(tmp_path / 'list.pth')


# --- attacks: each is a pickle, of which whatever it calls would leave a trace


def trace(*args, **kwargs):
    trace.calls += 1
    return STATE_DICT


class Trace:
    """A class of this module, which notices every use."""

    def __new__(cls, *args, **kwargs):
        trace()
        return super().__new__(cls)

    def __setstate__(self, state):
        trace()

    def __setitem__(self, key, value):
        trace()


ME = __name__.encode()


def call(name, argument=b'(X\x01\x00\x00\x00at', opcode=b'R'):
    module, _, attribute = name.rpartition(b'.')
    return b'\x80\x02c' + module + b'\n' + attribute + b'\n' + argument + opcode + b'.'


def string(text):
    return b'X' + len(text).to_bytes(4, 'little') + text.encode()


def build(name, attribute):
    return b'\x80\x02c' + name + b'\nN}' + string(attribute) + b'Ns\x86b.'


def touch(path):
    return b'(' + string(f'touch {path}') + b't'


def attacks(path):
    script = f"open({str(path)!r}, 'w')"
    stack_global = b'\x80\x04' + b'\x8c' + bytes([len(ME)]) + ME + b'\x8c\x05trace\x93)R.'
    return {
        'os.system': call(b'os.system', touch(path)),
        'posix.system': call(b'posix.system', touch(path)),
        'subprocess': call(b'subprocess.getoutput', touch(path)),
        'eval': call(b'__builtin__.eval', b'(' + string(script) + b't'),
        'exec': call(b'builtins.exec', b'(' + string(script) + b't'),
        'getattr': b'\x80\x02cbuiltins\ngetattr\n(cos\n__dict__\n' + string('system') + b'tR' + touch(path) + b'R.',
        'function': call(ME + b'.trace', b')'),
        'stack global': stack_global,
        'dotted name': b'\x80\x04\x8c\x05torch\x8c\x0f_utils.warnings\x93)R.',
        'inst': b'(' + string('x') + b'i' + ME + b'\ntrace\n.',
        'obj': b'(c' + ME + b'\ntrace\n' + string('x') + b'o.',
        'newobj of a function': call(b'os.system', touch(path), b'\x81'),
        'newobj': call(ME + b'.Trace', b')', b'\x81'),
        'newobj_ex': b'\x80\x04c' + ME + b'\nTrace\n)}\x92.',
        'setstate': call(ME + b'.Trace', b')', b'\x81}b'),
        'setitem': call(ME + b'.Trace', b')', b'\x81' + string('a') + b'K\x01s'),
        'build of a function': build(b'torch._utils\n_rebuild_tensor_v2', '__defaults__'),
        'build of a class': build(b'argparse\nNamespace', 'evil'),
        'build of a tensor class': build(b'torch.nn.parameter\nParameter', 'evil'),
        'import': call(b'__builtin__.__import__', b'(' + string('antigravity') + b't'),
        'load': call(b'torch.load', b'(' + string(str(path)) + b't'),
        'jit': call(b'torch.jit.load', b'(' + string(str(path)) + b't'),
        'persistent id': (
            b'\x80\x02(' + string('module') + b'c' + ME + b'\nTrace\n' + string(__file__) + string('x') + b'tQ.'
        ),
        'extension': b'\x80\x02\x82\xf0)R.',
        'storage name': call(b'evil.Storage', b')'),
    }


def as_checkpoint(payload, path, zip_format):
    """The payload as a checkpoint's only pickle."""
    if zip_format:
        buffer = io.BytesIO()
        torch.save({}, buffer)
        with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(path, 'w', zipfile.ZIP_STORED) as target:
            for entry in source.infolist():
                target.writestr(entry, payload if entry.filename.endswith('data.pkl') else source.read(entry))
    else:
        preamble = b''.join(
            pickle.dumps(value, protocol=2)
            for value in (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {})
        )
        path.write_bytes(preamble + payload + pickle.dumps([], protocol=2))


@formats
@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('attack', attacks('x'))
def test_attacks(attack, zip_format, tmp_path, monkeypatch):
    trace.calls = 0
    codecs.lookup('cp437')  # that of names in zip files, a module of its own
    monkeypatch.setitem(copyreg._inverted_registry, 0xF0, (__name__, 'trace'))
    monkeypatch.setitem(copyreg._extension_cache, 0xF0, trace)
    modules = set(sys.modules)
    defaults = torch._utils._rebuild_tensor_v2.__defaults__
    as_checkpoint(attacks(tmp_path / 'trace')[attack], tmp_path / 'c.pth', zip_format)
    with pytest.raises(UsageError) as e:
        read_checkpoint(tmp_path / 'c.pth')
    assert '\n' not in str(e.value)
    assert trace.calls == 0 and not (tmp_path / 'trace').exists()
    assert set(sys.modules) == modules
    assert torch._utils._rebuild_tensor_v2.__defaults__ == defaults
    assert not hasattr(argparse.Namespace, 'evil') and not hasattr(torch.nn.Parameter, 'evil')


@formats
def test_attack_beside_good_weights(zip_format, tmp_path):
    class Evil:
        def __reduce__(self):
            return trace, ()

    trace.calls = 0
    write(tmp_path / 'c.pth', {'model': STATE_DICT, 'config': Evil()}, zip_format)
    with pytest.raises(UsageError, match=rf'calls {__name__}\.trace'):
        read_checkpoint(tmp_path / 'c.pth')
    assert trace.calls == 0


def test_attributes_set_by_a_pickle_stay_behind():
    evil = collections.OrderedDict(STATE_DICT)
    evil.items = evil.keys = 'not callable'
    assert_state_dict({'model': evil})


def test_the_attacks_work_on_pickle(monkeypatch, tmp_path):
    """The traces would show: the same payloads do their work where nothing holds them back."""
    trace.calls = 0
    payloads = attacks(tmp_path / 'trace')
    for attack in ('function', 'stack global', 'inst', 'obj', 'newobj', 'newobj_ex', 'setstate', 'setitem'):
        before = trace.calls
        pickle.loads(payloads[attack])
        assert trace.calls > before, attack
    for attack in ('os.system', 'eval', 'exec', 'subprocess'):
        pickle.loads(payloads[attack])
        assert (tmp_path / 'trace').exists()
        (tmp_path / 'trace').unlink()


def test_restricted_pickle_reads_what_pickle_wrote():
    value = {'a': [1, 2.5, None, True, 'x', b'y', (1, 2)], 'b': {1, 2}, 'c': collections.OrderedDict(d=1)}
    for protocol in range(1, pickle.HIGHEST_PROTOCOL + 1):
        written = pickle.dumps(value, protocol)
        assert restricted_pickle.load(io.BytesIO(written), len(written)) == value


# --- files that take all memory, or for ever


def number(value, size):
    return value.to_bytes(size, 'little')


def greedy_pickles():
    """Pickles of a few bytes or megabytes that a reader must not do the will of, and what it says instead."""
    huge = number(3_500_000_000, 8)
    return {
        'integer': ('not enough data', b'\x80\x02\x8b' + number(2**31 - 1, 4) + b'.'),
        'bytes': ('remain', b'\x80\x04\x8e' + huge + b'.'),
        'text': ('remain', b'\x80\x04\x8d' + huge + b'.'),
        'bytearray': ('remain', b'\x80\x05\x96' + huge + b'.'),
        'frame and bytes': ('remain', b'\x80\x04\x95' + huge + b'B' + number(2**32 - 1, 4) + b'.'),
        'memo index': ('holds a list', b'\x80\x02]r' + number(250_000_000, 4) + b'.'),
        'call of bytearray': (
            'calls builtins.bytearray',
            b'\x80\x02cbuiltins\nbytearray\n' + b'J' + number(2**30, 4) + b'\x85R.',
        ),
        'hash of nested tuples': ('a tuple as a key', b'\x80\x02})q\x00' + b'h\x00\x86q\x00' * 60 + b'Ns.'),
        'numbers of one hash': (
            'a int as a key',
            b'\x80\x02}('
            + b''.join(b'\x8a\x0b' + number(i * (2**61 - 1), 11) + b'N' for i in range(1, 50_000))
            + b'u.',
        ),
        'objects': ('steps to build', b'\x80\x02](' + b'\x8f' * 1_500_000 + b'e.'),
        'copies of text': (
            'copies itself',
            b'\x80\x02](c_codecs\nencode\nq\x00X'
            + number(10**6, 4)
            + b'a' * 10**6
            + b'q\x01'
            + (b'h\x00h\x01' + string('latin1') + b'\x86R') * 3000
            + b'e.',
        ),
        'copies of lists': (
            'steps to build',
            b'\x80\x02](c__builtin__\nset\nq\x00]('
            + b''.join(b'M' + number(i, 2) for i in range(2**16))
            + b'eq\x01'
            + b'h\x00h\x01\x85R' * 3000
            + b'e.',
        ),
    }


MEASURE = """
import resource, sys, time
from flatten_zoo.errors import UsageError
from flatten_zoo.weights import read_checkpoint
for path in sys.argv[1:]:
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read_checkpoint(path)
    except UsageError as e:
        assert len(str(e).splitlines()) == 1
        print(time.process_time() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, e)
"""


@pytest.mark.slow
def test_files_that_take_everything(tmp_path):
    paths, reasons = [], []
    for name, (reason, payload) in greedy_pickles().items():
        for zip_format in (True, False) if len(payload) < 10**6 else (True,):
            paths.append(tmp_path / f'{name}.{zip_format}.pth')
            reasons.append(reason)
            as_checkpoint(payload, paths[-1], zip_format)
    paths.append(tmp_path / 'inflated.pth')
    reasons.append('its entries declare more')
    with zipfile.ZipFile(paths[-1], 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('archive/data.pkl', b'](' + b'}' * 30_000_000 + b'e.')
    report = subprocess.run(
        [sys.executable, '-c', MEASURE, *paths], capture_output=True, text=True, check=True, timeout=200
    ).stdout
    for reason, line in zip(reasons, report.splitlines(), strict=True):
        seconds, megabytes, message = line.split(' ', 2)
        assert reason in message and float(seconds) < 20 and float(megabytes) < 700, line


@formats
@pytest.mark.parametrize(
    ('declared', 'message'),
    [(rb'(cpuq.)K\x01', 'expected 255 ×|declares more'), (rb'(K\x00)K\x01(?=\x85)', 'out of bounds')],
    ids=['storage', 'tensor'],
)
def test_sizes_that_the_file_does_not_hold(declared, message, zip_format, tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        write(tmp_path / 'c.pth', {'weight': torch.zeros(1)}, zip_format)
    finally:
        torch.serialization.set_crc32_options(True)
    content, count = re.subn(declared, b'\\1K\xff', (tmp_path / 'c.pth').read_bytes(), flags=re.DOTALL)
    assert count == 1
    (tmp_path / 'c.pth').write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_checkpoint(tmp_path / 'c.pth')


# --- damage


@pytest.mark.parametrize(
    ('where', 'message'),
    [(b'\x80?\x80?', "checksum of 'half' is wrong"), (b'weight', 'CRC-32')],
    ids=['tensor', 'pickle'],
)
def test_a_flipped_bit_is_noticed(where, message, tmp_path):
    torch.save({'epoch': 3, 'model': STATE_DICT}, tmp_path / 'c.pth')
    content = bytearray((tmp_path / 'c.pth').read_bytes())
    content[content.index(where)] ^= 1
    (tmp_path / 'c.pth').write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_checkpoint(tmp_path / 'c.pth')


def test_files_without_checksums_and_compressed_ones_are_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE_DICT, tmp_path / 'c.pth')
    finally:
        torch.serialization.set_crc32_options(True)
    assert_state_dict(read_checkpoint(tmp_path / 'c.pth'))
    torch.save(STATE_DICT, tmp_path / 'c.pth')
    with (
        zipfile.ZipFile(tmp_path / 'c.pth') as source,
        zipfile.ZipFile(tmp_path / 'd.pth', 'w', zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert_state_dict(read_checkpoint(tmp_path / 'd.pth'))


# --- what else there is in checkpoints


@formats
@pytest.mark.parametrize('protocol', [2, 4, 5])
@pytest.mark.parametrize('core', [b'numpy._core.', b'numpy.core.'], ids=['numpy 2', 'numpy 1'])
def test_arrays_of_numbers_are_data(zip_format, protocol, core, tmp_path):
    arrays = {
        'random': np.random.RandomState(0).get_state(),
        'swapped': np.arange(3, dtype='>f4'),
        'empty': np.zeros((0, 2)),
        'columns': np.asfortranarray(np.arange(6).reshape(2, 3)),
        'flags': np.array([True, False]),
        'half': np.array(0.5, np.float16),
        'number': np.float32(2.5),
        'text': np.str_('a'),
    }
    payload = pickle.dumps(arrays, protocol)
    if protocol == 2:  # later ones count the bytes of names
        payload = payload.replace(b'numpy._core.', core)
    as_checkpoint(payload, tmp_path / 'c.pth', zip_format)
    checkpoint = read_checkpoint(tmp_path / 'c.pth')
    assert checkpoint['number'] == 2.5 and not isinstance(checkpoint.pop('text'), str)
    for key, value in arrays.items():
        if key not in ('random', 'text'):
            np.testing.assert_array_equal(checkpoint[key], value)
            assert np.shape(checkpoint[key]) == np.shape(value)
    assert checkpoint['random'][0] == 'MT19937'
    np.testing.assert_array_equal(checkpoint['random'][1], arrays['random'][1])


@formats
@pytest.mark.parametrize('protocol', [2, 5])
def test_arrays_of_objects_are_refused(zip_format, protocol, tmp_path):
    for array in (np.array([{}, None]), np.zeros(2, 'i4,f4')):
        as_checkpoint(pickle.dumps({'a': array}, protocol), tmp_path / 'c.pth', zip_format)
        with pytest.raises(UsageError, match='NumPy array of'):
            read_checkpoint(tmp_path / 'c.pth')


@formats
def test_tensors_with_attributes_and_of_new_types(zip_format, tmp_path):
    parameter, tensor = torch.nn.Parameter(torch.ones(2)), torch.ones(3)
    parameter.note, tensor.note = 'a', 'b'
    half = torch.arange(8.0)[2:6].reshape(2, 2).t()
    tensors = {'parameter': parameter, 'tensor': tensor, 'small': torch.ones(2, dtype=torch.uint16), 'view': half}
    if not zip_format:
        del tensors['small']  # legacy files have none
    write(tmp_path / 'c.pth', tensors, zip_format)
    read = select_state_dict(read_checkpoint(tmp_path / 'c.pth'))
    assert all(torch.equal(read[key], value) for key, value in tensors.items())


@pytest.mark.parametrize(
    'checkpoint',
    [
        {'model_state_dict': STATE_DICT, 'model': 'x'},
        {
            'state_dict': {f'model.{key}': value for key, value in STATE_DICT.items()},
            'pytorch-lightning_version': '2.5',
        },
        {
            'state_dict': {f'model._orig_mod.{key}': value for key, value in STATE_DICT.items()}
            | {'loss.w': torch.ones(1)}
        },
    ],
    ids=['model_state_dict', 'lightning', 'compiled, with a loss'],
)
def test_layouts_of_other_trainers(checkpoint):
    assert_state_dict(checkpoint)


def test_one_module_named_model_is_no_prefix():
    state_dict = {'model.weight': torch.ones(1), 'stem.weight': torch.ones(1), 'head.weight': torch.ones(1)}
    assert select_state_dict(state_dict).keys() == state_dict.keys()


def test_keys_that_are_no_text(tmp_path):
    torch.save({0: torch.ones(1)}, tmp_path / 'c.pth')
    with pytest.raises(UsageError, match='the int 0 as a key'):
        select_state_dict(read_checkpoint(tmp_path / 'c.pth'))
    with pytest.raises(UsageError, match='no averaged'):
        select_state_dict({0: 1}, use_ema=True)
    model = timm.create_model('flatten_pvt_v2_b0', device='meta')
    with pytest.raises(ValueError, match='the int 0 as a key'):
        family_of(model).checkpoint_filter_fn({0: torch.ones(1)}, model)


@formats
@pytest.mark.filterwarnings('ignore::UserWarning', 'ignore::DeprecationWarning')
@pytest.mark.parametrize('kind', ['sparse', 'meta', 'quantized', 'repeated'])
def test_tensors_that_are_not_all_there(kind, zip_format, tmp_path):
    tensor = {
        'sparse': lambda: torch.eye(3).to_sparse(),
        'meta': lambda: torch.ones(3, device='meta'),
        'quantized': lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        'repeated': lambda: torch.zeros(1).expand(20_000_000, 256),
    }[kind]()
    checkpoint = {'model': {**STATE_DICT, 'head.weight': tensor}, 'beside': tensor}
    write(tmp_path / 'c.pth', checkpoint, zip_format)
    for read in (checkpoint, read_checkpoint(tmp_path / 'c.pth')):
        with pytest.raises(UsageError, match=f"'head.weight' is a .*{kind}.* expected a dense tensor"):
            select_state_dict(read)


@pytest.mark.parametrize(
    ('key', 'shape', 'message'),
    [
        ('head.weight', (5_000_000, 2), 'cannot hold'),
        ('head.weight', (7,), 'has 1 dimensions'),
        ('head.weight', (), 'has 0 dimensions'),
        ('patch_embed.proj.weight', (32,), 'has 1 dimensions'),
        ('patch_embed.proj.weight', (1, 500_000, 1, 1), 'cannot hold'),
        ('stages.0.blocks.0.attn.positional_encoding', (3136, 32), 'of another shape'),
    ],
    ids=str,
)
def test_no_network_is_built_of_wrong_shapes(key, shape, message, tmp_path, monkeypatch):
    model = timm.create_model('flatten_pvt_v2_b0')
    torch.save({**model.state_dict(), key: torch.zeros(shape)}, tmp_path / 'c.pth')
    create_model = timm.create_model
    built = []

    def create(*args, **kwargs):
        built.append(create_model(*args, **kwargs))
        return built[-1]

    monkeypatch.setattr(timm, 'create_model', create)
    with pytest.raises(UsageError, match=message):
        load_model(tmp_path / 'c.pth', 'flatten_pvt_v2_b0')
    assert built and all(parameter.is_meta for network in built for parameter in network.parameters())
    if key.endswith('encoding'):
        with pytest.raises(ValueError, match='has the shape'):
            family_of(model).checkpoint_filter_fn({key: torch.zeros(shape)}, model)
