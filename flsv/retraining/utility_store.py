"""UtilityStore: the utilities of trained coalitions, in a file with which a stopped command continues."""

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
    """Utilities of trained coalitions, by seed, coalition and performance, or also by round.

    Each rank holds all utilities, and the first rank writes them. All rows of a coalition are written at once, so that
    a kill loses no coalition whose training has ended. Utilities that are not finite are held, but not written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "game.csv"
        >>> UtilityStore(path, ["accuracy"], {"rounds": 5}).add(0, (0, 2), {LAST: [[0.75]]})
        >>> print(path.read_text())
        # {"rounds": "5"}
        seed,coalition,accuracy
        0,0+2,0.75
        <BLANKLINE>
    """

    def __init__(
        self,
        path: Path | None,
        names: Sequence[str],
        # All that the utilities depend on, except the seed. A file with others is refused, or replaced if anew.
        settings: Mapping[str, Any] | None = None,
        *,
        # After which each coalition has utilities.
        rounds: Sequence[int] = (LAST,),
        ranks: Ranks = ALONE,
        # The performances of which outputs are stored, in a folder beside the file.
        outputs: Collection[str] = (),
        anew: bool = False,
    ) -> None:
        self.names, self.ranks = list(names), ranks
        self._named, self._outputs = (
            frozenset(outputs),
            dict[tuple[int, Members], Mapping[str, Tensor]](),
        )
        self._folder = (
            path.with_suffix("") if path is not None and ranks.rank == 0 and outputs else None
        )
        self._rounds, by_round = tuple(rounds), tuple(rounds) != (LAST,)
        columns: dict[str, Cell] = {"seed": parse_int, "coalition": read_members}
        columns |= {"round": parse_int} if by_round else {}
        columns |= dict.fromkeys(names, _numbers)
        self._file: ResultFile | None = None
        if path is not None and ranks.rank == 0:
            self._file = ResultFile(
                path, columns, settings or {}, key=2 if by_round else 0, anew=anew
            )
        rows = [] if self._file is None else self._file.rows
        found = {
            (row["seed"], row["coalition"], row.get("round", LAST)): [row[name] for name in names]
            for row in rows
        }
        if self._folder is not None:
            self._outputs = {
                each: kept for each in {key[:2] for key in found} if (kept := self._read(*each))
            }
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
        """Return the distinct ``coalitions`` that lack utilities after at least one round."""
        distinct = dict.fromkeys(coalitions)
        return [
            each
            for each in distinct
            if any((seed, each, index) not in self._known for index in self._rounds)
            or (each and not self._named <= self._outputs.get((seed, each), {}).keys())
        ]

    def outputs(self, seed: int, members: Members, name: str) -> Tensor:
        """Return a coalition's outputs ``[R, V, ...]`` after each of R rounds, or raise KeyError."""
        return self._outputs[seed, members][name]

    def last_outputs(self, seed: int, members: Members) -> Tensor | None:
        """Return a coalition's outputs ``[V, ...]`` after the last round, or None."""
        return next(
            (outputs[-1] for outputs in self._outputs.get((seed, members), {}).values()), None
        )

    def _read(self, seed: int, members: Members) -> Mapping[str, Tensor]:
        """Read a coalition's outputs by performance. Empty: the file is missing or of other rounds."""
        assert self._folder is not None
        kept = read_outputs(self._folder, seed, members)
        return {name: each for name, each in kept.items() if len(each) == len(self._rounds)}

    def progress(self, seed: int, coalitions: Sequence[Members]) -> str:
        """Return text on how many of the distinct ``coalitions`` have utilities."""
        return f"seed {seed}: {len(coalitions) - len(self.missing(seed, coalitions))} of {len(coalitions)} coalitions"

    def rows(self, seed: int, members: Members) -> list[Row]:
        """Return a coalition's utilities after each round, or raise KeyError."""
        return [self._known[seed, members, index] for index in self._rounds]

    def table(self, seed: int, masks: Tensor) -> Tensor:
        """Return K coalitions' utilities after training by C performances, float64 ``[K, C]``, or raise KeyError."""
        rows = [self._known[seed, members, LAST] for members in members_of(masks)]
        return torch.tensor([[value for (value,) in row] for row in rows], dtype=torch.float64)

    def add(
        self,
        seed: int,
        members: Members,
        rows: Mapping[int, Row],
        outputs: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add a coalition's outputs ``[R, V, ...]`` and utilities. ``rows`` are ``{round: utilities}``, one utility for
        each of ``names``.
        """
        kept = {name: each for name, each in (outputs or {}).items() if name in self._named}
        if kept:
            self._outputs[seed, members] = kept
            if (
                self._folder is not None
            ):  # before the rows, so that rows have their outputs after a kill
                self._folder.mkdir(exist_ok=True)
                with replacing(self._folder / outputs_file(seed, members)) as file:
                    torch.save(kept, file)
        self._known |= {(seed, members, index): row for index, row in rows.items()}
        if self._file is not None and all(map(_finite, rows.values())):
            self._file.add(self._cells(seed, members, index, row) for index, row in rows.items())

    def sort(self) -> None:
        """Write the file with sorted rows, whatever the order in which trainings ended."""
        if self._file is not None and self._known:
            ordered = sorted(
                self._known.items(), key=lambda item: (item[0][0], len(item[0][1]), *item[0][1:])
            )
            self._file.replace(self._cells(*key, row) for key, row in ordered if _finite(row))

    def _cells(self, seed: int, members: Members, index: int, row: Row) -> list[object]:
        place = [] if index == LAST else [index]
        return [
            seed,
            members_text(members),
            *place,
            *(" ".join(map(repr, map(float, cell))) for cell in row),
        ]


def outputs_file(seed: int, members: Members) -> str:
    """Return the name of the file with a coalition's outputs."""
    return f"{seed}_{members_text(members)}.pt"


def read_outputs(folder: Path, seed: int, members: Members) -> Mapping[str, Tensor]:
    """Read a coalition's outputs ``[R, V, ...]`` by performance, empty if there is no file."""
    path = folder / outputs_file(seed, members)
    return torch.load(path, weights_only=True) if path.is_file() else {}  # type: ignore[no-any-return]


def _finite(row: Row) -> bool:
    return all(math.isfinite(value) for cell in row for value in cell)
