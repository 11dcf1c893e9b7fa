"""Samples that two clients have are found in any data that hold them, and equal ones by chance are not."""

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from flsv import FederatedLoop, Reporting
from flsv.data import FederatedDataModule, Splits
from flsv.data.copies import Copies, copies_in, find_copies
from flsv.data.sample_hashes import hash_samples
from helpers.fits import fit
from helpers.models import Plainest

NUM_SAMPLES = 40
#: A function that makes a data set by a seed.
MakeDataset = Callable[[int], Dataset[Any]]


def make_inputs(seed: int, num_samples: int = NUM_SAMPLES) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return torch.randn(num_samples, 12, generator=generator)


class Texts(Dataset[Any]):
    """Samples that are texts and labels in lists."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        words = generator.integers(1000, size=(NUM_SAMPLES, 4))
        self.texts = []
        self.labels = []
        for sample in words:
            self.texts.append(" ".join(map(str, sample)))
            self.labels.append(int(sample[0]) % 2)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("samples are not read")


class Images(Texts):
    """Samples in arrays, as of torchvision's MNIST."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.texts = []
        self.data = generator.integers(
            256,
            size=(NUM_SAMPLES, 8, 8),
            dtype=np.uint8,
        )
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
    inputs = make_inputs(seed)
    labels = torch.arange(NUM_SAMPLES) % 3
    return TensorDataset(inputs, labels)


def make_subset(seed: int) -> Subset:
    """The samples backwards."""
    inputs, labels = make_tensors(seed).tensors
    backwards = list(range(NUM_SAMPLES))
    backwards.reverse()
    dataset = TensorDataset(inputs[backwards], labels[backwards])
    return Subset(dataset, backwards)


def make_parts(seed: int) -> ConcatDataset:
    inputs, labels = make_tensors(seed).tensors
    first_part = TensorDataset(inputs[:15], labels[:15])
    second_part = TensorDataset(inputs[15:], labels[15:])
    return ConcatDataset([first_part, second_part])


@pytest.mark.parametrize(
    "make",
    [
        make_tensors,
        make_subset,
        make_parts,
        Texts,
        Images,
    ],
)
def test_equal_samples_have_equal_hashes_and_others_do_not(
    make: MakeDataset,
) -> None:
    indices = torch.arange(NUM_SAMPLES)

    hashes = hash_samples(make(0), indices)
    assert hashes is not None
    same_hashes = hash_samples(make(0), indices)
    hashes_by_seed = hash_samples(make(1), indices)

    assert len(np.unique(hashes)) == NUM_SAMPLES
    assert np.array_equal(hashes, same_hashes)
    assert not np.isin(hashes, hashes_by_seed).any()


@pytest.mark.parametrize("make", [make_subset, make_parts])
def test_a_sample_has_one_hash_whatever_holds_it(make: MakeDataset) -> None:
    indices = torch.tensor([3, 20, 39])

    expected = hash_samples(make_tensors(0), indices)
    hashes = hash_samples(make(0), indices)

    assert np.array_equal(hashes, expected)


@pytest.mark.parametrize(
    "make",
    [
        make_parts,
        Texts,
    ],
)
def test_a_client_without_samples_has_no_hashes(make: MakeDataset) -> None:
    no_indices = torch.arange(0)
    hashes = hash_samples(make(0), no_indices)

    assert hashes is not None
    assert len(hashes) == 0
    copies = find_copies([hashes, np.arange(40)])
    assert copies == []


def test_labels_alone_are_not_compared() -> None:
    dataset = LabelsOnly(0)
    indices = torch.arange(NUM_SAMPLES)

    assert hash_samples(dataset, indices) is None


def make_hashes(num_clients: int) -> list[np.ndarray]:
    """Return 40 hashes of each client, all of them different."""
    hashes = []
    for client in range(num_clients):
        first_hash = 100 * client
        hashes.append(np.arange(first_hash, first_hash + 40))
    return hashes


def test_copies_are_counted_by_pair_of_clients() -> None:
    names = ["a", "b", "c", "d"]
    hashes = make_hashes(num_clients=4)
    hashes[3][:30] = hashes[1][:30]  # 30 of 40 are another's
    hashes[2][20:] = hashes[2][:20]  # 20 of 40 occur more than once

    shared, twice = find_copies(hashes)

    assert facts_of(shared) == (1, 3, 30)
    assert facts_of(twice) == (2, None, 20)
    assert shared.text(names) == "30 of 40 are also samples of d"
    assert twice.text(names) == "20 of 40 occur more than once"


def facts_of(copies: Copies) -> tuple[int, int | None, int]:
    return copies.client, copies.other_client, copies.count


def test_copies_are_those_that_pairs_of_clients_have() -> None:
    """The index finds the same as comparing each pair of clients, sample by sample."""
    generator = np.random.default_rng(0)
    hashes = []
    for client in range(30):
        client_hashes = generator.integers(10**9, size=10 + client)
        if client % 3 == 2:
            num_copied = int(generator.integers(4, 12))
            owner = int(generator.integers(client))
            client_hashes[:num_copied] = hashes[owner][:num_copied]
            client_hashes[num_copied : num_copied + 3] = client_hashes[0]
        hashes.append(client_hashes)

    shared_by_pair = {}
    for copies in find_copies(hashes):
        if copies.other_client is not None:
            shared_by_pair[copies.client, copies.other_client] = (copies.count, copies.excess)

    expected = {}
    for client, other_client in combinations(range(30), 2):
        is_shared = np.isin(hashes[client], hashes[other_client])
        if is_shared.sum() >= 5:
            expected[client, other_client] = (is_shared.sum(), is_shared.mean())
    assert len(expected) >= 5
    assert shared_by_pair == expected


@pytest.mark.parametrize("num_clients", [1, 2, 3, 8, 9])
def test_a_client_is_compared_with_what_is_usual_among_the_others(num_clients: int) -> None:
    """Each client has more samples twice than the one before it."""
    hashes = []
    shares_twice = []
    chances = []
    for client in range(num_clients):
        num_twice = 7 + client**2
        client_hashes = np.arange(1000 * client, 1000 * client + 200)
        client_hashes[:num_twice] = client_hashes[-num_twice:]
        hashes.append(client_hashes)
        shares_twice.append(num_twice / 200)
        chances.append(num_twice / (200 * 199 / 2))

    excess_by_client = {}
    for copies in find_copies(hashes):
        excess_by_client[copies.client] = copies.excess

    expected = {}
    for client, share in enumerate(shares_twice):
        usual_share = 0.0
        if num_clients > 1:
            usual_chance = np.median(np.delete(chances, client))
            usual_share = max(np.median(np.delete(shares_twice, client)), 200 * usual_chance)
        if share - usual_share > 0.05:
            expected[client] = pytest.approx(share - usual_share)
    assert excess_by_client == expected
    assert len(expected) == {1: 0, 2: 0, 3: 0, 8: 2, 9: 2}[num_clients]


def test_clients_with_a_sample_of_many_are_compared_with_the_next_fifty() -> None:
    hashes = [np.arange(10)] * 200

    num_copies_by_client = Counter(copies.client for copies in find_copies(hashes))

    expected = {}
    for client in range(199):
        expected[client] = min(50, 199 - client)
    assert num_copies_by_client == expected


def draw_ages_and_wards(num_rows: int, seed: int) -> Tensor:
    """Ages in tenths of years and one of two wards, of which many are equal by chance."""
    generator = np.random.default_rng(seed)
    ages = generator.normal(60, 10, num_rows).round(1)
    wards = generator.choice(2, num_rows)
    rows = np.stack([ages, wards], axis=1)
    return torch.tensor(rows, dtype=torch.float32)


def make_federation(rows_by_client: list[Tensor]) -> FederatedDataModule:
    names = ["Lyon", "Bonn", "Graz", "Turin"]
    clients = {}
    for name, rows in zip(names, rows_by_client):
        clients[name] = with_labels(rows)

    validation_rows = rows_by_client[0][:9]
    data = FederatedDataModule(
        clients=clients,
        val=with_labels(validation_rows),
        splits=Splits(),
        batch_size=8,
    )
    data.setup("fit")
    return data


def with_labels(rows: Tensor) -> tuple[Tensor, Tensor]:
    labels = torch.arange(len(rows)) % 3
    return rows, labels


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_equal_by_chance_make_no_data_warning(seed: int) -> None:
    rows = []
    for index in range(3):
        rows.append(draw_ages_and_wards(72, 3 * seed + index))
    federation = make_federation(rows)

    copied_rows = rows[0].clone()
    federation_with_copies = make_federation([rows[0], rows[1], copied_rows])

    assert copies_in(federation) == []
    (copies,) = copies_in(federation_with_copies)

    assert facts_of(copies) == (0, 2, 72)


@pytest.mark.parametrize("num_values", [2, 4, 16])
def test_clients_with_few_different_rows_make_no_data_warning(num_values: int) -> None:
    """All rows are of a few values, so that every client has the others' rows."""
    rows = []
    for seed in range(4):
        generator = np.random.default_rng(seed)
        codes = generator.integers(num_values, size=(60, 1))
        rows.append(torch.tensor(codes, dtype=torch.float32))
    federation = make_federation(rows)

    assert copies_in(federation) == []


def test_a_fit_that_tells_nobody_does_not_compare_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(data: Any) -> None:
        raise AssertionError("samples are hashed")

    monkeypatch.setattr(FederatedDataModule, "hashes_of_samples", refuse)
    silent = Reporting(table=False, files=False)
    loop = FederatedLoop(seed=1, reporting=silent)
    rows = [make_inputs(seed) for seed in range(4)]
    federation = make_federation(rows)

    fit(loop, tmp_path, make_module(), federation)


def make_module() -> Plainest:
    module = Plainest()
    module.net = torch.nn.Linear(12, 3)
    return module


# ---- samples without a value


def copies_of_clients(*inputs):
    datasets = [TensorDataset(x, torch.arange(len(x)) % 2) for x in inputs]
    hashes = [hash_samples(dataset, torch.arange(len(dataset))) for dataset in datasets]
    return find_copies(hashes)


def test_samples_whose_inputs_are_all_nan_are_reported_as_such_and_are_no_copies():
    first_inputs = make_inputs(1, num_samples=12)
    second_inputs = make_inputs(2)
    first_inputs[:9] = torch.nan
    second_inputs[:20] = torch.nan

    all_copies = copies_of_clients(first_inputs, second_inputs)

    assert [copies.kind for copies in all_copies] == ["empty", "empty"]
    texts = [copies.text(["a", "b"]) for copies in all_copies]
    assert texts == [
        "9 of 12 have no value: all their inputs are NaN",
        "20 of 40 have no value: all their inputs are NaN",
    ]


def test_samples_with_one_value_and_gaps_may_be_repeated():
    inputs = make_inputs(1)
    inputs[:20] = torch.nan
    inputs[:20, 0] = 0.5

    (copies,) = copies_of_clients(inputs, make_inputs(2))

    assert copies.kind == "repeated"
    assert copies.client == 0
