"""CoalitionTraining: trains the coalitions that have no models in a store yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from flsv.core import Ranks
from flsv.core.ranks import balance_load
from flsv.games.members import EMPTY, Members
from flsv.retraining.coalition_store import CoalitionStore, clients_text
from flsv.retraining.copied_fits import CopiedFits
from flsv.retraining.training_job import FitFailed, FitOutcome, FitResult, TrainingJob
from flsv.utilities.errors import ConfigurationError, listed
from flsv.values.coalition_files import NO_ROUND

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


@dataclass(eq=False)
class CoalitionTraining:
    """Training of coalitions with one seed.

    Args:
        fits: train coalitions in copies of the run.
        job: the request for each coalition, apart from its members.
        num_samples: ``[n]``, the clients' numbers of samples, by which ranks divide the coalitions.
        start_hash: a hash of the weights from which all fits must start. None: all must start from the same weights.

    Attributes:
        first_updates: ``{coalition: norms of the members' first updates}``, see :class:`FitResult`.
        changed_tensors: paths of the tensors outside of the module that fits have changed.
    """

    fits: CopiedFits
    job: TrainingJob
    num_samples: Sequence[int]
    start_hash: str | None = None
    first_updates: dict[Members, Mapping[int, Tensor]] = field(default_factory=dict)
    changed_tensors: set[str] = field(default_factory=set)
    _hash_of_fits: str = ""

    def train(
        self,
        coalitions: Sequence[Members],
        store: CoalitionStore,
        count: Callable[[], None] = lambda: None,
    ) -> None:
        """Train those of ``coalitions`` that have no models in ``store``. Successful results are stored, even if other
        fits fail. ``count`` is called after each coalition.
        """
        missing = store.missing(self.job.seed, coalitions)
        # The empty coalition's model is the untrained one, with which the fit of any coalition begins.
        coalitions_to_fit = [members for members in missing if members]
        scores_untrained = EMPTY in missing
        if scores_untrained and not coalitions_to_fit:
            coalitions_to_fit = [(0,)]  # the fit of one client is cheap

        failures = {}
        for members, result in self.results(coalitions_to_fit, scores_untrained, store.ranks):
            if isinstance(result, FitFailed):
                failures[members] = result
            else:
                self.add(members, result, store)
                count()
        if failures:
            raise FitsFailed(failures)

    def add(
        self,
        members: Members,
        result: FitResult,
        store: CoalitionStore,
    ) -> None:
        """Store the scores of a fit that are missing."""
        self._check_start(result.start_hash)
        self.changed_tensors.update(result.changed_tensors)
        self.first_updates[members] = result.first_updates
        missing = store.missing(self.job.seed, [members, EMPTY])
        if members in missing:
            models = dict(zip(store.rounds, result.scored))
            store.add(self.job.seed, members, models)
        if EMPTY in missing and result.untrained is not None:
            store.add(self.job.seed, EMPTY, {NO_ROUND: result.untrained})

    def _check_start(self, start_hash: str) -> None:
        """Raise ConfigurationError if a fit has started from other weights than the run or earlier fits."""
        self._hash_of_fits = self._hash_of_fits or self.start_hash or start_hash
        if start_hash == self._hash_of_fits:
            return
        if self.start_hash:
            raise ConfigurationError(NOT_THE_RUNS_START)
        raise ConfigurationError(NOT_THE_SAME_START)

    def results(
        self, coalitions: Sequence[Members], scores_untrained: bool, ranks: Ranks
    ) -> Outcomes:
        """Train coalitions, divided among the ranks by their samples. Yield the results of all ranks."""
        jobs = [
            replace(self.job, members=members, scores_untrained=scores_untrained)
            for members in coalitions
        ]
        if ranks.size == 1:
            yield from self._results_of_rank(jobs)
            return
        # Results are gathered after each coalition, so that a killed run loses at most one coalition of each rank. A
        # rank that has no coalition left takes part, too.
        jobs_by_rank = self._divided(jobs, ranks.size)
        num_turns = max(map(len, jobs_by_rank))
        for turn in range(num_turns):
            jobs_of_turn = jobs_by_rank[ranks.rank][turn : turn + 1]
            yield from self._results_of_turn(jobs_of_turn, ranks)

    def _divided(
        self,
        jobs: Sequence[TrainingJob],
        num_ranks: int,
    ) -> list[list[TrainingJob]]:
        """Divide jobs among the ranks by their members' numbers of samples."""
        costs = [sum(self.num_samples[client] for client in job.members) for job in jobs]
        jobs_by_rank: list[list[TrainingJob]] = [[] for _ in range(num_ranks)]
        for job, rank in zip(jobs, balance_load(costs, num_ranks)):
            jobs_by_rank[rank].append(job)
        return jobs_by_rank

    def _results_of_turn(self, jobs: Sequence[TrainingJob], ranks: Ranks) -> Outcomes:
        """Train this rank's ``jobs``. Yield the results of all ranks, or raise the error of one."""
        results_or_error: dict[Members, FitOutcome] | Exception
        try:
            results_or_error = dict(self._results_of_rank(jobs))
        except Exception as error:
            results_or_error = error  # raised below: the other ranks wait for this one
        for results_of_rank in ranks.all_gather(results_or_error, "coalitions' trainings"):
            if isinstance(results_of_rank, Exception):
                raise results_of_rank
            yield from results_of_rank.items()

    def _results_of_rank(self, jobs: Sequence[TrainingJob]) -> Outcomes:
        for job, result in self.fits.train(jobs):
            yield job.members, result
