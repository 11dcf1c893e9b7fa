"""A client, as Flower's quickstart has it; a SuperNode of a site says `site="1"`, a simulation's `partition-id`."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedapp.task import Net, load, train

app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    net = Net()
    node = context.node_config
    if "partition-id" in node:
        client = int(node["partition-id"])
    else:
        client = ["Boston", "Lyon", "Osaka"].index(node["site"])

    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    torch.manual_seed(int(message.content["config"]["server-round"]))
    batches = load(client)
    train(net, batches)

    metrics = {"num-examples": len(batches.dataset), "partition-id": client}
    content = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord(metrics),
    }

    return Message(RecordDict(content), reply_to=message)
