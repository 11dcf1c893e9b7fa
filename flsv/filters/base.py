"""What the server does with a cohort's updates before they are aggregated and measured."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from flsv.core import ClientMatrix, ClientUpdate
from flsv.core.matrix import copied_rows
from flsv.core.strategy import Component, Federation
from flsv.data.groups import client_called
from flsv.functional.distances import distances
from flsv.personalization import Personalizer
from flsv.utilities.errors import ConfigurationError


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


@dataclass(frozen=True)
class Cohort:
    """A cohort's updates as the server has them before it measures and averages; k clients.

    Args:
        round_index: the round, from 0.
        updates: what the clients sent.
        matrix: ``[k, P]``, their models.
        starts: what each of them started from, ``[P]``; None where the server does not know it.
        num_samples: integers ``[k]``, as the metrics and the aggregator are to see them.
        num_parameters: how many leading entries of a model are parameters; the rest are buffers.
        model_norm: of the global model's parameters at the start of the round.
        broken: ids of the clients whose model was not finite, so that they sent nothing.
        unmeasured: ids of the clients whose updates are averaged and not measured.
        said: sentences for the warning of this round.
    """

    round_index: int
    updates: tuple[ClientUpdate, ...]
    matrix: Tensor
    starts: tuple[Tensor | None, ...]
    num_samples: Tensor
    num_parameters: int
    model_norm: float = 0.0
    broken: Sequence[int] = ()
    unmeasured: Sequence[int] = ()
    said: tuple[str, ...] = ()

    @cached_property
    def ids(self) -> list[int]:
        """The clients' numbers."""
        return [update.client_id for update in self.updates]

    @cached_property
    def common_start(self) -> Tensor | None:
        """``[P]``, the common start point; None if clients started from different models."""
        first = self.starts[0] if self.starts else None
        return first if all(start is first for start in self.starts) else None

    @cached_property
    def norms(self) -> Tensor:
        """float64 ``[k]`` on the CPU: the updates' lengths; as the client says where the start is not known."""
        cut = self.num_parameters
        if self.common_start is not None:
            return distances(self.matrix[:, :cut], self.common_start[:cut]).cpu()
        known = [
            update.norm if start is None else distances(row[None, :cut], start[:cut]).item()
            for update, row, start in zip(self.updates, self.matrix, self.starts)
        ]
        return torch.tensor(known, dtype=torch.float64)

    @cached_property
    def gram(self) -> Tensor | None:
        """``[k, k]`` on the CPU: the updates' products; None where the server does not know what all started from."""
        starts = [start for start in self.starts if start is not None]
        if not self.updates or len(starts) < len(self.updates):
            return None
        return ClientMatrix(self.matrix, starts).until(self.num_parameters).gram().cpu()

    def keep(self, kept: Tensor) -> Cohort:
        """Only these clients, bool ``[k]``."""
        if kept.all():
            return self
        which = kept.tolist()
        return replace(
            self,
            updates=tuple(update for update, stays in zip(self.updates, which) if stays),
            starts=tuple(start for start, stays in zip(self.starts, which) if stays),
            matrix=copied_rows(self.matrix, kept.nonzero()[:, 0]),
            num_samples=self.num_samples[kept.to(self.num_samples.device)],
        )

    def say(self, *sentences: str) -> Cohort:
        """With this in the round's warning."""
        return replace(self, said=(*self.said, *sentences)) if sentences else self


class UpdateFilter(Component):
    """Base class: a subclass overrides :meth:`apply`.

    One that finds clients at fault says in ``faults`` what that is called in ``loop.events`` and what a warning says
    of them, and counts them with :attr:`notices`.

    Example:
        >>> class FirstTwo(UpdateFilter):
        ...     def apply(self, cohort):
        ...         return cohort.keep(torch.arange(len(cohort.updates)) < 2)
        >>> FirstTwo()
        FirstTwo()
    """

    faults: ClassVar[Mapping[str, str]] = {}
    #: Whether a run may be resumed with another of its kind, or without it.
    may_change: ClassVar[bool] = False
    #: What of the clients it compares, where that asks for everybody to start from the global model.
    compares: ClassVar[str] = ""

    @abstractmethod
    def apply(self, cohort: Cohort) -> Cohort:
        """The cohort that remains, as the metrics and the aggregator see it."""

    def check(self, personalizer: Personalizer | None, evaluating: Sequence[str]) -> None:
        """When a loop is made, whether it can be done beside the rest.

        Args:
            personalizer: of the loop.
            evaluating: names of the metrics that let clients evaluate models on their own validation samples.

        Raises:
            ConfigurationError: it cannot.
        """
        if self.compares and personalizer is not None:
            raise ConfigurationError(
                f"FederatedLoop(filters=[{self}], personalizer={personalizer!r}): {self.compares} are compared where "
                "everybody starts from the global model. Leave one of them out."
            )

    @property
    def excludes(self) -> bool:
        """Whether it may leave clients out of a round by what others send; yes, where nobody says otherwise."""
        return True

    @property
    def bounds(self) -> bool:
        """Whether it may change what a client is seen to have sent; likewise."""
        return True

    @cached_property
    def notices(self) -> Notices:
        """The clients at fault, and how often."""
        return Notices(self.faults)

    @property
    def groups(self) -> list[list[int]]:
        """Groups of clients that it has found to be alike."""
        return []

    def hint(self) -> str:
        """What models that are not finite may come from, where it knows that."""
        return ""

    def begin(self, federation: Federation) -> None:
        self.notices = Notices(self.faults)
        self.resume(federation)

    def resume(self, federation: Federation) -> None:
        self.notices.names = federation.client_names

    def state_dict(self) -> dict[str, Any]:
        return {"noticed": self.notices.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.notices = Notices(self.faults, state["noticed"])
        super().load_state_dict(state)
