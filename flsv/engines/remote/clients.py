"""The sites as the server sees them: how they train rounds and answer questions."""

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


class Remote:
    """All sites of a federation, as the server sees them.

    Every visit of a site, and every question to it, has a name: under it the site keeps what comes of it. The server
    says from which one a site goes on, so what a site keeps and what the server knows of it stay in step, whatever is
    lost on the way.

    Args:
        directory: where they are.
        state: of the federation; the run's name in it, what counts of the sites, and what went wrong there.
        rounds: of the run.
        steps_per_sample: the most optimizer steps that a site can take in a round, for each of its samples.
        reports: names of what strategies let sites report.
        num_classes: of the federation; None where there are none. A site that lacks the last ones knows no better.
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
        """What these have sent in this round counts, what others have sent does not."""
        self._stands |= {site: visit for site, visit in self._trained.items() if site in sites}
        self._trained = {}

    def commit(self) -> None:
        """The round is complete."""
        self._state.counted = dict(self._stands)

    def discard(self) -> None:
        """The round is forgotten."""
        self._stands, self._trained = dict(self._state.counted), {}

    def train(
        self, instructions: Mapping[int, Instruction], device: torch.device, space: ParameterSpace
    ) -> tuple[list[ClientUpdate], list[int]]:
        """The updates of those who sent one, in the order of ``instructions``, and whose models were not finite.

        Who is away, is late or sends something else is named in a warning and left out: as if it had not been drawn.
        """
        visits = {site: secrets.token_hex(8) for site in instructions}
        packets = {
            site: instruction_packet(instruction, {**self._facts(site), "visit": visits[site]})
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
            if replies[site].plain.get("lost"):  # type: ignore[union-attr]
                self._warn(site, "no longer held what it kept, and went on from nothing", "", when)
        return [updates[site] for site in self._trained], broken

    def _unusual(self, reports: Mapping[int, str]) -> dict[int, str]:
        """Who reports something else than the others. What most of them report is what there is to report. Where two
        things are reported as often, it is what most did in the last round in which most did; before that nobody knows
        who is right, and all are left out."""
        counts = Counter(reports.values())
        most = {words for words, count in counts.items() if count == max(counts.values())}
        if len(most) == 1:
            (self._usual,) = most
        right = self._usual if self._usual in most else None
        others = right or f"do not agree: {' or '.join(sorted(most))}"
        return {s: f"it reports {words}, the others {others}" for s, words in reports.items() if words != right}

    def ask(self, site: int, round_index: int, question: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A question's answer.

        Raises:
            ConfigurationError: it cannot leave the process.
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
        facts = {**self._facts(site), "visit": visit, "counted": before}
        packet = Packet(
            "ask",
            {"question": name, "arguments": plain, "round": round_index, **facts},
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

    def test(self, models: Mapping[int, Instruction]) -> dict[int, dict[str, float]]:
        """The :data:`OWN_SCORES` of sites' own models on their own test samples; a warning names who sends none."""
        packets = {site: instruction_packet(model, self._facts(site), "test") for site, model in models.items()}
        scores: dict[int, dict[str, float]] = {}
        for site, reply in self.directory.exchange(packets).items():
            try:
                own = {name: float(check_done(reply).plain[name]) for name in OWN_SCORES}
                if any(value < 0 or value > 1 for value in own.values()):  # NaN: there is nothing to tell it by
                    raise BadReply(f"its scores are {own}")
                scores[site] = own
            except GARBLED as error:
                self._warn(site, "has not tested its model", fault_of(error))
        return scores

    def _facts(self, site: int) -> dict[str, Any]:
        run = {"run": self._state.run, "rounds": self._rounds, "classes": self._num_classes}
        return {**run, "clients": len(self.directory.names), "client": site, "counted": self._stands.get(site)}

    def _note(self, site: int, what: str, why: object = "", when: str = "") -> str:
        """Something went wrong at a site: it is kept for the run's record, and given back in words."""
        # What a site says may be anything: a line break, half a character.
        printable = ["".join(c if c.isprintable() else "?" for c in str(words)) for words in (what, why)]
        what, why = printable[0], printable[1] and f": {printable[1]}"
        self._state.note(site, f"{what}{why}")
        return f"site {self.directory.names[site]!r} (client {site}) {what}{when}{why}."

    def _warn(self, site: int, what: str, why: object = "", when: str = "") -> None:
        warnings.warn(self._note(site, what, why, when), stacklevel=3)


def _reported(update: ClientUpdate) -> str:
    """Names, shapes and types, in words."""
    reports = sorted(update.reports.items())
    return ", ".join(f"{name:.40} {list(value.shape)} of {value.dtype}" for name, value in reports) or "nothing"


class RemoteClient(Client):
    """One site, to which questions can be sent.

    Args:
        id: its number.
        data: nothing: what it holds is elsewhere.
        channel: counts what crosses.
        remote: all sites.
        round_index: gives the present round.
    """

    def __init__(
        self, id: int, data: LocalData, channel: Channel, remote: Remote, round_index: Callable[[], int]
    ) -> None:
        super().__init__(id, data, channel)
        self._remote, self._round_index = remote, round_index

    def ask(self, question: Callable[Concatenate[LocalData, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        answer = self._remote.ask(self.id, self._round_index(), question, args, kwargs)
        self._count(question, (args, kwargs), answer)
        return answer

    def take_back(self) -> None:
        self._remote.take_back(self.id)
