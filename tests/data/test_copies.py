"""Samples that two clients have are found in any data that hold them, and equal ones by chance are not."""

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from flsv import FederatedLoop, Reporting
from flsv.data import FederatedDataModule, IIDPartitioner, Splits
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


class TextsThatFailIfRead(Dataset[Any]):
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


class ArraysThatFailIfRead(TextsThatFailIfRead):
    """Samples in arrays, as of torchvision's MNIST."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.texts = []
        self.data = generator.integers(256, size=(NUM_SAMPLES, 8, 8), dtype=np.uint8)
        self.targets = generator.integers(10, size=NUM_SAMPLES)

    def __len__(self) -> int:
        return len(self.data)


class LabelsWithoutInputs(ArraysThatFailIfRead):
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
    """A data set has the samples in the opposite order, and a subset turns them back."""
    inputs, labels = make_tensors(seed).tensors
    backwards = list(range(NUM_SAMPLES))[::-1]
    dataset = TensorDataset(inputs[backwards], labels[backwards])
    return Subset(dataset, backwards)


def make_parts(seed: int) -> ConcatDataset:
    inputs, labels = make_tensors(seed).tensors
    first_part = TensorDataset(inputs[:15], labels[:15])
    second_part = TensorDataset(inputs[15:], labels[15:])
    return ConcatDataset([first_part, second_part])


@pytest.mark.parametrize(
    "make", [make_tensors, make_subset, make_parts, TextsThatFailIfRead, ArraysThatFailIfRead]
)
def test_equal_samples_have_equal_hashes_and_others_do_not(make):
    indices = torch.arange(NUM_SAMPLES)

    hashes = hash_samples(make(0), indices)
    some_hashes = hash_samples(make(0), indices[[39, 3, 20]])
    hashes_by_seed = hash_samples(make(1), indices)

    assert len(np.unique(hashes)) == NUM_SAMPLES
    assert np.array_equal(hashes[[39, 3, 20]], some_hashes)
    assert not np.isin(hashes, hashes_by_seed).any()


@pytest.mark.parametrize("make", [make_parts, TextsThatFailIfRead])
def test_client_without_samples_has_no_hashes_and_no_copies(make):
    hashes = hash_samples(make(0), torch.arange(0))

    assert hashes is not None
    assert find_copies([hashes, np.arange(40)]) == []


@pytest.mark.parametrize("make", [make_subset, make_parts])
def test_subset_and_concatenation_have_the_hashes_of_their_tensors(make):
    indices = torch.arange(NUM_SAMPLES)

    hashes = hash_samples(make(0), indices)

    np.testing.assert_array_equal(hashes, hash_samples(make_tensors(0), indices))


def test_samples_whose_labels_alone_are_in_memory_have_no_hashes():
    assert hash_samples(LabelsWithoutInputs(0), torch.arange(NUM_SAMPLES)) is None


def make_hashes(num_clients: int) -> list[np.ndarray]:
    """Return 40 hashes of each client, all of them different."""
    hashes = []
    for client in range(num_clients):
        first_hash = 100 * client
        hashes.append(np.arange(first_hash, first_hash + 40))
    return hashes


def test_copies_are_counted_by_pair_of_clients():
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


def draw_hashes_with_copies(num_clients: int) -> list[np.ndarray]:
    """Hashes by client. Every third client has copied some of an earlier one, and has one of them several times."""
    generator = np.random.default_rng(0)
    hashes = []
    for client in range(num_clients):
        client_hashes = generator.integers(10**9, size=10 + client)
        if client % 3 == 2:
            num_copied = int(generator.integers(4, 12))
            owner = int(generator.integers(client))
            client_hashes[:num_copied] = hashes[owner][:num_copied]
            client_hashes[num_copied : num_copied + 3] = client_hashes[0]
        hashes.append(client_hashes)
    return hashes


def test_copies_of_many_clients_are_those_of_each_pair_compared_alone():
    num_clients = 30
    fewest_copies = 5  # fewer are not reported
    hashes = draw_hashes_with_copies(num_clients)

    counts = {}
    excesses = {}
    for copies in find_copies(hashes):
        if copies.other_client is not None:
            pair = copies.client, copies.other_client
            counts[pair] = copies.count
            excesses[pair] = copies.excess

    expected_counts = {}
    expected_excesses = {}
    for client, other_client in combinations(range(num_clients), 2):
        is_shared = np.isin(hashes[client], hashes[other_client])
        if is_shared.sum() >= fewest_copies:
            pair = client, other_client
            expected_counts[pair] = is_shared.sum()
            expected_excesses[pair] = is_shared.mean()
    assert len(expected_counts) >= 5
    assert counts == expected_counts
    assert excesses == expected_excesses


@pytest.mark.parametrize(("num_clients", "num_unusual"), [(1, 0), (3, 0), (8, 2), (9, 2)])
def test_client_with_more_samples_twice_than_usual_among_the_others_is_found(
    num_clients, num_unusual
):
    # Each client has more samples twice than the one before it.
    nums_twice = [7 + client**2 for client in range(num_clients)]
    hashes = [make_hashes_some_twice(client, num) for client, num in enumerate(nums_twice)]

    excess_by_client = {}
    for copies in find_copies(hashes):
        excess_by_client[copies.client] = copies.excess

    expected = {}
    for client, num_twice in enumerate(nums_twice):
        nums_of_others = np.delete(nums_twice, client)
        excess = num_twice / SAMPLES_OF_CLIENT - usual_share_twice(nums_of_others)
        if excess > 0.05:  # less is not reported
            expected[client] = pytest.approx(excess)
    assert excess_by_client == expected
    assert len(expected) == num_unusual


SAMPLES_OF_CLIENT = 200


def make_hashes_some_twice(client: int, num_twice: int) -> np.ndarray:
    first_hash = 1000 * client
    hashes = np.arange(first_hash, first_hash + SAMPLES_OF_CLIENT)
    hashes[:num_twice] = hashes[-num_twice:]
    return hashes


def usual_share_twice(nums_twice: np.ndarray) -> float:
    """The share of samples twice that clients with so many lead to expect: their median, or what is expected if pairs
    of samples are as often equal as at the median client. A client alone has nothing to expect."""
    if len(nums_twice) == 0:
        return 0.0
    num_pairs = SAMPLES_OF_CLIENT * (SAMPLES_OF_CLIENT - 1) / 2
    usual_num = np.median(nums_twice)
    usual_chance = usual_num / num_pairs
    return max(usual_num / SAMPLES_OF_CLIENT, SAMPLES_OF_CLIENT * usual_chance)


def test_client_with_a_sample_of_two_hundred_clients_is_compared_with_the_next_fifty():
    hashes = [np.arange(10)] * 200

    num_copies_by_client = Counter(copies.client for copies in find_copies(hashes))

    assert num_copies_by_client == {client: min(50, 199 - client) for client in range(199)}


def draw_hashes(num_values):
    """72 samples of each of four clients, which have some of so many values."""
    generator = np.random.default_rng(0)
    return list(generator.integers(num_values, size=(4, 72)))


@pytest.mark.parametrize("num_values", [2, 16, 800])
def test_samples_that_are_equal_by_chance_are_no_copies(num_values):
    assert find_copies(draw_hashes(num_values)) == []


def test_copied_client_is_found_among_samples_that_are_equal_by_chance():
    hashes = draw_hashes(num_values=800)
    hashes[2] = hashes[0]

    (copies,) = find_copies(hashes)

    assert facts_of(copies) == (0, 2, 72)


def test_client_with_one_sample_has_no_copies():
    data = FederatedDataModule(
        clients={"Lyon": make_tensors(0), "Graz": Subset(make_tensors(1), [0])},
        splits=Splits(server_val=0.0),
    )
    data.setup("fit")

    assert copies_in(data) == []


def test_fit_without_any_report_does_not_compare_samples(tmp_path, monkeypatch):
    def refuse(data: Any) -> None:
        raise AssertionError("samples are compared")

    monkeypatch.setattr("flsv.federation.data_events.copies_in", refuse)
    silent = Reporting(table=False, files=False)
    loop = FederatedLoop(seed=1, reporting=silent)
    module = Plainest()
    module.net = torch.nn.Linear(12, 3)

    fit(loop, tmp_path, module, FederatedDataModule(make_tensors(0), IIDPartitioner(2)))
