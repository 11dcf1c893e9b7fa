"""What callbacks may monitor: values of clients, weights, accuracies and the training loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from logging_module import logged
from torch import Tensor
from toys import fit, toy_data

from flsv import ClientEvaluation, Reporting
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost, LeaveOneOut
from flsv.sampling import ClientSampler


class Record(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        names = ("cssv/", "loo/", "cost/", "weight/", "client_accuracy/")
        self.seen.append({n: v.item() for n, v in trainer.callback_metrics.items() if n.startswith(names)})


def test_what_the_loggers_have_can_be_monitored(tmp_path: Path) -> None:
    loss = LeaveOneOut(performance="negative_loss")
    metrics: Any = {"cssv": ClassSpecificShapley(), "loo": loss, "cost": CommunicationCost()}
    options: Any = {"evaluation": ClientEvaluation(every=1), "reporting": Reporting(per_class=False)}
    loop, record = FederatedLoop(metrics=metrics, seed=1, **options), Record()
    fit(loop, tmp_path, data=toy_data(server_val=0.3), callbacks=[record], logger=CSVLogger(tmp_path))
    rows = logged(tmp_path)
    for round_index, seen in enumerate(record.seen):
        there = {k: float(v) for row in rows if row["step"] == str(round_index) for k, v in row.items() if v}
        values = [f"{name}/client_{client}" for name in ("cssv", "loo", "cost") for client in range(3)]
        for name in ["weight/client_0", "client_accuracy/mean", "client_accuracy/client_2", "cost/bytes_down", *values]:
            assert seen[name] == pytest.approx(there[name])
    expected = loop.contributions["cssv"]
    assert [record.seen[-1][f"cssv/client_{i}"] for i in range(3)] == pytest.approx(expected.tolist())


class Cohorts(ClientSampler):
    """Those that are given, round by round."""

    def __init__(self, cohorts: list[list[int]]) -> None:
        self.cohorts = cohorts

    def sample(self, num_clients: int, contributions: Any, generator: Any, round_index: int = 0) -> Tensor:
        return torch.tensor(self.cohorts[round_index])

    def inclusion_probabilities(self, num_clients: int, contributions: Any, round_index: int = 0) -> Tensor:
        return torch.ones(num_clients)


def test_a_value_stays_and_a_weight_is_its_rounds(tmp_path: Path) -> None:
    """And what is known of absent clients is known after a resume, too."""
    cohorts = [[0, 1], [1, 2], [1, 2], [0, 2]]

    def run(record: Record, rounds: int, **kwargs: Any) -> None:
        loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, sampler=Cohorts(cohorts), seed=1)
        fit(loop, tmp_path, rounds=rounds, **kwargs)

    whole, half, rest = Record(), Record(), Record()
    run(whole, 4, callbacks=[whole])
    for seen, cohort, known in zip(whole.seen, cohorts, ([0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2])):
        assert {name for name in seen if name.startswith("weight/")} == {f"weight/client_{i}" for i in cohort}
        assert {n for n in seen if n.startswith("cssv/")} == {f"cssv/client_{i}" for i in known}
    saving = ModelCheckpoint(tmp_path / "c", "last")
    run(half, 2, callbacks=[half, saving], enable_checkpointing=True)
    run(rest, 4, callbacks=[rest], ckpt_path=tmp_path / "c/last.ckpt")
    assert [*half.seen, *rest.seen] == whole.seen


@pytest.mark.parametrize(("name", "validation"), [("cssv/client_1", True), ("client_accuracy/mean", False)])
def test_early_stopping_and_checkpoints_by_contribution(tmp_path: Path, name: str, validation: bool) -> None:
    record = Record()
    best = ModelCheckpoint(tmp_path / "best", "{epoch}", monitor=name, mode="max")
    stop = EarlyStopping(name, mode="max", min_delta=5.0, patience=2)
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1, evaluation=ClientEvaluation(every=1))
    options: dict[str, Any] = {"enable_checkpointing": True, "limit_val_batches": 1.0 if validation else 0}
    fit(loop, tmp_path, rounds=8, callbacks=[stop, best, record], **options)
    assert loop.round_index == 3  # 1 + patience
    values = [seen[name] for seen in record.seen]
    assert best.best_model_score.item() == pytest.approx(max(values))
    assert Path(best.best_model_path).stem == f"epoch={values.index(max(values))}"
