"""Names are what classes mean: numbers beside names are refused, unless they are the names."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, TensorDataset

from flsv.data.labels import class_names_of
from flsv.utilities.errors import ConfigurationError
from helpers.data import HuggingFace, Items, X, Y, set_up_data

WORDS = (X, np.where(Y == 0, "ill", "well"))
NUMBERS = (X, (Y > 0).astype(int))
TWELVE_CLASSES = np.arange(60) % 12


def make_two_clients(samples, **options):
    """Return data of two clients with these samples."""
    return set_up_data(clients={"a": samples, "b": samples}, **options)


def validation_labels(data):
    labels = []
    for _, labels_of_batch in data.val_dataloader():
        labels += labels_of_batch.tolist()
    return labels


def make_texts(numbers):
    return X, numbers.astype(str)


@pytest.mark.parametrize("pos_label", [None, "ill", "well"])
@pytest.mark.parametrize("argument", ["val", "test"])
def test_numbers_beside_the_clients_words_are_refused(argument, pos_label):
    message = f"'{argument}' has numbers .*ill, well"
    with pytest.raises(ConfigurationError, match=message):
        make_two_clients(WORDS, pos_label=pos_label, **{argument: NUMBERS})
    make_two_clients(WORDS, pos_label=pos_label, **{argument: WORDS})


def test_words_beside_the_clients_numbers_are_refused():
    message = "'val' has names for its classes .*ill, well"
    with pytest.raises(ConfigurationError, match=message):
        make_two_clients(NUMBERS, val=WORDS)


def test_a_client_with_numbers_beside_another_with_words_is_refused():
    message = "'b' has no names for its classes"
    with pytest.raises(ConfigurationError, match=message):
        set_up_data(clients={"a": WORDS, "b": NUMBERS})


@pytest.mark.parametrize("offset", [0, 3])
def test_numbers_as_text_are_numbers(offset):
    numbers = TWELVE_CLASSES + offset
    texts = make_texts(numbers)
    names = tuple(map(str, range(offset, offset + 12)))

    for val in (texts, (X, numbers)):
        data = make_two_clients(texts, val=val)
        assert data.class_names == names
        assert validation_labels(data) == TWELVE_CLASSES.tolist()


def test_text_of_numbers_beside_the_clients_numbers_is_the_same_number():
    samples = (X, TWELVE_CLASSES)
    data = make_two_clients(samples, val=make_texts(TWELVE_CLASSES))
    assert validation_labels(data) == TWELVE_CLASSES.tolist()


def test_number_that_no_name_equals_is_refused():
    samples = make_texts(TWELVE_CLASSES + 3)
    message = "'val' has the label 0, .* 3, 4, 5"
    with pytest.raises(ConfigurationError, match=message):
        make_two_clients(samples, val=(X, TWELVE_CLASSES))


def make_items(**attributes):
    samples = []
    for index in range(20):
        samples.append((torch.zeros(4), index % 2))
    targets = [label for _, label in samples]
    return Items(samples, targets=targets, **attributes)


def make_named_tensors():
    tensors = TensorDataset(torch.zeros(2, 4), torch.arange(2))
    tensors.classes = ("ill", "well")
    return tensors


def make_hugging_face():
    label = SimpleNamespace(names=["ill", "well"])
    columns = {"x": [0.0, 1.0], "label": [0, 1]}
    return HuggingFace(columns, label=label)


@pytest.mark.parametrize(
    "dataset",
    [
        make_items(class_to_idx={"well": 1, "ill": 0}),
        make_items(classes=["ill", "well"]),
        make_hugging_face(),
        ConcatDataset([make_named_tensors(), make_named_tensors()]),
    ],
)
def test_names_are_found_wherever_data_sets_have_them(dataset):
    assert class_names_of(dataset) == ("ill", "well")


def test_names_that_do_not_belong_to_numbers_are_none():
    two_names = {"well": 1, "fine": 1, "ill": 0}
    assert class_names_of(make_items(class_to_idx=two_names)) == ()

    parts = [make_named_tensors(), make_items()]
    message = "parts of a ConcatDataset have different names"

    with pytest.raises(ConfigurationError, match=message):
        class_names_of(ConcatDataset(parts))


def test_numbers_of_class_to_idx_are_those_of_the_samples():
    numbers = {"ill": 1, "well": 0}
    dataset = make_items(classes=["ill", "well"], class_to_idx=numbers)
    data = make_two_clients(dataset)
    assert data.class_names == ("well", "ill")
