"""A coalition whose fit raises an error: there are no values, the reason is told, and earlier values are not shown."""

import errno
from unittest.mock import Mock

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


class ModuleThatFailsInRound2OfOneClient(Base):
    def on_train_batch_start(self, batch, batch_idx):
        is_alone = len(loop_of(self).state.cohort) == 1
        if is_alone and self.current_epoch == 2:
            raise ValueError("no batch norm of one client")


@pytest.mark.slow
def test_resumed_run_with_failed_coalitions_shows_no_values_of_an_earlier_round(tmp_path):
    module = ModuleThatFailsInRound2OfOneClient()
    loop_of_two_rounds = fit_valued(tmp_path, module, rounds=2)
    assert loop_of_two_rounds.contributions["shadow"].isfinite().all()

    checkpoint = tmp_path / "after.ckpt"
    module.trainer.save_checkpoint(checkpoint)
    resumed_module = ModuleThatFailsInRound2OfOneClient()
    with warns("no values.*no batch norm of one client"):
        resumed_loop = fit_valued(tmp_path, resumed_module, rounds=3, ckpt_path=checkpoint)

    assert resumed_loop.round_index == 3
    assert resumed_loop.contributions["shadow"].isnan().all()
    assert "no batch norm" in resumed_loop.values["shadow"].missing


@pytest.mark.slow
def test_run_ends_with_the_other_metrics_values_if_scores_cannot_be_read(tmp_path, monkeypatch):
    unreadable = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(CoalitionStore, "scores", Mock(side_effect=unreadable))
    with warns("no values. OSError .*Input/output error"):
        loop = fit_valued(tmp_path, Base(), loop={"metrics": {"rounds": CumulativeShapley()}})

    assert loop.contributions["shadow"].isnan().all()
    assert loop.contributions["rounds"].isfinite().all()
    assert "Input/output error" in text_of_page(write_report(tmp_path))


#: One in the dry run, the untrained one, and the one after the first round.
NUM_MODELS_UNTIL_SECOND_ROUND = 3


@pytest.mark.slow
def test_metric_that_has_failed_trains_no_coalition(tmp_path, monkeypatch):
    score = ModelScoring.score
    scored_models = []

    def fail_in_second_round(scoring, module, **options):
        scored_models.append(module)
        if len(scored_models) > NUM_MODELS_UNTIL_SECOND_ROUND:
            raise RuntimeError("out of memory")
        return score(scoring, module, **options)

    monkeypatch.setattr(ModelScoring, "score", fail_in_second_round)
    with warns("has failed: .*round 2.*out of memory"):
        loop = fit_valued(tmp_path, Base(), rounds=3)

    assert loop.contributions["shadow"].isnan().all()
    assert len(scored_models) == NUM_MODELS_UNTIL_SECOND_ROUND + 1
    trainings = read_coalitions(tmp_path / "coalitions")
    assert {training.members for training in trainings} == {(), (0, 1, 2)}
