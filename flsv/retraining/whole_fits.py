"""WholeFits: trains coalitions as federations of their own after a run, each by a fit, and keeps what comes of them.

The module, its optimizers and the Trainer's callbacks do the same in such a fit as in the federation's own fit. The
coalition of all clients is trained in the same way, and must come to the federation's own model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from flsv.core import Ranks
from flsv.core.ranks import balance_load
from flsv.games.members import Members, members_of
from flsv.games.performance import ModelScore
from flsv.retraining.coalition_fit import CoalitionFailed, CoalitionFits, Curves, FitOrder, FitResult
from flsv.retraining.coalition_fit import coalition_loop as coalition_loop
from flsv.retraining.copied_fits import Spare as Spare
from flsv.retraining.proof import difference
from flsv.retraining.utility_store import Row, UtilityStore
from flsv.sampling import ClientSampler, FullParticipation
from flsv.utilities.atomic_files import whole_lines
from flsv.utilities.choices import Participation as Participation
from flsv.utilities.csv_files import parse_float, parse_int, read_rows
from flsv.utilities.result_file import read_members

#: File in a run's folder with the utilities of the coalitions that were trained after the run.
COALITIONS = "coalitions.csv"
#: Seconds between two log lines about the trainings' progress.
PAUSE = 10.0


def called(measure: str | ModelScore) -> str:
    """Return the name that a performance has in the file of coalitions' utilities.

    Example:
        >>> called("accuracy"), called(ModelScore("val_loss", "min"))
        ('accuracy', 'val_loss (min)')
    """
    if isinstance(measure, str):
        return measure
    return measure.title if measure.called else f"{measure.title} ({measure.mode})"


def sampler_of(loop: Any, participation: Participation = "drawn") -> ClientSampler:
    """Return the sampler of which each coalition gets its own, see :meth:`flsv.sampling.ClientSampler.among`.

    Args:
        loop: the :class:`flsv.FederatedLoop` of the whole federation.
        participation: ``"drawn"``: each coalition draws its own cohorts among its members, as many clients as the run
            draws; ``"all"``: all members of a coalition train in every round.
    """
    return loop.config.sampler if participation == "drawn" else FullParticipation()


def trained_in(folder: Path, by: Sequence[str], seed: int, rounds: int | None) -> dict[Members, list[float]]:
    """Read the final utilities of coalitions that were trained after a run.

    Args:
        folder: the run's folder.
        by: the names of the performances, see :func:`called`.
        seed: the seed of the trainings.
        rounds: the number of rounds of the trainings.

    Returns:
        ``{members: utilities}``, with the utilities in the order of ``by``; empty if there is no file, or its trainings
        have another seed.
    """
    path = folder / COALITIONS
    lines = whole_lines(path)[1:2] if path.is_file() else []
    if not rounds or not {"seed", *by} <= {*",".join(lines).split(",")}:
        return {}
    read = {"seed": parse_int, "coalition": read_members, "round": parse_int, **dict.fromkeys(by, parse_float)}
    rows = [row for _, row in read_rows(path, read, skip=1) if (row["seed"], row["round"] + 1) == (seed, rounds)]
    return {row["coalition"]: [row[name] for name in by] for row in rows}


def trained_again(fits: CoalitionFits, order: FitOrder, nudged: bool) -> Tensor | None:
    """Train a coalition once more and return its model ``[P]``, see :func:`flsv.retraining.proof.difference`."""
    ((_, found),) = fits.train([replace(order, nudged=nudged)])
    return None if isinstance(found, CoalitionFailed) else found.last


class Unproved(CoalitionFailed):
    """Error: the coalition of all clients does not come to the federation's own model."""


def _stands(found: Sequence[Curves | CoalitionFailed]) -> bool:
    """Return whether there is a result of the coalition of all clients among several processes'; raise their errors."""
    failed = [each for each in found if isinstance(each, CoalitionFailed)]
    if failed:
        raise next((error for error in failed if isinstance(error, Unproved)), failed[-1])
    return bool(found)


class WholeFits:
    """Function that trains coalitions, each by a fit of its own, and returns their utilities after several rounds.

    Args:
        fits: the way in which coalitions are trained.
        samples: ``[n]``, the clients' numbers of training samples.
        seed: the run's seed.
        initial: the module's ``state_dict`` before the first round.
        measures: the performances of models, by name.
        rounds: the indices of the rounds after which models are measured, ascending; a coalition trains until the last
            of these rounds.
        ranks: the processes among which the coalitions are divided; each process gets all utilities.
        run: ``[P]``, the run's own model after its last round, and the index of that round.
        allowed: the difference of equal models that the precision allows, see :func:`flsv.retraining.proof.difference`.
        path: the file into which the utilities are written; None: they are not written.
        settings: the settings that the utilities depend on.
        resumed: whether utilities that are in the file already belong to this run.

    Attributes:
        everybody: the result of the coalition of all clients; None before it is trained.
    """

    def __init__(
        self,
        fits: CoalitionFits,
        samples: Tensor,
        seed: int,
        initial: dict[str, Any],
        measures: Mapping[str, str | ModelScore],
        rounds: Sequence[int],
        ranks: Ranks,
        run: tuple[Tensor, int],
        allowed: float = 0.0,
        path: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        resumed: bool = False,
    ) -> None:
        self._fits, self._samples, self._seed, self._initial = fits, samples, seed, initial
        self._measures, self._rounds, self._ranks = dict(measures), list(rounds), ranks
        (self._model, self._last), self._allowed = run, allowed
        self.everybody: FitResult | None = None
        if path is not None and ranks.rank == 0 and not resumed:
            path.unlink(missing_ok=True)  # it belongs to an earlier run, maybe with another module
        self._store = UtilityStore(path, list(measures), settings, rounds=True, ranks=ranks, anew=True)

    def __call__(self, masks: Tensor) -> list[Curves]:
        """Train the coalition of all clients and the coalitions that are not in the file, and return each coalition's
        utilities.

        Args:
            masks: bool ``[K, n]``, the members of each coalition.

        Returns:
            A list of K dictionaries, each with a coalition's utilities after the rounds, by the performance's name.

        Raises:
            Unproved: the coalition of all clients comes to another model than the run.
            CoalitionFailed: a coalition's training has failed; the others are in the file.
        """
        coalitions = members_of(masks)
        mine, most = self._shared_out(self._store.missing(self._seed, coalitions, self._rounds))
        start, said = time.monotonic(), 0.0
        failed: dict[Members, CoalitionFailed] = {}
        for results in self._gathered(mine, turns=1 + most):
            for members, result in results.items():
                if isinstance(result, CoalitionFailed):
                    failed[members] = result
                else:
                    self._store.add(self._seed, members, self._rows(result))
            left = len(self._store.missing(self._seed, coalitions, self._rounds))
            spent, done = time.monotonic() - start, len(coalitions) - left
            if spent - said > PAUSE:
                said = spent
                rank_zero_info(f"flsv: {done} of {len(coalitions)} coalitions are trained, in {spent:.0f} s.")
        if failed:
            others = f" ({len(failed) - 1} more have failed, too)" if len(failed) > 1 else ""
            raise CoalitionFailed(f"{failed[min(failed, key=coalitions.index)]}{others}")
        self._store.sort()
        return [self._curves(members) for members in coalitions]

    def _shared_out(self, missing: Sequence[Members]) -> tuple[list[Members], int]:
        """Return this process's part of the coalitions that are to be trained, and the size of the largest part."""
        size = self._ranks.size
        owners = balance_load([float(self._samples[list(members)].sum()) for members in missing], size)
        mine = [members for members, owner in zip(missing, owners) if owner == self._ranks.rank]
        return mine, max(map(owners.count, range(size)), default=0)

    def _gathered(self, mine: Sequence[Members], turns: int) -> Iterator[dict[Members, Curves | CoalitionFailed]]:
        """Train the coalition of all clients and this process's coalitions, and yield in each turn what all processes
        have found; nothing before the coalition of all clients has come to the run's model.

        Args:
            mine: the coalitions of this process.
            turns: the number of turns: the most coalitions that a process trains.

        Raises:
            CoalitionFailed: the coalition of all clients has failed, or comes to another model; on all ranks.
        """
        everybody = tuple(range(len(self._samples)))
        found = self._trained([everybody, *mine])
        waiting: dict[Members, Curves | CoalitionFailed] = {}
        proved = False
        for _ in range(turns):
            gathered = self._ranks.all_gather(next(found, None), "coalitions' trainings")
            parts = [part for part in gathered if part is not None]
            proved = _stands([result for members, result in parts if members == everybody]) or proved
            waiting |= {members: result for members, result in parts if members != everybody}
            if proved:
                yield waiting
                waiting = {}
            else:
                yield {}

    def _trained(self, coalitions: Sequence[Members]) -> Iterator[tuple[Members, Curves | CoalitionFailed]]:
        """Train this process's coalitions, the first of which is that of all clients, and yield each with its
        utilities, or an error that names it; of all clients when they have come to the run's model."""
        last = max(self._last, self._rounds[-1])
        proof = self._order(coalitions[0], (*self._rounds, last))
        doubted = False
        for order, found in self._fits.train([proof, *map(self._order, coalitions[1:])]):
            if isinstance(found, CoalitionFailed):
                named = f"The federation of clients {list(order.members)} alone: {found}"
                yield order.members, CoalitionFailed(named)
                continue
            if order is proof:
                self.everybody = found
                doubted = self._apart(found, lambda _: None) is not None
                if doubted:
                    continue
            yield order.members, found.curves
        if doubted:
            yield proof.members, self._doubt(proof)

    def _order(self, members: Members, rounds: Sequence[int] | None = None) -> FitOrder:
        return FitOrder(members, self._seed, tuple(sorted({*(rounds or self._rounds)})), self._initial)

    def _apart(self, found: FitResult, again: Callable[[bool], Tensor | None]) -> float | None:
        return difference(found.last, self._model.cpu(), found.start, again, self._allowed)

    def _doubt(self, order: FitOrder) -> Curves | Unproved:
        """Return the utilities of the coalition of all clients if rounding explains its distance from the run's model,
        otherwise an error."""

        assert self.everybody is not None
        share = self._apart(self.everybody, partial(trained_again, self._fits, order))
        if share is None:
            return self.everybody.curves
        return Unproved(
            f"The coalition of all clients, trained in the same way as the others, came to another model than the run "
            f"({100 * share:.2g} % of the way that training went lie between them)"
        )

    def _rows(self, curves: Curves) -> dict[int, Row]:
        """Return the store's rows of a coalition's utilities."""
        by = [curves[name].view(len(self._rounds), -1).tolist() for name in self._measures]
        return dict(zip(self._rounds, zip(*by)))

    def _curves(self, members: Members) -> dict[str, Tensor]:
        """Return a coalition's utilities from the store."""
        rows = self._store.rows(self._seed, members, self._rounds)
        by = [torch.tensor(cells, dtype=torch.float64) for cells in zip(*rows)]
        return {name: curve if curve.shape[1] > 1 else curve[:, 0] for name, curve in zip(self._measures, by)}
