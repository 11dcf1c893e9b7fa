"""RemoteServer and SiteClient: a deployment's two sides, on any network that carries packets."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from flsv.sites.federation import RemoteFederation, check_deployment
from flsv.sites.messages import Packet, failure_packet
from flsv.sites.policy import SitePolicy
from flsv.sites.remote_data import RemoteData
from flsv.sites.run_status import run_status
from flsv.sites.site import Site
from flsv.sites.site_folder import site_folder
from flsv.sites.transport import MAX_SAMPLES_OF_SPLIT, Directory, Transport, agreement
from flsv.utilities.declared import Count, NonNegative, Positive, checked
from flsv.utilities.errors import Refused

#: Names of limits, which may be set in the policy's file only.
LIMITS = {option.name for option in fields(SitePolicy)}
#: Options of a node's configuration that flsv reads, or that networks add themselves.
OWN_OPTIONS = {"folder", "policy", "site", "partition-id", "num-partitions"}

#: Names that the site's owner may have meant by an option, and the similarity from which on.
OWNERS_NAMES = ["folder", "policy", *LIMITS, *(name.removeprefix("max_") for name in LIMITS)]
MIN_SIMILARITY = 0.8

ReportWaiting = Callable[[str | None], None]
_log = logging.getLogger(__name__)


@checked
@dataclass
class RemoteServer:
    """Server that runs the rounds of a :class:`flsv.FederatedLoop` with remote sites as clients.

    The loop writes TensorBoard logs, ``contributions.csv`` and checkpoints into ``folder``. If the folder holds a
    checkpoint, the run continues from it.

    A site that cannot be reached, is late, or does not send a valid and finite model is excluded from the round. The
    log names it, and its contributions keep their values.

    ``status.json`` in the folder reports the run's state, the sites that it waits for and, at the end, which sites had
    errors.

    Args:
        make_module: a function that makes the LightningModule.
        make_loop: a function that makes the loop.
        sites: the names of all sites, as the network's operator has registered them. The first site is client 0.
        rounds: the number of rounds.
        num_classes: the number of classes, for metrics per class. The server does not see labels. Sites with tables
            report their classes.
        class_names: the names of the classes.
        datamodule: a function that makes the server's own data module, on whose validation data coalitions' models are
            evaluated. None if the server has no data. If the sites have tables, a FederatedDataModule with the server's
            tables is encoded in the same way.
        folder: the run's folder.
        trainer: arguments of the server's Trainer, such as ``{"callbacks": [...]}``.
        timeout: the time in seconds that a site has for each message's work.
        wait: the time in seconds to wait for all sites before the first round.
        max_samples: the largest number of samples that a site may announce in a split. A site that announces more is
            refused, since the number is the weight of the site's model in the average, and the server cannot check it.
    """

    make_module: Callable[[], L.LightningModule]
    make_loop: Callable[[], Any]
    sites: Sequence[str]
    _: KW_ONLY
    rounds: Count
    num_classes: Count | None = None
    class_names: Sequence[str] | None = None
    datamodule: Callable[[], L.LightningDataModule] | None = None
    folder: str | Path = "flsv-runs"
    trainer: Mapping[str, Any] | None = None
    timeout: Positive = 600.0
    wait: NonNegative = 600.0
    max_samples: Count = MAX_SAMPLES_OF_SPLIT

    def serve(self, transport: Transport, run: str | None = None) -> None:
        """Run all remaining rounds. ``run`` is the network's name of the run if other programs may write into
        ``status.json`` that they have stopped it.

        Raises:
            ConfigurationError: a metric or strategy cannot work with remote sites (checked before any site is
                contacted), or a site has another version, module or settings, or announces more than ``max_samples``
                (checked before the first round).
        """
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        with run_status(folder, run) as report_waiting:
            self._serve(transport, folder, report_waiting)

    def _serve(self, transport: Transport, folder: Path, report_waiting: ReportWaiting) -> None:
        module = self.make_module()
        loop = self.make_loop()
        metrics = loop.contribution_metrics
        check_deployment(loop.config, metrics.fields, metrics.evaluating)

        sizes_file = folder / "sites.json"
        last_checkpoint = folder / "checkpoints" / "last.ckpt"
        is_resumed = last_checkpoint.is_file()
        if not is_resumed:
            # The file may come from another run.
            sizes_file.unlink(missing_ok=True)
        directory = self._directory(transport, agreement(module, loop), sizes_file, report_waiting)
        directory.gather()
        data = self._data(directory)

        loop = loop.replace(engine=partial(RemoteFederation, directory))
        checkpoint = last_checkpoint if is_resumed else None
        trainer = L.Trainer(**self._trainer_options(folder, loop))
        trainer.fit(module, data, ckpt_path=checkpoint)
        report_waiting(self._site_errors(loop))

    def _directory(
        self,
        transport: Transport,
        server_agreement: Mapping[str, str],
        sizes_file: Path,
        report_waiting: ReportWaiting,
    ) -> Directory:
        return Directory(
            transport,
            self.sites,
            server_agreement,
            sizes_file,
            timeout=self.timeout,
            wait=self.wait,
            report_waiting=report_waiting,
            max_samples=self.max_samples,
            run_size={"rounds": self.rounds, "classes": self.num_classes},
        )

    def _data(self, directory: Directory) -> RemoteData:
        if self.datamodule is not None:
            server_data = self.datamodule()
        else:
            server_data = None
            # Lightning would warn in every round that the list of loaders is empty.
            warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
        site_ids = range(len(self.sites))
        return RemoteData(
            self.sites,
            sizes=[directory.sizes[site] for site in site_ids],
            contents=[directory.contents[site] for site in site_ids],
            num_classes=self.num_classes,
            class_names=self.class_names,
            server_data=server_data,
            dictionary_hash=directory.dictionary_hash,
            class_names_hash=directory.class_names_hash,
        )

    def _trainer_options(self, folder: Path, loop: Any) -> dict[str, Any]:
        options: dict[str, Any] = {
            "max_epochs": self.rounds,
            "num_sanity_val_steps": 0,
            # A resumed run writes into the same folder, so that its logs continue.
            "logger": TensorBoardLogger(folder, name="", version=""),
            **(self.trainer or {}),
        }
        saving = ModelCheckpoint(folder / "checkpoints", save_last=True)
        options["callbacks"] = [*options.get("callbacks", []), saving, loop]
        return options

    def _site_errors(self, loop: Any) -> str | None:
        errors = []
        for incident in loop.state.incidents:
            client = incident["client"]
            subject = "" if client is None else f"{self.sites[client]} "
            errors.append(f"{subject}{incident['what']} ({incident['times']} times)")
        return "; ".join(errors) or None


class NodeConfig(Mapping[str, Any]):
    """The options of a node's configuration, and the names of those that have been read.

    Example:
        >>> config = NodeConfig({"data": "boston.csv", "foldr": "/data"})
        >>> config["data"], config.unread
        ('boston.csv', {'foldr'})
    """

    def __init__(self, node: Mapping[str, Any]) -> None:
        self._node = dict(node)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._node[name]

    def __iter__(self) -> Iterator[str]:
        self.read.update(self._node)
        return iter(self._node)

    def __len__(self) -> int:
        return len(self._node)

    @property
    def unread(self) -> set[str]:
        return self._node.keys() - self.read


@checked
@dataclass
class SiteClient:
    """Client side of a site. It makes the :class:`Site` at the first message, and reads the owner's policy at each.

    Args:
        make_module: a function that makes the LightningModule, the same as the server's module.
        make_datamodule: a function that makes the site's own data module from the site's configuration.
        make_loop: a function that makes the :class:`flsv.FederatedLoop` that defines the clients' training, the same as
            the server's loop.
        trainer: arguments of the site's Trainer, such as ``{"accelerator": "gpu"}``.
        functions: functions, beside flsv's own, that the server may run on the site's data, as
            ``"package.module:function"``.
        sites: the names of the federation's sites, as for the server. Their number and ``rounds`` decide how many
            numbers a site reports (:class:`SitePolicy`). None: the first server's number.
        rounds: the number of rounds, as for the server. None: the first server's number.

    Raises:
        ConfigurationError: ``rounds`` is below 1.
    """

    make_module: Callable[[], L.LightningModule]
    make_datamodule: Callable[[Mapping[str, Any]], L.LightningDataModule]
    make_loop: Callable[[], Any]
    _: KW_ONLY
    trainer: Mapping[str, Any] | None = None
    functions: Sequence[str] = ()
    sites: Sequence[str] | None = None
    rounds: Count | None = None
    _site: Site | None = field(default=None, init=False)
    _node_config: NodeConfig = field(init=False)

    def respond(self, packet: Packet, node: Mapping[str, Any], sender: str) -> Packet:
        """Reply to a message, within :func:`reply_or_failure`.

        Args:
            packet: the message.
            node: the configuration by the site's owner. ``folder`` is the folder in which the site keeps its state
                between rounds, ``policy`` the path of the file with the owner's limits, if any. All other options are
                for ``make_datamodule``.
            sender: a description of the sender, for the site's log.
        """
        check_options(node)
        # The policy is read at every message: the owner may change the file while this process runs.
        policy = SitePolicy()
        if "policy" in node:
            policy = SitePolicy.read(Path(str(node["policy"])))
        if self._site is None:
            self._site = self._make_site(node)
            self._site.log_policy(node.get("policy"), policy)
        self._site.policy = policy
        reply = self._site.respond(packet, sender)
        self._check_unread_options()
        return reply

    def _make_site(self, node: Mapping[str, Any]) -> Site:
        self._node_config = NodeConfig(node)
        return Site(
            module=self.make_module,
            data=partial(self.make_datamodule, self._node_config),
            settings=self.make_loop,
            folder=site_folder(node),
            trainer=self.trainer,
            functions=self.functions,
            run_size={"clients": len(self.sites or ()), "rounds": self.rounds},
        )

    def _check_unread_options(self) -> None:
        unread_names = self._node_config.unread - OWN_OPTIONS
        if unread_names:
            raise Refused(
                f"its node configuration has the options {sorted(unread_names)}, which are not used. Expected "
                "'folder', 'policy' and the options that the app's data module reads, "
                f"{sorted(self._node_config.read)}"
            )


def check_options(node: Mapping[str, Any]) -> None:
    """Raise Refused if an option has a limit's name, or a name like an option of flsv."""
    # An app may read all options at once, so whether an option is read does not show that its name is right.
    for name in node.keys() - OWN_OPTIONS:
        plain_name = name.lower().replace("-", "_")
        is_similar = get_close_matches(plain_name, OWNERS_NAMES, cutoff=MIN_SIMILARITY)
        if is_similar or "policy" in plain_name:
            raise Refused(
                f"its node configuration has the option {name!r}, which is not used. Expected 'folder' or 'policy', "
                "the path of a file with the limits. If the app reads this option, give it another name"
            )


def reply_or_failure(respond: Callable[[], Packet]) -> Packet:
    """Return the result of ``respond``, or a report of its error without the error's text, which may quote samples."""
    try:
        return respond()
    except Exception as error:
        _log.exception("The site could not reply to a message.")
        return failure_packet(error)
