"""WholeFits: trains coalitions as federations of their own after a run, each by a fit from the run's initial state.

The module, its optimizers and the Trainer's callbacks do the same in such a fit as in the federation's own fit. The
coalition of all clients is trained in the same way, and must come to the federation's own model.
"""

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
from flsv.retraining.proof import difference
from flsv.retraining.train_fits import Fit, once_proved
from flsv.utilities.atomic_files import whole_lines
from flsv.utilities.csv_files import parse_float, parse_int, read_rows
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.result_file import read_members
from flsv.utilities.supervisor import ChildFailed

#: File in a run's folder with the utilities of the coalitions that were trained after the run.
COALITIONS = "coalitions.csv"


def called(measure: str | ModelScore) -> str:
    """Return the name of a performance measure in the file of coalitions' utilities.

    Example:
        >>> called("accuracy"), called(ModelScore("val_loss", "min"))
        ('accuracy', 'val_loss (min)')
    """
    if isinstance(measure, str):
        return measure
    return measure.title if measure.called else f"{measure.title} ({measure.mode})"


def trained_in(folder: Path, by: Sequence[str], seed: int, rounds: int | None) -> dict[Members, list[float]]:
    """Read the final utilities of coalitions that were trained after a run.

    Args:
        folder: the run's folder.
        by: the names of the performance measures, see :func:`called`.
        seed: the seed of the trainings to read.
        rounds: the number of rounds after which utilities are read.

    Returns:
        ``{members: utilities}``, with the utilities in the order of ``by``. It is empty if there is no file, or if the
        file has no such measures, seed or round.
    """
    path = folder / COALITIONS
    lines = whole_lines(path)[1:2] if path.is_file() else []
    if not rounds or not {"seed", *by} <= {*",".join(lines).split(",")}:
        return {}
    read = {"seed": parse_int, "coalition": read_members, "round": parse_int, **dict.fromkeys(by, parse_float)}
    rows = [row for _, row in read_rows(path, read, skip=1) if (row["seed"], row["round"] + 1) == (seed, rounds)]
    return {row["coalition"]: [row[name] for name in by] for row in rows}


def trained_again(way: CoalitionFits, order: FitOrder, nudged: bool) -> tuple[Tensor, Tensor] | None:
    """Train a coalition once more, from nudged weights if ``nudged``, for :func:`flsv.retraining.proof.difference`.

    Return its models ``[P]`` before and after training, or None if the training has failed."""
    ((_, found),) = way.train([replace(order, nudged=nudged)])
    return None if isinstance(found, ChildFailed) else (found.start, found.last)


class Unproved(ConfigurationError):
    """Error: the coalition of all clients does not come to the federation's own model."""


class WholeFits:
    """Object that trains coalitions after a run by fits from the run's initial state, and checks these fits.

    The coalition of all clients is trained for one round first. No fit is yielded before its model has been found equal
    to the run's after its first round. See :class:`flsv.retraining.train_fits.Fits`.

    Args:
        way: the object that trains coalitions, in forks or fresh processes.
        num_clients: n, the number of clients.
        initial: the module's ``state_dict`` before the first round.
        rounds: the indices of the rounds after which models are measured, ascending; a coalition trains until the last
            of these rounds.
        first: ``[P]``, the run's own model after its first round; None: it is not known, and nothing is compared.
        rounding: the tolerances of the run's arithmetic.

    Raises:
        Unproved: in :meth:`fits`: the coalition of all clients comes to another model than the run.
    """

    at_once = 1  # of the ranks of a run, each trains one coalition at a time

    def __init__(
        self,
        way: CoalitionFits,
        num_clients: int,
        initial: dict[str, Any],
        rounds: Sequence[int],
        first: Tensor | None,
        rounding: Rounding,
    ) -> None:
        self._way, self._initial, self._rounds, self._rounding = way, initial, tuple(rounds), rounding
        self._all, self._first = tuple(range(num_clients)), first

    def fits(self, coalitions: Sequence[Members], seed: int) -> Iterator[tuple[Members, Fit | ChildFailed]]:
        """Train coalitions, and yield each with its fit or its error."""
        orders = [FitOrder(members, seed, self._rounds, self._initial) for members in coalitions]
        proof = None if self._first is None else FitOrder(self._all, seed, (0,), self._initial)
        for order, found in once_proved(self._trained(orders, proof), proof):
            if order is not proof:
                yield order.members, found.fit(self._rounds) if isinstance(found, FitResult) else found

    def _trained(
        self, orders: Sequence[FitOrder], proof: FitOrder | None
    ) -> Iterator[tuple[FitOrder, FitResult | ChildFailed]]:
        """Train the coalitions of ``proof`` and ``orders``; yield each order with its result or error.

        If the model of ``proof`` is not equal to the run's at once, its pair comes last, after :meth:`_prove`."""
        doubted = None
        for order, found in self._way.train([*([] if proof is None else [proof]), *orders]):
            first = self._first if order is proof else None
            if first is not None and isinstance(found, FitResult):
                doubted = found if self._rounding.apart(found.last, first, found.start) is not None else None
                if doubted is not None:
                    continue
            yield order, found
        if doubted is not None and proof is not None:  # the way trains nothing else any more
            self._prove(doubted, proof)
            yield proof, doubted

    def _prove(self, found: FitResult, order: FitOrder) -> None:
        """Raise Unproved if rounding does not explain why the model of ``found``, the result of ``order`` with all
        clients, differs from the run's model."""
        assert self._first is not None
        again = partial(trained_again, self._way, order)
        share = difference(found.last, self._first, found.start, again, self._rounding)
        if share is not None:
            raise Unproved(
                f"The coalition of all clients, trained in the same way as the others, came to another model after its "
                f"first round than the run ({100 * share:.2g} % of the way that training went lie between them)"
            )
