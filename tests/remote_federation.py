"""A federation of three sites in this process, whose packets go through JSON and copies; and the same without sites."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from data_options import grouped
from torch.utils.data import DataLoader, Subset
from toys import trainer_for

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import ShapFedWA
from flsv.data import GroupPartitioner, OneClient, load_image_data
from flsv.engines.remote import Directory, Packet, RemoteData, RemoteFederation, Site, SitePolicy, agreement
from flsv.metrics import ClassSpecificShapley

NAMES = ["Boston", "Lyon", "Osaka"]
SEED = 7
ROUNDS = 3
#: Validation and test samples of the sites' own.
SPLITS = {"client_val": 0.3, "client_test": 0.2}
Make = Callable[..., FederatedLoop]


def groups() -> list[int]:
    """The site of each of the digits."""
    draw = torch.Generator().manual_seed(3)
    return torch.randint(0, len(NAMES), (1437,), generator=draw).tolist()


def whole(**options: Any) -> FederatedDataModule:
    """What one process would train on."""
    return FederatedDataModule("digits", GroupPartitioner(), groups=groups(), batch_size=48, **grouped(options))


class ServerData(L.LightningDataModule):
    """The validation samples that the server of :func:`whole` has."""

    def val_dataloader(self) -> Any:
        data = whole()
        data.setup("fit")
        return data.val_dataloader()


class SiteData(L.LightningDataModule):
    """One client's training samples of :func:`whole`, as a project of its own would have them."""

    def __init__(self, client: int) -> None:
        super().__init__()
        self.client = client

    def train_dataloader(self) -> DataLoader:
        data = whole()
        data.setup("fit")
        train = load_image_data("digits").train
        return DataLoader(Subset(train, data.client_indices(self.client).tolist()), batch_size=48, shuffle=True)


def module(**options: Any) -> ClassifierClient:
    torch.manual_seed(SEED)
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1), **options}
    return ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8), **options)


def momentum() -> ClassifierClient:
    return module(optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))


def shapfed(**options: Any) -> FederatedLoop:
    usual = {"aggregator": ShapFedWA("cssv"), "metrics": {"cssv": ClassSpecificShapley()}}
    return FederatedLoop(**{**usual, "seed": SEED, "reporting": Reporting(table=False), **options})


def one_process(tmp: Path, make: Make, make_module: Any = module, **data: Any) -> FederatedLoop:
    loop = make()
    trainer_for(loop, tmp, ROUNDS).fit(make_module(), whole(**data))
    return loop


def site(
    tmp: Path, client: int, make: Make, make_module: Any = module, policy: SitePolicy | None = None, **data: Any
) -> Site:
    def own() -> L.LightningDataModule:
        if not data:
            return SiteData(client)
        return FederatedDataModule(SiteData(client), OneClient(), **grouped({"server_val": 0.0, **data}))

    return Site(make_module, own, make, tmp / "sites" / NAMES[client], upload_seed=SEED, policy=policy)


class Replay:
    """Sites that send what they are given here, by the kind of what they are asked."""

    def __init__(self) -> None:
        self.says: dict[str, dict[int, Any]] = {}

    def present(self) -> dict[int, str]:
        return dict(enumerate(NAMES, 100))

    def exchange(self, packets: Mapping[int, Packet], seconds: float) -> Iterator[tuple[int, Any]]:
        for address, packet in packets.items():
            yield address, self.says[packet.kind][address]


class SiteTransport:
    """Sites behind a wire, by address; ``spoil`` is what becomes of their replies there."""

    def __init__(self, sites: Mapping[int, Any], names: Sequence[str] = NAMES) -> None:
        self.sites, self.names = dict(sites), dict(enumerate(names, 100))
        self.spoil: Callable[[int, Packet, Packet], Any] = lambda address, packet, reply: reply

    def present(self) -> dict[int, str]:
        return {address: self.names[address] for address in self.sites}

    def exchange(self, packets: Mapping[int, Packet], seconds: float) -> Iterator[tuple[int, Any]]:
        for address, packet in packets.items():
            if address not in self.sites:
                continue
            reply = self.spoil(address, packet, _through(self.sites[address].answer(_through(packet))))
            if reply is not None:
                yield address, reply


def _through(packet: Packet) -> Packet:
    tensors = {name: tensor.clone() for name, tensor in packet.tensors.items()}
    return Packet(packet.kind, json.loads(json.dumps(packet.plain)), tensors)


class Remotely:
    """The same federation with a wire in it."""

    def __init__(self, tmp: Path, make: Make, make_module: Any = module, **data: Any) -> None:
        self.tmp, self.make, self.make_module = tmp, make, make_module
        self.transport = SiteTransport({100 + i: site(tmp, i, make, make_module, **data) for i in range(len(NAMES))})

    def fit(self, rounds: int = ROUNDS, own: Any = None, **options: Any) -> FederatedLoop:
        directory = Directory(
            self.transport, NAMES, agreement(self.make_module(), self.make()), self.tmp / "book.json", 1, 0.2
        )
        directory.gather()
        data = RemoteData(NAMES, [directory.sizes[i] for i in range(len(NAMES))], 10, own=own)
        self.loop = self.make().replace(engine=partial(RemoteFederation, directory))
        ckpt = options.pop("ckpt_path", None)
        trainer_for(self.loop, self.tmp, rounds, **options).fit(self.make_module(), data, ckpt_path=ckpt)
        return self.loop


def kept_at(tmp: Path, name: str) -> list[dict[str, Any]]:
    """What a site keeps of the only run, the newest last."""
    (path,) = (tmp / "sites" / name).rglob("state.pt")
    return list(torch.load(path, weights_only=True).values())


def assert_same(remote: FederatedLoop, local: FederatedLoop) -> None:
    torch.testing.assert_close(remote.state.model(), local.state.model(), rtol=0, atol=0)
    assert remote.contributions.keys() == local.contributions.keys()
    for name, value in local.board.contributions.items():
        torch.testing.assert_close(remote.board.contributions[name], value, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(remote.client_scores, local.client_scores, rtol=0, atol=0, equal_nan=True)
