"""Site: the client side of a federation across processes."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import rank_zero_info

from flsv._lightning.evaluation import count_responses
from flsv.configuration.identity import sample_hashes
from flsv.core import ClientUpdate, Numbers, RespondingClient, opened
from flsv.core.needs import requirements_of
from flsv.core.responses import MIN_HELD_OUT, expected_response, rounded_response
from flsv.data import FederatedDataModule, OneClient, Splits
from flsv.engines.engine import shared_space
from flsv.games.module_copies import ModuleCopies
from flsv.scores import OWN_SCORES
from flsv.scores.class_scores import ClassScores, plain_scores
from flsv.sites.ledgers import SiteAnswers
from flsv.sites.messages import (
    Packet,
    check_model,
    check_request,
    check_shapes,
    failure_packet,
    named_cause,
    on_cpu,
    pack,
    read_instruction,
    unpack,
    update_packet,
)
from flsv.sites.policy import SitePolicy
from flsv.sites.requests import (
    REQUESTED_FUNCTIONS,
    SCORES_OF_CLASSES,
    SPLITS,
    TRAINING_LOSS,
    ResponseScore,
    numbers_of_request,
    numbers_of_run,
    requested_functions,
    score_of_response,
    scores_of_responses,
)
from flsv.sites.site_memory import (
    SiteMemory,
    SiteState,
    keyed_hash,
    noise_key,
    own_secret,
)
from flsv.sites.site_training import SiteTraining, restore_state
from flsv.sites.transport import agreement, check_agreement, hash_of_class_names
from flsv.training.algorithms.base import used_model
from flsv.training.client_batches import CohortLoader
from flsv.training.store import TENSORS
from flsv.utilities.errors import Refused
from flsv.utilities.plain_values import digest

_log = logging.getLogger(__name__)
#: File in the site's folder with the total privacy loss of its updates.
LEDGER_FILE = "privacy.json"
_QUIET_TRAINER_OPTIONS: dict[str, Any] = {"num_sanity_val_steps": 0, "limit_val_batches": 0}
_QUIET_TRAINER_OPTIONS |= dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Site:
    """A client of a federation across processes.

    Args:
        module: a function that makes the LightningModule, the same as the server's module.
        data: a function that makes the site's own data module: a LightningDataModule, or a FederatedDataModule with one
            client, which can hold out test and validation samples.
        settings: a function that makes the federation's loop, the same as the server's loop.
        folder: the folder in which the site saves its state between rounds.
        trainer: arguments of the site's Trainer, such as ``{"accelerator": "gpu"}``.
        functions: functions, beside flsv's own, that the server may run on the site's data, as
            ``"package.module:function"``.
        upload_seed: the seed of uploads' random numbers, such as the noise of a private update, to compare a site with
            a simulation. With None they are derived from the site's secret, so that the server cannot subtract the
            noise.
        policy: the limits that the site's owner sets, if any.
        run_size: the numbers of ``"clients"`` and ``"rounds"``, 0 or None if the app does not set them.

    Attributes:
        policy: the limits for the next message.
    """

    def __init__(
        self,
        module: Callable[[], L.LightningModule],
        data: Callable[[], L.LightningDataModule],
        settings: Callable[[], Any],
        folder: Path,
        trainer: Mapping[str, Any] | None = None,
        functions: Sequence[str] = (),
        upload_seed: int | None = None,
        policy: SitePolicy | None = None,
        run_size: Mapping[str, int | None] = MappingProxyType({}),
    ) -> None:
        self._make_module = module
        self._folder = folder
        self._functions = functions
        self._upload_seed = upload_seed
        self.policy = policy or SitePolicy()
        self._trainer_options = dict(trainer or {})
        self._limit_train_batches = self._trainer_options.pop("limit_train_batches", 1.0)
        # Only the numbers that the app sets.
        self._size_of_app = {name: number for name, number in run_size.items() if number}

        loop = settings()
        self._config = loop.config
        self._answers = SiteAnswers(folder, self._default_max_answers)
        self._secret = own_secret(folder)

        self._data = _federated(data())
        self._data.prepare_data()
        self._hash_by_client_id: dict[int, str] = {}
        site_module = module()
        self._agreement = agreement(site_module, loop)
        self._space = shared_space(site_module, self._config)
        self._flsv_functions = requested_functions(self._config)

    def log_policy(self, path: object, policy: SitePolicy) -> None:
        """Log at the site's start which policy it has, and what updates without noise spend."""
        if path is None:
            text = "has no policy, so it does everything that the app requests"
        else:
            text = f"has the policy {path}: {policy}"
        if not self._config.is_private:
            text += ". Its updates have no noise, so a policy that sets max_epsilon later will refuse every message"
        rank_zero_info(f"flsv: this site {text}.")

    def respond(self, packet: Packet, sender: str = "server") -> Packet:
        """Reply to a message of the server, and log it."""
        try:
            subject = {name: packet.plain.get(name) for name in ("run", "round", "function")}
            rank_zero_info(
                f"flsv: {sender} requests {packet.kind!r:.20} {subject!r:.200}, sha256 {packet.digest.hex()}"
            )
            reply = self._reply(packet)
        except Exception as error:
            reply = self._logged_failure(packet, error)
        message_name = packet.plain.get("message")
        if not isinstance(message_name, str):
            message_name = None  # a nested value might not be written as JSON
        return replace(reply, plain={**reply.plain, "message": message_name})

    def _reply(self, packet: Packet) -> Packet:
        handlers = {
            "handshake": self._handshake,
            "train": self._train,
            "query": self._query,
            "test": self._test,
        }
        if packet.kind not in handlers:
            raise Refused(f"the server's message has the unknown kind {packet.kind!r:.20}")
        check_agreement(self._agreement, packet.plain.get("agreement", {}))
        check_request(packet)
        check_shapes(packet, self._space.size)
        self._check_size(packet.plain)
        self._check_policy(packet)
        self._set_up(packet.plain["client"])
        self._count_sizes(packet.plain)
        self._check_samples(packet)
        return handlers[packet.kind](packet)

    def _logged_failure(self, packet: Packet, error: Exception) -> Packet:
        _log.error("The site could not reply to a %.20r.", packet.kind, exc_info=error)
        return failure_packet(error)

    def _check_policy(self, packet: Packet) -> None:
        """Raise Refused unless the owner's policy allows a reply to this message of any kind."""
        policy = self.policy
        all_functions = [*REQUESTED_FUNCTIONS, *self._functions]
        policy.check_names(scores_of_responses(self._config), all_functions)
        policy.noise(self._config.uploads)  # raises Refused if required noise is missing
        policy.check_reported(self._needed_reports())
        has_no_noise = packet.kind not in ("handshake", "train")
        if self._config.is_private and has_no_noise:
            raise Refused(
                f"its updates are private, but its reply to {packet.kind!r:.20} would have no noise"
            )
        if packet.kind == "query":
            functions_of_loop = [*self._flsv_functions, *self._functions]
            policy.check_function(packet.plain["function"], functions_of_loop)
        scores = [score.name for score in self._requested_scores(packet)]
        is_all_withheld = len(policy.withheld(scores)) == len(scores)
        if is_all_withheld:
            policy.check_reported(scores)  # raises Refused if any are requested

    def _requested_scores(self, packet: Packet) -> list[ResponseScore]:
        if packet.kind == "test":
            return [ResponseScore(name, "test") for name in OWN_SCORES]
        if packet.kind != "query":
            return []
        function = resolve_name(packet.plain["function"])
        args, kwargs = unpack(packet.plain["arguments"], packet.tensors)
        score = score_of_response(self._config, function, args, kwargs)
        return [] if score is None else [score]

    def _check_size(self, plain: Mapping[str, Any]) -> None:
        """Raise Refused if the server has other numbers of sites or rounds than the app."""
        for name, number in self._size_of_app.items():
            if plain.get(name, number) != number:
                raise Refused(
                    f"its app has {number} {name}, but the server has {plain[name]!r:.40}. Start both from the same app"
                )

    def _default_max_answers(self, run: Mapping[str, int]) -> int:
        """Return the default of the policy's ``max_answers``, twice the numbers that a run requests."""
        size = {**run, **self._size_of_app}
        functions = {**self._flsv_functions, **dict.fromkeys(self._functions, 1)}
        return 2 * numbers_of_run(
            self._config,
            functions,
            num_clients=size.get("clients", 1),
            num_rounds=size.get("rounds", 1),
            num_classes=self._num_classes,
        )

    @property
    def _num_classes(self) -> int:
        head = self._space.head
        return self._data.num_classes if head is None else head.num_classes

    def _set_up(self, client_id: int) -> None:
        """Split the site's samples with the random numbers of the client id that the server gives it."""
        self._data.set_up_site(client_id)
        if self._data.num_clients != 1:
            raise Refused(
                f"its data module has {self._data.num_clients} clients, but a site is one client. Use OneClient()"
            )
        source = self._data.division.source
        if source.missing_from_dictionary:
            raise Refused(f"its data dictionary is not complete: {source.missing_from_dictionary}")
        if source.is_inferred:
            raise Refused(
                "its table has no data dictionary. Infer its part with flsv data --write, merge all sites' parts with "
                "flsv data --merge, and pass the same file to all sites and the server: dictionary=..."
            )

    def _handshake(self, packet: Packet) -> Packet:
        dictionary = self._data.dictionary
        if dictionary is not None:
            _check_classes(dictionary, packet.plain.get("classes"))
        rank_zero_info(f"flsv: this site's classes are {', '.join(self._data.class_names):.600}.")
        reply = {
            "sizes": self._sizes(),
            "dictionary": None if dictionary is None else dictionary.hash,
            "class_names": hash_of_class_names(self._data),
            "contents": self._contents(),
        }
        return Packet("handshake", reply)

    def _count_sizes(self, plain: Mapping[str, Any]) -> None:
        """Count the sizes of the splits of the message's client id. An update tells them, too."""
        sizes = self._sizes()
        # Whether the sizes under another client id differ may depend on the samples, so they count in any case.
        self._answers.count(
            f"sizes {plain['client']} {sizes}",
            len(sizes),
            plain=plain,
            limit=self.policy.max_answers,
            first_of="sizes",
        )

    def _sizes(self) -> dict[str, int]:
        data: Any = self._data
        return {split: len(data.client_indices(0, split)) for split in SPLITS}

    def _contents(self) -> str:
        """Return the fingerprint of the samples: the secret's name and a keyed hash, constant at a private site."""
        client_id = self._data.partitioner.first_client
        if client_id not in self._hash_by_client_id:
            hash_of_samples = "private"
            if not self._config.is_private:
                hash_of_samples = sample_hashes(self._data)["0"]
            self._hash_by_client_id[client_id] = keyed_hash(
                self._secret, f"{client_id} {hash_of_samples}"
            )
        name_of_secret = keyed_hash(self._secret, "name")
        return f"{name_of_secret} {self._hash_by_client_id[client_id]}"

    def _check_samples(self, packet: Packet) -> None:
        """Raise Refused if the samples are not those of the run's start."""
        earlier_contents = packet.plain.get("contents")
        contents = self._contents()
        if earlier_contents is None:
            return
        name_of_secret, _, _ = contents.partition(" ")
        if earlier_contents.startswith(name_of_secret) and earlier_contents != contents:
            raise Refused(
                "its samples or labels differ from those at the start of this run. Restore the earlier ones, or start "
                "a new run in another folder"
            )

    def _needed_reports(self) -> list[str]:
        report_names = []
        if any("losses" in requirements_of(metric) for metric in self._config.metrics.values()):
            report_names.append(TRAINING_LOSS)
        for strategy in self._config.strategies.values():
            report_names += strategy.reports
        return report_names

    def _train(self, packet: Packet) -> Packet:
        """Train, and store the update for the same message, which neither trains nor spends again."""
        memory = self._memory(packet)
        name = self._answer_name(packet)
        with memory.one_training():
            stored_update = memory.load_update(name)
            if stored_update is not None:
                return stored_update
            update = self._trained(packet, memory)
            memory.save_update(name, update)
        return update

    def _answer_name(self, packet: Packet) -> str:
        """Return the name under which the answer to a message is stored."""
        return digest([packet.digest, self.policy.reports]).hex()

    def _trained(self, packet: Packet, memory: SiteMemory) -> Packet:
        state = memory.load(packet.plain["continue_from"])
        training = self._make_training(packet, state)
        self.policy.spend(self._config.uploads, self._folder / LEDGER_FILE)
        update = self._run_training(training, packet)
        if update is None:
            return Packet("broken")

        state_name = packet.digest.hex()
        memory.save(state_name, training.site_state, [packet.plain["continue_from"]])
        withheld = self.policy.withheld([TRAINING_LOSS])
        return update_packet(update, state_name, lost=state is None, withheld=withheld)

    def _make_training(self, packet: Packet, state: SiteState | None) -> SiteTraining:
        upload_secret: bytes | int | None = self._upload_seed
        if upload_secret is None:
            upload_secret = noise_key(self._secret, packet, state)
        if self._config.is_private:
            check_model(packet)
        return SiteTraining(
            packet=packet,
            data=self._data,
            site_state=state or {},
            config=self._config,
            upload_secret=upload_secret,
            limit_train_batches=self._limit_train_batches,
        )

    def _run_training(self, training: SiteTraining, packet: Packet) -> ClientUpdate | None:
        """Train, and return the update, None if it is not finite."""
        trainer = self._make_trainer(packet, packet.plain["rounds"], training)
        module = self._make_module()
        loader = training.loader(trainer)
        if self._config.is_private:
            return self._private_update(trainer, module, training, loader)
        trainer.fit(module, loader)
        loader.warn_of_left_out(set())
        return training.update

    def _private_update(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        training: SiteTraining,
        loader: CohortLoader,
    ) -> ClientUpdate | None:
        """Train, and return the update with noise. After an error return the global model with noise."""
        # Whether training fails, and how, may depend on single samples. So only an update with noise leaves the site.
        with _interrupts_stay():
            try:
                trainer.fit(module, loader)
            except BaseException:
                _log.exception(
                    "Training has failed. Without an update the site sends noise only. Solve the error, or leave the "
                    "run."
                )
        if training.has_update():
            return training.update
        _log.error("The update of this site is noise only.")
        return training.noise_only()

    def _answer_once(
        self, packet: Packet, numbers: int, make_answer: Callable[[SiteState], Packet]
    ) -> Packet:
        """Count the numbers that an answer may have, make it and store it for the same message."""
        name = self._answer_name(packet)
        with self._answers.locked():
            stored_answer = self._answers.load(name)
            if stored_answer is not None:
                return stored_answer
            site_state = self._state_for(packet)
            # Whether an answer fails may depend on samples. So it is counted before it is made, and a failure is an
            # answer.
            self._answers.count(name, numbers, plain=packet.plain, limit=self.policy.max_answers)
            answer = self._answer_or_failure(packet, partial(make_answer, site_state))
            if numbers:
                self._answers.save(name, answer)
        return answer

    def _answer_or_failure(self, packet: Packet, make_answer: Callable[[], Packet]) -> Packet:
        try:
            return make_answer()
        except Exception as error:
            if named_cause(error) is not None:
                raise  # it does not depend on samples, and the next attempt may succeed
            return self._logged_failure(packet, error)

    def _test(self, packet: Packet) -> Packet:
        if not self._config.evaluation.every:
            raise Refused("its loop does not score clients' own models")
        withheld = self.policy.withheld(OWN_SCORES)
        numbers = len(OWN_SCORES) - len(withheld)
        return self._answer_once(packet, numbers, partial(self._own_scores, packet, withheld))

    def _own_scores(self, packet: Packet, withheld: Sequence[str], site_state: SiteState) -> Packet:
        self._check_enough(ResponseScore("accuracy", "test"))
        if self._has_rare_class("test"):
            withheld = [name for name in OWN_SCORES if name in (*withheld, *SCORES_OF_CLASSES)]
        scores = self._within_fit(packet, partial(self._score_own_model, packet, site_state))
        scores.update(dict.fromkeys(withheld, float("nan")))
        return Packet("tested", {**scores, "withheld": withheld})

    def _score_own_model(
        self, packet: Packet, site_state: SiteState, trainer: L.Trainer
    ) -> dict[str, float]:
        instruction = read_instruction(packet)
        space, _, local = restore_state(trainer, self._data, self._config, packet, site_state)
        module = ModuleCopies(trainer.lightning_module, space).load().eval()
        with opened(local):  # the site's data may be read
            model = used_model(local, instruction, self._config.strategies)
            assert model is not None
            space.write(module, model)
            space.write_private(module, dict(local.private))
        class_scores = ClassScores(packet.plain["classes"] or self._data.num_classes)
        count_responses(trainer, module, self._data.client_loader(0, "test"), class_scores)
        return plain_scores(class_scores)

    def _query(self, packet: Packet) -> Packet:
        function = resolve_name(packet.plain["function"])  # "module:function"
        expected = self._expected_response(packet, function)
        numbers = 0
        if expected is not None:
            # Whether there is an empty response is an answer, too.
            numbers = max(1, math.prod(expected.shape))
        answer = partial(self._response, packet, function, expected)
        return self._answer_once(packet, numbers, answer)

    def _expected_response(self, packet: Packet, function: Any) -> Numbers | None:
        """Return what a response must be, None for a model."""
        name = packet.plain["function"]
        num_clients = packet.plain["clients"]  # that of the app, if this sets it
        max_numbers = numbers_of_request(self._config, name, num_clients, self._num_classes)
        if max_numbers == 0:
            return None  # the response is a model
        declaration = expected_response(function)
        if declaration is None:
            raise Refused(f"{name!r:.120} does not declare its response")
        args, kwargs = unpack(packet.plain["arguments"], packet.tensors)
        expected = declaration(self._responding_client(packet), *args, **kwargs)
        numbers = math.prod(expected.shape)
        if numbers > max_numbers:
            raise Refused(
                f"the server requests {numbers} numbers at once, but a run of {num_clients} sites requests at most "
                f"{max_numbers} in a round"
            )
        return expected

    def _responding_client(self, packet: Packet) -> RespondingClient:
        return RespondingClient(
            num_samples=self._sizes(),
            num_classes=packet.plain["classes"] or self._num_classes,
            model=partial(torch.empty, self._space.size, dtype=self._space.dtype),
        )

    def _response(
        self, packet: Packet, function: Any, expected: Numbers | None, site_state: SiteState
    ) -> Packet:
        for score in self._requested_scores(packet):
            self._check_enough(score)
        call = partial(self._call_function, packet, function, site_state)
        tensors_before = digest(_tensors_in(site_state))
        # The function may change `site_state`.
        result = self._within_fit(packet, call)
        result = rounded_response(function, result)
        if expected is not None:
            expected.check(result)
        plain_result, tensors = pack(result)

        state_name = packet.plain["continue_from"]
        is_changed = digest(_tensors_in(site_state)) != tensors_before
        if is_changed or state_name is None:
            state_name = packet.digest.hex()
            # The earlier states stay, since the server may discard this result.
            self._memory(packet).save(state_name, site_state)
        return Packet("result", {"result": plain_result, "state": state_name}, on_cpu(tensors))

    def _check_enough(self, reported_score: ResponseScore) -> None:
        """Raise Refused if a score would be computed on fewer samples than the minimum, in total or of a class."""
        score, split = reported_score
        if self._sizes()[split] < MIN_HELD_OUT:
            raise Refused(
                f"it has fewer than {MIN_HELD_OUT} {split} samples, so it reports no score of them"
            )
        if score in SCORES_OF_CLASSES and self._has_rare_class(split):
            raise Refused(
                f"it has fewer than {MIN_HELD_OUT} {split} samples of a class, or does not know its classes, so it "
                f"does not report {score!r}, in which each class has a weight of its own"
            )

    def _has_rare_class(self, split: str) -> bool:
        """Return whether a class has fewer samples than the minimum, or may have, since nobody knows the classes."""
        data: Any = self._data
        if data.no_classes:
            return True
        _, counts = data.client_labels(0, split).unique(return_counts=True)
        return bool((counts < MIN_HELD_OUT).any())

    def _call_function(
        self,
        packet: Packet,
        function: Callable[..., Any],
        site_state: SiteState,
        trainer: L.Trainer,
    ) -> Any:
        _, _, local = restore_state(trainer, self._data, self._config, packet, site_state)
        arguments = unpack(packet.plain["arguments"], packet.tensors)
        args, kwargs = move_data_to_device(arguments, trainer.lightning_module.device)
        with opened(local):  # the site's data may be read
            result = function(local, *args, **kwargs)
            changed_tensors = {name: tensor.cpu() for name, tensor in local.state.items()}
        store = site_state.get("store", {})
        site_state["store"] = {**store, TENSORS: changed_tensors}
        return result

    def _within_fit(self, packet: Packet, compute: Callable[[L.Trainer], Any]) -> Any:
        """Return ``compute(trainer)``, called at the start of a fit without rounds."""
        results = []

        def on_fit_start(trainer: L.Trainer, module: L.LightningModule) -> None:
            results.append(compute(trainer))

        callback = LambdaCallback(on_fit_start=on_fit_start)
        trainer = self._make_trainer(packet, rounds=0, callback=callback)
        trainer.fit(self._make_module(), self._data.client_loader(client=0))
        return results[0]

    def _make_trainer(self, packet: Packet, rounds: int, callback: L.Callback) -> L.Trainer:
        """Make a Trainer whose first epoch has the index of the message's round."""
        options = {**_QUIET_TRAINER_OPTIONS, **self._trainer_options}
        options["callbacks"] = [*options.get("callbacks", []), callback]
        options["max_epochs"] = rounds
        trainer = L.Trainer(**options)
        if rounds:
            # In hooks the current epoch is the round.
            progress = trainer.fit_loop.epoch_progress.current
            for counter_name in vars(progress):
                setattr(progress, counter_name, packet.plain["round"])
        return trainer

    def _memory(self, packet: Packet) -> SiteMemory:
        plain = packet.plain
        return SiteMemory(self._folder, plain["run"], plain["client"])

    def _state_for(self, packet: Packet) -> SiteState:
        memory = self._memory(packet)
        state = memory.load(packet.plain["continue_from"])
        if state is None:
            raise Refused("the server's message names a saved state that the site no longer has")
        return dict(state)


def _tensors_in(site_state: SiteState) -> dict[str, Any]:
    """Return the tensors that functions at the site may change."""
    tensors: dict[str, Any] = site_state.get("store", {}).get(TENSORS, {})
    return tensors


def _federated(site_data: L.LightningDataModule) -> FederatedDataModule:
    if isinstance(site_data, FederatedDataModule):
        return site_data
    return FederatedDataModule(site_data, OneClient(), splits=Splits(server_val=0.0))


@contextmanager
def _interrupts_stay() -> Iterator[None]:
    """Restore the handler of interrupts after a fit. After the first one Lightning ignores all others, since it expects
    the process to end.
    """
    handler_before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is not handler_before:
            signal.signal(signal.SIGINT, handler_before)


def _check_classes(dictionary: Any, num_classes: int | None) -> None:
    classes = dictionary.classes or ()
    if num_classes and classes and num_classes != len(classes):
        raise Refused(
            f"the server has num_classes={num_classes}, but the site's data dictionary {dictionary.hash} has "
            f"{len(classes)} classes in {dictionary.target!r}. Give all sites and the server the same file, and remove "
            "num_classes"
        )
