"""NamedCohort: who takes part in a round that somebody else ran, by the names that they have there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flsv.arguments import check_number
from flsv.data.groups import client_called
from flsv.errors import ConfigurationError

#: A larger number is an identity, and no place.
_PLACES = 10**5


@dataclass(frozen=True)
class NamedCohort:
    """Who takes part: ``ids`` of the cohort, in the order of ``keys`` (None: by place), and all clients' names."""

    ids: list[int]
    keys: list[Any] | None
    names: list[str]

    @classmethod
    def of(cls, updates: Any, named: Sequence[Any] | None, count: int | None) -> NamedCohort:
        names = [] if named is None else list(named)
        if isinstance(updates, Tensor) or not isinstance(updates, Mapping | Sequence) or not len(updates):
            raise ConfigurationError(
                f"value_round(updates={type(updates).__name__}): expected the models of at least one client, in a list "
                "or by client."
            )
        keys = list(updates) if isinstance(updates, Mapping) else None
        ids = [*range(len(updates))] if keys is None else _numbers(keys, names)
        count = count if count is not None else max(len(names), max(ids) + 1)
        hint = "A contribution is measured against other clients': say how many there are."
        check_number("value_round", "num_clients", count, least=2, whole=True, hint=hint)
        if max(ids) >= count or len(names) not in (0, count):
            raise ConfigurationError(
                f"value_round: there are {count} clients, and {len(names)} names and a client {max(ids)} are given. "
                "Say num_clients, or name all of them."
            )
        words = [str(name) for name in names or range(count)]
        if len(set(words)) < count or len(set(ids)) < len(ids):
            raise ConfigurationError(
                f"value_round: two clients have one name (client_names={words[:20]}, updates of {keys or ids})."
            )
        return cls(ids, keys, words)

    @property
    def called(self) -> list[str]:
        """The cohort's clients in a sentence."""
        return [client_called(client, self.names) for client in self.ids]

    def each(self, given: Any, argument: str) -> list[tuple[str, Any]]:
        """What is given of each client, in their order, and how the client is called; nothing of None."""
        if given is None:
            return []
        whose = list(given) if isinstance(given, Mapping) else list(range(len(given)))
        expected = self.keys if isinstance(given, Mapping) else list(range(len(self.ids)))
        if expected is None or set(whose) != set(expected):
            raise ConfigurationError(
                f"value_round({argument}=...) is given of {whose}, expected of {expected or len(self.ids)} as updates "
                "are: all in lists, or all by client."
            )
        return [(called, given[key]) for called, key in zip(self.called, expected)]


def _numbers(keys: Sequence[Any], names: Sequence[Any]) -> list[int]:
    """Of clients, by their numbers or names; a number may be an identity that another framework gives, and no place."""
    known = {name: place for place, name in enumerate(names)}
    places = range(0 if any(isinstance(name, int) for name in names) else _PLACES)
    strange = [key for key in keys if key not in known and key not in places]
    if strange:
        raise ConfigurationError(
            f"value_round(updates=...): {strange[:5]} are no numbers of clients, from 0, and none of "
            f"client_names={list(names)}. Name all clients in client_names."
        )
    return [known.get(key, key) for key in keys]
