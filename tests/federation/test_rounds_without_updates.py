"""A round without updates is an event: the model does not change, and other clients are drawn."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from flsv import FederatedLoop
from flsv.metrics import CumulativeShapley
from flsv.results.round_result import ALL_DIVERGED, NO_UPDATE
from flsv.sampling import FixedCohort
from helpers import warns
from helpers.fits import Cohorts, assert_resumes, fit, state_vector
from helpers.models import Diverges, network, sgd


def make_loop(**options):
    cohorts_of_rounds = [[0], [1], [2], [0]]
    return FederatedLoop(sampler=Cohorts(cohorts_of_rounds), seed=1, **options)


def make_diverging(rounds_and_clients):
    return Diverges(network(), sgd, failing=rounds_and_clients)


def make_module():
    """Client 1 diverges in the second round, whose only client it is."""
    return make_diverging([(1, 1)])


@pytest.fixture(scope="module")
def run_without_update(tmp_path_factory):
    """A loop whose second round had no update, and the model after each of its three rounds."""
    models = []

    def keep_model(trainer, module):
        models.append(state_vector(module))

    loop = make_loop(metrics={"shapley": CumulativeShapley()})
    keeps_models = LambdaCallback(on_train_epoch_end=keep_model)
    folder = tmp_path_factory.mktemp("without update")
    with warns("model does not change, and other clients"):
        fit(loop, folder, make_module(), rounds=3, callbacks=[keeps_models])
    return loop, models


@pytest.mark.slow
def test_round_in_which_the_only_client_diverges_leaves_the_model_as_it_is(run_without_update):
    _, (after_round_1, after_round_2, after_round_3) = run_without_update

    assert torch.equal(after_round_2, after_round_1)
    assert not torch.equal(after_round_3, after_round_2)


def test_client_that_diverged_in_its_only_round_has_no_participation_and_value(run_without_update):
    loop, _ = run_without_update

    assert loop.participations.tolist() == [1, 0, 1]
    has_value = loop.contributions["shapley"].isfinite()
    assert has_value.tolist() == [True, False, True]


def test_round_without_an_update_is_an_event_of_all_and_of_its_client(run_without_update):
    loop, _ = run_without_update

    event_of_all, event_of_client = loop.events
    assert event_of_all.what == NO_UPDATE
    assert event_of_all.client is None
    assert event_of_client.what == ALL_DIVERGED
    assert event_of_client.client == 1
    assert event_of_client.first == 1


@pytest.mark.fast_rows
@pytest.mark.filterwarnings("ignore:.*The global model does not change")
@pytest.mark.parametrize("first_rounds", [1, 2])
def test_run_that_resumes_around_a_round_without_updates_equals_one_without_a_break(
    tmp_path, first_rounds
):
    assert_resumes(make_loop, tmp_path, make_module, rounds=(first_rounds, 4))


@pytest.mark.filterwarnings("ignore:.*The global model does not change")
def test_run_ends_when_every_client_has_failed_since_the_last_update(tmp_path):
    module = make_diverging([(1, 1), (2, 2), (3, 0)])

    with pytest.raises(RuntimeError, match="All clients that could be drawn have failed"):
        fit(make_loop(), tmp_path, module, rounds=4)


@pytest.mark.filterwarnings("ignore:.*The global model does not change")
def test_run_of_a_fixed_cohort_ends_when_its_clients_have_failed(tmp_path):
    """Other clients are never drawn."""
    loop = FederatedLoop(sampler=FixedCohort([0, 2]), seed=1)

    with pytest.raises(RuntimeError, match="All clients that could be drawn have failed"):
        fit(loop, tmp_path, make_diverging([(1, 0), (1, 2)]), rounds=3)
