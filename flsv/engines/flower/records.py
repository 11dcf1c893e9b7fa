"""Packets as Flower's records and back, and a Grid as a transport."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flsv.engines.remote import Packet

#: Flower's types of messages for what servers say.
MESSAGE_TYPES = {"hello": "query", "ask": "query", "train": "train", "test": "evaluate"}


def to_record(packet: Packet) -> RecordDict:
    """A packet as what Flower carries."""
    tensors = {name: tensor.contiguous() for name, tensor in packet.tensors.items()}
    plain = ConfigRecord({"kind": packet.kind, "plain": json.dumps(packet.plain)})
    return RecordDict({"plain": plain, "tensors": ArrayRecord(torch_state_dict=tensors)})


def from_record(record: RecordDict) -> Packet:
    """What Flower carried, as a packet.

    Raises:
        ValueError: it is none.
    """
    try:
        plain, tensors = record.config_records["plain"], record.array_records["tensors"]
        return Packet(str(plain["kind"]), json.loads(str(plain["plain"])), dict(tensors.to_torch_state_dict()))
    except (KeyError, TypeError, ValueError, EOFError, OSError) as error:
        raise ValueError(f"this is no packet: {type(error).__name__}: {error}") from error


class GridTransport:
    """Carries packets over a Flower Grid.

    Args:
        grid: of the ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def present(self) -> Sequence[int]:
        return list(self._grid.get_node_ids())

    def exchange(self, packets: Mapping[int, Packet], timeout: float) -> dict[int, Packet | str]:
        messages = [
            Message(content=to_record(packet), dst_node_id=node, message_type=MESSAGE_TYPES[packet.kind])
            for node, packet in packets.items()
        ]
        replies: dict[int, Packet | str] = {}
        for reply in self._grid.send_and_receive(messages, timeout=timeout) if messages else ():
            node = reply.metadata.src_node_id
            if reply.has_error():
                replies[node] = f"{reply.error.reason or 'it failed'} (code {reply.error.code})"
                continue
            try:
                replies[node] = from_record(reply.content)
            except ValueError as error:
                replies[node] = str(error)
        return replies
