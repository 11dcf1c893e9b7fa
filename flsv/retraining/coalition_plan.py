"""CoalitionPlan: trains the models of the coalitions that metrics need, after the run.

A coalition is the same run with its members only. Sites train coalitions beside the run
(:mod:`flsv.retraining.coalitions_at_sites`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv._lightning.data_source import data_of
from flsv.configuration.federation_config import FederationConfig
from flsv.core.extension import MeasuredRun, RunExtension
from flsv.core.strategy import Strategy
from flsv.data import FederatedDataModule
from flsv.functional.shapley.predicted_outputs import favors_nobody, has_complete_sizes
from flsv.games.coalition_utility import utility_of
from flsv.games.members import EMPTY, Members
from flsv.games.trained_game import NUM_UNTRAINED_MODELS, OutputScore, untrained_models
from flsv.metrics.coalitions.design import (
    NO_OUTPUTS_FOR_HALVES,
    Coalitions,
    coalition_masks,
    design_within,
    equivalent_runs,
    with_any_halves,
)
from flsv.metrics.shadow import ShadowShapley
from flsv.retraining.after_the_run import TrainingAfterTheRun, measures_of, open_store
from flsv.retraining.coalition_fit import hash_of_start
from flsv.retraining.coalition_refusals import (
    callbacks_left_out,
    check_scored,
    check_settings,
    check_shared,
    checked_mean_cohort,
)
from flsv.retraining.coalitions_at_sites import CoalitionsAtSites, check_at_sites
from flsv.retraining.copied_fits import CopyOfRun, copy_of_run
from flsv.retraining.scoring import ModelScoring
from flsv.retraining.trial import Findings, client_on_trial, try_coalition
from flsv.retraining.utility_store import COALITIONS_FILE, NO_ROUND, ScoredModel, UtilityStore
from flsv.sampling import FullParticipation
from flsv.utilities.arguments import attribute_of
from flsv.utilities.errors import ConfigurationError, listed

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
        self._first_round_time = time.monotonic()
        self._first_round_seconds = 0.0
        # Sentences on what speaks against the values.
        self._doubts: list[str] = []
        # A hash of the weights with which the run has begun.
        self._start_hash = ""
        # The run's model after the round that the coalition of all clients must reach.
        self._checked_round = 0
        self._checked_model: Tensor | None = None
        # The coalitions' utilities, from the run's first round on.
        self._store: UtilityStore | None = None
        self._sites: CoalitionsAtSites | None = None
        # The state of `_sites` in a checkpoint.
        self._saved_sites: dict[str, Any] | None = None
        self._mean_cohort_size: float | None = None
        # Whether no two clients have a class in common, as far as the server may know.
        self._shares_no_class = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        if self._sites is None:
            state_of_sites = self._saved_sites
        else:
            state_of_sites = self._sites.state_dict()
        return {  # by the keys of checkpoints
            "start": self._start_hash,
            "first": self._checked_model,
            "checked_round": self._checked_round,
            "sites": state_of_sites,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        self._start_hash = state.get("start", "")  # checkpoints of earlier versions have none
        self._checked_model = state["first"]
        self._saved_sites = state["sites"]
        if self._saved_sites is not None and "initial" not in self._saved_sites:
            raise ConfigurationError(
                "ShadowShapley: an earlier version has saved this checkpoint of a run whose sites train coalitions. "
                "End the run by that version."
            )
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
        self._federation: Any = None
        self._scoring: ModelScoring | None = None

    def begin(
        self,
        federation: Any,
        module: L.LightningModule,
        weights: Tensor,
    ) -> list[Strategy]:
        """Check the run. If sites train coalitions, return the strategy that lets them."""
        config: FederationConfig = federation.config
        trainer = module.trainer
        if not self._metrics:
            return []
        if self._goes_on and trainer.lr_scheduler_configs and trainer.ckpt_path is None:
            raise ConfigurationError(
                "ShadowShapley: a further fit of a Trainer begins its learning-rate schedules anew, and the one fit of "
                "a coalition does not. Make a new Trainer with all rounds, and resume from a checkpoint."
            )
        self._federation = federation
        may_count_classes = not self._trains_at_sites and not config.is_private
        data: FederatedDataModule = data_of(trainer)
        self._shares_no_class = may_count_classes and _shares_no_class(data.class_counts)
        for metric in self._metrics.values():
            metric.await_training(after_the_run=not self._trains_at_sites)
            metric.averages = not isinstance(config.sampler, FullParticipation)
        if not self._trains_at_sites:
            return []

        check_shared(config, module)
        federation_info = replace(federation.info(), global_vector=federation.space.read(module))
        self._sites = CoalitionsAtSites(
            self._planned_masks(federation.state.num_clients),
            federation_info,
            federation.engine,
            weights=weights,
            saved=self._saved_sites,
            halvings=self._halvings if self._coalitions == "halves" else 0,
        )
        return [self._sites]

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

    # ---- what is said

    def begin_training(self, run: MeasuredRun) -> None:
        """Score the untrained module, and log how coalitions are trained and at what cost."""
        if not self._metrics:
            return
        self._first_round_time = time.monotonic()
        self._check_outputs(run.games)
        if not self._trains_at_sites:
            self._open_store(run)
        if not run.resumed:
            self._score_untrained(run)
        num_clients = run.data.num_clients
        plan = self._plan_in_words(num_clients)
        estimation = self._estimation_in_words(num_clients, run.games)
        rank_zero_info(f"flsv: {plan}{estimation}")

    def _open_store(self, run: MeasuredRun) -> None:
        """Open the store of coalitions' utilities. In a run that begins, the untrained module's are the first."""
        module = run.trainer.lightning_module
        for name, metric in self._metrics.items():
            evaluator = run.games.evaluator_of(metric.measured_by)
            check_scored(f"metric {name!r}", self._federation.config.share, evaluator)
        self._scoring = ModelScoring(measures_of(self._metrics.values()), run.games.evaluator_of)
        is_new_run = not run.resumed
        measures = {
            f"metric {name!r}": metric.measured_by for name, metric in self._metrics.items()
        }
        model = self._scoring.score(module, untrained=measures if is_new_run else None)
        if self._failure is not None:
            raise self._failure

        if is_new_run:
            self._start_hash = hash_of_start(module)
            self._remove_stale_coalitions(run)
        masks = self.masks(run.data.num_clients)
        store = open_store(run, self._metrics, masks, self._start_hash, outputs=model.outputs)
        if is_new_run:
            self._add(store, EMPTY, {NO_ROUND: model})
        # Without a folder, rows of an earlier fit of the same Trainer are in memory alone.
        is_kept = self._store is not None and self._store.settings == store.settings
        if is_new_run or run.folder is not None or not is_kept:
            self._store = store

    def _score_untrained(self, run: MeasuredRun) -> None:
        """Score models with other initial weights, unless clients would be asked to judge these, too."""
        module = run.trainer.lightning_module
        build = untrained_models(module, self._federation.space, run.seed)
        for metric in self._metrics.values():
            if build is not None and metric.judges == "server":
                evaluator = run.games.evaluator_of(metric.measured_by)
                scores = evaluator.evaluate(build, NUM_UNTRAINED_MODELS)
                metric.store_starts(utility_of(scores, metric.measured_by))

    def _check_outputs(self, games: Any) -> None:
        if self._coalitions != "halves":
            return
        for name, metric in self._metrics.items():
            evaluator = games.evaluator_of(metric.measured_by)
            if OutputScore.for_evaluator(evaluator, metric.measured_by) is None:
                raise ConfigurationError(f"metric {name!r}: {NO_OUTPUTS_FOR_HALVES}")

    def _remove_stale_coalitions(self, run: MeasuredRun) -> None:
        """Remove the coalitions of an earlier run in the folder of one that begins."""
        if run.trainer.is_global_zero and run.folder is not None:
            path = run.folder / COALITIONS_FILE
            path.unlink(missing_ok=True)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)

    def _plan_in_words(self, num_clients: int) -> str:
        masks = self._planned_masks(num_clients)
        coalitions = f"{', '.join(self._metrics)}: {self._coalitions_in_words(masks)} trained"
        if self._trains_at_sites:
            return f"{coalitions} by the sites, beside the run."
        num_fits = equivalent_runs(masks, self._mean_cohort_size)
        cost = f"{num_fits:.3g} more fit{'s' * (num_fits != 1)} and {len(masks) - 2} models' validations"
        left_out = f", without {listed(self._left_out)}" if self._left_out else ""
        return f"{coalitions} after the run{left_out} ({cost})."

    def _estimation_in_words(self, num_clients: int, games: Any) -> str:
        """Say how the scores of the coalitions are computed that are not trained."""
        masks = self._planned_masks(num_clients)
        if len(masks) == 2**num_clients:
            return ""
        measures = [metric.measured_by for metric in self._metrics.values()]
        have_outputs = all(
            OutputScore.for_evaluator(games.evaluator_of(measure), measure) for measure in measures
        )
        if have_outputs and favors_nobody(masks):
            return " The others' outputs are predicted."
        return (
            " The others' scores are estimated. To predict outputs, which comes closer, train each client alone and "
            "whole sizes, or halves, and take a performance of outputs."
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

        names = ", ".join(self._metrics)
        lines = [self._plan_in_words(num_clients)]
        masks = self._planned_masks(num_clients)
        _empty, _full, *inner_masks = masks
        are_all_trained = len(masks) == 2**num_clients
        are_singles = all(int(mask.sum()) == 1 for mask in inner_masks)
        if self._shares_no_class and are_singles and not are_all_trained:
            lines.append(
                f"{names}: no two clients have a class in common, so each alone knows nothing of the others'. "
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

    def end_round(
        self,
        module: L.LightningModule,
        index: int,
        is_run_over: bool,
    ) -> None:
        """Store the scores of the module, whose model is that of the coalition of all clients."""
        if self._scoring is None or self._store is None:
            return
        if not self._first_round_seconds:
            self._first_round_seconds = time.monotonic() - self._first_round_time
        if self._verifies_all or index < NUM_VERIFIED_ROUNDS:
            self._checked_round = index
            self._checked_model = self._federation.state.model().cpu().clone()

        is_last = index + 1 == module.trainer.max_epochs
        is_due = any(metric.is_due(index) for metric in self._metrics.values())
        # The last round's model is that after all hooks at the end of training.
        if not is_run_over and (is_last or not is_due):
            return
        all_clients = tuple(range(self._federation.state.num_clients))
        scored_model = self._scoring.score(module)
        self._add(self._store, all_clients, {index: scored_model})

    def _add(
        self,
        store: UtilityStore,
        members: Members,
        models: Mapping[int, ScoredModel],
    ) -> None:
        """Store the run's own models, in memory alone if the disk is full."""
        try:
            store.add(self._federation.state.seed, members, models)
        except OSError as error:
            rank_zero_warn(
                f"{', '.join(self._metrics)}: scores of the run are not in {COALITIONS_FILE} ({error}). A run that "
                "goes on from a checkpoint computes them again."
            )

    # ---- after the last round

    @property
    def is_pending(self) -> bool:
        """Return whether values come after the last round."""
        return any(metric.pending is not None for metric in self._metrics.values())

    def train(self, run: MeasuredRun) -> dict[int, dict[str, Tensor]]:
        """Train the coalitions, and return the metrics' values, ``{round: {metric: values}}``."""
        if self._scoring is None:  # no round was left
            self._open_store(run)
        assert self._run_copy is not None
        assert self._findings is not None
        assert self._store is not None
        num_rounds = self._federation.state.round_index
        rounds = [metric.rounds_to_value(num_rounds) for metric in self._metrics.values()]
        self._store.rounds = sorted(set(chain.from_iterable(rounds)))
        training = TrainingAfterTheRun(
            self._metrics,
            self.masks(run.data.num_clients),
            store=self._store,
            run_copy=self._run_copy,
            findings=self._findings,
            start_hash=self._start_hash if run.resumed else None,
            checked_round=self._checked_round,
            checked_model=self._checked_model,
            verifies_all=self._verifies_all,
            space=self._federation.space,
            max_wait=self._first_round_seconds + MAX_EXTRA_WAIT,
        )
        values = training.train(run)
        self._doubts = training.doubts
        return values

    @property
    def _verifies_all(self) -> bool:
        return any(metric.verify == "all" for metric in self._metrics.values())


def _shares_no_class(class_counts: Tensor) -> bool:
    """Return whether each class has samples at one client only, ``class_counts`` being ``[n, M]``."""
    num_owners = (class_counts > 0).sum(0)
    has_classes = len(num_owners) > 1
    return has_classes and int(num_owners.max()) == 1
