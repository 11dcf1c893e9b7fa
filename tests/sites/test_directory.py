"""Who is who among the nodes: whom a server waits for, whom it refuses, and how it goes on after its end."""

import errno
import json
import time
from functools import partial

import pytest

from flsv import ClientEvaluation
from flsv.aggregation import DivergenceWeighted, FedAvg, FedNova
from flsv.attacks import InnerProductManipulation
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionEstimation,
    ShadowShapley,
    WassersteinContribution,
)
from flsv.privacy import GaussianPrivacy
from flsv.retraining.coalition_store import CoalitionStore
from flsv.sampling import UniformSampler
from flsv.sites import Directory, Packet, RemoteData, RemoteServer
from flsv.sites.federation import check_deployment
from flsv.sites.messages import failed, failure_packet
from flsv.sites.run_status import run_status
from flsv.training.algorithms import FedProx
from flsv.uploads import TopK
from flsv.utilities.errors import ConfigurationError
from helpers import refused, warns
from helpers.sites import (
    ADDRESSES,
    BOSTON_ADDRESS,
    LYON_ADDRESS,
    NAMES,
    OSAKA_ADDRESS,
    Replay,
    ServerData,
    SitesInProcess,
    announcement,
    assert_same_runs,
    make_momentum_module,
    make_shapfed_loop,
    make_site,
    named,
)

HELLO = Packet("here", announcement({"train": 3, "val": 0, "test": 0}))
SIZES = HELLO.plain["sizes"]


def directory_of(folder, reply_of_osaka=HELLO, wait=0, **options):
    """A server's directory of sites that say HELLO, but for Osaka."""
    nodes = Replay()
    nodes.says["handshake"] = dict.fromkeys(ADDRESSES, HELLO) | {OSAKA_ADDRESS: reply_of_osaka}
    return Directory(nodes, NAMES, {}, folder / "book", wait=wait, **options)


class BostonThatComesLate:
    """Boston, which cannot be reached at first, or does not say who it is when it is first asked."""

    def __init__(self, absences=0, refusals=0):
        self.absences_left = absences
        self.refusals_left = refusals

    def present(self):
        if self.absences_left > 0:
            self.absences_left -= 1
            return {}
        return {BOSTON_ADDRESS: "Boston"}

    def exchange(self, packets, seconds):
        for address, packet in packets.items():
            if packet.kind != "handshake":
                yield address, named(packet, Packet("result", {"address": address}))
            elif self.refusals_left > 0:
                self.refusals_left -= 1
                yield address, failed("the node is not available")
            else:
                yield address, named(packet, HELLO)


@pytest.mark.parametrize(
    ("absences", "refusals", "num_warnings"),
    [(2, 0, 0), (0, 2, 1)],
    ids=["away", "silent"],
)
def test_restarted_server_waits_for_a_site_that_is_away_or_silent(
    tmp_path, absences, refusals, num_warnings, recwarn
):
    nodes = BostonThatComesLate(absences=absences, refusals=refusals)
    directory = Directory(nodes, NAMES, {}, tmp_path / "book", wait=60)

    replies = directory.exchange({0: Packet("query"), 1: Packet("query")})

    assert replies[0].plain["address"] == BOSTON_ADDRESS
    assert replies[1].plain["error"] == "it cannot be reached"
    messages = [str(warning.message) for warning in recwarn]
    text = " ".join(messages)
    assert text.count("'Boston' has not announced its samples") == num_warnings


def test_each_message_says_how_many_seconds_the_site_has(tmp_path):
    sent_packets = []

    class RecordingNodes(BostonThatComesLate):
        def exchange(self, packets, seconds):
            sent_packets.extend(packets.values())
            return super().exchange(packets, seconds)

    directory = Directory(RecordingNodes(), NAMES, {}, tmp_path / "book", timeout=9)
    directory.exchange({0: Packet("query")})

    assert [packet.kind for packet in sent_packets] == ["handshake", "query"]
    assert [packet.plain["seconds"] for packet in sent_packets] == [9, 9]


@pytest.mark.parametrize(
    "error", [ConfigurationError("class 'of Jane Doe' has 1 sample"), KeyError("Jane Doe")]
)
def test_misconfigured_site_ends_the_servers_start_without_the_sites_own_words(tmp_path, error):
    with refused("site 'Osaka' cannot take part: it failed with an error; the site's") as raised:
        directory_of(tmp_path, failure_packet(error), wait=60).gather()

    assert "Jane" not in str(raised.value)
    assert type(error).__name__ not in str(raised.value)


def test_site_whose_error_may_be_temporary_is_waited_for(tmp_path):
    full_disk = OSError(errno.ENOSPC, "No space left on device", "/data/Jane Doe")
    directory = directory_of(tmp_path, failure_packet(full_disk))
    with (
        warns("site 'Osaka' has not announced its samples: no space is left on its disk; the"),
        pytest.raises(RuntimeError, match=r"\['Osaka'\].*within 0 s.* 'Osaka'"),
    ):
        directory.gather()


FORGED = "gone\x1b[2J\nflsv: the run has finished: all is well"


@pytest.mark.parametrize(
    "reply",
    [
        Packet("failed", {"error": FORGED, "permanent": True}),
        Packet("failed", {"error": FORGED, "permanent": False}),
        Packet("here", {"sizes": FORGED}),
    ],
    ids=["permanent", "willing", "sizes"],
)
def test_words_of_a_site_are_printable_at_the_start(tmp_path, reply, recwarn):
    with pytest.raises((ConfigurationError, RuntimeError)) as error:
        directory_of(tmp_path, reply).gather()

    warnings = [str(warning.message) for warning in recwarn]
    for words in (str(error.value), *warnings):
        assert words.isprintable()


class NodesWithSilentBostonAndLateOsaka(Replay):
    """Boston never responds. Osaka is there from the second exchange on."""

    def __init__(self):
        super().__init__()
        self.num_exchanges = 0

    def present(self):
        nodes = super().present()
        if self.num_exchanges == 0:
            del nodes[OSAKA_ADDRESS]
        return nodes

    def exchange(self, packets, seconds):
        self.num_exchanges += 1
        for address, packet in packets.items():
            if address == BOSTON_ADDRESS:
                time.sleep(2 * SECONDS_TO_WAIT)
            else:
                yield address, named(packet, HELLO)


SECONDS_TO_WAIT = 0.1


def test_site_that_does_not_respond_is_not_said_to_be_away(tmp_path):
    nodes = NodesWithSilentBostonAndLateOsaka()
    directory = Directory(nodes, NAMES, {}, tmp_path / "book", wait=SECONDS_TO_WAIT)

    with pytest.raises(RuntimeError) as error:
        directory.gather()

    assert str(error.value).startswith("sites ['Boston'] are connected, but have not announced")
    assert "have not connected" not in str(error.value)
    assert nodes.num_exchanges == 2


def test_nodes_with_unknown_or_duplicate_names_are_ignored(tmp_path):
    remote = SitesInProcess(tmp_path, make_shapfed_loop)
    another_address = 99
    remote.transport.names[LYON_ADDRESS] = ""
    remote.transport.sites[another_address] = remote.transport.sites[OSAKA_ADDRESS]
    remote.transport.names[another_address] = "Osaka"
    words = r"a node is registered as '', which is not in sites=\['Boston', 'Lyon', 'Osaka'\]"
    with (
        warns(words) as warned,
        pytest.raises(RuntimeError, match=rf"sites \['Lyon'\] have not.*{words}"),
    ):
        remote.fit()

    messages = [str(warning.message) for warning in warned]
    assert sum("is registered as" in message for message in messages) == 1
    assert "two nodes are registered as 'Osaka'. The server uses one of them only." in messages


def write_book_of_earlier_start(path):
    path.write_text(json.dumps({"sites": dict.fromkeys(NAMES, SIZES)}))


def test_absent_sites_are_named_while_the_server_waits(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flsv.sites.transport.rank_zero_info", print)
    book = tmp_path / "book"
    write_book_of_earlier_start(book)
    statuses = []
    only_boston = BostonThatComesLate()
    directory = Directory(only_boston, NAMES, {}, book, wait=60, report_waiting=statuses.append)

    directory.gather()
    directory.exchange({0: Packet("query")})

    assert capsys.readouterr().out == "flsv: 1 of 3 sites are connected, without Lyon, Osaka.\n"
    no_longer_waiting = None
    assert statuses == [no_longer_waiting, no_longer_waiting]


MANY_SAMPLES = Packet("here", announcement({**SIZES, "train": 1001}))
TOO_MANY_SAMPLES = "it announces 1,001 train samples.*max_samples=1,000"


def test_site_with_more_samples_than_max_samples_ends_the_start(tmp_path):
    directory = directory_of(tmp_path, MANY_SAMPLES, max_samples=1000)
    with refused(f"'Osaka' cannot take part: {TOO_MANY_SAMPLES}"):
        directory.gather()


def test_site_with_more_samples_than_max_samples_is_left_out_later(tmp_path):
    directory = directory_of(tmp_path, MANY_SAMPLES, max_samples=1000)
    with warns(f"'Osaka' has not.*{TOO_MANY_SAMPLES}"):
        addresses = directory.refresh()

    assert addresses == {0: BOSTON_ADDRESS, 1: LYON_ADDRESS}


def test_book_with_a_site_of_too_many_samples_is_refused(tmp_path):
    directory_of(tmp_path, MANY_SAMPLES).gather()
    with refused(f"book cannot take part: {TOO_MANY_SAMPLES}"):
        directory_of(tmp_path, max_samples=1000)


def test_site_with_other_samples_than_in_the_book_is_refused(tmp_path):
    directory_of(tmp_path, MANY_SAMPLES).gather()
    with refused("'Osaka' cannot take part: it has {'train': 3, .* now, but it had {'train': 1001"):
        directory_of(tmp_path).gather()


def test_samples_that_sites_announce_take_no_memory_at_the_server():
    sizes = dict.fromkeys(("train", "val", "test"), 10**8)
    data = RemoteData(["Boston"], sizes=[sizes], contents=[""])

    labels = data.to_device(None).classes.labels
    assert len(labels) == 10**8
    assert labels.untyped_storage().nbytes() == 8


def test_another_checkout_of_one_version_is_refused(tmp_path, monkeypatch):
    remote = SitesInProcess(tmp_path, make_shapfed_loop)
    monkeypatch.setattr("flsv.sites.transport._sources", lambda: "changed")

    with refused(r"'[\w.]+, sources [0-9a-f]{12}', the server .*changed'"):
        remote.fit()


class ServerKilled(BaseException):
    """Ends a run also where other errors only fail a score."""


def make_halving_loop():
    return make_shapfed_loop(
        optimizer_state="persist",
        sampler=UniformSampler(2),
        metrics={
            "cssv": ClassSpecificShapley(),
            "shadow": ShadowShapley(coalitions="halves"),
        },
    )


def kill_at_last_reply_of_round_1(address, packet, reply):
    is_last_site = address == OSAKA_ADDRESS
    if packet.plain.get("round") == 1 and is_last_site:
        raise ServerKilled
    return reply


@pytest.mark.slow
def test_run_of_a_server_that_is_killed_twice_equals_the_uninterrupted_run(tmp_path, monkeypatch):
    """It is killed in round 1 after its sites have trained, and while it stores coalitions of this round."""
    whole = SitesInProcess(tmp_path / "whole", make_halving_loop, make_momentum_module)
    whole_run = whole.fit(rounds=2, server_data=ServerData())
    killed = SitesInProcess(tmp_path / "killed", make_halving_loop, make_momentum_module)
    fit_on = partial(killed.go_on_until, 2, server_data=ServerData())

    pass_reply_on = killed.transport.on_reply
    killed.transport.on_reply = kill_at_last_reply_of_round_1
    with pytest.raises(ServerKilled), warns("round 2 is discarded"):
        fit_on()
    killed.transport.on_reply = pass_reply_on

    add = CoalitionStore.add

    def kill_at_coalitions_of_round_1(store, seed, members, models):
        if 1 in models:
            raise ServerKilled
        add(store, seed, members, models)

    with monkeypatch.context() as patch:
        patch.setattr(CoalitionStore, "add", kill_at_coalitions_of_round_1)
        with pytest.raises(ServerKilled):
            fit_on()

    resumed_run = fit_on()
    assert_same_runs(resumed_run, whole_run)
    table = (killed.tmp / "coalitions.csv").read_text()
    assert table == (whole.tmp / "coalitions.csv").read_text()


def make_site_of_lyon_with_other_settings(folder):
    make_loop = partial(
        make_shapfed_loop, local_epochs=2, client_algorithm=FedProx(0.1), uploads=[TopK(0.5)]
    )
    return make_site(folder, 1, make_loop)


def test_site_with_other_settings_ends_the_start(tmp_path):
    remote = SitesInProcess(tmp_path, make_shapfed_loop)
    remote.transport.sites[LYON_ADDRESS] = make_site_of_lyon_with_other_settings(tmp_path)
    difference = r"at clients': the site has .*FedProx\(.*, TopK\(.*, the server 'nothing'"

    with refused(f"site 'Lyon' cannot take.*{difference}"):
        remote.fit()


def test_site_that_changes_its_settings_within_a_run_is_left_out(tmp_path):
    remote = SitesInProcess(tmp_path, make_shapfed_loop)

    def change_lyon_after_round_0(address, packet, reply):
        is_last_site = address == OSAKA_ADDRESS
        if packet.plain.get("round") == 0 and is_last_site:
            changed_site = make_site_of_lyon_with_other_settings(tmp_path)
            remote.transport.sites[LYON_ADDRESS] = changed_site
        return reply

    remote.transport.on_reply = change_lyon_after_round_0
    with warns(r"'Lyon' \(client 1\).*round 2:"):
        loop = remote.fit(rounds=2)

    assert loop.participations.tolist() == [2, 1, 2]


def test_round_without_replies_is_recorded_for_every_site(tmp_path):
    federation = SitesInProcess(tmp_path, make_shapfed_loop)
    federation.transport.change_replies("train", lambda reply: None)

    with (
        warns("is excluded"),
        pytest.raises(RuntimeError, match="no site.*model. All clients"),
    ):
        federation.fit()

    record = json.loads((tmp_path / "run.json").read_text())
    events = [(event["client"], event["what"]) for event in record["events"]]
    event_of_each_client = "is excluded: no reply within 60 s"
    assert events == [(client, event_of_each_client) for client in range(3)]


class SubclassOfFedNova(FedNova):
    """An aggregator of one's own that divides by reported steps, too."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"aggregator": DivergenceWeighted()}, "works with the clients' class counts"),
        (
            {"metrics": {"own": WassersteinContribution()}, "aggregator": None},
            "computes on the clients' samples",
        ),
        (
            {
                "metrics": {"own": ContributionEstimation(performance="val_hits", mode="max")},
                "aggregator": None,
            },
            "'val_hits'.*cannot be sent to them",
        ),
        (
            {"evaluation": ClientEvaluation(keep_trained=True)},
            "neither the models that sites have trained",
        ),
        (
            {
                "evaluation": ClientEvaluation(every=1),
                "uploads": [GaussianPrivacy(1.0, 1.0)],
                "aggregator": FedAvg(),
                "metrics": {},
            },
            "if updates have noise, their scores",
        ),
        ({"uploads": [InnerProductManipulation(clients=[0, 1])]}, "do not get each other's"),
        (
            {"aggregator": SubclassOfFedNova(), "metrics": {}},
            "numbers of steps. The server cannot check",
        ),
    ],
)
def test_settings_that_remote_sites_cannot_support_are_refused(options, words):
    loop = make_shapfed_loop(**options)
    metrics = loop.contribution_metrics
    with refused(words):
        check_deployment(loop.config, metrics.fields, metrics.evaluating)


def read_status(folder):
    status_file = json.loads((folder / "status.json").read_text())
    return status_file["status"], status_file["why"]


def test_status_json_of_a_run_says_what_the_server_waits_for(tmp_path):
    with run_status(tmp_path) as report:
        assert read_status(tmp_path) == ("running", None)
        report("waiting for Osaka")
        assert read_status(tmp_path) == ("running", "waiting for Osaka")
        report("Osaka was away")

    assert read_status(tmp_path) == ("finished", "Osaka was away")


def test_server_of_a_fresh_run_leaves_its_folder_of_checkpoints_empty(tmp_path):
    with run_status(tmp_path):
        # Otherwise Lightning would warn that it is not empty.
        assert not (tmp_path / "checkpoints").exists()
        with refused("another run is writing"), run_status(tmp_path):
            pass


def test_finished_run_is_reported_in_status_json_and_the_terminal(tmp_path, capsys):
    with run_status(tmp_path):
        pass

    assert read_status(tmp_path) == ("finished", None)
    assert capsys.readouterr().err.endswith(f"flsv: the run has finished: {tmp_path}.\n")


@pytest.mark.parametrize(
    ("error", "expected_status"),
    [
        (ValueError("too bad"), ("failed", "ValueError: too bad")),
        # Flower ends an app so whose SuperLink is gone.
        (SystemExit(0), ("running", None)),
    ],
    ids=["error", "exit"],
)
def test_status_json_of_a_run_that_an_exception_ends(tmp_path, error, expected_status):
    with pytest.raises(type(error)), run_status(tmp_path):
        raise error

    assert read_status(tmp_path) == expected_status


def test_status_json_of_a_stopped_run_stays_stopped_while_its_server_ends(tmp_path):
    status_file = tmp_path / "status.json"
    with run_status(tmp_path, "12") as report:
        stopped = status_file.read_text().replace("running", "stopped")
        status_file.write_text(stopped)
        report("waiting for Osaka")
        assert status_file.read_text() == stopped

    assert status_file.read_text() == stopped


def test_status_json_of_a_stopped_run_is_replaced_by_the_next_run(tmp_path):
    (tmp_path / "status.json").write_text('{"status": "stopped", "run": "12"}')
    with run_status(tmp_path, "13"):
        assert "running" in (tmp_path / "status.json").read_text()


@pytest.mark.parametrize(
    ("option", "value"),
    [("rounds", 0), ("timeout", 0), ("wait", -1.0), ("num_classes", 0), ("max_samples", 0)],
)
def test_server_with_an_option_out_of_range_is_refused(option, value):
    options = {"rounds": 3, option: value}
    with refused(option):
        RemoteServer(make_momentum_module, make_shapfed_loop, NAMES, **options)


def test_reply_to_an_earlier_message_excludes_the_site_from_the_round(tmp_path):
    remote = SitesInProcess(tmp_path, make_shapfed_loop)
    trainings_of_lyon = []

    def repeat_first_training_of_lyon(address, packet, reply):
        if packet.kind != "train" or address != LYON_ADDRESS:
            return reply
        trainings_of_lyon.append(reply)
        return trainings_of_lyon[0]

    remote.transport.on_reply = repeat_first_training_of_lyon
    with warns(
        "'Lyon'.*excluded in round 2: it has replied to the message 'train of round 0 in run .*, 1'"
    ):
        loop = remote.fit(rounds=2)

    assert loop.participations.tolist() == [2, 1, 2]
