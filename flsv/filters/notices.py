"""Notices: number of rounds in which each client was found at fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flsv.data.groups import client_called


class Notices:
    """Counter of the rounds in which clients were found at fault.

    A client that fails repeatedly is named in a warning the first time and once more at the end of the run.

    Args:
        words: fault to the words of its warning.
        found: the counts of earlier rounds: fault to client to the number of rounds.

    Attributes:
        names: the clients' names.

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
        """Add one to these clients' counts, and return whether it is the first time for one of them."""
        self._found[fault].update(clients)
        return any(self._found[fault][client] == 1 for client in clients)

    def describe(self, fault: str, clients: Sequence[int]) -> str:
        """Describe these clients in words, with how often each was found."""
        named = []
        for client in clients:
            count, called = self._found[fault][client], client_called(client, self.names)
            named.append(called.removeprefix("client ") + (f" ({count} times)" if count > 1 else ""))
        return f"client{'s' if len(named) > 1 else ''} {', '.join(named)}"

    def describe_fault(self, fault: str, clients: Sequence[int]) -> str:
        """Describe these clients and their fault in words."""
        return f"{self.describe(fault, clients)} {self._words[fault]}"

    def at_the_end(self) -> list[str]:
        """Describe the clients that failed more than once, in one text for each fault."""
        found = {fault: sorted(c for c, times in counts.items() if times > 1) for fault, counts in self._found.items()}
        return [self.describe_fault(fault, clients) for fault, clients in found.items() if clients]

    def state_dict(self) -> dict[str, dict[int, int]]:
        """Return the counts: fault to client to the number of rounds."""
        return {fault: dict(found) for fault, found in self._found.items()}
