"""What is known of a federation's clients between two rounds: who was found at fault, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flsv.filters import UpdateFilter
from flsv.filters.copies import COPY
from flsv.filters.outliers import LARGE, NOT_FINITE
from flsv.report.measured import known_rows
from flsv.report.run_table import frame, tidy
from flsv.round import FederationState
from flsv.round.result import Event
from flsv.server import ContributionMetrics

if TYPE_CHECKING:
    import pandas


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
    """Of the clients, as the metrics were told."""
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
