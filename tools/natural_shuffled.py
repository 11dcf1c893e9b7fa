"""What a client of a natural federation is worth, and what it would be worth if its targets were noise.

    python tools/natural_shuffled.py --root DATA [--names clinics reuters tales] [--seeds 5] [--rounds 5]

Every client in turn has its targets dealt out at random among its own training samples (numbers, classes; of running
text, its characters). Nothing else changes: pairs of runs share the seed of the network, the split and the order of the
batches. The value is the sum of the rounds' Shapley values, by the validation loss that the module logs, so that values
are losses taken off, in the loss's unit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import torch
from common import be_quiet, grid, spread

from flsv import FederatedLoop
from flsv.cli.parser import make_cli

CONFIGS = Path(__file__).parents[1] / "configs" / "natural"
UNITS = {"clinics": "variances of the target", "reuters": "nats", "tales": "nats per character"}
QUIET = {
    "trainer.logger": "false",
    "trainer.enable_checkpointing": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "trainer.limit_val_batches": 0,
    "federation.reporting.table": "false",
    "federation.metrics": "{shapley: {class_path: flsv.metrics.CumulativeShapley, init_args: "
    "{performance: val_loss, mode: min, weighting: samples}}}",
}
#: So that a coalition's model takes seconds on nobody's machine.
SMALLER = {"tales": {"model.init_args.hidden": 32, "data.source.init_args.val_fraction": 0.02}}


def values(
    name: str, root: str, rounds: int, seed: int, victim: int | None, **more: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contributions and numbers of samples ``[n]`` where ``victim``'s targets are shuffled (None: nobody's)."""
    options = {**QUIET, **SMALLER.get(name, {}), "trainer.max_epochs": rounds, "seed_everything": seed}
    options |= {
        "data.source.init_args.root": root,
        "data.source.init_args.seed": seed,
        "data.splits.seed": seed,
        **more,
    }
    arguments = [f"--{key}={value}" for key, value in options.items()]
    with tempfile.TemporaryDirectory() as folder:
        folders = ["--trainer.default_root_dir", folder]
        cli = make_cli(["--config", str(CONFIGS / f"{name}.yaml"), *arguments, *folders], run=False)
        data = cli.datamodule
        data.setup("fit")
        if victim is not None:
            shuffle_targets(data.source.train_set.tensors[-1], data.client_indices(victim), seed)
        cli.trainer.fit(cli.model, data)
    (loop,) = (each for each in cli.trainer.callbacks if isinstance(each, FederatedLoop))
    return loop.metrics["shapley"].compute(), data.num_samples


def shuffle_targets(targets: torch.Tensor, rows: torch.Tensor, seed: int) -> None:
    """Deal the rows' targets out anew among them, in place; characters ``[N, L]`` among all places of the rows."""
    own = targets[rows]
    order = torch.randperm(own.numel(), generator=torch.Generator().manual_seed(seed))
    targets[rows] = own.flatten()[order].view_as(own)


def table(name: str, root: str, rounds: int, seeds: int) -> str:
    clean = [values(name, root, rounds, seed, None) for seed in range(seeds)]
    rows = [["client", "samples", "value", "value if shuffled", "difference", "lower", "last of all"]]
    for client in range(len(clean[0][0])):
        shuffled = [values(name, root, rounds, seed, client)[0] for seed in range(seeds)]
        before, after = [float(v[client]) for v, _ in clean], [float(v[client]) for v in shuffled]
        differences = [b - a for a, b in zip(before, after)]
        rows.append(
            [
                str(client),
                f"{statistics.mean(float(samples[client]) for _, samples in clean):.0f}",
                *(spread(each, 3) for each in (before, after, differences)),
                f"{sum(each < 0 for each in differences)} of {seeds}",
                f"{sum(int(v.argmin()) == client for v in shuffled)} of {seeds}",
            ]
        )
    return f"## {name} ({UNITS[name]}, {rounds} rounds, {seeds} seeds: mean ± standard deviation)\n\n{grid(rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("FLSV_DATA_ROOT", "data"))
    parser.add_argument("--names", nargs="+", choices=sorted(UNITS), default=sorted(UNITS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    be_quiet()
    for name in options.names:
        print(table(name, options.root, options.rounds, options.seeds), flush=True)


if __name__ == "__main__":
    main()
