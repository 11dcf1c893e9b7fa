"""Ground truth of the benchmark: Shapley values of clients from coalitions that were trained with several seeds.

With few clients, all coalitions of a federation are trained. With many clients, coalitions are sampled as follows. The
Shapley value of a client is the mean, over all orders of the n clients, of the utility that the client adds to the
clients before it. A client adds most if it comes early, and in independent random orders chance decides which clients
come early. So the clients are put on a circle in random order, and all 2 n orders are used that begin anywhere on the
circle and go in either direction: each client then has each position twice. The coalitions to train are the arcs of the
circle: n (n - 1) coalitions, the empty and the full coalition. Each of the orders has the distribution of a random
order, so the mean is unbiased; a circle counts as one sample.

For the same number of trained coalitions, the variance is much smaller than with independent random orders and their
reverses (Castro et al. 2009): less than a fifth on the package's tables of six clients, see
``tests/benchmark/test_true_values.py``.

The utilities are stored in one CSV file per federation, with a row per coalition and seed, see
:class:`flsv.retraining.utility_store.UtilityStore`. The package contains the files of its own federations.
:func:`make_truth` creates such files for your own federations, one fit per coalition and seed, on all cores. It
continues after an interruption.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from flsv.benchmark.federation import Federation, quiet
from flsv.benchmark.scores import NAN, nanmean, spearman
from flsv.federation import FederatedLoop
from flsv.filters import OutlierFilter
from flsv.functional.confidence import half_width
from flsv.functional.shapley.enumeration import MAX_EXACT_PLAYERS, all_coalitions, shapley_of_table
from flsv.functional.shapley.memoized_game import MemoizedGame
from flsv.functional.shapley.permutation import marginals_along
from flsv.functional.shapley.random_coalitions import prefixes, random_permutations
from flsv.games.members import Members, members_of
from flsv.games.performance import performance_of
from flsv.results.folder import Reporting
from flsv.retraining.copied_fits import in_this_process
from flsv.retraining.fits_in_processes import UTILITY, FitsInProcesses, Piece, Prediction, work_on
from flsv.retraining.fits_in_processes import Federation as Retrainable
from flsv.retraining.train_fits import train_fits
from flsv.retraining.utility_store import UtilityStore
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.forks import cores, why_not_fork
from flsv.utilities.seeding import generator_for, isolated_rngs
from flsv.utilities.supervisor import supervise

FOLDER = Path(__file__).parent / "truths"
#: Training seeds of the ground truth; no metric is run with these seeds.
SEEDS = (100, 101, 102, 103, 104)
#: Largest number of clients for which all coalitions are trained.
MOST_CLIENTS = min(10, MAX_EXACT_PLAYERS)


@dataclass(frozen=True, eq=False)
class Truth:
    """Shapley values of a federation's n clients from trained coalitions, by training seed.

    Args:
        seeds: the s seeds with which coalitions were trained.
        values: float64 ``[s, n]``, the Shapley values for each seed.
        trained: number of coalitions trained with a seed; if seeds differ, the largest number.
        utilities: float64 ``[s, 2^n]``, utilities of all coalitions, where bit i of a coalition's number stands for
            client i; None if only some coalitions were trained.

    Example:
        >>> from flsv.benchmark import federation, truth_table
        >>> truth = truth_table(federation("digits_sizes"))
        >>> truth.utilities.shape, truth.mean.shape, truth.ceiling > 0.8
        (torch.Size([5, 64]), torch.Size([6]), True)
        >>> truth = truth_table(federation("digits_20_clients"))
        >>> truth.utilities, truth.mean.shape, truth.trained < 2**20
        (None, torch.Size([20]), True)
    """

    seeds: tuple[int, ...]
    values: Tensor
    trained: int
    utilities: Tensor | None = None

    @property
    def num_clients(self) -> int:
        """Number n of clients."""
        return self.values.shape[1]

    @property
    def mean(self) -> Tensor:
        """Mean of the Shapley values over the seeds, float64 ``[n]``."""
        return self.values.mean(0)

    def interval(self, level: float = 0.9) -> Tensor:
        """Compute half the width of the interval of :attr:`mean`, float64 ``[n]``, by Student's t over the seeds.

        It is NaN for a single seed. Each seed draws its own orders of clients, so the interval includes the sampling
        error.
        """
        count = len(self.seeds)
        variance = self.values.var(0, correction=min(1, count - 1)) / count
        return half_width(variance, torch.full_like(variance, count - 1), level)

    @property
    def ceiling(self) -> float:
        """Mean, over the seeds, of the rank correlation of a seed's values with the mean values of the other seeds.

        A metric of a single run can hardly exceed it. It is NaN for a single seed. If coalitions are sampled, the
        sampling error makes it too low."""
        values = self.values
        others = [torch.cat([values[:s], values[s + 1 :]]).mean(0) for s in range(len(values))]
        return nanmean(spearman(mine, rest) for mine, rest in zip(values, others)) if len(values) > 1 else NAN


def exact_truth(seeds: Sequence[int], utilities: Tensor) -> Truth:
    """Compute the ground truth from the utilities ``[s, 2^n]`` of all coalitions for s training seeds."""
    values = shapley_of_table(utilities.T.contiguous()).T
    return Truth(tuple(seeds), values, utilities.shape[1], utilities)


def sampled_truth(utilities: Mapping[int, Mapping[Members, float]], num_clients: int, circles: int) -> Truth:
    """Compute the ground truth of n clients from the utilities of the coalitions that :func:`arcs` returns.

    There are about ``circles`` times n (n - 1) such coalitions for each seed.

    Args:
        utilities: ``{seed: {members: utility}}``, the utility of each trained coalition.
        num_clients: number n of clients.
        circles: number of circles per seed.
    """
    found = []
    for seed, of_seed in utilities.items():

        def utility(masks: Tensor, known: Mapping[Members, float] = of_seed) -> Tensor:
            return torch.tensor([known[members] for members in members_of(masks)], dtype=torch.float64)

        found.append(values_by_circles(MemoizedGame(utility, num_clients), num_clients, seed, circles).mean(0))
    return Truth(tuple(utilities), torch.stack(found), max(map(len, utilities.values())))


def circular_orders(num_clients: int, seed: int, circle: int) -> Tensor:
    """Draw a random circle of n clients and return all orders along it, int64 ``[2 n, n]``.

    The orders begin at each client and go in both directions.

    Args:
        num_clients: number n of clients.
        seed: training seed; each seed has its own circles.
        circle: number of the circle among the circles of the seed.

    Example:
        >>> orders = circular_orders(4, seed=100, circle=0)
        >>> orders.shape, [orders[:, place].bincount().tolist() for place in range(2)]
        (torch.Size([8, 4]), [[2, 2, 2, 2], [2, 2, 2, 2]])
    """
    (order,) = random_permutations(1, num_clients, generator_for(seed, "circle", circle))
    onwards = torch.stack([order.roll(-start) for start in range(num_clients)])
    return torch.cat([onwards, onwards.flip(1)])


def arcs(num_clients: int, seed: int, circles: int) -> Tensor:
    """Return the K distinct coalitions whose members are neighbors on one of a seed's circles, bool ``[K, n]``; the
    empty and the full coalition come first. See :func:`circular_orders`.

    Example:
        >>> arcs(20, seed=100, circles=2).shape
        torch.Size([718, 20])
    """
    both = torch.tensor([[False], [True]]).expand(2, num_clients)
    met = [prefixes(circular_orders(num_clients, seed, circle)).flatten(0, 1) for circle in range(circles)]
    found = dict.fromkeys(tuple(mask) for mask in torch.cat([both, *met]).tolist())
    return torch.tensor(list(found))


def values_by_circles(game: MemoizedGame, num_clients: int, seed: int, circles: int) -> Tensor:
    """Estimate the Shapley values separately from each circle: the mean of the clients' marginal contributions over the
    circle's :func:`circular_orders`. Return the estimates, float64 ``[circles, n]``.

    Every estimate is unbiased; its sum over the clients is the utility of all clients minus that of no client.

    Args:
        game: utility of coalitions; only the coalitions along the circles are evaluated.
        num_clients: number n of clients.
        seed: training seed, which determines the circles.
        circles: number of circles.
    """
    each = [marginals_along(game, circular_orders(num_clients, seed, circle)) for circle in range(circles)]
    return torch.stack([marginals.mean(0).squeeze(-1).double() for marginals in each])


def truth_table(federation: Federation, folder: Path = FOLDER) -> Truth:
    """Return the ground truth of a federation from its table of utilities, the file ``<name>.csv`` in ``folder``.

    Raises:
        ConfigurationError: there is no table, the table was made with other settings, or coalitions are missing in it.
    """
    path = folder / f"{federation.name}.csv"
    make = "flsv.benchmark.make_truth(federation, folder)"
    if not path.is_file():
        raise ConfigurationError(f"there is no truth of {federation.name} ({path}): make it, {make}")
    store = UtilityStore(path, [UTILITY], truth_settings(federation, folder))
    if not store.seeds:
        raise ConfigurationError(f"{path} holds no coalition yet. Go on with the command that makes it, {make}.")
    clients = 1 + max(client for seed in store.seeds for members in store.coalitions(seed) for client in (0, *members))
    wanted = {seed: _wanted(federation, clients, seed) for seed in store.seeds}
    missing = [(seed, each) for seed, masks in wanted.items() for each in store.missing(seed, members_of(masks))]
    if missing:
        seed, members = missing[0]
        raise ConfigurationError(
            f"{path}: {len(missing)} of {sum(map(len, wanted.values()))} coalitions are missing, such as "
            f"{list(members)} of seed {seed}. Go on with the command that makes it, {make}."
        )
    table = {seed: store.table(seed, masks)[:, 0] for seed, masks in wanted.items()}
    if federation.circles:
        by_seed = {seed: dict(zip(members_of(masks), table[seed].tolist())) for seed, masks in wanted.items()}
        return sampled_truth(by_seed, clients, federation.circles)
    return exact_truth([*wanted], torch.stack([*table.values()]))


def make_truth(federation: Federation, folder: Path = FOLDER, seeds: Sequence[int] = SEEDS) -> int:
    """Train the coalitions that a federation's table lacks, and add them to the table as soon as they are trained.

    Args:
        federation: the federation.
        folder: folder of the table ``<name>.csv``.
        seeds: training seeds.

    Returns:
        The number of trained coalitions.

    Raises:
        ConfigurationError: the federation has more than ten clients but no ``circles``; the table was made with other
            settings or data; or a training failed.
    """
    clients = len(federation.num_samples)
    if not federation.circles and clients > MOST_CLIENTS:
        raise ConfigurationError(
            f"{federation.name}: {clients} clients make {2**clients:,} coalitions to train for every seed; the limit "
            f"is {MOST_CLIENTS} clients. Say `circles: 3` in its file: some {3 * clients * (clients - 1):,} are "
            "trained then, which give each client each place in an order equally often."
        )
    store, trained = UtilityStore(folder / f"{federation.name}.csv", [UTILITY], truth_settings(federation, folder)), 0
    for seed in seeds:
        masks = _wanted(federation, clients, seed)
        trained += len(store.missing(seed, members_of(masks)))
        _train(federation, masks, seed, store)
    federation.release()
    return trained


def truth_settings(federation: Federation, folder: Path) -> dict[str, str]:
    """Return ``{name: hash}`` of the settings on which a coalition's utility depends.

    For tables outside of the package, data and versions are included. The location of the data and the number of
    circles are not.
    """
    said = {name: getattr(federation, name) for name in ("rounds", "data", "model", "performance", "mode", "attacks")}
    text = json.dumps({**said, "local_epochs": federation.local_epochs}, sort_keys=True)
    own = {} if folder == FOLDER else {"data and versions": federation.identity.key}
    return {"settings": hashlib.sha256(text.encode()).hexdigest()[:12], **own}


def _wanted(federation: Federation, clients: int, seed: int) -> Tensor:
    """Return the K coalitions from which the ground truth for a seed is computed, bool ``[K, n]``."""
    return arcs(clients, seed, federation.circles) if federation.circles else all_coalitions(clients)


def train_coalitions(federation: Federation, masks: Tensor, seed: int) -> Tensor:
    """Train each coalition of clients by FedAvg, with numbers of samples as weights, and return their performances.

    Args:
        federation: the federation of the clients.
        masks: bool ``[K, n]``, the members of each of the K coalitions; the empty coalition has the untrained model.
        seed: seed of the initial weights, which all coalitions share, and of the clients' batches.

    Returns:
        Float64 ``[K]``, the performance of each coalition's model, as the federation defines it; more is better.

    Raises:
        ConfigurationError: a training failed.
    """
    store = UtilityStore(None, [UTILITY])
    _train(federation, masks, seed, store)
    return store.table(seed, masks)[:, 0]


def _train(federation: Federation, masks: Tensor, seed: int, store: UtilityStore) -> None:
    """Train the coalitions that a store lacks, each by a fit in a process of its own."""
    measure = performance_of("make_truth", federation.performance, federation.mode)
    data, samples = federation.datamodule(), federation.num_samples.tolist()

    def work(piece: Piece | Prediction) -> Any:
        # The loop's own seed: with the same seed it starts from the same weights.
        with isolated_rngs(piece.seed, "benchmark"), quiet(), TemporaryDirectory() as folder:
            loop = FederatedLoop(
                uploads=[*federation.attackers()],
                filters=[OutlierFilter(threshold=None)],
                local_epochs=federation.local_epochs,
                seed=piece.seed,
                reporting=Reporting(table=False, figures=0, files=False),
            )
            return work_on(piece, Retrainable(federation.trainer(loop), federation.module(), data, measure), folder)

    run: Any = supervise if why_not_fork() is None else partial(in_this_process, data, None)
    fits = FitsInProcesses(lambda piece: partial(work, piece), len(samples), cores(), run=run)
    train_fits(fits, samples, members_of(masks), seed, store)
