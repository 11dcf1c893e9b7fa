"""WholeFits: trains coalitions after a run, each by a complete fit from the run's initial state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from flsv._lightning.rounding import Rounding
from flsv.games.members import Members
from flsv.games.performance import ModelScore
from flsv.retraining.coalition_fit import CoalitionFits, FitOrder, FitResult
from flsv.retraining.kept_beginning import KeptBeginning
from flsv.retraining.proof import difference
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
    way: CoalitionFits, order: FitOrder, nudged: bool
) -> tuple[Tensor, Tensor] | None:
    """Train the coalition of ``order`` again by ``way``, from slightly changed weights if ``nudged``. Return its
    initial and final model ``[P]``, or None on failure.
    """
    ((_, found),) = way.train([replace(order, nudged=nudged)])
    return None if isinstance(found, ChildFailed) else (found.start, found.last)


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
        # [P], the run's own model after its first round. None: nothing is compared.
        first: Tensor | None,
        rounding: Rounding,
    ) -> None:
        self._beginning, self._initial, self._rounds, self._rounding = (
            beginning,
            initial,
            tuple(rounds),
            rounding,
        )
        self._all, self._first = tuple(range(num_clients)), first

    def fits(
        self, coalitions: Sequence[Members], seed: int
    ) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        """Train coalitions, and yield each with its result or error."""
        orders = [FitOrder(members, seed, self._rounds, self._initial) for members in coalitions]
        proof = None if self._first is None else FitOrder(self._all, seed, (0,), self._initial)
        left: dict[FitOrder, ChildFailed | None] = dict.fromkeys(orders)
        way: CoalitionFits | None = self._beginning.fits
        unproved: FitsFailed | None = None
        while left and way is not None:
            try:
                yield from self._tried(way, left, proof)
                unproved = None
            except FitsFailed as error:
                unproved = unproved or error  # the forks' own says more
            if left:  # what forks cannot do, fresh processes may
                failed = [*left.values(), *(unproved.failed.values() if unproved else ())]
                why = next(
                    (each for each in failed if each is not None),
                    ChildFailed("the first coalition has failed"),
                )
                way = self._beginning.fresh(f"{why}")
                if way is None and unproved:
                    raise unproved
        yield from ((order.members, found or why) for order, found in left.items())

    def _tried(
        self, way: CoalitionFits, left: dict[FitOrder, ChildFailed | None], proof: FitOrder | None
    ) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        """Train coalitions by ``way``, and yield each with its result or error. Its order is removed from ``left``,
        unless its process was killed.
        """
        for order, found in once_proved(self._trained(way, [*left], proof), proof):
            if isinstance(found, ChildFailed) and found.killed:
                left[order] = found
            elif order is not proof:
                del left[order]
                yield (
                    order.members,
                    found.stored(self._rounds) if isinstance(found, FitResult) else found,
                )

    def _trained(
        self, way: CoalitionFits, orders: Sequence[FitOrder], proof: FitOrder | None
    ) -> Iterator[tuple[FitOrder, FitResult | ChildFailed]]:
        """Train by ``way``, and yield each order with its result or error. ``proof`` trains the full coalition. If its
        model deviates from the run's, its result is checked and yielded last.
        """
        doubted = None
        for order, found in way.train([*([] if proof is None else [proof]), *orders]):
            first = self._first if order is proof else None
            if first is not None and isinstance(found, FitResult):
                doubted = (
                    found
                    if self._rounding.apart(found.last, first, found.start) is not None
                    else None
                )
                if doubted is not None:
                    continue
            yield order, found
        if doubted is not None and proof is not None:  # the way trains nothing else any more
            self._prove(way, doubted, proof)
            yield proof, doubted

    def _prove(self, way: CoalitionFits, found: FitResult, order: FitOrder) -> None:
        """Raise Unproved unless rounding explains the full coalition's difference from the run's model."""
        assert self._first is not None
        again = partial(trained_again, way, order)
        share = difference(found.last, self._first, found.start, again, self._rounding)
        if share is not None:
            raise Unproved(
                f"The coalition of all clients, trained in the same way as the others, came to another model after its "
                f"first round than the run ({100 * share:.2g} % of the way that training went lie between them)"
            )
