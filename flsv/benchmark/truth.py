"""The ground truth of the benchmark: values of clients from coalitions that were trained with several seeds.

All coalitions of a federation, or of many clients those along orders. The Shapley value is the mean over all orders of
what a client adds to those before it. Orders drawn alone leave it to chance who comes early, where a client adds most.
So the clients are put on a circle, in random order, and all 2 n orders are walked that begin anywhere on it and go
either way: each client has each place twice. Their prefixes are the arcs of the circle, n (n - 1) coalitions beside the
empty one and that of all, since an order and its reverse use the same. An order that begins anywhere is as random as
one that is drawn, so the mean is unbiased; a circle is one sample.

For as many trained coalitions the variance is a small part of that of orders and their reverses that are drawn alone
(Castro et al. 2009): below a fifth on the shipped tables of six clients, ``tests/benchmark/test_true_values.py``.

The utilities are kept as a small CSV file a federation, a row a coalition and seed. The package holds those of its own
federations; ``flsv bench --truth`` makes them, goes on where it was stopped, and makes those of federations of one's
own.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flsv._lightning.durable import append, whole_lines
from flsv.benchmark.federation import Federation
from flsv.benchmark.lattice import check_lattice, train_coalitions
from flsv.benchmark.scores import NAN, half_width, mean, spearman
from flsv.errors import ConfigurationError
from flsv.functional.shapley.game import MAX_EXACT_PLAYERS, MemoizedGame, all_coalitions, shapley_of_table
from flsv.functional.shapley.permutation import marginals_along
from flsv.functional.shapley.sampling import prefixes, random_permutations
from flsv.seeding import generator_for

Members = tuple[int, ...]


class Truth(ABC):
    """The Shapley values of each seed, and their mean, ceiling and intervals.

    Args:
        seeds: of the trainings, s of them.
    """

    seeds: tuple[int, ...]

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """Float64 ``[s, n]``, every seed's own Shapley values."""

    @property
    @abstractmethod
    def trained(self) -> int:
        """Coalitions that every seed has trained."""

    @property
    def num_clients(self) -> int:
        """n."""
        return self.values.shape[1]

    @property
    def mean(self) -> Tensor:
        """Float64 ``[n]``, the mean over the seeds."""
        return self.values.mean(0)

    def interval(self, level: float = 0.9) -> Tensor:
        """Float64 ``[n]``, half the width of the mean's interval at this level, by Student's t over the seeds; NaN of
        one seed. Seeds that have drawn orders of their own spread by that, too, so it is in the interval."""
        return half_width(self.values.std(0, correction=min(1, len(self.seeds) - 1)), len(self.seeds), level)

    @property
    def ceiling(self) -> float:
        """Mean rank correlation of one seed's values with the mean of the others': what no metric can be expected to
        exceed, which sees one run. NaN of one seed. Where coalitions are sampled it is too low by what one seed's
        sampling disturbs."""
        values = self.values
        others = [torch.cat([values[:s], values[s + 1 :]]).mean(0) for s in range(len(values))]
        return mean(spearman(mine, rest) for mine, rest in zip(values, others)) if len(values) > 1 else NAN


@dataclass(frozen=True, eq=False)
class ExactTruth(Truth):
    """The utilities of all coalitions of a federation.

    Args:
        seeds: of the trainings, s of them.
        utilities: float64 ``[s, 2^n]``, the federation's performance; bit i of a coalition's number is client i.
        losses: float64 ``[s, 2^n]``, mean cross-entropy in nats.

    Example:
        >>> from flsv.benchmark import federation, truth_table
        >>> truth = truth_table(federation("digits_sizes"))
        >>> truth.utilities.shape, truth.mean.shape, truth.ceiling > 0.8
        (torch.Size([5, 64]), torch.Size([6]), True)
    """

    seeds: tuple[int, ...]
    utilities: Tensor
    losses: Tensor

    @property
    def values(self) -> Tensor:
        """Float64 ``[s, n]``."""
        return shapley_of_table(self.utilities.T.contiguous()).T

    @property
    def trained(self) -> int:
        """2^n."""
        return self.utilities.shape[1]


@dataclass(frozen=True, eq=False)
class SampledTruth(Truth):
    """Utilities along random circles of the clients; each seed has its own circles and training.

    Args:
        seeds: of the trainings and of the circles, s of them.
        circle_values: float64 ``[s, circles, n]``, each circle's estimate.
        coalitions: trained for each seed, at most.

    Example:
        >>> from flsv.benchmark import federation, truth_table
        >>> truth = truth_table(federation("digits_20_clients"))
        >>> truth.circle_values.shape, truth.mean.shape, truth.trained < 2**20
        (torch.Size([5, 3, 20]), torch.Size([20]), True)
    """

    seeds: tuple[int, ...]
    circle_values: Tensor
    coalitions: int

    @property
    def values(self) -> Tensor:
        """Float64 ``[s, n]``, the means over the circles."""
        return self.circle_values.mean(1)

    @property
    def trained(self) -> int:
        """Some circles x n (n - 1)."""
        return self.coalitions


def sampled_truth(utilities: Mapping[int, Mapping[Members, float]], num_clients: int, circles: int) -> SampledTruth:
    """From the utilities of the coalitions on the circles, by seed and members."""
    found = []
    for seed, of_seed in utilities.items():

        def utility(masks: Tensor, known: Mapping[Members, float] = of_seed) -> Tensor:
            members = (tuple(mask.nonzero().flatten().tolist()) for mask in masks)
            return torch.tensor([known[each] for each in members], dtype=torch.float64)

        found.append(values_by_circles(MemoizedGame(utility, num_clients), num_clients, seed, circles))
    return SampledTruth(tuple(utilities), torch.stack(found), max(map(len, utilities.values())))


def circular_orders(num_clients: int, seed: int, circle: int) -> Tensor:
    """The orders that begin anywhere on a random circle and go either way, int ``[2 n, n]``.

    Args:
        num_clients: n.
        seed: of the drawing; other seeds have other circles.
        circle: which of a seed's.

    Example:
        >>> orders = circular_orders(4, seed=100, circle=0)
        >>> orders.shape, [orders[:, place].bincount().tolist() for place in range(2)]
        (torch.Size([8, 4]), [[2, 2, 2, 2], [2, 2, 2, 2]])
    """
    (order,) = random_permutations(1, num_clients, generator_for(seed, "circle", circle))
    onwards = torch.stack([order.roll(-start) for start in range(num_clients)])
    return torch.cat([onwards, onwards.flip(1)])


def arcs(num_clients: int, seed: int, circles: int) -> Tensor:
    """The distinct coalitions of so many circles, bool ``[K, n]``, the empty one and that of all first.

    Example:
        >>> arcs(20, seed=100, circles=2).shape
        torch.Size([718, 20])
    """
    both = torch.tensor([[False], [True]]).expand(2, num_clients)
    met = [prefixes(circular_orders(num_clients, seed, circle)).flatten(0, 1) for circle in range(circles)]
    found = dict.fromkeys(tuple(mask) for mask in torch.cat([both, *met]).tolist())
    return torch.tensor(list(found))


def values_by_circles(game: MemoizedGame, num_clients: int, seed: int, circles: int) -> Tensor:
    """Each circle's estimate of the Shapley values, float64 ``[circles, n]``; every one is unbiased and their sum over
    the clients is the gain of all.

    Args:
        game: the utility of coalitions, which is asked for the arcs only.
        num_clients: n.
        seed: of the drawing.
        circles: how many.
    """
    each = [marginals_along(game, circular_orders(num_clients, seed, circle)) for circle in range(circles)]
    return torch.stack([marginals.mean(0).squeeze(-1).double() for marginals in each])


FOLDER = Path(__file__).parent / "truths"
#: Other seeds than any that metrics are run with: no metric sees a run that is part of the truth.
SEEDS = (100, 101, 102, 103, 104)
#: Coalitions that are trained side by side.
CHUNK = 192
COLUMNS = ("seed", "coalition", "utility", "loss")


def truth_table(federation: Federation, folder: Path | None = None) -> Truth:
    """A federation's truth, from the tables of the package or of a folder.

    Args:
        federation: whose.
        folder: with ``<name>.csv``; None: the package's.

    Raises:
        ConfigurationError: there is no table, it is one of other settings, or coalitions are missing in it.
    """
    path = (folder or FOLDER) / f"{federation.name}.csv"
    if not path.is_file():
        raise ConfigurationError(
            f"there is no truth of {federation.name} ({path}): make it, flsv bench --truth --federations ... --out ..."
        )
    rows = _read(path, federation)
    if not rows:
        raise ConfigurationError(
            f"{path} holds no coalition yet. Go on with the command that makes it, flsv bench --truth."
        )
    clients = max(1 + max(members, default=-1) for _, members in rows)
    seeds = tuple(sorted({seed for seed, _ in rows}))
    wanted = {seed: _wanted(federation, clients, seed) for seed in seeds}
    missing = [(seed, members) for seed in seeds for members in wanted[seed] if (seed, members) not in rows]
    if missing:
        raise ConfigurationError(
            f"{path}: {len(missing)} of {sum(map(len, wanted.values()))} coalitions are missing, such as "
            f"{list(missing[0][1])} of seed {missing[0][0]}. Go on with the command that makes it, flsv bench --truth."
        )
    if federation.circles:
        by_seed = {seed: {members: rows[seed, members][0] for members in wanted[seed]} for seed in seeds}
        return sampled_truth(by_seed, clients, federation.circles)
    table = torch.tensor([[rows[seed, members] for members in wanted[seed]] for seed in seeds], dtype=torch.float64)
    return ExactTruth(seeds, table[..., 0].contiguous(), table[..., 1].contiguous())


def make_truth(
    federation: Federation,
    folder: Path = FOLDER,
    seeds: Sequence[int] = SEEDS,
    coalitions: Iterable[Sequence[int]] | None = None,
    max_clients: int = 10,
) -> int:
    """Train the coalitions that a federation's table does not have, and add them to it as they are done.

    Args:
        federation: whose.
        folder: of the table.
        seeds: of the trainings.
        coalitions: members of those that are wanted; None: all, or those on the federation's circles.
        max_clients: the most clients for which all 2^n may be begun.

    Returns:
        How many were trained.

    Raises:
        ConfigurationError: more clients than ``max_clients``, and no circles; a table of other settings or data; a
            module whose coalition of all, trained side by side with others, is not the run itself.
    """
    clients = len(federation.num_samples)
    if coalitions is None and not federation.circles and clients > min(max_clients, MAX_EXACT_PLAYERS):
        raise ConfigurationError(
            f"{federation.name}: {clients} clients make {2**clients:,} coalitions to train for every seed; the limit "
            f"is max_clients={max_clients}. Say `circles: 3` in its file: some {3 * clients * (clients - 1):,} are "
            "trained then, which give each client each place in an order equally often."
        )
    path = folder / f"{federation.name}.csv"
    known = _read(path, federation)
    given = None if coalitions is None else [tuple(sorted(members)) for members in coalitions]
    folder.mkdir(parents=True, exist_ok=True)
    if not known:
        header = f"# {federation.name}: identity {federation.identity.key}, settings {settings(federation)}"
        path.write_text(f"{header}\n{','.join(COLUMNS)}\n", encoding="utf-8")
    trained, checked = 0, False
    for seed in seeds:
        wanted = _wanted(federation, clients, seed) if given is None else given
        todo = [members for members in wanted if (seed, members) not in known]
        if todo and not checked:
            check_lattice(federation, seed)
            checked = True
        for start in range(0, len(todo), CHUNK):
            _train(federation, todo[start : start + CHUNK], seed, path)
        trained += len(todo)
    federation.release()
    return trained


def _train(federation: Federation, coalitions: Sequence[Members], seed: int, path: Path) -> None:
    """Train coalitions side by side, and add their utilities to a table."""
    masks = torch.zeros(len(coalitions), len(federation.num_samples), dtype=torch.bool)
    for row, members in enumerate(coalitions):
        masks[row, list(members)] = True
    scores = train_coalitions(federation, masks, seed)
    rows = zip(coalitions, scores["utility"].tolist(), scores["loss"].tolist())
    lines = (f"{seed},{'+'.join(map(str, m)) or '-'},{utility:.6g},{loss:.6g}\n" for m, utility, loss in rows)
    append(path, "".join(lines).encode())


def settings(federation: Federation) -> str:
    """A short hash of all that a coalition's utility depends on. Where the data lie is no part of it, nor is how many
    coalitions are trained."""
    said = {name: getattr(federation, name) for name in ("rounds", "data", "model", "performance", "mode", "attacks")}
    text = json.dumps({**said, "local_epochs": federation.local_epochs}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _wanted(federation: Federation, clients: int, seed: int) -> list[Members]:
    """The coalitions of a seed that its truth is worked out from."""
    return [
        _members(mask)
        for mask in (arcs(clients, seed, federation.circles) if federation.circles else all_coalitions(clients))
    ]


def _read(path: Path, federation: Federation) -> dict[tuple[int, Members], tuple[float, float]]:
    lines = whole_lines(path) if path.is_file() else []
    if not lines:
        return {}
    if not path.read_bytes().endswith(b"\n"):  # a line that a kill cut short is trained again, and not to be continued
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    first = lines[0]
    # The package's own tables are of data that do not change.
    other = "identity" in first and f"identity {federation.identity.key}," not in first
    if other or not first.endswith(settings(federation)):
        raise ConfigurationError(
            f"{path} is the truth of other settings or data than those of {federation.name} ({settings(federation)}): "
            f"{first}. Remove it, and make it anew: flsv bench --truth."
        )
    rows: dict[tuple[int, Members], tuple[float, float]] = {}
    for line in lines[2:]:
        seed, coalition, utility, loss = line.split(",")
        members = () if coalition == "-" else tuple(map(int, coalition.split("+")))
        rows[int(seed), members] = (float(utility), float(loss))
    return rows


def _members(mask: Any) -> Members:
    return tuple(mask.nonzero().flatten().tolist())
