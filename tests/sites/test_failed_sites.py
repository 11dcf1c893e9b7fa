"""Sites that do not respond, or send what is of no use: which sites are excluded, and what stays as it was."""

import shutil
import warnings
from functools import partial

import lightning as L
import pytest
import torch

from flsv._lightning.patches import find_loop
from flsv.aggregation import FedAvg, FedCE
from flsv.filters import OutlierFilter
from flsv.metrics import ContributionEstimation, DomainRelevance
from flsv.personalization import IFCA, FedFomo, PFedSV, Standalone
from flsv.sampling import PowerOfChoice
from flsv.sites import Packet
from flsv.sites.messages import pack
from flsv.training.algorithms import SCAFFOLD
from helpers import warns
from helpers.sites import (
    BOSTON_ADDRESS,
    LYON_ADDRESS,
    NAMES,
    OSAKA_ADDRESS,
    SPLITS,
    SitesInProcess,
    load_site_states,
    make_shapfed_loop,
)

_plain, _tensors = pack(torch.zeros(7))
WRONG_SHAPE = Packet("result", {"result": _plain, "state": "0" * 64}, _tensors)


def make_evaluation_loop(personalizer):
    return make_shapfed_loop(
        aggregator=FedAvg(), metrics={"relevance": DomainRelevance()}, personalizer=personalizer()
    )


make_pfedsv_loop = partial(make_evaluation_loop, partial(PFedSV, "relevance", k=2))
make_fedfomo_loop = partial(make_evaluation_loop, partial(FedFomo, num_downloads=2))


@pytest.mark.slow
def test_site_that_does_not_evaluate_models_counts_as_not_drawn(tmp_path):
    """In its first round, when it has no model of its own to go on from, and in a later one."""

    def spoil_two_responses(address, packet, reply):
        if packet.kind != "query":
            return reply
        visit = address, packet.plain["round"]
        is_spoiled = visit in [(LYON_ADDRESS, 0), (OSAKA_ADDRESS, 1)]
        return None if is_spoiled else reply

    relevances = []
    states_of_osaka = []

    class Recorder(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            relevance = find_loop(trainer.callbacks).contributions["relevance"]
            relevances.append(relevance.by_class.clone())
            states_of_osaka.append(load_site_states(tmp_path, NAMES[2])[-1])

    remote = SitesInProcess(tmp_path, make_pfedsv_loop, client_val=0.3)
    remote.transport.on_reply = spoil_two_responses
    with warns("has sent no result of .*no reply within 1 s"):
        loop = remote.fit(callbacks=[Recorder()])

    first_relevance = relevances[0]
    second_relevance = relevances[1]

    assert first_relevance[1].isnan().all()
    assert first_relevance[2].isfinite().any()
    assert second_relevance[2].tolist() == pytest.approx(
        first_relevance[2].tolist(),
        nan_ok=True,
    )

    final_relevance = loop.contributions["relevance"].by_class
    assert final_relevance[1].isfinite().any()
    assert loop.participations.tolist() == [3, 3, 3]

    # The mixture of round 1, whose scores never came, is not what it goes on from.
    mixtures = [state["store"]["tensors"]["own_model"] for state in states_of_osaka[:2]]
    assert not torch.equal(mixtures[0], mixtures[1])
    assert torch.equal(states_of_osaka[2]["start"], mixtures[0])


@pytest.mark.slow
def test_fedce_leaves_out_sites_that_do_not_score_the_others(tmp_path):
    """One site is silent in round 0, all of them in round 1."""

    def spoil_responses(address, packet, reply):
        if packet.kind != "query":
            return reply
        is_spoiled = address == LYON_ADDRESS or packet.plain["round"] == 1
        return WRONG_SHAPE if is_spoiled else reply

    def make():
        return make_shapfed_loop(aggregator=FedCE(), metrics={"fedce": ContributionEstimation()})

    remote = SitesInProcess(tmp_path, make, **SPLITS)
    remote.transport.on_reply = spoil_responses
    with warns("result is wrong: expected torch.float64"):
        loop = remote.fit(rounds=2)

    fedce = loop.metrics["fedce"]
    assert fedce.participations.tolist() == [1, 0, 1]
    assert fedce.rounds == 2

    values = loop.contributions["fedce"]
    assert values.isnan().tolist() == [False, True, False]


def lose_update(reply):
    return None


def enlarge_update(reply):
    huge_vector = 1e6 * reply.tensors["vector"]
    return Packet("update", reply.plain, {**reply.tensors, "vector": huge_vector})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil_update", "exclude"),
    [
        (lose_update, False),
        (enlarge_update, True),
    ],
)
def test_lost_or_excluded_update_leaves_the_sites_control_variate_unchanged(
    tmp_path, spoil_update, exclude
):
    """A site's control variate moves only with the server's, whether its update is lost or excluded. The server is
    killed and goes on from its checkpoint, too."""

    make = partial(
        make_shapfed_loop,
        aggregator=FedAvg("uniform"),
        metrics={},
        client_algorithm=SCAFFOLD(),
        filters=[OutlierFilter(exclude=exclude)],
    )
    remote = SitesInProcess(tmp_path, make)
    remote.transport.change_replies("train", spoil_update, [LYON_ADDRESS], rounds=[1, 2])

    with warns("is excluded|excluded from the round"):
        remote.go_on_until(3)
    loop = remote.go_on_until(4)
    assert loop.participations.tolist() == [4, 2, 4]
    assert rounds_of_site_states(tmp_path, "Lyon") == [0, 3]

    last_states = [load_site_states(tmp_path, name)[-1] for name in NAMES]
    last_tensors = [state["store"]["tensors"] for state in last_states]
    variates = torch.stack([tensors["control_variate"] for tensors in last_tensors])
    variate = loop.state_dict()["strategies"]["client_algorithm"]["variate"]

    torch.testing.assert_close(variate, variates.mean(0), rtol=1e-5, atol=1e-6)


def rounds_of_site_states(folder, name):
    rounds = []
    for state in load_site_states(folder, name):
        *_, round_index = state["who"]
        rounds.append(round_index)
    return rounds


class HurriedSite:
    """A site that is given no time in round 1."""

    def __init__(self, site):
        self.site = site

    def respond(self, packet):
        plain = dict(packet.plain)
        if packet.kind == "train" and plain["round"] == 1:
            plain["seconds"] = 0.0
        return self.site.respond(Packet(packet.kind, plain, packet.tensors))


def test_site_that_exceeds_its_time_stops_and_joins_the_next_round(tmp_path):
    """It keeps nothing of what it has stopped."""
    remote = SitesInProcess(tmp_path, make_shapfed_loop)
    sites_by_address = remote.transport.sites
    sites_by_address[LYON_ADDRESS] = HurriedSite(sites_by_address[LYON_ADDRESS])
    words = r"site 'Lyon' \(client 1\) is excluded in round 2: its training was not complete after 0.0 s"

    with warns(words):
        loop = remote.fit()

    assert loop.participations.tolist() == [3, 2, 3]
    assert rounds_of_site_states(tmp_path, "Lyon") == [0, 2]


@pytest.mark.slow
def test_power_of_choice_candidate_that_answers_without_a_loss_is_chosen_last(
    tmp_path,
):
    def answer_with_a_word(reply):
        return Packet(reply.kind, {**reply.plain, "result": "high"})

    make = partial(
        make_shapfed_loop,
        aggregator=FedAvg("uniform"),
        metrics={},
        sampler=PowerOfChoice(2, 3),
    )
    federation = SitesInProcess(tmp_path, make)
    federation.transport.change_replies("query", answer_with_a_word, [LYON_ADDRESS])

    with warns("The sampler chooses this client last"):
        loop = federation.fit()

    # Of three candidates two are drawn in each of three rounds.
    assert loop.participations.tolist() == [3, 0, 3]


def make_standalone_loop():
    return make_shapfed_loop(
        aggregator=FedAvg(),
        metrics={},
        personalizer=Standalone(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_fedfomo_loop, make_standalone_loop])
def test_site_that_loses_its_folder_goes_on_from_a_new_model(tmp_path, make):
    """Its disk is replaced once it has trained in round 2, before the server requests scores of models."""

    def lose_folder(reply):
        shutil.rmtree(tmp_path / "sites" / "Lyon" / "runs")
        return reply

    remote = SitesInProcess(tmp_path, make, **SPLITS)
    remote.transport.change_replies("train", lose_folder, [LYON_ADDRESS], rounds=[1])
    with warns("'Lyon' .*has lost its state"):
        loop = remote.fit(rounds=4)

    assert loop.participations.tolist() == [4, 4, 4]
    assert {event.client for event in loop.events} == {1}

    state = load_site_states(tmp_path, "Lyon")[-1]
    tensors = state["store"]["tensors"]

    assert "own_model" in tensors


def fill_reports(reply, number):
    tensors = dict(reply.tensors)
    for name, tensor in reply.tensors.items():
        if name.startswith("report/"):
            tensors[name] = torch.full_like(tensor, number)

    return Packet("update", reply.plain, tensors)


@pytest.mark.slow
def test_false_report_of_one_site_cannot_move_the_model_far(tmp_path):
    """Its update is as it should be, and what it reports beside it is any number."""
    make = partial(
        make_shapfed_loop,
        aggregator=FedAvg("uniform"),
        metrics={},
        client_algorithm=SCAFFOLD(),
    )
    honest_run = SitesInProcess(tmp_path / "honest", make).fit(rounds=2)
    honest_model = honest_run.state.model()
    believable_number = 100.0
    for number in (believable_number, 3e38, 1e-300, -1.0):
        remote = SitesInProcess(tmp_path / f"{number}", make)
        remote.transport.change_replies(
            "train", partial(fill_reports, number=number), [LYON_ADDRESS]
        )
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model = remote.fit(rounds=2).state.model()

        difference = model - honest_model
        assert difference.norm() < 0.1 * honest_model.norm(), number
        is_named = any("Lyon" in str(warning.message) for warning in warned)
        assert is_named == (number != believable_number), number


@pytest.mark.fast_rows
@pytest.mark.parametrize("number", [0.5, -7e9])
def test_site_that_reports_no_cluster_is_left_out_and_changes_no_model(tmp_path, number):
    """A report that is used as an index must be one: a fraction would be a cluster of its own."""
    cluster = torch.tensor(number, dtype=torch.float64)
    vectors_by_address = {}

    def change_cluster_of_lyon(address, packet, reply):
        if packet.kind != "train":
            return reply

        vectors_by_address[address] = reply.tensors["vector"].clone()
        if address != LYON_ADDRESS:
            return reply

        tensors = {**reply.tensors, "report/cluster": cluster}
        return Packet("update", reply.plain, tensors)

    make = partial(
        make_shapfed_loop,
        metrics={},
        aggregator=FedAvg("uniform"),
        personalizer=IFCA(1),
    )
    remote = SitesInProcess(tmp_path, make)
    remote.transport.on_reply = change_cluster_of_lyon

    with warns("'Lyon'.*round 1: it"):
        loop = remote.fit(rounds=1)

    assert loop.participations.tolist() == [1, 0, 1]

    (event,) = loop.events
    assert event.client == 1

    honest_mean = (vectors_by_address[BOSTON_ADDRESS] + vectors_by_address[OSAKA_ADDRESS]) / 2
    clusters = loop.strategies["personalizer"]._clusters

    torch.testing.assert_close(clusters[0], honest_mean)
