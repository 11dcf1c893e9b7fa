"""What is measured for ShapleyFL's figures and tables (Sun et al., KDD 2023; ``tables/shapleyfl.yaml``).

Table 3 compares estimators with 2000 sampled permutations, since 2^20 coalitions of a network cannot be evaluated. With
softmax regression they can: the logits of an average of models are the average of the models' logits, so that all
1,048,576 utilities are sums of 20 matrices. A cell is the first round of 20 clients under gradient poisoning, and every
number is the mean of 50 draws (of the surrogate, which is slow: of one). Each estimator is given as many distinct
coalitions as so many permutations of Monte Carlo.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from cells import Cell, Measured, built, federated_loop, test_accuracies
from sklearn.metrics import roc_auc_score
from torch import Tensor

from flsv import Round
from flsv.aggregation import FedAvg
from flsv.core.strategy import Contributions
from flsv.functional import (
    ShapleyEstimate,
    difference_shapley,
    normalize_shapley,
    permutation_shapley,
    surrogate_shapley,
)
from flsv.functional.shapley.exact import shapley_of_table

PERMUTATIONS = (80, 160, 240, 320, 400)
DRAWS = 50
#: Of an estimator that fits something, whose draws take seconds each.
FEW_DRAWS = {"surrogate": 1}
TRUNCATION = 0.02
ESTIMATORS: dict[str, Callable[..., ShapleyEstimate]] = {
    "MC": partial(permutation_shapley, antithetic=False),
    "TMC": partial(permutation_shapley, antithetic=False, truncation=TRUNCATION),
    "DMC, algorithm 3": difference_shapley,
    "MC, antithetic": permutation_shapley,
    "surrogate": surrogate_shapley,
}


def measured(cell: Cell, root: str) -> Measured:
    """Accuracies, and the AUROC of SSV where some clients are malicious (else NaN)."""
    with built(cell, root) as cli:
        cli.trainer.fit(cli.model, cli.datamodule)
        loop = federated_loop(cli.trainer)
        accuracies = test_accuracies(cli)
    clients = cli.datamodule.num_clients
    malicious = loop.uploads[0].chosen(clients) if loop.uploads else cli.datamodule.malicious
    auroc = float("nan")
    if "ssv" in loop.contributions and 0 < len(malicious) < clients:
        bad = torch.zeros(clients)
        bad[malicious] = 1
        auroc = float(roc_auc_score(bad, -loop.contribution_metrics.with_priors()["ssv"]))
    return {**accuracies, "auroc": auroc}


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

    exact = normalize_shapley(shapley_of_table(table[:, None])[:, 0])
    found: dict[str, dict[str, float]] = {name: {} for name in ESTIMATORS}
    for permutations in PERMUTATIONS:
        for name, estimator in ESTIMATORS.items():
            squares = []
            for draw in range(min(DRAWS, FEW_DRAWS.get(name, DRAWS))):
                generator = torch.Generator().manual_seed(
                    1000 * cell.seed + draw
                )  # the same for all estimators
                estimate = estimator(
                    utility, players, budget=permutations * players, generator=generator
                )
                squares.append(float((normalize_shapley(estimate.values) - exact).square().mean()))
            found[name][f"{permutations} permutations"] = 1000 * sum(squares) / len(squares)
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
        masks = (numbers[:, None] >> torch.arange(players) & 1).to(
            each
        )  # the argmax of the sum is that of the mean
        right = (masks @ each).unflatten(1, (-1, classes)).argmax(2) == labels
        table[numbers] = right.double().mean(1)
    return table
