"""Values of clients from coalitions trained with several seeds.

``flsv retrain`` and :func:`flsv.retrain` differ only in where fits take place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flsv.functional.intervals import interval_over_seeds, prediction_stderr, seed_covariance
from flsv.functional.shapley.few_coalitions import Which, few_coalitions, few_coalitions_shapley
from flsv.functional.shapley.predicted_outputs import whole_layers
from flsv.games.coalition_utility import Measure
from flsv.games.members import members_of
from flsv.games.performance import ModelScore, is_logged
from flsv.report.basis import (
    BY_SCORE,
    CASE_COVARIANCE,
    SEED_COVARIANCE,
    WITHOUT_SEED,
)
from flsv.results.text import shares_in
from flsv.results.verdict import Source
from flsv.retraining.fits_in_processes import UTILITY, Predicted, Prediction
from flsv.retraining.train_fits import CoalitionTraining
from flsv.retraining.utility_store import (
    COALITIONS,
    LAST,
    UtilityStore,
    read_outputs,
    utilities_after_run,
)
from flsv.utilities.csv_files import NAN, numbers_text

#: Options of ``flsv retrain`` whose coalitions only rank the clients if outputs are not predicted.
RANKING_ONLY = ("singles", "leave-one-out")
#: Default number of seeds.
SEEDS = 3
#: The most clients of whose coalitions, if all are trained, the outputs are kept.
MOST_WITH_OUTPUTS = 7


@dataclass(frozen=True)
class Retrained:
    """Utilities of coalitions that were trained with s seeds."""

    design: Which
    masks: Tensor
    seeds: list[int]
    # float64 [s, K, C], by C performance measures
    utilities: Tensor
    # None: the values follow from the utilities.
    predicted: Predicted | None = None

    @property
    def rank_only(self) -> bool:
        """Return whether values can only rank the clients, since their amounts are too inaccurate."""
        # The other coalitions would change the amounts by a third.
        return self.design in RANKING_ONLY and self.source == "scores"

    @property
    def source(self) -> Source:
        """Return where the utilities of all coalitions come from."""
        if len(self.masks) == 2 ** self.masks.shape[1]:
            return "trainings"
        return "scores" if self.predicted is None else "outputs"

    def values_by_seed(
        self,
        measure: int,
        seeds: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Compute each seed's values ``[s, n]`` by one performance ``measure``, and the standard error ``[n]`` of their
        mean that comes from coalitions that were not trained.
        """
        rows = [self.seeds.index(seed) for seed in seeds]
        are_all_trained = len(self.masks) == 2 ** self.masks.shape[1]
        if self.predicted is None or are_all_trained:
            estimate = few_coalitions_shapley(
                self.masks,
                self.utilities[rows, :, measure].T,
            )
            return (
                estimate.values.T,
                estimate.stderr.mean(1),
            )
        disagreement = self.predicted.disagreement[rows, :, measure].mean(0)
        return self.predicted.values[rows, :, measure], prediction_stderr(disagreement)

    def values(
        self,
        measure: int = 0,
        without: int | None = None,
    ) -> dict[str, list[float]]:
        """Compute clients' values, interval ends and shares by one performance ``measure``, ``{column: [n]}``.
        ``without`` is a seed to leave out.
        """
        seeds = [seed for seed in self.seeds if seed != without]
        by_seed, stderr = self.values_by_seed(measure, seeds)
        values = by_seed.mean(0)
        half_widths = interval_over_seeds(by_seed, stderr)
        shares = [NAN] * len(values)
        if not self.rank_only:
            shares = shares_in(values.tolist())
        return {
            "value": values.tolist(),
            "low": (values - half_widths).tolist(),
            "high": (values + half_widths).tolist(),
            "share": shares,
        }

    def covariances(self, measure: int) -> dict[str, list[str]]:
        """Return the rows of the values' covariances, ``{column: [n]}``, between seeds and between validation samples.
        Each is left out if it is not known.
        """
        by_seed, stderr = self.values_by_seed(measure, self.seeds)
        half_widths = interval_over_seeds(by_seed, stderr)
        covariances = {SEED_COVARIANCE: seed_covariance(by_seed, half_widths)}
        if self.predicted is not None:
            covariances[CASE_COVARIANCE] = self.predicted.case_covariance[measure]
        return {
            name: [
                *map(
                    numbers_text,
                    matrix.tolist(),
                )
            ]
            for name, matrix in covariances.items()
            if matrix.isfinite().all()
        }

    def columns(
        self,
        names: Sequence[str],
        metric: str,
    ) -> dict[str, list[Any]]:
        """Return :meth:`values` by ``metric``, with their covariances, and columns of the shares by each other measure
        in ``names`` and without each seed.
        """
        measure = names.index(metric)
        columns: dict[str, list[Any]] = {**self.values(measure)}
        utilities = self.utilities[:, :, measure].mean(0)
        together = float(utilities[self.masks.all(1)])
        columns["together"] = [together] * self.masks.shape[1]
        is_alone = self.masks.sum(1) == 1
        if is_alone.any():
            clients = self.masks[is_alone].int().argmax(1)
            columns["alone"] = utilities[is_alone][clients.argsort()].tolist()
        columns["source"] = [self.source] * self.masks.shape[1]
        if self.rank_only:
            return columns

        columns.update(self.covariances(measure))
        finite = self.utilities.flatten(0, 1).isfinite().all(0).tolist()
        if len(names) > 1:
            for place_in_list, name in enumerate(names):
                if finite[place_in_list]:
                    columns[f"{BY_SCORE}{name}"] = self.values(place_in_list)["share"]
        if len(self.seeds) > 1:
            for seed in self.seeds:
                columns[f"{WITHOUT_SEED}{seed}"] = self.values(measure, without=seed)["share"]
        return columns


def stored_outputs(masks: Tensor, measure: Measure) -> Sequence[str]:
    """Return the name under which coalitions' outputs are stored. Empty if nothing is computed from them."""
    num_clients = masks.shape[1]
    are_all_trained = len(masks) == 2**num_clients
    if not whole_layers(masks) or (are_all_trained and num_clients > MOST_WITH_OUTPUTS):
        return ()
    if isinstance(measure, str):
        return (UTILITY,)
    if not isinstance(measure, ModelScore):
        return measure[:1]

    has_outputs = not is_logged(measure)
    if measure.judged:
        has_outputs = measure.by_class and not are_all_trained
    return (UTILITY,) if has_outputs else ()


def learn(
    store: UtilityStore,
    run_folder: Path,
    names: Sequence[str],
    outputs: Sequence[str],
    seeds: Iterable[int],
    num_rounds: int | None,
) -> None:
    """Copy from a run's folder into the store the utilities, by the measures ``names``, and outputs of coalitions that
    were trained at the run's end.
    """
    outputs_folder = run_folder / Path(COALITIONS).stem
    for seed in seeds:
        utilities_by_members = utilities_after_run(run_folder, names, seed, num_rounds)
        for members, utilities in utilities_by_members.items():
            if not store.missing(seed, [members]):
                continue
            last_outputs = []
            for outputs_of_rounds in read_outputs(outputs_folder, seed, members).values():
                last_outputs.append(outputs_of_rounds[-1:])
            rows = {LAST: [[utility] for utility in utilities]}
            store.add(seed, members, rows, dict(zip(outputs, last_outputs)))


def train_seeds(
    training: CoalitionTraining,
    # Computes values from the trained coalitions' outputs.
    predict: Callable[[Prediction], Predicted],
    design: Which,
    first_seed: int,
    num_seeds: int | None,
    store: UtilityStore,
    say: Callable[[str], None] = lambda text: None,
) -> Retrained:
    """Train coalitions with the seeds ``first_seed``, ``first_seed + 1``, ..., and return their utilities.

    Coalitions in ``store`` are not trained again. Those that are trained are added to it, even if others fail.
    """
    if design == "auto":
        design = "both"
    masks = few_coalitions(training.num_clients, design)
    coalitions = members_of(masks)
    seeds = list(range(first_seed, first_seed + (num_seeds or SEEDS)))
    for seed in seeds:
        training.train(coalitions, seed, store, say)
    utilities = torch.stack([store.table(seed, masks) for seed in seeds])

    outputs = []
    for seed in seeds:
        for members in coalitions[1:]:
            last_outputs = store.last_outputs(seed, members)
            if last_outputs is not None:
                outputs.append(last_outputs)
    predicted = None
    if len(outputs) == len(seeds) * (len(coalitions) - 1):
        outputs_by_seed = torch.stack(outputs).unflatten(0, (len(seeds), -1))
        predicted = predict(Prediction(first_seed, masks, utilities, outputs_by_seed))
    elif len(masks) < 2 ** masks.shape[1]:
        say(
            "the scores of coalitions that were not trained are estimated. Predicting their outputs comes closer, but "
            "it needs each client alone and whole sizes, and logged values have no outputs"
        )
    return Retrained(design, masks, seeds, utilities, predicted)
