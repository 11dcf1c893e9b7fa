"""Samples that two clients have are found in any data that hold them, and equal ones by chance are not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from flsv import FederatedLoop, Reporting
from flsv.data import FederatedDataModule, Splits
from flsv.data.copies import copies_in, find_copies
from flsv.data.sample_hashes import hash_samples
from flsv.metrics import ShadowShapley
from helpers.fits import fit
from helpers.models import Plainest

NUM_SAMPLES = 40


def make_inputs(seed: int, num_samples: int = NUM_SAMPLES) -> Tensor:
    return torch.randn(num_samples, 12, generator=torch.Generator().manual_seed(seed))


class Texts(Dataset[Any]):
    """Samples that are texts and labels in lists."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        words = generator.integers(1000, size=(NUM_SAMPLES, 4))
        self.texts = [" ".join(map(str, sample)) for sample in words]
        self.labels = [int(sample[0]) % 2 for sample in words]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("samples are not read")


class Images(Texts):
    """Samples in arrays, as of torchvision's MNIST."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.texts = []
        self.data = generator.integers(256, size=(NUM_SAMPLES, 8, 8), dtype=np.uint8)
        self.targets = generator.integers(10, size=NUM_SAMPLES)

    def __len__(self) -> int:
        return len(self.data)


class LabelsOnly(Images):
    """Samples whose inputs are read from elsewhere."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        del self.data

    def __len__(self) -> int:
        return len(self.targets)


def make_tensors(seed: int) -> TensorDataset:
    return TensorDataset(make_inputs(seed), torch.arange(NUM_SAMPLES) % 3)


def make_subset(seed: int) -> Subset:
    """The samples backwards."""
    inputs, labels = make_tensors(seed).tensors
    backwards = list(range(NUM_SAMPLES))[::-1]
    return Subset(TensorDataset(inputs[backwards], labels[backwards]), backwards)


def make_parts(seed: int) -> ConcatDataset:
    inputs, labels = make_tensors(seed).tensors
    first_part = TensorDataset(inputs[:15], labels[:15])
    return ConcatDataset([first_part, TensorDataset(inputs[15:], labels[15:])])


@pytest.mark.parametrize("make", [make_tensors, make_subset, make_parts, Texts, Images])
def test_equal_samples_have_equal_hashes_and_others_do_not(
    make: Callable[[int], Dataset[Any]],
) -> None:
    indices = torch.arange(NUM_SAMPLES)

    hashes = hash_samples(make(0), indices)
    assert hashes is not None
    same_hashes = hash_samples(make(0), indices)
    other_hashes = hash_samples(make(1), indices)
    hashes_by_key = hash_samples(make(0), indices, key=b"a key")

    assert len(np.unique(hashes)) == NUM_SAMPLES
    assert np.array_equal(hashes, same_hashes)
    for others in (other_hashes, hashes_by_key):
        assert not np.isin(hashes, others).any()


@pytest.mark.parametrize("make", [make_subset, make_parts])
def test_a_sample_has_one_hash_whatever_holds_it(make: Callable[[int], Dataset[Any]]) -> None:
    indices = torch.tensor([3, 20, 39])

    expected = hash_samples(make_tensors(0), indices)

    assert np.array_equal(hash_samples(make(0), indices), expected)


@pytest.mark.parametrize("make", [make_tensors, make_parts, Texts, Images])
def test_a_client_without_samples_has_no_hashes(make: Callable[[int], Dataset[Any]]) -> None:
    hashes = hash_samples(make(0), torch.arange(0))

    assert hashes is not None
    assert len(hashes) == 0
    assert find_copies([hashes, np.arange(40)]) == []


def test_labels_alone_are_not_compared() -> None:
    assert hash_samples(LabelsOnly(0), torch.arange(NUM_SAMPLES)) is None


def test_copies_are_counted_by_pair_of_clients() -> None:
    hashes = [np.arange(100 * client, 100 * client + 40) for client in range(4)]
    hashes[3][:30] = hashes[1][:30]  # 30 of 40 are another's
    hashes[2][20:] = hashes[2][:20]  # 20 of 40 are there twice

    copies = find_copies(hashes)

    assert [(found.client, found.other_client, found.count) for found in copies] == [
        (1, 3, 30),
        (2, None, 20),
    ]
    assert copies[0].text(["a", "b", "c", "d"]) == "30 of 40 are samples of d, too"
    assert copies[1].text(["a", "b", "c", "d"]) == "20 of 40 are there twice"


def test_too_few_copies_are_no_doubt() -> None:
    hashes = [np.arange(100 * client, 100 * client + 40) for client in range(3)]
    hashes[2][:4] = hashes[0][:4]

    assert find_copies(hashes) == []


def draw_ages_and_wards(num_rows: int, seed: int) -> Tensor:
    """Ages in tenths of years and one of two wards, of which many are equal by chance."""
    generator = np.random.default_rng(seed)
    ages = generator.normal(60, 10, num_rows).round(1)
    wards = generator.choice(2, num_rows)
    return torch.tensor(np.stack([ages, wards], axis=1), dtype=torch.float32)


def make_federation(rows_by_client: list[Tensor]) -> FederatedDataModule:
    clients = {}
    for name, rows in zip(["Lyon", "Bonn", "Graz", "Turin"], rows_by_client):
        clients[name] = (rows, torch.arange(len(rows)) % 3)
    validation = (rows_by_client[0][:9], torch.arange(9) % 3)
    data = FederatedDataModule(clients=clients, val=validation, splits=Splits(), batch_size=8)
    data.setup("fit")
    return data


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_are_equal_by_chance_are_no_doubt(seed: int) -> None:
    rows = [draw_ages_and_wards(72, 3 * seed + index) for index in range(3)]
    with_copies = [rows[0], rows[1], rows[0].clone()]

    assert copies_in(make_federation(rows)) == []
    (copies,) = copies_in(make_federation(with_copies))

    assert (copies.client, copies.other_client, copies.count) == (0, 2, 72)


@pytest.mark.parametrize("num_values", [2, 4, 16])
def test_clients_with_few_different_rows_are_no_doubt(num_values: int) -> None:
    """All rows are of a few values, so that every client has the others' rows."""
    rows = []
    for seed in range(4):
        codes = np.random.default_rng(seed).integers(num_values, size=60)
        rows.append(torch.tensor(codes, dtype=torch.float32)[:, None])

    assert copies_in(make_federation(rows)) == []


def test_images_in_two_folders_are_found_by_their_files(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    pictures = generator.integers(256, size=(24, 8, 8), dtype=np.uint8)
    for index, picture in enumerate(pictures):
        name = f"{index}.png"
        owners = ["Lyon", "Bonn"] if index < 12 else ["Graz"]  # Bonn's are Lyon's, renamed
        for owner in owners:
            folder = tmp_path / "train" / owner / ("cat" if index % 2 else "dog")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(folder / f"{owner}_{name}")

    from torchvision.datasets import ImageFolder

    folders = [tmp_path / "train" / owner for owner in ("Lyon", "Bonn", "Graz")]
    hashes = [hash_samples(ImageFolder(str(folder)), torch.arange(12)) for folder in folders]
    (copies,) = find_copies(
        [client_hashes for client_hashes in hashes if client_hashes is not None]
    )

    assert (copies.client, copies.other_client, copies.count) == (0, 1, 12)


@pytest.mark.parametrize(
    ("num_copied", "expected"),
    [(NUM_SAMPLES, "40 of 40"), (10, "10 of 40")],
    ids=["all samples", "a quarter"],
)
def test_a_fit_on_copied_arrays_says_not_to_pay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_copied: int, expected: str
) -> None:
    rows = [make_inputs(seed) for seed in range(4)]
    rows[3][:num_copied] = rows[0][:num_copied]
    loop = FederatedLoop(metrics={"value": ShadowShapley()}, seed=1)

    with pytest.warns(UserWarning, match=f"samples of Lyon: {expected} are samples of Turin, too"):
        fit(loop, tmp_path, make_module(), make_federation(rows), rounds=1)

    (event,) = json.loads((tmp_path / "run.json").read_text())["events"]
    assert (event["client"], event["others"], event["kind"]) == (0, [3], "shared")
    printed = " ".join(capsys.readouterr().out.split())
    assert "Do not pay by these values" in printed
    assert f"Lyon and Turin ({expected} are samples of Turin, too)" in printed


def test_a_fit_that_tells_nobody_does_not_compare_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(data: Any) -> None:
        raise AssertionError("samples are hashed")

    monkeypatch.setattr(FederatedDataModule, "hashes_of_samples", refuse)
    silent = Reporting(table=False, files=False)
    rows = [make_inputs(seed) for seed in range(4)]

    fit(FederatedLoop(seed=1, reporting=silent), tmp_path, make_module(), make_federation(rows))


def make_module() -> Plainest:
    module = Plainest()
    module.net = torch.nn.Linear(12, 3)
    return module
