"""Properties of a federation's loop that can be read at any time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
from torch import Tensor
from torchmetrics import Metric

from flsv.aggregation import Aggregator
from flsv.arguments import ReadOnlyArguments
from flsv.engines.one_process import OneProcess
from flsv.filters import CopyFilter, UpdateFilter
from flsv.filters.copies import COPY
from flsv.filters.outliers import LARGE, NOT_FINITE
from flsv.parameters import ParameterSpace
from flsv.participants import Channel, Client
from flsv.participants.sharing import Share
from flsv.personalization import Personalizer
from flsv.report.measured import numbers_of, overall
from flsv.report.reporting import Reporting
from flsv.report.run_table import Numbers, RunTable
from flsv.round import FederationState
from flsv.sampling import ClientSampler
from flsv.server import ContributionMetrics
from flsv.server.config import ClientEvaluation, FederationConfig
from flsv.strategy import Strategy
from flsv.uploads import Upload

if TYPE_CHECKING:
    import pandas


class KnownLoop(ReadOnlyArguments, L.Callback):
    """The part of :class:`flsv.FederatedLoop` that only looks."""

    state: FederationState
    config: FederationConfig
    board: ContributionMetrics
    aggregator: Aggregator
    personalizer: Personalizer | None
    sampler: ClientSampler
    client_algorithm: Strategy | None
    uploads: tuple[Upload, ...]
    filters: tuple[UpdateFilter, ...]
    local_epochs: int
    client_optimizer: Literal["reset", "keep"]
    share: Share
    evaluation: ClientEvaluation
    reporting: Reporting
    seed: int | None
    engine: str | Callable[..., Any]
    _fit: OneProcess | None

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The live metrics by name."""
        return MappingProxyType(self.board.metrics)

    @property
    def contributions(self) -> dict[str, Tensor]:
        """The metrics' current values by name."""
        return self.board.contributions

    @property
    def round_index(self) -> int:
        """The number of completed rounds, so the index of the current or next one."""
        return self.state.round_index

    @property
    def weights(self) -> Tensor | None:
        """``[n]`` weights of the last aggregation, NaN outside its cohort."""
        return self.state.weights

    @property
    def participations(self) -> Tensor:
        """int64 ``[n]``, the number of rounds that each client's update was part of."""
        return self.state.participations

    @property
    def client_accuracy(self) -> Tensor | None:
        """``[n]``, the last evaluation of the clients' own models, or None."""
        return self.state.client_accuracy

    @property
    def models(self) -> dict[int, Tensor]:
        """Client id to the model ``[P]`` that the server will send it to start from, where it is not the global one;
        see :meth:`received` for models that clients keep themselves."""
        return self.state.starts

    @property
    def trained(self) -> dict[int, Tensor]:
        """Client id to the model ``[P]`` that it trained last, with ``ClientEvaluation(keep_trained=True)``."""
        return self.state.trained

    @property
    def coalitions(self) -> int:
        """Coalitions whose models were evaluated in this fit so far, each once, however many metrics asked for it."""
        games = None if self._fit is None else self._fit.server.games
        return 0 if games is None else games.total_evaluations

    @property
    def noticed(self) -> dict[str, dict[int, int]]:
        """What the filters found: fault to client id to in how many rounds. Faults are ``"not_finite"``, ``"large"``
        and, with a :class:`flsv.filters.CopyFilter`, ``"copy"``."""
        found: dict[str, dict[int, int]] = {fault: {} for fault in (NOT_FINITE, LARGE, COPY)}
        for each in self.filters:
            found |= each.notices.state_dict()
        return found

    @property
    def named(self) -> dict[int, tuple[int, int]]:
        """Client id to in how many rounds its update was at fault (not finite, or far too large), of how many that it
        sent; without those in order. A round in which a client was named counts nothing for it: no metric has measured
        what it sent, and ``flsv retrain`` takes the round's share off its value."""
        noticed = self.noticed
        rounds = Counter(noticed[NOT_FINITE]) + Counter(noticed[LARGE])
        return {client: (times, int(self.state.heard[client])) for client, times in sorted(rounds.items())}

    @property
    def copies(self) -> list[list[int]]:
        """The groups of clients who were found to send one another's updates, as one client under several names does:
        all members of each, ascending. Which of them copies which, if any does, nobody can tell from updates."""
        return [group for each in self.filters if isinstance(each, CopyFilter) for group in each.groups]

    @property
    def held(self) -> list[int]:
        """Whose payment is held back until somebody has looked at it, ascending: all members of all :attr:`copies`. Who
        is to be paid after all is named with ``flsv report RUN --pay``; what the metrics say of them is in
        :attr:`contributions`."""
        return sorted(client for group in self.copies for client in group)

    @property
    def payable(self) -> dict[str, Tensor]:
        """Metric to what each client may be paid by, ``[n]``: one number per client, as the report has it, NaN for
        those who were never measured and for the :attr:`held`, 0 for who was :attr:`named` in all of its rounds."""
        found = {name: overall(self.metrics[name], value).cpu().double() for name, value in self.contributions.items()}
        for name, value in found.items():
            for client in self.named if self.metrics[name].higher_is_better is not False else ():
                value[client].nan_to_num_(0)
            value[self.held] = float("nan")
        return found

    def _payable_rows(self) -> dict[str, Tensor]:
        """The contributions, NaN for those who are held."""
        found = {name: value.clone() for name, value in self.contributions.items()}
        for value in found.values():
            value[self.held] = float("nan")
        return found

    @property
    def clients(self) -> list[Client]:
        """The clients, by number; from the start of a fit on."""
        return self._running.manager.clients

    @property
    def channel(self) -> Channel:
        """What has crossed in this round; from the start of a fit on."""
        return self._running.manager.channel

    @property
    def space(self) -> ParameterSpace:
        """The map between the module and vectors; from the start of a fit on."""
        return self._running.space

    @property
    def current_client(self) -> int | None:
        """The client whose turn it is; None after the cohort's last, and outside of a round."""
        fit = self._fit
        return fit.training.client if fit is not None and fit.training is not None and fit.training.active else None

    def received(self) -> dict[int, Tensor]:
        """Client id to the model ``[P]`` that it would start the next round from, where that is not the global one.
        From the first round on."""
        return self._running.received()

    def to_frame(self) -> pandas.DataFrame:
        """What is known between two rounds, as a tidy DataFrame with the columns of :func:`flsv.read_run`: the metrics'
        current values, the last weights (``"weight"``) and accuracies (``"accuracy"``). All rounds are in the run's
        folder, for :func:`flsv.read_run`.
        """
        data = vars(self).get("_data")
        bound = (getattr(metric, "client_names", None) for metric in self.metrics.values())
        names = next(filter(None, [data and data.client_names, *bound]), map(str, range(len(self.participations))))
        last = {"weight": self.weights, "accuracy": self.client_accuracy}
        numbers = [
            *numbers_of(self.metrics, self.contributions, None),
            *(Numbers(name, value.cpu()) for name, value in last.items() if value is not None),
        ]
        return RunTable.of_round(max(0, self.round_index - 1), numbers, list(names)).to_frame()

    @property
    def strategies(self) -> Mapping[str, Strategy]:
        """The aggregator, personaliser, sampler and client algorithm, where there is one, by role."""
        return MappingProxyType(self.config.strategies)

    @property
    def _running(self) -> OneProcess:
        if self._fit is None:
            raise RuntimeError("the loop knows this from the start of a fit on: call trainer.fit first.")
        return self._fit
