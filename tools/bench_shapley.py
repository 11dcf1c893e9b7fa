"""The Shapley estimators: what they cost, and what they give for it.

    python tools/bench_shapley.py [coalitions | accuracy] [--seeds 20] [--png docs/images/shapley_error.png]
    python tools/bench_shapley.py accuracy --only surrogate regression

Without a section, both, one after the other. Reads ``$FLSV_DATA_ROOT``:

- ``coalitions``: 1,024 coalitions of 10 clients, LeNet5, on 2,000 Fashion-MNIST images: the naive way (a deepcopy of
  the module, an average of state_dicts and a DataLoader per coalition) and ``CoalitionUtility`` take turns, a block of
  coalitions at a time, on one thread; and how many accuracies differ.
- ``accuracy``: mean squared error of the normalized Shapley values (NSV) against the number of distinct coalitions
  evaluated, as in table 3 of ShapleyFL (Sun et al., KDD 2023). The games are real: rounds of 10 Fashion-MNIST clients
  (two label shards each) of which three poison their gradients, all 1,024 coalitions evaluated once for the exact
  values, by accuracy and by loss.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from bench_round import images
from common import be_quiet, grid, quiet_trainer, ratios
from matplotlib import cycler
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, ParameterSpace, Reporting, Round
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
from flsv.games import CoalitionUtility, ModelEvaluator
from flsv.metrics import PartialFederatedShapley
from flsv.models import LeNet5
from flsv.strategy import Contributions

PLAYERS, LOCAL_IMAGES = 10, 300
BUDGETS, ROUNDS = (50, 100, 200, 400), (0, 2, 5, 9)
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
        quiet_trainer(folder, max(ROUNDS) + 1, [loop]).fit(client, data)
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
    for axis, (metric, tables) in zip(figure.subplots(1, 2), games.items()):
        axis.set_prop_cycle(cycler(linestyle=["-", "--"]) * cycler(color=PALETTE))
        with ProcessPoolExecutor(workers) as pool:
            each = list(pool.map(partial(errors, seeds=seeds, names=names), tables))
        mean = {
            name: {b: [statistics.mean(e[name][b][place] for e in each) for place in (0, 1)] for b in BUDGETS}
            for name in names
        }
        rows = [["distinct coalitions, at most", *map(str, BUDGETS)]]
        for name in names:
            cells = [f"{mean[name][b][0]:.1e} ({mean[name][b][0] / mean[DMC][b][0]:.2f})" for b in BUDGETS]
            rows.append([name, *cells])
            axis.plot([mean[name][b][1] for b in BUDGETS], [mean[name][b][0] for b in BUDGETS], marker="o", label=name)
        print(f"MSE of NSV, utility {metric}, {len(tables)} rounds x {seeds} seeds; in brackets, of {DMC}'s:")
        print(f"\n{grid(rows)}\n")
        axis.set(xscale="log", yscale="log", xlabel="distinct coalitions evaluated", title=f"utility: {metric}")
        axis.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
        axis.minorticks_off()
    figure.axes[0].set_ylabel("mean squared error of NSV")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    if png is not None:
        figure.savefig(png)


# ---- what coalitions cost


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


def one_round(data: TensorDataset) -> tuple[nn.Module, list[nn.Module]]:
    """A global model that has seen something, and what the clients make of it."""
    x, y = data.tensors
    server = LeNet5(num_classes=10, input_shape=(1, 28, 28))
    train(server, x, y, 1)
    clients = [copy.deepcopy(server) for _ in range(PLAYERS)]
    for model, own_x, own_y in zip(clients, x.split(LOCAL_IMAGES), y.split(LOCAL_IMAGES)):
        train(model, own_x, own_y, 2)
    return server, clients


def average(server: nn.Module, clients: list[nn.Module], mask: Tensor) -> nn.Module:
    """The members' mean model, as one writes it down."""
    model = copy.deepcopy(server)
    members = [clients[i].state_dict() for i in mask.nonzero().flatten().tolist()]
    if members:
        model.load_state_dict({name: sum(s[name] for s in members) / len(members) for name in members[0]})
    return model.eval()


@torch.no_grad()
def naive(server: nn.Module, clients: list[nn.Module], data: TensorDataset, batch: int, masks: Tensor) -> Tensor:
    """One coalition after the other."""
    accuracies = []
    for mask in masks:
        model = average(server, clients, mask)
        hits = sum((model(x).argmax(-1) == y).sum().item() for x, y in DataLoader(data, batch_size=batch))
        accuracies.append(hits / len(data))
    return torch.tensor(accuracies, dtype=torch.float64)


def evaluators(
    data: TensorDataset, device: torch.device, batch: int = 100
) -> tuple[dict[str, Callable[[Tensor], Tensor]], Tensor]:
    """Ways to evaluate coalitions of a round on the images after the clients' own, and all coalitions, in disorder."""
    server, clients = one_round(TensorDataset(*data[: PLAYERS * LOCAL_IMAGES]))
    x, y = data[PLAYERS * LOCAL_IMAGES :]
    server.to(device)
    clients = [each.to(device) for each in clients]
    validation, space = TensorDataset(x.to(device), y.to(device)), ParameterSpace(server)
    round = Round(
        round_index=0,
        client_ids=torch.arange(PLAYERS),
        num_samples=torch.full((PLAYERS,), LOCAL_IMAGES),
        global_vector=space.read(server),
        client_vectors=torch.stack([space.read(client) for client in clients]),
        space=space,
    )

    def utility(backend: Any) -> Callable[[Tensor], Tensor]:
        loader = DataLoader(validation, batch_size=batch)
        return CoalitionUtility(round, ModelEvaluator(server, space, loader, num_classes=10, backend=backend))

    ways = {"naive": partial(naive, server, clients, validation, batch), "CoalitionUtility": utility("auto")}
    if device.type == "cuda":
        ways |= {f"CoalitionUtility, {backend}": utility(backend) for backend in ("vmap", "serial")}
    masks = all_masks()
    return ways, masks[torch.randperm(len(masks), generator=torch.Generator().manual_seed(0))]


def coalitions(device: torch.device, count: int) -> str:
    """Milliseconds of a coalition, and how many accuracies differ from the naive ones."""
    torch.manual_seed(0)
    ways, masks = evaluators(TensorDataset(*images(PLAYERS * LOCAL_IMAGES + 2000)), device)
    found: dict[str, list[Tensor]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(masks[:2])  # warms up
    for block in masks[:count].split(32):
        for name, way in ways.items():
            start = time.perf_counter()
            found[name].append(way(block).cpu())
            seconds[name].append(1000 * (time.perf_counter() - start) / len(block))
    expected = torch.cat(found["naive"])
    differ = {name: int((torch.cat(each) != expected).sum()) for name, each in found.items()}
    return f"{ratios(seconds, 'ms/coalition')}\n\naccuracies that differ from the naive ones: {differ}"


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
    be_quiet()
    for section in arguments.sections or ["coalitions", "accuracy"]:
        print(f"\n== {section}")
        if section == "accuracy":
            accuracy(arguments.seeds, arguments.png, arguments.workers, arguments.only)
            continue
        print(coalitions(torch.device("cpu"), 1024))


if __name__ == "__main__":
    main()
