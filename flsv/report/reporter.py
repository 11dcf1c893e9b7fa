"""Reporter: writes scalars to loggers, TensorBoard's tabs, rows of ``contributions.csv``, and the final table.

All of them are views of the round's rows, see :class:`flsv.report.run_table.RunTable`. A client's value, once
measured, stays until it is measured again. It is written in the rounds in which it changes, or its interval does: with
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
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchmetrics import Metric

from flsv.report.folder import CONTRIBUTIONS, Reporting, run_folder
from flsv.report.measured import (
    client_score,
    client_tag,
    columns_of,
    numbers_of,
    scalars_of,
    shared_numbers,
    spread,
)
from flsv.report.run_table import ContributionsFile, Numbers, RunTable
from flsv.report.tensorboard import Picture, TensorBoardRun
from flsv.report.terminal import print_contributions
from flsv.report.trackers import log_tables, tables_of


class Reporter:
    """Everything a fit says about its rounds. The x-axis of every curve is the round, from 0.

    Args:
        trainer: whose loggers and log folder are used.
        metrics: the contribution metrics by name.
        client_names: names of the clients.
        class_names: names of the classes, or None.
        reporting: what is shown. Columns that are no classes are in the CSV only.
        csv: whether the values are written to ``contributions.csv`` of the run's folder.
        evaluated: whether the clients' own models are evaluated.

    Attributes:
        folder: of this run, see :func:`flsv.report.folder.run_folder`.
        csv: the file of contributions; None where none is written.
        board: what TensorBoard reads.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        metrics: Mapping[str, Metric],
        client_names: Sequence[str],
        class_names: Sequence[str] | None,
        reporting: Reporting,
        csv: bool = True,
        evaluated: bool = False,
    ) -> None:
        self._trainer, self._metrics, self._per_class = trainer, metrics, reporting.per_class
        self._client_names, self._class_names = client_names, class_names
        self._known = self._rows(0)
        self._last, self._columns = self._known, dict[str, str]()
        self._shared: dict[str, float] = {}
        self.folder = run_folder(trainer)
        self.csv = ContributionsFile(self.folder / CONTRIBUTIONS, client_names) if csv else None
        self.board = TensorBoardRun(trainer, metrics, client_names, class_names, reporting, evaluated)

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
        known, written, path = self._measured(first_round, contributions), self._rows(0), None
        if self.csv is not None:
            path = self.csv.path.resolve()
            earlier = Path(earlier_csv or path)
            if first_round > 0 and earlier.is_file():
                self._known = known
            written = self.csv.begin(first_round, earlier if earlier != path else None)
        self.board.begin(first_round, described, chosen or {}, partition)
        self.board.remember(written + known)
        return None if path is None else str(path)

    def round(
        self,
        round_index: int,
        contributions: Mapping[str, Tensor],
        weights: Tensor,
        losses: Mapping[int, float],
        norms: Mapping[int, float],
        scores: Mapping[str, Tensor],
    ) -> None:
        """Write one round: what has changed of the metrics' values, and the clients' aggregation weights ``[n]``,
        training losses and norms of updates by client id, and the scores ``[n]`` of their own models by name where
        they were evaluated. NaN is not written."""
        before, self._known = self._known, self._measured(round_index, contributions)
        own = [Numbers("weight", weights.cpu()), Numbers("update_norm", [*norms.values()], clients=[*norms])]
        own += [Numbers(name, values.cpu()) for name, values in scores.items()]
        table = self._known.changes(before) + self._rows(round_index, *own)
        self._shared = shared_numbers(self._metrics, contributions)
        shared = {**self._shared, **spread(scores)}
        curves = [name for name in contributions if self._per_class and columns_of(self._metrics[name]) is None]
        scalars = scalars_of(table, curves, shared, self._client_names, self._class_names)
        for client, loss in losses.items():
            if loss == loss:
                scalars.add("train_loss", client, loss)
        self.board.scalars(round_index, scalars)
        for logger in self._trainer.loggers:
            if not (isinstance(logger, TensorBoardLogger) and isinstance(logger.experiment, SummaryWriter)):
                logger.log_metrics(scalars.named(), step=round_index)
        if self.csv is not None:
            self.csv.append(table)
        self.board.round(round_index, contributions, self._known)

    def monitored(self, weights: Tensor, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What callbacks may monitor after :meth:`round`, by names like those in loggers without runs per client, in
        which clients have their numbers alone (``cssv/client_0``): every metric's value of each client, what its
        diagnostics say of all, the round's weights ``[n]``, the last known scores ``[n]`` of clients' own models, their
        mean, least and spread. NaN is left out."""
        last = {name: self._known.last(name, len(weights)) for name in self._metrics}
        last["weight"] = weights.tolist()
        last |= {client_score(name): values.tolist() for name, values in scores.items()}
        scalars = {client_tag(name, i): value for name, values in last.items() for i, value in enumerate(values)}
        scalars |= self._shared | spread(scores)
        return {name: torch.tensor(value) for name, value in scalars.items() if value == value}

    def finish(
        self,
        num_samples: Tensor,
        rounds: Tensor,
        contributions: Mapping[str, Tensor],
        weights: Tensor | None,
        scores: Mapping[str, Tensor],
        last_round: int,
    ) -> None:
        """After the last round: what everybody was worth, as a text in TensorBoard.

        Args:
            num_samples: ``[n]`` training samples.
            rounds: ``[n]``, how many rounds each client took part in.
            contributions: the metrics' last values, by name.
            weights: ``[n]`` of the last aggregation.
            scores: of the clients' own models, by name, ``[n]``.
            last_round: its number.
        """
        counts = {"samples": num_samples, "rounds": rounds, "weight": weights, **scores}
        own = [Numbers(name, values.cpu()) for name, values in counts.items() if values is not None]
        self._last = self._measured(last_round, contributions) + self._rows(last_round, *own)
        known = {name: columns_of(metric) for name, metric in self._metrics.items() if name in contributions}
        self._columns = {name: "class" if names is None else "column" for name, names in known.items()}
        self.board.finish(self._last, self._columns, last_round)
        if self._trainer.is_global_zero and not self._trainer.fast_dev_run:  # type: ignore[attr-defined]
            tables = tables_of(self._last, self._columns, self._client_names)
            pictures = {
                name: partial(self.board.draw, name, value, last_round) for name, value in contributions.items()
            }
            log_tables(self._trainer.loggers, tables, pictures, last_round)

    def table(
        self,
        learned: Mapping[str, Any] | None = None,
        logged: Mapping[str, float] | None = None,
        where: Sequence[str] = (),
    ) -> None:
        """Print what :meth:`finish` was told: what the clients had and what they were worth, per class for up to ten
        classes; what of it all the model has, as the run's record says; what the model has logged last; and where the
        results are."""
        print_contributions(self._last, self._columns, self._client_names, learned or {})
        if logged:
            print(f"Model:   {', '.join(f'{name} {value:.4g}' for name, value in logged.items())}")
        for line in where:
            print(line)

    def _rows(self, round_index: int, *numbers: Numbers) -> RunTable:
        return RunTable.of_round(round_index, numbers, self._client_names)

    def _measured(self, round_index: int, contributions: Mapping[str, Tensor]) -> RunTable:
        return self._rows(round_index, *numbers_of(self._metrics, contributions, self._class_names))

    def _log_settings(self, settings: Mapping[str, Any], first_round: int) -> dict[str, Any]:
        module, data = self._trainer.lightning_module, self._trainer.datamodule  # type: ignore[attr-defined]
        merged = {**module.hparams_initial, **getattr(data, "hparams_initial", {}), **settings}
        for logger in self._trainer.loggers:
            # Of a run that goes on, other loggers have the settings already, and may not take others.
            if first_round == 0 or isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(merged)
        return merged
