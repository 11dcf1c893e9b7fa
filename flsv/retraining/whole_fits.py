"""WholeFits: trains coalitions after a run, each by a complete fit from the run's initial state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from flsv._lightning.rounding import Rounding
from flsv.games.members import Members
from flsv.games.performance import ModelScore
from flsv.retraining.coalition_fit import CoalitionFits, FitOrder, FitResult
from flsv.retraining.kept_beginning import KeptBeginning
from flsv.retraining.proof import difference
from flsv.retraining.readings import Reading, ReadingRefused, file_time
from flsv.retraining.train_fits import Fit, FitsFailed, once_proved
from flsv.utilities.atomic_files import whole_lines
from flsv.utilities.csv_files import parse_float, parse_int, read_rows
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.result_file import read_members
from flsv.utilities.supervisor import ChildFailed

#: File in a run's folder with the utilities of the coalitions that were trained after the run.
COALITIONS = "coalitions.csv"


def called(measure: str | ModelScore) -> str:
    """Return a performance measure's name in the file of coalitions' utilities.

    Example:
        >>> called("accuracy"), called(ModelScore("val_loss", "min"))
        ('accuracy', 'val_loss (min)')
    """
    if isinstance(measure, str):
        return measure
    return measure.title if measure.called else f"{measure.title} ({measure.mode})"


def trained_in(
    folder: Path, by: Sequence[str], seed: int, rounds: int | None
) -> dict[Members, list[float]]:
    """Read coalitions' utilities after ``rounds`` rounds, by the measures ``by``, from a run's folder. Empty if there
    are none.
    """
    path = folder / COALITIONS
    lines = whole_lines(path)[1:2] if path.is_file() else []
    if not rounds or not {"seed", *by} <= {*",".join(lines).split(",")}:
        return {}
    read = {
        "seed": parse_int,
        "coalition": read_members,
        "round": parse_int,
        **dict.fromkeys(by, parse_float),
    }
    rows = [
        row
        for _, row in read_rows(path, read, skip=1)
        if (row["seed"], row["round"] + 1) == (seed, rounds)
    ]
    return {row["coalition"]: [row[name] for name in by] for row in rows}


def trained_again(
    trainer: CoalitionFits, order: FitOrder, nudged: bool
) -> tuple[Tensor, Tensor] | None:
    """Train the coalition of ``order`` again by ``trainer``, from slightly changed weights if ``nudged``. Return its
    initial and final model ``[P]``, or None on failure.
    """
    ((_, result),) = trainer.train([replace(order, nudged=nudged)])
    if isinstance(result, FitResult):
        return result.initial_model, result.global_model
    return None


class ValidationMatters(Exception):
    """Error: training depends on the validations that were left out. The message says why."""


class Unproved(ConfigurationError):
    """Error: the training of all clients does not reproduce the federation's own model."""


class WholeFits:
    """Trainer of coalitions after a run. It first trains all clients, and yields results once this has reproduced the
    run's model.
    """

    at_once = 1  # of the ranks of a run, each trains one coalition at a time

    def __init__(
        self,
        beginning: KeptBeginning,
        num_clients: int,
        initial: dict[str, Any],
        # After which models are measured, ascending. A coalition trains until the last.
        rounds: Sequence[int],
        # [P], the run's own model after the checked round. None: nothing is compared.
        run_model: Tensor | None,
        rounding: Rounding,
        # Whether Lightning's validations are run, since training is known to depend on them.
        validates: bool = False,
    ) -> None:
        self._beginning = beginning
        self._initial = initial
        self._rounds = tuple(rounds)
        self._rounding = rounding
        self._all = tuple(range(num_clients))
        self._run_model = run_model
        self._validates = validates

    def fits(
        self, coalitions: Sequence[Members], seed: int
    ) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        """Train coalitions, and yield each with its result or error."""
        is_checked = self._run_model is not None
        first_order = FitOrder(
            self._all,
            seed,
            self._rounds,
            initial=self._initial,
            validates=self._validates or not is_checked,
            run_time=(self._beginning.trains_since, file_time()),
        )
        orders: list[FitOrder] = []
        for members in coalitions:
            # The untrained model is the same for all.
            order = replace(first_order, members=members, scores_untrained=not orders)
            orders.append(order)
        proof = None
        if is_checked:
            checked_rounds = (self._beginning.checked_round,)
            proof = replace(first_order, rounds=checked_rounds, scores_rounds=False)

        missing: dict[FitOrder, ChildFailed | None] = dict.fromkeys(orders)
        trainer: CoalitionFits | None = self._beginning.fits
        unproved: FitsFailed | None = None
        while missing and trainer is not None:
            try:
                yield from self._tried(trainer, missing, proof)
                unproved = None
            except ReadingRefused as error:
                if self._beginning.forks is None or not error.reading.can_take_part:
                    raise
                rank_zero_info(f"flsv: coalitions are trained with all callbacks: {error.reading}.")
                missing, proof = _with_changes(missing, proof, watched=True, validates=True)
                continue
            except ValidationMatters as error:
                rank_zero_info(f"flsv: coalitions are trained with validations: {error}.")
                missing, proof = _with_changes(missing, proof, validates=True)
                continue
            except FitsFailed as error:
                unproved = unproved or error  # the forks' own says more

            if missing:  # what forks cannot do, fresh processes may
                trainer = self._beginning.fresh(f"{_first_failure(missing, unproved)}")
                if trainer is None and unproved:
                    raise unproved

        for order, failure in missing.items():
            yield order.members, failure or _first_failure(missing, unproved)

    def _tried(
        self,
        trainer: CoalitionFits,
        missing: dict[FitOrder, ChildFailed | None],
        proof: FitOrder | None,
    ) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        """Train coalitions, and yield each with its result or error. Its order is removed from ``missing``, unless its
        process was killed.
        """
        for order, result in once_proved(self._trained(trainer, [*missing], proof), proof):
            if isinstance(result, ChildFailed) and result.killed:
                missing[order] = result
                continue
            if order is proof:
                continue
            del missing[order]
            if isinstance(result, FitResult):
                yield order.members, result.stored(self._rounds)
            else:
                yield order.members, result

    def _trained(
        self, trainer: CoalitionFits, orders: Sequence[FitOrder], proof: FitOrder | None
    ) -> Iterator[tuple[FitOrder, FitResult | ChildFailed]]:
        """Train, and yield each order with its result or error. ``proof`` trains the full coalition. If its model
        deviates from the run's, its result is checked and yielded last.
        """
        doubted: FitResult | None = None
        reason = ""
        first_orders = [] if proof is None else [proof]
        for order, result in trainer.train([*first_orders, *orders]):
            if isinstance(result, Reading):
                if result.needs_validation:
                    raise ValidationMatters(str(result))
                raise ReadingRefused(result)

            has_failed = isinstance(result, ChildFailed) and not result.killed
            deviates = order is proof and isinstance(result, FitResult) and self._deviates(result)
            if has_failed and not order.validates:
                reason = f"without them a coalition fails ({result})"
            elif deviates and not order.validates:
                reason = "without them the first rounds come to another model"
            elif deviates and isinstance(result, FitResult):
                doubted = result
            else:
                yield order, result
        if reason:  # the trainer trains nothing else any more
            raise ValidationMatters(reason)
        if doubted is not None and proof is not None:  # the trainer trains nothing else any more
            self._prove(trainer, doubted, proof)
            yield proof, doubted

    def _deviates(self, result: FitResult) -> bool:
        assert self._run_model is not None
        share = self._rounding.apart(result.global_model, self._run_model, result.initial_model)
        return share is not None

    def _prove(self, trainer: CoalitionFits, result: FitResult, order: FitOrder) -> None:
        """Raise Unproved unless rounding explains the full coalition's difference from the run's model."""
        assert self._run_model is not None
        model = self._run_model
        train_again = partial(trained_again, trainer, order)
        share = difference(
            result.global_model, model, result.initial_model, train_again, self._rounding
        )
        if share is not None:
            raise Unproved(
                "The coalition of all clients, trained in the same way as the others, came to another model after "
                f"round {self._beginning.checked_round + 1} than the run "
                f"({100 * share:.2g} % of the way that training went lie between them)"
            )


def _with_changes(
    missing: Mapping[FitOrder, ChildFailed | None], proof: FitOrder | None, **changes: Any
) -> tuple[dict[FitOrder, ChildFailed | None], FitOrder | None]:
    """Return orders and the proof with other fields."""
    changed = {replace(order, **changes): failure for order, failure in missing.items()}
    if proof is not None:
        proof = replace(proof, **changes)
    return changed, proof


def _first_failure(
    missing: Mapping[FitOrder, ChildFailed | None], unproved: FitsFailed | None
) -> ChildFailed:
    failures = [*missing.values()]
    if unproved is not None:
        failures += unproved.failed.values()
    for failure in failures:
        if failure is not None:
            return failure
    return ChildFailed("the first coalition has failed")
