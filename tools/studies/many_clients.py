"""Measure what predicted values of 20 to 100 clients cost, and how far they are from those of retrained coalitions.

    python tools/studies/many_clients.py [NAME...] [--csv FILE]

Thousands of coalitions along random orders of the clients are trained (``predicted_federations.py``). They show how far
predicted utilities are off. The truth is the predicted game's value plus the mean of what clients add to the difference
of both games. Last come games whose values have a closed form.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import be_quiet, grid, write_csv
from predicted_federations import Training, score
from predicted_sets import ALL, Federation
from torch import Tensor

from flsv.benchmark.scores import share_error
from flsv.functional import few_coalitions, predicted_shapley
from flsv.functional.intervals import one_seed_stderr, prediction_stderr
from flsv.functional.shapley.mixtures import interpolation_weights
from flsv.functional.shapley.permutation import Moments, prefixes, random_permutations
from flsv.functional.shapley.predicted_outputs import PredictedGame

FEDERATIONS = {
    "digits_20": Federation("digits", 20, "dir 1", samples=1400),
    "digits_4_of_20": Federation("digits", 20, "dir 1", samples=1400, cohort=4),
    "mnist_50": Federation("mnist", 50, "dir 1", samples=2500),
    "mnist_100": Federation("mnist", 100, "dir 1", samples=4000),
    "mnist_20_of_100": Federation("mnist", 100, "dir 1", samples=4000, cohort=20),
}
for name, federation in FEDERATIONS.items():
    rounds = 12
    if federation.cohort:
        rounds = 30
    ALL[name] = replace(
        federation,
        model="soft",
        rounds=rounds,
        lr=0.3,
        components=20,
    )
#: Coalitions that are trained along orders of the clients, about, and how many at once.
TRAINED = 4000
AT_ONCE = 500
DESIGNS: Any = ("singles", "both")
HEADER = (
    "federation",
    "trained",
    "exact coalitions",
    "seconds",
    "peak, GB",
    "drawing, % of the bracket",
    "utility off by",
    "gain",
    "misallocated, %",
    "by the truth's own error",
    "numbers of samples",
    "equal pay",
)


def outputs_of(training: Training, masks: Tensor) -> Tensor:
    """Train coalitions, and return their models' outputs ``[K, V, M]``."""
    outputs = []
    for some_masks in masks.split(AT_ONCE):
        models, _, _ = training(some_masks)
        outputs.append(training.outputs(models, training.validation[0]))
    return torch.cat(outputs)


@dataclass(frozen=True)
class Limits:
    """The utilities of the empty and of the grand coalition."""

    empty: Tensor
    grand: Tensor


def along(game: Callable[[Tensor], Tensor], orders: Tensor, limits: Limits) -> Tensor:
    """Utilities ``[P, n + 1]`` along orders of the clients."""
    num_orders, num_clients = orders.shape
    masks = prefixes(orders)
    utilities = game(masks.flatten(0, 1))
    return torch.cat(
        [
            limits.empty.expand(num_orders, 1),
            utilities.view(num_orders, num_clients - 1),
            limits.grand.expand(num_orders, 1),
        ],
        dim=1,
    )


def contributions(utilities: Tensor, orders: Tensor) -> Moments:
    """Moments of what clients add along pairs of an order and its reverse."""
    steps = utilities.diff(dim=1)
    added = torch.empty_like(steps)
    added.scatter_(1, orders, steps)
    pairs = added.unflatten(0, (-1, 2))
    moments = Moments()
    moments.add(pairs.mean(1))
    return moments


def drawn_orders(num_clients: int) -> Tensor:
    """Pairs of an order of the clients and its reverse, one after the other."""
    generator = torch.Generator().manual_seed(0)
    num_pairs = TRAINED // (2 * num_clients)
    orders = random_permutations(num_pairs, num_clients, generator)
    pairs = torch.stack([orders, orders.flip(1)], 1)
    return pairs.flatten(0, 1)


def peak_memory() -> float:
    """The most GB that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def percent_of(values: Tensor, truth: Tensor) -> str:
    """Percent misallocated."""
    return f"{100 * share_error(values, truth):.1f}"


def own_error(truth: Tensor, stderr: Tensor) -> str:
    """Percent misallocated by truths that are drawn around the truth."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(100):
        noise = torch.randn(len(truth), generator=generator)
        errors.append(share_error(truth + noise * stderr, truth))
    return f"{100 * float(torch.tensor(errors).mean()):.1f}"


def measured(name: str) -> list[list[Any]]:
    """The rows of one federation."""
    training = Training(name, 0)
    num_clients = training.of.n
    utility = partial(score, training.of, training.validation[1])
    orders = drawn_orders(num_clients)

    def exact_utility(masks: Tensor) -> Tensor:
        return utility(outputs_of(training, masks))

    rows = []
    exact: Tensor | None = None
    for design in DESIGNS:
        trained = few_coalitions(num_clients, design)
        outputs = outputs_of(training, trained)
        utilities = utility(outputs)
        limits = Limits(utilities[~trained.any(1)], utilities[trained.all(1)])
        arguments = (trained, utilities, outputs, training.sizes, utility)
        began = time.process_time()
        prediction = predicted_shapley(*arguments, logits=True)
        seconds = time.process_time() - began
        peak = peak_memory()

        if exact is None:
            exact = along(exact_utility, orders, limits)
        game = PredictedGame(*arguments, logits=True)
        predicted = along(partial(mean_utility, game), orders, limits)
        difference = exact - predicted
        moments = contributions(difference, orders)
        truth = prediction.values + moments.mean
        fit = prediction_stderr(prediction.disagreement)
        errors = one_seed_stderr(prediction.values, fit)
        drawing = (prediction.stderr / errors).mean()
        rows.append(
            [
                name,
                design,
                difference[:, 1:-1].numel(),
                f"{seconds:.1f}",
                f"{peak:.2f}",
                f"{100 * float(drawing):.1f}",
                f"{difference[:, 1:-1].square().mean().sqrt():.4f}",
                f"{float(limits.grand - limits.empty):.3f}",
                percent_of(prediction.values, truth),
                own_error(truth, moments.stderr),
                percent_of(training.sizes, truth),
                percent_of(torch.ones(num_clients), truth),
            ]
        )
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def mean_utility(game: PredictedGame, masks: Tensor) -> Tensor:
    """The mean of the utilities by interpolation and by ensemble."""
    return game(masks).mean(1)


def mean_output(outputs: Tensor) -> Tensor:
    """A utility that is linear in the outputs."""
    return outputs.mean(1)


def closed_form(num_clients: int) -> list[Any]:
    """The row of a game in which a coalition's utility is the mean of its outputs."""
    generator = torch.Generator().manual_seed(num_clients)
    trained = few_coalitions(num_clients, "singles")
    outputs = torch.rand(len(trained), 50, generator=generator, dtype=torch.float64)
    outputs[~trained.any(1)] = 0
    weights = torch.ones(num_clients)
    utilities = mean_output(outputs)
    began = time.process_time()
    prediction = predicted_shapley(trained, utilities, outputs, weights, mean_output, logits=False)
    seconds = time.process_time() - began

    values = closed_form_values(trained, utilities, weights)
    error = (prediction.values - values).square().mean().sqrt()
    stderr = prediction.stderr.square().mean().sqrt()
    print(f"closed form, {num_clients}: error {error:.1e}, said {stderr:.1e}", flush=True)
    facts = [f"closed form, {num_clients}", "singles", "", f"{seconds:.1f}", f"{peak_memory():.2f}"]
    return [*facts, "", f"{error:.1e}", "", percent_of(prediction.values, values), "", "", ""]


def closed_form_values(trained: Tensor, utilities: Tensor, weights: Tensor) -> Tensor:
    """Shapley values of a linear game of equal clients."""
    # By symmetry a coalition of s clients has the utility offset[s] + slope[s] (the sum of its members' utilities).
    num_clients = trained.shape[1]
    sizes = torch.arange(1, num_clients)
    masks = torch.arange(num_clients) < sizes[:, None]
    has_members = trained.any(1)
    mixing = interpolation_weights(masks, trained[has_members], weights)
    is_single = trained[has_members].sum(1) == 1
    single_mixing = mixing[:, is_single]
    of_members, of_others = single_mixing.amax(1), single_mixing[:, -1]
    alone = utilities[trained.sum(1) == 1]
    grand = utilities[trained.all(1)]

    slopes = (of_members - of_others + 1 / sizes) / 2
    offsets = (of_others * alone.sum() + mixing[:, ~is_single].flatten() * grand) / 2
    slopes[0] = 1  # a client alone is trained
    offsets[0] = 0

    mean_of_others = (alone.sum() - alone) / (num_clients - 1)
    values = alone.clone()
    for size in range(1, num_clients):
        without = offsets[size - 1] + slopes[size - 1] * size * mean_of_others
        with_client = grand.expand_as(alone)
        if size < num_clients - 1:
            members_sum = size * mean_of_others + alone
            with_client = offsets[size] + slopes[size] * members_sum
        values += with_client - without
    return values / num_clients


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="federations")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    be_quiet()
    rows: list[list[Any]] = [[*HEADER]]
    for num_clients in (20, 50, 100):
        rows.append(closed_form(num_clients))
    for name in options.names or FEDERATIONS:
        rows += measured(name)
    write_csv(rows, options.csv)
    print(grid([[str(cell) for cell in row] for row in rows]))


if __name__ == "__main__":
    main()
