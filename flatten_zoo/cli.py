"""The `flatten-zoo` command.

A subcommand is one function below: its docstring is the help, it adds the arguments to its parser and returns what runs
them. It is registered by its place in `COMMANDS`, and imports the module that does the work only when it runs.
"""
import argparse
from collections.abc import Callable
from pathlib import Path

from .errors import UsageError, report_usage_errors

__all__ = ['main']

Command = Callable[[argparse.Namespace], int | None]


def complexity(parser: argparse.ArgumentParser) -> Command:
    """Cost of models and of the attention operators: parameters, multiply-accumulates, activations, memory.

    Operators (ea, issa, nl) are compared at 256 channels on square maps, models on square images; one image at a time,
    in float32. Peak memory is measured on the GPU if there is one, otherwise on the CPU.
    """
    parser.add_argument('names', nargs='*', metavar='MODEL', help='model names, or the operators ea, issa and nl')
    parser.add_argument(
        '--img-size', nargs='+', type=int, metavar='N',
        help="sides of the image or map (default: the model's own; with --plot also two to four times that)")
    parser.add_argument('--format', choices=['text', 'csv'], default='text', help='of what is printed (default: text)')
    parser.add_argument('--plot', type=Path, metavar='FILE', help='draw cost against resolution')
    parser.add_argument(
        '--table', choices=['ea-table2', 'ea-section3.5', 'stereo'],
        help='print a table of the efficient attention paper, computed from the operators')

    def run(args: argparse.Namespace) -> None:
        from . import comparison, tables
        from .paper_tables import PAPER_TABLES
        if bool(args.names) == bool(args.table):
            raise UsageError('name models or operators to compare, or a paper table with --table')
        as_table = tables.as_csv if args.format == 'csv' else tables.as_text
        if args.table:
            print(as_table(*PAPER_TABLES[args.table]()))
            return
        comparisons = comparison.compare_all(args.names, args.img_size, args.plot)
        print(as_table(*comparison.comparison_table(comparisons, exact=args.format == 'csv')))
        if args.plot:
            comparison.plot(comparisons, args.plot)

    return run


COMMANDS: dict[str, Callable[[argparse.ArgumentParser], Command]] = {
    'complexity': complexity,
}


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        argv: Arguments, without the name of the program; those of the process if None.

    Returns:
        The exit status: 2 after a mistake in the arguments.
    """
    parser = argparse.ArgumentParser(prog='flatten-zoo', description='Efficient-attention vision backbones for timm.')
    subparsers = parser.add_subparsers(metavar='COMMAND', required=True)
    for name, command in COMMANDS.items():
        summary, _, _ = command.__doc__.partition('\n')
        subparser = subparsers.add_parser(name, help=summary, description=command.__doc__)
        subparser.set_defaults(run=command(subparser))
    args = parser.parse_args(argv)
    return report_usage_errors(lambda: args.run(args))
