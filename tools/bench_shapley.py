"""The Shapley estimators: what they cost, and what they give for it.

    python tools/bench_shapley.py [coalitions | accuracy] [--seeds 20] [--png docs/images/shapley_error.png]
    python tools/bench_shapley.py accuracy --only surrogate regression

Without a section, both, one after the other:

- ``coalitions``: 1,024 coalition models of LeNet5 against the naive way (``bench_coalitions.py``);
- ``accuracy``: mean squared error of the normalized Shapley values (NSV) against the number of distinct coalitions
  evaluated, as in table 3 of ShapleyFL (Sun et al., KDD 2023). The games are real: rounds of 10 Fashion-MNIST clients
  (two label shards each) of which three poison their gradients, all 1,024 coalitions evaluated once for the exact
  values, by accuracy and by loss. Reads ``$FLSV_DATA_ROOT``.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import lightning as L
import torch
from matplotlib import cycler
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting, Round
from flsv.aggregation import FedAvg
from flsv.attacks import GradientPoisoning
from flsv.charts import PALETTE
from flsv.data import Files, ShardPartitioner, Splits
from flsv.functional.shapley import (
    ShapleyEstimate,
    complementary_shapley,
    difference_shapley,
    exact_shapley,
    gtg_shapley,
    normalize_shapley,
    permutation_shapley,
    regression_shapley,
    stratified_shapley,
    surrogate_shapley,
)
from flsv.metrics import PartialFederatedShapley
from flsv.strategy import Contributions

PLAYERS, BUDGETS, ROUNDS = 10, (50, 100, 200, 400), (0, 2, 5, 9)
DMC = "DMC, algorithm 3"
ESTIMATORS: dict[str, Callable[..., ShapleyEstimate]] = {
    "MC": partial(permutation_shapley, antithetic=False),
    "MC, antithetic": permutation_shapley,
    "TMC, 0.02": partial(permutation_shapley, antithetic=False, truncation=0.02),
    "GTG": gtg_shapley,
    DMC: partial(difference_shapley, shared=False),
    "DMC, shared coalitions": difference_shapley,
    "stratified": stratified_shapley,
    "complementary": complementary_shapley,
    "regression": regression_shapley,
    "surrogate, unbiased": partial(surrogate_shapley, unbiased=True),
    "surrogate": surrogate_shapley,
}


class KeepGames(FedAvg):
    """Tabulates every coalition of some rounds, by accuracy and by minus the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.games: dict[str, list[Tensor]] = {"accuracy": [], "negative_loss": []}

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        if round.round_index in ROUNDS:
            for metric, tables in self.games.items():
                tables.append(round.play(metric)(all_masks()))  # type: ignore[arg-type]
        return super().weights(round, contributions)


def all_masks() -> Tensor:
    """``[2^n, n]``, row i the coalition whose members are the bits of i."""
    return (torch.arange(2**PLAYERS)[:, None] >> torch.arange(PLAYERS) & 1).bool()


def real_games(root: str) -> dict[str, list[Tensor]]:
    """Tables ``[1024]`` of utilities, in the order of :func:`all_masks`."""
    keep = KeepGames()
    # The metric asks for the round's games, so that the loop makes them.
    loop = FederatedLoop(
        keep,
        {"sv": PartialFederatedShapley(estimator="leave_one_out")},
        uploads=[GradientPoisoning(fraction=0.3, seed=0)],
        reporting=Reporting(figures=0, table=False),
        seed=0,
    )
    data = FederatedDataModule(
        "fashion_mnist",
        ShardPartitioner(PLAYERS, shards_per_client=2),
        batch_size=32,
        files=Files(root=root),
        splits=Splits(max_samples=5000, server_val=0.2),
    )
    L.seed_everything(0, verbose=False)
    client = ClassifierClient("lenet5", optimizer=partial(torch.optim.SGD, lr=0.05))
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=max(ROUNDS) + 1,
            accelerator="cpu",
            callbacks=[loop],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            default_root_dir=folder,
        )
        trainer.fit(client, data)
    return keep.games


def errors(table: Tensor, seeds: int, names: list[str]) -> dict[str, dict[int, tuple[float, float]]]:
    """Estimator and budget to the mean squared NSV error over seeds and the mean number of evaluations spent."""
    torch.set_num_threads(1)
    places = 2 ** torch.arange(PLAYERS)

    def utility(masks: Tensor) -> Tensor:
        return table[masks.long() @ places]

    exact = normalize_shapley(exact_shapley(utility, PLAYERS).values)
    result: dict[str, dict[int, tuple[float, float]]] = {}
    for name in names:
        estimator = ESTIMATORS[name]
        for budget in BUDGETS:
            squares, spent = [], []
            for seed in range(seeds):
                generator = torch.Generator().manual_seed(seed)
                estimate = estimator(utility, PLAYERS, budget=budget, generator=generator)
                squares.append((normalize_shapley(estimate.values) - exact).square().mean().item())
                spent.append(estimate.evaluations)
            result.setdefault(name, {})[budget] = statistics.mean(squares), statistics.mean(spent)
    return result


def accuracy(seeds: int, png: Path | None, workers: int, only: list[str] | None = None) -> None:
    """Print the tables, and draw them."""
    names = [name for name in ESTIMATORS if only is None or name in {DMC, *only}]
    games = real_games(os.environ.get("FLSV_DATA_ROOT", "data"))
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained")
    console = Console(width=110)
    for axis, (metric, tables) in zip(figure.subplots(1, 2), games.items()):
        axis.set_prop_cycle(cycler(linestyle=["-", "--"]) * cycler(color=PALETTE))
        with ProcessPoolExecutor(workers) as pool:
            each = list(pool.map(partial(errors, seeds=seeds, names=names), tables))
        mean = {
            name: {
                b: (statistics.mean(e[name][b][0] for e in each), statistics.mean(e[name][b][1] for e in each))
                for b in BUDGETS
            }
            for name in names
        }
        title = f"MSE of NSV, utility {metric}, {len(tables)} rounds x {seeds} seeds (in brackets: share of {DMC}'s)"
        out = Table(title=title, title_justify="left")
        out.add_column("evaluations")
        for budget in BUDGETS:
            out.add_column(str(budget), justify="right")
        for name in names:
            cells = [f"{mean[name][b][0]:.1e} ({mean[name][b][0] / mean[DMC][b][0]:.2f})" for b in BUDGETS]
            out.add_row(name, *cells)
            axis.plot([mean[name][b][1] for b in BUDGETS], [mean[name][b][0] for b in BUDGETS], marker="o", label=name)
        console.print(out)
        axis.set(xscale="log", yscale="log", xlabel="distinct coalitions evaluated", title=f"utility: {metric}")
        axis.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
        axis.minorticks_off()
    figure.axes[0].set_ylabel("mean squared error of NSV")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    if png is not None:
        figure.savefig(png)
        print(f"wrote {png}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="coalitions, accuracy; default: both")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--only", nargs="+", choices=ESTIMATORS, help="estimators of the accuracy section; default: all"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes of the accuracy section")
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    for section in arguments.sections or ["coalitions", "accuracy"]:
        print(f"\n== {section}")
        if section == "accuracy":
            accuracy(arguments.seeds, arguments.png, arguments.workers, arguments.only)
            continue
        script = str(Path(__file__).with_name("bench_coalitions.py"))
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
