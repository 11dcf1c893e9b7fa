"""Federations that a job of NVFlare runs one after the other, and a client that takes part in all of them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from flsv import ClientEvaluation, FederatedDataModule, FederatedLoop
from flsv.aggregation import FedAvg
from flsv.data import OneClient
from flsv.engines.remote import Packet, RemoteServer, Site, SiteClient, SitePolicy, agreement
from flsv.metrics import ClassSpecificShapley, DomainRelevance, ShadowShapley
from flsv.personalization import PFedSV
from flsv.privacy import GaussianPrivacy
from helpers.data import group_options
from helpers.sites import (
    NAMES,
    ROUNDS,
    SEED,
    SPLITS,
    ServerData,
    SiteData,
    make_mlp_module,
    make_shapfed_loop,
)


def retrained() -> FederatedLoop:
    """Weights by CSSV, and values by coalitions that the sites train."""
    shadow = ShadowShapley(performance="negative_loss")
    return make_shapfed_loop(metrics={"cssv": ClassSpecificShapley(), "shadow": shadow})


def personalized() -> FederatedLoop:
    return make_shapfed_loop(
        aggregator=FedAvg(),
        metrics={"relevance": DomainRelevance()},
        personalizer=PFedSV("relevance", k=2),
        evaluation=ClientEvaluation(every=2),
    )


def private() -> FederatedLoop:
    return make_shapfed_loop(uploads=[GaussianPrivacy(clip=1.0, noise_multiplier=0.1)])


#: The loops, and what data the sites keep for themselves.
FEDERATIONS: dict[str, tuple[Any, dict[str, float]]] = {
    "retrained": (retrained, {}),
    "personalized": (personalized, SPLITS),
    "private": (private, {}),
}


class Results(L.Callback):
    """Writes the model and the values beside the checkpoints."""

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loops = [part for part in trainer.callbacks if isinstance(part, FederatedLoop)]
        (loop,) = loops
        values = {}
        for name, value in loop.contribution_metrics.contributions.items():
            values[name] = value.as_subclass(torch.Tensor)

        results = {"model": loop.state.model(), "values": values}

        saving = trainer.checkpoint_callback
        assert isinstance(saving, ModelCheckpoint)

        torch.save(results, Path(saving.dirpath, "results.pt"))


def server_of(name: str) -> RemoteServer:
    make_loop, _ = FEDERATIONS[name]
    return RemoteServer(
        make_mlp_module,
        make_loop,
        NAMES,
        rounds=ROUNDS,
        num_classes=10,
        datamodule=ServerData,
        folder=name,
        trainer={
            "accelerator": "cpu",
            "callbacks": [Results()],
            "enable_progress_bar": False,
        },
        timeout=900,
        wait=900,
    )


class Participant(SiteClient):
    """A site of all federations, which knows by the server's settings which one asks. Its noise is a simulation's."""

    def __init__(self) -> None:
        super().__init__(
            make_mlp_module, lambda node: SiteData(NAMES.index(node["site"])), make_shapfed_loop
        )
        self._sites: dict[str, Site] = {}

    def answer(
        self,
        packet: Packet,
        node: Mapping[str, Any],
        sender: str,
    ) -> Packet:
        for name, (make_loop, _) in FEDERATIONS.items():
            if packet.plain["agreement"] == agreement(make_mlp_module(), make_loop()):
                return self._site_of(name, node).answer(packet, sender)
        raise LookupError("no federation has these settings")

    def _site_of(self, name: str, node: Mapping[str, Any]) -> Site:
        if name not in self._sites:
            make_loop, splits = FEDERATIONS[name]
            self._sites[name] = Site(
                make_mlp_module,
                partial(site_data, NAMES.index(node["site"]), splits),
                make_loop,
                Path(node["folder"]),
                upload_seed=SEED,
                policy=SitePolicy(),
            )
        return self._sites[name]


def site_data(part: int, splits: dict[str, float]) -> L.LightningDataModule:
    if not splits:
        return SiteData(part)
    options = group_options({"server_val": 0.0, **splits})
    return FederatedDataModule(SiteData(part), OneClient(), **options)


client = Participant()
retrained_server = server_of("retrained")
personalized_server = server_of("personalized")
private_server = server_of("private")
