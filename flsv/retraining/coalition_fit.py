"""The fit of one coalition's members by a copy of a run, and the scores that it returns.

The fit prints and logs nothing. Callbacks that only observe a run take no part, unless training reads them. Validations
run only if training depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelSummary, ProgressBar
from lightning.pytorch.cli import SaveConfigCallback

from flsv._lightning.double_precision import compute_in_double
from flsv._lightning.logged_values import GuardedValues
from flsv._lightning.patches import callbacks_of, find_loop, is_loop
from flsv._lightning.private import set_root
from flsv.configuration.federation_config import ClientEvaluation, Reporting
from flsv.core.needs import fields_of
from flsv.data import FederatedDataModule
from flsv.isolation.silent_logger import SilentLogger
from flsv.retraining.fit_scoring import CoalitionScoring
from flsv.retraining.training_job import TrainingJob
from flsv.retraining.training_needs import only_watches_the_run
from flsv.sampling.base import coalition_sampler
from flsv.scores.performance import Measures


def metrics_in_use(loop: Any, without: str = "") -> dict[str, Any]:
    """Return the metrics that a loop's strategies read. The strategy with the role ``without`` does not count."""
    names = {strategy.metric for role, strategy in loop.strategies.items() if role != without}
    return {name: metric for name, metric in loop.metrics.items() if name in names}


def only_watches_clients(loop: Any) -> bool:
    """Return whether clients train the same models without a loop's client algorithm: it only watches them, and no
    strategy reads a metric of its reports.
    """
    algorithm = loop.config.client_algorithm
    if algorithm is None or not algorithm.only_watches:
        return False
    attributes_in_use: set[Any] = set()
    for metric in metrics_in_use(loop).values():
        attributes_in_use.update(fields_of(metric).values())
    return attributes_in_use.isdisjoint(algorithm.reports)


def arguments_that_train(loop: Any, without: str = "") -> dict[str, Any]:
    """Return the arguments ``metrics`` and ``client_algorithm`` with which a copy of a loop trains the same models. The
    metric that the strategy with the role ``without`` reads does not count.
    """
    algorithm = None if only_watches_clients(loop) else loop.config.client_algorithm
    return {"metrics": metrics_in_use(loop, without), "client_algorithm": algorithm}


def prepare_coalition_fit(
    trainer: L.Trainer,
    module: L.LightningModule,
    data: FederatedDataModule,
    measures: Measures,
    job: TrainingJob,
    folder: str,
    make_scoring: Callable[..., CoalitionScoring] = CoalitionScoring,
) -> CoalitionScoring:
    """Prepare a copy of a run to train the coalition of ``job``. Lightning then writes its files into ``folder``.
    Return the callback that has the result after the fit.
    """
    data.restrict_to(job.members)
    scoring = make_scoring(data, measures, job)
    # The attributes are set in vars(...), where they hide properties and methods of the classes.
    vars(trainer)["callbacks"] = [scoring, *_callbacks_of_copy(trainer, job)]
    # list() has no callbacks: the trainer's already contain those that the module has configured.
    vars(module)["configure_callbacks"] = list
    write_into(folder, trainer)
    if job.in_double:
        compute_in_double(trainer)
    if not job.validates:
        trainer.limit_val_batches = 0
        trainer.num_sanity_val_steps = 0
        GuardedValues(trainer, scoring.refuse_logged_values)
    # The strategy's hook runs after those of the callbacks and of the module.
    vars(trainer.strategy)["on_train_end"] = partial(scoring.deliver, trainer)
    return scoring


def write_into(folder: str, trainer: L.Trainer) -> None:
    """Let a copied Trainer, its loggers and its checkpoint callbacks write into ``folder``."""
    if not _is_in(folder, trainer.default_root_dir):
        set_root(trainer, folder)
    # A callback may save checkpoints by an absolute path, where the run's checkpoints lie.
    vars(trainer)["save_checkpoint"] = partial(save_in_folder, trainer, folder)
    for logger in trainer.loggers:
        if isinstance(logger, SilentLogger):
            logger.redirect(folder)
    for callback in callbacks_of(trainer):
        if isinstance(callback, Checkpoint):
            _save_below(folder, callback)


def _save_below(folder: str, callback: Any) -> None:
    """Let a callback save its checkpoints in ``folder``, unless it does so already."""
    dirpath = getattr(callback, "dirpath", None)
    if not dirpath or not _is_in(folder, dirpath):
        callback.dirpath = folder


def save_in_folder(
    trainer: L.Trainer, folder: str, filepath: str | Path, *arguments: Any, **options: Any
) -> None:
    """Save a checkpoint at ``filepath``. If this path is outside of ``folder``, save it under the same name there."""
    if not _is_in(folder, filepath):
        filepath = Path(folder, Path(filepath).name)
    L.Trainer.save_checkpoint(trainer, filepath, *arguments, **options)


def _is_in(folder: str, path: str | Path) -> bool:
    return Path(path).absolute().is_relative_to(folder)


def _callbacks_of_copy(trainer: L.Trainer, job: TrainingJob) -> list[L.Callback]:
    """Return a coalition's callbacks. The FederatedLoop among them draws cohorts of members, and prints nothing."""
    callbacks = callbacks_that_train(trainer, job.keeps_checkpoints)
    for callback in callbacks:
        if is_loop(callback):
            _set_up_loop(callback, job)
    return callbacks


def _set_up_loop(loop: Any, job: TrainingJob) -> None:
    loop.set_arguments_of_copy(
        sampler=coalition_sampler(loop.config.sampler, job.members),
        seed=job.seed,
        # The metric that the run's sampler reads is not needed, because the sampler is replaced.
        **arguments_that_train(loop, without="sampler"),
        reporting=Reporting(table=False, figures=0, files=False),
        evaluation=ClientEvaluation(),
    )


def callbacks_that_train(trainer: L.Trainer, keeps_checkpoints: bool) -> list[L.Callback]:
    """Return a copied Trainer's callbacks that take part in training. With ``keeps_checkpoints`` those that save
    checkpoints or stop training are among them.
    """
    taking_part = []
    # A copy computes no values of clients, so no callback can monitor them.
    metric_names = set(find_loop(callbacks_of(trainer)).metrics)
    for callback in callbacks_of(trainer):
        if isinstance(callback, SaveConfigCallback | ModelSummary | ProgressBar):
            continue
        # The part before "/" is the metric's name.
        monitored_name, _, _ = str(getattr(callback, "monitor", None)).partition("/")
        can_monitor = monitored_name not in metric_names
        saves_or_stops = isinstance(callback, Checkpoint | EarlyStopping)
        is_kept = keeps_checkpoints and saves_or_stops and can_monitor
        if is_kept or not only_watches_the_run(callback):
            taking_part.append(callback)
    return taking_part
