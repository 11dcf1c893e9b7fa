"""ScoredRun: the scored models of a run and of its coalitions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from flsv._lightning.patches import callbacks_of, find_loop
from flsv.core.ranks import ranks_of
from flsv.functional.shapley.predicted_outputs import favors_nobody
from flsv.games.coalition_utility import utility_of
from flsv.games.members import EMPTY, Members
from flsv.games.untrained_models import NUM_UNTRAINED_MODELS, untrained_models
from flsv.metrics.coalitions.design import MAX_VALUED_ROUNDS
from flsv.metrics.shadow import ShadowShapley
from flsv.retraining.coalition_fit import metrics_in_use, only_watches_clients
from flsv.retraining.coalition_refusals import check_scored
from flsv.retraining.coalition_store import CoalitionStore
from flsv.retraining.measured_run import MeasuredRun
from flsv.retraining.price import Choice
from flsv.retraining.scoring import ModelScoring
from flsv.scores.performance import CLASSIFICATION, Measure, classifier_measure
from flsv.values.coalition_files import (
    COALITIONS_FOLDER,
    NO_ROUND,
    Models,
    ScoredModel,
    copy_coalitions,
    measure_name,
    outputs_name,
    remove_coalitions,
)
from flsv.values.query import Game

#: The largest number of output elements that are stored if all coalitions are trained. They then serve for the values'
#: standard errors only.
MAX_STORED_OUTPUTS = 2**24


class FirstScore(NamedTuple):
    """The score of the run's module before the first round of a fit."""

    scoring: ModelScoring
    model: ScoredModel
    seconds: float

    @classmethod
    def of(cls, run: MeasuredRun, metrics: Mapping[str, ShadowShapley]) -> FirstScore:
        """Score a run's module by the measures of metrics.

        Raises:
            ConfigurationError: the server would score models of which it does not have all parameters, or a score of
                the untrained module is not finite.
        """
        measures = {f"metric {name!r}": metric.measure for name, metric in metrics.items()}
        for title, measure in measures.items():
            check_scored(title, run.federation.config.share, run.games.evaluator_of(measure))
        scoring = ModelScoring(measures_of(metrics.values()), run.games.evaluator_of)
        measures_to_check = None if run.resumed else measures
        start_time = time.monotonic()
        model = scoring.score(run.trainer.lightning_module, untrained=measures_to_check)
        return cls(scoring, model, seconds=time.monotonic() - start_time)


class ScoredRun:
    """The scored models of a run and of the coalitions that it may train.

    Args:
        run: the run.
        metrics: the metrics that need coalitions, by name.
        first: the score of the run's module. If it is untrained, this and scores of other untrained models are added.
        choice: the coalitions to train. Stored coalitions of other settings are removed.
    """

    def __init__(
        self,
        run: MeasuredRun,
        metrics: Mapping[str, ShadowShapley],
        first: FirstScore,
        choice: Choice,
    ) -> None:
        self.run = run
        self.scoring = first.scoring
        self.measures = measures_of(metrics.values())
        self._metrics = metrics
        self._outputs = first.model.outputs
        _prepare_folder(run)
        self.store = CoalitionStore(
            run.folder,
            list(self.measures),
            settings={**_settings_of_training(run), "run": run.memory["start"]},
            ranks=ranks_of(run.trainer),
            outputs=self._measures_with_outputs(choice),
        )
        if not run.resumed:
            run.memory["untrained"] = self._scores_of_untrained()
        self.store.add_untrained(run.memory.get("untrained", {}))
        if not run.resumed:
            self.add(EMPTY, {NO_ROUND: first.model})

    def _measures_with_outputs(self, choice: Choice) -> set[str]:
        """Return the names of the measures of which the outputs of coalitions that may be trained are stored. If all
        are trained one by one, outputs that are large are not.
        """
        masks = choice.design.masks(self.run.data.num_clients)
        names: set[str] = set()
        if choice.fallback is not None:
            names |= self._measures_with_outputs(choice.fallback)
        if not favors_nobody(masks):  # values are computed from outputs for no other coalitions
            return names
        for metric in self._metrics.values():
            name = outputs_name(metric.measure)
            has_measure = self.run.games.output_measure(metric.measure) is not None
            if name not in self._outputs or not has_measure:
                continue
            if choice.is_at_once or _stores_outputs(metric, masks, self._outputs[name]):
                names.add(name)
        return names

    def _scores_of_untrained(self) -> dict[str, Tensor]:
        """Score models with other initial weights, unless clients score models. Return their utilities by measure."""
        run = self.run
        build = untrained_models(run.trainer.lightning_module, run.federation.space, run.seed)
        scores: dict[str, Tensor] = {}
        if build is None:
            return scores
        for metric in self._metrics.values():
            if metric.evaluators == "server":
                evaluator = run.games.evaluator_of(metric.measure)
                utilities = utility_of(
                    evaluator.evaluate(build, NUM_UNTRAINED_MODELS), metric.measure
                )
                in_rows = utilities.cpu().double().view(NUM_UNTRAINED_MODELS, -1)
                scores[measure_name(metric.measure)] = in_rows
        return scores

    def add(self, members: Members, models: Models) -> None:
        """Add models of a coalition, ``{round: model}``."""
        self.store.add(self.run.seed, members, models)

    def game(self, metric: ShadowShapley, masks: Tensor) -> Game:
        """Return the game of a metric, of the coalitions ``masks [K, n]`` after those of the store's rounds in which
        the metric has values.
        """
        store = self.store
        due_rounds = metric.rounds_to_value(store.rounds[-1] + 1)
        rounds = [round_index for round_index in store.rounds if round_index in due_rounds]
        of_outputs = None
        if outputs_name(metric.measure) in store.measures_with_outputs:
            of_outputs = self.run.games.output_measure(metric.measure)
        return metric.game(masks, rounds, weights=self.run.weights, of_outputs=of_outputs)

    def value_rounds(self, metrics: Iterable[ShadowShapley]) -> None:
        """Set the rounds after which coalitions are scored: those after which ``metrics`` have values."""
        rounds = chain.from_iterable(
            metric.rounds_to_value(self.run.num_rounds) for metric in metrics
        )
        self.store.rounds = sorted(set(rounds))


def measures_of(metrics: Iterable[ShadowShapley]) -> dict[str, Measure]:
    """Return the performance measures by which the metrics score coalitions' models, ``{name: measure}``."""
    measures = {measure_name(metric.measure): metric.measure for metric in metrics}
    # If one is a measure of a classifier, all of these are added, since flsv retrain reports shares by each of them.
    if any(name in CLASSIFICATION for name in measures):
        measures |= {name: classifier_measure(name) for name in CLASSIFICATION}
    return measures


def _prepare_folder(run: MeasuredRun) -> None:
    """Remove the coalitions of an earlier run. If a resumed run has a new folder, copy its coalitions into it."""
    if run.folder is None:
        return
    if not run.resumed and run.trainer.is_global_zero:
        remove_coalitions(run.folder)
    earlier_folder = run.memory.get("folder")
    run.memory["folder"] = str(run.folder.absolute())
    if earlier_folder is None or not run.trainer.is_global_zero:
        return
    has_coalitions = (run.folder / COALITIONS_FOLDER).exists()
    if not has_coalitions:
        copy_coalitions(Path(earlier_folder), run.folder)


def _stores_outputs(metric: ShadowShapley, masks: Tensor, outputs: Tensor) -> bool:
    """Return whether coalitions' outputs are stored, of which each model's are as large as ``outputs``."""
    num_coalitions, num_clients = masks.shape
    if num_coalitions < 2**num_clients:
        return True
    # If all coalitions are trained, outputs are stored for the values' standard errors only, if they are small.
    num_elements = num_coalitions * MAX_VALUED_ROUNDS * outputs.numel()
    return not metric.per_class and num_elements <= MAX_STORED_OUTPUTS


def _settings_of_training(run: MeasuredRun) -> dict[str, str]:
    """Return the run's settings on which training depends: all except those of metrics that no strategy reads, and of
    a client algorithm that only watches.
    """
    loop: Any = find_loop(callbacks_of(run.trainer))
    names_in_use = [f"federation.metrics.{name}" for name in metrics_in_use(loop)]
    unused_prefixes = ["federation.metrics."]
    if only_watches_clients(loop):
        unused_prefixes.append("federation.client_algorithm")
    settings = {}
    for name, text in run.settings.items():
        is_used = not name.startswith(tuple(unused_prefixes)) or name in names_in_use
        if is_used:
            settings[name] = text
    return settings
