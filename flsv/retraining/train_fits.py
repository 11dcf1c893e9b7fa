"""CoalitionTraining: trains the coalitions that a store lacks, with several seeds, and compares with the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from flsv.core import ALONE, Ranks
from flsv.core.ranks import balance_load
from flsv.games.members import EMPTY, Members
from flsv.retraining.coalition_store import CoalitionStore, clients_text
from flsv.retraining.copied_fits import CopiedFits
from flsv.retraining.fit_order import FitFailed, FitOrder, FitResult
from flsv.utilities.errors import ConfigurationError, listed
from flsv.values.coalition_files import NO_ROUND, Training

#: Errors if weights are drawn anew.
NOT_THE_SAME_START = (
    "two coalitions started from different weights, although their seed is the same, so that their models do not tell "
    "what a client adds: the module draws its weights by a generator of its own. Let torch's global generator draw "
    "them, which is seeded."
)
NOT_THE_RUNS_START = (
    "coalitions do not start from the weights with which the run has begun, since the module draws others now. Make it "
    "as for the run, under the same seed_everything."
)
Result = TypeVar("Result")


class FitsFailed(ConfigurationError):
    """Error: some coalitions' fits have failed, ``{coalition: error}``."""

    def __init__(self, failed: Mapping[Members, FitFailed]) -> None:
        self.failed = failed
        coalitions_by_reason: dict[str, list[Members]] = {}
        for members, failure in failed.items():
            reason = f"{failure}".rstrip(".")
            coalitions_by_reason.setdefault(reason, []).append(members)

        reasons = []
        for reason, coalitions in coalitions_by_reason.items():
            reasons.append(f"{listed(coalitions, show=clients_text)}: {reason}")
        plural = "s" if len(failed) > 1 else ""
        super().__init__(f"{len(failed)} coalition{plural} failed to train, {'; '.join(reasons)}.")

    def __reduce__(self) -> tuple[type, tuple[Mapping[Members, FitFailed]]]:
        """Let a rank send the error to the others, which make it anew from the coalitions."""
        return type(self), (self.failed,)


class CoalitionTraining:
    """Training of coalitions by ``trainer``."""

    def __init__(
        self,
        trainer: CopiedFits,
        # Each coalition gets a copy of it with its members.
        order: FitOrder,
        # The clients' numbers of samples, [n].
        num_samples: Sequence[int],
        # A hash of the weights with which the order's seed must start. None: coalitions only need the same.
        start_hash: str | None = None,
    ) -> None:
        self.trainer = trainer
        self.order = order
        self._num_samples = num_samples
        self._start_hash = start_hash
        # The members' first updates in fits with the order's seed, see FitResult.
        self.first_updates: dict[Members, Mapping[int, Tensor]] = {}
        # Paths of the program's tensors that fits have changed.
        self.changed_tensors: set[str] = set()
        # Whether fits run validations, as the run does.
        self.is_whole = order.is_whole
        # The hash of the weights from which the coalitions of a seed start.
        self._start_hash_by_seed: dict[int, str] = {}
        if start_hash is not None:
            self._start_hash_by_seed[order.seed] = start_hash

    @property
    def num_clients(self) -> int:
        """Return the number of clients n."""
        return len(self._num_samples)

    def train(
        self,
        coalitions: Sequence[Members],
        seeds: Sequence[int],
        store: CoalitionStore,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Train the coalitions that a store lacks. Successful results are stored, even if other fits fail."""
        trainings: list[Training] = []
        for seed in seeds:
            missing = store.missing(seed, coalitions)
            members_to_fit = [members for members in missing if members]
            if missing and not members_to_fit:
                # The empty coalition's model is that of any fit before training, and one client's is cheap.
                members_to_fit = [(0,)]
            trainings += [Training(seed, members) for members in members_to_fit]

        failures: dict[Members, FitFailed] = {}
        for training, result in self.fits(trainings, store.ranks):
            if isinstance(result, FitFailed):
                failures[training.members] = result
                continue
            self._check_start(training.seed, result.start_hash)
            self.changed_tensors.update(result.changed_tensors)
            if training.seed == self.order.seed:
                self.first_updates[training.members] = result.first_updates
            self._store_scores(training, result, store, coalitions)
            say(store.progress(training.seed, coalitions))
        if failures:
            raise FitsFailed(failures)

    def _check_start(self, seed: int, start_hash: str) -> None:
        """Raise ConfigurationError if a fit starts from other weights than earlier fits of the seed."""
        expected_hash = self._start_hash_by_seed.setdefault(seed, start_hash)
        if start_hash == expected_hash:
            return
        if expected_hash == self._start_hash:
            raise ConfigurationError(NOT_THE_RUNS_START)
        raise ConfigurationError(NOT_THE_SAME_START)

    def _store_scores(
        self,
        training: Training,
        result: FitResult,
        store: CoalitionStore,
        coalitions: Sequence[Members],
    ) -> None:
        """Store the scores of a fit's models that the store lacks of ``coalitions``."""
        seed, members = training
        is_wanted = members in coalitions  # or the fit only scores the untrained model
        if is_wanted and store.missing(seed, [members]):
            store.add(seed, members, dict(zip(store.rounds, result.scored)))
        lacks_empty = EMPTY in coalitions and store.missing(seed, [EMPTY])
        if lacks_empty and result.untrained is not None:
            store.add(seed, EMPTY, {NO_ROUND: result.untrained})

    def fits(
        self, trainings: Sequence[Training], ranks: Ranks = ALONE
    ) -> Iterator[tuple[Training, FitResult | FitFailed]]:
        """Train coalitions, divided among the ranks by their samples. Yield the results of all ranks."""
        if ranks.size == 1:
            yield from self._fits_of_rank(trainings)
            return
        costs = [self.cost(training.members) for training in trainings]
        trainings_by_rank: list[list[Training]] = [[] for _ in range(ranks.size)]
        for training, rank in zip(trainings, balance_load(costs, ranks.size)):
            trainings_by_rank[rank].append(training)
        remaining_trainings = trainings_by_rank[ranks.rank]
        # Results are gathered after each coalition, so that a killed run loses one coalition of a rank. A rank without
        # a coalition left takes part, too.
        num_turns = max(map(len, trainings_by_rank))
        for _ in range(num_turns):
            next_training = remaining_trainings[:1]
            remaining_trainings = remaining_trainings[1:]
            fit_next = partial(self._fits_of_rank, next_training)
            yield from gathered(ranks, fit_next, "coalitions' trainings")

    def cost(self, members: Members) -> float:
        """Return a coalition's number of samples."""
        known_clients = [client for client in members if client < self.num_clients]
        return float(sum(self._num_samples[client] for client in known_clients))

    def _fits_of_rank(
        self, trainings: Sequence[Training]
    ) -> Iterator[tuple[Training, FitResult | FitFailed]]:
        """Train coalitions on this rank, and yield each training with its result or error."""
        orders: list[FitOrder] = []
        for training in trainings:
            is_first_of_seed = all(order.seed != training.seed for order in orders)
            order = replace(
                self.order,
                members=training.members,
                seed=training.seed,
                scores_untrained=is_first_of_seed,
                is_whole=self.is_whole,
            )
            orders.append(order)
        for order, result in self.trainer.train(orders):
            yield Training(order.seed, order.members), result


def gathered(
    ranks: Ranks, train: Callable[[], Iterable[tuple[Training, Result]]], description: str
) -> Iterator[tuple[Training, Result]]:
    """Call ``train`` on this rank, and yield the pairs of all ranks. Any rank's error is raised."""
    results_or_error: dict[Training, Result] | Exception
    try:
        results_or_error = dict(train())
    except Exception as error:
        results_or_error = error  # raised below: the other ranks wait for this one
    for results_of_rank in ranks.all_gather(results_or_error, description):
        if isinstance(results_of_rank, Exception):
            raise results_of_rank
        yield from results_of_rank.items()
