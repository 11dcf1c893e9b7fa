"""What a site misses changes values. The verdict says so, wherever the site was missing."""

from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch

from flsv import Reporting
from flsv.aggregation import FedAdam, FedAvg
from flsv.metrics import ShadowShapley
from flsv.results import open_run
from flsv.results.verdict import PaymentInputs, inputs_of_events, verdict_of
from flsv.sites import Packet
from helpers.sites import (
    BOSTON_ADDRESS,
    LYON_ADDRESS,
    NAMES,
    ServerData,
    SitesInProcess,
    make_shapfed_loop,
)

COALITION = "is excluded from a coalition's training: "
DIVERGED = "sent a model that is not finite in a coalition's training"


def make_shadow_loop(aggregator=None):
    return make_shapfed_loop(
        aggregator=aggregator or FedAvg(),
        metrics={"shadow": ShadowShapley(performance="negative_loss")},
        reporting=Reporting(table=False, files=True),
    )


def lose(reply):
    return None


def spoil(reply):
    return Packet("update", reply.plain, {"vector": reply.tensors["vector"] * torch.nan})


class Federation(SitesInProcess):
    """Lyon's replies are spoiled in the second round, of the run or of its coalitions."""

    def __init__(self, folder, change, in_run):
        super().__init__(folder, make_shadow_loop)
        self.run_id: str | None = None

        def on_reply(address, packet, reply):
            if packet.kind != "train":
                return reply
            if self.run_id is None:
                self.run_id = packet.plain["run"]  # coalitions train after it
            is_of_run = packet.plain["run"] == self.run_id
            is_changed = address == LYON_ADDRESS and packet.plain["round"] == 1
            return change(reply) if is_changed and is_of_run == in_run else reply

        self.transport.on_reply = on_reply


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("change", "in_run", "words"),
    [
        (lose, False, f"Lyon {COALITION}no reply within 1 s (1 times)"),
        (spoil, False, f"Lyon {DIVERGED} (1 times)"),
        (lose, True, "Lyon is excluded: no reply within 1 s (1 times)"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is excluded")
def test_verdict_says_what_a_site_has_missed(tmp_path, change, in_run, words):
    federation = Federation(tmp_path, change, in_run=in_run)
    loop = federation.fit(server_data=ServerData())

    (event,) = loop.events
    assert event.client == 1
    inputs = inputs_of_events(open_run(tmp_path).record["events"], NAMES)
    assert inputs["incidents"] == words

    payable = PaymentInputs(values=[0.3, 0.2, 0.1], by="accuracy", source="trainings", seeds=3)
    verdict = verdict_of(replace(payable, **inputs))
    assert words in verdict.text
    assert not verdict.forbids_payment
    assert "Lyon" not in verdict.for_one_client().text


def test_verdict_that_forbids_payment_says_what_a_site_has_missed_too():
    inputs = PaymentInputs(
        values=[0.3, 0.2],
        source="trainings",
        seeds=3,
        evaluated_by_clients=True,
        incidents="Lyon cannot be reached",
    )
    verdict = verdict_of(inputs)

    assert verdict.forbids_payment
    assert [*verdict.reasons] == ["evaluated_by_clients", "incidents"]
    assert "Lyon cannot be reached" in verdict.text


@pytest.mark.slow
def test_verdict_of_a_run_without_faults_names_none(tmp_path):
    SitesInProcess(tmp_path, make_shadow_loop).fit(server_data=ServerData())
    events = open_run(tmp_path).record["events"]
    assert inputs_of_events(events, NAMES)["incidents"] == ""


def lost(round_index, kind, *sites):
    """Replies that are lost: of the run's training, or of a site's training in its own coalition."""
    return {(round_index, kind, site) for site in sites}


LOSSES = {
    "own, then the run's": lost(0, "own", 1) | lost(1, "run", 1),
    "own in all rounds": lost(0, "own", 1) | lost(1, "own", 1) | lost(2, "own", 1),
    "the others', then own": lost(0, "run", 0, 2) | lost(1, "own", 1) | lost(2, "run", 0, 2),
    "two sites' own": lost(0, "own", 0, 1) | lost(1, "own", 0) | lost(2, "run", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.filterwarnings("ignore:.*is excluded")
def test_honest_site_is_not_accused_whatever_replies_are_lost(tmp_path, losses):
    make = partial(make_shadow_loop, FedAdam(lr=0.03))
    federation = SitesInProcess(tmp_path, make)
    members_of_runs = members_by_run(federation)

    def on_reply(address, packet, reply):
        if packet.kind != "train":
            return reply
        run = packet.plain["run"]
        site = address - BOSTON_ADDRESS
        # The first messages are the federation's own, the others those of coalitions.
        first_run, *_ = members_of_runs
        if run == first_run:
            kind = "run"
        elif members_of_runs[run] == {site}:
            kind = "own"
        else:
            kind = "of a larger coalition"
        is_lost = (packet.plain["round"], kind, site) in losses
        return None if is_lost else reply

    federation.transport.on_reply = on_reply
    loop = federation.fit(server_data=ServerData())

    num_lost_of_run = sum(kind == "run" for _, kind, _ in losses)
    assert loop.participations.sum() == 9 - num_lost_of_run  # of three sites in three rounds
    assert [event.what for event in loop.events if "its own model" in event.what] == []


def members_by_run(federation):
    """``{run's id: the sites that are sent messages of it}``, filled while messages are sent."""
    members = defaultdict[str, set[int]](set)
    exchange = federation.transport.exchange

    def note_members(packets, seconds):
        for address, packet in packets.items():
            if packet.kind == "train":
                members[packet.plain["run"]].add(address - BOSTON_ADDRESS)
        return exchange(packets, seconds)

    federation.transport.exchange = note_members
    return members
