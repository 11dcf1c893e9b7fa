"""What a site's owner forbids does not happen, whatever the server and its app ask for."""

import json
import math
import multiprocessing
import re
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch

from flsv import ClientEvaluation, FederatedLoop
from flsv.aggregation import FedAvg
from flsv.contrib import InRunShapley, InRunValues
from flsv.metrics import ContributionEstimation, ContributionMetric, LeaveOneOut
from flsv.privacy import GaussianPrivacy, gaussian_epsilon
from flsv.sites import Packet, SiteClient, SitePolicy
from flsv.sites.deployment import reply_or_failure
from flsv.sites.federation import WITHHELD
from flsv.sites.ledgers import ANSWERS_FILE, SiteAnswers
from flsv.sites.site import LEDGER_FILE
from flsv.utilities.errors import Refused
from helpers import refused, warns
from helpers.sites import (
    ADDRESSES,
    BOSTON_ADDRESS,
    LYON_ADDRESS,
    OSAKA_ADDRESS,
    SPLITS,
    ServerData,
    SiteData,
    SitesInProcess,
    fit_in_one_process,
    make_mlp_module,
    make_shapfed_loop,
    make_site,
    training_packet,
)


def make_private_loop():
    return make_shapfed_loop(
        uploads=[GaussianPrivacy(clip=1.0, noise_multiplier=2.0)], aggregator=FedAvg(), metrics=None
    )


def make_sites_with_policy(tmp_path, make, policy, **data):
    """Boston has a policy, the others have none."""
    remote = SitesInProcess(tmp_path, make, **data)
    remote.transport.sites[BOSTON_ADDRESS] = make_site(tmp_path, 0, make, policy=policy, **data)
    return remote


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "least_sites = 3",
            r"'least_sites'. A policy may have the keys \['functions', 'max_epsilon', 'delta', 'reports', ",
        ),
        ('functions = "all"', "Pass a list of names"),
        ('reports = "all"', "Pass a list of names"),
        ("functions = [", "cannot be read"),
    ],
)
def test_site_policy_file_with_wrong_entries_is_refused(tmp_path, text, match):
    (tmp_path / "site.toml").write_text(text)
    with refused(match):
        SitePolicy.read(tmp_path / "site.toml")


def make_fedce_loop():
    return make_shapfed_loop(aggregator=FedAvg(), metrics={"fedce": ContributionEstimation()})


@pytest.mark.slow
def test_request_that_is_not_allowed_is_not_answered(tmp_path):
    kinds_of_responses = set()

    def record_kind(address, packet, reply):
        if packet.kind == "query":
            kinds_of_responses.add((address, reply.kind))
        return reply

    remote = make_sites_with_policy(tmp_path, make_fedce_loop, SitePolicy(functions=[]), **SPLITS)
    remote.transport.on_reply = record_kind

    with warns("'Boston'.*its policy does not.*'flsv.metrics.contribution_estimation:"):
        remote.fit(rounds=1)

    assert kinds_of_responses == {
        (BOSTON_ADDRESS, "failed"),
        (LYON_ADDRESS, "result"),
        (OSAKA_ADDRESS, "result"),
    }


class MetricThatReadsTrainingLosses(ContributionMetric):
    per_class = False

    def init_states(self, num_clients, num_classes):
        self.losses_by_round: list[list[float]] = []

    def update(self, client_ids, losses):
        self.losses_by_round.append(losses.tolist())

    def compute(self):
        return torch.zeros(self.num_clients or 0)


def make_evaluation_loop(metric, **options):
    return make_shapfed_loop(
        aggregator=FedAvg(), metrics={} if metric is None else {"m": metric}, **options
    )


make_evaluated_loop = partial(make_evaluation_loop, None, evaluation=ClientEvaluation(every=1))


class EvaluatedRun(NamedTuple):
    loop: FederatedLoop
    #: Fields of replies by their message's kind and site.
    replies: dict[tuple[str, int], list[dict]]
    warnings: list[str]


@pytest.fixture(scope="module")
def run_with_withheld_scores(tmp_path_factory):
    """A run of two rounds in which Boston reports nothing but its accuracy."""
    replies = {}

    def record_reply(address, packet, reply):
        replies.setdefault((packet.kind, address), []).append(dict(reply.plain))
        return reply

    folder = tmp_path_factory.mktemp("withheld")
    policy = SitePolicy(reports=["accuracy"])
    remote = make_sites_with_policy(folder, make_evaluated_loop, policy, client_test=0.7)
    remote.transport.on_reply = record_reply
    with warns("does not report") as caught_warnings:
        loop = remote.fit(rounds=2)
    return EvaluatedRun(loop, replies, [str(warning.message) for warning in caught_warnings])


@pytest.mark.slow
def test_withheld_scores_and_losses_never_leave_the_site(run_with_withheld_scores):
    replies = run_with_withheld_scores.replies
    losses = [replies["train", address][0]["loss"] for address in ADDRESSES]
    assert np.isnan(losses).tolist() == [True, False, False]

    for scores in replies["test", BOSTON_ADDRESS]:
        assert 0 <= scores["accuracy"] <= 1
        assert math.isnan(scores["auroc"])
        assert math.isnan(scores["balanced_accuracy"])

    client_scores = run_with_withheld_scores.loop.client_scores
    assert client_scores["accuracy"].isfinite().all()
    assert client_scores["auroc"].isfinite().tolist() == [False, True, True]


@pytest.mark.slow
def test_server_says_once_which_reports_a_site_withholds(run_with_withheld_scores):
    messages = " ".join(run_with_withheld_scores.warnings)
    assert messages.count("does not report") == 2
    assert f"(client 0) does not report training_loss: {WITHHELD}." in messages
    assert f"(client 0) does not report balanced_accuracy, auroc: {WITHHELD}." in messages

    events = " ".join(event.what for event in run_with_withheld_scores.loop.events)
    assert "does not report training_loss" in events


@pytest.mark.slow
def test_site_that_may_report_no_score_is_not_scored(tmp_path):
    policy = SitePolicy(reports=[])
    remote = make_sites_with_policy(tmp_path, make_evaluated_loop, policy, client_test=0.7)
    with warns("not scored.*reports of 'accuracy', 'bal"):
        remote.fit(rounds=1)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("make", "allowed_report", "needed_report"),
    [
        (
            partial(make_evaluation_loop, MetricThatReadsTrainingLosses()),
            "accuracy",
            "training_loss",
        ),
        (
            partial(make_evaluation_loop, InRunShapley(), client_algorithm=InRunValues()),
            "training_loss",
            "in_run_values",
        ),
    ],
)
def test_run_that_needs_what_a_site_withholds_is_refused(
    tmp_path, make, allowed_report, needed_report
):
    remote = make_sites_with_policy(tmp_path, make, SitePolicy(reports=[allowed_report]))
    with refused(f"'Boston' cannot take part:.*'{needed_report}'"):
        remote.fit(server_data=ServerData())

    reply = remote.transport.sites[BOSTON_ADDRESS].respond(training_packet(classes=10))
    assert f"does not allow reports of '{needed_report}'" in reply.plain["error"]


HELLO = Packet("handshake", {"client": 0, "clients": 3})


def make_loss_loop():
    metric = LeaveOneOut(evaluators="clients", performance="val_loss", mode="min")
    return make_evaluation_loop(metric)


#: So many samples are held out that each class has five.
LOSS_SPLITS = {"client_val": 0.7}


@pytest.mark.slow
def test_losses_that_a_policy_allows_equal_those_of_one_process(tmp_path):
    policy = SitePolicy(reports=["val_loss"])
    remote = make_sites_with_policy(tmp_path / "sites", make_loss_loop, policy, **LOSS_SPLITS)
    loop = remote.fit(rounds=1, server_data=ServerData())
    local = fit_in_one_process(tmp_path / "one", make_loss_loop, rounds=1, **LOSS_SPLITS)

    # Samples have another order at a site, in which their losses are rounded.
    expected_values = local.contributions["m"]
    torch.testing.assert_close(loop.contributions["m"], expected_values, rtol=0, atol=1e-6)
    assert all("val_loss" not in event.what for event in loop.events)


@pytest.mark.slow
def test_run_by_losses_that_a_policy_withholds_is_refused(tmp_path):
    policy = SitePolicy(reports=["training_loss", "auroc"])
    remote = make_sites_with_policy(tmp_path, make_loss_loop, policy, **LOSS_SPLITS)
    with refused("policy does not allow reports of 'val_loss'"):
        remote.fit(rounds=1, server_data=ServerData())


@pytest.mark.slow
def test_sites_max_epsilon_bounds_its_updates_over_all_runs(tmp_path):
    epsilon_of_two_rounds = gaussian_epsilon(2.0, 2)
    epsilon_of_three_rounds = gaussian_epsilon(2.0, 3)
    policy = SitePolicy(max_epsilon=(epsilon_of_two_rounds + epsilon_of_three_rounds) / 2)
    remote = make_sites_with_policy(tmp_path, make_private_loop, policy)

    with warns("'Boston'.*round 3.*update after 2"):
        loop = remote.fit(rounds=3)

    assert loop.participations.tolist() == [2, 3, 3]
    ledger = json.loads((tmp_path / "sites" / "Boston" / LEDGER_FILE).read_text())
    assert ledger["updates"] == 2
    assert ledger["epsilon"] == pytest.approx(epsilon_of_two_rounds)

    next_run = make_sites_with_policy(tmp_path, make_private_loop, policy)
    with warns("'Boston'.*excluded in round 1"):
        loop = next_run.fit(rounds=1)

    assert loop.participations.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "damaged",
    [
        '{"updates": 3',
        "[]",
        '{"updates": 3, "squares": -1.0}',
        '{"updates": 3, "squares": NaN}',
        '{"updates": -3, "squares": 1.0}',
        "{}",
        "[" * 100_000,
    ],
)
def test_damaged_ledger_is_refused(tmp_path, damaged):
    ledger = tmp_path / LEDGER_FILE
    ledger.write_text(damaged)

    with refused("its privacy.json cannot be read.*backup"):
        SitePolicy(max_epsilon=100.0).spend([GaussianPrivacy(1.0, 1.0)], ledger)
    assert ledger.read_text() == damaged


@pytest.mark.parametrize(
    "damaged",
    [
        "{}",
        "-1000",
        "[]",
        '{"answers": {}}',
        '{"run": {}, "answers": -1000}',
        '{"run": {}, "answers": {"sizes": -1000}}',
        '{"run": {}, "answers": {"sizes": NaN}}',
        '{"run": {}, "answers": {"sizes": 1.5}}',
        '{"run": {"rounds": -5}, "answers": {}}',
        '{"run": {"rounds": 1e30}, "answers": {}}',
        '{"run": {"round": 3}, "answers": {}}',
    ],
)
def test_damaged_count_of_answers_is_refused(tmp_path, damaged):
    (tmp_path / ANSWERS_FILE).write_text(damaged)

    with refused('its answers.json cannot be read.*"earlier": count.*backup'):
        SiteAnswers(tmp_path, lambda run: 100).count("sizes", 3, {"clients": 3, "rounds": 3})
    assert (tmp_path / ANSWERS_FILE).read_text() == damaged


@pytest.mark.parametrize("target", ["answers of yesterday.json", "nothing"])
def test_count_of_answers_in_a_link_is_refused(tmp_path, target):
    """Writing it would replace the link, and a link to nothing would begin to count anew."""
    (tmp_path / "answers of yesterday.json").write_text('{"run": {}, "answers": {}}')
    (tmp_path / ANSWERS_FILE).symlink_to(tmp_path / target)

    with refused("its answers.json cannot be read"):
        SiteAnswers(tmp_path, lambda run: 100).count("sizes", 3, {"clients": 3, "rounds": 3})


@pytest.mark.parametrize("name", [ANSWERS_FILE, LEDGER_FILE])
def test_server_is_told_of_a_damaged_file_without_the_sites_folder(tmp_path, name, caplog):
    site = make_site(tmp_path, 0, make_private_loop)
    (tmp_path / "sites" / "Boston" / name).write_text("{}")
    reply = site.respond(training_packet(classes=10))

    assert f"its {name} cannot be read" in reply.plain["error"]
    assert str(tmp_path) not in reply.plain["error"]
    assert str(tmp_path) in caplog.text


def test_max_epsilon_counts_all_updates_with_different_noise_and_before_it_was_set(tmp_path):
    ledger = tmp_path / LEDGER_FILE
    limited = SitePolicy(max_epsilon=100.0)
    SitePolicy().spend([GaussianPrivacy(1.0, 1.0)], ledger)
    SitePolicy().spend([GaussianPrivacy(1.0, 2.0)], ledger)
    limited.spend([GaussianPrivacy(1.0, 2.0)], ledger)

    # Together they are one update whose noise multiplier z has 1 / z^2 = sum of 1 / z_i^2.
    sum_of_inverse_squares = 1 / 1.0**2 + 1 / 2.0**2 + 1 / 2.0**2
    total_multiplier = sum_of_inverse_squares**-0.5
    entries = json.loads(ledger.read_text())
    assert entries["epsilon"] == pytest.approx(gaussian_epsilon(total_multiplier, 1))
    assert entries["updates"] == 3


def test_max_epsilon_allows_no_update_after_one_without_noise(tmp_path):
    ledger = tmp_path / LEDGER_FILE
    SitePolicy().spend([], ledger)

    with pytest.raises(Refused, match="one more update after 1"):
        SitePolicy(max_epsilon=100.0).spend([GaussianPrivacy(1.0, 1.0)], ledger)


def spend_repeatedly(ledger, times):
    for _ in range(times):
        SitePolicy().spend([GaussianPrivacy(1.0, 1.0)], ledger)


def test_two_processes_on_one_ledger_lose_no_count(tmp_path):
    ledger = tmp_path / LEDGER_FILE
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=spend_repeatedly, args=(ledger, 40)) for _ in range(2)]

    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=600)

    exit_codes = [process.exitcode for process in processes]
    assert exit_codes == [0, 0]
    assert json.loads(ledger.read_text())["updates"] == 2 * 40


@pytest.fixture
def greet_twice(tmp_path, caplog):
    """``greet_twice(**node)``: what a site with this configuration logs of its policy, when it is greeted twice."""

    def greet(**node):
        client = SiteClient(make_mlp_module, lambda node: SiteData(0), make_shapfed_loop)
        with caplog.at_level("INFO"):
            for _greeting in range(2):
                client.respond(HELLO, {"folder": str(tmp_path), **node}, "the server")
        return [text for text in caplog.messages if re.search("this site has .*policy", text)]

    return greet


def test_site_without_a_policy_says_so_once(greet_twice):
    (message,) = greet_twice()
    assert "this site has no policy, so it does everything that the app requests" in message
    assert "Its updates have no noise" in message


def test_site_says_its_policy_once(greet_twice, tmp_path):
    policy_file = tmp_path / "flsv-site.toml"
    policy_file.write_text("delta = 1e-6")

    (message,) = greet_twice(policy=str(policy_file))

    assert re.search(r"this site has the policy .*flsv-site.toml: SitePolicy\(.*1e-06", message)


def response_to_registration(client, **node):
    """Return what a network would send back."""
    response = partial(client.respond, HELLO, node, "the server")
    return dict(reply_or_failure(response).plain)


def test_policy_file_is_read_at_every_message(tmp_path, caplog):
    policy = tmp_path / "flsv-site.toml"
    client = SiteClient(make_mlp_module, lambda node: SiteData(0), make_shapfed_loop)
    greet = partial(response_to_registration, client, folder=str(tmp_path), policy=str(policy))

    policy.write_text("functions = []")
    assert greet()["sizes"]["train"] > 0

    policy.write_text("max_epsilon = 3")
    assert "its policy sets max_epsilon=3, but the app's updates have no noise" in greet()["error"]

    policy.unlink()
    # The path stays in the site's own log.
    assert greet()["error"].startswith(
        "its policy cannot be read: No such file or directory. A policy"
    )
    assert str(policy) in caplog.text


def test_error_of_a_sites_data_is_sent_without_its_words(tmp_path, caplog):
    def no_data(node):
        raise ValueError("could not convert string to float: 'John Smith'")

    client = SiteClient(make_mlp_module, no_data, make_shapfed_loop)

    reply = response_to_registration(client, folder=str(tmp_path))

    assert reply["error"].startswith("it failed with an error; the site's own log has")
    assert "John Smith" not in str(reply)
    assert "John Smith" in caplog.text


def test_entry_of_a_node_that_the_app_does_not_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client = SiteClient(make_mlp_module, lambda node: SiteData(node["part"]), make_shapfed_loop)
    greet = partial(response_to_registration, client, part=0, site="Boston")

    for _ in range(2):
        error = greet(year=2024)["error"]
        assert "its node configuration has the options ['year'], which are not used" in error


class SiteDataWithAnyOptions(SiteData):
    def __init__(self, part, **options):
        super().__init__(part)


@pytest.mark.parametrize(
    "name",
    [
        *("polcy", "Policy", "policy_file", "foldr", "Folder"),
        *("max_epsilon", "max-epsilon", "epsilon", "Answers", "report"),
    ],
)
def test_misspelt_option_of_the_owner_is_refused_before_the_app_reads_options(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    client = SiteClient(
        make_mlp_module, lambda node: SiteDataWithAnyOptions(**node), make_shapfed_loop
    )

    response = response_to_registration(client, part=0, **{name: 1.0})

    assert f"its node configuration has the option '{name}', which is not used" in response["error"]
    assert not list(tmp_path.iterdir())


def test_app_may_read_all_its_options_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client = SiteClient(
        make_mlp_module, lambda node: SiteDataWithAnyOptions(**node), make_shapfed_loop
    )

    response = response_to_registration(client, part=0, data_folder="/data", year=2024)

    assert response["sizes"]["train"] > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'reports = ["acuracy"]',
            "its policy allows reports of 'acuracy': expected one of ['accuracy', ",
        ),
        (
            'functions = ["flsv:score_models"]',
            "allows the function 'flsv:score_models': expected one of [",
        ),
    ],
)
def test_policy_that_names_what_does_not_exist_is_refused(tmp_path, text, words):
    policy = tmp_path / "flsv-site.toml"
    policy.write_text(text)
    client = SiteClient(make_mlp_module, lambda node: SiteData(0), make_shapfed_loop)
    reply = response_to_registration(client, folder=str(tmp_path), policy=str(policy))
    assert words in reply["error"]


def test_site_whose_app_has_another_number_of_rounds_or_sites_is_refused(tmp_path):
    client = SiteClient(
        make_mlp_module,
        lambda node: SiteData(0),
        make_shapfed_loop,
        sites=["Boston", "Lyon"],
        rounds=3,
    )
    reply = response_to_registration(client, folder=str(tmp_path))
    assert "its app has 2 clients, but the server has 3" in reply["error"]
