"""Values of clients from coalitions trained with several seeds.

``flsv retrain`` and :func:`flsv.retrain` differ only in where fits take place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flsv.functional.intervals import interval_over_seeds, prediction_stderr
from flsv.functional.shapley.few_coalitions import Which, few_coalitions, retrained_shapley
from flsv.functional.shapley.predicted_outputs import whole_layers
from flsv.games.coalition_utility import Measure
from flsv.games.members import members_of
from flsv.games.performance import ModelScore, is_logged
from flsv.report.basis import BY_SCORE, RANKING_ONLY, WITHOUT_SEED
from flsv.results.text import shares_in
from flsv.retraining.fits_in_processes import UTILITY, FitsInProcesses, Predicted, Prediction
from flsv.retraining.train_fits import train_fits
from flsv.retraining.utility_store import LAST, UtilityStore, read_outputs
from flsv.retraining.whole_fits import COALITIONS, trained_in
from flsv.utilities.csv_files import NAN

#: Default number of seeds.
SEEDS = 3


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
        return self.which in RANKING_ONLY

    def values(self, measure: int = 0, without: int | None = None) -> dict[str, list[float]]:
        """Compute clients' values, interval ends and shares by one performance ``measure``, ``{column: [n]}``.
        ``without`` is a seed to leave out.
        """
        kept = [place for place, seed in enumerate(self.seeds) if seed != without]
        if self.predicted is None:
            values, half = retrained_shapley(self.masks, self.utilities[kept, :, measure])
        else:
            by_seed = self.predicted.values[kept, :, measure]
            apart = self.predicted.disagreement[kept, :, measure].mean(0)
            values, half = by_seed.mean(0), interval_over_seeds(by_seed, prediction_stderr(apart))
        columns = {
            "value": values.tolist(),
            "low": (values - half).tolist(),
            "high": (values + half).tolist(),
        }
        return columns | {
            "share": [NAN] * len(values) if self.rank_only else shares_in(columns["value"])
        }

    def columns(self, names: Sequence[str], metric: str) -> dict[str, list[float]]:
        """Return :meth:`values` by ``metric``, with columns of the shares by each other measure in ``names`` and
        without each seed.
        """
        by, columns = names.index(metric), self.values(names.index(metric))
        if self.rank_only:
            return columns
        finite = self.utilities.flatten(0, 1).isfinite().all(0).tolist()
        for place, name in enumerate(names) if len(names) > 1 else ():
            columns |= {f"{BY_SCORE}{name}": self.values(place)["share"]} if finite[place] else {}
        for seed in self.seeds if len(self.seeds) > 1 else ():
            columns[f"{WITHOUT_SEED}{seed}"] = self.values(by, without=seed)["share"]
        return columns


def stored_outputs(masks: Tensor, measure: Measure) -> Sequence[str]:
    """Return the name under which coalitions' outputs are stored. Empty if no outputs are predicted from them."""
    if len(masks) == 2 ** masks.shape[1] or not whole_layers(masks):
        return ()
    if isinstance(measure, ModelScore):
        kept = measure.by_class if measure.judged else not is_logged(measure)
        return (UTILITY,) if kept else ()
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
