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


def visualize(parser: argparse.ArgumentParser) -> Command:
    """Draw what a model's attention does on a picture, or the energy of its feature maps.

    Focused linear attention: the equivalent attention of query points without and with the depthwise term, beside
    softmax attention, with rank and singular values. Interlaced sparse and non-local attention: the affinities of query
    points. Efficient attention: its global attention maps. Every model, and those without any of these: the feature
    pyramid.
    """
    parser.add_argument('image', type=Path, metavar='IMAGE', help='the picture')
    parser.add_argument('--model', required=True, metavar='NAME', help='any model name of timm')
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument('--checkpoint', type=Path, metavar='FILE', help='load the weights of this file')
    weights.add_argument('--pretrained', action='store_true', help='load the released weights (default: none)')
    parser.add_argument('--layer', metavar='NAME', help='attention layer (default: the last one)')
    parser.add_argument('--head', type=int, default=0, metavar='N', help='head of the attention (default: 0)')
    parser.add_argument(
        '--query', nargs=2, type=float, action='append', metavar=('X', 'Y'),
        help='query point, as fractions of width and height from the top left; may be repeated (default: 3 × 3 points)')
    parser.add_argument('--pyramid', action='store_true', help='draw the feature pyramid instead of attention')
    parser.add_argument(
        '--img-size', nargs='+', type=int, metavar='N',
        help="side, or height and width, to resize the picture to (default: the model's own)")
    parser.add_argument('-o', '--output', type=Path, required=True, metavar='FILE', help='figure, such as OUT.png')
    parser.add_argument('--save-arrays', type=Path, metavar='FILE.npz', help='write the numbers too')

    def run(args: argparse.Namespace) -> None:
        from .visualize import DEFAULT_POINTS, render
        points = [tuple(point) for point in args.query] if args.query else DEFAULT_POINTS
        drawn = render(
            args.image, args.model, args.output, args.save_arrays, args.layer, points, args.head, args.pyramid,
            args.img_size, args.pretrained, args.checkpoint)
        print(f'{args.output}: {drawn}')

    return run


COMMANDS: dict[str, Callable[[argparse.ArgumentParser], Command]] = {
    'complexity': complexity,
    'visualize': visualize,
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
