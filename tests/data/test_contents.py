"""Whether two data sets of equal labels are the same, and whether their inputs are finite."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_options import ready
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

from flsv.data import IIDPartitioner, SizePartitioner
from flsv.data.contents import content_hashes, loader_rows, not_finite
from flsv.errors import ConfigurationError

HOLDERS = {"a": torch.tensor([0, 2, 4]), "b": torch.tensor([1, 3, 5])}


def other(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Whose samples differ."""
    assert before.keys() == after.keys()
    return [name for name in before if before[name] != after[name]]


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(24.0).reshape(6, 4), torch.arange(6) % 2)


class Table(Dataset):
    """What it holds lies in attributes; or its samples are made when they are read."""

    factor, drawn, opened = 1.0, False, False

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 6

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
    assert other(content_hashes(Table(), HOLDERS), content_hashes(Table(factor=2.0), HOLDERS)) == ["a", "b"]
    # Random numbers are no other samples, and nothing is left behind.
    drawn = Table(drawn=True)
    found = content_hashes(drawn, HOLDERS)
    torch.rand(1)
    assert content_hashes(drawn, HOLDERS) == found
    assert not drawn.opened


def test_files_are_read_wherever_they_lie(tmp_path: Path) -> None:
    for file in (f"{place}/{name}/{i}.png" for place in ("one", "two") for name in ("cat", "dog") for i in range(3)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), 10 * int(file[-5]), np.uint8)).save(tmp_path / file)
    first, second = (ImageFolder(str(tmp_path / place), transform=ToTensor()) for place in ("one", "two"))
    before = content_hashes(first, HOLDERS)
    assert content_hashes(second, HOLDERS) == before
    Image.fromarray(np.full((4, 4), 21, np.uint8)).save(tmp_path / "two/dog/2.png")
    assert other(before, content_hashes(second, HOLDERS)) == ["b"]


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_rows_of_loaders() -> None:
    assert loader_rows([DataLoader(tensors(), batch_size=4), DataLoader(tensors())]) == 2 * len(tensors())
    assert loader_rows([DataLoader(tensors()), DataLoader(Endless())]) is None


def test_whose_samples_they_are() -> None:
    x = torch.arange(60.0)[:, None]
    data = ready(TensorDataset(x, torch.arange(60) % 2), SizePartitioner([1, 2], seed=0))
    before = data.content_hashes()
    assert list(before) == ["server", "0", "1"]
    for name, row in (("1", data.client_indices(1)[0]), ("server", data.server_val_indices[0])):
        x[row] += 1
        assert other(before, data.content_hashes()) == [name]
        x[row] -= 1


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_what_is_not_finite_is_found_wherever_it_is(value: float) -> None:
    x, y = torch.randn(3000, 2, 4, generator=torch.Generator().manual_seed(0)), torch.arange(3000) % 3
    for clean in (TensorDataset(x, y), TensorDataset(x.long(), y), TensorDataset(x[:0], y[:0]), Table()):
        assert not len(not_finite(clean))
    x[[0, 1023, 1024, 2999], 1, 2] = value
    data, few = TensorDataset(x, y), TensorDataset(x[1:9], y[1:9])
    assert not_finite(data).tolist() == [0, 1023, 1024, 2999]
    assert not_finite(Subset(data, [7, 1024, 8])).tolist() == [1]
    with pytest.raises(ConfigurationError, match="4 samples of the test data have NaN"):
        ready((few, data), IIDPartitioner(2))
    with pytest.raises(ConfigurationError, match="2 samples of client 0's val set have NaN"):
        ready(TensorDataset(x[[0, 1023] * 4], y[:8]), IIDPartitioner(2), server_val=0.0, client_val=0.4)
    with pytest.warns(UserWarning, match="4 samples of the training data have NaN or infinite inputs"):
        ready(data, IIDPartitioner(2), val=few)
