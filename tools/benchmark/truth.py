"""Ground truth of the benchmark, from coalitions that were trained with several seeds."""
# The package has one CSV file of utilities per federation, a row per coalition and seed. `make_truth` continues such a
# file after an interruption.

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from benchmark.federation import Federation, quiet
from benchmark.result_file import ResultFile
from benchmark.scores import NAN, spearman
from flsv.configuration.federation_config import Reporting
from flsv.federation import FederatedLoop
from flsv.filters import OutlierFilter
from flsv.functional.shapley.exact import all_coalitions, shapley_of_table
from flsv.functional.shapley.game import MAX_EXACT_PLAYERS
from flsv.games.members import Members, members_of
from flsv.retraining.coalition_store import CoalitionStore
from flsv.retraining.copied_fits import CopiedFits, CopyOfRun
from flsv.retraining.one_by_one import OneByOne, SameStart, train_missing
from flsv.retraining.training_job import TrainingJob
from flsv.scores.performance import performance_of
from flsv.utilities.csv_files import Cell, parse_float, parse_int
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import isolated_rngs
from flsv.values.coalition_files import NO_ROUND, Models, ScoredModel, Training

FOLDER = Path(__file__).parent / "truths"
#: Column of the utilities in a table.
UTILITY_NAME = "utility"
#: Training seeds of the ground truth. No metric is run with these seeds.
SEEDS = (100, 101, 102, 103, 104)
#: Largest number of clients for which all coalitions are trained.
MAX_CLIENTS = min(10, MAX_EXACT_PLAYERS)


@dataclass(frozen=True, eq=False)
class Truth:
    """Ground truth of a federation: the Shapley values of its n clients, from trained coalitions.

    Args:
        seeds: the s seeds with which coalitions were trained.
        values: float64 ``[s, n]``, the Shapley values for each seed.
        utilities: float64 ``[s, 2^n]``, utilities of all coalitions. Bit i of a coalition's number stands for client i.

    Example:
        >>> from benchmark import federation, truth_table
        >>> truth = truth_table(federation("digits_sizes"))
        >>> truth.utilities.shape, truth.mean.shape, truth.ceiling > 0.8
        (torch.Size([5, 64]), torch.Size([6]), True)
    """

    seeds: tuple[int, ...]
    values: Tensor
    utilities: Tensor

    @property
    def num_clients(self) -> int:
        """Return the number of clients n."""
        return self.values.shape[1]

    @property
    def mean(self) -> Tensor:
        """Mean of the Shapley values over the seeds, float64 ``[n]``."""
        return self.values.mean(0)

    @property
    def ceiling(self) -> float:
        """Mean rank correlation of a seed's values with the mean of the other seeds."""
        num_seeds = len(self.values)
        if num_seeds < 2:
            return NAN
        correlations = []
        for position, values in enumerate(self.values):
            is_peer = torch.arange(num_seeds) != position
            mean_of_peers = self.values[is_peer].mean(0)
            correlations.append(spearman(values, mean_of_peers))
        return fmean(correlations)


class TruthTable(CoalitionStore):
    """Store of one utility for each coalition, in a CSV file with a row for each coalition and seed."""

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, str],
    ) -> None:
        super().__init__(None, [UTILITY_NAME], settings={})
        columns: dict[str, Cell] = {"seed": parse_int, "coalition": _read_members}
        columns[UTILITY_NAME] = parse_float
        self._file = ResultFile(path, columns, settings)
        for row in self._file.rows:
            model = ScoredModel({UTILITY_NAME: [row[UTILITY_NAME]]})
            super().add(row["seed"], row["coalition"], {NO_ROUND: model})

    @property
    def trainings(self) -> list[Training]:
        """Return all seeds and coalitions that have a utility, in an order that does not depend on that of training."""
        return sorted(self._models, key=lambda each: (each.seed, len(each.members), each.members))

    def add(
        self,
        seed: int,
        members: Members,
        models: Models,
    ) -> None:
        super().add(seed, members, models)
        (model,) = models.values()
        if model.is_finite:  # others are trained again by the next command
            self._file.add([self._row(Training(seed, members))])

    def sort(self) -> None:
        """Write the rows in the order of :attr:`trainings`."""
        self._file.replace(map(self._row, self.trainings))

    def _row(self, training: Training) -> list[object]:
        (model,) = self._models[training].values()
        (utility,) = model.utilities[UTILITY_NAME]
        coalition = "+".join(map(str, training.members)) or "-"
        return [training.seed, coalition, repr(float(utility))]


def _read_members(cell: str) -> Members:
    """Parse the text of a coalition, such as ``0+2``, or ``-`` for the empty one."""
    if cell == "-":
        return ()
    members = tuple(map(parse_int, cell.split("+")))
    if list(members) != sorted(set(members)):
        raise ValueError("clients' numbers, ascending, with + between them, or -")
    return members


def truth_table(federation: Federation, folder: Path = FOLDER) -> Truth:
    """Return a federation's ground truth from the table ``<name>.csv`` in ``folder``.

    Raises:
        ConfigurationError: there is no table, the table was made with other settings, or coalitions are missing in it.
    """
    path = folder / f"{federation.name}.csv"
    command = "benchmark.make_truth(federation, folder)"
    if not path.is_file():
        raise ConfigurationError(
            f"there is no truth of {federation.name} ({path}): make it, {command}"
        )
    store = TruthTable(path, truth_settings(federation, folder))
    seeds = sorted({training.seed for training in store.trainings})
    if not seeds:
        raise ConfigurationError(
            f"{path} holds no coalition yet. Go on with the command that makes it, {command}."
        )

    last_client = max(max(training.members, default=0) for training in store.trainings)
    masks = all_coalitions(last_client + 1)
    coalitions = members_of(masks)
    missing = [(seed, members) for seed in seeds for members in store.missing(seed, coalitions)]
    if missing:
        seed, members = missing[0]
        raise ConfigurationError(
            f"{path}: {len(missing)} of {len(seeds) * len(masks)} coalitions are missing, such as "
            f"{list(members)} of seed {seed}. Go on with the command that makes it, {command}."
        )

    utilities = torch.stack([stored_utilities(store, seed, masks) for seed in seeds])
    # Exact Shapley values [s, n] of the tables [s, 2^n].
    values = shapley_of_table(utilities.T.contiguous()).T
    return Truth(tuple(seeds), values, utilities)


def make_truth(
    federation: Federation,
    folder: Path = FOLDER,
    seeds: Sequence[int] = SEEDS,
) -> int:
    """Train the coalitions that are missing in a federation's table, and add their utilities.

    Args:
        federation: the federation.
        folder: folder of the table ``<name>.csv``.
        seeds: training seeds.

    Returns:
        The number of trained coalitions.

    Raises:
        ConfigurationError: the federation has more than ten clients, the table was made with other settings or data, or
            a training failed.
    """
    num_clients = len(federation.num_samples)
    if num_clients > MAX_CLIENTS:
        raise ConfigurationError(
            f"{federation.name}: {num_clients} clients make {2**num_clients:,} coalitions to train for every seed; the "
            f"limit is {MAX_CLIENTS} clients."
        )
    path = folder / f"{federation.name}.csv"
    store = TruthTable(path, truth_settings(federation, folder))
    masks = all_coalitions(num_clients)
    num_trained = 0
    for seed in seeds:
        num_trained += len(store.missing(seed, members_of(masks)))
        train_coalitions(federation, masks, seed, store)
    store.sort()
    federation.release()
    return num_trained


def truth_settings(
    federation: Federation,
    folder: Path,
) -> dict[str, str]:
    """Return ``{name: fingerprint}`` of the settings on which a coalition's utility depends."""
    names = ("rounds", "data", "model", "performance", "mode", "attacks", "local_epochs")
    options = {name: getattr(federation, name) for name in names}
    text = json.dumps(options, sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:12]
    settings = {"settings": fingerprint}
    if folder != FOLDER:
        settings["data and versions"] = federation.identity.key
    return settings


def train_coalitions(
    federation: Federation,
    masks: Tensor,
    seed: int,
    store: CoalitionStore | None = None,
) -> Tensor:
    """Train each coalition by FedAvg, and return the performances of the trained models.

    Args:
        federation: the federation of the clients.
        masks: bool ``[K, n]``, the members of each of the K coalitions. The empty coalition has the initial model.
        seed: seed of the initial weights, which all coalitions share, and of the clients' batches.
        store: has coalitions that are not trained again, and gets the others.

    Returns:
        Float64 ``[K]``, the performance of each coalition's model, as the federation defines it. More is better.

    Raises:
        ConfigurationError: a training failed.
    """
    measure = performance_of("make_truth", federation.performance, federation.mode)
    if store is None:
        store = CoalitionStore(None, [UTILITY_NAME], settings={})
    # The loop's own seed: with the same seed it starts from the same weights.
    with isolated_rngs(seed, "benchmark"), quiet():
        loop = FederatedLoop(
            uploads=[*federation.attackers()],
            filters=[OutlierFilter(threshold=None)],
            local_epochs=federation.local_epochs,
            seed=seed,
            reporting=Reporting(table=False, figures=0, files=False),
        )
        data = federation.datamodule()
        run = CopyOfRun(federation.trainer(loop), federation.module(), data)
        way = OneByOne(
            CopiedFits(run, {UTILITY_NAME: measure}),
            TrainingJob(members=(), seed=seed, rounds=(federation.rounds - 1,)),
            num_samples=data.num_samples.tolist(),
        )
        train_missing(way, members_of(masks), store, SameStart().check)
    return stored_utilities(store, seed, masks)


def stored_utilities(store: CoalitionStore, seed: int, masks: Tensor) -> Tensor:
    """Return the utilities of K coalitions after training, float64 ``[K]``, or raise KeyError."""
    models = store.scores(seed).models
    utilities = []
    for members in members_of(masks):
        (model,) = models[members].values()
        (utility,) = model.utilities[UTILITY_NAME]
        utilities.append(utility)
    return torch.tensor(utilities, dtype=torch.float64)
