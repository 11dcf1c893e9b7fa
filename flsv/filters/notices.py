"""Who was found at fault, how often, and when to say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flsv.data.groups import client_called


class Notices:
    """Counts the rounds in which clients were found at fault.

    Whoever goes on failing is not named in every round, but at the 1st, 10th, 100th, ... time, and once more at the end
    of the run.

    Args:
        words: fault to what a warning says of it.
        found: what was found in earlier rounds: fault to client to the number of rounds.

    Attributes:
        names: of the clients.

    Example:
        >>> notices = Notices({"large": "sent too much"})
        >>> notices.due("large", [3]), notices.due("large", [3]), notices.name("large", [3])
        (True, False, 'client 3 (2 times)')
        >>> notices.at_the_end()
        ['client 3 (2 times) sent too much']
    """

    def __init__(self, words: Mapping[str, str], found: Mapping[str, Mapping[int, int]] | None = None) -> None:
        self._words = words
        self.names: Sequence[str] = ()
        self._found = {fault: Counter((found or {}).get(fault, {})) for fault in words}
        self._told: dict[tuple[str, int], int] = {}

    def due(self, fault: str, clients: Sequence[int]) -> bool:
        """Count one more time for these clients; whether it is time to speak of one of them."""
        times = self._found[fault]
        times.update(clients)
        due = any(_power_of_ten(times[client]) for client in clients)
        if due:
            self._told.update({(fault, client): times[client] for client in clients})
        return due

    def name(self, fault: str, clients: Sequence[int]) -> str:
        """These clients in words, and how often each was found."""
        named = []
        for client in clients:
            count, called = self._found[fault][client], client_called(client, self.names)
            named.append(called.removeprefix("client ") + (f" ({count} times)" if count > 1 else ""))
        return f"client{'s' if len(named) > 1 else ''} {', '.join(named)}"

    def said(self, fault: str, clients: Sequence[int]) -> str:
        """These clients, and what they did."""
        return f"{self.name(fault, clients)} {self._words[fault]}"

    def at_the_end(self) -> list[str]:
        """The clients that failed more often than has been reported, a text for each fault."""
        result = []
        for fault, found in self._found.items():
            more = [client for client, times in found.items() if times > self._told.get((fault, client), 0)]
            if more:
                result.append(self.said(fault, sorted(more)))
        return result

    def state_dict(self) -> dict[str, dict[int, int]]:
        """Fault to client to the number of rounds."""
        return {fault: dict(found) for fault, found in self._found.items()}


def _power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"
