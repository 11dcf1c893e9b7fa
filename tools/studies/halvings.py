"""How far values from halvings of unlike clients lie from those of retrained coalitions.

    python tools/studies/halvings.py train [SET...] [--seeds 6]    goes on where it was stopped
    python tools/studies/halvings.py table [--csv FILE]    misallocated, and what brackets hold

`train` trains all 2^n coalitions of each federation of ``predicted_sets.py`` with at most eight clients, and keeps all
utilities and outputs. `table` needs those of `usual.py train`, too. The truth for a seed is the mean of the exact
values of the *other* seeds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import be_quiet, grid, numbers_of, train_missing, write_csv
from predicted import DECIDABLE, interval, wrong_by
from predicted_federations import Training, flat, score
from predicted_sets import ALL, FEW_CLASSES, HELD_OUT, SEVEN_OR_EIGHT, Federation
from torch import Tensor
from usual_federations import FEDERATIONS

from flsv.functional import (
    choose_halvings,
    few_coalitions,
    few_coalitions_shapley,
    predicted_shapley,
)
from flsv.functional.intervals import (
    interval_over_seeds,
    one_seed_stderr,
    prediction_stderr,
    t_quantile,
)
from flsv.functional.shapley.exact import all_coalitions, shapley_of_table

#: The largest federations all of whose coalitions' outputs are kept.
MOST_CLIENTS = 8
#: The most numbers of models that are trained at once.
NUMBERS_PER_CHUNK = 2**22


#: The most random halvings of a federation whose mean stands for any.
NUM_RANDOM = 3


def with_few_clients(federations: dict[str, Federation]) -> list[str]:
    """The names of federations whose coalitions' outputs are all kept, and whose truth is of the same samples."""
    return [
        name
        for name, federation in federations.items()
        if federation.n <= MOST_CLIENTS and not federation.apart
    ]


SETS = {
    "few": with_few_clients(FEW_CLASSES),
    "seven_or_eight": with_few_clients(SEVEN_OR_EIGHT),
    "held_out": with_few_clients(HELD_OUT),
}


def play(
    name: str,
    seed: int,
) -> dict[str, Any]:
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
        models, first_updates, total = training(part)
        outputs.append(
            training.outputs(
                models,
                training.validation[0],
            )
        )
    all_outputs = torch.cat(outputs)
    return {
        "masks": masks,
        "utilities": score(federation, training.validation[1], all_outputs),
        "outputs": all_outputs,
        "sizes": training.sizes,
        "first": first_updates,
        "total": total,
        "labels": training.validation[1],
        "seconds": time.process_time() - began,
    }


@dataclass(frozen=True, eq=False)
class Trained:
    """All coalitions of one seed of a federation, in the order of their numbers."""

    masks: Tensor
    outputs: Tensor
    utilities: Tensor
    weights: Tensor
    score: Callable[[Tensor], Tensor]
    logits: bool
    # Utilities of untrained models.
    untrained: Tensor
    # The clients' updates of the first round, and their sums. None: they were not kept.
    first_updates: Tensor | None
    total: Tensor | None

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return self.masks.shape[1]


def trained(
    record: Mapping[str, Any],
    score: Callable[[Tensor], Tensor],
    logits: bool,
) -> Trained:
    """Read a record of ``halvings.py`` or ``usual.py``."""
    masks = record["masks"]
    num_clients = masks.shape[1]
    order = torch.tensor(numbers_of(masks)).argsort()
    outputs = record["outputs"][order]
    return Trained(
        masks=all_coalitions(num_clients),
        outputs=outputs,
        utilities=score(outputs).double(),
        weights=record["sizes"].double(),
        score=score,
        logits=logits,
        untrained=record["untrained"].double(),
        first_updates=record.get("first"),
        total=record.get("total"),
    )


#: Scores of the federations of usual.py, in the words of predicted.py.
SCORES = {"accuracy": "accuracy", "balanced_accuracy": "balanced", "negative_loss": "loss"}


def seeds_of(
    name: str,
    folder: Path,
) -> list[Trained]:
    """All seeds of a federation."""
    records = [torch.load(path) for path in sorted((folder / name).glob("*.pt"))]
    if name in FEDERATIONS:
        usual_federation = FEDERATIONS[name]
        federation = Federation(
            usual_federation.data,
            usual_federation.num_clients,
            usual_federation.split,
            score=SCORES[usual_federation.performance],
        )
    else:
        federation = ALL[name]
        # The empty coalition's models have other initial weights with each seed.
        untrained = torch.stack([record["utilities"][0] for record in records])
        records = [{**record, "untrained": untrained} for record in records]
    seeds = []
    for record in records:
        measure = partial(score, federation, record["labels"])
        seeds.append(
            trained(
                record,
                measure,
                logits=federation.score != "r2",
            )
        )
    return seeds


@dataclass(frozen=True, eq=False)
class Valued:
    """One seed's values by some coalitions, and the standard error of what was not trained."""

    values: Tensor
    stderr: Tensor


def valued(seed: Trained, masks: Tensor) -> Valued:
    """Compute the values from predicted outputs."""
    rows = numbers_of(masks)
    estimate = predicted_shapley(
        seed.masks[rows],
        seed.utilities[rows],
        seed.outputs[rows],
        seed.weights,
        seed.score,
        logits=seed.logits,
    )
    return Valued(estimate.values, prediction_stderr(estimate.disagreement))


def exact(seed: Trained) -> Valued:
    """Compute the values from all coalitions."""
    values = shapley_of_table(seed.utilities[:, None])[:, 0]
    return Valued(values, torch.zeros_like(values))


def by_design(seed: Trained, design: Any) -> Valued:
    """Compute the values from each client alone, or all but one, too."""
    return valued(seed, few_coalitions(seed.num_clients, design))


def halved(seed: Trained, halvings: int) -> Tensor:
    """List each client alone and the halves of unlike clients."""
    singles = few_coalitions(seed.num_clients, "singles")
    outputs = seed.outputs[numbers_of(singles[2:])]
    halves = choose_halvings(
        outputs,
        names_of(seed),
        halvings,
        logits=seed.logits,
    )
    return torch.cat([singles, halves])


def names_of(seed: Trained) -> list[str]:
    """Names of clients."""
    return [f"client {client:02}" for client in range(seed.num_clients)]


def by_halves(seed: Trained, halvings: int) -> Valued:
    """Compute the values from halves of unlike clients."""
    return valued(seed, halved(seed, halvings))


def by_scores(seed: Trained, halvings: int) -> Valued:
    """Estimate the values from the scores of each client alone and of halves, as for a logged value."""
    masks = halved(seed, halvings)
    estimate = few_coalitions_shapley(
        masks,
        seed.utilities[numbers_of(masks)],
    )
    return Valued(estimate.values, estimate.stderr)


def by_updates(seed: Trained, updates: Tensor) -> Valued:
    """Compute the values from halves of clients whose updates are unlike."""
    singles = few_coalitions(seed.num_clients, "singles")
    halves = choose_halvings(
        updates,
        names_of(seed),
        1,
        logits=False,
    )
    return valued(seed, torch.cat([singles, halves]))


def by_random_halves(seed: Trained, number: int) -> Valued:
    """Compute the values from a halving that does not depend on the clients."""
    num_clients = seed.num_clients
    generator = torch.Generator().manual_seed(number)
    noise = torch.randn(num_clients, 8, generator=generator)
    return by_updates(seed, noise)


#: The ways to value, and how many seeds' means are compared.
WAYS: dict[str, Callable[[Trained], Valued]] = {
    "exact": exact,
    "alone": partial(by_design, design="singles"),
    "alone and all but one": partial(by_design, design="both"),
    "alone and one halving": partial(by_halves, halvings=1),
    "alone and two halvings": partial(by_halves, halvings=2),
    "alone and three halvings": partial(by_halves, halvings=3),
    "alone and one halving, scores": partial(by_scores, halvings=1),
}
RANDOM_WAY = "alone and one random halving"
WAY_BY_FIRST_UPDATES = "alone and one halving, by first updates"
SEEDS_OF_WAY = (1, 3)


def values_by_seed(seeds: Sequence[Trained]) -> dict[str, list[list[Valued]]]:
    """Compute each seed's values in all ways. A method has a list for each of its random halvings, else one."""
    ways = {method: [[value(seed) for seed in seeds]] for method, value in WAYS.items()}
    ways[RANDOM_WAY] = []
    for number in range(NUM_RANDOM):
        ways[RANDOM_WAY].append(
            [
                by_random_halves(
                    seed,
                    number,
                )
                for seed in seeds
            ]
        )
    if seeds[0].first_updates is not None:
        by_first = []
        for seed in seeds:
            assert seed.first_updates is not None
            by_first.append(by_updates(seed, seed.first_updates))
        ways[WAY_BY_FIRST_UPDATES] = [by_first]
    return ways


def coverage(
    of_seeds: Sequence[Valued],
    truths: Tensor,
    untrained: Sequence[Tensor],
    num_seeds: int,
) -> float:
    """The part of the others' means that brackets of some seeds hold, widened by those means' own error."""
    quantile = t_quantile(0.9)
    fractions = []
    values = torch.stack([valued.values for valued in of_seeds])
    errors = torch.stack([valued.stderr for valued in of_seeds])
    for chosen in map(
        list,
        combinations(range(len(values)), num_seeds),
    ):
        other_seeds = [seed for seed in range(len(values)) if seed not in chosen]
        if num_seeds == 1:
            (seed,) = chosen
            stderr = one_seed_stderr(
                values[seed],
                errors[seed],
                untrained[seed],
            )
            half_width = quantile * stderr
        else:
            half_width = interval_over_seeds(
                values[chosen],
                errors[chosen].mean(0),
            )
        variance_of_truth = quantile**2 * truths.var(0).mean() / len(other_seeds)
        distance = (values[chosen].mean(0) - truths[other_seeds].mean(0)).abs()
        is_held = distance <= (half_width.square() + variance_of_truth).sqrt()
        fractions.append(is_held.double().mean())
    return float(torch.stack(fractions).mean())


@dataclass(frozen=True)
class Measured:
    """How far one method's values lie from the truth in one federation."""

    wrong: float
    coverage: float


def measure(seeds: Sequence[Trained]) -> dict[tuple[str, int], Measured]:
    """Measure all ways in one federation, by one seed and by the mean of three."""
    by_way = values_by_seed(seeds)
    truths = torch.stack([valued.values for valued in by_way["exact"][0]])
    untrained = [seed.untrained for seed in seeds]
    measured = {}
    for method, alternatives in by_way.items():
        for num_seeds in SEEDS_OF_WAY:
            if len(seeds) < num_seeds + 2 and num_seeds > 1:
                continue
            wrong = []
            covered = []
            for of_seeds in alternatives:
                values = torch.stack([valued.values for valued in of_seeds])
                wrong.append(wrong_by(values, truths, num_seeds))
                covered.append(coverage(of_seeds, truths, untrained, num_seeds))
            measured[method, num_seeds] = Measured(
                float(np.mean(wrong)),
                float(np.mean(covered)),
            )
    return measured


def kinds_of(
    by_name: Mapping[str, Mapping[tuple[str, int], Measured]],
) -> dict[str, list[str]]:
    """Sets of federations."""
    names_by_set = {**SETS, "usual": [*FEDERATIONS]}
    kinds = {}
    for title, names in names_by_set.items():
        present = [name for name in names if name in by_name]
        decidable = [name for name in present if by_name[name]["exact", 1].wrong <= DECIDABLE]
        kinds[title] = present
        kinds[f"{title}, decidable"] = decidable
    kinds["few, one class"] = [name for name in kinds["few"] if "_1_" in name]
    kinds["few, two classes"] = [name for name in kinds["few"] if "_2_" in name]
    kinds["usual, one class"] = [name for name in kinds["usual"] if name.startswith("one_class")]
    kinds["regressions"] = [name for name in kinds["held_out"] if ALL[name].score == "r2"]
    return kinds


def table(
    folder: Path,
    usual_folder: Path,
    path: Path | None,
) -> str:
    """Percent misallocated, what it exceeds the exact game's by, and what brackets hold."""
    by_name = {}
    for name in [*FEDERATIONS, *SETS["few"], *SETS["seven_or_eight"], *SETS["held_out"]]:
        seeds = seeds_of(name, usual_folder if name in FEDERATIONS else folder)
        if len(seeds) > 1:
            by_name[name] = measure(seeds)

    rows = [["federations", "way", "seeds", "misallocated", "over exact", "most", "brackets hold"]]
    for title, names in kinds_of(by_name).items():
        ways = dict.fromkeys(key for name in names for key in by_name[name])
        for method, num_seeds in ways:
            pairs = []
            for name in names:
                of_method = by_name[name].get((method, num_seeds))
                of_exact = by_name[name].get(("exact", num_seeds))
                if of_method is not None and of_exact is not None:
                    pairs.append((of_method, of_exact))
            over = [pair[0].wrong - pair[1].wrong for pair in pairs]
            cells = [f"{title}: {len(pairs)}", method, str(num_seeds)]
            cells.append(f"{np.mean([pair[0].wrong for pair in pairs]):.2f}")
            cells.append(interval(over) if len(over) > 1 else f"{np.mean(over):+.2f}")
            cells.append(f"{max(over):+.1f}")
            cells.append(f"{np.mean([pair[0].coverage for pair in pairs]):.2f}")
            rows.append(cells)
    if path is not None:
        write(by_name, path)
    return grid(rows)


def write(
    by_name: Mapping[str, Mapping[tuple[str, int], Measured]],
    path: Path,
) -> None:
    """Write a row for each federation and method."""
    lines = [["federation", "clients", "way", "seeds", "misallocated_percent", "held"]]
    for name, measured in by_name.items():
        num_clients = FEDERATIONS[name].num_clients if name in FEDERATIONS else ALL[name].n
        for (method, num_seeds), of_way in measured.items():
            numbers = [f"{of_way.wrong:.2f}", f"{of_way.coverage:.3f}"]
            lines.append([name, str(num_clients), method, str(num_seeds), *numbers])
    write_csv(lines, path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "table"])
    parser.add_argument(
        "sets",
        nargs="*",
        choices=[*SETS, []],
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/halvings"),
    )
    parser.add_argument(
        "--usual-folder",
        type=Path,
        default=Path("runs/usual"),
    )
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    be_quiet()
    if options.what == "train":
        names = [name for set_name in options.sets or SETS for name in SETS[set_name]]
        train_missing(play, options.folder, names, options.seeds)
    else:
        print(
            table(
                options.folder,
                options.usual_folder,
                options.csv,
            )
        )


if __name__ == "__main__":
    main()
