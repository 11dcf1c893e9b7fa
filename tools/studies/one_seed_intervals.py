"""How often the 90 % interval of one seed's exact values contains the mean of the other seeds' values.

    python tools/studies/one_seed_intervals.py --csv docs/results/one_seed_intervals.csv

Federations of the benchmark's tuning set that need no file, with up to five honest clients, train all coalitions
for 20 rounds, with four seeds. Their values after several rounds, of a model that still learns or that has learned, get
intervals without the spread of the last three rounds' values, with it, and with it less its linear trend. Finished fits
are kept in --out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import lightning as L
import pandas
import torch
from pandas import DataFrame
from torch import Tensor

from benchmark import federation, names
from benchmark.federation import QUIET_TRAINER, quiet
from flsv.configuration.federation_config import Reporting
from flsv.federation import FederatedLoop
from flsv.functional.intervals import one_seed_stderr, t_quantile
from flsv.metrics import ShadowShapley
from flsv.utilities.display import INTERVAL_LEVEL
from flsv.values.coalition_files import read_untrained

MAX_CLIENTS = 5
NUM_ROUNDS = 20
COMPARED_ROUNDS = (4, 8, 20)
NUM_RECENT_ROUNDS = 3
SEEDS = range(4)


def federations() -> list[str]:
    """Return the names of small federations of the tuning set."""
    chosen = []
    for name in names("tuning"):
        candidate = federation(name)
        is_small = not candidate.needs and len(candidate.num_samples) <= MAX_CLIENTS
        if is_small and not candidate.attacks:
            chosen.append(name)
    return chosen


def trained_seed(name: str, seed: int, folder: Path) -> tuple[Tensor, Tensor]:
    """Return the values after each round ``[rounds, n]``, and the utilities of untrained models ``[R]``."""
    path = folder / f"{name}_{seed}.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(train_seed(name, seed), path)
    values_by_round, untrained = torch.load(path)
    return values_by_round, untrained


def train_seed(name: str, seed: int) -> tuple[Tensor, Tensor]:
    longer = replace(federation(name), rounds=NUM_ROUNDS)
    metric = ShadowShapley(
        coalitions="all", every=1, performance=longer.performance, mode=longer.mode
    )
    with tempfile.TemporaryDirectory() as folder, quiet():
        loop = FederatedLoop(
            metrics={"value": metric},
            local_epochs=longer.local_epochs,
            seed=seed,
            reporting=Reporting(table=False, figures=0),
        )
        trainer = L.Trainer(
            max_epochs=NUM_ROUNDS,
            accelerator="cpu",
            default_root_dir=folder,
            callbacks=[loop],
            num_sanity_val_steps=0,
            limit_val_batches=0,
            **QUIET_TRAINER,
        )
        trainer.fit(longer.module(), longer.datamodule())
        (untrained,) = read_untrained(Path(folder, "coalitions")).values()
        history = loop.history().query("metric == 'value'")

    values_by_round = history.pivot(index="round", columns="client", values="value")
    return torch.tensor(values_by_round.sort_index().to_numpy()), untrained[:, 0]


def recent_values_by_rule(last_rounds: Tensor) -> Mapping[str, Tensor | None]:
    """Return what enters the intervals as the spread of the last three rounds' values ``[3, n]``, by rule."""
    # Of three values on a line, the middle one is the mean of the others.
    deviation_from_line = last_rounds[1] - (last_rounds[0] + last_rounds[2]) / 2
    without_trend = torch.outer(torch.tensor([1.0, -2.0, 1.0]).double(), deviation_from_line)
    # The squares' sum, with one degree of freedom, is that of the residuals. `var` divides by two degrees.
    without_trend = without_trend * (2 / 3) * (2 / 6) ** 0.5 * (6 / 4) ** 0.5
    return {"no spread": None, "spread": last_rounds, "without its trend": without_trend}


def rows_of(name: str, folder: Path) -> list[dict[str, object]]:
    """Return a row for each number of rounds and rule."""
    trained = [trained_seed(name, seed, folder) for seed in SEEDS]
    rows = []
    for num_rounds in COMPARED_ROUNDS:
        for rule in ("no spread", "spread", "without its trend"):
            held, width = coverage(trained, num_rounds, rule)
            rows.append(
                {
                    "federation": name,
                    "score": federation(name).performance,
                    "rounds": num_rounds,
                    "rule": rule,
                    "held": held,
                    "half width, % of what is paid": 100 * width,
                }
            )
    return rows


def coverage(
    trained: list[tuple[Tensor, Tensor]], num_rounds: int, rule: str
) -> tuple[float, float]:
    """Return the share of values whose interval holds the other seeds' mean, and the intervals' mean half width."""
    recent_by_seed = [
        values_by_round[num_rounds - NUM_RECENT_ROUNDS : num_rounds]
        for values_by_round, _ in trained
    ]
    last_values = torch.stack([recent_values[-1] for recent_values in recent_by_seed])  # [seeds, n]
    is_covered = []
    relative_widths = []
    for seed, (_, untrained) in enumerate(trained):
        stderr = one_seed_stderr(
            last_values[seed],
            stderr=torch.zeros_like(last_values[seed]),
            untrained_utilities=untrained,
            recent_values=recent_values_by_rule(recent_by_seed[seed])[rule],
        )
        half_width = t_quantile(INTERVAL_LEVEL) * stderr
        others = torch.cat([last_values[:seed], last_values[seed + 1 :]])
        # The mean of the others has an error of its own.
        error_of_mean = (1 + 1 / len(others)) ** 0.5
        deviation = (last_values[seed] - others.mean(0)).abs() / error_of_mean
        is_covered.append(deviation <= half_width)
        paid = last_values[seed].clamp_min(0).sum()
        relative_widths.append(half_width.mean() / paid)
    held = torch.stack(is_covered).double().mean()
    return float(held), float(torch.stack(relative_widths).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, help="file to write")
    parser.add_argument("--out", type=Path, default=Path("runs/one_seed_intervals"))
    options = parser.parse_args()

    rows = []
    for name in federations():
        rows += rows_of(name, options.out)
        print(name, flush=True)

    table = DataFrame(rows)
    # The loss of a regression differs much more between untrained models than a score of classes.
    is_of_classes = table["score"].str.contains("accuracy")
    for title, rows_of_title in [
        ("mean of classes", table[is_of_classes]),
        ("mean of numbers", table[~is_of_classes]),
    ]:
        groups = rows_of_title.groupby(["rounds", "rule"], as_index=False, sort=False)
        means = groups.mean(numeric_only=True)
        table = pandas.concat([table, means.assign(federation=title)], ignore_index=True)
    table = table.round({"held": 3, "half width, % of what is paid": 1})
    print(table.to_string(index=False))
    if options.csv:
        table.to_csv(options.csv, index=False)


if __name__ == "__main__":
    main()
