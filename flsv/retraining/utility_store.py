"""UtilityStore: the utilities of trained coalitions, in a file with which a stopped command continues."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flsv.core import ALONE, Ranks
from flsv.games.members import Members, members_of
from flsv.scores.performance import ModelScore
from flsv.utilities.atomic_files import replacing, whole_lines
from flsv.utilities.csv_files import Cell, parse_float, parse_int, read_rows
from flsv.utilities.result_file import ResultFile, members_text, read_members, stored_settings

#: File in a run's folder with the utilities of the coalitions that were trained after the run.
COALITIONS_FILE = "coalitions.csv"
#: Folder beside that file with one of an earlier run, from which trainings of the same run are taken over.
EARLIER_FOLDER = "earlier"
#: The index under which utilities after training are stored if a store has no rounds.
LAST_ROUND_KEY = -1
#: Settings of a file that tell which scores it has of trainings, not how they trained.
SETTINGS_OF_SCORES = {"scores", "rounds"}
#: A coalition's utilities after a round, by each performance: one number, or one for each class.
Row = Sequence[Sequence[float]]
#: A coalition's outputs, [R, V, ...] after each of R rounds, by performance.
Outputs = Mapping[str, Tensor]
#: Seed and members of a training.
Training = tuple[int, Members]


def _parse_numbers(cell: str) -> list[float]:
    return [parse_float(number) for number in cell.split()]


class UtilityStore:
    """Utilities of trained coalitions, by seed, coalition and performance, or also by round.

    Each rank holds all utilities, and the first rank writes them. All rows of a coalition are written at once, so that
    a kill loses no coalition whose training has ended. Utilities that are not finite are held, but not written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "game.csv"
        >>> UtilityStore(path, ["accuracy"], {"rounds": 5}).add(0, (0, 2), {LAST_ROUND_KEY: [[0.75]]})
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
        # All on which the utilities depend, except the seed. A file with other settings is refused, or with `anew`
        # replaced.
        settings: Mapping[str, Any] | None = None,
        *,
        # The rounds after which each coalition has utilities.
        rounds: Sequence[int] = (LAST_ROUND_KEY,),
        ranks: Ranks = ALONE,
        # Names of the performances whose outputs are stored, in a folder beside the file.
        outputs: Collection[str] = (),
        anew: bool = False,
    ) -> None:
        self.names = list(names)
        self.ranks = ranks
        self.rounds = tuple(rounds)
        self._measures_with_outputs = frozenset(outputs)
        self._rows_by_training: dict[Training, dict[int, Row]] = {}
        self._outputs_by_training: dict[Training, Outputs] = {}
        self._file: ResultFile | None = None
        self._outputs_folder: Path | None = None

        if path is not None and ranks.rank == 0:
            self._file = self._open(path, settings, anew)
            if outputs:
                self._outputs_folder = path.with_suffix("")
            self._read_back(self._file)
            if not self._file.rows:
                self._take_over(path.parent / EARLIER_FOLDER / path.name, settings or {})
        # All ranks take what the first one has read.
        trainings = self._rows_by_training, self._outputs_by_training
        trainings = ranks.broadcast(0, trainings, "the stored trainings")
        self._rows_by_training, self._outputs_by_training = trainings

    def _open(
        self,
        path: Path,
        settings: Mapping[str, Any] | None,
        anew: bool,
    ) -> ResultFile:
        columns: dict[str, Cell] = {
            "seed": parse_int,
            "coalition": read_members,
        }
        has_rounds = self.rounds != (LAST_ROUND_KEY,)
        # Rows with the same key, a training's seed and coalition, are read only if all are there.
        num_key_columns = 2 if has_rounds else 0
        if has_rounds:
            columns["round"] = parse_int
        for name in self.names:
            columns[name] = _parse_numbers
        return ResultFile(
            path,
            columns,
            settings=settings or {},
            key=num_key_columns,
            anew=anew,
        )

    def _read_back(self, file: ResultFile) -> None:
        for cells in file.rows:
            training = cells["seed"], cells["coalition"]
            round_index = cells.get("round", LAST_ROUND_KEY)
            rows = self._rows_by_training.setdefault(training, {})
            rows[round_index] = [cells[name] for name in self.names]

        for training in self._rows_by_training:
            outputs = self._read_outputs(*training)
            if outputs:
                self._outputs_by_training[training] = outputs

    def _take_over(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Store the trainings in a file of the same run, which may have other coalitions, and more scores or rounds."""
        for (seed, members), rows in _trainings_of_run(path, settings, self.names).items():
            stored_rounds = sorted(rows)
            has_all_rounds = rows.keys() >= set(self.rounds)
            if not has_all_rounds or stored_rounds[-1] != self.rounds[-1]:
                continue
            positions = [stored_rounds.index(round_index) for round_index in self.rounds]
            self._rows_by_training[seed, members] = {index: rows[index] for index in self.rounds}
            if self._outputs_folder is not None:
                stored_outputs = read_outputs(path.with_suffix(""), seed, members)
                self._outputs_by_training[seed, members] = {
                    name: outputs[positions]
                    for name, outputs in stored_outputs.items()
                    if len(outputs) == len(stored_rounds)
                }
                self._write_outputs(seed, members)
        self.sort()

    def _read_outputs(self, seed: int, members: Members) -> Outputs:
        """Read a coalition's outputs. Empty: the file is missing or of other rounds."""
        if self._outputs_folder is None:
            return {}
        stored = read_outputs(self._outputs_folder, seed, members)
        num_rounds = len(self.rounds)
        return {name: outputs for name, outputs in stored.items() if len(outputs) == num_rounds}

    @property
    def seeds(self) -> list[int]:
        """Return the seeds with utilities, ascending."""
        return sorted({seed for seed, _ in self._rows_by_training})

    def coalitions(self, seed: int) -> set[Members]:
        """Return the coalitions that have utilities for a seed."""
        trainings = self._rows_by_training
        return {members for stored_seed, members in trainings if stored_seed == seed}

    def missing(
        self,
        seed: int,
        coalitions: Sequence[Members],
    ) -> list[Members]:
        """Return the distinct ``coalitions`` that lack utilities after at least one round."""
        distinct_coalitions = dict.fromkeys(coalitions)
        return [members for members in distinct_coalitions if not self._is_complete(seed, members)]

    def _is_complete(self, seed: int, members: Members) -> bool:
        row_by_round = self._rows_by_training.get((seed, members), {})
        has_all_rounds = row_by_round.keys() >= set(self.rounds)
        if not has_all_rounds:
            return False
        if not members:
            return True
        outputs = self._outputs_by_training.get((seed, members), {})
        return outputs.keys() >= self._measures_with_outputs

    def outputs(self, seed: int, members: Members, name: str) -> Tensor:
        """Return a coalition's outputs ``[R, V, ...]`` after each of R rounds, or raise KeyError."""
        return self._outputs_by_training[seed, members][name]

    def progress(self, seed: int, coalitions: Sequence[Members]) -> str:
        """Return text on how many of the distinct ``coalitions`` have utilities."""
        num_coalitions = len(coalitions)
        num_missing = len(self.missing(seed, coalitions))
        num_trained = num_coalitions - num_missing
        return f"seed {seed}: {num_trained} of {num_coalitions} coalitions"

    def rows(self, seed: int, members: Members) -> list[Row]:
        """Return a coalition's utilities after each round, or raise KeyError."""
        rows = self._rows_by_training[seed, members]
        return [rows[round_index] for round_index in self.rounds]

    def table(self, seed: int, masks: Tensor) -> Tensor:
        """Return K coalitions' utilities after training by C performances, float64 ``[K, C]``, or raise KeyError."""
        utilities = []
        for members in members_of(masks):
            row = self._rows_by_training[seed, members][LAST_ROUND_KEY]
            utilities.append([utility for (utility,) in row])  # one number of each measure
        return torch.tensor(utilities, dtype=torch.float64)

    def add(
        self,
        seed: int,
        members: Members,
        rows: Mapping[int, Row],
        outputs: Outputs | None = None,
    ) -> None:
        """Add a coalition's outputs ``[R, V, ...]`` and utilities. ``rows`` are ``{round: utilities}``, one utility for
        each of ``names``.
        """
        stored_outputs = {}
        if outputs is not None:
            for name in outputs.keys() & self._measures_with_outputs:
                stored_outputs[name] = outputs[name]
        if stored_outputs:
            self._outputs_by_training[seed, members] = stored_outputs
            self._write_outputs(seed, members)

        stored_rows = self._rows_by_training.setdefault((seed, members), {})
        stored_rows.update(rows)
        # What is not finite is computed again by the next command.
        are_finite = all(map(_is_finite, rows.values()))
        if self._file is not None and are_finite:
            self._file.add(_csv_rows(seed, members, rows))

    def _write_outputs(self, seed: int, members: Members) -> None:
        folder = self._outputs_folder
        if folder is None:
            return
        folder.mkdir(exist_ok=True)
        with replacing(folder / outputs_file(seed, members)) as file:
            torch.save(self._outputs_by_training[seed, members], file)

    def discard(self, seed: int, coalitions: Sequence[Members]) -> None:
        """Forget the utilities of coalitions, which are computed anew."""
        for members in coalitions:
            self._rows_by_training.pop((seed, members), None)
            self._outputs_by_training.pop((seed, members), None)

    def sort(self) -> None:
        """Write the file with sorted rows, whatever the order in which trainings ended."""
        if self._file is None or not self._rows_by_training:
            return
        lines = []
        for seed, members in sorted(self._rows_by_training, key=_sort_key):
            rows = self._rows_by_training[seed, members]
            finite_rows = {index: row for index, row in sorted(rows.items()) if _is_finite(row)}
            lines += _csv_rows(seed, members, finite_rows)
        self._file.replace(lines)


def _trainings_of_run(
    path: Path,
    settings: Mapping[str, Any],
    names: Sequence[str],
) -> dict[Training, dict[int, Row]]:
    """Read the trainings in a file with all scores ``names``. Empty if it is of another run or lacks one."""
    lines = whole_lines(path) if path.is_file() else []
    if len(lines) < 2:
        return {}
    _head, columns, *_rows = lines
    settings_of_file = stored_settings(path)
    for name in settings_of_file.keys() & settings.keys() - SETTINGS_OF_SCORES:
        if settings_of_file[name] != str(settings[name]):
            return {}
    if not {"round", *names} <= set(columns.split(",")):
        return {}

    parsers: dict[str, Cell] = {
        "seed": parse_int,
        "coalition": read_members,
        "round": parse_int,
        **dict.fromkeys(names, _parse_numbers),
    }
    trainings: dict[Training, dict[int, Row]] = {}
    for cells in read_rows(path, parsers, skip=1):
        training = cells["seed"], cells["coalition"]
        rows = trainings.setdefault(training, {})
        rows[cells["round"]] = [cells[name] for name in names]
    return trainings


def _csv_rows(
    seed: int,
    members: Members,
    rows: Mapping[int, Row],
) -> list[list[object]]:
    lines = []  # one for each round
    for round_index, utilities in rows.items():
        line: list[object] = [seed, members_text(members)]
        if round_index != LAST_ROUND_KEY:
            line.append(round_index)
        for utility in utilities:
            numbers = [repr(float(number)) for number in utility]  # several, if per class
            line.append(" ".join(numbers))
        lines.append(line)
    return lines


def _sort_key(training: Training) -> tuple[int, int, Members]:
    seed, members = training
    return seed, len(members), members


def outputs_file(seed: int, members: Members) -> str:
    """Return the name of the file with a coalition's outputs."""
    return f"{seed}_{members_text(members)}.pt"


def read_outputs(folder: Path, seed: int, members: Members) -> Outputs:
    """Read a coalition's outputs ``[R, V, ...]`` by performance, empty if there is no file."""
    path = folder / outputs_file(seed, members)
    if not path.is_file():
        return {}
    return torch.load(path, weights_only=True)


def _is_finite(row: Row) -> bool:
    numbers = itertools.chain(*row)
    return all(map(math.isfinite, numbers))


def outputs_name(measure: str | ModelScore) -> str:
    """Return the name under which a coalition's outputs are stored. All names of scores are of a classifier's."""
    return "accuracy" if isinstance(measure, str) else column_name(measure)


def column_name(measure: str | ModelScore) -> str:
    """Return a performance measure's name in the file of coalitions' utilities.

    Example:
        >>> column_name("accuracy"), column_name(ModelScore("val_loss", "min"))
        ('accuracy', 'val_loss (min)')
    """
    if isinstance(measure, str):
        return measure
    if measure.called:
        return measure.title
    return f"{measure.title} ({measure.mode})"
