"""What is known of a federation's clients between two rounds: contributions, who was found at fault, the table."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.filters import UpdateFilter
from flsv.filters.copies import COPY
from flsv.filters.outliers import LARGE, NOT_FINITE
from flsv.metrics import ContributionMetric
from flsv.report.measured import known_rows, overall
from flsv.report.run_table import frame, tidy
from flsv.round import FederationState
from flsv.round.result import Event
from flsv.server import ContributionMetrics

if TYPE_CHECKING:
    import pandas


class Contribution(Tensor):
    """A metric's value ``[n]`` as tables show it: a tensor, with what else the metric says.

    Attributes:
        by_class: ``[n, M]`` per class, or per whatever the metric's columns are; None where it has none.
        interval: low and high ends, ``[n]`` each, see :meth:`flsv.metrics.ContributionMetric.intervals`; None where
            none is known.

    Example:
        >>> import torch
        >>> from torchmetrics import MeanMetric
        >>> found = contribution(MeanMetric(), torch.tensor([[0.5, 1.0], [0.0, 0.5]]))
        >>> found, found.by_class[0]
        (tensor([0.7500, 0.2500]), tensor([0.5000, 1.0000]))
    """

    # What is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    by_class: Tensor | None = None
    interval: tuple[Tensor, Tensor] | None = None

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return str(self.as_subclass(Tensor).__repr__(**options))

    def __deepcopy__(self, memo: dict[int, Any]) -> Contribution:
        found = self.detach().clone().as_subclass(Contribution)
        found.by_class, found.interval = copy.deepcopy((self.by_class, self.interval), memo)
        return found


def contribution(metric: Metric, value: Tensor) -> Contribution:
    """A metric's value ``[n]`` or ``[n, M]`` as it is shown."""
    whole = overall(metric, value)
    found = whole.as_subclass(Contribution)
    found.by_class = value if value.ndim == 2 else None
    found.interval = metric.intervals(value=whole) if isinstance(metric, ContributionMetric) and whole.ndim else None
    return found


def table(board: ContributionMetrics, state: FederationState, client_names: Sequence[str] | None) -> pandas.DataFrame:
    """What is known between two rounds: the metrics' values, the last weights and accuracies.

    Args:
        board: the metrics.
        state: of the federation.
        client_names: of the fit; None: what the metrics were told.
    """
    last = {"weight": state.weights, **state.client_scores}
    index, names = max(0, state.round_index - 1), client_names or _names(board, state)
    return tidy(frame(known_rows(index, board.metrics, board.contributions, last, names)))


def _names(board: ContributionMetrics, state: FederationState) -> list[str]:
    """Client names that the metrics were given."""
    bound = [getattr(metric, "client_names", None) for metric in board.metrics.values()]
    return list(next(filter(None, bound), map(str, range(len(state.participations)))))


def events_of(filters: Sequence[UpdateFilter], state: FederationState) -> list[Event]:
    """All that has happened to clients and their updates in the run so far; what the filters have found up to this
    round becomes a part of the state's incidents."""
    known = {(each["client"], each["what"]): each["times"] for each in state.incidents}
    for each in filters:
        for fault, clients in each.notices.state_dict().items():
            for client, times in clients.items():
                if times > known.get((client, fault), 0):
                    state.note(client, fault)
    groups = {client: group for each in filters for group in each.groups for client in group}
    events = []
    for incident in state.incidents:
        client, what = incident["client"], incident["what"]
        of = int(state.heard[client]) if what in (NOT_FINITE, LARGE) else None
        others = [other for other in groups.get(client, ()) if other != client] if what == COPY else []
        events.append(Event(**incident, of=of, others=others))
    return events
