"""On a CUDA device, against the CPU. Nothing here has ever been run by the project's own CI, which has none."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from resume_run import checkpoints
from torchmetrics.classification import MulticlassF1Score
from toys import CLASSES, FEATURES, Plain, fit, network, toy_data, vector

from flsv import ClassifierClient, ClientEvaluation
from flsv.aggregation import ShapFedWA
from flsv.data import DirichletPartitioner, FederatedDataModule, Splits
from flsv.games import ModelEvaluator
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CumulativeShapley
from flsv.parameters import ParameterSpace

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
ON: dict[str, Any] = {"accelerator": "cuda", "devices": 1}


def quickstart(folder: Path, **where: Any) -> list[dict[str, str]]:
    """The federation of ``configs/quickstart.yaml``, and its CSV."""
    torch.manual_seed(0)
    partitioner = DirichletPartitioner(num_clients=5, alpha=0.5, min_samples=40, seed=1)
    data = FederatedDataModule("digits", partitioner, batch_size=16, splits=Splits(client_test=0.2))
    module = ClassifierClient(
        "mlp", network_args={"hidden": [64]}, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    loop = FederatedLoop(
        ShapFedWA("cssv"), {"cssv": ClassSpecificShapley()}, evaluation=ClientEvaluation(every=5), seed=0
    )
    fit(loop, folder, module, data, rounds=5, logger=CSVLogger(folder, name="log"), **where)
    (path,) = folder.rglob("contributions.csv")
    return list(csv.DictReader(path.open()))


def test_the_quickstart_is_the_cpus(tmp_path: Path) -> None:
    here, there = quickstart(tmp_path / "cpu"), quickstart(tmp_path / "cuda", **ON)
    assert len(here) == len(there) > 0
    for mine, theirs in zip(here, there):
        assert mine.keys() == theirs.keys()
        for column, value in mine.items():
            try:
                expected = float(value)
            except ValueError:
                assert theirs[column] == value, column
            else:
                # One sample of a client's test set may be a tie that rounding decides.
                tolerance = 0.02 if "accuracy" in column else 1e-5
                assert float(theirs[column]) == pytest.approx(expected, abs=tolerance, rel=1e-5), column


def test_games_under_vmap_are_those_one_by_one() -> None:
    """And those on the CPU."""
    module = network().to(ON["accelerator"]).eval()
    space = ParameterSpace(module)
    draw = torch.Generator().manual_seed(0)
    batches = [(torch.randn(50, FEATURES, generator=draw), torch.arange(50) % CLASSES) for _ in range(3)]
    vectors = space.read(module) + 0.1 * torch.rand(40, space.size, generator=draw).to(ON["accelerator"])
    metric = MulticlassF1Score(CLASSES, average="macro")

    def scores(backend: Any) -> Any:
        return ModelEvaluator(module, space, batches, num_classes=CLASSES, metric=metric, backend=backend)(vectors)

    mapped, serial = scores("vmap"), scores("serial")
    module.cpu()
    vectors = vectors.cpu()
    reference = scores("serial")
    for found in (mapped, serial):
        torch.testing.assert_close(found.loss, reference.loss, rtol=1e-5, atol=1e-6)
        assert (found.correct - reference.correct).abs().max() <= 1
        torch.testing.assert_close(found.value("metric"), reference.value("metric"), rtol=0, atol=0.02)


@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_resumes(tmp_path: Path, first: str) -> None:
    """On CUDA, from either device: as the uninterrupted run on CUDA."""

    def make() -> FederatedLoop:
        return FederatedLoop(metrics={"sv": CumulativeShapley()}, optimizer_state="persist", seed=1)

    whole, resumed = make(), make()
    expected = fit(whole, tmp_path / "whole", rounds=3, **ON)
    saving = {"enable_checkpointing": True, "callbacks": [checkpoints(tmp_path)]}
    fit(make(), tmp_path / "half", rounds=2, **saving, **(ON if first == "cuda" else {}))
    path = tmp_path / "checkpoints/last.ckpt"
    found = fit(resumed, tmp_path / "rest", rounds=3, ckpt_path=path, **ON)
    torch.testing.assert_close(vector(found).cpu(), vector(expected).cpu(), rtol=1e-5, atol=1e-6)


def test_data_stay_there_for_the_fit(tmp_path: Path) -> None:
    data, places = toy_data(), []

    class Looks(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            places.append(next(iter(data.client_loader(0)))[0].device.type)

    fit(FederatedLoop(seed=1), tmp_path, Plain(), data, rounds=1, callbacks=[Looks()], **ON)
    assert set(places) == {ON["accelerator"]}
    assert next(iter(data.client_loader(0)))[0].device.type == "cpu"
