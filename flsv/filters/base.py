"""UpdateFilter: base class of filters, which change or drop a cohort's updates before metrics and the aggregator."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from flsv.core.strategy import Component, FederationInfo
from flsv.data.groups import client_called
from flsv.filters.cohort import Cohort
from flsv.personalization import Personalizer
from flsv.utilities.errors import ConfigurationError


class Notices:
    """Counter of the rounds in which each client had each fault."""

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


class UpdateFilter(Component):
    """Base class of filters, which change, drop or doubt received updates.

    In every round the server passes the received updates through the loop's filters, one after the other, by calling
    :meth:`apply`, which subclasses override. Metrics and the aggregator see the result of the last filter.

    A filter that finds faulty clients declares the possible faults in ``faults``, ``{name: text}``. In ``apply`` it
    reports a fault to :attr:`notices`, which counts the rounds in which each client had it, and adds a sentence to the
    round's warning (:meth:`Cohort.warn`). ``loop.events`` shows the fault's name, warnings show its text.

    Example:
        >>> class FirstTwo(UpdateFilter):
        ...     def apply(self, cohort):
        ...         return cohort.keep(torch.arange(len(cohort.updates)) < 2)
        >>> FirstTwo()
        FirstTwo()
    """

    faults: ClassVar[Mapping[str, str]] = {}
    #: Whether a run may be resumed without this filter, or with other arguments.
    may_change: ClassVar[bool] = False
    #: Quantity, as part of an error message, that can be compared only between clients with the same start point; empty
    #: if the filter compares no such quantity.
    compares: ClassVar[str] = ""

    @abstractmethod
    def apply(self, cohort: Cohort) -> Cohort:
        """Return the filtered cohort, which the next filter or, after the last filter, metrics and the aggregator get.
        Use :meth:`Cohort.keep` to drop clients, and ``dataclasses.replace`` to change updates."""

    def check(self, personalizer: Personalizer | None, evaluating: Sequence[str]) -> None:
        """Check, when a loop is constructed, that the filter is compatible with the loop's other parts.

        Args:
            personalizer: the loop's personalizer, or None if there is none.
            evaluating: names of the metrics that let clients evaluate models on their own validation samples.

        Raises:
            ConfigurationError: the filter is not compatible with the personalizer or with a metric.
        """
        if self.compares and personalizer is not None:
            raise ConfigurationError(
                f"FederatedLoop(filters=[{self}], personalizer={personalizer!r}): {self.compares} can be compared "
                "only where all clients start from the global model. Leave one of them out."
            )

    @property
    def excludes(self) -> bool:
        """Whether the filter may drop a client's update, depending on other clients' updates. True unless
        overridden."""
        return True

    @property
    def bounds(self) -> bool:
        """Whether the filter may change updates or numbers of samples. True unless overridden."""
        return True

    @cached_property
    def notices(self) -> Notices:
        """Counter of the rounds in which each client was found faulty."""
        return Notices(self.faults)

    @property
    def groups(self) -> list[list[int]]:
        """Groups of clients whose updates are copies of each other."""
        return []

    def hint(self) -> str:
        """Return a sentence on a possible cause of non-finite models, for warnings. By default an empty text."""
        return ""

    def begin(self, federation: FederationInfo) -> None:
        self.notices = Notices(self.faults)
        self.resume(federation)

    def resume(self, federation: FederationInfo) -> None:
        self.notices.names = federation.client_names

    def state_dict(self) -> dict[str, Any]:
        return {"noticed": self.notices.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.notices = Notices(self.faults, state["noticed"])
        super().load_state_dict(state)
