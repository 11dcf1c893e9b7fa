"""A coalition whose fit raises an error: there are no values, the reason is told, and earlier values are not shown."""

import errno
from pathlib import Path
from typing import Any

import pytest

from flsv import FederatedLoop, Reporting
from flsv.metrics import CumulativeShapley, ShadowShapley
from flsv.report import write_report
from flsv.retraining.scoring import ModelScoring
from flsv.retraining.utility_store import UtilityStore
from helpers.fits import trainer_for
from helpers.hidden_state import SEED, Base, make_data
from helpers.models import loop_of
from helpers.pages import text_of_page


class FailingAlone(Base):
    """Fails in a federation of one client, from a round on."""

    first_failing_round = 2

    def on_train_batch_start(self, batch, batch_idx):
        loop = loop_of(self)
        is_alone = len(loop.state.cohort) == 1
        if is_alone and self.current_epoch >= self.first_failing_round:
            raise ValueError("no batch norm of one client")


def fit(
    folder: Path,
    rounds: int,
    checkpoint: Path | None = None,
) -> FederatedLoop:
    metrics = {"shadow": ShadowShapley(coalitions="singles")}
    loop = FederatedLoop(
        metrics=metrics,
        seed=SEED,
        reporting=Reporting(table=False),
    )
    trainer = trainer_for(loop, folder, rounds)
    module = FailingAlone()
    trainer.fit(module, make_data(), ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "after.ckpt")
    return loop


def test_resumed_run_whose_coalitions_fail_shows_no_values_of_an_earlier_round(
    tmp_path,
):
    first_part = fit(tmp_path, rounds=2)
    assert first_part.contributions["shadow"].isfinite().all()

    checkpoint = tmp_path / "after.ckpt"
    with pytest.warns(UserWarning, match="there are no values.*no batch norm of one client"):
        resumed = fit(tmp_path, rounds=4, checkpoint=checkpoint)

    assert resumed.round_index == 4
    assert resumed.contributions["shadow"].isnan().all()
    record = resumed.metrics["shadow"].payment_record()
    assert "no batch norm" in record["why_no_values"]


def test_coalitions_that_cannot_be_stored_end_no_run(tmp_path, monkeypatch):
    """The other metric's values are kept, which were there before the coalitions were trained."""

    def add_to_full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UtilityStore, "add", add_to_full_disk)
    metrics = {"shadow": ShadowShapley(coalitions="singles"), "rounds": CumulativeShapley()}
    loop = FederatedLoop(metrics=metrics, seed=SEED, reporting=Reporting(table=False))

    with pytest.warns(UserWarning, match="shadow: there are no values. OSError at .*No space left"):
        trainer_for(loop, tmp_path, 2).fit(Base(), make_data())

    assert loop.contributions["shadow"].isnan().all()
    assert loop.contributions["rounds"].isfinite().all()
    assert "No space left" in text_of_page(write_report(tmp_path))


def test_metric_that_has_failed_trains_no_coalition(tmp_path, monkeypatch):
    score = ModelScoring.score
    scored_models = []

    def fail_in_the_second_round(scoring: ModelScoring, module: Any, **options: Any) -> Any:
        scored_models.append(module)
        if len(scored_models) > 3:  # on trial, untrained, and after the first round
            raise RuntimeError("out of memory")
        return score(scoring, module, **options)

    monkeypatch.setattr(ModelScoring, "score", fail_in_the_second_round)
    metrics = {"shadow": ShadowShapley(coalitions="singles")}
    loop = FederatedLoop(metrics=metrics, seed=SEED, reporting=Reporting(table=False))
    with pytest.warns(UserWarning, match="its values are missing.*round 2.*out of memory"):
        trainer_for(loop, tmp_path, 3).fit(Base(), make_data())

    assert loop.contributions["shadow"].isnan().all()
    assert len(scored_models) == 4
    _settings, _head, *rows = (tmp_path / "coalitions.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows] == ["'-", "0+1+2"]
