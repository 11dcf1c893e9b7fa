"""Reports a fit: loggers, CSV, the run's record, monitored values, the final table."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv import __version__
from flsv.data import FederatedDataModule, plot_partition
from flsv.engines.one_process import OneProcess
from flsv.loop.learned import verdicts
from flsv.loop.saved import SavedLoop
from flsv.report.folder import leaves_files
from flsv.report.progress import ProgressText
from flsv.report.record import ended, record_of, write_record
from flsv.report.reporter import Reporter
from flsv.round import Round
from flsv.server.description import chosen, settings


class ToldLoop(SavedLoop):
    """The part of :class:`flsv.FederatedLoop` that reports."""

    _data: FederatedDataModule
    # From the start of a fit on.
    _record: dict[str, Any]
    _progress: ProgressText | None
    _monitored: set[str]

    def _leaves_files(self, trainer: L.Trainer) -> bool:
        """Whether this run's folder is written into, by whichever process."""
        return self.reporting.files and leaves_files(trainer)

    def _begin_reports(self, trainer: L.Trainer, fit: OneProcess) -> None:
        data = self._data
        self._reporter = Reporter(
            trainer,
            self.metrics,
            data.client_names,
            data.class_names,
            self.reporting,
            csv=self._leaves_files(trainer) and trainer.is_global_zero,
            evaluated=self.evaluation.every > 0,
        )
        self._reporter.folder = fit.ranks.from_rank(0, self._reporter.folder, "the run's folder")
        partition = partial(plot_partition, data.class_counts, data.class_names, data.client_names)
        described = settings(self.config, self.metrics, data, self.state.seed)
        if self._reporter.csv is not None:
            roles = {**self.strategies, "privacy": self.config.privacy}
            self._record = record_of(
                trainer, data, self.metrics, roles, described, self._fingerprint, self.round_index, __version__
            )
            self._record |= self._found
            write_record(self._reporter.folder, self._record)
        columns = chosen(self.strategies, data, self.state.seed, trainer.max_epochs)
        known = self.contributions
        self._csv = self._reporter.begin(self.round_index, self._csv, described, partition, known, columns)
        self._progress = ProgressText(trainer)

    @property
    def _found(self) -> dict[str, Any]:
        """What turns out while a run runs, for its record."""
        state = self.state
        elsewhere = {"run": state.run, "incidents": copy.deepcopy(state.incidents)} if state.run else {}
        return {
            "copies": self.copies,
            "named": {str(who): list(rounds) for who, rounds in self.named.items()},
            **elsewhere,
        }

    def _record_found(self) -> None:
        """At once: a killed run's folder has to say it, too."""
        found = self._found
        if self._reporter.csv is not None and not found.items() <= self._record.items():
            self._record |= found
            write_record(self._reporter.folder, self._record)

    def _report_round(self, trainer: L.Trainer, fit: OneProcess, round: Round) -> None:
        index = self.round_index
        assert self.weights is not None
        self._reporter.round(
            index,
            self.contributions,
            self.weights,
            losses={} if round.losses is None else dict(zip(round.client_ids.tolist(), round.losses.tolist())),
            norms=fit.server.norms,
            accuracy=self.client_accuracy if fit.evaluated else None,
        )
        self._record_found()
        known, monitored = self._reporter.monitored(self.weights, self.client_accuracy), trainer.callback_metrics
        for name in self._monitored - known.keys():
            monitored.pop(name, None)
        monitored.update(known)
        self._monitored = set(known)
        if self._reporter.figures_due(index) and self._leaves_files(trainer):
            fit.write_artifacts(round, self._reporter.folder / "clients")

    def _looks(self, trainer: L.Trainer) -> bool:
        """Whether anybody is told what becomes of the model, and paid by it."""
        told = self.reporting.files or self.reporting.table
        return told and bool(self.metrics) and not trainer.fast_dev_run  # type: ignore[attr-defined]

    def _look_at_start(self, trainer: L.Trainer, fit: OneProcess) -> None:
        if self.round_index == 0 and self._looks(trainer):
            found, _ = verdicts(trainer, self._data, fit, self.state.model())
            self.state.start = {name: verdict.value for name, verdict in found.items()}

    def _paid_in(self, trainer: L.Trainer, fit: OneProcess, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """For the run's record: by metric, what its game shares out, of the model at the run's start and now, the sum
        of the values, and whether the model is told apart from a constant answer; and why that is not known."""
        if not self._looks(trainer):
            return {}
        found, unknown = verdicts(trainer, self._data, fit, self.state.model())
        paid = {
            name: {
                "by": verdict.by,
                "start": self.state.start.get(name),
                "end": verdict.value,
                "sum": float(values[name].nansum()) if name in values else None,
                "told_apart": verdict.apart,
            }
            for name, verdict in found.items()
        }
        for by in dict.fromkeys(verdict.by for verdict in found.values() if verdict.apart is False):
            rank_zero_warn(
                f"The model is not told apart from a constant answer by {by}: who contributed what to it is chance."
            )
        return {"paid_in": paid} | ({} if unknown is None else {"not_known": unknown})

    def _finish_reports(self, trainer: L.Trainer, fit: OneProcess) -> None:
        values = self._payable_rows()
        learned = self._paid_in(trainer, fit, values)
        if self._reporter.csv is not None:
            write_record(self._reporter.folder, {**self._record, **ended(trainer, self.round_index), **learned})
        known = self._data.num_samples, self.participations, values, self.weights, self.client_accuracy
        self._reporter.finish(*known, last_round=max(self.round_index - 1, 0))
        if self.reporting.table and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            assert self._progress is not None
            self._progress.afterwards(partial(self._reporter.table, learned))
