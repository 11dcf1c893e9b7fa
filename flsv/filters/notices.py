"""Notices: a counter of the rounds in which each client had each fault that a filter finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flsv.data.groups import client_called


class Notices:
    """Counter of the rounds in which each client had each fault.

    Example:
        >>> notices = Notices({"large": "sent too much"})
        >>> notices.is_first("large", [3]), notices.is_first("large", [3]), notices.describe("large", [3])
        (True, False, 'client 3 (2 times)')
        >>> notices.at_the_end()
        ['client 3 (2 times) sent too much']
    """

    def __init__(self, words: Mapping[str, str], found: Mapping[str, Mapping[int, int]] | None = None) -> None:
        self._words = words
        self.names: Sequence[str] = ()
        self._found = {fault: Counter((found or {}).get(fault, {})) for fault in words}

    def is_first(self, fault: str, clients: Sequence[int]) -> bool:
        """Count a round with ``fault`` for each client, and return whether one has it for the first time."""
        self._found[fault].update(clients)
        return any(self._found[fault][client] == 1 for client in clients)

    def describe(self, fault: str, clients: Sequence[int]) -> str:
        """Name ``clients`` and the number of rounds in which each had ``fault``."""
        named = []
        for client in clients:
            count, called = self._found[fault][client], client_called(client, self.names)
            named.append(called.removeprefix("client ") + (f" ({count} times)" if count > 1 else ""))
        return f"client{'s' if len(named) > 1 else ''} {', '.join(named)}"

    def describe_fault(self, fault: str, clients: Sequence[int]) -> str:
        """Name ``clients`` and describe their ``fault``."""
        return f"{self.describe(fault, clients)} {self._words[fault]}"

    def at_the_end(self) -> list[str]:
        """Describe each fault that clients had in more than one round."""
        found = {fault: sorted(c for c, times in counts.items() if times > 1) for fault, counts in self._found.items()}
        return [self.describe_fault(fault, clients) for fault, clients in found.items() if clients]

    def state_dict(self) -> dict[str, dict[int, int]]:
        """Return ``{fault: {client: number of rounds}}``."""
        return {fault: dict(found) for fault, found in self._found.items()}
