"""Data sets of Hugging Face: samples are what ``dataset[i]`` returns, and classes have the names of ``features``."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from flsv.data import Splits
from helpers.data import set_up_data

datasets = pytest.importorskip(
    "datasets", reason="Hugging Face's package datasets is not installed"
)

NO_VALIDATION = Splits(server_val=0)


def make_dataset(columns, features):
    """A data set of 60 samples, well and ill in turn."""
    class_label = datasets.ClassLabel(names=["well", "ill"])
    return datasets.Dataset.from_dict(
        {**columns, "label": [0, 1] * 30},
        features=datasets.Features({**features, "label": class_label}),
    )


def make_table():
    columns = {
        "age": np.arange(60.0),
        "next_year": np.arange(60) / 2,
        "site": ["clinic 0", "clinic 1", "clinic 2"] * 20,
    }
    features = {
        "age": datasets.Value("float64"),
        "next_year": datasets.Value("float64"),
        "site": datasets.Value("string"),
    }
    return make_dataset(columns, features)


def make_texts():
    texts = [f"letter {index}" for index in range(60)]
    return make_dataset({"text": texts}, {"text": datasets.Value("string")})


def make_tokens():
    tokens = [[index, index + 1] for index in range(60)]
    features = {"tokens": datasets.List(datasets.Value("int64"))}
    return make_dataset({"tokens": tokens}, features).with_format("torch")


def age_alone(rows):
    return {"age": rows["age"], "label": rows["label"]}


# ---- tables


@pytest.mark.parametrize(
    "hide",
    [
        lambda dataset: dataset.with_format("torch", columns=["age", "label"]),
        lambda dataset: dataset.with_transform(age_alone),
        lambda dataset: dataset.remove_columns(["next_year", "site"]),
    ],
)
def test_hidden_column_is_no_feature(hide):
    data = set_up_data(hide(make_table()), labels="label")

    assert list(data.dictionary.columns) == ["age"]
    assert data.class_names == ("well", "ill")


def test_hidden_column_can_name_the_clients():
    dataset = make_table().with_format("numpy", columns=["age", "label"])

    data = set_up_data(dataset, labels="label", groups="site")

    assert data.client_names == ("clinic 0", "clinic 1", "clinic 2")
    assert list(data.dictionary.columns) == ["age"]


def swap_labels(rows):
    return {"age": rows["age"], "label": [1 - label for label in rows["label"]]}


def test_class_numbers_that_a_transform_of_a_table_makes_are_their_own_names():
    dataset = make_table().with_transform(swap_labels)

    data = set_up_data(dataset, labels="label", splits=NO_VALIDATION)

    assert data.class_names == ("0", "1")


# ---- samples


@pytest.mark.parametrize("make", [make_texts, make_tokens])
def test_samples_of_texts_and_tokens_are_dictionaries_with_classes(make):
    data = set_up_data(make(), labels="label", splits=NO_VALIDATION)

    first_batch = next(iter(data.client_loader(0)))
    assert set(first_batch) == {"label", *make().column_names}
    assert data.class_names == ("well", "ill")
    assert data.class_counts.sum(0).tolist() == [30, 30]


def test_parts_of_a_concatenation_name_their_classes():
    sixty_samples = make_tokens()
    ten_samples = Subset(sixty_samples, range(10))
    dataset = ConcatDataset([sixty_samples, ten_samples])

    data = set_up_data(dataset, labels="label", splits=NO_VALIDATION)

    assert data.class_names == ("well", "ill")
    assert data.class_counts.sum(0).tolist() == [30 + 5, 30 + 5]


def collate_to_lengths(samples):
    return torch.tensor([len(sample["text"]) for sample in samples])


def test_client_loaders_of_texts_keep_their_collate_fn():
    loader = DataLoader(make_texts(), batch_size=60, collate_fn=collate_to_lengths)

    data = set_up_data(clients=[loader, loader], labels="label", splits=NO_VALIDATION)

    (lengths,) = data.client_loader(0)
    assert set(lengths.tolist()) == {len("letter 7"), len("letter 17")}


class DecodesImages:
    """A transform that counts the rows whose images it has decoded."""

    num_decoded = 0

    def __call__(self, rows):
        num_rows = len(rows["label"])
        self.num_decoded += num_rows
        return {**rows, "image": [torch.zeros(2, 2)] * num_rows}


def test_groups_and_labels_are_read_without_decoding_other_columns():
    decode = DecodesImages()
    dataset = make_table().with_transform(decode)

    data = set_up_data(dataset, labels="label", groups="site")

    assert data.client_names == ("clinic 0", "clinic 1", "clinic 2")
    assert decode.num_decoded < len(dataset)


def swap_labels_of_images(rows):
    return {**swap_labels(rows), "image": [torch.zeros(2, 2)] * len(rows["label"])}


def test_labels_that_a_transform_changes_are_those_of_the_samples():
    dataset = make_table().with_transform(swap_labels_of_images)

    data = set_up_data(dataset, labels="label", splits=NO_VALIDATION)

    ill_and_well_in_turn = [1, 0] * 30
    assert data.division.classes.labels.tolist() == ill_and_well_in_turn
    assert data.class_names == ("0", "1")
