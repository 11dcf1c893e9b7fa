"""Waiting: with whose answers a round ends. Wait: one exchange, which says whom it waits for and what took so long."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lightning.pytorch.utilities import rank_zero_info

from flsv.arguments import check_number
from flsv.engines.remote.messages import BadReply, Packet, check_done
from flsv.engines.remote.secure.settings import LEAST, SecureSums
from flsv.errors import ConfigurationError

Address = int
Reply = Packet | str
"""A packet, or in words why there is none."""

#: Seconds after which the server says for the first time whom it waits for; then after twice as many, and so on.
SILENT = 15.0
#: What an exchange that is over sooner took is not said.
QUICK = 1.0


@dataclass(frozen=True)
class Waiting:
    """With whose answers a round ends, where some sites are slow.

    The server waits for all sites that it has asked, at most for the ``timeout`` of a reply. Here it goes on as soon as
    a quorum has answered and the deadline is over. Whoever comes later counts as not drawn in that round: contributions
    are of those who have answered, and of a site that is always late there are none. Draw more sites than a round
    needs, and a quorum is over-sampling (Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys
    2019, Section 2.2).

    An update that comes late is dropped, with a line that says so; :class:`flsv.aggregation.FedBuff` takes it, as stale
    as it is, in the next round that its site is drawn for. It is not in the checkpoint: after a restart of the server
    the site is asked again.

    Args:
        quorum: the share of the sites asked whose answers are enough, above 0 and up to 1.
        deadline: seconds that all have in any case.

    Raises:
        ConfigurationError: an argument out of range; with secure sums, before the first round, a quorum that can leave
            fewer sites than a sum needs.

    Example:
        >>> waiting = Waiting(quorum=0.8, deadline=120)
        >>> [waiting.enough(sites) for sites in (1, 3, 5, 10)]
        [1, 3, 4, 8]
    """

    quorum: float = 1.0
    deadline: float = 0.0

    def __post_init__(self) -> None:
        check_number(self, "quorum", self.quorum, above=0, most=1)
        check_number(self, "deadline", self.deadline, least=0)

    def enough(self, sites: int) -> int:
        """How many answers of so many sites end a round, once the deadline is over."""
        return math.ceil(round(self.quorum * sites, 9))

    def check_sums(self, sums: SecureSums, sites: int, groups: Collection[Collection[int]] = ()) -> None:
        """Before the first round of secure sums over so many sites, and over groups of them.

        Raises:
            ConfigurationError: a sum could be left with fewer sites than it needs.
        """
        announced = left = self.enough(sites)
        for _ in range(3):  # of a round's four messages each goes to those who have answered the one before
            left = self.enough(left)
        try:
            least = sums.threshold_of(announced)
        except ConfigurationError:
            least = left + 1
        if left < least:
            raise ConfigurationError(
                f"{self!r} can leave {left} of {sites} sites in a secure sum, which needs {least} or more: each of a "
                "round's four messages may end with a quorum of those who have answered the one before. Raise quorum."
            )
        smallest = min((len(group) for group in groups), default=sites) - (sites - left)
        if groups and smallest < LEAST:
            raise ConfigurationError(
                f"{self!r} can leave {max(0, smallest)} sites of a group in a secure sum, which needs {LEAST} or more. "
                "Raise quorum, or make groups larger."
            )


class Wait:
    """Of one exchange. A transport asks it again and again whether it is :meth:`over`.

    Args:
        seconds: that a site has for its work.
        start: seconds that the start of its process may take besides.
        what: is asked, in words.
        names: of the sites, by their addresses.
        asked: how many sites are, also those that are away.
        waiting: with whose answers it ends.
        keep_late: whether the reply to an earlier packet of a kind is one to the next packet of that kind.

    Example:
        >>> wait = Wait(60.0, asked=2, waiting=Waiting(quorum=0.5))
        >>> wait.over({}, missing=[7, 8]), wait.over({7: Packet("update")}, missing=[8])
        (False, True)
    """

    def __init__(
        self,
        seconds: float,
        start: float = 0.0,
        what: str = "a reply",
        names: Mapping[Address, str] | None = None,
        asked: int = 0,
        waiting: Waiting | None = None,
        keep_late: bool = False,
    ) -> None:
        self.seconds, self.limit, self.keep_late = seconds, seconds + start, keep_late
        self._what, self._names, self._asked, self._waiting = what, names or {}, asked, waiting or Waiting()
        self._began, self._say_at, self._by_quorum = time.monotonic(), SILENT, False

    @property
    def waited(self) -> float:
        """Seconds since the exchange began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until nobody is waited for any more."""
        return self.limit - self.waited

    def over(self, replies: Mapping[Address, Reply], missing: Collection[Address]) -> bool:
        """Whether it is; now and then, whom the server still waits for is said.

        Args:
            replies: that have come.
            missing: whose have not.
        """
        waited, done = self.waited, sum(map(_is_answer, replies.values()))
        enough = done >= self._waiting.enough(max(self._asked, len(replies) + len(missing)))
        if not missing or waited >= self.limit:
            return True
        if enough and waited >= self._waiting.deadline:
            self._by_quorum = True
            return True
        if waited >= self._say_at:
            self._say_at *= 2
            names = ", ".join(repr(self._name(address)) for address in missing)
            rank_zero_info(
                f"flsv: {self._what}: waiting for {names}, {waited:.0f} s so far, {self.limit:.0f} s at most."
            )
        return False

    def why_missing(self) -> str:
        """Why there is no reply of a site, in words that are the same in every round."""
        if self._by_quorum:
            return f"no reply when {self._waiting.quorum:.0%} had answered and {self._waiting.deadline:g} s were over"
        return f"no reply within {self.limit:.4g} s"

    def came_late(self, address: Address, reply: Reply, what: str, seconds: float) -> bool:
        """Whether a reply that nobody waited for any more is of use; what becomes of it is said.

        Args:
            address: of its site.
            reply: has come now.
            what: it answers, in words.
            seconds: that it took.
        """
        if not _is_answer(reply):  # that it has failed makes no difference now
            return False
        fate = "kept for the round that it is drawn for next" if self.keep_late else "dropped"
        rank_zero_info(f"flsv: {self._name(address)!r} has answered {what} after {seconds:.0f} s: late, and {fate}.")
        return self.keep_late

    def tell(self, replies: Mapping[Address, Reply]) -> None:
        """Say how long it took, and what the last one to answer spent its time on."""
        waited, answers = self.waited, {a: r for a, r in replies.items() if isinstance(r, Packet) and _is_answer(r)}
        if waited < QUICK or not answers:
            return
        last = max(answers, key=lambda address: sum(answers[address].took.values()))
        took = answers[last].took
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in took.items())
        slowest = f" The slowest, {self._name(last)!r}: {parts}." if took else ""
        of = max(self._asked, len(replies))
        rank_zero_info(f"flsv: {self._what}: {len(answers)} of {of} sites in {waited:.1f} s.{slowest}")

    def _name(self, address: Address) -> str:
        return self._names.get(address, f"node {address}")


def _is_answer(reply: Reply) -> bool:
    try:
        check_done(reply)
    except BadReply:
        return False
    return True
