"""UpdateFilter: base class of filters, which change or drop a cohort's updates before metrics and the aggregator."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor

from flsv.core import ClientMatrix, ClientUpdate
from flsv.core.matrix import common_model, copied_rows
from flsv.core.strategy import Component, FederationInfo, Strategy
from flsv.data.groups import client_called
from flsv.functional.distances import distances
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.host_copies import to_host

# Names of failures of clients, as results show them.
NOT_FINITE = "not_finite"
LARGE_EXCLUDED = "large_excluded"
#: The update was too large to be measured, but the aggregator has averaged it.
LARGE_AVERAGED = "large_averaged"


@dataclass(frozen=True)
class Cohort:
    """Updates of a round's k clients, with everything that filters read or change.

    Args:
        round_index: the round, from 0.
        updates: the messages with the clients' updates, one per client.
        matrix: the clients' models ``[k, P]``.
        starts: the model ``[P]`` from which each client started training (start point). None if the server does not
            know it.
        num_samples: the numbers of samples, integers ``[k]``, that the metrics and the aggregator see.
        num_parameters: number of leading elements of a model that are parameters. The rest are buffers.
        model: the global model ``[P]`` at the start of the round. None if it is not known.
        broken: ids of the clients whose model was not finite. These clients are not among the k.
        unmeasured: ids of the clients whose updates the aggregator sees and the metrics do not.
        warnings: sentences that filters have added to the warning of this round.
    """

    round_index: int
    updates: tuple[ClientUpdate, ...]
    matrix: Tensor
    starts: tuple[Tensor | None, ...]
    num_samples: Tensor
    num_parameters: int
    model: Tensor | None = None
    broken: Sequence[int] = ()
    unmeasured: Sequence[int] = ()
    warnings: tuple[str, ...] = ()

    @cached_property
    def ids(self) -> list[int]:
        """Ids of the k clients."""
        return [update.client_id for update in self.updates]

    @cached_property
    def common_start(self) -> Tensor | None:
        """Start point ``[P]`` of all clients. None if they started from different models, or from an unknown one."""
        return common_model(self.starts)

    @cached_property
    def norms(self) -> Tensor:
        """Norms of the updates, float64 ``[k]`` on the CPU. If a client's start point is unknown, the distance of its
        model from the global model."""
        update_norms, _ = self._host_norms
        return update_norms

    @property
    def model_norm(self) -> float:
        """Norm of the global model's parameters at the start of the round. 0 if the model is unknown."""
        _, model_norm = self._host_norms
        return model_norm

    @cached_property
    def _host_norms(self) -> tuple[Tensor, float]:
        """The updates' norms and the model's norm, copied to the CPU at once."""
        norms = self._norms_of_updates()
        if self.model is None:
            return torch.cat(to_host(norms)), 0.0

        # A model's norm is its distance from 0, without a second vector in float64.
        zero = self.model.new_zeros(1)  # counts as a vector of zeros
        norm_of_model = distances(self.model[None, : self.num_parameters], zero)
        host_norms = torch.cat(to_host([*norms, norm_of_model]))  # [k + 1]
        return host_norms[:-1], host_norms[-1].item()

    def _norms_of_updates(self) -> list[Tensor]:
        rows = self.matrix[:, : self.num_parameters]
        if self.common_start is not None:
            return [distances(rows, self.common_start[: self.num_parameters])]
        norms = []
        for row, client_start in zip(rows, self.starts):
            initial_model = self.model if client_start is None else client_start
            assert initial_model is not None
            norms.append(distances(row[None], initial_model[: self.num_parameters]))
        return norms

    @cached_property
    def gram(self) -> Tensor | None:
        """Inner products of the updates ``[k, k]``, on the CPU. None unless the server knows all start points."""
        origins = [origin for origin in self.starts if origin is not None]
        if not self.updates or len(origins) < len(self.updates):
            return None
        matrix = ClientMatrix(self.matrix, origins).first_columns(self.num_parameters)
        return matrix.gram().cpu()

    def keep(self, mask: Tensor) -> Cohort:
        """Return a cohort of only those clients for which ``mask``, bool ``[k]``, is True."""
        if mask.all():
            return self
        is_kept = mask.tolist()
        rows = mask.nonzero().flatten()
        return replace(
            self,
            updates=tuple(compress(self.updates, is_kept)),
            starts=tuple(compress(self.starts, is_kept)),
            matrix=copied_rows(self.matrix, rows),
            num_samples=self.num_samples[mask.to(self.num_samples.device)],
        )

    def warn(self, *sentences: str) -> Cohort:
        """Return the cohort with ``sentences`` added to the round's warning."""
        if not sentences:
            return self
        return replace(self, warnings=(*self.warnings, *sentences))


class Notices:
    """Counter of the rounds in which a client had a failure, such as a model that is not finite."""

    def __init__(
        self,
        failure_texts: Mapping[str, str],
        counts: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        self.names: Sequence[str] = ()
        self._failure_texts = failure_texts
        self._rounds_by_failure: dict[str, Counter[int]] = {}  # numbers of rounds, by client
        for failure in failure_texts:
            self._rounds_by_failure[failure] = Counter()
            if counts is not None:
                self._rounds_by_failure[failure].update(counts.get(failure, {}))

    def is_first(self, failure: str, clients: Sequence[int]) -> bool:
        """Count a round with ``failure`` for each client. Return whether it is the first for any client."""
        counts = self._rounds_by_failure[failure]
        counts.update(clients)
        return any(counts[client] == 1 for client in clients)

    def describe(self, failure: str, clients: Sequence[int]) -> str:
        """Name ``clients`` and the number of rounds in which each had ``failure``."""
        descriptions = []
        for client in clients:
            name_with_noun = client_called(client, self.names)
            description = name_with_noun.removeprefix("client ")  # the noun is added once below
            num_rounds = self._rounds_by_failure[failure][client]
            if num_rounds > 1:
                description += f" ({num_rounds} times)"
            descriptions.append(description)
        noun = "clients" if len(descriptions) > 1 else "client"
        return f"{noun} {', '.join(descriptions)}"

    def describe_failure(self, failure: str, clients: Sequence[int]) -> str:
        """Name ``clients`` and describe their ``failure``."""
        return f"{self.describe(failure, clients)} {self._failure_texts[failure]}"

    def at_the_end(self) -> list[str]:
        """Describe each failure that clients had in more than one round."""
        sentences = []
        for failure, counts in self._rounds_by_failure.items():
            clients = sorted(client for client, count in counts.items() if count > 1)
            if clients:
                sentences.append(self.describe_failure(failure, clients))
        return sentences

    def state_dict(self) -> dict[str, dict[int, int]]:
        """Return ``{failure: {client: number of rounds}}``."""
        return {failure: dict(counts) for failure, counts in self._rounds_by_failure.items()}


class UpdateFilter(Component):
    """Base class of filters, which change, drop or flag received updates.

    In every round the server passes the received updates through the loop's filters, one after the other, by calling
    :meth:`apply`, which subclasses override. Metrics and the aggregator see the result of the last filter.

    A filter that detects failures of clients declares them in ``failures``, ``{name: text}``. In ``apply`` it reports a
    failure to :attr:`notices`, which counts the rounds in which each client had it, and adds a sentence to the round's
    warning (:meth:`Cohort.warn`). ``loop.events`` shows the failure's name, warnings show its text.

    Example:
        >>> class FirstTwo(UpdateFilter):
        ...     def apply(self, cohort):
        ...         return cohort.keep(torch.arange(len(cohort.updates)) < 2)
        >>> FirstTwo()
        FirstTwo()
    """

    failures: ClassVar[Mapping[str, str]] = {}
    #: Whether a run may be resumed without this filter, or with other arguments.
    may_change: ClassVar[bool] = False
    #: Quantity, as part of an error message, that can be compared only between clients with the same start point; empty
    #: if the filter compares no such quantity.
    compares: ClassVar[str] = ""

    @abstractmethod
    def apply(self, cohort: Cohort) -> Cohort:
        """Return the filtered cohort. The next filter gets it or, after the last filter, metrics and the aggregator.
        Use :meth:`Cohort.keep` to drop clients, and ``dataclasses.replace`` to change updates.
        """

    def check(self, personalizer: Strategy | None, evaluating: Sequence[str]) -> None:
        """Check, when a loop is constructed, that the filter is compatible with the loop's other parts.

        Args:
            personalizer: the loop's personalizer, or None if there is none.
            evaluating: names of the metrics that let clients evaluate models on their own validation samples.

        Raises:
            ConfigurationError: the filter is not compatible with the personalizer or with a metric.
        """
        if self.compares and personalizer is not None:
            raise ConfigurationError(
                f"FederatedLoop(filters=[{self}], personalizer={personalizer!r}): the filter compares {self.compares}, "
                "which is possible only if all clients start from the global model. Remove one of the two."
            )

    @property
    def excludes(self) -> bool:
        """Return whether the filter may drop a client's update, depending on other clients' updates. True unless
        overridden."""
        return True

    @property
    def bounds(self) -> bool:
        """Return whether the filter may change updates or numbers of samples. True unless overridden."""
        return True

    @cached_property
    def notices(self) -> Notices:
        """Counter of the rounds in which each client had a failure."""
        return Notices(self.failures)

    def hint(self) -> str:
        """Return a sentence on a possible cause of non-finite models, for warnings. By default an empty text."""
        return ""

    def begin(self, federation: FederationInfo) -> None:
        self.notices = Notices(self.failures)
        self.resume(federation)

    def resume(self, federation: FederationInfo) -> None:
        self.notices.names = federation.client_names

    def state_dict(self) -> dict[str, Any]:
        return {"noticed": self.notices.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        counts = state["noticed"]
        self.notices = Notices(self.failures, counts)
        super().load_state_dict(state)
