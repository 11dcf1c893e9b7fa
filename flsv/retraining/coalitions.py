"""Coalitions: trains the coalitions that a run's metrics need, by steps before, between and after its rounds.

To train a coalition means to repeat the run with the coalition's members only.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv._lightning.data_source import data_of
from flsv.configuration.federation_config import FederationConfig
from flsv.core import Values
from flsv.core.ranks import ranks_of
from flsv.metrics.coalitions.design import MAX_VALUED_ROUNDS
from flsv.metrics.shadow import BEFORE_TRAINING, ShadowShapley
from flsv.retraining.after_the_run import NoValues
from flsv.retraining.at_sites import AtSites
from flsv.retraining.coalition_refusals import (
    check_sampler,
    check_settings,
    metrics_with_coalitions,
)
from flsv.retraining.fit_scoring import hash_of_start
from flsv.retraining.here import Here
from flsv.retraining.measured_run import MeasuredRun
from flsv.retraining.plan_in_words import (
    NO_COMMON_CLASS,
    are_all,
    estimation_in_words,
    rounding_in_words,
)
from flsv.retraining.price import (
    Choice,
    PriceList,
    Request,
    choose,
    max_valued_rounds,
    one_by_one,
)
from flsv.retraining.progress import showing_progress
from flsv.retraining.scored_run import FirstScore, ScoredRun
from flsv.sampling import FullParticipation
from flsv.server import ContributionMetrics
from flsv.values.query import are_singles_only

#: Values of metrics, ``{round: {metric: values}}``.
MetricValues = dict[int, dict[str, Values]]


class Coalitions:
    """The coalitions that a run trains for its metrics, from their choice to the metrics' values. A loop makes it if a
    metric has ``trains_coalitions``, and calls the methods in the order below.

    Args:
        config: the run's :class:`FederationConfig`.
        contribution_metrics: the run's metrics.

    Raises:
        ConfigurationError: coalitions cannot be trained in this run. All methods except :meth:`end_round` and
            :meth:`train` may raise it, too.
    """

    def __init__(self, config: FederationConfig, contribution_metrics: ContributionMetrics) -> None:
        self._config = config
        self._contribution_metrics = contribution_metrics
        self._metrics = metrics_with_coalitions(contribution_metrics)
        check_settings(config)
        self._request = Request.of(self._metrics)
        way = AtSites if _is_engine_of_sites(config.engine) else Here
        self._way: Here | AtSites = way(config, self._metrics, self._request)
        self._awaits_training = False
        # In a fit: the MeasuredRun, the Choice of the coalitions to train, and all scores.
        self._run: Any = None
        self._choice: Any = None
        self._scored: ScoredRun | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the parts that belong to the present fit."""
        return {**vars(self), "_run": None, "_scored": None}

    @property
    def awaits_training(self) -> bool:
        """Whether coalitions are still to be trained for values of the fit's rounds."""
        return self._awaits_training and bool(self._valued_metrics)

    @property
    def _valued_metrics(self) -> Mapping[str, ShadowShapley]:
        """The metrics whose updates have not failed in the run."""
        missing = self._contribution_metrics.missing
        return {name: metric for name, metric in self._metrics.items() if name not in missing}

    # ---- before the first round

    def prepare(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Copy the run before its fit, and make a dry run of a coalition. Their errors are raised by
        :meth:`begin_training`."""
        num_clients = data_of(trainer).num_clients
        choice = one_by_one(self._request, PriceList([1] * num_clients, num_clients))
        check_sampler(self._config.sampler, choice.design.planned_masks(num_clients))
        self._way.prepare(trainer, module)

    def begin(self, federation: Any, run_state: Any, folder: Path | None) -> None:
        """Check the run before its first round. If sites train coalitions, add the strategy that requests this."""
        self._run = MeasuredRun(federation, run_state, folder)
        self._choice = None
        self._scored = None
        self._awaits_training = True
        for metric in self._metrics.values():
            metric.await_training()
        self._way.begin(self._run, self._choose)

    def _choose(self, prices: PriceList) -> Choice:
        """Choose the coalitions to train, once in a fit. A resumed run, whose request is the same, keeps its choice, if
        it was made before its checkpoint.
        """
        if self._choice is not None:
            return self._choice
        memory = self._run.memory
        if self._run.resumed and "choice" in memory:
            choice = Choice.of_record(memory["choice"], self._request.design)
        else:
            choice = choose(self._request, prices)
        if choice.is_at_once:
            choice = choice._replace(fallback=one_by_one(self._request, prices))
        self._choice = choice
        memory["choice"] = choice.record(self._run.data.num_clients)
        return choice

    def begin_training(self) -> None:
        """Score the untrained module, and log which coalitions will be trained and at what cost."""
        first = self._open()
        if not self._way.begin_training(self._run):
            return
        masks = self._masks
        measures = [metric.measure for metric in self._metrics.values()]
        have_outputs = all(map(self._run.games.output_measure, measures))
        words = estimation_in_words(masks, have_outputs)
        words += self._way.duration_in_words(self._run, self._choice, masks, self._metrics, first)
        rank_zero_info(f"flsv: {self._plan_in_words(masks)}{words}")

    def _open(self) -> FirstScore:
        """Score the run's module, choose the coalitions, and open the store of their scores."""
        run = self._run
        self._request = self._request.with_halves(self._metrics, run.games)
        first = FirstScore.of(run, self._metrics)
        self._way.check()
        if not run.resumed:
            run.memory["start"] = hash_of_start(run.trainer.lightning_module)
        prices = self._way.prices(run, first.model.outputs)
        choice = self._choose(prices)
        self._scored = ScoredRun(run, self._metrics, first, choice)
        limit = MAX_VALUED_ROUNDS  # if clients score models, there are no outputs
        for outputs in first.model.outputs.values():
            limit = max_valued_rounds(self._config, run, choice, prices, len(outputs))
        averages = not isinstance(self._config.sampler, FullParticipation)
        for metric in self._metrics.values():
            metric.plan_rounds(averages, limit)
        if run.resumed and self._way.scores_each_round and run.num_rounds > 0:
            # If the run was killed, the utilities of its last round may not have been stored.
            self.end_round(run.num_rounds - 1, is_run_over=True)
        return first

    @property
    def _masks(self) -> Tensor:
        """Coalitions ``[K, n]`` with the number and the sizes of those that are trained."""
        return self._choice.design.planned_masks(self._run.data.num_clients)

    def _plan_in_words(self, masks: Tensor) -> str:
        plan = self._way.plan_in_words(self._run, self._choice, masks)
        return f"{', '.join(self._metrics)}: {plan}"

    # ---- between rounds

    def end_round(self, index: int, is_run_over: bool) -> None:
        """Store the scores of the run's model, which is that of all clients, and of models of coalitions at sites."""
        if self._scored is None or not self._valued_metrics:
            return
        self._way.end_round(self._run, index)
        # The last round's model is scored at the end of the run, after all hooks.
        is_last = index + 1 == self._run.trainer.max_epochs
        if is_run_over or (not is_last and self._is_due(index)):
            for members, model in self._way.scored_models(self._scored):
                self._scored.add(members, {index: model})

    def _is_due(self, index: int) -> bool:
        """Return whether a round's models are scored even if it is not the last."""
        metrics = self._metrics.values()
        # A run may end early, and its values may be means over its last rounds.
        may_be_last = self._way.scores_each_round and any(metric.averages for metric in metrics)
        return may_be_last or any(metric.is_due(index) for metric in metrics)

    # ---- after the last round

    def train(self) -> tuple[MetricValues, list[str]]:
        """Train the coalitions if metrics need them, and return the metrics' values and lines to print."""
        values: MetricValues = {}
        if self.awaits_training:
            try:
                values = self._values()
                self._awaits_training = False
            except NoValues as reason:
                self._explain_missing(f"{reason}", reason.interrupted)
            except Exception as error:  # the run's other results are written in any case
                if ranks_of(self._run.trainer).size > 1:
                    raise  # the other ranks would wait for this one
                self._explain_missing(_error_in_words(error))
        if self._scored is not None:
            self._scored.store.write_table(self._run.data.client_names)
        return values, self._lines()

    def _values(self) -> MetricValues:
        if self._scored is None:  # a resumed run in which no round was left
            self._open()
        assert self._scored is not None
        metrics = self._valued_metrics
        self._scored.value_rounds(metrics.values())
        self._choice, masks = self._way.train(self._scored, metrics, self._choice)
        self._run.memory["choice"] = self._choice.record(self._run.data.num_clients)

        store = self._scored.store
        values: MetricValues = {index: {} for index in store.rounds}
        scores = store.scores(self._run.seed)
        for name, metric in metrics.items():
            game = showing_progress(self._scored.game(metric, masks), self._run.trainer)
            for round_index, values_of_round in metric.complete(scores, game).items():
                values[round_index][name] = values_of_round
        return values

    def _explain_missing(self, reason: str, interrupted: bool = False) -> None:
        evidence = {"unfinished": True, "interrupted": interrupted}
        for name, metric in self._valued_metrics.items():
            metric.take(replace(metric.result().without(reason), evidence=evidence))
            self._contribution_metrics.values[name] = metric.result()
        rank_zero_warn(f"{', '.join(self._valued_metrics)}: there are no values. {reason}")

    def _lines(self) -> list[str]:
        metrics = self._valued_metrics
        if self.awaits_training or not metrics:
            return [f"{name}: {BEFORE_TRAINING}" for name in metrics]
        masks = self._masks
        lines = [self._plan_in_words(masks), *rounding_in_words(metrics)]
        trains_singles_only = are_singles_only(masks) and not are_all(masks)
        if trains_singles_only and self._way.shares_no_class(self._run):
            lines.append(f"{', '.join(metrics)}: {NO_COMMON_CLASS}")
        return lines

    def close(self) -> None:
        """Undo what :meth:`prepare` has changed in the process. This is called when the fit has ended or failed."""
        self._way.close()


def _is_engine_of_sites(engine: Any) -> bool:
    """Return whether the clients of an engine, as :class:`FederatedLoop` gets it, train at sites."""
    engine_class = getattr(engine, "func", engine)  # of a partial function
    return not getattr(engine_class, "clients_here", True)


def _error_in_words(error: Exception) -> str:
    innermost_frame = traceback.extract_tb(error.__traceback__)[-1]
    file_and_line = f"{Path(innermost_frame.filename).name}:{innermost_frame.lineno}"
    description = f"{type(error).__name__} at {file_and_line}: {error}"
    return f"{description}. flsv retrain trains the coalitions."
