"""FitsAtOnce: trains all coalitions in one fit of one copy of the run, if the run's module can be trained so."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
from torch import Tensor

from flsv._lightning.patches import callbacks_of, find_loop, is_loop
from flsv.data import FederatedDataModule
from flsv.games.members import Members
from flsv.models.classifier import ClassifierClient
from flsv.retraining.coalition_fit import (
    CoalitionScoring,
    callbacks_that_train,
    change_in_place,
    is_of_the_fit,
    prepare_coalition_fit,
)
from flsv.retraining.copied_fits import CopiedFits, CopyOfRun, _has_workers, fit_quietly, in_quiet
from flsv.retraining.training_job import FitModels, FitOutcome, FitResult, TrainingJob
from flsv.scores.performance import Measures
from flsv.server.coalition_server import CoalitionServer, metric_of_aggregator
from flsv.training.module_snapshot import ModuleSnapshot
from flsv.utilities.plain_values import are_equal
from flsv.utilities.wings import from_wing
from flsv.values.coalition_files import ScoredModel
from flsv.vmap.batched import NotBatched

#: The run's model after these rounds is kept, with which the run's own model is compared.
ROUNDS_TO_KEEP = (0, 1)


class FitsAtOnce(CopiedFits):
    """Trainer of coalitions by one fit of a copy of the run, else one by one as :class:`CopiedFits`.

    Attributes:
        why_not: why coalitions are not trained at once. Empty: no reason is known.
    """

    why_not = ""

    def __init__(self, run_copy: CopyOfRun, measures: Measures) -> None:
        super().__init__(run_copy, measures)
        # The models of the coalition of all clients, by round.
        self._grand_models: dict[int, FitResult] = {}

    def train(self, jobs: Sequence[TrainingJob]) -> Iterator[tuple[TrainingJob, FitOutcome]]:
        jobs = list(jobs)
        if len(jobs) == 1 and jobs[0].returns_models and not self.why_not:
            kept = self._grand_models.get(jobs[0].rounds[-1])
            if kept is not None:
                yield jobs[0], kept
                return
        if len(jobs) > 1 and not self.why_not and not _has_workers():
            results = self._train_at_once(jobs)
            if results is not None:
                for job in jobs:
                    yield job, results[job.members]
                return
        yield from super().train(jobs)

    def give_up(self, reason: str) -> None:
        """Train coalitions one by one from now on."""
        self.why_not = reason

    def _train_at_once(self, jobs: Sequence[TrainingJob]) -> dict[Members, FitResult] | None:
        try:
            with in_quiet() as changed_tensors:
                scoring = self._fit(jobs)
        except NotBatched as error:
            self.give_up(f"{error}")
            return None
        except Exception as error:  # one by one, the error names its coalition
            self.give_up(f"{type(error).__name__}: {error}")
            return None
        changed = [*changed_tensors, *self._run_copy.folder.changed_files]
        self._grand_models = scoring.grand_models()
        return {
            members: replace(result, changed_tensors=changed)
            for members, result in scoring.results().items()
        }

    def _fit(self, jobs: Sequence[TrainingJob]) -> ScoringAtOnce:
        with self._run_copy.folder.entered() as folder:
            trainer, module, data = self._run_copy.load()
            reason = why_not_at_once(trainer, module, jobs)
            if reason:
                raise NotBatched(reason)
            everyone = tuple(range(data.num_clients))
            job = replace(jobs[0], members=everyone, returns_models=True)
            scoring = prepare_coalition_fit(
                trainer,
                module,
                data,
                measures=self._measures,
                job=job,
                folder=folder,
                make_scoring=partial(ScoringAtOnce, jobs=jobs),
            )
            loop = find_loop(callbacks_of(trainer))
            change_in_place(loop, engine=from_wing("engines", "coalition rows"))
            reads = _ReadsOfMembers(data)
            fit_quietly(trainer, module, data)
            reads.check()
            scoring.result()  # raises an error if nothing was trained
            assert isinstance(scoring, ScoringAtOnce)
            return scoring


def why_not_at_once(trainer: L.Trainer, module: Any, jobs: Sequence[TrainingJob]) -> str:
    """Return why coalitions of a run cannot be trained in one fit. Empty: no reason is known before."""
    job = jobs[0]
    if job.validates or job.keeps_checkpoints:
        return "training depends on validations or checkpoints."
    others = [
        callback
        for callback in callbacks_that_train(trainer, job.keeps_checkpoints)
        if not is_loop(callback)
    ]
    if others:
        return f"{type(others[0]).__name__} takes part in training."
    if isinstance(module, ClassifierClient) and module.is_balanced:
        return "classes have other weights in each coalition."
    config = find_loop(callbacks_of(trainer)).config
    if config.uploads:
        return f"{config.uploads[0]!r} has a state for each client and coalition."
    for strategy in config.strategies.values():
        if strategy.sends or strategy.reports:
            return f"{strategy!r} sends or reports tensors."
    if metric_of_aggregator(config):
        return f"{config.aggregator!r} reads a metric."
    return ""


#: Attributes of a FederatedDataModule that differ between coalitions.
_DIFFERENT = ("class_counts", "known_class_counts", "members", "train_dataloader")


class _ReadsOfMembers:
    """Record of whether the program reads data that a coalition would have of its members only."""

    def __init__(self, data: FederatedDataModule) -> None:
        self._name = ""
        self._watch(data, _DIFFERENT)
        if data.users_module is not None:  # any of its attributes may hold samples
            self._watch(data.users_module, None)

    def _watch(self, data: Any, names: Collection[str] | None) -> None:
        kind = type(data)

        def get_attribute(this: Any, name: str) -> Any:
            if not name.startswith("__") and (names is None or name in names):
                frame = sys._getframe(1)
                if not is_of_the_fit(frame) and frame.f_locals.get("self") is not this:
                    self._name = name
                    self.check()
            return kind.__getattribute__(this, name)

        watched = type(kind.__name__, (kind,), {"__getattribute__": get_attribute})
        watched.__module__ = kind.__module__
        watched.__qualname__ = kind.__qualname__
        data.__class__ = watched

    def check(self) -> None:
        if self._name:
            raise NotBatched(f"the program reads {self._name!r} of the data, of all clients.")


class ScoringAtOnce(CoalitionScoring):
    """Callback that scores all coalitions' models in a fit that trains them at once."""

    def __init__(
        self,
        data: FederatedDataModule,
        measures: Measures,
        job: TrainingJob,
        jobs: Sequence[TrainingJob],
    ) -> None:
        super().__init__(data, measures, job)
        self._jobs = [each for each in jobs if each.members != job.members]
        self._includes_all = len(self._jobs) < len(jobs)
        self._coalitions: list[CoalitionServer] = []
        self._scored: dict[Members, list[ScoredModel]] = {each.members: [] for each in jobs}
        self._models_after: dict[int, Tensor] = {}
        self._values: Mapping[str, Any] = {}

    def _begin_round(self, trainer: L.Trainer) -> None:
        has_begun = bool(self._start_hash)
        super()._begin_round(trainer)
        if has_begun:
            return
        loop: Any = find_loop(callbacks_of(trainer))
        self._values = _values_of(trainer)
        info = loop.run.info()
        self._coalitions = [CoalitionServer(list(job.members), info) for job in self._jobs]
        loop.run.engine.coalitions = self._coalitions

    def _end_round(self, trainer: L.Trainer) -> None:
        super()._end_round(trainer)
        round_index = trainer.current_epoch - 1
        if round_index == 0 and not are_equal(_values_of(trainer), self._values):
            raise NotBatched("training changes attributes of the module.")
        loop: Any = find_loop(callbacks_of(trainer))
        loop.run.engine.check_model()
        if round_index in ROUNDS_TO_KEEP:
            self._models_after[round_index] = loop.state.model().cpu().clone()
        if round_index in self._job.rounds and round_index != self._job.rounds[-1]:
            self._score_coalitions()

    def deliver(self, trainer: L.Trainer) -> None:
        super().deliver(trainer)
        loop: Any = find_loop(callbacks_of(trainer))
        loop.run.engine.check_model()
        self._score_coalitions()

    def _score_coalitions(self) -> None:
        if not self._measures:
            return
        vectors = [coalition.state.model() for coalition in self._coalitions]
        models = self._scoring.score_vectors(vectors)
        for job, model in zip(self._jobs, models):
            self._scored[job.members].append(model)

    def results(self) -> dict[Members, FitResult]:
        """Return the result of each job."""
        grand = self.result()
        results = {}
        for job, coalition in zip(self._jobs, self._coalitions):
            models = None
            if job.returns_models and grand.models is not None:
                trained = coalition.state.model().cpu().clone()
                models = FitModels(initial=grand.models.initial, trained=trained)
            results[job.members] = replace(grand, scored=self._scored[job.members], models=models)
        if self._includes_all:
            results[self._job.members] = grand
        return results

    def grand_models(self) -> dict[int, FitResult]:
        """Return the coalition of all clients after the rounds that the run is compared in."""
        grand = self.result()
        assert grand.models is not None
        kept = {}
        for round_index, model in self._models_after.items():
            models = FitModels(initial=grand.models.initial, trained=model)
            kept[round_index] = replace(grand, models=models, is_exact=False)
        return kept


def _values_of(trainer: L.Trainer) -> dict[str, Any]:
    values = ModuleSnapshot(trainer.lightning_module).values
    return {
        path: value for path, value in values.items() if not path.endswith("num_batches_tracked")
    }
