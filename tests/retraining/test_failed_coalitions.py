"""A coalition whose fit raises an error: there are no values, the reason is told, and earlier values are not shown."""

import errno

import pytest

from flsv.metrics import CumulativeShapley
from flsv.payment import write_report
from flsv.retraining.coalition_store import CoalitionStore
from flsv.retraining.scoring import ModelScoring
from flsv.values.coalition_files import read_coalitions
from helpers import warns
from helpers.models import loop_of
from helpers.pages import text_of_page
from zoo.program import Base, fit_valued


class FailingAlone(Base):
    """Fails in a federation of one client, from a round on."""

    first_failing_round = 2

    def on_train_batch_start(self, batch, batch_idx):
        loop = loop_of(self)
        is_alone = len(loop.state.cohort) == 1
        if is_alone and self.current_epoch >= self.first_failing_round:
            raise ValueError("no batch norm of one client")


@pytest.mark.slow
def test_resumed_run_whose_coalitions_fail_shows_no_values_of_an_earlier_round(
    tmp_path,
):
    module = FailingAlone()
    first_part = fit_valued(tmp_path, module)
    assert first_part.contributions["shadow"].isfinite().all()

    checkpoint = tmp_path / "after.ckpt"
    module.trainer.save_checkpoint(checkpoint)
    with warns("no values.*no batch norm of one client"):
        resumed = fit_valued(tmp_path, FailingAlone(), rounds=4, ckpt_path=checkpoint)

    assert resumed.round_index == 4
    assert resumed.contributions["shadow"].isnan().all()
    record = resumed.metrics["shadow"].payment_record()
    assert "no batch norm" in record["why_no_values"]


def test_coalitions_without_scores_end_no_run(tmp_path, monkeypatch):
    """The other metric's values are kept, which were there before the coalitions were trained."""

    def fail_to_read(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(CoalitionStore, "scores", fail_to_read)
    with warns("no values. OSError .*Input/output error"):
        loop = fit_valued(tmp_path, Base(), loop={"metrics": {"rounds": CumulativeShapley()}})

    assert loop.contributions["shadow"].isnan().all()
    assert loop.contributions["rounds"].isfinite().all()
    assert "Input/output error" in text_of_page(write_report(tmp_path))


@pytest.mark.slow
def test_metric_that_has_failed_trains_no_coalition(tmp_path, monkeypatch):
    score = ModelScoring.score
    scored_models = []

    def fail_in_the_second_round(scoring, module, **options):
        scored_models.append(module)
        if len(scored_models) > 3:  # on trial, untrained, and after the first round
            raise RuntimeError("out of memory")
        return score(scoring, module, **options)

    monkeypatch.setattr(ModelScoring, "score", fail_in_the_second_round)
    with warns("has failed: .*round 2.*out of memory"):
        loop = fit_valued(tmp_path, Base(), rounds=3)

    assert loop.contributions["shadow"].isnan().all()
    assert len(scored_models) == 4
    trained = read_coalitions(tmp_path / "coalitions")
    assert {training.members for training in trained} == {(), (0, 1, 2)}
