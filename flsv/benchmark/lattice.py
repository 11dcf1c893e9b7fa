"""The federations of the benchmark, trained for all coalitions side by side, see :mod:`flsv.loop.side_by_side`."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.evaluation import all_on_device
from flsv.benchmark.federation import Federation, quiet
from flsv.filters import OutlierFilter
from flsv.games.evaluator import ModelEvaluator
from flsv.games.evaluators import evaluators_of
from flsv.games.performance import ModelScore, performance_of
from flsv.loop import FederatedLoop
from flsv.loop.side_by_side import CoalitionTraining, check_same
from flsv.parameters import ParameterSpace
from flsv.report.folder import Reporting
from flsv.seeding import isolated_rngs


def train_coalitions(federation: Federation, masks: Tensor, seed: int) -> dict[str, Tensor]:
    """Train a federation of each coalition's members, by FedAvg with their samples as weights.

    Args:
        federation: whose clients.
        masks: bool ``[K, n]``, row by row who is in the coalition; a row without anybody is the untrained model.
        seed: of the initial weights, which all coalitions share, and of the clients' batches.

    Returns:
        Float64 ``[K]`` by name: ``"utility"``, the federation's own performance (more is better), and ``"loss"``, the
        mean cross-entropy in nats (of a regression: minus the utility).

    Raises:
        ConfigurationError: a module that cannot be trained as rows of a batched one.
    """
    training = CoalitionTraining(
        _loop(federation, seed, filters=[OutlierFilter(threshold=None)]),
        masks,
        seed,
        evaluate=lambda trainer, space, models: model_scores(trainer, space, federation, models),
    )
    _fit(federation, training, seed)
    found: dict[str, Tensor] = training.scores
    return found


def check_lattice(federation: Federation, seed: int) -> None:
    """Train the coalition of all clients, and compare it with the run that it stands for.

    Raises:
        ConfigurationError: they come to different models; the module does something that coalitions which are trained
            side by side do not.
    """
    loop = _loop(federation, seed)
    _fit(federation, loop, seed)
    nothing_else = torch.empty(0, len(federation.num_samples), dtype=torch.bool)
    training = CoalitionTraining(_loop(federation, seed), nothing_else, seed)
    _fit(federation, training, seed)
    check_same(training.checked, loop.state.model(), federation.name)


def _loop(federation: Federation, seed: int, **options: Any) -> FederatedLoop:
    return FederatedLoop(
        uploads=[*federation.attackers()],
        local_epochs=federation.local_epochs,
        seed=seed,
        reporting=Reporting(table=False, figures=0, files=False),
        **options,
    )


def _fit(federation: Federation, callback: L.Callback, seed: int) -> None:
    # What the loop's own seed gives: with the same seed it starts from the same weights.
    with isolated_rngs(seed, "benchmark"), quiet():
        federation.trainer(callback).fit(federation.module(), federation.datamodule())


def model_scores(
    trainer: L.Trainer, space: ParameterSpace, federation: Federation, vectors: Tensor
) -> dict[str, Tensor]:
    """``"utility"`` and ``"loss"`` of models ``[K, P]`` on the server's validation set, float64 ``[K]``."""
    data = federation.datamodule()
    measure = performance_of(federation.name, federation.performance, federation.mode)
    if isinstance(measure, ModelScore):
        evaluate = evaluators_of(trainer, space, data.val_dataloader(), {"the utility": measure})[measure.evaluator]
        utility = measure.utility(evaluate(vectors).value(measure.name))
        return {"utility": utility, "loss": -utility}
    evaluator = ModelEvaluator(
        trainer.lightning_module, space, all_on_device(trainer, data.val_dataloader()), num_classes=data.num_classes
    )
    scores = evaluator(vectors)
    return {"utility": scores.value(measure), "loss": -scores.value("negative_loss")}
