"""Games on what a module logs when it validates: played in a fit, and by Lightning's own validation."""

import copy
import itertools
from pathlib import Path
from typing import Any

import lightning as L
import torch
from task_kinds import Kind
from torch import Tensor
from toys import fit, trainer_for

from flsv import Reporting
from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule, SizePartitioner
from flsv.federation import FederatedLoop
from flsv.functional import ShapleyEstimate
from flsv.metrics import LeaveOneOut

MASKS = torch.tensor(list(itertools.product([False, True], repeat=3)))


class Seen(LeaveOneOut):
    """Plays all coalitions, and keeps the values, the cohort's models and the fit's module as it was."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.__dict__["found"] = []

    @property
    def round_fields(self) -> dict[str, Any]:
        return {**super().round_fields, "generator": lambda round: self.found.append([round]) or round.generator("x")}

    def _estimate(self, utility: Any, players: int, generator: Any) -> ShapleyEstimate:
        self.found[-1].append(utility(MASKS))
        return super()._estimate(utility, players, generator)


def federated(data: L.LightningDataModule) -> FederatedDataModule:
    return FederatedDataModule(data, SizePartitioner([3, 1, 2]))


def played(
    folder: Path, module: Kind, data: FederatedDataModule, rounds: int = 1, **measures: Any
) -> tuple[Tensor, list[Tensor]]:
    """The utilities ``[8]`` of the last round's coalitions, and their models by hand."""
    metric = Seen(**measures)
    fit(
        FederatedLoop(metrics={"mine": metric}, seed=3, reporting=Reporting(table=False)),
        folder,
        module,
        data,
        rounds=rounds,
    )
    round, values = metric.found[-1]
    x, models = round.global_vector, round.client_vectors
    vectors = [models[mask].double().mean(0).float() if mask.any() else x for mask in MASKS]
    return values, vectors


def validated(module: L.LightningModule, vector: Tensor, data: L.LightningDataModule, folder: Path) -> dict[str, float]:
    """By Lightning: the vector set into a copy, ``trainer.validate``."""
    own = copy.deepcopy(module)
    ParameterSpace(own).write(own, vector)
    trainer = trainer_for(None, folder)
    trainer.validate(own, data, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def never(kind: Any) -> Any:
    class Never(kind):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise AssertionError("training had started")

    Never.__name__ = kind.__name__
    return Never()
