"""What is measured for ShapFed's tables and figures (Tastan et al., IJCAI 2024; ``tables/shapfed.yaml``).

A column is an experiment: data, partition, network and training. A row is an algorithm of ``configs/``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import lightning as L
import torch
from cells import Cell, Measured, built, federated_loop
from own_models import OwnModels
from torch import Tensor

from flsv import FederatedLoop
from flsv.data import FederatedDataModule
from flsv.functional import collaborative_fairness

#: Rounds between two tests on the way, for the figures that are curves.
EVERY = {"CIFAR-10, imbalanced": 2, "HAM10000, made-up clinics": 3}


class Tested(OwnModels):
    """Tests the clients' and the global models after the last round, and every so many rounds before it.

    Attributes:
        curve: models by round to a balanced accuracy of each, in %.
    """

    def __init__(self, loop: FederatedLoop, every: int = 0) -> None:
        super().__init__(loop)
        self.every, self.curve = every, dict[int, dict[str, list[float]]]()
        self._limit: int | None = None

    def _batches(self, data: FederatedDataModule) -> Iterable[Any]:
        return islice(super()._batches(data), self._limit)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.limit_test_batches, int):
            self._limit = trainer.limit_test_batches
        super().on_fit_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rounds = trainer.current_epoch + 1
        if self.every and rounds % self.every == 0 and rounds != trainer.max_epochs:
            self._test(trainer, pl_module, rounds)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._test(trainer, pl_module, int(trainer.max_epochs or 0))

    def _test(self, trainer: L.Trainer, pl_module: L.LightningModule, rounds: int) -> None:
        super().on_train_end(trainer, pl_module)
        self.curve[rounds] = {
            name: (100 * each["balanced_accuracy"]).tolist() for name, each in self.scores.items()
        }


def tested(cell: Cell, root: str) -> Measured:
    """Balanced accuracies after the last round and on the way, and class-specific values, where the run has them."""
    with built(cell, root, **{"federation.evaluation.keep_trained": True}) as cli:
        loop = federated_loop(cli.trainer)
        tests = Tested(loop, EVERY.get(cell.column, 0))
        cli.trainer.callbacks.append(tests)  # type: ignore[attr-defined]
        L.seed_everything(cell.seed, verbose=False)  # all rows start from the same weights
        cli.trainer.fit(cli.model, cli.datamodule)
    cssv = loop.contribution_metrics.contributions.get("cssv")
    return {
        **list(tests.curve.values())[-1],
        "cssv": None if cssv is None else cssv.tolist(),
        "curve": {str(rounds): scores for rounds, scores in tests.curve.items()},
    }


def values(cell: Cell, root: str) -> Measured:
    """All metrics' values, a list per client."""
    with built(cell, root) as cli:
        loop = federated_loop(cli.trainer)
        L.seed_everything(cell.seed, verbose=False)
        cli.trainer.fit(cli.model, cli.datamodule)
    found = {name: loop.contribution_metrics.contributions[name] for name in loop.metrics}
    if cell.column == "figure 5":
        found = {name: loop.metrics[name].per_client(value) for name, value in found.items()}
    return {name: value.tolist() for name, value in found.items()}


# ---- what the tables show


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's."""
    return float(torch.corrcoef(torch.stack([x.flatten().double(), y.flatten().double()]))[0, 1])


def with_true(
    run: Measured, beside: Mapping[str, Measured], row: str, column: str
) -> dict[str, float]:
    """The correlation of each metric's values with the true ones."""
    true = torch.tensor(run["true"])
    return {name: correlation(torch.tensor(run[name]), true) for name in run}


def gap(run: Measured, beside: Mapping[str, Measured], row: str, column: str) -> float:
    """Of figure 3's ``[4, 4]``: the least diagonal block's mean minus the largest off-diagonal one's."""
    (a, b), (c, d) = (
        torch.tensor(run["cssv"]).unflatten(0, (2, 2)).unflatten(2, (2, 2)).mean((1, 3)).tolist()
    )
    return min(a, d) - max(b, c)


def orders(
    run: Measured, beside: Mapping[str, Measured], row: str, column: str
) -> dict[str, dict[str, bool]]:
    """Of figure 5, by metric: whether P3 is first, and P1 and P5 last."""
    found = {
        name: torch.tensor(each).argsort(descending=True).tolist() for name, each in run.items()
    }
    return {
        name: {"P3 first": o[0] == 2, "P1, P5 last": set(o[3:]) == {0, 4}}
        for name, o in found.items()
    }


def missing_class(
    run: Measured, beside: Mapping[str, Measured], row: str, column: str
) -> dict[str, float]:
    """Of figure 6's CSSV: class 1 of P1 and of the three clients without it, their other classes, and how many of the
    three have their least there."""
    cssv = torch.tensor(run["cssv"])
    means = {"P1, class 1": cssv[0, 0], "P2 to P4, class 1": cssv[1:, 0].mean()}
    means |= {
        "P2 to P4, other classes": cssv[1:, 1:].mean(),
        "clients": (cssv[1:].argmin(1) == 0).sum(),
    }
    return {name: float(value) for name, value in means.items()}


def fairness(run: Measured, beside: Mapping[str, Measured], row: str, column: str) -> float | None:
    """Pearson's correlation over the clients with what they have alone; NaN if undefined."""
    if row == "Individual" or "Individual" not in beside:
        return None
    alone = torch.tensor(beside["Individual"]["trained"])
    return float(collaborative_fairness(alone, torch.tensor(run["trained"])))
