"""The fit of one coalition's members by a copy of a run, and the scores that it returns.

The fit prints and logs nothing. Callbacks that only observe a run take no part, unless training reads them. Validations
run only if training depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelSummary, ProgressBar
from lightning.pytorch.cli import SaveConfigCallback
from torch import Tensor
from torch.nn.parameter import is_lazy

from flsv._lightning.double_precision import compute_in_double
from flsv._lightning.logged_values import GuardedValues
from flsv._lightning.patches import callbacks_of, find_loop, in_turn, is_loop
from flsv._lightning.private import set_root
from flsv._lightning.round_boundary import averaged_weights
from flsv._lightning.rounding import rounding_of
from flsv.configuration.federation_config import ClientEvaluation, Reporting
from flsv.core.needs import fields_of
from flsv.data import FederatedDataModule
from flsv.games.client_evaluation import ClientEvaluator
from flsv.games.make_evaluators import make_evaluators
from flsv.games.vector_evaluator import VectorEvaluator
from flsv.isolation.silent_logger import SilentLogger
from flsv.retraining.scoring import ModelScoring
from flsv.retraining.training_job import FitModels, FitResult, TrainingJob
from flsv.retraining.training_needs import only_watches_the_run
from flsv.sampling.base import coalition_sampler
from flsv.scores.performance import Measure, Measures
from flsv.server.round_server import NoModel
from flsv.utilities.plain_values import digest
from flsv.values.coalition_files import ScoredModel, measure_name


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


class CoalitionScoring(L.Callback):
    """Callback that scores a coalition's model before the first round, after the rounds that its job lists, and after
    training.
    """

    _untrained: ScoredModel | None = None
    # The last finite model, if training ended because no further model was finite.
    _last_model: ScoredModel | None = None
    _has_last_round_ended = False
    _start_hash = ""
    _initial_model: Tensor
    _has_read_logged_values = False

    def __init__(self, data: FederatedDataModule, measures: Measures, job: TrainingJob) -> None:
        self._data = data
        self._job = job
        self._measures = measures if job.scores_rounds else {}
        self._model_by_round: dict[int, ScoredModel] = {}
        # The models [P] themselves, after the rounds that the job names.
        self._vector_by_round: dict[int, Tensor] = {}
        self._first_updates: Mapping[int, Tensor] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rounding = rounding_of(trainer)
        fit_loop: Any = trainer.fit_loop
        # Models are scored at the same points as in the run: before all hooks of the first round, and after Lightning
        # has ended a round.
        fit_loop.on_advance_start = in_turn(
            partial(self._begin_round, trainer), fit_loop.on_advance_start
        )
        fit_loop.on_advance_end = in_turn(
            fit_loop.on_advance_end, partial(self._end_round, trainer)
        )

    def _begin_round(self, trainer: L.Trainer) -> None:
        if self._start_hash:
            return
        module = trainer.lightning_module
        loop: Any = find_loop(callbacks_of(trainer))
        self._start_hash = hash_of_start(module)
        self._initial_model = loop.space.read(module).cpu().clone()
        self._scoring = ModelScoring(
            self._measures, partial(self._make_evaluator, trainer, loop), copies_modules=False
        )
        if self._job.scores_untrained:
            self._untrained = self._scoring.score(module)

    def _make_evaluator(self, trainer: L.Trainer, loop: Any, measure: Measure) -> VectorEvaluator:
        device = trainer.lightning_module.device
        (evaluator,) = make_evaluators(
            trainer,
            loop.space,
            self._data.val_dataloader(),
            measures={"the utility": measure},
            num_classes=self._data.known_num_classes,
            seed=loop.state.seed,
            effects=self._job.effects.get(measure_name(measure)),
            make_client_evaluator=partial(
                ClientEvaluator, loop.space, loop.clients, self._data, device
            ),
        )
        return evaluator

    def _end_round(self, trainer: L.Trainer) -> None:
        round_index = trainer.current_epoch - 1
        self._keep_model(trainer, round_index)
        # The fit has as many rounds as the run, even if a callback wants to stop it earlier.
        is_last = round_index == self._job.rounds[-1]
        trainer.should_stop = is_last
        if is_last:  # `deliver` scores the model after all hooks at the end of training
            self._has_last_round_ended = True
            trainer.fit_loop.min_epochs = 0
        elif round_index in self._job.rounds:
            module = trainer.lightning_module
            with averaged_weights(trainer, module):
                self._model_by_round[round_index] = self._scoring.score(module)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """If training ends because a round has no finite model, score the global model after the last complete round,
        unless it was scored already.
        """
        last_round = trainer.current_epoch - 1
        if not isinstance(exception, NoModel) or last_round in self._model_by_round:
            return
        loop: Any = find_loop(callbacks_of(trainer))
        last_model = loop.state.model()
        for round_index in self._job.model_rounds:
            self._vector_by_round.setdefault(round_index, last_model.cpu().clone())
        loop.space.write(pl_module, last_model)
        self._last_model = self._scoring.score(pl_module)

    def deliver(self, trainer: L.Trainer) -> None:
        """Store and score the model after all hooks at the end of training."""
        last_round = self._job.rounds[-1]
        if not self._has_last_round_ended:
            raise RuntimeError(
                f"the fit has ended after {trainer.current_epoch} of {last_round + 1} rounds, because a callback or a "
                "hook has stopped it"
            )
        loop: Any = find_loop(callbacks_of(trainer))
        self._first_updates = loop.run.engine.first_updates
        self._model_by_round[last_round] = self._scoring.score(trainer.lightning_module)

    def _keep_model(self, trainer: L.Trainer, round_index: int) -> None:
        if round_index in self._job.model_rounds:
            loop: Any = find_loop(callbacks_of(trainer))
            self._vector_by_round[round_index] = loop.state.model().cpu().clone()

    def refuse_logged_values(self) -> None:
        """Note that the program reads logged values, although the fit does not validate, and raise NeedsValidation."""
        self._has_read_logged_values = True  # the program may catch the error
        raise NeedsValidation

    def result(self) -> FitResult:
        """Return the fit's result, after the end of training."""
        if not self._start_hash:
            raise RuntimeError("the fit has trained nothing")
        if self._has_read_logged_values:
            raise NeedsValidation
        return FitResult(
            scored=self._scored_models(),
            untrained=self._untrained,
            start_hash=self._start_hash,
            models=FitModels(self._initial_model, after_round=self._vector_by_round),
            rounding=self._rounding,
            first_updates=self._first_updates,
        )

    def _scored_models(self) -> list[ScoredModel]:
        """Return the model after each of the job's rounds. A round without a finite model has the last finite one."""
        models: list[ScoredModel] = []
        for round_index in self._job.rounds:
            model = self._model_by_round.get(round_index, self._last_model)
            if model is None and models:
                model = models[-1]
            if model is not None:
                models.append(model)
        return models


def hash_of_start(module: L.LightningModule) -> str:
    """Return a hash of a module's weights before training, including frozen weights."""
    weights = {name: weight for name, weight in module.named_parameters() if not is_lazy(weight)}
    return digest(weights).hex()[:16]


class NeedsValidation(Exception):
    """Error: training reads values that only validations log."""


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
    identity = loop.run_state.identity
    loop.set_arguments(
        sampler=coalition_sampler(loop.config.sampler, job.members),
        seed=job.seed,
        # The metric that the run's sampler reads is not needed, because the sampler is replaced.
        **arguments_that_train(loop, without="sampler"),
        reporting=Reporting(table=False, figures=0, files=False),
        evaluation=ClientEvaluation(),
    )
    loop.inherited_identity = identity  # otherwise all samples would be hashed again


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
