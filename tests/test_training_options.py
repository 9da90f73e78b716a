"""Options: timm's names, types and defaults; YAML files checked against them; wrong values."""

import copy
import csv
import math
import shlex
from pathlib import Path

import pytest
import timm
import torch

from flatten_zoo.errors import UsageError, report_usage_errors
from flatten_zoo.training import train, validate
from flatten_zoo.training.options.checks import check_train_options
from flatten_zoo.training.options.definitions import REFUSED, train_parser, validate_parser
from flatten_zoo.training.options.parser import Flag, Number, Options, write_options_file

from .tiny_images import write_images

REFERENCE = Path(__file__).parent / 'reference'
ATTENTION = {'attention', 'attention_where'}
OURS = {
    'train': {'log_tensorboard', *ATTENTION},  # what wandb has, and timm's script lacks
    'validate': {'tta', *ATTENTION},  # what train.py has
}
PARSERS = {'train': train_parser, 'validate': validate_parser}
MORE_SPELLINGS = {'local_rank': '--local-rank'}  # torch's old launcher has it so


def described(action) -> dict[str, str]:
    def text(value):
        return '' if value is None else str(value)

    options = [option for option in action.option_strings if option != getattr(action, 'opposite', None)]
    return {
        'options': ' '.join(options) or action.dest,
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
    ours = [described(a) for a in parser._actions if a.dest not in {'help', 'config', *OURS[script]}]
    assert len(ours) >= 40
    assert not OURS[script] & set(rows)
    for option in ours:
        expected = {key: rows[option['dest']][key] or '' for key in option}
        more = {MORE_SPELLINGS[option['dest']]} if option['dest'] in MORE_SPELLINGS else set()
        assert {**option, 'options': set(option['options'].split())} == {
            **expected,
            'options': set(expected['options'].split()) | more,
        }


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


@pytest.mark.parametrize(
    'argv, message',
    [
        ('--naflex-loader', 'left out: no model of the zoo is a NaFlex model'),
        ('--kd-model-name resnet50', 'left out: distillation'),
        ('--torchscript', 'use --torchcompile'),
        ('--fuser=nvfuser', 'use --torchcompile'),
    ],
)
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
    args = parsed(
        tmp_path,
        'lr: 1e-3\nmin_lr: 1\nscale: [1, 1]\nmodel_ema: true\nclip_grad: null\n'
        'model_kwargs: {img_size: 32}\ndata: some/where\ninput_size: [1, 32, 32]\n',
    )
    assert args.lr == 1e-3
    assert isinstance(args.min_lr, float)
    assert args.scale == [1.0, 1.0]
    assert args.model_ema is True
    assert args.clip_grad is None
    assert args.model_kwargs == {'img_size': 32}
    assert args.data == 'some/where'
    assert args.input_size == [1, 32, 32]


@pytest.mark.parametrize(
    'text, message',
    [
        ('epoch: 3', "unknown option 'epoch'; did you mean epochs"),
        ('epochs: three', "epochs expects an integer of at least 1, not 'three'"),
        ('epochs: 3.5', 'epochs expects an integer of at least 1, not 3.5'),
        ('epochs: true', 'epochs expects an integer of at least 1, not True'),
        ('epochs: null', 'epochs expects an integer of at least 1, not None'),
        ('epochs: 0', 'epochs expects an integer of at least 1, not 0'),
        ('lr: fast', "lr expects a number of at least 0, not 'fast'"),
        ('lr: .inf', 'lr expects a number of at least 0, not inf'),
        (f'lr: 1{"0" * 400}', 'lr expects a number of at least 0, not 1'),
        ('hflip: 2', 'hflip expects a number of at least 0 and at most 1, not 2'),
        ('std: [0.2, 0, 0.2]', 'std expects a number above 0, not [0.2, 0, 0.2]'),
        ('model_ema: 1', 'model_ema expects true or false, not 1'),
        ('model: 18', 'model expects text, not 18'),
        ('scale: 0.5', 'scale expects a list of values, not 0.5'),
        ('scale: [a]', "scale expects a number above 0, not ['a']"),
        ('input_size: [3, 32]', 'input_size expects a list of 3 values, not [3, 32]'),
        ('model_kwargs: img_size=32', "model_kwargs expects a mapping of names to values, not 'img_size=32'"),
        ('sched: cosin', 'sched expects one of cosine, '),
        ('config: other.yaml', "unknown option 'config'"),
        ('- epochs', 'expected a mapping of option names to values'),
        ('epochs: [', 'not valid YAML'),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, message):
    with pytest.raises(UsageError) as e:
        parsed(tmp_path, text)
    assert message in str(e.value)
    assert 'options.yaml' in str(e.value)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize(
    'argv, message',
    [
        (['--epoch', '3'], "unknown option '--epoch'; did you mean --epochs"),
        (['a', 'b'], "unexpected argument 'b'"),
        (['--epochs', 'x'], "--epochs: invalid int value: 'x'"),
        (['--sched', 'x'], "--sched: invalid choice: 'x'"),
        (['--model-kwargs', 'x'], "--model-kwargs: 'x' is not KEY=VALUE"),
        (['--config', 'missing.yaml'], "cannot read the options in 'missing.yaml': No such file"),
    ],
)
def test_mistakes_on_the_command_line_are_named(argv, message):
    with pytest.raises(UsageError) as e:
        train_parser().parse_with_config(argv)
    assert message in str(e.value)


@pytest.mark.parametrize(
    'argv, message',
    [
        ('--scale 1 0.5', '--scale [1.0, 0.5]: must be two numbers, the smaller one first'),
        ('--mean 1 2', '--mean [1.0, 2.0]: must be one value, or one for each of 3 channels'),
        ('--opt adamx', "--opt: unknown optimizer 'adamx'; did you mean"),
        ('--decay-rate 2', '--decay-rate 2: must be below 1'),
        ('--decay-milestones 30 20', '--decay-milestones [30, 20]: must be in order'),
        ('--lr-noise 0 .5 1', '--lr-noise [0.0, 0.5, 1.0]: must be where it begins'),
        ('--sched plateau --val-interval 2', '--sched plateau needs a validation after every epoch'),
        ('--aug-splits 1', '--aug-splits 1'),
        ('--aug-splits 2 --mixup 0.1', '--aug-splits does not go with --mixup'),
        ('--jsd-loss', '--jsd-loss needs --aug-splits'),
        (
            '--aug-repeats 3',
            '--aug-repeats 3 gives the augmentations of an image to different processes: start several',
        ),
        ('--aug-repeats 0.5', '--aug-repeats 0.5: must be at least 1, or 0 for none'),
        ('--sync-bn --split-bn --aug-splits 2', '--sync-bn does not go with --split-bn'),
        ('--mixup 0.1 --batch-size 3', '--batch-size 3'),
        ('--train-batches-per-epoch 3', '--train-batches-per-epoch needs --train-img-sizes'),
        ('--train-img-sizes 32 64 --train-size-probs 1', 'must be one value for each of 2 --train-img-sizes'),
        ('--train-img-sizes 32 64 --train-size-probs 0 0', 'one of them must be positive'),
        ('--train-img-sizes 32 --train-size-schedule progressive', 'needs two or more'),
        ('--train-img-sizes 32 --aug-splits 2', 'does not go with --aug-splits'),
        ('--train-img-sizes 32 64 --train-batch-sizes 3 2 --mixup 0.1', 'must be even'),
        ('--variable-batch-loss-scale sqrt', '--variable-batch-loss-scale needs --train-batch-sizes'),
        ('--train-img-sizes 32 --variable-batch-loss-scale linear', 'needs --train-batch-sizes'),
        ('--experiment a/../../b', "--experiment 'a/../../b' is no folder in --output"),
        ('--experiment /b', "--experiment '/b' is no folder in --output"),
        ('--experiment .', "--experiment '.' is no folder in --output"),
    ],
)
def test_impossible_values_are_refused(argv, message):
    with pytest.raises(UsageError) as e:
        check_train_options(train_parser().parse_args(argv.split()))
    assert message in str(e.value)


def test_defaults_are_possible():
    check_train_options(train_parser().parse_args([]))


@pytest.mark.parametrize('script', PARSERS)
def test_every_flag_can_be_switched_off_again(script, tmp_path):
    parser = PARSERS[script]()
    flags = [action for action in parser._actions if isinstance(action, Flag)]
    path = tmp_path / 'options.yaml'
    path.write_text(''.join(f'{action.dest}: true\n' for action in flags))
    assert {'--no-amp', '--prefetcher'} <= {action.opposite for action in flags}
    on = vars(parser.parse_with_config(['-c', str(path)]))
    off = vars(parser.parse_with_config(['-c', str(path), *(action.opposite for action in flags)]))
    for action in flags:
        assert (on[action.dest], off[action.dest]) == (True, False)


# Every option with a wrong value

ANY_TEXT = {'train': {'wandb_project', 'wandb_tags', 'wandb_resume_id'}, 'validate': set()}
WRONG_INPUT = {
    'config': ['none.yaml'],
    'data': ['none'],
    'data_dir': ['none'],
    'dataset': ['none', 'none/none', 'torch/none'],
    'class_map': ['none'],
    'input_img_mode': ['none', 'L'],
    'input_key': ['none'],
    'target_key': ['none'],
    'mean': ['1 2'],
    'std': ['1 2'],
    'model': ['none', 'none/none'],
    'gp': ['none'],
    'attention': ['focused_linear'],
    'attention_where': ['0', '0- --attention efficient', '0 --attention efficient'],
    'model_kwargs': ['none', 'none=1'],
    'device': ['none', 'mps', 'cuda:7'],
    'torchcompile': ['none'],
    'torchcompile_mode': ['none'],
}
WRONG = {
    'train': WRONG_INPUT
    | {
        'train_split': ['none'],
        'val_split': ['none'],
        'pretrained_path': ['none'],
        'initial_checkpoint': ['none'],
        'resume': ['none', '.'],
        'opt': ['none'],
        'opt_kwargs': ['none', 'none=1'],
        'device_modules': ['none'],
        'aa': ['none', 'rand-foo', 'rand-foo1', 'rand-m9-inc', 'rand-mx', 'rand-tnone', 'augmix-x3', 'original-x1'],
        'output': ['/dev/null'],
        'experiment': ['../none'],
        'opt_betas': ['0.9 --opt adamw'],
        'in_chans': ['4'],
        'input_size': ['4 32 32'],
        'num_classes': ['2'],
        'batch_size': ['1', '7'],
        'decay_rate': ['2', '1 --sched plateau'],
        'aug_splits': ['1'],
    },
    'validate': WRONG_INPUT
    | {
        'split': ['none'],
        'checkpoint': ['none', '.'],
        'real_labels': ['none'],
        'valid_labels': ['none'],
        'results_file': ['/dev/null/none'],
        'num_gpu': ['2'],
    },
}


def wrong_values(script, action) -> list[str]:
    """Values that an option does not take; of numbers, those next to its limits."""
    values = WRONG[script].get(action.dest, [])
    if isinstance(action.type, Number):
        limits = action.type.least - 1, action.type.above, action.type.most + 1
        values = [*values, 'nothing', 'nan', *(f'{limit:g}' for limit in limits if math.isfinite(limit))]
    elif action.choices:
        values = [*values, 'nothing']
    return values


def options_with_values():
    for script, parser in PARSERS.items():
        for action in parser()._actions:
            if action.nargs != 0 and action.dest not in ANY_TEXT[script]:
                yield pytest.param(script, action, id=f'{script}-{action.dest}')


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    """A command line of each script that works."""
    folder = tmp_path_factory.mktemp('base')
    images = write_images(folder / 'images', train=2, validation=1)
    torch.save(timm.create_model('test_resnet', num_classes=3).state_dict(), folder / 'model.pth')
    common = f'--data-dir {images} --model test_resnet --num-classes 3 --img-size 32 -b 2 -j 0 --device cpu'
    return {
        'train': shlex.split(f'{common} --epochs 1 --output out --experiment run'),
        'validate': shlex.split(f'{common} --checkpoint {folder}/model.pth'),
    }


@pytest.mark.parametrize('script', PARSERS)
def test_options_stay_as_they_were_given(script, base, tmp_path):
    program = {'train': train, 'validate': validate}[script]
    args = program.parse([*base[script], *(['--output', str(tmp_path), '--sync-bn'] if script == 'train' else [])])
    assert isinstance(args, Options)
    given = copy.deepcopy(vars(args))
    with pytest.raises(AttributeError, match='batch_size'):
        args.batch_size = 1
    with pytest.raises(AttributeError, match='batch_size'):
        del args.batch_size
    if script == 'train':
        train.prepare(args).train()
        written = train_parser().parse_with_config(['-c', str(tmp_path / 'run' / 'args.yaml')])
        checkpoint = torch.load(tmp_path / 'run' / 'last.pth.tar', weights_only=True)
        assert checkpoint['args'] == vars(written) == given | {'lr': 0.1 * 2 / 256, 'lr_base_scale': 'linear'}
    else:
        assert validate.validate(args)['images'] == 3
    assert vars(args) == given


@pytest.mark.parametrize('script, action', list(options_with_values()))
def test_wrong_values_are_refused_by_name(script, action, base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main = {'train': train.main, 'validate': validate.main}[script]
    values = wrong_values(script, action)
    assert values, 'which value of this option is wrong?'
    for value in values:
        words = value.split() * (action.nargs if isinstance(action.nargs, int) and ' ' not in value else 1)
        argv = [*base[script], *action.option_strings[:1], *words]
        assert report_usage_errors(lambda argv=argv: main(argv)) == 2, value
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, (value, lines)
        assert any(name in lines[0] for name in action.option_strings or ['--data-dir']), (value, lines)
        assert not list(tmp_path.iterdir()), value


def test_written_options_are_read_back(tmp_path):
    argv = ['--lr', '1e-5', '--scale', '0.5', '1', '--model-kwargs', 'img_size=32', '--model-ema']
    args = train_parser().parse_with_config(argv)
    write_options_file(tmp_path / 'args.yaml', vars(args))
    assert train_parser().parse_with_config(['-c', str(tmp_path / 'args.yaml')]) == args
