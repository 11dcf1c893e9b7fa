"""The truth that metrics are measured against: the utility of every coalition, trained from scratch, of several seeds.

It is kept as a small CSV file a federation, a row a coalition and seed. The package holds those of its own federations;
``flsv bench --truth`` makes them, goes on where it was stopped, and makes those of federations of one's own.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from flsv.benchmark.federation import Federation
from flsv.benchmark.lattice import train_coalitions
from flsv.benchmark.scores import spearman
from flsv.errors import ConfigurationError
from flsv.functional.shapley.exact import MAX_EXACT_PLAYERS, all_coalitions, shapley_of_table

FOLDER = Path(__file__).parent / "truths"
#: Other seeds than any that metrics are run with: no metric sees a run that is part of the truth.
SEEDS = (100, 101, 102, 103, 104)
#: Coalitions that are trained side by side.
CHUNK = 64
COLUMNS = ("seed", "coalition", "utility", "loss")
Members = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Truth:
    """The utilities of all coalitions of a federation.

    Args:
        seeds: of the trainings, s of them.
        utilities: float64 ``[s, 2^n]``, the federation's performance; bit i of a coalition's number is client i.
        losses: float64 ``[s, 2^n]``, mean cross-entropy in nats.

    Example:
        >>> from flsv.benchmark import federation
        >>> truth = truth_table(federation("digits_sizes"))
        >>> truth.utilities.shape, truth.mean.shape, truth.ceiling > 0.8
        (torch.Size([5, 64]), torch.Size([6]), True)
    """

    seeds: tuple[int, ...]
    utilities: Tensor
    losses: Tensor

    @property
    def num_clients(self) -> int:
        """n."""
        return self.utilities.shape[1].bit_length() - 1

    @property
    def values(self) -> Tensor:
        """Float64 ``[s, n]``, every seed's own Shapley values."""
        return shapley_of_table(self.utilities.T.contiguous()).T

    @property
    def mean(self) -> Tensor:
        """Float64 ``[n]``, the Shapley values of the mean utilities."""
        return self.values.mean(0)

    def interval(self, level: float = 0.9) -> Tensor:
        """Float64 ``[n]``, half the width of the mean's interval at this level, by Student's t over the seeds; NaN of
        one seed."""
        count = len(self.seeds)
        if count < 2:
            return torch.full((self.num_clients,), float("nan"), dtype=torch.float64)
        quantile = float(stats.t.ppf((1 + level) / 2, count - 1))
        return quantile * self.values.std(0) / count**0.5

    @property
    def ceiling(self) -> float:
        """Mean rank correlation of one seed's values with the mean of the others': what no metric can be expected to
        exceed, which sees one run. NaN of one seed."""
        values = self.values
        others = [torch.cat([values[:s], values[s + 1 :]]).mean(0) for s in range(len(values))]
        return (
            float(np.mean([spearman(mine, rest) for mine, rest in zip(values, others)]))
            if len(values) > 1
            else float("nan")
        )


def truth_table(federation: Federation, folder: Path | None = None) -> Truth:
    """A federation's truth, from the tables of the package or of a folder.

    Args:
        federation: whose.
        folder: with ``<name>.csv``; None: the package's.

    Raises:
        ConfigurationError: there is no table, it is one of other settings, or coalitions are missing in it.
    """
    path = (folder or FOLDER) / f"{federation.name}.csv"
    if not path.is_file():
        raise ConfigurationError(
            f"there is no truth of {federation.name} ({path}): make it, flsv bench --truth --federations ... --out ..."
        )
    rows = _read(path, federation)
    if not rows:
        raise ConfigurationError(
            f"{path} holds no coalition yet. Go on with the command that makes it, flsv bench --truth."
        )
    clients = max(1 + max(members, default=-1) for _, members in rows)
    coalitions = [_members(mask) for mask in all_coalitions(clients)]
    seeds = tuple(sorted({seed for seed, _ in rows}))
    missing = [(seed, members) for seed in seeds for members in coalitions if (seed, members) not in rows]
    if missing:
        raise ConfigurationError(
            f"{path}: {len(missing)} of {len(seeds) * len(coalitions)} coalitions are missing, such as "
            f"{list(missing[0][1])} of seed {missing[0][0]}. Go on with the command that makes it, flsv bench --truth."
        )
    table = torch.tensor([[rows[seed, members] for members in coalitions] for seed in seeds], dtype=torch.float64)
    return Truth(seeds, table[..., 0].contiguous(), table[..., 1].contiguous())


def make_truth(
    federation: Federation,
    folder: Path = FOLDER,
    seeds: Sequence[int] = SEEDS,
    coalitions: Iterable[Sequence[int]] | None = None,
    max_clients: int = 10,
) -> int:
    """Train the coalitions that a federation's table does not have, and add them to it as they are done.

    Args:
        federation: whose.
        folder: of the table.
        seeds: of the trainings.
        coalitions: members of those that are wanted; None: all.
        max_clients: the most clients for which all 2^n may be begun.

    Returns:
        How many were trained.

    Raises:
        ConfigurationError: more clients than ``max_clients``; a table of other settings.
    """
    clients = federation.datamodule().num_clients
    if coalitions is None and clients > min(max_clients, MAX_EXACT_PLAYERS):
        raise ConfigurationError(
            f"{federation.name}: {clients} clients make {2**clients:,} coalitions to train for every seed; the limit "
            f"is max_clients={max_clients}."
        )
    path = folder / f"{federation.name}.csv"
    known = _read(path, federation) if path.is_file() else {}
    if coalitions is None:
        wanted = [_members(mask) for mask in all_coalitions(clients)]
    else:
        wanted = [tuple(sorted(members)) for members in coalitions]
    folder.mkdir(parents=True, exist_ok=True)
    if not known and not (path.is_file() and path.read_text(encoding="utf-8").count("\n") > 1):
        header = f"# {federation.name}: settings {settings(federation)}"
        path.write_text(f"{header}\n{','.join(COLUMNS)}\n", encoding="utf-8")
    trained = 0
    for seed in seeds:
        todo = [members for members in wanted if (seed, members) not in known]
        for start in range(0, len(todo), CHUNK):
            some = todo[start : start + CHUNK]
            masks = torch.zeros(len(some), clients, dtype=torch.bool)
            for row, members in enumerate(some):
                masks[row, list(members)] = True
            scores = train_coalitions(federation, masks, seed)
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                for members, utility, loss in zip(some, scores["utility"].tolist(), scores["loss"].tolist()):
                    writer.writerow([seed, "+".join(map(str, members)) or "-", f"{utility:.6g}", f"{loss:.6g}"])
            trained += len(some)
    return trained


def settings(federation: Federation) -> str:
    """A short hash of all that the truth depends on. Where the data lie is no part of it."""
    said = {name: getattr(federation, name) for name in ("rounds", "data", "model", "performance", "mode", "attacks")}
    text = json.dumps({**said, "local_epochs": federation.local_epochs}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _read(path: Path, federation: Federation) -> dict[tuple[int, Members], tuple[float, float]]:
    text = path.read_text(encoding="utf-8")
    # Who was killed while writing left half a line: it is trained again, and must not be continued.
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    if not whole:
        return {}
    first, *lines = whole.splitlines()
    if not first.endswith(settings(federation)):
        raise ConfigurationError(
            f"{path} is the truth of other settings than those of {federation.name} ({settings(federation)}): {first}. "
            "Remove it, and make it anew: flsv bench --truth."
        )
    rows: dict[tuple[int, Members], tuple[float, float]] = {}
    for row in csv.DictReader(lines):
        members = () if row["coalition"] == "-" else tuple(map(int, row["coalition"].split("+")))
        rows[int(row["seed"]), members] = (float(row["utility"]), float(row["loss"]))
    return rows


def _members(mask: Any) -> Members:
    return tuple(mask.nonzero().flatten().tolist())
