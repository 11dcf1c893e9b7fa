"""TrainingAfterTheRun: trains coalitions when a run has ended, for metrics that need their models."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self

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
from flsv.metrics.coalitions.design import MAX_VALUED_ROUNDS
from flsv.metrics.shadow import ShadowShapley
from flsv.models.classifier import ClassifierClient
from flsv.retraining.coalition_fit import metrics_in_use
from flsv.retraining.copied_fits import CopiedFits, CopyOfRun, KeptRun
from flsv.retraining.fit_order import FitFailed, FitOrder, FitResult
from flsv.retraining.stored_values import (
    output_score,
    score_of_stored_outputs,
    stored_outputs,
)
from flsv.retraining.train_fits import CoalitionTraining
from flsv.retraining.trial import Findings
from flsv.retraining.utility_store import (
    COALITIONS_FILE,
    EARLIER_FOLDER,
    Outputs,
    UtilityStore,
    column_name,
    outputs_name,
)
from flsv.scores.performance import CLASSIFICATION, ModelScore
from flsv.utilities.errors import ConfigurationError, listed

#: Seconds between two log lines about the trainings' progress.
PAUSE_SECONDS = 10.0
#: The most entries of outputs that are stored if all coalitions are trained. Only errors are computed from them then.
MAX_STORED_OUTPUTS = 2**24


def measures_of(metrics: Iterable[ShadowShapley]) -> dict[str, str | ModelScore]:
    """Return each performance measure by which the metrics score coalitions' models, ``{name: measure}``."""
    measures = {}
    for metric in metrics:
        measures[column_name(metric.measured_by)] = metric.measured_by
    # One measure of a classifier's outputs brings all, since flsv retrain shows shares by each of them.
    has_classification_measure = any(name in CLASSIFICATION for name in measures)
    if has_classification_measure:
        for name in CLASSIFICATION:
            measures[name] = name
    return measures


class NoValues(Exception):
    """Error: coalitions are missing, and why."""

    def __init__(self, reason: str, interrupted: bool = False) -> None:
        super().__init__(reason)
        self.interrupted = interrupted


class TrainingAfterTheRun:
    """Training of coalitions after a run, for metrics that need the coalitions' models."""

    def __init__(
        self,
        metrics: Mapping[str, ShadowShapley],
        masks: Tensor,
        store: UtilityStore,
        run_copy: CopyOfRun,
        findings: Findings,
        # A hash of the weights from which a run has started that goes on, which coalitions must start from, too.
        start_hash: str | None,
        # The run's model after a round, which the coalition of all clients must reach.
        checked_round: int,
        checked_model: Tensor | None,
        # Whether one coalition is compared with a fresh process.
        verifies_all: bool,
        space: ParameterSpace,
        # Seconds after which a coalition is given up if no round begins.
        max_wait: float,
    ) -> None:
        self._metrics = dict(metrics)
        self._masks = masks
        self._store = store
        self._run_copy = run_copy
        self._findings = findings
        self._start_hash = start_hash
        self._max_wait = max_wait
        self._checked_round = checked_round
        self._checked_model = checked_model
        self._verifies_all = verifies_all
        self._space = space
        self._is_on_cpu = False
        # Sentences on what speaks against the values.
        self.doubts: list[str] = []

    def train(self, run: MeasuredRun) -> Tensor:
        """Train the coalitions that the store lacks, and return all of them, bool ``[K, n]``.

        Raises:
            NoValues: the training was interrupted, or one has failed.
        """
        store = self._store
        self._is_on_cpu = run.trainer.strategy.root_device.type == "cpu"
        empty, grand, *trained_coalitions = members_of(self._masks)
        if run.folder is not None:
            store.take_over(run.folder / EARLIER_FOLDER / COALITIONS_FILE, run.seed, grand)

        training = self._make_training(run)
        kept_run = KeptRun(run.trainer)
        try:
            # Those of the run itself are missing if a kill has lost them.
            coalitions = [empty, grand, *trained_coalitions]
            with _Progress(run.trainer, store.missing(run.seed, coalitions)) as progress:
                training.train(coalitions, [run.seed], store, progress)
                halves = self._next_coalitions(run)
                if len(halves):
                    self._masks = torch.cat([self._masks, halves])
                    trained_coalitions += members_of(halves)
                    training.train(trained_coalitions, [run.seed], store, progress)
            self._compare_with_run(training, trained_coalitions, run)
            self._compare_first_updates(training, run.trainer)
            self._doubt_shared(training)
        except KeyboardInterrupt:
            done = store.progress(run.seed, trained_coalitions)
            reason = f"Their training was interrupted: {done} are trained{_rest(run)}"
            raise NoValues(reason, interrupted=True) from None
        except ConfigurationError as error:  # the federation itself is trained
            advice = "flsv retrain trains the coalitions that are missing."
            raise NoValues(f"{error} {advice}") from error
        finally:
            has_changed_run = kept_run.restore()
        if has_changed_run:
            self.doubts.append(
                "the run's own module or optimizers have changed while coalitions were trained, and are as before. So "
                "coalitions share tensors with the run: copy what a data set or a global holds of the module"
            )
        for doubt in self.doubts:
            rank_zero_warn(f"{', '.join(self._metrics)}: {doubt}.")
        return self._masks

    def _next_coalitions(self, run: MeasuredRun) -> Tensor:
        metric = next(iter(self._metrics.values()))
        score = score_of_stored_outputs(metric, self._store, run)
        if score is None:
            return self._masks[:0]
        return metric.next_coalitions(
            self._masks,
            stored_outputs(metric, self._masks, self._store, run.seed)[:, -1],
            logits=score.logits,
            names=run.data.client_names,
            seed=run.seed,
        )

    def _make_training(self, run: MeasuredRun) -> CoalitionTraining:
        """Return the training of coalitions by fits of the run's copies."""
        order = FitOrder(
            members=tuple(range(run.data.num_clients)),
            seed=run.seed,
            rounds=tuple(self._store.rounds),
            max_wait=self._max_wait,
        )
        return CoalitionTraining(
            CopiedFits(lambda seed: self._run_copy, measures_of(self._metrics.values())),
            self._findings.applied(order),
            num_samples=run.data.num_samples.tolist(),
            start_hash=self._start_hash,
        )

    def _compare_with_run(
        self, training: CoalitionTraining, coalitions: Sequence[Members], run: MeasuredRun
    ) -> None:
        """Train the twin's first rounds, and compare it with the run."""
        ranks = ranks_of(run.trainer)
        doubts: list[str] = []
        needs_validations = False
        if run.changes:
            # The twin, which has the present settings in all rounds, is known to be another.
            self.doubts.append(
                f"the run has gone on with other settings ({'; '.join(run.changes)}), and coalitions are trained with "
                "the present ones from their first round on, so that the values are not quite the run's. flsv fit with "
                "the present settings from the start brings values of one history"
            )
        elif ranks.rank == 0:
            doubt = self._doubt_by_twin(training, training.is_whole)
            if doubt is not None and not training.is_whole:
                doubt = self._doubt_by_twin(training, is_whole=True)
                needs_validations = doubt is None
            if doubt is not None:
                doubts.append(doubt)
            if self._verifies_all:
                doubts += self._doubts_by_fresh_process(training, coalitions, run)
        comparison = ranks.broadcast(0, (needs_validations, doubts), "the comparison with the run")
        needs_validations, doubts = comparison
        self.doubts += doubts
        if needs_validations:
            # Only without validations the twin was another: the coalitions need them, too.
            training.is_whole = True
            self._store.discard(run.seed, coalitions)
            training.train(coalitions, [run.seed], self._store)

    def _compare_first_updates(self, training: CoalitionTraining, trainer: L.Trainer) -> None:
        """Compare clients' first updates in coalitions with the run's."""
        module = trainer.lightning_module
        weighs_classes = isinstance(module, ClassifierClient) and module.is_balanced
        if weighs_classes or any(metric.leaves_out for metric in self._metrics.values()):
            return  # coalitions are meant to train otherwise
        own_norms = find_loop(callbacks_of(trainer)).run.engine.first_updates
        norms_of_run: dict[int, Tensor] = {}
        for norms_of_rank in ranks_of(trainer).all_gather(own_norms, "the first updates"):
            norms_of_run |= norms_of_rank

        tolerance = 0.0 if self._is_on_cpu else MAX_ROUNDING
        entry_by_client = {}
        for norms_by_client in training.first_updates.values():
            for client in norms_by_client.keys() & norms_of_run.keys():
                norms = norms_by_client[client]
                is_same = norms.isclose(norms_of_run[client], rtol=tolerance, atol=0.0)
                if not is_same.all():
                    first_entry = int(is_same.int().argmin())
                    entry_by_client[client] = self._space.names[first_entry]
        if entry_by_client:
            clients = listed(f"{client} ({entry})" for client, entry in entry_by_client.items())
            self.doubts.append(
                f"clients train otherwise in the first round of coalitions than in that of the run: {clients}. "
                "Training depends on who else takes part, or on what passes from client to client and the module does "
                "not hold, such as a global, a cache, a class attribute or a file"
            )

    def _doubt_shared(self, training: CoalitionTraining) -> None:
        """Doubt the values if coalitions have changed tensors of the program, which the next coalition sees."""
        if training.changed_tensors:
            paths = listed(sorted(training.changed_tensors))
            self.doubts.append(
                f"while coalitions trained, {paths} changed, which the program keeps outside of the module, so that "
                "one may have seen what another has left there"
            )

    def _doubt_by_twin(self, training: CoalitionTraining, is_whole: bool) -> str | None:
        if self._checked_model is None:
            return None
        order = replace(
            training.order,
            rounds=(self._checked_round,),
            scores_rounds=False,
            returns_models=True,
            is_whole=is_whole,
        )
        result: FitResult | FitFailed
        try:
            ((_, result),) = training.trainer.train([order])
        except ConfigurationError as error:  # the coalitions themselves are trained
            result = FitFailed(str(error))
        described_twin = (
            f"the coalition of all clients, trained once more for {self._checked_round + 1} rounds"
        )
        if isinstance(result, FitFailed):
            return f"{described_twin}, has failed ({result}), so that nothing shows that coalitions are like the run"
        difference = self._difference(result, self._checked_model)
        if difference is None:
            return None
        return (
            f"{described_twin}, came to another model than the run ({difference}). Training depends on something that "
            "Trainer, module and callbacks do not hold, such as a global, a class attribute, an environment variable, "
            "a file or a data set that changes, and the values with it"
        )

    def _difference(self, result: FitResult, expected: Tensor) -> str | None:
        """Describe how a fit's model differs from the expected one, None if bitwise identical, or near enough on an
        accelerator.
        """
        models = result.models
        assert models is not None
        if torch.equal(models.trained, expected):
            return None
        distance = result.rounding.unexplained_distance(models.trained, expected, models.initial)
        if distance is None and not self._is_on_cpu:
            return None
        are_both_nan = models.trained.isnan() & expected.isnan()
        differs = (models.trained != expected) & ~are_both_nan
        entries = self._space.unflatten(differs)
        changed_names = [name for name, is_changed in entries.items() if is_changed.any()]
        if not changed_names:
            return None
        path_length = float((expected - models.initial).double().norm())
        change = float((models.trained - expected).double().norm())
        percent = 100 * change / max(path_length, 1e-30)
        return f"{percent:.2g} % of the way that training went, first in {changed_names[0]!r}"

    def _doubts_by_fresh_process(
        self, training: CoalitionTraining, coalitions: Sequence[Members], run: MeasuredRun
    ) -> Iterator[str]:
        """Compare the smallest coalition with its fit in a fresh process."""
        smallest = min(coalitions, key=training.cost)
        order = replace(training.order, members=smallest, is_whole=training.is_whole)
        try:
            result = training.trainer.train_in_fresh_process(order)
        except Exception as error:  # whatever pickling the data raises
            result = FitFailed(f"{type(error).__name__}: {error}")
        described_coalition = f"coalition {list(smallest)}, trained in a fresh process"
        if isinstance(result, FitFailed):
            yield f"{described_coalition}, has failed ({result}), so that it could not be compared"
            return
        stored_row = self._store.rows(run.seed, smallest)[-1]
        row = result.scored[-1].utilities
        if row != stored_row:
            yield (
                f"{described_coalition}, has another score ({row} instead of {stored_row}): the run and its "
                "coalitions share something that the program keeps, such as a cache"
            )


def open_store(
    run: MeasuredRun,
    metrics: Mapping[str, ShadowShapley],
    masks: Tensor,
    start_hash: str,
    # A model's outputs, of as many entries as each has.
    outputs: Outputs,
) -> UtilityStore:
    """Open the store of a run's coalitions ``masks``. A file of other settings is replaced."""
    names = list(measures_of(metrics.values()))
    num_coalitions, num_clients = masks.shape
    are_all_trained = num_coalitions == 2**num_clients
    measures_with_outputs = set()
    for metric in metrics.values():
        name = outputs_name(metric.measured_by)
        if name not in outputs or not favors_nobody(masks) or output_score(metric, run) is None:
            continue
        # If all are trained, no outputs are predicted. The values' errors are still computed from them, if it is cheap.
        num_entries = num_coalitions * MAX_VALUED_ROUNDS * outputs[name].numel()
        is_cheap = not metric.per_class and num_entries <= MAX_STORED_OUTPUTS
        if is_cheap or not are_all_trained:
            measures_with_outputs.add(name)
    return UtilityStore(
        None if run.folder is None else run.folder / COALITIONS_FILE,
        names=names,
        settings={
            **_settings_of_training(run),
            "run": start_hash,
            "scores": " ".join(names),
        },
        by_round=True,
        ranks=ranks_of(run.trainer),
        outputs=measures_with_outputs,
        anew=True,
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
        self._bar = Tqdm(total=total, desc="Coalitions", leave=False, disable=not shows_bars)
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
