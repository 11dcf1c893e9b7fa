"""What a site misses changes values. The verdict says so, wherever the site was missing."""

from dataclasses import replace

import pytest
import torch

from flsv import Reporting
from flsv.aggregation import FedAvg
from flsv.engines.remote import Packet
from flsv.metrics import ShadowShapley
from flsv.report import open_run
from flsv.results.verdict import PaymentInputs, inputs_of_events, verdict_of
from helpers.sites import (
    LYON_ADDRESS,
    NAMES,
    ServerData,
    SitesInProcess,
    make_shapfed_loop,
)

COALITION = "is left out of a coalition's training: "
DIVERGED = "sent a model that is not finite in a coalition's training"


def make_shadow_loop():
    return make_shapfed_loop(
        aggregator=FedAvg(),
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
        (lose, True, "Lyon is left out: no reply within 1 s (1 times)"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is left out")
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


@pytest.mark.slow
def test_verdict_of_a_run_without_faults_names_none(tmp_path):
    SitesInProcess(tmp_path, make_shadow_loop).fit(server_data=ServerData())
    events = open_run(tmp_path).record["events"]
    assert inputs_of_events(events, NAMES)["incidents"] == ""
