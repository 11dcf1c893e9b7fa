"""UtilityStore: the utilities of trained coalitions, in a file with which a stopped command continues."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.core import ALONE, Ranks
from flsv.games.members import Members, members_of
from flsv.results.text import joined
from flsv.scores.performance import ModelScore
from flsv.utilities.atomic_files import replacing, whole_lines
from flsv.utilities.csv_files import Cell, parse_float, parse_int, read_rows
from flsv.utilities.errors import listed
from flsv.utilities.plain_values import digest
from flsv.utilities.result_file import ResultFile, members_text, read_members, stored_settings

#: File in a run's folder with the utilities of the coalitions that were trained after the run.
COALITIONS_FILE = "coalitions.csv"
#: Folder beside that file with one of an earlier run, from which trainings of the same run are taken over.
EARLIER_FOLDER = "earlier"
#: The round of models that have none: those after training, if a store has no rounds, and of the empty coalition.
NO_ROUND = -1
#: Settings of a file that tell which scores it has of trainings, not how they trained.
SETTINGS_OF_SCORES = {"scores"}
#: A model's utilities by each performance: one number, or one for each class.
Row = Sequence[Sequence[float]]
#: A model's outputs, [V, ...], by performance.
Outputs = Mapping[str, Tensor]
#: Seed and members of a training.
Training = tuple[int, Members]


def _parse_numbers(cell: str) -> list[float]:
    return [parse_float(number) for number in cell.split()]


def _parse_round(cell: str) -> int:
    return parse_int(cell) if cell else NO_ROUND


@dataclass(frozen=True, eq=False)
class ScoredModel:
    """Hold what is stored of a model: its utilities, and outputs if values need them."""

    utilities: Row
    outputs: Outputs = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Return whether all utilities are numbers."""
        numbers = itertools.chain(*self.utilities)
        return all(map(math.isfinite, numbers))


class UtilityStore:
    """Utilities of coalitions' models, by seed, coalition and performance, or also by round.

    Each rank holds all utilities, and the first rank writes them as soon as they are known. The coalition of all
    clients is the run itself. The empty coalition has the model before the first round, which has no round. Utilities
    that are not finite are held, but not written. If a coalition cannot be written, such as to a full disk, it is held,
    and :meth:`sort` warns.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "game.csv"
        >>> UtilityStore(path, ["accuracy"], {"rounds": 5}).add(0, (0, 2), {NO_ROUND: ScoredModel([[0.75]])})
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
        # Whether coalitions have utilities after several rounds.
        by_round: bool = False,
        ranks: Ranks = ALONE,
        # Names of the performances whose outputs are stored, in a folder beside the file.
        outputs: Collection[str] = (),
        anew: bool = False,
    ) -> None:
        self.names = list(names)
        self.settings = dict(settings or {})
        self.ranks = ranks
        # The rounds after which coalitions need utilities.
        self.rounds: Sequence[int] = () if by_round else (NO_ROUND,)
        self._by_round = by_round
        self.measures_with_outputs = frozenset(outputs)
        self._models: dict[Training, dict[int, ScoredModel]] = {}
        # Why coalitions could not be stored.
        self._errors: dict[Training, OSError] = {}
        self._file: ResultFile | None = None
        self._outputs_folder: Path | None = None

        if path is not None and ranks.rank == 0:
            columns = _columns(names, by_round)
            self._file = ResultFile(
                path,
                columns,
                settings=self.settings,
                anew=anew,
            )
            if outputs:
                self._outputs_folder = path.with_suffix("")
            self._read_back(self._file.rows)
        # All ranks take what the first one has read.
        self._models = ranks.broadcast(0, self._models, "the stored trainings")

    def _read_back(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for training, round_index, utilities in _read_rows(rows, self.names):
            outputs = read_outputs(self._outputs_folder, training, round_index)
            models = self._models.setdefault(training, {})
            models[round_index] = ScoredModel(utilities, outputs)

    def take_over(
        self,
        path: Path,
        seed: int,
        grand: Members,
    ) -> None:
        """Store the trainings in a file of the same run, which may have other coalitions, and more scores or rounds.

        It is the same run if settings and the last utilities of the coalition ``grand`` of all clients are the same.
        """
        if self._file is not None and not self.missing(seed, [grand]):
            trainings = _trainings_of_run(path, self.settings, self.names)
            stored_rows = trainings.get((seed, grand), {})
            last_row = self.rows(seed, grand)[-1]
            if stored_rows.get(self.rounds[-1]) == last_row:
                self._add_rows(trainings, path.with_suffix(""))
        self._models = self.ranks.broadcast(0, self._models, "the trainings of an earlier run")

    def _add_rows(self, trainings: Mapping[Training, Mapping[int, Row]], folder: Path) -> None:
        """Add the trainings that are missing, with the outputs in ``folder``."""
        for training, row_by_round in trainings.items():
            seed, members = training
            if not self.missing(seed, [members]):
                continue
            models = {}
            for round_index in self._rounds_of(members):
                if round_index in row_by_round:
                    outputs = read_outputs(folder, training, round_index)
                    models[round_index] = ScoredModel(row_by_round[round_index], outputs)
            self.add(seed, members, models)

    @property
    def seeds(self) -> list[int]:
        """Return the seeds with utilities, ascending."""
        return sorted({seed for seed, _ in self._models})

    def coalitions(self, seed: int) -> set[Members]:
        """Return the coalitions that have utilities for a seed."""
        return {members for stored_seed, members in self._models if stored_seed == seed}

    def missing(
        self,
        seed: int,
        coalitions: Sequence[Members],
    ) -> list[Members]:
        """Return the distinct ``coalitions`` that lack utilities after at least one round."""
        distinct_coalitions = dict.fromkeys(coalitions)
        return [members for members in distinct_coalitions if not self._is_complete(seed, members)]

    def rounds_of_all(self, seed: int, coalitions: Sequence[Members]) -> list[int]:
        """Return those of :attr:`rounds` after which all ``coalitions`` have utilities."""
        return [
            index
            for index in self.rounds
            if all(self._has_model(seed, members, index) for members in coalitions)
        ]

    def _is_complete(self, seed: int, members: Members) -> bool:
        return all(self._has_model(seed, members, index) for index in self._rounds_of(members))

    def _has_model(self, seed: int, members: Members, round_index: int) -> bool:
        models = self._models.get((seed, members), {})
        model = models.get(round_index if members else NO_ROUND)
        return model is not None and model.outputs.keys() >= self.measures_with_outputs

    def _rounds_of(self, members: Members) -> Sequence[int]:
        return self.rounds if members else (NO_ROUND,)

    def _models_of(self, seed: int, members: Members) -> list[ScoredModel]:
        """Return a coalition's model after each round, or raise KeyError."""
        models = self._models[seed, members]
        if not members:
            return [models[NO_ROUND]] * len(self.rounds)
        return [models[round_index] for round_index in self.rounds]

    def outputs(
        self,
        seed: int,
        members: Members,
        name: str,
    ) -> Tensor:
        """Return a coalition's outputs ``[R, V, ...]`` after each of R rounds, or raise KeyError."""
        models = self._models_of(seed, members)
        return torch.stack([model.outputs[name] for model in models])

    def rows(self, seed: int, members: Members) -> list[Row]:
        """Return a coalition's utilities after each round, or raise KeyError."""
        return [model.utilities for model in self._models_of(seed, members)]

    def progress(self, seed: int, coalitions: Sequence[Members]) -> str:
        """Return text on how many of the distinct ``coalitions`` have utilities."""
        num_coalitions = len(coalitions)
        num_missing = len(self.missing(seed, coalitions))
        num_trained = num_coalitions - num_missing
        return f"seed {seed}: {num_trained} of {num_coalitions} coalitions"

    def table(self, seed: int, masks: Tensor) -> Tensor:
        """Return K coalitions' utilities after training by C performances, float64 ``[K, C]``, or raise KeyError."""
        utilities = []
        for members in members_of(masks):
            row = self._models[seed, members][NO_ROUND].utilities
            utilities.append([utility for (utility,) in row])  # one number of each measure
        return torch.tensor(utilities, dtype=torch.float64)

    def add(
        self,
        seed: int,
        members: Members,
        models: Mapping[int, ScoredModel],
    ) -> None:
        """Add a coalition's models, ``{round: model}``."""
        stored_models = self._models.setdefault((seed, members), {})
        for round_index, model in models.items():
            outputs = {
                name: tensor
                for name, tensor in model.outputs.items()
                if name in self.measures_with_outputs
            }
            stored_models[round_index] = ScoredModel(model.utilities, outputs)
        try:
            self._write(seed, members, rounds=list(models))
        except OSError as error:
            self._errors[seed, members] = error

    def _write(
        self,
        seed: int,
        members: Members,
        rounds: Sequence[int],
    ) -> None:
        """Write a coalition's outputs, and then its rows."""
        models = {}
        for round_index in rounds:
            model = self._models[seed, members][round_index]
            models[round_index] = model
            if model.outputs and self._outputs_folder is not None:
                write_outputs(self._outputs_folder, (seed, members), round_index, model.outputs)
        lines = self._lines(seed, members, models)
        if self._file is not None and lines:
            self._file.add(lines)

    def discard(self, seed: int, coalitions: Sequence[Members]) -> None:
        """Forget the utilities of coalitions, which are computed anew."""
        for members in coalitions:
            self._models.pop((seed, members), None)

    def sort(self) -> None:
        """Write the file with the rows of the rounds alone, sorted, whatever the order in which trainings ended.

        What could not be stored is a warning.
        """
        if self._file is None or not self._models:
            return
        try:
            self._write_sorted(self._file)
        except OSError as error:
            rank_zero_warn(f"the rows of coalitions are not sorted ({error}).")
        if self._errors:
            trainings = listed(self._errors, show=_training_text)
            first_error, *_ = self._errors.values()
            rank_zero_warn(
                f"the scores of these coalitions could not be stored: {trainings} ({first_error}). The values count "
                "them, but a later command may train these coalitions again."
            )
            self._errors = {}

    def _write_sorted(self, file: ResultFile) -> None:
        lines = []
        names_of_outputs = set()
        for training in sorted(self._models, key=_sort_key):
            seed, members = training
            models = {}
            for round_index in self._rounds_of(members):
                if round_index in self._models[training]:
                    models[round_index] = self._models[training][round_index]
                    names_of_outputs.add(outputs_file(training, round_index))
            lines += self._lines(seed, members, models)
        file.replace(lines)
        if self._outputs_folder is not None:
            for path in self._outputs_folder.glob("*.pt"):
                if path.name not in names_of_outputs:
                    path.unlink()

    def _lines(
        self,
        seed: int,
        members: Members,
        models: Mapping[int, ScoredModel],
    ) -> list[list[object]]:
        """Return a line for each model. What is not finite is computed again by the next command."""
        lines = []
        for round_index, model in models.items():
            if not model.is_finite:
                continue
            line: list[object] = [seed, members_text(members)]
            if self._by_round:
                line.append("" if round_index == NO_ROUND else round_index)
            for utility in model.utilities:
                numbers = [repr(float(number)) for number in utility]  # several, if per class
                line.append(" ".join(numbers))
            lines.append(line)
        return lines


def _columns(names: Sequence[str], by_round: bool) -> dict[str, Cell]:
    columns: dict[str, Cell] = {
        "seed": parse_int,
        "coalition": read_members,
    }
    if by_round:
        columns["round"] = _parse_round
    return {**columns, **dict.fromkeys(names, _parse_numbers)}


def _read_rows(
    rows: Iterable[Mapping[str, Any]], names: Sequence[str]
) -> Iterator[tuple[Training, int, Row]]:
    """Yield training, round and utilities of each row of a file."""
    for cells in rows:
        training = cells["seed"], cells["coalition"]
        utilities = [cells[name] for name in names]
        yield training, cells.get("round", NO_ROUND), utilities


def _trainings_of_run(
    path: Path,
    settings: Mapping[str, Any],
    names: Sequence[str],
) -> dict[Training, dict[int, Row]]:
    """Read the trainings in a file with all scores ``names``. Empty if it has other settings or lacks a score."""
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

    trainings: dict[Training, dict[int, Row]] = {}
    rows = read_rows(path, _columns(names, by_round=True), skip=1)
    for training, round_index, utilities in _read_rows(rows, names):
        trainings.setdefault(training, {})[round_index] = utilities
    return trainings


def _sort_key(training: Training) -> tuple[int, int, Members]:
    seed, members = training
    return seed, len(members), members


def clients_text(members: Members) -> str:
    """Name the members of a coalition by their ids.

    Example:
        >>> clients_text((0, 2)), clients_text((1,)), clients_text(())
        ('clients 0 and 2', 'client 1', 'no clients')
    """
    if not members:
        return "no clients"
    plural = "s" if len(members) > 1 else ""
    return f"client{plural} {joined(map(str, members))}"


def _training_text(training: Training) -> str:
    seed, members = training
    return f"{clients_text(members)} with seed {seed}"


def outputs_file(training: Training, round_index: int) -> str:
    """Return the name of the file with the outputs of a coalition's model, which has a digest of the members."""
    seed, members = training
    return f"{seed}_{digest(members).hex()[:16]}_{round_index}.pt"


def write_outputs(
    folder: Path,
    training: Training,
    round_index: int,
    outputs: Outputs,
) -> None:
    """Write the outputs of a coalition's model by performance, with its members."""
    _seed, members = training
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / outputs_file(training, round_index)) as file:
        torch.save({"members": members, "outputs": dict(outputs)}, file)


def read_outputs(
    folder: Path | None,
    training: Training,
    round_index: int,
) -> Outputs:
    """Read the outputs of a coalition's model by performance, empty if there is no file."""
    if folder is None:
        return {}
    path = folder / outputs_file(training, round_index)
    if not path.is_file():
        return {}
    content = torch.load(path, weights_only=True)
    _seed, members = training
    if content["members"] != members:
        return {}
    outputs: Outputs = content["outputs"]
    return outputs


def copy_store(folder: Path, target: Path) -> None:
    """Copy a run's rows and outputs of coalitions, if there are any, into another folder."""
    file = folder / COALITIONS_FILE
    if not file.is_file():
        return
    outputs_folder = target / file.stem
    outputs_folder.mkdir(parents=True, exist_ok=True)
    for path in file.with_suffix("").glob("*"):
        shutil.copy(path, outputs_folder)
    shutil.copy(file, target)


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
