"""Whether two data sets of equal labels are the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

from flsv.data import FederatedDataModule, SizePartitioner
from flsv.data.contents import content_hashes, loader_hash, loader_rows

HOLDERS = {"a": torch.tensor([0, 2, 4]), "b": torch.tensor([1, 3, 5])}


def other(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Whose samples differ."""
    assert before.keys() == after.keys()
    return [name for name in before if before[name] != after[name]]


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(24.0).reshape(6, 4), torch.arange(6) % 2)


class Table(Dataset):
    """What it holds lies in attributes, and in objects that say nothing of what is in them."""

    def __init__(self, **attributes: Any) -> None:
        self.targets = np.arange(6) % 2
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), self.targets[index]


class Hidden(Table):
    """Its samples are made when they are read."""

    factor, drawn, opened = 1.0, False, False

    def __getitem__(self, index: int) -> Any:
        self.opened = True
        return {"x": torch.tensor([self.factor * (index + 1)]) + (torch.rand(1) if self.drawn else 0)}, 0


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: Subset(x, range(6))])
def test_one_number_of_one_sample_is_its_holders(wrap: Any) -> None:
    before, data = content_hashes(wrap(tensors()), HOLDERS), tensors()
    data.tensors[0][3, 2] += 1e-6
    assert other(before, content_hashes(wrap(data), HOLDERS)) == ["b"]
    assert content_hashes(wrap(tensors()), HOLDERS) == before


@pytest.mark.parametrize("column", [np.arange(12.0).reshape(6, 2), torch.arange(6).bfloat16()])
def test_arrays_of_a_data_set_of_ones_own(column: Any) -> None:
    before, changed = content_hashes(Table(column=column), HOLDERS), copy.deepcopy(column)
    changed[3] = column[2]
    assert content_hashes(Table(column=copy.deepcopy(column)), HOLDERS) == before
    assert other(before, content_hashes(Table(column=changed), HOLDERS)) == ["b"]


def test_what_says_nothing_of_its_samples_is_read() -> None:
    before, scaled = content_hashes(Hidden(), HOLDERS), Hidden()
    scaled.factor = 2.0
    assert other(before, content_hashes(scaled, HOLDERS)) == ["a", "b"]
    # Random numbers are no other samples, and nothing is left behind.
    drawn, state = Hidden(drawn=True), torch.get_rng_state()
    found = content_hashes(drawn, HOLDERS)
    torch.manual_seed(5)
    assert content_hashes(drawn, HOLDERS) == found
    torch.set_rng_state(state)
    assert not drawn.opened


def images(folder: Path) -> ImageFolder:
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(np.full((4, 4), 10 * i, np.uint8)).save(folder / name / f"{i}.png")
    return ImageFolder(str(folder), transform=ToTensor())


def test_files_are_read_wherever_they_lie(tmp_path: Path) -> None:
    first, second = images(tmp_path / "one"), images(tmp_path / "two")
    before = content_hashes(first, HOLDERS)
    assert content_hashes(second, HOLDERS) == before
    Image.fromarray(np.full((4, 4), 21, np.uint8)).save(tmp_path / "two/dog/2.png")
    assert other(before, content_hashes(second, HOLDERS)) == ["b"]


def test_rows_of_loaders() -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    rows = len(tensors())
    assert loader_rows(DataLoader(tensors())) == rows
    assert loader_rows([DataLoader(tensors(), batch_size=4), DataLoader(tensors())]) == 2 * rows
    assert loader_rows([DataLoader(tensors()), DataLoader(Endless())]) is None


def test_whose_samples_they_are() -> None:
    x = torch.arange(60.0)[:, None]
    data = FederatedDataModule(TensorDataset(x, torch.arange(60) % 2), SizePartitioner([1, 2], seed=0))
    data.setup("fit")
    before = data.content_hashes()
    assert list(before) == ["server", "0", "1"]
    for name, row in (("1", data.client_indices(1)[0]), ("server", data.server_val_indices[0])):
        x[row] += 1
        assert other(before, data.content_hashes()) == [name]
        x[row] -= 1


def test_a_sample_may_be_one_entry_of_a_larger_tensor() -> None:
    """As time series are cut: what has one entry counts as contiguous, and keeps the stride of the whole."""
    table = torch.arange(12).reshape(4, 3)
    cut = [(table[row].as_strided((1,), (3,), 3 * row + 1), 0) for row in range(4)]
    assert loader_hash(DataLoader(cut, collate_fn=tuple)) == loader_hash(
        DataLoader([(torch.tensor([3 * row + 1]), 0) for row in range(4)], collate_fn=tuple)
    )
    of_one = TensorDataset(table.as_strided((1, 1), (1, 3), 1))
    assert content_hashes(of_one, {"a": torch.tensor([0])}) == content_hashes(
        TensorDataset(torch.tensor([[1]])), {"a": torch.tensor([0])}
    )
