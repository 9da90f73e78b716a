"""Training from the first option to the last line of the report: `train.py`."""
import argparse
import datetime
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.data import Mixup
from timm.utils import get_outdir, random_seed, update_summary
from torch import nn
from torch.utils.data import Dataset
from tqdm import tqdm

from flatten_zoo.errors import UsageError

from .checkpoints import BEST, LAST, Checkpoints, load_weights
from .config import write_options_file
from .data import evaluation_loader, input_config, mixup_arguments, open_splits, training_loader
from .engine import Trainer, evaluate
from .interrupts import interrupts_between_batches, raise_if_interrupted
from .logs import log, setup_logging
from .models import build_training_model, resolve_device
from .options import check_train_options, train_parser
from .recipe import build_optimizer, build_scheduler, build_task
from .report import draw_curves, figures_text, next_command

__all__ = ['main']

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says.

    Args:
        argv: Command line without the program's name; `sys.argv` if None.

    Returns:
        Exit status: 0, or 130 after Ctrl-C.

    Raises:
        UsageError: What was asked for cannot be done.
    """
    setup_logging()
    run = None
    try:
        args = train_parser().parse_with_config(argv)
        check_train_options(args)
        run = prepare(args)
        with interrupts_between_batches():
            run.train()
    except KeyboardInterrupt:
        last = run and run.folder / LAST
        if last and last.exists():
            log.info('interrupted; the last complete checkpoint is %s', last)
        else:
            log.info('interrupted before the first checkpoint')
        return INTERRUPTED
    return 0


@dataclass
class Run:
    """A training run, ready to start.

    Attributes:
        args: Options.
        folder: Output folder.
        trainer: Trains an epoch.
        loader_eval: Validation batches, None without validation.
        saver: Keeps the checkpoints.
        epochs: Number of epochs, warm-up prefix and cooldown included.
    """
    args: argparse.Namespace
    folder: Path
    trainer: Trainer
    loader_eval: Any
    saver: Checkpoints
    epochs: int

    def train(self) -> None:
        """Train every epoch; validate, record and save after each; report at the end."""
        started = time.monotonic()
        first = self.args.start_epoch or 0
        for epoch in range(first, self.epochs):
            raise_if_interrupted()
            label = f'epoch {epoch}/{self.epochs}'
            train_figures = self.trainer.train_epoch(epoch, label)
            figures = self._validate(epoch, label)
            best = self._record(epoch, train_figures, figures)
            elapsed = time.monotonic() - started
            left = elapsed / (epoch + 1 - first) * (self.epochs - epoch - 1)
            log.info(
                '%s  train loss %.4f  %s  best %s  %s elapsed, %s left',
                label, train_figures['loss'], figures_text(figures) if figures else 'not validated', best,
                tqdm.format_interval(elapsed), tqdm.format_interval(left))
        self._report()

    def _validate(self, epoch: int, label: str) -> OrderedDict[str, float] | None:
        """Figures of the model, or of the average of its weights where there is one on the device."""
        last = epoch + 1 == self.epochs
        if self.loader_eval is None or ((epoch + 1) % self.args.val_interval and not last):
            return None
        task = self.trainer.task
        figures = self._evaluate(task.get_eval_model(), f'{label} validation')
        if task.has_ema() and not self.args.model_ema_force_cpu:
            log.info('%s  %s without averaging', label, figures_text(figures))
            figures = self._evaluate(task.get_eval_model(ema=True), f'{label} validation of the average')
        return figures

    def _evaluate(self, model: nn.Module, label: str) -> OrderedDict[str, float]:
        evaluator = self.trainer.task.create_evaluator()
        return evaluate(model, self.loader_eval, self.trainer.device, evaluator, label, self.args.log_interval)

    def _record(
            self,
            epoch: int,
            train_figures: OrderedDict[str, float],
            figures: OrderedDict[str, float] | None,
    ) -> str:
        """Write the summary's next row, the curves and the checkpoint, and set the next learning rate.

        Returns:
            The best figure so far and its epoch, in words.
        """
        args, trainer = self.args, self.trainer
        summary = self.folder / 'summary.csv'
        columns = figures or (self.loader_eval and dict.fromkeys(trainer.task.create_evaluator().metric_names, ''))
        update_summary(epoch, train_figures, columns, summary, lr=trainer.learning_rate())
        draw_curves(summary, self.folder / 'curves.png')
        metric = figures and figures[args.eval_metric]
        best, best_epoch = self.saver.save_checkpoint(epoch, metric)
        if trainer.scheduler is not None:
            trainer.scheduler.step(epoch + 1, metric)
        return 'unknown' if best is None else f'{args.eval_metric} {best:.4g} at epoch {best_epoch}'

    def _report(self) -> None:
        if self.saver.best_epoch is not None:
            log.info('best %s %.4g at epoch %d', self.args.eval_metric, self.saver.best_metric, self.saver.best_epoch)
        names = (BEST, LAST, 'summary.csv', 'curves.png', 'args.yaml')
        names = [name for name in names if (self.folder / name).exists()]
        log.info('written to %s: %s', self.folder, ', '.join(names))
        log.info('next: %s', next_command(self.folder))


def prepare(args: argparse.Namespace) -> Run:
    """Build everything a run needs; the output folder comes last, so that bad input leaves none behind."""
    device = resolve_device(args.device)
    random_seed(args.seed)
    args.data_dir, args.data = args.data or args.data_dir, None
    model = build_training_model(args)
    if args.initial_checkpoint:
        load_weights(model, args.initial_checkpoint, use_ema=None, adapt=True)
    args.num_classes = model.num_classes
    config = input_config(args, model)
    train_set, eval_set = open_splits(args, channels=config['input_size'][0])
    loader = training_loader(args, train_set, config, device)
    eval_batch = args.validation_batch_size or args.batch_size
    loader_eval = evaluation_loader(args, eval_set, config, device, eval_batch) if eval_set is not None else None

    task = build_task(args, model.to(device), device)
    optimizer = build_optimizer(args, model)
    scheduler, epochs = build_scheduler(args, optimizer, updates_per_epoch=len(loader))
    mixup = mixup_arguments(args)
    folder = output_folder(args, size=config['input_size'][-1])
    trainer = Trainer(
        args, device, task, optimizer, scheduler, loader,
        mixup=Mixup(**mixup) if mixup and args.no_prefetcher else None, folder=folder)
    trainer.updates = (args.start_epoch or 0) * len(loader)
    saver = Checkpoints(
        model, optimizer, args=args, task=task, checkpoint_dir=str(folder), recovery_dir=str(folder),
        decreasing=args.eval_metric == 'loss', max_history=args.checkpoint_hist)
    write_options_file(folder / 'args.yaml', args)
    log.info(
        '%s with %.2f M parameters on %s: %s images, %d classes, %s for training and %s for validation', args.model,
        sum(p.numel() for p in model.parameters()) / 1e6, device, ' × '.join(map(str, config['input_size'])),
        args.num_classes, size_text(train_set), size_text(eval_set))
    return Run(args, folder, trainer, loader_eval, saver, epochs)


def size_text(dataset: Dataset | None) -> str:
    """How many images there are, as far as that is known."""
    if dataset is None:
        return 'none'
    return str(len(dataset) or 'a stream')


def output_folder(args: argparse.Namespace, size: int) -> Path:
    """A new folder for the run; one that holds another run's checkpoints is refused.

    Raises:
        UsageError: The folder is taken, or cannot be made.
    """
    name = args.experiment or f'{datetime.datetime.now():%Y%m%d-%H%M%S}-{args.model.replace("/", "_")}-{size}'
    parent = args.output or 'output/train'
    if (Path(parent, name) / LAST).exists():
        raise UsageError(f"'{Path(parent, name)}' holds an earlier run: choose another --experiment, or remove it")
    try:
        return Path(get_outdir(parent, name))
    except OSError as e:
        raise UsageError(f"cannot make the output folder '{Path(parent, name)}': {e.strerror}") from e
