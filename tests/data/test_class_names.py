"""Names are what classes mean: numbers beside names are refused, unless they are the names."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from flsv.data import IIDPartitioner
from flsv.data.labels import class_names_of
from flsv.tables import Dictionary
from flsv.tables.merger import merge
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


# ---- the order of classes that data declare


WORDS = ["ill", "well", "well"] * 20
ARROW_CATEGORIES = "dictionary<values=string, indices=int32, ordered=0>[pyarrow]"


def make_hugging_face(samples, names):
    """Return samples of a class feature with these names, every second one ill."""
    labels = [names.index("ill"), names.index("well")] * 10
    return HuggingFace({"sample": samples, "label": labels}, label=SimpleNamespace(names=names))


def make_categories(order=("well", "ill"), ordered=False):
    return pd.Categorical(WORDS, categories=order, ordered=ordered)


def make_frame(outcome):
    return pd.DataFrame({"age": np.arange(60.0), "outcome": outcome})


def make_parquet_file(folder, outcome):
    path = folder / "visits.parquet"
    make_frame(outcome).to_parquet(path)
    return path


def make_arrow_series():
    pyarrow = pytest.importorskip("pyarrow")
    categories = pd.ArrowDtype(pyarrow.dictionary(pyarrow.int32(), pyarrow.string()))
    return pd.Series(make_categories()).astype(categories)


def make_arrow_table():
    return pytest.importorskip("pyarrow").Table.from_pandas(make_frame(make_categories()))


@pytest.mark.parametrize(
    ("make_source", "options"),
    [
        pytest.param(lambda _: make_frame(make_categories()), {"labels": "outcome"}, id="pandas"),
        pytest.param(
            lambda _: make_frame(make_categories(ordered=True)), {"labels": "outcome"}, id="ordered"
        ),
        pytest.param(
            lambda folder: make_parquet_file(folder, make_categories()),
            {"labels": "outcome"},
            id="parquet",
        ),
        pytest.param(
            lambda _: make_frame(make_arrow_series()), {"labels": "outcome"}, id="pandas of Arrow"
        ),
        pytest.param(lambda _: make_arrow_table(), {"labels": "outcome"}, id="Arrow"),
        pytest.param(
            lambda _: make_hugging_face([*map(float, range(20))], ["well", "ill"]),
            {"labels": "label"},
            id="table of Hugging Face",
        ),
        pytest.param(
            lambda _: make_hugging_face([[index] for index in range(20)], ["well", "ill"]),
            {"labels": "label"},
            id="tokens of Hugging Face",
        ),
        pytest.param(lambda _: (X, make_categories()), {}, id="arrays"),
        pytest.param(lambda _: (X, make_arrow_series()), {}, id="arrays of Arrow"),
        pytest.param(lambda _: make_items(classes=["well", "ill"]), {}, id="data set"),
        pytest.param(
            lambda _: make_frame(WORDS),
            {"labels": "outcome", "dictionary": {"classes": ["well", "ill"]}},
            id="data dictionary",
        ),
    ],
)
def test_order_of_classes_that_data_declare_is_kept(tmp_path, make_source, options):
    data = set_up_data(make_source(tmp_path), IIDPartitioner(2), **options)

    assert data.class_names == ("well", "ill")


def test_words_without_a_declared_order_are_sorted():
    data = set_up_data(make_frame(WORDS), IIDPartitioner(2), labels="outcome")

    assert data.class_names == ("ill", "well")


def test_numbers_as_categories_in_the_order_of_pandas_are_sorted_by_value():
    outcome = pd.Series(["9", "10"] * 30).astype("category")

    data = set_up_data(make_frame(outcome), IIDPartitioner(2), labels="outcome")

    assert data.class_names == ("9", "10")


def test_undeclared_classes_come_after_the_declared_ones():
    clients = {
        "a": make_frame(make_categories()),
        "b": make_frame(["dead", "ill", "well"] * 20),
        "c": make_frame(["dead", "ill", "well"] * 20),
    }

    data = set_up_data(clients=clients, labels="outcome", server_val=0)

    assert data.class_names == ("well", "ill", "dead")


TWO_TABLES = {
    "a": make_frame(make_categories()),
    "b": make_frame(make_categories(("ill", "well"))),
}


def make_clients_with_two_orders(samples):
    return {
        "a": make_hugging_face(samples, ["ill", "well"]),
        "b": make_hugging_face(samples, ["well", "ill"]),
    }


@pytest.mark.parametrize(
    ("clients", "options"),
    [
        (TWO_TABLES, {"labels": "outcome"}),
        (
            make_clients_with_two_orders([float(index) for index in range(20)]),
            {"labels": "label"},
        ),
        ({"a": (X, make_categories()), "b": (X, make_categories(("ill", "well")))}, {}),
    ],
)
def test_contradicting_orders_of_clients_are_refused_unless_the_positive_class_is_named(
    clients, options
):
    with refused("'well', 'ill' at .; 'ill', 'well' at .|'ill', 'well' at .; 'well', 'ill' at ."):
        set_up_data(clients=clients, server_val=0, **options)

    data = set_up_data(clients=clients, server_val=0, pos_label="well", **options)

    assert data.class_names == ("ill", "well")
    assert data.client_labels(0).tolist() == data.client_labels(1).tolist()


@pytest.mark.parametrize("classes_at_b", [["well"], ["ill", "well"]])
def test_merged_dictionaries_keep_the_order_of_classes_or_are_refused(classes_at_b):
    dictionaries = {
        "a": Dictionary("outcome", classes=("well", "ill"), class_counts=(40, 20)),
        "b": Dictionary(
            "outcome", classes=tuple(classes_at_b), class_counts=(9,) * len(classes_at_b)
        ),
    }

    if classes_at_b == ["well"]:
        merged, _ = merge(dictionaries)
        assert merged.classes == ("well", "ill")
    else:
        with refused("'well', 'ill' at a; 'ill', 'well' at b"):
            merge(dictionaries)


def test_tokens_with_classes_in_another_order_are_refused():
    clients = make_clients_with_two_orders([[index, index + 1] for index in range(20)])

    with refused("'a' has the names ill, well, 'b' has"):
        set_up_data(clients=clients, labels="label")
