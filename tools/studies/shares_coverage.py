"""How often intervals of shares hold the true share, in games whose values are known.

    python tools/studies/shares_coverage.py [--draws 400]

Each game has true values. A draw adds errors with a known covariance, or estimates it from validation cases, and the
intervals of the shares are computed from what a payer sees. Beside them stand the intervals of moving one client's
value to the ends of its own interval while all others stay, as pages showed them before.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from common import part_inside
from torch import Generator, Tensor

from flsv.functional.intervals import t_quantile
from flsv.functional.joint_shares import (
    ValueErrors,
    covariance_over_cases,
    draw_values,
    joint_shares,
    shares_of_draws,
)
from flsv.utilities.display import INTERVAL_LEVEL

#: An estimate of the values, and the errors that a payer knows of.
Estimate = tuple[Tensor, list[ValueErrors]]
Game = tuple[Tensor, Callable[[Generator], Estimate]]
#: Joint draws for each interval.
JOINT_DRAWS = 2000


def with_noise(
    values: Sequence[float],
    covariance: Tensor,
) -> Game:
    """A game whose values are known up to normal errors of a known covariance."""
    truth = torch.tensor(values, dtype=torch.float64)
    errors = [ValueErrors(covariance.double())]

    def estimate(
        generator: Generator,
    ) -> Estimate:
        return draw_values(
            truth,
            errors,
            draws=1,
            generator=generator,
        )[0], errors

    return truth, estimate


def of_cases(
    values: Sequence[float],
    num_cases: int,
    correlation: float,
) -> Game:
    """A game that is a mean over cases: each has values of its own, 0 or 1 in part, and some cases are drawn."""
    truth = torch.tensor(values, dtype=torch.float64)
    num_clients = len(values)
    matrix = (
        torch.full(
            (num_clients, num_clients),
            correlation,
        )
        .fill_diagonal_(1.0)
        .double()
    )
    root = torch.linalg.cholesky(matrix)

    def estimate(
        generator: Generator,
    ) -> Estimate:
        normal = torch.randn(
            num_cases,
            num_clients,
            generator=generator,
        ).double()
        cases = truth + 0.5 * normal @ root.T
        return cases.mean(0), [ValueErrors(covariance_over_cases(cases))]

    return truth, estimate


def games() -> Iterator[tuple[str, Game]]:
    pair = torch.tensor([[0.04, 0.01], [0.01, 0.02]])
    yield (
        "two clients",
        with_noise([3.0, 1.0], pair),
    )
    five = [0.20, 0.25, 0.12, 0.10, 0.18]
    yield (
        "five, additive",
        with_noise(five, 0.02**2 * torch.eye(5)),
    )
    shared = 0.02**2 * (0.5 * torch.eye(5) + 0.5)
    yield (
        "five, errors in common",
        with_noise(five, shared),
    )
    yield (
        "five, 144 cases",
        of_cases(
            five,
            num_cases=144,
            correlation=0.0,
        ),
    )
    yield (
        "five, 144 cases, opposed",
        of_cases(
            five,
            num_cases=144,
            correlation=-0.2,
        ),
    )
    yield "seven, 400 cases", of_cases([*five, 0.3, 0.08], num_cases=400, correlation=0.3)


def moved_alone(
    values: Tensor,
    errors: Sequence[ValueErrors],
) -> tuple[Tensor, Tensor]:
    """The ends of shares if one value is moved and all others stay."""
    variances = torch.stack([source.covariance.diagonal() for source in errors]).sum(0)
    half_widths = float(t_quantile(INTERVAL_LEVEL)) * variances.sqrt()
    interval_ends = []
    for sign in (-1, 1):
        moved = values + sign * torch.diag(half_widths)
        interval_ends.append(shares_of_draws(moved, "zero").diagonal())
    return interval_ends[0], interval_ends[1]


def coverage(game: Game, draws: int, seed: int = 0) -> tuple[float, float]:
    """The fractions of true shares within the joint intervals, and within those of one value moved."""
    truth, estimate = game
    true_shares = shares_of_draws(truth[None], "zero")[0]
    generator = Generator().manual_seed(seed)
    joint_hits, single_hits = [], []
    for _ in range(draws):
        values, errors = estimate(generator)
        joint = joint_shares(values, errors, draws=JOINT_DRAWS)
        joint_hits.append(
            part_inside(
                true_shares,
                joint.low,
                joint.high,
            )
        )
        single_hits.append(
            part_inside(
                true_shares,
                *moved_alone(values, errors),
            )
        )
    return float(np.mean(joint_hits)), float(np.mean(single_hits))


def main(
    arguments: Sequence[str] | None = None,
) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Coverage of the 90 % intervals of shares.")
    parser.add_argument(
        "--draws",
        type=int,
        default=400,
        help="draws of each game",
    )
    options = parser.parse_args(arguments)
    print("| game | joint draws | one value moved |\n|---|---|---|")
    for name, game in games():
        joint, single = coverage(game, options.draws)
        print(f"| {name} | {joint:.3f} | {single:.3f} |", flush=True)


if __name__ == "__main__":
    main()
