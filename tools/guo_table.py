"""Guo et al.'s comparison (Sensors 2024, section 5): five scenarios x nine ways to say what a client is worth.

    python tools/guo_table.py [--root DATA] [--seeds 3] [--workers 2] [--out FILE.md] [--images docs/images]
    python tools/guo_table.py --full --root DATA        all images of a class that the smallest has, for a GPU

MNIST and Fashion-MNIST, softmax regression and LeNet5, five clients as in ``configs/scenarios/guo_*.yaml``. One run of
DivergenceWeighted gives the paper's values, one of FedAvg those of the baselines that rebuild sub-models (OR, MR, TMR);
exact, TMC and K-subset retrain coalitions and share one table of them. Accuracies are those of the run's own model on
the test set. A second experiment looks for the paper's gain in accuracy: in class-ordered batches and a larger step.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from guo_federation import (
    AGGREGATORS,
    CLAIM_SCENARIOS,
    FULL,
    PRESETS,
    SCENARIOS,
    SERVER_LRS,
    SOURCES,
    Cell,
    Claim,
    Result,
    claimed_accuracy,
    value_clients,
)
from guo_report import draw, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("FLSV_DATA_ROOT", "data"))
    parser.add_argument("--full", action="store_true", help="all images, for a GPU")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--retrain-seeds", type=int, default=3, help="seeds for which coalitions are retrained")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), choices=SOURCES)
    parser.add_argument("--networks", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--no-claim", action="store_true", help="leave the second experiment out")
    parser.add_argument("--out", type=Path, help="write the tables there, too")
    parser.add_argument("--images", type=Path, help="folder for the figures guo_SOURCE.png")
    arguments = parser.parse_args()
    settings = FULL if arguments.full else PRESETS
    if arguments.rounds:
        settings = {name: replace(setting, rounds=arguments.rounds) for name, setting in settings.items()}
    seeds = range(arguments.seeds)
    # The long ones first, so that the workers end together.
    cells: list[Cell] = [
        (source, network, scenario, seed)
        for network in sorted(arguments.networks)
        for source in arguments.sources
        for seed in seeds
        for scenario in arguments.scenarios
    ]
    claims: list[Claim] = [
        (network, scenario, aggregator, rate, ordered, seed)
        for network in sorted(arguments.networks)
        for scenario in CLAIM_SCENARIOS
        for aggregator in AGGREGATORS
        for rate in SERVER_LRS
        for ordered in (False, True)
        for seed in seeds
        if not arguments.no_claim
    ]
    start = time.perf_counter()
    work = {"settings": settings, "root": arguments.root}
    results: dict[Cell, list[Result]] = {}
    accuracies: dict[Claim, float] = {}
    with ProcessPoolExecutor(arguments.workers) as pool:
        running = [
            pool.submit(value_clients, cell, **work, retrain=cell[3] < arguments.retrain_seeds) for cell in cells
        ]
        later = [pool.submit(claimed_accuracy, claim, **work) for claim in claims]
        for cell, future in zip(cells, running):
            results[cell] = future.result()
            print(f"{len(results)}/{len(cells)} {cell} {time.perf_counter() - start:.0f} s", flush=True)
        for claim, accuracy in zip(claims, later):
            accuracies[claim] = accuracy.result()
            print(f"{len(accuracies)}/{len(claims)} {claim} {accuracies[claim]:.3f}", flush=True)
    order = {name: place for place, name in enumerate((*SOURCES, *PRESETS))}
    results = dict(sorted(results.items(), key=lambda item: (order[item[0][0]], order[item[0][1]], item[0][3])))
    text = report(results, accuracies, settings, arguments.retrain_seeds)
    text += f"\n\n{time.perf_counter() - start:.0f} s with {arguments.workers} workers, torch {torch.__version__}.\n"
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    if arguments.images is not None:
        arguments.images.mkdir(parents=True, exist_ok=True)
        for source in arguments.sources:
            draw(results, source).savefig(arguments.images / f"guo_{source}.png")


if __name__ == "__main__":
    main()
