"""A cohort whose models lie in a file: the same numbers, no trace of the file, and a full disk said before it kills."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import fit, toy_data, vector

from flsv import FederatedLoop
from flsv.aggregation import FedAdam
from flsv.attacks import ALittleIsEnough, Scaling
from flsv.filters import MultiKrum, OutlierFilter
from flsv.metrics import ClassSpecificShapley, ContributionEstimation, CumulativeShapley
from flsv.round import matrix
from flsv.round.matrix import copied_rows, empty_rows

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="files are mapped on Linux only")


def in_a_file(rows: Tensor) -> bool:
    return rows.untyped_storage().filename is not None


class Seen(ClassSpecificShapley):
    """Whether each round's models lay in a file."""

    round_fields = {"client_vectors": lambda round: round.client_vectors}  # noqa: RUF012

    def update(self, client_ids: Any, client_heads: Any, server_head: Any, client_vectors: Any) -> None:
        self.lay = [*getattr(self, "lay", []), in_a_file(client_vectors)]
        super().update(client_ids, client_heads, server_head)


def run(folder: Path, **options: Any) -> tuple[Tensor, dict[str, Tensor], list[bool]]:
    """The model, the metrics' values, and whether each round's models lay in a file."""
    metrics = {"cssv": Seen(), "sums": CumulativeShapley(), "else": ContributionEstimation()}
    data = toy_data((1,) * 6, server_val=0.2, client_val=0.2)
    module = fit(FederatedLoop(metrics=metrics, seed=0, **options), folder, data=data, rounds=2)
    return vector(module), {name: each.compute() for name, each in metrics.items()}, metrics["cssv"].lay


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"aggregator": FedAdam()},
        lambda: {"filters": [OutlierFilter(), MultiKrum(1, keep=3)]},
        lambda: {"uploads": [ALittleIsEnough(clients=[0, 1])]},
        lambda: {"uploads": [Scaling(1e30, clients=[1])], "filters": [OutlierFilter(exclude=True)]},
    ],
    ids=["FedAdam", "some are left out", "some collude", "one is far too large"],
)
@pytest.mark.filterwarnings("ignore")
def test_the_same_to_the_bit(
    options: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, values, seen = run(tmp_path / "memory", **options())
    assert seen == [False, False]
    monkeypatch.setattr(matrix, "LARGE", 0)
    mapped, again, lay = run(tmp_path / "file", **options())
    assert lay == [True, True]
    assert torch.equal(mapped, model)
    torch.testing.assert_close(again, values, rtol=0, atol=0, equal_nan=True)
    assert not list(tmp_path.rglob(".flsv-cohort*"))


def test_files_have_no_name_and_copies_lie_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = empty_rows(3, torch.zeros(4), tmp_path)
    assert (in_a_file(few), in_a_file(copied_rows(few))) == (False, False)
    monkeypatch.setattr(matrix, "LARGE", 0)
    rows = empty_rows(3, torch.zeros(4, dtype=torch.bfloat16), tmp_path)
    rows[:] = torch.arange(12).view(3, 4)
    copy = copied_rows(rows, torch.tensor([2, 0]))
    rows.zero_()
    assert copy.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert (in_a_file(rows), in_a_file(copy)) == (True, True)
    assert not list(tmp_path.iterdir())
    assert len(empty_rows(2, torch.zeros(4), "s3://elsewhere")) == 2


def test_a_control_groups_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, limit = matrix.memory_bytes(), tmp_path / "memory.max"
    monkeypatch.setattr(matrix, "GROUP_LIMIT", limit)
    limit.write_text("max\n")
    assert matrix.memory_bytes() >= machine
    limit.write_text("4096\n")
    assert matrix.memory_bytes() == 4096
