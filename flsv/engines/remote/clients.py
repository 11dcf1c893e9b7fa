"""RemoteSites: the sites as the server sees them, which train rounds and answer questions."""

from __future__ import annotations

import secrets
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_info

from flsv.core import Channel, Client, ClientUpdate, FederationState, Instruction, LocalData, NoAnswer
from flsv.core.parameter_space import ParameterSpace
from flsv.engines.remote.messages import (
    GARBLED,
    BadReply,
    Packet,
    check_done,
    fault_of,
    instruction_packet,
    pack,
    read_update,
    unpack,
)
from flsv.engines.remote.transport import Directory
from flsv.models.imbalance import OWN_SCORES
from flsv.utilities.errors import ConfigurationError

T = TypeVar("T")
P = ParamSpec("P")


class RemoteSites:
    """All sites of a federation, as the server sees them.

    Every visit of a site (a round's training) and every question to it has a name, under which the site saves its
    state. With each message the server names the visit from which the site continues, so the site's state and the
    server's view of it stay consistent even if messages are lost.

    Args:
        directory: the sites' names and addresses.
        state: the federation's state, in which the run's name, the sites' last visits and their faults are recorded.
        rounds: number of rounds of the run.
        steps_per_sample: the most optimizer steps that a site can take in a round, for each of its samples.
        reports: names of the reports that strategies declare.
        num_classes: the federation's number of classes, which a site that lacks the last classes cannot know; None
            where there are no classes.
    """

    def __init__(
        self,
        directory: Directory,
        state: FederationState,
        rounds: int,
        steps_per_sample: int,
        reports: Collection[str] = (),
        num_classes: int | None = None,
    ) -> None:
        self.directory, self._state, self._rounds = directory, state, rounds
        self._steps_per_sample, self._num_classes, self._reports = steps_per_sample, num_classes, frozenset(reports)
        self._usual: str | None = None
        self._stands: dict[int, str] = {}
        self._trained: dict[int, str] = {}
        self._answered: dict[int, tuple[dict[int, str], str | None]] = {}
        self.discard()

    def count(self, sites: Collection[int]) -> None:
        """Count the round's visits of these sites, and forget those of all others."""
        self._stands |= {site: visit for site, visit in self._trained.items() if site in sites}
        self._trained = {}

    def commit(self) -> None:
        """Record the sites' visits in the federation's state at the end of a round."""
        self._state.counted = dict(self._stands)

    def discard(self) -> None:
        """Forget the round's visits."""
        self._stands, self._trained = dict(self._state.counted), {}

    def train(
        self, instructions: Mapping[int, Instruction], device: torch.device, space: ParameterSpace
    ) -> tuple[list[ClientUpdate], list[int]]:
        """Let sites train, and collect their updates.

        A site that is away, is late or sends something else is named in a warning and left out, as if it had not been
        drawn.

        Args:
            instructions: the server's instructions, by site.
            device: the device for the updates.
            space: the map between the module and vectors.

        Returns:
            The updates in the order of ``instructions``, and the sites whose models were not finite.
        """
        visits = {site: secrets.token_hex(8) for site in instructions}
        packets = {
            site: instruction_packet(instruction, {**self._run_info(site), "visit": visits[site]})
            for site, instruction in instructions.items()
        }
        began = time.monotonic()
        replies = self.directory.exchange(packets)
        updates: dict[int, ClientUpdate] = {}
        broken = []
        wrong: dict[int, str] = {}
        for site, reply in replies.items():
            samples = self.directory.sizes[site]["train"]
            try:
                update = read_update(check_done(reply), site, space, device, samples, samples * self._steps_per_sample)
                if update is None:
                    broken.append(site)
                    continue
                if unknown := sorted(update.reports.keys() - self._reports):
                    raise BadReply(f"it reports {unknown[0]!r:.40}, which nobody asks for")
                updates[site] = update
            except BadReply as why:
                wrong[site] = str(why)
        wrong |= self._unusual({site: _reported(update) for site, update in updates.items()})
        when = f" of round {self._state.round_index + 1}"
        for site, words in wrong.items():
            self._warn(site, "is left out", words, when)
        self._trained = {site: visits[site] for site in updates if site not in wrong}
        came, took = f"{len(self._trained)} of {len(packets)} sites", time.monotonic() - began
        rank_zero_info(f"flsv: round {self._state.round_index + 1}: {came} in {took:.1f} s.")
        for site in self._trained:
            if replies[site].plain.get("lost"):  # type: ignore[union-attr]  # a Packet: its update was read
                self._warn(site, "no longer held what it kept, and went on from nothing", "", when)
        return [updates[site] for site in self._trained], broken

    def _unusual(self, reports: Mapping[int, str]) -> dict[int, str]:
        """Find the sites whose reports differ in names, shapes or types from what most sites report.

        In a tie, the majority of the last round that had one decides; before there was a majority, all sites differ.

        Args:
            reports: the description of each site's reports.

        Returns:
            A description of the fault, by site.
        """
        counts = Counter(reports.values())
        most = {words for words, count in counts.items() if count == max(counts.values())}
        if len(most) == 1:
            (self._usual,) = most
        right = self._usual if self._usual in most else None
        others = right or f"do not agree: {' or '.join(sorted(most))}"
        return {s: f"it reports {words}, the others {others}" for s, words in reports.items() if words != right}

    def ask(self, site: int, round_index: int, question: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Ask a site a question, and return its answer.

        Raises:
            ConfigurationError: the question or its arguments cannot be sent to another process.
            NoAnswer: the site did not answer.
        """
        while isinstance(question, partial):
            args, kwargs = (*question.args, *args), {**question.keywords, **kwargs}
            question = question.func
        name = f"{question.__module__}:{question.__qualname__}"
        if "<" in name or "." in question.__qualname__:
            raise ConfigurationError(f"{name} cannot be asked of a site: a question is a function of a module.")
        plain, tensors = pack((tuple(args), dict(kwargs)))
        stands = self._trained if site in self._trained else self._stands
        visit, before = secrets.token_hex(8), stands.get(site)
        info = {**self._run_info(site), "visit": visit, "counted": before}
        packet = Packet(
            "ask",
            {"question": name, "arguments": plain, "round": round_index, **info},
            {key: tensor.cpu() for key, tensor in tensors.items()},
        )
        self._answered.pop(site, None)
        reply = self.directory.exchange({site: packet})[site]
        try:
            reply = check_done(reply)
            answer = unpack(reply.plain["answer"], reply.tensors)
            if not all(tensor.isfinite().all() for tensor in reply.tensors.values()):
                raise BadReply("its answer holds numbers that are not finite")
        except GARBLED as error:
            raise NoAnswer(self._note(site, f"did not answer {name}", fault_of(error))) from error
        stands[site] = visit
        self._answered[site] = stands, before
        return answer

    def take_back(self, site: int) -> None:
        """Discard the last answer: the site continues as if it had not been asked."""
        stands, before = self._answered.pop(site, ({}, None))
        if before is None:
            stands.pop(site, None)
        else:
            stands[site] = before

    def score_own_models(self, models: Mapping[int, Instruction]) -> dict[int, dict[str, float]]:
        """Collect the :data:`OWN_SCORES` of sites' own models on their own test samples, by site and name.

        A warning names the sites that send none."""
        packets = {site: instruction_packet(model, self._run_info(site), "test") for site, model in models.items()}
        scores: dict[int, dict[str, float]] = {}
        for site, reply in self.directory.exchange(packets).items():
            try:
                own = {name: float(check_done(reply).plain[name]) for name in OWN_SCORES}
                if any(value < 0 or value > 1 for value in own.values()):  # NaN means: not defined
                    raise BadReply(f"its scores are {own}")
                scores[site] = own
            except GARBLED as error:
                self._warn(site, "has not tested its model", fault_of(error))
        return scores

    def _run_info(self, site: int) -> dict[str, Any]:
        run = {"run": self._state.run, "rounds": self._rounds, "classes": self._num_classes}
        return {**run, "clients": len(self.directory.names), "client": site, "counted": self._stands.get(site)}

    def _note(self, site: int, what: str, why: object = "", when: str = "") -> str:
        """Record a site's fault for the run's record, and return a message about it."""
        # A site's words may hold anything: line breaks, halves of characters.
        printable = ["".join(c if c.isprintable() else "?" for c in str(words)) for words in (what, why)]
        what, why = printable[0], printable[1] and f": {printable[1]}"
        self._state.note(site, f"{what}{why}")
        return f"site {self.directory.names[site]!r} (client {site}) {what}{when}{why}."

    def _warn(self, site: int, what: str, why: object = "", when: str = "") -> None:
        warnings.warn(self._note(site, what, why, when), stacklevel=3)


def _reported(update: ClientUpdate) -> str:
    """Describe an update's reports by names, shapes and types."""
    reports = sorted(update.reports.items())
    return ", ".join(f"{name:.40} {list(value.shape)} of {value.dtype}" for name, value in reports) or "nothing"


class RemoteClient(Client):
    """A site as a client to which questions can be sent.

    Args:
        id: the site's number.
        data: an empty stand-in, since the data are at the site.
        channel: counts the messages.
        remote: all sites.
        round_index: returns the present round.
    """

    def __init__(
        self, id: int, data: LocalData, channel: Channel, remote: RemoteSites, round_index: Callable[[], int]
    ) -> None:
        super().__init__(id, data, channel)
        self._remote, self._round_index = remote, round_index

    def ask(self, question: Callable[Concatenate[LocalData, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        answer = self._remote.ask(self.id, self._round_index(), question, args, kwargs)
        self._count(question, (args, kwargs), answer)
        return answer

    def take_back(self) -> None:
        self._remote.take_back(self.id)
