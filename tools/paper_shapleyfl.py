"""What is measured for ShapleyFL's figures and tables (Sun et al., KDD 2023; ``tables/shapleyfl.yaml``).

Table 3 compares estimators with 2000 sampled permutations, since 2^20 coalitions of a network cannot be evaluated. With
softmax regression they can: the logits of an average of models are the average of the models' logits, so that all
1,048,576 utilities are sums of 20 matrices. A cell is the first round of 20 clients under gradient poisoning, and every
number is the mean of 50 draws (of the surrogate, which is slow: of one). Errors are counted in two ways:

- *errors*, by coalitions: each estimator is given as many distinct coalitions as so many permutations of Monte Carlo;
- *sampled*, as the paper counts: of M samples Monte Carlo makes M n evaluations; algorithm 3 draws floor(M / (n - 1))
  coalitions for each of n - 1 players and n - 1 sizes and evaluates two models for each. *referenced*: against 2,000
  permutations of Monte Carlo, the paper's reference, in the place of the exact values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from cells import Cell, Measured, built, federated_loop, test_accuracies, trained
from sklearn.metrics import roc_auc_score
from torch import Tensor

from flsv import Round
from flsv.aggregation import FedAvg
from flsv.functional.shapley import (
    ShapleyEstimate,
    Utility,
    complementary_shapley,
    difference_shapley,
    normalize_shapley,
    permutation_shapley,
    surrogate_shapley,
)
from flsv.strategy import Contributions

PERMUTATIONS = (80, 160, 240, 320, 400)
DRAWS = 50
#: Of an estimator that fits something, whose draws take seconds each.
FEW_DRAWS = {"surrogate, unbiased": 1}
TRUNCATION = 0.02
REFERENCE = 2000  # permutations, the paper's benchmark
ESTIMATORS: dict[str, Callable[..., ShapleyEstimate]] = {
    "MC": partial(permutation_shapley, antithetic=False),
    "TMC": partial(permutation_shapley, antithetic=False, truncation=TRUNCATION),
    "DMC, algorithm 3": partial(difference_shapley, shared=False),
    "MC, antithetic": permutation_shapley,
    "complementary": complementary_shapley,
    "surrogate, unbiased": partial(surrogate_shapley, unbiased=True),
}

#: Of the tables by samples: how many permutations, or M of algorithm 3, each is given.
SAMPLED = ("MC", "TMC", "DMC, algorithm 3")


def measured(cell: Cell, root: str) -> Measured:
    """Accuracies, cost, and the AUROC of SSV where some clients are malicious (else NaN)."""
    with built(cell, root) as cli:
        cost = trained(cli)
        loop = federated_loop(cli.trainer)
        accuracies = test_accuracies(cli)
    clients = cli.datamodule.num_clients
    malicious = loop.uploads[0].chosen(clients) if loop.uploads else cli.datamodule.malicious
    auroc = float("nan")
    if "ssv" in loop.contributions and 0 < len(malicious) < clients:
        bad = torch.zeros(clients)
        bad[malicious] = 1
        auroc = float(roc_auc_score(bad, -loop.board.with_priors()["ssv"]))
    return {**accuracies, **cost, "auroc": auroc}


class KeepRound(FedAvg):
    """Keeps the round that it aggregates."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.start = torch.zeros(0), torch.zeros(0)

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        self.vectors, self.start = round.client_vectors.clone(), round.global_vector.clone()
        return super().weights(round, contributions)


def errors(cell: Cell, root: str) -> Measured:
    """Estimator to budgets to the mean squared error of the normalized values, in 1/1000, averaged over draws."""
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
    reference = normalize_shapley(_walked(utility, players, REFERENCE, None, generator_of(cell.seed, "reference")))
    found: Measured = {"errors": {}, "sampled": {}, "referenced": {}}
    for permutations in PERMUTATIONS:
        column = f"{permutations} permutations"
        for name, estimator in ESTIMATORS.items():
            squares = []
            for draw in range(min(DRAWS, FEW_DRAWS.get(name, DRAWS))):
                generator = generator_of(cell.seed, draw)
                estimate = estimator(utility, players, budget=permutations * players, generator=generator)
                squares.append(float((normalize_shapley(estimate.values) - exact).square().mean()))
            found["errors"].setdefault(name, {})[column] = 1000 * sum(squares) / len(squares)
        for name in SAMPLED:
            values = [
                normalize_shapley(by_samples(name, utility, players, permutations, generator_of(cell.seed, draw)))
                for draw in range(DRAWS)
            ]
            for key, right in (("sampled", exact), ("referenced", reference)):
                squares = [float((each - right).square().mean()) for each in values]
                found[key].setdefault(name, {})[column] = 1000 * sum(squares) / DRAWS
    return found


def generator_of(seed: int, draw: int | str) -> torch.Generator:
    """Of a draw, the same for all estimators; or of the reference."""
    return torch.Generator().manual_seed(1000 * seed + (draw if isinstance(draw, int) else 999))


def by_samples(name: str, utility: Utility, players: int, samples: int, generator: torch.Generator) -> Tensor:
    """Values ``[n]`` of so many permutations, or of algorithm 3 with M of as many."""
    if name == "DMC, algorithm 3":
        return algorithm_3(utility, players, samples, generator)
    return _walked(utility, players, samples, TRUNCATION if name == "TMC" else None, generator)


def _walked(
    utility: Utility, players: int, permutations: int, truncation: float | None, generator: torch.Generator
) -> Tensor:
    return permutation_shapley(
        utility,
        players,
        antithetic=False,
        truncation=truncation,
        num_permutations=permutations,
        generator=generator,
    ).values


def algorithm_3(utility: Utility, players: int, samples: int, generator: torch.Generator) -> Tensor:
    """Values ``[n]`` of the paper's algorithm 3 with M ``samples``, accumulating where it prints ``=``.

    floor(M/(n - 1)) coalitions for each other player i and each size j, player 0 the base; the differences are made
    values by two more evaluations (normalized values need none)."""
    others = players - 1
    passes = samples // others
    drawn = torch.rand(passes, others, others, others, generator=generator)  # pass, i, j, who may be in S
    drawn = drawn.masked_fill(torch.eye(others, dtype=torch.bool)[:, None], 2)  # i is not
    inside = drawn.argsort(-1).argsort(-1) < torch.arange(others)[:, None]
    base = torch.zeros(*inside.shape[:-1], 1, dtype=torch.bool)
    with_base = torch.cat([~base, inside], dim=-1)
    with_other = torch.cat([base, inside | torch.eye(others, dtype=torch.bool)[:, None]], dim=-1)
    gains = utility(with_base.flatten(0, 2)) - utility(with_other.flatten(0, 2))
    differences = torch.cat([torch.zeros(1), gains.view(passes, others, others).mean((0, 2))])
    ends = utility(torch.tensor([[False], [True]]).expand(2, players))
    return (ends[1] - ends[0] + differences.sum()) / players - differences


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
