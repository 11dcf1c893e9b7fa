"""Site: the participant's side of a federation across processes."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import rank_zero_info

from flsv._lightning.evaluation import count_answers
from flsv.core import LocalData, opened
from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule, OneClient, Splits
from flsv.engines.client_manager import ClientManager
from flsv.engines.engine import shared_space
from flsv.engines.remote.messages import (
    LOSS,
    Packet,
    Refused,
    failure_packet,
    pack,
    read_instruction,
    unpack,
    update_packet,
)
from flsv.engines.remote.policy import SitePolicy
from flsv.engines.remote.transport import agreement, check_agreement
from flsv.engines.remote.visit import SiteMemory, SiteState, SiteVisit, own_secret, visit_secret
from flsv.metrics.needs import needs_of
from flsv.scores.class_scores import OWN_SCORES, ClassScores, plain_scores
from flsv.training.algorithms.base import used_model
from flsv.training.store import TENSORS, ClientStore
from flsv.uploads import UploadContext, sanitize_report
from flsv.utilities.errors import ConfigurationError

_log = logging.getLogger(__name__)
#: Functions of flsv that a server may let sites compute on their data, and the score that they tell, unless their
#: argument ``performance`` names another. A site may allow more.
QUESTIONS: Mapping[str, str | None] = {
    "flsv.personalization.pfedsv:collaborate": "accuracy",
    "flsv.personalization.fedfomo:mix_models": "negative_loss",
    "flsv.core.round:started_from": None,
    "flsv.sampling.power_of_choice:local_loss": "negative_loss",
    "flsv.metrics.contribution_estimation:leave_self_out": "accuracy",
    "flsv.games.judges:judge": "accuracy",
    "flsv.games.judges:judge_coalitions": "accuracy",
}
#: File in the site's folder with the privacy loss of its updates so far.
LEDGER = "privacy.json"
_QUIET: dict[str, Any] = {"num_sanity_val_steps": 0, "limit_val_batches": 0}
_QUIET |= dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


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
        self._make_module, self._folder = module, folder
        federation, made = settings(), data()
        self._config = federation.config
        self._trainer_options, self._questions = dict(trainer or {}), {*QUESTIONS, *questions}
        self._limit = self._trainer_options.pop("limit_train_batches", 1.0)
        self._upload_seed, self._secret, self.policy = upload_seed, own_secret(folder), policy or SitePolicy()
        if not isinstance(made, FederatedDataModule):
            made = FederatedDataModule(made, OneClient(), splits=Splits(server_val=0.0))
        self._data = made
        made.prepare_data()
        made.setup("fit")
        if made.num_clients != 1:
            raise ConfigurationError(
                f"this site has data of {made.num_clients} clients: a site is one. Use OneClient()."
            )
        self._agreement = agreement(module(), federation)

    def answer(self, packet: Packet, who: str = "server") -> Packet:
        """Reply to a message of the server, and log it."""
        # The reply reports an error by class and line only, because its text may quote samples. A refusal's text is
        # sent.
        replies = {"hello": self._hello, "train": self._train, "ask": self._ask, "test": self._test}
        try:
            about = {name: packet.plain[name] for name in ("run", "round", "question") if name in packet.plain}
            rank_zero_info(f"flsv: {who} asks {packet.kind!r:.20} {about!r:.200}, sha256 {packet.digest.hex()}")
            check_agreement(self._agreement, packet.plain.get("agreement", {}))
            if self._config.private and packet.kind not in ("hello", "train"):
                raise Refused(f"its updates are private, and its answer to {packet.kind!r:.20} would have no noise")
            if (number := packet.plain.get("client")) is not None:  # which client this is, in the server's count
                self._data.deal_from(number)
            return replies[packet.kind](packet)
        except Exception as error:
            _log.exception("%r could not be answered", packet.kind)
            return failure_packet(error)

    def _hello(self, packet: Packet) -> Packet:
        self.policy.noise(self._config.uploads)
        self.policy.check_told(self._needed())
        data: Any = self._data
        sizes = {split: len(data.client_indices(0, split)) for split in ("train", "val", "test")}
        return Packet("hello", {"sizes": sizes})

    def _needed(self) -> list[str]:
        """Name the losses and scores that a run with the site's settings needs."""
        losses = [LOSS for metric in self._config.metrics.values() if "losses" in needs_of(metric)]
        return [*losses[:1], *(name for each in self._config.strategies.values() for name in each.reports)]

    def _train(self, packet: Packet) -> Packet:
        plain, memory = packet.plain, self._memory(packet)
        kept = memory.after(plain["counted"])
        secret = visit_secret(self._secret, packet, kept) if self._upload_seed is None else self._upload_seed
        visit = SiteVisit(packet, self._data, kept or {}, self._config, secret, self._limit)
        self.policy.check_told(self._needed())
        self.policy.spend(self._config.uploads, self._folder / LEDGER)
        trainer = self._trainer(packet, plain["rounds"], visit)
        trainer.fit(self._make_module(), visit.loader(trainer))
        if visit.update is None:
            return Packet("broken")
        name = packet.digest.hex()
        memory.keep(name, visit.kept, [plain["counted"]])
        return update_packet(visit.update, name, lost=kept is None, withheld=self.policy.withheld([LOSS]))

    def _test(self, packet: Packet) -> Packet:
        """Score the model that this site would use on its test samples."""
        kept, withheld = self._kept(packet), self.policy.withheld(OWN_SCORES)
        if len(withheld) == len(OWN_SCORES):
            self.policy.check_told(OWN_SCORES)
        scores = self._within_fit(packet, partial(self._scores, packet, kept))
        return Packet("tested", {**scores, **dict.fromkeys(withheld, float("nan")), "withheld": withheld})

    def _scores(self, packet: Packet, kept: SiteState, trainer: L.Trainer) -> dict[str, float]:
        module, num_classes = trainer.lightning_module, packet.plain["classes"]
        space, local = self._open(packet, kept, trainer)
        with opened(local):
            model = used_model(local, read_instruction(packet), self._config.strategies)
            assert model is not None
            space.write(module, model)
            space.write_private(module, dict(local.private))
        counts = ClassScores(num_classes or self._data.num_classes)
        count_answers(trainer, self._data.client_loader(0, "test"), counts)
        return plain_scores(counts)

    def _ask(self, packet: Packet) -> Packet:
        name = packet.plain["question"]
        self.policy.check_question(name)
        if name not in self._questions:
            raise PermissionError(f"{name!r} is no question that this site answers.")
        module_name, _, function = name.partition(":")
        question = getattr(importlib.import_module(module_name), function)
        args, kwargs = unpack(packet.plain["arguments"], packet.tensors)
        bound = inspect.signature(question).bind(None, *args, **kwargs)
        bound.apply_defaults()
        asked = bound.arguments.get("performance")
        if (score := QUESTIONS.get(name) if asked is None else asked) is not None:
            self.policy.check_told([score])
        kept, memory = self._kept(packet), self._memory(packet)
        answer, tensors = pack(self._within_fit(packet, partial(self._reply, packet, question, kept)))
        visit = packet.digest.hex()
        memory.keep(visit, kept, memory.all())
        plain = {"answer": answer, "visit": visit}
        return Packet("answer", plain, {name: tensor.cpu() for name, tensor in tensors.items()})

    def _reply(self, packet: Packet, question: Callable[..., Any], kept: SiteState, trainer: L.Trainer) -> Any:
        _, local = self._open(packet, kept, trainer)
        arguments = unpack(packet.plain["arguments"], packet.tensors)
        args, kwargs = move_data_to_device(arguments, trainer.lightning_module.device)
        with opened(local):
            answer = question(local, *args, **kwargs)
            tensors = {name: tensor.cpu() for name, tensor in local.state.items()}
            kept["store"] = {**kept.get("store", {}), TENSORS: tensors}
        return answer

    def _open(self, packet: Packet, kept: SiteState, trainer: L.Trainer) -> tuple[ParameterSpace, LocalData]:
        """Return the map to vectors, and the site's :class:`LocalData` restored from its saved state."""
        module = trainer.lightning_module
        space, _ = shared_space(module, self._config)
        store, client = ClientStore(), packet.plain["client"]
        store.load_state_dict({client: kept.get("store", {})})
        store.to(module.device)
        classes = packet.plain["classes"]
        manager = ClientManager(trainer, self._data, space, store, first=client, num_classes=classes)
        tell = None
        if "who" in kept:
            client, clients, index = kept["who"]
            context = UploadContext(client, clients, space.num_parameters, index)
            tell = partial(sanitize_report, self._config.uploads, context)
        models = [kept.get(name) for name in ("start", "trained", "sent")]
        start, trained, sent = (None if model is None else model.to(module.device) for model in models)
        manager.locals[0].set_models(start, trained, sent, tell)
        return space, manager.locals[0]

    def _within_fit(self, packet: Packet, reply: Callable[[L.Trainer], Any]) -> Any:
        """Call ``reply`` with the trainer of a fit that trains nothing, and return the result."""
        answers: list[Any] = []
        asked = LambdaCallback(on_fit_start=lambda trainer, module: answers.append(reply(trainer)))
        self._trainer(packet, 0, asked).fit(self._make_module(), self._data.client_loader(0))
        return answers[0]

    def _trainer(self, packet: Packet, rounds: int, callback: L.Callback) -> L.Trainer:
        callbacks = [*self._trainer_options.get("callbacks", []), callback]
        trainer = L.Trainer(**{**_QUIET, **self._trainer_options, "callbacks": callbacks, "max_epochs": rounds})
        if rounds:
            # The fit's only epoch gets the round's index as its number.
            progress = trainer.fit_loop.epoch_progress.current
            vars(progress).update(dict.fromkeys(vars(progress), packet.plain["round"]))
        return trainer

    def _memory(self, packet: Packet) -> SiteMemory:
        return SiteMemory(self._folder, packet.plain["run"])

    def _kept(self, packet: Packet) -> SiteState:
        """Return the saved state from which the server wants the site to continue."""
        kept = self._memory(packet).after(packet.plain["counted"])
        if kept is None:
            raise LookupError("this site no longer holds what it kept of the round that it is asked about.")
        return dict(kept)
