"""Site: the participant's side of a federation across processes."""

from __future__ import annotations

import hmac
import importlib
import inspect
import logging
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from flsv._lightning.evaluation import count_answers
from flsv._lightning.fit_loop import FederatedFitLoop, Rounds
from flsv.configuration.federation_config import FederationConfig
from flsv.configuration.identity import sample_hashes
from flsv.core import ClientUpdate, FederationState, LocalData, opened
from flsv.core.needs import needs_of
from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule, OneClient, Splits
from flsv.engines.client_manager import ClientManager
from flsv.engines.engine import shared_space
from flsv.engines.remote.messages import (
    TRAINING_LOSS,
    Packet,
    Refused,
    check_request,
    failure_packet,
    global_model,
    on_cpu,
    pack,
    read_instruction,
    unpack,
    update_packet,
)
from flsv.engines.remote.policy import QUESTIONS, SitePolicy
from flsv.engines.remote.site_memory import (
    SiteMemory,
    SiteState,
    keyed_hash,
    own_secret,
    visit_secret,
)
from flsv.engines.remote.tables import (
    TABLE_SUMMARY,
    packet_of_summary,
    state_of_table,
    table_summary,
    take_encoder,
)
from flsv.engines.remote.transport import agreement, check_agreement
from flsv.personalization.base import OWN_MODEL
from flsv.scores import OWN_SCORES
from flsv.scores.class_scores import ClassScores, plain_scores
from flsv.training.algorithms.base import used_model
from flsv.training.client_batches import CohortLoader, LocalSteps
from flsv.training.local_training import LocalTraining
from flsv.training.store import TENSORS, ClientStore
from flsv.training.training_step import note_on_types
from flsv.uploads import UploadContext, sanitize_report, upload
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import seed_global_rngs

_log = logging.getLogger(__name__)
#: File in the site's folder with the privacy loss of its updates so far.
LEDGER_FILE = "privacy.json"
_QUIET_TRAINER_OPTIONS: dict[str, Any] = {"num_sanity_val_steps": 0, "limit_val_batches": 0}
_QUIET_TRAINER_OPTIONS |= dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Site:
    """A participant of a federation across processes.

    Args:
        module: a function that makes the LightningModule, the same as the server's module.
        data: a function that makes the site's own data: a LightningDataModule, or a FederatedDataModule with one client
            (which can hold out test and validation samples).
        settings: a function that makes the federation's loop, the same as the server's loop.
        folder: the site's folder, for its state between rounds.
        trainer: arguments of the site's Trainer, such as ``{"accelerator": "gpu"}``.
        questions: functions, beside flsv's own, that the server may let the site compute on its data, as
            ``"package.module:function"``.
        upload_seed: the seed of uploads' random numbers, such as the noise of a private update, to compare a site with
            a simulation. With None they follow from this site's secret, so that the server cannot subtract the noise.
        policy: the limits that the site's owner sets, if any.

    Attributes:
        policy: the limits that apply to the next message.

    Raises:
        ConfigurationError: the data module has several clients.
    """

    def __init__(
        self,
        module: Callable[[], L.LightningModule],
        data: Callable[[], L.LightningDataModule],
        settings: Callable[[], Any],
        folder: Path,
        trainer: Mapping[str, Any] | None = None,
        questions: Sequence[str] = (),
        upload_seed: int | None = None,
        policy: SitePolicy | None = None,
    ) -> None:
        self._make_module = module
        self._folder = folder
        federation = settings()
        self._config = federation.config
        self._trainer_options = dict(trainer or {})
        self._limit_train_batches = self._trainer_options.pop("limit_train_batches", 1.0)
        self._questions = questions
        self._upload_seed = upload_seed
        self._secret = own_secret(folder)
        self.policy = policy or SitePolicy()

        site_data = data()
        if not isinstance(site_data, FederatedDataModule):
            site_data = FederatedDataModule(site_data, OneClient(), splits=Splits(server_val=0.0))
        self._data = site_data
        self._hash_by_encoding: dict[tuple[int, str | None], str] = {}
        self._configured_encoder = site_data.encoder
        site_data.prepare_data()
        site_data.deal_from(0)
        if site_data.num_clients != 1:
            raise ConfigurationError(
                f"this site has data of {site_data.num_clients} clients: a site is one. Use OneClient()."
            )
        self._agreement = agreement(module(), federation)

    def say_policy(self, path: object, policy: SitePolicy) -> None:
        """Log at the site's start which policy it has, and what updates without noise spend."""
        if path is None:
            text = "has no policy: it does all that the app asks"
        else:
            text = f"has the policy {path}: {policy}"
        if not self._config.is_private:
            text += ". Its updates leave without noise, which exceeds any max_epsilon that a policy sets later"
        rank_zero_info(f"flsv: this site {text}.")

    def answer(self, packet: Packet, sender: str = "server") -> Packet:
        """Reply to a message of the server, and log it."""
        # The reply reports an error by class and line only, because its text may quote samples. A refusal's text is
        # sent.
        replies = {
            "hello": self._hello,
            "agree": self._agree,
            "train": self._train,
            "ask": self._ask,
            "test": self._test,
        }
        try:
            subject = {}
            for name in ("run", "round", "question"):
                if name in packet.plain:
                    subject[name] = packet.plain[name]
            rank_zero_info(
                f"flsv: {sender} asks {packet.kind!r:.20} {subject!r:.200}, sha256 {packet.digest.hex()}"
            )
            check_agreement(self._agreement, packet.plain.get("agreement", {}))
            if self._config.is_private and packet.kind not in ("hello", "train"):
                raise Refused(
                    f"its updates are private, and its answer to {packet.kind!r:.20} would have no noise"
                )
            client_id = packet.plain.get("client")
            if client_id is not None:
                self._data.deal_from(client_id)
            take_encoder(self._data, packet, self._configured_encoder, self._config.is_private)
            self._check_samples(packet)
            return replies[packet.kind](packet)
        except Exception as error:
            _log.exception("%r could not be answered", packet.kind)
            return failure_packet(error)

    def _hello(self, packet: Packet) -> Packet:
        self.policy.noise(self._config.uploads)  # both raise an error if the policy refuses
        self.policy.check_told(self._needed_reports())
        data: Any = self._data
        sizes = {split: len(data.client_indices(0, split)) for split in ("train", "val", "test")}
        reply = {"sizes": sizes, "table": state_of_table(data), "contents": self._contents()}
        return Packet("hello", reply)

    def _contents(self) -> str | None:
        """Return the name of the site's secret, and a hash of its samples that only who knows the secret can compute.

        It is None for a table that waits for an encoder. The hash of a private site does not depend on its samples.
        """
        if self._data.needs_encoder:
            return None
        encoding = (self._data.partitioner.first_client, state_of_table(self._data))
        if encoding not in self._hash_by_encoding:
            hash_of_samples = (
                "private" if self._config.is_private else sample_hashes(self._data)["0"]
            )
            self._hash_by_encoding[encoding] = keyed_hash(self._secret, hash_of_samples)
        name_of_secret = keyed_hash(self._secret, "name")
        return f"{name_of_secret} {self._hash_by_encoding[encoding]}"

    def _check_samples(self, packet: Packet) -> None:
        """Raise Refused if the samples are not those of which this site told when the run began."""
        told_before = packet.plain.get("contents")
        contents = self._contents()
        if told_before is None or contents is None:
            return
        name_of_secret, _, _ = contents.partition(" ")
        if told_before.startswith(name_of_secret) and told_before != contents:
            raise Refused(
                "its samples or labels are other ones than when this run began. Give it those again, or start a new "
                "run in another folder"
            )

    def _agree(self, packet: Packet) -> Packet:
        self.policy.check_listed(TABLE_SUMMARY)
        return packet_of_summary(table_summary(self._data, self.policy.min_rows))

    def _needed_reports(self) -> list[str]:
        report_names: list[str] = []
        metrics = self._config.metrics.values()
        if any("losses" in needs_of(metric) for metric in metrics):
            report_names.append(TRAINING_LOSS)
        for strategy in self._config.strategies.values():
            report_names += strategy.reports
        return report_names

    def _train(self, packet: Packet) -> Packet:
        memory = SiteMemory(self._folder, packet.plain["run"])
        state = memory.after(packet.plain["counted"])
        secret: bytes | int | None = self._upload_seed
        if secret is None:
            secret = visit_secret(self._secret, packet, state)
        if self._config.is_private:
            check_request(packet)

        visit = SiteVisit(
            packet=packet,
            data=self._data,
            site_state=state or {},
            config=self._config,
            upload_secret=secret,
            limit_train_batches=self._limit_train_batches,
        )
        self.policy.check_told(self._needed_reports())
        self.policy.spend(self._config.uploads, self._folder / LEDGER_FILE)
        trainer = self._trainer(packet, packet.plain["rounds"], visit)
        module = self._make_module()
        loader = visit.loader(trainer)
        if self._config.is_private:
            update = self._private_update(trainer, module, visit, loader)
        else:
            trainer.fit(module, loader)
            update = visit.update

        if update is None:
            return Packet("broken")
        name = packet.digest.hex()
        memory.keep(name, visit.site_state, [packet.plain["counted"]])
        return update_packet(
            update, name, lost=state is None, withheld=self.policy.withheld([TRAINING_LOSS])
        )

    def _private_update(
        self, trainer: L.Trainer, module: L.LightningModule, visit: SiteVisit, loader: CohortLoader
    ) -> ClientUpdate | None:
        """Train, and return the noised update, or noise alone if there is none, whatever has happened."""
        # That training failed, or how, may depend on single samples. So only the noised update leaves the site.
        handler_before = signal.getsignal(signal.SIGINT)
        try:
            trainer.fit(module, loader)
        except BaseException:
            _log.exception(
                "training has failed: without an update this site sends noise alone. Leave the run, or mend the cause"
            )
        finally:
            # Lightning ignores further interrupts after the first, since it ends the process.
            if signal.getsignal(signal.SIGINT) is not handler_before:
                signal.signal(signal.SIGINT, handler_before)
        if visit.has_update():
            return visit.update
        _log.error("this site's update is noise alone")
        return visit.noise_alone()

    def _test(self, packet: Packet) -> Packet:
        site_state = self._state_for(packet)
        withheld = self.policy.withheld(OWN_SCORES)
        if len(withheld) == len(OWN_SCORES):
            self.policy.check_told(OWN_SCORES)  # raises Refused: nothing is left to report
        scores = self._within_fit(packet, partial(self._score_own_model, packet, site_state))
        scores.update(dict.fromkeys(withheld, float("nan")))
        return Packet("tested", {**scores, "withheld": withheld})

    def _score_own_model(
        self, packet: Packet, site_state: SiteState, trainer: L.Trainer
    ) -> dict[str, float]:
        module = trainer.lightning_module
        instruction = read_instruction(packet)
        space, _, local = restore_state(trainer, self._data, self._config, packet, site_state)
        with opened(local):  # the site's data may be read
            model = used_model(local, instruction, self._config.strategies)
            assert model is not None
            space.write(module, model)
            space.write_private(module, dict(local.private))
        class_scores = ClassScores(packet.plain["classes"] or self._data.num_classes)
        count_answers(trainer, self._data.client_loader(0, "test"), class_scores)
        return plain_scores(class_scores)

    def _ask(self, packet: Packet) -> Packet:
        question_name = packet.plain["question"]  # "module:function"
        self.policy.check_question(question_name, self._questions)
        module_name, _, function_name = question_name.partition(":")
        question = getattr(importlib.import_module(module_name), function_name)
        # The score that an answer tells: the question's argument, or else what QUESTIONS lists.
        args, kwargs = unpack(packet.plain["arguments"], packet.tensors)
        bound_arguments = inspect.signature(question).bind(None, *args, **kwargs)  # None: the data
        bound_arguments.apply_defaults()
        told_score = bound_arguments.arguments.get("performance")
        if told_score is None:
            told_score = QUESTIONS.get(question_name)
        if told_score is not None:
            self.policy.check_told([told_score])

        site_state = self._state_for(packet)
        call = partial(self._call_question, packet, question, site_state)
        answer, tensors = pack(self._within_fit(packet, call))
        visit = packet.digest.hex()
        memory = SiteMemory(self._folder, packet.plain["run"])
        # The earlier states stay, since the server may discard this answer.
        memory.keep(visit, site_state, visits_to_keep=memory.load_all())
        return Packet("answer", {"answer": answer, "visit": visit}, on_cpu(tensors))

    def _call_question(
        self,
        packet: Packet,
        question: Callable[..., Any],
        site_state: SiteState,
        trainer: L.Trainer,
    ) -> Any:
        # What the question has changed is written into `site_state`.
        _, _, local = restore_state(trainer, self._data, self._config, packet, site_state)
        arguments = unpack(packet.plain["arguments"], packet.tensors)
        args, kwargs = move_data_to_device(arguments, trainer.lightning_module.device)
        with opened(local):
            answer = question(local, *args, **kwargs)
            store = dict(site_state.get("store", {}))
            store[TENSORS] = {name: tensor.cpu() for name, tensor in local.state.items()}
            site_state["store"] = store
        return answer

    def _within_fit(self, packet: Packet, compute: Callable[[L.Trainer], Any]) -> Any:
        # A fit without any round prepares the trainer.
        results: list[Any] = []

        def on_fit_start(trainer: L.Trainer, module: L.LightningModule) -> None:
            results.append(compute(trainer))

        callback = LambdaCallback(on_fit_start=on_fit_start)
        trainer = self._trainer(packet, rounds=0, callback=callback)
        trainer.fit(self._make_module(), self._data.client_loader(client=0))
        return results[0]

    def _trainer(self, packet: Packet, rounds: int, callback: L.Callback) -> L.Trainer:
        options = {**_QUIET_TRAINER_OPTIONS, **self._trainer_options}
        options["callbacks"] = [*options.get("callbacks", []), callback]
        options["max_epochs"] = rounds
        trainer = L.Trainer(**options)
        if rounds:
            # Hooks see the round as the epoch: all counters of epochs are set to it.
            progress = trainer.fit_loop.epoch_progress.current
            for counter_name in vars(progress):
                setattr(progress, counter_name, packet.plain["round"])
        return trainer

    def _state_for(self, packet: Packet) -> SiteState:
        """Return the saved state from which this site continues, as the server requests."""
        memory = SiteMemory(self._folder, packet.plain["run"])
        state = memory.after(packet.plain["counted"])  # the visit that the server has accepted
        if state is None:
            raise LookupError(
                "this site no longer holds what it kept of the round that it is asked about."
            )
        return dict(state)


def restore_state(
    trainer: L.Trainer,
    data: FederatedDataModule,
    config: FederationConfig,
    packet: Packet,
    site_state: SiteState,
) -> tuple[ParameterSpace, ClientStore, LocalData]:
    """Restore a site's saved state, and return its parameter space, store and :class:`LocalData`."""
    module = trainer.lightning_module
    client = packet.plain["client"]
    space = shared_space(module, config)
    store = ClientStore()
    store.load_state_dict({client: site_state.get("store", {})})
    store.to(module.device)
    manager = ClientManager(
        trainer,
        data,
        space=space,
        store=store,
        first_client=client,
        num_classes=packet.plain["classes"],
    )
    (local,) = manager.locals

    tell = None
    if "who" in site_state:
        client, num_clients, round_index = site_state["who"]
        context = UploadContext(client, num_clients, space.num_parameters, round_index)
        tell = partial(sanitize_report, config.uploads, context)
    models = []
    for name in ("start", "trained", "sent"):
        model = site_state.get(name)
        if model is not None:
            model = model.to(module.device)
        models.append(model)
    initial_model, trained, sent = models
    local.set_models(initial_model, trained, sent=sent, tell=tell)
    return space, store, local


class NumberedData:
    """Wrapper of a site's data module that gives its client the site's id. Random draws depend on it."""

    def __init__(self, data: FederatedDataModule, num_clients: int) -> None:
        self._data = data
        self.num_clients = num_clients

    def client_loader(self, client: int, *args: Any, **kwargs: Any) -> Any:
        return self._data.client_loader(0, *args, **kwargs)


class SiteVisit(L.Callback, Rounds):
    """Callback that turns a fit into one site's training in one round."""

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
        # The site's state after an earlier round, empty if there is none.
        self.site_state = site_state
        self._upload_secret = upload_secret
        self.update: ClientUpdate | None = None

    def loader(self, trainer: L.Trainer) -> CohortLoader:
        instruction = self._instruction
        state = FederationState(
            round_index=instruction.round_index,
            seed=instruction.seed,
            num_clients=self._num_clients,
        )
        sampler: Any = self._config.strategies["sampler"]
        site_name = self._packet.plain.get("name", "")
        work_by_client = {instruction.client_id: self._config.work_of(site_name)}
        self._steps = LocalSteps(
            trainer, self._numbered_data, sampler, state, work_by_client, self._limit_train_batches
        )
        self._loader = CohortLoader(
            self._numbered_data,
            [instruction.client_id],
            seed=instruction.seed,
            round_index=instruction.round_index,
            lengths=self._steps.lengths,
        )
        return self._loader

    def has_update(self) -> bool:
        """Return whether there is an update of the global model's shape."""
        model = global_model(self._instruction)
        if self.update is None or model is None:
            return False
        vector = self.update.vector
        return vector.shape == model.shape and vector.dtype == model.dtype

    def noise_alone(self) -> ClientUpdate:
        """Return the update of a private site that has none: the global model, as its uploads send it."""
        instruction = self._instruction
        model = global_model(instruction)
        assert model is not None  # checked before
        upload_seed, upload_secret = self._upload_keys()
        store = self.site_state.get("store", {})
        tensors = dict(store.get(TENSORS, {}))
        context = UploadContext(
            client=instruction.client_id,
            num_clients=self._num_clients,
            num_parameters=len(model),  # noise is refused for models with buffers
            round_index=instruction.round_index,
            seed=upload_seed,
            state=tensors,
            secret=upload_secret,
        )
        vector, traffic = upload(self._config.uploads, model, model, model, context)
        # What compression has not sent is part of the next update, as after any other.
        self.site_state["store"] = {**store, TENSORS: tensors}

        (visit,) = self._loader.visits
        return ClientUpdate(
            instruction.client_id,
            num_samples=int(self._data.num_samples[0]),
            vector=vector,
            num_steps=self._steps.steps_in_round(visit.lengths, instruction.round_index),
            traffic=traffic,
        )

    def _upload_keys(self) -> tuple[int, bytes]:
        if isinstance(self._upload_secret, int):
            return self._upload_secret, b""
        # What a seed gives away tells nothing of the key.
        digest_of_secret = hmac.digest(self._upload_secret, b"seed", "sha256")
        return int.from_bytes(digest_of_secret[:8], "little") >> 1, self._upload_secret

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._steps.client = self._instruction.client_id
        self._loop = FederatedFitLoop(trainer, rounds=self)
        self._step_counts = self._steps.patch_step_counts()
        self._batch_counts = self._steps.patch_batch_counts()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._batch_counts.restore()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        loop = trainer.fit_loop
        if not isinstance(loop, FederatedFitLoop):
            return
        note = note_on_types(exception, loop.batch)
        if note:
            exception.add_note(f"flsv: {note}")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._batch_counts.restore()
        self._step_counts.restore()
        self._loop.give_back()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._data.warn_of_growth()
        self._forward_schedules(trainer)
        space, self._store, self._local_data = restore_state(
            trainer, self._data, self._config, self._packet, self.site_state
        )
        for transformation in self._config.uploads:
            transformation.check(space)
        training = LocalTraining(
            trainer, space, self._config, self._store, self._num_clients, self._steps
        )
        self._training = training
        training.upload_seed, training.upload_secret = self._upload_keys()
        buffers = self.site_state.get("buffers")
        if buffers is not None:
            training.state.restore(buffers)

        instruction = read_instruction(self._packet, pl_module.device)
        model = global_model(instruction)
        if model is not None:
            space.write(pl_module, model)
        seed_global_rngs(instruction.seed, "round", instruction.round_index)
        training.state.remember()
        training.state.begin_round()
        self._loop.begin(training.begin_batch, self._end_batch)

        if self._has_lost_its_model():
            with opened(self._local_data) as local:
                local.state[OWN_MODEL] = space.read(pl_module)
        (visit,) = self._loader.visits
        num_samples = int(self._data.num_samples[0])
        training.begin(instruction, self._local_data, num_samples, visit.lengths)

    def _has_lost_its_model(self) -> bool:
        """Return whether the server sends no model, since this site should have its own, and it is gone."""
        has_trained_before = self._packet.plain["counted"] is not None
        return has_trained_before and not self.site_state and self._instruction.start is None

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        self._training.begin_step(optimizer)

    def _end_batch(self, loss: Tensor | None) -> None:
        if time.monotonic() - self._start_time > self._time_limit:
            raise Refused(f"it has stopped, not ready after {self._time_limit} s")
        self._training.end_batch(loss)

    def run_round(self) -> None:
        (visit,) = self._loader.visits  # a site trains one client
        self._loader.train(visit, self._loop.train_epoch)
        if self._training.is_trained:
            self._end_training()
            self._loop.trainer.should_stop = True  # each round is a fit of its own
        self._loop.end_round()

    def _end_training(self) -> None:
        self.update = self._training.end()
        if self.update is None:
            return  # as if the site had not taken part
        trainer_state = self._training.state
        trainer_state.end_round(self.update.vector)
        self._store.commit()
        self._store.to("cpu")
        client_id = self._instruction.client_id
        with opened(self._local_data) as local:  # the site's data may be read
            has_sent_trained_model = local.sent is local.model
            other_sent_model = None if has_sent_trained_model else local.sent
            self.site_state = {
                "store": self._store.state_dict().get(client_id, {}),
                "buffers": trainer_state.buffers(),
                "start": local.start,
                "trained": local.model,
                "sent": other_sent_model,
                "who": [client_id, self._num_clients, self._instruction.round_index],
            }

    def _forward_schedules(self, trainer: L.Trainer) -> None:
        # Each round is a new fit, in which schedulers start from the beginning.
        for config in trainer.lr_scheduler_configs:
            if config.interval != "epoch":
                continue
            num_earlier_steps = self._instruction.round_index // config.frequency
            with warnings.catch_warnings():
                # torch warns of schedules that step before the optimizer.
                warnings.simplefilter("ignore")
                for _ in range(num_earlier_steps):
                    config.scheduler.step()  # type: ignore[call-arg]  # ReduceLROnPlateau says so itself
