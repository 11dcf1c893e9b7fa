"""Coalitions score themselves by their live module, in the first round and the last, on all validation batches.

Scores of modules whose hooks set them are in ``tests/retraining/test_hidden_state.py``.
"""

import pytest
import torch
from retraining.recorded import ShadowShapleyThatKeepsUtilities

from flsv.data import Loader
from helpers.coalitions_by_hand import make_shadow_loop
from helpers.fits import fit
from zoo.program import Base, make_data
from zoo.scores import TunesItsTemperature

pytestmark = pytest.mark.slow


def fit_and_keep_utilities(folder, module, rounds=3, **trainer_options):
    """Return the metric of a run whose models are scored by their logged loss, on several batches."""
    metric = ShadowShapleyThatKeepsUtilities(
        coalitions="singles", performance="val_loss", mode="min", every=1
    )
    data = make_data(loader=Loader(eval_batch_size=8))
    fit(make_shadow_loop(metric), folder, module, data, rounds, **trainer_options)
    return metric


def test_scores_of_the_first_round_are_those_of_a_run_of_one_round(tmp_path):
    long_run = fit_and_keep_utilities(tmp_path / "long", TunesItsTemperature(), rounds=2)
    short_run = fit_and_keep_utilities(tmp_path / "short", TunesItsTemperature(), rounds=1)

    expected = short_run.utilities
    torch.testing.assert_close(long_run.utilities_after_first_round, expected, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def scored_on_all_batches(tmp_path_factory):
    return fit_and_keep_utilities(tmp_path_factory.mktemp("all"), Base())


@pytest.mark.parametrize(
    "trainer_options",
    [{"limit_val_batches": 1}, {"check_val_every_n_epoch": 2}],
    ids=["validates one batch", "validates every second round"],
)
def test_coalitions_are_scored_on_all_batches_whatever_the_trainer_validates(
    scored_on_all_batches, tmp_path, trainer_options
):
    scored = fit_and_keep_utilities(tmp_path, Base(), **trainer_options)

    assert torch.equal(scored.utilities, scored_on_all_batches.utilities)
    assert torch.equal(
        scored.utilities_after_first_round, scored_on_all_batches.utilities_after_first_round
    )
