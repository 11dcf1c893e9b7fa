"""TrainingAfterTheRun: trains coalitions when a run has ended, for metrics that need their models.

SavedBeginning holds the state before the run's fit, from which they are trained.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv.core.extension import EndedRun
from flsv.core.ranks import ranks_of
from flsv.functional.shapley.predicted_outputs import has_complete_sizes
from flsv.games.members import Members, members_of
from flsv.games.trained_game import OutputScore
from flsv.metrics.shadow import ShadowShapley
from flsv.retraining.fit_order import CoalitionTrainer, FitOrder
from flsv.retraining.forked_fits import ForkedFits, why_not_by_forks
from flsv.retraining.fresh_fits import FreshFits, pickled_fit
from flsv.retraining.readings import file_time
from flsv.retraining.train_fits import CoalitionTraining, Proof, Unproved
from flsv.retraining.utility_store import COALITIONS_FILE, UtilityStore, column_name
from flsv.scores.performance import CLASSIFICATION, ModelScore
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import digest
from flsv.utilities.supervisor import ChildFailed

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


class SavedBeginning:
    """State before a fit. It is a fork of the process, or the pickled Trainer, module and data."""

    #: When the run's first round began.
    first_round_time = float("inf")
    #: The round whose model the coalition of all clients must reach.
    checked_round = 0

    def __init__(self) -> None:
        self.forks: ForkedFits | None = None
        self._fresh_fits: FreshFits | None = None
        # Makes `_fresh_fits` from a pickled fit.
        self._make_fresh_fits: Any = None
        # The reasons for which there is no fork, and no pickled fit.
        self.why_no_fork: str | None = None
        self.why_not_pickled = ""

    def __bool__(self) -> bool:
        """Return whether the state before the fit is stored."""
        return self.forks is not None or self._fresh_fits is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fresh_fits": None, "forks": None, "_make_fresh_fits": None}

    def fork_or_pickle(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        measures: Mapping[str, str | ModelScore],
    ) -> bool:
        """Fork the process or pickle the fit. Return True only in a process that is forked later for a coalition."""
        self.why_no_fork = why_not_by_forks(trainer)
        self._make_fresh_fits = partial(
            FreshFits, trainer, measures=measures, start_time=time.monotonic()
        )
        pickle_fit = partial(pickled_fit, trainer, module, environment=dict(os.environ))
        if self.why_no_fork is None:
            # The constructor forks a process that waits in it. After the run the coalitions' processes are forked from
            # that one, and in them the constructor returns, too.
            self.forks = ForkedFits(trainer, module, measures, pickle_fit)
            return self.forks.is_in_coalition_process

        has_been_fitted = trainer.current_epoch > 0
        if has_been_fitted:
            self.why_not_pickled = (
                "this Trainer has been fitted before: make a new one, and resume from a checkpoint"
            )
            return False
        try:
            fit = pickle_fit()
            self._fresh_fits = self._make_fresh_fits(fit)
        except Exception as error:  # reported when it is known that coalitions will be trained
            self.why_not_pickled = f"{type(error).__name__}: {error}"
        return False

    def note_first_round(self) -> None:
        """Note that the run's first round begins."""
        self.first_round_time = file_time()

    def close(self) -> None:
        """End the forked process that holds the state, if there is one."""
        for fits in (self.forks, self._fresh_fits):
            if fits is not None:
                fits.close()
        self.forks = None

    def forget(self) -> None:
        """Release the state, since no coalition will be trained after the run."""
        self.close()
        self._fresh_fits = None

    @property
    def trainer(self) -> CoalitionTrainer:
        """Return the object that trains coalitions from the stored state."""
        fits = self.forks or self._fresh_fits
        assert fits is not None
        return fits

    def switch_to_fresh_processes(self, reason: str) -> CoalitionTrainer | None:
        """Return a trainer of coalitions in new processes, after forks failed for this reason. None if that is
        impossible.
        """
        forks = self.forks
        if forks is None:
            return None
        self.forks = None
        # Only the waiting fork still has the fit as it was at the beginning.
        fit = forks.pickled_fit()
        forks.close()
        self.why_no_fork = f"forks have failed ({reason})"
        if isinstance(fit, ChildFailed):
            self.why_not_pickled = str(fit)
            return None
        rank_zero_info(
            f"flsv: coalitions are trained in fresh processes, since {self.why_no_fork}."
        )
        self._fresh_fits = self._make_fresh_fits(fit)
        return self._fresh_fits


class TrainingAfterTheRun:
    """Training of coalitions after a run, for metrics that need the coalitions' models."""

    def __init__(
        self,
        metrics: Mapping[str, ShadowShapley],
        masks: Tensor,
        beginning: SavedBeginning,
        # The state_dict from which the coalitions are trained.
        initial_state: dict[str, Any],
        # The run's model after the round that the coalition of all clients must reach.
        checked_model: Tensor | None,
        # Names of what the run's first validation has changed, on which later training may depend.
        validation_changes: Sequence[str] = (),
    ) -> None:
        self._metrics = dict(metrics)
        self._masks = masks
        self._beginning = beginning
        self._initial_state = initial_state
        self._checked_model = checked_model
        self._validation_changes = validation_changes
        rounds = set()
        for metric in metrics.values():
            metric.choose_rounds()
            rounds.update(metric.valued.tolist())
        self._rounds = sorted(rounds)

    def train(self, run: EndedRun) -> dict[int, dict[str, Tensor]]:
        """Train the coalitions, and return the metrics' values, ``{round: {metric: values}}``. Empty if a training
        failed.
        """
        scores = {}
        measures_with_outputs = set()
        for name, metric in self._metrics.items():
            scores[name] = self._output_score(metric, run)
            if scores[name] is not None:
                measures_with_outputs.add(column_name(metric.measured_by))
        store = self._make_store(run, measures_with_outputs)
        coalitions = members_of(self._masks[2:])
        trained_coalitions = list(coalitions)
        if any(_is_scored_by_clients(metric, run) for metric in self._metrics.values()):
            trained_coalitions.append(())

        training = self._make_training(run)
        start_time = time.monotonic()
        try:
            with _Progress(run.trainer, len(trained_coalitions)) as progress:
                training.train(trained_coalitions, run.seed, store, progress)
        except KeyboardInterrupt:
            done = store.progress(run.seed, trained_coalitions)
            rank_zero_warn(
                f"{', '.join(self._metrics)}: there are no values. {done} are trained{_rest(run)}"
            )
            return {}
        except ConfigurationError as error:  # the federation itself is trained
            rank_zero_warn(
                f"{', '.join(self._metrics)}: there are no values. {error}{self._advice_after_failure(error)}"
            )
            return {}
        seconds = time.monotonic() - start_time
        rank_zero_info(f"flsv: the coalitions were trained in {seconds:.1f} s.")

        values_by_round: dict[int, dict[str, Tensor]] = {index: {} for index in self._rounds}
        for name, metric in self._metrics.items():
            metric_values = self._complete(metric, store, coalitions, run, scores[name])
            for index, values in metric_values.items():
                values_by_round[index][name] = values
        return values_by_round

    def _make_training(self, run: EndedRun) -> CoalitionTraining:
        """Return the training of coalitions by fits from the run's initial state. It first trains all clients, and
        compares this with the run's model after the checked round.
        """
        num_clients = run.data.num_clients
        checked_round = self._beginning.checked_round
        is_checked = self._checked_model is not None
        order = FitOrder(
            members=tuple(range(num_clients)),
            seed=run.seed,
            rounds=tuple(self._rounds),
            initial=self._initial_state,
            validates=bool(self._validation_changes) or not is_checked,
            run_time=(self._beginning.first_round_time, file_time()),
        )
        proof = None
        if is_checked:
            proof_order = replace(
                order,
                rounds=(checked_round,),
                scores_rounds=False,
                returns_models=True,
                expected_hash=digest(self._checked_model).hex(),
            )
            message = (
                "The coalition of all clients, trained in the same way as the others, came to another model after "
                f"round {checked_round + 1} than the run ({{}})"
            )
            proof = Proof(proof_order, message, self._checked_model)
        return CoalitionTraining(
            self._beginning.trainer,
            order,
            num_samples=run.data.num_samples.tolist(),
            proof=proof,
            make_replacement=self._beginning.switch_to_fresh_processes,
        )

    def _make_store(self, run: EndedRun, measures_with_outputs: set[str]) -> UtilityStore:
        ranks = ranks_of(run.trainer)
        path = None
        if run.folder is not None:
            path = run.folder / COALITIONS_FILE
            if ranks.rank == 0 and not run.resumed:
                # It belongs to an earlier run, maybe with another module.
                path.unlink(missing_ok=True)
        return UtilityStore(
            path,
            names=list(measures_of(self._metrics.values())),
            settings=run.settings,
            rounds=self._rounds,
            ranks=ranks,
            outputs=measures_with_outputs,
            anew=True,  # a resumed run's file with other settings is replaced
        )

    def _output_score(self, metric: ShadowShapley, run: EndedRun) -> OutputScore | None:
        """Return the score of ``metric`` as a function of a model's outputs. None if no coalition's outputs are
        needed, or if those of all coalitions are too many.
        """
        has_outputs = len(metric.outputs) > 0
        if not has_outputs or not has_complete_sizes(self._masks):
            return None
        num_coalitions, num_clients = self._masks.shape
        are_all_trained = num_coalitions == 2**num_clients
        if are_all_trained:
            # No outputs are predicted. The values' errors are still computed from them, if that is cheap.
            outputs_per_coalition = metric.outputs[:, 0].numel()
            num_outputs = num_coalitions * outputs_per_coalition
            if metric.per_class or num_outputs > MAX_STORED_OUTPUTS:
                return None
        evaluator = run.games.evaluator_of(metric.measured_by)
        return OutputScore.for_evaluator(evaluator, metric.measured_by)

    def _complete(
        self,
        metric: ShadowShapley,
        store: UtilityStore,
        coalitions: Sequence[Members],
        run: EndedRun,
        score: OutputScore | None,
    ) -> dict[int, Tensor]:
        """Pass the trained coalitions' utilities and outputs to ``metric``, and return its values after each round,
        ``{round: values}``.
        """
        measure_name = column_name(metric.measured_by)
        column = store.names.index(measure_name)
        positions = [self._rounds.index(index) for index in metric.valued.tolist()]
        if _is_scored_by_clients(metric, run):
            # The run's clients have trained their own part by now, so the untrained model was scored with it, too.
            untrained_by_round = [row[column] for row in store.rows(run.seed, ())]
            untrained_utilities = torch.tensor(untrained_by_round)[positions]
            with torch.inference_mode():
                metric.ends[:, 0] = untrained_utilities.to(metric.ends)

        utilities_by_round = []
        rows_by_coalition = [store.rows(run.seed, members) for members in coalitions]
        for position in positions:
            utilities_of_round = [rows[position][column] for rows in rows_by_coalition]
            utilities_by_round.append(utilities_of_round)
        # [rounds, K - 2, 1], or per class: the empty and the full coalition are missing.
        utilities = torch.tensor(utilities_by_round, dtype=torch.float64)
        if utilities.shape[-1] == 1:
            utilities = utilities.squeeze(-1)
        if score is None:
            return metric.complete(self._masks, utilities)

        outputs_by_coalition = [
            store.outputs(run.seed, members, measure_name)[positions] for members in coalitions
        ]
        outputs = torch.stack(outputs_by_coalition, 1)  # [rounds, K - 2, ...]
        return metric.complete(self._masks, utilities, outputs, run.weights, score)

    def _advice_after_failure(self, error: ConfigurationError) -> str:
        """Return how the warning of an error goes on: what was tried, and what helps."""
        if not isinstance(error, Unproved):
            why_not_fresh = ""
            reason = self._beginning.why_not_pickled
            if reason:
                why_not_fresh = f" Nor can fresh processes train them, since the fit cannot be pickled ({reason})."
            return f"{why_not_fresh} flsv retrain trains the coalitions that are missing."
        if self._beginning.forks is not None:
            return (
                ": training depends on something that neither its seed nor the state of this process at the beginning "
                "sets, as the time, a file that it writes or a generator of its own does. Seed it, and train again."
            )
        return (
            f": coalitions were trained in fresh processes, since {self._beginning.why_no_fork}. Training depends on "
            "something that neither its seed nor what the program has set determines. Value the run by flsv retrain."
        )


def _rest(run: EndedRun) -> str:
    if run.folder is None:
        return ", and none is kept, since the run has no folder."
    return f", and kept in {run.folder}. flsv retrain trains the rest."


def _is_scored_by_clients(metric: ShadowShapley, run: EndedRun) -> bool:
    """Return whether clients score the metric's models, after replacing a part by their local parameters."""
    evaluator = run.games.evaluator_of(metric.measured_by)
    return evaluator.asks_clients and bool(evaluator.space.private_names)


class _Progress:
    """Progress of the trainings: a bar if the Trainer shows bars, else a line every :data:`PAUSE_SECONDS`."""

    def __init__(self, trainer: L.Trainer, total: int) -> None:
        shows_bars = trainer.progress_bar_callback is not None and ranks_of(trainer).rank == 0
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
