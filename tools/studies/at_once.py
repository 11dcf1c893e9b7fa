"""What ``ShadowShapley()`` does by default in fifty-two federations: what it trains, at which price, how far it is off.

    python tools/studies/at_once.py train [usual] [halvings] [--seeds 3]    goes on where it was stopped
    python tools/studies/at_once.py table [--csv FILE]    misallocated, ranks, prices, and the distance of the two games
    python tools/studies/at_once.py prices    counted prices beside processor seconds, for each federation

`train` fits each federation of ``usual_federations.py`` (thirty) and of ``halvings_federations.py`` (twenty-two) with
``ShadowShapley(performance=..., every=rounds)`` and without metrics, by the first seed. By each seed it fits it with
``coalitions="all"``, too, if the default did not train all coalitions. The exact values of a seed are those of all
coalitions. *Each alone, predicted* is computed from each client alone among these coalitions, and is the default's
value by further seeds where the default trains each client alone. `table` and `prices` count prices anew by what each
run counted, so that they show what the present constants of ``flsv/retraining/price.py`` choose.

What decides was written down before any of this was trained. On the thirty federations, with three seeds:

- percent misallocated by the default's values of one seed against the *same* seed's exact values: 0 in at least 28 of
  the thirty, and at most 0.3 on the mean, where it was 4.5,
- against the mean of the *other* seeds' exact values: at most 10.2 on the mean, where it was 11.6 and the exact values
  of one seed 10.0,
- processor seconds beside the run's own, on the mean and at most, are reported.

On the twenty-two the same numbers are reported and decide nothing.

The distance of the two games is half the sum of their absolute differences, as a part of the sum of the positive
values, at most 1. It says when a prediction is bad if, on the twenty-two, over federations, the 90 % interval of
Pearson's correlation of it with the percent that each alone misallocates against the same seed's exact values lies
above 0, and federations with a distance above 0.10 misallocate more than the others, with a 90 % interval above 0. On
the thirty this was found (0.66), so that they decide nothing.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import halvings_federations
import lightning as L
import numpy as np
import torch
import usual_federations
from scipy import stats
from torch import Tensor
from torch.utils.data import TensorDataset

# The package benchmark is beside this folder.
sys.path.append(str(Path(__file__).parents[1]))

from benchmark.scores import share_error, spearman
from flsv import FederatedDataModule, FederatedLoop, Reporting
from flsv.functional import few_coalitions
from flsv.functional.intervals import t_quantile
from flsv.metrics import ShadowShapley
from flsv.metrics.coalitions.design import coalition_masks
from flsv.retraining.price import Choice, PriceList, Request, RowTrial, choose
from flsv.values.query import values_by_round

FOLDER = Path("runs/at_once")
SETS: dict[str, Mapping[str, Any]] = {
    "usual": usual_federations.FEDERATIONS,
    "halvings": halvings_federations.FEDERATIONS,
}
#: Bounds of the distance of the two games, between groups of federations.
DISTANCES = (0.0, 0.1, 0.2, 1.0)
RANKS = ("rank", "rank_others")
METHODS = {
    "counted samples": "sizes",
    "exact": "exact",
    "each alone, predicted": "alone",
    "**default**": "default",
}
#: What is known of a default that trains each client alone, if it was not fitted.
NOT_FITTED = {
    "design": "singles",
    "is_at_once": False,
    "planned_at_once": False,
    "seconds": math.nan,
}
QUIET = Reporting(table=False, figures=0, files=False)
SILENT: Any = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
Record = dict[str, Any]


class Kept(ShadowShapley):
    """Keeps the scored models from which its values are computed."""

    def complete(self, scores: Any, game: Any) -> Any:
        self.kept = scores, game
        return super().complete(scores, game)


def fit(name: str, seed: int, **options: Any) -> Record:
    """Train a federation, with a metric if it has options. Return what is known of its values and of its price."""
    federation, definitions = definition(name)
    samples = definitions.dealt(name)
    module_class = getattr(definitions, "UsualModule", None) or definitions.HalvingsModule
    L.seed_everything(seed, verbose=False)
    module = module_class(federation, samples.validation[0])
    clients = {
        f"client {number}": TensorDataset(*client) for number, client in enumerate(samples.clients)
    }
    validation = TensorDataset(*samples.validation)
    data = FederatedDataModule(clients=clients, val=validation, batch_size=federation.batch)
    metrics = {}
    if options:
        metrics = {
            "value": Kept(performance=federation.performance, every=federation.rounds, **options)
        }
    epochs = getattr(federation, "epochs", 1)
    loop = FederatedLoop(metrics=metrics, seed=seed, local_epochs=epochs, reporting=QUIET)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=federation.rounds,
            accelerator="cpu",
            devices=1,
            callbacks=[loop],
            limit_val_batches=0,
            default_root_dir=folder,
            **SILENT,
        )
        start = time.process_time()
        trainer.fit(module, data)
        seconds = time.process_time() - start
    if not options:
        return {"seconds": seconds}
    return {"seconds": seconds, **price_of(loop), **values_of(loop.metrics["value"])}


def definition(name: str) -> tuple[Any, Any]:
    """A federation, and the module that defines it."""
    for definitions in (usual_federations, halvings_federations):
        if name in definitions.FEDERATIONS:
            return definitions.FEDERATIONS[name], definitions
    raise KeyError(name)


def price_of(loop: FederatedLoop) -> Record:
    """What a run counted, and what it chose."""
    plan: Any = loop._coalitions
    prices = plan._prices
    planned = choose(plan._request, prices)
    masks = coalition_masks("all", prices.num_clients)
    return {
        "design": plan._choice.design,
        "is_at_once": plan._choice.is_at_once,
        "price": plan._choice.price,
        # These differ if coalitions did not train at once although it was planned.
        "planned_at_once": planned.is_at_once,
        "why_not": prices.trial.why_not,
        "joins_clients": prices.trial.joins_clients,
        "enlarges": prices.trial.enlarges_rounding,
        "megaflops": prices.trial.megaflops,
        "elements": prices.trial.num_elements,
        "batches": list(prices.num_batches),
        "rounds": prices.num_rounds,
        "scored_batches": prices.num_scored_batches,
        "all_at_once": prices.at_once(masks),
        "all_one_by_one": prices.one_by_one(masks),
    }


def values_of(metric: Any) -> Record:
    """A run's values, and if it has trained all coalitions, those of each client alone and their predictions."""
    result = metric.result()
    scores, game = metric.kept
    record = {
        "values": result.value,
        "missing": result.missing,
        "distance": distance(result),
        "weights": game.weights,
    }
    if game.are_all_trained:
        (index,) = game.rounds
        singles = replace(game, masks=few_coalitions(game.masks.shape[1], "singles"))
        alone = values_by_round(scores, singles)[index]
        record["utilities"] = scores.utilities(game, index)
        record["alone"] = alone.value
        record["alone_distance"] = distance(alone)
    return record


def distance(values: Any) -> float:
    """The distance of the two games of predicted values. NaN: they are not predicted."""
    disagreement = (values.evidence or {}).get("disagreement")
    if disagreement is None:
        return math.nan
    gains = values.value.clamp_min(0).sum().clamp_min(1e-12)
    return min(1.0, float(torch.tensor(disagreement).abs().sum() / 2 / gains))


def play(name: str, seed: int) -> Record:
    """All that is kept of one seed of a federation."""
    record: Record = {}
    design: Any = ""
    if seed == 0:
        record["plain"] = fit(name, seed)
    else:
        first = torch.load(FOLDER / name / "0.pt", weights_only=False)
        design = choice_of(first["all"]).design
    if design != "singles":
        record["default"] = record["all"] = fit(name, seed, coalitions="auto")
        design = record["default"]["design"]
    if design != "all":
        record["all"] = fit(name, seed, coalitions="all")
    return record


def train(names: Sequence[str], num_seeds: int) -> None:
    """Keep one seed of each federation after the other. Go on where it was stopped."""
    missing = [
        (name, seed)
        for seed in range(num_seeds)
        for name in names
        if not (FOLDER / name / f"{seed}.pt").exists()
    ]
    if missing:  # what is imported and compiled at first use is not measured
        fit("wine_momentum", 0)
        fit("wine_momentum", 0, coalitions="all")
    for name, seed in missing:
        record = play(name, seed)
        path = FOLDER / name / f"{seed}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        torch.save(record, part)
        part.rename(path)
        print(f"{name}, seed {seed}: {in_words(record)}", flush=True)


def in_words(record: Record) -> str:
    """A line about one seed of a federation."""
    fits = []
    for title in ("default", "all"):
        if title not in record:
            continue
        fitted = record[title]
        how = "at once" if fitted["is_at_once"] else "one by one"
        words = f"{title}: {fitted['design']} {how}, {fitted['price']:.2f} runs, {fitted['seconds']:.1f} s"
        if "plain" in record:
            words += f", by seconds {seconds_price(record, title):.2f} runs"
        fits.append(words)
    return "; ".join(fits)


def seconds_price(record: Record, title: str) -> float:
    """Further runs by processor seconds."""
    return record[title]["seconds"] / record["plain"]["seconds"] - 1


def read(names: Sequence[str]) -> dict[str, list[Record]]:
    """The seeds of each federation with all coalitions."""
    by_name = {}
    for name in names:
        paths = sorted((FOLDER / name).glob("*.pt"))
        records = [torch.load(path, weights_only=False) for path in paths]
        if records:
            by_name[name] = records
    return by_name


def choice_of(fitted: Record) -> Choice:
    """What the default chooses by a run's counts and the present prices, which may be newer than the record."""
    return choose(Request("auto", max_fits=None), prices_of(fitted))


def default_of(record: Record, choice: Choice) -> Record:
    """The values and the price of the default in one seed. Where it is the same, these are of another fit's."""
    fitted = record.get("default")
    if fitted is not None and fitted["design"] == choice.design:
        return fitted
    if fitted is not None and fitted["planned_at_once"] and not fitted["is_at_once"]:
        return fitted  # after a failed proof
    of_all = record["all"]
    if choice.design == "all":
        return of_all
    if choice.design not in ("singles", "all"):
        raise ValueError(f"remove the record: the default now trains {choice.design}.")
    return {**NOT_FITTED, "values": of_all["alone"]}


def stacked(records: Sequence[Record], method: str) -> Tensor:
    """Each seed's values by a method, ``[seeds, n]``."""
    choice = choice_of(records[0]["all"])
    if method == "sizes":
        values = [record["all"]["weights"] for record in records]
    elif method == "exact":
        values = [record["all"]["values"] for record in records]
    elif method == "alone":
        values = [record["all"]["alone"] for record in records]
    else:
        values = [default_of(record, choice)["values"] for record in records]
    return torch.stack(values).double()


def against_others(measure: Any, values: Tensor, exact: Tensor) -> float:
    """Mean over seeds of a measure of one seed's values against the mean of the other seeds' exact ones."""
    num_seeds = len(values)
    if num_seeds == 1:
        return math.nan
    means = [(exact.sum(0) - exact[seed]) / (num_seeds - 1) for seed in range(num_seeds)]
    return float(np.mean([measure(values[seed], means[seed]) for seed in range(num_seeds)]))


def measure(records: Sequence[Record]) -> dict[str, Any]:
    """What is measured of one federation, by method and as a whole."""
    exact = stacked(records, "exact")
    measured: dict[str, Any] = {}
    for key in METHODS.values():
        values = stacked(records, key)
        same_seed = [share_error(own, truth) for own, truth in zip(values, exact)]
        measured[key] = {
            "others": 100 * against_others(share_error, values, exact),
            "same": 100 * float(np.mean(same_seed)),
            "rank": float(np.mean([spearman(own, truth) for own, truth in zip(values, exact)])),
            "rank_others": against_others(spearman, values, exact),
        }
    choice = choice_of(records[0]["all"])
    default = default_of(records[0], choice)
    return {
        **measured,
        "price": choice.price,
        "seconds_price": default["seconds"] / records[0]["plain"]["seconds"] - 1,
        "further_seconds": default["seconds"] - records[0]["plain"]["seconds"],
        "design": choice.design,
        "trained_all": default["design"] == "all",
        "distance": float(np.mean([record["all"]["alone_distance"] for record in records])),
        "seeds": len(records),
    }


def interval(numbers: Sequence[float]) -> str:
    """A mean with half its 90 % interval."""
    count = len(numbers)
    half_width = t_quantile(0.9, count - 1) * np.std(numbers, ddof=1) / count**0.5
    return f"{np.mean(numbers):.2f} ± {half_width:.2f}"


def table(measured: Mapping[str, Any]) -> str:
    """Misallocated, ranks and prices, by set of federations."""
    rows = [
        [
            "federations",
            "way",
            "against other seeds, %",
            "over exact",
            "against the same seed, %",
            "rank",
            "rank, other seeds",
        ]
    ]
    price_columns = ["price, counted", "by seconds", "most counted", "by seconds"]
    second_columns = ["further seconds", "most"]
    prices = [["federations", "trained all", *price_columns, *second_columns]]
    for title, names in kinds(measured).items():
        of_kind = [measured[name] for name in names]
        for method, key in METHODS.items():
            others = [each[key]["others"] for each in of_kind]
            over = [each[key]["others"] - each["exact"]["others"] for each in of_kind]
            same = [each[key]["same"] for each in of_kind]
            ranks = [np.mean([each[key][kind] for each in of_kind]) for kind in RANKS]
            rows.append(
                [
                    f"{title}: {len(names)}",
                    method,
                    interval(others),
                    interval(over),
                    interval(same),
                    *(f"{rank:.2f}" for rank in ranks),
                ]
            )
        counted = [each["price"] for each in of_kind]
        by_seconds = [each["seconds_price"] for each in of_kind]
        further = [each["further_seconds"] for each in of_kind]
        prices.append(
            [
                f"{title}: {len(names)}",
                f"{sum(each['trained_all'] for each in of_kind)}",
                interval(counted),
                interval(by_seconds),
                f"{max(counted):.2f}",
                f"{max(by_seconds):.2f}",
                interval(further),
                f"{max(further):.1f}",
            ]
        )
    return f"{grid(rows)}\n\n{grid(prices)}"


def kinds(measured: Mapping[str, Any]) -> dict[str, list[str]]:
    """Sets of federations of which two or more are measured."""
    usual = [name for name in SETS["usual"] if name in measured]
    halvings = [name for name in SETS["halvings"] if name in measured]
    found = {
        "as people train": usual,
        "of these, all trained": [name for name in usual if measured[name]["trained_all"]],
        "of these, predicted": [name for name in usual if not measured[name]["trained_all"]],
        "of these, one class each": [name for name in usual if name.startswith("one_class")],
        "of halvings": halvings,
        "halvings, all trained": [name for name in halvings if measured[name]["trained_all"]],
        "halvings, predicted": [name for name in halvings if not measured[name]["trained_all"]],
    }
    return {title: names for title, names in found.items() if len(names) > 1}


def table_of_distances(measured: Mapping[str, Any]) -> str:
    """How the part that each alone misallocates goes with the distance of the two games."""
    rows = [
        [
            "federations",
            "against",
            "Pearson, 90 %",
            "Spearman",
            "over 0.10 less others",
            *(f"{low} to {high}" for low, high in pairwise(DISTANCES)),
        ]
    ]
    for title, names in kinds(measured).items():
        distances = np.array([measured[name]["distance"] for name in names])
        for against in ("same", "others"):
            wrong = np.array([measured[name]["alone"][against] for name in names])
            means = []
            for low, high in pairwise(DISTANCES):
                part = wrong[(distances <= high) & ((distances > low) | (low == 0))]
                means.append(f"{part.mean():.1f} ({len(part)})" if len(part) else "")
            rank = stats.spearmanr(distances, wrong).statistic
            rows.append(
                [
                    f"{title}: {len(names)}",
                    against,
                    correlation(distances, wrong),
                    f"{rank:.2f}",
                    difference(wrong[distances > 0.1], wrong[distances <= 0.1]),
                    *means,
                ]
            )
    return grid(rows)


def correlation(first: np.ndarray, second: np.ndarray) -> str:
    """Pearson's correlation with its 90 % interval."""
    if len(first) < 4:
        return ""
    result = stats.pearsonr(first, second)
    low, high = result.confidence_interval(0.9)
    return f"{result.statistic:.2f} [{low:.2f}, {high:.2f}]"


def difference(first: np.ndarray, second: np.ndarray) -> str:
    """The difference of two means with half its 90 % interval, of unequal variances."""
    if min(len(first), len(second)) < 2:
        return ""
    result = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.9)
    return f"{first.mean() - second.mean():+.1f} [{result.low:+.1f}, {result.high:+.1f}]"


def prices_of(fitted: Record) -> PriceList:
    """The present prices, by a run's counts."""
    trial = RowTrial(
        fitted["why_not"],
        fitted["megaflops"],
        fitted["elements"],
        fitted["joins_clients"],
        fitted["enlarges"],
    )
    batches = fitted["batches"]
    return PriceList(batches, len(batches), trial, fitted["rounds"], fitted["scored_batches"])


def table_of_prices(by_name: Mapping[str, Sequence[Record]]) -> str:
    """What each federation counted, and what it took, with the first seed."""
    head = ["federation", "clients", "rounds", "batches a round", "most of a client"]
    head += ["megaflops", "elements", "run, s", "default", "price", "by seconds"]
    head += ["all at once, counted", "all", "by seconds", "why not"]
    rows = [head]
    for name, (record, *_) in by_name.items():
        if "plain" not in record:
            continue
        of_all = record["all"]
        batches = of_all["batches"]
        masks = coalition_masks("all", len(batches))
        cells = [name, str(len(batches)), str(of_all["rounds"])]
        cells += [str(sum(batches)), str(max(batches))]
        cells += [f"{of_all['megaflops']:.3f}", str(of_all["elements"])]
        cells.append(f"{record['plain']['seconds']:.2f}")
        choice = choice_of(of_all)
        default = default_of(record, choice)
        further = default["seconds"] / record["plain"]["seconds"] - 1
        cells += [how(default), f"{choice.price:.2f}", f"{further:.2f}"]
        cells.append(f"{prices_of(of_all).at_once(masks):.2f}")
        cells += [how(of_all), f"{seconds_price(record, 'all'):.2f}", of_all["why_not"]]
        rows.append(cells)
    return grid(rows)


def how(fitted: Record) -> str:
    """Which coalitions a fit trained, and how."""
    way = "at once" if fitted["is_at_once"] else "one by one"
    failed = fitted["planned_at_once"] and not fitted["is_at_once"]
    return f"{fitted['design']} {way}{', after a failed proof' if failed else ''}"


def write(measured: Mapping[str, Any], path: Path) -> None:
    """Write a row for each federation."""
    head = [
        "federation",
        "seeds",
        "design",
        "price",
        "price_by_seconds",
        "further_seconds",
        "distance",
    ]
    for key in METHODS.values():
        head += [f"{key}_other_seeds_percent", f"{key}_same_seed_percent", f"{key}_rank"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for name, of in measured.items():
            numbers = [of["price"], of["seconds_price"], of["further_seconds"], of["distance"]]
            for key in METHODS.values():
                numbers += [of[key]["others"], of[key]["same"], of[key]["rank"]]
            cells = [f"{number:.3f}" for number in numbers]
            writer.writerow([name, of["seeds"], of["design"], *cells])


def grid(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its head first."""
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def be_quiet() -> None:
    """For a process that measures: one thread, and no word of Lightning's."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "table", "prices"])
    parser.add_argument("sets", nargs="*", help="usual, halvings, or names of federations")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    be_quiet()
    names: list[str] = []
    for chosen in options.sets or SETS:
        names += SETS.get(chosen, [chosen])
    if options.what == "train":
        train(names, options.seeds)
        return
    by_name = read(names)
    if options.what == "prices":
        print(table_of_prices(by_name))
        return
    measured = {name: measure(records) for name, records in by_name.items()}
    print(f"{table(measured)}\n\n{table_of_distances(measured)}")
    if options.csv:
        write(measured, options.csv)


if __name__ == "__main__":
    main()
