"""What a site misses changes values. The verdict says so, wherever the site was missing."""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

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


class SitesWithChangedReplyOfLyon(SitesInProcess):
    """Lyon's reply in round 1 is changed: in the run itself, or in its coalitions' runs."""

    def __init__(self, folder, change, in_run):
        super().__init__(folder, make_shadow_loop)
        self.change = change
        self.in_run = in_run
        self.run_id: str | None = None
        self.transport.on_reply = self.change_reply_of_lyon

    def change_reply_of_lyon(self, address, packet, reply):
        if packet.kind != "train":
            return reply
        run_id = packet.plain["run"]
        if self.run_id is None:
            self.run_id = run_id

        is_in_place = (run_id == self.run_id) == self.in_run
        is_changed = address == LYON_ADDRESS and packet.plain["round"] == 1
        if is_in_place and is_changed:
            return self.change(reply)
        return reply


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("change", "in_run", "words"),
    [
        (lose, False, f"Lyon {COALITION}no reply within 60 s (1 times)"),
        (spoil, False, f"Lyon {DIVERGED} (1 times)"),
        (lose, True, "Lyon is excluded: no reply within 60 s (1 times)"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is excluded")
def test_verdict_says_what_a_site_has_missed(tmp_path, change, in_run, words):
    remote = SitesWithChangedReplyOfLyon(tmp_path, change, in_run=in_run)
    loop = remote.fit(rounds=2, server_data=ServerData())

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
    SitesInProcess(tmp_path, make_shadow_loop).fit(rounds=1, server_data=ServerData())
    events = open_run(tmp_path).record["events"]
    assert inputs_of_events(events, NAMES)["incidents"] == ""


class Loss(NamedTuple):
    """A reply that is lost: to a training of the run, or of the site's own coalition."""

    round_index: int
    run: Literal["federation", "own coalition"]
    site: int


FEDERATION = "federation"
OWN = "own coalition"
LOSSES = {
    "own, then the federation's": {Loss(0, OWN, 1), Loss(1, FEDERATION, 1)},
    "own in all rounds": {Loss(0, OWN, 1), Loss(1, OWN, 1), Loss(2, OWN, 1)},
    "the others', then own": {
        Loss(0, FEDERATION, 0),
        Loss(0, FEDERATION, 2),
        Loss(1, OWN, 1),
        Loss(2, FEDERATION, 0),
        Loss(2, FEDERATION, 2),
    },
}


class SitesThatLoseReplies(SitesInProcess):
    def __init__(self, folder, losses):
        super().__init__(folder, partial(make_shadow_loop, FedAdam(lr=0.03)))
        self.losses = losses
        self.exchange = self.transport.exchange
        self.transport.exchange = self.record_members
        self.transport.on_reply = self.lose_replies
        #: The sites that are sent messages of a run, by its id. The federation's own is the first.
        self.members_by_run = defaultdict[str, set[int]](set)

    def record_members(self, packets, seconds):
        for address, packet in packets.items():
            if packet.kind == "train":
                self.members_by_run[packet.plain["run"]].add(address - BOSTON_ADDRESS)
        return self.exchange(packets, seconds)

    def lose_replies(self, address, packet, reply):
        if packet.kind != "train":
            return reply
        site = address - BOSTON_ADDRESS
        run = self.kind_of_run(packet.plain["run"], site)
        is_lost = (packet.plain["round"], run, site) in self.losses
        return None if is_lost else reply

    def kind_of_run(self, run_id, site):
        first_run, *_ = self.members_by_run
        if run_id == first_run:
            return FEDERATION
        if self.members_by_run[run_id] == {site}:
            return OWN
        return "larger coalition"


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.filterwarnings("ignore:.*is excluded")
def test_honest_site_is_not_accused_whatever_replies_are_lost(tmp_path, losses):
    num_rounds = 3
    remote = SitesThatLoseReplies(tmp_path, losses)
    loop = remote.fit(num_rounds, server_data=ServerData())

    num_lost_in_federation = sum(loss.run == FEDERATION for loss in losses)
    expected_participations = num_rounds * len(NAMES) - num_lost_in_federation
    assert loop.participations.sum() == expected_participations
    assert [event.what for event in loop.events if "its own model" in event.what] == []
