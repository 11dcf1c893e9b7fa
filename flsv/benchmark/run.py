"""Runs metrics in the benchmark's federations, all metrics of a federation in one fit where possible."""

from __future__ import annotations

import copy
import csv
import gc
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv._lightning.durable import append, replacing, whole_lines
from flsv.benchmark.conditions import CONDITIONS, arguments
from flsv.benchmark.federation import Federation, quiet
from flsv.benchmark.lattice import model_scores
from flsv.benchmark.registry import Entry, WrongArguments, identity_of
from flsv.benchmark.true_values import Truth
from flsv.csv_files import Cell, csv_text, number_or_nan, read_csv, whole
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ContributionMetric
from flsv.participants import ALONE, Ranks
from flsv.report.reporting import Reporting
from flsv.seeding import isolated_rngs

#: Of values.csv, and how they are read; ``value`` is a text where a metric was refused, which has no ``client``.
COLUMNS: dict[str, Cell] = {
    **{"federation": str, "condition": str, "seed": whole, "metric": str, "client": str, "value": str},
    **{"low": number_or_nan, "high": number_or_nan, "identity": str},
}
Interval = tuple[Tensor, Tensor]
Key = tuple[str, str, int, str]
"""Federation, condition, seed, metric."""


@dataclass(frozen=True, eq=False)
class Values:
    """The result of a run.

    Args:
        values: metric to values ``[n]``.
        refused: metric to why it has none here.
        failed: metric to the traceback of its error, which no configuration is to blame for.
        seconds: of the processor, for each metric's own updates, what it asked for included; only where it rode alone.
        evaluations: coalitions that each metric asked for.
        fit: the same for the whole fit.
        utility: of the last global model, what the federation measures models by.
        noticed: fault to int64 ``[n]``, in how many rounds each client was warned of.
        intervals: metric to the ends ``[n]`` of its own 90 % intervals, where it has any.
    """

    values: dict[str, Tensor]
    refused: dict[str, str]
    seconds: dict[str, float]
    evaluations: dict[str, int]
    fit: float
    utility: float = float("nan")
    noticed: Mapping[str, Tensor] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def run(
    federation: Federation,
    entries: Mapping[str, Entry],
    seed: int,
    condition: str = "base",
    best: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Values:
    """One fit of a federation with these metrics in it.

    A metric that the federation refuses is left out. Where a fit with all of them fails, each rides alone, so that one
    that fails fails alone. Metrics that have clients do more, or keep samples back, have a fit of their own. Without
    entries: the run by itself.

    Args:
        federation: where.
        entries: metrics by name.
        seed: of the run.
        condition: a name in :data:`flsv.benchmark.conditions.CONDITIONS`.
        best: the client of the largest true value.
        options: further arguments of :class:`flsv.FederatedLoop`.

    Raises:
        ConfigurationError: the fit fails without any metric, too; a metric takes no such arguments.
    """
    metrics, result = _made(federation, entries)
    if entries and not metrics:
        return result

    def apart(companies: Sequence[Sequence[str]]) -> Values:
        each = ({name: entries[name] for name in names} for names in companies)
        return _joined(result, [run(federation, some, seed, condition, best, options) for some in each])

    companies = _companies(entries, metrics)
    if len(companies) > 1:
        return apart(companies)
    given = options or {}
    asked = [metric for metric in metrics.values() if isinstance(metric, ContributionMetric) and metric.evaluates]
    where = federation.with_client_validation if asked else federation
    theirs = next((entries[name].options() for name in metrics), {})
    try:
        fit = _fit(where, metrics, seed, condition, best, {**theirs, **given})
    except Exception as error:
        if not metrics:
            raise
        if len(metrics) > 1:
            return apart([[name] for name in metrics])
        (name,) = metrics
        _fit(federation, {}, seed, condition, best, given)  # whose fault is it?
        if isinstance(error, ConfigurationError):
            result.refused[name] = str(error)
        else:
            result.failed[name] = "".join(traceback.format_exception(error))
        return result
    return _joined(result, [fit])


def _made(federation: Federation, entries: Mapping[str, Entry]) -> tuple[dict[str, Metric], Values]:
    """New metrics, and what is known of the others: values of the data alone, or why there are none."""
    metrics: dict[str, Metric] = {}
    result = Values({}, {}, {}, {}, 0.0)
    for name, each in entries.items():
        try:
            made = each.build(federation)
            if isinstance(made, Metric):
                if isinstance(made, ContributionMetric):
                    made.check(federation.num_samples)
                metrics[name] = made
            else:
                data = federation.datamodule()
                start = time.process_time()
                result.values[name] = made(data)
                result.seconds[name] = time.process_time() - start
        except WrongArguments:
            raise
        except ConfigurationError as error:
            result.refused[name] = str(error)
        except Exception:
            result.failed[name] = traceback.format_exc()
    return metrics, result


def _companies(entries: Mapping[str, Entry], metrics: Mapping[str, Metric]) -> list[list[str]]:
    """Who may ride in one fit; those of the run as it is come first."""
    found: dict[tuple[str, bool], list[str]] = {}
    for name, metric in metrics.items():
        asks = isinstance(metric, ContributionMetric) and metric.evaluates
        found.setdefault((entries[name].client_algorithm or "", asks), []).append(name)
    return [found[key] for key in sorted(found)]


def _joined(result: Values, parts: Sequence[Values]) -> Values:
    for part in parts:
        for name in ("values", "refused", "failed", "seconds", "evaluations", "intervals"):
            getattr(result, name).update(getattr(part, name))
    # A fit that failed has neither.
    first = next((part for part in parts if part.noticed), parts[0])
    return replace(result, fit=sum(p.fit for p in parts), utility=first.utility, noticed=first.noticed)


def _fit(
    federation: Federation,
    metrics: Mapping[str, Metric],
    seed: int,
    condition: str,
    best: int,
    options: Mapping[str, Any],
) -> Values:
    gc.collect()  # the trainer, module and data of the run before refer to each other, and are large
    # Names of columns are the user's; those of a loop's metrics have no brackets.
    inside = {f"metric_{place}": metric for place, metric in enumerate(metrics.values())}
    # Copies: filters keep what they found.
    given = copy.deepcopy({"filters": [], **arguments(condition, federation, best), **options})
    loop = FederatedLoop(
        metrics=inside,  # type: ignore[arg-type]
        uploads=[*federation.attackers(), *given.pop("uploads", [])],
        local_epochs=federation.local_epochs,
        reporting=Reporting(per_class=False, figures=0, table=False, files=False),
        seed=seed,
        **given,
    )
    clock = _Clock(loop)
    with isolated_rngs(seed, "benchmark"), quiet():
        trainer = federation.trainer(loop)
        start = time.process_time()
        trainer.fit(federation.module(), federation.datamodule())
        seconds = time.process_time() - start
        utility = float(model_scores(trainer, loop.space, federation, loop.state.model()[None])["utility"])
    values, evaluations, intervals = {}, {}, {}
    for (name, metric), key in zip(metrics.items(), inside):
        value = loop.contributions[key].detach().cpu()
        each = metric.per_client(value) if isinstance(metric, ContributionMetric) else _one_number(value)
        values[name] = _without(each, loop.held)
        evaluations[name] = int(getattr(metric, "evaluations", 0))
        ends = metric.intervals(value=values[name]) if isinstance(metric, ContributionMetric) else None
        if ends is not None:
            intervals[name] = ends
    alone = dict.fromkeys(metrics, clock.seconds) if len(metrics) == 1 else {}
    noticed = {}
    for fault, times in loop.noticed.items():
        noticed[fault] = torch.tensor([times.get(i, 0) for i in range(len(federation.num_samples))])
    return Values(values, {}, alone, evaluations, seconds, utility, noticed, intervals)


class _Clock:
    """How long a loop's metrics take, with all that they ask a round for: time of the processor, which does not depend
    on what else runs on the machine."""

    def __init__(self, loop: FederatedLoop) -> None:
        self.seconds, self._update = 0.0, loop.board.update
        loop.board.update = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any) -> None:
        start = time.process_time()
        self._update(*args)
        self.seconds += time.process_time() - start


def _without(values: Tensor, clients: Sequence[int]) -> Tensor:
    """``values [n]``, NaN for clients whose payment is held back."""
    result = values.clone()
    result[list(clients)] = float("nan")
    return result


def _one_number(value: Tensor) -> Tensor:
    return value.mean(-1) if value.ndim == 2 else value


class Results:
    """Values of clients by federation, condition, seed and metric, appended to ``values*.csv`` of a folder.

    What is there already is not run again; each rank writes a file of its own. An error is not kept.

    Args:
        folder: of the files; None: nothing is kept.
        rank: this process's.
        identity: of a federation's and a metric's name: what their values are of, see
            :func:`flsv.benchmark.registry.identity_of`. Others are left where they lie. None: the last of each is
            taken, whatever made it.

    Attributes:
        failed: the errors of this call, as ``values`` and ``refused``.
    """

    def __init__(
        self, folder: Path | None, rank: int = 0, identity: Callable[[str, str], str | None] | None = None
    ) -> None:
        self._identity = identity
        self.failed: dict[Key, str] = {}
        self._folder, self._path = folder, None if folder is None else folder / f"values{rank or ''}.csv"
        self.values: dict[Key, Tensor] = {}
        self.intervals: dict[Key, Interval] = {}
        self.refused: dict[Key, str] = {}
        if self._path is not None:
            cut_half_line(self._path, 4)
        self.read()

    def read(self) -> None:
        """Take in what lies in the folder."""
        rows: dict[Key, dict[str, list[tuple[float, ...]]]] = {}
        for path in sorted(self._folder.glob("values*.csv")) if self._folder is not None else ():
            for row in read_rows(path, COLUMNS):
                key = (row["federation"], row["condition"], row["seed"], row["metric"])
                if self._identity is not None and row["identity"] != self._identity(key[0], key[3]):
                    continue
                if not row["client"]:
                    self.refused[key] = row["value"]
                else:
                    numbers = (number_or_nan(row["value"]), row["low"], row["high"])
                    rows.setdefault(key, {}).setdefault(row["identity"], []).append(numbers)
        for key, by_identity in rows.items():
            found = list(by_identity.values())[-1]
            self.values[key], low, high = torch.tensor(found, dtype=torch.float64).T.contiguous()
            if (low == low).any():
                self.intervals[key] = low, high

    def known(self, federation: str, condition: str, seed: int, metric: str) -> bool:
        """Whether there is nothing to run."""
        key = (federation, condition, seed, metric)
        return key in self.values or key in self.refused

    def add(self, federation: str, condition: str, seed: int, run: Values, passing: Collection[str] = ()) -> None:
        """What one fit came to; why one of the metrics ``passing`` was refused, is not kept."""
        rows: list[list[Any]] = []

        def told(metric: str) -> str:
            return ("" if self._identity is None else self._identity(federation, metric)) or ""

        self.failed |= {(federation, condition, seed, name): why for name, why in run.failed.items()}
        for name, values in run.values.items():
            key = (federation, condition, seed, name)
            self.values[key] = values.double()
            numbers = [values]
            if name in run.intervals:
                low, high = run.intervals[name]
                self.intervals[key] = low.double(), high.double()
                numbers += [low, high]
            for client, cells in enumerate(zip(*(each.tolist() for each in numbers))):
                said = ["" if cell != cell else f"{cell:.8g}" for cell in cells]
                rows.append([*key, client, *said, *[""] * (3 - len(said)), told(name)])
        for name, why in run.refused.items():
            self.refused[federation, condition, seed, name] = why
            if name in passing:
                continue
            rows.append([federation, condition, seed, name, "", why, "", "", told(name)])
        if self._path is not None:
            add_rows(self._path, COLUMNS, rows)


def add_rows(path: Path, columns: Mapping[str, Cell], rows: Sequence[Sequence[object]]) -> None:
    """Append to a CSV file, all of them or none, with a header where it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.is_file() or not path.stat().st_size
    append(path, csv_text([list(columns), *rows] if new else rows))


def read_rows(path: Path, columns: Mapping[str, Cell]) -> Iterator[dict[str, Any]]:
    """The whole lines of a file that :func:`add_rows` has added to; none of one that is not there."""
    if path.is_file() and whole_lines(path):
        for _, row in read_csv(path, columns):
            yield row


def cut_half_line(path: Path, same: int) -> None:
    """Who was killed while writing left half a line: it goes, with the lines before it whose first cells, ``same`` of
    them, are the same."""
    text = path.read_bytes() if path.is_file() else b""
    lines, half = (
        text[: text.rfind(b"\n") + 1].decode().splitlines(),
        text[text.rfind(b"\n") + 1 :].decode(errors="replace"),
    )
    if not half:
        return
    last = csv_text([next(csv.reader(lines[-1:]), [])[:same]]).decode().rstrip("\n") + ","
    if half.startswith(last) or last.startswith(half):
        lines = [line for line in lines if not line.startswith(last)]
    with replacing(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def bench(
    federations: Mapping[str, tuple[Federation, Truth]],
    entries: Mapping[str, Entry],
    *,
    seeds: int = 3,
    conditions: Sequence[str] = tuple(CONDITIONS),
    folder: Path | None = None,
    ranks: Ranks = ALONE,
    say: Any = print,
) -> Results:
    """Run all metrics in all federations: ``seeds`` times as they are, and once under every other condition.

    Args:
        federations: by name, each with its truth.
        entries: metrics by name.
        seeds: runs of each federation as it is.
        conditions: names in :data:`flsv.benchmark.conditions.CONDITIONS`; ``"base"`` is always among them.
        folder: where values are kept; what is there is not run again.
        ranks: processes that share the fits out.
        say: is told of every fit.

    Raises:
        ConfigurationError: an unknown condition.
    """
    for condition in conditions:
        if condition not in CONDITIONS:
            raise ConfigurationError(f"there is no condition {condition!r}: expected one of {list(CONDITIONS)}.")
    results = Results(folder, ranks.rank, identity_of({name: each for name, (each, _) in federations.items()}, entries))
    runs = [("base", seed) for seed in range(seeds)] + [(other, 0) for other in conditions if other != "base"]
    tasks = [(name, condition, seed) for name in federations for condition, seed in runs]
    # One federation after the other: the data of all of them at once are some gigabytes.
    for name, theirs in groupby(tasks[ranks.rank :: ranks.size], key=itemgetter(0)):
        federation, truth = federations[name]
        for _, condition, seed in theirs:
            todo = {m: each for m, each in entries.items() if not results.known(name, condition, seed, m)}
            if not todo:
                continue
            found = run(federation, todo, seed, condition, int(truth.mean.argmax()))
            results.add(name, condition, seed, found, [m for m, each in todo.items() if each.own])
            say(f"{name}, {condition}, seed {seed}: {len(found.values)} metrics, {found.fit:.1f} s of the processor")
        federation.release()
    mine = (results.values, results.intervals, results.refused, results.failed)
    for values, intervals, refused, failed in ranks.everybody(mine, "the benchmark's values"):
        results.values |= values
        results.failed |= failed
        results.intervals |= intervals
        results.refused |= refused
    return results
