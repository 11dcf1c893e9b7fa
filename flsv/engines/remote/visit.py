"""SiteVisit and SiteMemory: a site's training in one round, and its state between rounds."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from flsv._lightning.fit_loop import FederatedFitLoop
from flsv.configuration.federation_config import FederationConfig
from flsv.core import ClientUpdate, FederationState, opened
from flsv.core.state import GLOBAL_MODEL
from flsv.data import FederatedDataModule
from flsv.engines.client_manager import ClientManager
from flsv.engines.engine import shared_space
from flsv.engines.remote.messages import Packet, Refused, read_instruction
from flsv.training.client_turn import Turn
from flsv.training.cohort_loader import CohortLoader
from flsv.training.step_counts import LocalSteps
from flsv.training.store import ClientStore
from flsv.utilities.atomic_files import replacing
from flsv.utilities.digest import digest
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import seed_global_rngs

SiteState = dict[str, Any]
_log = logging.getLogger(__name__)


def own_secret(folder: Path) -> str:
    """Return the site's secret text, drawn at the first call and stored in its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "secret"
    if not path.is_file():
        with replacing(path, private=True) as file:
            file.write(secrets.token_hex(32).encode())
    if not re.fullmatch(r"[0-9a-f]{64}", secret := path.read_text()):
        raise ConfigurationError(f"{path} is no secret of 64 hexadecimal digits. Delete it: the site draws another.")
    return secret


def visit_secret(secret: str, packet: Packet, kept: SiteState | None) -> bytes:
    """Derive the site's secret key (32 bytes) for the noise of its update in a round."""
    # The same message and state give the same key, so that averaging answers reveals nothing. Any difference gives
    # another key, so that subtracting two answers reveals nothing. GaussianPrivacy adds the update itself to the key.
    return hmac.digest(secret.encode(), digest([packet.digest, kept]), "sha256")


class SiteMemory:
    """A site's saved states of one run, each named by its visit.

    Example:
        >>> import tempfile
        >>> memory = SiteMemory(Path(tempfile.mkdtemp()), "0123456789abcdef")
        >>> memory.keep("first", {"visits": 1}, [])
        >>> memory.keep("second", {"visits": 2}, ["first"])
        >>> memory.after(None), memory.after("first"), memory.after("second"), memory.after("third")
        ({}, {'visits': 1}, {'visits': 2}, None)
    """

    # A visit's name is the hash of the server's message, so a server that repeats a round, and two servers that
    # continue from one checkpoint, get the right state, and no message can overwrite the state after another.

    def __init__(self, folder: Path, run: str) -> None:
        if not isinstance(run, str) or not re.fullmatch(r"[0-9a-f]{16}", run):
            raise ConfigurationError(f"{run!r:.80} names no run: expected 16 hexadecimal digits.")
        self._path = folder / "runs" / run / "state.pt"
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def after(self, visit: str | None) -> SiteState | None:
        """Return the state after a visit, empty before the first, None if it was deleted."""
        return {} if visit is None else self.all().get(visit)

    def keep(self, visit: str, kept: SiteState, earlier: Any) -> None:
        """Save the site's state after a visit, and delete all but ``earlier`` ones."""
        with replacing(self._path, private=True) as file:
            torch.save({**{name: value for name, value in self.all().items() if name in earlier}, visit: kept}, file)

    def all(self) -> dict[str, SiteState]:
        """Return all saved states by the visit's name."""
        return torch.load(self._path, map_location="cpu", weights_only=True) if self._path.is_file() else {}


class NumberedData:
    """A site's data module in which its client has its number in the federation."""

    # Random draws depend on the client's number.

    def __init__(self, data: FederatedDataModule, client: int, num_clients: int) -> None:
        self._data, self._client, self.num_clients = data, client, num_clients

    def client_loader(self, client: int, *args: Any, **kwargs: Any) -> Any:
        assert client == self._client
        return self._data.client_loader(0, *args, **kwargs)


class _OwnSteps(LocalSteps):
    """Number of optimizer steps at a site, which knows only its own."""

    def most(self) -> float:
        assert self.client is not None
        return self.of(self.client)


class SiteVisit(L.Callback):
    """Callback that turns a fit into a site's training in one round."""

    def __init__(
        self,
        packet: Packet,
        data: FederatedDataModule,
        kept: SiteState,
        config: FederationConfig,
        upload_secret: bytes | int,
        limit: float = 1.0,
    ) -> None:
        self._packet, self._instruction = packet, read_instruction(packet)
        self._seconds = packet.plain.get("seconds", float("inf"))
        self._began = time.monotonic()
        self._num_clients, self._num_classes = packet.plain["clients"], packet.plain["classes"]
        self._numbered: Any = NumberedData(data, self._instruction.client_id, self._num_clients)
        self._data, self._config, self._limit = data, config, limit
        # The site's state after an earlier round, empty if there is none.
        self.kept, self._upload_secret = kept, upload_secret
        self.update: ClientUpdate | None = None

    def loader(self, trainer: L.Trainer) -> CohortLoader:
        """Make the loader of the site's training batches in this round."""
        told = self._instruction
        state = FederationState(round_index=told.round_index, seed=told.seed, num_clients=self._num_clients)
        strategies: Mapping[str, Any] = self._config.strategies
        work = {told.client_id: self._config.work_of(self._packet.plain.get("name", ""))}
        self._steps = _OwnSteps(trainer, self._numbered, strategies["sampler"], state, work, self._limit)
        self._loader = CohortLoader(
            self._numbered,
            [told.client_id],
            seed=told.seed,
            round_index=told.round_index,
            lengths=self._steps.lengths,
        )
        return self._loader

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        steps = self._steps
        steps.client = self._instruction.client_id
        self._loop = FederatedFitLoop(trainer)
        self._steps_told, self._batches_told = steps.tell_steps(), steps.tell_batches()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._batches_told.restore()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._batches_told.restore()
        self._steps_told.restore()
        self._loop.give_back()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._forward_schedules(trainer)
        space, _ = shared_space(pl_module, self._config)
        for upload in self._config.uploads:
            upload.check(space)
        self._store, client = ClientStore(), self._instruction.client_id
        self._store.load_state_dict({client: self.kept["store"]} if self.kept.get("store") else {})
        self._store.to(pl_module.device)
        manager = ClientManager(trainer, self._data, space, self._store, first=client, num_classes=self._num_classes)
        self._holder = manager.locals[0]
        self._turn = turn = Turn(trainer, space, self._config, self._store, self._num_clients, self._steps)
        if isinstance(secret := self._upload_secret, bytes):
            turn.upload_secret = secret
            # What a seed gives away tells nothing of the key.
            secret = int.from_bytes(hmac.digest(secret, b"seed", "sha256")[:8], "little") >> 1
        turn.upload_seed = secret
        if (buffers := self.kept.get("buffers")) is not None:
            turn.state.restore(buffers)
        here = read_instruction(self._packet, pl_module.device)
        model = here.tensors.get(GLOBAL_MODEL, here.start)
        if model is not None:
            space.write(pl_module, model)
        seed_global_rngs(here.seed, "round", here.round_index)
        turn.state.remember()
        turn.state.begin_round()
        self._loop.begin(turn.begin_batch, self._end_batch)
        self._loop.round = partial(self._train, trainer)
        turn.begin(here, self._holder, int(self._data.num_samples[0]), self._loader.visits[0].lengths)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._turn.begin_step(optimizer)

    def _end_batch(self, loss: Tensor | None) -> None:
        if time.monotonic() - self._began > self._seconds:
            raise Refused(f"it has stopped, not ready after {self._seconds} s")
        self._turn.end_batch(loss)

    def _train(self, trainer: L.Trainer) -> None:
        """Train the site's local epochs in place of Lightning's epoch, and end the visit."""
        (visit,) = self._loader.visits
        try:
            self._loader.train(visit, self._loop.train_epoch)
        except Exception as error:
            if not self._config.private or isinstance(error, Refused):
                raise
            # Whether it fails may depend on single samples.
            _log.exception("training has failed: this site's update is noise alone. Leave the run, or mend the cause")
            self._turn.context.broken = True  # type: ignore[union-attr]  # a client is in training
        if self._turn.is_trained:
            self._leave()
            trainer.should_stop = True  # each round is a fit of its own
        self._loop.end_round()

    def _leave(self) -> None:
        self.update = self._turn.end()
        if self.update is None:
            return  # as if the site had not taken part
        shared = self._turn.state
        shared.end_round(self.update.vector)
        self._store.commit()
        self._store.to("cpu")
        with opened(self._holder) as local:
            self.kept = {
                "store": self._store.state_dict().get(self._instruction.client_id, {}),
                "buffers": shared.buffers(),
                "start": local.start,
                "trained": local.model,
                "sent": None if local.sent is local.model else local.sent,
                "who": [self._instruction.client_id, self._num_clients, self._instruction.round_index],
            }

    def _forward_schedules(self, trainer: L.Trainer) -> None:
        """Advance the schedulers that step once per round to the present round."""
        # Each round is a new fit, in which schedulers start from the beginning.
        for config in trainer.lr_scheduler_configs:
            if config.interval != "epoch":
                continue
            if isinstance(config.scheduler, ReduceLROnPlateau) or config.reduce_on_plateau:
                raise ConfigurationError(
                    "a schedule that follows a validation value (ReduceLROnPlateau) cannot be kept at a site, which "
                    "does not validate. Use one that follows the round."
                )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of schedules that step before the optimizer
                for _ in range(self._instruction.round_index // config.frequency):
                    config.scheduler.step()
