"""A server that runs each strategy without Contributions and with them, and keeps what was sent and what came."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg, Result

import flsv
from fedapp.task import CLIENTS, Net, val_loader
from flsv.outside.flower import Contributions

app = ServerApp()


class Halfway(FedAvg):
    """Moves half of the way to the average, in a random order that torch's generator draws, and counts its rounds."""

    done = 0

    def start(self, *args, **kwargs) -> Result:  # type: ignore[no-untyped-def]
        self.done = 10
        return super().start(*args, **kwargs)

    def configure_train(self, server_round, arrays, config, grid):  # type: ignore[no-untyped-def]
        self.model_sent = arrays.to_torch_state_dict()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        arrays, _ = super().aggregate_train(server_round, replies)
        self.done = self.done + 1
        noise = torch.randn(()) / 10  # reported, so that the draws can be compared
        next_model = {}
        for name, average in arrays.to_torch_state_dict().items():
            next_model[name] = (self.model_sent[name] + average) / 2 + noise

        return ArrayRecord(next_model), MetricRecord({"noise": noise.item()})


class Kept:
    """A Grid whose replies come in the clients' order, which sums of floats depend on, and are kept."""

    def __init__(self, grid: Grid) -> None:
        self._grid, self.rounds = grid, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self._grid, name)

    def send_and_receive(self, messages, **options) -> list[Message]:  # type: ignore[no-untyped-def]
        messages = list(messages)
        if not messages:
            return []

        sent = messages[0].content["arrays"].to_torch_state_dict()
        replies = list(self._grid.send_and_receive(messages=messages, **options))
        replies.sort(key=lambda reply: reply.content["metrics"]["partition-id"])
        states = []
        counts = []
        for reply in replies:
            states.append(reply.content["arrays"].to_torch_state_dict())
            counts.append(reply.content["metrics"]["num-examples"])

        self.rounds.append((sent, tuple(states), tuple(counts)))
        return replies


@app.main()
def main(grid: Grid, context: Context) -> None:
    results = {}
    for make in (FedAvg, FedAdam, Halfway):
        for valued in (False, True):
            torch.manual_seed(0)
            net = Net()
            recorded = Kept(grid)
            strategy = make(
                fraction_evaluate=0.0,
                min_train_nodes=CLIENTS,
                min_available_nodes=CLIENTS,
            )
            if valued:
                metrics = {
                    "value": flsv.metrics.CumulativeShapley(performance="negative_loss"),
                    "cssv": flsv.metrics.ClassSpecificShapley(),
                }
                folder = f"{context.run_config['folder']}/{make.__name__}"
                strategy = Contributions(
                    strategy, net, val_loader(), metrics=metrics, folder=folder
                )
            result = strategy.start(
                recorded,
                ArrayRecord(net.state_dict()),
                num_rounds=context.run_config["num-server-rounds"],
            )
            records = {}
            for index, record in result.train_metrics_clientapp.items():
                records[index] = dict(record)
            results[make.__name__, valued] = (
                recorded.rounds,
                result.arrays.to_torch_state_dict(),
                records,
                getattr(strategy, "done", 0),
            )

    torch.save(results, f"{context.run_config['folder']}/kept.pt")
