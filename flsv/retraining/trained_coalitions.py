"""TrainedCoalitions: trains the coalitions that a run's metrics need, by steps before, between and after its rounds.

To train a coalition means to repeat the run with the coalition's members only. Sites train coalitions beside the run.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv._lightning.data_source import data_of
from flsv.configuration.federation_config import FederationConfig
from flsv.core import FederationState, Values
from flsv.core.ranks import ranks_of
from flsv.data import FederatedDataModule
from flsv.engines.ranks import share_weights
from flsv.games.coalition_utility import utility_of
from flsv.games.members import EMPTY, Members, members_of
from flsv.games.untrained_models import NUM_UNTRAINED_MODELS, untrained_models
from flsv.metrics.coalitions.design import (
    NO_OUTPUTS_FOR_HALVES,
    coalition_masks,
    equivalent_runs,
    num_valued_rounds,
    with_any_halves,
)
from flsv.metrics.shadow import BEFORE_TRAINING, ShadowShapley
from flsv.retraining.after_the_run import (
    NoValues,
    TrainingAfterTheRun,
    game_of,
    measures_of,
    open_store,
)
from flsv.retraining.coalition_fit import hash_of_start
from flsv.retraining.coalition_refusals import (
    check_scored,
    check_settings,
    check_shared,
    checked_mean_cohort,
    excluded_callbacks,
    fitted_before,
    hidden_engine_of_sites,
    metrics_with_coalitions,
)
from flsv.retraining.coalition_store import CoalitionStore
from flsv.retraining.copied_fits import CopyOfRun
from flsv.retraining.dry_run import DryRunResult, NotRepeatable, client_of_dry_run, dry_run
from flsv.retraining.measured_run import MeasuredRun
from flsv.retraining.plan_in_words import (
    NO_COMMON_CLASS,
    are_all,
    coalitions_in_words,
    estimation_in_words,
    rounding_in_words,
    witnesses_in_words,
)
from flsv.retraining.price import (
    MAX_HALVINGS,
    NO_TRIAL,
    Choice,
    PriceList,
    Request,
    choose,
    one_by_one,
    price_list,
)
from flsv.retraining.progress import seconds_of_values, showing_progress
from flsv.retraining.scoring import ModelScoring
from flsv.sampling import FullParticipation
from flsv.server import ContributionMetrics
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.wings import from_wing
from flsv.values.coalition_files import (
    COALITIONS_FOLDER,
    NO_ROUND,
    Models,
    Outputs,
    ScoredModel,
    copy_coalitions,
    measure_name,
    remove_coalitions,
)
from flsv.values.query import are_singles_only

#: The number of first rounds of the run that the coalition of all clients trains again, to check the training of
#: coalitions. The second one begins after a validation.
NUM_VERIFIED_ROUNDS = 2
#: A fit says how long scoring and values take if it is at least this long, in seconds.
LONG_SECONDS = 10.0

#: Values of metrics, ``{round: {metric: values}}``.
MetricValues = dict[int, dict[str, Values]]


class TrainedCoalitions:
    """The coalitions that a run trains for its metrics, from their choice to the metrics' values.

    A loop makes it if one of its metrics has ``trains_coalitions``, and calls the methods in the order below.

    Args:
        config: the run's :class:`FederationConfig`.
        contribution_metrics: the run's metrics.

    Raises:
        ConfigurationError: coalitions cannot be trained in this run. All methods except :meth:`end_round` and
            :meth:`train` may raise it, too.
    """

    # The copy from before the fit, and the result of its dry run.
    _run_copy: CopyOfRun | None = None
    _dry_run_result: DryRunResult | None = None
    # The error of copy or dry run, which is raised later.
    _failure: ConfigurationError | None = None
    _why_no_values = ""
    _awaits_training = False
    _mean_cohort_size: float | None = None
    # What the coalitions cost, and which of them are trained, from :meth:`prepare` on.
    _prices: PriceList | None = None
    _choice: Choice
    # Whether no two clients have a class in common. False if the server must not know it.
    _shares_no_class = False
    # The run, and the scoring of its models, from :meth:`begin` on.
    _run: MeasuredRun
    _scoring: ModelScoring | None = None
    # Which clients were trained at once with others and also alone.
    _about_witnesses = ""
    # Why coalitions that were to be trained at once were not.
    _why_not_after_all = ""
    # When this fit has begun its first round, and the round's index.
    _start_time = 0.0
    _first_timed_round = 0
    # The seconds that the scoring of the untrained model has taken.
    _seconds_per_score = 0.0
    # The coalitions' utilities, from the run's first round on.
    _store: CoalitionStore | None = None
    # The CoalitionsAtSites of flsv.sites, if sites train them beside the run.
    _sites: Any = None

    def __init__(self, config: FederationConfig, contribution_metrics: ContributionMetrics) -> None:
        self.config = config
        self._contribution_metrics = contribution_metrics
        self._metrics = metrics_with_coalitions(contribution_metrics)
        check_settings(config)
        self._trains_at_sites = _is_engine_of_sites(config.engine)
        metrics = list(self._metrics.values())
        limits = [metric.max_fits for metric in metrics if metric.max_fits is not None]
        design = metrics[0].coalitions
        num_halvings = metrics[0].num_halvings
        self._request = Request(
            design,
            max_fits=min(limits, default=None),
            halvings=num_halvings if design == "halves" else 0,
        )
        for metric in metrics:
            if metric.coalitions != design or metric.num_halvings != num_halvings:
                raise ConfigurationError(
                    f"The metrics {list(self._metrics)} need different coalitions, but a run trains one set of "
                    "coalitions. Give these metrics the same coalitions, or keep only one of them."
                )
        # Names of the classes of callbacks that take no part in coalitions.
        self._excluded: list[str] = []
        self._untrained_outputs: Outputs = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the parts that belong to the present fit."""
        return {
            **vars(self),
            "_run": None,
            "_scoring": None,
            "_sites": None,
            "_untrained_outputs": {},
        }

    @property
    def awaits_training(self) -> bool:
        """Whether coalitions are still to be trained for values of the fit's rounds."""
        return self._awaits_training and bool(self._valued_metrics)

    # ---- before the first round

    def prepare(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Copy the run before its fit, and make a dry run of a coalition. Their errors are raised by
        :meth:`begin_training`."""
        data: FederatedDataModule = data_of(trainer)
        excluded = excluded_callbacks(trainer, self._metrics.values(), self._trains_at_sites)
        self._choice = one_by_one(
            self._request, PriceList([1] * data.num_clients, data.num_clients)
        )
        self._mean_cohort_size = checked_mean_cohort(
            self.config.sampler, self._planned_masks, data.num_clients
        )
        if self._trains_at_sites:
            from_wing("coalitions", "sites").check_at_sites(self.config)
            return
        if trainer.current_epoch > 0:
            raise fitted_before(trainer.current_epoch)
        self._excluded = [type(callback).__name__ for callback in excluded]
        client = client_of_dry_run(data)
        ranks = ranks_of(trainer)
        if ranks.size > 1:  # without a seed, each rank has drawn other weights
            share_weights(module, ranks)
        try:
            self._run_copy = CopyOfRun(trainer, module, data, excluded)
            self._run_copy.folder.begin_run()
            self._dry_run_result = dry_run(
                self._run_copy,
                trainer,
                client,
                seed=self.config.seed or 0,
                tries_rows=self._may_train_at_once,
            )
        except NotRepeatable as error:  # the run continues without values
            self._why_no_values = f"{error}"
        except ConfigurationError as error:  # raised after other checks, whose errors say more
            self._failure = error

    def begin(self, federation: Any, run_state: Any, folder: Path | None) -> None:
        """Check the run before its first round. If sites train coalitions, add the strategy that requests this."""
        if not federation.engine.clients_here and not self._trains_at_sites:
            raise hidden_engine_of_sites(type(federation.engine).__name__)
        self._run = MeasuredRun(federation, run_state, folder)
        self._scoring = None
        self._awaits_training = True
        may_count_classes = not self._trains_at_sites and not self.config.is_private
        self._shares_no_class = may_count_classes and _shares_no_class(self._run.data.class_counts)
        for metric in self._metrics.values():
            metric.await_training()
            metric.averages = not isinstance(self.config.sampler, FullParticipation)
        if self._trains_at_sites:
            self._begin_at_sites()

    def _begin_at_sites(self) -> None:
        run = self._run
        num_clients = run.data.num_clients
        self._choose(PriceList([1] * num_clients, self._mean_cohort_size or num_clients))
        federation = run.federation
        module = run.trainer.lightning_module
        check_shared(self.config, module)
        coalitions_at_sites = from_wing("coalitions", "sites")
        self._sites = coalitions_at_sites.CoalitionsAtSites(
            self._planned_masks(run.data.num_clients),
            replace(federation.info(), global_vector=federation.space.read(module)),
            federation.engine,
            memory=run.memory,
            consistency_warnings=federation.coalition_differences,
            halvings=self._choice.halvings,
        )
        federation.server.strategies.append(self._sites)

    def masks(self, num_clients: int) -> Tensor:
        """Return the K coalitions that are trained first, bool ``[K, n]``. The first two are the empty coalition and
        that of all clients. Halves are not among them, since they are chosen later.
        """
        return coalition_masks(self._choice.design, num_clients)

    def _planned_masks(self, num_clients: int) -> Tensor:
        """Return coalitions ``[K, n]`` with the number and the sizes of those that will be trained."""
        masks = self.masks(num_clients)
        if self._choice.halvings:
            return with_any_halves(masks, self._choice.halvings)
        return masks

    def _choose(self, prices: PriceList) -> None:
        """Choose the coalitions to train. A resumed run, whose request is the same, keeps its choice, if it was made
        before its checkpoint.
        """
        memory = self._run.memory
        self._prices = prices
        if self._run.resumed and "choice" in memory:
            self._choice = Choice(*memory["choice"])
        else:
            self._choice = choose(self._request, prices)
        memory["choice"] = list(self._choice)

    # ---- messages, scores of the run's own models

    def begin_training(self) -> None:
        """Score the untrained module, and log which coalitions will be trained and at what cost."""
        self._open_store()
        self._start_time = time.monotonic()
        self._first_timed_round = self._run.federation.state.round_index
        if self._why_no_values:
            rank_zero_warn(
                f"{', '.join(self._metrics)}: there will be no values. {self._why_no_values}"
            )
            return
        masks = self._planned_masks(self._run.data.num_clients)
        plan = self._plan_in_words(masks)
        have_outputs = all(
            self._run.games.output_measure(metric.measure) for metric in self._metrics.values()
        )
        estimation = estimation_in_words(masks, have_outputs)
        duration = self._duration_in_words(masks)
        self._untrained_outputs = {}
        rank_zero_info(f"flsv: {plan}{estimation}{duration}")

    def _duration_in_words(self, masks: Tensor) -> str:
        """Say how long the scoring of all models and the values take, if it is long, by the score of one model."""
        if self._trains_at_sites:
            return ""
        if self._choice.is_at_once:  # the scores are part of its price
            return ""
        # Seconds. Metrics share the scored models, but not the computation of values.
        scoring = 0.0
        estimation = 0.0
        for metric in self._metrics.values():
            num_rounds = len(metric.rounds_to_value(self._run.trainer.max_epochs or 1))
            scoring = max(scoring, len(masks) * num_rounds * self._seconds_per_score)
            of_outputs = self._run.games.output_measure(metric.measure)
            game = metric.game(masks, range(num_rounds), self._run.weights, of_outputs)
            estimation += seconds_of_values(game, self._untrained_outputs)
        if scoring + estimation < LONG_SECONDS:
            return ""
        return f" Scoring these models takes about {scoring:.0f} s, and computing the values {estimation:.0f} s."

    def _open_store(self) -> None:
        """Open the store of coalitions' utilities. At the start of a new run, add those of the untrained module."""
        is_new_run = not self._run.resumed
        self._check_outputs(self._run.games)
        scored_module = self._score_module()
        if self._failure is not None:
            raise self._failure
        if is_new_run:
            self._run.memory["start"] = hash_of_start(self._run.trainer.lightning_module)
            if self._run.trainer.is_global_zero and self._run.folder is not None:
                remove_coalitions(self._run.folder)
        self._copy_from_earlier_folder()
        if not self._trains_at_sites:
            trial = NO_TRIAL  # there will be no values
            if self._dry_run_result is not None:
                trial = self._dry_run_result.rows_or_reason()
            run = self._run
            prices = price_list(
                self.config, run, self._mean_cohort_size, trial, scored_module.outputs
            )
            self._choose(prices)
        self._store = open_store(
            self._run,
            self._metrics,
            [self._choice, self._fallback()],
            start_hash=self._run.memory["start"],
            outputs=scored_module.outputs,
        )
        for outputs in scored_module.outputs.values():  # none if clients score models
            self._limit_valued_rounds(num_validation_samples=len(outputs))
        self._score_untrained()

        num_rounds = self._run.federation.state.round_index
        if is_new_run:
            self._add(EMPTY, {NO_ROUND: scored_module})
        elif self._trains_at_sites and num_rounds > 0:
            # If the run was killed, the utilities of its last round may not have been stored.
            self.end_round(num_rounds - 1, is_run_over=True)

    def _score_module(self) -> ScoredModel:
        """Score the run's module, and measure how long it takes. Check the scores of a module that is not trained."""
        measures = {}
        for name, metric in self._metrics.items():
            evaluator = self._run.games.evaluator_of(metric.measure)
            check_scored(f"metric {name!r}", self.config.share, evaluator)
            measures[f"metric {name!r}"] = metric.measure
        self._scoring = ModelScoring(
            measures_of(self._metrics.values()), self._run.games.evaluator_of
        )
        measures_to_check = None if self._run.resumed else measures
        start_time = time.monotonic()
        model = self._scoring.score(self._run.trainer.lightning_module, untrained=measures_to_check)
        self._seconds_per_score = time.monotonic() - start_time
        self._untrained_outputs = model.outputs
        return model

    def _limit_valued_rounds(self, num_validation_samples: int) -> None:
        """Let metrics have values after fewer rounds if scoring all coalitions' models takes long beside training."""
        assert self._prices is not None
        masks = self._planned_masks(self._run.data.num_clients)
        if self._choice.is_at_once:
            max_valued_rounds = self._prices.num_valued_rounds(masks)
        else:
            num_scored = len(masks) * num_validation_samples
            max_valued_rounds = num_valued_rounds(self._num_trained_samples(masks), num_scored)
        for metric in self._metrics.values():
            metric.max_valued_rounds = max_valued_rounds

    def _num_trained_samples(self, masks: Tensor) -> float:
        """Return about how many samples the training of the coalitions ``masks`` passes through the module."""
        data = self._run.data
        sizes = masks.sum(1)
        # The empty coalition and that of all clients are not trained.
        trained_sizes = sizes[(sizes > 0) & (sizes < data.num_clients)]
        cohort_sizes = trained_sizes.clamp_max(self._mean_cohort_size or data.num_clients)
        trainings_per_round = cohort_sizes.sum()  # of one client, in all coalitions

        # A local training of a number of steps counts as an epoch.
        num_epochs = [self.config.work_of(name).epochs or 1 for name in data.client_names]
        samples_per_training = (data.num_samples * torch.tensor(num_epochs)).double().mean()
        num_rounds = self._run.trainer.max_epochs or 0
        return float(num_rounds * trainings_per_round * samples_per_training)

    def _score_untrained(self) -> None:
        """Before the first round, score models with other initial weights, unless clients score models."""
        assert self._store is not None
        if not self._run.resumed:
            self._run.memory["untrained"] = {}
            module = self._run.trainer.lightning_module
            build = untrained_models(module, self._run.federation.space, self._run.seed)
            for metric in self._metrics.values():
                if build is not None and metric.evaluators == "server":
                    evaluator = self._run.games.evaluator_of(metric.measure)
                    scores = evaluator.evaluate(build, NUM_UNTRAINED_MODELS)
                    utilities = utility_of(scores, metric.measure).cpu().double()
                    name = measure_name(metric.measure)
                    self._run.memory["untrained"][name] = utilities.view(NUM_UNTRAINED_MODELS, -1)
        self._store.add_untrained(self._run.memory.get("untrained", {}))

    def _check_outputs(self, games: Any) -> None:
        """Raise ConfigurationError if halves cannot be chosen. With ``"auto"`` they are considered if they can."""
        asked_for = self._request.coalitions
        if asked_for not in ("auto", "halves"):
            return
        for name, metric in self._metrics.items():
            has_outputs = games.output_measure(metric.measure) is not None
            if has_outputs and metric.evaluators == "server":
                continue
            if asked_for == "auto":
                return
            raise ConfigurationError(f"metric {name!r}: {NO_OUTPUTS_FOR_HALVES}")
        if asked_for == "auto":
            self._request = replace(self._request, halvings=MAX_HALVINGS)

    def _copy_from_earlier_folder(self) -> None:
        """If a resumed run has a new folder, copy the coalitions from its earlier folder."""
        if self._run.folder is None:
            return
        earlier_folder = self._run.memory.get("folder")
        self._run.memory["folder"] = str(self._run.folder.absolute())
        if earlier_folder is None or not self._run.trainer.is_global_zero:
            return
        has_coalitions = (self._run.folder / COALITIONS_FOLDER).exists()
        if not has_coalitions:
            copy_coalitions(Path(earlier_folder), self._run.folder)

    def _plan_in_words(self, masks: Tensor) -> str:
        is_halved = self._choice.halvings > 0
        coalitions = f"{', '.join(self._metrics)}: {coalitions_in_words(masks, is_halved)} trained"
        if self._trains_at_sites:
            return f"{coalitions} by the sites, beside the run."

        excluded = f", without {listed(self._excluded)}" if self._excluded else ""
        if self._choice.is_at_once:
            num_groups = len(masks) - 2
            price = f"{self._choice.price:.2g}"
            return (
                f"{', '.join(self._metrics)}: {num_groups} groups of clients are trained at once after the "
                f"run{excluded} (as long as about {price} more fits)."
            )
        num_fits = equivalent_runs(masks, self._mean_cohort_size)
        fits = "fit" if num_fits == 1 else "fits"
        num_validations = len(masks) - 2  # the empty and the full coalition are not trained
        cost = f"as long as {num_fits:.3g} more {fits}, and {num_validations} validations"
        return f"{coalitions} after the run{excluded} ({cost}).{self._why_not_at_once()}"

    def _why_not_at_once(self) -> str:
        """Say why coalitions cannot be trained at once, if rows were tried."""
        assert self._prices is not None
        reason = self._why_not_after_all or self._prices.trial.why_not
        if not reason or not self._may_train_at_once:
            return ""
        return f" Groups of clients cannot be trained at once: {reason}"

    @property
    def _may_train_at_once(self) -> bool:
        return self._request.coalitions not in ("singles", "halves")

    def _lines(self, masks: Tensor) -> list[str]:
        metrics = self._valued_metrics
        if self.awaits_training or not metrics:
            return [f"{name}: {BEFORE_TRAINING}" for name in metrics]

        lines = [self._plan_in_words(masks) + self._about_witnesses]
        lines += rounding_in_words(metrics)
        trains_singles_only = are_singles_only(masks) and not are_all(masks)
        if trains_singles_only and self._shares_no_class:
            lines.append(f"{', '.join(metrics)}: {NO_COMMON_CLASS}")
        return lines

    def end_round(self, index: int, is_run_over: bool) -> None:
        """Store the scores of the run's model, which is that of the coalition of all clients, and of the models that
        sites have trained.
        """
        if self._scoring is None or not self._valued_metrics:
            return
        state: FederationState = self._run.federation.state
        trainer = self._run.federation.engine.trainer
        if not self._trains_at_sites and index < NUM_VERIFIED_ROUNDS:
            self._run.memory["checked_round"] = index
            self._run.memory["first"] = (
                state.model().cpu().clone()
            )  # the model after the checked round

        # The last round's model is scored at the end of the run, after all hooks.
        is_last = index + 1 == trainer.max_epochs
        if is_run_over or (not is_last and self._is_due(index)):
            self._add_scores_of_round(index, self._scoring, trainer.lightning_module)

    def _add_scores_of_round(self, index: int, scoring: ModelScoring, module: Any) -> None:
        state = self._run.federation.state
        all_clients = tuple(range(state.num_clients))
        if self._sites is None:
            self._add(all_clients, {index: scoring.score(module)})
            return
        models = {**self._sites.models(), all_clients: state.model()}
        scored_models = scoring.score_vectors(list(models.values()))
        for members, scored_model in zip(models, scored_models):
            self._add(members, {index: scored_model})

    def _is_due(self, index: int) -> bool:
        """Return whether a round's models are scored even if it is not the last."""
        metrics = self._metrics.values()
        # A run may end early, and its values may be means over its last rounds, which sites cannot train again.
        if self._trains_at_sites and any(metric.averages for metric in metrics):
            return True
        return any(metric.is_due(index) for metric in metrics)

    def _add(self, members: Members, models: Models) -> None:
        assert self._store is not None
        self._store.add(self._run.federation.state.seed, members, models)

    # ---- after the last round

    @property
    def _valued_metrics(self) -> dict[str, ShadowShapley]:
        """Return the metrics whose updates have not failed in the run."""
        missing = self._contribution_metrics.missing
        return {name: metric for name, metric in self._metrics.items() if name not in missing}

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
        if self._store is not None:
            self._store.write_table(self._run.data.client_names)
        return values, self._lines(self._planned_masks(self._run.data.num_clients))

    def _explain_missing(self, reason: str, interrupted: bool = False) -> None:
        evidence = {"unfinished": True, "interrupted": interrupted}
        for name, metric in self._valued_metrics.items():
            metric.take(replace(metric.result().without(reason), evidence=evidence))
            self._contribution_metrics.values[name] = metric.result()
        rank_zero_warn(f"{', '.join(self._valued_metrics)}: there are no values. {reason}")

    def _values(self) -> MetricValues:
        metrics = self._valued_metrics
        if self._scoring is None:  # a resumed run in which no round was left
            self._open_store()
        assert self._store is not None
        num_rounds = self._run.federation.state.round_index
        rounds_of_metrics = [metric.rounds_to_value(num_rounds) for metric in metrics.values()]
        self._store.rounds = sorted(set(chain.from_iterable(rounds_of_metrics)))
        if self._sites is None:
            masks = self._train()
        else:
            masks = self._sites.masks
            self._exclude_rounds(masks, self._run.seed)

        values: MetricValues = {index: {} for index in self._store.rounds}
        scores = self._store.scores(self._run.seed)
        for name, metric in metrics.items():
            game = showing_progress(
                game_of(metric, masks, self._store, self._run), self._run.trainer
            )
            for round_index, values_of_round in metric.complete(scores, game).items():
                values[round_index][name] = values_of_round
        return values

    def _train(self) -> Tensor:
        """Train the coalitions that are missing in the store. Return all coalitions, bool ``[K, n]``."""
        if self._why_no_values:
            raise NoValues(self._why_no_values)
        assert self._run_copy is not None
        assert self._dry_run_result is not None
        assert self._store is not None
        self._say_how_long()
        start_hash = self._run.memory["start"] if self._run.resumed else None
        training = TrainingAfterTheRun(
            self._valued_metrics,
            self._choice,
            fallback=self._fallback(),
            store=self._store,
            run_copy=self._run_copy,
            dry_run_result=self._dry_run_result,
            start_hash=start_hash,
            checked_round=self._run.memory.get("checked_round", 0),
            checked_model=self._run.memory.get("first"),
            space=self._run.federation.space,
        )
        masks = training.train(self._run)
        self._choice = training.choice
        self._about_witnesses = witnesses_in_words(training.witnesses)
        self._why_not_after_all = training.why_not_at_once
        self._run.memory["choice"] = list(self._choice)
        self._run.federation.coalition_differences += training.consistency_warnings
        return masks

    def _say_how_long(self) -> None:
        """Say how many seconds the training of coalitions takes, by those of the rounds of this fit."""
        num_rounds = self._run.federation.state.round_index
        num_timed = num_rounds - self._first_timed_round
        if num_timed <= 0:  # a resumed run in which no round was left
            return
        seconds_of_round = (time.monotonic() - self._start_time) / num_timed
        seconds = self._choice.price * num_rounds * seconds_of_round
        rank_zero_info(f"flsv: the training of groups of clients takes about {seconds:.0f} s.")

    def _fallback(self) -> Choice | None:
        """Return the coalitions to train if those that are planned to train at once cannot. None: none are planned."""
        if not self._choice.is_at_once:
            return None
        assert self._prices is not None
        return one_by_one(self._request, self._prices)

    def close(self) -> None:
        """Undo what :meth:`prepare` has changed in the process. This is called when the fit has ended or failed."""
        if self._run_copy is not None:
            self._run_copy.folder.end_run()

    def _exclude_rounds(self, masks: Tensor, seed: int) -> None:
        """Exclude the rounds after which models of coalitions are missing in the store, since sites do not train them
        again.
        """
        assert self._store is not None
        rounds = self._store.rounds
        self._store.rounds = self._store.rounds_of_all(seed, members_of(masks))
        missing_rounds = sorted(set(rounds).difference(self._store.rounds))
        if missing_rounds:
            numbers = [index + 1 for index in missing_rounds]
            sentence = f"coalitions have no scores after the rounds {numbers}, and sites do not train rounds again"
            if rounds[-1] in missing_rounds:
                raise NoValues(f"{sentence}.")
            rank_zero_warn(f"{', '.join(self._metrics)}: {sentence}.")


def _is_engine_of_sites(engine: Any) -> bool:
    """Return whether the clients of an engine, as :class:`FederatedLoop` gets it, train at sites."""
    engine_class = getattr(engine, "func", engine)  # of a partial function
    return not getattr(engine_class, "clients_here", True)


def _error_in_words(error: Exception) -> str:
    innermost_frame = traceback.extract_tb(error.__traceback__)[-1]
    file_and_line = f"{Path(innermost_frame.filename).name}:{innermost_frame.lineno}"
    description = f"{type(error).__name__} at {file_and_line}: {error}"
    return f"{description}. flsv retrain trains the coalitions."


def _shares_no_class(class_counts: Tensor) -> bool:
    """Return whether each class has samples at one client only, from the numbers of samples ``class_counts [n, M]``."""
    num_owners = (class_counts > 0).sum(0)
    has_classes = len(num_owners) > 1
    return has_classes and int(num_owners.max()) == 1
