"""Readers of a run's folder, also of a killed run's, and of the runs of ``flsv repeat``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from pandas import DataFrame

from flsv.configuration.option_texts import other_options
from flsv.core import IntervalKind, Values
from flsv.results.folder import (
    CONFIG,
    CONTRIBUTIONS,
    OPTIONS,
    RECORD,
    RETRAINED,
    RUNS,
    RUNS_SETTINGS,
    find_contributions,
    repeated_folders,
)
from flsv.results.record import INTERVALS, read_record
from flsv.results.round_result import UNLIKE_RUN, Event
from flsv.results.run_table import (
    last_estimates,
    read_contributions,
    select_rows,
    tidy,
)
from flsv.results.text import design_in_words, design_of
from flsv.utilities.display import client_label
from flsv.utilities.errors import ConfigurationError, listed
from flsv.values.over_seeds import mean_with_interval

#: Setting in the list of the runs of ``flsv retrain``: a description of the settings that differ from the run's.
CHANGED = "changed"


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder.

    Args:
        folder: the run's folder.
        record: the content of ``run.json``.
        table: the rows of ``contributions.csv``, in the file's order, without metrics that have failed.
        repetitions: runs with different seeds, this one included. Performances, final values and intervals are then
            means over them.
    """

    folder: Path
    record: Mapping[str, Any]
    table: DataFrame
    repetitions: Sequence[Run] = ()

    @cached_property
    def num_clients(self) -> int:
        """Return the number of clients n."""
        return len(self.record["clients"])

    @cached_property
    def client_names(self) -> tuple[str, ...]:
        """Return the clients' names, or their ids as text if the data have no names."""
        return tuple(self.record["clients"])

    def label(self, client: int) -> str:
        """Return a client's name, or "client" and its id if it has none."""
        return client_label(client, self.client_names)

    @property
    def rounds(self) -> int:
        """Return the number of the last round in the table, counted from 1, or 0 without rounds."""
        return max(self.table["round"], default=-1) + 1

    @property
    def rounds_text(self) -> str:
        """Return the number of rounds, as in "2 of 3 rounds"."""
        planned_rounds = self.record["rounds"]
        if planned_rounds is None or planned_rounds < 0:  # -1: no limit
            return "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        return f"{self.rounds} of {planned_rounds} rounds"

    @property
    def ended(self) -> bool:
        """Return whether the run was trained to its end."""
        return "ended" in self.record

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Return the names of the contribution metrics, in the order of the run's configuration.

        A metric without any value is one of them.
        """
        return tuple(self.record["metrics"])

    @cached_property
    def measured(self) -> tuple[str, ...]:
        """Return all names in the table's column ``metric``, including weights and metrics' diagnostics."""
        return tuple(self.table["metric"].unique())

    def metric_info(self, metric: str) -> Mapping[str, Any]:
        """Return a metric's entry in ``run.json``, or empty if it has none."""
        return self.record["metrics"].get(metric, {})

    @property
    def performances(self) -> Mapping[str, dict[str, Any]]:
        """Return for each metric the performance whose gain its values divide among the clients."""
        return self.record.get("paid_in", {})

    def design(self, metric: str) -> str:
        """Return a name of the set of coalitions that were trained for a metric's values, "" if none were."""
        return design_of(self.performances.get(metric, {}))

    def columns_are_classes(self, metric: str) -> bool:
        """Return whether the columns of a metric's values are classes, not, for example, other clients."""
        return self.metric_info(metric).get("per_class", False)

    def columns(self, metric: str) -> dict[str, str]:
        """Return the names of a metric's values per client, such as classes, by key. Empty if it has one value per
        client.
        """
        is_of_metric = self.table["metric"] == metric
        has_column = self.table["class"] != ""
        rows = self.table[is_of_metric & has_column]
        name_by_key = dict(zip(rows["class"], rows["class_name"]))
        if all(key.isdigit() for key in name_by_key):
            ordered_keys = sorted(name_by_key, key=int)
            return {key: name_by_key[key] for key in ordered_keys}
        return name_by_key

    def to_frame(self) -> DataFrame:
        """Return the run's measurements as a data frame, see :func:`read_run`."""
        return tidy(self.table)

    def final(
        self,
        metric: str,
        column: str = "",
    ) -> list[float]:
        """Return the last values ``[n]`` of a metric, or of its ``column`` such as a class. NaN for clients without
        one.
        """
        if not column:
            return self.estimates(metric)["value"].tolist()
        values = final_values(self.runs, metric, column)
        return values.mean().tolist()

    def estimates(self, metric: str) -> DataFrame:
        """Return a metric's last values with intervals: ``value``, ``low``, ``high``."""
        if self.seeds == 1:
            return last_estimates(self.runs[0].table, metric, self.num_clients)
        columns = _means_over_seeds(self.runs, metric).columns()
        return DataFrame({name: column.tolist() for name, column in columns.items()})

    def interval_kind(self, metric: str) -> IntervalKind:
        """Return how the intervals of a metric's last values were computed."""
        if self.seeds == 1:
            return IntervalKind.from_plain(self.record.get(INTERVALS, {}).get(metric))
        return _means_over_seeds(self.runs, metric).interval_kind

    @property
    def runs(self) -> Sequence[Run]:
        """Return the runs over which the values are averaged, by default this run alone."""
        return self.repetitions or [self]

    @property
    def seeds(self) -> int:
        """Return the number of runs with different seeds over which the values are averaged."""
        return len(self.runs)

    def taken_part(self) -> list[int]:
        """Return the number of rounds in which each client's update was aggregated."""
        rows = select_rows(self.table, "weight")
        counts = rows["client"].value_counts()
        all_clients = range(self.num_clients)
        return counts.reindex(all_clients, fill_value=0).tolist()

    @cached_property
    def retrained(self) -> Run | None:
        """Return the runs of ``flsv retrain``, with means over them, or None without any."""
        folder = self.folder / RETRAINED
        if not (folder / RUNS).is_file() or not repeated_folders(folder):
            return None
        return open_run(folder)

    @property
    def retraining_options(self) -> str | None:
        """Return the options of the last ``flsv retrain`` of the run as they were typed, None if it is not known."""
        path = self.folder / RETRAINED / OPTIONS
        return path.read_text(encoding="utf-8") if path.is_file() else None

    @property
    def changed_settings(self) -> str:
        """Return a description of the settings that differ between ``flsv retrain`` and the run, or ""."""
        path = self.folder / RETRAINED / RUNS_SETTINGS
        if not path.is_file():
            return ""
        settings: dict[str, str] = json.loads(path.read_text())
        return settings.get(CHANGED, "")


def read_run(path: str | Path) -> DataFrame:
    """Read the measurements of a run: one row per round, metric, client and class.

    As in ``contributions.csv``, a value has a row only in the rounds in which the value or its interval changed. To get
    it in every round, pivot the table and fill forward.

    Args:
        path: the run's folder, see :func:`flsv.results.open_run`. The run may have been killed.

    Returns:
        A data frame with the columns ``round`` (from 0), ``metric`` (also ``"weight"``, ``"accuracy"``,
        ``"update_norm"`` and diagnostics such as ``"<metric>/stderr"``), ``client`` (its id), ``client_name``,
        ``class`` (the number of a class, or the name of another column, as text, or None for a client's overall value),
        ``class_name``, ``value``, ``low_over_seeds`` and ``high_over_seeds`` (the ends of an overall value's interval
        over seeds alone, NaN if it has none).

    Raises:
        ConfigurationError: there is no run in the folder.

    Example:
        >>> frame = read_run("lightning_logs/version_0")  # doctest: +SKIP
        >>> cssv = frame[(frame["metric"] == "cssv") & frame["class"].isna()]  # doctest: +SKIP
        >>> cssv.pivot(index="round", columns="client_name", values="value").ffill()  # doctest: +SKIP
    """
    return open_run(path).to_frame()


def open_run(path: str | Path) -> Run:
    """Read a run's folder, or the folder of a ``flsv repeat``, with the means over its runs.

    Args:
        path: the folder that holds ``contributions.csv`` (``flsv fit`` prints it), or this file itself, or the folder
            of a ``flsv repeat``.

    Raises:
        ConfigurationError: the folder does not exist, or holds no run (the message names runs below it), or a file is
            not one that a run writes (the message names the line), or the runs of a repeat differ in more than their
            seeds.
    """
    path = Path(path)
    if not (path / RUNS).is_file():
        return _read_folder(find_contributions(path).parent)
    runs = [_read_folder(folder) for folder in repeated_folders(path)]
    if not runs:
        raise ConfigurationError(f"{path / RUNS} lists no finished run. Name the folder of a run.")
    return _mean_run(path, runs)


def _read_folder(folder: Path) -> Run:
    record = read_record(folder / RECORD)
    table = read_contributions(folder / CONTRIBUTIONS)
    # A metric that has failed only has values of earlier rounds.
    names = table["metric"].str.split("/").str[0]
    missing_metrics = list(record.get("missing", {}))
    is_missing = names.isin(missing_metrics)
    return Run(folder, record=record, table=table[~is_missing])


# ---- runs of flsv repeat: the same federation with different seeds, and each client's mean over them

#: File in the folder of ``flsv repeat`` with the means over its runs.
SUMMARY_FILE = "repeat.csv"


def final_values(
    runs: Sequence[Run],
    metric: str,
    column: str = "",
) -> DataFrame:
    """Return the last values of a metric, with a row per run and a column per client."""
    rows = []
    for run in runs:
        estimates = last_estimates(run.table, metric, run.num_clients, column)
        rows.append(estimates["value"].tolist())
    return DataFrame(rows)


def _mean_run(folder: Path, runs: Sequence[Run]) -> Run:
    """Return the means over all runs of a ``flsv repeat``, with the rest of the first, or a single run itself."""
    run = runs[0]
    if len(runs) == 1:
        return run
    for repetition in runs:
        _check_repetition(run, repetition)

    # The run's record, in which two entries are means over all runs: "paid_in", the performances that metrics' values
    # distribute, and "logged".
    mean_performances = {}
    for metric in run.performances:
        mean_performances[metric] = _mean_performance(metric, runs)
    logged_by_run = [repeated.record.get("logged", {}) for repeated in runs]
    record = {
        **run.record,
        "paid_in": mean_performances,
        "logged": _means_of_all(logged_by_run, logged_by_run[0]),
        "events": _events_of_all(runs),
    }
    return Run(folder, record, table=run.table, repetitions=runs)


def _check_repetition(run: Run, repetition: Run) -> None:
    differences = _differences_of_experiments(run, repetition)
    if differences:
        raise ConfigurationError(
            f"{repetition.folder} is not {run.folder} with another seed, so means over seeds cannot be "
            f"computed: {listed(differences)}. To read one run, name its folder."
        )


def _mean_performance(
    metric: str,
    runs: Sequence[Run],
) -> dict[str, Any]:
    """Return the first run's performance by a metric, with means over all runs."""
    performance_by_run = [run.performances.get(metric, {}) for run in runs]
    means = _means_of_all(performance_by_run, ("start", "end", "sum", "together"))
    alone_by_run = [performance.get("alone") or [] for performance in performance_by_run]
    means["alone"] = DataFrame(alone_by_run).mean().tolist()
    for performance in performance_by_run:
        if "why_no_values" in performance:
            means["why_no_values"] = performance["why_no_values"]
    return {**performance_by_run[0], **means}


def _events_of_all(runs: Sequence[Run]) -> list[Event]:
    """Return the first run's events, and all runs' on how coalitions' trainings differ."""
    first_run = runs[0]
    differences: dict[str, Event] = {}
    for run in runs:
        for event in run.record["events"]:
            if event.what == UNLIKE_RUN:
                differences.setdefault(event.text, event)
    first_events = first_run.record["events"]
    events = [event for event in first_events if event.what != UNLIKE_RUN]
    return [*events, *differences.values()]


def _means_of_all(
    mappings: Sequence[Mapping[str, float | None]],
    names: Iterable[str],
) -> dict[str, float | None]:
    """Return the mean of each named number over all mappings, None if one of them has none."""
    numbers = DataFrame(mappings, columns=list(names), dtype=float)
    means = numbers.mean(skipna=False).astype(object)
    return means.where(means.notna(), None).to_dict()


def _means_over_seeds(runs: Sequence[Run], metric: str) -> Values:
    """Return the means of a metric's last values over runs with different seeds. Their intervals follow from the
    differences between these, and not from the intervals of each.
    """
    values = final_values(runs, metric).to_numpy("float64")
    evidence = None
    if runs[0].metric_info(metric).get("class") == "ShadowShapley":
        evidence = [run.performances.get(metric, {}) for run in runs]
    return mean_with_interval(torch.tensor(values), evidence)


def _differences_of_experiments(run: Run, repetition: Run) -> list[str]:
    """Describe what two runs differ in apart from their seeds."""
    differences = []
    if repetition.record["hashes"] != run.record["hashes"]:
        differences.append(f"it does not have the data of {run.folder}")
    if repetition.record["rounds"] != run.record["rounds"]:
        differences.append(
            f"it has {repetition.record['rounds']} rounds, and not {run.record['rounds']}"
        )

    for metric in run.performances:
        design = run.design(metric)
        repeated_design = repetition.design(metric)
        if design and repeated_design and design != repeated_design:
            differences.append(
                f"its {metric} trained {design_in_words(repeated_design)}, and not {design_in_words(design)}"
            )
    return differences + other_options_of_repetition(_config(repetition), _config(run))


def other_options_of_repetition(config: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Describe each option that determines results and that differs between two configurations, without the designs of
    coalitions, which are compared by what was trained.
    """
    for one in (config, reference):
        metrics = one.get("federation", {}).get("metrics") or {}
        for metric in metrics.values():
            for name in ("coalitions", "halvings", "max_fits"):
                (metric.get("init_args") or {}).pop(name, None)
    return other_options(config, reference, "is {}, and not {}")


def _config(run: Run) -> dict[str, Any]:
    """Return a run's configuration, or an empty one without its file."""
    path = run.folder / CONFIG
    if not path.is_file():
        return {}
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return config
