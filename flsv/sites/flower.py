"""Federations on Flower (``pip install "flwr>=1.41,<2"``): ClientApps for the sites, and a ServerApp.

Tier: provisional.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping

from lightning_utilities.core.imports import RequirementCache

if not (_flower := RequirementCache("flwr>=1.41,<2")):
    raise ModuleNotFoundError(
        f"flsv.sites.flower needs Flower: pip install 'flwr>=1.41,<2'. {_flower}"
    )

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from flsv.sites import Packet, RemoteServer, SiteClient
from flsv.sites.deployment import reply_or_failure
from flsv.sites.messages import failed

__all__ = ["client_app", "server_app"]

#: Seconds between two checks for replies.
POLL_SECONDS = 0.25
#: ``{kind of packet: Flower's type of the message}``.
MESSAGE_TYPES = {"handshake": "query", "query": "query", "train": "train", "test": "evaluate"}

CODE_OF_EXPIRED = ErrorCode.MESSAGE_UNAVAILABLE
#: Codes of an app that cannot be loaded, raises an error or is not an app. It would fail again.
CODES_OF_FAILED_APP = (
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION,
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
    ErrorCode.INVALID_FAB,
)


def to_record(packet: Packet) -> RecordDict:
    """Convert a packet into a Flower record."""
    tensors = {name: tensor.contiguous() for name, tensor in packet.tensors.items()}
    plain = ConfigRecord({"kind": packet.kind, "plain": json.dumps(packet.plain)})
    return RecordDict({"plain": plain, "tensors": ArrayRecord(torch_state_dict=tensors)})


def from_record(record: RecordDict) -> Packet:
    """Convert a Flower record into a packet, or raise ValueError."""
    try:
        fields = record.config_records["plain"]
        plain = json.loads(str(fields["plain"]))
        tensors = record.array_records["tensors"].to_torch_state_dict()
        return Packet(str(fields["kind"]), plain, dict(tensors))
    except Exception as error:  # a parser may raise any error on bytes from another machine
        raise ValueError(
            f"its message is not a packet of flsv: {type(error).__name__}: {error!s:.200}"
        ) from error


class GridTransport:
    """Transport of packets to sites over a Flower Grid.

    A SuperNode replies to one message after the other. A message that it does not fetch in time expires.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def present(self) -> dict[int, str]:
        # `flwr supernode register KEY --name NAME` sets the names.
        return {node.node_id: node.name for node in self._grid.get_nodes()}

    def exchange(
        self, packets: Mapping[int, Packet], seconds: float
    ) -> Iterator[tuple[int, Packet]]:
        deadline = time.monotonic() + seconds
        message_ids = self._grid.push_messages(_messages(packets, seconds))
        node_by_message = dict(zip(message_ids, packets))  # without those that have replied
        is_last_look = False
        while node_by_message and not is_last_look:
            # Replies that came in time are read even if the server itself is late.
            is_last_look = time.monotonic() >= deadline
            for message in self._grid.pull_messages(list(node_by_message)):
                node = node_by_message.pop(message.metadata.reply_to_message_id)
                # If the server looks late, Flower reports that the message itself has expired. That is no reply.
                is_late = time.monotonic() >= deadline
                if is_late and message.has_error() and message.error.code == CODE_OF_EXPIRED:
                    continue
                yield node, _reply(message)
            if node_by_message and not is_last_look:
                time.sleep(POLL_SECONDS)


def _messages(packets: Mapping[int, Packet], seconds: float) -> list[Message]:
    messages = []
    for node, packet in packets.items():
        content = to_record(packet)
        message_type = MESSAGE_TYPES[packet.kind]
        messages.append(Message(content, node, message_type, ttl=seconds + POLL_SECONDS))
    return messages


def _reply(message: Message) -> Packet:
    if message.has_error():
        reason = f"{message.error.reason or 'it failed'} (code {message.error.code})"
        return failed(reason, is_permanent=message.error.code in CODES_OF_FAILED_APP)
    try:
        return from_record(message.content)
    except ValueError as error:
        return failed(str(error))


def client_app(client: SiteClient) -> ClientApp:
    """Make the Flower ClientApp of a :class:`flsv.sites.SiteClient`.

    Start a SuperNode with ``--node-config 'folder="/data/boston"'``. ``folder`` is the folder in which the site keeps
    its state between rounds (default: ``flsv-site`` in the working folder). ``policy`` in the node's configuration is
    the path of a file with the limits that the site's owner sets (:class:`flsv.sites.SitePolicy`), which no
    app can change. A site has the name under which the SuperLink's operator has registered its key: ``flwr supernode
    register KEY --name Boston``.

    Returns:
        The ClientApp.

    Example:
        >>> from flsv import ClassifierClient, FederatedLoop
        >>> def make_module():
        ...     return ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8))
        >>> app = client_app(SiteClient(make_module, lambda node: MyData(node["data"]), FederatedLoop))
    """
    app = ClientApp()

    def reply_to(message: Message, context: Context) -> Message:
        def respond() -> Packet:
            packet = from_record(message.content)
            sender = f"Flower run {message.metadata.run_id}"
            return client.respond(packet, context.node_config, sender)

        reply = reply_or_failure(respond)
        return Message(content=to_record(reply), reply_to=message)

    for register_handler in (app.train(), app.query(), app.evaluate()):
        register_handler(reply_to)
    return app


def server_app(server: RemoteServer) -> ServerApp:
    """Make the Flower ServerApp of a :class:`flsv.sites.RemoteServer`.

    ``flwr run`` exits with status 0 even if the run has failed: ``status.json`` in the run's folder says so.

    Returns:
        The ServerApp.
    """
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]  # flwr is untyped where it is not installed
    def main(grid: Grid, context: Context) -> None:
        server.serve(GridTransport(grid), str(context.run_id))

    return app
