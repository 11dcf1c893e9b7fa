"""Messages over a Flower Grid, without processes: what a late site is sent, and when."""

import json
import time
from functools import partial

import pytest

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo

from flsv import ClassifierClient, FederatedLoop
from flsv.aggregation import DivergenceWeighted
from flsv.sites import Packet, RemoteServer, SiteClient
from flsv.sites.flower import GridTransport, client_app, from_record, server_app, to_record
from flsv.sites.messages import BadReply, PermanentFailure, check_done
from helpers import refused

pytestmark = [pytest.mark.flower, pytest.mark.usefixtures("as_a_task")]


class GridWithSlowMessage:
    """A Grid of two SuperNodes. The first message to the second one has a reply when the server has looked for it
    ``patience`` times, or an error.
    """

    def __init__(self, patience, error=None):
        self.sent: list[Message] = []
        self._patience = patience
        self._error = error

    def address_messages(self, messages):
        for message in messages:
            # What Flower sets when it sends a message, and nobody else can.
            message.metadata.__dict__.update(
                _message_id=f"m{len(self.sent)}", _src_node_id=1, _run_id=1
            )
            self.sent.append(message)
        return messages

    def get_nodes(self):
        return [NodeInfo(node_id=1, name="Boston"), NodeInfo(node_id=2)]

    def push_messages(self, messages):
        addressed = self.address_messages(messages)
        return [message.metadata.message_id for message in addressed]

    def pull_messages(self, message_ids):
        replies = []
        for message_id in message_ids:
            message = self.sent[position_of_message(message_id)]
            if message is self._slow_message():
                self._patience -= 1
                if self._patience > 0:
                    continue
                if self._error:
                    error = Error(code=self._error, reason="gone")
                    replies.append(Message(error, reply_to=message))
                    continue
            round_index = from_record(message.content).plain["round"]
            packet = Packet("update", {"response_to_round": round_index})
            replies.append(Message(to_record(packet), reply_to=message))

        return replies

    def _slow_message(self):
        """Return the first message to the second node, or else the first one."""
        for message in self.sent:
            if message.metadata.dst_node_id == 2:
                return message
        return self.sent[0]


def position_of_message(message_id):
    return int(message_id.removeprefix("m"))


def make_training_packets(round_index):
    packet = Packet("train", {"round": round_index})
    return {1: packet, 2: packet}


def test_nodes_are_present_by_the_names_of_their_registration():
    transport = GridTransport(GridWithSlowMessage(patience=0))
    assert transport.present() == {1: "Boston", 2: ""}


def test_late_node_is_not_waited_for():
    grid = GridWithSlowMessage(patience=float("inf"))
    seconds = 0.2

    replies = dict(GridTransport(grid).exchange(make_training_packets(0), seconds))

    assert list(replies) == [1]
    assert replies[1].plain == {"response_to_round": 0}
    assert len(grid.sent) == 2
    for message in grid.sent:
        assert message.metadata.ttl <= seconds + 0.05


def test_replies_come_one_by_one():
    transport = GridTransport(GridWithSlowMessage(patience=5))
    first_node, _ = next(transport.exchange(make_training_packets(0), 5.0))
    assert first_node == 1


class GridThatSendsLate(GridWithSlowMessage):
    """Sends messages only after their time."""

    def push_messages(self, messages):
        time.sleep(0.3)
        return super().push_messages(messages)


def test_reply_in_time_is_read_although_the_server_itself_is_late():
    grid = GridThatSendsLate(patience=float("inf"))
    transport = GridTransport(grid)

    packets = make_training_packets(0)
    replies = dict(transport.exchange(packets, 0.2))

    assert list(replies) == [1]


@pytest.mark.parametrize(
    ("make_grid", "nodes_with_reply"),
    [(GridThatSendsLate, [1]), (GridWithSlowMessage, [1, 2])],
)
def test_message_that_has_expired_when_a_late_server_looks_is_no_reply(make_grid, nodes_with_reply):
    grid = make_grid(patience=1, error=ErrorCode.MESSAGE_UNAVAILABLE)
    transport = GridTransport(grid)

    replies = dict(transport.exchange(make_training_packets(0), 0.2))

    assert sorted(replies) == nodes_with_reply


@pytest.mark.parametrize(
    ("code", "is_permanent"),
    [(ErrorCode.NODE_UNAVAILABLE, False), (ErrorCode.LOAD_CLIENT_APP_EXCEPTION, True)],
)
def test_error_message_of_flower_is_reported_as_the_sites_fault(code, is_permanent):
    transport = GridTransport(GridWithSlowMessage(patience=1, error=code))

    replies = dict(transport.exchange(make_training_packets(0), 5.0))

    with pytest.raises(BadReply, match=rf"gone \(code {code}\)") as error:
        check_done(replies[2])
    assert isinstance(error.value, PermanentFailure) is is_permanent
    assert replies[1].plain == {"response_to_round": 0}


def make_context(run_id, **node_config):
    return Context(
        run_id=run_id,
        node_id=1,
        node_config=node_config,
        state=RecordDict(),
        run_config={},
    )


def greet(app, **node_config):
    """Return what a site says when it is greeted."""
    packet = Packet("handshake", {"client": 1, "clients": 3})
    greeting = Message(to_record(packet), 1, "query")
    grid = GridWithSlowMessage(patience=0)
    (message,) = grid.address_messages([greeting])
    context = make_context(run_id=1, **node_config)
    reply = app(message, context)
    return from_record(reply.content)


def test_client_app_reads_the_policy_of_its_nodes_configuration():
    app = client_app(SiteClient(ClassifierClient, lambda node: None, FederatedLoop))

    reply = greet(app, policy="/nowhere.toml")

    assert reply.kind == "failed"
    assert reply.plain["error"].startswith("its policy cannot be read: No such file")


def test_refused_run_contacts_no_site_and_records_its_failure(tmp_path):
    module = partial(ClassifierClient, "mlp", num_classes=10, input_shape=(1, 8, 8))
    loop = partial(FederatedLoop, DivergenceWeighted())
    server = RemoteServer(module, loop, ["Boston"], rounds=1, num_classes=10, folder=tmp_path)
    app = server_app(server)

    with refused("works with.*clients' class counts"):
        app(grid=None, context=make_context(run_id=7))

    status = json.loads((tmp_path / "status.json").read_text())
    assert status["status"] == "failed"
    assert status["why"].startswith("ConfigurationError")
    assert status["run"] == "7"
