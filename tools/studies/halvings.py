"""How far values from halvings of unlike clients lie from those of retrained coalitions.

    python tools/studies/halvings.py train [SET...] [--seeds 6]    goes on where it was stopped

`train` trains all 2^n coalitions of each federation of ``predicted_sets.py`` with at most eight clients, and keeps all
utilities and outputs. The truth for a seed is the mean of the exact values of the *other* seeds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import be_quiet
from predicted_federations import Training, flat, score
from predicted_sets import ALL, FEW_CLASSES, HELD_OUT, SEVEN_OR_EIGHT, Federation

from flsv.functional.shapley.exact import all_coalitions

#: The largest federations all of whose coalitions' outputs are kept.
MOST_CLIENTS = 8
#: The most numbers of models that are trained at once.
NUMBERS_PER_CHUNK = 2**22


def with_few_clients(federations: dict[str, Federation]) -> list[str]:
    """The names of federations whose coalitions' outputs are all kept."""
    return [name for name, federation in federations.items() if federation.n <= MOST_CLIENTS]


SETS = {
    "few": with_few_clients(FEW_CLASSES),
    "seven_or_eight": with_few_clients(SEVEN_OR_EIGHT),
    "held_out": with_few_clients(HELD_OUT),
}


def play(name: str, seed: int) -> dict[str, Any]:
    """Train all coalitions of a federation. Return their utilities and outputs, and the clients' updates in the run."""
    began = time.process_time()
    training = Training(name, seed)
    federation = training.of
    masks = all_coalitions(federation.n)
    numbers_per_model = flat(training.start, 0).numel()
    coalitions_per_chunk = max(8, NUMBERS_PER_CHUNK // numbers_per_model)

    outputs = []
    for part in masks.split(coalitions_per_chunk):
        # The last chunk ends with the coalition of all clients, whose updates are kept.
        models, first, total = training(part)
        outputs.append(training.outputs(models, training.validation[0]))
    all_outputs = torch.cat(outputs)
    return {
        "masks": masks,
        "utilities": score(federation, training.validation[1], all_outputs),
        "outputs": all_outputs,
        "sizes": training.sizes,
        "first": first,
        "total": total,
        "labels": training.validation[1],
        "seconds": time.process_time() - began,
    }


def train(folder: Path, names: Sequence[str], num_seeds: int) -> None:
    """Train all federations with one seed after the other."""
    for seed in range(num_seeds):
        for name in names:
            path = folder / name / f"{seed}.pt"
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            record = play(name, seed)
            part = path.with_suffix(".part")
            torch.save(record, part)
            part.rename(path)
            num_clients = ALL[name].n
            print(
                f"{name}, {num_clients} clients, seed {seed}: {record['seconds']:.1f} s", flush=True
            )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train"])
    parser.add_argument("sets", nargs="*", choices=[*SETS, []])
    parser.add_argument("--folder", type=Path, default=Path("runs/halvings"))
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    be_quiet()
    names = [name for set_name in options.sets or SETS for name in SETS[set_name]]
    train(options.folder, names, options.seeds)


if __name__ == "__main__":
    main()
