"""Coalitions score themselves by their live module, in the first round and the last, on all validation batches.

Scores of modules whose hooks set them are in ``tests/retraining/test_hidden_state.py``.
"""

import pytest
import torch
from retraining.recorded import Recorded

from flsv.data import Loader
from helpers.coalitions_by_hand import make_shadow_loop
from helpers.fits import fit
from zoo.program import Base, make_data
from zoo.scores import TunesItsTemperature

#: A batch has 8 validation samples.
SMALL_BATCHES = Loader(eval_batch_size=8)


def record_game(folder, module, rounds=3, **trainer_options):
    """A run that is scored by its logged loss."""
    metric = Recorded(coalitions="singles", performance="val_loss", mode="min", every=1)
    loop = make_shadow_loop(metric)
    fit(loop, folder, module, make_data(loader=SMALL_BATCHES), rounds, **trainer_options)
    return metric


@pytest.mark.slow
def test_scores_of_the_first_round_are_those_of_a_run_of_one_round(
    tmp_path,
):
    run = record_game(tmp_path / "run", TunesItsTemperature())
    run_of_one_round = record_game(tmp_path / "one", TunesItsTemperature(), rounds=1)

    torch.testing.assert_close(run.first_round, run_of_one_round.utilities, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def scored_on_all_batches(
    tmp_path_factory,
):
    folder = tmp_path_factory.mktemp("all")
    return record_game(folder, Base())


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer_options",
    [
        {"limit_val_batches": 1},
        {"limit_val_batches": 0.5},
        {"check_val_every_n_epoch": 2},
    ],
)
def test_logged_value_is_of_all_validation_batches(
    scored_on_all_batches,
    tmp_path,
    trainer_options,
):
    few_batches = record_game(
        tmp_path,
        Base(),
        **trainer_options,
    )

    expected = scored_on_all_batches
    assert torch.equal(few_batches.utilities, expected.utilities)
    assert torch.equal(few_batches.first_round, expected.first_round)
