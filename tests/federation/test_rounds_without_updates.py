"""A round without updates is an event: the model does not change, and other clients are drawn."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from flsv import FederatedLoop
from flsv.metrics import CumulativeShapley
from flsv.results.round_result import ALL_DIVERGED, NO_UPDATE
from helpers import warns
from helpers.fits import Cohorts, assert_resumes, fit, state_vector
from helpers.models import Diverges, network, sgd
from helpers.sites import ADDRESSES, LYON_ADDRESS, SitesInProcess, make_shapfed_loop


class ModelsAfterRounds(Callback):
    def __init__(self):
        self.models: list[Tensor] = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.models.append(state_vector(pl_module).clone())


def make_loop(**options):
    one_client_a_round = Cohorts([[0], [1], [2], [0]])
    return FederatedLoop(sampler=one_client_a_round, seed=1, **options)


def make_module():
    second_round, client = 1, 1
    return Diverges(network(), sgd, failing={(second_round, client)})


def test_round_in_which_the_only_client_diverges_leaves_the_model_as_it_is(tmp_path):
    loop = make_loop(metrics={"shapley": CumulativeShapley()})
    recorder = ModelsAfterRounds()
    with warns("model does not change, and other clients"):
        fit(loop, tmp_path, make_module(), rounds=3, callbacks=[recorder])

    models = recorder.models
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


def make_site_loop():
    return make_shapfed_loop(sampler=Cohorts([[0], [1], [2], [0]]))


def fit_with_failing_sites(folder, failing):
    """``failing`` has pairs of an address and a round."""

    def spoil(address, packet, reply):
        if packet.kind != "train":
            return reply
        visit = (address, packet.plain["round"])
        return None if visit in failing else reply

    federation = SitesInProcess(folder, make_site_loop)
    federation.transport.on_reply = spoil
    federation.fit(rounds=4)
    return federation.loop


def test_round_whose_only_site_is_silent_is_followed_by_the_next_sites(tmp_path):
    second_round = 1
    with warns("a model. The global model does not change"):
        loop = fit_with_failing_sites(tmp_path, {(LYON_ADDRESS, second_round)})

    assert loop.participations.tolist() == [2, 0, 1]
    event_of_site, event_of_all = loop.events
    assert event_of_site.client == 1
    assert event_of_all.client is None
    assert event_of_site.first == event_of_all.first == second_round


@pytest.mark.filterwarnings("ignore:.*The global model does not change")
@pytest.mark.filterwarnings("ignore:.*is left out")
def test_run_ends_when_every_site_has_failed_since_the_last_update(tmp_path):
    failing = set()
    for address in ADDRESSES:
        for round_index in (1, 2, 3):
            failing.add((address, round_index))

    with pytest.raises(RuntimeError, match="All clients that could be drawn have failed"):
        fit_with_failing_sites(tmp_path, failing)
