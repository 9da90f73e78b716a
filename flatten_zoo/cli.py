"""The `flatten-zoo` command.

A subcommand is one function below: its docstring is the help, it adds the arguments to its parser and returns what runs
them. It is registered by its place in `COMMANDS`, and imports the module that does the work only when it runs. One
that takes long sets an `announcement`, in which arguments stand by name, for `main` to print first.
"""

import argparse
import ast
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UsageError, printable, report_usage_errors

__all__ = ['main']

Command = Callable[[argparse.Namespace], int | None]


def complexity(parser: argparse.ArgumentParser) -> Command:
    """Cost of models and of the attention operators: parameters, multiply-accumulates, activations, memory.

    Operators (ea, issa, nl) are compared at 256 channels on square maps, models on square images; one image at a time,
    in float32. Peak memory is measured in inference, on the GPU if there is one, otherwise on the CPU.
    """
    parser.set_defaults(announcement='measuring')
    parser.add_argument('names', nargs='*', metavar='MODEL', help='model names, or the operators ea, issa and nl')
    parser.add_argument(
        '--img-size',
        nargs='+',
        type=int,
        metavar='N',
        help="sides of the image or map (default: the model's own; with --plot also two to four times that)",
    )
    _attention_arguments(parser, 'compare each model with what it is with this linear attention')
    parser.add_argument('--stages', action='store_true', help='each stage of the models, by itself')
    parser.add_argument('--format', choices=['text', 'csv'], default='text', help='of what is printed (default: text)')
    parser.add_argument('--plot', type=Path, metavar='FILE', help='draw cost against resolution')
    parser.add_argument(
        '--table',
        choices=['ea-table2', 'ea-section3.5', 'ea-mask-rcnn', 'stereo', 'issa-efficiency'],
        help='print a table of the efficient attention paper, computed from the operators, or measure the heads of '
        'isa_net as the ISSA paper does (--img-size: sides of the map; --plot)',
    )

    def run(args: argparse.Namespace) -> None:
        from . import tables
        from .cost import comparison
        from .cost.paper_tables import PAPER_TABLES

        if bool(args.names) == bool(args.table):
            raise UsageError('name models or operators to compare, or a paper table with --table')
        if args.table and args.stages:
            raise UsageError('--stages is for models: leave it out with --table')
        if args.table in PAPER_TABLES and (args.plot or args.img_size):
            raise UsageError(
                f'--table {args.table} has the sizes of its paper and is not drawn: leave out --img-size and --plot'
            )
        as_table = tables.as_csv if args.format == 'csv' else tables.as_text
        if args.table in PAPER_TABLES:
            print(as_table(*PAPER_TABLES[args.table]()))
            return
        if args.table:
            from .bench.contexts import compare_contexts

            comparisons = compare_contexts(args.img_size, args.plot)
        else:
            comparisons = comparison.compare_all(_with_attention(args), args.img_size, args.plot, args.stages)
        print(as_table(*comparison.comparison_table(comparisons, exact=args.format == 'csv')))
        if args.format == 'text' and any(c.closed_form for c in comparisons):
            print(comparison.MEMORY_NOTE, file=sys.stderr)
        if args.plot:
            comparison.plot(comparisons, args.plot)

    return run


def convert(parser: argparse.ArgumentParser) -> Command:
    """Convert a checkpoint: official, of train.py, or in timm's style; to a folder for the Hub, or to other files.

    Only tensors and plain values are read; code that a file may carry is never run.
    """
    _checkpoint_arguments(parser, 'SOURCE', 'checkpoint file')
    parser.add_argument(
        '-o',
        '--output',
        type=Path,
        required=True,
        metavar='FOLDER|FILE',
        help="folder in timm's Hub layout, FILE.safetensors for the tensors alone, or FILE.pth with --to official",
    )
    parser.add_argument(
        '--to',
        choices=['timm', 'official'],
        default='timm',
        help='whose names and shapes the tensors have (default: timm)',
    )

    def run(args: argparse.Namespace) -> None:
        from . import weights

        model = weights.load_model(
            args.source, _model(args), args.use_ema, dict(args.model_kwargs), allow_non_finite=args.allow_non_finite
        )
        weights.write_weights(model, args.output, official=args.to == 'official')
        print(f'wrote {args.output}')

    return run


def push(parser: argparse.ArgumentParser) -> Command:
    """Publish a model on the Hugging Face Hub, for everyone to load with `timm.create_model('hf-hub:account/name')`.

    A folder is sent as `flatten-zoo convert` wrote it; a checkpoint is converted first. If it stops on the way, the
    same command again continues.
    """
    _checkpoint_arguments(parser, 'FOLDER|CHECKPOINT', "folder in timm's Hub layout, or checkpoint file")
    parser.add_argument('--repo', required=True, metavar='ACCOUNT/NAME', help='repository, created if there is none')
    parser.add_argument('--private', action='store_true', help='for a private repository')
    parser.add_argument('--dry-run', action='store_true', help='check, and show what would be sent, but send nothing')

    def run(args: argparse.Namespace) -> None:
        from . import weights

        finite = {'allow_non_finite': args.allow_non_finite}
        arguments = args.source, args.repo, _model(args), args.use_ema, dict(args.model_kwargs)
        with weights.hub_folder(*arguments, **finite) as folder:
            if args.dry_run:
                print(weights.dry_run(folder, args.repo, args.private, **finite))
            else:
                print(weights.push(folder, args.repo, args.private, keep_card=args.source != folder, **finite))

    return run


def _checkpoint_arguments(parser: argparse.ArgumentParser, metavar: str, help: str) -> None:
    parser.add_argument('source', type=Path, metavar=metavar, help=help)
    parser.add_argument(
        '--model',
        metavar='NAME',
        help='model of the checkpoint, with its tag if these are the released weights '
        '(default: what a checkpoint of train.py says)',
    )
    _attention_arguments(parser)
    parser.add_argument('--use-ema', action='store_true', help='take the averaged (EMA) weights')
    parser.add_argument(
        '--model-kwargs',
        nargs='*',
        default=[],
        type=_key_value,
        metavar='KEY=VALUE',
        help='more arguments of the model, such as img_size=384',
    )
    parser.add_argument(
        '--allow-non-finite', action='store_true', help='take weights that are infinite or not a number too'
    )


def _attention_arguments(
    parser: argparse._ActionsContainer, help: str = 'give the model this linear attention, after weights are loaded'
) -> None:
    parser.add_argument('--attention', choices=['focused_linear', 'efficient'], help=help)
    parser.add_argument(
        '--attention-where', metavar='N,N-N', help='blocks or stages that get it, as in 0-5 or 0-3,8 (default: all)'
    )


def _model(args: argparse.Namespace) -> Any:
    """The model that the options name, with the attention that they give it."""
    from .models.linearized import with_attention

    return with_attention(args.model, args.attention, args.attention_where)


def _with_attention(args: argparse.Namespace) -> list[str]:
    """The models that the options name, each beside what it is with other attention if they say so."""
    from .models.linearized import with_attention

    names = ((name, with_attention(name, args.attention, args.attention_where)) for name in args.names)
    return list(dict.fromkeys(name for pair in names for name in pair))


def _key_value(text: str) -> tuple[str, object]:
    key, separator, value = text.partition('=')
    if not separator:
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def list_models(parser: argparse.ArgumentParser) -> Command:
    """List every model: parameters, image size, tag, and where its weights come from."""

    def run(args: argparse.Namespace) -> None:
        from . import tables, weights

        print(tables.as_text(*weights.list_table()))

    return run


def info(parser: argparse.ArgumentParser) -> Command:
    """Show a model's configuration, where its weights come from, what of them is cached, and the reported accuracy."""
    parser.add_argument('model', metavar='MODEL', help='model name, with or without a tag')
    _attention_arguments(parser)

    def run(args: argparse.Namespace) -> None:
        from . import weights
        from .weights.open import check_model_name

        check_model_name(args.model)
        for what, how in weights.describe(_model(args)):
            print(f'{what:<20}{how}')

    return run


def visualize(parser: argparse.ArgumentParser) -> Command:
    """Draw what a model's attention does on a picture, or the energy of its feature maps.

    Focused linear attention: the equivalent attention of query points without and with the depthwise term, beside
    softmax attention, with rank and singular values. Interlaced sparse and non-local attention: the affinities of query
    points. Efficient attention: its global attention maps. Every model, and those without any of these: the feature
    pyramid.
    """
    parser.set_defaults(announcement='drawing {image} with {model}')
    parser.add_argument('image', type=Path, metavar='IMAGE', help='the picture')
    parser.add_argument('--model', required=True, metavar='NAME', help='any model name of timm')
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument('--checkpoint', type=Path, metavar='FILE', help='load the weights of this file')
    weights.add_argument('--pretrained', action='store_true', help='load the released weights (default: none)')
    _attention_arguments(parser)
    parser.add_argument('--layer', metavar='NAME', help='attention layer (default: the last one with something to see)')
    parser.add_argument('--head', type=int, default=0, metavar='N', help='head of the attention (default: 0)')
    parser.add_argument(
        '--query',
        nargs=2,
        type=float,
        action='append',
        metavar=('X', 'Y'),
        help='query point, as fractions of width and height from the top left; may be repeated (default: 3 × 3 points)',
    )
    parser.add_argument('--pyramid', action='store_true', help='draw the feature pyramid instead of attention')
    parser.add_argument(
        '--img-size',
        nargs='+',
        type=int,
        metavar='N',
        help="side, or height and width, to resize the picture to (default: the model's own)",
    )
    parser.add_argument('-o', '--output', type=Path, required=True, metavar='FILE', help='figure, such as OUT.png')
    parser.add_argument('--save-arrays', type=Path, metavar='FILE.npz', help='write the numbers too')

    def run(args: argparse.Namespace) -> None:
        from .visualize import DEFAULT_POINTS, render

        points = [tuple(point) for point in args.query] if args.query else DEFAULT_POINTS
        drawn = render(
            args.image,
            _model(args),
            args.output,
            args.save_arrays,
            args.layer,
            points,
            args.head,
            args.pyramid,
            args.img_size,
            args.pretrained,
            args.checkpoint,
        )
        print(f'{args.output}: {drawn}')

    return run


def export(parser: argparse.ArgumentParser) -> Command:
    """Write a model as ONNX or as a program of torch.export, for use without its code.

    The file is read again and compared with the model. Beside it, a JSON file has what its user must know:
    normalisation, image size, classes or strides and channels, versions.
    """
    parser.set_defaults(announcement='exporting {model} to {output}')
    parser.add_argument(
        'model', metavar='MODEL', help='any model name of timm; for segmentation the output folder of train-dense'
    )
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument('--checkpoint', type=Path, metavar='FILE', help='load the weights of this file')
    weights.add_argument('--pretrained', action='store_true', help='load the released weights (default: none)')
    _attention_arguments(parser)
    parser.add_argument(
        '--task',
        choices=['classification', 'features', 'segmentation'],
        default='classification',
        help='what comes out: class scores, the feature maps that backbones give, or class scores of each pixel '
        '(default: classification)',
    )
    parser.add_argument('--format', choices=['onnx', 'pt2'], default='onnx', help='of the file (default: onnx)')
    parser.add_argument(
        '--img-size', nargs='+', type=int, metavar='N', help="side, or height and width (default: the model's own)"
    )
    parser.add_argument(
        '--dynamic',
        choices=['batch', 'size', 'both'],
        help='leave open how many images, or how large (default: one image of one size)',
    )
    parser.add_argument('--half', action='store_true', help='weights, images and outputs in float16')
    parser.add_argument(
        '--opset',
        type=int,
        choices=range(17, 23),
        metavar='N',
        help='of --format onnx, 17 to 22; older runtimes need older ones '
        '(default: 21, for onnxruntime 1.20; 20 with --int8)',
    )
    parser.add_argument(
        '--int8',
        type=Path,
        metavar='FOLDER',
        help='quantise --format onnx to 8 bits with the images of this folder, and say how far it agrees on others',
    )
    parser.add_argument(
        '--reparameterize',
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fold batch norms, scales and training-time branches into weights, as timm's reparameterize_model does",
    )
    parser.add_argument('--force', action='store_true', help='overwrite files that are there')
    parser.add_argument('-o', '--output', type=Path, required=True, metavar='FILE', help='OUT.onnx or OUT.pt2')

    def run(args: argparse.Namespace) -> None:
        from .export import check_output, description_of, export
        from .weights import open_model

        check_output(args.output, args.format, args.force)
        classes: list[str] = []
        if args.task == 'segmentation':
            from .dense.training.trained import open_segmentation

            if args.pretrained or args.checkpoint or args.attention:
                raise UsageError(
                    f"'{args.model}' has its weights: leave out --pretrained, --checkpoint and --attention"
                )
            model, classes, size = open_segmentation(Path(args.model))
            args.img_size, weights = args.img_size or size, args.model
        else:
            model, weights = open_model(
                _model(args), args.img_size, args.dynamic in ('size', 'both'), args.pretrained, args.checkpoint
            )
        difference = export(
            model,
            args.output,
            args.task,
            args.format,
            args.img_size,
            args.dynamic,
            args.half,
            args.force,
            weights,
            args.opset,
            args.int8,
            args.reparameterize,
            classes,
        )
        print(f'{args.output}: differs from the model by {difference:.1e} of the largest output, at most')
        if args.int8:
            int8 = json.loads(description_of(args.output).read_text())['int8']
            top1 = f'the same class for {int8["top1_agreement"]:.1%}, ' if 'top1_agreement' in int8 else ''
            print(
                f'in 8 bits, on {int8["images"]} images that have not calibrated it: {top1}outputs differ by '
                f'{int8["largest_difference"]:.1e} of the largest, at most'
            )

    return run


def predict(parser: argparse.ArgumentParser) -> Command:
    """Classes of pictures, with their probabilities: of files, of folders with all in them, or of a data set.

    Classes have the names that the training run had for them, those of ImageNet where the weights are, or else their
    index. Pictures that cannot be read are named at the end, with status 1; the others' results are kept.
    """
    parser.set_defaults(announcement='predicting')
    parser.add_argument('images', nargs='*', type=Path, metavar='FILE|FOLDER', help='pictures, and folders of them')
    group = parser.add_argument_group('model')
    group.add_argument(
        '-m',
        '--model',
        metavar='NAME',
        help='any model name of timm, an address such as hf-hub:account/name, or an ONNX file of flatten-zoo export',
    )
    weights = group.add_mutually_exclusive_group()
    weights.add_argument('--pretrained', action='store_true', help='load the released weights')
    weights.add_argument(
        '--checkpoint',
        type=Path,
        metavar='PATH',
        help='load the weights of this file, or of the best checkpoint in this output folder of train.py; --model is '
        'needed only where the file does not say which it is of',
    )
    _attention_arguments(group)
    group.add_argument(
        '--img-size', nargs='+', type=int, metavar='N', help="side, or height and width (default: the model's own)"
    )
    group = parser.add_argument_group('data set, in place of pictures')
    group.add_argument('--dataset', default='', metavar='NAME', help='PREFIX/NAME, as for train.py')
    group.add_argument('--data-dir', metavar='DIR', help='folder (or tar file) of the data')
    group.add_argument('--split', default='validation', metavar='NAME', help='of the data (default: validation)')
    group.add_argument('--num-samples', type=int, metavar='N', help='images, for streams that do not say')
    group.add_argument('--dataset-download', action='store_true', help='download the data if its source allows it')
    group.add_argument('--input-key', metavar='KEY', help='name of the image in a record')
    group.add_argument('--target-key', metavar='KEY', help='name of the class in a record')
    group = parser.add_argument_group('running')
    group.add_argument('-b', '--batch-size', type=int, default=64, metavar='N', help='images per batch (default: 64)')
    group.add_argument(
        '-j',
        '--workers',
        type=int,
        default=min(4, os.cpu_count() or 1),
        metavar='N',
        help='processes that read images (default: 4, but no more than there are cores)',
    )
    group.add_argument('--device', default='cuda', help='where to run (default: cuda, or the CPU if there is none)')
    group = parser.add_argument_group('results')
    group.add_argument('--topk', type=int, default=5, metavar='K', help='classes for each picture (default: 5)')
    group.add_argument('--results-file', type=Path, metavar='FILE', help='write them to .csv, .json, .jsonl, .parquet')
    group.add_argument(
        '--results-format',
        choices=['csv', 'json', 'jsonl', 'parquet'],
        help="as which format (default: that of the file's suffix; without a file, a table)",
    )
    group.add_argument(
        '--embeddings', type=Path, metavar='FILE', help='instead write pooled features, to FILE.npz or FILE.parquet'
    )

    def run(args: argparse.Namespace) -> int:
        from .predict.command import run

        args.model = _model(args)
        return run(args)

    return run


def linearize(parser: argparse.ArgumentParser) -> Command:
    """Give a trained network linear attention that keeps what it knows, from images without labels.

    First every converted attention learns to give what the network's own gives for the same input; then the whole
    network learns its features and class scores. The same command again continues. On several GPUs: torchrun … -m
    flatten_zoo linearize …
    """
    parser.set_defaults(announcement='linearizing {model}')
    parser.add_argument(
        'model', metavar='MODEL', help='any model name of timm, or an address such as hf-hub:account/name'
    )
    parser.argument_default = argparse.SUPPRESS  # what is not given is left to `linearize.Settings`
    parser.add_argument('--checkpoint', type=Path, metavar='FILE', help='its weights (default: the released ones)')
    parser.add_argument(
        '--data',
        required=True,
        metavar='FOLDER',
        help='images, of which every tenth is held out; or a folder with those of train and validation',
    )
    parser.add_argument('-o', '--output', required=True, metavar='FOLDER', help='for the network and the report')
    parser.add_argument(
        '--img-size', nargs='+', type=int, metavar='N', help='side, or height and width (default: its own)'
    )
    group = parser.add_argument_group('which attention')
    _attention_arguments(group, 'linear attention to give it (default: focused_linear)')
    group.add_argument(
        '--keep',
        type=int,
        metavar='N',
        help='leave softmax in N of these, in which linear attention errs most (default: 0)',
    )
    group.add_argument(
        '--budget',
        type=float,
        metavar='GMACS',
        help='in place of that, leave it where the network errs least and costs no more',
    )
    group.add_argument(
        '--budget-size', type=int, metavar='N', help="for images of that side (default: the network's own)"
    )
    group = parser.add_argument_group('learning: what is new in each attention; with queries and keys; the network')
    group.add_argument('--epochs', nargs=3, type=int, metavar='N', help='of each (default: 1 1 2)')
    group.add_argument('--lr', nargs=3, type=float, metavar='X', help='learning rates (default: 1e-2 1e-3 2e-4)')
    group.add_argument(
        '--parameters', choices=['all', 'attention'], help='that the last of them changes (default: all)'
    )
    group.add_argument('--temperature', type=float, metavar='T', help='of the class scores (default: 1)')
    group.add_argument(
        '--label-weight', type=float, metavar='X', help='of cross-entropy with labels (default: 0, without)'
    )
    group.add_argument('-b', '--batch-size', type=int, metavar='N', help='images per batch (default: 64)')
    group.add_argument(
        '--no-augment',
        dest='augment',
        action='store_false',
        help='learn from whole images (default: from random crops)',
    )
    group.add_argument('--scale', nargs=2, type=float, metavar='X', help='area of the crops (default: 0.35 1)')
    group.add_argument('--hflip', type=float, metavar='P', help='probability of a mirror image (default: 0.5)')
    group = parser.add_argument_group('running')
    group.add_argument(
        '--amp', nargs='?', const='bfloat16', choices=['bfloat16', 'float16'], help='mixed precision (bfloat16)'
    )
    group.add_argument('-j', '--workers', type=int, metavar='N', help='processes that load images (default: 4)')
    group.add_argument('--device', help='where to run (default: cuda, or the CPU if there is none)')
    group.add_argument('--seed', type=int, metavar='N', help='random seed (default: 42)')
    group.add_argument('--log-interval', type=int, metavar='N', help='batches between log lines (default: 50)')
    group.add_argument(
        '--sizes', nargs='*', type=int, metavar='N', help='image sizes to compare speed at (default: 224 512 1024)'
    )
    group.add_argument('--seconds', type=float, metavar='S', help='to measure each (default: 2)')

    def run(args: argparse.Namespace) -> int:
        from .linearize.transfer import run

        return run(args)

    return run


def bench(parser: argparse.ArgumentParser) -> Command:
    """How fast models run here, side by side: images per second, time of a batch, peak memory, speed against the first.

    Medians, and quartiles in brackets. The models of one mode, batch size and image size take turns, so that a machine
    that is busy for a while is busy for all of them. Weights and images are random, also those that calibrate int8:
    speed alone is meant. Ctrl-C prints what there is.
    """
    parser.set_defaults(announcement='measuring')
    parser.add_argument('names', nargs='*', metavar='MODEL', help='any model names of timm; the first is the measure')
    _attention_arguments(parser, 'time beside each model what it is with this linear attention')
    parser.add_argument('--family', metavar='NAME', help="all of the zoo's models of a family, such as swin")
    parser.add_argument(
        '--modes',
        nargs='+',
        default=['eager'],
        metavar='MODE',
        choices=['eager', 'compile', 'channels-last', 'bfloat16', 'reparameterized', 'onnx', 'int8'],
        help='eager, compile, channels-last, bfloat16, reparameterized, onnx or int8 (default: eager); '
        'onnx and int8 run in onnxruntime, on the CPU',
    )
    parser.add_argument('--batch-size', nargs='+', type=int, default=[1], metavar='N', help='images (default: 1)')
    parser.add_argument(
        '--img-size', nargs='+', type=int, metavar='N', help="sides of the images (default: each model's own)"
    )
    parser.add_argument('--train', action='store_true', help='time a training step: forward, backward and SGD')
    parser.add_argument(
        '--seconds', type=float, default=5.0, metavar='S', help='for each figure, but at least five runs (default: 5)'
    )
    parser.add_argument('--threads', type=int, metavar='N', help="of the CPU (default: torch's choice)")
    parser.add_argument('--device', default='cuda', help='where to run (default: cuda, or the CPU if there is none)')
    parser.add_argument(
        '--plot', type=Path, metavar='FILE', help='draw time against the ImageNet accuracy reported for the models'
    )
    parser.add_argument('--results', type=Path, metavar='FILE', help='write the figures to FILE.csv or FILE.json')
    parser.add_argument(
        '--loader',
        nargs=argparse.REMAINDER,
        metavar='OPTION',
        help='in place of all this: whether the loader or the model limits the training that these options of train.py '
        'start; --seconds may be among them',
    )

    def run(args: argparse.Namespace) -> int:
        if args.loader is None:
            from .bench.command import run

            args.names = _with_attention(args)
            return run(args)
        if changed := [
            name
            for name, value in vars(args).items()
            if name != 'loader' and value != parser.get_default(name) and value != []
        ]:
            raise UsageError(f'--loader takes the options of train.py after it, and none before: {", ".join(changed)}')
        from .training.loader_bench import main

        return main(args.loader)

    return run


def run(parser: argparse.ArgumentParser) -> Command:
    """Run another script, such as timm's own train.py, with the zoo's models registered.

    Everything after the script is the script's. On several GPUs: torchrun … -m flatten_zoo run SCRIPT …
    """
    parser.add_argument('script', metavar='SCRIPT', help='Python script')
    parser.add_argument('arguments', nargs=argparse.REMAINDER, metavar='…', help='its arguments')

    def run(args: argparse.Namespace) -> None:
        from .run_script import run_script

        run_script(args.script, args.arguments)

    return run


def train(parser: argparse.ArgumentParser) -> Command:
    """Train an image classifier: what train.py does, with the same options (--help lists them).

    In several processes: torchrun … -m flatten_zoo train …
    """
    return _program(parser, 'training.train')


def validate(parser: argparse.ArgumentParser) -> Command:
    """Measure an image classifier: what validate.py does, with the same options (--help lists them)."""
    return _program(parser, 'training.validate')


def train_dense(parser: argparse.ArgumentParser) -> Command:
    """Train a network for detection, segmentation, stereo or video: train-dense TASK, whose --help lists the options.

    In several processes: torchrun … -m flatten_zoo train-dense …
    """
    return _program(parser, 'dense.training.train')


def validate_dense(parser: argparse.ArgumentParser) -> Command:
    """Scores of what train-dense has trained: validate-dense FOLDER, with options (--help lists them).

    In several processes: torchrun … -m flatten_zoo validate-dense …
    """
    return _program(parser, 'dense.training.validate')


def predict_dense(parser: argparse.ArgumentParser) -> Command:
    """Pictures of images with what a network of train-dense finds in them: boxes and masks, or classes with a legend.

    Images that cannot be read are named at the end, with status 1; the others' pictures are kept.
    """
    parser.set_defaults(announcement='predicting')
    parser.add_argument('folder', type=Path, metavar='RUN', help='output folder of train-dense')
    parser.add_argument('images', nargs='+', type=Path, metavar='FILE|FOLDER', help='images, and folders of them')
    parser.add_argument(
        '-o', '--output', type=Path, default=Path('predictions'), metavar='FOLDER', help='(default: predictions)'
    )
    parser.add_argument('--device', default='cuda', help='where to run (default: cuda, or the CPU if there is none)')

    def run(args: argparse.Namespace) -> int:
        from .dense.training.predict import predict

        pictures, failures = predict(args.folder, args.images, args.output, args.device)
        print(f'{args.output}: {len(pictures)} pictures')
        for failure in failures:
            print(printable(failure), file=sys.stderr)
        return int(bool(failures))

    return run


def _program(parser: argparse.ArgumentParser, module: str) -> Command:
    """The way to a module that reads its options itself."""
    parser.add_argument('arguments', nargs='*')

    def run(args: argparse.Namespace) -> int:
        return importlib.import_module(f'.{module}', __package__).main(args.arguments)

    return run


COMMANDS: dict[str, Callable[[argparse.ArgumentParser], Command]] = {
    'complexity': complexity,
    'convert': convert,
    'push': push,
    'list': list_models,
    'info': info,
    'predict': predict,
    'train': train,
    'validate': validate,
    'train-dense': train_dense,
    'validate-dense': validate_dense,
    'predict-dense': predict_dense,
    'visualize': visualize,
    'linearize': linearize,
    'export': export,
    'bench': bench,
    'run': run,
}
PROGRAMS = ('train', 'validate', 'train-dense', 'validate-dense')  # which read their options themselves


@contextmanager
def _ends_with_its_reader() -> Iterator[None]:
    """Ends quietly where nobody reads what is printed any more, as in `flatten-zoo list | head -1`."""
    try:
        try:
            yield
        finally:
            print(end='', flush=True)
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python writes the rest at its end
            sys.exit(128 + 13)  # as a shell reports SIGPIPE
        raise  # it was of another pipe


@_ends_with_its_reader()
def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        argv: Arguments, without the name of the program; those of the process if None.

    Returns:
        The exit status: 2 after a mistake in the arguments.
    """
    parser = argparse.ArgumentParser(prog='flatten-zoo', description='Efficient-attention vision backbones for timm.')
    subparsers = parser.add_subparsers(metavar='COMMAND', dest='command', required=True)
    for name, command in COMMANDS.items():
        summary, _, _ = (command.__doc__ or '').partition('\n')
        # all words after a program are its arguments, --help too
        options: dict[str, Any] = {'add_help': False, 'prefix_chars': '\0'} if name in PROGRAMS else {}
        subparser = subparsers.add_parser(name, help=summary, description=command.__doc__, **options)
        subparser.set_defaults(run=command(subparser))
    args = parser.parse_args(argv)
    if 'announcement' in args:  # of what takes long, before the imports, which do too
        print(args.announcement.format_map(vars(args)), '…', file=sys.stderr)
    if vars(args).pop('command') in PROGRAMS:
        os.environ.setdefault('OMP_WAIT_POLICY', 'passive')  # spinning threads starve the loader's processes
    importlib.import_module('.weights', __package__)  # registers the networks, which `flatten_zoo` left to this
    return report_usage_errors(lambda: args.run(args))
