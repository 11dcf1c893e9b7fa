"""Packets as Flower's records and back, and a Grid as a transport."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flsv.engines.remote import Packet

#: Seconds between two looks for replies.
POLL = 1.0
#: Flower's types of messages for what servers say.
MESSAGE_TYPES = {"hello": "query", "ask": "query", "train": "train", "test": "evaluate"}


def to_record(packet: Packet) -> RecordDict:
    """A packet as what Flower carries."""
    tensors = {name: tensor.contiguous() for name, tensor in packet.tensors.items()}
    plain = ConfigRecord({"kind": packet.kind, "plain": json.dumps(packet.plain)})
    return RecordDict({"plain": plain, "tensors": ArrayRecord(torch_state_dict=tensors)})


def from_record(record: RecordDict) -> Packet:
    """A packet from a Flower record.

    Raises:
        ValueError: it is none.
    """
    try:
        plain, tensors = record.config_records["plain"], record.array_records["tensors"]
        return Packet(str(plain["kind"]), json.loads(str(plain["plain"])), dict(tensors.to_torch_state_dict()))
    except Exception as error:  # whatever foreign bytes lead to in a parser
        raise ValueError(f"this is no packet: {type(error).__name__}: {error!s:.200}") from error


class GridTransport:
    """Carries packets over a Flower Grid.

    A SuperNode answers one message after the other. So a site that is still at an earlier one is sent nothing that
    would wait behind it, but what it is asked as soon as it has answered, with the time that is left.

    Args:
        grid: of the ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._owed: dict[str, tuple[int, str]] = {}  # messages that nobody waits for any more: whose, and what about

    def present(self) -> Sequence[int]:
        return list(self._grid.get_node_ids())

    def exchange(self, packets: Mapping[int, Packet], timeout: float) -> dict[int, Packet | str]:
        deadline = time.monotonic() + timeout
        waiting, asked = dict(packets), dict[str, tuple[int, str]]()
        replies: dict[int, Packet | str] = {}
        while True:
            for message_id, reply in self._pull([*self._owed, *asked]):
                if self._owed.pop(message_id, None) is None:
                    replies[asked.pop(message_id)[0]] = _said(reply)
            at = dict(self._owed.values())
            left = deadline - time.monotonic()
            if left <= 0 or not (asked or waiting):
                break
            asked |= self._push({node: packet for node, packet in waiting.items() if node not in at}, left)
            waiting = {node: packet for node, packet in waiting.items() if node in at}
            time.sleep(min(POLL, left))
        self._owed |= asked
        return replies | {node: f"it is still at {at[node]}" for node in waiting}

    def _push(self, packets: Mapping[int, Packet], seconds: float) -> dict[str, tuple[int, str]]:
        """Send; message to whose it is, and what about."""
        messages = []
        for node, packet in packets.items():
            content = to_record(Packet(packet.kind, {**packet.plain, "seconds": seconds}, packet.tensors))
            # What nobody has fetched by then is of no use; what is being worked on ends itself, or is late for good.
            messages.append(Message(content, node, MESSAGE_TYPES[packet.kind], ttl=2 * seconds + POLL))
        about = [(node, _about(packet)) for node, packet in packets.items()]
        sent = self._grid.push_messages(messages) if messages else ()
        return {message_id: told for message_id, told in zip(sent, about) if message_id}

    def _pull(self, message_ids: Sequence[str]) -> list[tuple[str, Message]]:
        found = self._grid.pull_messages(message_ids) if message_ids else ()
        return [(reply.metadata.reply_to_message_id, reply) for reply in found]


def _said(reply: Message) -> Packet | str:
    if reply.has_error():
        return f"{reply.error.reason or 'it failed'} (code {reply.error.code})"
    try:
        return from_record(reply.content)
    except ValueError as error:
        return str(error)


def _about(packet: Packet) -> str:
    return f"round {packet.plain['round']}" if "round" in packet.plain else f"its {packet.kind!r}"
