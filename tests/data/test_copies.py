"""Samples that two clients have are found in any data that hold them, and equal ones by chance are not."""

from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from flsv import FederatedLoop, Reporting
from flsv.data import FederatedDataModule, IIDPartitioner
from flsv.data.copies import (
    conspicuous,
    copies_in,
    find_copies,
    find_validation_copies,
    validation_copies_in,
)
from flsv.data.sample_hashes import hash_samples, hash_samples_and_inputs
from helpers.data import set_up_data
from helpers.fits import fit
from helpers.models import Plainest

NUM_SAMPLES = 40


class TextsThatFailIfRead(Dataset[Any]):
    """Samples that are texts and labels in lists."""

    def __init__(self, seed):
        generator = np.random.default_rng(seed)
        words = generator.integers(1000, size=(NUM_SAMPLES, 4))
        self.texts = []
        self.labels = []
        for sample in words:
            self.texts.append(" ".join(map(str, sample)))
            self.labels.append(int(sample[0]) % 2)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        raise AssertionError("samples are not read")


class ArraysThatFailIfRead(TextsThatFailIfRead):
    """Samples in arrays, as of torchvision's MNIST."""

    def __init__(self, seed):
        generator = np.random.default_rng(seed)
        self.texts = []
        self.data = generator.integers(256, size=(NUM_SAMPLES, 8, 8), dtype=np.uint8)
        self.targets = generator.integers(10, size=NUM_SAMPLES)

    def __len__(self):
        return len(self.data)


class LabelsWithoutInputs(ArraysThatFailIfRead):
    """Samples whose inputs are read from elsewhere."""

    def __init__(self, seed):
        super().__init__(seed)
        del self.data

    def __len__(self):
        return len(self.targets)


def make_tensors(seed):
    generator = torch.Generator()
    generator.manual_seed(seed)
    inputs = torch.randn(NUM_SAMPLES, 12, generator=generator)
    labels = torch.arange(NUM_SAMPLES) % 3
    return TensorDataset(inputs, labels)


def make_subset(seed):
    """A data set has the samples in the opposite order, and a subset turns them back."""
    inputs, labels = make_tensors(seed).tensors
    backwards = TensorDataset(inputs.flip(0), labels.flip(0))
    return Subset(backwards, range(NUM_SAMPLES - 1, -1, -1))


def make_parts(seed):
    inputs, labels = make_tensors(seed).tensors
    first_part = TensorDataset(inputs[:15], labels[:15])
    second_part = TensorDataset(inputs[15:], labels[15:])
    return ConcatDataset([first_part, second_part])


@pytest.mark.parametrize(
    "make", [make_tensors, make_subset, make_parts, TextsThatFailIfRead, ArraysThatFailIfRead]
)
def test_equal_samples_have_equal_hashes_and_others_do_not(make):
    all_indices = torch.arange(NUM_SAMPLES)
    three_indices = torch.tensor([39, 3, 20])

    hashes = hash_samples(make(0), all_indices)
    hashes_of_three = hash_samples(make(0), three_indices)
    hashes_of_other_seed = hash_samples(make(1), all_indices)

    assert len(np.unique(hashes)) == NUM_SAMPLES
    assert np.array_equal(hashes_of_three, hashes[three_indices])
    assert not np.isin(hashes_of_other_seed, hashes).any()


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


def test_pairs_of_tensors_have_the_hashes_of_samples_and_of_their_inputs():
    pairs = make_tensors(0)
    inputs = TensorDataset(pairs.tensors[0])
    indices = torch.tensor([39, 3, 20])

    hashes, input_hashes = hash_samples_and_inputs(pairs, indices)

    np.testing.assert_array_equal(hashes, hash_samples(pairs, indices))
    np.testing.assert_array_equal(input_hashes, hash_samples(inputs, indices))


def test_samples_whose_labels_alone_are_in_memory_have_no_hashes():
    assert hash_samples(LabelsWithoutInputs(0), torch.arange(NUM_SAMPLES)) is None


def make_hashes(num_clients):
    """Return 40 hashes of each client, all of them different."""
    hashes = []
    for client in range(num_clients):
        first_hash = 100 * client
        hashes.append(np.arange(first_hash, first_hash + 40))
    return hashes


def test_copies_are_counted_by_pair_of_clients():
    names = ["a", "b", "c", "d"]
    a, b, c, d = range(4)
    hashes = make_hashes(num_clients=4)
    hashes[d][:30] = hashes[b][:30]
    hashes[c][20:] = hashes[c][:20]

    shared, twice = find_copies(hashes)

    assert facts_of(shared) == (b, d, 30)
    assert facts_of(twice) == (c, None, 20)
    assert shared.text(names) == "30 of 40 are also samples of d"
    assert twice.text(names) == "20 of 40 occur more than once"


def facts_of(copies):
    return copies.client, copies.other_client, copies.count


def draw_hashes_with_copies(num_clients):
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


def compare_each_pair_alone(hashes):
    """The number and the share of samples that each pair of clients shares, where that are five and more."""
    facts_by_pair = {}
    for client, other_client in combinations(range(len(hashes)), 2):
        is_shared = np.isin(hashes[client], hashes[other_client])
        if is_shared.sum() >= 5:
            facts_by_pair[client, other_client] = (is_shared.sum(), is_shared.mean())
    return facts_by_pair


def test_copies_of_many_clients_are_those_of_each_pair_compared_alone():
    hashes = draw_hashes_with_copies(num_clients=30)

    facts_by_pair = {}
    for copies in find_copies(hashes):
        if copies.other_client is not None:
            facts_by_pair[copies.client, copies.other_client] = (copies.count, copies.excess)

    expected_facts = compare_each_pair_alone(hashes)
    assert len(expected_facts) >= 5
    assert facts_by_pair == expected_facts


SAMPLES_OF_CLIENT = 200


def make_hashes_some_twice(client, num_twice):
    first_hash = 1000 * client
    hashes = np.arange(first_hash, first_hash + SAMPLES_OF_CLIENT)
    hashes[:num_twice] = hashes[-num_twice:]
    return hashes


def usual_share_twice(nums_twice):
    """The share of samples twice that clients with so many lead to expect: their median, or what is expected if pairs
    of samples are as often equal as at the median client. A client alone has nothing to expect."""
    if len(nums_twice) == 0:
        return 0.0
    num_pairs = SAMPLES_OF_CLIENT * (SAMPLES_OF_CLIENT - 1) / 2
    usual_num = np.median(nums_twice)
    usual_chance = usual_num / num_pairs
    return max(usual_num / SAMPLES_OF_CLIENT, SAMPLES_OF_CLIENT * usual_chance)


@pytest.mark.parametrize(
    ("num_clients", "num_unusual"),
    [
        (1, 0),
        (3, 0),
        (8, 2),
        (9, 2),
    ],
)
def test_client_with_more_samples_twice_than_usual_among_the_others_is_found(
    num_clients, num_unusual
):
    hashes = []
    nums_twice = []
    for client in range(num_clients):
        num_twice = 7 + client**2  # more than of the client before
        nums_twice.append(num_twice)
        hashes.append(make_hashes_some_twice(client, num_twice))

    excess_by_client = {copies.client: copies.excess for copies in find_copies(hashes)}

    expected_excesses = {}
    for client, num_twice in enumerate(nums_twice):
        nums_of_others = np.delete(nums_twice, client)
        excess = num_twice / SAMPLES_OF_CLIENT - usual_share_twice(nums_of_others)
        if excess > 0.05:  # less is not reported
            expected_excesses[client] = pytest.approx(excess)
    assert excess_by_client == expected_excesses
    assert len(expected_excesses) == num_unusual


def test_client_with_samples_of_two_hundred_clients_is_compared_with_the_next_fifty():
    same_hashes_of_all_clients = [np.arange(10)] * 200

    all_copies = find_copies(same_hashes_of_all_clients)

    clients_after = {client: 199 - client for client in range(199)}
    expected_numbers = {client: min(50, number) for client, number in clients_after.items()}
    assert Counter(copies.client for copies in all_copies) == expected_numbers


def draw_hashes(num_values):
    """72 samples of each of four clients, which have some of so many values."""
    generator = np.random.default_rng(0)
    return list(generator.integers(num_values, size=(4, 72)))


@pytest.mark.parametrize("num_values", [2, 16, 800])
def test_samples_that_are_equal_by_chance_are_no_copies(num_values):
    assert find_copies(draw_hashes(num_values)) == []


def test_copied_client_is_found_among_samples_that_are_equal_by_chance():
    hashes = draw_hashes(num_values=800)
    owner, copyist = 0, 2
    hashes[copyist] = hashes[owner]

    (copies,) = find_copies(hashes)

    assert facts_of(copies) == (owner, copyist, len(hashes[owner]))


def test_client_with_one_sample_has_no_copies():
    one_sample = Subset(make_tensors(1), [0])
    data = set_up_data(clients={"Lyon": make_tensors(0), "Graz": one_sample}, server_val=0.0)

    assert copies_in(data) == []


# ---- validation samples that clients train on


def test_validation_samples_of_each_client_are_counted_and_those_of_many_are_reported():
    validation, lyon, graz = make_hashes(num_clients=3)
    validation[10] = validation[0]  # a sample twice
    graz[:16] = validation[:16]
    lyon[:4] = validation[10:14]

    of_any, of_lyon, of_graz = find_validation_copies(validation, [lyon, graz])

    assert (of_any.count, of_lyon.count, of_graz.count) == (16, 5, 16)
    assert conspicuous([of_any, of_lyon, of_graz]) == [of_graz]  # five copies may be due to chance
    assert of_graz.text == "16 of 40 validation samples are also training samples"


def test_validation_samples_spread_over_many_clients_are_reported_for_all_together():
    validation, *hashes = make_hashes(num_clients=9)
    for client, client_hashes in enumerate(hashes):
        client_hashes[0] = validation[client]

    (reported,) = conspicuous(find_validation_copies(validation, hashes))

    assert (reported.client, reported.count) == (None, 8)


@pytest.mark.parametrize("num_values", [2, 16, 800])
def test_validation_samples_that_are_equal_by_chance_are_not_reported(num_values):
    validation, *hashes = draw_hashes(num_values)

    assert conspicuous(find_validation_copies(validation, hashes)) == []


def make_tensors_relabeled(seed):
    inputs, labels = make_tensors(seed).tensors
    return TensorDataset(inputs, (labels + 1) % 3)


@pytest.mark.parametrize(
    ("make", "make_validation", "num_relabeled"),
    [
        (make_tensors, make_tensors, 0),
        (make_tensors, make_tensors_relabeled, NUM_SAMPLES),
        (make_tensors, make_subset, 0),
        (make_parts, make_parts, 0),
        (TextsThatFailIfRead, TextsThatFailIfRead, 0),
        (ArraysThatFailIfRead, ArraysThatFailIfRead, 0),
    ],
)
def test_validation_samples_of_a_client_are_found_in_any_data_that_hold_them(
    make, make_validation, num_relabeled
):
    clients = {"Lyon": make(0), "Graz": make(1)}

    data = set_up_data(clients=clients, val=make_validation(1), labels=False)
    (copies,) = conspicuous(validation_copies_in(data))

    assert (copies.client, copies.count, copies.num_relabeled) == (1, NUM_SAMPLES, num_relabeled)


def test_validation_samples_of_nobody_are_counted_as_none():
    data = set_up_data(make_tensors(0), IIDPartitioner(2), server_val=0.2)

    of_any, *_ = validation_copies_in(data)

    assert (of_any.count, of_any.num_samples) == (0, 8)


@pytest.mark.parametrize("make", [LabelsWithoutInputs, ArraysThatFailIfRead])
def test_samples_that_cannot_be_compared_have_no_counts(make):
    clients = {"Lyon": make_tensors(0), "Graz": make_tensors(1)}

    data = set_up_data(clients=clients, val=make(1), labels=False)

    assert validation_copies_in(data) is None


def fail_if_called(data):
    raise AssertionError("samples are compared")


def test_fit_without_any_report_does_not_compare_samples(tmp_path, monkeypatch):
    monkeypatch.setattr("flsv.federation.data_events.copies_in", fail_if_called)
    module = Plainest()
    module.net = torch.nn.Linear(12, 3)
    data = FederatedDataModule(make_tensors(0), IIDPartitioner(2))
    loop = FederatedLoop(seed=1, reporting=Reporting(table=False, files=False))

    fit(loop, tmp_path, module, data)
