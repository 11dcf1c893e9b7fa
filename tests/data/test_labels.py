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
    labels = [5, 6, 7, 8]
    last_second_and_first = Subset(make_dataset(labels), [3, 1, 0])
    last_and_first = Subset(last_second_and_first, [0, 2])

    assert dataset_labels(last_second_and_first).tolist() == [8, 6, 5]
    assert dataset_labels(last_and_first).tolist() == [8, 5]


def test_labels_of_concatenated_sets_follow_each_other():
    tensors = make_dataset([5, 6])
    last_and_first_pair = Subset(Items(PAIRS, targets=[3, 1, 2]), [2, 0])

    concatenation = ConcatDataset([tensors, last_and_first_pair])

    assert dataset_labels(concatenation).tolist() == [5, 6, 2, 3]


def subtract_1(label):
    return label - 1


def test_stored_labels_are_changed_by_the_target_transform():
    dataset = Items(PAIRS, targets=[3, 1, 2], target_transform=subtract_1)

    assert dataset_labels(dataset).tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("names", "test", "num_classes"),
    [
        ((), None, 3),
        (("a", "b", "c", "d"), None, 4),
        ((), make_dataset([2, 2]), 3),
        ((), make_dataset([0, 3]), 4),
        pytest.param((), Items(PAIRS), 3, id="samples that are not read"),
    ],
)
def test_number_of_classes_covers_names_and_labels_of_training_and_test_data(
    names, test, num_classes
):
    training_labels = torch.arange(30) % 3

    assert count_classes(training_labels, names, held_out={"test": test}) == num_classes


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("large_label", [1000, 2**62])
def test_class_label_far_above_the_number_of_classes_is_refused(split, large_label):
    num_classes = 10
    labels = {"train": torch.arange(30) % num_classes, "test": torch.arange(30) % num_classes}
    labels[split][4] = large_label
    test = TensorDataset(torch.zeros(30, 2), labels["test"])

    message = f"The largest label is {large_label}, but there are only {num_classes + 1} different"
    with refused(message):
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
    data = set_up_data(WITHOUT_CLASSES[kind], SizePartitioner([1, 2, 3]), server_val=0.2)

    assert data.num_classes == 1
    assert data.class_names == ("samples",)
    assert data.no_classes
    assert data.class_counts.flatten().tolist() == data.num_samples.tolist()
    categories = [warning.category for warning in recwarn]
    assert UserWarning not in categories


THREE_LABELS = [i % 3 for i in range(NUM_SAMPLES)]
LABELS = torch.tensor(THREE_LABELS)
IS_POSITIVE = LABELS > 0


@pytest.mark.parametrize(
    ("dataset", "labels", "names"),
    [
        pytest.param(TensorDataset(X, LABELS), LABELS, ("0", "1", "2"), id="tensors"),
        pytest.param(TensorDataset(X, IS_POSITIVE), IS_POSITIVE.long(), ("0", "1"), id="booleans"),
        pytest.param(Items(zip(X, THREE_LABELS)), LABELS, ("0", "1", "2"), id="read"),
        pytest.param(Items(X, targets=THREE_LABELS), LABELS, ("0", "1", "2"), id="stored"),
    ],
)
@pytest.mark.parametrize("components", [(), ("somebody",)])
def test_integer_labels_are_classes_even_if_no_component_needs_them(
    dataset, labels, names, components
):
    classes = find_classes(
        dataset, class_names=(), held_out={}, labels=None, parts_that_need_classes=components
    )

    assert torch.equal(classes.labels, labels)
    assert classes.names == names
    assert classes.missing_reason is None


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
    need = rf"{name}\(.*\) needs the class of each sample\. .* has no class labels: "
    where_labels_are_found = ".*second part of each sample .x, y.*attribute `targets`.*labels="
    with refused(need + where_labels_are_found):
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
NUMBERS_OF_SAMPLES = torch.arange(NUM_SAMPLES)
LABELS_NEEDED = DirichletPartitioner(2, alpha=1.0)


def make_items_of(*columns):
    return Items(zip(*columns))


#: Columns of samples, the positions of those that may be labels, and the position of the labels.
THREE_PARTS = {
    "label after a mask": ((X, MASKS, LABELS), "2", 2),
    "number after the label": ((X, LABELS, NUMBERS_OF_SAMPLES), "1, 2", 1),
    "two inputs": ((X, NUMBERS_OF_SAMPLES[:, None], LABELS), "1, 2", 2),
}


@pytest.mark.parametrize("make_dataset", [TensorDataset, make_items_of])
@pytest.mark.parametrize("kind", THREE_PARTS)
def test_label_among_three_parts_of_samples_is_not_used_unless_it_is_named(kind, make_dataset):
    columns, candidates, _ = THREE_PARTS[kind]
    dataset = make_dataset(*columns)

    with refused(f"parts {candidates} of a sample are .* labels=2"):
        set_up_data(dataset, LABELS_NEEDED)

    data = set_up_data(dataset, IIDPartitioner(2))
    assert f"the parts {candidates}" in data.no_classes


@pytest.mark.parametrize("make_dataset", [TensorDataset, make_items_of])
@pytest.mark.parametrize("kind", THREE_PARTS)
def test_label_among_three_parts_of_samples_is_used_by_its_position(kind, make_dataset):
    columns, _, position_of_label = THREE_PARTS[kind]

    data = set_up_data(make_dataset(*columns), LABELS_NEEDED, labels=position_of_label)

    for client in range(2):
        samples = data.client_indices(client)
        assert data.client_labels(client).equal(LABELS[samples])


def assert_no_classes(source, **options):
    data = set_up_data(source, IIDPartitioner(2), **options)
    assert data.num_classes == 1

    with pytest.raises(ConfigurationError):
        set_up_data(source, LABELS_NEEDED, **options)


NEGATIVE_IDENTIFIERS = [-1, *range(NUM_SAMPLES - 1)]
LARGE_IDENTIFIERS = [10**6, *[0] * (NUM_SAMPLES - 1)]


@pytest.mark.parametrize("identifiers", [NEGATIVE_IDENTIFIERS, LARGE_IDENTIFIERS])
def test_identifiers_are_no_classes(identifiers):
    assert_no_classes(TensorDataset(X, torch.tensor(identifiers)))


def test_labels_false_leaves_class_labels_unread():
    assert_no_classes(TensorDataset(X, LABELS), labels=False)


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


GROUPED = Items(PAIRS, groups=[7, 5, 7], hospital=np.array(["b", "a", "c"]))
LAST_TWO_GROUPED = Subset(GROUPED, [1, 2])


# Groups are numbered in the order of their sorted names.
@pytest.mark.parametrize(
    ("dataset", "groups", "expected"),
    [
        (GROUPED, None, [1, 0, 1]),
        (GROUPED, "hospital", [1, 0, 2]),
        (GROUPED, torch.tensor([9, 9, 1]), [1, 1, 0]),
        (LAST_TWO_GROUPED, None, [0, 1]),
        (LAST_TWO_GROUPED, "hospital", [0, 1]),
    ],
)
def test_groups_are_read_from_an_attribute_a_name_or_a_list(dataset, groups, expected):
    numbers, _ = named_groups(dataset, groups)

    assert numbers.tolist() == expected


def test_data_set_without_groups_has_none():
    assert named_groups(Items(PAIRS)) == (None, ())


@pytest.mark.parametrize(
    ("field", "names"),
    [
        pytest.param("meta.clinic", ("clinic 3", "clinic 7"), id="in another field"),
        pytest.param("a.b", ("b 3", "b 7"), id="with a point in its name"),
    ],
)
def test_groups_are_read_from_a_field_of_the_samples(field, names):
    first_sample = {"meta": {"clinic": 7}, "a.b": "7"}
    second_sample = {"meta": {"clinic": 3}, "a.b": "3"}

    numbers, names_of_groups = named_groups(Items([first_sample, second_sample]), field)

    assert names_of_groups == names
    assert numbers.tolist() == [1, 0]


def test_groups_of_an_unknown_field_are_refused():
    with refused("'meta.ward': Items has no attribute, and its samples have no field, of this"):
        named_groups(Items([{"meta": {"clinic": 7}}]), "meta.ward")


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
def test_clients_that_are_not_one_group_each_are_numbered(partitioner, names):
    wards_of_samples = ["St Mary", "General", 'a/b "c"'] * 20

    data = set_up_data(HERE, partitioner, groups=wards_of_samples)

    assert data.client_names == names


def test_client_names_tell_one_federation_from_another():
    data = set_up_data(clients={"Boston": HERE, "Ly/on": HERE})
    renamed_data = set_up_data(clients={"Boston": HERE, "Köln": HERE})

    identity = fit_identity({}, data)
    (difference,) = fit_identity({}, renamed_data).differences(identity)

    assert difference == "data.client_names is ['Boston', 'Köln'] and was ['Boston', 'Ly/on']"
