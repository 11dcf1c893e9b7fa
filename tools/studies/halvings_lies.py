"""What a client gains by a false model of its own, where clients alone and halves are trained.

    python tools/studies/halvings_lies.py [--seeds 1] [--csv FILE]    after halvings.py train held_out

Every client lies in turn, in each held-out federation of ``halvings.py`` in which all clients train in every round. It
sends another model when it is trained alone, and trains honestly in all other coalitions. Gains are points of a
payment.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from common import be_quiet, grid, write_csv
from halvings import SETS, Trained, Valued, by_design, by_halves, exact, seeds_of
from predicted_federations import Training
from predicted_sets import ALL
from torch import Tensor

from flsv.benchmark.scores import shares

DESIGNS: dict[str, Callable[[Trained], Valued]] = {
    "alone": partial(by_design, design="singles"),
    "one halving": partial(by_halves, halvings=1),
    "two halvings": partial(by_halves, halvings=2),
    "alone and all but one": partial(by_design, design="both"),
    "all trained": exact,
}
LIES = (
    "the global model",
    "the next client's",
    "one trained on other samples like the validation's",
)


def federations() -> list[str]:
    """The names of the held-out federations whose clients all train in every round."""
    names = []
    for name in SETS["held_out"]:
        federation = ALL[name]
        if not federation.cohort and federation.model != "lora":
            names.append(name)
    return names


def outputs_of_lies(
    name: str,
    seed_number: int,
    seed: Trained,
    client: int,
) -> list[Tensor]:
    """The outputs of each false model, ``[V, ...]``."""
    next_client = (client + 1) % seed.num_clients
    training = Training(name, seed_number)
    model = {key: value[None] for key, value in training.start.items()}
    for round_index in range(ALL[name].rounds):
        model = training.local(model, round_index, client, training.others)
    trained_elsewhere = training.outputs(model, training.validation[0])[0]
    return [
        seed.outputs[-1],
        seed.outputs[1 << next_client],
        trained_elsewhere,
    ]


def with_lie(
    seed: Trained,
    client: int,
    outputs: Tensor,
) -> Trained:
    """Put a false model's outputs in the place of those of a client alone."""
    row = 1 << client
    all_outputs = seed.outputs.clone()
    all_outputs[row] = outputs
    utilities = seed.utilities.clone()
    utilities[row] = seed.score(outputs[None])[0]
    return replace(
        seed,
        outputs=all_outputs,
        utilities=utilities,
    )


def gains(
    name: str,
    seed_number: int,
    seed: Trained,
) -> dict[tuple[str, str], list[float]]:
    """What each client gains, in points of the payment, by lie and design."""
    honest_shares = {}
    for design, value in DESIGNS.items():
        honest_shares[design] = shares(value(seed).values)
    gains_by_case = defaultdict(list)
    for client in range(seed.num_clients):
        false_outputs = outputs_of_lies(name, seed_number, seed, client)
        for lie, outputs in zip(LIES, false_outputs):
            seed_with_lie = with_lie(seed, client, outputs)
            for design, value in DESIGNS.items():
                share = shares(value(seed_with_lie).values)[client]
                gain = 100 * float(share - honest_shares[design][client])
                gains_by_case[lie, design].append(gain)
    return gains_by_case


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/halvings"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    be_quiet()

    all_gains = defaultdict(list)
    lines = [["federation", "lie", "design", "mean_gain", "largest_gain"]]
    for name in federations():
        of_federation = defaultdict(list)
        for seed_number, seed in enumerate(seeds_of(name, options.folder)[: options.seeds]):
            for case, values in gains(name, seed_number, seed).items():
                of_federation[case] += values
        for case, values in of_federation.items():
            all_gains[case] += values
            mean_gain = sum(values) / len(values)
            lines.append([name, *case, f"{mean_gain:.2f}", f"{max(values):.2f}"])
        print(name, flush=True)

    rows = [["a client sends as its own model", *DESIGNS]]
    for lie in LIES:
        cells = [lie]
        for design in DESIGNS:
            values = torch.tensor(all_gains[lie, design])
            cells.append(f"{values.mean():+.1f}, up to {values.max():+.0f}")
        rows.append(cells)
    print(grid(rows))
    write_csv(lines, options.csv)


if __name__ == "__main__":
    main()
