"""Ctrl-C and kills while coalitions are trained: what is trained is kept, and a line says how to do the rest."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from flsv import FederatedLoop, Reporting
from flsv.metrics import ShadowShapley
from flsv.retraining.utility_store import UtilityStore
from helpers.coalition_kinds import Manual
from helpers.coalitions_by_hand import FIT_ROUNDS, SEED, make_three_clients
from helpers.fits import trainer_for
from helpers.forked import Forked
from helpers.hidden_state import Base, make_data


@pytest.mark.parametrize("writes_files", [True, False])
def test_interrupted_trainings_are_kept_and_the_rest_is_named(
    writes_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = UtilityStore.add

    def add_and_interrupt(*args: Any) -> None:
        add(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(UtilityStore, "add", add_and_interrupt)
    loop = FederatedLoop(
        metrics={"shadow": ShadowShapley(coalitions="singles")},
        seed=SEED,
        reporting=Reporting(table=False, files=writes_files),
    )
    if writes_files:
        message = "1 of 3 coalitions are trained, and kept in .*flsv retrain trains the rest"
    else:
        message = "1 of 3 coalitions are trained, and none is kept"

    with pytest.warns(UserWarning, match=message):
        trainer_for(loop, tmp_path, 2).fit(Base(), make_data())

    assert loop.round_index == 2
    assert loop.contributions["shadow"].isnan().all()

    stored = list(tmp_path.rglob("coalitions.csv"))
    assert len(stored) == writes_files


class SignalsItself(Manual):
    """Sends itself the signal in FLSV_TEST_SIGNAL when clients 1 and 2 train alone."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        loop: Any = next(part for part in callbacks if isinstance(part, FederatedLoop))
        number = os.environ.get("FLSV_TEST_SIGNAL")
        if number and loop.state.cohort == [1, 2]:
            os.kill(os.getpid(), int(number))

        super().training_step(batch, batch_idx)


def fit_with_values(folder: Path, path: str | None = None) -> list[float]:
    metric = ShadowShapley(coalitions="both", performance="negative_loss")
    loop = FederatedLoop(metrics={"shadow": metric}, seed=SEED, reporting=Reporting(table=False))
    saves = ModelCheckpoint(folder / "checkpoints", save_last=True)
    trainer = trainer_for(loop, folder, FIT_ROUNDS, callbacks=[saves], enable_checkpointing=True)

    trainer.fit(SignalsItself(), make_three_clients(), ckpt_path=path)

    rows = loop.history().query("metric == 'shadow'")
    return rows.sort_values(["round", "client"]).value.tolist()


def fit_once(folder: Path) -> None:
    fit_with_values(folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_ended_run_resumes_to_the_bit(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "ended"
    variables = {"FLSV_TEST_SIGNAL": str(int(number))}
    process = Forked(tmp_path / "process", fit_once, folder, **variables)

    status, output = process.wait()

    # Ctrl-C while coalitions are trained ends these trainings alone: the run is trained.
    is_trained = number == signal.SIGINT
    assert (status == 0) == is_trained, output
    assert ("there are no values" in output) == is_trained

    values = fit_with_values(folder, str(folder / "checkpoints" / "last.ckpt"))

    assert values == fit_with_values(tmp_path / "whole")
