"""Shares and intervals of ``flsv retrain`` for small tables with a rare class, as clinics have them.

    python tools/retrain_small.py [--seeds 5] [--out FILE.md]

Tables by scikit-learn's ``make_classification``, 12 columns, dealt to clinics of unequal sizes, one of which has 35 %
of its labels wrong; an MLP-32 of ten rounds. All coalitions are trained with every seed, and a few of them are given to
every fit of ``retrain_table.py``, by each performance. Takes two minutes.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import be_quiet
from retrain_table import errors
from sklearn.datasets import make_classification
from torch import Tensor

from flsv.benchmark import Federation
from flsv.benchmark.lattice import train_coalitions
from flsv.functional import few_coalitions

#: Samples of each clinic, the share of the rare class, and the clinic whose labels are wrong.
CLINICS = {
    "four, one large": ((1200, 500, 220, 500), 0.2, 2),
    "four, the large one wrong": ((1200, 500, 220, 500), 0.2, 0),
    "four, one very large": ((900, 120, 90, 60), 0.2, 1),
    "five, rarer": ((400, 150, 80, 150, 60), 0.1, 1),
    "six, small": ((300, 300, 120, 120, 60, 60), 0.2, 2),
}
PERFORMANCES = ("negative_loss", "balanced_accuracy", "accuracy")
#: Of the table, what the server validates on.
VALIDATION = 0.2


def write_table(path: Path, sizes: tuple[int, ...], rare: float, seed: int) -> None:
    """Rows of all clinics, shuffled; a part of each goes to the server."""
    rows = round(sum(sizes) / (1 - VALIDATION))
    x, y = make_classification(rows, 12, n_informative=6, weights=[1 - rare], flip_y=0.02, random_state=seed)
    clinic = np.random.default_rng(seed).choice(len(sizes), rows, p=np.array(sizes) / sum(sizes))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"x{column}" for column in range(12)), "clinic", "outcome"])
        writer.writerows([*values, f"clinic {of}", "ill" if ill else "well"] for values, of, ill in zip(x, clinic, y))


def clinics(folder: Path, name: str, performance: str) -> Federation:
    """A federation of these clinics, whose table is written to the folder."""
    sizes, rare, wrong = CLINICS[name]
    write_table(folder / "table.csv", sizes, rare, seed=1)
    noise = {"rate": 0.35, "clients": [wrong]}
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05}}
    network = {"network": "mlp", "network_args": {"hidden": [32]}, "optimizer": optimizer}
    return Federation(
        name=name,
        title=name,
        set="held_out",
        rounds=10,
        performance=performance,
        data={
            "source": "table.csv",
            "labels": "outcome",
            "groups": "clinic",
            "partitioner": None,
            "splits": {"server_val": VALIDATION, "seed": 0},
            "batch_size": 32,
            "corruptions": [{"class_path": "flsv.data.ClosedSetLabelNoise", "init_args": noise}],
        },
        model={"class_path": "flsv.ClassifierClient", "init_args": network},
        needs=["table.csv"],
        root=str(folder),
    )


def tables(name: str, seeds: int) -> dict[str, Tensor]:
    """Performance to ``[s, 2^n]``."""
    masks = few_coalitions(len(CLINICS[name][0]), "all")
    order = (masks * 2 ** torch.arange(masks.shape[1])).sum(1).argsort()
    found: dict[str, list[Tensor]] = {performance: [] for performance in PERFORMANCES}
    with tempfile.TemporaryDirectory() as folder:
        for performance in ("accuracy", "balanced_accuracy"):
            federation = clinics(Path(folder), name, performance)
            for seed in range(seeds):
                scores = train_coalitions(federation, masks[order], seed)
                found[performance].append(scores["utility"])
                if performance == "accuracy":
                    found["negative_loss"].append(-scores["loss"])
    return {performance: torch.stack(each) for performance, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a Markdown file to write, besides printing")
    options = parser.parse_args()
    be_quiet()
    trained = {name: tables(name, options.seeds) for name in CLINICS}
    text = []
    for performance in PERFORMANCES:
        found = errors({name: each[performance] for name, each in trained.items()})
        text.append(f"**by {performance.replace('_', ' ')}**\n\n{found}")
    page = "\n\n".join(text)
    print(page)
    if options.out:
        options.out.write_text(page + "\n")


if __name__ == "__main__":
    main()
