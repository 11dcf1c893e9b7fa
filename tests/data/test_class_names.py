"""Names are what classes mean: numbers beside names are refused, unless they are the names."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from flsv.data import IIDPartitioner
from flsv.data.labels import class_names_of
from helpers import refused
from helpers.data import HERE, DataModuleOfLoader, HuggingFace, Items, X, Y, set_up_data

SAMPLES_WITH_WORDS = (X, np.where(Y == 0, "ill", "well"))
SAMPLES_WITH_NUMBERS = (X, (Y > 0).astype(int))


def make_two_clients(samples, **options):
    """Return data of two clients with these samples."""
    return set_up_data(clients={"a": samples, "b": samples}, **options)


@pytest.mark.parametrize("offset", [0, 3])
def test_numbers_as_text_are_class_names(offset):
    numbers = np.arange(60) % 12 + offset
    texts = (X, numbers.astype(str))

    data = make_two_clients(texts, val=texts)

    names_in_order_of_numbers = [str(number) for number in range(offset, offset + 12)]
    assert list(data.class_names) == names_in_order_of_numbers
    with refused("'val' has no names"):
        make_two_clients(texts, val=(X, numbers))


def make_items(numbers=(0, 1), **attributes):
    """Samples of two classes with these numbers in turn."""
    targets = [*numbers] * 10
    samples = [(torch.zeros(4), label) for label in targets]
    return Items(samples, targets=targets, **attributes)


def make_named_tensors():
    tensors = TensorDataset(torch.zeros(2, 4), torch.arange(2))
    tensors.classes = ("ill", "well")
    return tensors


@pytest.mark.parametrize(
    ("samples_of_clients", "held_out", "message"),
    [
        (
            SAMPLES_WITH_WORDS,
            {"val": SAMPLES_WITH_NUMBERS},
            "'a' has the names ill, well, .*'val' has no names",
        ),
        (
            SAMPLES_WITH_NUMBERS,
            {"test": SAMPLES_WITH_WORDS},
            "'a' has no names, .*'test' has the names ill, well",
        ),
        (
            make_items(classes=["ill", "well"]),
            {"val": make_items(), "test": make_items(classes=["well", "ill"])},
            "'val' has no names, 'test' has the names well, ill",
        ),
    ],
)
def test_held_out_data_whose_class_numbers_may_mean_other_classes_are_refused(
    samples_of_clients, held_out, message
):
    with refused(message):
        make_two_clients(samples_of_clients, **held_out)


def test_client_without_the_class_names_of_another_client_is_refused():
    clients = {"a": make_items(classes=["ill", "well"]), "b": make_items()}

    with refused("'a' has the names ill, well, 'b' has no names"):
        set_up_data(clients=clients)


def test_class_names_of_clients_are_those_of_validation_samples_without_names():
    data = make_two_clients(make_items(classes=["ill", "well"]), val=make_items())

    assert data.class_names == ("ill", "well")


@pytest.mark.parametrize(
    "dataset",
    [
        make_items(class_to_idx={"well": 1, "ill": 0}, classes=["well", "ill"]),
        make_items(classes=["ill", "well"]),
        ConcatDataset([make_named_tensors(), make_named_tensors()]),
    ],
)
def test_names_are_read_wherever_data_sets_have_them(dataset):
    assert class_names_of(dataset) == ("ill", "well")


def test_two_names_of_one_class_number_are_not_used():
    dataset = make_items(class_to_idx={"well": 1, "fine": 1, "ill": 0})

    assert class_names_of(dataset) == ()


def test_concatenated_parts_with_different_names_are_refused():
    with refused("parts of a ConcatDataset have different names"):
        class_names_of(ConcatDataset([make_named_tensors(), make_items()]))


# ---- classes that a data module declares


@pytest.mark.parametrize(
    ("num_declared", "num_classes"),
    [pytest.param(5, 5, id="two without samples"), pytest.param(2, 3, id="fewer than there are")],
)
def test_classes_that_a_data_module_declares_are_used_if_they_have_all_labels(
    num_declared, num_classes
):
    source_of_three_classes = DataModuleOfLoader(DataLoader(HERE, batch_size=8, shuffle=True))
    source_of_three_classes.num_classes = num_declared

    data = set_up_data(source_of_three_classes, IIDPartitioner(3))

    assert data.class_counts.shape == (3, num_classes)
    assert data.class_counts[:, 3:].sum() == 0


def make_items_with_numbers(numbers_by_name):
    """Samples whose classes have such numbers, and all the same names in the same order."""
    return make_items(
        numbers=numbers_by_name.values(), classes=["ill", "well"], class_to_idx=numbers_by_name
    )


@pytest.mark.parametrize("numbers_at_b", [{"ill": 7, "well": 5}, {"ill": 6, "well": 8}])
def test_names_with_other_numbers_at_another_client_are_refused(numbers_at_b):
    clients = {
        "a": make_items_with_numbers({"ill": 5, "well": 7}),
        "b": make_items_with_numbers(numbers_at_b),
    }

    with refused("number their classes in different ways"):
        set_up_data(clients=clients)


@pytest.mark.parametrize("ordered", [False, True])
def test_pandas_categories_in_another_order_are_merged_by_their_names(ordered):
    words = ["ill", "well", "ill", "well"] * 5
    clients = {}
    for client, categories in {"a": ["ill", "well"], "b": ["well", "ill"]}.items():
        outcome = pd.Categorical(words, categories=categories, ordered=ordered)
        clients[client] = pd.DataFrame({"age": np.arange(20.0), "outcome": outcome})

    data = set_up_data(clients=clients, labels="outcome", server_val=0)

    assert data.client_labels(0).tolist() == data.client_labels(1).tolist()


def make_hugging_face(samples, names):
    """Return samples of a class feature with these names, every second one ill."""
    labels = [names.index("ill"), names.index("well")] * 10
    return HuggingFace({"sample": samples, "label": labels}, label=SimpleNamespace(names=names))


def make_clients_with_two_orders(samples):
    return {
        "a": make_hugging_face(samples, ["ill", "well"]),
        "b": make_hugging_face(samples, ["well", "ill"]),
    }


def test_table_with_classes_in_another_order_is_merged_by_names():
    clients = make_clients_with_two_orders([float(index) for index in range(20)])

    data = set_up_data(clients=clients, labels="label", server_val=0)

    assert data.class_names == ("ill", "well")
    assert data.client_labels(0).tolist() == data.client_labels(1).tolist()


def test_tokens_with_classes_in_another_order_are_refused():
    clients = make_clients_with_two_orders([[index, index + 1] for index in range(20)])

    with refused("'a' has the names ill, well, 'b' has"):
        set_up_data(clients=clients, labels="label")
