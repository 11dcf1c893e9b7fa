"""What is known of a federation's clients between two rounds: who was found at fault, payment, the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.filters import CopyFilter, UpdateFilter
from flsv.filters.copies import COPY, ECHOING
from flsv.filters.outliers import LARGE, NOT_FINITE
from flsv.report.measured import numbers_of, overall
from flsv.report.reading import read_run
from flsv.report.run_table import Numbers, RunTable
from flsv.round import FederationState
from flsv.server import ContributionMetrics
from flsv.showing import html_table

if TYPE_CHECKING:
    import pandas

    from flsv.loop.federated_loop import FederatedLoop


@dataclass(frozen=True)
class Findings:
    """What the filters have found, and what follows for payment: the attributes of a loop by these names.

    Args:
        filters: of the loop.
        board: its metrics.
        state: of the federation.
    """

    filters: Sequence[UpdateFilter]
    board: ContributionMetrics
    state: FederationState

    @property
    def noticed(self) -> dict[str, dict[int, int]]:
        found: dict[str, dict[int, int]] = {fault: {} for fault in (NOT_FINITE, LARGE, COPY, ECHOING)}
        for each in self.filters:
            found |= each.notices.state_dict()
        return found

    @property
    def named(self) -> dict[int, tuple[int, int]]:
        found = self.noticed
        rounds = Counter(found[NOT_FINITE]) + Counter(found[LARGE])
        return {client: (times, int(self.state.heard[client])) for client, times in sorted(rounds.items())}

    @property
    def copies(self) -> list[list[int]]:
        return [group for each in self.filters if isinstance(each, CopyFilter) for group in each.groups]

    @property
    def held(self) -> list[int]:
        return sorted(client for group in self.copies for client in group)

    @property
    def payable(self) -> dict[str, Tensor]:
        metrics = self.board.metrics
        found = {name: overall(metrics[name], each).cpu().double() for name, each in self.board.contributions.items()}
        for name, value in found.items():
            for client in self.named if metrics[name].higher_is_better is not False else ():
                value[client].nan_to_num_(0)
            value[self.held] = float("nan")
        return found


def without(board: ContributionMetrics, held: list[int]) -> dict[str, Tensor]:
    """The contributions, NaN for those who are held."""
    found = {name: value.clone() for name, value in board.contributions.items()}
    for value in found.values():
        value[held] = float("nan")
    return found


def history(loop: FederatedLoop) -> pandas.DataFrame:
    """All rounds of a loop's fit, of the file that it writes.

    Raises:
        ConfigurationError: it has written none.
    """
    if loop.saver.csv is None:
        raise ConfigurationError(
            "loop.history(): the fit has written no contributions.csv. Give the Trainer a default_root_dir or a "
            "logger, and leave Reporting(files=True)."
        )
    return read_run(loop.saver.csv)


def html_of(loop: FederatedLoop) -> str:
    """A loop in a notebook: its parts, and what each client is worth so far."""
    metrics = {name: values for name, values in loop.payable.items() if loop.round_index}
    names = [f"client {i}" for i in range(len(loop.participations))]
    for metric in loop.metrics.values():
        names = [*(getattr(metric, "client_names", None) or names)]
    rows = [
        [name, int(loop.participations[i]), *(f"{values[i]:.4g}" for values in metrics.values())]
        for i, name in enumerate(names)
    ]
    parts = ", ".join(repr(each) for each in loop.strategies.values())
    return html_table(f"FederatedLoop({parts}), {loop.round_index} rounds", ["client", "rounds", *metrics], rows)


def table(loop: FederatedLoop, client_names: Sequence[str] | None) -> RunTable:
    """What a loop knows between two rounds: its metrics' values, the last weights and accuracies.

    Args:
        loop: whose rounds they are.
        client_names: of its fit; None: what the metrics were told.
    """
    bound = (getattr(metric, "client_names", None) for metric in loop.metrics.values())
    names = next(filter(None, [client_names, *bound]), map(str, range(len(loop.participations))))
    last = {"weight": loop.weights, **loop.client_scores}
    numbers = [
        *numbers_of(loop.metrics, loop.contributions, None),
        *(Numbers(name, value.cpu()) for name, value in last.items() if value is not None),
    ]
    return RunTable.of_round(max(0, loop.round_index - 1), numbers, list(names))
