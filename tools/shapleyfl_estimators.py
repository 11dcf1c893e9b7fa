"""ShapleyFL's table 3 (Sun et al., KDD 2023, appendix B.5): errors of Shapley estimators in a round of 20 clients.

The paper compares with 2000 sampled permutations, since 2^20 coalitions of a network cannot be evaluated. With softmax
regression they can: the logits of an average of models are the average of the models' logits, so that all 1,048,576
utilities are sums of 20 matrices. A cell is the first round of 20 clients under gradient poisoning; each estimator is
asked with budgets of coalitions, as many as so many permutations of Monte Carlo take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from table_cells import Results
from table_runs import Cell, Measured, built, federated_loop
from table_statistics import against_best, gather, means
from torch import Tensor

from flsv import Round
from flsv.aggregation import FedAvg
from flsv.functional.shapley import (
    ShapleyEstimate,
    complementary_shapley,
    difference_shapley,
    normalize_shapley,
    permutation_shapley,
    surrogate_shapley,
)
from flsv.strategy import Contributions

PERMUTATIONS = (80, 160, 240, 320, 400)
DRAWS = 1
ESTIMATORS: dict[str, Callable[..., ShapleyEstimate]] = {
    "MC": partial(permutation_shapley, antithetic=False),
    "TMC": partial(permutation_shapley, antithetic=False, truncation=0.02),
    "DMC, algorithm 3": partial(difference_shapley, shared=False),
    "MC, antithetic": permutation_shapley,
    "complementary": complementary_shapley,
    "surrogate, unbiased": partial(surrogate_shapley, unbiased=True),
}


class KeepRound(FedAvg):
    """Keeps the round that it aggregates."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.start = torch.zeros(0), torch.zeros(0)

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        self.vectors, self.start = round.client_vectors.clone(), round.global_vector.clone()
        return super().weights(round, contributions)


def errors(cell: Cell, root: str) -> Measured:
    """Estimator to budgets to the mean squared error of the normalised values, averaged over draws."""
    with built(cell, root) as cli:
        keep = KeepRound()
        callbacks = cli.trainer.callbacks  # type: ignore[attr-defined]
        loop = federated_loop(cli.trainer)
        callbacks[callbacks.index(loop)] = loop.replace(aggregator=keep)
        cli.trainer.fit(cli.model, cli.datamodule)
        images, labels = (torch.cat(parts) for parts in zip(*cli.datamodule.val_dataloader()))
        table = utilities(keep.vectors, keep.start, images, labels)
    players = len(keep.vectors)
    places = 2 ** torch.arange(players)

    def utility(masks: Tensor) -> Tensor:
        return table[masks.long() @ places]

    exact = normalize_shapley(exact_values(table, players))
    found: dict[str, list[float]] = {}
    for name, estimator in ESTIMATORS.items():
        for permutations in PERMUTATIONS:
            squares = []
            for draw in range(DRAWS):
                generator = torch.Generator().manual_seed(1000 * cell.seed + draw)
                estimate = estimator(utility, players, budget=permutations * players, generator=generator)
                squares.append(float((normalize_shapley(estimate.values) - exact).square().mean()))
            found.setdefault(name, []).append(sum(squares) / DRAWS)
    return {"errors": found}


def utilities(vectors: Tensor, start: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """``[2^n]``: accuracies of the averages of softmax regressions ``[n, M * D + M]``; ``start``'s for nobody.

    The members of coalition i are the bits of i.
    """
    flat = images.flatten(1)
    classes = vectors.shape[1] // (flat.shape[1] + 1)

    def logits(models: Tensor) -> Tensor:  # [k, V, M]
        weight, bias = models[:, : classes * flat.shape[1]], models[:, classes * flat.shape[1] :]
        return torch.einsum("kmd,vd->kvm", weight.unflatten(1, (classes, -1)), flat) + bias[:, None]

    each, players = logits(vectors).flatten(1), len(vectors)
    table = torch.empty(2**players, dtype=torch.float64)
    table[0] = (logits(start[None])[0].argmax(1) == labels).double().mean()
    for numbers in torch.arange(1, 2**players).split(2**13):
        masks = (numbers[:, None] >> torch.arange(players) & 1).to(each)  # the argmax of the sum is that of the mean
        right = (masks @ each).unflatten(1, (-1, classes)).argmax(2) == labels
        table[numbers] = right.double().mean(1)
    return table


def exact_values(table: Tensor, players: int) -> Tensor:
    """Shapley values ``[n]`` of a game of which all utilities ``[2^n]`` are known."""
    numbers = torch.arange(2**players)
    sizes = sum((numbers >> player & 1 for player in range(players)), start=torch.zeros_like(numbers))
    binomial = torch.ones(players, dtype=torch.float64)
    for size in range(1, players):
        binomial[size] = binomial[size - 1] * (players - size) / size
    values = []
    for player in range(players):
        without = numbers[(numbers >> player & 1) == 0]
        gain = table[without + 2**player] - table[without]
        values.append((gain / (players * binomial[sizes[without]])).sum())
    return torch.stack(values)


def report(results: Results) -> list[str]:
    runs = {key: result["errors"] for key, result in results.items() if "errors" in result}
    parts = ["## Table 3: mean squared errors of normalised values, 20 players, in 1/1000"] if runs else []
    for column in dict.fromkeys(column for _, column, _ in runs):
        by_row = {
            (name, f"{permutations} permutations", seed): {"error": 1000 * values[place]}
            for (_, where, seed), found in runs.items()
            if where == column
            for name, values in found.items()
            for place, permutations in enumerate(PERMUTATIONS)
        }
        table = gather(by_row, lambda r: r["error"])
        negative = gather(by_row, lambda r: -r["error"])
        parts += [f"{column.partition(', ')[2]}:", means(table, list(ESTIMATORS), 2, bold=False)]
        ours, others = ["DMC, algorithm 3"], ["MC", "TMC"]
        parts += ["DMC's advantage over the better of MC and TMC:", against_best(negative, ours, others)]
    return parts
