"""CoalitionTraining: trains the coalitions that a store lacks, in any kind of process, and proves the way of training.

The coalition of all clients is trained first, and must come to the run's own model. This check needs no knowledge of
the state that a module or a callback keeps, or of faults of its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from flsv._lightning.rounding import Rounding
from flsv.core import Ranks
from flsv.core.ranks import balance_load
from flsv.games.members import EMPTY, Members
from flsv.results.text import joined
from flsv.retraining.fit_order import CoalitionTrainer, FitModels, FitOrder, FitResult
from flsv.retraining.readings import Reading, ReadingRefused
from flsv.retraining.utility_store import UtilityStore
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.supervisor import ChildFailed

Result = TypeVar("Result")
Trained = tuple[FitOrder, FitResult | ChildFailed]


@dataclass(frozen=True, eq=False)
class Proof:
    """Check of the way of training: the coalition of all clients must come to the run's model."""

    # Trains all clients with the run's seed, and returns models.
    order: FitOrder
    # The error's text, with "{}" for the distance.
    message: str
    # [P]. None: the model of the order's checkpoint.
    run_model: Tensor | None = None


class Unproved(ConfigurationError):
    """Error: the training of all clients does not reproduce the run's model."""


class FitsFailed(ConfigurationError):
    """Error: some coalitions' fits have failed, ``{coalition: error}``."""

    def __init__(self, failed: Mapping[Members, ChildFailed]) -> None:
        self.failed = failed
        coalitions_by_reason: dict[str, list[Members]] = {}
        for members, failure in failed.items():
            reason = f"{failure}".rstrip(".")
            coalitions_by_reason.setdefault(reason, []).append(members)

        reasons = []
        for reason, coalitions in coalitions_by_reason.items():
            reasons.append(f"{listed(coalitions, show=_clients)}: {reason}")
        plural = "s" if len(failed) > 1 else ""
        super().__init__(f"{len(failed)} coalition{plural} failed to train, {'; '.join(reasons)}.")

    def __reduce__(self) -> tuple[type, tuple[Mapping[Members, ChildFailed]]]:
        """Let a rank send the error to the others, which make it anew from the coalitions."""
        return type(self), (self.failed,)


def _clients(members: Members) -> str:
    plural = "s" if len(members) > 1 else ""
    return f"client{plural} {joined(map(str, members))}"


class _ChangedOrders(Exception):
    """Error: coalitions must be trained by orders with these changes. The message says why."""

    def __init__(self, message: str, **changes: Any) -> None:
        super().__init__(message)
        self.changes = changes


class CoalitionTraining:
    """Training of coalitions by ``trainer``, which has to pass the proof, if there is one, before results count."""

    def __init__(
        self,
        trainer: CoalitionTrainer,
        # Each coalition gets a copy of it with its members.
        order: FitOrder,
        # The clients' numbers of samples, [n].
        num_samples: Sequence[int],
        proof: Proof | None = None,
        # Makes another trainer after this one has failed for a reason, or returns None.
        make_replacement: Callable[[str], CoalitionTrainer | None] = lambda reason: None,
    ) -> None:
        self._trainer = trainer
        self._order = order
        self._num_samples = num_samples
        self._everybody = tuple(range(len(num_samples)))
        self._proof = proof
        self._is_proved = proof is None
        self._make_replacement = make_replacement

    @property
    def num_clients(self) -> int:
        """Return the number of clients n."""
        return len(self._num_samples)

    def train(
        self,
        coalitions: Sequence[Members],
        seed: int,
        store: UtilityStore,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Train the coalitions that a store lacks. Successful results are stored, even if other fits fail."""
        missing = store.missing(seed, coalitions)
        # The empty coalition's model is that of any fit before training. If no other is missing, one client's is cheap.
        coalitions_to_fit = [members for members in missing if members]
        if missing and not coalitions_to_fit:
            first_client_alone = (0,)
            coalitions_to_fit = [first_client_alone]

        failed: dict[Members, ChildFailed] = {}
        start_hashes: set[str] = set()
        for members, result in self._on_ranks(coalitions_to_fit, seed, store.ranks):
            if isinstance(result, ChildFailed):
                failed[members] = result
                continue
            start_hashes.add(result.start_hash)
            _check_starts(start_hashes)
            # The fit of one client may only stand in for the empty coalition.
            if members in missing:
                store.add(seed, members, result.rows(store.rounds), result.outputs)
            needs_empty_row = EMPTY in missing and bool(store.missing(seed, [EMPTY]))
            if needs_empty_row and result.untrained:
                untrained_rows = dict.fromkeys(store.rounds, result.untrained_row())
                store.add(seed, EMPTY, untrained_rows)
            say(store.progress(seed, coalitions))
        store.sort()
        if failed:
            raise FitsFailed(failed)

    def _on_ranks(
        self, coalitions: Sequence[Members], seed: int, ranks: Ranks
    ) -> Iterator[tuple[Members, FitResult | ChildFailed]]:
        """Divide the coalitions among the ranks by their samples. Yield the results of all ranks."""
        if ranks.size == 1:
            yield from self.fits(coalitions, seed)
            return
        costs = []
        for members in coalitions:
            samples = [self._num_samples[client] for client in members]
            costs.append(float(sum(samples)))

        coalitions_by_rank: list[list[Members]] = [[] for _ in range(ranks.size)]
        rank_of_coalition = balance_load(costs, ranks.size)
        for members, rank in zip(coalitions, rank_of_coalition):
            coalitions_by_rank[rank].append(members)
        coalitions_of_rank = coalitions_by_rank[ranks.rank]
        most_coalitions = max(map(len, coalitions_by_rank))
        # One coalition at a time, so that a kill loses no more.
        for position in range(most_coalitions):
            next_coalition = coalitions_of_rank[position : position + 1]  # empty if none is left
            fit_next = partial(self.fits, next_coalition, seed)
            yield from gathered(ranks, fit_next, "coalitions' trainings")

    def fits(
        self, coalitions: Sequence[Members], seed: int
    ) -> Iterator[tuple[Members, FitResult | ChildFailed]]:
        """Train coalitions, and yield each with its result or error."""
        # {members: why its process was killed, None without one}. Those with a result are removed.
        missing: dict[Members, ChildFailed | None] = dict.fromkeys(coalitions)
        failed_proof: FitsFailed | None = None
        while missing:
            try:
                yield from self._train_missing(missing, seed)
                failed_proof = None
            except _ChangedOrders as retry:  # with other orders, by the same trainer
                self._change_orders(retry)
                continue
            except FitsFailed as error:
                if failed_proof is None:  # the first trainer's says more
                    failed_proof = error

            # What forks cannot do, fresh processes may.
            if missing:
                reason = str(_first_failure(missing, failed_proof))
                replacement = self._make_replacement(reason)
                if replacement is None:
                    break
                self._trainer = replacement
                self._is_proved = self._proof is None
        # No trainer is left.
        if failed_proof is not None:
            raise failed_proof
        for members, failure in missing.items():
            yield members, failure or _first_failure(missing, failed_proof)

    def _change_orders(self, retry: _ChangedOrders) -> None:
        """Train by changed orders from now on, after another proof."""
        rank_zero_info(f"flsv: {retry}.")
        self._order = replace(self._order, **retry.changes)
        if self._proof is not None:
            order_of_proof = replace(self._proof.order, **retry.changes)
            self._proof = replace(self._proof, order=order_of_proof)
            self._is_proved = False

    def _train_missing(
        self, missing: dict[Members, ChildFailed | None], seed: int
    ) -> Iterator[tuple[Members, FitResult | ChildFailed]]:
        """Train coalitions, and yield each with its result or error. It is removed from ``missing``, unless its process
        was killed.
        """
        # The proof is a fit that must reach the run's own model. It is left out if it has done so, or has another seed.
        proof = self._proof
        has_other_seed = proof is not None and proof.order.seed != seed
        if self._is_proved or has_other_seed:
            proof = None

        orders = self._orders([*missing], seed, proof)
        checked_results = self._checked(orders, proof)
        for order, result in _held_until_proved(checked_results, proof):
            is_proof = proof is not None and order is proof.order
            if is_proof:
                self._is_proved = True  # no result comes before the proof has reached the model
            if isinstance(result, ChildFailed) and result.killed:
                missing[order.members] = result  # another trainer may train this coalition
                continue
            # A proof without scores only returns its model, and is no coalition's result.
            if order.scores_rounds:
                missing.pop(order.members, None)
                yield order.members, result

    def _orders(
        self, coalitions: Sequence[Members], seed: int, proof: Proof | None
    ) -> list[FitOrder]:
        # The proof trains all clients. If it is scored, it is the grand coalition's fit.
        orders = [] if proof is None else [proof.order]
        is_grand_scored = proof is not None and proof.order.scores_rounds
        is_untrained_scored = proof is not None and proof.order.scores_untrained

        # The grand coalition comes first, as the dearest.
        smaller_coalitions = [members for members in coalitions if members != self._everybody]
        if self._everybody in coalitions and not is_grand_scored:
            coalitions_to_train = [self._everybody, *smaller_coalitions]
        else:
            coalitions_to_train = smaller_coalitions
        for members in coalitions_to_train:
            order = replace(
                self._order,
                members=members,
                seed=seed,
                scores_untrained=not is_untrained_scored,  # the untrained model is the same for all
            )
            is_untrained_scored = True
            orders.append(order)
        return orders

    def _checked(self, orders: Sequence[FitOrder], proof: Proof | None) -> Iterator[Trained]:
        """Train, and yield each order with its result or error. If the proof's model deviates from the run's, its
        result is checked and yielded last, unless the trainer can train for the check at once.
        """
        doubted: FitResult | None = None
        reason = ""
        for order, result in self._trainer.train(orders):
            if isinstance(result, Reading):
                _raise_for(result, order)
            if isinstance(result, ChildFailed):
                if result.killed or order.validates:
                    yield order, result
                else:
                    reason = f"without them a coalition fails ({result})"
                continue

            deviates = False
            if proof is not None and order is proof.order:
                deviates = _deviates(proof, result)
            if not deviates:
                yield order, result
            elif not order.validates:
                reason = "without them the first rounds come to another model"
            elif self._trainer.is_reentrant:
                self._check_proof(proof, result)
                yield order, result
            else:
                doubted = result
        if reason:  # the trainer trains nothing else any more
            raise _ChangedOrders(
                f"coalitions are trained with validations: {reason}", validates=True
            )
        if doubted is not None and proof is not None:
            self._check_proof(proof, doubted)
            yield proof.order, doubted

    def _check_proof(self, proof: Proof | None, result: FitResult) -> None:
        """Raise Unproved unless rounding explains the proof's difference from the run's model."""
        assert proof is not None
        models, run_model = _models_of(proof, result)
        train_again = partial(self._trained_again, proof.order)
        distance = difference_from_run(models, run_model, train_again, result.rounding)
        if distance is not None:
            description = f"{100 * distance:.2g} % of the way that training went lie between them"
            raise Unproved(proof.message.format(description))

    def _trained_again(self, order: FitOrder, nudged: bool) -> FitModels | None:
        """Train by ``order`` again, from slightly changed weights if ``nudged``. None on failure."""
        repeated_order = replace(order, nudged=nudged, expected_hash=None)
        ((_, result),) = self._trainer.train([repeated_order])  # of the only order
        if isinstance(result, FitResult):
            return result.models
        return None


def _models_of(proof: Proof, result: FitResult) -> tuple[FitModels, Tensor]:
    models = result.models
    assert models is not None
    if proof.run_model is None:
        run_model = models.checkpoint
    else:
        run_model = proof.run_model
    assert run_model is not None
    return models, run_model


def _deviates(proof: Proof, result: FitResult) -> bool:
    if result.models is None:
        return False  # it is the expected model
    models, run_model = _models_of(proof, result)
    return (
        result.rounding.unexplained_distance(models.trained, run_model, models.initial) is not None
    )


def difference_from_run(
    models: FitModels,
    run_model: Tensor,
    train_again: Callable[..., FitModels | None],
    rounding: Rounding,
) -> float | None:
    """Return the distance of a retrained model from the run's, relative to that from the initial model.

    None if rounding explains it. If the distance is above a fixed tolerance, the effect of rounding is measured by two
    more trainings: ``train_again(nudged=True)`` from slightly changed weights, and one from the same weights. If
    the latter does not give the same model, the training depends on something other than its seed, and rounding does
    not explain the difference.
    """

    def nudged_displacement() -> Tensor | None:
        # Once from the same initial weights, and once from weights changed by as much as rounding does.
        repeated = train_again(nudged=False)
        nudged = train_again(nudged=True)
        if repeated is None or nudged is None:
            return None
        path_length = (models.trained - models.initial).double().norm()
        relative_tolerance = max(rounding.run_tolerance, rounding.steps)
        tolerance = relative_tolerance * path_length
        repetition_error = (repeated.trained - models.trained).double().norm()
        if repetition_error > tolerance:  # something other than rounding differs
            return None
        return nudged.trained - nudged.initial

    # This trains again only if the models are further apart than a fixed tolerance.
    return rounding.unexplained_distance(
        models.trained, run_model, models.initial, nudged=nudged_displacement
    )


def _raise_for(reading: Reading, order: FitOrder) -> NoReturn:
    """Raise _ChangedOrders if a coalition can train with what it has read, else ReadingRefused."""
    if reading.needs_validation:
        raise _ChangedOrders(f"coalitions are trained with validations: {reading}", validates=True)
    if reading.can_take_part and not order.watched:
        raise _ChangedOrders(
            f"coalitions are trained with all callbacks: {reading}", watched=True, validates=True
        )
    raise ReadingRefused(reading)


def gathered(
    ranks: Ranks, train: Callable[[], Iterable[tuple[Members, Result]]], description: str
) -> Iterator[tuple[Members, Result]]:
    """Call ``train`` on this rank, and yield the pairs of all ranks. Any rank's error is raised."""
    results_or_error: dict[Members, Result] | Exception
    try:
        results_or_error = dict(train())
    except Exception as error:
        results_or_error = error  # raised below: the other ranks wait for this one
    for results_of_rank in ranks.all_gather(results_or_error, description):
        if isinstance(results_of_rank, Exception):
            raise results_of_rank
        yield from results_of_rank.items()


def _check_starts(start_hashes: set[str]) -> None:
    if len(start_hashes) > 1:
        raise ConfigurationError(
            "two coalitions started from different weights, although their seed is the same, so that their models do "
            "not tell what a client adds: the module draws its weights by a generator of its own. Let torch's global "
            "generator draw them, which is seeded."
        )


def _held_until_proved(results: Iterable[Trained], proof: Proof | None) -> Iterator[Trained]:
    """Yield pairs of order and result as soon as the proof has succeeded. Raise FitsFailed if it fails."""
    if proof is None:
        yield from results
        return
    waiting_results: list[Trained] = []
    is_proved = False
    for order, result in results:
        waiting_results.append((order, result))
        if order is proof.order:
            if isinstance(result, ChildFailed):
                raise FitsFailed({order.members: result})
            is_proved = True  # a deviating model has raised by now
        if is_proved:
            yield from waiting_results
            waiting_results.clear()


def _first_failure(
    missing: Mapping[Members, ChildFailed | None], failed_proof: FitsFailed | None
) -> ChildFailed:
    # None for a coalition that was not tried.
    failures: list[ChildFailed | None] = list(missing.values())
    if failed_proof is not None:
        failures += failed_proof.failed.values()
    for failure in failures:
        if failure is not None:
            return failure
    return ChildFailed("the first coalition has failed")
