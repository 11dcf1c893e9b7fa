"""The ground truth of the benchmark: utilities of coalitions, trained from scratch with several seeds.

All coalitions of a federation, or of many clients those along circles (:mod:`flsv.benchmark.true_values`). It is kept
as a small CSV file a federation, a row a coalition and seed. The package holds those of its own federations;
``flsv bench --truth`` makes them, goes on where it was stopped, and makes those of federations of one's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from flsv._lightning.durable import append, whole_lines
from flsv.benchmark.federation import Federation
from flsv.benchmark.lattice import check_lattice, train_coalitions
from flsv.benchmark.true_values import ExactTruth, Members, Truth, arcs, sampled_truth
from flsv.errors import ConfigurationError
from flsv.functional.shapley.exact import MAX_EXACT_PLAYERS, all_coalitions

FOLDER = Path(__file__).parent / "truths"
#: Other seeds than any that metrics are run with: no metric sees a run that is part of the truth.
SEEDS = (100, 101, 102, 103, 104)
#: Coalitions that are trained side by side.
CHUNK = 192
COLUMNS = ("seed", "coalition", "utility", "loss")


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
    seeds = tuple(sorted({seed for seed, _ in rows}))
    wanted = {seed: _wanted(federation, clients, seed) for seed in seeds}
    missing = [(seed, members) for seed in seeds for members in wanted[seed] if (seed, members) not in rows]
    if missing:
        raise ConfigurationError(
            f"{path}: {len(missing)} of {sum(map(len, wanted.values()))} coalitions are missing, such as "
            f"{list(missing[0][1])} of seed {missing[0][0]}. Go on with the command that makes it, flsv bench --truth."
        )
    if federation.circles:
        by_seed = {seed: {members: rows[seed, members][0] for members in wanted[seed]} for seed in seeds}
        return sampled_truth(by_seed, clients, federation.circles)
    table = torch.tensor([[rows[seed, members] for members in wanted[seed]] for seed in seeds], dtype=torch.float64)
    return ExactTruth(seeds, table[..., 0].contiguous(), table[..., 1].contiguous())


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
        coalitions: members of those that are wanted; None: all, or those on the federation's circles.
        max_clients: the most clients for which all 2^n may be begun.

    Returns:
        How many were trained.

    Raises:
        ConfigurationError: more clients than ``max_clients``, and no circles; a table of other settings or data; a
            module whose coalition of all, trained side by side with others, is not the run itself.
    """
    clients = len(federation.num_samples)
    if coalitions is None and not federation.circles and clients > min(max_clients, MAX_EXACT_PLAYERS):
        raise ConfigurationError(
            f"{federation.name}: {clients} clients make {2**clients:,} coalitions to train for every seed; the limit "
            f"is max_clients={max_clients}. Say `circles: 3` in its file: some {3 * clients * (clients - 1):,} are "
            "trained then, which give each client each place in an order equally often."
        )
    path = folder / f"{federation.name}.csv"
    known = _read(path, federation)
    given = None if coalitions is None else [tuple(sorted(members)) for members in coalitions]
    folder.mkdir(parents=True, exist_ok=True)
    if not known:
        header = f"# {federation.name}: identity {federation.identity.key}, settings {settings(federation)}"
        path.write_text(f"{header}\n{','.join(COLUMNS)}\n", encoding="utf-8")
    trained, checked = 0, False
    for seed in seeds:
        wanted = _wanted(federation, clients, seed) if given is None else given
        todo = [members for members in wanted if (seed, members) not in known]
        if todo and not checked:
            check_lattice(federation, seed)
            checked = True
        for start in range(0, len(todo), CHUNK):
            some = todo[start : start + CHUNK]
            masks = torch.zeros(len(some), clients, dtype=torch.bool)
            for row, members in enumerate(some):
                masks[row, list(members)] = True
            scores = train_coalitions(federation, masks, seed)
            rows = zip(some, scores["utility"].tolist(), scores["loss"].tolist())
            lines = (f"{seed},{'+'.join(map(str, m)) or '-'},{utility:.6g},{loss:.6g}\n" for m, utility, loss in rows)
            append(path, "".join(lines).encode())
            trained += len(some)
    federation.release()
    return trained


def settings(federation: Federation) -> str:
    """A short hash of all that a coalition's utility depends on. Where the data lie is no part of it, nor is how many
    coalitions are trained."""
    said = {name: getattr(federation, name) for name in ("rounds", "data", "model", "performance", "mode", "attacks")}
    text = json.dumps({**said, "local_epochs": federation.local_epochs}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _wanted(federation: Federation, clients: int, seed: int) -> list[Members]:
    """The coalitions of a seed that its truth is worked out from."""
    return [
        _members(mask)
        for mask in (arcs(clients, seed, federation.circles) if federation.circles else all_coalitions(clients))
    ]


def _read(path: Path, federation: Federation) -> dict[tuple[int, Members], tuple[float, float]]:
    lines = whole_lines(path) if path.is_file() else []
    if not lines:
        return {}
    if not path.read_bytes().endswith(b"\n"):  # a line that a kill cut short is trained again, and not to be continued
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    first = lines[0]
    # The package's own tables are of data that do not change.
    other = "identity" in first and f"identity {federation.identity.key}," not in first
    if other or not first.endswith(settings(federation)):
        raise ConfigurationError(
            f"{path} is the truth of other settings or data than those of {federation.name} ({settings(federation)}): "
            f"{first}. Remove it, and make it anew: flsv bench --truth."
        )
    rows: dict[tuple[int, Members], tuple[float, float]] = {}
    for line in lines[2:]:
        seed, coalition, utility, loss = line.split(",")
        members = () if coalition == "-" else tuple(map(int, coalition.split("+")))
        rows[int(seed), members] = (float(utility), float(loss))
    return rows


def _members(mask: Any) -> Members:
    return tuple(mask.nonzero().flatten().tolist())
