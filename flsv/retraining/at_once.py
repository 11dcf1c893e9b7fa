"""AtOnce: trains a run's coalitions at once, in groups, with proofs that each is what it would be if it trained alone.

Two clients are the witnesses, the one with the fewest and the one with the most samples: each trains alone in a fit of
its own, too. All models that a group of coalitions trains at once are discarded if, beyond rounding, the coalition of
all clients does not come to the run's own models, or a witness not to the models of its own fit. If such a difference
may be rounding, witnesses, all clients and the group train once more in 64 bits, to find out.

A group trains by the fit of a copy of the run, which trains the coalition of all clients as the run does. In each round
a client begins once and its batches are loaded once. The models of all coalitions that it belongs to then take their
steps on them together, each as a row of stacked tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.memory import is_oom_error

from flsv._lightning.patches import callbacks_of, find_loop
from flsv.games.members import EMPTY, Members
from flsv.retraining.coalition_fit import prepare_coalition_fit
from flsv.retraining.coalition_store import clients_text
from flsv.retraining.copied_fits import CopyOfRun, fit_quietly, in_quiet
from flsv.retraining.fit_scoring import CoalitionScoring
from flsv.retraining.one_by_one import OneByOne, Outcomes, of_all_ranks
from flsv.retraining.price import RowTrial, num_groups
from flsv.retraining.proofs import Proofs
from flsv.retraining.training_job import FitFailed, FitResult, TrainingJob
from flsv.scores.performance import Measures
from flsv.utilities.errors import NotBatched, reason_of
from flsv.vmap.coalition_rows import CoalitionRows


class AtOnce:
    """Training of a run's coalitions at once, in groups.

    Args:
        alone: trains the witnesses.
        run_copy: the copy of the run from before its fit.
        measures: the performance measures by which models are scored, by name.
        proofs: compare a group with the run and the witnesses.
        trial: what the dry run found out about rows of the run's module.
    """

    def __init__(
        self,
        alone: OneByOne,
        run_copy: CopyOfRun,
        measures: Measures,
        proofs: Proofs,
        trial: RowTrial,
    ) -> None:
        self.job = replace(alone.job, model_rounds=proofs.rounds_to_compare)
        self._alone = replace(alone, job=self.job)
        self._run_copy = run_copy
        self._measures = measures
        self._proofs = proofs
        self._trial = trial
        self._all_clients = tuple(range(len(alone.num_samples)))

    @property
    def witnesses(self) -> list[Members]:
        """Return the clients that also train alone in fits of their own."""
        num_samples = self._alone.num_samples
        clients = [client for client, count in enumerate(num_samples) if count > 0]
        by_samples = sorted(clients, key=num_samples.__getitem__)
        return [(by_samples[0],), (by_samples[-1],)]

    def results(self, coalitions: Sequence[Members], missing: Sequence[Members]) -> Outcomes:
        """Train the witnesses alone, and then each group of ``coalitions`` in which one is ``missing``. Yield the
        results of all ranks.

        Raises:
            NotBatched: they cannot be trained at once, or a proof has failed.
        """
        if self._trial.why_not:  # a resumed run has chosen these coalitions before
            raise NotBatched(self._trial.why_not)
        to_fit = [*self.witnesses, EMPTY] if EMPTY in missing else self.witnesses
        for members, outcome in self._alone.results(coalitions, missing=to_fit):
            if isinstance(outcome, FitFailed):
                raise NotBatched(f"training of {clients_text(members)} has failed: {outcome}.")
            self._proofs.expect(members, outcome)
            yield members, outcome

        rows = [members for members in coalitions if members not in (EMPTY, self._all_clients)]
        untrained_rows = set(missing).difference(self.witnesses)
        groups = [group for group in self._groups(rows) if untrained_rows.intersection(group)]
        ranks = self._alone.ranks
        groups_by_rank = [groups[rank :: ranks.size] for rank in range(ranks.size)]
        yield from of_all_ranks(ranks, groups_by_rank, self._train, "coalitions trained at once")

    def _groups(self, coalitions: Sequence[Members]) -> list[Sequence[Members]]:
        """Divide coalitions into groups of about the same size."""
        count = num_groups(len(coalitions), self._trial.num_elements, len(self._all_clients))
        return [coalitions[number::count] for number in range(count)]

    def _train(self, group: Sequence[Members]) -> dict[Members, FitResult]:
        """Train a group, and raise NotBatched whatever the error is."""
        try:
            return self._train_in_memory(group)
        except NotBatched:
            raise
        except Exception as error:  # a coalition that trains one by one is named in its error
            raise NotBatched(reason_of(error)) from error

    def _train_in_memory(self, group: Sequence[Members]) -> dict[Members, FitResult]:
        """Train a group, in parts if it does not fit into the memory."""
        try:
            return self._proven(group)
        except Exception as error:
            if not is_oom_error(error) or len(group) == 1:
                raise
            rank_zero_warn(
                f"{len(group)} groups of clients do not fit into the memory at once, and are trained in two parts. "
                "Their models may be rounded otherwise than on a machine with more memory."
            )
            halves = group[::2], group[1::2]
            return {**self._train_in_memory(halves[0]), **self._train_in_memory(halves[1])}

    def _proven(self, group: Sequence[Members]) -> dict[Members, FitResult]:
        """Train a group at once. Return its results if they differ by rounding only from those of earlier trainings."""
        results = self._fit(group)
        differences = self._proofs.differences(results)
        if not differences:
            return {members: results[members] for members in group if members in results}

        in_double = self._proofs.check_in_double(
            differences, train=lambda: self._fit(group, in_double=True)
        )
        # Those whose own scores are stored already come first. After a kill others are missing then, so that the group
        # trains once more.
        own_fits = {*self.witnesses, self._all_clients}
        return {
            members: replace(results[members], in_double=in_double[members].scored)
            for members in sorted(results, key=lambda members: members not in own_fits)
            if members in in_double
        }

    def _fit(self, group: Sequence[Members], in_double: bool = False) -> dict[Members, FitResult]:
        witnesses_to_add = [members for members in self.witnesses if members not in group]
        return fit_at_once(
            self._run_copy,
            self._measures,
            replace(self.job, members=self._all_clients, in_double=in_double),
            coalitions=[*group, *witnesses_to_add],
            witnesses=self.witnesses,
            joins_clients=self._trial.joins_clients,
        )


def fit_at_once(
    run_copy: CopyOfRun,
    measures: Measures,
    job: TrainingJob,
    coalitions: Sequence[Members],
    witnesses: Collection[Members],
    joins_clients: bool,
) -> dict[Members, FitResult]:
    """Train ``coalitions`` at once by one fit of a copy of the run, and return their results.

    Args:
        run_copy: the copy of the run from before its fit.
        measures: the performance measures by which models are scored, by name.
        job: the request for the coalition of all clients. That for each coalition has other members only.
        coalitions: the coalitions besides that of all clients, whose result is returned, too.
        witnesses: the coalitions whose results have the models after ``job.model_rounds``, too.
        joins_clients: whether the rows of all clients take their steps together.

    Raises:
        NotBatched: the coalitions cannot be trained at once.
        torch.OutOfMemoryError: they do not fit into the memory together.
    """
    with in_quiet() as changed_tensors:
        # In a function of its own, after which nothing refers to the copy, so that it is freed here.
        results = _fit_copy(run_copy, measures, job, coalitions, witnesses, joins_clients)
    changes = [*changed_tensors, *run_copy.folder.changed_files]
    if changes:
        raise NotBatched(
            f"training changes {changes[0]}, which the program keeps outside of the module."
        )
    return results


def _fit_copy(
    run_copy: CopyOfRun,
    measures: Measures,
    job: TrainingJob,
    coalitions: Sequence[Members],
    witnesses: Collection[Members],
    joins_clients: bool,
) -> dict[Members, FitResult]:
    with run_copy.folder.entered() as folder:
        trainer, module, data = run_copy.load()
        scoring: Any = prepare_coalition_fit(
            trainer,
            module,
            data,
            measures=measures,
            job=job,
            folder=folder,
            make_scoring=partial(CoalitionScoring, coalitions=coalitions, witnesses=witnesses),
        )
        loop = find_loop(callbacks_of(trainer))
        loop.set_arguments(engine=partial(CoalitionRows, joins_clients=joins_clients))
        CoalitionRows.guard_first_hooks(module, data)
        fit_quietly(trainer, module, data)
        results: dict[Members, FitResult] = scoring.results()
    return results
