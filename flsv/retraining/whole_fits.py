"""WholeFits: trains coalitions as federations of their own after a fit, each by a copy of the fit's Trainer.

The module, its optimizers and the Trainer's callbacks do the same in such a fit as in the federation's own fit, so that
the model of the full coalition would equal the federation's model to the bit.
"""

from __future__ import annotations

import copy
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from flsv._lightning.patches import callbacks_of
from flsv.configuration.federation_config import ClientEvaluation
from flsv.core import Ranks
from flsv.core.ranks import balance_load
from flsv.data import FederatedDataModule
from flsv.engines.ranks import FederatedStrategy
from flsv.games.coalition_training import GlobalModelScoring, train_alone
from flsv.games.coalition_utility import utility_of
from flsv.games.copy_module import copy_module, deepcopy_with_closures
from flsv.games.members import Members, members_of
from flsv.games.performance import ModelScore
from flsv.results.folder import Reporting
from flsv.sampling import FixedCohort, FullParticipation
from flsv.server.round_server import NoModel
from flsv.training.rows.row_checks import OF_THE_RUN
from flsv.utilities.atomic_files import whole_lines
from flsv.utilities.csv_files import Cell, parse_int, read_rows
from flsv.utilities.result_file import ResultFile, members_text, read_members
from flsv.utilities.seeding import global_rngs, restore_global_rngs

#: File in a run's folder with the utilities of the coalitions that were trained after the run.
COALITIONS = "coalitions.csv"
#: Seconds between two log lines about the trainings' progress.
PAUSE = 10.0


class CoalitionFailed(RuntimeError):
    """Error: a coalition's training has failed."""


class _Nowhere(DummyLogger):
    """Logger that drops everything, with a folder into which callbacks may write files."""

    folder: str | None = None

    @property
    def save_dir(self) -> str | None:
        return self.folder


def _numbers(cell: str) -> list[float]:
    return [float(number) for number in cell.split()]


COLUMNS: Mapping[str, Cell] = {"coalition": read_members, "round": parse_int, "by": str, "utility": _numbers}
#: A coalition, a performance's name and a round: what a row of the file is of.
_Cell = tuple[Members, str, int]
#: A coalition's utilities after each of R rounds, by the name of the performance: ``[R]``, or ``[R, M]`` per class.
Curves = Mapping[str, Tensor]


def called(measure: str | ModelScore) -> str:
    """Return the name that a performance has in the file of coalitions' utilities.

    Example:
        >>> called("accuracy"), called(ModelScore("val_loss", "min"))
        ('accuracy', 'val_loss (min)')
    """
    if isinstance(measure, str):
        return measure
    return measure.title if measure.called else f"{measure.title} ({measure.mode})"


def coalition_loop(loop: Any, cohort: FixedCohort, seed: int) -> Any:
    """Make a coalition's loop: the coalition's clients take part in every round, and nothing is shown or written.

    Args:
        loop: the :class:`flsv.FederatedLoop` of the whole federation.
        cohort: the sampler that always draws the coalition's clients.
        seed: the seed of every random choice.
    """
    read = {strategy.metric for role, strategy in loop.strategies.items() if role != "sampler"}
    metrics = {name: metric for name, metric in loop.metrics.items() if name in read}
    silent = Reporting(table=False, figures=0, files=False)
    return loop.replace(sampler=cohort, seed=seed, metrics=metrics, reporting=silent, evaluation=ClientEvaluation())


def all_take_part(loop: Any) -> str | None:
    """Return the notice that coalitions train without the federation's sampler; None: all its clients always take part.

    Args:
        loop: the :class:`flsv.FederatedLoop` of the whole federation.
    """
    sampler = loop.config.sampler
    if isinstance(sampler, FullParticipation):
        return None
    return (
        "all members of a coalition train in every round, whereas the run drew its cohorts by "
        f"{sampler!r}: another game"
    )


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
    lines = whole_lines(path) if path.is_file() else []
    if len(lines) < 2 or json.loads(lines[0].removeprefix("# ")).get("seed") != str(seed):
        return {}
    found: dict[Members, dict[str, float]] = {}
    for _, row in read_rows(path, COLUMNS, skip=1):
        if row["round"] + 1 == rounds:
            found.setdefault(row["coalition"], {})[row["by"]] = row["utility"][0]
    return {members: [values[name] for name in by] for members, values in found.items() if values.keys() >= set(by)}


class Spare:
    """Copies of a Trainer and its module before a fit, without loggers, checkpoints and progress bars.

    Args:
        trainer: the trainer in its ``setup``, before the fit has changed it.
        module: the module before the first round.

    Raises:
        ConfigurationError: the module cannot be copied.
    """

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._module = copy_module(module)
        held: Any = trainer
        instead: dict[int, Any] = {id(held.datamodule): held.datamodule, id(held.profiler): PassThroughProfiler()}
        instead |= {id(logger): _Nowhere() for logger in trainer.loggers}
        left_out = L.Callback()
        instead |= {id(each): left_out for each in held.callbacks if isinstance(each, OF_THE_RUN)}
        strategy = trainer.strategy
        if isinstance(strategy, FederatedStrategy):  # each rank trains its coalitions by itself
            parts = copy.deepcopy((strategy.accelerator, strategy.precision_plugin))
            instead[id(strategy)] = SingleDeviceStrategy(strategy.root_device, parts[0], precision_plugin=parts[1])
        pairs = _counterparts(module, self._module)
        self._trainer = deepcopy_with_closures(trainer, callbacks_of(trainer), {*pairs}, instead | pairs)
        callbacks: list[L.Callback] = callbacks_of(self._trainer)
        callbacks[:] = [each for each in callbacks if each is not left_out]

    def made(self) -> tuple[L.Trainer, L.LightningModule]:
        """Return further copies of the Trainer and the module, for one fit."""
        module = copy_module(self._module)
        data: Any = self._trainer.datamodule  # type: ignore[attr-defined]  # Lightning does not declare it
        same = {id(each): each for each in (data, *self._trainer.loggers)}
        pairs, callbacks = _counterparts(self._module, module), callbacks_of(self._trainer)
        return deepcopy_with_closures(self._trainer, callbacks, {*pairs}, same | pairs), module


def _counterparts(module: L.LightningModule, copy_of_it: L.LightningModule) -> dict[int, Any]:
    """Return the layers, parameters and buffers of a module's copy by the ``id`` of their originals, to which callbacks
    may refer."""
    pairs = [*zip(module.modules(), copy_of_it.modules()), *zip(module.parameters(), copy_of_it.parameters())]
    return {id(mine): theirs for mine, theirs in (*pairs, *zip(module.buffers(), copy_of_it.buffers()))}


class WholeFits:
    """Function that trains coalitions, each by a Trainer of its own, and returns their utilities after several rounds.

    Args:
        spare: the copies of the Trainer and the module before the fit.
        data: the federation's data module.
        seed: the run's seed.
        initial: the module's ``state_dict`` before the first round.
        measures: the performances of models, by name.
        rounds: the indices of the rounds after which models are measured, ascending; a coalition trains until the last
            of these rounds.
        ranks: the processes among which the coalitions are divided; each process gets all utilities.
        path: the file into which the utilities are written; None: they are not written.
        settings: the settings that the utilities depend on.
        resumed: whether utilities that are in the file already belong to this run.
    """

    def __init__(
        self,
        spare: Spare,
        data: FederatedDataModule,
        seed: int,
        initial: dict[str, Any],
        measures: Mapping[str, str | ModelScore],
        rounds: Sequence[int],
        ranks: Ranks,
        path: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        resumed: bool = False,
    ) -> None:
        self._spare, self._data, self._seed, self._initial = spare, data, seed, initial
        self._measures, self._rounds, self._ranks = dict(measures), list(rounds), ranks
        self._kept: ResultFile | None = None
        if path is not None and ranks.rank == 0:
            if not resumed:
                path.unlink(missing_ok=True)  # it belongs to an earlier run, maybe with another module
            self._kept = ResultFile(path, COLUMNS, settings or {}, key=1, anew=True)

    def __call__(self, masks: Tensor) -> list[Curves]:
        """Train the coalitions that are not in the file, and return each coalition's utilities.

        Args:
            masks: bool ``[K, n]``, the members of each coalition.

        Returns:
            A list of K dictionaries, each with a coalition's utilities after the rounds, by the performance's name.

        Raises:
            CoalitionFailed: a coalition's training has failed.
        """
        coalitions = members_of(masks)
        known = self._ranks.broadcast(0, self._known(), "the trainings that are kept")
        missing = [members for members in coalitions if members not in known]
        samples = self._data.num_samples
        owners = balance_load([float(samples[list(members)].sum()) for members in missing], self._ranks.size)
        start, said = time.monotonic(), 0.0
        turns = [[m for m, owner in zip(missing, owners) if owner == rank] for rank in range(self._ranks.size)]
        for turn in range(max(map(len, turns), default=0)):
            mine = turns[self._ranks.rank][turn : turn + 1]
            found = {members: self._tried(members) for members in mine}
            for part in self._ranks.all_gather(found, "coalitions' trainings"):
                if errors := [f"{each}" for each in part.values() if isinstance(each, CoalitionFailed)]:
                    raise CoalitionFailed(errors[0])  # on all ranks
                known |= part
                for members, curves in part.items():
                    self._keep(members, curves)
            spent, done = time.monotonic() - start, sum(members in known for members in coalitions)
            if spent - said > PAUSE:
                said = spent
                rank_zero_info(f"flsv: {done} of {len(coalitions)} coalitions are trained, in {spent:.0f} s.")
        self._put_in_order(coalitions, known)
        return [known[members] for members in coalitions]

    def _tried(self, members: Members) -> Any:
        """Return a coalition's utilities, or the CoalitionFailed error of its training."""
        try:
            return self._train(members)
        except Exception as error:
            return CoalitionFailed(f"The federation of clients {list(members)} alone: {type(error).__name__}: {error}")

    def _train(self, members: Members) -> dict[str, Tensor]:
        """Train a coalition, and return its utilities after the rounds, by the performance's name."""
        trainer, module = self._spare.made()
        callbacks: list[Any] = callbacks_of(trainer)
        cohort = FixedCohort(members)
        callbacks[:] = [coalition_loop(c, cohort, self._seed) if hasattr(c, "without_files") else c for c in callbacks]
        # A classifier's outputs are scored once for all performances.
        scored = {
            name: measure if isinstance(measure, ModelScore) else None for name, measure in self._measures.items()
        }
        once = list(dict.fromkeys(scored.values()))
        measured = GlobalModelScoring(self._data, [each or "accuracy" for each in once], self._initial, self._rounds)
        with _as_it_was(self._data), tempfile.TemporaryDirectory() as folder:
            trainer._default_root_dir = folder  # type: ignore[attr-defined]  # for files of callbacks
            for logger in trainer.loggers:
                logger.folder = folder  # type: ignore[attr-defined]  # all are _Nowhere
            with suppress(NoModel):  # the last finite model counts
                train_alone(trainer, module, self._data, measured)
        scores = measured.before
        rounds = [scores := measured.after.get(index, scores) for index in self._rounds]
        return {
            name: torch.stack([utility_of(found[once.index(scored[name])], by)[0].cpu() for found in rounds])
            for name, by in self._measures.items()
        }

    def _known(self) -> dict[Members, dict[str, Tensor]]:
        """Return the utilities in the file of those coalitions that it holds with all performances and rounds, by the
        coalition's members."""
        rows = [] if self._kept is None else self._kept.rows
        found: dict[Members, dict[tuple[str, int], list[float]]] = {}
        for row in rows:
            found.setdefault(row["coalition"], {})[row["by"], row["round"]] = row["utility"]
        wanted = [(by, index) for by in self._measures for index in self._rounds]
        whole_ones = {members: cells for members, cells in found.items() if cells.keys() >= set(wanted)}
        return {m: {by: self._curve(cells, by) for by in self._measures} for m, cells in whole_ones.items()}

    def _curve(self, cells: Mapping[tuple[str, int], list[float]], by: str) -> Tensor:
        curve = torch.tensor([cells[by, index] for index in self._rounds], dtype=torch.float64)
        return curve if curve.shape[1] > 1 else curve[:, 0]

    def _keep(self, members: Members, curves: Curves) -> None:
        if self._kept is not None:
            self._kept.add(_row(cell, numbers) for cell, numbers in self._cells(members, curves).items())

    def _cells(self, members: Members, curves: Curves) -> dict[_Cell, list[float]]:
        """Return the file's cells of a coalition."""
        return {
            (members, by, index): torch.atleast_1d(value).tolist()
            for by, curve in curves.items()
            for index, value in zip(self._rounds, curve)
        }

    def _put_in_order(self, coalitions: Sequence[Members], known: Mapping[Members, Curves]) -> None:
        """Write the file anew, each utility once and in an order that does not depend on the number of ranks."""
        if self._kept is None:
            return
        cells = {(row["coalition"], row["by"], row["round"]): row["utility"] for row in self._kept.rows}
        for members in coalitions:
            cells |= self._cells(members, known[members])
        places = {members: place for place, members in enumerate(dict.fromkeys([*coalitions, *(m for m, *_ in cells)]))}
        measures = [*dict.fromkeys([*self._measures, *(by for _, by, _ in cells)])]
        ordered = sorted(cells, key=lambda cell: (places[cell[0]], measures.index(cell[1]), cell[2]))
        self._kept.replace(_row(cell, cells[cell]) for cell in ordered)


def _row(cell: _Cell, numbers: Sequence[float]) -> list[object]:
    members, by, index = cell
    return [members_text(members), index, by, " ".join(map(repr, numbers))]


@contextmanager
def _as_it_was(data: FederatedDataModule) -> Iterator[None]:
    """Silence logs and warnings within this context, in which another Trainer fits on a fit's data; then restore the
    data module's trainer and the random state."""
    logger, trainer, drawn = logging.getLogger("lightning.pytorch"), data.trainer, global_rngs()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself has shown them
            yield
    finally:
        logger.setLevel(level)
        data.trainer = trainer
        restore_global_rngs(drawn)
