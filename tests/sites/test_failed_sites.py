"""Sites that do not respond, or send what is of no use: which sites are excluded, and what stays as it was."""

import errno
import shutil
from functools import cache, partial

import lightning as L
import pytest
import torch

from flsv._lightning.patches import find_loop
from flsv.aggregation import FedAvg, FedCE
from flsv.filters import OutlierFilter
from flsv.metrics import ContributionEstimation, DomainRelevance
from flsv.personalization import IFCA, FedFomo, PFedSV
from flsv.sampling import PowerOfChoice
from flsv.sites import Packet
from flsv.sites.messages import failure_packet, pack
from flsv.training.algorithms import SCAFFOLD
from helpers import refused, warns
from helpers.curious_server import EVALUATED, CuriousServer, model_that_picks
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
RESULT_OF_WRONG_SHAPE = Packet("result", {"result": _plain, "state": "0" * 64}, _tensors)


def make_evaluation_loop(personalizer):
    return make_shapfed_loop(
        aggregator=FedAvg(), metrics={"relevance": DomainRelevance()}, personalizer=personalizer()
    )


make_pfedsv_loop = partial(make_evaluation_loop, partial(PFedSV, "relevance", k=2))
make_fedfomo_loop = partial(make_evaluation_loop, partial(FedFomo, num_downloads=2))


BOSTON, LYON, OSAKA = range(len(NAMES))


class CallbackThatRecordsRounds(L.Callback):
    """Records the relevances after each round, and what Osaka keeps then."""

    def __init__(self, folder):
        self.folder = folder
        self.relevances = []
        self.states_of_osaka = []

    def on_train_epoch_end(self, trainer, pl_module):
        relevance = find_loop(trainer.callbacks).values["relevance"]
        self.relevances.append(relevance.by_class.clone())
        self.states_of_osaka.append(load_site_states(self.folder, NAMES[OSAKA])[-1])


@pytest.fixture(scope="module")
def run_with_two_lost_results(tmp_path_factory):
    """A recorded run of three rounds. Lyon's scores of models are lost in round 0, and Osaka's in round 1."""
    folder = tmp_path_factory.mktemp("lost")
    lost_results = [(LYON_ADDRESS, 0), (OSAKA_ADDRESS, 1)]

    def lose_results(address, packet, reply):
        is_lost = packet.kind == "query" and (address, packet.plain["round"]) in lost_results
        return None if is_lost else reply

    remote = SitesInProcess(folder, make_pfedsv_loop, client_val=0.3)
    remote.transport.on_reply = lose_results
    record = CallbackThatRecordsRounds(folder)
    with warns("has sent no result of .*no reply within 60 s"):
        loop = remote.fit(rounds=3, callbacks=[record])
    return loop, record


@pytest.mark.slow
def test_site_whose_scores_are_lost_keeps_its_last_value(run_with_two_lost_results):
    loop, record = run_with_two_lost_results
    first_relevance, second_relevance, last_relevance = record.relevances

    assert first_relevance[LYON].isnan().all()
    assert last_relevance[LYON].isfinite().any()
    assert first_relevance[OSAKA].isfinite().any()
    expected = first_relevance[OSAKA].tolist()
    assert second_relevance[OSAKA].tolist() == pytest.approx(expected, nan_ok=True)
    assert loop.participations.tolist() == [3, 3, 3]


@pytest.mark.slow
def test_site_whose_scores_are_lost_continues_from_its_earlier_model(run_with_two_lost_results):
    _, record = run_with_two_lost_results
    first_state, second_state, third_state = record.states_of_osaka
    first_mixture = first_state["store"]["tensors"]["own_model"]
    mixture_without_scores = second_state["store"]["tensors"]["own_model"]

    assert not torch.equal(first_mixture, mixture_without_scores)
    assert torch.equal(third_state["start"], first_mixture)


def make_fedce_loop():
    return make_shapfed_loop(aggregator=FedCE(), metrics={"fedce": ContributionEstimation()})


@pytest.mark.slow
def test_fedce_leaves_out_sites_that_do_not_score_the_others(tmp_path):
    """Lyon's scores are wrong in both rounds, and all sites' in round 1."""

    def spoil_results(address, packet, reply):
        if packet.kind != "query":
            return reply
        is_spoiled = address == LYON_ADDRESS or packet.plain["round"] == 1
        return RESULT_OF_WRONG_SHAPE if is_spoiled else reply

    remote = SitesInProcess(tmp_path, make_fedce_loop, **SPLITS)
    remote.transport.on_reply = spoil_results
    with warns("result is wrong: expected torch.float64"):
        loop = remote.fit(rounds=2)

    fedce = loop.metrics["fedce"]
    assert fedce.participations.tolist() == [1, 0, 1]
    assert fedce.rounds == 2
    assert loop.contributions["fedce"].isnan().tolist() == [False, True, False]


def lose_update(reply):
    return None


def enlarge_update(reply):
    huge_vector = 1e6 * reply.tensors["vector"]
    return Packet("update", reply.plain, {**reply.tensors, "vector": huge_vector})


def control_variate_of_site(folder, name):
    last_state = load_site_states(folder, name)[-1]
    return last_state["store"]["tensors"]["control_variate"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil_update", "exclude"),
    [(lose_update, False), (enlarge_update, True)],
    ids=["lost", "excluded"],
)
def test_lost_or_excluded_update_leaves_the_sites_control_variate_unchanged(
    tmp_path, spoil_update, exclude
):
    """The server's control variate stays the mean of the sites', also after a resume."""
    make = partial(
        make_shapfed_loop,
        aggregator=FedAvg("uniform"),
        metrics={},
        client_algorithm=SCAFFOLD(),
        filters=[OutlierFilter(exclude=exclude)],
    )
    remote = SitesInProcess(tmp_path, make)
    remote.transport.change_replies("train", spoil_update, [LYON_ADDRESS], rounds=[1])

    with warns("is excluded|excluded from the round"):
        remote.go_on_until(2)
    loop = remote.go_on_until(3)

    assert loop.participations.tolist() == [3, 2, 3]
    assert rounds_of_site_states(tmp_path, "Lyon") == [0, 2]
    variates = torch.stack([control_variate_of_site(tmp_path, name) for name in NAMES])
    variate_of_server = loop.state_dict()["strategies"]["client_algorithm"]["variate"]
    torch.testing.assert_close(variate_of_server, variates.mean(0), rtol=1e-5, atol=1e-6)


def rounds_of_site_states(folder, name):
    rounds = []
    for state in load_site_states(folder, name):
        *_, round_index = state["who"]
        rounds.append(round_index)
    return rounds


class SiteWithoutTimeInRound1:
    """A site that is given 0 seconds to train in round 1."""

    def __init__(self, site):
        self.site = site

    def respond(self, packet):
        plain = dict(packet.plain)
        if packet.kind == "train" and plain["round"] == 1:
            plain["seconds"] = 0.0
        return self.site.respond(Packet(packet.kind, plain, packet.tensors))


@pytest.mark.slow
def test_site_that_exceeds_its_time_stops_and_joins_the_next_round(tmp_path):
    remote = SitesInProcess(tmp_path, make_shapfed_loop)
    sites_by_address = remote.transport.sites
    sites_by_address[LYON_ADDRESS] = SiteWithoutTimeInRound1(sites_by_address[LYON_ADDRESS])

    with warns(
        r"site 'Lyon' \(client 1\) is excluded in round 2: its training was not complete after 0.0 s"
    ):
        loop = remote.fit(rounds=3)

    assert loop.participations.tolist() == [3, 2, 3]
    assert rounds_of_site_states(tmp_path, "Lyon") == [0, 2]


@pytest.mark.slow
def test_power_of_choice_candidate_that_answers_without_a_loss_is_chosen_last(tmp_path):
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
        loop = federation.fit(rounds=2)

    assert loop.participations.tolist() == [2, 0, 2]


@pytest.mark.slow
def test_site_that_loses_its_folder_goes_on_from_a_new_model(tmp_path):
    def lose_folder(reply):
        shutil.rmtree(tmp_path / "sites" / "Lyon" / "runs")
        return reply

    remote = SitesInProcess(tmp_path, make_fedfomo_loop, **SPLITS)
    remote.transport.change_replies("train", lose_folder, [LYON_ADDRESS], rounds=[1])
    with warns("'Lyon' .*has lost its state"):
        loop = remote.fit(rounds=3)

    assert loop.participations.tolist() == [3, 3, 3]
    assert {event.client for event in loop.events} == {LYON}
    last_state = load_site_states(tmp_path, "Lyon")[-1]
    assert "own_model" in last_state["store"]["tensors"]


def fill_reports(reply, number):
    """Replace the tensors that a site reports beside its update."""
    tensors = dict(reply.tensors)
    for name, tensor in reply.tensors.items():
        if name.startswith("report/"):
            tensors[name] = torch.full_like(tensor, number)

    return Packet("update", reply.plain, tensors)


@pytest.fixture(scope="module")
def model_with_reports_of_lyon(tmp_path_factory):
    """``model_with_reports_of_lyon(number)``: the model after two rounds of SCAFFOLD. None: with honest reports."""
    make = partial(
        make_shapfed_loop,
        aggregator=FedAvg("uniform"),
        metrics={},
        client_algorithm=SCAFFOLD(),
    )

    @cache
    def fit_and_read_model(number):
        remote = SitesInProcess(tmp_path_factory.mktemp("sites"), make)
        if number is not None:
            change = partial(fill_reports, number=number)
            remote.transport.change_replies("train", change, [LYON_ADDRESS])
        return remote.fit(rounds=2).state.model()

    return fit_and_read_model


def assert_near_honest_model(model, honest_model):
    assert (model - honest_model).norm() < 0.1 * honest_model.norm()


@pytest.mark.slow
def test_believable_false_report_cannot_move_the_model_far(model_with_reports_of_lyon):
    honest_model = model_with_reports_of_lyon(None)
    assert_near_honest_model(model_with_reports_of_lyon(100.0), honest_model)


@pytest.mark.slow
@pytest.mark.parametrize("number", [3e38, -1.0])
def test_unbelievable_report_is_warned_about_and_cannot_move_the_model_far(
    model_with_reports_of_lyon, number
):
    honest_model = model_with_reports_of_lyon(None)
    with warns("Lyon"):
        model = model_with_reports_of_lyon(number)
    assert_near_honest_model(model, honest_model)


@pytest.mark.fast_rows
@pytest.mark.parametrize("number", [0.5, -7e9])
def test_site_that_reports_no_index_of_a_cluster_is_left_out(tmp_path, number):
    cluster = torch.tensor(number, dtype=torch.float64)
    vectors_by_address = {}

    def change_cluster_of_lyon(address, packet, reply):
        if packet.kind != "train":
            return reply

        vectors_by_address[address] = reply.tensors["vector"].clone()
        if address != LYON_ADDRESS:
            return reply
        return Packet("update", reply.plain, {**reply.tensors, "report/cluster": cluster})

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
    assert event.client == LYON
    honest_mean = (vectors_by_address[BOSTON_ADDRESS] + vectors_by_address[OSAKA_ADDRESS]) / 2
    (cluster_model,) = loop.strategies["personalizer"]._clusters
    torch.testing.assert_close(cluster_model, honest_mean)


FOLDER_FOR_FILE = "a folder is in the place of a file"
FILE_FOR_FOLDER = "a file is in the place of a folder"


@pytest.mark.parametrize(
    ("kind", "name", "is_folder", "expected_error"),
    [
        ("handshake", "answers.json", True, "its answers.json cannot be read"),
        ("train", "privacy.json", True, "its privacy.json cannot be read"),
        ("test", "answers.lock", True, FOLDER_FOR_FILE),
        ("test", "answers", False, FILE_FOR_FOLDER),
        ("train", "runs", False, FILE_FOR_FOLDER),
    ],
)
def test_site_names_what_is_wrong_with_its_folder(tmp_path, kind, name, is_folder, expected_error):
    if is_folder:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).touch()
    server = CuriousServer(tmp_path, greets=False, **EVALUATED)

    reply = server.send(kind, model=model_that_picks(3))

    assert expected_error in reply.plain["error"]


def test_site_names_a_secret_that_is_none_without_its_path(tmp_path):
    (tmp_path / "secret").touch()
    with refused("does not contain a secret") as error:
        CuriousServer(tmp_path)

    text = failure_packet(error.value).plain["error"]
    assert text.startswith("its file 'secret' does not contain a secret of 64")
    assert str(tmp_path) not in text


def test_site_names_a_disk_that_cannot_be_written():
    error = OSError(errno.EROFS, "Read-only file system", "/data/Jane Doe")
    text = failure_packet(error).plain["error"]
    assert text == "its disk is read-only; the site's own log has the details"
