"""Three sites in this process, whose packets go through JSON and copies: nothing but what could cross does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from data_options import grouped
from torch.utils.data import DataLoader, Subset

from flsv import ClassifierClient, FederatedDataModule
from flsv.data import GroupPartitioner, load_image_data
from flsv.engines.remote import Packet, Site

NAMES = ["Boston", "Lyon", "Osaka"]
SEED = 7


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def groups(count: int = len(NAMES)) -> list[int]:
    train = load_image_data("digits").train
    draw = torch.Generator().manual_seed(3)
    return torch.randint(0, count, (len(train),), generator=draw).tolist()  # type: ignore[arg-type]


def module(**options: Any) -> ClassifierClient:
    torch.manual_seed(SEED)
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1), **options}
    return ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8), **options)


def whole(count: int = len(NAMES), **options: Any) -> FederatedDataModule:
    """What one process would train on."""
    return FederatedDataModule("digits", GroupPartitioner(), groups=groups(count), batch_size=48, **grouped(options))


class SiteData(L.LightningDataModule):
    """One client's training samples of :func:`whole`, as a project of its own would have them."""

    def __init__(self, client: int, count: int = len(NAMES)) -> None:
        super().__init__()
        self.client, self.count = client, count

    def train_dataloader(self) -> DataLoader:
        data = whole(self.count)
        data.setup("fit")
        train = load_image_data("digits").train
        return DataLoader(Subset(train, data.client_indices(self.client).tolist()), batch_size=48, shuffle=True)


class Replay:
    """Sites that send what they are given here, by the kind of what they are asked."""

    def __init__(self) -> None:
        self.says: dict[str, dict[int, Any]] = {}

    def present(self) -> dict[int, str]:
        return dict(zip([100, 101, 102], NAMES))

    def exchange(self, packets: Mapping[int, Packet], seconds: float) -> Iterator[tuple[int, Any]]:
        for address, packet in packets.items():
            yield address, self.says[packet.kind][address]


class SiteTransport:
    """Sites behind a wire.

    Args:
        sites: by address, from 100 on in the order of their names.
        names: of all.

    Attributes:
        names: by address.
    """

    def __init__(self, sites: Mapping[int, Site], names: Sequence[str] = NAMES) -> None:
        self.sites, self.names = dict(sites), dict(enumerate(names, 100))
        self.spoil: Callable[[int, Packet, Packet], Packet | str | None] = lambda address, packet, reply: reply

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
