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
from flsv.retraining.copied_fits import CopiedFits, copy_of_run
from flsv.retraining.train_fits import CoalitionTraining
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
    def seeds(self) -> list[int]:
        """Return the seeds with utilities, ascending."""
        return sorted({training.seed for training in self._models})

    def coalitions(self, seed: int) -> set[Members]:
        """Return the coalitions that have utilities for a seed."""
        return {training.members for training in self._models if training.seed == seed}

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
        """Write the rows in an order that does not depend on that of the trainings."""

        def sort_key(training: Training) -> tuple[int, int, Members]:
            return training.seed, len(training.members), training.members

        trainings = sorted(self._models, key=sort_key)
        self._file.replace([self._row(training) for training in trainings])

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


def exact_truth(
    seeds: Sequence[int],
    utilities: Tensor,
) -> Truth:
    """Compute the clients' exact Shapley values from all coalitions' utilities ``[s, 2^n]`` for s training seeds."""
    values = shapley_of_table(utilities.T.contiguous()).T
    return Truth(tuple(seeds), values, utilities)


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
    if not store.seeds:
        raise ConfigurationError(
            f"{path} holds no coalition yet. Go on with the command that makes it, {command}."
        )

    last_client = 0
    for seed in store.seeds:
        for members in store.coalitions(seed):
            last_client = max([last_client, *members])
    masks = all_coalitions(last_client + 1)
    missing = []
    for seed in store.seeds:
        for members in store.missing(seed, members_of(masks)):
            missing.append((seed, members))
    if missing:
        seed, members = missing[0]
        raise ConfigurationError(
            f"{path}: {len(missing)} of {len(store.seeds) * len(masks)} coalitions are missing, such as "
            f"{list(members)} of seed {seed}. Go on with the command that makes it, {command}."
        )

    utilities = [stored_utilities(store, seed, masks) for seed in store.seeds]
    return exact_truth(store.seeds, torch.stack(utilities))


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
        _train(federation, masks, seed, store)
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
) -> Tensor:
    """Train each coalition by FedAvg, and return the performances of the trained models.

    Args:
        federation: the federation of the clients.
        masks: bool ``[K, n]``, the members of each of the K coalitions. The empty coalition has the initial model.
        seed: seed of the initial weights, which all coalitions share, and of the clients' batches.

    Returns:
        Float64 ``[K]``, the performance of each coalition's model, as the federation defines it. More is better.

    Raises:
        ConfigurationError: a training failed.
    """
    store = CoalitionStore(None, [UTILITY_NAME], settings={})
    _train(federation, masks, seed, store)
    return stored_utilities(store, seed, masks)


def stored_utilities(
    store: CoalitionStore,
    seed: int,
    masks: Tensor,
) -> Tensor:
    """Return the utilities of K coalitions after training, float64 ``[K]``, or raise KeyError."""
    models = store.scores(seed).models
    utilities = []
    for members in members_of(masks):
        (model,) = models[members].values()
        (utility,) = model.utilities[UTILITY_NAME]
        utilities.append(utility)
    return torch.tensor(utilities, dtype=torch.float64)


def _train(
    federation: Federation,
    masks: Tensor,
    seed: int,
    store: CoalitionStore,
) -> None:
    """Train the coalitions that are missing in a store."""
    measure = performance_of("make_truth", federation.performance, federation.mode)
    data = federation.datamodule()
    samples = federation.num_samples.tolist()

    # The loop's own seed: with the same seed it starts from the same weights.
    with isolated_rngs(seed, "benchmark"), quiet():
        loop = FederatedLoop(
            uploads=[*federation.attackers()],
            filters=[OutlierFilter(threshold=None)],
            local_epochs=federation.local_epochs,
            seed=seed,
            reporting=Reporting(table=False, figures=0, files=False),
        )
        run_copy = copy_of_run(federation.trainer(loop), federation.module(), data)

    training = CoalitionTraining(
        CopiedFits(run_copy, {UTILITY_NAME: measure}),
        TrainingJob(members=(), seed=seed, rounds=(federation.rounds - 1,)),
        num_samples=samples,
    )
    training.train(members_of(masks), store)
