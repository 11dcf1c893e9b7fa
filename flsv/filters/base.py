"""UpdateFilter: base class of the steps between receiving a cohort's updates and aggregating them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from flsv.core.strategy import Component, Federation
from flsv.filters.cohort import Cohort
from flsv.filters.notices import Notices
from flsv.personalization import Personalizer
from flsv.utilities.errors import ConfigurationError


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
