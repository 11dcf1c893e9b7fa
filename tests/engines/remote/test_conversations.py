"""Sites are asked at the same time, and what comes of it is that of one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_federation import shapfed, with_splits

from flsv import FederatedLoop
from flsv.aggregation import FedAvg
from flsv.engines.remote import Packet
from flsv.engines.remote.conversations import Conversations
from flsv.metrics import DomainRelevance
from flsv.participants import Client
from flsv.personalization import PFedSV

CLIENTS: list[Any] = [Client(i, None) for i in range(4)]  # type: ignore[arg-type]


def talks(exchange: Any) -> tuple[Conversations, Any]:
    conversations = Conversations(exchange)

    def ask(client: int, word: str) -> str:
        return str(conversations.exchange(client, Packet("ask", {"word": word})).plain["said"])  # type: ignore[union-attr]

    return conversations, ask


def test_questions_go_out_together_however_many_each_site_is_asked() -> None:
    sent: list[dict[int, str]] = []

    def exchange(packets: Mapping[int, Packet]) -> dict[int, Packet]:
        sent.append({site: packets[site].plain["word"] for site in sorted(packets)})
        return {site: Packet("answer", {"said": f"{packet.plain['word']}!"}) for site, packet in packets.items()}

    conversations, ask = talks(exchange)

    def conversation(client: Client) -> list[str]:
        return [ask(client.id, f"{client.id}{number}") for number in range(client.id)]

    told = conversations.map(conversation, CLIENTS)
    assert told == [[], ["10!"], ["20!", "21!"], ["30!", "31!", "32!"]]
    assert sent == [{1: "10", 2: "20", 3: "30"}, {2: "21", 3: "31"}, {3: "32"}]
    assert ask(2, "alone") == "alone!"
    assert sent[3:] == [{2: "alone"}]


def test_the_first_error_is_raised_once_all_have_ended() -> None:
    ended = []

    def exchange(packets: Mapping[int, Packet]) -> dict[int, Packet]:
        return {site: Packet("answer", {"said": "yes"}) for site in packets}

    conversations, ask = talks(exchange)

    def conversation(client: Client) -> None:
        ask(client.id, "well?")
        if client.id in (1, 2):
            raise KeyError(client.id)
        ask(client.id, "and?")
        ended.append(client.id)

    with pytest.raises(KeyError, match="1"):
        conversations.map(conversation, CLIENTS)
    assert sorted(ended) == [0, 3]


@pytest.mark.parametrize("error", [OSError("the wire is cut"), KeyboardInterrupt()])
def test_what_ends_the_exchange_ends_the_conversations(error: BaseException) -> None:
    def exchange(packets: Mapping[int, Packet]) -> dict[int, Packet]:
        raise error

    conversations, ask = talks(exchange)
    with pytest.raises(type(error)):
        conversations.map(lambda client: ask(client.id, "well?"), CLIENTS)


def test_gradients_are_off_where_they_were_off() -> None:
    conversations, _ = talks(None)
    with torch.no_grad():
        assert conversations.map(lambda client: torch.is_grad_enabled(), CLIENTS) == [False] * 4
    with torch.inference_mode():
        assert conversations.map(lambda client: torch.is_inference_mode_enabled(), CLIENTS) == [True] * 4


def test_a_federations_sites_are_asked_at_once(tmp_path: Path) -> None:
    def make() -> FederatedLoop:
        metrics = {"relevance": DomainRelevance()}
        return shapfed(aggregator=FedAvg(), metrics=metrics, personalizer=PFedSV("relevance", k=2))

    remote = with_splits(tmp_path, make)
    asked: list[list[str]] = []
    exchange = remote.transport.exchange

    def watched(packets: Mapping[int, Packet], timeout: float) -> dict[int, Any]:
        asked.append(sorted(packet.kind for packet in packets.values()))
        return exchange(packets, timeout)

    remote.transport.exchange = watched  # type: ignore[method-assign]
    remote.fit(rounds=2)
    questions = [kinds for kinds in asked if "ask" in kinds]
    assert questions
    assert all(kinds == ["ask"] * 3 for kinds in questions)
