"""Federations on NVIDIA FLARE (``pip install "nvflare>=2.9,<3"``): a Controller for the server, an Executor for sites.

Tier: provisional.
"""

from __future__ import annotations

import json
import queue
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lightning_utilities.core.imports import RequirementCache

if not (_nvflare := RequirementCache("nvflare>=2.9,<3")):
    raise ModuleNotFoundError(
        f"flsv.sites.nvflare needs NVFlare: pip install 'nvflare>=2.9,<3'. {_nvflare}"
    )

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

from flsv.sites import Packet, RemoteServer, SiteClient
from flsv.sites.deployment import reply_or_failure
from flsv.sites.messages import failed
from flsv.sites.run_status import Stopped
from flsv.sites.site_folder import SITE_FOLDER
from flsv.sites.transport import Address
from flsv.utilities.errors import ConfigurationError, Refused, similar_names

__all__ = ["FlsvController", "FlsvExecutor"]

# With this decomposer NVFlare sends tensors of any size, in chunks.
fobs.register(TensorDecomposer)

#: Seconds between two requests of an idle site for a task, and between two checks for replies.
POLL_SECONDS = 0.2
#: Seconds that a site whose process has ended has to reconnect before NVFlare ends the job.
GRACE_SECONDS = 10.0
#: Files of a site's owner, in the folder ``local`` of the site's workspace.
NODE_FILE = "flsv-node.toml"
POLICY_FILE = "flsv-site.toml"

ReplyQueue = queue.SimpleQueue[tuple[Address, Packet]]


def to_shareable(packet: Packet) -> Shareable:
    """Convert a packet into a Shareable of NVFlare."""
    shareable = Shareable()
    shareable["kind"] = packet.kind
    shareable["plain"] = json.dumps(packet.plain)
    shareable["tensors"] = {name: tensor.contiguous() for name, tensor in packet.tensors.items()}
    return shareable


def from_shareable(shareable: Any) -> Packet:
    """Convert a Shareable of NVFlare into a packet, or raise ValueError."""
    try:
        return Packet(shareable["kind"], json.loads(shareable["plain"]), shareable["tensors"])
    except Exception as error:  # a message from another machine may raise any error
        raise ValueError(
            f"its message is not a packet of flsv: {type(error).__name__}: {error!s:.200}"
        ) from error


def check_filters(fl_ctx: FLContext, config: Any) -> None:
    """Raise Refused if NVFlare has filters for a job's messages, in the job's ``config`` or by the site's owner."""
    # NVFlare's filters do not change flsv's messages, so their user would think that private data is protected.
    chains = [config.task_data_filters, config.task_result_filters]
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)
    if scope is not None:
        chains += [scope.task_data_filters, scope.task_result_filters]
    names: set[str] = set()
    for chain in chains:
        for filters in chain.values():
            names.update(type(item).__name__ for item in filters)
    if names:
        raise Refused(
            f"NVFlare's filters {sorted(names)} would not change flsv's messages. Remove them from the job and from "
            "privacy.json. For noise use flsv.privacy.GaussianPrivacy, for limits a site's policy"
        )


class NvflareTransport:
    """Transport of packets to sites as tasks of a Controller.

    A site requests a task when it has completed the one before. A task that it does not request in time expires.
    """

    def __init__(self, controller: Controller, fl_ctx: FLContext, abort_signal: Signal) -> None:
        self._controller = controller
        self._fl_ctx = fl_ctx
        self._abort_signal = abort_signal

    def present(self) -> dict[Address, str]:
        self._check_abort()
        names = {client.name for client in self._fl_ctx.get_engine().get_clients()}
        names -= self._disconnected(names)
        return {name: name for name in names}

    def _disconnected(self, names: set[Address]) -> set[Address]:
        """Return the sites among ``names`` that NVFlare has found disconnected."""
        disconnect_time = self._controller.get_client_disconnect_time
        return {name for name in names if disconnect_time(name) is not None}

    def exchange(
        self, packets: Mapping[Address, Packet], seconds: float
    ) -> Iterator[tuple[Address, Packet]]:
        deadline = time.monotonic() + seconds
        reply_queue: ReplyQueue = queue.SimpleQueue()
        tasks = []
        try:
            for site, packet in packets.items():
                task = _task(packet, seconds, partial(_receive, reply_queue, site))
                self._controller.send(task, self._fl_ctx, targets=[site])
                tasks.append(task)
            yield from self._await_replies(reply_queue, set(packets), deadline)
        finally:
            for task in tasks:
                if task.completion_status is None:
                    self._controller.cancel_task(task)

    def _await_replies(
        self, reply_queue: ReplyQueue, missing: set[Address], deadline: float
    ) -> Iterator[tuple[Address, Packet]]:
        """Yield the reply of each ``missing`` site, a failed one if its connection has ended."""
        while missing:
            self._check_abort()
            # Replies that came in time are read even if the server itself is late.
            is_last_look = time.monotonic() >= deadline
            try:
                site, reply = reply_queue.get(block=not is_last_look, timeout=POLL_SECONDS)
            except queue.Empty:
                if is_last_look:
                    break
                for site in self._disconnected(missing):
                    missing.discard(site)
                    yield site, failed("its process or its connection has ended")
                continue
            missing.discard(site)
            yield site, reply

    def _check_abort(self) -> None:
        if self._abort_signal.triggered:
            raise Stopped("the job was aborted")


def _task(packet: Packet, seconds: float, receive: Callable[..., None]) -> Task:
    return Task(
        name=packet.kind,
        data=to_shareable(packet),
        timeout=int(seconds) + 1,
        result_received_cb=receive,
    )


def _receive(
    reply_queue: ReplyQueue, site: Address, client_task: ClientTask, fl_ctx: FLContext
) -> None:
    result = client_task.result
    client_task.result = None  # only one copy of a model stays in memory
    reply_queue.put((site, _reply(result)))


def _reply(result: Shareable) -> Packet:
    return_code = result.get_return_code(ReturnCode.OK)
    if return_code != ReturnCode.OK:
        return failed(f"NVFlare: {return_code}")
    try:
        return from_shareable(result)
    except ValueError as error:
        return failed(str(error))


class FlsvController(Controller):  # type: ignore[misc]  # untyped where nvflare is not installed
    """Controller of NVFlare that runs the rounds of a :class:`flsv.sites.RemoteServer`.

    A relative ``folder`` of the RemoteServer is in the workspace of NVFlare's server, beside the jobs' folders. A job
    that finds a checkpoint there continues its run, so give each run its own folder.

    Args:
        server: the place to import the RemoteServer from, as ``"federation:server"``.

    Example:
        >>> from nvflare.job_config.api import FedJob
        >>> job = FedJob("digits")
        >>> _ = job.to_server(FlsvController("federation:server"))
        >>> _ = job.to_clients(FlsvExecutor("federation:client"))
    """

    def __init__(self, server: str) -> None:
        super().__init__(task_check_period=POLL_SECONDS)
        self.server = server

    def add_to_fed_job(self, job: Any, ctx: Any, **kwargs: Any) -> None:
        super().add_to_fed_job(job, ctx, **kwargs)
        # Sites import the installed flsv. Without this line NVFlare would add the files of flsv to the job.
        job.set_app_packages([*job.job.app_packages, "flsv"])
        job.add_params(
            {
                "server": {"task_request_interval": POLL_SECONDS},
                "dead_client_grace_period": GRACE_SECONDS,
            },
            ctx,
        )

    def start_controller(self, fl_ctx: FLContext) -> None:
        pass

    def stop_controller(self, fl_ctx: FLContext) -> None:
        self.cancel_all_tasks()

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        configured_server = resolve_name(self.server)
        if not isinstance(configured_server, RemoteServer):
            raise ConfigurationError(
                f"server={self.server!r} is a {type(configured_server).__name__}, expected a "
                "flsv.sites.RemoteServer."
            )
        check_filters(fl_ctx, fl_ctx.get_prop(FLContextKey.RUNNER).config)

        workspace = Path(fl_ctx.get_workspace().get_root_dir())
        server = replace(configured_server, folder=workspace / configured_server.folder)
        try:
            server.serve(NvflareTransport(self, fl_ctx, abort_signal))
        except Stopped as error:
            self.log_info(fl_ctx, f"{error}: the next job continues from {server.folder}")

    def process_result_of_unknown_task(self, *arguments: Any, **options: Any) -> None:
        """Ignore the result of a site that is late."""


class FlsvExecutor(Executor):  # type: ignore[misc]  # untyped where nvflare is not installed
    """Executor of NVFlare that replies to messages with a :class:`flsv.sites.SiteClient`.

    The site's owner may write two files in ``local`` of the site's workspace, which no job can change.
    ``flsv-node.toml`` is the configuration that ``make_datamodule`` gets in addition to ``site``, the site's name. Its
    option ``folder`` is the folder in which the site saves its state between rounds (default: ``flsv-site`` in the
    workspace). ``flsv-site.toml`` has the limits of :class:`flsv.sites.SitePolicy`, and is read at every
    message.

    Args:
        client: the place to import the SiteClient from, as ``"federation:client"``.
    """

    def __init__(self, client: str) -> None:
        super().__init__()
        self.client = client

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        return to_shareable(reply_or_failure(partial(self._respond, shareable, fl_ctx)))

    def _respond(self, shareable: Shareable, fl_ctx: FLContext) -> Packet:
        check_filters(fl_ctx, fl_ctx.get_prop(FLContextKey.RUNNER))
        client = resolve_name(self.client)
        if not isinstance(client, SiteClient):
            raise ConfigurationError(
                f"client={self.client!r} is a {type(client).__name__}, expected a "
                "flsv.sites.SiteClient."
            )
        packet = from_shareable(shareable)
        return client.respond(packet, node_of(fl_ctx), f"NVFlare job {fl_ctx.get_job_id()}")


def node_of(fl_ctx: FLContext) -> dict[str, Any]:
    """Return the configuration that a site's owner has written."""
    workspace = fl_ctx.get_workspace()
    node = {
        "site": fl_ctx.get_identity_name(),
        "folder": str(Path(workspace.get_root_dir(), SITE_FOLDER)),
    }
    config_folder = Path(workspace.get_site_config_dir())
    _check_names([file.name for file in config_folder.iterdir()])
    policy_file = config_folder / POLICY_FILE
    if policy_file.exists():
        node["policy"] = str(policy_file)
    node_file = config_folder / NODE_FILE
    if node_file.exists():
        node |= tomllib.loads(node_file.read_text())  # its options override the defaults
    return node


def _check_names(names: Iterable[str]) -> None:
    """Raise Refused if the name of an owner's file is probably a misspelled name of a file that flsv reads."""
    expected_names = (POLICY_FILE, NODE_FILE)
    for name in names:
        is_of_editor = name.startswith(".") and name.endswith(".swp")
        if name in expected_names or is_of_editor:
            continue
        # NVFlare's own files are of other kinds.
        is_meant = "flsv" in name.lower() or name.endswith(".toml")
        if is_meant or similar_names(name, expected_names):
            raise Refused(
                f"flsv does not read the file {name} in the site's folder local: expected {POLICY_FILE} or {NODE_FILE}"
            )
