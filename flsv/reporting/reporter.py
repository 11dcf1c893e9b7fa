"""What a run writes: scalars to every logger, figures to TensorBoard, rows to ``contributions.csv``, a last table.

A client's value, once measured, stays until it is measured again. It is written in the rounds in which it changes: with
10 of 1,000 clients in a round 10 rows, not 1,000 (where no value depends on the others', as a share does). What belongs
to one round, such as a weight or a norm, is written in that round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchmetrics import Metric

from flsv.drawing import drawing, label_text
from flsv.metrics import ContributionMetric
from flsv.reporting.contributions_csv import ContributionsFile, Row
from flsv.reporting.folder import run_folder
from flsv.reporting.table import chosen, class_columns, client_columns, make_console, print_table

#: A figure and its axis.
Picture = tuple[Figure, Any]


class Reporter:
    """Everything a fit says about its rounds. The x-axis of every curve is the round, from 0.

    Args:
        trainer: whose loggers and log folder are used.
        metrics: the contribution metrics by name.
        class_names: names of the classes, or None.
        per_class: whether ``[n, M]`` values are logged per class too; columns that are no classes are in the CSV only.
        figures_every: rounds between two figures of a metric; 0 for none.
        client_names: names of the clients, or None.

    Attributes:
        folder: of this run, see :func:`flsv.reporting.folder.run_folder`.
        csv: the file of contributions; None in a fast_dev_run, which leaves no trace.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        metrics: Mapping[str, Metric],
        class_names: Sequence[str] | None,
        per_class: bool,
        figures_every: int,
        client_names: Sequence[str] | None = None,
    ) -> None:
        self._trainer, self._metrics, self._class_names = trainer, metrics, class_names
        self._per_class, self._figures_every = per_class, figures_every
        self._client_names = client_names
        self._written: dict[str, Tensor] = {}
        self.folder = run_folder(trainer)
        self.csv = None if trainer.fast_dev_run else ContributionsFile(self.folder / "contributions.csv")  # type: ignore[attr-defined]

    def begin(
        self,
        first_round: int,
        earlier_csv: str | None,
        settings: Mapping[str, Any],
        partition: Callable[[], Picture],
        contributions: Mapping[str, Tensor],
    ) -> str | None:
        """Open the CSV; at the start of a run also log the settings and the picture that ``partition`` draws.

        ``contributions`` are those of the rounds before: what has been written already.

        Returns:
            Where the CSV is, or None if none is written.
        """
        if first_round == 0:
            self._log_settings(settings)
            self._figure("data/partition", partition, 0)
        if self.csv is None:
            return None
        path = self.csv.path.resolve()
        if first_round > 0 and Path(earlier_csv or path).is_file():
            self._written = self._values(contributions)
        self.csv.begin(first_round, Path(earlier_csv) if earlier_csv and Path(earlier_csv) != path else None)
        return str(path)

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
        scalars: dict[str, float] = {}
        values = self._values(contributions)
        for name, value in values.items():
            before = self._written.get(name)
            new = value if before is None else value.masked_fill(value == before, float("nan"))
            if value.ndim == 0:
                scalars[f"contribution/{name}"] = value.item()
            elif value.ndim == 1:
                changed = _rows(round_index, name, "", new)
                rows += changed
                scalars |= {f"contribution/{name}/client_{i}": v for _, _, i, _, v in changed}
            else:
                name = name.removesuffix(PER_CLASS)
                names = self._columns(name)
                for j, column in enumerate(new.T):
                    changed = _rows(round_index, name, names[j] if names else j, column)
                    rows += changed
                    if self._per_class and names is None:
                        scalars |= {f"contribution/{name}/class_{j}/client_{i}": v for _, _, i, _, v in changed}
        self._written = values
        weighed = _rows(round_index, "weight", "", weights)
        rows += weighed
        scalars |= {f"weight/client_{i}": w for _, _, i, _, w in weighed}
        rows += [(round_index, "update_norm", i, "", norm) for i, norm in norms.items()]
        scalars |= {f"update_norm/client_{i}": norm for i, norm in norms.items()}
        scalars |= {f"train_loss/client_{i}": loss for i, loss in losses.items() if loss == loss}
        if accuracy is not None:
            evaluated = _rows(round_index, "accuracy", "", accuracy)
            rows += evaluated
            scalars |= {f"client_accuracy/client_{i}": v for _, _, i, _, v in evaluated}
            scalars["client_accuracy/mean"] = accuracy.mean().item()
        self._log(scalars, round_index)
        if self.csv is not None:
            self.csv.append(rows)
        if self.figures_due(round_index):
            self.figures(round_index, contributions)

    def monitored(self, weights: Tensor, accuracy: Tensor | None) -> dict[str, Tensor]:
        """What callbacks may monitor after :meth:`round`, by the names that the loggers have: every metric's value of
        each client, what its diagnostics say of all, the round's weights ``[n]`` and the last known accuracies ``[n]``.
        NaN is left out."""
        scalars: dict[str, float] = {}
        for name, value in self._written.items():
            if value.ndim == 0:
                scalars[f"contribution/{name}"] = value.item()
            elif name in self._metrics:
                scalars |= _by_client(f"contribution/{name}", value)
        scalars |= _by_client("weight", weights)
        if accuracy is not None:
            scalars |= _by_client("client_accuracy", accuracy)
            scalars["client_accuracy/mean"] = accuracy.mean().item()
        return {name: torch.tensor(value) for name, value in scalars.items() if value == value}

    def figures_due(self, round_index: int) -> bool:
        """Whether this is a round for pictures."""
        last = round_index + 1 == self._trainer.max_epochs
        return bool(self._figures_every) and (last or (round_index + 1) % self._figures_every == 0)

    def figures(self, round_index: int, contributions: Mapping[str, Tensor]) -> None:
        """One picture per metric."""
        for name, value in contributions.items():
            self._figure(f"contribution/{name}", partial(self._draw, name, value, round_index), round_index)

    def table(
        self,
        num_samples: Tensor,
        rounds: Tensor,
        contributions: Mapping[str, Tensor],
        weights: Tensor | None,
        accuracy: Tensor | None,
    ) -> None:
        """Print what the clients had and what they were worth; per class for up to ten classes."""
        console, clients = make_console(), self._client_names or list(map(str, range(len(num_samples))))
        values = {name: self.overall(name, value) for name, value in contributions.items()}
        first = next(iter(values), None)
        rows, gap = chosen(values[first] if first else None, len(clients))
        title = "Contributions"
        if len(rows) < len(clients):
            by = f", by {first}" if first else ""
            title += f" of {len(rows)} of {len(clients)} clients{by}; all are in contributions.csv"
        columns = client_columns(num_samples, values, weights, accuracy, rounds)
        print_table(console, title, clients, columns, rows, gap)
        for name, value in contributions.items():
            names = self._columns(name)
            if value.ndim == 2 and value.shape[1] <= 10 and (names or value.shape[1] > 1):
                title = f"{name} by {'column' if names else 'class'}"
                print_table(console, title, clients, class_columns(value, names or self._class_names), rows, gap)

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

    def _columns(self, name: str) -> list[str] | None:
        """Names of the columns of a metric's values where they are no classes."""
        metric = self._metrics[name]
        return metric.columns() if isinstance(metric, ContributionMetric) else None

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        for logger in self._trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and isinstance(logger.experiment, SummaryWriter):
                # One event for the round: an event per scalar takes 30 us each, and there are n x M of them.
                values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
                logger.experiment._get_file_writer().add_summary(Summary(value=values), step)
            else:
                logger.log_metrics(dict(scalars), step=step)

    @property
    def _tensorboards(self) -> list[TensorBoardLogger]:
        return [logger for logger in self._trainer.loggers if isinstance(logger, TensorBoardLogger)]

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        # TensorBoard keeps the first set of hyper-parameters of a run, so the module's and the data's go with ours.
        module, data = self._trainer.lightning_module, self._trainer.datamodule  # type: ignore[attr-defined]
        merged = {**module.hparams_initial, **getattr(data, "hparams_initial", {}), **settings}
        for logger in self._trainer.loggers:
            logger.log_hyperparams(merged)

    def _draw(self, name: str, value: Tensor, round_index: int) -> Picture:
        figure, axis = self._metrics[name].plot(value)
        axis.set_title(f"{label_text(name)}, round {round_index}")
        return figure, axis

    def _figure(self, tag: str, draw: Callable[[], Picture], step: int) -> None:
        # In a fast_dev_run a logger's experiment is no writer.
        writers = [x.experiment for x in self._tensorboards if isinstance(x.experiment, SummaryWriter)]
        with drawing(tag):
            for writer in writers:
                writer.add_figure(tag, draw()[0], global_step=step)


PER_CLASS = " per class"


def _by_client(name: str, values: Tensor) -> dict[str, float]:
    return {f"{name}/client_{i}": value for i, value in enumerate(values.detach().double().tolist())}


def _rows(round_index: int, metric: str, label: int | str, values: Tensor) -> list[Row]:
    return [(round_index, metric, i, label, v) for i, v in enumerate(values.detach().double().tolist()) if v == v]
