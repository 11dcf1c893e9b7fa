"""Proofs that coalitions are trained as the run is, and those that train at once as if each trained alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor

from flsv._lightning.rounding import MAX_ROUNDING
from flsv.games.members import Members
from flsv.retraining.coalition_store import clients_text
from flsv.retraining.differences import (
    Difference,
    Expected,
    ProofFailed,
    check_in_double,
    find_differences,
    last_round_of_run,
    no_rounding,
)
from flsv.retraining.one_by_one import OneByOne, SameStart
from flsv.retraining.scored_run import ScoredRun
from flsv.retraining.training_job import FitFailed, FitOutcome, FitResult
from flsv.utilities.errors import ConfigurationError, NotBatched, listed, reason_of


class Comparison(NamedTuple):
    """How a coalition of all clients, trained once more, compares with the run."""

    #: A sentence, or None: it comes to the same model.
    difference: str | None = None
    #: Whether it comes to another model without validations, and to the run's with them.
    needs_validations: bool = False


class Proofs:
    """Comparisons which prove that coalitions are trained as the run is.

    Args:
        scored: the run, with what coalitions must come to if they are trained twice.
        alone: trains single coalitions, for comparison.
    """

    def __init__(self, scored: ScoredRun, alone: OneByOne) -> None:
        run = scored.run
        self._scored = scored
        self._alone = alone
        self._is_on_cpu = run.trainer.strategy.root_device.type == "cpu"
        self._start = SameStart(run.memory["start"] if run.resumed else None)
        # The run's models [P] by round that the coalition of all clients must reproduce.
        self._models_of_run: dict[int, Tensor] = {}
        if not run.changes:
            self._models_of_run[scored.store.rounds[-1]] = run.federation.state.model()
            if "first" in run.memory:
                self._models_of_run[run.memory["checked_round"]] = run.memory["first"]
        # The round up to which all clients are trained again after the training of coalitions.
        self._round_to_repeat: int | None = run.memory.get("checked_round")
        # {coalition: norms of the members' first updates}, see FitResult.
        self._first_updates: dict[Members, Mapping[int, Tensor]] = {}
        self._changed_tensors: set[str] = set()
        # What the witnesses have come to alone, and with all clients in 64 bits.
        self._expected: dict[Members, Expected] = {}
        self._expected_in_double: list[Expected] = []
        # The last rounds after which all clients in a group differ from the run, although not in 64 bits.
        self._doubted_rounds: list[int | None] = []

    # ---- each fit

    def check(self, members: Members, result: FitResult) -> None:
        """Note what a fit has changed, and raise ConfigurationError if it has started from other weights."""
        self._start.check(members, result)
        self._changed_tensors.update(result.changed_tensors)
        self._first_updates[members] = result.first_updates

    # ---- coalitions that train at once

    @property
    def rounds_to_compare(self) -> tuple[int, ...]:
        """The rounds after which models of groups, witnesses and the run are compared."""
        return tuple(sorted({*self._models_of_run, *self._scored.store.rounds}))

    def expect(self, members: Members, result: FitResult) -> None:
        """Let groups with a coalition come to what its own fit has come to."""
        self._expected[members] = Expected.of_fit(members, result, self._scored.store.rounds)

    def differences(self, results: Mapping[Members, FitResult]) -> list[Difference]:
        """Return the differences of a group from earlier trainings that plain rounding does not explain.

        Raises:
            NotBatched: a coalition to compare with an earlier training has no result.
        """
        rounds = self._scored.store.rounds
        return [
            difference
            for expected in [*self._expected.values(), self._run()]
            for difference in find_differences(_result_of(results, expected), expected, rounds)
        ]

    def check_in_double(
        self, differences: Sequence[Difference], train: Callable[[], dict[Members, FitResult]]
    ) -> dict[Members, FitResult]:
        """Let ``train`` repeat the training of a group in 64 bits, and return its results.

        Raises:
            ProofFailed: the differences are no rounding, since they do not vanish.
        """
        try:
            results = train()
            for expected in self._trained_in_double():
                result = _result_of(results, expected)
                check_in_double(result, expected, self._scored.store.rounds, differences)
        except Exception as error:
            if is_oom_error(error) or isinstance(error, ProofFailed):
                raise
            # Such as a module that computes in 32 bits only.
            raise no_rounding(differences, f"in 64 bits, {reason_of(error)}") from error
        self._doubted_rounds.append(last_round_of_run(differences))
        return results

    def _run(self) -> Expected:
        """Return the run's own models, to which all clients together must come."""
        all_clients = self._scored.run.all_clients
        models = self._scored.store.scores(self._alone.job.seed).models
        scored = models.get(all_clients, {})
        return Expected(all_clients, self._models_of_run, scored=scored, is_run=True)

    def _trained_in_double(self) -> list[Expected]:
        """Train the witnesses and all clients in 64 bits, each in a fit of its own, if this was not done yet."""
        if not self._expected_in_double:
            job = replace(self._alone.job, model_rounds=self.rounds_to_compare, in_double=True)
            coalitions = [*self._expected, self._scored.run.all_clients]
            jobs = [replace(job, members=members) for members in coalitions]
            for job, result in self._alone.fits.train(jobs):
                if isinstance(result, FitFailed):
                    raise NotBatched(f"{result}")
                self._expected_in_double.append(Expected.of_fit(job.members, result, job.rounds))
        return self._expected_in_double

    def accept_at_once(self) -> None:
        """Accept what all groups have come to. If all clients differ from the run, although not in 64 bits, the copy of
        the run itself may differ, too, so :meth:`compare_with_run` trains them again. All ranks call it.
        """
        ranks = self._alone.ranks
        rounds_by_rank = ranks.all_gather(self._doubted_rounds, "doubted rounds")
        rounds = [index for rounds in rounds_by_rank for index in rounds if index is not None]
        self._round_to_repeat = None
        self._repeat_until(max(rounds, default=None))

    def refuse_at_once(self, error: NotBatched) -> None:
        """Forget the witnesses, since coalitions train one by one. If all clients at once have come to another model
        than the run, the copy of the run may be why, so :meth:`compare_with_run` trains them up to this round.
        """
        self._expected.clear()
        if isinstance(error, ProofFailed):
            self._repeat_until(error.round_of_run)

    def _repeat_until(self, round_of_run: int | None) -> None:
        """Let all clients be trained again up to this round, if there is one, or to the next one after which the run's
        model is known.
        """
        if round_of_run is not None:
            known_rounds = [index for index in self._models_of_run if index >= round_of_run]
            self._round_to_repeat = min(known_rounds)

    # ---- the run itself

    def compare_with_run(self) -> Comparison:
        """Train the run's first rounds by a coalition of all clients, first without validations if coalitions train
        without. All ranks call it.
        """
        ranks = self._alone.ranks
        comparison = Comparison()  # on other ranks than 0
        if ranks.rank == 0:
            comparison = self._repeat_rounds()
        return ranks.broadcast(0, comparison, "the comparison with the run")

    def _repeat_rounds(self) -> Comparison:
        validates = self._alone.job.validates
        difference = self._difference_by_repetition(validates)
        if difference is None or validates:
            return Comparison(difference)
        difference = self._difference_by_repetition(validates=True)
        return Comparison(difference, needs_validations=difference is None)

    def _difference_by_repetition(self, validates: bool) -> str | None:
        """Return a sentence if all clients, trained once more, come to another model than the run."""
        last_round = self._round_to_repeat
        if last_round is None or last_round not in self._models_of_run:
            return None
        outcome = self._repeated(last_round, validates)
        subject = f"the coalition of all clients, trained once more for {last_round + 1} rounds"
        if isinstance(outcome, FitFailed):
            return f"{subject}, has failed ({outcome}), so it is not known whether coalitions are trained as the run is"
        difference = self._describe_difference(outcome, last_round)
        if difference is None:
            return None
        return (
            f"{subject}, came to another model than the run ({difference}). Training, and so the values, depend on "
            "something outside of Trainer, module and callbacks, such as a global, a class attribute, an environment "
            "variable, a file or a data set that changes"
        )

    def _repeated(self, last_round: int, validates: bool) -> FitOutcome:
        job = replace(
            self._alone.job,
            rounds=(last_round,),
            scores_rounds=False,
            model_rounds=(last_round,),
            validates=validates,
        )
        try:
            results = dict(self._alone.fits.train([job]))
        except ConfigurationError as error:
            # A warning is enough, since the coalitions themselves are trained.
            return FitFailed(str(error))
        return results[job]

    def _describe_difference(self, result: FitResult, last_round: int) -> str | None:
        """Describe how the model of a fit differs from the run's. Return None if they are equal, or if they differ only
        by rounding on a GPU.
        """
        model = result.models.after_round[last_round]
        expected_model = self._models_of_run[last_round].cpu()
        initial_model = result.models.initial
        if not self._is_on_cpu and not torch.equal(model, expected_model):
            rounding = result.rounding
            unexplained = rounding.unexplained_distance(model, expected_model, initial_model)
            if unexplained is None:
                return None  # rounding alone explains the difference
        are_both_nan = model.isnan() & expected_model.isnan()
        differs = (model != expected_model) & ~are_both_nan
        if not differs.any():
            return None

        differs_by_name = self._scored.run.federation.space.unflatten(differs)
        different_names = [name for name, entries in differs_by_name.items() if entries.any()]
        distance = float((model - expected_model).double().norm())
        training_distance = float((expected_model - initial_model).double().norm())
        percent = 100 * distance / max(training_distance, 1e-30)
        return f"{percent:.2g} % of the way from the initial model to the run's, first in {different_names[0]!r}"

    # ---- what is said after training

    def sentences(self, updates_differ_by_intention: bool) -> list[str]:
        """Return sentences that say how the training of coalitions differs from that of the run, apart from
        :meth:`compare_with_run`.
        """
        run = self._scored.run
        sentences = []
        if run.changes:
            # The run's first rounds had other settings, so its model cannot be reproduced.
            sentences.append(_resumed_with_changes(run.changes))
        different_parameters = {}
        if not updates_differ_by_intention:
            different_parameters = self._different_first_updates()
        if different_parameters:
            clients = listed(f"{client} ({name})" for client, name in different_parameters.items())
            sentences.append(
                f"clients train otherwise in the first round of coalitions than in that of the run: {clients}. "
                "Training depends on which other clients take part, or on data that pass from client to client outside "
                "of the module, such as in a global, a cache, a class attribute or a file"
            )
        if self._changed_tensors:
            sentences.append(
                f"training of coalitions has changed {listed(sorted(self._changed_tensors))}, which the program keeps "
                "outside of the module. So a coalition may have read changes that another coalition has made"
            )
        return sentences

    def _different_first_updates(self) -> dict[int, str]:
        """Return a parameter by client in which its first update in a coalition has another norm than in the run. All
        ranks call it.
        """
        run = self._scored.run
        norms_of_run: dict[int, Tensor] = {}
        norms_of_rank = run.federation.engine.first_updates
        for norms in self._alone.ranks.all_gather(norms_of_rank, "the first updates"):
            norms_of_run |= norms
        tolerance = 0.0 if self._is_on_cpu else MAX_ROUNDING
        parameter_by_client = {}
        for norms_by_client in self._first_updates.values():
            for client in norms_by_client.keys() & norms_of_run.keys():
                norms = norms_by_client[client]
                is_same = norms.isclose(norms_of_run[client], rtol=tolerance, atol=0.0)
                if not is_same.all():
                    first_difference = int(is_same.int().argmin())
                    parameter_by_client[client] = run.federation.space.names[first_difference]
        return parameter_by_client


def _result_of(results: Mapping[Members, FitResult], expected: Expected) -> FitResult:
    if expected.members not in results:
        raise NotBatched(f"a filter may exclude an update of {clients_text(expected.members)}.")
    return results[expected.members]


def _resumed_with_changes(changes: Iterable[str]) -> str:
    return (
        f"the run was resumed with other settings ({'; '.join(changes)}), but coalitions are trained with the present "
        "settings from their first round on. So the values are only approximately those of the run. For exact values, "
        "start flsv fit with the present settings"
    )
