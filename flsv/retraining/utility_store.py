"""UtilityStore: the utilities of trained coalitions, in a file that a stopped command continues."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flsv.core import ALONE, Ranks
from flsv.games.members import Members, members_of
from flsv.utilities.atomic_files import replacing
from flsv.utilities.csv_files import Cell, parse_float, parse_int
from flsv.utilities.result_file import ResultFile, members_text, read_members

#: The index under which utilities after training are stored if a store has no rounds.
LAST = -1
#: A coalition's utilities after a round, by each performance: one number, or one for each class.
Row = Sequence[Sequence[float]]


def _numbers(cell: str) -> list[float]:
    return [parse_float(number) for number in cell.split()]


class UtilityStore:
    """Utilities of trained coalitions: by seed, coalition and performance, or also by round.

    Each rank holds all utilities, and the first rank writes them. All rows of a coalition are written at once, so that
    a kill loses no coalition whose training has ended. Utilities that are not finite are held, but not written.

    Args:
        path: the file, see :class:`flsv.utilities.result_file.ResultFile`; None: nothing is written.
        names: the names of the performance measures, which are columns of the file.
        settings: all that the utilities depend on, except the seed. A file with other settings is refused.
        rounds: the rounds after which each coalition has utilities; by default only one entry, after training.
        ranks: the processes that each have a copy of the store, and among which trainings are divided.
        outputs: the performances of which coalitions' outputs are stored, too, in a folder beside the file.
        anew: whether a file with other settings is replaced instead of refused.

    Raises:
        ConfigurationError: the file has other settings, or is not a file of utilities.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "game.csv"
        >>> UtilityStore(path, ["accuracy"], {"rounds": 5}).add(0, (0, 2), {LAST: [[0.75]]})
        >>> print(path.read_text())
        # {"rounds": "5"}
        seed,coalition,accuracy
        0,0+2,0.75
        <BLANKLINE>
        >>> store = UtilityStore(path, ["accuracy"], {"rounds": 5})
        >>> store.table(0, torch.tensor([[True, False, True]]))
        tensor([[0.7500]], dtype=torch.float64)
        >>> store.missing(0, [(0, 2), (1,)])
        [(1,)]
    """

    def __init__(
        self,
        path: Path | None,
        names: Sequence[str],
        settings: Mapping[str, Any] | None = None,
        *,
        rounds: Sequence[int] = (LAST,),
        ranks: Ranks = ALONE,
        outputs: Collection[str] = (),
        anew: bool = False,
    ) -> None:
        self.names, self.ranks = list(names), ranks
        self._named, self._outputs = frozenset(outputs), dict[tuple[int, Members], Mapping[str, Tensor]]()
        self._folder = path.with_suffix("") if path is not None and ranks.rank == 0 and outputs else None
        self._rounds, by_round = tuple(rounds), tuple(rounds) != (LAST,)
        columns: dict[str, Cell] = {"seed": parse_int, "coalition": read_members}
        columns |= {"round": parse_int} if by_round else {}
        columns |= dict.fromkeys(names, _numbers)
        self._file: ResultFile | None = None
        if path is not None and ranks.rank == 0:
            self._file = ResultFile(path, columns, settings or {}, key=2 if by_round else 0, anew=anew)
        rows = [] if self._file is None else self._file.rows
        found = {(row["seed"], row["coalition"], row.get("round", LAST)): [row[name] for name in names] for row in rows}
        if self._folder is not None:
            self._outputs = {each: kept for each in {key[:2] for key in found} if (kept := self._read(*each))}
        known = found, self._outputs
        self._known: dict[tuple[int, Members, int], Row]
        self._known, self._outputs = ranks.broadcast(0, known, "the trainings that are kept")

    @property
    def seeds(self) -> list[int]:
        """Return the seeds with utilities, ascending."""
        return sorted({seed for seed, _, _ in self._known})

    def coalitions(self, seed: int) -> set[Members]:
        """Return the coalitions that have utilities for a seed."""
        return {members for of, members, _ in self._known if of == seed}

    def missing(self, seed: int, coalitions: Sequence[Members]) -> list[Members]:
        """Return those of ``coalitions`` that lack utilities after at least one of the rounds, each once, in order."""
        distinct = dict.fromkeys(coalitions)
        return [
            each
            for each in distinct
            if any((seed, each, index) not in self._known for index in self._rounds)
            or (each and not self._named <= self._outputs.get((seed, each), {}).keys())
        ]

    def outputs(self, seed: int, members: Members, name: str) -> Tensor:
        """Return the outputs ``[R, V, ...]`` of a coalition's model after each of the R rounds.

        Raises:
            KeyError: they are not stored.
        """
        return self._outputs[seed, members][name]

    def last_outputs(self, seed: int, members: Members) -> Tensor | None:
        """Return the outputs ``[V, ...]`` of a coalition's model after the last round; None if they are not stored."""
        return next((outputs[-1] for outputs in self._outputs.get((seed, members), {}).values()), None)

    def _read(self, seed: int, members: Members) -> Mapping[str, Tensor]:
        """Read the outputs of a coalition; a file that is missing, or of other rounds, has none."""
        assert self._folder is not None
        kept = read_outputs(self._folder, seed, members)
        return {name: each for name, each in kept.items() if len(each) == len(self._rounds)}

    def progress(self, seed: int, coalitions: Sequence[Members]) -> str:
        """Return a text that says how many of the distinct ``coalitions`` have utilities for a seed."""
        return f"seed {seed}: {len(coalitions) - len(self.missing(seed, coalitions))} of {len(coalitions)} coalitions"

    def rows(self, seed: int, members: Members) -> list[Row]:
        """Return a coalition's utilities after each of the rounds.

        Raises:
            KeyError: utilities after one of the rounds are missing.
        """
        return [self._known[seed, members, index] for index in self._rounds]

    def table(self, seed: int, masks: Tensor) -> Tensor:
        """Return the utilities after training of K coalitions by C performances, float64 ``[K, C]``.

        Args:
            seed: the seed of the trainings.
            masks: bool ``[K, n]``, the coalitions.

        Raises:
            KeyError: a coalition has no utilities.
        """
        rows = [self._known[seed, members, LAST] for members in members_of(masks)]
        return torch.tensor([[value for (value,) in row] for row in rows], dtype=torch.float64)

    def add(
        self, seed: int, members: Members, rows: Mapping[int, Row], outputs: Mapping[str, Tensor] | None = None
    ) -> None:
        """Add a coalition's utilities, in memory and, if they are finite, to the file; and its outputs.

        Args:
            seed: the seed of the coalition's training.
            members: the coalition.
            rows: ``{round: utilities}``, with the utilities in the order of ``names``.
            outputs: ``{performance: outputs [R, V, ...]}``; None: there are none.
        """
        kept = {name: each for name, each in (outputs or {}).items() if name in self._named}
        if kept:
            self._outputs[seed, members] = kept
            if self._folder is not None:  # before the rows, so that rows have their outputs after a kill
                self._folder.mkdir(exist_ok=True)
                with replacing(self._folder / outputs_file(seed, members)) as file:
                    torch.save(kept, file)
        self._known |= {(seed, members, index): row for index, row in rows.items()}
        if self._file is not None and all(map(_finite, rows.values())):
            self._file.add(self._cells(seed, members, index, row) for index, row in rows.items())

    def sort(self) -> None:
        """Write the file again with sorted rows, so that it does not depend on the order in which trainings ended."""
        if self._file is not None and self._known:
            ordered = sorted(self._known.items(), key=lambda item: (item[0][0], len(item[0][1]), *item[0][1:]))
            self._file.replace(self._cells(*key, row) for key, row in ordered if _finite(row))

    def _cells(self, seed: int, members: Members, index: int, row: Row) -> list[object]:
        place = [] if index == LAST else [index]
        return [seed, members_text(members), *place, *(" ".join(map(repr, map(float, cell))) for cell in row)]


def outputs_file(seed: int, members: Members) -> str:
    """Return the name of the file with a coalition's outputs, in the folder beside the utilities."""
    return f"{seed}_{members_text(members)}.pt"


def read_outputs(folder: Path, seed: int, members: Members) -> Mapping[str, Tensor]:
    """Read a coalition's outputs ``{performance: outputs [R, V, ...]}`` from a folder; empty if there is no file."""
    path = folder / outputs_file(seed, members)
    return torch.load(path, weights_only=True) if path.is_file() else {}  # type: ignore[no-any-return]


def _finite(row: Row) -> bool:
    return all(math.isfinite(value) for cell in row for value in cell)
