"""Ground truth of the benchmark: values of clients from coalitions that were trained with several seeds.

All coalitions of a federation are trained, or, with many clients, those along orders. The Shapley value is the mean
over all orders of the utility that a client adds to those before it. In orders drawn independently chance decides which
clients come early, where they add most. So the clients are put on a circle, in random order, and all 2 n orders are
used that begin anywhere on it and go either way: each client has each place twice. Their prefixes are the arcs of the
circle, n (n - 1) coalitions beside the empty and the full one, since an order and its reverse use the same. Each of
these orders is as random as one drawn independently, so the mean is unbiased; a circle is one sample.

With as many trained coalitions the variance is a small part of that of orders and reverses drawn independently
(Castro et al. 2009): below a fifth on the shipped tables of six clients, ``tests/benchmark/test_true_values.py``.

The utilities are stored in a small CSV file per federation, with a row per coalition and seed, see
:class:`flsv.games.stored_utility.StoredUtility`. The package contains those of its own federations; :func:`make_truth`
makes them, continues where it was stopped, and makes those of your own federations.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lightning as L
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
from flsv.games.retrained_utility import RetrainedUtility
from flsv.games.stored_utility import COLUMNS, StoredUtility
from flsv.results.folder import Reporting
from flsv.retraining.side_by_side import NotSideBySide, SideBySideUtility
from flsv.sampling import FixedCohort
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.result_file import ResultFile
from flsv.utilities.seeding import generator_for, isolated_rngs

FOLDER = Path(__file__).parent / "truths"
#: Seeds with which no metric is run: no metric sees a run that is part of the truth.
SEEDS = (100, 101, 102, 103, 104)
#: Number of coalitions trained side by side, and the most clients for which all coalitions are trained.
CHUNK, MOST_CLIENTS = 192, min(10, MAX_EXACT_PLAYERS)


@dataclass(frozen=True, eq=False)
class Truth:
    """True Shapley values of a federation's clients, by training seed.

    Args:
        seeds: the s seeds of the trainings.
        values: float64 ``[s, n]``, every seed's own Shapley values.
        trained: number of coalitions trained with each seed.
        utilities: float64 ``[s, 2^n]`` of all coalitions, bit i of a coalition's number is client i; None where only
            some were trained.

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
        """Number of clients n."""
        return self.values.shape[1]

    @property
    def mean(self) -> Tensor:
        """Mean of the values over the seeds, float64 ``[n]``."""
        return self.values.mean(0)

    def interval(self, level: float = 0.9) -> Tensor:
        """Compute half the width of the mean's interval, float64 ``[n]``, by Student's t over the seeds.

        It is NaN of one seed. Seeds draw their own orders, so that the interval includes the sampling error.
        """
        count = len(self.seeds)
        variance = self.values.var(0, correction=min(1, count - 1)) / count
        return half_width(variance, torch.full_like(variance, count - 1), level)

    @property
    def ceiling(self) -> float:
        """Mean rank correlation of one seed's values with the mean of the others', which a metric of one run can hardly
        exceed. NaN of one seed. Where coalitions are sampled, sampling error makes it too low."""
        values = self.values
        others = [torch.cat([values[:s], values[s + 1 :]]).mean(0) for s in range(len(values))]
        return nanmean(spearman(mine, rest) for mine, rest in zip(values, others)) if len(values) > 1 else NAN


def exact_truth(seeds: Sequence[int], utilities: Tensor) -> Truth:
    """Compute the truth from the utilities ``[s, 2^n]`` of all coalitions."""
    values = shapley_of_table(utilities.T.contiguous()).T
    return Truth(tuple(seeds), values, utilities.shape[1], utilities)


def sampled_truth(utilities: Mapping[int, Mapping[Members, float]], num_clients: int, circles: int) -> Truth:
    """Compute the truth from the utilities of the coalitions on random circles, by seed and members.

    Each seed has circles of its own, with about circles x n (n - 1) coalitions.
    """
    found = []
    for seed, of_seed in utilities.items():

        def utility(masks: Tensor, known: Mapping[Members, float] = of_seed) -> Tensor:
            return torch.tensor([known[members] for members in members_of(masks)], dtype=torch.float64)

        found.append(values_by_circles(MemoizedGame(utility, num_clients), num_clients, seed, circles).mean(0))
    return Truth(tuple(utilities), torch.stack(found), max(map(len, utilities.values())))


def circular_orders(num_clients: int, seed: int, circle: int) -> Tensor:
    """Draw a circle of clients and return the orders that begin anywhere on it and go either way, int ``[2 n, n]``.

    Args:
        num_clients: n.
        seed: seed of the draw; other seeds have other circles.
        circle: number of the circle among those of a seed.

    Example:
        >>> orders = circular_orders(4, seed=100, circle=0)
        >>> orders.shape, [orders[:, place].bincount().tolist() for place in range(2)]
        (torch.Size([8, 4]), [[2, 2, 2, 2], [2, 2, 2, 2]])
    """
    (order,) = random_permutations(1, num_clients, generator_for(seed, "circle", circle))
    onwards = torch.stack([order.roll(-start) for start in range(num_clients)])
    return torch.cat([onwards, onwards.flip(1)])


def arcs(num_clients: int, seed: int, circles: int) -> Tensor:
    """List the distinct coalitions of a number of circles, bool ``[K, n]``, the empty and the full one first.

    Example:
        >>> arcs(20, seed=100, circles=2).shape
        torch.Size([718, 20])
    """
    both = torch.tensor([[False], [True]]).expand(2, num_clients)
    met = [prefixes(circular_orders(num_clients, seed, circle)).flatten(0, 1) for circle in range(circles)]
    found = dict.fromkeys(tuple(mask) for mask in torch.cat([both, *met]).tolist())
    return torch.tensor(list(found))


def values_by_circles(game: MemoizedGame, num_clients: int, seed: int, circles: int) -> Tensor:
    """Compute each circle's estimate of the Shapley values, float64 ``[circles, n]``.

    Every estimate is unbiased, and its sum over the clients is the utility of all less that of none.

    Args:
        game: the utility of coalitions, of which only the arcs are evaluated.
        num_clients: n.
        seed: seed of the draw.
        circles: number of circles.
    """
    each = [marginals_along(game, circular_orders(num_clients, seed, circle)) for circle in range(circles)]
    return torch.stack([marginals.mean(0).squeeze(-1).double() for marginals in each])


def truth_table(federation: Federation, folder: Path = FOLDER) -> Truth:
    """Read a federation's truth from the tables of the package or of a folder with ``<name>.csv``.

    Raises:
        ConfigurationError: there is no table, it has other settings, or coalitions are missing in it.
    """
    path = folder / f"{federation.name}.csv"
    make = "flsv.benchmark.make_truth(federation, folder)"
    if not path.is_file():
        raise ConfigurationError(f"there is no truth of {federation.name} ({path}): make it, {make}")
    known = _stored_utilities(path, truth_settings(federation, folder))
    if not known:
        raise ConfigurationError(f"{path} holds no coalition yet. Go on with the command that makes it, {make}.")
    clients = 1 + max(client for of_seed in known.values() for members in of_seed for client in (0, *members))
    wanted = {seed: members_of(_wanted(federation, clients, seed)) for seed in sorted(known)}
    missing = [(seed, members) for seed, all_of in wanted.items() for members in all_of if members not in known[seed]]
    if missing:
        seed, members = missing[0]
        raise ConfigurationError(
            f"{path}: {len(missing)} of {sum(map(len, wanted.values()))} coalitions are missing, such as "
            f"{list(members)} of seed {seed}. Go on with the command that makes it, {make}."
        )
    if federation.circles:
        by_seed = {seed: {members: known[seed][members] for members in all_of} for seed, all_of in wanted.items()}
        return sampled_truth(by_seed, clients, federation.circles)
    table = [[known[seed][members] for members in all_of] for seed, all_of in wanted.items()]
    return exact_truth([*wanted], torch.tensor(table, dtype=torch.float64))


def make_truth(federation: Federation, folder: Path = FOLDER, seeds: Sequence[int] = SEEDS) -> int:
    """Train the coalitions that a federation's table lacks, and add each to it as soon as it is trained.

    Args:
        federation: the federation.
        folder: folder of the table.
        seeds: seeds of the trainings.

    Returns:
        The number of trained coalitions.

    Raises:
        ConfigurationError: more than ten clients without circles; a table of other settings or data; a module whose
            coalition of all, trained side by side with others, differs from the run itself.
    """
    clients = len(federation.num_samples)
    if not federation.circles and clients > MOST_CLIENTS:
        raise ConfigurationError(
            f"{federation.name}: {clients} clients make {2**clients:,} coalitions to train for every seed; the limit "
            f"is {MOST_CLIENTS} clients. Say `circles: 3` in its file: some {3 * clients * (clients - 1):,} are "
            "trained then, which give each client each place in an order equally often."
        )
    trained = 0
    for seed in seeds:
        game = partial(train_coalitions, federation, seed=seed, compare=trained == 0)
        path, said = folder / f"{federation.name}.csv", truth_settings(federation, folder)
        kept = StoredUtility(game, path, said, seed=seed, at_once=CHUNK)
        before = len(kept.known)
        kept(_wanted(federation, clients, seed))
        trained += len(kept.known) - before
    federation.release()
    return trained


def truth_settings(federation: Federation, folder: Path) -> dict[str, str]:
    """Return the settings on which a coalition's utility depends, and for tables outside of the package the identity of
    data and versions. The data's location and the number of coalitions are not included."""
    said = {name: getattr(federation, name) for name in ("rounds", "data", "model", "performance", "mode", "attacks")}
    text = json.dumps({**said, "local_epochs": federation.local_epochs}, sort_keys=True)
    own = {} if folder == FOLDER else {"data and versions": federation.identity.key}
    return {"settings": hashlib.sha256(text.encode()).hexdigest()[:12], **own}


def _stored_utilities(path: Path, said: Mapping[str, str]) -> dict[int, dict[Members, float]]:
    """Read the utilities of a table, by seed and members."""
    found: dict[int, dict[Members, float]] = {}
    for row in ResultFile(path, COLUMNS, said).rows:
        found.setdefault(row["seed"], {})[row["coalition"]] = row["utility"]
    return found


def _wanted(federation: Federation, clients: int, seed: int) -> Tensor:
    """List the coalitions from which a seed's truth is computed, bool ``[K, n]``."""
    return arcs(clients, seed, federation.circles) if federation.circles else all_coalitions(clients)


def train_coalitions(federation: Federation, masks: Tensor, seed: int, compare: bool = False) -> Tensor:
    """Train a federation of each coalition's members, by FedAvg with their samples as weights.

    Args:
        federation: the federation of the clients.
        masks: bool ``[K, n]``, a coalition's members in each row; an empty coalition is the untrained model.
        seed: seed of the initial weights, which all coalitions share, and of the clients' batches.
        compare: also train the coalition of all by itself, and compare both models.

    Returns:
        Float64 ``[K]``, the federation's own performance (more is better).

    Raises:
        ConfigurationError: a module that cannot be trained as rows of a batched one; a coalition of all that ends with
            another model when it is trained by itself.
    """

    def trainer(cohort: FixedCohort) -> L.Trainer:
        loop = FederatedLoop(
            sampler=cohort,
            uploads=[*federation.attackers()],
            filters=[OutlierFilter(threshold=None)],
            local_epochs=federation.local_epochs,
            seed=seed,
            reporting=Reporting(table=False, figures=0, files=False),
        )
        return federation.trainer(loop)

    # The loop's own seed: with the same seed it starts from the same weights.
    with isolated_rngs(seed, "benchmark"), quiet():
        alone = RetrainedUtility(
            trainer,
            federation.module(),
            federation.datamodule(),
            federation.performance,
            max_clients=masks.shape[1],
            mode=federation.mode,
        )
        try:
            return SideBySideUtility(alone, seed, compare)(masks)
        except NotSideBySide as error:
            raise error.__cause__ or error from None
