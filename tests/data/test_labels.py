"""Labels, groups and names of clients, of data sets of every make, from the data to the last message."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from flsv.configuration.identity import fit_identity
from flsv.data import (
    ClosedSetLabelNoise,
    DirichletPartitioner,
    GroupPartitioner,
    IIDPartitioner,
    SizePartitioner,
)
from flsv.data.groups import client_names_of, named_groups
from flsv.data.labels import count_classes, dataset_labels, find_classes
from flsv.utilities.errors import ConfigurationError
from flsv.valuation import FedBary
from helpers import refused
from helpers.data import HERE, Items, set_up_data

NUM_SAMPLES = 40
X = torch.rand(NUM_SAMPLES, 6)
FOUR_LABELS = [index % 4 for index in range(NUM_SAMPLES)]


STORED_LABELS = [3, 1, 2]
PAIRS = [(torch.zeros(2), label) for label in STORED_LABELS]
COLUMN_OF_LABELS = np.array(STORED_LABELS, np.uint8)[:, None]


@pytest.mark.parametrize("stored", [STORED_LABELS, torch.tensor(STORED_LABELS), COLUMN_OF_LABELS])
def test_stored_labels_spare_reading_the_samples(stored):
    dataset = Items(PAIRS, targets=stored)
    assert dataset_labels(dataset).tolist() == STORED_LABELS
    assert dataset.reads == 0


def make_dataset(labels):
    return TensorDataset(torch.zeros(len(labels), 2), torch.tensor(labels))


def test_labels_of_a_subset_of_a_subset_are_found():
    subset = Subset(make_dataset([5, 6, 7, 8]), [3, 1, 0])
    assert dataset_labels(subset).tolist() == [8, 6, 5]

    first_and_last = Subset(subset, [0, 2])
    assert dataset_labels(first_and_last).tolist() == [8, 5]


def test_labels_of_concatenated_sets_follow_each_other():
    tensors = make_dataset([5, 6])
    subset_of_stored = Subset(Items(PAIRS, targets=[3, 1, 2]), [2, 0])

    concatenation = ConcatDataset([tensors, subset_of_stored])

    assert dataset_labels(concatenation).tolist() == [5, 6, 2, 3]


def test_stored_labels_are_changed_by_the_target_transform():
    dataset = Items(PAIRS, targets=[3, 1, 2], target_transform=lambda label: label - 1)

    assert dataset_labels(dataset).tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("names", "held_out", "num_classes"),
    [
        ((), {}, 3),
        (("a", "b", "c", "d"), {}, 4),
        ((), {"validation": None, "test": make_dataset([2, 2])}, 3),
        ((), {"test": make_dataset([0, 3])}, 4),
        pytest.param((), {"test": Items(PAIRS)}, 3, id="samples that are not read"),
    ],
)
def test_number_of_classes_covers_names_and_labels_of_training_and_held_out_data(
    names, held_out, num_classes
):
    labels = torch.arange(30) % 3

    assert count_classes(labels, names, held_out) == num_classes


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("large_label", [1000, 2**62])
def test_class_label_far_above_the_number_of_classes_is_refused(split, large_label):
    labels_of_ten_classes = torch.arange(30) % 10
    labels = {"train": labels_of_ten_classes, "test": labels_of_ten_classes.clone()}
    labels[split][4] = large_label
    test = TensorDataset(torch.zeros(30, 2), labels["test"])

    # Ten classes, and the large label.
    with refused(f"The largest label is {large_label}, but there are only 11 different"):
        count_classes(labels["train"], class_names=(), held_out={"test": test})


MASK = torch.randint(3, (4, 4))
TOKENS = torch.randint(20, (NUM_SAMPLES, 8))
LABELS_OF_SEVERAL_CLASSES = torch.randint(2, (NUM_SAMPLES, 5))
#: What people train on that is no classification.
WITHOUT_CLASSES = {
    "texts": TensorDataset(TOKENS),
    "segmentation": Items([(torch.rand(1, 4, 4), MASK)] * NUM_SAMPLES),
    "regression": TensorDataset(X, torch.rand(NUM_SAMPLES)),
    "regression on whole floats": TensorDataset(X, torch.arange(NUM_SAMPLES).float()),
    "multilabel": TensorDataset(X, LABELS_OF_SEVERAL_CLASSES),
    "dictionaries of texts": Items([{"x": X[0], "labels": TOKENS[0]}] * NUM_SAMPLES),
    "ragged, stored": Items(
        [(X[0], 0.0)] * NUM_SAMPLES, targets=[[0], [0, 0]] * (NUM_SAMPLES // 2)
    ),
    "a field called label": Items([{"x": X[0], "label": 1}] * NUM_SAMPLES),
    "names": Items([(X[0], "cat")] * NUM_SAMPLES),
}


@pytest.mark.parametrize("kind", WITHOUT_CLASSES)
def test_data_without_labels_count_as_one_class(kind, recwarn):
    source = WITHOUT_CLASSES[kind]
    partitioner = SizePartitioner([1, 2, 3])

    data = set_up_data(source, partitioner, server_val=0.2)

    sizes = data.num_samples.tolist()
    assert data.num_classes == 1
    assert data.class_names == ("samples",)
    assert data.no_classes
    assert data.class_counts.flatten().tolist() == sizes
    categories = [warning.category for warning in recwarn]
    assert UserWarning not in categories


THREE_LABELS = [i % 3 for i in range(NUM_SAMPLES)]
LABELS = torch.tensor(THREE_LABELS)
WITH_CLASSES = {
    "tensors": TensorDataset(X, LABELS),
    "yes and no": TensorDataset(X, LABELS > 0),
    "read": Items(zip(X, THREE_LABELS)),
    "stored": Items(X, targets=THREE_LABELS),
}


EXPECTED_LABELS = dict.fromkeys(WITH_CLASSES, THREE_LABELS)
EXPECTED_LABELS["yes and no"] = [int(label > 0) for label in THREE_LABELS]


@pytest.mark.parametrize("kind", WITH_CLASSES)
@pytest.mark.parametrize("asking", [(), ("somebody",)])
def test_integer_labels_are_classes_even_if_no_component_needs_them(kind, asking):
    expected = EXPECTED_LABELS[kind]

    classes = find_classes(
        WITH_CLASSES[kind], class_names=(), held_out={}, labels=None, parts_that_need_classes=asking
    )

    assert classes.labels.tolist() == expected
    assert classes.labels.dtype == torch.int64
    assert classes.missing_reason is None
    num_classes = max(expected) + 1
    assert classes.names == tuple(map(str, range(num_classes)))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"partitioner": DirichletPartitioner(3, alpha=0.5)}, "DirichletPartitioner"),
        ({"corruptions": [ClosedSetLabelNoise(fraction=0.5)]}, "ClosedSetLabelNoise"),
        ({"drop_flagged": FedBary()}, "FedBary"),
    ],
)
@pytest.mark.parametrize("kind", ["multilabel", "names", "a field called label"])
def test_component_that_needs_classes_refuses_data_without_them(kind, arguments, name):
    message = (
        rf"{name}\(.*\) needs the class of each sample\. .* has no class labels: "
        ".*second part of each sample .x, y.*attribute `targets`.*labels="
    )
    with refused(message):
        set_up_data(WITHOUT_CLASSES[kind], **arguments)


@pytest.mark.parametrize(
    ("source", "labels"),
    [
        pytest.param(TensorDataset(torch.randint(9, (NUM_SAMPLES, 3))), FOUR_LABELS, id="a list"),
        pytest.param(Items(list(X), topic=np.array(FOUR_LABELS)), "topic", id="an attribute"),
        pytest.param(
            Items([{"text": torch.zeros(3), "topic": torch.tensor(y)} for y in FOUR_LABELS]),
            "topic",
            id="a field",
        ),
        pytest.param(
            Items([SimpleNamespace(y=torch.tensor([y])) for y in FOUR_LABELS]),
            "y",
            id="an attribute of the samples",
        ),
    ],
)
def test_labels_are_read_from_a_list_an_attribute_or_a_field(source, labels):
    partitioner = DirichletPartitioner(2, alpha=1.0)
    data = set_up_data(source, partitioner, labels=labels, server_val=0.0)

    for client in range(2):
        expected = [FOUR_LABELS[index] for index in data.client_indices(client)]
        assert data.client_labels(client).tolist() == expected


MASKS = torch.ones(NUM_SAMPLES, 3, 3)


def as_tensors(*parts):
    return TensorDataset(*parts)


def as_samples(*parts):
    return Items(zip(*parts))


NUMBERS_OF_SAMPLES = torch.arange(NUM_SAMPLES)
#: Parts of samples, and the positions of those that may be labels. The labels are LABELS.
UNCLEAR_PARTS = {
    "late": ((X, MASKS, LABELS), "2"),
    "a number of the sample": ((X, LABELS, NUMBERS_OF_SAMPLES), "1, 2"),
    "a second input": ((X, NUMBERS_OF_SAMPLES[:, None], LABELS), "1, 2"),
}
LABELS_NEEDED = DirichletPartitioner(2, alpha=1.0)


@pytest.mark.parametrize("as_dataset", [as_tensors, as_samples])
@pytest.mark.parametrize("kind", UNCLEAR_PARTS)
def test_label_that_is_not_named_among_several_parts_of_a_sample_is_not_used(kind, as_dataset):
    parts, candidates = UNCLEAR_PARTS[kind]
    dataset = as_dataset(*parts)

    with refused(f"parts {candidates} of a sample are .* labels=2"):
        set_up_data(dataset, LABELS_NEEDED)

    without_labels = set_up_data(dataset, IIDPartitioner(2))
    assert f"the parts {candidates}" in without_labels.no_classes


@pytest.mark.parametrize("as_dataset", [as_tensors, as_samples])
@pytest.mark.parametrize("kind", UNCLEAR_PARTS)
def test_label_whose_position_among_parts_of_a_sample_is_named_is_used(kind, as_dataset):
    parts, _ = UNCLEAR_PARTS[kind]
    position = next(index for index, part in enumerate(parts) if part is LABELS)

    data = set_up_data(as_dataset(*parts), LABELS_NEEDED, labels=position)

    for client in range(2):
        samples = data.client_indices(client)
        assert data.client_labels(client).equal(LABELS[samples])


def check_that_there_are_no_classes(source, **options):
    data = set_up_data(source, IIDPartitioner(2), **options)
    assert data.num_classes == 1

    with pytest.raises(ConfigurationError):
        set_up_data(source, DirichletPartitioner(2, 1.0), **options)


NEGATIVE_IDENTIFIERS = [-1, *range(NUM_SAMPLES - 1)]
LARGE_IDENTIFIERS = [10**6, *[0] * (NUM_SAMPLES - 1)]


@pytest.mark.parametrize("identifiers", [NEGATIVE_IDENTIFIERS, LARGE_IDENTIFIERS])
def test_identifiers_are_no_classes(identifiers):
    check_that_there_are_no_classes(TensorDataset(X, torch.tensor(identifiers)))


def test_labels_false_leaves_class_labels_unread():
    check_that_there_are_no_classes(TensorDataset(X, torch.tensor(THREE_LABELS)), labels=False)


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param("topic", id="name"),
        pytest.param([-1] * NUM_SAMPLES, id="-1"),
        pytest.param(["cat"] * NUM_SAMPLES, id="text"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels):
    with refused("labels"):
        set_up_data(WITHOUT_CLASSES["texts"], IIDPartitioner(2), labels=labels)


@pytest.mark.parametrize(
    ("groups", "kind", "names"),
    [
        ([3, "0042", "-1.5"], "school", ("school 3", "school 0042", "school -1.5")),
        ([0, 1], "school", ("school 0", "school 1")),
        (["1", "2"], "site", ("site 1", "site 2")),
    ],
)
def test_numeric_group_names_get_the_kind_of_group_as_prefix(groups, kind, names):
    assert client_names_of(groups, kind) == names


def test_group_name_of_several_lines_becomes_one_line():
    assert client_names_of(["two\nlines\t"], "school") == ("two lines",)


@pytest.mark.parametrize("kind_without_meaning", ["group", "site"])
def test_numbers_of_groups_that_are_those_of_the_clients_get_no_prefix(kind_without_meaning):
    assert client_names_of([0, 1, 2], kind_without_meaning) == ("0", "1", "2")


def test_groups_are_read_from_an_attribute_a_name_or_a_list():
    hospitals = np.array(["b", "a", "c"])
    dataset = Items(PAIRS, groups=[7, 5, 7], hospital=hospitals)
    subset = Subset(dataset, [2, 1])

    # Groups are numbered in the order of their sorted names.
    assert groups_of(dataset) == [1, 0, 1]
    assert groups_of(dataset, "hospital") == [1, 0, 2]
    assert groups_of(dataset, torch.tensor([9, 9, 1])) == [1, 1, 0]
    assert groups_of(subset) == [1, 0]
    assert groups_of(subset, "hospital") == [1, 0]
    assert named_groups(Items(PAIRS)) == (None, ())


def groups_of(*arguments):
    groups, _ = named_groups(*arguments)
    return groups.tolist()


def test_groups_are_read_from_a_field_of_the_samples():
    first_sample = {"meta": {"clinic": 7}, "a.b": "7"}
    second_sample = {"meta": {"clinic": 3}, "a.b": "3"}
    dataset = Items([first_sample, second_sample])

    _, names_of_clinics = named_groups(dataset, "meta.clinic")
    groups, _ = named_groups(dataset, "a.b")

    assert names_of_clinics == ("clinic 3", "clinic 7")
    assert groups.tolist() == [1, 0]
    with refused("'meta.ward': Items has no attribute, and its samples have no field, of this"):
        named_groups(dataset, "meta.ward")


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(["a", None, "b"], id="text"),
        pytest.param([1.0, float("nan"), 2.0], id="numbers"),
        pytest.param([[0, 1]] * 3, id="two each"),
        pytest.param(torch.tensor(5), id="one for all"),
    ],
)
def test_groups_with_gaps_or_of_another_shape_are_refused(groups):
    with refused("none of them None or NaN"):
        named_groups(Items(PAIRS), groups)


@pytest.mark.parametrize(
    ("partitioner", "names"),
    [
        pytest.param(GroupPartitioner(2), ("0", "1"), id="several groups"),
        pytest.param(IIDPartitioner(3), ("0", "1", "2"), id="parts of groups"),
    ],
)
def test_clients_of_no_single_group_are_numbered(partitioner, names):
    wards = ["St Mary", "General", 'a/b "c"'] * 20

    data = set_up_data(HERE, partitioner, groups=wards)

    assert data.client_names == names


def test_client_names_tell_one_federation_from_another():
    data = set_up_data(clients={"Boston": HERE, "Ly/on": HERE})
    renamed = set_up_data(clients={"Boston": HERE, "Köln": HERE})
    identity = fit_identity({}, data)
    renamed_identity = fit_identity({}, renamed)
    (difference,) = renamed_identity.differences(identity)

    assert difference == "data.client_names is ['Boston', 'Köln'] and was ['Boston', 'Ly/on']"
