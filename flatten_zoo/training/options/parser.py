"""Command line and YAML file, checked against one parser."""

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from timm.utils import ParseKwargs

from flatten_zoo.errors import UsageError, shown, unknown_name
from flatten_zoo.files import write_beside
from flatten_zoo.models.recorded import check_plain

__all__ = [
    'KeyValues',
    'Number',
    'OptionParser',
    'Options',
    'as_given',
    'flag',
    'program',
    'read_options_file',
    'recipes',
    'write_options_file',
]


class Options(argparse.Namespace):
    """Options as they were given, which nothing changes from then on: what follows from them is kept elsewhere."""

    def __init__(self, values: Mapping[str, Any]):
        vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f'the options stay as they were given, {name} too')

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def replace(self, **values: Any) -> 'Options':
        """Other options, of which these differ."""
        return Options(vars(self) | values)


class KeyValues(ParseKwargs):
    """Any number of KEY=VALUE, the values read as Python literals; a mapping in a YAML file."""

    def __call__(self, parser, namespace, values, option_string=None):
        for value in values:
            if '=' not in value:
                raise argparse.ArgumentError(self, f"'{value}' is not KEY=VALUE")
        super().__call__(parser, namespace, values, option_string)


class Number:
    """The type of an option that takes finite numbers within limits.

    Args:
        kind: int or float.
        least: Smallest number.
        most: Largest number.
        above: In place of `least`, what all numbers are greater than.
    """

    def __init__(self, kind: type, least: float = -math.inf, most: float = math.inf, above: float = -math.inf):
        self.kind, self.least, self.most, self.above = kind, least, most, above
        self.__name__ = kind.__name__  # as argparse calls it in messages

    def __call__(self, text: str) -> int | float:
        value = self.kind(text)
        if not self.allows(value):
            raise argparse.ArgumentTypeError(f'expects {self}, not {text}')
        return value

    def __str__(self) -> str:
        name = 'an integer' if self.kind is int else 'a number'
        limits = (('above', self.above), ('of at least', self.least), ('at most', self.most))
        limits = ' and '.join(f'{word} {limit}' for word, limit in limits if math.isfinite(limit))
        return f'{name} {limits}'.strip()

    def allows(self, value: int | float) -> bool:
        """Whether a number is finite and within the limits."""
        finite = abs(value) <= sys.float_info.max
        return finite and self.above < value and self.least <= value <= self.most


class Flag(argparse.Action):
    """An option without a value, and its opposite, which switches off again what a file has switched on.

    The opposite of `--amp` is `--no-amp`, that of `--no-aug` is `--aug`.
    """

    def __init__(self, option_strings: list[str], dest: str, default: bool = False, help: str | None = None):
        name = option_strings[0].removeprefix('--')
        self.opposite = f'--{name.removeprefix("no-")}' if name.startswith('no-') else f'--no-{name}'
        super().__init__([*option_strings, self.opposite], dest, nargs=0, default=default, help=help)

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, option_string != self.opposite)


class OptionParser(argparse.ArgumentParser):
    """A parser that reports mistakes as `UsageError` and takes defaults from a YAML file given with `--config`.

    Args:
        refused: Why an option of timm's is not there, by its destination name.
        recipe_folder: Where the recipes for it are among the recipes.
        kwargs: Arguments of argparse's parser.
    """

    def __init__(self, refused: Mapping[str, str] | None = None, recipe_folder: str = '', **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)
        self.refused = refused or {}
        self.recipe_folder = recipe_folder
        self.register('action', 'store_true', Flag)
        self.add_argument(
            '-c',
            '--config',
            metavar='FILE',
            help='YAML file of options, or the name of a recipe; the command line overrides it',
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse_args(self, args=None, namespace=None):
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition('=')[0] for word in unknown if word.startswith('-')]
            if flags:
                reason = self.refused.get(flags[0].lstrip('-').replace('-', '_'))
                if reason:
                    raise UsageError(f'{flags[0]}: {reason}')
                raise unknown_name('option', flags[0], self._option_string_actions)
            raise UsageError(f"unexpected argument '{unknown[0]}'")
        return options

    def parse_with_config(self, args: Sequence[str] | None = None) -> Options:
        """Options from the command line, over those of the `--config` file, over the defaults."""
        early = OptionParser(add_help=False)
        config = early.parse_known_args(args)[0].config
        if config:
            try:
                config = find_recipe(config, self.recipe_folder)
                values = read_options_file(config)
            except UsageError as e:
                raise UsageError(f'--config: {e}') from e
            self.set_defaults(**self.check(values, source=config))
        values = vars(self.parse_args(args))
        del values['config']
        return Options(values)

    def check(self, values: dict[str, Any], source: str | Path) -> dict[str, Any]:
        """Options by destination name, each of the type its command line option has.

        Args:
            values: Option values as a YAML file holds them.
            source: Where they come from, for messages.

        Raises:
            UsageError: A key is no option, or a value has the wrong type.
        """
        actions = {action.dest: action for action in self._actions if action.dest not in ('help', 'config')}
        checked = {}
        for key, value in values.items():
            if key in self.refused:
                raise UsageError(f'{source}: {key}: {self.refused[key]}')
            if key not in actions:
                raise UsageError(f'{source}: {unknown_name("option", str(key), actions)}')
            try:
                checked[key] = _checked(actions[key], value)
                if key == 'model_kwargs':
                    check_plain(checked[key], f'{source}: {key}')
            except _Mismatch as e:
                raise UsageError(f'{source}: {key} expects {e}, not {shown(value)}') from None
        return checked


def flag(name: str) -> str:
    """The option of a destination name."""
    return '--' + name.replace('_', '-')


def as_given(options: argparse.Namespace, *names: str) -> str:
    """The options of these names that have a value, for messages: ' --opt sgd --momentum 0.9'."""
    values = {name: getattr(options, name, None) for name in names}
    return ''.join(f' {flag(name)} {value}' for name, value in values.items() if value not in (None, {}))


class _Mismatch(Exception):
    """What was expected instead of a value."""


def _checked(action: argparse.Action, value: Any) -> Any:
    if value in (None, []) and value == action.default:
        return value
    if action.nargs == 0:
        return _of_type(bool, value)
    if isinstance(action, KeyValues):
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise _Mismatch('a mapping of names to values')
        return value
    if action.nargs == '+' or isinstance(action.nargs, int):
        number = f'{action.nargs} values' if isinstance(action.nargs, int) else 'values'
        if not isinstance(value, list) or not value or (number != 'values' and len(value) != action.nargs):
            raise _Mismatch(f'a list of {number}')
        return [_of_type(action.type, item) for item in value]
    value = _of_type(action.type, value)
    if action.choices is not None and value not in action.choices:
        raise _Mismatch(f'one of {", ".join(action.choices)}')
    return value


def _of_type(kind: Any, value: Any) -> Any:
    if isinstance(kind, Number):
        if type(value) not in (int, kind.kind) or not kind.allows(value):
            raise _Mismatch(kind)
        return kind.kind(value)
    if type(value) is not (kind or str):
        raise _Mismatch('true or false' if kind is bool else 'text')
    return value


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-3 for text, as it has no dot; here it is the number that everybody means."""


_Loader.add_implicit_resolver(
    'tag:yaml.org,2002:float', re.compile(r'^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$'), list('-+.0123456789')
)


def read_options_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        UsageError: The file is missing, unreadable, not YAML, or holds something else.
    """
    try:
        values = yaml.load(Path(path).read_text(), _Loader)
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"cannot read the options in '{path}': {getattr(e, 'strerror', None) or e}") from e
    except yaml.YAMLError as e:
        mark = getattr(e, 'problem_mark', None)
        where = f'{path}, line {mark.line + 1}' if mark else path
        raise UsageError(f'{where}: not valid YAML: {getattr(e, "problem", None) or e}') from e
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f'{path}: expected a mapping of option names to values')
    return values


def recipes(folder: str = '') -> dict[str, Path]:
    """Recipes by name: those that came with the package, or in a checkout those beside it.

    Args:
        folder: Where among them.
    """
    package = Path(__file__).parents[2]
    root = package / 'recipes' if (package / 'recipes').is_dir() else package.parent / 'configs'
    return {path.stem: path for path in sorted((root / folder).glob('*.yaml'))}


def find_recipe(name: str, folder: str = '') -> Path:
    """The file of that name, or where there is none the recipe.

    Args:
        name: The name.
        folder: Where among the recipes.

    Raises:
        UsageError: There is neither.
    """
    path = Path(name)
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    known = recipes(folder)
    if name not in known:
        raise unknown_name('recipe', name, known)
    return known[name]


def program(name: str) -> str:
    """How 'train' or 'validate' is started, as this process was: as a script, or as a subcommand."""
    script = Path(sys.argv[0])
    return str(script.with_name(f'{name}.py')) if script.name in ('train.py', 'validate.py') else f'flatten-zoo {name}'


def write_options_file(path: Path, options: Mapping[str, Any]) -> None:
    """Write options so that `--config` reads them back."""
    with write_beside(path) as temporary:
        temporary.write_text(yaml.safe_dump(dict(options), sort_keys=False))
