"""What is measured by the benchmark's tables of truth: a few retrained coalitions, intervals of metrics and of sampled
estimators, and shadow coalitions (``tables/retrain.yaml`` and others)."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from cells import Cell, Measured
from scipy import stats
from torch import Generator, Tensor

from flsv import FederatedLoop, Reporting
from flsv.benchmark import Federation, federation, names, truth_table
from flsv.benchmark.federation import quiet
from flsv.benchmark.registry import entry
from flsv.benchmark.scores import share_error, shares, spearman
from flsv.errors import ConfigurationError
from flsv.functional import few_coalitions, few_coalitions_shapley, kernel_shap
from flsv.functional.shapley import ShapleyEstimate, permutation_shapley, surrogate_shapley
from flsv.functional.shapley.few_coalitions import retrained_shapley
from flsv.functional.shapley.game import shapley_of_table, t_quantile
from flsv.metrics import ShadowShapley
from flsv.seeding import isolated_rngs

LEVEL = 0.9
#: Title to the sizes of its coalitions; -1: all but one.
DESIGNS: dict[str, tuple[int, ...]] = {
    "each alone": (1,),
    "all but one": (-1,),
    "each alone, all but one": (1, -1),
    "each alone, pairs": (1, 2),
    "each alone, pairs, all but one": (1, 2, -1),
    "all 2^n": tuple(range(20)),
}


# ---- a few retrained coalitions


def few_retrained(cell: Cell, root: str) -> Measured:
    """Of a federation all of whose coalitions were trained, a few are shown, of one seed or two (``trainings``).

    The values of ``flsv retrain`` are compared with the mean of the other seeds' exact ones. The cell's seed is the
    federation's place in its set. Nothing is trained.

    By design: ``fits``, the samples that its trainings visit in fits of everybody; by fit, ``rank`` correlation and
    ``share error``; ``held``: the share of clients whose 90 % interval holds the other seeds' value.
    """
    known = names(cell.column)
    each = federation(known[cell.seed]) if cell.seed < len(known) else None
    try:
        truth = None if each is None else truth_table(each)
    except ConfigurationError:
        truth = None  # its data are not here
    if each is None or truth.utilities is None or len(truth.seeds) <= cell.overrides["trainings"]:
        return {}
    samples = each.num_samples
    each.release()
    found: Measured = {"fits": {}, "rank": {}, "share error": {}, "held": {}}
    for design, sizes in DESIGNS.items():
        masks, exact = of_sizes(truth.num_clients, sizes), design == "all 2^n"
        found["fits"][design] = visits(masks, samples)
        cases: dict[str, list[tuple[float, float]]] = {}
        held = []
        for given, others in splits(len(truth.seeds), cell.overrides["trainings"]):
            table, right = of_table(truth.utilities[given], masks), truth.values[others].mean(0)
            fitted, half = retrained_shapley(masks, table, level=LEVEL)
            values = {"the fit": truth.values[given].mean(0) if exact else fitted}
            if not exact:
                values["KernelSHAP"] = kernel_shap(masks, table.mean(0))
            for name, value in values.items():
                cases.setdefault(name, []).append((rank(value, right), share_error(value, right)))
            held.append(holds(fitted, half, right))
        for place, what in enumerate(("rank", "share error")):
            found[what][design] = {name: statistics.mean(c[place] for c in each) for name, each in cases.items()}
        found["held"][design] = statistics.mean(held)
    return found


def of_sizes(clients: int, sizes: tuple[int, ...]) -> Tensor:
    """Bool ``[K, n]``: nobody, everybody, and all coalitions of these sizes.

    Example:
        >>> of_sizes(3, (1,)).int().tolist()
        [[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    wanted = sorted({clients - 1 if size == -1 else size for size in sizes} & set(range(1, clients)))
    members = [(), tuple(range(clients)), *(some for size in wanted for some in combinations(range(clients), size))]
    masks = torch.zeros(len(members), clients, dtype=torch.bool)
    for row, some in enumerate(members):
        masks[row, list(some)] = True
    return masks


def visits(masks: Tensor, samples: Tensor) -> float:
    """Samples that training these coalitions visits, in fits of everybody.

    Example:
        >>> visits(of_sizes(4, (-1,)), torch.tensor([10, 20, 30, 40]))
        4.0
    """
    return float((masks.double() @ samples.double()).sum() / samples.sum())


def of_table(table: Tensor, masks: Tensor) -> Tensor:
    """``[s, K]``, the utilities of these coalitions, of ``[s, 2^n]``."""
    return table[:, (masks * 2 ** torch.arange(masks.shape[1])).sum(1)]


def splits(seeds: int, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Those that are given, and the others: all sets of so many seeds."""
    for given in combinations(range(seeds), count):
        yield list(given), [seed for seed in range(seeds) if seed not in given]


def rank(values: Tensor, right: Tensor) -> float:
    """Spearman's correlation, 0 where all values are the same."""
    return float(stats.spearmanr(values, right).statistic) if float(values.max() - values.min()) > 0 else 0.0


def holds(values: Tensor, half: Tensor, right: Tensor) -> float:
    """The share of clients whose interval holds their value; NaN without intervals."""
    held = ((values - right).abs() <= half + 1e-9).double()
    return float(torch.where(half.isnan(), half, held).mean())


# ---- intervals of metrics

METRICS = {
    "ClassSpecificShapley": "ClassSpecificShapley",
    "CosineGradientShapley": "CosineGradientShapley",
    "DecayedShapley (no division)": "DecayedShapley(normalize=False)",
    "SurrogateFederatedShapley": "SurrogateFederatedShapley(estimator='exact')",
    "CumulativeShapley, sample weights, exact": "CumulativeShapley(weighting='samples')",
    "GradientShapley": "GradientShapley",
    "CumulativeShapley, permutations, 24 evaluations": (
        "CumulativeShapley(weighting='samples', estimator='permutation', estimator_args={'budget': 24})"
    ),
    "PartialFederatedShapley (momentum 0.5)": "PartialFederatedShapley(momentum=0.5)",
    "LeaveOneOut (last round)": "LeaveOneOut",
}
Case = tuple[Tensor, Tensor, Tensor]  # value and ends of its 90 % interval, float64 [n], as shares


def coverage(cell: Cell, root: str) -> Measured:
    """Of every metric, in some runs of a federation whose true Shapley values are known: how often its intervals hold
    the truth's share, and the mean of the other runs' values; how wide they are, beside what the deviation over runs
    asks for; and the distance of the runs' mean to the truth, as a part of a single run's."""
    where = federation(cell.column)
    truth = shares(truth_table(where).mean)
    where = replace(where, rounds=cell.overrides.get("rounds", where.rounds))
    runs = [intervals(where, seed) for seed in range(cell.overrides["runs"])]
    return {name: covered([run[name] for run in runs], truth) for name in METRICS}


def covered(cases: list[Case], truth: Tensor) -> dict[str, float]:
    """Over the runs of one metric."""
    values = torch.stack([value for value, _, _ in cases])
    held, others = [], []
    for place, (_, low, high) in enumerate(cases):
        held.append((low <= truth) & (truth <= high))
        rest = torch.cat([values[:place], values[place + 1 :]]).mean(0)
        others.append((low <= rest) & (rest <= high))
    single = torch.stack([distance(shares(value), truth) for value in values]).mean()
    found = {
        "covers the truth's share": torch.stack(held).double().mean(),
        "covers the other runs' mean": torch.stack(others).double().mean(),
        "half width, as a share": torch.stack([(high - low) / 2 for _, low, high in cases]).mean(),
        # Deviations on each side that hold 90 % of a normal variable.
        "half width that the deviation over runs asks for": 1.645 * values.std(0).mean(),
        "distance of the runs' mean to the truth, of a run's": distance(shares(values.mean(0)), truth) / single,
    }
    return {name: float(value) for name, value in found.items()}


def distance(mine: Tensor, truth: Tensor) -> Tensor:
    """Half the sum of absolute differences."""
    return (mine - truth).abs().sum() / 2


def intervals(where: Federation, seed: int) -> dict[str, Case]:
    """One fit with all metrics; their values and intervals, divided by the sum of the values above 0."""
    made = {name: entry(f"flsv.metrics.{path}")[1].build(where) for name, path in METRICS.items()}
    inside = {f"metric_{place}": metric for place, metric in enumerate(made.values())}
    loop = FederatedLoop(
        metrics=inside,  # type: ignore[arg-type]
        local_epochs=where.local_epochs,
        reporting=Reporting(per_class=False, figures=0, table=False, files=False),
        seed=seed,
    )
    with isolated_rngs(seed, "benchmark"):
        where.trainer(loop).fit(where.module(), where.datamodule())
    found = {}
    for name, metric in made.items():
        value = metric.per_client(metric.compute())
        low, high = metric.intervals(value=value)
        total = value.double().clamp(min=0).sum()
        found[name] = (value.double() / total, low.double() / total, high.double() / total)
    return found


# ---- intervals of sampled estimators

ESTIMATORS: dict[str, Callable[..., ShapleyEstimate]] = {
    "permutations": permutation_shapley,
    "surrogate": surrogate_shapley,
    "surrogate, unbiased": partial(surrogate_shapley, unbiased=True),
}


def estimated(cell: Cell, root: str) -> Measured:
    """By kind of game and coalitions to a player: the share of players whose 90 % interval holds the exact value.

    The games are the first seeds' tables of the benchmark's federations of more than five clients, and ten smooth ones
    of ten players: an accuracy that saturates in the mean of the members' updates.
    """
    truths = [truth_table(federation(name)) for name in names()]
    tables = [truth.utilities[0].double() for truth in truths if truth.utilities is not None]
    games = {"the benchmark's": [table for table in tables if len(table) > 2**5]}
    games["smooth, ten players"] = [smooth(seed) for seed in range(10)]
    found = {}
    for title, each in (("the benchmark's", 4), *(("smooth, ten players", n) for n in (4, 8, 20))):
        few = [table for table in games[title] if each * (len(table).bit_length() - 1) < len(table) - 2]
        held = [
            held_by(table, ESTIMATORS[cell.row], each, draw) for table in few for draw in range(cell.overrides["draws"])
        ]
        found[f"{title}: {each} n"] = statistics.mean(held)
    return found


def smooth(seed: int, players: int = 10) -> Tensor:
    """``[2^n]``: an accuracy of the members' mean update."""
    updates = torch.randn(players, 6, generator=Generator().manual_seed(seed), dtype=torch.float64) * 0.7 + 0.5
    masks = ((torch.arange(2**players)[:, None] >> torch.arange(players)) & 1).double()
    models = masks @ updates / masks.sum(dim=1, keepdim=True).clamp_min(1)
    return 0.9 * torch.exp(-(models - 0.6).square().sum(dim=1) / 3)


def held_by(table: Tensor, estimator: Callable[..., ShapleyEstimate], each: int, draw: int) -> float:
    """The share of players whose interval, by Student's t, holds their value."""
    players = len(table).bit_length() - 1
    exact = shapley_of_table(table[:, None])[:, 0]
    places = 2 ** torch.arange(players)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {"budget": each * players, "generator": Generator().manual_seed(draw)}
        found = estimator(lambda masks: table[(masks.long() * places).sum(1)], players, **given)
    half = t_quantile(LEVEL, found.freedom) * found.stderr
    return float(((found.values - exact).abs() <= half + 1e-9).double().mean())


# ---- shadow coalitions


class Kept(ShadowShapley):
    """Keeps the last game."""

    def update(
        self, client_ids: Tensor, coalitions: Tensor, utility: Callable[[Tensor], Tensor], round_index: int = 0
    ) -> None:
        def kept(masks: Tensor) -> Tensor:
            found = utility(masks)
            vars(self)["game"] = {tuple(mask): float(value) for mask, value in zip(masks.tolist(), found)}
            return found

        super().update(client_ids, coalitions, kept, round_index)


def shadows(cell: Cell, root: str) -> Measured:
    """How near the values of few shadow coalitions come to those of all of the same run, which are exact for its seed,
    and to the benchmark's truth, of other seeds: by kind of coalitions, ``rank`` correlations and ``share`` errors. The
    column is a federation, the row its set; one that ``ShadowShapley`` refuses has no numbers."""
    each, clients = federation(cell.column), len(federation(cell.column).num_samples)
    try:
        truth, found = truth_table(each).mean, {}
        known = last_game(each, cell.seed, clients)
        for which in ("all", "singles", "pairs", "both"):
            found[which] = valued(known, clients, which)
    except ConfigurationError:
        return {}
    result: Measured = {}
    for target, right in (("this seed", found["all"]), ("truth", truth)):
        for score, of in (("rank", spearman), ("share", share_error)):
            known_values = {name: value for name, value in found.items() if not value.isnan().any()}
            result[f"{score}, {target}"] = {name: of(value, right) for name, value in known_values.items()}
    return result


def last_game(each: Federation, seed: int, clients: int) -> dict[tuple[bool, ...], float]:
    """Of all coalitions after the last round; of more than ten clients those of pairs and of all but one."""
    few = torch.cat([few_coalitions(clients, which) for which in ("pairs", "both")]).unique(dim=0)
    given: Any = "all" if clients <= 10 else [mask.nonzero().flatten().tolist() for mask in few]
    metric = Kept(coalitions=given, performance=each.performance, mode=each.mode, every=each.rounds)
    loop = FederatedLoop(
        metrics={"shadow": metric},
        uploads=each.attackers(),
        local_epochs=each.local_epochs,
        seed=seed,
        reporting=Reporting(table=False, figures=0, files=False),
    )
    with isolated_rngs(seed, "benchmark"), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        each.trainer(loop).fit(each.module(), each.datamodule())
    return vars(metric)["game"]


def valued(game: dict[tuple[bool, ...], float], clients: int, which: Any) -> Tensor:
    """Float64 ``[n]``; NaN where the game of these coalitions is not known."""
    masks = few_coalitions(clients, which) if which != "all" or clients <= 10 else None
    if masks is None or any(tuple(mask) not in game for mask in masks.tolist()):
        return torch.full((clients,), torch.nan, dtype=torch.float64)
    known = torch.tensor([game[tuple(mask)] for mask in masks.tolist()], dtype=torch.float64)
    return few_coalitions_shapley(masks, known).values
