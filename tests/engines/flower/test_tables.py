"""Tables at sites of Flower, without processes: they agree on an encoder, and train as in one process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs flwr: make flower")

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo

from flsv.engines.engine import shared_space
from flsv.engines.flower import client_app, server_app
from helpers.hospitals import fit_in_one_process, make_data, make_hospital_table, make_module
from helpers.sites import NAMES, make_shapfed_loop

pytestmark = [pytest.mark.flower, pytest.mark.usefixtures("as_a_task")]
ROUNDS = 2


class Grid:
    """SuperNodes whose apps answer as soon as a message is sent."""

    def __init__(self, folder: Path) -> None:
        self.apps: dict[int, ClientApp] = {}
        self.contexts: dict[int, Context] = {}
        self.replies: dict[str, Message] = {}
        for number, name in enumerate(NAMES, 1):
            self.apps[number] = client_app(make_module, site_table, make_shapfed_loop)
            node_config: dict[str, Any] = {"folder": str(folder / name), "name": name}
            self.contexts[number] = Context(
                run_id=1,
                node_id=number,
                node_config=node_config,
                state=RecordDict(),
                run_config={},
            )

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=number, name=name) for number, name in enumerate(NAMES, 1)]

    def push_messages(self, messages: Sequence[Message]) -> list[str]:
        message_ids = []
        for message in messages:
            message_id = f"m{len(self.replies)}"
            # What Flower sets when it sends a message, and nobody else can.
            message.metadata.__dict__.update(_message_id=message_id, _src_node_id=1, _run_id=1)
            node = message.metadata.dst_node_id
            reply = self.apps[node](message, self.contexts[node])
            self.replies[message_id] = reply
            message_ids.append(message_id)

        return message_ids

    def pull_messages(self, message_ids: Sequence[str]) -> list[Message]:
        return [self.replies[message_id] for message_id in message_ids]


def site_table(node: Any) -> Any:
    return make_data(make_hospital_table(node["name"]))


def server_tables() -> Any:
    val = make_hospital_table("val")
    return make_data(val, val=val)


def test_tables_on_flower_give_the_weights_of_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    app = server_app(
        make_module,
        make_shapfed_loop,
        NAMES,
        rounds=ROUNDS,
        datamodule=server_tables,
        folder=folder,
        trainer={"accelerator": "cpu", "enable_progress_bar": False},
        wait=5,
    )
    context = Context(run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config={})

    app(grid=Grid(tmp_path), context=context)  # type: ignore[arg-type]

    expected_loop, data = fit_in_one_process(tmp_path / "one", ROUNDS)
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)
    trained_module = make_module()
    trained_module.load_state_dict(checkpoint["state_dict"])
    space = shared_space(trained_module, expected_loop.config)
    trained_weights = space.read(trained_module)

    assert torch.equal(trained_weights, expected_loop.state.model())

    encoder = checkpoint["RemoteData"]["encoder"]
    assert encoder["classes"] == list(data.class_names) == ["yes", "no"]
