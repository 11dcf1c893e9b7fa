"""Runs ended while forks of their beginning train coalitions."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from flsv import FederatedLoop, Reporting
from flsv.metrics import ShadowShapley
from helpers.coalition_kinds import Manual
from helpers.coalitions_by_hand import FIT_ROUNDS, SEED, make_three_clients
from helpers.fits import trainer_for
from helpers.forked import Forked, processes


class Slow(Manual):
    """Of one coalition, which never ends where it is not resumed."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loop: Any = next(
            callback for callback in self.trainer.callbacks if isinstance(callback, FederatedLoop)
        )  # type: ignore[attr-defined]
        if os.environ.get("FLSV_TEST_HANGS") and loop.state.cohort == [1, 2]:
            time.sleep(600)

        super().training_step(batch, batch_idx)


def retrain_values(folder: Path, path: str | None = None) -> list[float]:
    metric = ShadowShapley(coalitions="both", performance="negative_loss")
    loop = FederatedLoop(metrics={"shadow": metric}, seed=SEED, reporting=Reporting(table=False))
    saves = ModelCheckpoint(folder / "checkpoints", save_last=True)
    trainer = trainer_for(loop, folder, FIT_ROUNDS, callbacks=[saves], enable_checkpointing=True)

    trainer.fit(Slow(), make_three_clients(), ckpt_path=path)

    rows = loop.history().query("metric == 'shadow'")
    return rows.sort_values(["round", "client"]).value.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGKILL,
    ],
    ids=lambda number: number.name,
)
def test_killed_run_leaves_no_process_and_resumes_bitwise(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flsv.utilities.supervisor.HANG_SHARE", 1.0)  # the coalition may sleep
    process = Forked(tmp_path / "process", retrain_values, tmp_path / "killed", FLSV_TEST_HANGS="1")
    file = tmp_path / "killed" / "coalitions.csv"
    end = time.monotonic() + 600
    alive: list[int] = []
    while len(alive) < 3 and time.monotonic() < end:  # the run, its beginning, and a coalition
        status, output = process.wait(0.1)
        assert status is None, output
        alive = (
            processes(process.pid)
            if file.is_file() and len(file.read_text().splitlines()) > 2
            else []
        )

    assert len(alive) >= 3

    os.kill(process.pid, number)
    status, output = process.wait(300)
    # Ctrl-C while coalitions are trained ends these trainings alone: the run is trained.
    if number == signal.SIGINT:
        assert status == 0, output
    else:
        assert status not in (None, 0), output

    end = time.monotonic() + 60
    while processes(process.pid) and time.monotonic() < end:
        time.sleep(0.1)

    assert not processes(process.pid)

    checkpoint = tmp_path / "killed" / "checkpoints" / "last.ckpt"
    assert retrain_values(tmp_path / "killed", str(checkpoint)) == retrain_values(
        tmp_path / "whole"
    )
