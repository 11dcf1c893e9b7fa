"""How far payments by few validation samples are from payments by many, and what the page says of them.

    python tools/studies/validation_samples.py --csv docs/results/validation_samples.csv

All coalitions of five federations are trained, and each validation sample has its own values. Some of these samples
are drawn again and again. Values on the drawn samples, with their intervals, are compared with values on all others
of the same training. "allowed" are draws whose expected part of a payment that goes to others forbids no payment.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pandas
import torch
from pandas import DataFrame
from torch import Tensor

from benchmark import federation
from benchmark.federation import QUIET_TRAINER, quiet
from flsv.configuration.federation_config import Reporting
from flsv.federation import FederatedLoop
from flsv.functional.intervals import t_quantile
from flsv.functional.joint_shares import (
    ValueErrors,
    covariance_over_cases,
    joint_shares,
    shares_of_draws,
)
from flsv.metrics import ShadowShapley
from flsv.results.verdict import MAX_MOVED_FRACTION, MAX_PROBABILITY_OF_NO_GAIN
from flsv.utilities.display import INTERVAL_LEVEL

FEDERATIONS = (
    "digits_dirichlet",
    "digits_label_noise",
    "digits_sizes",
    "mnist_dirichlet",
    "fashion_dirichlet",
)
VALIDATION_FRACTION = 0.5
NUMS_OF_SAMPLES = (4, 10, 20, 30, 50, 100, 200, 300)
NUM_DRAWS = 100
SEED = 0


def case_values_of(name: str) -> tuple[Tensor, Tensor]:
    """Train all coalitions. Return the values on each sample ``[V, n]``, and the variances ``[n]`` between seeds."""
    of_file = federation(name)
    data = copy.deepcopy(dict(of_file.data))
    data["splits"] = {**data["splits"], "server_val": VALIDATION_FRACTION}
    chosen = replace(of_file, data=data)
    metric = ShadowShapley(coalitions="all", performance="accuracy")
    with tempfile.TemporaryDirectory() as folder, quiet():
        loop = FederatedLoop(
            metrics={"value": metric},
            seed=SEED,
            reporting=Reporting(table=False, figures=0),
        )
        trainer = L.Trainer(
            max_epochs=chosen.rounds,
            accelerator="cpu",
            default_root_dir=folder,
            callbacks=[loop],
            num_sanity_val_steps=0,
            limit_val_batches=0,
            **QUIET_TRAINER,
        )
        trainer.fit(chosen.module(), chosen.datamodule())
        values = loop.values["value"]
        assert values.case_values is not None
        assert values.half_width is not None
        case_values = values.case_values()
    assert case_values is not None
    stderr = values.half_width / t_quantile(INTERVAL_LEVEL)
    return case_values.values.T.double(), stderr.double().square()


def row_of(name: str, num_samples: int, case_values: Tensor, variance: Tensor) -> Mapping[str, Any]:
    """Return the means over draws of ``num_samples`` samples."""
    generator = torch.Generator().manual_seed(SEED)
    draws = []
    for _ in range(NUM_DRAWS):
        order = torch.randperm(len(case_values), generator=generator)
        drawn = case_values[order[:num_samples]]
        others = case_values[order[num_samples:]]
        values = drawn.mean(0)
        errors = [ValueErrors(variance.diag()), ValueErrors(covariance_over_cases(drawn))]
        joint = joint_shares(values, errors)
        shares = shares_of_draws(values[None], "zero")[0]
        other_shares = shares_of_draws(others.mean(0)[None], "zero")[0]
        is_covered = (joint.low <= other_shares) & (other_shares <= joint.high)
        is_allowed = (
            joint.moved <= MAX_MOVED_FRACTION and joint.without_gain <= MAX_PROBABILITY_OF_NO_GAIN
        )
        draws.append(
            {
                "to others": float((shares - other_shares).abs().sum() / 2),
                "held": float(is_covered.double().mean()),
                "allowed": float(is_allowed),
            }
        )
    table = DataFrame(draws)
    allowed = table[table["allowed"] == 1]
    return {
        "federation": name,
        "samples": num_samples,
        "to others, %": 100 * table["to others"].mean(),
        "held": table["held"].mean(),
        "allowed": table["allowed"].mean(),
        "of these to others, %": 100 * allowed["to others"].mean(),
        "of these held": allowed["held"].mean(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, help="file to write")
    options = parser.parse_args()

    rows = []
    for name in FEDERATIONS:
        case_values, variance = case_values_of(name)
        rows += [row_of(name, number, case_values, variance) for number in NUMS_OF_SAMPLES]
        print(name, len(case_values), flush=True)

    table = DataFrame(rows)
    means = table.groupby("samples", as_index=False).mean(numeric_only=True)
    table = pandas.concat([table, means.assign(federation="mean")], ignore_index=True)
    table = table.round(2)
    print(table.to_string(index=False))
    if options.csv:
        table.to_csv(options.csv, index=False)


if __name__ == "__main__":
    main()
