"""The server, as Flower's quickstart has it, and the lines that docs/howto/own_loop.md shows."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import flsv
from fedapp.task import Net, val_loader
from flsv.outside.flower import Contributions

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    net = Net()
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
