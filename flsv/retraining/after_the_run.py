"""AfterTheRun: trains coalitions when a run has ended, for metrics that need their models."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv._lightning.rounding import rounding_of
from flsv.core.extension import EndedRun
from flsv.core.ranks import ranks_of
from flsv.functional.shapley.predicted_outputs import whole_layers
from flsv.games.members import Members, members_of
from flsv.games.performance import CLASSIFICATION, ModelScore
from flsv.games.trained_game import OutputScore
from flsv.metrics.shadow import ShadowShapley
from flsv.retraining.kept_beginning import KeptBeginning
from flsv.retraining.train_fits import train_fits
from flsv.retraining.utility_store import UtilityStore
from flsv.retraining.whole_fits import COALITIONS, Unproved, WholeFits, called
from flsv.utilities.errors import ConfigurationError

#: Seconds between two log lines about the trainings' progress.
PAUSE = 10.0
#: The most numbers of outputs that are kept if all coalitions are trained. Only errors are computed from them then.
MOST_OUTPUTS = 2**24


def measures_of(metrics: Iterable[ShadowShapley]) -> dict[str, str | ModelScore]:
    """Return each performance measure by which the metrics score coalitions' models, ``{name: measure}``."""
    measures = {called(metric.measured_by): metric.measured_by for metric in metrics}
    # One measure of a classifier's outputs brings all, since flsv retrain shows shares by each of them.
    classes = (
        {}
        if measures.keys().isdisjoint(CLASSIFICATION)
        else {name: name for name in CLASSIFICATION}
    )
    return measures | classes


class AfterTheRun:
    """Training of coalitions after a run, for metrics that need the coalitions' models."""

    def __init__(
        self,
        metrics: Mapping[str, ShadowShapley],
        masks: Tensor,
        beginning: KeptBeginning,
        initial: dict[str, Any],
        # The run's model after the round that the coalition of all clients must reach.
        checked_model: Tensor | None,
        # Names of what the run's first validation has changed. Later training may depend on it.
        validation_changes: Sequence[str] = (),
    ) -> None:
        self._metrics = dict(metrics)
        self._masks = masks
        self._beginning = beginning
        self._initial = initial
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
        predicting = set()
        for name, metric in self._metrics.items():
            scores[name] = self._score(metric, run)
            if scores[name] is not None:
                predicting.add(called(metric.measured_by))
        store = self._store(run, predicting)
        coalitions = members_of(self._masks[2:])
        trained_coalitions = list(coalitions)
        if any(_own(metric, run) for metric in self._metrics.values()):
            trained_coalitions.append(())

        fits = WholeFits(
            self._beginning,
            run.data.num_clients,
            self._initial,
            self._rounds,
            self._checked_model,
            rounding_of(run.trainer),
            validates=bool(self._validation_changes),
        )
        num_samples = run.data.num_samples.tolist()
        start_time = time.monotonic()
        try:
            with _Progress(run.trainer, len(trained_coalitions)) as progress:
                train_fits(fits, num_samples, trained_coalitions, run.seed, store, progress)
        except KeyboardInterrupt:
            done = store.progress(run.seed, trained_coalitions)
            rank_zero_warn(
                f"{', '.join(self._metrics)}: there are no values. {done} are trained{_rest(run)}"
            )
            return {}
        except ConfigurationError as error:  # the federation itself is trained
            rank_zero_warn(
                f"{', '.join(self._metrics)}: there are no values. {error}{self._remedy(error)}"
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

    def _store(self, run: EndedRun, predicting: set[str]) -> UtilityStore:
        """Return the store of coalitions' utilities in the run's folder, and outputs by the measures ``predicting``."""
        ranks = ranks_of(run.trainer)
        path = None
        if run.folder is not None:
            path = run.folder / COALITIONS
            if ranks.rank == 0 and not run.resumed:
                # It belongs to an earlier run, maybe with another module.
                path.unlink(missing_ok=True)
        return UtilityStore(
            path,
            list(measures_of(self._metrics.values())),
            run.settings,
            rounds=self._rounds,
            ranks=ranks,
            outputs=predicting,
            anew=True,
        )

    def _score(self, metric: ShadowShapley, run: EndedRun) -> OutputScore | None:
        """Return the score of ``metric`` as a function of a model's outputs. None if no coalition's outputs are
        needed, or if those of all coalitions are too many.
        """
        if not whole_layers(self._masks) or not len(metric.outputs):
            return None
        num_coalitions = len(self._masks)
        numbers_of_a_model = metric.outputs[:, 0].numel()
        are_all_trained = num_coalitions == 2 ** self._masks.shape[1]
        are_too_many = num_coalitions * numbers_of_a_model > MOST_OUTPUTS
        if are_all_trained and (metric.per_class or are_too_many):
            return None
        return OutputScore.of(run.games.evaluator_of(metric.measured_by), metric.measured_by)

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
        by = called(metric.measured_by)
        places, of = (
            [self._rounds.index(index) for index in metric.valued.tolist()],
            store.names.index(by),
        )
        curves = [store.rows(run.seed, members) for members in coalitions]
        if _own(metric, run):  # the run's clients have trained theirs by now
            empty = torch.tensor([row[of] for row in store.rows(run.seed, ())])[places]
            metric.ends = torch.stack([empty.to(metric.ends), metric.ends[:, 1]], 1)
        utilities = torch.tensor(
            [[curve[place][of] for curve in curves] for place in places], dtype=torch.float64
        )
        utilities = (
            utilities.squeeze(-1) if utilities.shape[-1] == 1 else utilities
        )  # [R, K - 2], or per class
        if score is None:
            return metric.complete(self._masks, utilities)
        outputs = torch.stack(
            [store.outputs(run.seed, members, by)[places] for members in coalitions], 1
        )
        return metric.complete(self._masks, utilities, outputs, run.weights, score)

    def _remedy(self, error: ConfigurationError) -> str:
        """Return the end of a message about ``error``: what the user can do."""
        if not isinstance(error, Unproved):
            pickling = ""
            if self._beginning.not_pickled:
                reason = self._beginning.not_pickled
                pickling = f" Nor can fresh processes train them, since the fit cannot be pickled ({reason})."
            return f"{pickling} flsv retrain trains the coalitions that are missing."
        if self._beginning.forks is not None:
            return (
                ": training depends on something that neither its seed nor the state of this process at the beginning "
                "sets, as the time, a file that it writes or a generator of its own does. Seed it, and train again."
            )
        return (
            f": coalitions were trained in fresh processes, since {self._beginning.no_fork}. Training depends on "
            "something that neither its seed nor what the program has set determines. Value the run by flsv retrain."
        )


def _rest(run: EndedRun) -> str:
    """Return the end of a message about interrupted trainings: how to do the rest."""
    if run.folder is None:
        return ", and none is kept, since the run has no folder."
    return f", and kept in {run.folder}. flsv retrain trains the rest."


def _own(metric: ShadowShapley, run: EndedRun) -> bool:
    """Return whether clients score the metric's models, after replacing a part by their local parameters."""
    evaluator = run.games.evaluator_of(metric.measured_by)
    return evaluator.asks_clients and bool(evaluator.space.private_names)


class _Progress:
    """Progress of the trainings: a bar if the Trainer shows bars, else a line every :data:`PAUSE` seconds."""

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
        is_due = time.monotonic() - self._line_time > PAUSE
        if is_due and not self._shows_bar:
            self._line_time = time.monotonic()
            rank_zero_info(f"flsv: {text} are trained.")
