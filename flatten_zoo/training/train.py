"""Training from the first option to the last line of the report: `train.py`."""

import argparse
import datetime
import errno
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from timm.data import Mixup
from timm.task import TrainingTask
from timm.task.evaluator import evaluation_sample_limit
from timm.utils import random_seed, update_summary
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from tqdm import tqdm

from flatten_zoo.errors import UsageError
from flatten_zoo.models.linearized import with_attention
from flatten_zoo.weights.open import load_weights

from .continuing import (
    BEST,
    LAST,
    Checkpoints,
    find_resumed,
    first_epoch,
    last_checkpoint,
    read_saved,
    remove_unfinished,
)
from .data.datasets import Images, class_names, open_splits
from .data.loaders import evaluation_loader, input_config, training_loader
from .loop.model import build_training_model, check_batch_norm, check_fits, import_device_modules, resolve_device
from .loop.optimization import (
    Numerics,
    Settled,
    build_optimizer,
    build_scheduler,
    build_task,
    mixup_arguments,
    updates_per_epoch,
)
from .loop.sync_batch_norm import synchronize_batch_norm
from .loop.trainer import Divergence, Trainer, evaluate, remedies
from .options.checks import check_files, check_train_options, recorded_options
from .options.definitions import train_parser
from .options.parser import Options, write_options_file
from .processes import (
    Terminated,
    as_one,
    exit_status,
    first_of_machine_ahead,
    from_first,
    interrupts_between_batches,
    is_first,
    is_first_to_fail,
    join,
    raise_if_interrupted,
    rank,
    wait_for_all,
    world_size,
)
from .report import (
    draw_curves,
    figures_text,
    log,
    log_last_row,
    next_command,
    setup_logging,
    start_tensorboard,
    start_wandb,
    trim_summary,
)

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]  # a module elsewhere

__all__ = ['Run', 'assemble', 'carry_out', 'main']


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says.

    Args:
        argv: Command line without the program's name; `sys.argv` if None.

    Returns:
        Exit status: 0, or 130 after Ctrl-C, or 143 after SIGTERM, which first saves a recovery checkpoint.

    Raises:
        UsageError: What was asked for cannot be done.
    """
    setup_logging()
    with as_one():
        return train(argv)


def train(argv: Sequence[str] | None) -> int:
    """What `main` does, in each of the processes."""
    return carry_out(_one(argv))


def _one(argv: Sequence[str] | None) -> Iterator['Run']:
    run = prepare(parse(argv))
    yield run
    run.report()


def carry_out(runs: Iterable['Run'], ideas: Callable[[argparse.Namespace, float], str] = remedies) -> int:
    """Train runs one after the other, and end well however they end.

    Args:
        runs: Each is made when those before are done.
        ideas: What to try against divergence, from a run's options and its learning rate.

    Returns:
        Exit status, as that of `main`.

    Raises:
        UsageError: One cannot be made or has diverged, or there is no room for its output.
    """
    run = None
    try:
        for run in runs:
            with interrupts_between_batches():
                try:
                    run.train()
                except Terminated:
                    run.save_recovery()
                    raise
    except Divergence as e:
        assert run is not None  # nothing diverges before there is one
        raise UsageError(f'{e}; {ideas(run.args, run.settled.lr)}; {what_is_left(run)}') from e
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UsageError(f'cannot write the output: {e.strerror}; {what_is_left(run)}') from e
    except KeyboardInterrupt as e:
        bereft = world_size() > 1 and e.__cause__ is not None  # of another process, perhaps the first
        if is_first_to_fail() if bereft else is_first():
            log.warning('interrupted%s; %s', ' as another process has ended' if bereft else '', what_is_left(run))
        return exit_status(e)
    return 0


def parse(argv: Sequence[str] | None) -> Options:
    """The options; where `--resume` is a run's folder, those that are not given are the run's."""
    parser = train_parser()
    args = parser.parse_with_config(argv)
    if args.resume not in ('', 'auto') and os.path.isdir(args.resume):
        folder = Path(os.path.abspath(args.resume))
        run = recorded_options(folder, '--resume', parser, named=args)
        parser.set_defaults(**run | {'output': str(folder.parent), 'experiment': folder.name})
        args = parser.parse_with_config(argv)
        check_fits(args, max(folder.glob('*.pth.tar'), key=os.path.getsize, default=folder))
    check_train_options(args)
    if not args.resume:  # a recipe may name one that another recipe has yet to make
        check_files(args, 'initial_checkpoint')
    return args


@dataclass
class Run:
    """A training run, ready to start.

    Attributes:
        args: Options.
        settled: What follows from them.
        folder: Output folder.
        trainer: Trains an epoch.
        loader_eval: Validation batches, None without validation.
        saver: Keeps the checkpoints.
        epochs: Number of epochs, warm-up prefix and cooldown included.
        epoch: The current epoch, at first the one to start with.
        lock: Keeps other processes out of the folder, in the process that writes there.
        tensorboard: Where each row of the summary is logged as well, if anywhere.
    """

    args: argparse.Namespace
    settled: Settled
    folder: Path
    trainer: Trainer
    loader_eval: Any
    saver: Checkpoints
    epochs: int
    epoch: int
    lock: TextIO | None = None
    tensorboard: Any = None

    def train(self) -> None:
        """Train every epoch; validate, record and save after each."""
        started = time.monotonic()
        first = self.epoch
        for epoch in range(first, self.epochs):
            self.epoch = epoch
            raise_if_interrupted()
            label = f'epoch {epoch}/{self.epochs}'
            train_figures = self.trainer.train_epoch(epoch, label, partial(self.saver.save_recovery, epoch))
            figures = self._validate(epoch, label)
            best = self._record(epoch, train_figures, figures)
            elapsed = time.monotonic() - started
            left = elapsed / (epoch + 1 - first) * (self.epochs - epoch - 1)
            log.info(
                '%s  train loss %.4f  %s  best %s  %s elapsed, %s left',
                label,
                train_figures['loss'],
                figures_text(figures) if figures else 'not validated',
                best,
                tqdm.format_interval(elapsed),
                tqdm.format_interval(left),
            )

    def save_recovery(self) -> None:
        """Save what the current epoch has come to, if that is more than the last checkpoint has."""
        position = self.trainer.position
        if position is not None and position.batches:
            self.trainer.check()
            self.saver.save_recovery(self.epoch, position.batches)
            wait_for_all()  # the end of another process would end the one that writes

    def _validate(self, epoch: int, label: str) -> OrderedDict[str, float] | None:
        """Figures of the model, or of the average of its weights where there is one on the device."""
        last = epoch + 1 == self.epochs
        if self.loader_eval is None or ((epoch + 1) % self.args.val_interval and not last):
            return None
        task: Any = self.trainer.task
        figures = self._evaluate(task.get_eval_model(), f'{label} validation')
        if task.has_ema() and not self.args.model_ema_force_cpu:
            log.info('%s  %s without averaging', label, figures_text(figures))
            figures = self._evaluate(task.get_eval_model(ema=True), f'{label} validation of the average')
        return figures

    def _evaluate(self, model: nn.Module, label: str) -> OrderedDict[str, float]:
        evaluator = self.trainer.task.create_evaluator(max_samples=evaluation_sample_limit(self.loader_eval))
        if isinstance(model, DistributedDataParallel):
            model = model.module  # each process goes through its images by itself
        return evaluate(model, self.loader_eval, self.trainer.numerics, evaluator, label, self.args.log_interval)

    def _record(self, epoch: int, train_figures: Mapping[str, float], figures: Mapping[str, float] | None) -> str:
        """Write the summary's next row, the curves and the checkpoint, and set the next learning rate.

        Returns:
            The best figure so far and its epoch, in words.
        """
        args, trainer = self.args, self.trainer
        if is_first():
            self._record_figures(epoch, train_figures, figures)
        metric = figures[args.eval_metric] if figures else None
        if trainer.scheduler is not None:
            trainer.scheduler.step(epoch + 1, metric)
        trainer.go_to(epoch + 1)
        best, best_epoch = self.saver.save_checkpoint(epoch, metric)
        return 'unknown' if best is None else f'{args.eval_metric} {best:.4g} at epoch {best_epoch}'

    def _record_figures(
        self, epoch: int, train_figures: Mapping[str, float], figures: Mapping[str, float] | None
    ) -> None:
        trainer = self.trainer
        summary = self.folder / 'summary.csv'
        columns = figures or (self.loader_eval and dict.fromkeys(trainer.task.create_evaluator().metric_names, ''))
        update_summary(
            epoch, train_figures, columns, summary, lr=trainer.learning_rate(), log_wandb=self.args.log_wandb
        )
        if self.tensorboard is not None:
            log_last_row(self.tensorboard, summary)
        draw_curves(summary, self.folder / 'curves.png')

    def report(self) -> None:
        """Say what has come out, and where it is."""
        if not is_first():
            return
        if self.saver.best_epoch is not None:
            log.info('best %s %.4g at epoch %d', self.args.eval_metric, self.saver.best_metric, self.saver.best_epoch)
        names = (BEST, LAST, 'summary.csv', 'curves.png', 'args.yaml')
        names = [name for name in names if (self.folder / name).exists()]
        log.info('written to %s: %s', self.folder, ', '.join(names))
        log.info('next: %s', next_command(self.folder))


def prepare(args: argparse.Namespace) -> Run:
    """Build everything a run needs; the output folder comes last, so that bad input leaves none behind."""
    import_device_modules(args.device_modules)
    numerics = Numerics.from_options(args, join(resolve_device(args.device)))
    random_seed(args.seed)
    resumed: Path | None = from_first(find_resumed(args) if is_first() else None)
    checkpoint = read_saved(resumed) if resumed else None
    model = start_model(args, resumed)
    settled = Settled.from_options(args, model.num_classes)
    config = input_config(args, model)
    if 1 in (args.batch_size, *(args.train_batch_sizes or ())) and not args.aug_splits and world_size() == 1:
        check_batch_norm(model, config['input_size'])
    with first_of_machine_ahead(args.dataset_download):
        train_set, eval_set = open_splits(args, settled.num_classes, channels=config['input_size'][0])
    loader = training_loader(args, settled.num_classes, train_set, config, numerics)
    eval_batch, loader_eval = args.validation_batch_size or args.batch_size, None
    if eval_set is not None:
        loader_eval = evaluation_loader(args, eval_set, config, numerics, eval_batch, views=args.tta)

    model = numerics.place(model)
    if args.sync_bn and world_size() > 1:
        model = synchronize_batch_norm(model, numerics.device)
    task = build_task(args, model, numerics.device)
    folder = from_first(output_folder(args, config['input_size'][-1]) if is_first() else None)
    names = class_names(train_set)
    run = assemble(args, settled, numerics, model, task, loader, loader_eval, names, folder, resumed, checkpoint)
    log.info(
        '%s with %.2f M parameters on %s%s: %s images, %d classes, %s for training and %s for validation',
        with_attention(args.model, args.attention, args.attention_where),
        sum(p.numel() for p in model.parameters()) / 1e6,
        f'{world_size()} × ' if world_size() > 1 else '',
        numerics.device,
        ' × '.join(map(str, config['input_size'])),
        settled.num_classes,
        size_text(train_set),
        size_text(eval_set),
    )
    return run


def assemble(
    args: argparse.Namespace,
    settled: Settled,
    numerics: Numerics,
    model: nn.Module,
    task: TrainingTask,
    loader: Any,
    loader_eval: Any,
    label_names: list[str] | None,
    folder: Path,
    resumed: Path | None,
    checkpoint: dict[str, Any] | None,
) -> Run:
    """A run of a task that trains a model, which is placed and has the weights to start or go on with.

    Args:
        args, settled, numerics: Options, and what follows from them.
        model: What the optimizer changes.
        task: The model with its loss.
        loader, loader_eval: Batches.
        label_names: Names of the classes, if known.
        folder: Output folder.
        resumed: Checkpoint that the run continues from.
        checkpoint: What was read from it.
    """
    start = first_epoch(args, checkpoint)
    optimizer = build_optimizer(args, model, settled.lr)
    updates = updates_per_epoch(args, len(loader))
    scheduler, epochs = build_scheduler(args, optimizer, updates, start)
    mixup = mixup_arguments(args, settled.num_classes)
    lock = claim(folder, resumed) if is_first() and os.path.exists(folder) else None
    trainer = Trainer(
        args,
        settled.dist_bn,
        numerics,
        task,
        optimizer,
        scheduler,
        loader,
        mixup=Mixup(**mixup) if mixup and args.no_prefetcher else None,
        folder=folder,
    )
    trainer.updates = start * updates
    record = vars(args) | asdict(settled)
    saver = Checkpoints(trainer, record, label_names, folder)
    run = Run(args, settled, folder, trainer, loader_eval, saver, epochs, start, lock)
    if resumed and checkpoint is not None:
        saver.resume(resumed, checkpoint, start)
    start_output(run, record)
    return run


def what_is_left(run: Run | None) -> str:
    """Where a run that ends early can go on."""
    if run is None:
        return 'training had not begun'
    last = last_checkpoint(run.folder)
    return f'the last complete checkpoint is {last}' if last else 'there is no checkpoint yet'


def start_model(args: argparse.Namespace, resumed: Path | None) -> nn.Module:
    """The model with the weights to start with, the same in all processes; their random numbers differ from then on."""
    with first_of_machine_ahead(args.pretrained):
        model = build_training_model(args)
    if rank():
        random_seed(args.seed, rank())
    if resumed:
        load_weights(model, resumed, use_ema=False)
    elif args.initial_checkpoint:
        load_weights(model, args.initial_checkpoint, use_ema=None, adapt=True)
    return model


def start_output(run: Run, record: dict[str, Any]) -> None:
    """Make the output folder with the options in it, and begin the logs on Weights & Biases and for TensorBoard."""
    args, folder = run.args, run.folder
    if is_first():
        if args.log_wandb:
            start_wandb(args, record, folder.name)
        run.lock = run.lock or claim(folder)
        remove_unfinished(folder)
        trim_summary(folder / 'summary.csv', run.epoch)
        if args.log_tensorboard:
            run.tensorboard = start_tensorboard(folder, run.epoch)
        write_options_file(folder / 'args.yaml', record)
    wait_for_all()


def size_text(dataset: Images | None) -> str:
    """How many images there are, as far as that is known."""
    if dataset is None:
        return 'none'
    shares = world_size() if isinstance(dataset, IterableDataset) else 1
    return str(shares * len(dataset) or 'a stream')


def output_folder(args: argparse.Namespace, size: int) -> Path:
    """The folder for the run, which may not be there yet."""
    name = args.experiment or f'{datetime.datetime.now():%Y%m%d-%H%M%S}-{args.model.replace("/", "_")}-{size}'
    return Path(args.output or 'output/train', name)


def claim(folder: Path, resumed: Path | None = None) -> TextIO:
    """Make an output folder, and lock it against other processes until this one closes the returned file or ends.

    Args:
        folder: Output folder.
        resumed: Checkpoint that the run continues from.

    Raises:
        UsageError: The folder cannot be made, is another process's, or holds checkpoints of another run, or later ones
            than that to continue from.
    """
    lock = lock_folder(folder)
    last = last_checkpoint(folder)
    if last is not None and (resumed is None or last.resolve() != resumed.resolve()):
        raise UsageError(
            f"'{folder}' holds an earlier run: choose another --experiment, or continue it with --resume auto"
        )
    return lock


def lock_folder(folder: Path) -> TextIO:
    """Make an output folder, and lock it against other processes until this one closes the returned file or ends.

    Raises:
        UsageError: The folder cannot be made, or is another process's.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / '.lock').open('w')
    except OSError as e:
        raise UsageError(f"--output: cannot make the output folder '{folder}': {e.strerror}") from e
    try:
        if fcntl:  # unlike flock, lockf is not inherited by the loader's processes, which may outlive this one
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EAGAIN):
            raise UsageError(
                f"another process is training in '{folder}': wait for its end, or choose another folder"
            ) from e
        log.warning("'%s' cannot be locked (%s): start no second process there", folder, e.strerror)
    return lock
