"""SiteTraining: a fit that is a site's training in one round, from its saved state."""

from __future__ import annotations

import hmac
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.fit_loop import FederatedFitLoop, Phase, Rounds
from flsv.configuration.federation_config import FederationConfig
from flsv.core import ClientUpdate, FederationState, Instruction, LocalData, Traffic, opened
from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule
from flsv.engines.client_manager import ClientManager
from flsv.engines.engine import shared_space
from flsv.personalization.base import OWN_MODEL
from flsv.sites.messages import Packet, global_model, read_instruction
from flsv.sites.site_memory import SiteState
from flsv.training.client_batches import CohortLoader, LocalSteps
from flsv.training.local_training import LocalTraining
from flsv.training.store import TENSORS, ClientStore
from flsv.training.training_step import note_on_types
from flsv.uploads.base import UploadContext, sanitize_report, upload
from flsv.utilities.errors import Refused
from flsv.utilities.seeding import seed_global_rngs


def restore_state(
    trainer: L.Trainer,
    data: FederatedDataModule,
    config: FederationConfig,
    packet: Packet,
    site_state: SiteState,
) -> tuple[ParameterSpace, ClientStore, LocalData]:
    """Restore a site's saved state, and return its parameter space, store and :class:`LocalData`."""
    module = trainer.lightning_module
    space = shared_space(module, config)
    client_id = packet.plain["client"]
    store = ClientStore()
    store.load_state_dict({client_id: site_state.get("store", {})})
    store.to(module.device)
    num_classes = packet.plain["classes"]
    manager = ClientManager(
        trainer, data, space, store, first_client=client_id, num_classes=num_classes
    )
    local = manager.locals[0]  # of the only client
    local.set_models(
        initial_model=_stored_model(site_state, "start", module.device),
        model=_stored_model(site_state, "trained", module.device),
        sent=_stored_model(site_state, "sent", module.device),
        tell=_sanitizer(config, space, site_state),
    )
    return space, store, local


def _stored_model(site_state: SiteState, name: str, device: torch.device) -> Tensor | None:
    model = site_state.get(name)
    return None if model is None else model.to(device)


def _sanitizer(config: FederationConfig, space: ParameterSpace, site_state: SiteState) -> Any:
    """Return a function that applies uploads to the site's reports, None before its first training."""
    if "who" not in site_state:
        return None
    client, num_clients, round_index = site_state["who"]
    context = UploadContext(
        client=client,
        num_clients=num_clients,
        num_parameters=space.num_parameters,
        round_index=round_index,
    )
    return partial(sanitize_report, config.uploads, context)


class NumberedData:
    """Wrapper of a site's data module in which the client has the site's id, on which random draws depend."""

    def __init__(self, data: FederatedDataModule, num_clients: int) -> None:
        self._data = data
        self.num_clients = num_clients

    def client_loader(self, client: int, *args: Any, **kwargs: Any) -> Any:
        return self._data.client_loader(0, *args, **kwargs)

    def shown_loader(self, clients: Any, num_batches: Callable[[], int]) -> Any:
        return self._data.shown_loader([0], num_batches)


class SiteTraining(L.Callback, Rounds):
    """Callback that turns a fit into one site's training in one round."""

    _loop: Any = None  # a FederatedFitLoop from `setup` to `teardown`

    def __init__(
        self,
        packet: Packet,
        data: FederatedDataModule,
        site_state: SiteState,
        config: FederationConfig,
        upload_secret: bytes | int,
        limit_train_batches: float = 1.0,
    ) -> None:
        self._packet = packet
        self._instruction = read_instruction(packet)
        self._time_limit = packet.plain.get("seconds", float("inf"))
        self._start_time = time.monotonic()
        self._num_clients = packet.plain["clients"]
        self._numbered_data: Any = NumberedData(data, self._num_clients)
        self._data = data
        self._config = config
        self._limit_train_batches = limit_train_batches
        # The site's saved state, empty if there is none. After the training it is the new state.
        self.site_state = site_state
        self._upload_secret = upload_secret
        self.update: ClientUpdate | None = None

    def loader(self, trainer: L.Trainer) -> CohortLoader:
        instruction = self._instruction
        self._steps = self._local_steps(trainer)
        self._loader = CohortLoader(
            self._numbered_data,
            [instruction.client_id],
            seed=instruction.seed,
            round_index=instruction.round_index,
            lengths=self._steps.lengths,
        )
        return self._loader

    def _local_steps(self, trainer: L.Trainer) -> LocalSteps:
        instruction = self._instruction
        state = FederationState(
            round_index=instruction.round_index,
            seed=instruction.seed,
            num_clients=self._num_clients,
        )
        sampler: Any = self._config.strategies["sampler"]
        site_name = self._packet.plain.get("name", "")
        return LocalSteps(
            trainer,
            self._numbered_data,
            sampler=sampler,
            state=state,
            work_by_client={instruction.client_id: self._config.work_of(site_name)},
            limit_train_batches=self._limit_train_batches,
        )

    def has_update(self) -> bool:
        """Return whether there is an update of the global model's shape."""
        model = global_model(self._instruction)
        if self.update is None or model is None:
            return False
        vector = self.update.vector
        return vector.shape == model.shape and vector.dtype == model.dtype

    def noise_only(self) -> ClientUpdate:
        """Return an update of a private site whose training has failed: the global model with noise."""
        instruction = self._instruction
        store = self.site_state.get("store", {})
        client_tensors = dict(store.get(TENSORS, {}))
        vector, traffic = self._noisy_global_model(client_tensors)
        # Uploads have changed the tensors: the next update will include what compression has not sent.
        self.site_state["store"] = {**store, TENSORS: client_tensors}

        lengths = self._client_batches().lengths
        return ClientUpdate(
            instruction.client_id,
            num_samples=int(self._data.num_samples[0]),
            vector=vector,
            num_steps=self._steps.steps_in_round(lengths, instruction.round_index),
            traffic=traffic,
        )

    def _noisy_global_model(self, client_tensors: dict[str, Tensor]) -> tuple[Tensor, Traffic]:
        """Return the global model after all uploads, which may change ``client_tensors``, and its traffic."""
        instruction = self._instruction
        model = global_model(instruction)
        assert model is not None  # checked before
        upload_seed, upload_secret = self._upload_keys()
        context = UploadContext(
            client=instruction.client_id,
            num_clients=self._num_clients,
            # Models with buffers cannot have noise, which is checked before.
            num_parameters=len(model),
            round_index=instruction.round_index,
            seed=upload_seed,
            state=client_tensors,
            secret=upload_secret,
        )
        return upload(
            self._config.uploads,
            vector=model,
            initial_model=model,
            global_vector=model,
            context=context,
        )

    def _upload_keys(self) -> tuple[int, bytes]:
        if isinstance(self._upload_secret, int):
            return self._upload_secret, b""
        # The seed is a hash, so the key cannot be computed from it.
        digest_of_secret = hmac.digest(self._upload_secret, b"seed", "sha256")
        return int.from_bytes(digest_of_secret[:8], "little") >> 1, self._upload_secret

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._steps.client = self._instruction.client_id
        self._loop = FederatedFitLoop(trainer, rounds=self, steps=self._steps)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._loop.take_loaders_from(lambda: self._loader)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self._loop is None:  # the error was raised before `setup` or after `teardown`
            return
        note = note_on_types(exception, self._loop.epoch_loop.batch)
        if note:
            exception.add_note(f"flsv: {note}")
        self.teardown(trainer, pl_module, "fit")  # Lightning does not call it after an error

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._loop.give_back()
        self._loop = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._data.warn_of_growth()
        self._forward_schedules(trainer)
        space, self._store, self._local_data = restore_state(
            trainer, self._data, self._config, self._packet, self.site_state
        )
        for transformation in self._config.uploads:
            transformation.check(space)
        self._training = self._make_training(trainer, space)
        instruction = read_instruction(self._packet, pl_module.device)
        self._write_models(pl_module, space, instruction)
        self._begin_round(instruction)
        if self._has_lost_its_model():
            with opened(self._local_data) as local:  # the site's data may be read
                local.state[OWN_MODEL] = space.read(pl_module)
        self._training.begin(
            instruction,
            self._local_data,
            num_samples=int(self._data.num_samples[0]),
            lengths=self._client_batches().lengths,
        )

    def _write_models(
        self, module: L.LightningModule, space: ParameterSpace, instruction: Instruction
    ) -> None:
        buffers = self.site_state.get("buffers")
        if buffers is not None:
            self._training.state.restore(buffers)
        model = global_model(instruction)
        if model is not None:
            space.write(module, model)

    def _begin_round(self, instruction: Instruction) -> None:
        seed_global_rngs(instruction.seed, "round", instruction.round_index)
        trainer_state = self._training.state
        trainer_state.remember()
        self._steps.state.global_vector = trainer_state.begin_round()
        self._loop.begin(self._training.client_steps)

    def _client_batches(self) -> Any:
        """Return the batches of the site's only client."""
        return self._loader.batches_of_clients[0]

    def _make_training(self, trainer: L.Trainer, space: ParameterSpace) -> LocalTraining:
        """Make the training of the site's only client, with the seed and the secret key of its noise."""
        upload_seed, upload_secret = self._upload_keys()
        return LocalTraining(
            trainer,
            space,
            parts=self._config,
            store=self._store,
            steps=self._steps,
            upload_seed=upload_seed,
            upload_secret=upload_secret,
        )

    def _has_lost_its_model(self) -> bool:
        """Return whether the site has lost its own model, from which it should continue."""
        has_trained_before = self._packet.plain["continue_from"] is not None
        return has_trained_before and not self.site_state and self._instruction.start is None

    def on_train_batch_end(self, *_: Any) -> None:
        if time.monotonic() - self._start_time > self._time_limit:
            raise Refused(
                f"its training was not complete after {self._time_limit} s, so it has stopped"
            )

    def run_round(self) -> None:
        client_batches = self._client_batches()
        self._loop.train_client(self._loader, client_batches.epochs)
        if self._training.is_trained:
            self._end_training()
            self._loop.trainer.should_stop = True  # each round is a separate fit
        self._loop.end_round()

    def _end_training(self) -> None:
        self.update = self._training.end()
        if self.update is None:
            return  # the site has not taken part in the round
        self._training.state.end_round(self.update.vector)
        self._loop.phase = Phase.BETWEEN_ROUNDS
        self._store.commit()
        self._store.to("cpu")
        with opened(self._local_data) as local:  # the site's data may be read
            self.site_state = self._state_after_training(local)

    def _state_after_training(self, local: LocalData) -> SiteState:
        client_id = self._instruction.client_id
        has_sent_trained_model = local.sent is local.model
        return {
            "store": self._store.state_dict().get(client_id, {}),
            "buffers": self._training.state.buffers(),
            "start": local.start,
            "trained": local.model,
            "sent": None if has_sent_trained_model else local.sent,
            "who": [client_id, self._num_clients, self._instruction.round_index],
        }

    def _forward_schedules(self, trainer: L.Trainer) -> None:
        # Each round is a new fit, in which schedulers start from the beginning.
        pace = self.site_state.get("store", {}).get("pace", {})
        # The states of the schedulers that local training steps, by their index. They are loaded from here.
        stored_states = pace.get("schedulers", {})
        for index, config in enumerate(trainer.lr_scheduler_configs):
            if config.interval != "epoch" or index in stored_states:
                continue
            num_earlier_steps = self._instruction.round_index // config.frequency
            with warnings.catch_warnings():
                # torch warns about schedulers that step before the optimizer.
                warnings.simplefilter("ignore")
                for _ in range(num_earlier_steps):
                    config.scheduler.step()  # type: ignore[call-arg]  # ReduceLROnPlateau raises its own error
