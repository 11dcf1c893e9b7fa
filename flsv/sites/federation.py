"""RemoteFederation: the server of a federation whose clients are sites."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import multimode
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from flsv._lightning.several_processes import TrainingCounts, add_counts
from flsv.configuration.federation_config import FederationConfig
from flsv.core import (
    Channel,
    Client,
    ClientUpdate,
    FederationState,
    Instruction,
    LocalData,
    NoResponse,
    Numbers,
    RespondingClient,
)
from flsv.core.matrix import empty_rows
from flsv.core.needs import requirements_of
from flsv.core.parameter_space import ParameterSpace
from flsv.core.responses import MIN_HELD_OUT, expected_response
from flsv.core.state import OF_VALUES
from flsv.core.strategy import Strategy
from flsv.engines.engine import Instruct
from flsv.engines.idle_engine import IdleEngine
from flsv.scores import OWN_SCORES
from flsv.scores.performance import measure_of
from flsv.sites.conversations import Conversations
from flsv.sites.messages import (
    GARBLED_REPLY_ERRORS,
    BadReply,
    Packet,
    check_done,
    describe_error,
    describe_reports,
    instruction_packet,
    name_of_function,
    on_cpu,
    pack,
    printable,
    read_response,
    read_state_name,
    read_update,
)
from flsv.sites.requests import TRAINING_LOSS
from flsv.sites.transport import Directory
from flsv.uploads.base import JointUpload
from flsv.utilities.errors import ConfigurationError

#: Reason why a site does not report a score.
WITHHELD = (
    f"its policy does not allow it, it has fewer than {MIN_HELD_OUT} samples of a class, or it does not know its "
    "classes"
)
#: Largest number of optimizer steps per sample that a site may report for a module without automatic optimization.
MAX_STEPS_PER_SAMPLE = 1000


def check_deployment(
    config: FederationConfig, fields: Mapping[str, Mapping[str, Any]], evaluating: Mapping[str, Any]
) -> None:
    """Raise ConfigurationError if a setting, strategy or metric cannot work with remote sites. For ``fields`` and
    ``evaluating`` see :meth:`Engine.check`."""
    evaluation = config.evaluation
    is_scored_in_private = config.is_private and evaluation.every > 0
    if evaluation.keeps or evaluation.models == "trained" or is_scored_in_private:
        raise ConfigurationError(
            "ClientEvaluation: the server of remote sites gets neither the models that sites have trained nor, if "
            "updates have noise, their scores. Remove `evaluation`."
        )
    colluders = [upload for upload in config.uploads if isinstance(upload, JointUpload)]
    if colluders:
        raise ConfigurationError(
            f"uploads={colluders}: sites do not get each other's updates, so they cannot collude. Test collusion in a "
            "simulation."
        )
    _check_strategies(config.strategies)
    _check_metrics(config, metric_names=fields, evaluating_metrics=evaluating)


def _check_strategies(strategies: Mapping[str, Strategy]) -> None:
    for role, strategy in strategies.items():
        if strategy.needs_classes:
            raise ConfigurationError(
                f"{role} {strategy!r} works with the clients' class counts, which remote sites do not report. Choose "
                "another one, or evaluate it in a simulation."
            )
        if strategy.reads_steps:
            raise ConfigurationError(
                f"{role} {strategy!r} divides updates by the clients' numbers of steps. The server cannot check these, "
                "and a false number would multiply the global model's step. Use FedAvg with "
                'local_epochs="100 steps", or evaluate it in a simulation.'
            )
        if "responses" in requirements_of(strategy) and not strategy.evaluates:
            raise ConfigurationError(
                f"{role} {strategy!r} computes on the clients' samples, which a deployment does not allow. Choose "
                "another one, or evaluate it in a simulation."
            )


def _check_metrics(
    config: FederationConfig, metric_names: Iterable[str], evaluating_metrics: Mapping[str, Any]
) -> None:
    for name, metric in evaluating_metrics.items():
        measure = measure_of(metric)
        if measure is not None and not (measure.is_of_classifier or measure.at_clients):
            raise ConfigurationError(
                f"the metric {name!r} lets sites score models by {measure.title!r}, which cannot be sent to "
                'them. Use performance="accuracy", "balanced_accuracy" or "negative_loss".'
            )
    for name in metric_names:
        if "responses" in requirements_of(config.metrics.get(name)):
            raise ConfigurationError(
                f"the metric {name!r} computes on the clients' samples, which a deployment does not allow. Remove it, "
                "or evaluate it in a simulation."
            )


def _max_steps(
    config: FederationConfig, names: Sequence[str], is_automatic: bool, site: int, num_samples: int
) -> int:
    """Return the largest number of optimizer steps of a site in a round. With ``is_automatic`` Lightning takes them."""
    work = config.work_of(names[site])
    max_batches = work.steps or work.epochs * num_samples  # of one sample or more
    # A module with manual optimization may step several times per batch.
    steps_of_batch = 1 if is_automatic else MAX_STEPS_PER_SAMPLE
    return max_batches * steps_of_batch


class RemoteFederation(IdleEngine):
    """Engine whose clients train at remote sites, for ``FederatedLoop(engine=...)``.

    Args:
        directory: the sites' names and addresses.
        trainer, data, state, store, config, steps: see :class:`flsv.engines.engine.Engine`.

    Attributes:
        sites_of: a function that makes the :class:`RemoteSites` of a FederationState, for other runs at the same sites.
    """

    clients_here = False

    def __init__(
        self,
        directory: Directory,
        trainer: L.Trainer,
        data: Any,
        state: FederationState,
        store: Any,
        config: FederationConfig,
        steps: Any,
    ) -> None:
        if trainer.max_epochs == -1:
            raise ConfigurationError(
                "max_epochs=-1: the server sends the number of rounds to the sites. Set max_epochs to this number."
            )
        if not state.run:
            state.run = secrets.token_hex(8)
        is_automatic = trainer.lightning_module.automatic_optimization
        self.sites_of = partial(
            RemoteSites,
            directory,
            rounds=trainer.max_epochs or 1,
            max_steps=partial(_max_steps, config, directory.names, is_automatic),
            reports=expected_reports(config),
            num_classes=data.known_num_classes,
        )
        self._remote = self.sites_of(state)
        super().__init__(trainer, data, state, store, config, steps)

    def check(self, fields: Mapping[str, Mapping[str, Any]], evaluating: Mapping[str, Any]) -> None:
        check_deployment(self.config, fields, evaluating)

    def commit(self) -> None:
        self._remote.commit()
        super().commit()

    def discard(self) -> bool:
        self._remote.discard()
        return super().discard()

    def write_tables(self, cohort: Sequence[int], folder: Path) -> None:
        """Do nothing: files about a site's data stay at the site."""

    def received_models(self, instruct: Instruct) -> dict[int, Tensor]:
        personalizer = self._strategies.get("personalizer")
        if personalizer is None:
            return {}
        # The server has these models itself, so it does not need the instructions.
        state = self.state.for_strategies()
        own_models = {}
        for client in range(state.num_clients):
            model = personalizer.start(client, state)
            is_global_model = model is state.model()
            if model is not None and not is_global_model:
                own_models[client] = model
        return own_models

    def _make_client(self, client: int, data: LocalData, channel: Channel) -> Client:
        return RemoteClient(client, data, channel, self._remote, self.config.is_private)

    @property
    def place(self) -> str:
        return f"{len(self._instructions)} sites"

    def _train(self, batches: Any) -> None:
        """Send the round's instructions to the sites, and store their updates and models."""
        global_vector = self.state.model()
        device = global_vector.device
        updates, self.broken_clients = self._remote.train(self._instructions, device, self.space)
        if updates:
            folder = self.trainer.default_root_dir
            self._matrix = empty_rows(len(updates), global_vector, folder)
        else:
            self._matrix = self._matrix[:0]  # no models

        # Only one copy of each vector stays in memory: a row of the matrix.
        self.updates = []
        for row, update in zip(self._matrix, updates):
            row.copy_(update.vector)
            self.updates.append(replace(update, vector=row))
        # The trainer counts the sites' optimizer steps as its own.
        num_steps = sum(update.num_steps for update in updates)
        add_counts(self.trainer, TrainingCounts(steps=num_steps))

    def exclude(self, clients: Collection[int]) -> None:
        """Discard this round's training of the excluded sites ``clients``, and accept that of all others."""
        super().exclude(clients)
        clients_with_updates = {update.client_id for update in self.updates}
        self._remote.accept(clients_with_updates.difference(clients))

    def own_scores(self, instruct: Instruct) -> dict[str, Tensor]:
        scores = self._remote.score_own_models(instruct(self._clients_of_process()))
        no_scores = dict.fromkeys(OWN_SCORES, float("nan"))
        num_clients = self.state.num_clients
        rows = [scores.get(client, no_scores) for client in range(num_clients)]
        return {name: torch.tensor([row[name] for row in rows]) for name in OWN_SCORES}


T = TypeVar("T")
P = ParamSpec("P")


class RemoteSites:
    """The server's connection to all sites of a federation."""

    # A site saves its state after each training and each query, under the hash of the server's message as its name.
    # Each message names the state from which the site continues. So server and site stay consistent if messages are
    # lost, and a message that is sent again, as after a kill, leads to the same state.

    def __init__(
        self,
        directory: Directory,
        state: FederationState,
        rounds: int,
        max_steps: Callable[[int, int], int],  # (site, number of samples) -> steps in a round
        reports: Mapping[str, Numbers | None] = MappingProxyType({}),
        num_classes: int | None = None,
        excluded_from: str = "",  # what a site without a valid update is excluded from, if not the round
    ) -> None:
        self.directory = directory
        self._exclusion = f"is excluded{excluded_from}"
        self.conversations = Conversations(directory.exchange)
        self._state = state
        self._rounds = rounds
        self._max_steps = max_steps
        self._num_classes = num_classes
        self._expected_reports = reports
        self._majority_report: str | None = None
        self._withheld_names: set[tuple[int, str]] = set()
        # The names of the sites' states, {site: name}.
        self._accepted_states = dict(state.counted)
        self._states_of_round: dict[int, str] = {}

    def discard(self) -> None:
        """Forget this round's trainings, so that sites continue from the last completed round."""
        self._accepted_states = dict(self._state.counted)
        self._states_of_round = {}

    def accept(self, sites: Collection[int]) -> None:
        """Accept this round's training of ``sites``, and discard that of all others."""
        for site, state in self._states_of_round.items():
            if site in sites:
                self._accepted_states[site] = state
        self._states_of_round = {}

    def commit(self) -> None:
        """Record the name of each site's last accepted state at the end of a round."""
        self._state.counted = dict(self._accepted_states)

    def train(
        self, instructions: Mapping[int, Instruction], device: torch.device, space: ParameterSpace
    ) -> tuple[list[ClientUpdate], list[int]]:
        """Return the sites' updates, and the ids of sites whose model is not finite."""
        # A warning names each site without a valid reply, and the site is excluded from the round.
        start_time = time.monotonic()
        replies = self.directory.exchange(self.packets(instructions))
        updates, broken_sites = self.updates(replies, device, space)
        seconds = time.monotonic() - start_time
        sites_with_updates = f"{len(updates)} of {len(instructions)} sites"
        rank_zero_info(
            f"flsv: round {self._state.round_index + 1}: {sites_with_updates} in {seconds:.1f} s."
        )
        return updates, broken_sites

    def packets(self, instructions: Mapping[int, Instruction]) -> dict[int, Packet]:
        """Return the requests to train, ``{site id: message}``."""
        return {
            site: instruction_packet(instruction, self._run_info(site))
            for site, instruction in instructions.items()
        }

    def updates(
        self, replies: Mapping[int, Packet], device: torch.device, space: ParameterSpace
    ) -> tuple[list[ClientUpdate], list[int]]:
        """Read updates from the sites' replies to :meth:`packets`, and return them as :meth:`train` does."""
        updates, errors = self._valid_updates(replies, device, space)
        broken_sites = [site for site, update in updates.items() if update is None]
        finite_updates = {site: update for site, update in updates.items() if update is not None}

        reports = {site: describe_reports(update) for site, update in finite_updates.items()}
        errors |= self._unusual_reports(reports)
        for site, error_text in errors.items():
            self._warn(site, self._exclusion, why=error_text, when=self._in_round())
            finite_updates.pop(site, None)
        self._states_of_round = {}
        for site in finite_updates:
            self._note_accepted(site, replies[site])
        return list(finite_updates.values()), broken_sites

    def _valid_updates(
        self, replies: Mapping[int, Packet], device: torch.device, space: ParameterSpace
    ) -> tuple[dict[int, ClientUpdate | None], dict[int, str]]:
        """Return the sites' updates, None for one that is not finite, and the errors of other sites."""
        updates = {}
        errors = {}
        for site, reply in replies.items():
            try:
                updates[site] = self._read_update(site, reply, device, space)
            except BadReply as error:
                errors[site] = str(error)
        return updates, errors

    def _note_accepted(self, site: int, reply: Any) -> None:
        self._states_of_round[site] = read_state_name(reply)
        if reply.plain.get("lost"):
            self._warn(
                site,
                "has lost its state of earlier rounds, and continues without it",
                when=self._in_round(),
            )
        self._warn_of_withheld(site, reply, [TRAINING_LOSS])

    def _in_round(self) -> str:
        return f" in round {self._state.round_index + 1}"

    def _read_update(
        self, site: int, reply: Packet, device: torch.device, space: ParameterSpace
    ) -> ClientUpdate | None:
        """Return a site's update, None if it is not finite. Raise BadReply if the reply is not valid."""
        packet = check_done(reply)
        num_samples = self.directory.sizes[site]["train"]
        max_steps = self._max_steps(site, num_samples)
        update = read_update(packet, site, space, device, num_samples, max_steps)
        if update is None:  # its model is not finite
            return None
        for name, value in sorted(update.reports.items()):
            self._check_report(name, value)
        read_state_name(packet)  # raises an error if there is none
        return update

    def _check_report(self, name: str, value: Tensor) -> None:
        if name not in self._expected_reports:
            raise BadReply(f"it reports {name!r:.40}, which no strategy declares")
        expected = self._expected_reports[name]
        if expected is None:  # any shape, but finite numbers
            expected = Numbers(value.dtype, tuple(value.shape))
        try:
            expected.check(value)
        except ValueError as error:
            raise BadReply(f"its report {name!r:.40} is not valid: {error}") from error

    def _unusual_reports(self, reports: Mapping[int, str]) -> dict[int, str]:
        """Return the sites whose reports differ from the majority's, with reasons."""
        # `reports` has a description for each site.
        most_frequent = multimode(reports.values())
        if len(most_frequent) == 1:
            self._majority_report = most_frequent[0]

        majority_report = self._majority_report  # in a tie that of an earlier round
        if majority_report in most_frequent:
            unusual_sites = [site for site in reports if reports[site] != majority_report]
            reports_of_others = majority_report
        else:
            unusual_sites = list(reports)  # nobody knows which report is right
            reports_of_others = " or ".join(sorted(most_frequent))
        return {
            site: f"it reports {reports[site]}, but the other sites report {reports_of_others}"
            for site in unusual_sites
        }

    def query(self, site: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Let a site call ``function`` on its data, and return the result."""
        if isinstance(function, partial):
            all_args = (*function.args, *args)
            all_kwargs = {**function.keywords, **kwargs}
            return self.query(site, function.func, all_args, all_kwargs)
        name = name_of_function(function)
        expected = self._expected_result(site, function, args, kwargs)

        packet = self._query_packet(site, name, (tuple(args), dict(kwargs)))
        # Without a result the site continues from the state before.
        result, state_after = self._send_query(site, packet, expected)
        self._latest_states(site)[site] = state_after
        return result

    def _send_query(self, site: int, packet: Packet, expected: Numbers) -> tuple[Any, str]:
        """Return a site's result, and the name of its state after the query."""
        reply = self.conversations.send(site, packet)
        try:
            return read_response(reply, expected)
        except GARBLED_REPLY_ERRORS as error:
            event = f"has sent no result of {packet.plain['function']}"
            raise NoResponse(self._note(site, event, describe_error(error))) from error

    def _latest_states(self, site: int) -> dict[int, str]:
        """Return the names of the sites' states, those of this round if the site has trained in it."""
        if site in self._states_of_round:
            return self._states_of_round
        return self._accepted_states

    def _query_packet(self, site: int, function_name: str, arguments: Any) -> Packet:
        plain_arguments, tensors = pack(arguments)
        plain = {
            "function": function_name,
            "arguments": plain_arguments,
            "round": self._state.round_index,
            **self._run_info(site),
        }
        return Packet("query", plain, on_cpu(tensors))

    def _expected_result(
        self, site: int, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Numbers:
        expectation = expected_response(function)
        if expectation is None:
            raise ConfigurationError(
                f"{name_of_function(function)} cannot run at a site, since the server could not check its result. "
                "Declare what the result must be with flsv.core.declare_response(...)."
            )
        client = RespondingClient(
            num_samples=self.directory.sizes[site],
            num_classes=self._num_classes,
            model=self._state.model,
        )
        return expectation(client, *args, **kwargs)

    def score_own_models(self, models: Mapping[int, Instruction]) -> dict[int, dict[str, float]]:
        """Return the scores of each site's own model on its test samples, ``{site: {name: score}}``."""
        packets = {}
        for site, instruction in models.items():
            packets[site] = instruction_packet(instruction, self._run_info(site), kind="test")
        scores = {}
        for site, reply in self.directory.exchange(packets).items():
            try:
                plain = check_done(reply).plain
                scores_of_site = {name: float(plain[name]) for name in OWN_SCORES}
                # NaN is accepted: it stands for a score that is not defined.
                if any(score < 0 or score > 1 for score in scores_of_site.values()):
                    raise BadReply(f"its scores {scores_of_site} are not between 0 and 1")
                scores[site] = scores_of_site
                self._warn_of_withheld(site, reply, OWN_SCORES)
            except GARBLED_REPLY_ERRORS as error:
                self._warn(site, "has not scored its model", why=describe_error(error), kind=None)
        return scores

    def _warn_of_withheld(self, site: int, reply: Any, names: Sequence[str]) -> None:
        withheld = reply.plain.get("withheld")
        if not isinstance(withheld, list):
            return
        # There is one warning in a run for each site and name.
        new_names = []
        for name in names:
            if name in withheld and (site, name) not in self._withheld_names:
                self._withheld_names.add((site, name))
                new_names.append(name)
        if new_names:
            score_names = ", ".join(new_names)
            self._warn(site, f"does not report {score_names}", why=WITHHELD, kind=None)

    def _run_info(self, site: int) -> dict[str, Any]:
        """Return the values of JSON types that every message to a site contains."""
        return {
            "run": self._state.run,
            "rounds": self._rounds,
            "classes": self._num_classes,
            "client": site,
            "continue_from": self._latest_states(site).get(site),
        }

    def _note(
        self,
        site: int,
        event: str,
        why: object = "",
        when: str = "",
        kind: str | None = OF_VALUES,
    ) -> str:
        """Record an event at a site with its reason ``why``. Return a warning's text, which also says ``when``."""
        event = printable(event)  # both texts may come from a site
        reason = printable(why)
        clause = f": {reason}" if reason else ""
        self._state.note(site, f"{event}{clause}", kind)
        site_name = self.directory.names[site]
        return f"site {site_name!r} (client {site}) {event}{when}{clause}."

    def _warn(self, site: int, event: str, *arguments: Any, **options: Any) -> None:
        """Record an event at a site, and warn about it. The arguments are those of :meth:`_note`."""
        warnings.warn(self._note(site, event, *arguments, **options), stacklevel=3)


def expected_reports(config: FederationConfig) -> dict[str, Numbers | None]:
    """Return what each report of a site must be. None: a strategy has declared the report's name only."""
    expected: dict[str, Numbers | None] = {}
    for strategy in config.strategies.values():
        expected |= dict.fromkeys(strategy.reports)
        expected |= strategy.expected_reports()
    return expected


class RemoteClient(Client):
    """Client at a remote site. :meth:`request` sends a message to the site."""

    def __init__(
        self, id: int, data: LocalData, channel: Channel, remote: RemoteSites, is_private: bool
    ) -> None:
        super().__init__(id, data, channel, is_private=is_private)
        self._remote = remote

    def _response(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> T:
        return self._remote.query(self.id, function, args, kwargs)

    def map_conversations(
        self, conversation: Callable[[Client], T], clients: Sequence[Client]
    ) -> list[T]:
        return self._remote.conversations.hold_conversations(conversation, clients)
