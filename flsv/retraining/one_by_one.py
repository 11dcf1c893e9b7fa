"""OneByOne: trains coalitions, each by a fit of its own; and the training of those that a store does not have yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from flsv.core import ALONE, Ranks
from flsv.core.ranks import balance_load
from flsv.games.members import EMPTY, Members
from flsv.retraining.coalition_store import CoalitionStore, clients_text
from flsv.retraining.copied_fits import CopiedFits
from flsv.retraining.training_job import FitFailed, FitOutcome, FitResult, TrainingJob
from flsv.utilities.errors import ConfigurationError, listed

#: Errors if fits with one seed start from different weights.
NOT_THE_SAME_START = (
    "two coalitions started from different weights, although their seed is the same, so their models do not show what "
    "a client adds. The module draws its initial weights from a generator of its own. Draw them from torch's global "
    "generator, which is seeded."
)
NOT_THE_RUNS_START = (
    "coalitions do not start from the initial weights of the run, because the module draws other weights now. Create "
    "the module as for the run, after the same seed_everything."
)

Task = TypeVar("Task")
#: The coalitions that are trained, each with what its fit comes to.
Outcomes = Iterator[tuple[Members, FitOutcome]]


class FitsFailed(ConfigurationError):
    """Error: the fits of some coalitions have failed, ``{coalition: error}``."""

    def __init__(self, failed: Mapping[Members, FitFailed]) -> None:
        self.failed = failed
        coalitions_by_reason: dict[str, list[Members]] = {}
        for members, failure in failed.items():
            reason = f"{failure}".rstrip(".")
            coalitions_by_reason.setdefault(reason, []).append(members)

        reasons = [
            f"{listed(coalitions, show=clients_text)}: {reason}"
            for reason, coalitions in coalitions_by_reason.items()
        ]
        plural = "s" if len(failed) > 1 else ""
        super().__init__(f"{len(failed)} coalition{plural} failed to train, {'; '.join(reasons)}.")

    def __reduce__(self) -> tuple[type, tuple[Mapping[Members, FitFailed]]]:
        """Let a rank send the error to the other ranks, which construct it from the coalitions."""
        return type(self), (self.failed,)


class SameStart:
    """Check that all fits start from the same weights.

    Args:
        start_hash: a hash of these weights. None: they are those of the first fit.
    """

    def __init__(self, start_hash: str | None = None) -> None:
        self._start_hash = start_hash
        self._hash_of_fits = start_hash or ""

    def check(self, members: Members, result: FitResult) -> None:
        """Raise ConfigurationError if a fit has started from other weights."""
        self._hash_of_fits = self._hash_of_fits or result.start_hash
        if result.start_hash == self._hash_of_fits:
            return
        if self._start_hash:
            raise ConfigurationError(NOT_THE_RUNS_START)
        raise ConfigurationError(NOT_THE_SAME_START)


@dataclass(frozen=True, eq=False)
class OneByOne:
    """Training of coalitions with one seed, each by a fit of its own."""

    #: Trains coalitions in copies of the run.
    fits: CopiedFits
    #: The request for each coalition, apart from its members.
    job: TrainingJob
    #: ``[n]``, the clients' numbers of samples, by which ranks divide the coalitions.
    num_samples: Sequence[int]
    ranks: Ranks = ALONE

    def results(self, coalitions: Sequence[Members], missing: Sequence[Members]) -> Outcomes:
        """Train the ``missing`` ones of ``coalitions``, divided among the ranks by their samples. Yield the results of
        all ranks.
        """
        # The empty coalition's model is the untrained one, with which the fit of any coalition begins.
        to_fit = [members for members in missing if members]
        scores_untrained = EMPTY in missing
        if scores_untrained and not to_fit:
            to_fit = [(0,)]  # the fit of one client is cheap
        jobs = [
            replace(self.job, members=members, scores_untrained=scores_untrained)
            for members in to_fit
        ]
        if self.ranks.size == 1:
            yield from self._results(jobs)
            return
        yield from of_all_ranks(
            self.ranks,
            self._divided(jobs),
            train=lambda job: dict(self._results([job])),
            title="coalitions' trainings",
        )

    def _divided(self, jobs: Sequence[TrainingJob]) -> list[list[TrainingJob]]:
        """Divide jobs among the ranks by their members' numbers of samples."""
        costs = [sum(self.num_samples[client] for client in job.members) for job in jobs]
        jobs_by_rank: list[list[TrainingJob]] = [[] for _ in range(self.ranks.size)]
        for job, rank in zip(jobs, balance_load(costs, self.ranks.size)):
            jobs_by_rank[rank].append(job)
        return jobs_by_rank

    def _results(self, jobs: Sequence[TrainingJob]) -> Outcomes:
        for job, result in self.fits.train(jobs):
            yield job.members, result


def of_all_ranks(
    ranks: Ranks,
    tasks_by_rank: Sequence[Sequence[Task]],
    train: Callable[[Task], Mapping[Members, FitOutcome]],
    title: str,
) -> Outcomes:
    """Let each rank do its tasks, and yield the results of all ranks, or raise the error of one. Results are gathered
    after each task, so that a killed run loses at most one task of each rank.
    """
    for turn in range(max(map(len, tasks_by_rank))):
        results: Mapping[Members, FitOutcome] | Exception = {}  # a rank may have no task left
        try:
            for task in tasks_by_rank[ranks.rank][turn : turn + 1]:
                results = train(task)
        except Exception as error:
            results = error  # raised below: the other ranks wait for this one
        for results_of_rank in ranks.all_gather(results, title):
            if isinstance(results_of_rank, Exception):
                raise results_of_rank
            yield from results_of_rank.items()


class WayToTrain(Protocol):
    """A way to train coalitions: :class:`OneByOne`, or all at once."""

    @property
    def job(self) -> TrainingJob:
        """The request for each coalition, apart from its members."""

    def results(self, coalitions: Sequence[Members], missing: Sequence[Members]) -> Outcomes:
        """Train at least the ``missing`` ones of ``coalitions``, and yield the results of all ranks."""


def train_missing(
    way: WayToTrain,
    coalitions: Sequence[Members],
    store: CoalitionStore,
    check: Callable[[Members, FitResult], None],
    count: Callable[[], None] = lambda: None,
) -> None:
    """Train those of ``coalitions`` that have no models in ``store``.

    Args:
        way: how they are trained.
        coalitions: all coalitions that are needed.
        store: gets the successful results, even if other fits fail.
        check: raises an error if a result is not valid.
        count: is called after each coalition.

    Raises:
        FitsFailed: the fits of some coalitions have failed.
    """
    seed = way.job.seed
    missing = store.missing(seed, coalitions)
    if not missing:
        return
    failures = {}
    for members, result in way.results(coalitions, missing):
        if isinstance(result, FitFailed):
            failures[members] = result
            continue
        check(members, result)
        if store.add_result(seed, members, result):
            count()
    if failures:
        raise FitsFailed(failures)
