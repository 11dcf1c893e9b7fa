"""Training of many coalitions, with one or several seeds: as rows of one batched model, or each by a fit of its own.

``flsv retrain``, :func:`flsv.retrain` and the benchmark's ground truth use this algorithm. They differ in where fits
take place, see :class:`Trainings`. The utilities of coalitions whose training has ended are in a
:class:`flsv.retraining.utility_store.UtilityStore`, and are not trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flsv.core import ALONE, Ranks
from flsv.functional.shapley.few_coalitions import Which, few_coalitions, retrained_shapley
from flsv.games.members import Members, members_of
from flsv.results.text import shares_in
from flsv.retraining.side_by_side import NotSideBySide
from flsv.retraining.train_fits import Fits, told, train_fits
from flsv.retraining.utility_store import LAST, UtilityStore
from flsv.utilities.csv_files import NAN

#: Default number of seeds if the coalitions are trained side by side.
SEEDS = 3


class Trainings(Fits, Protocol):
    """A place where coalitions are trained by fits, or as rows of one batched model."""

    def rows(self, masks: Tensor, seed: int, compare: bool) -> Tensor:
        """Train the coalitions ``masks [K, n]`` as rows of one batched model, and return their utilities ``[K, C]``.

        Args:
            masks: the coalitions.
            seed: the seed of the trainings.
            compare: whether to check the trainings against fits.

        Raises:
            NotSideBySide: the coalitions cannot be trained so.
        """


@dataclass(frozen=True)
class Retrained:
    """Coalitions that were trained with one or several seeds.

    Args:
        which: the name of the design.
        masks: bool ``[K, n]``, the coalitions.
        seeds: the s seeds.
        utilities: float64 ``[s, K, C]``, the utilities by each performance.
    """

    which: Which
    masks: Tensor
    seeds: list[int]
    utilities: Tensor


def train_seeds(
    trainings: Trainings,
    num_samples: Sequence[int],
    which: Which,
    first: int,
    seeds: int | None,
    store: UtilityStore,
    ranks: Ranks = ALONE,
    say: Callable[[str], None] = lambda text: None,
) -> Retrained:
    """Train the coalitions of a design with several seeds, and return their utilities.

    Args:
        trainings: the place where coalitions are trained.
        num_samples: ``[n]``, the clients' numbers of samples.
        which: the design, see :func:`flsv.functional.few_coalitions`. ``"auto"`` stands for ``"both"`` if coalitions
            cannot be trained as rows of one batched model.
        first: the first seed; the next ones follow it.
        seeds: the number of seeds; None: three if coalitions are trained as rows, else one.
        store: the utilities that are known, to which the others are added.
        ranks: the processes among which the coalitions are divided; each of them returns all utilities.
        say: called with lines about the progress.

    Raises:
        ConfigurationError: the federation allows no training of coalitions, or some trainings failed; the utilities of
            the others are in the store.
    """
    masks, trained, together = few_coalitions(len(num_samples), which), list[int](), True
    default = seeds is None
    while not trained or len(trained) < (seeds or 1):
        seed = first + len(trained)

        if together:
            try:
                train_rows(trainings.rows, masks, seed, store, compare=not trained, ranks=ranks, say=say)
            except NotSideBySide as error:
                if default and trained:
                    break  # those of the first seed were known, and of fits one seed is the default
                together = False
                if which == "auto" and not trained:
                    which, masks = "both", few_coalitions(len(num_samples), "both")
                say(f"{len(masks) - 1} trainings follow, each by a fit of its own: {error}")
        if not together:
            train_fits(trainings, num_samples, members_of(masks), seed, store, ranks, say)
        trained.append(seed)
        seeds = seeds or (SEEDS if together else 1)
    return Retrained(which, masks, trained, torch.stack([store.table(seed, masks) for seed in trained]))


def train_rows(
    rows: Callable[[Tensor, int, bool], Tensor],
    masks: Tensor,
    seed: int,
    store: UtilityStore,
    compare: bool,
    at_once: int | None = None,
    ranks: Ranks = ALONE,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Train the coalitions that a store lacks as rows of one batched model, and return their number.

    Args:
        rows: the function that trains coalitions, see :meth:`Trainings.rows`.
        masks: bool ``[K, n]``, the coalitions.
        seed: the seed of the trainings.
        store: the utilities that are known, to which the others are added.
        compare: whether to check the first trainings against fits.
        at_once: the number of coalitions that are trained at once; None: all.
        ranks: the processes among which the coalitions are divided.
        say: called with a line about the progress whenever coalitions have been trained.

    Raises:
        NotSideBySide: the coalitions cannot be trained so; on all ranks, if on one.
    """
    place = {members: index for index, members in enumerate(members_of(masks))}
    missing = store.missing(seed, [*place])
    for some in torch.arange(len(missing)).split(at_once or len(missing) or 1):
        mine = [missing[i] for i in some[ranks.rank :: ranks.size].tolist()]
        found: dict[Members, list[float]] | Exception = {}
        try:
            if mine:
                table = rows(masks[[place[members] for members in mine]], seed, compare and not some[0])
                found = dict(zip(mine, table.double().view(len(mine), -1).tolist()))
        except Exception as error:
            found = error
        for part in ranks.all_gather(found, "coalitions side by side"):
            if isinstance(part, Exception):
                raise part
            for members, values in part.items():
                store.add(seed, members, {LAST: [[value] for value in values]})
        say(told(seed, len(place) - len(store.missing(seed, [*place])), len(place)))
    if missing:
        store.sort()
    return len(missing)


def values_of(masks: Tensor, utilities: Tensor, rank_only: bool) -> dict[str, list[float]]:
    """Compute clients' values, the ends of their intervals and their shares, ``{column: [n]}``.

    Args:
        masks: bool ``[K, n]``, the K coalitions of n clients.
        utilities: ``[s, K]``, the coalitions' utilities with s seeds.
        rank_only: whether the coalitions only rank clients: those that are missing would change amounts by a third, so
            that the shares are NaN.
    """
    values, half = retrained_shapley(masks, utilities)
    columns = {"value": values.tolist(), "low": (values - half).tolist(), "high": (values + half).tolist()}
    return columns | {"share": [NAN] * masks.shape[1] if rank_only else shares_in(columns["value"])}
