"""Guo et al.'s comparison (Sensors 2024, section 5): five scenarios x nine ways to say what a client is worth.

    python tools/guo_table.py [--root DATA] [--seeds 3] [--workers 2] [--out FILE.md] [--images docs/images]
    python tools/guo_table.py --full --root DATA        all images of a class that the smallest has, for a GPU

MNIST and Fashion-MNIST, softmax regression and LeNet5, five clients as in ``configs/scenarios/guo_*.yaml``. One run of
DivergenceWeighted gives the paper's values, one of FedAvg those of the baselines that rebuild sub-models (OR, MR, TMR);
exact, TMC and K-subset retrain coalitions and share one table of them. Accuracies are those of the run's own model on
the test set. A second experiment looks for the paper's gain in accuracy: in class-ordered batches and a larger step.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from matplotlib.figure import Figure
from torch import Tensor

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.aggregation import DivergenceWeighted, FedAvg
from flsv.functional import ShapleyEstimate, exact_shapley, permutation_shapley, stratified_shapley
from flsv.metrics import CumulativeShapley, DecayedShapley, OneRoundShapley
from flsv.retraining import RetrainedUtility
from flsv.sampling import FixedCohort
from flsv.seeding import generator_for

CONFIGS = Path(__file__).parents[1] / "configs" / "scenarios"
SOURCES = ("mnist", "fashion_mnist")
SCENARIOS = {
    "same": "same distribution and size: the five values within 10 % of each other",
    "sizes": "same distribution, 2, 3, 4, 5 and 6 of 20 parts: values increase with size",
    "mixtures": "80 % of two classes, the last client two classes only: its value is positive (the paper's claim)",
    "biased": "four clients with two classes, one with all: that one first, the others within 20 % and positive",
    "noisy": "0, 5, 10, 15 and 20 % of noise: values decrease with noise",
}
OURS, OURS_FIXED, OURS_RAW = "ours, renormalised", "ours, fixed", "ours, not divided by the round's sum"
RETRAINING = ("exact", "TMC", "K-subset")
ALGORITHMS = (OURS, OURS_FIXED, OURS_RAW, *RETRAINING, "OR", "MR", "TMR")
OMEGA, THRESHOLD = 0.8, 0.1  # TMR then evaluates 10 rounds
TMC_ORDERS, TMC_TRUNCATION, K_SUBSET_BUDGET = 15, 0.01, 20


@dataclass(frozen=True)
class Setting:
    """Training of one network; ``total`` images of all clients together (None: as many as there are)."""

    network: str
    total: int | None
    batch_size: int
    lr: float
    momentum: float = 0.0
    validation: float = 0.1
    rounds: int = 20
    accelerator: str = "cpu"


# The paper gives neither learning rate nor batch size. Softmax regression gains in every round at this rate; LeNet5
# needs momentum to leave the plateau at which it starts within a few rounds.
PRESETS = {
    "softmax": Setting("softmax", total=5000, batch_size=200, lr=0.01, validation=1500 / 60000),
    "lenet5": Setting("lenet5", total=600, batch_size=20, lr=0.03, momentum=0.9, validation=300 / 60000),
}
FULL = {
    "softmax": Setting("softmax", total=None, batch_size=64, lr=0.01, accelerator="auto"),
    "lenet5": Setting("lenet5", None, batch_size=64, lr=0.01, momentum=0.9, accelerator="auto"),
}


@dataclass(frozen=True)
class Result:
    """What one algorithm says in one federation.

    ``rows`` are the rounds' own values ``[T, 5]``, where it has them; ``coalitions`` are models evaluated, and
    ``trainings`` federations trained for it, besides the run itself.
    """

    algorithm: str
    values: list[float]
    accuracy: float
    training: float
    valuation: float
    coalitions: int
    trainings: int = 0
    rows: list[list[float]] | None = None


class Played:
    """The exact estimator, which keeps what it finds and how long that takes."""

    def __init__(self) -> None:
        self.estimates: list[ShapleyEstimate] = []
        self.seconds: list[float] = []

    def __call__(self, utility: Any, players: int, generator: Any = None) -> ShapleyEstimate:
        start = time.perf_counter()
        self.estimates.append(exact_shapley(utility, players))
        self.seconds.append(time.perf_counter() - start)
        return self.estimates[-1]

    def again(self, utility: Any, players: int, generator: Any = None) -> ShapleyEstimate:
        """For a metric that is updated later in the same round and plays the same game."""
        return self.estimates[-1]

    @property
    def rows(self) -> list[list[float]]:
        return [estimate.values.tolist() for estimate in self.estimates]


class ClassOrdered(FederatedDataModule):
    """Every client's batches sorted by class and never shuffled, as in the code of the paper's baselines."""

    def client_loader(self, client: int, split: Any = "train", generator: Any = None) -> Any:
        loader = super().client_loader(client, split, generator)
        if split != "train":
            return loader
        if client not in self.__dict__.setdefault("_ordered", {}):
            x, y = (torch.cat(parts) for parts in zip(*loader))
            order = y.argsort(stable=True)
            self._ordered[client] = list(zip(x[order].split(self.batch_size), y[order].split(self.batch_size)))
        return self._ordered[client]


def federated_data(
    source: str, scenario: str, setting: Setting, seed: int, root: str, kind: type = FederatedDataModule
) -> FederatedDataModule:
    """The scenario of the YAML file, with as many images as the setting says, dealt out by this seed."""
    file = yaml.safe_load((CONFIGS / f"guo_{scenario}.yaml").read_text())["data"]
    return kind(
        source,
        build(file["partitioner"], seed=seed, total=setting.total),
        root=root,
        batch_size=setting.batch_size,
        server_val_fraction=setting.validation,
        corruptions=[build(corruption, seed=seed) for corruption in file.get("corruptions", [])],
        seed=seed,
    )


def build(spec: dict[str, Any], **more: Any) -> Any:
    module, _, name = spec["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**{**spec["init_args"], **more})


def client_module(setting: Setting) -> ClassifierClient:
    sgd = partial(torch.optim.SGD, lr=setting.lr, momentum=setting.momentum)
    return ClassifierClient(setting.network, optimizer=sgd)


def make_trainer(loop: FederatedLoop, setting: Setting, folder: str) -> L.Trainer:
    return L.Trainer(
        max_epochs=setting.rounds,
        accelerator=setting.accelerator,
        devices=1,
        callbacks=[loop],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        default_root_dir=folder,
    )


def federate(
    data: FederatedDataModule, setting: Setting, seed: int, **strategies: Any
) -> tuple[FederatedLoop, float, float]:
    """One federation: the loop, the test accuracy of its model, and the seconds of the whole fit."""
    L.seed_everything(seed, verbose=False)
    loop = FederatedLoop(**strategies, figures_every=0, print_table=False, seed=seed)
    module = client_module(setting)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(loop, setting, folder)
        start = time.perf_counter()
        trainer.fit(module, data)
        seconds = time.perf_counter() - start
        accuracy = trainer.test(module, data, verbose=False)[0]["test_accuracy"]
    return loop, accuracy, seconds


# ---- the algorithms


def ours(data: FederatedDataModule, setting: Setting, seed: int) -> list[Result]:
    """DivergenceWeighted, its sub-models with renormalised and with fixed weights."""
    renormalised, fixed = Played(), Played()
    metrics = {
        OURS: DecayedShapley(decay=OMEGA, estimator=renormalised),
        OURS_RAW: DecayedShapley(decay=OMEGA, estimator=renormalised.again, normalize=False),
        OURS_FIXED: DecayedShapley(decay=OMEGA, estimator=fixed, coalition_weights="fixed"),
    }
    loop, accuracy, seconds = federate(data, setting, seed, aggregator=DivergenceWeighted(), metrics=metrics)
    training = seconds - sum(renormalised.seconds) - sum(fixed.seconds)
    played = {OURS: renormalised, OURS_RAW: renormalised, OURS_FIXED: fixed}
    return [
        Result(
            name,
            loop.contributions[name].tolist(),
            accuracy,
            training,
            sum(played[name].seconds),
            int(metric.diagnostics()["evaluations"]),
            rows=played[name].rows,
        )
        for name, metric in metrics.items()
    ]


def rebuilt(data: FederatedDataModule, setting: Setting, seed: int) -> list[Result]:
    """FedAvg, and the baselines that rebuild sub-models."""
    rounds, once = Played(), Played()
    metrics = {
        "OR": OneRoundShapley(setting.rounds, estimator=once),
        "MR": CumulativeShapley(weighting="samples", estimator=rounds),
        "TMR": DecayedShapley(decay=OMEGA, threshold=THRESHOLD, estimator=rounds.again),
    }
    loop, accuracy, seconds = federate(data, setting, seed, aggregator=FedAvg(), metrics=metrics)
    evaluated = setting.rounds - int(metrics["TMR"].diagnostics()["truncated"])
    valuation = {"OR": sum(once.seconds), "MR": sum(rounds.seconds), "TMR": sum(rounds.seconds[:evaluated])}
    training = seconds - valuation["OR"] - valuation["MR"]
    return [
        Result(
            name,
            loop.contributions[name].tolist(),
            accuracy,
            training,
            valuation[name],
            int(metric.diagnostics()["evaluations"]),
            rows=None if name == "OR" else rounds.rows,
        )
        for name, metric in metrics.items()
    ]


def retrained(data: FederatedDataModule, setting: Setting, seed: int, accuracy: float) -> list[Result]:
    """The game by retraining, which the three share; each pays for the coalitions that it asks for."""
    L.seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:

        def trainer(cohort: FixedCohort) -> L.Trainer:
            loop = FederatedLoop(sampler=cohort, figures_every=0, print_table=False, seed=seed)
            return make_trainer(loop, setting, folder)

        utility = RetrainedUtility(trainer, client_module(setting), data)
        everybody = tuple(range(utility.num_players))
        results = []
        for name in RETRAINING:
            asked: set[tuple[int, ...]] = set()

            def game(masks: Tensor, asked: set[tuple[int, ...]] = asked) -> Tensor:
                asked.update(tuple(mask.nonzero().flatten().tolist()) for mask in masks)
                return utility(masks)

            estimate = estimators()[name](game, utility.num_players, generator=generator_for(seed, name))
            extra = [members for members in asked if members not in ((), everybody)]
            results.append(
                Result(
                    name,
                    estimate.values.tolist(),
                    accuracy,
                    utility.seconds[everybody],
                    sum(utility.seconds[members] for members in extra),
                    len(asked),
                    len(extra),
                )
            )
    return results


def estimators() -> dict[str, Callable[..., ShapleyEstimate]]:
    tmc = partial(permutation_shapley, antithetic=False, truncation=TMC_TRUNCATION, num_permutations=TMC_ORDERS)
    return {"exact": exact_shapley, "TMC": tmc, "K-subset": partial(stratified_shapley, budget=K_SUBSET_BUDGET)}


# ---- the checks


def spread(values: Sequence[float]) -> float:
    """The distance of the outermost values, as a share of the larger of their sizes."""
    return (max(values) - min(values)) / max(map(abs, values), default=0.0) if any(values) else 0.0


def check(scenario: str, values: Sequence[float]) -> tuple[bool, str]:
    """Whether the values show what they have to, and the figures behind it."""
    steps = [after - before for before, after in pairwise(values)]
    if scenario == "same":
        return spread(values) <= 0.1, f"{100 * spread(values):.0f} % apart"
    if scenario == "sizes":
        return min(steps) > 0, f"{sum(step > 0 for step in steps)} of 4 steps up"
    if scenario == "noisy":
        return max(steps) < 0, f"{sum(step < 0 for step in steps)} of 4 steps down"
    if scenario == "mixtures":
        return values[-1] > 0, f"{values[-1]:+.3f}"
    others = values[:-1]
    met = values[-1] > max(others) and min(others) > 0 and spread(others) <= 0.2
    first = "first" if values[-1] > max(others) else "not first"
    return met, f"{first}, others {100 * spread(others):.0f} % apart, {sum(v > 0 for v in others)} of 4 positive"


# ---- jobs

Cell = tuple[str, str, str, int]  # source, network, scenario, seed
Claim = tuple[str, str, str, float, bool, int]  # network, scenario, aggregator, server_lr, class-ordered, seed
AGGREGATORS: dict[str, Callable[[], Any]] = {"FedAvg": FedAvg, "DivergenceWeighted": DivergenceWeighted}
CLAIM_SOURCE, CLAIM_SCENARIOS, SERVER_LRS = "mnist", ("mixtures", "biased"), (1.0, 1.5)


def quietly() -> None:
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def value_clients(cell: Cell, *, settings: dict[str, Setting], root: str, retrain: bool = True) -> list[Result]:
    """All algorithms in one scenario."""
    quietly()
    source, network, scenario, seed = cell
    setting = settings[network]
    data = federated_data(source, scenario, setting, seed, root)
    results = ours(data, setting, seed) + rebuilt(data, setting, seed)
    if retrain:
        results += retrained(data, setting, seed, results[-1].accuracy)
    return results


def claimed_accuracy(claim: Claim, *, settings: dict[str, Setting], root: str) -> float:
    """Accuracy without any valuation."""
    quietly()
    network, scenario, aggregator, server_lr, ordered, seed = claim
    setting = settings[network]
    data = federated_data(CLAIM_SOURCE, scenario, setting, seed, root, ClassOrdered if ordered else FederatedDataModule)
    return federate(data, setting, seed, aggregator=AGGREGATORS[aggregator](), server_lr=server_lr)[1]


# ---- reports


def grid(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def mean_and_deviation(values: Iterable[float], digits: int) -> str:
    known = list(values)
    if not known:
        return "-"
    deviation = statistics.stdev(known) if len(known) > 1 else 0.0
    return f"{statistics.mean(known):.{digits}f} ± {deviation:.{digits}f}"


def shares(values: Sequence[float]) -> list[float]:
    """The values divided by the sum of their sizes, so that algorithms compare."""
    total = sum(map(abs, values))
    return [value / total if total else 0.0 for value in values]


def verdict(scenario: str, runs: Sequence[Sequence[float]]) -> str:
    """On the mean over seeds of the shares, and how many seeds agree with the check on their own."""
    met, figures = check(scenario, [statistics.mean(column) for column in zip(*runs)])
    return f"{'met' if met else 'not met'}: {figures} ({sum(check(scenario, run)[0] for run in runs)}/{len(runs)})"


def report_scenario(scenario: str, results: Sequence[list[Result]]) -> str:
    """One table: a list of results for every seed."""
    clients = len(results[0][0].values)
    head = ["", *(f"client {i}" for i in range(clients)), "check (seeds that meet it)", "accuracy, %"]
    rows = [[*head, "training, s", "valuation, s", "models", "trainings"]]
    for algorithm in ALGORITHMS:
        mine = [result for each in results for result in each if result.algorithm == algorithm]
        if not mine:
            continue
        runs = [shares(result.values) for result in mine]
        rows.append(
            [
                algorithm,
                *(mean_and_deviation(column, 3) for column in zip(*runs)),
                verdict(scenario, runs),
                mean_and_deviation((100 * result.accuracy for result in mine), 1),
                mean_and_deviation((result.training for result in mine), 1),
                mean_and_deviation((result.valuation for result in mine), 1),
                f"{statistics.mean(result.coalitions for result in mine):.0f}",
                f"{statistics.mean(result.trainings for result in mine):.0f}",
            ]
        )
    return grid(rows)


def report_checks(results: dict[Cell, list[Result]]) -> str:
    """In how many of the federations, and on the mean over seeds in how many of the cases, every check is met."""
    scenarios = [name for name in SCENARIOS if any(cell[2] == name for cell in results)]
    rows = [["", *scenarios]]
    for algorithm in ALGORITHMS:
        cells = []
        for scenario in scenarios:
            cases: dict[tuple[str, str], list[list[float]]] = {}
            for (source, network, name, _), each in results.items():
                found = [shares(r.values) for r in each if r.algorithm == algorithm and name == scenario]
                cases.setdefault((source, network), []).extend(found)
            cases = {case: runs for case, runs in cases.items() if runs}
            met = sum(verdict(scenario, runs).startswith("met") for runs in cases.values())
            alone = [check(scenario, run)[0] for runs in cases.values() for run in runs]
            cells.append(f"{met} of {len(cases)} ({sum(alone)} of {len(alone)} runs)" if cases else "-")
        if any(cell != "-" for cell in cells):
            rows.append([algorithm, *cells])
    return grid(rows)


def report_claim(results: dict[Claim, float]) -> str:
    """Accuracies by network and scenario."""
    columns = sorted({claim[:2] for claim in results}, reverse=True)
    rows = [["batches", "server_lr", "aggregator", *(f"{network}, {scenario}" for network, scenario in columns)]]
    kinds = dict.fromkeys((c[4], c[3], c[2]) for c in results)
    for ordered, rate, aggregator in sorted(kinds, key=lambda kind: kind[:2]):
        cells = [
            mean_and_deviation(
                (100 * value for c, value in results.items() if c[:5] == (*column, aggregator, rate, ordered)), 1
            )
            for column in columns
        ]
        rows.append(["class-ordered" if ordered else "shuffled", f"{rate:g}", aggregator, *cells])
    return grid(rows)


def report(
    results: dict[Cell, list[Result]], claims: dict[Claim, float], settings: dict[str, Setting], retrain_seeds: int
) -> str:
    """The whole page, in Markdown."""
    seeds = len({cell[3] for cell in results})
    parts = [
        "## Checks\n\nCases (data set and network) whose mean over seeds meets the check; single runs in brackets.\n\n"
        + report_checks(results)
    ]
    for source, network in dict.fromkeys(cell[:2] for cell in results):
        parts.append(f"## {source}, {network}\n\n{settings[network]}")
        for scenario, claim in SCENARIOS.items():
            runs = [each for cell, each in results.items() if cell[:3] == (source, network, scenario)]
            if runs:
                parts.append(f"**{claim[0].upper()}{claim[1:]}.**\n\n{report_scenario(scenario, runs)}")
    if claims:
        title = f"## Where the paper's accuracy comes from\n\n{CLAIM_SOURCE}, test accuracy in %"
        parts.append(f"{title}\n\n{report_claim(claims)}")
    parts.append(
        "Values are shares: a client's value divided by the sum of the absolute values, mean ± standard deviation of "
        f"{seeds} seeds ({min(seeds, retrain_seeds)} for {', '.join(RETRAINING)}). Models: evaluated coalitions; "
        "trainings: whole federations besides the run itself."
    )
    return "\n\n".join(parts)


def draw(results: dict[Cell, list[Result]], source: str) -> Figure:
    """Rows: networks; columns: scenarios; lines: a client's value in each round, mean over seeds."""
    networks = list(dict.fromkeys(cell[1] for cell in results if cell[0] == source))
    scenarios = [name for name in SCENARIOS if any(cell[2] == name for cell in results)]
    size = (2.6 * len(scenarios), 0.5 + 2.1 * len(networks))
    figure = Figure(figsize=size, dpi=80, layout="constrained")
    for row, axes in zip(networks, figure.subplots(len(networks), len(scenarios), squeeze=False)):
        for name, ax in zip(scenarios, axes):
            runs = [
                torch.tensor(result.rows)
                for cell, each in results.items()
                for result in each
                if cell[:3] == (source, row, name) and result.algorithm == OURS
            ]
            if not runs:
                continue
            for client, line in enumerate(torch.stack(runs).mean(0).T):
                ax.plot(range(1, len(line) + 1), line.tolist(), label=f"client {client}", linewidth=1)
            ax.axhline(0, color="grey", linewidth=0.5)
            ax.set_title(f"{row}, {name}", fontsize="small")
            ax.tick_params(labelsize="x-small")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5, fontsize="small")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("FLSV_DATA_ROOT", "data"))
    parser.add_argument("--full", action="store_true", help="all images, for a GPU")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--retrain-seeds", type=int, default=3, help="seeds for which coalitions are retrained")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), choices=SOURCES)
    parser.add_argument("--networks", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--no-claim", action="store_true", help="leave the second experiment out")
    parser.add_argument("--out", type=Path, help="write the tables there, too")
    parser.add_argument("--images", type=Path, help="folder for the figures guo_SOURCE.png")
    arguments = parser.parse_args()
    settings = FULL if arguments.full else PRESETS
    if arguments.rounds:
        settings = {name: replace(setting, rounds=arguments.rounds) for name, setting in settings.items()}
    seeds = range(arguments.seeds)
    # The long ones first, so that the workers end together.
    cells: list[Cell] = [
        (source, network, scenario, seed)
        for network in sorted(arguments.networks)
        for source in arguments.sources
        for seed in seeds
        for scenario in arguments.scenarios
    ]
    claims: list[Claim] = [
        (network, scenario, aggregator, rate, ordered, seed)
        for network in sorted(arguments.networks)
        for scenario in CLAIM_SCENARIOS
        for aggregator in AGGREGATORS
        for rate in SERVER_LRS
        for ordered in (False, True)
        for seed in seeds
        if not arguments.no_claim
    ]
    start = time.perf_counter()
    work = {"settings": settings, "root": arguments.root}
    results: dict[Cell, list[Result]] = {}
    accuracies: dict[Claim, float] = {}
    with ProcessPoolExecutor(arguments.workers) as pool:
        running = [
            pool.submit(value_clients, cell, **work, retrain=cell[3] < arguments.retrain_seeds) for cell in cells
        ]
        later = [pool.submit(claimed_accuracy, claim, **work) for claim in claims]
        for cell, future in zip(cells, running):
            results[cell] = future.result()
            print(f"{len(results)}/{len(cells)} {cell} {time.perf_counter() - start:.0f} s", flush=True)
        for claim, accuracy in zip(claims, later):
            accuracies[claim] = accuracy.result()
            print(f"{len(accuracies)}/{len(claims)} {claim} {accuracies[claim]:.3f}", flush=True)
    order = {name: place for place, name in enumerate((*SOURCES, *PRESETS))}
    results = dict(sorted(results.items(), key=lambda item: (order[item[0][0]], order[item[0][1]], item[0][3])))
    text = report(results, accuracies, settings, arguments.retrain_seeds)
    text += f"\n\n{time.perf_counter() - start:.0f} s with {arguments.workers} workers, torch {torch.__version__}.\n"
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    if arguments.images is not None:
        arguments.images.mkdir(parents=True, exist_ok=True)
        for source in arguments.sources:
            draw(results, source).savefig(arguments.images / f"guo_{source}.png")


if __name__ == "__main__":
    main()
