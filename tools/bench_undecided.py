"""Fifty equal clients of the digits in sampled games: their values' errors, and how many evaluations tell a pair apart.

    python tools/bench_undecided.py --budgets 250 1000 4000

A row for each budget a round: ``CumulativeShapley`` by permutations, negative loss, three rounds of FedAvg. A pair is
told apart or not by ``flsv.functional.shapley.undecided``. The last rows have a target standard error.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from typing import Any

import torch
from common import be_quiet, grid, quiet_trainer

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import IIDPartitioner, Splits
from flsv.functional.shapley.undecided import times_to_tell_apart, told_apart
from flsv.metrics import CumulativeShapley

CLIENTS, ROUNDS = 50, 3


def row(seed: int, **arguments: Any) -> list[str]:
    torch.manual_seed(seed)
    metric = CumulativeShapley(
        performance="negative_loss", estimator="permutation", estimator_args=arguments, weighting="samples"
    )
    loop = FederatedLoop(metrics={"sv": metric}, seed=seed, reporting=Reporting(table=False, files=False))
    optimizer = partial(torch.optim.SGD, lr=0.1)
    module = ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8), optimizer=optimizer)
    data = FederatedDataModule(
        "digits", IIDPartitioner(CLIENTS), batch_size=8, splits=Splits(server_val=0.2, seed=seed)
    )
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, ROUNDS, [loop]).fit(module, data)
    seconds = time.process_time() - start
    values, errors = loop.contributions["sv"], metric.diagnostics()["stderr"]
    spent, freedom = int(metric.evaluations), float(torch.as_tensor(metric.error_freedom()).min())
    apart = told_apart(values, errors, freedom)
    needed = "" if apart else f"{spent * times_to_tell_apart(values, errors, freedom):,.0f}"
    what = ", ".join(f"{name}={value:g}" for name, value in arguments.items())
    spread = f"{float(values.std()):.4f}"
    return [what, str(seed), f"{spent:,}", f"{float(errors.mean()):.4f}", f"{float(errors.max()):.4f}", spread,
            "yes" if apart else "no", needed, f"{seconds:.0f}"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, nargs="+", default=[250, 1000, 4000])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--target", type=float, default=0.01, help="a round's standard error to stop at")
    options = parser.parse_args()
    be_quiet()
    head = ["a round", "seed", "evaluations", "standard error", "largest", "values' deviation", "a pair apart"]
    asked = [{"budget": budget} for budget in options.budgets] + [{"target_stderr": options.target, "budget": 20000}]
    rows = [row(seed, **each) for each in asked for seed in range(options.seeds)]
    print(grid([[*head, "evaluations that would", "s of the processor"], *rows]))


if __name__ == "__main__":
    main()
