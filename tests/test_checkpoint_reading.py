"""Reading checkpoints: every layout that there is, damaged files, and files that try to run code."""
import argparse
import collections
import copyreg
import io
import pickle
import sys
import tarfile
import types
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch

from flatten_zoo.errors import UsageError
from flatten_zoo.weights import read_checkpoint, restricted_pickle, select_state_dict

STATE_DICT = {'weight': torch.arange(6.).reshape(2, 3), 'half': torch.ones(2, dtype=torch.bfloat16)}
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
    write(tmp_path / 'c.pth', {
        'model': collections.OrderedDict(STATE_DICT), 'optimizer': optimizer.state_dict(), 'config': config,
        'lr_scheduler': {'base': [0.1]}, 'max_accuracy': np.float64(82.1), 'epoch': 299, 'loader': slots,
        'names': yacs.Names(['a', 'b']), 'seen': {1, 2}, 'parameter': parameter,
    }, zip_format, monkeypatch)
    checkpoint = read_checkpoint(tmp_path / 'c.pth')
    assert_state_dict(checkpoint)
    assert checkpoint['epoch'] == 299 and checkpoint['seen'] == {1, 2}
    torch.testing.assert_close(checkpoint['optimizer']['state'][0]['exp_avg'], torch.full((3,), 0.1))
    for key in ('config', 'loader', 'names', 'max_accuracy'):
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
@pytest.mark.parametrize(('content', 'message'), [
    (b'  <!DOCTYPE html><html>no such share</html>', 'web page'),
    (b'<html><body>sign in</body></html>', 'web page'),
    (b'', 'damaged'),
    (b'not a checkpoint at all', ''),
    (sample()[:-200], 'incomplete'),
    (sample('legacy')[:-6], 'incomplete'),
    (sample('legacy')[:60], ''),
    (pickle.dumps([1, 2]), ''),
    (script_module(), ''),
    (tar(), ''),
], ids=['page', 'html', 'empty', 'text', 'cut zip', 'cut legacy', 'cut start', 'plain pickle', 'script', 'tar'])
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
            b'\x80\x02(' + string('module') + b'c' + ME + b'\nTrace\n' + string(__file__) + string('x') + b'tQ.'),
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
        preamble = b''.join(pickle.dumps(value, protocol=2) for value in (
            torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {}))
        path.write_bytes(preamble + payload + pickle.dumps([], protocol=2))


@formats
@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('attack', attacks('x'))
def test_attacks(attack, zip_format, tmp_path, monkeypatch):
    trace.calls = 0
    monkeypatch.setitem(copyreg._inverted_registry, 0xf0, (__name__, 'trace'))
    monkeypatch.setitem(copyreg._extension_cache, 0xf0, trace)
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
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        value['a'][5] = b'y' if protocol > 2 else 'y'  # protocol 2 makes bytes by a call
        assert restricted_pickle.load(io.BytesIO(pickle.dumps(value, protocol))) == value
