"""What clients are worth to a language model that is fine-tuned by LoRA: the table of docs/results/language_model.md.

    python tools/language_model.py --root DATA [--seeds 0 1 2 3 4] [--rounds 3] [--parts values costs samples]

The federation is that of ``examples/language_model.py``: five groups of tales, one of them with its characters
shuffled, in run s the client s mod 5, by adapters of a transformer that has read news. *Values*: whether that client
has the lowest value. *Costs*: processor seconds of a fit with one metric, as a ratio of the fit without. *Samples*:
30 % of everybody's pieces are shuffled, and in-run values of single pieces are to tell them from the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import be_quiet, grid, spread
from sklearn.metrics import roc_auc_score

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import language_model as example

from flsv import FederatedDataModule, FederatedLoop
from flsv.clients.algorithms import InRunValues
from flsv.metrics import (
    CosineGradientShapley,
    CumulativeShapley,
    GradientAgreement,
    GradientShapley,
    InRunShapley,
    ShadowShapley,
)

LOSS: dict[str, Any] = {"performance": "val_loss", "mode": "min"}
METRICS: dict[str, Callable[[], Any]] = {
    "agreement of updates: `CosineGradientShapley`": CosineGradientShapley,
    "a gradient of the loss: `GradientShapley`": lambda: GradientShapley(loss="val_loss", momentum=0.5),
    "slopes and agreement: `GradientAgreement`": lambda: GradientAgreement(loss="val_loss"),
    "exact game: `CumulativeShapley`": lambda: CumulativeShapley(weighting="samples", **LOSS),
    "samples: `InRunShapley`": lambda: InRunShapley(loss="val_loss"),
    "shadow coalitions: `ShadowShapley`": lambda: ShadowShapley(coalitions="singles", **LOSS),
}
#: Those that change what clients do, one to a fit.
ALONE = [name for name in METRICS if name.startswith(("samples", "shadow"))]
BAD_SHARE = 0.3


def fitted(network: Path, data: Any, names: list[str], rounds: int, seed: int) -> tuple[FederatedLoop, float]:
    """The loop, and processor seconds."""
    algorithm = InRunValues() if any(name.startswith("samples") for name in names) else None
    metrics = {f"m{number}": METRICS[name]() for number, name in enumerate(names)}
    start = time.process_time()
    loop = example.fit(network, data, metrics, rounds, seed, algorithm)
    return loop, time.process_time() - start


def client_values(loop: FederatedLoop, names: list[str]) -> dict[str, torch.Tensor]:
    found = {name: loop.metrics[f"m{number}"] for number, name in enumerate(names)}
    return {name: metric.per_client(metric.compute()) for name, metric in found.items()}  # type: ignore[operator]


def values(network: Path, root: Path, seeds: list[int], rounds: int) -> str:
    """A row for each metric: the bad client's values and the others', least to largest, and in how many runs its is the
    lowest."""
    together = [name for name in METRICS if name not in ALONE]
    found: dict[str, list[torch.Tensor]] = {name: [] for name in METRICS}
    for seed in seeds:
        bad = seed % 5
        for names in (together, *([name] for name in ALONE)):
            loop, seconds = fitted(network, example.federation(root, bad, seed), names, rounds, seed)
            for name, value in client_values(loop, names).items():
                found[name].append(value.roll(-bad))  # the bad one first
                print(f"run {seed}, {name}: {value.tolist()} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    rows = [["by", "client with shuffled text", "the four others", "lowest in"]]
    for name, each in found.items():
        runs = torch.stack(each)
        parts = [f"{part.min():+.4f} to {part.max():+.4f}" for part in (runs[:, 0], runs[:, 1:])]
        rows.append([name, *parts, f"{int((runs.argmin(1) == 0).sum())} of {len(runs)}"])
    return f"## Is the bad client lowest ({rounds} rounds)\n\n{grid(rows)}\n"


def costs(network: Path, root: Path, repeats: int, rounds: int) -> str:
    found: dict[str, list[float]] = {}
    for repeat in range(repeats):
        for name in ("", *METRICS):
            data = example.federation(root, 1, 0)
            found.setdefault(name, []).append(fitted(network, data, [name] if name else [], rounds, 0)[1])
            print(f"costs {repeat}, {name or 'plain'}: {found[name][-1]:.1f} s", file=sys.stderr, flush=True)
    rows = [["with", "processor s", "ratio"]]
    for name, seconds in found.items():
        ratio = statistics.median(s / plain for s, plain in zip(seconds, found[""]))
        rows.append([name or "fine-tuning alone", f"{statistics.median(seconds):.1f}", f"{ratio:.2f}"])
    return f"## What it costs ({rounds} rounds, medians of {repeats})\n\n{grid(rows)}\n"


def samples(network: Path, root: Path, seeds: list[int], rounds: int) -> str:
    (name,) = (name for name in METRICS if name.startswith("samples"))
    found: list[float] = []
    for seed in seeds:
        own, val = example.tales(root)
        draw, bad = torch.Generator().manual_seed(seed), []
        for tokens in own.values():
            bad.append(torch.rand(len(tokens), generator=draw) < BAD_SHARE)
            for row in bad[-1].nonzero().flatten().tolist():
                tokens[row] = tokens[row][torch.randperm(example.LENGTH, generator=draw)]
        clients = {group: example.Pieces(tokens) for group, tokens in own.items()}
        data = FederatedDataModule(clients=clients, val=example.Pieces(val), batch_size=16, labels=False)
        loop, _ = fitted(network, data, [name], rounds, seed)
        kept = loop.state_dict()["clients"]
        scores = [-kept[client]["in_run_values"] for client in range(len(bad))]
        found.append(float(roc_auc_score(torch.cat(bad).numpy(), torch.cat(scores).numpy())))
        print(f"samples, seed {seed}: AUROC {found[-1]:.3f}", file=sys.stderr, flush=True)
    rows = [["runs", "pieces shuffled", "AUROC"], [str(len(seeds)), f"{BAD_SHARE:.0%}", spread(found, 3)]]
    return f"## Shuffled pieces among everybody's ({rounds} rounds: mean ± standard deviation)\n\n{grid(rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(os.environ.get("FLSV_DATA_ROOT", "data")))
    parser.add_argument("--network", type=Path, default=Path("runs/language_model/news"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="of the costs")
    parts = ("values", "costs", "samples")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    be_quiet()
    network = example.pretrained(options.root, options.network)
    if "values" in options.parts:
        print(values(network, options.root, options.seeds, options.rounds), flush=True)
    if "costs" in options.parts:
        print(costs(network, options.root, options.repeats, options.rounds), flush=True)
    if "samples" in options.parts:
        print(samples(network, options.root, options.seeds, options.rounds), flush=True)


if __name__ == "__main__":
    main()
