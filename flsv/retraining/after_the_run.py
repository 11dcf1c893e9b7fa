"""TrainingAfterTheRun: trains coalitions after the end of a run, for metrics that need the coalitions' models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv.functional.shapley.predicted_outputs import OutputMeasure
from flsv.games.members import EMPTY, Members, members_of
from flsv.metrics.shadow import ShadowShapley
from flsv.models.classifier import ClassifierClient
from flsv.retraining.at_once import AtOnce
from flsv.retraining.coalition_store import EARLIER_FOLDER
from flsv.retraining.copied_fits import CopiedFits, CopyOfRun, KeptRun
from flsv.retraining.dry_run import DryRunResult
from flsv.retraining.measured_run import MeasuredRun
from flsv.retraining.one_by_one import OneByOne, WayToTrain, train_missing
from flsv.retraining.price import Choice
from flsv.retraining.progress import Progress
from flsv.retraining.proofs import Proofs
from flsv.retraining.scored_run import ScoredRun
from flsv.retraining.training_job import TrainingJob
from flsv.utilities.errors import ConfigurationError, NotBatched
from flsv.values.coalition_files import Training

_CHANGED_RUN = (
    "the training of coalitions has changed the run's own module or optimizers, which were restored. So "
    "coalitions share tensors with the run: let data sets and globals hold copies of the module's tensors"
)


class NoValues(Exception):
    """Error: there are no values, for the given reason, because models of coalitions are missing."""

    def __init__(self, reason: str, interrupted: bool = False) -> None:
        super().__init__(reason)
        self.interrupted = interrupted


class TrainingAfterTheRun:
    """Training of the coalitions that a run's store does not have.

    Args:
        scored: the run, with the store.
        metrics: the metrics that need coalitions, by name.
        choice: the coalitions to train.
        run_copy: the copy of the run from before its fit.
        dry_run_result: what the training of coalitions needs.

    Attributes:
        choice: the coalitions that were trained: the choice's fallback, if they could not be trained at once.
        masks: bool ``[K, n]``, these coalitions. The first two are the empty coalition and that of all clients.
        witnesses: clients that were trained at once with others and also alone, with the same models.
        why_not_at_once: why coalitions were trained one by one although they were to be trained at once. Empty: they
            were not.
        consistency_warnings: sentences that say why the values may be wrong.
    """

    def __init__(
        self,
        scored: ScoredRun,
        metrics: Mapping[str, ShadowShapley],
        choice: Choice,
        run_copy: CopyOfRun,
        dry_run_result: DryRunResult,
    ) -> None:
        self.choice = choice
        self.masks = choice.design.masks(scored.run.data.num_clients)
        self.witnesses: Sequence[Members] = ()
        self.why_not_at_once = ""
        self.consistency_warnings: list[str] = []
        self._scored = scored
        self._store = scored.store
        self._metrics = metrics
        self._run_copy = run_copy
        self._trial = dry_run_result.rows
        self._alone = OneByOne(
            CopiedFits(run_copy, scored.measures),
            self._make_job(scored.run, dry_run_result),
            num_samples=scored.run.data.num_samples.tolist(),
            ranks=scored.store.ranks,
        )
        self._proofs = Proofs(scored, self._alone)

    def _make_job(self, run: MeasuredRun, dry_run_result: DryRunResult) -> TrainingJob:
        effects = {}
        for name, measure in self._scored.measures.items():
            evaluator = run.games.evaluator_of(measure)
            if evaluator.effects is not None:
                effects[name] = evaluator.effects
        return TrainingJob(
            members=run.all_clients,
            seed=run.seed,
            rounds=tuple(self._store.rounds),
            effects=effects,
            validates=dry_run_result.needs_validations,
            keeps_checkpoints=dry_run_result.needs_checkpoints,
        )

    def train(self) -> None:
        """Train the coalitions that are missing in the store, and compare their training with that of the run.

        Raises:
            NoValues: the training was interrupted, or the fit of a coalition has failed.
        """
        run = self._scored.run
        if run.folder is not None:
            grand = Training(run.seed, run.all_clients)
            self._store.take_over(run.folder / EARLIER_FOLDER, grand)

        kept_run = KeptRun(run.trainer)
        try:
            self._train_or_explain()
        finally:
            has_changed_run = kept_run.restore()
            if has_changed_run:
                self.consistency_warnings.append(_CHANGED_RUN)

        for consistency_warning in self.consistency_warnings:
            rank_zero_warn(f"{', '.join(self._metrics)}: {consistency_warning}.")

    def _train_or_explain(self) -> None:
        """Train and compare, and turn an interruption and the failure of a fit into NoValues."""
        run = self._scored.run
        try:
            self._train_at_once()
            self._train_one_by_one()
            self._compare_with_run()
        except KeyboardInterrupt:
            done = self._store.progress(run.seed, self._coalitions_to_train())
            reason = f"The training of coalitions was interrupted: {done} are trained{_rest(run)}"
            raise NoValues(reason, interrupted=True) from None
        except ConfigurationError as error:  # raised as NoValues: the run itself has ended well
            advice = "flsv retrain trains the coalitions that are missing."
            raise NoValues(f"{error} {advice}") from error

    def _coalitions_to_train(self) -> list[Members]:
        """Return all coalitions except the empty one and that of all clients, whose models are the run's."""
        num_clients = self.masks.shape[1]
        coalitions = members_of(self.masks)
        return [members for members in coalitions if 0 < len(members) < num_clients]

    def _train_at_once(self) -> None:
        """If it is planned, train the coalitions at once. If they cannot be, let others be trained one by one."""
        if self.choice.fallback is None:
            return
        at_once = AtOnce(
            self._alone,
            self._run_copy,
            self._scored.measures,
            self._proofs,
            trial=self._trial,
        )
        try:
            coalitions = [EMPTY, *self._coalitions_to_train()]
            self._train(at_once, coalitions, title="Groups of clients")
            self.witnesses = at_once.witnesses
            self._proofs.accept_at_once()
        except NotBatched as error:
            self._discard(at_once)
            self._fall_back(self.choice.fallback, error)

    def _discard(self, at_once: AtOnce) -> None:
        """Remove all coalitions that have trained at once."""
        coalitions = [
            members for members in self._coalitions_to_train() if members not in at_once.witnesses
        ]
        self._store.discard(at_once.job.seed, coalitions)
        self._store.discard_in_double(at_once.job.seed)

    def _fall_back(self, fallback: Choice, error: NotBatched) -> None:
        rank_zero_info(
            f"flsv: groups of clients are trained one by one, since they cannot be trained at once: {error.reason}"
        )
        self.why_not_at_once = error.reason
        self.choice = fallback
        self.masks = fallback.design.masks(self._scored.run.data.num_clients)
        self._proofs.refuse_at_once(error)

    def _train_one_by_one(self) -> None:
        """Train the coalitions that are missing, and then those that their outputs choose."""
        # The run's own two coalitions are missing if the run was killed before they were stored.
        self._train(self._alone, members_of(self.masks), title="Groups of clients")
        next_masks = self._choose_next()
        if len(next_masks):
            self.masks = torch.cat([self.masks, next_masks])
            self._train(self._alone, self._coalitions_to_train(), title="Halves of clients")

    def _train(self, way: WayToTrain, coalitions: Sequence[Members], title: str) -> None:
        """Train those of ``coalitions`` that are missing in the store, with a bar that shows the progress."""
        missing = self._store.missing(way.job.seed, coalitions)
        num_fits = sum(map(bool, missing))  # without the empty coalition
        with Progress(self._scored.run.trainer, num_fits, title) as progress:
            train_missing(way, coalitions, self._store, self._proofs.check, count=progress)

    def _choose_next(self) -> Tensor:
        """Return the coalitions that the design chooses by the trained models' outputs, bool ``[K, n]``."""
        design = self.choice.design
        if not design.grows:
            return self.masks[:0]
        run = self._scored.run
        metric = next(iter(self._metrics.values()))  # all metrics train the same coalitions
        game = self._scored.game(metric, self.masks)
        if not isinstance(game.of_outputs, OutputMeasure):
            return self.masks[:0]
        return design.next_masks(
            self.masks,
            self._store.scores(run.seed).outputs(game, self._store.rounds[-1]),
            logits=game.of_outputs.logits,
            names=run.data.client_names,
            seed=run.seed,
        )

    def _compare_with_run(self) -> None:
        """Say in :attr:`consistency_warnings` how coalitions differ from the run. If all clients reproduce it only with
        validations, train all coalitions again with validations.
        """
        comparison = self._proofs.compare_with_run()
        if comparison.difference is not None:
            self.consistency_warnings.append(comparison.difference)
        if comparison.needs_validations:
            coalitions = self._coalitions_to_train()
            self._store.discard(self._alone.job.seed, coalitions)
            validating = replace(self._alone, job=replace(self._alone.job, validates=True))
            train_missing(validating, coalitions, self._store, self._proofs.check)
        self.consistency_warnings += self._proofs.sentences(self._updates_differ_by_intention)

    @property
    def _updates_differ_by_intention(self) -> bool:
        """Return whether clients train otherwise in coalitions than in the run, because the user wants them to."""
        module = self._scored.run.trainer.lightning_module
        weighs_classes = isinstance(module, ClassifierClient) and module.is_balanced
        return weighs_classes or any(metric.excluded_callbacks for metric in self._metrics.values())


def _rest(run: MeasuredRun) -> str:
    if run.folder is None:
        return ", and none is kept, because the run has no folder."
    return f", and kept in {run.folder}. flsv retrain trains the rest."
