"""A cohort whose models lie in a file: the same numbers, no trace of the file, and a full disk said before it kills."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedLoop, Reporting
from flsv.aggregation import FedAdam
from flsv.attacks import ALittleIsEnough, Scaling
from flsv.data import FederatedDataModule, IIDPartitioner, Splits
from flsv.filters import MultiKrum, OutlierFilter
from flsv.metrics import ClassSpecificShapley, ContributionEstimation, CumulativeShapley
from flsv.round import matrix
from flsv.round.matrix import copied_rows, empty_rows

QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0, "accelerator": "cpu",
}  # fmt: skip


def in_a_file(rows: Tensor) -> bool:
    return rows.untyped_storage().filename is not None


def fit(tmp_path: Path, **options: Any) -> tuple[list[Tensor], dict[str, Tensor], list[bool]]:
    """The model, the metrics' values, and whether each round's models lay in a file."""
    seen: list[bool] = []

    class Seen(ClassSpecificShapley):
        round_fields = {"client_vectors": lambda round: round.client_vectors}  # noqa: RUF012

        def update(self, client_ids: Any, client_heads: Any, server_head: Any, client_vectors: Any) -> None:
            seen.append(in_a_file(client_vectors))
            super().update(client_ids, client_heads, server_head)

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(240, 6, generator=generator), torch.randint(3, (240,), generator=generator)
    data = FederatedDataModule(
        TensorDataset(x, y), IIDPartitioner(6), batch_size=10, splits=Splits(server_val=0.2, client_val=0.2)
    )
    metrics = {"cssv": Seen(), "sums": CumulativeShapley(), "else": ContributionEstimation()}
    loop = FederatedLoop(metrics=metrics, reporting=Reporting(table=False), seed=0, **options)
    torch.manual_seed(0)
    module = ClassifierClient(torch.nn.Linear(6, 3), num_classes=3, input_shape=(6,))
    L.Trainer(max_epochs=2, callbacks=[loop], default_root_dir=tmp_path, **QUIET).fit(module, data)
    return list(module.state_dict().values()), {name: each.compute() for name, each in metrics.items()}, seen


def attack() -> dict[str, Any]:
    return {"uploads": [Scaling(1e30, clients=[1])], "filters": [OutlierFilter(exclude=True)]}


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="files are mapped on Linux only")
@pytest.mark.parametrize(
    "options",
    [
        lambda: {},
        lambda: {"aggregator": FedAdam()},
        lambda: {"filters": [OutlierFilter(), MultiKrum(1, keep=3)]},
        lambda: {"uploads": [ALittleIsEnough(clients=[0, 1])]},
        attack,
    ],
    ids=["FedAvg", "FedAdam", "some are left out", "some collude", "one is far too large"],
)
@pytest.mark.filterwarnings("ignore")
def test_the_same_to_the_bit(
    options: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, values, seen = fit(tmp_path / "memory", **options())
    assert not any(seen)
    monkeypatch.setattr(matrix, "LARGE", 0)
    mapped, again, lay = fit(tmp_path / "file", **options())
    assert lay
    assert all(lay)
    torch.testing.assert_close(mapped, model, rtol=0, atol=0)
    torch.testing.assert_close(again, values, rtol=0, atol=0, equal_nan=True)
    assert not list(tmp_path.rglob(".flsv-cohort*"))


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="files are mapped on Linux only")
def test_files_have_no_name_and_copies_lie_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = empty_rows(3, torch.zeros(4), tmp_path)
    assert not in_a_file(few)
    assert not in_a_file(copied_rows(few))
    monkeypatch.setattr(matrix, "LARGE", 0)
    rows = empty_rows(3, torch.zeros(4, dtype=torch.bfloat16), tmp_path)
    rows[:] = torch.arange(12).view(3, 4)
    copy = copied_rows(rows, torch.tensor([2, 0]))
    rows.zero_()
    assert copy.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert copy.dtype == torch.bfloat16
    assert in_a_file(rows)
    assert in_a_file(copy)
    assert not list(tmp_path.iterdir())
    assert len(empty_rows(2, torch.zeros(4), "s3://elsewhere")) == 2


def test_a_control_groups_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = matrix.memory_bytes()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(matrix, "GROUP_LIMIT", limit)
    assert matrix.memory_bytes() >= machine
    limit.write_text("max\n")
    assert matrix.memory_bytes() >= machine
    limit.write_text("4096\n")
    assert matrix.memory_bytes() == 4096
