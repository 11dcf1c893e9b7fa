"""Sites that get the same request respond at the same time."""

from functools import partial

import pytest
import torch

from flsv.aggregation import FedAvg
from flsv.core import Client
from flsv.metrics import CumulativeShapley
from flsv.sites.conversations import Conversations
from flsv.sites.messages import Packet
from helpers.sites import (
    NAMES,
    SPLITS,
    SitesInProcess,
    make_shapfed_loop,
)


class ExchangeThatEchoes:
    """An exchange in which each site repeats its packet's text. It records the sites of each exchange."""

    def __init__(self):
        self.sites_of_exchanges: list[list[int]] = []

    def __call__(self, packets):
        self.sites_of_exchanges.append(list(packets))
        replies = {}
        for site, packet in packets.items():
            replies[site] = packet.plain["text"]
        return replies


def make_clients(count):
    data = None
    return [Client(number, data) for number in range(count)]


def make_query(text):
    return Packet("query", {"text": text}, {})


def replies_of_client(conversations, num_requests, client):
    """Send a client as many requests as the list says, and return its replies."""
    replies = []
    for number in range(num_requests[client.id]):
        packet = make_query(f"{client.id}.{number}")
        replies.append(conversations.send(client.id, packet))
    return replies


def test_requests_of_one_step_are_one_exchange():
    exchange = ExchangeThatEchoes()
    conversations = Conversations(exchange)
    num_requests_of_clients = [2, 0, 1]
    talk = partial(replies_of_client, conversations, num_requests_of_clients)

    replies = conversations.hold_conversations(talk, make_clients(3))

    assert replies == [["0.0", "0.1"], [], ["2.0"]]
    sites_of_first_requests = [0, 2]
    sites_of_second_requests = [0]
    assert exchange.sites_of_exchanges == [sites_of_first_requests, sites_of_second_requests]


def test_request_outside_of_conversations_is_an_exchange_of_its_own():
    exchange = ExchangeThatEchoes()
    conversations = Conversations(exchange)
    assert conversations.send(1, make_query("alone")) == "alone"
    assert conversations.hold_conversations(lambda client: client.id, make_clients(1)) == [0]
    assert exchange.sites_of_exchanges == [[1]]


def test_error_in_a_conversation_ends_all_and_is_raised():
    conversations = Conversations(ExchangeThatEchoes())
    ended = []

    def talk(client):
        try:
            conversations.send(client.id, make_query("first"))
            if client.id == 1:
                raise KeyError("client 1")
            conversations.send(client.id, make_query("second"))
        finally:
            ended.append(client.id)

    with pytest.raises(KeyError, match="client 1"):
        conversations.hold_conversations(talk, make_clients(3))

    assert sorted(ended) == [0, 1, 2]
    assert conversations.hold_conversations(lambda client: client.id, make_clients(2)) == [0, 1]


def test_failed_exchange_ends_all_conversations():
    def fail(packets):
        raise ConnectionError("the network is away")

    conversations = Conversations(fail)
    with pytest.raises(ConnectionError, match="away"):
        conversations.hold_conversations(
            partial(replies_of_client, conversations, [1, 1]), make_clients(2)
        )


def test_another_site_is_not_asked_within_a_conversation():
    conversations = Conversations(ExchangeThatEchoes())

    def talk(client):
        conversations.send(1 - client.id, make_query("for the other"))

    with pytest.raises(RuntimeError, match="conversation with site 0"):
        conversations.hold_conversations(talk, make_clients(2))


def test_conversations_compute_as_their_caller_does():
    conversations = Conversations(ExchangeThatEchoes())
    clients = make_clients(2)

    def autograd_modes(client):
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with torch.no_grad():
        without_gradients = conversations.hold_conversations(autograd_modes, clients)
    with torch.inference_mode():
        in_inference = conversations.hold_conversations(autograd_modes, clients)
    with_gradients = conversations.hold_conversations(autograd_modes, clients)

    assert without_gradients == [(False, False)] * 2
    assert in_inference == [(False, True)] * 2
    assert with_gradients == [(True, False)] * 2


def make_client_valued_loop():
    return make_shapfed_loop(
        aggregator=FedAvg(),
        metrics={"value": CumulativeShapley(evaluators="clients")},
    )


@pytest.mark.slow
def test_sites_score_models_at_the_same_time(tmp_path):
    federation = SitesInProcess(tmp_path, make_client_valued_loop, **SPLITS)
    transport = federation.transport
    exchange = transport.exchange
    num_requested_sites = []

    def record_and_exchange(packets, seconds):
        kinds = {packet.kind for packet in packets.values()}
        if kinds == {"query"}:
            num_requested_sites.append(len(packets))
        return exchange(packets, seconds)

    transport.exchange = record_and_exchange
    federation.fit(rounds=1)

    assert set(num_requested_sites) == {len(NAMES)}
