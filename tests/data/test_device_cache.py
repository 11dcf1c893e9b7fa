"""Which data go to an accelerator, and what reads them there. Fits on a device: ``tests/cuda``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_options import grouped
from torch.utils.data import TensorDataset
from toys import Plain, toy_data, toy_sets

from flsv.data import FederatedDataModule, SizePartitioner, device_cache
from flsv.data.loaders import TensorBatches
from flsv.errors import ConfigurationError

META = torch.device("meta")
BYTES = sum(tensor.nbytes for tensor in toy_sets()[0].tensors)


def resident(data: FederatedDataModule, device: torch.device = META, module: Any = None) -> FederatedDataModule:
    """``data`` as in a fit on ``device``."""
    data.setup("fit")
    trainer: Any = SimpleNamespace(lightning_module=module or Plain(), strategy=SimpleNamespace(root_device=device))
    data.device_cache = data.reside(trainer)
    return data


def devices(loader: Any) -> set[str]:
    return {tensor.device.type for batch in loader for tensor in batch}


@pytest.mark.parametrize(("free", "fits"), [(4 * BYTES, True), (4 * BYTES - 4, False), (None, False)])
def test_what_fits(monkeypatch: pytest.MonkeyPatch, free: int | None, fits: bool) -> None:
    monkeypatch.setattr(device_cache, "free_memory", lambda device: free)
    data = resident(toy_data())
    expected = {"meta"} if fits else {"cpu"}
    loaders = [data.client_loader(0), data.client_loader(0, shuffle=False), data.client_loader(1, "test")]
    for loader in (*loaders, data.val_dataloader()):
        assert devices(loader) == expected


class Turned(Plain):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def test_who_may_count_on_the_cpus_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's batch hook and a transform get them, unless they are told otherwise."""
    monkeypatch.setattr(device_cache, "free_memory", lambda device: 4 * BYTES)
    seen: list[str] = []

    def noted(x: Any) -> Any:
        seen.append(x.device.type)
        return x

    for on_device, there in (("auto", "cpu"), (True, "meta")):
        assert devices(resident(toy_data(on_device=on_device), module=Turned()).client_loader(0)) == {there}
        assert devices(resident(toy_data(on_device=on_device, train_transform=noted)).client_loader(0)) == {there}
        assert {*seen} == {there}
        seen.clear()


class OneByOne(TensorDataset):
    """Not exactly a TensorDataset: read sample by sample."""


def test_data_that_are_no_tensors() -> None:
    def data(**options: Any) -> FederatedDataModule:
        sets = [OneByOne(*each.tensors) for each in toy_sets()]
        return FederatedDataModule(sets, SizePartitioner([2, 1]), batch_size=16, **grouped(options))

    assert resident(data()).device_cache is None
    with pytest.raises(ConfigurationError, match="on_device=True: .* read sample by sample.*preload"):
        resident(data(on_device=True))
    assert resident(data(on_device=True, preload=True)).device_cache is not None


def test_a_loader_of_an_evaluation_is_made_once() -> None:
    """Its order crosses once."""
    data = resident(toy_data(on_device=True))
    loader = data.client_loader(0, "test")
    assert data.client_loader(0, "test") is loader
    assert loader.indices.device == META
    assert data.client_loader(0).indices.device.type == "cpu"  # it is shuffled by a CPU generator
    data.device_cache = None
    assert devices(data.client_loader(0, "test")) == {"cpu"}


def test_what_is_gathered_is_the_same() -> None:
    """From copies on the CPU itself, which can be read."""
    data = toy_data()
    data.setup("fit")
    train = data._data.train
    copies = device_cache.DeviceCache(train.tensors, torch.device("cpu"))  # type: ignore[attr-defined]
    for shuffled in (True, False):
        expected = list(data.client_loader(0, shuffle=shuffled))
        near = copies.near(data.client_loader(0, shuffle=shuffled))
        assert isinstance(near, TensorBatches)
        for (x, y), (far_x, far_y) in zip(near, expected, strict=True):
            assert torch.equal(x, far_x)
            assert torch.equal(y, far_y)
    stranger = TensorBatches([torch.ones(3)], None, batch_size=2)
    assert copies.near(stranger) is stranger
    assert copies.near([1, 2]) == [1, 2]
