"""Where a run writes, and whether it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from toys import Plain, network, toy_data, trainer_for

from flsv import Reporting
from flsv.clients.algorithms import InRunValues
from flsv.loop import FederatedLoop
from flsv.metrics import InRunShapley
from flsv.report.folder import FolderLock

FILES = {".lock", "contributions.csv", "run.json", "clients"}


def run(folder: Path | str | None, **options: Any) -> None:
    metrics = {"in_run": InRunShapley()}
    loop = FederatedLoop(
        metrics=metrics, client_algorithm=InRunValues(), reporting=Reporting(figures=1, table=False), seed=1
    )
    trainer = trainer_for(loop, folder, rounds=1, **options)  # type: ignore[arg-type]
    trainer.fit(Plain(network(batch_norm=False)), toy_data(server_val=0.2))


def test_nothing_is_left_in_a_working_folder_that_was_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    held = FolderLock(tmp_path)  # nobody else is kept out of it either
    run(None)
    run(None)
    held.release()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("folder", [".", "given"])
def test_a_folder_that_was_given_is_written_into(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(folder)
    assert {path.name for path in (tmp_path / folder).iterdir()} == FILES


def test_a_loggers_folder_is_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(None, logger=CSVLogger(".", name="", version="logged"))
    assert {path.name for path in tmp_path.iterdir()} == {"logged"}
    assert {path.name for path in (tmp_path / "logged").iterdir()} > FILES
