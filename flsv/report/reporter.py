"""What a run writes: scalars to every logger, TensorBoard's tabs, rows to ``contributions.csv``, a last table.

A client's value, once measured, stays until it is measured again. It is written in the rounds in which it changes, or
its interval does: with 10 of 1,000 clients in a round 10 rows, not 1,000 (where no value depends on the others', as a
share does). What belongs to one round, such as a weight or a norm, is written in that round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.text import Text
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchmetrics import Metric

from flsv.metrics import ContributionMetric
from flsv.report.contributions_csv import ContributionsFile, Row
from flsv.report.folder import run_folder
from flsv.report.learned import lines_of
from flsv.report.names import MEANING
from flsv.report.table import chosen, class_columns, client_columns, make_console, print_table
from flsv.report.tensorboard.run import Picture, TensorBoardRun, fairness
from flsv.report.tensorboard.scalars import PER_CLASS, RoundScalars, client_tag, followed


class Reporter:
    """Everything a fit says about its rounds. The x-axis of every curve is the round, from 0.

    Args:
        trainer: whose loggers and log folder are used.
        metrics: the contribution metrics by name.
        class_names: names of the classes, or None.
        per_class: whether ``[n, M]`` values are logged per class too; columns that are no classes are in the CSV only.
        figures_every: rounds between two figures of a metric; 0 for none; None for ten in the run.
        csv: whether the values are written to ``contributions.csv`` of the run's folder.
        client_names: names of the clients, or None.
        client_runs: whether every client has a run of its own in TensorBoard; "auto": up to 30 clients have.
        evaluated: whether the clients' own models are evaluated.

    Attributes:
        folder: of this run, see :func:`flsv.report.folder.run_folder`.
        csv: the file of contributions; None where none is written.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        metrics: Mapping[str, Metric],
        class_names: Sequence[str] | None,
        per_class: bool,
        figures_every: int | None,
        csv: bool = True,
        client_names: Sequence[str] | None = None,
        client_runs: bool | str = "auto",
        evaluated: bool = False,
    ) -> None:
        self._trainer, self._metrics, self._class_names = trainer, metrics, class_names
        self._per_class, self._client_names = per_class, client_names
        self._written: dict[str, Tensor] = {}
        self._ends: dict[str, Tensor] = {}
        self.folder = run_folder(trainer)
        path = self.folder / "contributions.csv"
        self.csv = ContributionsFile(path, client_names, class_names) if csv else None
        self._board = TensorBoardRun(
            trainer, metrics, client_names, class_names, per_class, client_runs, figures_every, evaluated
        )

    def begin(
        self,
        first_round: int,
        earlier_csv: str | None,
        settings: Mapping[str, Any],
        partition: Callable[[], Picture],
        contributions: Mapping[str, Tensor],
        chosen: Mapping[str, str | int | float] | None = None,
    ) -> str | None:
        """Open the CSV and what TensorBoard reads; at the start of a run also log the settings and the picture that
        ``partition`` draws.

        ``contributions`` are those of the rounds before: what has been written already. ``chosen`` are the settings
        that tell runs apart, the columns of TensorBoard's table of runs.

        Returns:
            Where the CSV is, or None if none is written.
        """
        described = self._log_settings(settings, first_round)
        path = None if self.csv is None else self.csv.path.resolve()
        if path is not None and self.csv is not None:
            if first_round > 0 and Path(earlier_csv or path).is_file():
                self._written, self._ends = self._values(contributions), self._intervals(contributions)
            self.csv.begin(first_round, Path(earlier_csv) if earlier_csv and Path(earlier_csv) != path else None)
        self._board.begin(first_round, described, chosen or {}, partition)
        known = self.csv.values() if self.csv is not None and first_round > 0 else ()
        self._board.remember(self._values(contributions), known)
        return None if path is None else str(path)

    def round(
        self,
        round_index: int,
        contributions: Mapping[str, Tensor],
        weights: Tensor,
        losses: Mapping[int, float],
        norms: Mapping[int, float],
        accuracy: Tensor | None,
    ) -> None:
        """Write one round: what has changed of the metrics' values, and the clients' aggregation weights ``[n]``,
        training losses and norms of updates by client id, and the accuracies ``[n]`` of their own models where they
        were evaluated. NaN is not written."""
        rows: list[Row] = []
        scalars = RoundScalars(self._client_names, self._class_names)
        values, ends = self._values(contributions), self._intervals(contributions)
        intervals: dict[tuple[str, int], tuple[float, float]] = {}
        for name, value in values.items():
            before = self._written.get(name)
            new = value if before is None else value.masked_fill(value == before, float("nan"))
            if value.ndim == 0:
                scalars.share(name, value.item())
            elif value.ndim == 1:
                if name in ends:
                    moved = _moved(ends[name], self._ends.get(name))
                    new = torch.where(moved, value, new)  # one that is again what it was may be better known by now
                    intervals |= {(name, i): (low, high) for i, (low, high) in _known(ends[name])}
                    for i, (low, high) in _known(ends[name].masked_fill(~moved, float("nan"))):
                        scalars.add(f"{name}/low", i, low)
                        scalars.add(f"{name}/high", i, high)
                changed = _rows(round_index, name, "", new)
                rows += changed
                for _, _, i, _, v in changed:
                    scalars.add(name, i, v)
            else:
                name = name.removesuffix(PER_CLASS)
                names = self._columns(name)
                for j, column in enumerate(new.T):
                    rows += _rows(round_index, name, names[j] if names else j, column)
                if self._per_class and names is None:
                    self._curves(scalars, name, new, value, values[name])
        self._written, self._ends = values, ends
        weighed = _rows(round_index, "weight", "", weights)
        rows += weighed
        rows += [(round_index, "update_norm", i, "", norm) for i, norm in norms.items()]
        of_clients = {"weight": {i: w for _, _, i, _, w in weighed}, "update_norm": norms, "train_loss": losses}
        if accuracy is not None:
            evaluated = _rows(round_index, "accuracy", "", accuracy)
            rows += evaluated
            of_clients["client_accuracy"] = {i: v for _, _, i, _, v in evaluated}
            for tag, number in {**_spread(accuracy), **fairness(self._metrics, values, accuracy)}.items():
                scalars.share(tag, number)
        for tag, numbers in of_clients.items():
            for i, number in numbers.items():
                if number == number:
                    scalars.add(tag, i, number)
        self._log(scalars, round_index)
        if self.csv is not None:
            self.csv.append(rows, intervals)
        self._board.round(round_index, contributions, values)

    def monitored(self, weights: Tensor, accuracy: Tensor | None) -> dict[str, Tensor]:
        """What callbacks may monitor after :meth:`round`, by the names that loggers without runs per client have: every
        metric's value of each client, what its diagnostics say of all, the round's weights ``[n]``, the last known
        accuracies ``[n]``, their mean, least and spread. NaN is left out."""
        scalars: dict[str, float] = {}
        for name, value in self._written.items():
            if value.ndim == 0:
                scalars[name] = value.item()
            elif name in self._metrics:
                scalars |= _by_client(name, value)
        scalars |= _by_client("weight", weights)
        if accuracy is not None:
            scalars |= _by_client("client_accuracy", accuracy) | _spread(accuracy)
        return {name: torch.tensor(value) for name, value in scalars.items() if value == value}

    def figures_due(self, round_index: int) -> bool:
        """Whether this is a round for pictures."""
        return self._board.figures_due(round_index)

    def finish(
        self,
        num_samples: Tensor,
        rounds: Tensor,
        contributions: Mapping[str, Tensor],
        weights: Tensor | None,
        accuracy: Tensor | None,
        last_round: int,
    ) -> None:
        """After the last round: what everybody was worth, as a text in TensorBoard."""
        known = {name: contributions[name] for name in self._metrics if name in contributions}
        values = {name: self.overall(name, value).detach().cpu() for name, value in known.items()}
        values |= {} if weights is None else {"weight": weights}
        values |= {} if accuracy is None else {"own accuracy": accuracy}
        self._board.finish({"samples": num_samples, "rounds": rounds}, values, self._intervals(known), last_round)

    def flush(self) -> None:
        """Everything to the disk, before a checkpoint that stands behind it."""
        self._board.flush()

    def close(self) -> None:
        """Close what this opened; a second call does nothing."""
        self._board.close()

    def table(
        self,
        num_samples: Tensor,
        rounds: Tensor,
        contributions: Mapping[str, Tensor],
        weights: Tensor | None,
        accuracy: Tensor | None,
        learned: Mapping[str, Any] | None = None,
    ) -> None:
        """Print what the clients had and what they were worth, per class for up to ten classes; and what of it all the
        model has, as the run's record says."""
        console, clients = make_console(), self._client_names or list(map(str, range(len(num_samples))))
        values = {name: self.overall(name, value) for name, value in contributions.items()}
        first = next(iter(values), None)
        rows, gap = chosen(values[first] if first else None, len(clients))
        title = "Contributions"
        if len(rows) < len(clients):
            by = f", by {first}" if first else ""
            title += f" of {len(rows)} of {len(clients)} clients{by}; all are in contributions.csv"
        columns = client_columns(num_samples, values, weights, accuracy, rounds, self._intervals(contributions))
        if any("[" in cell for cells in columns.values() for cell in cells):
            title += f"; in brackets {MEANING.partition(':')[0]}"
        print_table(console, title, clients, columns, rows, gap)
        for name, value in contributions.items():
            names = self._columns(name)
            if value.ndim == 2 and value.shape[1] <= 10 and (names or value.shape[1] > 1):
                title = f"{name} by {'column' if names else 'class'}"
                print_table(console, title, clients, class_columns(value, names or self._class_names), rows, gap)
        for line in lines_of(learned or {}):
            console.print(Text(line))

    def overall(self, name: str, value: Tensor) -> Tensor:
        """One number per client ``[n]``: the metric's own summary, or the mean over classes."""
        summary = getattr(self._metrics[name], "per_client", None)
        if summary is not None:
            return summary(value)
        return value.mean(-1) if value.ndim == 2 else value

    def _values(self, contributions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All that the metrics say, by name: ``[n]``, per class ``[n, M]``, and scalars; a copy on the CPU."""
        values: dict[str, Tensor] = {}
        for name, value in contributions.items():
            values[name] = self.overall(name, value)
            # Of one class there is no more to say than over all.
            if value.ndim == 2 and (value.shape[1] > 1 or self._columns(name)):
                values[name + PER_CLASS] = value
        for name, metric in self._metrics.items():
            diagnostics = metric.diagnostics() if isinstance(metric, ContributionMetric) else {}
            values |= {f"{name}/{what}": value for what, value in diagnostics.items()}
        return {name: value.detach().cpu().to(torch.float64, copy=True) for name, value in values.items()}

    def _intervals(self, contributions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Low and high ends ``[2, n]`` of the overall values, of the metrics that know them; float64 on the CPU."""
        found: dict[str, Tensor] = {}
        for name, value in contributions.items():
            metric = self._metrics[name]
            known = (
                metric.intervals(value=self.overall(name, value)) if isinstance(metric, ContributionMetric) else None
            )
            if known is not None:
                found[name] = torch.stack(known).detach().cpu().to(torch.float64, copy=True)
        return found

    def _columns(self, name: str) -> list[str] | None:
        """Names of the columns of a metric's values where they are no classes."""
        metric = self._metrics[name]
        return metric.columns() if isinstance(metric, ContributionMetric) else None

    def _curves(self, scalars: RoundScalars, name: str, new: Tensor, value: Tensor, overall: Tensor) -> None:
        """A metric's values per class: what is new of them, or where that would be too many curves, those of the
        clients at the top and at the bottom."""
        clients = followed(overall, value.shape[1])
        shown = new if len(clients) == len(value) else value
        numbers = shown.tolist()
        for i in clients:
            for j, number in enumerate(numbers[i]):
                if number == number:
                    scalars.add_class(name, j, i, number)

    def _log(self, scalars: RoundScalars, step: int) -> None:
        self._board.scalars(step, scalars)
        for logger in self._trainer.loggers:
            if not (isinstance(logger, TensorBoardLogger) and isinstance(logger.experiment, SummaryWriter)):
                logger.log_metrics(scalars.flat(), step=step)

    def _log_settings(self, settings: Mapping[str, Any], first_round: int) -> dict[str, Any]:
        module, data = self._trainer.lightning_module, self._trainer.datamodule  # type: ignore[attr-defined]
        merged = {**module.hparams_initial, **getattr(data, "hparams_initial", {}), **settings}
        for logger in self._trainer.loggers:
            # Of a run that goes on, other loggers have the settings already, and may not take others.
            if first_round == 0 or isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(merged)
        return merged


def _spread(accuracy: Tensor) -> dict[str, float]:
    """Of the clients' accuracies ``[n]``. Their standard deviation is how unevenly they are served: Li, Sanjabi,
    Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, definition 1."""
    known = accuracy[~accuracy.isnan()].double()
    if not len(known):
        return {}
    # NaN where somebody has no accuracy: it is a mean of all.
    values = {"mean": accuracy.mean(), "min": known.min(), "std": known.std(correction=0)}
    return {f"client_accuracy/{what}": value.item() for what, value in values.items()}


def _moved(ends: Tensor, before: Tensor | None) -> Tensor:
    """Bool ``[n]``: whether there is an interval ``[2, n]`` that is not as it was."""
    known = ~ends.isnan().any(0)
    return known if before is None else known & (ends != before).any(0)


def _known(ends: Tensor) -> list[tuple[int, tuple[float, float]]]:
    """Client and interval, of those that have one."""
    return [(i, (low, high)) for i, (low, high) in enumerate(zip(*ends.tolist())) if low == low and high == high]


def _by_client(name: str, values: Tensor) -> dict[str, float]:
    return {client_tag(name, i): value for i, value in enumerate(values.detach().double().tolist())}


def _rows(round_index: int, metric: str, label: int | str, values: Tensor) -> list[Row]:
    return [(round_index, metric, i, label, v) for i, v in enumerate(values.detach().double().tolist()) if v == v]
