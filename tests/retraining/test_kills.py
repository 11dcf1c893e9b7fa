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
from flsv.retraining.after_the_run import row_disproved
from flsv.retraining.forked_fits import ForkedFits
from helpers.coalition_kinds import Manual
from helpers.coalitions_by_hand import FIT_ROUNDS, SEED, data
from helpers.fits import trainer_for
from helpers.forked import Forked, processes
from helpers.models import Plain


class Slow(Manual):
    """Of one coalition, which never ends where it is not resumed."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loop: Any = next(each for each in self.trainer.callbacks if isinstance(each, FederatedLoop))  # type: ignore[attr-defined]
        if os.environ.get("FLSV_TEST_HANGS") and loop.state.cohort == [1, 2]:
            time.sleep(600)
        super().training_step(batch, batch_idx)


def run(folder: Path, path: str | None = None) -> list[float]:
    loop = FederatedLoop(
        metrics={"shadow": ShadowShapley(performance="negative_loss")}, seed=SEED, reporting=Reporting(table=False)
    )
    saves = ModelCheckpoint(folder / "checkpoints", save_last=True)
    trainer = trainer_for(loop, folder, FIT_ROUNDS, callbacks=[saves], enable_checkpointing=True)
    trainer.fit(Slow(), data(), ckpt_path=path)
    return loop.history().query("metric == 'shadow'").sort_values(["round", "client"]).value.tolist()


def test_killed_trial_of_batched_coalitions_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed_once(*_: Any) -> None:
        if not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("flsv.retraining.coalition_plan.not_as_rows", killed_once)
    metric = ShadowShapley(performance="negative_loss")
    loop = FederatedLoop(metrics={"shadow": metric}, seed=SEED, reporting=Reporting(table=False))
    trainer_for(loop, tmp_path, FIT_ROUNDS).fit(Plain(), data())
    assert (tmp_path / "killed").exists()
    assert not list(tmp_path.rglob("coalitions.csv"))  # which only fits write


@pytest.mark.parametrize("who", ["the process that waits", "the fit"])
def test_batched_coalitions_keep_their_values_with_a_warning_if_their_check_is_killed(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def values(folder: Path) -> list[float]:
        metric = ShadowShapley(performance="negative_loss")
        loop = FederatedLoop(metrics={"shadow": metric}, seed=SEED, reporting=Reporting(figures=0))
        trainer_for(loop, folder, FIT_ROUNDS).fit(Plain(), data())
        assert not list(folder.rglob("coalitions.csv"))  # which only fits write
        return loop.history().query("metric == 'shadow'").sort_values(["round", "client"]).value.tolist()

    def killed(forks: ForkedFits, *rest: Any) -> str | None:
        os.kill(forks._waiting, signal.SIGKILL)
        return row_disproved(forks, *rest)

    whole, owner = values(tmp_path / "whole"), os.getpid()
    if who == "the fit":
        monkeypatch.setattr(Plain, "on_train_start", lambda _: owner == os.getpid() or os.kill(os.getpid(), 9))
    else:
        monkeypatch.setattr("flsv.retraining.coalition_plan.row_disproved", killed)
    capsys.readouterr()
    with pytest.warns(UserWarning, match=r"values are not proved: the federation of clients .* \((signal|the process)"):
        assert values(tmp_path / "killed") == whole
    assert "batched, and are not proved." in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_killed_run_leaves_no_process_and_resumes_to_the_bit(tmp_path: Path, number: signal.Signals) -> None:
    process = Forked(tmp_path / "process", run, tmp_path / "killed", FLSV_TEST_HANGS="1")
    file, end = tmp_path / "killed" / "coalitions.csv", time.monotonic() + 120
    alive: list[int] = []
    while len(alive) < 3 and time.monotonic() < end:  # the run, its beginning, and a coalition
        status, said = process.wait(0.1)
        assert status is None, said
        alive = processes(process.pid) if file.is_file() and len(file.read_text().splitlines()) > 2 else []
    assert len(alive) >= 3
    os.kill(process.pid, number)
    status, said = process.wait(60)
    assert status not in (None, 0), said
    end = time.monotonic() + 10
    while processes(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not processes(process.pid)
    checkpoint = tmp_path / "killed" / "checkpoints" / "last.ckpt"
    assert run(tmp_path / "killed", str(checkpoint)) == run(tmp_path / "whole")
