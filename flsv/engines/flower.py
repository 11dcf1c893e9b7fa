"""Federations on Flower (``pip install flsv[flower]``): a Lightning project as a site, and the server of the rounds."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning_utilities.core.imports import RequirementCache

if not (_flower := RequirementCache("flwr>=1.41")):
    raise ModuleNotFoundError(f"flsv.engines.flower needs Flower: pip install 'flsv[flower]'. {_flower}")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flsv.engines.flower_resident import TOOK
from flsv.engines.remote import Directory, Packet, RemoteData, RemoteFederation, SecureSums, Site, SitePolicy, agreement
from flsv.engines.remote.federation import PLENTY, rehearse, told_status
from flsv.engines.remote.messages import failure_packet
from flsv.engines.remote.prometheus import PrometheusFile
from flsv.engines.remote.site import Settings
from flsv.engines.remote.waiting import Wait, Waiting
from flsv.errors import ConfigurationError

__all__ = ["client_app", "server_app"]

#: Seconds between two looks for replies.
POLL = 0.25
#: Flower's types of messages for what servers say.
MESSAGE_TYPES = {"hello": "query", "ask": "query", "train": "train", "test": "evaluate"}
MESSAGE_TYPES |= dict.fromkeys(("keys", "shares", "unmask"), "query")


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


@dataclass(frozen=True)
class _Sent:
    """A message that has not been answered: to whom, what, and when."""

    node: int
    packet: Packet
    at: float

    @property
    def about(self) -> str:
        plain = self.packet.plain
        return f"round {plain['round']}" if "round" in plain else f"its {self.packet.kind!r}"


class GridTransport:
    """Carries packets over a Flower Grid.

    A SuperNode answers one message after the other. So a site that is still at an earlier one is sent nothing that
    would wait behind it, but what it is asked as soon as it has answered, with the time that is left; or, where a late
    reply is of use, nothing: its answer to the earlier message is its answer.

    Args:
        grid: of the ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._owed: dict[str, _Sent] = {}  # messages that nobody waits for any more
        self._late: dict[int, Packet] = {}  # replies to such messages, by node, for the next packet of their kind

    def present(self) -> Sequence[int]:
        return list(self._grid.get_node_ids())

    def exchange(self, packets: Mapping[int, Packet], wait: Wait) -> dict[int, Packet | str]:
        waiting, asked = dict(packets), dict[str, _Sent]()
        replies: dict[int, Packet | str] = {}
        while True:
            for message_id, reply in self._pull([*self._owed, *asked]):
                if (sent := asked.pop(message_id, None)) is not None:
                    replies[sent.node] = _said(reply, sent)
                else:
                    self._came_late(self._owed.pop(message_id), reply, wait)
            for node, packet in dict(waiting).items():
                late = self._late.get(node)
                if late is not None and late.asked is not None and late.asked.kind == packet.kind:
                    replies[node] = self._late.pop(node)
                    del waiting[node]
            at = {sent.node: sent.about for sent in self._owed.values()}
            if wait.left > 0:
                asked |= self._push({node: packet for node, packet in waiting.items() if node not in at}, wait)
                waiting = {node: packet for node, packet in waiting.items() if node in at}
            if wait.over(replies, [*waiting, *(sent.node for sent in asked.values())]):
                break
            time.sleep(max(0.0, min(POLL, wait.left)))
        self._owed |= asked
        return replies | {node: f"it is still at {at[node]}" for node in waiting if node in at}

    def _came_late(self, sent: _Sent, reply: Message, wait: Wait) -> None:
        said = _said(reply, sent)
        if wait.came_late(sent.node, said, sent.about, time.monotonic() - sent.at) and isinstance(said, Packet):
            self._late[sent.node] = replace(said, asked=sent.packet)

    def _push(self, packets: Mapping[int, Packet], wait: Wait) -> dict[str, _Sent]:
        """Send; message to whose it is, and what about."""
        seconds = min(wait.seconds, wait.left)
        messages = []
        for node, packet in packets.items():
            content = to_record(Packet(packet.kind, {**packet.plain, "seconds": seconds}, packet.tensors))
            # What nobody has fetched by then is of no use; what is being worked on ends itself, or is late for good.
            messages.append(Message(content, node, MESSAGE_TYPES[packet.kind], ttl=2 * wait.limit + POLL))
        sent = [_Sent(node, packet, time.monotonic()) for node, packet in packets.items()]
        ids = self._grid.push_messages(messages) if messages else ()
        return {message_id: each for message_id, each in zip(ids, sent) if message_id}

    def _pull(self, message_ids: Sequence[str]) -> list[tuple[str, Message]]:
        found = self._grid.pull_messages(message_ids) if message_ids else ()
        return [(reply.metadata.reply_to_message_id, reply) for reply in found]


def _said(reply: Message, sent: _Sent) -> Packet | str:
    if reply.has_error():
        return f"{reply.error.reason or 'it failed'} (code {reply.error.code})"
    try:
        packet = from_record(reply.content)
    except ValueError as error:
        return str(error)
    return replace(packet, took=_took(reply.content, time.monotonic() - sent.at))


def _took(content: RecordDict, total: float) -> dict[str, float]:
    """What the seconds until a reply went for: what its site says, where that can be, and the rest."""
    said = content.config_records.get(TOOK, {})
    parts = {name: said.get(name) for name in ("start", "import", "work")}
    told = {name: float(part) for name, part in parts.items() if isinstance(part, float) and 0 <= part <= total}
    if len(told) < len(parts) or sum(told.values()) > total:
        return {"in all": total}
    return {**told, "wire": total - sum(told.values())}


_log = logging.getLogger(__name__)


def client_app(
    make_module: Callable[[], L.LightningModule],
    make_datamodule: Callable[[Mapping[str, Any]], L.LightningDataModule],
    make_loop: Callable[[], Settings],
    *,
    trainer: Mapping[str, Any] | None = None,
    questions: Sequence[str] = (),
    mods: Sequence[Callable[..., Any]] = (),
    secure: SecureSums | bool = False,
) -> ClientApp:
    """A Flower ClientApp around a LightningModule and a data module.

    A SuperNode is started with ``--node-config 'site="Boston" folder="/data/boston"'``: ``site`` is its name in the
    federation, ``folder`` where it keeps what it needs between rounds (default: ``flsv-sites`` in its working folder);
    ``policy`` the path of a file in which its owner says what is allowed (:class:`flsv.engines.remote.SitePolicy`),
    which no app can set; whatever else is there is for ``make_datamodule``.

    Args:
        make_module: makes the LightningModule, the same as the server's.
        make_datamodule: makes the site's own data, from the node's configuration.
        make_loop: makes the :class:`flsv.FederatedLoop` that says what happens at clients, the same as the server's.
        trainer: arguments of the Trainer that trains here, such as ``{"accelerator": "gpu"}``.
        questions: functions that the server may ask for beside flsv's own, as ``"package.module:function"``.
        mods: Flower's mods. Not those of secure aggregation.
        secure: send sums only: True, or :class:`flsv.engines.remote.SecureSums`, the same as the server.

    Raises:
        ConfigurationError: a mod of secure aggregation, in whose place ``secure`` is.

    Example:
        >>> from flsv import ClassifierClient, FederatedLoop
        >>> def make_module():
        ...     return ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8))
        >>> app = client_app(make_module, lambda node: MyData(node["data"]), FederatedLoop)
    """
    hiding = [name for mod in mods if (name := getattr(mod, "__name__", "")) in ("secagg_mod", "secaggplus_mod")]
    if hiding:
        raise ConfigurationError(
            f"{hiding[0]} lets only sums of updates reach the server, in messages of its own that flsv's server does "
            "not send. Leave it out, and take client_app(secure=True) and server_app(secure=True)."
        )
    app = ClientApp(mods=[_without_texts, *mods])
    sites: dict[str, tuple[SitePolicy | None, Site]] = {}

    def site(node_config: Mapping[str, Any]) -> Site:
        name = site_name(node_config)
        # At every message: its owner may have written another one while this process lives.
        policy = SitePolicy.read(Path(str(node_config["policy"]))) if "policy" in node_config else None
        if name not in sites or sites[name][0] != policy:
            folder = Path(str(node_config.get("folder", "flsv-sites")))
            data = make_datamodule(node_config)
            made = Site(
                name, make_module, lambda: data, make_loop, folder, trainer, questions, policy=policy, secure=secure
            )
            sites[name] = policy, made
        return sites[name][1]

    def reply(message: Message, context: Context) -> Message:
        who = f"Flower run {message.metadata.run_id}"
        return Message(
            content=to_record(site(context.node_config).answer(from_record(message.content), who)), reply_to=message
        )

    for register in (app.train(), app.query(), app.evaluate()):
        register(reply)
    return app


def _without_texts(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """A mod: of an error, also of another mod, Flower would send what it says, which may be of the samples."""
    try:
        return call_next(message, context)
    except Exception as error:
        name = str(context.node_config.get("site", ""))
        _log.exception("site %r could not answer", name)
        return Message(content=to_record(failure_packet(error, name)), reply_to=message)


def site_name(node_config: Mapping[str, Any]) -> str:
    """The name that the SuperNode was started with.

    Raises:
        ConfigurationError: it was told nothing.
    """
    name = node_config.get("site")
    if not isinstance(name, str):
        raise ConfigurationError(
            f"the SuperNode's configuration names no site, it is {dict(node_config)}. Start it with "
            "--node-config 'site=\"Boston\"'."
        )
    return name


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
    waiting: Waiting | None = None,
    secure: SecureSums | bool = False,
) -> ServerApp:
    """A Flower ServerApp that runs a :class:`flsv.FederatedLoop`'s rounds on sites.

    Metrics, aggregation, personalisation, TensorBoard, ``contributions.csv`` and checkpoints are the loop's, in
    ``folder``. Where that holds a checkpoint, the run goes on from it: start a killed server again.

    A site that is away, late, or sends garbage or a model that is not finite is named and left out of the round. Its
    contributions stay what they were.

    How a run stands is in ``status.json`` of the folder: ``flwr run`` ends with status 0 whatever becomes of the run;
    and after every round in ``metrics.prom``, for Prometheus' node exporter.

    Args:
        make_module: makes the LightningModule.
        make_loop: makes the loop.
        sites: the names of all sites; the first is client 0.
        rounds: how many.
        num_classes: M, for metrics per class; the server does not see labels.
        class_names: their names.
        datamodule: makes the server's own data: its validation loader is what coalition games are played on.
        folder: where the run writes.
        trainer: arguments of the server's Trainer, such as ``{"callbacks": [...]}``.
        timeout: seconds that a site has for its work; what its first contact took comes on top, for the start of its
            process.
        wait: seconds to wait for all sites before the first round.
        waiting: with whose answers a round ends, :class:`flsv.engines.remote.Waiting`. None: with those of all.
        secure: let sites send sums only: True, or :class:`flsv.engines.remote.SecureSums`, the same as the sites.

    Raises:
        ConfigurationError: before any site is asked, a metric or strategy that needs what a deployment does not give;
            before the first round, a site with another version, module or settings.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        with told_status(where):
            serve(GridTransport(grid), where)

    def serve(transport: GridTransport, where: Path) -> None:
        module, loop = make_module(), make_loop()
        book, last = where / "sites.json", where / "checkpoints" / "last.ckpt"
        if not last.is_file():
            book.unlink(missing_ok=True)  # of another run
        directory = Directory(transport, sites, agreement(module, loop, secure), book, timeout, wait, waiting)
        own = None if datamodule is None else datamodule()
        options = {"max_epochs": rounds, "num_sanity_val_steps": 0, **(trainer or {})}
        counted = SecureSums.of(secure) is None
        willing = RemoteData(sites, [PLENTY] * len(sites), num_classes, class_names, own, counted)
        rehearse(make_module(), make_loop(), directory, willing, options, secure)
        directory.gather()
        data = RemoteData(
            sites, [directory.sizes[i] for i in range(len(sites))], num_classes, class_names, own, counted
        )
        saving = ModelCheckpoint(where / "checkpoints", save_last=True)
        engine = partial(RemoteFederation, directory, secure=secure)
        loop = loop.replace(engine=engine)
        callbacks = [*options.pop("callbacks", []), saving, PrometheusFile(where / "metrics.prom", loop), loop]
        # One folder for all starts of a run, so that its logs go on, too.
        logger = options.pop("logger", TensorBoardLogger(where, name="", version=""))
        L.Trainer(**{**options, "logger": logger, "callbacks": callbacks}).fit(
            module, data, ckpt_path=last if last.is_file() else None
        )

    return app
