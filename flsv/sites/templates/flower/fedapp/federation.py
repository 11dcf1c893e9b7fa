"""Parts that server and sites share. Put your own LightningModule and LightningDataModule here."""

from functools import partial

import lightning as L
import torch
from torch.utils.data import DataLoader, Subset

from flsv import ClassifierClient, FederatedLoop
from flsv.aggregation import ShapFedWA
from flsv.data import load_image_data
from flsv.metrics import ClassSpecificShapley
from flsv.sites import RemoteServer, SiteClient
from flsv.sites.flower import client_app, server_app

SITES = ["Boston", "Lyon", "Osaka"]
ROUNDS = 3


def make_module() -> L.LightningModule:
    torch.manual_seed(0)  # the server and all sites start from the same weights
    return ClassifierClient(
        "mlp", num_classes=10, input_shape=(1, 8, 8), optimizer=partial(torch.optim.SGD, lr=0.1)
    )


class SiteData(L.LightningDataModule):
    """A site's own data, here a third of scikit-learn's digits. `node` is what the SuperNode was started with."""

    def __init__(self, node) -> None:
        super().__init__()
        self.part = SITES.index(node["site"])

    def train_dataloader(self) -> DataLoader:
        digits = load_image_data("digits").train  # 1,437 images
        return DataLoader(Subset(digits, range(self.part, 1437, 3)), batch_size=16, shuffle=True)


def make_loop() -> FederatedLoop:
    return FederatedLoop(
        aggregator=ShapFedWA("cssv"), metrics={"cssv": ClassSpecificShapley()}, seed=0
    )


client = client_app(
    SiteClient(
        make_module,
        SiteData,
        make_loop,
        sites=SITES,
        rounds=ROUNDS,
    )
)
server = server_app(
    RemoteServer(
        make_module,
        make_loop,
        SITES,
        rounds=ROUNDS,
        num_classes=10,
        folder="runs",
        timeout=600,
    )
)
