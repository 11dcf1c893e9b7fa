"""Training of many coalitions, with one or several seeds: as rows of one batched model, or each by a fit of its own.

``flsv retrain``, :func:`flsv.retrain` and the benchmark's ground truth use this algorithm. They differ in where fits
take place, see :class:`Trainings`. The utilities of coalitions whose training has ended are in a
:class:`flsv.retraining.utility_store.UtilityStore`, and are not trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from flsv.functional.shapley.few_coalitions import Which, few_coalitions, retrained_shapley
from flsv.games.members import Members, members_of
from flsv.report.basis import RANKING_ONLY
from flsv.results.text import shares_in
from flsv.retraining.side_by_side import NotSideBySide
from flsv.retraining.train_fits import Fits, gathered, train_fits
from flsv.retraining.utility_store import LAST, UtilityStore
from flsv.utilities.csv_files import NAN

#: Default number of seeds if the coalitions are trained side by side.
SEEDS = 3


class Trainings(Fits, Protocol):
    """Protocol of objects that train coalitions by fits or as rows of one batched model, in this process or others."""

    def rows(self, masks: Tensor, seed: int, compare: bool) -> Tensor:
        """Train the coalitions ``masks [K, n]`` as rows of one batched model, and return their utilities.

        Args:
            masks: the coalitions.
            seed: the seed of the trainings.
            compare: whether to train the full coalition and one drawn at random by fits, too, and to compare their
                models with those of the rows.

        Returns:
            The utilities by C performance measures, float64 ``[K, C]``.

        Raises:
            NotSideBySide: the coalitions cannot be trained as rows, or the compared models differ.
        """


@dataclass(frozen=True)
class Retrained:
    """Coalitions that were trained with one or several seeds.

    Args:
        which: the name of the set of coalitions, see :func:`flsv.functional.few_coalitions`.
        masks: bool ``[K, n]``, the coalitions.
        seeds: the s seeds.
        utilities: float64 ``[s, K, C]``, the utilities by C performance measures.
    """

    which: Which
    masks: Tensor
    seeds: list[int]
    utilities: Tensor

    @property
    def rank_only(self) -> bool:
        """Return whether the coalitions are too few for values to pay by: values from them only rank the clients, since
        the other coalitions would change the amounts by a third."""
        return self.which in RANKING_ONLY

    def values(self, utilities: Tensor) -> dict[str, list[float]]:
        """Compute clients' values, the ends of their intervals and their shares, ``{column: [n]}``.

        Args:
            utilities: ``[s, K]``, the coalitions' utilities by one performance measure, with s of the seeds.

        Returns:
            The columns ``value``, ``low``, ``high`` and ``share``; the shares are NaN if :attr:`rank_only`.
        """
        values, half = retrained_shapley(self.masks, utilities)
        columns = {"value": values.tolist(), "low": (values - half).tolist(), "high": (values + half).tolist()}
        return columns | {"share": [NAN] * len(values) if self.rank_only else shares_in(columns["value"])}


def train_seeds(
    trainings: Trainings,
    num_samples: Sequence[int],
    which: Which,
    first: int,
    seeds: int | None,
    store: UtilityStore,
    say: Callable[[str], None] = lambda text: None,
) -> Retrained:
    """Train a set of coalitions with several seeds, and return their utilities.

    The coalitions are trained as rows of one batched model or, if that is impossible, each by a fit of its own.

    Args:
        trainings: the object that trains coalitions.
        num_samples: ``[n]``, the clients' numbers of samples.
        which: the name of the set of coalitions, see :func:`flsv.functional.few_coalitions`. ``"auto"`` stands for
            ``"both"`` if coalitions cannot be trained as rows of one batched model.
        first: the first seed; the others are ``first + 1``, ``first + 2`` and so on.
        seeds: the number of seeds; None: three if coalitions are trained as rows, else one.
        store: the store of utilities. Coalitions that it contains are not trained; the others' utilities are added.
        say: called with lines about the progress.

    Raises:
        ConfigurationError: the federation does not allow to train coalitions, or some trainings failed. The store then
            contains the utilities of those that ended.
    """
    masks, trained, as_rows = few_coalitions(len(num_samples), which), list[int](), True
    while len(trained) < (seeds or (SEEDS if as_rows else 1)):
        seed = first + len(trained)
        try:
            if as_rows:
                train_rows(trainings.rows, masks, seed, store, compare=not trained, say=say)
        except NotSideBySide as error:
            if seeds is None and trained:
                break  # those of the first seed were known, and of fits one seed is the default
            as_rows = False
            if which == "auto" and not trained:
                which, masks = "both", few_coalitions(len(num_samples), "both")
            say(f"{len(masks) - 1} trainings follow, each by a fit of its own: {error}")
        if not as_rows:
            train_fits(trainings, num_samples, members_of(masks), seed, store, say)
        trained.append(seed)
    return Retrained(which, masks, trained, torch.stack([store.table(seed, masks) for seed in trained]))


def train_rows(
    rows: Callable[[Tensor, int, bool], Tensor],
    masks: Tensor,
    seed: int,
    store: UtilityStore,
    compare: bool,
    at_once: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Train those coalitions that a store lacks, as rows of one batched model, and return the number of trained ones.
    The store's ranks divide the coalitions.

    Args:
        rows: the function that trains coalitions, see :meth:`Trainings.rows`.
        masks: bool ``[K, n]``, the coalitions.
        seed: the seed of the trainings.
        store: the store of utilities, to which those of the trained coalitions are added.
        compare: whether ``rows`` also trains some of the first coalitions by fits, and compares the models.
        at_once: the number of coalitions that are trained at once; None: all.
        say: called with a line about the progress whenever coalitions have been trained.

    Raises:
        NotSideBySide: the coalitions cannot be trained as rows. If one rank has this error, all ranks raise it.
    """
    coalitions, ranks = members_of(masks), store.ranks
    missing = store.missing(seed, coalitions)
    size = at_once or max(1, len(missing))

    def train(some: Sequence[Members], check: bool) -> Iterable[tuple[Members, list[float]]]:
        if not some:
            return ()
        table = rows(masks[[coalitions.index(members) for members in some]], seed, check)
        return zip(some, table.double().view(len(some), -1).tolist())

    for start in range(0, len(missing), size):
        mine = missing[start : start + size][ranks.rank :: ranks.size]
        for members, values in gathered(ranks, partial(train, mine, compare and not start), "coalitions side by side"):
            store.add(seed, members, {LAST: [[value] for value in values]})
        say(store.progress(seed, coalitions))
    if missing:
        store.sort()
    return len(missing)
