"""The server, as Flower's quickstart has it, and the lines that docs/howto/own_loop.md shows."""

from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

import flsv
from flsv.outside.flower import Contributions
from helpers import make_generator

app = ServerApp()


def val_loader() -> list[Any]:
    generator = make_generator(1)
    x = torch.randn(30, 4, generator=generator)
    y = x[:, :3].argmax(1)
    return [(x, y)]


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    metrics = {
        "value": flsv.metrics.CumulativeShapley(),
        "cssv": flsv.metrics.ClassSpecificShapley(),
    }
    strategy = Contributions(
        strategy, net, val_loader(), metrics=metrics, folder=context.run_config["folder"]
    )
    strategy.start(
        grid, ArrayRecord(net.state_dict()), num_rounds=context.run_config["num-server-rounds"]
    )
