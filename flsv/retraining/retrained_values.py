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
from flsv.retraining.fits_in_processes import UTILITY, FitsInProcesses, Predicted, Prediction
from flsv.retraining.train_fits import train_fits
from flsv.retraining.utility_store import LAST, UtilityStore, read_outputs
from flsv.retraining.whole_fits import COALITIONS, trained_in
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

    which: Which
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
        return self.which in RANKING_ONLY and self.source == "scores"

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
    if isinstance(measure, ModelScore):
        if are_all_trained and measure.judged:
            return ()
        stored_text = measure.by_class if measure.judged else not is_logged(measure)
        return (UTILITY,) if stored_text else ()
    return (UTILITY,) if isinstance(measure, str) else measure[:1]


def learn(
    store: UtilityStore,
    run: Path,
    by: Sequence[str],
    outputs: Sequence[str],
    seeds: Iterable[int],
    rounds: int | None,
) -> None:
    """Copy from a run's folder into the store the utilities, by the measures ``by``, and outputs of coalitions that
    were trained at the run's end.
    """
    for seed in seeds:
        for members, values in trained_in(run, by, seed, rounds).items():
            if store.missing(seed, [members]):
                kept = [
                    each[-1:]
                    for each in read_outputs(run / Path(COALITIONS).stem, seed, members).values()
                ]
                store.add(
                    seed, members, {LAST: [[value] for value in values]}, dict(zip(outputs, kept))
                )


def train_seeds(
    trainings: FitsInProcesses,
    # [n], of the clients
    num_samples: Sequence[int],
    which: Which,
    first: int,
    seeds: int | None,
    store: UtilityStore,
    say: Callable[[str], None] = lambda text: None,
) -> Retrained:
    """Train coalitions with the seeds ``first``, ``first + 1``, ..., and return their utilities.

    Coalitions in ``store`` are not trained again. Those that are trained are added to it, even if others fail.
    """
    which = "both" if which == "auto" else which
    masks = few_coalitions(len(num_samples), which)
    coalitions, trained = members_of(masks), range(first, first + (seeds or SEEDS))
    for seed in trained:
        train_fits(trainings, num_samples, coalitions, seed, store, say)
    utilities = torch.stack([store.table(seed, masks) for seed in trained])
    outputs = [
        [store.last_outputs(seed, members) for members in coalitions[1:]] for seed in trained
    ]
    known = [each for of_seed in outputs for each in of_seed if each is not None]
    predicted = None
    if len(known) == len(trained) * (len(coalitions) - 1):
        stacked = torch.stack(known).unflatten(0, (len(trained), -1))
        predicted = trainings.predict(Prediction(first, masks, utilities, stacked))
    elif len(masks) < 2 ** masks.shape[1]:
        say(
            "the scores of coalitions that were not trained are estimated. Predicting their outputs comes closer, but "
            "it needs each client alone and whole sizes, and logged values have no outputs"
        )
    return Retrained(which, masks, [*trained], utilities, predicted)
