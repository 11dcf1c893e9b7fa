"""CoalitionStore: the scored models of coalitions, in files from which a stopped run continues."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.core import ALONE, Ranks
from flsv.games.members import EMPTY, Members
from flsv.results.text import joined
from flsv.retraining.training_job import FitResult
from flsv.utilities.errors import listed
from flsv.values.coalition_files import (
    COALITIONS_FOLDER,
    COALITIONS_TABLE,
    NO_ROUND,
    Models,
    ScoredModel,
    Training,
    read_coalitions,
    read_settings,
    read_untrained,
    remove_coalition,
    remove_files,
    replace_coalition,
    rounds_of,
    write_coalition,
    write_settings,
    write_table,
    write_untrained,
)
from flsv.values.query import SeedScores

#: Folder in a run's folder with coalitions of an earlier run, which are taken over if it is the same run.
EARLIER_FOLDER = "earlier"


class CoalitionStore:
    """Scored models of coalitions by seed, coalition and round.

    Each rank holds all models, and the first rank writes them as soon as they are known. The coalition of all clients
    is the run itself. The empty coalition has the model before the first round, which has no round. Models whose
    utilities are not finite are held, but not written. If a file cannot be written, such as to a full disk,
    :meth:`write_table` warns.

    Args:
        run_folder: the run's folder. None: nothing is written.
        measures: names of the performance measures by which each model has utilities.
        settings: all on which the utilities depend, except the seed. Files of other settings are replaced.
        outputs: names of the measures whose outputs are stored.
    """

    _folder: Path | None = None
    # Whether the folder has these settings, without which coalitions cannot be read.
    _has_settings = False

    def __init__(
        self,
        run_folder: Path | None,
        measures: Sequence[str],
        settings: Mapping[str, Any],
        *,
        ranks: Ranks = ALONE,
        outputs: Collection[str] = (),
    ) -> None:
        self.measures = list(measures)
        self.settings = {name: str(value) for name, value in settings.items()}
        self.ranks = ranks
        # The rounds after which coalitions need models, as the run sets them.
        self.rounds: Sequence[int] = (NO_ROUND,)
        self.measures_with_outputs = frozenset(outputs)
        #: Utilities of untrained models, [R, 1] or [R, M], by measure.
        self.untrained: Mapping[str, Tensor] = {}
        self._models: dict[Training, dict[int, ScoredModel]] = {}
        # What could not be stored, and why.
        self._errors: dict[str, OSError] = {}
        if run_folder is not None and ranks.rank == 0:
            self._read(run_folder / COALITIONS_FOLDER)
        content_here = {"models": self._models, "untrained": self.untrained}
        content_of_rank_0 = ranks.broadcast(0, content_here, "the stored coalitions")
        self._models = content_of_rank_0["models"]
        self.untrained = content_of_rank_0["untrained"]

    def _read(self, folder: Path) -> None:
        """Store coalitions in this folder from now on, and read those that were trained with the same settings."""
        self._folder = folder
        self._has_settings = read_settings(folder) == self.settings
        if self._has_settings:
            self._models = read_coalitions(folder)
            self.untrained = read_untrained(folder)

    def add_untrained(self, utilities: Mapping[str, Tensor]) -> None:
        """Add the utilities of R untrained models, for each measure ``[R, 1]``, or ``[R, M]`` for M classes."""
        self.untrained = utilities
        write = partial(write_untrained, utilities=utilities)
        self._write("the scores of untrained models", write)

    def _write(self, title: str, write: Callable[[Path], None]) -> None:
        """Write a file, the settings first. An error of the file system is held."""
        if self._folder is None:
            return
        try:
            if not self._has_settings:
                remove_files(self._folder)  # of other settings
                write_settings(self._folder, self.settings)
                self._has_settings = True
            write(self._folder)
        except OSError as error:
            self._errors[title] = error

    def take_over(self, run_folder: Path, grand: Training) -> None:
        """Add the coalitions of an earlier run in ``run_folder`` that are missing, if it was the same run.

        It was if the settings that both have are equal, and the last utilities of the ``grand`` coalition.
        """
        if self._folder is not None and self._is_complete(grand):
            models = self._models_of_same_run(run_folder / COALITIONS_FOLDER, grand)
            for training, models_by_round in models.items():
                if not self._is_complete(training):
                    self.add(*training, models_by_round)
        self._models = self.ranks.broadcast(0, self._models, "the coalitions of an earlier run")

    def _models_of_same_run(self, folder: Path, grand: Training) -> Mapping[Training, Models]:
        settings = read_settings(folder)
        for name in settings.keys() & self.settings.keys():
            if settings[name] != self.settings[name]:
                return {}
        models = read_coalitions(folder)
        last_round = self.rounds[-1]
        earlier_model = models.get(grand, {}).get(last_round)
        if earlier_model is None:
            return {}
        utilities = self._models[grand][last_round].utilities
        for name in self.measures:
            if earlier_model.utilities.get(name) != utilities[name]:
                return {}
        return models

    def missing(self, seed: int, coalitions: Sequence[Members]) -> list[Members]:
        """Return the distinct ``coalitions`` that have no model after at least one round."""
        distinct_coalitions = dict.fromkeys(coalitions)
        return [
            members
            for members in distinct_coalitions
            if not self._is_complete(Training(seed, members))
        ]

    def rounds_of_all(self, seed: int, coalitions: Sequence[Members]) -> list[int]:
        """Return those of :attr:`rounds` after which all ``coalitions`` have models."""
        trainings = [Training(seed, members) for members in coalitions]
        return [
            round_index
            for round_index in self.rounds
            if all(self._has_models(training, [round_index]) for training in trainings)
        ]

    def _is_complete(self, training: Training) -> bool:
        return self._has_models(training, self.rounds)

    def _has_models(self, training: Training, rounds: Sequence[int]) -> bool:
        models = self._models.get(training, {})
        for round_index in rounds_of(training.members, rounds):
            model = models.get(round_index)
            if model is None:
                return False
            has_utilities = model.utilities.keys() >= set(self.measures)
            has_outputs = model.outputs.keys() >= self.measures_with_outputs
            if not (has_utilities and has_outputs):
                return False
        return True

    def scores(self, seed: int) -> SeedScores:
        """Return the scored models of a seed."""
        models = {
            training.members: models_by_round
            for training, models_by_round in self._models.items()
            if training.seed == seed
        }
        return SeedScores(models, self.untrained)

    def progress(self, seed: int, coalitions: Sequence[Members]) -> str:
        """Return text on how many of the distinct ``coalitions`` are trained."""
        num_coalitions = len(coalitions)
        num_trained = num_coalitions - len(self.missing(seed, coalitions))
        return f"seed {seed}: {num_trained} of {num_coalitions} coalitions"

    def add_result(self, seed: int, members: Members, result: FitResult) -> bool:
        """Add those scores of a coalition's fit that are missing. Return whether the coalition's own were."""
        missing = self.missing(seed, [members, EMPTY])
        in_double = dict(zip(self.rounds, result.in_double))
        if members in missing:
            # Both in one file: a coalition that has its scores only is not trained again after a kill.
            models = {
                round_index: replace(model, in_double=in_double.get(round_index))
                for round_index, model in zip(self.rounds, result.scored)
            }
            self.add(seed, members, models)
        elif in_double:
            self.add_in_double(seed, members, in_double)
        if EMPTY in missing and result.untrained is not None:
            self.add(seed, EMPTY, {NO_ROUND: result.untrained})
        return members in missing

    def add(self, seed: int, members: Members, models: Models) -> None:
        """Add a coalition's models, ``{round: model}``."""
        training = Training(seed, members)
        models_to_write = {}
        for round_index, model in models.items():
            stored_model = self._without_needless_outputs(model)
            self._models.setdefault(training, {})[round_index] = stored_model
            # What is not finite is computed again by the next command.
            if model.is_finite:
                models_to_write[round_index] = stored_model
        if models_to_write:
            write = partial(write_coalition, training=training, models=models_to_write)
            self._write(_scores_text(training), write)

    def _without_needless_outputs(self, model: ScoredModel) -> ScoredModel:
        names = model.outputs.keys() & self.measures_with_outputs
        outputs = {name: model.outputs[name] for name in names}
        in_double = model.in_double
        if in_double is not None:
            in_double = self._without_needless_outputs(in_double)
        return ScoredModel(model.utilities, outputs, in_double=in_double)

    def discard(self, seed: int, coalitions: Sequence[Members]) -> None:
        """Remove the models of coalitions, which are trained again."""
        for members in coalitions:
            training = Training(seed, members)
            self._models.pop(training, None)
            if self._folder is not None:
                remove_coalition(self._folder, training)

    def add_in_double(self, seed: int, members: Members, models: Models) -> None:
        """Add what a coalition's models come to in 64 bits, ``{round: model}``."""
        training = Training(seed, members)
        models_of_coalition = self._models[training]
        for round_index in models.keys() & models_of_coalition.keys():
            model = replace(models_of_coalition[round_index], in_double=models[round_index])
            models_of_coalition[round_index] = self._without_needless_outputs(model)
        self._rewrite(training)

    def discard_in_double(self, seed: int) -> None:
        """Remove what the models of a seed come to in 64 bits."""
        for training, models in self._models.items():
            is_known = any(model.in_double is not None for model in models.values())
            if training.seed == seed and is_known:
                for round_index, model in models.items():
                    models[round_index] = replace(model, in_double=None)
                self._rewrite(training)

    def _rewrite(self, training: Training) -> None:
        models = {
            index: model for index, model in self._models[training].items() if model.is_finite
        }
        write = partial(replace_coalition, training=training, models=models)
        self._write(_scores_text(training), write)

    def write_table(self, client_names: Sequence[str]) -> None:
        """Write the table of all coalitions' scores. What could not be stored is a warning."""
        if self._folder is None:
            return
        try:
            write_table(
                self._folder.with_name(COALITIONS_TABLE),
                self._models,
                measures=self.measures,
                rounds=self.rounds,
                client_names=client_names,
            )
        except OSError as error:
            rank_zero_warn(f"the table of the coalitions' scores could not be written ({error}).")
        if self._errors:
            first_error = next(iter(self._errors.values()))
            rank_zero_warn(
                f"these could not be stored: {listed(self._errors)} ({first_error}). The values count them, but a "
                "later command may train coalitions again."
            )
            self._errors = {}


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


def _scores_text(training: Training) -> str:
    return f"the scores of {clients_text(training.members)} with seed {training.seed}"
