"""A federation of three sites, and the same one in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from data_options import grouped
from remote_sites import NAMES, QUIET, SEED, SiteData, SiteTransport, module, whole

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import FedAvg, ShapFedWA
from flsv.clients.algorithms import SCAFFOLD
from flsv.data import OneClient
from flsv.engines.remote import Directory, RemoteData, RemoteFederation, Site, SitePolicy, agreement
from flsv.metrics import ClassSpecificShapley
from flsv.personalization import ShapFedPersonalizer
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.uploads import TopK

ROUNDS = 3
Make = Callable[..., FederatedLoop]


def shapfed(**options: Any) -> FederatedLoop:
    metrics = {"cssv": ClassSpecificShapley()}
    return FederatedLoop(
        **{
            "aggregator": ShapFedWA("cssv"),
            "metrics": metrics,
            "seed": SEED,
            "reporting": Reporting(table=False),
            **options,
        }
    )


def one_process(tmp: Path, make: Make, make_module: Any = module, rounds: int = ROUNDS, **data: Any) -> FederatedLoop:
    loop = make()
    trainer = L.Trainer(max_epochs=rounds, callbacks=[loop], enable_checkpointing=False, default_root_dir=tmp, **QUIET)
    trainer.fit(make_module(), whole(**data))
    return loop


def site(
    tmp: Path,
    client: int,
    make: Make,
    make_module: Any = module,
    policy: SitePolicy | None = None,
    names: Sequence[str] = NAMES,
    **data: Any,
) -> Site:
    own: Any = partial(SiteData, client, len(names))
    if data:
        own = partial(_as_federated, own, data)
    return Site(make_module, own, make, tmp / "sites" / names[client], upload_seed=SEED, policy=policy)


def _as_federated(own: Any, options: dict[str, Any]) -> FederatedDataModule:
    return FederatedDataModule(own(), OneClient(), **grouped({"server_val": 0.0, **options}))


class ServerData(L.LightningDataModule):
    """The validation samples that the server of :func:`whole` has."""

    def val_dataloader(self) -> Any:
        data = whole()
        data.setup("fit")
        return data.val_dataloader()


class Remotely:
    """The same federation with a wire in it."""

    def __init__(self, tmp: Path, make: Make, make_module: Any = module, names: Any = NAMES, **data: Any) -> None:
        self.tmp, self.make, self.make_module, self.names = tmp, make, make_module, names
        self.sites = {100 + i: site(tmp, i, make, make_module, names=names, **data) for i in range(len(names))}
        self.transport = SiteTransport(self.sites, names)

    def connect(self, sites: Any) -> None:
        """To other sites than those of this process."""
        self.sites, self.transport = sites, SiteTransport(sites, self.names)

    def fit(self, rounds: int = ROUNDS, own: Any = None, **options: Any) -> FederatedLoop:
        ours = agreement(self.make_module(), self.make())
        directory = Directory(self.transport, self.names, ours, self.tmp / "book.json", 1, 0.2)
        directory.gather()
        sizes = [directory.sizes[i] for i in range(len(self.names))]
        data = RemoteData(self.names, sizes, 10, own=own)
        loop = self.make().replace(engine=partial(RemoteFederation, directory))
        self.loop, self.module = loop, self.make_module()
        options = {"enable_checkpointing": False, "num_sanity_val_steps": 0, **QUIET, **options}
        ckpt = options.pop("ckpt_path", None)
        callbacks = [loop, *options.pop("callbacks", [])]
        L.Trainer(max_epochs=rounds, callbacks=callbacks, default_root_dir=self.tmp, **options).fit(
            self.module, data, ckpt_path=ckpt
        )
        return loop


def kept_at(tmp: Path, name: str) -> list[dict[str, Any]]:
    """What a site keeps of the only run, the newest last."""
    (path,) = (tmp / "sites" / name).rglob("state.pt")
    return list(torch.load(path, weights_only=True).values())


def assert_same(remote: FederatedLoop, local: FederatedLoop) -> None:
    torch.testing.assert_close(remote.state.model(), local.state.model(), rtol=0, atol=0)
    assert remote.contributions.keys() == local.contributions.keys()
    for name, value in local.board.contributions.items():
        torch.testing.assert_close(remote.board.contributions[name], value, rtol=0, atol=0, equal_nan=True)


def momentum() -> Any:
    return module(optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))


class Scheduled(ClassifierClient):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch", "frequency": 2}]


def scheduled() -> Any:
    torch.manual_seed(SEED)
    return Scheduled("mlp", num_classes=10, input_shape=(1, 8, 8))


class Decaying(ClassifierClient):
    """Ends at zero after the last of a client's steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        assert self.trainer.num_training_batches == len(self.trainer.train_dataloader) <= total
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def decaying() -> Any:
    torch.manual_seed(SEED)
    return Decaying("mlp", num_classes=10, input_shape=(1, 8, 8))


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "cssv": (shapfed, {}),
    "kept momentum, two of three": (
        partial(shapfed, optimizer_state="persist", sampler=UniformSampler(2), local_epochs=2),
        {"make_module": momentum},
    ),
    "a schedule by rounds": (shapfed, {"make_module": scheduled}),
    "a schedule by a client's own steps": (partial(shapfed, sampler=UniformSampler(2)), {"make_module": decaying}),
    "local heads": (partial(shapfed, aggregator=FedAvg(), metrics={}, share=["!head"]), {}),
    "scaffold": (partial(shapfed, aggregator=FedAvg("uniform"), client_algorithm=SCAFFOLD()), {}),
    "privacy": (partial(shapfed, uploads=[GaussianPrivacy(clip=1.0, noise_multiplier=0.1)]), {}),
    "compression with memory": (partial(shapfed, uploads=[TopK(0.1)]), {}),
    "own models at the server": (partial(shapfed, personalizer=ShapFedPersonalizer("cssv")), {}),
}
SPLITS = {"client_val": 0.3, "client_test": 0.2}


def with_splits(tmp_path: Path, make: Make) -> Remotely:
    """Sites with validation and test samples of their own."""
    return Remotely(tmp_path / "b", make, **SPLITS)


def both_with_splits(tmp_path: Path, make: Make) -> tuple[FederatedLoop, FederatedLoop]:
    """Sites and one process, which draw the same splits."""
    return with_splits(tmp_path, make).fit(), one_process(tmp_path / "a", make, **SPLITS)
