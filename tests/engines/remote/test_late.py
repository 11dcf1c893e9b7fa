"""Updates that come too late for their round: FedBuff takes them as stale as they are, others do without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_federation import Remotely, shapfed
from remote_sites import SiteTransport
from torch import Tensor

from flsv import FederatedLoop
from flsv.aggregation import FedBuff, StaleStarts
from flsv.engines.remote import Packet, Wait

ROUNDS = 5


class LateTransport(SiteTransport):
    """Holds replies back: of these sites, asked in these rounds, until these later ones, in which a site that is still
    at work is asked nothing."""

    def __init__(self, sites: Any, held: Mapping[tuple[int, int], int]) -> None:
        super().__init__(sites)
        self.held, self.asked = held, dict[Any, Packet]()
        self.replied: dict[Any, tuple[Packet, Packet]] = {}  # by site and round of arrival: what it answers, and how
        self._late: dict[int, Packet] = {}

    def exchange(self, packets: Mapping[int, Packet], wait: Wait) -> dict[int, Any]:
        replies: dict[int, Any] = {}
        for address, packet in packets.items():
            if packet.kind != "train":
                replies |= super().exchange({address: packet}, wait)
                continue
            now = packet.plain["round"]
            late = self._late.get(address)
            if late is not None and late.asked is not None:
                if now < self.held[address, late.asked.plain["round"]]:
                    continue
                del self._late[address]
                if wait.keep_late:
                    replies[address] = late
                    self.replied[address, now] = late.asked, late
                    continue
            (reply,) = super().exchange({address: packet}, wait).values()
            self.asked[address, now] = packet
            if (address, now) in self.held:
                self._late[address] = replace(reply, asked=packet)
            else:
                replies[address] = reply
                self.replied[address, now] = packet, reply
        return replies


def buffered() -> FederatedLoop:
    return shapfed(aggregator=FedBuff(), personalizer=StaleStarts())


def by_hand(transport: LateTransport) -> Tensor:
    """x + 1/K sum_i (1 + tau_i)^(-1/2) (x_i - its start), where tau counts the models since that start."""
    models = [transport.asked[100, 0].tensors["start"]]
    for now in range(ROUNDS):
        steps = []
        for (_, when), (asked, reply) in transport.replied.items():
            if when == now:
                start = asked.tensors["start"]
                (version,) = (i for i, model in enumerate(models) if torch.equal(model, start))
                steps.append((1 + now - version) ** -0.5 * (reply.tensors["vector"] - start))
        models.append(models[-1] + sum(steps) / len(steps))
        # What the server has is what it sends: later starts are equal to the bit.
        sent = [p.tensors["start"] for (_, r), p in transport.asked.items() if r == now + 1]
        models[-1] = next((s for s in sent if torch.allclose(s, models[-1], rtol=0, atol=1e-6)), models[-1])
    return models[-1]


@pytest.mark.filterwarnings("ignore:.*is left out")
def test_fedbuff_takes_a_late_update_as_stale_as_it_is(tmp_path: Path) -> None:
    remote = Remotely(tmp_path, buffered)
    # The second site's very first update, and one of the third's later ones.
    remote.transport = transport = LateTransport(remote.sites, {(101, 0): 2, (102, 1): 3})
    loop = remote.fit(ROUNDS)
    torch.testing.assert_close(loop.state.model(), by_hand(transport), rtol=0, atol=1e-5)
    assert loop.state.participations.tolist() == [5, 3, 3]
    assert (101, 1) not in transport.asked
    # The site goes on from the visit whose update was late.
    assert transport.asked[101, 3].plain["counted"] == transport.asked[101, 0].plain["visit"]
    assert transport.asked[102, 4].plain["counted"] == transport.asked[102, 1].plain["visit"]


@pytest.mark.filterwarnings("ignore:.*is left out")
def test_without_staleness_a_late_update_is_dropped(tmp_path: Path) -> None:
    remote = Remotely(tmp_path, shapfed)
    remote.transport = transport = LateTransport(remote.sites, {(101, 1): 2})
    loop = remote.fit(3)
    assert transport.replied[101, 2][0] is transport.asked[101, 2]
    assert transport.asked[101, 2].plain["counted"] == transport.asked[101, 0].plain["visit"]
    assert loop.state.participations.tolist() == [3, 2, 3]
