"""Site: the participant's side of a federation across processes. It trains on its own data and answers questions."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import lightning as L
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities import rank_zero_info

from flsv._lightning.evaluation import count_answers
from flsv.clients.algorithms.base import used_model
from flsv.clients.client_manager import ClientManager
from flsv.data import FederatedDataModule, OneClient, Splits
from flsv.engines.one_process import shared_space
from flsv.engines.remote.messages import (
    Packet,
    digest,
    failed_packet,
    failure_packet,
    pack,
    read_instruction,
    unpack,
    update_packet,
)
from flsv.engines.remote.policy import Refused, SitePolicy
from flsv.engines.remote.transport import agreement
from flsv.engines.remote.visit import Kept, OutOfTime, SiteMemory, SiteVisit, StillBusy, noise_seed, own_secret
from flsv.errors import ConfigurationError
from flsv.models.imbalance import ClassScores, plain_scores
from flsv.parameters import ParameterSpace
from flsv.participants import ClientStates, LocalData, at
from flsv.round import Instruction
from flsv.server.config import FederationConfig
from flsv.uploads import UploadContext, sanitize_report

_log = logging.getLogger(__name__)
#: Functions that a server may ask sites for, by module and name; a site may allow more.
QUESTIONS = (
    "flsv.personalization.pfedsv:collaborate",
    "flsv.personalization.fedfomo:mix_models",
    "flsv.round.round:started_from",
    "flsv.sampling.power_of_choice:local_loss",
    "flsv.metrics.peers:leave_self_out",
)
#: In the site's folder: what its updates have told so far, where a policy bounds it.
LEDGER = "privacy.json"
_VISIT = ("start", "trained", "sent")
_QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}


class Settings(Protocol):
    """What both sides share: a :class:`flsv.FederatedLoop`."""

    @property
    def config(self) -> FederationConfig: ...


class Site:
    """A participant.

    Args:
        module: makes the LightningModule, the same as the server's.
        data: makes the site's own data: a LightningDataModule, or a FederatedDataModule of one client (which can hold
            back test and validation samples of its own).
        settings: makes the federation's loop, the same as the server's.
        folder: the site's own, where it keeps what it needs between rounds.
        trainer: arguments of the Trainer that trains here, such as ``{"accelerator": "gpu"}``.
        questions: functions that the server may ask for beside flsv's own, as ``"package.module:function"``.
        upload_seed: what uploads draw from, such as the noise of a private update. Default: a secret of this site's
            own, so that the server cannot take the noise off again.
        policy: what the site's owner allows. None: whatever the app asks for.

    Raises:
        ConfigurationError: the data are those of several clients.
    """

    def __init__(
        self,
        module: Callable[[], L.LightningModule],
        data: Callable[[], L.LightningDataModule],
        settings: Callable[[], Settings],
        folder: Path,
        trainer: Mapping[str, Any] | None = None,
        questions: Sequence[str] = (),
        upload_seed: int | None = None,
        policy: SitePolicy | None = None,
    ) -> None:
        self._policy = policy or SitePolicy()
        self._make_module, self._folder = module, folder
        self._trainer_options, self._questions = dict(trainer or {}), {*QUESTIONS, *questions}
        self._settings, made = settings(), data()
        self._upload_seed, self._secret = upload_seed, own_secret(folder)
        if not isinstance(made, FederatedDataModule):
            made = FederatedDataModule(made, OneClient(), splits=Splits(server_val=0.0))
        self._data = made
        self._limit = self._trainer_options.pop("limit_train_batches", 1.0)
        made.prepare_data()
        made.setup("fit")
        if made.num_clients != 1:
            raise ConfigurationError(
                f"this site has data of {made.num_clients} clients: a site is one. Use OneClient()."
            )

    def answer(self, packet: Packet, who: str = "server") -> Packet:
        """Reply to a message of the server. Errors are reported by kind and place only, because their text may quote
        samples; this site's log has them in full. What the site's policy forbids is said in words.

        Args:
            packet: the message; the log has a line of it.
            who: has sent it.
        """
        replies = {"hello": self._hello, "train": self._train, "ask": self._ask, "test": self._test}
        try:
            about = {name: packet.plain[name] for name in ("run", "round", "question") if name in packet.plain}
            sent = digest([packet.kind, packet.plain], packet.tensors).hex()
            rank_zero_info(f"flsv: {who} asks {packet.kind!r:.20} {about!r:.200}, sha256 {sent}")
            if (number := packet.plain.get("client")) is not None:  # which client this is, in the server's count
                self._data.deal_from(number)
            return replies[packet.kind](packet)
        except StillBusy as error:
            return Packet("busy", {"round": str(error)})
        except OutOfTime:
            return Packet("late", {"seconds": packet.plain["seconds"]})
        except Refused as error:
            _log.warning("%r was refused: %s", packet.kind, error)
            return failed_packet(str(error), unwilling=True)
        except Exception as error:
            _log.exception("%r could not be answered", packet.kind)
            return failure_packet(error)

    def _hello(self, packet: Packet) -> Packet:
        self._policy.noise(self._settings.config.uploads)
        module, data = self._make_module(), self._data
        sizes = {split: len(data.client_indices(0, split)) for split in ("train", "val", "test")}  # type: ignore[arg-type]
        agreed = agreement(module, self._settings)
        return Packet("hello", {"sizes": sizes, **agreed})

    def _train(self, packet: Packet) -> Packet:
        instruction, plain = read_instruction(packet), packet.plain
        with self._memory(packet) as memory:
            kept = memory.after(plain["counted"])
            visit = SiteVisit(
                instruction,
                plain["clients"],
                plain["classes"],
                self._data,
                kept or {},
                self._settings.config,
                noise_seed(self._secret, packet) if self._upload_seed is None else self._upload_seed,
                self._limit,
                plain.get("seconds"),
            )
            self._policy.spend(self._settings.config.uploads, self._folder / LEDGER)
            trainer = self._trainer(instruction.round_index, plain["rounds"], visit)
            trainer.fit(self._make_module(), visit.loader())
            if visit.update is None:
                return Packet("broken")
            memory.keep(plain["visit"], visit.kept, plain["counted"])
        return update_packet(visit.update, lost=kept is None)

    def _test(self, packet: Packet) -> Packet:
        """The scores of the model that this site would use, on its own test samples."""
        instruction = read_instruction(packet)
        with self._memory(packet) as memory:
            tested = _Asked(partial(self._scores, instruction, self._kept(memory, packet), packet.plain["classes"]))
            self._trainer(instruction.round_index, 0, tested).fit(self._make_module(), self._data.client_loader(0))
        return Packet("tested", tested.answer)

    def _scores(
        self, instruction: Instruction, kept: Kept, num_classes: int | None, trainer: L.Trainer
    ) -> dict[str, float]:
        space, local = self._open(kept, num_classes, trainer)
        with at(local):
            model = used_model(local, instruction, self._settings.config.strategies)
            assert model is not None
            space.write(trainer.lightning_module, model)
            space.write_private(trainer.lightning_module, dict(local.private))
        counts = ClassScores(num_classes or self._data.num_classes)
        count_answers(trainer, self._data.client_loader(0, "test"), counts)
        return plain_scores(counts)

    def _ask(self, packet: Packet) -> Packet:
        plain = packet.plain
        self._policy.check_question(plain["question"])
        if plain["question"] not in self._questions:
            raise PermissionError(f"{plain['question']!r} is no question that this site answers.")
        module_name, _, function = plain["question"].partition(":")
        question = getattr(importlib.import_module(module_name), function)
        args, kwargs = unpack(plain["arguments"], packet.tensors)
        with self._memory(packet) as memory:
            kept = self._kept(memory, packet)
            asked = _Asked(partial(self._reply, question, args, kwargs, kept, plain["classes"]))
            self._trainer(plain["round"], 0, asked).fit(self._make_module(), self._data.client_loader(0))
            memory.keep_too(plain["visit"], kept)
        result, tensors = pack(asked.answer)
        return Packet("answer", {"answer": result}, {name: tensor.cpu() for name, tensor in tensors.items()})

    def _reply(
        self,
        question: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        kept: Kept,
        num_classes: int | None,
        trainer: L.Trainer,
    ) -> Any:
        """Within a fit, where the module is on its device."""
        _, local = self._open(kept, num_classes, trainer)
        device = trainer.lightning_module.device
        args, kwargs = move_data_to_device(args, device), move_data_to_device(kwargs, device)
        with at(local):
            answer = question(local, *args, **kwargs)
            kept["state"] = {name: tensor.cpu() for name, tensor in local.state.items()}
        return answer

    def _open(self, kept: Kept, num_classes: int | None, trainer: L.Trainer) -> tuple[ParameterSpace, LocalData]:
        """What the site holds, with what it has kept."""
        module = trainer.lightning_module
        space, _ = shared_space(module, self._settings.config)
        states = ClientStates()
        states.load_state_dict({0: kept.get("state", {})})
        states.to(module.device)
        local = ClientManager(trainer, self._data, space, states, num_classes=num_classes).locals[0]
        tell = None
        if "who" in kept:
            client, clients, index = kept["who"]
            tell = partial(
                sanitize_report,
                self._settings.config.uploads,
                UploadContext(client, clients, space.num_parameters, index),
            )
        start, trained, sent = (None if kept.get(n) is None else kept[n].to(module.device) for n in _VISIT)
        local.visit(start, trained, sent, tell)
        return space, local

    def _trainer(self, round_index: int, rounds: int, callback: L.Callback) -> L.Trainer:
        callbacks = [*self._trainer_options.get("callbacks", []), callback]
        trainer = L.Trainer(**{**_QUIET, **self._trainer_options, "callbacks": callbacks, "max_epochs": rounds})
        if rounds:
            # Whoever asks for the epoch is told the round; this one is the only one here.
            progress = trainer.fit_loop.epoch_progress.current
            vars(progress).update(dict.fromkeys(vars(progress), round_index))
        return trainer

    @contextmanager
    def _memory(self, packet: Packet) -> Iterator[SiteMemory]:
        memory = SiteMemory(self._folder, packet.plain["run"])
        with memory.busy(packet.plain["round"]):
            yield memory

    def _kept(self, memory: SiteMemory, packet: Packet) -> Kept:
        """What this site stands at, to be asked about."""
        kept = memory.after(packet.plain["counted"])
        if kept is None:
            raise LookupError("this site no longer holds what it kept of the round that it is asked about.")
        return dict(kept)


class _Asked(L.Callback):
    """Answers a question where a fit would begin: the module is on its device, and nothing is trained."""

    answer: Any = None

    def __init__(self, reply: Callable[[L.Trainer], Any]) -> None:
        self._reply = reply

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.answer = self._reply(trainer)
