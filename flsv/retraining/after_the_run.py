"""TrainingAfterTheRun: trains coalitions when a run has ended, for metrics that need their models."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv._lightning.patches import callbacks_of, find_loop
from flsv._lightning.rounding import MAX_ROUNDING
from flsv.core.extension import MeasuredRun
from flsv.core.parameter_space import ParameterSpace
from flsv.core.ranks import ranks_of
from flsv.functional.shapley.predicted_outputs import favors_nobody
from flsv.games.members import Members, members_of
from flsv.games.output_score import OutputScore
from flsv.metrics.coalitions.design import MAX_VALUED_ROUNDS
from flsv.metrics.shadow import ShadowShapley
from flsv.models.classifier import ClassifierClient
from flsv.retraining.coalition_fit import metrics_in_use
from flsv.retraining.coalition_store import EARLIER_FOLDER, CoalitionStore
from flsv.retraining.copied_fits import CopiedFits, CopyOfRun, KeptRun
from flsv.retraining.fit_order import FitFailed, FitOrder, FitResult
from flsv.retraining.train_fits import CoalitionTraining
from flsv.retraining.trial import Findings
from flsv.scores.performance import CLASSIFICATION, ModelScore
from flsv.utilities.errors import ConfigurationError, listed
from flsv.values.coalition_files import Outputs, Training, measure_name, outputs_name
from flsv.values.query import Game

#: Seconds between two log lines about the trainings' progress.
PAUSE_SECONDS = 10.0
#: The most entries of outputs that are stored if all coalitions are trained. Only errors are computed from them then.
MAX_STORED_OUTPUTS = 2**24


def measures_of(metrics: Iterable[ShadowShapley]) -> dict[str, str | ModelScore]:
    """Return each performance measure by which the metrics score coalitions' models, ``{name: measure}``."""
    measures = {measure_name(metric.measured_by): metric.measured_by for metric in metrics}
    # One measure of a classifier's outputs brings all, since flsv retrain shows shares by each of them.
    has_classification_measure = any(name in CLASSIFICATION for name in measures)
    if has_classification_measure:
        measures |= {name: name for name in CLASSIFICATION}
    return measures


class NoValues(Exception):
    """Error: coalitions are missing, and why."""

    def __init__(self, reason: str, interrupted: bool = False) -> None:
        super().__init__(reason)
        self.interrupted = interrupted


@dataclass(eq=False)
class TrainingAfterTheRun:
    """Training of coalitions after a run, for metrics that need the coalitions' models."""

    metrics: Mapping[str, ShadowShapley]
    #: The coalitions to train, bool ``[K, n]``, the empty and the full one first.
    masks: Tensor
    store: CoalitionStore
    run_copy: CopyOfRun
    findings: Findings
    #: A hash of the weights from which a resumed run has started. Coalitions must start from the same.
    start_hash: str | None
    #: The run's model ``[P]`` after a round, which the coalition of all clients must reach.
    checked_round: int
    checked_model: Tensor | None
    space: ParameterSpace
    #: Seconds after which a coalition is given up if no round begins.
    max_wait: float
    #: Sentences on why the values may be wrong.
    consistency_warnings: list[str] = field(default_factory=list)
    _is_on_cpu: bool = False

    def train(self, run: MeasuredRun) -> Tensor:
        """Train the coalitions that the store lacks, and return all of them, bool ``[K, n]``.

        Raises:
            NoValues: the training was interrupted, or one has failed.
        """
        self._is_on_cpu = run.trainer.strategy.root_device.type == "cpu"
        _empty, grand, *_ = members_of(self.masks)
        if run.folder is not None:
            self.store.take_over(run.folder / EARLIER_FOLDER, Training(run.seed, grand))

        training = self._make_training(run)
        kept_run = KeptRun(run.trainer)
        try:
            self._train_missing(training, run)
            self._compare_with_run(training, self._coalitions_to_train(), run)
            self._compare_first_updates(training, run.trainer)
            if training.changed_tensors:
                paths = listed(sorted(training.changed_tensors))
                self.consistency_warnings.append(
                    f"while coalitions trained, {paths} changed, which the program keeps outside of the module, so "
                    "that one may have seen what another has left there"
                )
        except KeyboardInterrupt:
            done = self.store.progress(run.seed, self._coalitions_to_train())
            reason = f"Their training was interrupted: {done} are trained{_rest(run)}"
            raise NoValues(reason, interrupted=True) from None
        except ConfigurationError as error:  # the federation itself is trained
            advice = "flsv retrain trains the coalitions that are missing."
            raise NoValues(f"{error} {advice}") from error
        finally:
            has_changed_run = kept_run.restore()
        if has_changed_run:
            self.consistency_warnings.append(
                "the run's own module or optimizers have changed while coalitions were trained, and are as before. So "
                "coalitions share tensors with the run: copy what a data set or a global holds of the module"
            )
        for consistency_warning in self.consistency_warnings:
            rank_zero_warn(f"{', '.join(self.metrics)}: {consistency_warning}.")
        return self.masks

    def _coalitions_to_train(self) -> list[Members]:
        """Return the members of all coalitions but the empty and the full one, which are the run's."""
        return members_of(self.masks)[2:]

    def _train_missing(self, training: CoalitionTraining, run: MeasuredRun) -> None:
        """Train the coalitions that the store lacks, and then the halves that are chosen by their outputs."""
        # The run's own two are missing if a kill has lost them.
        coalitions = members_of(self.masks)
        with _Progress(run.trainer, self.store.missing(run.seed, coalitions)) as progress:
            training.train(coalitions, [run.seed], self.store, progress)
            halves = self._choose_halves(run)
            if len(halves):
                self.masks = torch.cat([self.masks, halves])
                training.train(self._coalitions_to_train(), [run.seed], self.store, progress)

    def _choose_halves(self, run: MeasuredRun) -> Tensor:
        """Return the halves that the metric chooses by the trained models' outputs, bool ``[K, n]``, often none."""
        metric, *_ = self.metrics.values()  # all metrics train the same coalitions
        game = game_of(metric, self.masks, self.store, run)
        if game.score is None:
            return self.masks[:0]
        return metric.next_coalitions(
            self.masks,
            self.store.scores(run.seed).outputs(game, self.store.rounds[-1]),
            logits=game.score.logits,
            names=run.data.client_names,
            seed=run.seed,
        )

    def _make_training(self, run: MeasuredRun) -> CoalitionTraining:
        """Return the training of coalitions by fits of the run's copies."""
        measures = measures_of(self.metrics.values())
        effects = {}
        for name, measure in measures.items():
            evaluator = run.games.evaluator_of(measure)
            if evaluator.effects is not None:
                effects[name] = evaluator.effects
        order = FitOrder(
            members=tuple(range(run.data.num_clients)),
            seed=run.seed,
            rounds=tuple(self.store.rounds),
            max_wait=self.max_wait,
            effects=effects,
        )
        return CoalitionTraining(
            CopiedFits(lambda seed: self.run_copy, measures),
            self.findings.applied(order),
            num_samples=run.data.num_samples.tolist(),
            start_hash=self.start_hash,
        )

    def _compare_with_run(
        self, training: CoalitionTraining, coalitions: Sequence[Members], run: MeasuredRun
    ) -> None:
        """Train the run's first rounds once more, and compare the models. If only validations make them equal, train
        the coalitions again with validations.
        """
        if run.changes:
            # The run's first rounds had other settings, so that its model is known to be another.
            self.consistency_warnings.append(
                f"the run has gone on with other settings ({'; '.join(run.changes)}), and coalitions are trained with "
                "the present ones from their first round on, so that the values are not quite the run's. flsv fit with "
                "the present settings from the start brings values of one history"
            )
            return

        ranks = ranks_of(run.trainer)
        consistency_warnings: list[str] = []
        needs_validations = False
        if ranks.rank == 0:
            consistency_warning = self._difference_by_repetition(training, training.is_whole)
            if consistency_warning is not None and not training.is_whole:
                consistency_warning = self._difference_by_repetition(training, is_whole=True)
                needs_validations = consistency_warning is None
            if consistency_warning is not None:
                consistency_warnings.append(consistency_warning)
        self.consistency_warnings += ranks.broadcast(
            0, consistency_warnings, "the comparison with the run"
        )
        if ranks.broadcast(0, needs_validations, "whether coalitions need validations"):
            training.is_whole = True
            self.store.discard(run.seed, coalitions)
            training.train(coalitions, [run.seed], self.store)

    def _compare_first_updates(self, training: CoalitionTraining, trainer: L.Trainer) -> None:
        """Compare clients' first updates in coalitions with the run's."""
        module = trainer.lightning_module
        weighs_classes = isinstance(module, ClassifierClient) and module.is_balanced
        excludes_callbacks = any(metric.excluded_callbacks for metric in self.metrics.values())
        if weighs_classes or excludes_callbacks:
            return  # coalitions are meant to train otherwise
        norms_of_rank = find_loop(callbacks_of(trainer)).run.engine.first_updates
        norms_of_run: dict[int, Tensor] = {}
        for norms_by_client in ranks_of(trainer).all_gather(norms_of_rank, "the first updates"):
            norms_of_run |= norms_by_client

        tolerance = 0.0 if self._is_on_cpu else MAX_ROUNDING
        changed_entry_by_client = {}
        for norms_by_client in training.first_updates.values():
            for client in norms_by_client.keys() & norms_of_run.keys():
                norms = norms_by_client[client]
                is_same = norms.isclose(norms_of_run[client], rtol=tolerance, atol=0.0)
                if not is_same.all():
                    first_entry = int(is_same.int().argmin())
                    changed_entry_by_client[client] = self.space.names[first_entry]
        if changed_entry_by_client:
            clients = listed(
                f"{client} ({name})" for client, name in changed_entry_by_client.items()
            )
            self.consistency_warnings.append(
                f"clients train otherwise in the first round of coalitions than in that of the run: {clients}. "
                "Training depends on who else takes part, or on what passes from client to client and the module does "
                "not hold, such as a global, a cache, a class attribute or a file"
            )

    def _difference_by_repetition(self, training: CoalitionTraining, is_whole: bool) -> str | None:
        """Train the run's first rounds by a coalition of all clients. Return a sentence if the model is not the run's.
        ``is_whole``: with validations.
        """
        if self.checked_model is None:
            return None
        order = replace(
            training.order,
            rounds=(self.checked_round,),
            scores_rounds=False,
            returns_models=True,
            is_whole=is_whole,
        )
        result: FitResult | FitFailed
        try:
            ((_, result),) = training.trainer.train([order])
        except ConfigurationError as error:  # the coalitions themselves are trained
            result = FitFailed(str(error))
        subject = (
            f"the coalition of all clients, trained once more for {self.checked_round + 1} rounds"
        )
        if isinstance(result, FitFailed):
            return f"{subject}, has failed ({result}), so that nothing shows that coalitions are like the run"
        difference = self._describe_difference(result, self.checked_model)
        if difference is None:
            return None
        return (
            f"{subject}, came to another model than the run ({difference}). Training depends on something that "
            "Trainer, module and callbacks do not hold, such as a global, a class attribute, an environment variable, "
            "a file or a data set that changes, and the values with it"
        )

    def _describe_difference(self, result: FitResult, expected_model: Tensor) -> str | None:
        """Describe how the model that a fit has trained differs from ``expected_model [P]``. None: it does not, or
        only by rounding on a GPU.
        """
        assert result.models is not None
        model = result.models.trained
        initial_model = result.models.initial
        if not self._is_on_cpu and not torch.equal(model, expected_model):
            rounding = result.rounding
            if rounding.unexplained_distance(model, expected_model, initial_model) is None:
                return None
        are_both_nan = model.isnan() & expected_model.isnan()
        differs = (model != expected_model) & ~are_both_nan
        if not differs.any():
            return None

        differs_by_name = self.space.unflatten(differs)
        first_name = next(name for name, entries in differs_by_name.items() if entries.any())
        distance = float((model - expected_model).double().norm())
        training_distance = float((expected_model - initial_model).double().norm())
        percent = 100 * distance / max(training_distance, 1e-30)
        return f"{percent:.2g} % of the way that training went, first in {first_name!r}"


def game_of(
    metric: ShadowShapley,
    masks: Tensor,
    store: CoalitionStore,
    run: MeasuredRun,
) -> Game:
    """Return the game of a metric, of coalitions ``masks [K, n]`` after those rounds of a store that it values."""
    due_rounds = metric.rounds_to_value(store.rounds[-1] + 1)
    rounds = [round_index for round_index in store.rounds if round_index in due_rounds]
    score = None
    if outputs_name(metric.measured_by) in store.measures_with_outputs:
        score = output_score(metric, run.games)
    return metric.game(masks, rounds, weights=run.weights, score=score)


def output_score(metric: ShadowShapley, games: Any) -> OutputScore | None:
    """Return the score of ``metric`` as a function of outputs, None if there are none."""
    evaluator = games.evaluator_of(metric.measured_by)
    return OutputScore.for_evaluator(evaluator, metric.measured_by)


def open_store(
    run: MeasuredRun,
    metrics: Mapping[str, ShadowShapley],
    masks: Tensor,
    start_hash: str,
    # A model's outputs, of as many entries as each has.
    outputs: Outputs,
) -> CoalitionStore:
    """Open the store of a run's coalitions ``masks``. A file of other settings is replaced."""
    names = list(measures_of(metrics.values()))
    num_coalitions, num_clients = masks.shape
    are_all_trained = num_coalitions == 2**num_clients
    measures_with_outputs = set()
    for metric in metrics.values():
        name = outputs_name(metric.measured_by)
        if (
            name not in outputs
            or not favors_nobody(masks)
            or output_score(metric, run.games) is None
        ):
            continue
        # If all are trained, no outputs are predicted. The values' errors are still computed from them, if it is cheap.
        num_entries = num_coalitions * MAX_VALUED_ROUNDS * outputs[name].numel()
        is_cheap = not metric.per_class and num_entries <= MAX_STORED_OUTPUTS
        if is_cheap or not are_all_trained:
            measures_with_outputs.add(name)
    return CoalitionStore(
        run.folder,
        names,
        settings={**_settings_of_training(run), "run": start_hash},
        ranks=ranks_of(run.trainer),
        outputs=measures_with_outputs,
    )


def _settings_of_training(run: MeasuredRun) -> dict[str, str]:
    """Return a run's settings without those of metrics that no strategy reads."""
    loop = find_loop(callbacks_of(run.trainer))
    names_in_use = [f"federation.metrics.{name}" for name in metrics_in_use(loop)]
    settings = {}
    for name, text in run.settings.items():
        is_metric = name.startswith("federation.metrics.")
        if not is_metric or name in names_in_use:
            settings[name] = text
    return settings


def _rest(run: MeasuredRun) -> str:
    if run.folder is None:
        return ", and none is kept, since the run has no folder."
    return f", and kept in {run.folder}. flsv retrain trains the rest."


class _Progress:
    """Progress of the trainings: a bar, or a line every :data:`PAUSE_SECONDS`."""

    def __init__(self, trainer: L.Trainer, missing: Sequence[Members]) -> None:
        shows_bars = trainer.progress_bar_callback is not None and ranks_of(trainer).rank == 0
        total = sum(map(bool, missing))  # without the empty coalition
        self._bar = Tqdm(total=total, desc="Groups of clients", leave=False, disable=not shows_bars)
        self._shows_bar = shows_bars
        self._line_time = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def __call__(self, text: str) -> None:
        """Note that one more coalition is trained."""
        self._bar.update()
        is_due = time.monotonic() - self._line_time > PAUSE_SECONDS
        if is_due and not self._shows_bar:
            self._line_time = time.monotonic()
            rank_zero_info(f"flsv: {text} are trained.")
