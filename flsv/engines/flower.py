"""Federations on Flower (``pip install "flwr>=1.41,<2"``): ClientApps for the sites, and a ServerApp.

Tier: provisional.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_utilities.core.imports import RequirementCache

if not (_flower := RequirementCache("flwr>=1.41,<2")):
    raise ModuleNotFoundError(
        f"flsv.engines.flower needs Flower: pip install 'flwr>=1.41,<2'. {_flower}"
    )

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flsv.engines.flower_resident import FOLDER
from flsv.engines.remote import (
    Directory,
    Packet,
    RemoteData,
    RemoteFederation,
    Site,
    SitePolicy,
    agreement,
)
from flsv.engines.remote.federation import check_deployment, run_status
from flsv.engines.remote.messages import Reply, failure_packet
from flsv.engines.remote.transport import ENCODER_FILE, MOST_SAMPLES
from flsv.outside.flower import Contributions

__all__ = ["Contributions", "client_app", "server_app"]

_log = logging.getLogger(__name__)
#: Seconds between two checks for replies.
POLL = 0.25
#: ``{kind of packet: Flower's type of the message}``.
MESSAGE_TYPES = {
    "hello": "query",
    "agree": "query",
    "ask": "query",
    "train": "train",
    "test": "evaluate",
}


def to_record(packet: Packet) -> RecordDict:
    """Convert a packet into a Flower record."""
    tensors = {name: tensor.contiguous() for name, tensor in packet.tensors.items()}
    plain = ConfigRecord({"kind": packet.kind, "plain": json.dumps(packet.plain)})
    return RecordDict({"plain": plain, "tensors": ArrayRecord(torch_state_dict=tensors)})


def from_record(record: RecordDict) -> Packet:
    """Convert a Flower record into a packet, or raise ValueError."""
    try:
        plain, tensors = record.config_records["plain"], record.array_records["tensors"]
        return Packet(
            str(plain["kind"]), json.loads(str(plain["plain"])), dict(tensors.to_torch_state_dict())
        )
    except Exception as error:  # foreign bytes may raise any error in a parser
        raise ValueError(f"this is no packet: {type(error).__name__}: {error!s:.200}") from error


class GridTransport:
    """Transport of packets to sites over a Flower Grid.

    A SuperNode answers one message after the other. A message that it does not fetch in time expires.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def present(self) -> dict[int, str]:
        # `flwr supernode register KEY --name NAME` sets the names.
        return {node.node_id: node.name for node in self._grid.get_nodes()}

    def exchange(
        self, packets: Mapping[int, Packet], seconds: float
    ) -> Iterator[tuple[int, Reply]]:
        deadline, messages = time.monotonic() + seconds, []
        for node, packet in packets.items():
            timed = Packet(packet.kind, {**packet.plain, "seconds": seconds}, packet.tensors)
            messages.append(
                Message(to_record(timed), node, MESSAGE_TYPES[packet.kind], ttl=seconds + POLL)
            )
        waiting = dict(zip(self._grid.push_messages(messages), packets))
        while waiting and time.monotonic() < deadline:
            for message in self._grid.pull_messages(list(waiting)):
                yield waiting.pop(message.metadata.reply_to_message_id), _reply(message)
            time.sleep(POLL if waiting else 0)


def _reply(message: Message) -> Reply:
    if message.has_error():
        return f"{message.error.reason or 'it failed'} (code {message.error.code})"
    try:
        return from_record(message.content)
    except ValueError as error:
        return str(error)


def client_app(
    make_module: Callable[[], L.LightningModule],
    make_datamodule: Callable[[Mapping[str, Any]], L.LightningDataModule],
    make_loop: Callable[[], Any],
    *,
    trainer: Mapping[str, Any] | None = None,
    questions: Sequence[str] = (),
) -> ClientApp:
    """Make a Flower ClientApp from a LightningModule and a data module.

    Start a SuperNode with ``--node-config 'folder="/data/boston"'``. ``folder`` is the folder in which the site keeps
    its state between rounds (default: ``flsv-site`` in the working folder). ``policy`` in the node's configuration is
    the path of a file with the limits that the site's owner sets (:class:`flsv.engines.remote.SitePolicy`), which no
    app can change. All other entries of the configuration are for ``make_datamodule``. A site has the name under which
    the SuperLink's operator has registered its key: ``flwr supernode register KEY --name Boston``.

    Args:
        make_module: a function that makes the LightningModule, the same as the server's module.
        make_datamodule: a function that makes the site's own data module from the node's configuration.
        make_loop: a function that makes the :class:`flsv.FederatedLoop` that defines the clients' training, the same as
            the server's loop.
        trainer: arguments of the site's Trainer, such as ``{"accelerator": "gpu"}``.
        questions: functions, beside flsv's own, that the server may let the site compute on its data, as
            ``"package.module:function"``.

    Returns:
        The ClientApp.

    Example:
        >>> from flsv import ClassifierClient, FederatedLoop
        >>> def make_module():
        ...     return ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8))
        >>> app = client_app(make_module, lambda node: MyData(node["data"]), FederatedLoop)
    """
    app = ClientApp()
    made: dict[str, Any] = {}

    def answer(message: Message, context: Context) -> Packet:
        node = context.node_config
        # The policy is read at every message: the owner may change the file while this process runs.
        policy = SitePolicy.read(Path(str(node["policy"]))) if "policy" in node else SitePolicy()
        if "site" not in made:
            folder = Path(str(node.get("folder", FOLDER)))
            made["site"] = Site(
                make_module, partial(make_datamodule, node), make_loop, folder, trainer, questions
            )
        site: Site = made["site"]
        site.policy = policy
        return site.answer(from_record(message.content), f"Flower run {message.metadata.run_id}")

    def reply(message: Message, context: Context) -> Message:
        try:
            packet = answer(message, context)
        except Exception as error:  # Flower would send the error's text, which may contain samples
            _log.exception("a message could not be answered")
            packet = failure_packet(error)
        return Message(content=to_record(packet), reply_to=message)

    for register in (app.train(), app.query(), app.evaluate()):
        register(reply)
    return app


def server_app(
    make_module: Callable[[], L.LightningModule],
    make_loop: Callable[[], Any],
    sites: Sequence[str],
    *,
    rounds: int,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    datamodule: Callable[[], L.LightningDataModule] | None = None,
    folder: str | Path = "flsv-runs",
    trainer: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    wait: float = 600.0,
    max_samples: int = MOST_SAMPLES,
) -> ServerApp:
    """Make a Flower ServerApp that runs the rounds of a :class:`flsv.FederatedLoop` with remote sites as clients.

    The loop computes metrics, aggregation and personalization, and writes TensorBoard logs, ``contributions.csv`` and
    checkpoints into ``folder``. If the folder holds a checkpoint, the run continues from it. After a crash, start the
    server again.

    A site that is away or late, or whose reply is not a valid and finite model, is left out of the round. The log names
    it, and its contributions keep their values.

    The file ``status.json`` in the folder reports the run's state, the sites that it waits for and, at the end, the
    sites' faults. ``flwr run`` exits with status 0 even if the run has failed.

    Args:
        make_module: a function that makes the LightningModule.
        make_loop: a function that makes the loop.
        sites: the names of all sites, as their keys are registered. The first site is client 0.
        rounds: the number of rounds.
        num_classes: the number of classes, for metrics per class. The server does not see labels. Sites with tables
            tell their classes.
        class_names: the names of the classes.
        datamodule: a function that makes the server's own data module, on whose validation data coalitions' models are
            evaluated. None if the server has no data. If the sites have tables, a FederatedDataModule with the server's
            tables is encoded as they are.
        folder: the run's folder.
        trainer: arguments of the server's Trainer, such as ``{"callbacks": [...]}``.
        timeout: the time in seconds that a site has for each message's work.
        wait: the time in seconds to wait for all sites before the first round.
        max_samples: the largest number of samples that a site may announce in a split. A site that announces more is
            refused, since a model's weight in the average is its site's number of samples, which nobody else can count.

    Returns:
        The ServerApp.

    Raises:
        ConfigurationError: a metric or strategy cannot work with remote sites, which is checked before any site is
            contacted. Or a site has another version, module or settings, or announces more than ``max_samples``, which
            is checked before the first round.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        with run_status(where, str(context.run_id)) as say:
            serve(GridTransport(grid), where, say)

    def serve(transport: GridTransport, where: Path, say: Callable[[str | None], None]) -> None:
        module = make_module()
        loop = make_loop()
        metrics = loop.contribution_metrics
        check_deployment(loop.config, metrics.fields, metrics.evaluating)
        book = where / "sites.json"
        last_checkpoint = where / "checkpoints" / "last.ckpt"
        is_resumed = last_checkpoint.is_file()
        if not is_resumed:
            # They belong to another run.
            book.unlink(missing_ok=True)
            book.with_name(ENCODER_FILE).unlink(missing_ok=True)
        directory = Directory(
            transport,
            sites,
            agreement(module, loop),
            book,
            timeout=timeout,
            wait=wait,
            say=say,
            max_samples=max_samples,
        )
        directory.gather()
        server_data = None if datamodule is None else datamodule()
        sizes = [directory.sizes[site] for site in range(len(sites))]
        data = RemoteData(
            sites,
            sizes,
            num_classes,
            class_names=class_names,
            own=server_data,
        )
        data.take_encoder(directory.encoder, directory.encoder_hash)
        if server_data is None:  # Lightning would warn of it in every round
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")

        saving = ModelCheckpoint(where / "checkpoints", save_last=True)
        loop = loop.replace(engine=partial(RemoteFederation, directory))
        options: dict[str, Any] = {
            "max_epochs": rounds,
            "num_sanity_val_steps": 0,
            # All starts of a run log into one folder, so that the logs continue, too.
            "logger": TensorBoardLogger(where, name="", version=""),
            **(trainer or {}),
        }
        options["callbacks"] = [*options.get("callbacks", []), saving, loop]
        checkpoint = last_checkpoint if is_resumed else None
        L.Trainer(**options).fit(module, data, ckpt_path=checkpoint)
        missed = []
        for incident in loop.state.incidents:
            site = sites[incident["client"]]
            missed.append(f"{site} {incident['what']} ({incident['times']} times)")
        say("; ".join(missed) or None)

    return app
