"""Reports a fit: loggers, CSV, the run's record, monitored values, the final table."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.data import plot_partition
from flsv.functional.shapley.undecided import times_to_tell_apart, told_apart
from flsv.loop.federation import FederationRun
from flsv.loop.learned import verdicts
from flsv.metrics import ContributionMetric
from flsv.report.folder import leaves_files, where_results_are
from flsv.report.progress import ProgressText
from flsv.report.record import ended, record_of, write_record
from flsv.report.reporter import Reporter
from flsv.round import Round
from flsv.server.description import chosen, settings

if TYPE_CHECKING:
    from flsv.loop.federated_loop import FederatedLoop
    from flsv.loop.fit import LightningFit


class RunReports:
    """Reports a fit, from its start on.

    Args:
        loop: whose rounds are reported.
        run: the fit.
        federation: the same, as rounds.
    """

    def __init__(self, loop: FederatedLoop, run: LightningFit, federation: FederationRun) -> None:
        self._loop, self._run, self._federation = loop, run, federation
        trainer, data, state = run.trainer, run.data, loop.state
        self._monitored: set[str] = set()
        self.reporter = Reporter(
            trainer,
            loop.metrics,
            data.client_names,
            data.class_names,
            loop.reporting,
            csv=run.files and trainer.is_global_zero,
            evaluated=loop.evaluation.every > 0,
        )
        self.reporter.folder = federation.engine.ranks.from_rank(0, self.reporter.folder, "the run's folder")
        partition = partial(plot_partition, data.class_counts, data.class_names, data.client_names)
        described = settings(loop.config, loop.metrics, data, state.seed)
        if self.reporter.csv is not None:
            roles = {**loop.strategies, "privacy": loop.config.privacy}
            known = loop.saver.identity.plain(), loop.round_index, version("flsv")
            self._record = record_of(trainer, data, loop.metrics, roles, described, *known) | self._found
            write_record(self.reporter.folder, self._record)
        columns = chosen(loop.strategies, data, state.seed, trainer.max_epochs)
        loop.saver.csv = self.reporter.begin(
            loop.round_index, loop.saver.csv, described, partition, loop.contributions, columns
        )
        self.progress = ProgressText(trainer)

    @property
    def _found(self) -> dict[str, Any]:
        """What turns out while a run runs, for its record."""
        state = self._loop.state
        elsewhere = {"run": state.run, "incidents": copy.deepcopy(state.incidents)} if state.run else {}
        return {
            "copies": self._loop.copies,
            "named": {str(who): list(rounds) for who, rounds in self._loop.named.items()},
            **elsewhere,
        }

    def record_found(self) -> None:
        """At once: a killed run's folder has to say it, too."""
        found = self._found
        if self.reporter.csv is not None and not found.items() <= self._record.items():
            self._record |= found
            write_record(self.reporter.folder, self._record)

    def round(self, round: Round) -> None:
        """A round is over."""
        loop, trainer = self._loop, self._run.trainer
        index = loop.round_index
        assert loop.weights is not None
        self.reporter.round(
            index,
            loop.contributions,
            loop.weights,
            losses={} if round.losses is None else dict(zip(round.client_ids.tolist(), round.losses.tolist())),
            norms=self._federation.server.norms,
            scores=loop.client_scores if self._federation.evaluated else {},
        )
        self.record_found()
        known, monitored = self.reporter.monitored(loop.weights, loop.client_scores), trainer.callback_metrics
        for name in self._monitored - known.keys():
            monitored.pop(name, None)
        monitored.update(known)
        self._monitored = set(known)
        if self.reporter.board.figures_due(index) and self._run.files:
            self._federation.engine.write_artifacts(round, self.reporter.folder / "clients")

    @property
    def _looks(self) -> bool:
        """Whether anybody is told what becomes of the model."""
        loop, trainer = self._loop, self._run.trainer
        told = loop.reporting.files or loop.reporting.table
        return told and bool(loop.metrics) and not trainer.fast_dev_run  # type: ignore[attr-defined]

    def look_at_start(self) -> None:
        """What the metrics' games share out, of the model before the first round."""
        loop, trainer = self._loop, self._run.trainer
        if loop.round_index == 0 and self._looks:
            found, _ = verdicts(trainer, self._run.data, self._federation, loop.state.model())
            loop.state.start = {name: verdict.value for name, verdict in found.items()}

    def _paid_in(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """For the run's record: by metric, what its game shares out, of the model at the run's start and now, the sum
        of the values, and whether the model is told apart from a constant answer; and why that is not known."""
        loop, trainer = self._loop, self._run.trainer
        if not self._looks:
            return {}
        found, unknown = verdicts(trainer, self._run.data, self._federation, loop.state.model())
        paid = {
            name: {
                "by": verdict.by,
                "start": loop.state.start.get(name),
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

    def _undecided(self) -> dict[str, Any]:
        """For the run's record: metrics whose sampled values tell no pair of clients apart, the evaluations that they
        have had, and those that would, see :mod:`flsv.functional.shapley.undecided`."""
        found = {}
        for name, value in self._loop.contributions.items() if self._looks else ():
            metric = self._loop.metrics[name]
            if not isinstance(metric, ContributionMetric):
                continue
            told = metric.diagnostics()
            if value.ndim != 1 or not {"stderr", "evaluations"} <= told.keys() or not bool((told["stderr"] > 0).any()):
                continue
            values, errors = value.cpu(), told["stderr"].cpu()
            known = int((values.isfinite() & errors.isfinite()).sum())
            freedom = float(torch.as_tensor(metric.error_freedom()).nan_to_num(nan=math.inf).min())
            if known > 1 and not told_apart(values, errors, freedom):
                spent, times = int(told["evaluations"]), times_to_tell_apart(values, errors, freedom)
                found[name] = {"evaluations": spent, "needed": math.ceil(spent * times)}
        return {"undecided": found} if found else {}

    def finish(self) -> None:
        """The fit is over."""
        loop, trainer = self._loop, self._run.trainer
        values = loop.contributions
        learned = {**self._paid_in(values), **self._undecided()}
        if self.reporter.csv is not None:
            write_record(self.reporter.folder, {**self._record, **ended(trainer, loop.round_index), **learned})
        known = self._run.data.num_samples, loop.participations, values, loop.weights, loop.client_scores
        self.reporter.finish(*known, last_round=max(loop.round_index - 1, 0))
        if loop.reporting.table and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            logged = ended(trainer, loop.round_index)["logged"]
            where = where_results_are(trainer) if leaves_files(trainer) and loop.reporting.files else ()
            self.progress.afterwards(partial(self.reporter.table, learned, logged, where))

    def cancel(self) -> None:
        """The fit has failed: there is no table."""
        self.progress.cancel()

    def close(self) -> None:
        self.progress.remove()
        self.reporter.board.close()
