"""Here: the training of coalitions by the process of the run, or by its ranks, after the run and in copies of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv._lightning.data_source import data_of
from flsv.configuration.federation_config import FederationConfig
from flsv.core.ranks import ranks_of
from flsv.engines.ranks import share_weights
from flsv.games.members import Members
from flsv.metrics.coalitions.design import equivalent_runs
from flsv.metrics.shadow import ShadowShapley
from flsv.retraining.after_the_run import NoValues, TrainingAfterTheRun
from flsv.retraining.coalition_refusals import (
    excluded_callbacks,
    fitted_before,
    hidden_engine_of_sites,
)
from flsv.retraining.copied_fits import CopyOfRun
from flsv.retraining.dry_run import DryRunResult, NotRepeatable, client_of_dry_run, dry_run
from flsv.retraining.measured_run import MeasuredRun
from flsv.retraining.plan_in_words import witnesses_in_words
from flsv.retraining.price import NO_TRIAL, Choice, PriceList, Request, price_list
from flsv.retraining.progress import seconds_of_values
from flsv.retraining.scored_run import FirstScore, ScoredRun
from flsv.utilities.errors import ConfigurationError, listed
from flsv.values.coalition_files import Outputs, ScoredModel

#: The number of first rounds of the run that the coalition of all clients trains again, to check the training of
#: coalitions. The second one begins after a validation.
NUM_VERIFIED_ROUNDS = 2

#: A fit says how long scoring and values take if it is at least this long, in seconds.
LONG_SECONDS = 10.0


class Here:
    """The training of coalitions in copies of the run that are made before it.

    Args:
        config: the run's configuration.
        metrics: the metrics that need coalitions, by name.
        request: the coalitions that they ask for.
    """

    #: Whether models of coalitions are scored in each round, since rounds cannot be trained again.
    scores_each_round = False

    def __init__(
        self, config: FederationConfig, metrics: Mapping[str, ShadowShapley], request: Request
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._tries_rows = request.may_train_at_once
        # Names of the classes of callbacks that take no part in coalitions.
        self._excluded: list[str] = []
        # The copy from before the fit, and the result of its dry run.
        self._run_copy: CopyOfRun | None = None
        self._dry_run_result: DryRunResult | None = None
        # The error of copy or dry run, which is raised later.
        self._failure: ConfigurationError | None = None
        self._why_no_values = ""
        self._trial = NO_TRIAL
        # The index of the first round of this fit, and when it began. None: no round was left.
        self._begin_of_rounds: tuple[int, float] | None = None
        # Why coalitions that were to be trained at once were not, and who was trained at once and also alone.
        self._why_not_after_all = ""
        self._about_witnesses = ""

    def prepare(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Copy the run before its fit, and make a dry run of a coalition. Their errors are raised by
        :meth:`check`.
        """
        excluded = excluded_callbacks(trainer, self._metrics.values(), at_sites=False)
        if trainer.current_epoch > 0:
            raise fitted_before(trainer.current_epoch)
        self._excluded = [type(callback).__name__ for callback in excluded]
        data = data_of(trainer)
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
                seed=self._config.seed or 0,
                tries_rows=self._tries_rows,
            )
            self._trial = self._dry_run_result.rows_or_reason()
        except NotRepeatable as error:  # the run continues without values
            self._why_no_values = f"{error}"
        except ConfigurationError as error:  # raised after other checks, whose errors say more
            self._failure = error

    def begin(self, run: MeasuredRun, choose: Callable[[PriceList], Choice]) -> None:
        """Check that the clients of the run train in this process."""
        if not run.federation.engine.clients_here:
            raise hidden_engine_of_sites(type(run.federation.engine).__name__)

    def check(self) -> None:
        """Raise the error of the copy or the dry run."""
        if self._failure is not None:
            raise self._failure

    def begin_training(self, run: MeasuredRun) -> bool:
        """Take the time when rounds begin. Return whether there will be values, and warn otherwise."""
        self._begin_of_rounds = run.num_rounds, time.monotonic()
        if self._why_no_values:
            rank_zero_warn(
                f"{', '.join(self._metrics)}: there will be no values. {self._why_no_values}"
            )
        return not self._why_no_values

    def prices(self, run: MeasuredRun, outputs: Outputs) -> PriceList:
        """Return the prices of coalitions, given the outputs of one model."""
        return price_list(self._config, run, self._trial, outputs)

    def plan_in_words(self, run: MeasuredRun, choice: Choice, masks: Tensor) -> str:
        """Say which coalitions ``masks [K, n]`` are trained, and at what cost."""
        excluded = f", without {listed(self._excluded)}" if self._excluded else ""
        num_groups = len(masks) - 2  # the empty and the full coalition are not trained
        if choice.is_at_once:
            return (
                f"{num_groups} groups of clients are trained at once after the run{excluded} (as long as about "
                f"{choice.price:.2g} more fits).{self._about_witnesses}"
            )
        num_fits = equivalent_runs(masks, run.clients_per_round)
        fits = "fit" if num_fits == 1 else "fits"
        cost = f"as long as {num_fits:.3g} more {fits}, and {num_groups} validations"
        return f"{choice.design.in_words(masks)} trained after the run{excluded} ({cost}).{self._why_not_at_once()}"

    def duration_in_words(
        self,
        run: MeasuredRun,
        choice: Choice,
        masks: Tensor,
        metrics: Mapping[str, ShadowShapley],
        first: FirstScore,
    ) -> str:
        """Say how long the scoring of all models and the values take, if it is long, by the score of one model."""
        if choice.is_at_once:  # the scores are part of its price
            return ""
        # Seconds. Metrics share the scored models, but not the computation of values.
        scoring = 0.0
        estimation = 0.0
        for metric in metrics.values():
            num_rounds = len(metric.rounds_to_value(run.trainer.max_epochs or 1))
            scoring = max(scoring, len(masks) * num_rounds * first.seconds)
            of_outputs = run.games.output_measure(metric.measure)
            game = metric.game(masks, range(num_rounds), run.weights, of_outputs)
            estimation += seconds_of_values(game, first.model.outputs)
        if scoring + estimation < LONG_SECONDS:
            return ""
        return f" Scoring these models takes about {scoring:.0f} s, and computing the values {estimation:.0f} s."

    def _why_not_at_once(self) -> str:
        """Say why coalitions cannot be trained at once, if rows were tried."""
        reason = self._why_not_after_all or self._trial.why_not
        if not reason or not self._tries_rows:
            return ""
        return f" Groups of clients cannot be trained at once: {reason}"

    def end_round(self, run: MeasuredRun, index: int) -> None:
        """Keep the run's model after its first rounds, which the coalition of all clients must reproduce."""
        if index < NUM_VERIFIED_ROUNDS:
            run.memory["checked_round"] = index
            run.memory["first"] = run.federation.state.model().cpu().clone()

    def scored_models(self, scored: ScoredRun) -> Iterator[tuple[Members, ScoredModel]]:
        """Score the models that a round has trained."""
        module = scored.run.trainer.lightning_module
        yield scored.run.all_clients, scored.scoring.score(module)

    def train(
        self,
        scored: ScoredRun,
        metrics: Mapping[str, ShadowShapley],
        choice: Choice,
    ) -> tuple[Choice, Tensor]:
        """Train the coalitions that are missing in the store. Return what was chosen in the end, and all coalitions,
        bool ``[K, n]``.
        """
        if self._why_no_values:
            raise NoValues(self._why_no_values)
        assert self._run_copy is not None
        assert self._dry_run_result is not None
        self._say_how_long(scored.run, choice)
        training = TrainingAfterTheRun(
            scored,
            metrics,
            choice,
            run_copy=self._run_copy,
            dry_run_result=self._dry_run_result,
        )
        training.train()
        self._about_witnesses = witnesses_in_words(training.witnesses)
        self._why_not_after_all = training.why_not_at_once
        scored.run.federation.coalition_differences += training.consistency_warnings
        return training.choice, training.masks

    def _say_how_long(self, run: MeasuredRun, choice: Choice) -> None:
        """Say how many seconds the training of coalitions takes, by those of the rounds of this fit."""
        if self._begin_of_rounds is None:
            return
        first_round, start_time = self._begin_of_rounds
        num_timed = run.num_rounds - first_round
        if num_timed <= 0:
            return
        seconds_of_round = (time.monotonic() - start_time) / num_timed
        seconds = choice.price * run.num_rounds * seconds_of_round
        rank_zero_info(f"flsv: the training of groups of clients takes about {seconds:.0f} s.")

    def shares_no_class(self, run: MeasuredRun) -> bool:
        """Return whether no two clients have a class in common. False if the server must not know it."""
        if self._config.is_private:
            return False
        num_owners = (run.data.class_counts > 0).sum(0)  # from [n, M]
        has_classes = len(num_owners) > 1
        return has_classes and int(num_owners.max()) == 1

    def close(self) -> None:
        """Undo what :meth:`prepare` has changed in the process."""
        if self._run_copy is not None:
            self._run_copy.folder.end_run()
