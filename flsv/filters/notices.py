"""Notices: how often each client was found at fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flsv.data.groups import client_called


class Notices:
    """Counts the rounds in which clients were found at fault.

    Whoever goes on failing is not named in every round, but the first time, and once more at the end of the run.

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

    def due(self, fault: str, clients: Sequence[int]) -> bool:
        """Count one more time for these clients; whether it is the first of one of them."""
        self._found[fault].update(clients)
        return any(self._found[fault][client] == 1 for client in clients)

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
        """The clients that failed more than once, a text for each fault."""
        found = {fault: sorted(c for c, times in counts.items() if times > 1) for fault, counts in self._found.items()}
        return [self.said(fault, clients) for fault, clients in found.items() if clients]

    def state_dict(self) -> dict[str, dict[int, int]]:
        """Fault to client to the number of rounds."""
        return {fault: dict(found) for fault, found in self._found.items()}
