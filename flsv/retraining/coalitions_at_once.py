"""CoalitionsAtOnce: trains a run's coalitions at once, and proves that each is what it would be if it trained alone.

Two clients are the witnesses, the one with the fewest and the one with the most samples: each trains alone in a fit of
its own, too. All models that a group of coalitions trains at once are discarded if, beyond rounding, the coalition of
all clients does not come to the run's own models, or a witness not to the models of its own fit. If such a difference
may be rounding, witnesses, all clients and the group train once more in 64 bits, to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor

from flsv.games.members import EMPTY, Members
from flsv.retraining.coalition_store import CoalitionStore, clients_text
from flsv.retraining.copied_fits import CopyOfRun
from flsv.retraining.fit_at_once import fit_at_once
from flsv.retraining.price import num_groups
from flsv.retraining.proofs import (
    Expected,
    ProofFailed,
    check_in_double,
    find_differences,
    last_round_of_run,
    no_rounding,
)
from flsv.retraining.train_fits import CoalitionTraining
from flsv.retraining.training_job import FitFailed, FitResult
from flsv.scores.performance import Measures
from flsv.utilities.errors import NotBatched, reason_of


@dataclass(eq=False)
class CoalitionsAtOnce:
    """Training of a run's coalitions at once, in groups that are stored one after the other."""

    #: Trains the witnesses.
    training: CoalitionTraining
    store: CoalitionStore
    run_copy: CopyOfRun
    measures: Measures
    #: The number of elements of a model.
    num_elements: int
    #: The run's own models ``[P]`` by round, which the coalition of all clients must reproduce.
    models_of_run: Mapping[int, Tensor]
    # The last rounds after which all clients in a group differ from the run, although not in 64 bits.
    _doubted_rounds: list[int | None] = field(default_factory=list)
    # What the witnesses have come to alone.
    _fits_of_witnesses: list[Expected] = field(default_factory=list)
    # What the witnesses and all clients come to in 64 bits, each in a fit of its own.
    _fits_in_double: list[Expected] = field(default_factory=list)

    @property
    def witnesses(self) -> list[Members]:
        """Return the clients that also train alone in fits of their own."""
        num_samples = self.training.num_samples
        clients = [client for client, count in enumerate(num_samples) if count > 0]
        by_samples = sorted(clients, key=num_samples.__getitem__)
        return [(by_samples[0],), (by_samples[-1],)]

    def train(self, coalitions: Sequence[Members], count: Callable[[], None]) -> None:
        """Train those of ``coalitions`` that have no models in the store. ``count`` is called after each.

        Raises:
            NotBatched: they cannot be trained at once, or a proof has failed. Then the store has no models of these
                coalitions, except those of the witnesses.
        """
        num_clients = len(self.training.num_samples)
        rows = [members for members in coalitions if 0 < len(members) < num_clients]
        if not self._missing(rows):
            return
        try:
            job = self.training.job
            self.training.job = replace(job, model_rounds=self._rounds_to_compare())
            try:
                self._train_witnesses(count)
            finally:
                self.training.job = job
            groups = [group for group in self._groups(rows) if self._missing(group)]
            self._train_groups(groups, count)
        except NotBatched:
            others = [members for members in rows if members not in self.witnesses]
            self.store.discard(self.training.job.seed, others)
            self.store.discard_in_double(self.training.job.seed)
            raise

    def _missing(self, coalitions: Sequence[Members]) -> list[Members]:
        return self.store.missing(self.training.job.seed, coalitions)

    def _groups(self, coalitions: Sequence[Members]) -> list[Sequence[Members]]:
        """Divide coalitions into groups of about the same size."""
        num_clients = len(self.training.num_samples)
        count = num_groups(len(coalitions), self.num_elements, num_clients)
        return [coalitions[number::count] for number in range(count)]

    # ---- the witnesses, one by one

    def _train_witnesses(self, count: Callable[[], None]) -> None:
        training = self.training
        scores_untrained = bool(self._missing([EMPTY]))
        for members, outcome in training.results(
            self.witnesses, scores_untrained, self.store.ranks
        ):
            if isinstance(outcome, FitFailed):
                raise NotBatched(f"training of {clients_text(members)} has failed: {outcome}.")
            if self._missing([members]):
                count()
            training.add(members, outcome, self.store)
            self._fits_of_witnesses.append(Expected.of_fit(members, outcome, training.job.rounds))

    def _rounds_to_compare(self) -> tuple[int, ...]:
        return tuple(sorted({*self.models_of_run, *self.training.job.rounds}))

    # ---- groups of coalitions

    def _train_groups(self, groups: Sequence[Sequence[Members]], count: Callable[[], None]) -> None:
        """Train groups, each at one rank. All ranks store the results of each turn."""
        ranks = self.store.ranks
        for first in range(0, len(groups), ranks.size):
            group = groups[first + ranks.rank : first + ranks.rank + 1]
            outcome = self._outcome(group[0]) if group else {}
            for results in ranks.all_gather(outcome, "coalitions trained at once"):
                if isinstance(results, NotBatched):
                    raise results
                for members, result in results.items():
                    if self._missing([members]):
                        self.training.add(members, result, self.store)
                        count()
                    self._add_in_double(members, result)

    def doubted_round(self) -> int | None:
        """Return the last round after which all clients at once differ from the run, although not in 64 bits. The copy
        of the run itself may then differ, too. None: they do not differ. All ranks call it.
        """
        rounds_by_rank = self.store.ranks.all_gather(self._doubted_rounds, "doubted rounds")
        rounds = [index for rounds in rounds_by_rank for index in rounds if index is not None]
        return max(rounds, default=None)

    def _outcome(self, group: Sequence[Members]) -> dict[Members, FitResult] | NotBatched:
        """Train a group. Return its results, or the error that prevents it."""
        try:
            return self._train_group(group)
        except ProofFailed as error:
            return error
        except Exception as error:  # a coalition that trains one by one is named in its error
            return NotBatched(reason_of(error))

    def _add_in_double(self, members: Members, result: FitResult) -> None:
        """Add what a coalition's models come to in 64 bits to their scores, if it is known."""
        if not result.in_double:
            return
        job = self.training.job
        models = dict(zip(job.rounds, result.in_double))
        self.store.add_in_double(job.seed, members, models)

    def _train_group(self, group: Sequence[Members]) -> dict[Members, FitResult]:
        try:
            results = self._proven(group)
        except Exception as error:
            if not is_oom_error(error) or len(group) == 1:
                raise
            rank_zero_warn(
                f"{len(group)} groups of clients do not fit into the memory at once, and are trained in two parts. "
                "Their models may be rounded otherwise than on a machine with more memory."
            )
            return {**self._train_group(group[::2]), **self._train_group(group[1::2])}
        return results

    def _proven(self, group: Sequence[Members]) -> dict[Members, FitResult]:
        """Train a group at once. Return its results if they differ by rounding only from those of earlier trainings."""
        results = self._fit(group)
        differences = [
            difference
            for expected in [*self._fits_of_witnesses, self._run()]
            for difference in find_differences(
                _result_of(results, expected.members), expected, self.training.job.rounds
            )
        ]
        if not differences:
            return {members: results[members] for members in group if members in results}

        try:
            results_in_double = self._fit(group, in_double=True)
            for expected in self._trained_in_double():
                result = _result_of(results_in_double, expected.members)
                check_in_double(result, expected, self.training.job.rounds, differences)
            self._doubted_rounds.append(last_round_of_run(differences))
        except Exception as error:
            if is_oom_error(error) or isinstance(error, ProofFailed):
                raise
            # Such as a module that computes in 32 bits only.
            raise no_rounding(differences, f"in 64 bits, {reason_of(error)}") from error
        return {
            members: replace(result, in_double=results_in_double[members].scored)
            for members, result in results.items()
            if members in results_in_double
        }

    def _fit(self, group: Sequence[Members], in_double: bool = False) -> dict[Members, FitResult]:
        witnesses_to_add = [members for members in self.witnesses if members not in group]
        return fit_at_once(
            self.run_copy,
            self.measures,
            replace(
                self.training.job,
                members=self._all_clients,
                model_rounds=self._rounds_to_compare(),
                in_double=in_double,
            ),
            coalitions=[*group, *witnesses_to_add],
            witnesses=self.witnesses,
        )

    @property
    def _all_clients(self) -> Members:
        return tuple(range(len(self.training.num_samples)))

    def _run(self) -> Expected:
        """Return the run's own models, to which all clients together must come."""
        models = self.store.scores(self.training.job.seed).models
        return Expected(
            self._all_clients,
            self.models_of_run,
            scored=models.get(self._all_clients, {}),
            is_run=True,
        )

    def _trained_in_double(self) -> list[Expected]:
        """Train the witnesses and all clients in 64 bits, each in a fit of its own, if this was not done yet."""
        if not self._fits_in_double:
            job = replace(self.training.job, model_rounds=self._rounds_to_compare(), in_double=True)
            coalitions = [*self.witnesses, self._all_clients]
            jobs = [replace(job, members=members) for members in coalitions]
            for job, result in self.training.fits.train(jobs):
                if isinstance(result, FitFailed):
                    raise NotBatched(f"{result}")
                self._fits_in_double.append(Expected.of_fit(job.members, result, job.rounds))
        return self._fits_in_double


def _result_of(results: Mapping[Members, FitResult], members: Members) -> FitResult:
    if members not in results:
        raise NotBatched(f"a filter may exclude an update of {clients_text(members)}.")
    return results[members]
