"""Options: timm's names, types and defaults; YAML files checked against them."""
import csv
from pathlib import Path

import pytest

from flatten_zoo.errors import UsageError
from flatten_zoo.training.config import write_options_file
from flatten_zoo.training.options import REFUSED, check_train_options, train_parser, validate_parser

REFERENCE = Path(__file__).parent / 'reference'
OURS = {'log_tensorboard'}  # what wandb has, and timm's script lacks
PARSERS = {'train': train_parser, 'validate': validate_parser}
MORE_SPELLINGS = {'local_rank': '--local-rank'}  # torch's old launcher has it so


def described(action) -> dict[str, str]:
    def text(value):
        return '' if value is None else str(value)
    return {
        'options': ' '.join(action.option_strings) or action.dest,
        'dest': action.dest,
        'nargs': text(action.nargs),
        'type': action.type.__name__ if action.type else '',
        'default': text(action.default),
    }


def timms_options(script) -> dict[str, dict[str, str]]:
    with (REFERENCE / f'timm_{script}_options.tsv').open(newline='') as file:
        return {row['dest']: row for row in csv.DictReader(file, delimiter='\t')}


@pytest.mark.parametrize('script', PARSERS)
def test_every_option_is_timms(script):
    rows = timms_options(script)
    parser = PARSERS[script]()
    ours = [described(a) for a in parser._actions if a.dest not in {'help', 'config', *OURS}]
    assert len(ours) >= 40
    assert not OURS & set(rows)
    for option in ours:
        expected = {key: rows[option['dest']][key] or '' for key in option}
        more = {MORE_SPELLINGS[option['dest']]} if option['dest'] in MORE_SPELLINGS else set()
        assert {**option, 'options': set(option['options'].split())} == \
               {**expected, 'options': set(expected['options'].split()) | more}


@pytest.mark.parametrize('script', PARSERS)
def test_every_option_of_timm_is_there_or_refused_with_a_reason(script, tmp_path):
    parser = PARSERS[script]()
    missing = set(timms_options(script)) - {action.dest for action in parser._actions}
    assert missing == set(timms_options(script)) & set(REFUSED)
    for name in missing:
        flag = timms_options(script)[name]['options'].split()[0]
        path = tmp_path / 'options.yaml'
        path.write_text(f'{name}: 1\n')
        for argv, said in (([flag, '1'], flag), (['-c', str(path)], f'{path}: {name}')):
            with pytest.raises(UsageError) as e:
                parser.parse_with_config(argv)
            assert str(e.value) == f'{said}: {REFUSED[name]}'


def test_every_refusal_is_of_timms():
    assert set(REFUSED) <= set(timms_options('train')) | set(timms_options('validate'))


@pytest.mark.parametrize('argv, message', [
    ('--naflex-loader', 'left out: no model of the zoo is a NaFlex model'),
    ('--kd-model-name resnet50', 'left out: distillation'),
    ('--torchscript', 'use --torchcompile'),
    ('--fuser=nvfuser', 'use --torchcompile'),
])
def test_what_is_left_out_says_so(argv, message):
    with pytest.raises(UsageError, match=message):
        train_parser().parse_args(argv.split())


@pytest.mark.parametrize('script', PARSERS)
def test_help_describes_every_option(script):
    parser = PARSERS[script]()
    assert all(action.help for action in parser._actions)
    assert '--model' in parser.format_help()


def parsed(tmp_path, text, *argv):
    path = tmp_path / 'options.yaml'
    path.write_text(text)
    return train_parser().parse_with_config(['--config', str(path), *argv])


def test_command_line_overrides_file_overrides_default(tmp_path):
    args = parsed(tmp_path, 'epochs: 7\nopt: adamw\n', '--epochs', '9')
    assert (args.epochs, args.opt, args.sched) == (9, 'adamw', 'cosine')


def test_file_values_get_the_options_types(tmp_path):
    args = parsed(tmp_path, 'lr: 1e-3\nmin_lr: 1\nscale: [1, 1]\nmodel_ema: true\nclip_grad: null\n'
                            'model_kwargs: {img_size: 32}\ndata: some/where\ninput_size: [1, 32, 32]\n')
    assert args.lr == 1e-3
    assert isinstance(args.min_lr, float)
    assert args.scale == [1.0, 1.0]
    assert args.model_ema is True
    assert args.clip_grad is None
    assert args.model_kwargs == {'img_size': 32}
    assert args.data == 'some/where'
    assert args.input_size == [1, 32, 32]


@pytest.mark.parametrize('text, message', [
    ('epoch: 3', "unknown option 'epoch'; did you mean epochs"),
    ('epochs: three', "epochs expects an integer, not 'three'"),
    ('epochs: 3.5', 'epochs expects an integer, not 3.5'),
    ('epochs: true', 'epochs expects an integer, not True'),
    ('epochs: null', 'epochs expects an integer, not None'),
    ('lr: fast', "lr expects a number, not 'fast'"),
    ('model_ema: 1', 'model_ema expects true or false, not 1'),
    ('model: 18', 'model expects text, not 18'),
    ('scale: 0.5', 'scale expects a list of values, not 0.5'),
    ('scale: [a]', "scale expects a number, not ['a']"),
    ('input_size: [3, 32]', 'input_size expects a list of 3 values, not [3, 32]'),
    ('model_kwargs: img_size=32', "model_kwargs expects a mapping of names to values, not 'img_size=32'"),
    ('sched: cosin', "sched expects one of cosine, "),
    ('config: other.yaml', "unknown option 'config'"),
    ('- epochs', 'expected a mapping of option names to values'),
    ('epochs: [', 'not valid YAML'),
])
def test_mistakes_in_a_file_are_named(tmp_path, text, message):
    with pytest.raises(UsageError) as e:
        parsed(tmp_path, text)
    assert message in str(e.value)
    assert 'options.yaml' in str(e.value)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('argv, message', [
    (['--epoch', '3'], "unknown option '--epoch'; did you mean --epochs"),
    (['a', 'b'], "unexpected argument 'b'"),
    (['--epochs', 'x'], "--epochs: invalid int value: 'x'"),
    (['--sched', 'x'], "--sched: invalid choice: 'x'"),
    (['--model-kwargs', 'x'], "--model-kwargs: 'x' is not KEY=VALUE"),
    (['--config', 'missing.yaml'], "cannot read the options in 'missing.yaml': No such file"),
])
def test_mistakes_on_the_command_line_are_named(argv, message):
    with pytest.raises(UsageError) as e:
        train_parser().parse_with_config(argv)
    assert message in str(e.value)


@pytest.mark.parametrize('argv, message', [
    ('--batch-size 0', '--batch-size 0: must be at least 1'),
    ('--workers -1', '--workers -1: must be at least 0'),
    ('--reprob 1.5', '--reprob 1.5: must be between 0 and 1'),
    ('--scale 1 0.5', '--scale [1.0, 0.5]: must be two positive numbers'),
    ('--mean 1 2', '--mean [1.0, 2.0]: must be one value, or one for each of 3 channels'),
    ('--opt adamx', "unknown optimizer 'adamx'; did you mean"),
    ('--sched plateau --val-interval 2', '--sched plateau needs a validation after every epoch'),
    ('--aug-splits 1', '--aug-splits 1'),
    ('--aug-splits 2 --mixup 0.1', '--aug-splits does not go with --mixup'),
    ('--jsd-loss', '--jsd-loss needs --aug-splits'),
    ('--aug-repeats 3', '--aug-repeats 3 gives the augmentations of an image to different processes: start several'),
    ('--aug-repeats 0.5', '--aug-repeats 0.5: must be at least 1, or 0 for none'),
    ('--sync-bn --split-bn --aug-splits 2', '--sync-bn does not go with --split-bn'),
    ('--mixup 0.1 --batch-size 3', '--batch-size 3'),
    ('--train-batches-per-epoch 3', '--train-batches-per-epoch needs --train-img-sizes'),
    ('--train-img-sizes 32 64 --train-size-probs 1', 'must be one value for each of 2 --train-img-sizes'),
    ('--train-img-sizes 0 32', '--train-img-sizes and --train-batch-sizes must be positive'),
    ('--train-img-sizes 32 64 --train-size-probs 0 0', 'one of them must be positive'),
    ('--train-img-sizes 32 --train-size-schedule progressive', 'needs two or more'),
    ('--train-img-sizes 32 --aug-splits 2', 'does not go with --aug-splits'),
    ('--train-img-sizes 32 64 --train-batch-sizes 3 2 --mixup 0.1', 'must be even'),
    ('--variable-batch-loss-scale sqrt', '--variable-batch-loss-scale needs --train-batch-sizes'),
    ('--train-img-sizes 32 --variable-batch-loss-scale linear', 'needs --train-batch-sizes'),
    ('--experiment a/../../b', "--experiment 'a/../../b' is no folder in --output"),
    ('--experiment /b', "--experiment '/b' is no folder in --output"),
    ('--experiment .', "--experiment '.' is no folder in --output"),
    ('--tta -1', '--tta -1: must be at least 0'),
    ('--tta 11', '--tta 11: there are 10 views of an image'),
])
def test_impossible_values_are_refused(argv, message):
    with pytest.raises(UsageError) as e:
        check_train_options(train_parser().parse_args(argv.split()))
    assert message in str(e.value)


def test_defaults_are_possible():
    check_train_options(train_parser().parse_args([]))


def test_written_options_are_read_back(tmp_path):
    argv = ['--lr', '1e-5', '--scale', '0.5', '1', '--model-kwargs', 'img_size=32', '--model-ema']
    args = train_parser().parse_with_config(argv)
    write_options_file(tmp_path / 'args.yaml', args)
    assert train_parser().parse_with_config(['-c', str(tmp_path / 'args.yaml')]) == args
