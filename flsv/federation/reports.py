"""RunReports, which passes rounds' results to files and loggers, and Contribution, a metric's values."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchmetrics import Metric

from flsv._lightning.evaluation import each_loader, keep_batches
from flsv.configuration.identity import hyperparameters
from flsv.core import FederationState, Round
from flsv.core.faults import COPY, LARGE, NOT_FINITE
from flsv.data import plot_partition
from flsv.engines.client_manager import try_forward
from flsv.engines.engine import Engine
from flsv.federation.run import FederationRun, RunState
from flsv.filters import UpdateFilter
from flsv.games import ModelScore
from flsv.games.performance import title_of
from flsv.games.validated_models import ValidatedModels
from flsv.metrics import ContributionMetric
from flsv.results.curves import Monitored, curves_of
from flsv.results.folder import CONTRIBUTIONS, run_folder
from flsv.results.record import Record, record_of, to_pay_by
from flsv.results.round_result import Event, RoundResult, RunResult, Sink
from flsv.results.rows import RoundResults, column_names, overall
from flsv.results.run_table import CSV, frame, tidy
from flsv.results.tensorboard import TensorBoard, Trackers
from flsv.results.terminal import Terminal
from flsv.results.text import nearest_first
from flsv.server import ContributionMetrics
from flsv.utilities.arguments import attribute_of
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.host_copies import on_host

if TYPE_CHECKING:
    import pandas


class RunReports:
    """Writer of a fit's results to all its sinks (files and loggers)."""

    def __init__(
        self,
        trainer: L.Trainer,
        federation: FederationRun,
        run_state: RunState,
        files: bool,
        told: Callable[[], list[str]],
    ) -> None:
        self._trainer: Any = trainer  # Any: Lightning does not declare all attributes
        self._federation, self._told = federation, told
        self._state, self._config, self._data = (
            federation.state,
            federation.config,
            federation.engine.data,
        )
        metrics, reporting = federation.metrics.metrics, self._config.reporting
        names = self._data.client_names, self._data.class_names
        self._events = partial(events_of, self._config.filters, self._state)
        self.results = RoundResults(metrics, *names)
        self._known = self.results.rows(self._state.round_index, federation.metrics.contributions)
        self._logged: set[tuple[Any, ...]] = set()
        folder = federation.engine.ranks.broadcast(0, run_folder(trainer), "the run's folder")
        described = hyperparameters(self._config, metrics, self._data, self._state.seed)
        before, run_state.csv = run_state.csv, None
        self.sinks: list[Sink] = []
        if files and trainer.is_global_zero:
            csv = self._csv(folder / CONTRIBUTIONS, before)
            run_state.csv = str(csv.path.resolve())
            identity = run_state.identity.plain()
            self.sinks += [csv, Record(folder, self._record(identity, described), self._events)]
        if files:
            self.sinks.append(ClientPictures(federation.engine, folder / "clients"))
        self.sinks += self._loggers(described)
        self.terminal = Terminal(trainer, names[0], self._prints and reporting.table, files)
        self._monitored = Monitored(trainer, metrics)
        self.sinks += [self.terminal, self._monitored]

    @property
    def _prints(self) -> bool:
        return self._trainer.is_global_zero and not self._trainer.fast_dev_run

    def _draws(self, index: int) -> bool:
        return self._config.reporting.draws(index, self._trainer.max_epochs)

    def _csv(self, path: Path, before: str | None) -> CSV:
        """Return the sink that writes ``contributions.csv`` to ``path``, after a resumed run's rows in ``before``."""
        csv, first = CSV(path, self._data.client_names), self._state.round_index
        earlier = path.resolve() if before is None else Path(before)
        if first > 0 and earlier.is_file():
            self.results.resume(self._known)
        kept = csv.begin(first, earlier if earlier != path.resolve() else None)
        # In another folder the loggers begin anew.
        self._logged = {row[:5] for row in kept} if earlier == path.resolve() else set()
        return csv

    def _record(self, identity: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
        state, metrics = self._state, self._federation.metrics.metrics
        roles = {**self._config.strategies, "privacy": self._config.privacy}
        about = identity, state.round_index, version("flsv"), self._events()
        content = record_of(self._trainer, self._data, metrics, roles, described, *about)
        return content | ({"run": state.run} if state.run else {})

    def _loggers(self, described: Mapping[str, Any]) -> list[Sink]:
        """Log the hyper-parameters and the ``described`` settings, and return the sinks for the trainer's loggers."""
        trainer, data, first = self._trainer, self._data, self._state.round_index
        metrics, reporting = self._federation.metrics.metrics, self._config.reporting
        module, names = trainer.lightning_module, (data.client_names, data.class_names)
        merged = {**module.hparams_initial, **getattr(data, "hparams_initial", {}), **described}
        classes = (
            None if data.known_class_counts is None else data.class_names
        )  # sites' samples are counted as of one
        draw = lambda: plot_partition(data.class_counts, classes, data.client_names)[0]  # noqa: E731
        per_class = curves_of(metrics, reporting.per_class)
        sinks: list[Sink] = []
        others = []
        for logger in trainer.loggers:
            # In a resumed run, other loggers have the settings already, and may refuse others.
            if first == 0 or isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(merged)
            # In a fast_dev_run a logger's experiment is a dummy.
            if isinstance(logger, TensorBoardLogger) and isinstance(
                logger.experiment, SummaryWriter
            ):
                board = TensorBoard(logger, metrics, *names, per_class)
                board.begin(first, merged, draw)
                sinks.append(board)
            else:
                others.append(logger)
        return [*sinks, Trackers(others, per_class, *names)] if others else sinks

    def begin_round(self) -> None:
        for sink in self.sinks:
            sink.begin_round(self._state.round_index)

    def write(self, round: Round) -> None:
        """Make the result of a round, and pass it to all sinks."""
        state, federation = self._state, self._federation
        assert state.weights is not None
        result = self.results.round_result(
            state.round_index,
            federation.metrics.contributions,
            state.weights,
            losses={}
            if round.losses is None
            else dict(zip(on_host(round.client_ids), on_host(round.losses))),
            norms=federation.server.norms,
            scores=state.client_scores,
            evaluated=federation.evaluated,
            events=self._events(),
            drawn=self._draws(state.round_index),
        )
        for sink in self.sinks:
            sink.write(result)

    def write_late(
        self, values_by_round: Mapping[int, Mapping[str, Tensor]], scores: Mapping[str, Tensor]
    ) -> None:
        """Write metrics' values that were computed after the last round, ``{round: {metric: values}}``, and the
        ``scores`` of clients' own models after the last round, if they were computed then.
        """
        last_round = self._state.round_index - 1
        results = []
        for index in sorted(values_by_round):
            is_last = index == last_round
            result = self.results.late(
                index,
                values_by_round[index],
                self._draws(index),
                scores=scores if is_last else {},
            )
            results.append(result)

        # A logger cannot replace what it holds: it gets no round again whose values are in the file, which is written
        # once the loggers have them.
        new_results = [result for result in results if not self._is_logged(result)]
        for sink in sorted(self.sinks, key=lambda sink: isinstance(sink, CSV)):
            is_logger = isinstance(sink, TensorBoard | Trackers)
            sink.write_late(new_results if is_logger else results)
            sink.flush()
        for index in sorted(values_by_round):
            self._federation.metrics.contributions.update(values_by_round[index])

    def _is_logged(self, result: RoundResult) -> bool:
        """Return whether the loggers have a result's rows from an earlier process."""
        return bool(result.changes) and {row[:5] for row in result.changes} <= self._logged

    @property
    def _learning_is_told(self) -> bool:
        """Return whether the output includes the model's performance at the start and the end."""
        reporting, metrics = self._config.reporting, self._federation.metrics.metrics
        if self._federation.server.games is None and self._federation.metrics.game_metrics:
            return False  # a resumed run without a round
        return (
            bool(metrics)
            and (reporting.files or reporting.table)
            and not self._trainer.fast_dev_run
        )

    def look_at_start(self) -> None:
        """Store the initial model's performance in the federation's state."""
        if self._state.round_index == 0 and self._learning_is_told:
            self._state.start = {
                name: told["value"] for name, told in performances(self._federation).items()
            }

    def finish(self) -> None:
        """Pass the final result to all sinks. After a trial run, log the measures that can be used to value clients."""
        if self._trainer.fast_dev_run:
            rank_zero_info(f"flsv: {self._tried()}")
        result = self._result(learning_record(self._federation) if self._learning_is_told else {})
        # That a round was the last is not known in a run that ends early.
        index = result.round_index
        is_due = self._config.reporting.draws(index, rounds=index + 1)
        draws_end = is_due and not self._draws(index)
        for sink in self.sinks:
            if isinstance(sink, TensorBoard) and draws_end:
                sink.draw(result)
            sink.finish(result)

    def _tried(self) -> str:
        """Describe, after a trial run, which performance measures can be used to value clients."""
        data, found = self._data, list[str]()
        for measures, ask in (
            ("what validation logs", self._log_names),
            ("accuracy", self._classified),
        ):
            try:
                found.append(f"Values by {measures}: {ask(data.val_dataloader())}")
            except ConfigurationError as error:
                found.append(f"No values by {measures}: {error}")
        return " ".join(
            [
                f"a batch of each of {data.num_clients} clients was trained, and nothing is kept.",
                *found,
            ]
        )

    def _log_names(self, loaders: Any) -> str:
        if not is_overridden("validation_step", self._trainer.lightning_module, L.LightningModule):
            raise ConfigurationError("there is no validation_step.")
        kept = keep_batches(self._trainer, [islice(each, 1) for each in each_loader(loaders)])
        names = ValidatedModels(
            self._trainer, self._federation.engine.space, kept, names=()
        ).logged()
        return f"performance one of {names}, with a mode."

    def _classified(self, loaders: Any) -> str:
        if self._data.no_classes is not None:
            raise ConfigurationError(f"{self._data.no_classes}.")
        try_forward(self._trainer, loaders, self._data.num_classes, "forward(x)")
        return f"performance accuracy, of {self._data.num_classes} classes."

    def stopped(self) -> None:
        """Print the values so far, after the user has stopped the fit, and name what is of an earlier round."""
        if not self._state.round_index or not self._prints:
            return
        earlier = self._federation.metrics.of_earlier_rounds()
        if not self._federation.evaluated and self._config.evaluation.every:
            earlier.append("the scores of clients' own models")
        if earlier:
            warnings.warn(
                f"{', '.join(earlier)}: the run was stopped after round {self._state.round_index}, and these are of an "
                "earlier round. Resume the run, or let it end by max_epochs, max_time or early stopping.",
                stacklevel=2,
            )
        self.terminal.show_table(self._result({}))

    def _result(self, learning: dict[str, Any]) -> RunResult:
        state = self._state
        metrics = self._federation.metrics.metrics
        values = self._federation.metrics.contributions
        last_round = max(state.round_index - 1, 0)

        rows = self.results.rows(
            last_round,
            values,
            samples=self._data.num_samples,
            rounds=state.participations,
            weight=state.weights,
            **state.client_scores,
        )
        kinds_to_pay_by = {}
        columns = {}
        for name in metrics:
            if name in values:
                columns[name] = "column" if column_names(metrics[name]) else "class"
        for name in values:
            if to_pay_by(metrics[name]):
                kinds_to_pay_by[name] = type(metrics[name]).__name__

        lines_on_coalitions = self._told()
        learning_record = {**learning}
        if lines_on_coalitions:
            learning_record["coalitions"] = lines_on_coalitions

        return RunResult(
            last_round,
            state.round_index,
            table=frame(rows),
            columns=columns,
            to_pay_by=nearest_first(kinds_to_pay_by),
            trained=[name for name in values if attribute_of(metrics[name], "extension")],
            learning_record=learning_record,
            logged=self._logged_numbers(),
            pictures=self.results.pictures(last_round, values),
        )

    def _logged_numbers(self) -> dict[str, float]:
        """Return the numbers that the module has logged, without those of the run itself."""
        numbers = {}
        for name, value in self._trainer.callback_metrics.items():
            if value.numel() == 1 and name not in self._monitored.names:
                numbers[name] = value.item()
        return numbers

    def flush(self) -> None:
        for sink in self.sinks:
            sink.flush()

    def close(self, failed: bool) -> None:
        for sink in self.sinks:
            sink.close(failed)


class ClientPictures(Sink):
    """Sink that writes the pictures and tables that clients have stored."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._folder = engine, folder

    def write(self, result: RoundResult) -> None:
        if result.drawn:
            cohort = [row.client for row in result.table if row.metric == "weight"]
            self._engine.write_artifacts(cohort, result.round_index, self._folder)


# ---- values between two rounds


class Contribution(Tensor):
    """Tensor with a metric's values ``[n]``, values per class and interval.

    Example:
        >>> import torch
        >>> from torchmetrics import MeanMetric
        >>> found = contribution(MeanMetric(), torch.tensor([[0.5, 1.0], [0.0, 0.5]]))
        >>> found, found.by_class[0]
        (tensor([0.7500, 0.2500]), tensor([0.5000, 1.0000]))
    """

    # Results of operations are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # not a classmethod
    by_class: Tensor | None = None
    interval: tuple[Tensor, Tensor] | None = None
    pending: str | None = None

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch names the option
        text = str(self.as_subclass(Tensor).__repr__(**options))
        return text if self.pending is None else f"{text} ({self.pending})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Contribution:
        found = self.detach().clone().as_subclass(Contribution)
        found.by_class, found.interval = copy.deepcopy((self.by_class, self.interval), memo)
        found.pending = self.pending
        return found


def contribution(metric: Metric, value: Tensor) -> Contribution:
    """Make a Contribution from a metric's value ``[n]`` or ``[n, M]``."""
    whole = overall(metric, value)
    found = whole.as_subclass(Contribution)
    found.by_class = value if value.ndim == 2 else None
    found.pending = getattr(metric, "pending", None)
    found.interval = (
        metric.intervals(value=whole)
        if isinstance(metric, ContributionMetric) and whole.ndim
        else None
    )
    return found


def current_table(
    board: ContributionMetrics, state: FederationState, client_names: Sequence[str] | None
) -> pandas.DataFrame:
    """Return a table of the present values, weights and scores of clients' own models."""
    last = {"weight": state.weights, **state.client_scores}
    results = RoundResults(board.metrics, client_names or _names(board, state))
    return tidy(frame(results.rows(max(0, state.round_index - 1), board.contributions, **last)))


def _names(board: ContributionMetrics, state: FederationState) -> list[str]:
    """Return the clients' names as the metrics know them, else their ids."""
    bound = [getattr(metric, "client_names", None) for metric in board.metrics.values()]
    return list(next(filter(None, bound), map(str, range(len(state.participations)))))


def events_of(filters: Sequence[UpdateFilter], state: FederationState) -> list[Event]:
    """Return one event for each client and kind of fault in the run."""
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
        of = int(state.updates_received[client]) if what in (NOT_FINITE, LARGE) else None
        others = (
            [other for other in groups.get(client, ()) if other != client] if what == COPY else []
        )
        events.append(Event(**incident, of=of, others=others))
    return events


def performances(run: FederationRun) -> dict[str, dict[str, Any]]:
    """Return the global model's performance by each metric's measure, ``{metric: {"value": ...}}``."""
    # "value" is None if it is not finite. "majority" is the accuracy of always answering the most frequent class, None
    # by another measure.
    model, scores, found = run.state.model(), dict[Any, Any](), {}
    for name, measure in run.metrics.performances.items():
        other = measure if isinstance(measure, ModelScore) else None
        key = None if other is None else other.evaluator
        if key not in scores:
            assert run.server.games is not None
            scores[key] = run.server.games.evaluator_of(measure)(model[None])
        value = float(scores[key].value(measure if other is None else other.name).mean())
        support = scores[key].support if measure == "accuracy" else None
        found[name] = {
            "by": title_of(measure, run.engine.data.positive_class),
            "value": value if math.isfinite(value) else None,
            "majority": None if support is None else float(support.max() / support.sum()),
        }
    return found


def learning_record(run: FederationRun) -> dict[str, Any]:
    """Return the entries of ``run.json`` on the performance at the run's start and end."""
    # "paid_in" has, by metric, the performance at the run's start and end, the majority class's accuracy, and the sum
    # of values.
    values = run.metrics.contributions
    return {
        "paid_in": {
            name: {
                "by": told["by"],
                "start": run.state.start.get(name),
                "end": told["value"],
                "majority": told["majority"],
                "sum": float(values[name].nansum()) if name in values else None,
            }
            for name, told in performances(run).items()
        }
    }
