"""The options of `train.py` and `validate.py`: timm's names, meanings and defaults."""

import argparse

from .parser import KeyValues, Number, OptionParser, program

__all__ = ['REFUSED', 'train_parser', 'validate_parser']

_NAFLEX = 'left out: no model of the zoo is a NaFlex model'
_DISTILLATION = "left out: distillation is timm's own train.py's; `flatten-zoo run` trains with it"
_TORCHSCRIPT = 'left out with TorchScript, which torch gives up: use --torchcompile'

REFUSED = {
    **dict.fromkeys(
        (
            'naflex_loader',
            'naflex_train_seq_lens',
            'naflex_max_seq_len',
            'naflex_patch_sizes',
            'naflex_patch_size_probs',
            'naflex_loss_scale',
            'naflex_patchify_channels_first',
        ),
        _NAFLEX,
    ),
    **dict.fromkeys(
        (
            'kd_model_name',
            'kd_distill_type',
            'kd_loss_type',
            'distill_loss_weight',
            'task_loss_weight',
            'kd_temperature',
            'kd_student_feature_dim',
            'kd_teacher_feature_dim',
            'kd_token_distill_type',
        ),
        _DISTILLATION,
    ),
    **dict.fromkeys(('torchscript', 'fuser', 'aot_autograd'), _TORCHSCRIPT),
}

REAL = Number(float)
NOT_NEGATIVE = Number(float, least=0)
POSITIVE = Number(float, above=0)
FRACTION = Number(float, least=0, most=1)
PART = Number(float, above=0, most=1)
WHOLE = Number(int, least=0)
COUNT = Number(int, least=1)
MOST_WORKERS = 256
MOST_VIEWS = 10

INTERPOLATIONS = ('bilinear', 'bicubic', 'nearest', 'lanczos', 'box', 'hamming')


def train_parser() -> OptionParser:
    """Parser of `train.py`."""
    parser = OptionParser(REFUSED, prog=program('train'), description='Train an image classifier.')
    _dataset_options(parser, train=True)
    _model_options(parser)
    _input_options(parser)
    _loader_options(parser)
    _numerics_options(parser, train=True)
    _optimizer_options(parser)
    _schedule_options(parser)
    _augmentation_options(parser)
    _size_options(parser)
    _mixing_options(parser)
    _regularisation_options(parser)
    _ema_options(parser)
    _distribution_options(parser)
    _output_options(parser)
    return parser


def validate_parser() -> OptionParser:
    """Parser of `validate.py`."""
    parser = OptionParser(
        REFUSED,
        prog=program('validate'),
        description='Measure the accuracy of an image classifier: a model by its name with --pretrained or '
        '--checkpoint FILE, or a run of train.py with --checkpoint FOLDER, whose args.yaml then says '
        'which model, data and image size.',
    )
    _dataset_options(parser, train=False)
    group = parser.add_argument_group('model')
    group.add_argument(
        '--model',
        '-m',
        default='dpn92',
        metavar='NAME',
        help="model, by its timm name; or a wildcard ('flatten_*'), 'all', or a file with a name on each line",
    )
    group.add_argument('--pretrained', action='store_true', help='load the released weights')
    group.add_argument(
        '--checkpoint',
        default='',
        type=str,
        metavar='PATH',
        help='checkpoint file, or output folder of train.py (its best checkpoint is taken)',
    )
    group.add_argument('--use-ema', action='store_true', help="take the checkpoint's averaged weights")
    _head_options(group)
    group.add_argument('--test-pool', action='store_true', help='test-time pooling of larger images')
    group.add_argument('--reparam', action='store_true', help="fold the model's training-time branches first")
    _input_options(parser)
    group = parser.add_argument_group('evaluation input')
    group.add_argument('--use-train-size', action='store_true', help="the model's training size, not its test size")
    group.add_argument('--crop-mode', type=str, choices=('squash', 'border', 'center'), help='how to crop')
    group.add_argument('--crop-border-pixels', type=WHOLE, metavar='N', help='pixels to cut off every border')
    group.add_argument(
        '--real-labels', default='', type=str, metavar='FILE', help='JSON file of the reassessed ImageNet labels'
    )
    group.add_argument(
        '--valid-labels',
        default='',
        type=str,
        metavar='FILE',
        help='file with the indices of the classes to choose among, for data with some of the classes',
    )
    group.add_argument(
        '--tf-preprocessing', action='store_true', help='decode and resize as TensorFlow does (needs tensorflow)'
    )
    group.add_argument('-b', '--batch-size', type=COUNT, default=256, metavar='N', help='images per batch')
    group.add_argument(
        '--metrics-avg',
        type=str,
        choices=('micro', 'macro', 'weighted'),
        help='also precision, recall and F1, so averaged over the classes',
    )
    group.add_argument('--num-gpu', type=COUNT, default=1, metavar='N', help='GPUs of this machine that share a batch')
    _views_option(group)
    group.add_argument('--retry', action='store_true', help='try smaller batches where memory does not suffice')
    _loader_options(parser)
    _numerics_options(parser, train=False)
    group = parser.add_argument_group('output')
    group.add_argument('--log-freq', type=COUNT, default=10, metavar='N', help='batches between log lines')
    group.add_argument('--results-file', type=str, default='', metavar='FILE', help='write the results there')
    group.add_argument('--results-format', type=str, default='csv', choices=('csv', 'json'), help='as which format')
    return parser


def _dataset_options(parser: OptionParser, train: bool) -> None:
    group = parser.add_argument_group('dataset')
    group.add_argument('data', nargs='?', metavar='DIR', help='data folder, the same as --data-dir')
    group.add_argument('--data-dir', metavar='DIR', help='folder (or tar file) of the data')
    group.add_argument(
        '--dataset',
        default='',
        metavar='NAME',
        help='PREFIX/NAME with prefix torch, hfds, hfids, tfds or wds; '
        'without it, --data-dir holds a folder (or SPLIT.tar) per split with a folder of images per class',
    )
    if train:
        group.add_argument('--train-split', default='train', metavar='NAME', help='split to train on')
        group.add_argument('--val-split', default='validation', metavar='NAME', help="split to validate on, '': none")
        group.add_argument('--train-num-samples', type=COUNT, metavar='N', help='training images, for streams')
        group.add_argument('--val-num-samples', type=COUNT, metavar='N', help='validation images, for streams')
    else:
        group.add_argument('--split', default='validation', metavar='NAME', help='split to validate on')
        group.add_argument('--num-samples', type=COUNT, metavar='N', help='images, for streams')
    group.add_argument('--dataset-download', action='store_true', help='download the data if its source allows it')
    group.add_argument('--class-map', default='', type=str, metavar='FILE', help='class names in order of index')
    group.add_argument('--input-img-mode', type=str, metavar='MODE', help='PIL mode; RGB, or L for one channel')
    group.add_argument('--input-key', type=str, metavar='KEY', help='name of the image in a record')
    group.add_argument('--target-key', type=str, metavar='KEY', help='name of the class in a record')
    group.add_argument(
        '--dataset-trust-remote-code', action='store_true', help="let a Hugging Face dataset's own code run"
    )


def _model_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('model')
    group.add_argument('--model', default='resnet50', type=str, metavar='NAME', help='model, by its timm name')
    group.add_argument('--pretrained', action='store_true', help='start from the released weights')
    group.add_argument('--pretrained-path', type=str, metavar='FILE', help='a local file in place of the released one')
    group.add_argument(
        '--initial-checkpoint', default='', type=str, metavar='FILE', help='load this checkpoint into the new model'
    )
    group.add_argument(
        '--resume',
        default='',
        type=str,
        metavar='FILE',
        help="continue a run from this checkpoint, or this output folder's last one and with its options; 'auto': from "
        "the experiment's own last one, if there is one yet",
    )
    group.add_argument(
        '--no-resume-opt', action='store_true', help="do not continue with the checkpoint's optimizer state"
    )
    _head_options(group)
    group.add_argument('--head-init-scale', type=REAL, metavar='X', help='factor on the initial classifier weights')
    group.add_argument('--head-init-bias', type=REAL, metavar='X', help='initial classifier bias')


def _head_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--attention',
        type=str,
        choices=('focused_linear', 'efficient'),
        help='give the model this linear attention, after its released weights are loaded',
    )
    group.add_argument(
        '--attention-where', type=str, metavar='N,N-N', help='blocks or stages that get it, as in 0-5 or 0-3,8; or all'
    )
    group.add_argument('--num-classes', type=COUNT, metavar='N', help="classes; the model's own number if not given")
    group.add_argument('--gp', type=str, metavar='TYPE', help='global pooling: fast, avg, max, avgmax, …')
    group.add_argument('--fast-norm', action='store_true', help="timm's fast norm layers where they exist")
    group.add_argument(
        '--model-kwargs',
        nargs='*',
        default={},
        action=KeyValues,
        metavar='KEY=VALUE',
        help='more arguments of the model',
    )


def _input_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('input')
    group.add_argument('--img-size', type=COUNT, metavar='N', help='side of the square image')
    group.add_argument('--in-chans', type=COUNT, metavar='N', help='channels of the image')
    group.add_argument('--input-size', nargs=3, type=COUNT, metavar='N', help='channels, height and width')
    group.add_argument('--crop-pct', type=PART, metavar='X', help='side of the crop / side of the resized image')
    group.add_argument('--mean', type=REAL, nargs='+', metavar='X', help='mean of each channel')
    group.add_argument('--std', type=POSITIVE, nargs='+', metavar='X', help='standard deviation of each channel')
    group.add_argument(
        '--interpolation',
        default='',
        type=str,
        metavar='NAME',
        choices=('', *INTERPOLATIONS),
        help='how to resize: ' + ', '.join(INTERPOLATIONS),
    )


def _loader_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('device and loading')
    group.add_argument('--device', default='cuda', type=str, help='device; for cuda, the CPU where there is none')
    group.add_argument(
        '-j',
        '--workers',
        type=Number(int, least=0, most=MOST_WORKERS),
        default=4,
        metavar='N',
        help='processes that load images',
    )
    group.add_argument('--pin-mem', action='store_true', help='pin memory for the transfer to the device')
    group.add_argument('--no-prefetcher', action='store_true', help='no asynchronous transfer to the device')
    group.add_argument('--seed', type=Number(int, least=0, most=2**31 - 1), default=42, help='random seed')


def _numerics_options(parser: OptionParser, train: bool) -> None:
    group = parser.add_argument_group('numerics and memory')
    group.add_argument('--amp', action='store_true', help='mixed precision')
    group.add_argument(
        '--amp-dtype',
        type=str,
        default='float16',
        choices=('float16', 'bfloat16'),
        help='lower precision of --amp; float16 scales the loss, bfloat16 needs no such thing',
    )
    group.add_argument(
        '--model-dtype',
        type=str,
        choices=('float32', 'float16', 'bfloat16'),
        help='type of weights and images throughout, without --amp',
    )
    group.add_argument('--channels-last', action='store_true', help='memory layout with the channels last')
    group.add_argument(
        '--torchcompile',
        nargs='?',
        type=str,
        const='inductor',
        metavar='BACKEND',
        help='compile the model; with inductor if no backend is given',
    )
    group.add_argument('--torchcompile-mode', type=str, metavar='MODE', help='mode of the compilation')
    if train:
        group.add_argument(
            '--grad-accum-steps', type=COUNT, default=1, metavar='N', help='batches whose gradients make one update'
        )
        group.add_argument(
            '--grad-checkpointing', action='store_true', help='compute activations twice to save their memory'
        )
        group.add_argument(
            '--device-modules', type=str, nargs='+', metavar='MODULE', help='modules to import for other devices'
        )


def _optimizer_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('optimizer')
    group.add_argument('--opt', default='sgd', type=str, metavar='NAME', help="optimizer, by timm's name")
    group.add_argument('--opt-eps', type=NOT_NEGATIVE, metavar='X', help='epsilon')
    group.add_argument('--opt-betas', type=FRACTION, nargs='+', metavar='X', help='betas')
    group.add_argument('--momentum', type=FRACTION, default=0.9, metavar='X', help='momentum')
    group.add_argument('--weight-decay', type=NOT_NEGATIVE, default=2e-5, metavar='X', help='weight decay')
    group.add_argument('--clip-grad', type=POSITIVE, metavar='X', help='limit of the gradient')
    group.add_argument('--clip-mode', type=str, default='norm', choices=('norm', 'value', 'agc'), help='of its what')
    group.add_argument('--layer-decay', type=PART, metavar='X', help='learning-rate factor from layer to layer')
    group.add_argument('--layer-decay-min-scale', type=FRACTION, default=0, metavar='X', help='its lower limit')
    group.add_argument(
        '--layer-decay-no-opt-scale', type=FRACTION, metavar='X', help='do not train layers with a smaller factor'
    )
    group.add_argument(
        '--opt-kwargs',
        nargs='*',
        default={},
        action=KeyValues,
        metavar='KEY=VALUE',
        help='more arguments of the optimizer',
    )


def _schedule_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('schedule')
    group.add_argument(
        '--sched',
        type=str,
        default='cosine',
        metavar='NAME',
        help='schedule of the learning rate',
        choices=('cosine', 'tanh', 'step', 'multistep', 'plateau', 'poly', 'wsd', 'rsqrt', 'constant', 'none'),
    )
    group.add_argument('--sched-on-updates', action='store_true', help='step it on every update, not every epoch')
    group.add_argument('--lr', type=NOT_NEGATIVE, metavar='X', help='learning rate; from --lr-base if not given')
    group.add_argument('--lr-base', type=NOT_NEGATIVE, default=0.1, metavar='X', help='learning rate at --lr-base-size')
    group.add_argument('--lr-base-size', type=COUNT, default=256, metavar='N', help='images per update of --lr-base')
    group.add_argument(
        '--lr-base-scale',
        type=str,
        default='',
        choices=('', 'linear', 'sqrt'),
        help='how it scales with the images per update; sqrt for adaptive optimizers and linear otherwise if not given',
    )
    group.add_argument(
        '--lr-noise', type=FRACTION, nargs='+', metavar='X', help='noise on and off, in parts of the run'
    )
    group.add_argument(
        '--lr-noise-pct', type=Number(float, least=0.01, most=1), default=0.67, metavar='X', help='limit of the noise'
    )
    group.add_argument(
        '--lr-noise-std', type=Number(float, least=0, most=10), default=1.0, metavar='X', help='deviation of the noise'
    )
    group.add_argument(
        '--lr-cycle-mul', type=Number(float, least=1), default=1.0, metavar='X', help='factor on the cycle length'
    )
    group.add_argument('--lr-cycle-decay', type=FRACTION, default=0.5, metavar='X', help='factor on each cycle')
    group.add_argument('--lr-cycle-limit', type=COUNT, default=1, metavar='N', help='number of cycles')
    group.add_argument('--lr-k-decay', type=POSITIVE, default=1.0, metavar='X', help='k of k-decay')
    group.add_argument('--warmup-lr', type=NOT_NEGATIVE, default=1e-5, metavar='X', help='learning rate at the start')
    group.add_argument('--min-lr', type=NOT_NEGATIVE, default=0, metavar='X', help='smallest learning rate')
    group.add_argument('--epochs', type=COUNT, default=300, metavar='N', help='epochs to train')
    group.add_argument(
        '--epoch-repeats', type=NOT_NEGATIVE, default=0.0, metavar='X', help='passes per epoch, for streams'
    )
    group.add_argument('--start-epoch', type=WHOLE, metavar='N', help='first epoch')
    group.add_argument(
        '--decay-milestones', type=WHOLE, nargs='+', default=[90, 180, 270], metavar='N', help='epochs of multistep'
    )
    group.add_argument('--decay-epochs', type=POSITIVE, default=90, metavar='X', help='epochs between decays')
    group.add_argument('--warmup-epochs', type=WHOLE, default=5, metavar='N', help='epochs of warm-up')
    group.add_argument('--warmup-prefix', action='store_true', help='warm-up comes on top of --epochs')
    group.add_argument(
        '--cooldown-epochs', type=WHOLE, default=0, metavar='N', help='epochs at --min-lr after the rest'
    )
    group.add_argument('--patience-epochs', type=WHOLE, default=10, metavar='N', help='patience of plateau')
    group.add_argument('--decay-rate', '--dr', type=POSITIVE, default=0.1, metavar='X', help='factor of each decay')


def _augmentation_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('augmentation')
    group.add_argument('--no-aug', action='store_true', help='none at all')
    group.add_argument('--train-crop-mode', type=str, choices=('rrc', 'rkrc', 'rkrr'), help='how to crop at random')
    group.add_argument('--scale', type=POSITIVE, nargs='+', default=[0.08, 1.0], metavar='X', help='area of the crop')
    group.add_argument(
        '--ratio', type=POSITIVE, nargs='+', default=[3 / 4, 4 / 3], metavar='X', help='its aspect ratio'
    )
    group.add_argument('--hflip', type=FRACTION, default=0.5, metavar='P', help='probability of a horizontal flip')
    group.add_argument('--vflip', type=FRACTION, default=0.0, metavar='P', help='probability of a vertical flip')
    group.add_argument('--color-jitter', type=NOT_NEGATIVE, default=0.4, metavar='X', help='colour jitter')
    group.add_argument('--color-jitter-prob', type=FRACTION, metavar='P', help='its probability; always if not given')
    group.add_argument('--grayscale-prob', type=FRACTION, metavar='P', help='probability of losing the colour')
    group.add_argument('--gaussian-blur-prob', type=FRACTION, metavar='P', help='probability of a blur')
    group.add_argument('--aa', type=str, metavar='POLICY', help="AutoAugment policy, 'original' or 'rand-m9-mstd0.5'")
    group.add_argument(
        '--aug-repeats',
        type=NOT_NEGATIVE,
        default=0,
        metavar='X',
        help='augmentations of each image, on several processes',
    )
    group.add_argument(
        '--aug-splits', type=WHOLE, default=0, metavar='N', help='augmentations of each image: 0 or >= 2'
    )
    group.add_argument('--reprob', type=FRACTION, default=0.0, metavar='P', help='probability of random erasing')
    group.add_argument('--remode', type=str, default='pixel', choices=('pixel', 'rand', 'const'), help='its filling')
    group.add_argument('--recount', type=COUNT, default=1, metavar='N', help='its regions')
    group.add_argument('--resplit', action='store_true', help='no random erasing in the first (clean) split')
    group.add_argument(
        '--train-interpolation',
        type=str,
        default='random',
        metavar='NAME',
        choices=('', 'random', *INTERPOLATIONS),
        help='how to resize training images: random, or as --interpolation',
    )
    group.add_argument(
        '--worker-seeding', type=str, default='all', choices=('all', 'part'), help='random generators to seed'
    )


def _size_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('several image sizes')
    group.add_argument(
        '--train-img-sizes', type=COUNT, nargs='+', metavar='N', help='sides of square images, one drawn for each batch'
    )
    group.add_argument(
        '--train-batch-sizes', type=COUNT, nargs='+', metavar='N', help='images per batch at each of them'
    )
    group.add_argument('--train-size-probs', type=NOT_NEGATIVE, nargs='+', metavar='P', help='how often each is drawn')
    group.add_argument(
        '--train-size-schedule',
        type=str,
        default='constant',
        choices=('constant', 'progressive'),
        help='progressive moves from the first size to the last over the epochs',
    )
    group.add_argument(
        '--train-size-schedule-spread',
        type=NOT_NEGATIVE,
        default=0.65,
        metavar='X',
        help='width of the progressive choice, in sizes',
    )
    group.add_argument(
        '--train-size-random-mix',
        type=FRACTION,
        default=0.1,
        metavar='P',
        help='part of it that is drawn from all sizes',
    )
    group.add_argument(
        '--train-batches-per-epoch', '--train-steps-per-epoch', type=COUNT, metavar='N', help='batches per epoch'
    )
    group.add_argument(
        '--variable-batch-loss-scale',
        type=str,
        default='none',
        choices=('none', 'sqrt', 'linear'),
        help='weigh the loss of a batch by (its size / --batch-size), or the square root of that',
    )


def _mixing_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('loss and mixing')
    group.add_argument('--smoothing', type=FRACTION, default=0.1, metavar='X', help='label smoothing')
    group.add_argument('--mixup', type=NOT_NEGATIVE, default=0.0, metavar='X', help='mixup alpha')
    group.add_argument('--cutmix', type=NOT_NEGATIVE, default=0.0, metavar='X', help='cutmix alpha')
    group.add_argument('--cutmix-minmax', type=PART, nargs='+', metavar='X', help='limits of the area cut')
    group.add_argument('--mixup-prob', type=FRACTION, default=1.0, metavar='P', help='probability of mixing')
    group.add_argument(
        '--mixup-switch-prob', type=FRACTION, default=0.5, metavar='P', help='of cutmix where both are on'
    )
    group.add_argument(
        '--mixup-mode', type=str, default='batch', choices=('batch', 'pair', 'elem'), help='what shares a mix'
    )
    group.add_argument('--mixup-off-epoch', type=WHOLE, default=0, metavar='N', help='no mixing from then on, 0: never')
    group.add_argument('--jsd-loss', action='store_true', help='Jensen-Shannon and cross-entropy, with --aug-splits')
    group.add_argument('--bce-loss', action='store_true', help='binary cross-entropy')
    group.add_argument('--bce-sum', action='store_true', help='summed, not averaged, over the classes')
    group.add_argument('--bce-target-thresh', type=FRACTION, metavar='X', help='make mixed targets 0 or 1 at this')
    group.add_argument('--bce-pos-weight', type=POSITIVE, metavar='X', help='weight of the positive term')


def _regularisation_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('regularisation and batch norm')
    group.add_argument('--drop', type=FRACTION, default=0.0, metavar='P', help='dropout')
    group.add_argument('--drop-connect', type=FRACTION, metavar='P', help='old name of --drop-path')
    group.add_argument('--drop-path', type=FRACTION, metavar='P', help='stochastic depth')
    group.add_argument('--drop-block', type=FRACTION, metavar='P', help='drop block')
    group.add_argument('--bn-momentum', type=FRACTION, metavar='X', help='batch-norm momentum')
    group.add_argument('--bn-eps', type=POSITIVE, metavar='X', help='batch-norm epsilon')
    group.add_argument('--split-bn', action='store_true', help='batch norm of its own for each augmentation split')


def _ema_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('average of the weights')
    group.add_argument('--model-ema', action='store_true', help='keep (and validate) a moving average of the weights')
    group.add_argument('--model-ema-force-cpu', action='store_true', help='on the CPU, where it is not validated')
    group.add_argument('--model-ema-decay', type=FRACTION, default=0.9998, metavar='X', help='its decay')
    group.add_argument('--model-ema-warmup', action='store_true', help='less decay at first')


def _distribution_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('several processes, started by torchrun')
    group.add_argument('--sync-bn', action='store_true', help='batch norm over the images of all processes')
    group.add_argument(
        '--dist-bn',
        type=str,
        default='reduce',
        choices=('reduce', 'broadcast', ''),
        help="batch-norm statistics after each epoch: the processes' mean, those of the first, or each its own",
    )
    group.add_argument(
        '--no-ddp-bb', action='store_true', help="do not give all processes the first one's buffers at every batch"
    )
    group.add_argument('--synchronize-step', action='store_true', help='wait for the device after every update')
    group.add_argument(
        '--local_rank',
        '--local-rank',
        type=Number(int),
        default=0,
        metavar='N',
        help='has no effect: the number of a process is taken from the environment',
    )


def _output_options(parser: OptionParser) -> None:
    group = parser.add_argument_group('evaluation and output')
    group.add_argument('-b', '--batch-size', type=COUNT, default=128, metavar='N', help='images per training batch')
    group.add_argument('-vb', '--validation-batch-size', type=COUNT, metavar='N', help='the same if not given')
    group.add_argument('--eval-metric', type=str, default='top1', choices=('top1', 'top5', 'loss'), help='best by what')
    _views_option(group)
    group.add_argument('--val-interval', type=COUNT, default=1, metavar='N', help='epochs between validations')
    group.add_argument('--log-interval', type=COUNT, default=50, metavar='N', help='batches between log lines')
    group.add_argument('--checkpoint-hist', type=COUNT, default=10, metavar='N', help='checkpoints to keep')
    group.add_argument(
        '--recovery-interval', type=WHOLE, default=0, metavar='N', help='updates between recovery checkpoints, 0: none'
    )
    group.add_argument(
        '--use-multi-epochs-loader',
        action='store_true',
        help="keep the loader's processes from epoch to epoch; a resumed run then has other random numbers",
    )
    group.add_argument('--log-wandb', action='store_true', help='log every epoch to Weights & Biases (needs wandb)')
    group.add_argument('--wandb-project', type=str, metavar='NAME', help='project there')
    group.add_argument('--wandb-tags', type=str, nargs='+', default=[], metavar='TAG', help='tags there')
    group.add_argument('--wandb-resume-id', type=str, default='', metavar='ID', help='run there to continue')
    group.add_argument(
        '--log-tensorboard',
        action='store_true',
        help='log every epoch for TensorBoard, in the output folder (needs tensorboard)',
    )
    group.add_argument('--save-images', action='store_true', help='save training batches at every log interval')
    group.add_argument('--output', default='', type=str, metavar='DIR', help='parent of the output, output/train')
    group.add_argument('--experiment', default='', type=str, metavar='NAME', help='folder in it; date, model and size')


def _views_option(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        '--tta',
        type=Number(int, least=0, most=MOST_VIEWS),
        default=0,
        metavar='N',
        help='validate on N views of each image (centre, corners, mirror images), up to 10, and average the outputs',
    )
