"""The sites as the server sees them: they train a round, and answer questions."""

from __future__ import annotations

import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from flsv.engines.remote.messages import BadReply, instruction_packet, read_update
from flsv.engines.remote.transport import Directory
from flsv.engines.remote.wire import Packet, pack, unpack
from flsv.errors import ConfigurationError
from flsv.parameters import ParameterSpace
from flsv.participants import Channel, Client, LocalData, NoAnswer
from flsv.round import ClientUpdate, Instruction

T = TypeVar("T")
P = ParamSpec("P")


class Remote:
    """All sites of a federation, from the server.

    Args:
        directory: where they are.
        federation: a name of the run, the same when it is resumed.
        rounds: of the run.
        sends_global: whether uploads refer to the global model, so that sites need it beside their start point.
        counted: site to the last round whose update was taken in, -1 for none: from there it goes on. Not in it: from
            the last round that it knows of.
        taken_back: site to the questions that it is to forget, each with its round; it is kept up to date.
    """

    def __init__(
        self,
        directory: Directory,
        federation: str,
        rounds: int,
        sends_global: bool,
        counted: Mapping[int, int],
        taken_back: dict[int, dict[str, int]],
    ) -> None:
        self.directory, self._federation, self._rounds, self._counted = directory, federation, rounds, counted
        self._sends_global, self._taken_back = sends_global, taken_back
        self._asked: dict[int, tuple[str, int]] = {}

    def train(
        self, instructions: Mapping[int, Instruction], global_vector: Tensor, space: ParameterSpace
    ) -> tuple[list[ClientUpdate], list[int]]:
        """The updates of those who sent one, in the order of ``instructions``, and whose models were not finite.

        Who is away, is late or sends something else is named in a warning and left out: as if it had not been drawn.
        """
        packets = {}
        for site, told in instructions.items():
            needed = global_vector if self._sends_global and told.start is not global_vector else None
            packets[site] = instruction_packet(told, self._facts_for(site), needed)
        replies = self.directory.exchange(packets)
        updates: list[ClientUpdate] = []
        broken = []
        wrong: dict[int, str] = {}
        for site, reply in replies.items():
            try:
                if isinstance(reply, str):
                    raise BadReply(reply)
                update = read_update(reply, site, space, global_vector.device)
                if update is None:
                    broken.append(site)
                else:
                    updates.append(update)
            except BadReply as why:
                wrong[site] = str(why)
        # What most of them report is what there is to report: of one that is first nobody knows whether it is right.
        found = {update.client_id: _reported(update) for update in updates}
        usual = next((words for words, _ in Counter(found.values()).most_common(1)), "")
        wrong |= {site: f"it reports {words}, the others {usual}" for site, words in found.items() if words != usual}
        updates = [update for update in updates if update.client_id not in wrong]
        for site, words in wrong.items():
            name, index = self.directory.names[site], instructions[site].round_index
            warnings.warn(f"site {name!r} (client {site}) is left out of round {index}: {words}.", stacklevel=2)
        return updates, broken

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
        asked = secrets.token_hex(8)
        self._asked[site] = asked, round_index
        told = {"question": name, "id": asked, "arguments": plain, "round": round_index}
        told |= {**self._facts, **self._forgotten(site)}
        packet = Packet("ask", told, {key: tensor.cpu() for key, tensor in tensors.items()})
        reply = self.directory.exchange({site: packet})[site]
        if isinstance(reply, str):
            raise NoAnswer(f"site {self.directory.names[site]!r} (client {site}) did not answer {name}: {reply}.")
        try:
            return unpack(reply.plain["answer"], reply.tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise NoAnswer(
                f"site {self.directory.names[site]!r} (client {site}) answered {name} with a {reply.kind!r} that lacks "
                f"or garbles {error}."
            ) from error

    def take_back(self, site: int) -> None:
        """What the last question has changed at the site is to be forgotten there: every message says so, until a later
        round of the site's has counted. Once would not do: the server may go on from a checkpoint of before, or leave
        the next update out."""
        if site in self._asked:
            question, round_index = self._asked[site]
            self._taken_back[site] = {**self._since(site), question: round_index}

    def test(self, round_index: int, models: Mapping[int, Instruction]) -> dict[int, float]:
        """The accuracy of every site's own model on its own test samples; who does not reply, or sends something else,
        is named in a warning and missing."""
        packets = {}
        for site, told in models.items():
            packet = instruction_packet(told, self._facts_for(site), None)
            packets[site] = Packet("test", packet.plain, packet.tensors)
        found: dict[int, float] = {}
        for site, reply in self.directory.exchange(packets).items():
            try:
                if isinstance(reply, str):
                    raise BadReply(reply)
                accuracy = float(reply.plain["accuracy"])
                if accuracy < 0 or accuracy > 1:  # NaN: it has no test samples
                    raise BadReply(f"its accuracy is {accuracy}")
                found[site] = accuracy
            except (BadReply, KeyError, TypeError, ValueError) as why:
                said = why if isinstance(why, BadReply) else f"its reply lacks or garbles {why}"
                warnings.warn(
                    f"site {self.directory.names[site]!r} (client {site}) has not tested its model: {said}.",
                    stacklevel=2,
                )
        return found

    def _facts_for(self, site: int) -> dict[str, Any]:
        counted = {"counted": self._counted[site]} if site in self._counted else {}
        return {**self._facts, "clients": len(self.directory.names), **counted, **self._forgotten(site)}

    def _forgotten(self, site: int) -> dict[str, Any]:
        since = self._since(site)
        return {"taken_back": list(since)} if since else {}

    def _since(self, site: int) -> dict[str, int]:
        """The questions to forget of rounds from which the site may still go on."""
        last = self._counted.get(site, -1)
        return {question: index for question, index in self._taken_back.get(site, {}).items() if index >= last}

    @property
    def _facts(self) -> dict[str, Any]:
        return {"federation": self._federation, "rounds": self._rounds}


def _reported(update: ClientUpdate) -> str:
    """Names and shapes, in words."""
    return ", ".join(f"{name} {list(value.shape)}" for name, value in sorted(update.reports.items())) or "nothing"


class RemoteClient(Client):
    """A site, to be asked.

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
