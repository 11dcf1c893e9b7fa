"""CoalitionPlan: trains the models of the coalitions that metrics need, after the run.

A coalition is the same run with its members only. Sites train coalitions beside the run
(:mod:`flsv.retraining.coalitions_at_sites`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from flsv._lightning.data_source import data_of
from flsv._lightning.patches import callbacks_of, find_loop
from flsv.configuration.federation_config import FederationConfig
from flsv.core import Round, TrainedCoalitions
from flsv.core.extension import EndedRun, RunExtension
from flsv.core.parameter_space import ParameterSpace
from flsv.core.sharing import sharing
from flsv.core.strategy import Strategy
from flsv.data import FederatedDataModule
from flsv.functional.shapley.predicted_outputs import favors_nobody, has_complete_sizes
from flsv.games.coalition_utility import check_untrained, utility_of
from flsv.games.module_copies import ModuleCopies
from flsv.games.trained_game import OutputScore, untrained_models
from flsv.metrics.coalitions.design import (
    NO_OUTPUTS_FOR_HALVES,
    Coalitions,
    coalition_masks,
    design_within,
    equivalent_runs,
    with_any_halves,
)
from flsv.metrics.shadow import ShadowShapley
from flsv.results.folder import leaves_files, run_folder
from flsv.retraining.after_the_run import TrainingAfterTheRun
from flsv.retraining.coalition_refusals import (
    callbacks_left_out,
    check_scored,
    check_settings,
    check_shared,
    checked_mean_cohort,
)
from flsv.retraining.coalitions_at_sites import CoalitionsAtSites, check_at_sites, models_of
from flsv.retraining.copied_fits import CopyOfRun, copy_of_run
from flsv.retraining.trial import Findings, client_on_trial, try_coalition
from flsv.retraining.utility_store import COALITIONS_FILE
from flsv.sampling import FullParticipation
from flsv.scores.performance import is_logged
from flsv.utilities.arguments import attribute_of
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.plain_values import digest

#: Number of a run's first rounds that the coalition of all clients trains again, to check the training of coalitions.
NUM_VERIFIED_ROUNDS = 2
#: Seconds that a coalition may take longer until a round begins than the run has taken for its first.
MAX_EXTRA_WAIT = 60.0
#: Errors in percent of shares from clients alone, and from all coalitions: means over eight federations in which no two
#: clients have a class in common.
_ERROR_OF_SINGLES, _ERROR_OF_ALL = 24, 16


class CoalitionPlan(RunExtension):
    """A run's plan for training the coalitions that its metrics need."""

    def __init__(self, metrics: Mapping[str, ShadowShapley]) -> None:
        self._metrics = dict(metrics)
        self._config: FederationConfig | None = None
        self._trains_at_sites = False
        self._coalitions: Coalitions = ()
        self._halvings = 1
        self._max_fits = 0.0
        if metrics:
            first_metric = next(iter(metrics.values()))
            self._coalitions = first_metric.trains
            self._halvings = first_metric.halvings
            self._max_fits = min(metric.max_fits for metric in metrics.values())
        wanted = (self._coalitions, self._halvings)
        if any((metric.trains, metric.halvings) != wanted for metric in metrics.values()):
            raise ConfigurationError(
                f"metrics {list(metrics)} need different coalitions, but a run trains one set. Give them the same "
                "coalitions, or leave out all but one."
            )
        self.reset()

    @classmethod
    def of(cls, config: FederationConfig) -> CoalitionPlan:
        """Make the plan for a loop's metrics. It does nothing if no metric needs trained coalitions."""
        retraining_metrics: Any = {
            name: metric
            for name, metric in config.metrics.items()
            if attribute_of(metric, "trains") is not None
        }
        plan = cls(retraining_metrics)
        if retraining_metrics:
            check_settings(config)
            plan._config = config
            plan._trains_at_sites = callable(config.engine)
        return plan

    def reset(self) -> None:
        """Forget the coalitions' models of an earlier fit."""
        self.close()
        # Whether the run has had rounds in an earlier fit of its Trainer.
        self._goes_on = False
        # The state before the fit, and what coalitions need, as a trial has shown.
        self._run_copy: CopyOfRun | None = None
        self._findings: Findings | None = None
        self._failure: ConfigurationError | None = None
        # Names of callbacks that take no part in coalitions.
        self._left_out: list[str] = []
        self._checked_round = 0
        self._first_round_time = time.monotonic()
        self._first_round_seconds = 0.0
        # Sentences on what speaks against the values.
        self._doubts: list[str] = []
        self._initial_state: dict[str, Any] | None = None
        self._frozen_parameters: dict[str, Tensor] = {}
        # The run's model after the round that the coalition of all clients must reach.
        self._checked_model: Tensor | None = None
        self._sites: CoalitionsAtSites | None = None
        # The state of `_sites` in a checkpoint.
        self._saved_sites: dict[str, Any] | None = None
        self._mean_cohort_size: float | None = None
        # Whether no two clients have a class in common, as far as the server may know.
        self._shares_no_class = False
        self._scored_round: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        if self._sites is None:
            state_of_sites = self._saved_sites
        else:
            state_of_sites = self._sites.state_dict()
        return {  # by the keys of checkpoints
            "initial": self._initial_state,
            "first": self._checked_model,
            "checked_round": self._checked_round,
            "sites": state_of_sites,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        self._initial_state = state["initial"]
        self._checked_model = state["first"]
        self._saved_sites = state["sites"]
        self._checked_round = state.get("checked_round", 0)

    # ---- before the first round

    def prepare(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Copy the state before the fit, and train one client of a copy for a round. An error of these is raised by
        :meth:`begin_training`."""
        config = self._config
        if config is None:  # no metric needs coalitions
            return
        data: FederatedDataModule = data_of(trainer)
        left_out = callbacks_left_out(trainer, self._metrics.values(), self._trains_at_sites)
        self._mean_cohort_size = checked_mean_cohort(
            config.sampler, self._planned_masks, data.num_clients
        )
        if self._trains_at_sites:
            check_at_sites(config)
            return
        self._goes_on = trainer.current_epoch > 0
        if self._goes_on and self._run_copy is not None:
            return
        if self._goes_on:
            raise ConfigurationError(
                "ShadowShapley: this Trainer has been fitted before. Make a new one, and resume from a checkpoint. Or "
                "leave ShadowShapley out, and run flsv retrain after the run."
            )
        self._left_out = [type(callback).__name__ for callback in left_out]
        client = client_on_trial(data)
        try:
            self._run_copy = copy_of_run(trainer, module, data, left_out)
            self._findings = try_coalition(self._run_copy, trainer, client, seed=config.seed or 0)
        except ConfigurationError as error:  # told after other checks, which say more
            self._failure = error

    def close(self) -> None:
        """Release the run's module."""
        self._valued_models: _ValuedModels | None = None
        self._games: Any = None

    def check_run(
        self, trainer: L.Trainer, data: FederatedDataModule, config: FederationConfig
    ) -> None:
        """Store the initial state of coalitions. Raise ConfigurationError if sites cannot train them."""
        if not self._metrics:
            return
        if self._goes_on and trainer.lr_scheduler_configs and trainer.ckpt_path is None:
            raise ConfigurationError(
                "ShadowShapley: a further fit of a Trainer begins its learning-rate schedules anew, and the one fit of "
                "a coalition does not. Make a new Trainer with all rounds, and resume from a checkpoint."
            )
        module = trainer.lightning_module
        self._share = config.share
        if self._trains_at_sites:
            check_shared(config, module)
        may_count_classes = not self._trains_at_sites and not config.is_private
        self._shares_no_class = may_count_classes and _shares_no_class(data.class_counts)

        trained, frozen = _initial_state(module, config)
        if self._initial_state is None:
            # Coalitions have the frozen weights of the copied run.
            self._initial_state = copy.deepcopy(trained)
        else:  # of a resumed run, whose frozen weights are the checkpoint's
            self._frozen_parameters = frozen

        for metric in self._metrics.values():
            metric.await_training(after_the_run=not self._trains_at_sites)
            metric.averages = not isinstance(config.sampler, FullParticipation)

    def masks(self, num_clients: int) -> Tensor:
        """Return the K coalitions that are trained first, bool ``[K, n]``, the empty and the full one at their head.

        They are all, but for halves, which are chosen later.
        """
        design = self._coalitions
        if design == "auto":
            design = design_within(self._max_fits, num_clients, self._mean_cohort_size)
        return coalition_masks(design, num_clients)

    def _planned_masks(self, num_clients: int) -> Tensor:
        """Return as many coalitions of the same sizes as will be trained, bool ``[K, n]``."""
        masks = self.masks(num_clients)
        if self._coalitions == "halves":
            return with_any_halves(masks, self._halvings)
        return masks

    def strategies(
        self, run: Any, module: L.LightningModule, weights: Callable[[], Tensor]
    ) -> list[Strategy]:
        """Make the strategies that give metrics the models of the empty and the full coalition. If sites train
        coalitions, also those of all others. ``weights()`` returns the clients' weights in the average.
        """
        if self._initial_state is None or not self._metrics:
            return []
        space = run.space
        for metric in self._metrics.values():
            seed = run.state.seed
            build_untrained = untrained_models(module, self._initial_state, space, seed)
            metric.compare_starts(build_untrained)

        untrained_module = ModuleCopies(module, space).load()
        untrained_module.load_state_dict(self._initial_state, strict=False)
        untrained_model = space.read(untrained_module)
        self._valued_models = _ValuedModels(self, space, untrained_model, weights)
        if not self._trains_at_sites:
            return [self._valued_models]

        info_of_untrained = replace(run.info(), global_vector=untrained_model)
        self._sites = CoalitionsAtSites(
            self._planned_masks(run.state.num_clients),
            info_of_untrained,
            run.engine,
            saved=self._saved_sites,
            halvings=self._halvings if self._coalitions == "halves" else 0,
        )
        return [self._sites, self._valued_models]

    # ---- what is said

    def begin_training(self, num_clients: int, games: Any, module: L.LightningModule) -> None:
        """Score the untrained module, and log how coalitions are trained and at what cost."""
        if not self._metrics:
            return
        self._games = games
        self._first_round_time = time.monotonic()
        self._remove_stale_coalitions(module.trainer)
        self._check_outputs(games)
        if not self._trains_at_sites:
            self._check_and_score_untrained(games, module)
        if self._failure is not None:
            raise self._failure
        self._log_plan(num_clients, games)

    def _check_outputs(self, games: Any) -> None:
        if self._coalitions != "halves":
            return
        for name, metric in self._metrics.items():
            evaluator = games.evaluator_of(metric.measured_by)
            if OutputScore.for_evaluator(evaluator, metric.measured_by) is None:
                raise ConfigurationError(f"metric {name!r}: {NO_OUTPUTS_FOR_HALVES}")

    def _check_and_score_untrained(self, games: Any, module: L.LightningModule) -> None:
        measures = {name: metric.measured_by for name, metric in self._metrics.items()}
        for name, measure in measures.items():
            evaluator = games.evaluator_of(measure)
            check_scored(f"metric {name!r}", self._share, evaluator)
        if self._valued_models is not None:
            self._valued_models.score_untrained(module, self._initial_state, games, measures)

    def _remove_stale_coalitions(self, trainer: L.Trainer) -> None:
        """Remove the coalitions of an earlier run in the folder of one that begins."""
        is_new_run = trainer.ckpt_path is None
        if is_new_run and trainer.is_global_zero and leaves_files(trainer):
            path = run_folder(trainer) / COALITIONS_FILE
            path.unlink(missing_ok=True)

    def _log_plan(self, num_clients: int, games: Any) -> None:
        masks = self._planned_masks(num_clients)
        metric_names = ", ".join(self._metrics)
        coalitions = self._coalitions_in_words(masks)
        how_trained = self._training_in_words(masks)
        estimation = self._sentence_on_untrained(masks, games)
        rank_zero_info(f"flsv: {metric_names}: {coalitions} {how_trained}.{estimation}")

    def _training_in_words(self, masks: Tensor) -> str:
        if self._trains_at_sites:
            return "trained by the sites, beside the run"
        sentence = (
            f"trained after the run, each by a fit of a copy of it, which costs {self._cost(masks)}"
        )
        if self._left_out:
            sentence += f", without {listed(self._left_out)}"
        return sentence

    def _sentence_on_untrained(self, masks: Tensor, games: Any) -> str:
        """Say how the scores of the coalitions are computed that are not trained."""
        num_clients = masks.shape[1]
        are_all_trained = len(masks) == 2**num_clients
        if are_all_trained:
            return ""
        if not favors_nobody(masks):
            return (
                " The others' scores are estimated: to predict outputs, train each client alone and whole sizes, or "
                "halves."
            )
        measures = [metric.measured_by for metric in self._metrics.values()]
        output_scores = []  # of the measures by which outputs can be predicted
        for measure in measures:
            output_score = OutputScore.for_evaluator(games.evaluator_of(measure), measure)
            if output_score is not None:
                output_scores.append(output_score)
        if len(output_scores) == len(measures):
            bound = ""
            if any(score.is_bounded for score in output_scores):
                bound = ", between those of the trained coalitions, since forward's have a bound"
            return f" The others' outputs are predicted{bound}."
        if any(is_logged(measure) for measure in measures):
            reason = "logged values have no outputs"
        else:
            reason = "their outputs cannot be predicted"
        return (
            f" The others' scores are estimated, since {reason}. A larger max_fits, or a performance of outputs such "
            'as "accuracy" or a torchmetrics metric, comes closer.'
        )

    def _coalitions_in_words(self, masks: Tensor) -> str:
        num_clients = masks.shape[1]
        num_coalitions = len(masks) - 2
        if num_coalitions == num_clients and has_complete_sizes(masks):
            return f"each of {num_clients} clients alone is"
        if self._coalitions == "halves":
            num_halves = num_coalitions - num_clients
            return (
                f"each of {num_clients} clients alone and {num_halves} halves of unlike clients are"
            )
        return f"{num_coalitions} coalitions are"

    def _cost(self, masks: Tensor) -> str:
        num_fits = equivalent_runs(masks, self._mean_cohort_size)
        return f"{num_fits:.3g} more fit{'s' * (num_fits != 1)} and {len(masks) - 2} models' validations"

    def summary_lines(self, num_clients: int) -> list[str]:
        """Return lines to print after a run: how coalitions were trained, or why metrics have no values yet."""
        if not self._metrics:
            return []
        pending_lines = [
            f"{name}: {metric.pending}"
            for name, metric in self._metrics.items()
            if metric.pending is not None
        ]
        if pending_lines:
            return pending_lines

        masks = self._planned_masks(num_clients)
        if self._trains_at_sites:
            where_trained = "by the sites, beside the run"
        else:
            where_trained = f"after the run ({self._cost(masks)})"
        metric_names = ", ".join(self._metrics)
        lines = [f"{metric_names}: {self._coalitions_in_words(masks)} trained {where_trained}."]
        _empty, _full, *inner_masks = masks
        are_all_trained = len(masks) == 2**num_clients
        are_singles = all(int(mask.sum()) == 1 for mask in inner_masks)
        if self._shares_no_class and are_singles and not are_all_trained:
            lines.append(
                f"{metric_names}: no two clients have a class in common, so each alone knows nothing of the others'. "
                f"Such shares were {_ERROR_OF_SINGLES} % off, and by all coalitions {_ERROR_OF_ALL} %. coalitions: "
                "both trains all but one, too."
            )
        return lines

    @property
    def doubts(self) -> Sequence[str]:
        """Return what the comparisons of coalitions with the run have found."""
        if self._sites is not None:
            return self._sites.doubts
        return self._doubts

    def end_round(self, module: L.LightningModule, index: int, skips_scored: bool) -> None:
        """Score the module, whose model is the full coalition's, after round ``index``, unless it has been scored."""
        if self._valued_models is None or self._trains_at_sites:
            return
        # Several calls may follow a round. One with `skips_scored` does nothing after another of the same kind.
        if skips_scored and index == self._scored_round:
            return
        self._scored_round = index if skips_scored else None

        for metric in self._metrics.values():
            last_valued_round = metric.valued[-1:].tolist()  # none, or one
            if last_valued_round != [index]:
                continue
            measure = metric.measured_by
            evaluator = self._games.evaluator_of(measure)
            if evaluator.asks_clients and self._valued_models.is_full_model(module):
                continue  # clients have scored the global model in the round
            scores = evaluator.live(module, keep=True)
            outputs = None
            if scores.outputs is not None:
                outputs = scores.outputs[0]
            utility = utility_of(scores, measure)[0]  # of the only model
            metric.deliver(utility, outputs)

    # ---- after the last round

    @property
    def has_missing_values(self) -> bool:
        """Return whether coalitions still have to be trained for the values of past rounds."""
        return any(
            metric.pending is not None and len(metric.valued) for metric in self._metrics.values()
        )

    def train(self, run: EndedRun) -> dict[int, dict[str, Tensor]]:
        """Train the coalitions if metrics need them, and return the metrics' values, ``{round: {metric: values}}``."""
        if not self.has_missing_values:
            return {}
        assert self._initial_state is not None
        metrics = self._metrics
        pending = {name: metrics[name] for name in metrics if metrics[name].pending is not None}
        masks = self.masks(run.data.num_clients)
        run_seconds = time.monotonic() - self._first_round_time
        planned_masks = self._planned_masks(run.data.num_clients)
        num_fits = equivalent_runs(planned_masks, self._mean_cohort_size)
        rank_zero_info(
            f"flsv: coalitions are trained now, in about {run_seconds * num_fits:.1f} s."
        )
        assert self._run_copy is not None
        assert self._findings is not None
        assert self._valued_models is not None
        initial_state = self._initial_state | self._frozen_parameters
        training = TrainingAfterTheRun(
            pending,
            masks,
            run_copy=self._run_copy,
            findings=self._findings,
            initial_state=initial_state,
            checked_round=self._checked_round,
            checked_model=self._checked_model,
            verifies_all=self._verifies_all,
            run_id=self._run_id(find_loop(callbacks_of(run.trainer)).state.model()),
            space=self._valued_models.space,
            run_seconds=run_seconds,
            max_wait=self._first_round_seconds + MAX_EXTRA_WAIT,
        )
        values = training.train(run)
        self._doubts = training.doubts
        return values

    @property
    def _verifies_all(self) -> bool:
        return any(metric.verify == "all" for metric in self._metrics.values())

    def _run_id(self, trained_model: Tensor) -> str:
        """Return a text that runs share only if they start from the same model, and come to the same one."""
        assert self._valued_models is not None
        models = [self._valued_models.untrained_model, trained_model]
        hashes = [digest(model.cpu()).hex()[:16] for model in models]
        return " ".join(hashes)

    def keep_checked_model(self, round: Round) -> None:
        """Store the run's model after a round, which the coalition of all clients must reach."""
        if not self._first_round_seconds:
            self._first_round_seconds = time.monotonic() - self._first_round_time
        is_checked = self._verifies_all or round.round_index < NUM_VERIFIED_ROUNDS
        if is_checked and not self._trains_at_sites and round.server_vector is not None:
            self._checked_round = round.round_index
            self._checked_model = round.server_vector.cpu().clone()


def _shares_no_class(class_counts: Tensor) -> bool:
    """Return whether each class has samples at one client only, ``class_counts`` being ``[n, M]``."""
    num_owners = (class_counts > 0).sum(0)
    has_classes = len(num_owners) > 1
    return has_classes and int(num_owners.max()) == 1


def _initial_state(
    module: L.LightningModule, config: FederationConfig
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the module's ``state_dict`` in two parts: what training may change, and frozen parameters."""
    frozen_parameters = sharing(config.share, module, config.head).constant
    frozen_ids = {
        id(parameter) for name, parameter in module.named_parameters() if name in frozen_parameters
    }

    # A parameter that layers share has several names in the state dict.
    frozen_names = {
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if id(parameter) in frozen_ids
    }

    trained: dict[str, Tensor] = {}
    frozen: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if name in frozen_names:
            frozen[name] = value
        else:
            trained[name] = value
    return trained, frozen


class _ValuedModels(Strategy):
    """Strategy that provides the empty and the full coalition's models in every round."""

    def __init__(
        self,
        plan: CoalitionPlan,
        space: ParameterSpace,
        untrained_model: Tensor,
        weights: Callable[[], Tensor],
    ) -> None:
        self._plan = plan
        self.space = space
        self.untrained_model = untrained_model
        self._weights = weights
        self._untrained_scores: dict[Any, Any] = {}
        self.full_model: Tensor | None = None

    def score_untrained(
        self,
        module: L.LightningModule,
        initial: Any,
        games: Any,
        measures: Mapping[str, Any],
    ) -> None:
        """Score the module with its ``initial`` weights by each measure, ``{metric: measure}``."""
        untrained_module = ModuleCopies(module, self.space).load()
        untrained_module.load_state_dict(initial, strict=False)
        for name, measure in measures.items():
            evaluator = games.evaluator_of(measure)
            if evaluator.asks_clients:
                continue
            if measure not in self._untrained_scores:
                self._untrained_scores[measure] = evaluator.live(untrained_module, keep=True)
            scores = self._untrained_scores[measure]
            check_untrained(f"metric {name!r}", measure, scores)

    def coalition_models(self, round: Round) -> TrainedCoalitions | None:
        assert round.server_vector is not None
        self._plan.keep_checked_model(round)
        self.full_model = round.server_vector
        weights = self._weights()
        if round.trained is not None:  # all coalitions, which sites train
            coalitions = round.trained
        else:  # the empty and the full coalition
            empty_and_full = torch.tensor([[False], [True]])
            masks = empty_and_full.expand(-1, len(weights))  # [2, n]
            coalitions = models_of(
                masks, empty=self.untrained_model, full=self.full_model, inner_models=()
            )
        coalitions = replace(coalitions, weights=weights)
        if not self._untrained_scores:
            return coalitions
        # Returns the scores by a measure. As a method of a dictionary it can be pickled.
        score_before_training = self._untrained_scores.__getitem__
        return replace(coalitions, before=score_before_training)

    def is_full_model(self, module: L.LightningModule) -> bool:
        """Return whether the module holds the last global model."""
        return self.full_model is not None and torch.equal(self.space.read(module), self.full_model)
