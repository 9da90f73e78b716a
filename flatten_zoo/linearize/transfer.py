"""Attention transfer from the first option to the last line of the report: `flatten-zoo linearize`."""

import argparse
import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timm.models import get_model_args
from timm.task.evaluator import ClassificationEvaluator, evaluation_sample_limit
from timm.utils import random_seed
from torch import nn

from ..errors import UsageError
from ..images import two_sides
from ..models.linearized import with_attention
from ..training.continuing import find_resumed, read_saved
from ..training.data.loaders import evaluation_loader, input_config, training_loader
from ..training.loop.model import resolve_device
from ..training.loop.optimization import Numerics, Settled, share_gradients
from ..training.loop.trainer import evaluate
from ..training.options.definitions import train_parser
from ..training.options.parser import Options, read_options_file, write_options_file
from ..training.processes import as_one, from_first, is_first, join, rank
from ..training.report import log, setup_logging
from ..training.train import Run, assemble, carry_out
from ..weights import open_model, save_model, select_state_dict
from .data import open_images
from .hybrid import choose_kept, converted_copy, costs, keep_costliest, part_of
from .layers import LayerErrors, converted, trainable
from .report import Report, layers_table, speeds, speeds_table, write_report
from .tasks import Agreement, ErrorEvaluator, LayersTask, NetworkTask

__all__ = ['Settings', 'linearize']

PHASES = ('new', 'queries-keys', 'network')  # and the folders of their runs


@dataclass(frozen=True)
class Settings:
    """What attention transfer may be told.

    Attributes:
        attention: 'focused_linear', or for ViTs 'efficient', as in `replace_attention`.
        where: Parts to convert: indices of the blocks of a ViT, of the stages of the others; None for all.
        keep: Of these, how many keep softmax: those that err most after the layers have learned.
        budget: GMACs that the network may cost; parts keep softmax so that the others err least.
        budget_size: Side of the images that the budget is for, that of the network's own if None.
        img_size: Side, or height and width, of the images; what the network is made for if None.
        epochs: Passes over the images: of what is new in each layer; with queries and keys; of the whole network.
        lr: Learning rate of each of the three.
        parameters: What the last of them trains: 'all', or 'attention' that has been converted.
        temperature: Of the class scores of both networks, in the last phase.
        label_weight: Weight of the labels' cross-entropy there; 0 leaves them out.
        batch_size: Images per batch and process.
        augment: Learn from random crops and their mirror images, not from images as in evaluation.
        scale: Area of the crops, least and most.
        hflip: Probability of a mirror image.
        amp: 'bfloat16' or 'float16' for mixed precision, None for none.
        sizes: Sides of the images at which cost and speed are compared at the end; none to leave that out.
        seconds: Time to measure each of them.
        workers: Processes that load images.
        device: Where to run; for 'cuda', the CPU where there is none.
        seed: Random seed.
        log_interval: Batches between two lines of progress.
    """

    attention: str = 'focused_linear'
    where: Sequence[int] | None = None
    keep: int = 0
    budget: float | None = None
    budget_size: int | None = None
    img_size: Sequence[int] | None = None
    epochs: Sequence[int] = (1, 1, 2)
    lr: Sequence[float] = (1e-2, 1e-3, 2e-4)
    parameters: str = 'all'
    temperature: float = 1.0
    label_weight: float = 0.0
    batch_size: int = 64
    augment: bool = True
    scale: Sequence[float] = (0.35, 1.0)
    hflip: float = 0.5
    amp: str | None = None
    sizes: Sequence[int] = (224, 512, 1024)
    seconds: float = 2.0
    workers: int = 4
    device: str = 'cuda'
    seed: int = 42
    log_interval: int = 50

    def check(self) -> None:
        """Raises a `UsageError` for what cannot be."""
        wrong = [
            ('keep', self.keep < 0, 'must not be negative'),
            ('keep', self.keep and self.budget is not None, 'does not go with --budget, which chooses itself'),
            ('budget', self.budget is not None and not 0 < self.budget < float('inf'), 'must be positive'),
            ('budget_size', self.budget_size and self.budget is None, 'needs --budget'),
            ('budget_size', self.budget_size is not None and self.budget_size < 1, 'must be positive'),
            ('epochs', len(self.epochs) != 3 or min(self.epochs) < 0, 'must be three numbers of at least 0'),
            ('epochs', not any(self.epochs), 'leaves nothing to learn'),
            ('lr', len(self.lr) != 3 or not all(0 < x < float('inf') for x in self.lr), 'must be three, and positive'),
            ('parameters', self.parameters not in ('all', 'attention'), 'must be all or attention'),
            ('temperature', not 0 < self.temperature < float('inf'), 'must be positive'),
            ('label_weight', not 0 <= self.label_weight < float('inf'), 'must not be negative'),
            ('batch_size', self.batch_size < 1, 'must be positive'),
            (
                'scale',
                len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[-1],
                'must be the least and the most',
            ),
            ('hflip', not 0 <= self.hflip <= 1, 'must be from 0 to 1'),
            ('amp', self.amp not in (None, 'bfloat16', 'float16'), 'must be bfloat16 or float16'),
            ('sizes', any(size < 1 for size in self.sizes), 'must be positive'),
            ('seconds', not 0 < self.seconds < float('inf'), 'must be positive'),
            ('workers', self.workers < 0, 'must not be negative'),
            ('seed', self.seed < 0, 'must not be negative'),
            ('log_interval', self.log_interval < 1, 'must be positive'),
        ]
        for name, is_wrong, reason in wrong:
            if is_wrong:
                value = getattr(self, name)
                value = ' '.join(map(str, value)) if isinstance(value, Sequence | tuple) else value
                raise UsageError(f'--{name.replace("_", "-")} {value}: {reason}')


def linearize(teacher: nn.Module, data: str | Path, output: str | Path, **settings: Any) -> nn.Module | None:
    """Give a trained network linear attention that keeps what it knows, from images without labels.

    First every converted attention learns to give what the teacher's own gives for the same input; then parts that err
    most get their softmax back, if asked for; then the whole network learns the teacher's features and class scores.
    The same call again goes on where an earlier one was interrupted.

    Args:
        teacher: Trained network that `replace_attention` can convert; it stays as it is.
        data: Folder of images: with `train` and `validation`, which have a folder for each class, or any other, of
            which every tenth image is held out.
        output: Folder for what comes out: `model`, in timm's Hub layout; `report.json` and `report.png`; and a folder
            for each phase of learning, with `summary.csv`, `curves.png` and checkpoints.
        **settings: Those of `Settings`.

    Returns:
        The converted network, in inference mode; None after Ctrl-C.

    Raises:
        UsageError: What was asked for cannot be done.
    """
    status, student = transfer(teacher, data, output, Settings(**settings))
    return student


def transfer(
    teacher: nn.Module, data: str | Path, output: str | Path, settings: Settings
) -> tuple[int, nn.Module | None]:
    """What `linearize` does, with the exit status of the command before."""
    settings.check()
    setup_logging()
    with as_one():
        it = Transfer(teacher, Path(data), Path(output), settings)
        status = carry_out(it.phases(), remedies)
        return status, None if status else it.student.eval()


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status, as that of `train.py`."""
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Settings) if field.name in args}
    where = getattr(args, 'attention_where', None)
    name = with_attention(args.model, given.get('attention', Settings.attention), where)
    settings = Settings(**given, where=name.arguments.get('where'))
    settings.check()
    checkpoint = getattr(args, 'checkpoint', None)
    with as_one():
        teacher, _ = open_model(args.model, settings.img_size, False, checkpoint is None, checkpoint)
    return transfer(teacher, args.data, args.output, settings)[0]


def remedies(args: argparse.Namespace, lr: float) -> str:
    """What to try where learning has diverged."""
    return f'try a lower --lr than {lr:g} for this phase' + (
        ', or --amp bfloat16' if args.amp_dtype == 'float16' else ''
    )


@dataclass
class Transfer:
    """A transfer, from the teacher to what comes out.

    Attributes:
        teacher: Trained network; a copy of it on the device once it has begun.
        data: Folder of images.
        output: Output folder.
        settings: All the rest.
        student: The converted network.
        report: What has been found so far.
    """

    teacher: nn.Module
    data: Path
    output: Path
    settings: Settings
    student: nn.Module = field(init=False)
    report: Report = field(default_factory=Report, init=False)

    def phases(self) -> Iterator[Run]:
        """The runs, one for each phase; after the last everything is written."""
        settings = self.settings
        self.args = self._options()
        self.numerics = Numerics.from_options(self.args, join(resolve_device(settings.device)))
        random_seed(settings.seed)
        self.teacher = self.numerics.place(copy.deepcopy(self.teacher)).eval().requires_grad_(False)
        self.config = input_config(self.args, self.teacher)
        self.size = self.config['input_size'][1:]
        self._check_size()
        settled = {name: self.config[name] for name in ('crop_pct', 'interpolation', 'mean', 'std')}
        self.args = self.args.replace(**settled | {name: list(settled[name]) for name in ('mean', 'std')})
        self.student = self._convert(settings.where)
        names = LayerErrors(self.teacher, self.student).names
        parts = sorted({part_of(name) for name in names})
        self._check_hybrid(parts)
        learned, held_out, self.label_names = open_images(self.args, self.teacher.in_chans)
        self._check_labels()
        self.loader = training_loader(self.args, self.teacher.num_classes, learned, self.config, self.numerics)
        self.loader_eval = evaluation_loader(self.args, held_out, self.config, self.numerics, self.args.batch_size)
        if is_first():
            self._start_output()

        self.report.layers = {name: {} for name in names}
        self._measure('converted', self.student)
        for phase in PHASES[:2]:
            yield from self._run(phase, names)
        self._measure('layers', self.student)
        log.info('relative squared errors of the layers:\n%s', layers_table(self.report))
        kept = self._kept(parts)
        if kept:
            self._keep(kept, sorted(set(parts) - set(kept)))
        self.report.kept = kept
        yield from self._run(PHASES[2], names)
        self._measure('network', self.student)
        if is_first():
            self._write()

    def _options(self) -> Options:
        """The options of `train.py` that these settings are."""
        s, teacher = self.settings, self.teacher
        made_for = getattr(teacher.patch_embed, 'img_size', None) or teacher.pretrained_cfg['input_size'][1:]
        arguments = {key: list(x) if isinstance(x, tuple) else x for key, x in get_model_args(teacher).items()}
        return (
            train_parser()
            .parse_with_config([])
            .replace(
                model=teacher.pretrained_cfg['architecture'],
                num_classes=teacher.num_classes,
                in_chans=teacher.in_chans,
                gp=arguments.get('global_pool'),
                model_kwargs={
                    key: value
                    for key, value in arguments.items()
                    if key not in ('num_classes', 'in_chans', 'global_pool')
                    and isinstance(value, bool | int | str | float | list)
                },
                attention=s.attention,
                input_size=[teacher.in_chans, *(two_sides(s.img_size) if s.img_size else made_for)],
                data_dir=str(self.data),
                batch_size=s.batch_size,
                no_aug=not s.augment,
                scale=list(s.scale),
                hflip=s.hflip,
                color_jitter=0.0,
                amp=s.amp is not None,
                amp_dtype=s.amp or 'bfloat16',
                opt='adamw',
                weight_decay=0.0,
                clip_grad=1.0,
                sched_on_updates=True,
                smoothing=0.0,
                workers=s.workers,
                device=s.device,
                seed=s.seed,
                log_interval=s.log_interval,
                checkpoint_hist=1,
                output=str(self.output),
                resume='auto',
            )
        )

    def _convert(self, where: Sequence[int] | None) -> nn.Module:
        return converted_copy(self.teacher, self.settings.attention, where, self.size)

    def _check_size(self) -> None:
        """Whether the network takes images of that size."""
        made_for = getattr(self.teacher.patch_embed, 'img_size', None)
        if made_for and not getattr(self.teacher, 'dynamic_img_size', False) and tuple(made_for) != self.size:
            size = ' × '.join(map(str, made_for))
            raise UsageError(
                f'--img-size {self.settings.img_size}: this network is made for {size}; build it for the other'
            )

    def _check_hybrid(self, parts: list[int]) -> None:
        """Whether so many parts can be kept, or the budget met."""
        settings = self.settings
        if settings.keep >= len(parts):
            raise UsageError(
                f'--keep {settings.keep}: there are {len(parts)} parts to convert, and one at least has to be'
            )
        if settings.budget is not None:
            size = settings.budget_size or self.size[-1]
            self.macs, self.savings = costs(self.teacher, settings.attention, parts, self.size, size)
            least = self.macs - sum(max(saving, 0) for saving in self.savings.values())
            if not least <= settings.budget * 1e9 < self.macs:
                raise UsageError(
                    f'--budget {settings.budget:g}: at {size} pixels the network costs {self.macs / 1e9:.4g} GMACs, '
                    f'and with linear attention {least / 1e9:.4g} at least; the budget must be between these'
                )

    def _check_labels(self) -> None:
        classes = self.teacher.num_classes
        if self.settings.label_weight and len(self.label_names or ()) != classes:
            raise UsageError(
                f'--label-weight {self.settings.label_weight:g}: the network has {classes} classes, and '
                f"'{self.data}' {len(self.label_names) if self.label_names else 'none with names'}"
            )

    def _start_output(self) -> None:
        """Note the settings in the output folder, or hold them against those of an earlier start."""
        path = self.output / 'args.yaml'
        changeable = ('workers', 'device', 'sizes', 'seconds', 'log_interval')
        settings = {'model': self.args.model, 'data': str(self.data), **dataclasses.asdict(self.settings)}
        settings = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
        if path.is_file():
            earlier = read_options_file(path)
            for name, value in settings.items():
                if name not in changeable and earlier.get(name) != value:
                    raise UsageError(
                        f"'{self.output}' has begun with --{name.replace('_', '-')} {earlier.get(name)}, not {value}: "
                        f'choose another folder with -o, or remove it'
                    )
        self.output.mkdir(parents=True, exist_ok=True)
        write_options_file(path, settings)

    def _evaluate(self, model: nn.Module, evaluator: Any, label: str) -> OrderedDict[str, float]:
        return evaluate(model, self.loader_eval, self.numerics, evaluator, label, self.args.log_interval)

    def _measure(self, when: str, student: nn.Module) -> None:
        """Errors of the layers, agreement with the teacher, and accuracies if there are labels."""
        limit = {'max_samples': evaluation_sample_limit(self.loader_eval)}
        device = self.numerics.device
        layers = LayerErrors(self.teacher, student)
        figures = self._evaluate(layers, ErrorEvaluator(layers.names, device, **limit), f'errors, {when}')
        for name in layers.names:
            self.report.layers[name][when] = figures[name]
        agreement = Agreement(self.teacher, student)
        figures = self._evaluate(agreement, agreement.evaluator(device, **limit), f'agreement, {when}')
        if self.teacher.num_classes:
            self.report.agreement[when] = figures['top1']
            log.info('%s: the same class as the teacher for %.2f %% of the held-out images', when, figures['top1'])
        else:
            self.report.feature_error[when] = figures['features']
        if self.label_names and len(self.label_names) == self.teacher.num_classes:
            models = {when: student} if self.report.accuracy else {'teacher': self.teacher, when: student}
            for name, model in models.items():
                figures = self._evaluate(model, ClassificationEvaluator(device, **limit), f'accuracy, {name}')
                self.report.accuracy[name] = figures['top1']

    def _run(self, phase: str, names: list[str]) -> Iterator[Run]:
        """The run of a phase, with what it may change set free; none where there is nothing to do."""
        settings, index = self.settings, PHASES.index(phase)
        names = [name for name in names if part_of(name) not in (self.report.kept or ())]
        epochs, what = settings.epochs[index], settings.parameters if phase == 'network' else phase
        where = get_model_args(self.student).get('where')
        with trainable(self.student, names, what) as chosen:
            if not epochs or not chosen:
                return
            args = self.args.replace(
                attention_where=None if where is None else ','.join(map(str, where)),
                experiment=phase,
                epochs=epochs,
                lr=settings.lr[index],
                warmup_epochs=int(epochs > 4),
                warmup_lr=settings.lr[index] / 10,
                eval_metric='top1' if phase == 'network' and self.teacher.num_classes else 'loss',
            )
            log.info('phase %s: %d tensors, at a learning rate of %g', phase, len(chosen), args.lr)
            resumed = from_first(find_resumed(args) if is_first() else None)
            checkpoint = read_saved(resumed) if resumed else None
            if checkpoint:
                self.student.load_state_dict(select_state_dict(checkpoint, False))
            random_seed(settings.seed + index, rank())  # a start at this phase is like one that comes to it
            device = self.numerics.device
            if phase == 'network':
                task = NetworkTask(self.teacher, self.student, device, settings.temperature, settings.label_weight)
            else:
                task = LayersTask(self.teacher, self.student, device)
            yield assemble(
                args,
                Settled.from_options(args, self.teacher.num_classes),
                self.numerics,
                self.student,
                share_gradients(args, task, self.student, device),
                self.loader,
                self.loader_eval,
                self.label_names,
                self.output / phase,
                resumed,
                checkpoint,
            )

    def _kept(self, parts: list[int]) -> list[int]:
        """The parts that keep softmax."""
        errors = dict.fromkeys(parts, 0.0)
        for name, figures in self.report.layers.items():
            errors[part_of(name)] += figures['layers']
        if self.settings.budget is None:
            return keep_costliest(errors, self.settings.keep)
        affordable = self.settings.budget * 1e9 - (self.macs - sum(self.savings.values()))
        return choose_kept(errors, self.savings, affordable)

    def _keep(self, kept: list[int], linear: list[int]) -> None:
        """Give parts their softmax back, and keep what the others have learned."""
        learned = self.student.state_dict()
        self.student = self._convert(linear)
        names = converted(self.teacher, self.student)
        own = self.student.state_dict()
        self.student.load_state_dict(
            {key: learned[key] if any(key.startswith(f'{name}.') for name in names) else own[key] for key in own}
        )
        log.info('softmax stays in %s', ', '.join(map(str, kept)))

    def _write(self) -> None:
        """The network and the report."""
        save_model(self.student, self.output / 'model', self.output.resolve().name)
        self.report.speeds = speeds(self.teacher, self.student, self.settings.sizes, self.settings.seconds)
        about = {
            'model': self.args.model,
            'data': str(self.data),
            'images': {'learned': len(self.loader.dataset), 'held_out': len(self.loader_eval.dataset)},
            **dataclasses.asdict(self.settings),
        }
        write_report(self.report, about, self.output)
        log.info('%s', layers_table(self.report))
        if self.report.speeds:
            log.info('%s', speeds_table(self.report.speeds))
        log.info('written to %s: model, report.json, report.png', self.output)
