"""How often intervals of shares hold the shares that other cases and other seeds give.

    python tools/studies/other_cases.py [NAME...] [--draws 200] [--seeds 12] [--csv FILE]

All coalitions of federations in ``predicted_federations.py`` are trained with many seeds. A draw takes some of the
seeds and as many validation samples as the federation has, values the clients as ``flsv retrain`` does, and computes
the intervals of a page to pay by. The truth has all other seeds and all other samples. Its own error widens the
intervals. Beside them stand intervals that know only of seeds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import be_quiet, grid, numbers_of, part_inside, write_csv
from predicted_federations import Samples, Training, source
from predicted_sets import ALL
from shares_coverage import moved_alone
from torch import Generator, Tensor

from flsv.functional import choose_halvings, few_coalitions, predicted_shapley
from flsv.functional.intervals import (
    interval_over_seeds,
    prediction_stderr,
    seed_covariance,
    seed_freedom,
)
from flsv.functional.joint_shares import (
    ValueErrors,
    covariance_over_cases,
    joint_shares,
    shares_of_draws,
)
from flsv.functional.shapley.exact import all_coalitions, shapley_of_table
from flsv.games.case_scores import case_scores

#: Federations with at least twice as many samples left as their validation set has, whose coalitions train in minutes.
NAMES = (
    "digits_dir_5",
    "digits_sizes_6",
    "digits_labels_6",
    "digits_disjoint_5",
    "digits_harm_5",
    "mnist_dir_6",
    "mnist_twins_6",
    "mnist_harm_6",
    "mnist_hundred_7",
    "fashion_dir_7",
    "fashion_features_6",
    "fashion_labels_6",
    "fashion_twins_6",
    "blobs_dir_6",
    "blobs_labels_7",
    "women_5",
)
#: The trainings, or the number of halvings, and numbers of seeds of which intervals are computed.
WAYS: dict[str, tuple[Any, int]] = {
    "alone and all but one, 3 seeds": ("both", 3),
    "alone and one halving, 3 seeds": (1, 3),
    "alone and two halvings, 3 seeds": (2, 3),
    "alone, 1 seed": ("singles", 1),
    "alone and one halving, 1 seed": (1, 1),
    "alone and two halvings, 1 seed": (2, 1),
}
#: Measures of flsv by the scores of the federations.
MEASURES = {"accuracy": "accuracy", "balanced": "balanced_accuracy"}
#: The most samples that are predicted, and joint draws of an interval.
MOST_SAMPLES = 3000
JOINT_DRAWS = 2000
HEADER = (
    "federation",
    "clients",
    "cases",
    "way",
    "other cases, other seeds",
    "this validation set, other seeds",
    "one value moved",
    "half width, % of a payment",
)


@dataclass(frozen=True)
class TrainedFederation:
    """Outputs of all coalitions' models with many seeds, for samples that nobody has trained on."""

    num_clients: int
    num_cases: int
    measure: str
    # [n], the clients' numbers of samples.
    sizes: Tensor
    # int64 [P], and [seeds, 2^n, P, M].
    labels: Tensor
    logits: Tensor
    # float64 [seeds, P, n], each sample's exact Shapley values of hits.
    case_values: Tensor


def unused_samples(name: str) -> Samples:
    """All samples on which no client trains."""
    federation = ALL[name]
    samples, targets, _ = source(federation.data, federation.classes)
    generator = np.random.default_rng(sum(map(ord, name)))
    rows = generator.permutation(len(targets))

    # As in predicted_federations.samples_of: first those for validation, then the clients'.
    num_held_out = federation.validation
    num_others = 300 if federation.apart else federation.validation
    end = min(num_held_out + federation.samples, len(rows) - num_others)
    is_unused = np.ones(len(rows), dtype=bool)
    is_unused[num_held_out:end] = False
    return samples[rows[is_unused]], targets[rows[is_unused]]


def trained_federation(name: str, num_seeds: int) -> TrainedFederation:
    """Train all coalitions of a federation with seeds from 0."""
    federation = ALL[name]
    masks = all_coalitions(federation.n)
    samples, labels = unused_samples(name)
    samples, labels = samples[:MOST_SAMPLES], labels[:MOST_SAMPLES]
    logits, case_values = [], []
    for seed in range(num_seeds):
        training = Training(name, seed)
        models, _, _ = training(masks)
        outputs = training.outputs(models, samples)
        hits = (outputs.argmax(-1) == labels).double()
        logits.append(outputs)
        case_values.append(shapley_of_table(hits).T)
    return TrainedFederation(
        num_clients=federation.n,
        num_cases=federation.validation,
        measure=MEASURES[federation.score],
        sizes=training.sizes,
        labels=labels,
        logits=torch.stack(logits),
        case_values=torch.stack(case_values),
    )


def masks_of(
    num_clients: int,
    trainings: Any,
    logits: Tensor,
) -> Tensor:
    """List the coalitions. Halves are chosen by the first seed's outputs of each client alone."""
    if isinstance(trainings, str):
        return few_coalitions(num_clients, trainings)
    singles = few_coalitions(num_clients, "singles")
    outputs = logits[numbers_of(singles[2:])]
    names = [f"client {client:02}" for client in range(num_clients)]
    halves = choose_halvings(outputs, names, trainings, logits=True)
    return torch.cat([singles, halves])


def estimate(
    federation: TrainedFederation,
    trainings: Any,
    seeds: Tensor,
    cases: Tensor,
) -> tuple[Tensor, list[ValueErrors]]:
    """Value the clients as ``flsv retrain`` does: values ``[n]``, and their errors by seeds and by cases."""
    all_logits = federation.logits[seeds][:, :, cases]
    masks = masks_of(federation.num_clients, trainings, all_logits[0])
    logits = all_logits[:, numbers_of(masks)]
    evaluator: Any = SimpleNamespace(batches=[(None, federation.labels[cases])])
    scores = case_scores(evaluator, federation.measure)
    assert scores is not None

    def utility(outputs: Tensor) -> Tensor:
        return scores.score(outputs).mean(1)

    values, disagreements = [], []
    for outputs in logits:
        prediction = predicted_shapley(
            masks, utility(outputs), outputs, federation.sizes, utility, logits=True
        )
        values.append(prediction.values)
        disagreements.append(prediction.disagreement)
    by_seed = torch.stack(values)
    stderr = prediction_stderr(torch.stack(disagreements).mean(0))
    half_widths = interval_over_seeds(by_seed, stderr)
    between_seeds = seed_covariance(by_seed, half_widths)
    between_cases = scores.covariance(masks, logits, federation.sizes, logits=True)
    assert between_cases is not None
    errors = [
        ValueErrors(between_seeds, seed_freedom(len(seeds))),
        ValueErrors(between_cases),
    ]
    return by_seed.mean(0), errors


def truth(
    federation: TrainedFederation,
    seeds: Tensor,
    cases: Tensor,
) -> tuple[Tensor, list[ValueErrors]]:
    """Exact values ``[n]`` of some seeds and cases, and their errors."""
    labels = federation.labels[cases]
    multiples = torch.ones(len(cases), dtype=torch.float64)
    strata = None
    if federation.measure == "balanced_accuracy":
        counts = labels.bincount()
        multiples = len(labels) / ((counts > 0).sum() * counts[labels].double())
        strata = labels
    case_values = federation.case_values[seeds][:, cases] * multiples[:, None]
    by_seed = case_values.mean(1)
    errors = [
        ValueErrors(torch.cov(by_seed.T) / len(seeds)),
        ValueErrors(covariance_over_cases(case_values.mean(0), strata)),
    ]
    return by_seed.mean(0), errors


def coverage(
    federation: TrainedFederation,
    trainings: Any,
    num_seeds: int,
    draws: int,
) -> list[float]:
    """The fractions of true shares within each kind of interval, and half the first kind's width in percent."""
    generator = Generator().manual_seed(0)
    measured = []
    for _ in range(draws):
        seeds = torch.randperm(len(federation.logits), generator=generator)
        cases = torch.randperm(len(federation.labels), generator=generator)
        values, errors = estimate(
            federation,
            trainings,
            seeds=seeds[:num_seeds],
            cases=cases[: federation.num_cases],
        )
        true_values, true_errors = truth(
            federation,
            seeds=seeds[num_seeds:],
            cases=cases[federation.num_cases :],
        )
        shares = shares_of_draws(true_values[None], "zero")[0]
        with_cases = joint_shares(values, [*errors, *true_errors], draws=JOINT_DRAWS)
        with_seeds = joint_shares(values, [errors[0], *true_errors], draws=JOINT_DRAWS)
        measured.append(
            [
                part_inside(shares, with_cases.low, with_cases.high),
                part_inside(shares, with_seeds.low, with_seeds.high),
                part_inside(shares, *moved_alone(values, [errors[0], *true_errors])),
                50 * float((with_cases.high - with_cases.low).mean()),
            ]
        )
    return np.mean(measured, 0).tolist()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Coverage of intervals for other cases.")
    parser.add_argument("names", nargs="*", help="federations")
    parser.add_argument("--draws", type=int, default=200, help="draws of each federation")
    parser.add_argument("--seeds", type=int, default=12, help="seeds that are trained")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    if options.seeds < 5:
        parser.error("--seeds: expected 5 or more, of which some are the truth's")
    be_quiet()

    rows = [[*HEADER]]
    fractions: dict[str, list[list[float]]] = {title: [] for title in WAYS}
    for name in options.names or NAMES:
        began = time.process_time()
        federation = trained_federation(name, options.seeds)
        for title, (trainings, num_seeds) in WAYS.items():
            measured = coverage(federation, trainings, num_seeds, options.draws)
            fractions[title].append(measured)
            facts = [name, str(federation.num_clients), str(federation.num_cases), title]
            rows.append([*facts, *_cells(measured)])
            print(*rows[-1], sep=" | ", flush=True)
        print(f"{name}: {time.process_time() - began:.0f} s", flush=True)
    for title, measured_by_name in fractions.items():
        mean = np.mean(measured_by_name, 0).tolist()
        rows.append(["mean", "", "", title, *_cells(mean)])
    write_csv(rows, options.csv)
    print(grid(rows))


def _cells(measured: Sequence[float]) -> list[str]:
    *fractions, half_width = measured
    return [*(f"{fraction:.2f}" for fraction in fractions), f"{half_width:.1f}"]


if __name__ == "__main__":
    main()
