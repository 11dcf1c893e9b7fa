"""RemoteFederation: the server of a federation whose clients are sites."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flsv._lightning.several_processes import Counted, add
from flsv.attacks import Collusion
from flsv.configuration.federation_config import FederationConfig
from flsv.core.matrix import empty_rows
from flsv.engines.client_manager import ClientManager
from flsv.engines.engine import IdleEngine, Instruct
from flsv.engines.remote.clients import RemoteClient, RemoteSites
from flsv.engines.remote.transport import Directory
from flsv.results.folder import FolderLock
from flsv.scores.class_scores import OWN_SCORES
from flsv.utilities.atomic_files import replacing
from flsv.utilities.errors import ConfigurationError

#: Largest number of optimizer steps per sample that a site may report for a module without automatic optimization.
STEPS_BY_HAND = 1000


def check_deployment(
    config: FederationConfig, fields: Mapping[str, Mapping[str, Any]], evaluating: Mapping[str, Any]
) -> None:
    """Refuse settings, strategies and metrics that cannot work with remote sites."""
    # Refused is what needs a site's trained model, class counts or samples, clients that collude, and a performance
    # that cannot be sent.
    asked = config.evaluation
    if any([asked.keeps, asked.models == "trained", config.private & bool(asked.every)]):
        raise ConfigurationError(
            "models that sites have trained stay there, and so do scores of private sites: leave evaluation out."
        )
    if colluders := [each for each in config.uploads if isinstance(each, Collusion)]:
        raise ConfigurationError(
            f"uploads={colluders}: sites do not see each other's updates. Try collusion out in a simulation."
        )
    for role, strategy in config.strategies.items():
        if strategy.needs_class_counts:
            raise ConfigurationError(
                f"{role} {strategy!r} works with the clients' class counts, and a site knows nothing of "
                "the others'. Choose another, or measure it in a simulation."
            )
    for name, metric in evaluating.items():
        performance = getattr(metric, "performance", "accuracy")
        if not isinstance(performance, str) and getattr(metric, "judges", None) != "clients":  # tried when all is ready
            raise ConfigurationError(
                f"the metric {name!r} lets sites measure models by {performance!r}, which cannot be sent to "
                'them. Use performance="accuracy", "balanced_accuracy" or "negative_loss".'
            )
    for name, read in fields.items():
        if name not in evaluating and "clients" in [each for each in read.values() if isinstance(each, str)]:
            raise ConfigurationError(
                f"the metric {name!r} asks clients about their samples, which a deployment does not give. Leave "
                "it out, or measure it in a simulation."
            )


class RemoteFederation(IdleEngine):
    """The engine that trains at remote sites, for ``FederatedLoop(engine=...)``.

    Args:
        directory: the sites' names and addresses.
        options: the arguments of :class:`flsv.engines.engine.Engine`.

    Attributes:
        sites_of: a function that connects the sites to another run, by its state.
    """

    clients_here = False

    def __init__(self, directory: Directory, *options: Any) -> None:
        trainer, data, state, _, config, *_ = options
        state.run = state.run or secrets.token_hex(8)
        # A batch has at least one sample; a module with manual optimization may step several times per batch.
        steps_of_batch = 1 if trainer.lightning_module.automatic_optimization else STEPS_BY_HAND

        def most_steps(site: int, samples: int) -> int:
            work = config.work_of(directory.names[site])
            return (work.steps or work.epochs * samples) * steps_of_batch

        num_classes = data.num_classes if data.no_classes is None else None
        reports = [name for strategy in config.strategies.values() for name in strategy.reports]
        self.sites_of = lambda of: RemoteSites(directory, of, trainer.max_epochs or 1, most_steps, reports, num_classes)
        self._remote = self.sites_of(state)
        super().__init__(*options)

    def check(self, fields: Mapping[str, Mapping[str, Any]], evaluating: Mapping[str, Any]) -> None:
        check_deployment(self._config, fields, evaluating)

    def commit(self) -> None:
        self._remote.commit()
        super().commit()

    def discard(self) -> bool:
        self._remote.discard()
        return super().discard()

    def write_artifacts(self, cohort: Sequence[int], round_index: int, folder: Path) -> None:
        """Do nothing: files about a site's data stay at the site."""

    def received(self, instruct: Instruct) -> dict[int, Tensor]:
        """Return ``{client id: model [P]}`` of clients that the personalizer gives another model."""
        personalizer, state = self._strategies.get("personalizer"), self._state
        if personalizer is None:
            return {}
        models = {client: personalizer.used(client, state) for client in range(state.num_clients)}
        return {i: model for i, model in models.items() if model is not None and model is not state.model()}

    def _make_manager(self) -> ClientManager:
        """Make a :class:`ClientManager` whose ``clients`` are the sites."""
        manager = super()._make_manager()
        manager.clients = [
            RemoteClient(i, local, manager.channel, self._remote, lambda: self._state.round_index)
            for i, local in enumerate(manager.locals)
        ]
        return manager

    @property
    def place(self) -> str:
        return f"{len(self._instructions)} sites"

    def _train(self, batches: Any) -> None:
        """Let the sites train, whose updates take the place of a cohort's."""
        start = self.global_vector
        updates, self.broken = self._remote.train(self._instructions, start.device, self.space)
        if not updates and not self.broken:
            raise RuntimeError(
                "no site sent a model in this round. Start them again and then this server: it goes on from its last "
                "checkpoint."
            )
        self._matrix = empty_rows(len(updates), start, self.trainer.default_root_dir) if updates else self._matrix[:0]
        for row, update in zip(self._matrix, updates):
            row.copy_(update.vector)
        # Only one copy of each vector stays in memory.
        self.updates = [replace(update, vector=row) for update, row in zip(updates, self._matrix)]
        add(self.trainer, Counted(steps=sum(update.num_steps for update in updates)))

    def leave_out(self, clients: Collection[int]) -> None:
        """Forget this round of excluded sites, and accept the trainings of all others."""
        super().leave_out(clients)
        self._remote.count({update.client_id for update in self.updates}.difference(clients))

    def own_scores(self, instruct: Instruct) -> dict[str, Tensor]:
        scores = self._remote.score_own_models(instruct(self._mine()))
        unknown = dict.fromkeys(OWN_SCORES, float("nan"))
        everybody = [scores.get(client, unknown) for client in range(self._state.num_clients)]
        return {name: torch.tensor([each[name] for each in everybody]) for name in OWN_SCORES}


@contextmanager
def run_status(folder: Path, run: str | None = None) -> Iterator[Callable[[str | None], None]]:
    """Write a run's status into ``status.json``, and yield a function that adds a text.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with run_status(folder):
        ...     json.loads((folder / "status.json").read_text())["status"]
        'running'
        >>> json.loads((folder / "status.json").read_text())["status"]
        'finished'
    """
    # A killed process leaves "running". After an operator's stop the status stays "stopped", although the server ends
    # later.
    lock = FolderLock(folder / "checkpoints")  # the run locks the folder itself later

    begun = datetime.now(UTC)

    def write(status: str, why: str | None = None) -> None:
        path = folder / "status.json"
        said = path.read_text() if path.is_file() else ""
        if run is not None and '"stopped"' in said and f'"{run}"' in said:
            return
        since = (begun if status == "running" else datetime.now(UTC)).isoformat(timespec="seconds")
        with replacing(path) as file:
            file.write(json.dumps({"status": status, "since": since, "why": why, "run": run}, indent=1).encode())
        if status != "running":
            print(f"flsv: the run has {status}: {why or folder}.", file=sys.stderr, flush=True)

    last: list[str | None] = [None]

    def running(why: str | None) -> None:
        last.append(why)
        write("running", why)

    try:
        write("running")
        yield running
        write("finished", last[-1])
    except Exception as error:  # not the SystemExit with which Flower ends an app whose SuperLink is gone
        write("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        lock.release()
