"""Files of coalitions: each coalition's scores and outputs, and what all coalitions of a run have in common.

A run's folder has the folder ``coalitions`` with

- ``<seed>/<digest>.pt``: a coalition's members, and the scores and outputs of its models by round. Digests of the
  members and of the rounds make the name. A file is written completely or not at all.
- ``settings.json``: the settings by which coalitions were trained, and a hash of the initial weights.
- ``untrained.csv``: scores of untrained models with different initial weights, a column for each performance measure.

``coalitions.csv`` beside this folder is a table of the scores for people, which flsv does not read.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flsv.games.members import Members
from flsv.scores.performance import Measure
from flsv.utilities.atomic_files import replacing, write_json
from flsv.utilities.csv_files import parse_numbers, read_rows, save_csv
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import digest

#: Folder of the coalitions' files in a run's folder.
COALITIONS_FOLDER = "coalitions"
#: Table of the coalitions' scores in a run's folder.
COALITIONS_TABLE = "coalitions.csv"
#: Name of the empty coalition in that table.
NO_CLIENTS = "no clients"
#: The round of models that have none: those after training, if no rounds are named, and of the empty coalition.
NO_ROUND = -1
#: The name of the outputs of classifiers, by which all their measures are computed.
CLASSIFIER_OUTPUTS = "accuracy"
_SETTINGS_FILE = "settings.json"
_UNTRAINED_FILE = "untrained.csv"

#: A model's utilities by performance measure: one number, or one for each class.
Utilities = Mapping[str, Sequence[float]]
#: A model's outputs, [V, ...], by performance measure.
Outputs = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class ScoredModel:
    """Utilities of a coalition's model, and its outputs if values need them."""

    utilities: Utilities
    outputs: Outputs = field(default_factory=dict)
    #: The same model, trained in 64 bits. It is known where training enlarges rounding errors.
    in_double: ScoredModel | None = None

    @property
    def is_finite(self) -> bool:
        """Return whether all utilities are numbers."""
        numbers = itertools.chain(*self.utilities.values())
        return all(map(math.isfinite, numbers))


#: A coalition's models by round.
Models = Mapping[int, ScoredModel]


class Training(NamedTuple):
    """A coalition to train, and the seed of its fit."""

    seed: int
    members: Members


def rounds_of(members: Members, rounds: Sequence[int]) -> Sequence[int]:
    """Return the rounds after which a coalition has models: of the empty one :data:`NO_ROUND` alone."""
    return rounds if members else (NO_ROUND,)


def write_coalition(folder: Path, training: Training, models: Models) -> None:
    """Write a coalition's models into the folder of coalitions."""
    path = _path_of(folder, training, models)
    path.parent.mkdir(parents=True, exist_ok=True)
    rounds = {round_index: _as_plain(model) for round_index, model in models.items()}
    content = {"members": list(training.members), "rounds": rounds}
    with replacing(path) as file:
        torch.save(content, file)


def replace_coalition(folder: Path, training: Training, models: Models) -> None:
    """Write all models of a coalition into one file, in place of its other files."""
    write_coalition(folder, training, models)
    path = _path_of(folder, training, models)
    for other_path in _paths_of(folder, training):
        if other_path != path:
            other_path.unlink()


def _path_of(folder: Path, training: Training, models: Models) -> Path:
    digest_of_rounds = digest([*models]).hex()[:8]
    return folder / str(training.seed) / f"{_coalition_name(training)}_{digest_of_rounds}.pt"


def _paths_of(folder: Path, training: Training) -> list[Path]:
    return [*folder.glob(f"{training.seed}/{_coalition_name(training)}_*.pt")]


def _as_plain(model: ScoredModel) -> dict[str, object]:
    content: dict[str, object] = {
        "utilities": dict(model.utilities),
        "outputs": dict(model.outputs),
    }
    if model.in_double is not None:
        content["in_double"] = _as_plain(model.in_double)
    return content


def _from_plain(content: dict[str, Any]) -> ScoredModel:
    in_double = content.get("in_double")
    return ScoredModel(
        content["utilities"],
        content["outputs"],
        in_double=None if in_double is None else _from_plain(in_double),
    )


def read_coalitions(folder: Path) -> dict[Training, dict[int, ScoredModel]]:
    """Read the models of all coalitions in the folder of coalitions. Empty without this folder."""
    models: dict[Training, dict[int, ScoredModel]] = {}
    for path in sorted(folder.glob("*/*.pt")):
        content = torch.load(path, weights_only=True)
        training = Training(
            seed=int(path.parent.name),
            members=tuple(content["members"]),
        )
        models_of_coalition = models.setdefault(training, {})
        for round_index, table in content["rounds"].items():
            models_of_coalition[round_index] = _from_plain(table)
    return models


def remove_coalition(folder: Path, training: Training) -> None:
    """Remove all files of a coalition."""
    for path in _paths_of(folder, training):
        path.unlink()


def _coalition_name(training: Training) -> str:
    return digest(training.members).hex()[:16]


def read_settings(folder: Path) -> dict[str, str]:
    """Read the settings of the coalitions in a folder. Empty without any.

    Raises:
        ConfigurationError: an earlier version has written the folder.
    """
    path = folder / _SETTINGS_FILE
    if path.is_file():
        settings: dict[str, str] = json.loads(path.read_text())
        return settings
    # A kill while the first settings are written leaves a temporary file alone.
    if any(folder.glob("**/*.pt")):
        raise ConfigurationError(
            f"{folder} has no {_SETTINGS_FILE}: an earlier version of flsv has written it, and this version does not "
            "read it. Move the folder away, and retrain with this version."
        )
    return {}


def write_settings(folder: Path, settings: Mapping[str, str]) -> None:
    """Write the settings by which coalitions are trained."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _SETTINGS_FILE, settings)


def write_untrained(folder: Path, utilities: Mapping[str, Tensor]) -> None:
    """Save the utilities of R untrained models, for each measure ``[R, 1]``, or ``[R, M]`` for M classes."""
    if not utilities:
        return
    columns = [map(_numbers_text, column.tolist()) for column in utilities.values()]
    rows = zip(*columns)
    save_csv(folder / _UNTRAINED_FILE, [list(utilities), *rows])


def read_untrained(folder: Path) -> dict[str, Tensor]:
    """Read the utilities of untrained models. Empty without such models."""
    path = folder / _UNTRAINED_FILE
    if not path.is_file():
        return {}
    rows = list(read_rows(path, {}))
    utilities = {}
    for name in rows[0]:
        numbers = [parse_numbers(row[name]) for row in rows]
        utilities[name] = torch.tensor(numbers, dtype=torch.float64)
    return utilities


def remove_coalitions(run_folder: Path) -> None:
    """Remove the coalitions of an earlier run in a run's folder."""
    remove_files(run_folder / COALITIONS_FOLDER)
    (run_folder / COALITIONS_TABLE).unlink(missing_ok=True)


def remove_files(folder: Path) -> None:
    """Remove a folder of coalitions."""
    # Before the settings, so that a kill leaves no coalitions without settings.
    for path in folder.glob("**/*.pt"):
        path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def copy_coalitions(run_folder: Path, target: Path) -> None:
    """Copy the coalitions in a run's folder into another one."""
    folder = run_folder / COALITIONS_FOLDER
    settings = read_settings(folder)
    if not settings:
        return
    write_settings(target / COALITIONS_FOLDER, settings)  # first, for kills
    shutil.copytree(
        folder,
        target / COALITIONS_FOLDER,
        ignore=shutil.ignore_patterns(".*"),
        copy_function=_copy_file,
        dirs_exist_ok=True,
    )


def _copy_file(source: str, target: str) -> None:
    with open(source, "rb") as source_file, replacing(Path(target)) as target_file:
        shutil.copyfileobj(source_file, target_file)


def write_table(
    path: Path,
    models: Mapping[Training, Models],
    *,
    measures: Sequence[str],
    rounds: Sequence[int],
    client_names: Sequence[str],
) -> None:
    """Write the scores of all coalitions by their members' names, sorted by seed, size and round."""
    rows: list[list[object]] = [["seed", "coalition", "round", *measures]]
    for training in sorted(models, key=_sort_key):
        names = [client_names[client] for client in training.members]
        coalition = "+".join(names) or NO_CLIENTS
        for round_index in rounds_of(training.members, rounds):
            model = models[training].get(round_index)
            if model is None:
                continue
            round_text = "" if round_index == NO_ROUND else round_index
            scores = [_numbers_text(model.utilities[name]) for name in measures]
            rows.append([training.seed, coalition, round_text, *scores])
    save_csv(path, rows)


def _numbers_text(numbers: Sequence[float]) -> str:
    return " ".join(repr(float(number)) for number in numbers)  # several, if per class


def _sort_key(training: Training) -> tuple[int, int, Members]:
    return training.seed, len(training.members), training.members


def outputs_name(measure: Measure) -> str:
    """Return the name under which a coalition's outputs are stored."""
    is_of_outputs = measure.is_of_classifier and not measure.at_clients
    return CLASSIFIER_OUTPUTS if is_of_outputs else measure_name(measure)


def measure_name(measure: Measure) -> str:
    """Return a performance measure's name in the files of coalitions.

    Example:
        >>> from flsv.scores.performance import as_measure
        >>> measure_name(as_measure("accuracy")), measure_name(Measure("val_loss", "min"))
        ('accuracy', 'val_loss (min)')
    """
    if measure.called:
        return measure.title
    return f"{measure.title} ({measure.mode})"
