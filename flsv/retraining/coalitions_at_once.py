"""CoalitionsAtOnce: trains a run's coalitions at once, and proves that each is what it would be if it trained alone.

Two clients are the witnesses, the one with the fewest and the one with the most samples: each trains alone in a fit of
its own, too. All models that a group of coalitions trains at once are discarded if, beyond rounding, the coalition of
all clients does not come to the run's own models, or a witness not to the models of its own fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor

from flsv._lightning.rounding import MAX_ROUNDING_RATIO, relative_distance
from flsv.games.members import EMPTY, Members
from flsv.retraining.coalition_store import CoalitionStore, clients_text
from flsv.retraining.copied_fits import CopyOfRun
from flsv.retraining.fit_at_once import fit_at_once
from flsv.retraining.train_fits import CoalitionTraining
from flsv.retraining.training_job import FitFailed, FitResult, TrainingJob
from flsv.scores.performance import Measures
from flsv.utilities.errors import NotBatched, reason_of
from flsv.values.coalition_files import ScoredModel

#: The largest number of elements of all models that the coalitions of one group receive from their members in a round.
#: It is a constant, and not what memory is free, so that a model is rounded in the same way on every machine.
MAX_ELEMENTS_OF_GROUP = 2**26
#: The largest relative difference between the scores or outputs of two models that differ by rounding.
MAX_DIFFERENCE_OF_SCORES = 0.01
#: The largest relative difference between two models, and between their scores or outputs, that may be explained by
#: rounding errors that training enlarges.
MAX_ENLARGED_ROUNDING = 0.1


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
    #: The largest distance of two models of one coalition that rounding explains only since training enlarges it,
    #: relative to the model's distance from the initial model.
    enlarged_rounding: float = 0.0
    _results_of_witnesses: dict[Members, FitResult] = field(default_factory=dict)

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
            raise

    def _missing(self, coalitions: Sequence[Members]) -> list[Members]:
        return self.store.missing(self.training.job.seed, coalitions)

    def _groups(self, coalitions: Sequence[Members]) -> list[Sequence[Members]]:
        """Divide coalitions into groups of about the same size."""
        elements_of_coalition = self.num_elements * len(self.training.num_samples)
        max_size = max(1, MAX_ELEMENTS_OF_GROUP // elements_of_coalition)
        num_groups = -(-len(coalitions) // max_size)
        return [coalitions[number::num_groups] for number in range(num_groups)]

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
            self._results_of_witnesses[members] = outcome

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

    def _outcome(self, group: Sequence[Members]) -> dict[Members, FitResult] | NotBatched:
        """Train a group. Return its results, or the error that prevents it."""
        try:
            return self._train_group(group)
        except Exception as error:  # a coalition that trains one by one is named in its error
            return NotBatched(reason_of(error))

    def _train_group(self, group: Sequence[Members]) -> dict[Members, FitResult]:
        try:
            results = self._fit(group)
        except Exception as error:
            if not is_oom_error(error) or len(group) == 1:
                raise
            rank_zero_warn(
                f"{len(group)} groups of clients do not fit into the memory at once, and are trained in two parts. "
                "Their models may be rounded otherwise than on a machine with more memory."
            )
            return {**self._train_group(group[::2]), **self._train_group(group[1::2])}
        self._check(results)
        return {members: results[members] for members in group if members in results}

    def _fit(self, group: Sequence[Members]) -> dict[Members, FitResult]:
        job = self.training.job
        all_clients = tuple(range(len(self.training.num_samples)))
        witnesses_to_add = [members for members in self.witnesses if members not in group]
        return fit_at_once(
            self.run_copy,
            self.measures,
            replace(job, members=all_clients, model_rounds=self._rounds_to_compare()),
            coalitions=[*group, *witnesses_to_add],
            witnesses=self.witnesses,
        )

    # ---- proofs

    def _check(self, results: Mapping[Members, FitResult]) -> None:
        """Raise NotBatched if a coalition that was trained twice has other models than before."""
        for witness, expected in self._results_of_witnesses.items():
            result = results.get(witness)
            if result is None:
                raise NotBatched(f"a filter may exclude an update of {clients_text(witness)}.")
            self._check_models(
                result, expected.models.after_round, f"{clients_text(witness)} alone"
            )
            scored_models = dict(zip(self.training.job.rounds, expected.scored))
            self._check_scores(result, scored_models, f"{clients_text(witness)} alone")

        all_clients = tuple(range(len(self.training.num_samples)))
        result = results[all_clients]
        self._check_models(result, self.models_of_run, "all clients")
        models = self.store.scores(self.training.job.seed).models
        self._check_scores(result, models.get(all_clients, {}), "all clients")

    def _check_models(
        self, result: FitResult, expected_models: Mapping[int, Tensor], members: str
    ) -> None:
        for round_index, expected_model in expected_models.items():
            distance = result.rounding.unexplained_distance(
                result.models.after_round[round_index], expected_model.cpu(), result.models.initial
            )
            if distance is None:
                continue
            by_rounding = self._distance_by_rounding(round_index)
            if not _explains(by_rounding, distance):
                raise NotBatched(
                    f"the model of {members} after round {round_index + 1} differs by {100 * distance:.2g} % of its "
                    f"distance from the initial model, and other rounding errors explain {100 * by_rounding:.2g} %."
                )
            self.enlarged_rounding = max(self.enlarged_rounding, distance)

    def _check_scores(
        self, result: FitResult, expected_models: Mapping[int, ScoredModel], members: str
    ) -> None:
        for round_index, model in zip(self.training.job.rounds, result.scored):
            expected = expected_models.get(round_index)
            if expected is None:
                continue
            for name, difference in _differences(model, expected).items():
                if difference <= MAX_DIFFERENCE_OF_SCORES:
                    continue
                by_rounding = self._difference_by_rounding(round_index, name)
                if not _explains(by_rounding, difference):
                    raise NotBatched(
                        f"{name} of the model of {members} after round {round_index + 1} differs."
                    )

    # ---- what training makes of rounding errors

    @cached_property
    def _perturbed_witnesses(self) -> dict[Members, FitResult]:
        """The witnesses' results with other rounding errors. They are trained if a model differs."""
        job = replace(self.training.job, model_rounds=self._rounds_to_compare())
        self._check_repetition(job)
        job = replace(job, has_other_errors=True)
        return {witness: self._train_again(witness, job) for witness in self.witnesses}

    def _check_repetition(self, job: TrainingJob) -> None:
        """Raise NotBatched if training is not repeatable, since its differences would look like rounding."""
        witness = self.witnesses[0]
        models = self._results_of_witnesses[witness].models.after_round
        for round_index, model in self._train_again(witness, job).models.after_round.items():
            if not torch.equal(model, models[round_index]):
                raise NotBatched(
                    f"{clients_text(witness)} alone has another model when training is repeated."
                )

    def _train_again(self, witness: Members, job: TrainingJob) -> FitResult:
        ((_, result),) = self.training.fits.train([replace(job, members=witness)])
        if isinstance(result, FitFailed):
            raise NotBatched(f"{result}")
        return result

    def _distance_by_rounding(self, round_index: int) -> float:
        """Return how far other rounding errors take a witness's model, relative to its training."""
        distances = []
        for witness, result in self._perturbed_witnesses.items():
            models = self._results_of_witnesses[witness].models
            distances.append(
                relative_distance(
                    result.models.after_round[round_index],
                    models.after_round[round_index],
                    models.initial,
                )
            )
        return max(distances)

    def _difference_by_rounding(self, round_index: int, name: str) -> float:
        """Return by how much other rounding errors change a witness's scores."""
        position = self.training.job.rounds.index(round_index)
        differences = []
        for witness, result in self._perturbed_witnesses.items():
            expected = self._results_of_witnesses[witness].scored[position]
            model = result.scored[position]
            # Other models may have no outputs of a measure that the witnesses' models have.
            pairs = {**_pairs_of_utilities(model, expected), **_pairs_of_numbers(model, expected)}
            differences.append(_relative_difference(*pairs[name]))
        return max(differences)


def _explains(by_rounding: float, difference: float) -> bool:
    """Return whether rounding errors explain a difference, given that two trainings have differed ``by_rounding``."""
    return difference <= min(MAX_ROUNDING_RATIO * by_rounding, MAX_ENLARGED_ROUNDING)


def _differences(model: ScoredModel, expected: ScoredModel) -> dict[str, float]:
    """Return by how much two models' outputs or utilities differ, relative to the largest one, by name."""
    pairs = _pairs_of_numbers(model, expected)
    return {name: _relative_difference(*pair) for name, pair in pairs.items()}


def _pairs_of_numbers(
    model: ScoredModel, expected: ScoredModel
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the outputs that both models have, by name, or their utilities if they have no outputs in common, since a
    store may have none.
    """
    names = model.outputs.keys() & expected.outputs.keys()
    if names:
        return {name: (model.outputs[name], expected.outputs[name]) for name in names}
    return _pairs_of_utilities(model, expected)


def _pairs_of_utilities(
    model: ScoredModel, expected: ScoredModel
) -> dict[str, tuple[Tensor, Tensor]]:
    return {
        name: (torch.tensor(model.utilities[name]), torch.tensor(utility))
        for name, utility in expected.utilities.items()
    }


def _relative_difference(numbers: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected number. Infinite: shapes or NaNs differ."""
    if numbers.shape != expected.shape or not numbers.isnan().equal(expected.isnan()):
        return float("inf")
    if not expected.numel():
        return 0.0
    numbers = numbers.double().nan_to_num()
    expected = expected.double().nan_to_num()
    difference = float((numbers - expected).abs().max())
    if not difference:
        return 0.0
    scale = float(expected.abs().max())
    return difference / scale if scale else float("inf")
