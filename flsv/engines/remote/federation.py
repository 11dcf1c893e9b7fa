"""RemoteFederation: the server of a federation whose clients are sites; and ``status.json``, how its run stands."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.durable import replacing
from flsv._lightning.several_processes import Counted, add
from flsv.attacks import Collusion
from flsv.clients.client_manager import ClientManager
from flsv.clients.cohort import CohortTraining
from flsv.clients.train_client import LocalTraining
from flsv.data import FederatedDataModule
from flsv.engines.one_process import IdleProcess
from flsv.engines.remote.clients import Remote, RemoteClient
from flsv.engines.remote.data import RemoteData
from flsv.engines.remote.transport import Directory
from flsv.errors import ConfigurationError
from flsv.models.imbalance import OWN_SCORES
from flsv.participants import LocalData
from flsv.report.folder import FolderLock
from flsv.round import Instruction, Round
from flsv.round.matrix import empty_rows
from flsv.server import ContributionMetrics, RoundServer
from flsv.server.checks import check_names
from flsv.server.config import FederationConfig
from flsv.strategy import Strategy

#: How often a module without automatic optimization may step for one sample, before its site is not believed.
STEPS_BY_HAND = 1000


class RemoteCohort(CohortTraining):
    """Lets the sites of a cohort train, within the idle batch of a round.

    Args:
        local: of the server's module, which stays the global model.
        manager: the sites.
        remote: the same, as those who train.

    Attributes:
        sent: counts the instructions that went down.
    """

    sent: Callable[[Mapping[int, Instruction]], None]

    def __init__(self, local: LocalTraining, manager: ClientManager, remote: Remote) -> None:
        super().__init__(local, manager)
        self._remote = remote

    @property
    def place(self) -> str:
        return f"{len(self._instructions)} sites"

    def trained(self) -> dict[int, Tensor]:
        raise ConfigurationError("what sites have trained stays there: leave ClientEvaluation(keep_trained=True) out.")

    def begin_batch(self, batch: Any = None) -> bool:
        device = self.local.global_vector.device
        self.updates, self.broken = self._remote.train(self._instructions, device, self.local.space)
        heard = {*self.broken, *(update.client_id for update in self.updates)}
        self.sent({client: told for client, told in self._instructions.items() if client in heard})
        if not heard:
            raise RuntimeError(
                "no site sent a model in this round. Start them again and then this server: it goes on from its last "
                "checkpoint."
            )
        if self.updates:
            self._matrix = empty_rows(len(self.updates), self.local.global_vector, self._trainer.default_root_dir)
            for row, update in zip(self._matrix, self.updates):
                row.copy_(update.vector)
            # One in memory.
            self.updates = [replace(update, vector=row) for update, row in zip(self.updates, self._matrix)]
        add(self._trainer, Counted(steps=sum(update.num_steps for update in self.updates)))
        return True

    def end_batch(self, loss: Tensor | None) -> bool:
        return True

    def leave_out(self, clients: Collection[int]) -> None:
        """Sites keep their own states; the next instruction tells them which of their rounds counted."""
        super().leave_out(clients)
        self._remote.count({update.client_id for update in self.updates}.difference(clients))


def _check_parts(config: FederationConfig) -> None:
    """Refuse what needs trained models, or clients that see each other."""
    if config.evaluation.keeps or config.evaluation.models == "trained":
        raise ConfigurationError(
            "models that sites have trained stay there: leave ClientEvaluation(keep_trained=True) and "
            'ClientEvaluation(models="trained") out.'
        )
    if colluders := [each for each in config.uploads if isinstance(each, Collusion)]:
        raise ConfigurationError(
            f"uploads={colluders}: sites do not see each other's updates. Try collusion out in a simulation."
        )


def _check_questions(strategies: Mapping[str, Strategy], board: ContributionMetrics) -> None:
    """Refuse what asks clients for what sites do not tell."""
    for role, strategy in strategies.items():
        if strategy.needs_class_counts:
            raise ConfigurationError(
                f"{role} {strategy!r} works with the clients' class counts, and a site knows nothing of "
                "the others'. Choose another, or measure it in a simulation."
            )
    evaluating = board.evaluating
    for metric, asks in evaluating.items():
        performance = getattr(asks, "performance", "accuracy")
        if not isinstance(performance, str):
            raise ConfigurationError(
                f"the metric {metric!r} lets sites measure models by {performance!r}, which cannot be sent to "
                'them. Use performance="accuracy", "balanced_accuracy" or "negative_loss".'
            )
    for metric, fields in board.fields.items():
        asks_clients = "clients" in {field for field in fields.values() if isinstance(field, str)}
        if asks_clients and metric not in evaluating:
            raise ConfigurationError(
                f"the metric {metric!r} asks clients about their samples, which a deployment does not give. Leave "
                "it out, or measure it in a simulation."
            )


class RemoteFederation(IdleProcess):
    """The engine for sites: pass it to :class:`flsv.FederatedLoop` as ``engine``.

    Args:
        directory: the sites.
        options: what :class:`OneProcess` takes.
    """

    def __init__(self, directory: Directory, *options: Any) -> None:
        trainer, data, state, _, config, *_ = options
        _check_parts(config)
        state.run = state.run or secrets.token_hex(8)
        # A batch has a sample at least; who steps by hand may do so several times a batch.
        steps = config.local_epochs * (1 if trainer.lightning_module.automatic_optimization else STEPS_BY_HAND)
        num_classes = data.num_classes if data.no_classes is None else None
        reports = check_names(config.strategies)
        self._remote = Remote(directory, state, trainer.max_epochs or 1, steps, reports, num_classes)
        super().__init__(*options)

    clients_here = False

    def check(self, board: ContributionMetrics) -> None:
        _check_questions(self._strategies, board)

    def instruct(self, instructions: dict[int, Instruction], sent: Callable[[Mapping[int, Instruction]], None]) -> None:
        # Only what has reached a site counts: the cohort says it when the replies are there.
        cohort: Any = self.clients
        cohort.sent = sent
        super().instruct(instructions, lambda _: None)

    def commit(self) -> None:
        self._remote.commit()
        super().commit()

    def discard(self) -> bool:
        self._remote.discard()
        return super().discard()

    def write_artifacts(self, round: Round, folder: Path) -> None:
        """Pictures of a site's data stay there."""

    def received(self, server: RoundServer) -> dict[int, Tensor]:
        """Without the models that are at their sites alone."""
        personalizer, state = self._strategies.get("personalizer"), self._state
        if personalizer is None:
            return {}
        known = {client: personalizer.used(client, state) for client in range(state.num_clients)}
        return {i: model for i, model in known.items() if model is not None and model is not state.model()}

    def _make_manager(self) -> ClientManager:
        options = (self.trainer, self.data, self.space, self._states)
        return RemoteClientManager(self._remote, lambda: self._state.round_index, *options)

    def _make_training(self, local: LocalTraining) -> CohortTraining:
        return RemoteCohort(local, self.manager, self._remote)

    def own_scores(self, server: RoundServer) -> dict[str, Tensor]:
        told = self._remote.test(self._state.round_index, server.instruct(self._mine(), self._state))
        unknown = dict.fromkeys(OWN_SCORES, float("nan"))
        everybody = [told.get(client, unknown) for client in range(self._state.num_clients)]
        return {name: torch.tensor([scores[name] for scores in everybody]) for name in OWN_SCORES}


class RemoteClientManager(ClientManager):
    """The sites, and the server's own data."""

    def __init__(
        self,
        remote: Remote,
        round_index: Callable[[], int],
        trainer: L.Trainer,
        data: FederatedDataModule,
        *options: Any,
    ) -> None:
        super().__init__(trainer, data, *options)
        unknown = torch.zeros(data.num_classes, dtype=torch.long)
        self.locals = [
            LocalData(f"client {i}", partial(_elsewhere, i), unknown, unknown) for i in range(data.num_clients)
        ]
        self.clients = [
            RemoteClient(i, local, self.channel, remote, round_index) for i, local in enumerate(self.locals)
        ]


def _elsewhere(client: int, split: str) -> Iterable[Any]:
    raise PermissionError(f"the samples of client {client} are at its site.")


#: What every site would have to say of its samples, where nothing is wrong with them.
PLENTY = {"train": 1000, "val": 1000, "test": 1000}


class _Rehearsed(Exception):
    """Nothing is wrong."""


class _Stop(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        raise _Rehearsed


def rehearse(
    module: L.LightningModule,
    loop: Any,
    directory: Directory,
    data: RemoteData,
    trainer: Mapping[str, Any],
) -> None:
    """Begin the fit as it will begin, with sites that have enough of everything, up to the first round.

    Args:
        module: of its own: it is not the one to be trained.
        loop: likewise.
        directory: of the sites; none is asked.
        data: whose sites have :data:`PLENTY`.
        trainer: arguments of the Trainer.

    Raises:
        ConfigurationError: what is wrong.
    """
    acting = loop.without_files().replace(engine=partial(RemoteFederation, directory))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again
        options = {**trainer, **quiet, "default_root_dir": folder, "callbacks": [acting, _Stop()]}
        try:
            L.Trainer(**options).fit(module, data)
        except _Rehearsed:
            return
    raise RuntimeError("the fit has ended before its first round.")


@contextmanager
def told_status(folder: Path) -> Iterator[None]:
    """Say in a folder's ``status.json`` how what is done within ends: ``"running"``, then ``"finished"``, ``"failed"``
    and why, or ``"stopped"`` from outside. A run that was killed stays ``"running"``, since when it says.

    Raises:
        ConfigurationError: another server is at work in this folder; what it says of itself is left as it is.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with told_status(folder):
        ...     json.loads((folder / "status.json").read_text())["status"]
        'running'
        >>> json.loads((folder / "status.json").read_text())["status"]
        'finished'
    """
    path = folder / "status.json"
    lock = FolderLock(folder / "checkpoints")  # the run itself holds the folder later
    try:
        _write(path, "running")
        try:
            yield
        except (SystemExit, KeyboardInterrupt):  # as Flower ends an app whose SuperLink is gone
            _write(path, "stopped")
            raise
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            _write(path, "failed", why)
            said = f"flsv: the run has failed: {why}. See {path}."
            if hasattr(error, "add_note"):  # from Python 3.11 on: the last line of its traceback
                error.add_note(said)
            else:
                print(said, file=sys.stderr, flush=True)
            raise
        _write(path, "finished")
        print(f"flsv: the run has finished. See {path}.", file=sys.stderr, flush=True)
    finally:
        lock.release()


def _write(path: Path, status: str, why: str | None = None) -> None:
    when = datetime.now(UTC).isoformat(timespec="seconds")
    with replacing(path) as file:
        file.write(json.dumps({"status": status, "since": when, "why": why}, indent=1).encode())
