"""A round without updates is an event: the model does not change, and other clients are drawn."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from flsv import FederatedLoop
from flsv.metrics import CumulativeShapley
from flsv.results.round_result import ALL_DIVERGED, NO_UPDATE
from helpers import warns
from helpers.fits import Cohorts, assert_resumes, fit, state_vector
from helpers.models import Diverges, network, sgd


def make_loop(**options):
    cohorts_of_rounds = [
        [0],
        [1],
        [2],
        [0],
    ]
    sampler = Cohorts(cohorts_of_rounds)
    return FederatedLoop(sampler=sampler, seed=1, **options)


def make_module():
    return make_diverging([(1, 1)])


def make_diverging(rounds_and_clients):
    return Diverges(network(), sgd, failing=rounds_and_clients)


def test_round_in_which_the_only_client_diverges_leaves_the_model_as_it_is(tmp_path):
    loop = make_loop(metrics={"shapley": CumulativeShapley()})
    models = []
    recorder = LambdaCallback(
        on_train_epoch_end=lambda trainer, module: models.append(state_vector(module))
    )
    with warns("model does not change, and other clients"):
        fit(
            loop,
            tmp_path,
            make_module(),
            rounds=3,
            callbacks=[recorder],
        )

    assert torch.equal(models[1], models[0])
    assert not torch.equal(models[2], models[1])

    assert loop.participations.tolist() == [1, 0, 1]
    has_value = loop.contributions["shapley"].isfinite()
    assert has_value.tolist() == [True, False, True]

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
    module = make_diverging(
        [
            (1, 1),
            (2, 2),
            (3, 0),
        ]
    )

    with pytest.raises(RuntimeError, match="All clients that could be drawn have failed"):
        fit(make_loop(), tmp_path, module, rounds=4)
