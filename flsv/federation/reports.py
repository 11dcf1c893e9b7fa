"""RunReports, which passes rounds' results to files and loggers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from flsv import scores
from flsv.__about__ import code_version
from flsv._lightning.logged_values import callback_metrics_of
from flsv._lightning.patches import callbacks_of
from flsv.configuration.identity import hyperparameters
from flsv.core import FederationState, Round, Values
from flsv.data import plot_partition
from flsv.data.copies import validation_copies_in
from flsv.engines.engine import Engine
from flsv.federation.run import FederationRun, RunState
from flsv.isolation.silent_logger import SilentLogger
from flsv.results.curves import Curves, Monitored
from flsv.results.folder import CONTRIBUTIONS, RECORD, run_folder
from flsv.results.record import INTERVALS, Record, model_settings, now, record_of
from flsv.results.round_result import (
    INVALID_UPDATES,
    UNLIKE_RUN,
    Event,
    RoundResult,
    Row,
    RunResult,
    Sink,
)
from flsv.results.rows import ResultBuilder, kinds_of_intervals
from flsv.results.run_table import CSV, frame, tidy
from flsv.results.terminal import Terminal
from flsv.server import ContributionMetrics
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.host_copies import on_host

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


class RunReports:
    """Writer of a fit's results to all its sinks (files and loggers)."""

    def __init__(
        self, trainer: L.Trainer, federation: FederationRun, run_state: RunState, writes_files: bool
    ) -> None:
        self._trainer: Any = trainer  # Any: Lightning does not declare all attributes
        self._federation = federation
        self._state = federation.state
        self._config = federation.config
        self._data = federation.engine.data
        self._metrics = federation.metrics.metrics
        self._writes_files = writes_files
        self._folder = federation.engine.ranks.broadcast(0, run_folder(trainer), "the run's folder")
        self.results = ResultBuilder(
            self._metrics,
            self._data.client_names,
            self._data.class_names,
        )
        self._logged_keys: set[tuple[Any, ...]] = set()
        # Number of validation samples that are training samples. None: they were not compared.
        self._num_trained_on: int | None = None
        self._events_of_data = self._write_dictionary_and_check_data()
        self._record: Mapping[str, Any] = {}
        # What the module had logged when the resumed run ended, if that run has trained all rounds.
        self._logged_before: Mapping[str, float] = {}
        self.sinks: list[Sink] = []
        self._add_sinks(run_state)

    def _add_sinks(self, run_state: RunState) -> None:
        trainer = self._trainer
        prints_table = self._may_print and self._config.reporting.table
        loggers = [logger for logger in trainer.loggers if not isinstance(logger, SilentLogger)]
        # A coalition's fit has none of these, so nobody reads its result.
        self._has_readers = bool(self._writes_files or prints_table or loggers)

        # The path of the table of the resumed run becomes that of this fit's table, or None if the fit writes none.
        earlier_csv = run_state.csv
        run_state.csv = None
        if self._has_readers:
            self._add_files_and_loggers(loggers, run_state, earlier_csv)

        self.terminal = Terminal(
            trainer, prints_table, files=self._writes_files, progress=self._progress
        )
        self._monitored = Monitored(trainer, self._metrics)
        self.sinks += [self.terminal, self._monitored]

    def _add_files_and_loggers(
        self, loggers: Sequence[Any], run_state: RunState, earlier_csv: str | None
    ) -> None:
        """Add the sinks of files and loggers, and store the path of the table in ``run_state``."""
        if earlier_csv is not None:  # the record beside it is overwritten below
            folder_of_last_fit = Path(earlier_csv).parent
            self._logged_before = _logged_in_finished_run(
                folder_of_last_fit, self._state.round_index
            )
        settings = hyperparameters(
            self._config, self._metrics, data=self._data, seed=self._state.seed
        )
        # Metrics are described here, so that errors are raised before training.
        self._record = self._describe_run(run_state.identity.plain(), settings)
        if self._writes_files and self._trainer.is_global_zero:
            csv = self._open_csv(self._folder / CONTRIBUTIONS, earlier_csv)
            run_state.csv = str(csv.path.resolve())
            self.sinks += [csv, Record(self._folder, self._record, self._events)]
        if self._writes_files:
            self.sinks.append(ClientTables(self._federation.engine, self._folder / "clients"))
        if loggers:
            self.sinks += self._log_settings_and_make_sinks(loggers, settings)

    def _write_dictionary_and_check_data(self) -> list[Event]:
        """Write the tables' data dictionary, and return data-quality warnings, except about private clients."""
        if self._config.is_private or not self._trainer.is_global_zero:
            return []
        is_reported = self._writes_files or self._config.reporting.table
        if not is_reported:
            return []
        from flsv.federation import data_events

        if self._writes_files:
            data_events.write_dictionary(self._data, self._folder)
        validation_copies = validation_copies_in(self._data)
        if validation_copies is not None:
            self._num_trained_on = validation_copies[0].count  # those of any client
        return [
            *data_events.events_of_tables(self._data),
            *data_events.events_of_copies(self._data, validation_copies or ()),
        ]

    def _events(self) -> list[Event]:
        last_round = max(0, self._state.round_index - 1)
        unlike_run = [
            Event(client=None, what=UNLIKE_RUN, first=last_round, last=last_round, text=difference)
            for difference in self._federation.coalition_differences
        ]
        return [*self._events_of_data, *unlike_run, *events_of(self._state)]

    @property
    def _may_print(self) -> bool:
        return self._trainer.is_global_zero and not self._trainer.fast_dev_run

    def _progress(self) -> dict[str, str]:
        num_rounds = self._trainer.max_epochs
        round_number = self._state.round_index  # of the last complete round, from 1
        if round_number != num_rounds:
            round_number += 1  # of the round in progress
        return {
            "round": f"{round_number}/{num_rounds}",
            "client": self._federation.engine.place,
        }

    def _draws_pictures(self, index: int) -> bool:
        return self._config.reporting.draws(index, self._trainer.max_epochs)

    def _open_csv(self, path: Path, earlier_csv: str | None) -> CSV:
        """Return the sink of ``contributions.csv``, which continues a resumed run's file."""
        csv = CSV(path)
        first_round = self._state.round_index
        path_of_this_fit = path.resolve()
        path_of_last_fit = path_of_this_fit
        if earlier_csv is not None:
            path_of_last_fit = Path(earlier_csv)
        is_resumed = first_round > 0 and path_of_last_fit.is_file()
        if is_resumed:  # rows are written for values that differ from the last fit's
            self.results.compare_with(self._federation.metrics.values)

        if path_of_last_fit != path_of_this_fit:
            # In another folder the loggers start from zero, but the file gets copies of the earlier rows.
            csv.keep_rows_before(first_round, path_of_last_fit)
            return csv
        earlier_rows = csv.keep_rows_before(first_round)
        self._logged_keys = {_row_key(row) for row in earlier_rows}
        return csv

    def _describe_run(
        self, identity: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        options = self._federation.engine.options.configured_options
        record = record_of(
            self._trainer,
            self._data,
            metrics=self._metrics,
            algorithm={**self._config.strategies, "privacy": self._config.privacy},
            settings={
                **model_settings(self._trainer.lightning_module, options),
                **settings,
            },
            identity=identity,
            first_round=self._state.round_index,
            version=code_version(),
        )
        if record["validation"] is not None:
            record["validation"]["trained_on"] = self._num_trained_on
        if self._state.run:
            record["run"] = self._state.run
        return record

    def _log_settings_and_make_sinks(
        self, loggers: Sequence[Any], settings: Mapping[str, Any]
    ) -> list[Sink]:
        """Log the hyper-parameters and the ``settings``, and return the sinks for the loggers."""
        from torch.utils.tensorboard import SummaryWriter

        from flsv.results.tensorboard import Trackers

        all_settings = {
            **self._trainer.lightning_module.hparams_initial,
            **getattr(self._data, "hparams_initial", {}),
            **settings,
        }
        curves = Curves(self._metrics, self._data.client_names, self._data.class_names)
        sinks: list[Sink] = []
        tracked_loggers = []
        for logger in loggers:
            is_tensorboard = isinstance(logger, TensorBoardLogger)
            # In a resumed run, other loggers have the settings already, and may raise an error for new ones.
            if self._state.round_index == 0 or is_tensorboard:
                logger.log_hyperparams(all_settings)
            if is_tensorboard and isinstance(logger.experiment, SummaryWriter):
                sinks.append(self._open_tensorboard(logger, curves, all_settings))
            else:  # in a fast_dev_run a logger's experiment is a dummy
                tracked_loggers.append(logger)
        if tracked_loggers:
            sinks.append(Trackers(tracked_loggers, curves))
        return sinks

    def _open_tensorboard(self, logger: Any, curves: Curves, settings: Mapping[str, Any]) -> Sink:
        from flsv.results.tensorboard import TensorBoard

        limits_drawing = self._config.reporting.figures is None
        tensorboard = TensorBoard(logger, curves, limits_drawing=limits_drawing)
        tensorboard.write_settings(self._state.round_index, settings, self._draw_partition)
        return tensorboard

    def _draw_partition(self) -> Figure:
        class_names = None  # samples of sites are counted in a single class
        if self._data.known_class_counts is not None:
            class_names = self._data.class_names
        figure, _ = plot_partition(self._data.class_counts, class_names, self._data.client_names)
        return figure

    def check_monitors(self) -> None:
        """Raise ConfigurationError if a callback monitors values that are computed after the run."""
        late_metrics = self._federation.metrics.trained_names
        for callback in callbacks_of(self._trainer):
            monitor = getattr(callback, "monitor", None)
            metric_name, _, _ = str(monitor).partition("/")
            if metric_name in late_metrics:
                raise ConfigurationError(
                    f"{type(callback).__name__}(monitor={monitor!r}): the values of {metric_name} are computed after "
                    "the run. Monitor a metric with values from round 1 on, such as CumulativeShapley, or a value that "
                    "validation logs."
                )

    def write_round(self, round: Round) -> None:
        """Make the result of a round, and pass it to all sinks."""
        state = self._state
        federation = self._federation
        assert state.weights is not None
        losses = {}
        if round.losses is not None:
            client_ids = on_host(round.client_ids)
            losses = dict(zip(client_ids, on_host(round.losses)))

        result = self.results.round_result(
            state.round_index,
            federation.metrics.values,
            state.weights,
            losses=losses,
            norms=federation.server.norms,
            scores=state.client_scores,
            has_new_scores=federation.has_evaluated_clients,
            events=self._events(),
            draws_pictures=self._draws_pictures(state.round_index),
        )
        for sink in self.sinks:
            sink.write_round(result)

    def write_late_rounds(
        self, values_by_round: Mapping[int, Mapping[str, Values]], scores: Mapping[str, Tensor]
    ) -> None:
        """Write metrics' values that were computed after the last round, ``{round: {metric: values}}``, and the
        ``scores`` of clients' own models after the last round, if they were computed then.
        """
        results = self._late_results(values_by_round, scores)
        for index in sorted(values_by_round):
            self._federation.metrics.values.update(values_by_round[index])
        # A logger cannot replace values, so it gets each round's values once.
        unlogged_results = [result for result in results if not self._is_logged(result)]
        # The file is written last, so that the loggers have all its rounds after a crash.
        sinks_with_file_last = sorted(self.sinks, key=lambda sink: isinstance(sink, CSV))
        for sink in sinks_with_file_last:
            if sink.is_logger:
                sink.write_late_rounds(unlogged_results)
            else:
                sink.write_late_rounds(results)
            sink.flush()

    def _late_results(
        self, values_by_round: Mapping[int, Mapping[str, Values]], scores: Mapping[str, Tensor]
    ) -> list[RoundResult]:
        self.results.begin_late_results()
        last_round = self._state.round_index - 1
        results = []
        next_round = 0
        for index in sorted(values_by_round):
            # The values of a round also represent the rounds before it without values.
            represented_rounds = range(next_round, index + 1)
            next_round = index + 1
            result = self.results.round_result(
                index,
                values_by_round[index],
                scores=scores if index == last_round else {},
                has_new_scores=True,
                draws_pictures=any(map(self._draws_pictures, represented_rounds)),
            )
            results.append(result)
        return results

    def _is_logged(self, result: RoundResult) -> bool:
        """Return whether an earlier process has logged a result's rows."""
        changed_keys = {_row_key(row) for row in result.rows_of_file}
        if changed_keys:
            return changed_keys <= self._logged_keys
        # A round with the same values as the last round has no rows. A key begins with the round.
        logged_rounds = {round_index for round_index, *_ in self._logged_keys}
        return result.round_index in logged_rounds

    @property
    def _reports_learning(self) -> bool:
        """Return whether the output includes the model's performance at the start and the end."""
        # A resumed run without a round has no games.
        has_no_games = self._federation.server.games is None
        if has_no_games and self._federation.metrics.game_metrics:
            return False
        if not self._metrics or self._trainer.fast_dev_run:
            return False
        reporting = self._config.reporting
        return reporting.files or reporting.table

    def evaluate_untrained(self) -> None:
        """Store the initial model's performance in the federation's state. Raise ConfigurationError if a measure is not
        defined for it."""
        if self._state.round_index > 0:
            return
        measures = self._federation.metrics.performances.values()
        are_defined = all(scores.performance.is_always_defined(measure) for measure in measures)
        if not self._reports_learning and are_defined:
            return

        # This raises an error if a measure is not defined.
        from flsv.federation.learning import untrained_scores

        initial_scores = untrained_scores(self._federation)
        if self._reports_learning:
            self._state.untrained_scores.update(initial_scores)

    def finish(self, lines_on_coalitions: Sequence[str]) -> None:
        """Pass the final result to all sinks."""
        if not self._has_readers:
            return
        learning: dict[str, Any] = {}
        if self._reports_learning:
            from flsv.federation.learning import learning_record

            learning = learning_record(self._federation)
        if lines_on_coalitions:
            learning["coalitions"] = list(lines_on_coalitions)
        learning["ended"] = now()
        learning["rounds_done"] = self._state.round_index
        result = self._result(learning)

        for sink in self.sinks:
            sink.finish(result)

    def show_stopped_run(self) -> None:
        """Print the values so far after the user has stopped the fit, and warn of values of earlier rounds."""
        if not self._state.round_index or not self._may_print:
            return
        outdated_names = self._federation.metrics.outdated_names()
        if not self._federation.has_evaluated_clients and self._config.evaluation.every:
            outdated_names.append("the scores of clients' own models")
        if outdated_names:
            warnings.warn(
                f"the run was stopped after round {self._state.round_index}, but {', '.join(outdated_names)} were last "
                "computed in an earlier round. Resume the run, or let it end by max_epochs, max_time or early "
                "stopping.",
                stacklevel=2,
            )
        self.terminal.finish(self._result(further_items={}))
        self.terminal.show_table()

    def _result(self, further_items: Mapping[str, Any]) -> RunResult:
        """Return the run's result, with ``further_items`` of its record."""
        state = self._state
        values = self._federation.metrics.values
        last_round = max(state.round_index - 1, 0)

        rows = self.results.rows(
            last_round,
            values,
            samples=self._data.num_samples,
            rounds=state.participations,
            weight=state.weights,
            **state.client_scores,
        )
        record = {
            **self._record,
            "events": self._events(),
            "logged": self._logged_numbers(),
            **further_items,
        }
        interval_kinds = kinds_of_intervals(values)
        if interval_kinds:
            record[INTERVALS] = interval_kinds
        return RunResult(
            last_round,
            table=frame(rows),
            record=record,
            pictures=self.results.pictures(last_round, values),
            draws_pictures=self._config.reporting.figures != 0,
        )

    def _logged_numbers(self) -> dict[str, float]:
        """Return the numbers that the module has logged, without those of the run and learning rates."""
        numbers = {}
        for name, value in callback_metrics_of(self._trainer).items():
            is_learning_rate = name.partition("-")[0] == "lr"  # also LearningRateMonitor's "lr-SGD"
            is_score = name not in self._monitored.names and not is_learning_rate
            if value.numel() == 1 and is_score:
                numbers[name] = value.item()
        has_trained = self._state.round_index > self._record.get("first_round", 0)
        if not numbers and not has_trained:
            return dict(self._logged_before)
        return numbers

    def flush(self) -> None:
        for sink in self.sinks:
            sink.flush()

    def close(self, failed: bool) -> None:
        for sink in self.sinks:
            sink.close(failed)


class ClientTables(Sink):
    """Sink that writes the tables that clients have stored."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder

    def write_round(self, result: RoundResult) -> None:
        if not result.draws_pictures:
            return
        cohort = [
            row.client for row in result.table if row.metric == "weight" and row.client is not None
        ]
        self._engine.write_tables(cohort, self._folder)


def _logged_in_finished_run(folder: Path, num_rounds: int) -> dict[str, float]:
    """Return what the module had logged at the end of the run in a folder, if it ended after so many rounds."""
    path = folder / RECORD
    if not path.is_file():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    if record.get("rounds_done") != num_rounds:
        return {}
    logged_values = record.get("logged", {}).items()
    return {name: value for name, value in logged_values if value is not None}


def _row_key(row: Row) -> tuple[Any, ...]:
    # Without the interval: a value that a logger has is not logged again for another interval.
    return row.round, row.metric, row.client, row.column, row.value


def current_table(
    metrics: ContributionMetrics, state: FederationState, client_names: Sequence[str] | None
) -> pandas.DataFrame:
    """Return a table of the present values, weights and scores of clients' own models."""
    results = ResultBuilder(metrics.metrics, client_names or _client_names(metrics, state))
    last_round = max(0, state.round_index - 1)
    # Columns beside the metrics': the aggregation weights and the scores of clients' own models.
    rows = results.rows(last_round, metrics.values, weight=state.weights, **state.client_scores)
    return tidy(frame(rows))


def _client_names(metrics: ContributionMetrics, state: FederationState) -> list[str]:
    for metric in metrics.metrics.values():
        names = getattr(metric, "client_names", None)
        if names:
            return list(names)
    return [str(client) for client in range(len(state.participations))]


def events_of(state: FederationState) -> list[Event]:
    """Return one event for each client and kind of failure in the run."""
    events = []
    for incident in state.incidents:
        client = incident["client"]
        failure = incident["what"]
        num_updates = None
        if failure in INVALID_UPDATES:
            num_updates = int(state.updates_received[client])
        # An incident also has the first and last round, and the number of times.
        events.append(Event(**incident, of=num_updates))
    return events
