"""Training of many coalitions, with one or several seeds: as rows of one batched model, or each by a fit of its own.

``flsv retrain``, :func:`flsv.retrain` and the benchmark's ground truth use this algorithm. They differ in where fits
take place, see :class:`Trainings`. The utilities of coalitions whose training has ended are in a
:class:`flsv.retraining.utility_store.UtilityStore`, and are not trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from flsv.core import ALONE, Ranks
from flsv.core.ranks import balance_load
from flsv.functional.shapley.few_coalitions import Which, few_coalitions, retrained_shapley
from flsv.games.members import Members, members_of
from flsv.results.text import joined, shares_in
from flsv.retraining.retrained_utility import TrainedGame
from flsv.retraining.side_by_side import NotSideBySide, SideBySideUtility
from flsv.retraining.utility_store import LAST, UtilityStore
from flsv.utilities.csv_files import NAN
from flsv.utilities.digest import digest
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.supervisor import ChildFailed

#: Default number of seeds if the coalitions are trained side by side.
SEEDS = 3


def coalition_seed(seed: int, members: Members) -> int:
    """Return the seed of a coalition's fit in the trainings with ``seed``: the same for all coalitions, so that they
    start from the same weights and their clients take the same batches."""
    return seed


@dataclass(frozen=True)
class Fit:
    """Result of a coalition's fit, as the store needs it.

    Args:
        values: ``[C]``, the utilities of the trained model by each performance.
        empty: ``[C]``, the utilities of the model before training: those of the empty coalition.
        start: a hash of the model before training.
        model: ``[2, P]``, the trained model and the model before training, if they were asked for.
    """

    values: list[float]
    empty: list[float]
    start: str
    model: Tensor | None = None


class Trainings(Protocol):
    """A place where coalitions are trained.

    Attributes:
        at_once: the number of fits that run at once.
    """

    at_once: int

    def rows(self, masks: Tensor, seed: int, compare: bool) -> Tensor:
        """Train the coalitions ``masks [K, n]`` as rows of one batched model, and return their utilities ``[K, C]``.

        Args:
            masks: the coalitions.
            seed: the seed of the trainings.
            compare: whether to check the trainings against fits.

        Raises:
            NotSideBySide: the coalitions cannot be trained so.
        """

    def fits(self, coalitions: Sequence[Members], seed: int) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        """Train each coalition by a fit of its own, and yield it when its fit has ended."""


class Here:
    """Trainings in this process.

    Args:
        game: a function that makes the game of a seed, which trains coalitions.
        within: a context for the game and its trainings with a seed.
    """

    at_once = 1

    def __init__(
        self,
        game: Callable[[int], TrainedGame],
        within: Callable[[int], AbstractContextManager[None]] = lambda seed: nullcontext(),
    ) -> None:
        self._game, self._within = lru_cache(maxsize=1)(game), within

    def rows(self, masks: Tensor, seed: int, compare: bool) -> Tensor:
        with self._within(seed):
            return SideBySideUtility(self._game(seed), seed, compare)(masks)

    def fits(self, coalitions: Sequence[Members], seed: int) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        for members in coalitions:
            with self._within(seed):
                fit = fit_of(self._game(seed), members)
            yield members, fit


def fit_of(game: TrainedGame, members: Members) -> Fit:
    """Train a coalition, and return what is known of its fit."""
    masks = torch.zeros(2, game.num_players, dtype=torch.bool)
    masks[1, list(members)] = True
    empty, values = game(masks).view(2, -1).tolist()
    return Fit(values, empty, digest(game.initial).hex())


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
            _train_fits(trainings, num_samples, masks, seed, store, ranks, say)
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
        say(_progress(masks, seed, store))
    if missing:
        store.sort()
    return len(missing)


def _progress(masks: Tensor, seed: int, store: UtilityStore) -> str:
    left = len(store.missing(seed, members_of(masks)))
    return f"seed {seed}: {len(masks) - left} of {len(masks)} coalitions"


def _train_fits(
    trainings: Trainings,
    num_samples: Sequence[int],
    masks: Tensor,
    seed: int,
    store: UtilityStore,
    ranks: Ranks,
    say: Callable[[str], None],
) -> None:
    """Train the coalitions that a store lacks, each by a fit of its own."""
    missing = store.missing(seed, members_of(masks))
    # The empty coalition's model is that of any fit before training.
    wanted = [members for members in missing if members] or [(0,)][: len(missing)]
    owners = balance_load([float(sum(num_samples[client] for client in each)) for each in wanted], ranks.size)
    parts = [[each for each, owner in zip(wanted, owners) if owner == rank] for rank in range(ranks.size)]
    failed: dict[Members, ChildFailed] = {}
    starts: set[str] = set()
    for members, fit in _on_ranks(trainings, parts, seed, ranks):
        if isinstance(fit, ChildFailed):
            failed[members] = fit
            continue
        starts.add(fit.start)
        _check_starts(starts)
        for coalition, values in ((members, fit.values), ((), fit.empty)):
            if store.missing(seed, [coalition]):
                store.add(seed, coalition, {LAST: [[value] for value in values]})
        say(_progress(masks, seed, store))
    if missing:
        store.sort()
    if failed:
        raise failed_fits(failed)


def failed_fits(failed: Mapping[Members, ChildFailed]) -> ConfigurationError:
    """Return the error that names coalitions whose fits have failed, and why."""
    reasons: dict[str, list[Members]] = {}
    for members, why in failed.items():
        reasons.setdefault(f"{why}".rstrip("."), []).append(members)
    told = [f"{listed(of, show=_clients)}: {why}" for why, of in reasons.items()]
    return ConfigurationError(
        f"{len(failed)} coalition{'s' * (len(failed) > 1)} failed to train, {'; '.join(told)}. The others are kept: "
        "start the same again to go on."
    )


def _clients(members: Members) -> str:
    return f"client{'s' * (len(members) > 1)} {joined(map(str, members))}"


def _on_ranks(
    trainings: Trainings, parts: Sequence[Sequence[Members]], seed: int, ranks: Ranks
) -> Iterator[tuple[Members, Fit | ChildFailed]]:
    """Yield the fits of all ranks, of which each trains its part of the coalitions."""
    if ranks.size == 1:
        yield from trainings.fits(parts[0], seed)
        return
    for start in range(0, max(map(len, parts)), trainings.at_once):
        mine: dict[Members, Fit | ChildFailed] | Exception
        try:
            mine = dict(trainings.fits(parts[ranks.rank][start : start + trainings.at_once], seed))
        except Exception as error:  # is raised on all ranks
            mine = error
        for part in ranks.all_gather(mine, "coalitions' trainings"):
            if isinstance(part, Exception):
                raise part
            yield from part.items()


def _check_starts(starts: set[str]) -> None:
    if len(starts) > 1:
        raise ConfigurationError(
            "two coalitions started from different weights, although their seed is the same, so that their models do "
            "not tell what a client adds: the module draws its weights by a generator of its own. Let torch's global "
            "generator draw them, which is seeded."
        )


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
