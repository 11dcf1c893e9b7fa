"""Federations on Flower (``pip install flsv[flower]``): a Lightning project as a site, and the server of the rounds."""

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
    raise ModuleNotFoundError(f"flsv.engines.flower needs Flower: pip install 'flsv[flower]'. {_flower}")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flsv.engines.flower_contributions import Contributions
from flsv.engines.flower_resident import FOLDER
from flsv.engines.remote import Directory, Packet, RemoteData, RemoteFederation, Site, SitePolicy, agreement
from flsv.engines.remote.federation import check_deployment, run_status
from flsv.engines.remote.messages import Reply, failure_packet

__all__ = ["Contributions", "client_app", "server_app"]

_log = logging.getLogger(__name__)
#: The newest release that the tests have run on.
TESTED = "1.41"
#: Seconds between two looks for replies.
POLL = 0.25
#: Flower's types of messages by the kinds of packets.
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
    """Carries packets over a Flower Grid. A SuperNode answers one message after the other; what it has not fetched when
    the time is over it no longer gets.

    Args:
        grid: of the ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def present(self) -> dict[int, str]:
        """Nodes by the names of their registration: ``flwr supernode register KEY --name NAME``."""
        return {node.node_id: node.name for node in self._grid.get_nodes()}

    def exchange(self, packets: Mapping[int, Packet], seconds: float) -> Iterator[tuple[int, Reply]]:
        """See :class:`flsv.engines.remote.Transport`."""
        deadline, messages = time.monotonic() + seconds, []
        for node, packet in packets.items():
            timed = Packet(packet.kind, {**packet.plain, "seconds": seconds}, packet.tensors)
            messages.append(Message(to_record(timed), node, MESSAGE_TYPES[packet.kind], ttl=seconds + POLL))
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
    """A Flower ClientApp around a LightningModule and a data module.

    A SuperNode is started with ``--node-config 'folder="/data/boston"'``, where the site keeps what it needs between
    rounds (default: ``flsv-site`` in its working folder); ``policy`` is the path of a file in which its owner says what
    is allowed (:class:`flsv.engines.remote.SitePolicy`), which no app can set; whatever else is there is for
    ``make_datamodule``. The site's name is that under which the SuperLink's operator has registered its key: ``flwr
    supernode register KEY --name Boston``.

    Args:
        make_module: makes the LightningModule, the same as the server's.
        make_datamodule: makes the site's own data, from the node's configuration.
        make_loop: makes the :class:`flsv.FederatedLoop` that says what happens at clients, the same as the server's.
        trainer: arguments of the Trainer that trains here, such as ``{"accelerator": "gpu"}``.
        questions: functions that the server may ask for beside flsv's own, as ``"package.module:function"``.

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
        # At every message: its owner may have written another one while this process lives.
        policy = SitePolicy.read(Path(str(node["policy"]))) if "policy" in node else SitePolicy()
        if "site" not in made:
            folder = Path(str(node.get("folder", FOLDER)))
            made["site"] = Site(make_module, partial(make_datamodule, node), make_loop, folder, trainer, questions)
        site: Site = made["site"]
        site.policy = policy
        return site.answer(from_record(message.content), f"Flower run {message.metadata.run_id}")

    def reply(message: Message, context: Context) -> Message:
        try:
            packet = answer(message, context)
        except Exception as error:  # Flower would send its text, which may be of the samples
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
) -> ServerApp:
    """A Flower ServerApp that runs a :class:`flsv.FederatedLoop`'s rounds on sites.

    Metrics, aggregation, personalization, TensorBoard, ``contributions.csv`` and checkpoints are the loop's, in
    ``folder``. Where that holds a checkpoint, the run goes on from it: start a killed server again.

    A site that is away, late, or sends garbage or a model that is not finite is named and left out of the round. Its
    contributions stay what they were.

    How a run stands, for which sites it waits, and at its end who has missed something, is in ``status.json`` of the
    folder: ``flwr run`` ends with status 0 whatever becomes of the run.

    Args:
        make_module: makes the LightningModule.
        make_loop: makes the loop.
        sites: the names of all sites, under which their keys are registered; the first is client 0.
        rounds: how many.
        num_classes: M, for metrics per class; the server does not see labels.
        class_names: their names.
        datamodule: makes the server's own data: its validation loader is what coalition games are played on.
        folder: where the run writes.
        trainer: arguments of the server's Trainer, such as ``{"callbacks": [...]}``.
        timeout: seconds that a site has for its work.
        wait: seconds to wait for all sites before the first round.

    Raises:
        ConfigurationError: before any site is asked, a metric or strategy that needs what a deployment does not give;
            before the first round, a site with another version, module or settings.
    """
    if not RequirementCache(f"flwr<={TESTED}.99"):
        warnings.warn(f"flsv is tested with Flower up to {TESTED}, and this is a newer release.", stacklevel=2)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        with run_status(where, str(context.run_id)) as say:
            serve(GridTransport(grid), where, say)

    def serve(transport: GridTransport, where: Path, say: Callable[[str | None], None]) -> None:
        module, loop = make_module(), make_loop()
        check_deployment(loop.config, loop.contribution_metrics.fields, loop.contribution_metrics.evaluating)
        book, last = where / "sites.json", where / "checkpoints" / "last.ckpt"
        if not last.is_file():
            book.unlink(missing_ok=True)  # of another run
        directory = Directory(transport, sites, agreement(module, loop), book, timeout, wait, say)
        directory.gather()
        own = None if datamodule is None else datamodule()
        data = RemoteData(sites, [directory.sizes[i] for i in range(len(sites))], num_classes, class_names, own)
        if own is None:  # Lightning would wonder, in every round
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
        saving = ModelCheckpoint(where / "checkpoints", save_last=True)
        loop = loop.replace(engine=partial(RemoteFederation, directory))
        # One folder for all starts of a run, so that its logs go on, too.
        options = {"logger": TensorBoardLogger(where, name="", version=""), **(trainer or {})}
        options["callbacks"] = [*options.get("callbacks", []), saving, loop]
        options = {"max_epochs": rounds, "num_sanity_val_steps": 0, **options}
        L.Trainer(**options).fit(module, data, ckpt_path=last if last.is_file() else None)
        missed = [f"{sites[each['client']]} {each['what']} ({each['times']} times)" for each in loop.state.incidents]
        say("; ".join(missed) or None)

    return app
