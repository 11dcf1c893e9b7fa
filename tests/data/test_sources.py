"""Where samples come from: arrays, data sets, clients by name, Parquet files, other people's data modules and kinds."""

import sys
from pathlib import Path

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from flsv.cli import main
from flsv.data.sources.open_source import module_source
from flsv.data.sources.source_data import array_set
from helpers import refused, warns
from helpers.data import HERE, WORDS, Frame, X, Y, set_up_data

ONES = np.ones((3, 2))
#: Of arrays of pixels, each with its number of channels.
SHAPES_OF_PIXELS = {
    "gray": ((2, 8, 6), 1),
    "channels last": ((2, 8, 6, 3), 3),
    "channels first": ((2, 3, 8, 6), 3),
    "one channel": ((2, 1, 8, 6), 1),
}


@pytest.mark.parametrize("kind", SHAPES_OF_PIXELS)
def test_pixels_are_read_with_their_channels_and_named_as_images(kind, caplog):
    shape, num_channels = SHAPES_OF_PIXELS[kind]
    pixels = np.full(shape, 51, np.uint8)
    with caplog.at_level("INFO", "lightning.pytorch"):
        (images,) = array_set(pixels).tensors

    assert images.shape == (2, num_channels, 8, 6)
    assert images.max().item() == pytest.approx(51 / 255)
    assert f"{list(shape)} are read as images" in caplog.text


def test_pixels_whose_channels_are_first_or_last_are_refused():
    pixels = np.zeros((2, 3, 8, 3), np.uint8)
    message = "second or the last dimension"
    with refused(message):
        array_set(pixels)


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (ONES, torch.float32),
        (ONES[::-1], torch.float32),
        (ONES.astype(bool), torch.float32),
        (ONES.astype(">f4"), torch.float32),  # big-endian
        (ONES.astype(np.int32), torch.int64),
    ],
)
def test_arrays_of_inputs_become_tensors_of_torchs_dtypes(x, dtype):
    (inputs,) = array_set(x).tensors

    assert inputs.dtype == dtype
    assert inputs.tolist() == [[1, 1]] * 3


@pytest.mark.parametrize(
    ("y", "labels"),
    [
        (np.array([[1], [0], [2]]), [1, 0, 2]),
        ([True, False, True], [1, 0, 1]),
        ([0.5, 1, 2], [0.5, 1, 2]),
        (np.array(["well", "ill", "well"], object), [1, 0, 1]),
    ],
)
def test_arrays_of_labels_become_a_vector(y, labels):
    x = torch.ones(3, 2, dtype=torch.float64)

    data = array_set(x, y)

    assert data.tensors[1].tolist() == labels
    assert getattr(data, "classes", ("ill", "well")) == ("ill", "well")


@pytest.mark.parametrize(
    "y",
    [
        pytest.param([0.5, np.nan, 1.0], id="numbers"),
        pytest.param(np.array(["a", None, "b"], object), id="words"),
    ],
)
def test_labels_with_gaps_are_refused(y):
    message = r"\(X, y\): y has the type .*none of them NaN or infinite"

    with refused(message):
        array_set(np.zeros((3, 1)), y)


def test_data_sets_by_client_give_each_client_its_own_samples():
    boston = HERE
    first_row_of_lyon = 30
    lyon = Subset(HERE, list(range(first_row_of_lyon, len(HERE))))

    data = set_up_data(clients={"Boston": boston, "Lyon": lyon}, client_val=0.1)

    assert data.client_names == ("Boston", "Lyon")
    assert len(data.server_val_indices) == 0.1 * (len(boston) + len(lyon))
    # The samples are one after the other, Boston's first.
    assert max(data.client_indices(0).tolist()) < len(boston)

    x, y = next(iter(data.client_loader(1, shuffle=False)))
    positions_at_lyon = data.client_indices(1)[: len(x)] - len(boston)
    rows = positions_at_lyon + first_row_of_lyon
    inputs, labels = HERE.tensors
    assert torch.equal(x, inputs[rows])
    assert torch.equal(y, labels[rows])


def test_class_numbers_of_all_clients_follow_from_the_class_names():
    names_of_samples = WORDS[Y]  # cat, dog and eel in turn
    data = set_up_data(
        clients={"a": (X, names_of_samples), "b": (X[:9], ["eel"] * 9)},
        test=(X[:4], ["dog", "cat", "dog", "cat"]),
        server_val=0.0,
    )

    assert data.class_names == ("cat", "dog", "eel")

    first_counts, second_counts = data.class_counts.tolist()
    samples_of_class = len(X) // 3
    assert first_counts == [samples_of_class] * 3
    assert second_counts == [0, 0, 9]

    ((_, test_labels),) = data.test_dataloader()
    assert test_labels.tolist() == [1, 0, 1, 0]


TABLE_OF_PATIENTS = Frame(age=[*range(40)], sex=[*"fm"] * 20, ill=[0, 1] * 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": {"a": HERE}}, "data of at least 2 clients, as a dictionary"),
        ({"clients": {"a": HERE, "b": HERE}, "source": "mnist"}, "without source and groups"),
        ({"clients": {"a": HERE, "b": (X[:0], Y[:0])}}, "client 'b': the data set has no samples"),
        ({"clients": {"a": HERE, "b": (X[:, :3], Y)}}, "those of 'a' .*those of 'b' "),
        ({"clients": {"a": HERE, "a ": HERE}}, "The clients' names are .* have to be different"),
        (
            {"source": HERE, "val": DataLoader(HERE)},
            "val: .* Instead of a DataLoader, give loader.dataset",
        ),
        ({"source": "mnist"}, "data.files.download true"),
        ({"source": (X[:4], Y[:4])}, "gives the clients 1, 1, 1, 1, 0 of 4 samples"),
        ({"source": HERE, "max_samples": 12, "client_test": 0.9}, "Client 0 has [23] samples"),
        (
            {"source": TABLE_OF_PATIENTS},
            "Frame is a table, so set labels to the column to predict. Its columns are age, sex, ill",
        ),
        (
            {"source": TABLE_OF_PATIENTS, "labels": "ill", "groups": "ill"},
            "'ill' .groups. is also the target",
        ),
        (
            {"source": TABLE_OF_PATIENTS, "labels": "sex", "dictionary": {"task": "regression"}},
            "in the target 'sex', expected a number",
        ),
    ],
)
def test_data_with_wrong_options_are_refused(options, message, tmp_path):
    with refused(message):
        set_up_data(**{"server_val": 0.0, "root": str(tmp_path), **options})


#: The only sample of the last of 61 goes to the server by the first seed, and stays with its client by the second.
SEED_THAT_TAKES_IT = 2
SEED_THAT_LEAVES_IT = 0


def test_validation_split_that_takes_all_samples_of_a_client_is_refused():
    clients = {"a": HERE, "Lyon": (X[:1], Y[:1])}

    data = set_up_data(clients=clients, server_val=0.5, seed=SEED_THAT_LEAVES_IT)
    assert data.num_clients == 2

    with refused("No training sample is left at 'Lyon'. All of them are in the server"):
        set_up_data(clients=clients, server_val=0.5, seed=SEED_THAT_TAKES_IT)


def test_group_that_the_validation_split_takes_is_no_client():
    two_parts = ConcatDataset([HERE, HERE])
    with warns("No training sample is left at 'c'"):
        data = set_up_data(
            Subset(two_parts, range(61)),
            groups=[*"ab"] * 30 + ["c"],
            server_val=0.5,
            seed=SEED_THAT_TAKES_IT,
        )

    assert data.client_names == ("a", "b")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(HERE, id="data set"),
        pytest.param((X, Y), id="arrays"),
        pytest.param([torch.tensor(X), pd.Series(Y)], id="tensor and series"),
    ],
)
def test_val_and_test_data_are_added_to_any_source(source):
    data = set_up_data(source, val=(X[:5], Y[:5]), test=(X[:6], Y[:6]))

    assert len(data.server_val_indices) == 0
    assert sum(len(y) for _, y in data.val_dataloader()) == 5
    assert sum(len(y) for _, y in data.test_dataloader()) == 6


def test_second_of_two_sources_is_test_data():
    data = set_up_data((HERE, (X[:6], Y[:6])))

    assert sum(len(y) for _, y in data.test_dataloader()) == 6


@pytest.fixture
def table_file(tmp_path):
    """A file of forty patients."""
    path = tmp_path / "all.csv"
    columns = {"age": range(40), "ward": ["a", "b"] * 20, "ill": [0, 1, 0, 0] * 10}
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


def test_column_of_a_table_file_names_the_clients(table_file):
    data = set_up_data(table_file, labels="ill", groups="ward")
    assert data.client_names == ("a", "b")

    with_test_file = set_up_data((table_file, table_file), labels="ill", groups="ward")
    assert with_test_file.client_names == ("a", "b")


def test_rows_of_a_table_file_are_divided_by_a_list_of_groups(table_file):
    groups_of_rows = [row % 3 for row in range(40)]

    data = set_up_data(table_file, labels="ill", groups=groups_of_rows)

    assert data.num_clients == 3


def test_broken_parquet_file_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "broken.parquet"
    path.write_bytes(b"PAR1, and no more")

    with refused("broken.parquet cannot be read as a Parquet file"):
        set_up_data(path, labels="ill", groups="ward")


def write_parquet_of_wards(path):
    """A table of ninety patients in the wards a, b and c."""
    age = np.random.default_rng(0).normal(50, 10, 90)
    table = pd.DataFrame()
    table["patient"] = range(90)
    table["age"] = age
    table["ward"] = ["a", "b", "c"] * 30
    table["ill"] = np.where(age > 52, "yes", "no")
    table.to_parquet(path)


@pytest.mark.slow
def test_example_of_a_parquet_file_prints_a_row_of_each_ward(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pyarrow")
    write_parquet_of_wards(tmp_path / "wards.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flsv"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    example = Path(__file__).parents[2] / "examples" / "parquet.yaml"

    exit_code = main(
        [
            *("fit", "--config", str(example)),
            *("--data.files.root", str(tmp_path)),
            *("--trainer.max_epochs", "1"),
            *("--trainer.enable_progress_bar", "false"),
        ]
    )

    assert exit_code == 0
    first_words = [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {"a", "b", "c"} <= set(first_words)


TWENTY_SAMPLES = TensorDataset(torch.zeros(20, 3), torch.arange(20) % 4)


class ReturnsLoader(L.LightningDataModule):
    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return self.loader


def test_options_of_a_wrapped_loader_are_kept():
    def collate(samples):
        return samples

    loader = DataLoader(
        TWENTY_SAMPLES,
        batch_size=6,
        shuffle=True,
        collate_fn=collate,
        num_workers=2,
        drop_last=True,
    )
    source = module_source(ReturnsLoader(loader))

    assert source.indices is None
    assert source.train_options == {
        "batch_size": 6,
        "drop_last": True,
        "collate_fn": collate,
        "num_workers": 2,
        "pin_memory": False,
        "worker_init_fn": None,
    }
    assert source.eval_options == {**source.train_options, "drop_last": False}


def test_subset_sampler_of_a_wrapped_loader_selects_samples():
    loader = DataLoader(TWENTY_SAMPLES, batch_size=2, sampler=SubsetRandomSampler([1, 4, 9]))

    assert module_source(ReturnsLoader(loader)).indices.tolist() == [1, 4, 9]


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (RandomSampler(TWENTY_SAMPLES, replacement=True), " RandomSampler, but flsv shuffles"),
        (SequentialSampler(TWENTY_SAMPLES), "does not shuffle samples"),
    ],
)
def test_order_of_a_wrapped_loader_that_is_not_used_has_a_warning(sampler, message):
    loader = DataLoader(TWENTY_SAMPLES, batch_size=2, sampler=sampler)

    with warns(message):
        module_source(ReturnsLoader(loader))


class BatchesAreTasks(BatchSampler):
    """Every batch is a task of its own."""


BATCHES_ARE_TASKS = BatchesAreTasks(SequentialSampler(TWENTY_SAMPLES), 2, drop_last=False)


class DoublesInputs(DataLoader):
    """Yields something else than its data set holds."""

    def __iter__(self):
        return ((2 * x, y) for x, y in super().__iter__())


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (DataLoader(TWENTY_SAMPLES, batch_size=None), "DataLoader"),
        ([DataLoader(TWENTY_SAMPLES), DataLoader(TWENTY_SAMPLES)], "list"),
        (
            DataLoader(
                TWENTY_SAMPLES,
                batch_sampler=BatchesAreTasks(SequentialSampler(TWENTY_SAMPLES), 2, False),
            ),
            "DataLoader",
        ),
        (DoublesInputs(TWENTY_SAMPLES, 4), "DoublesInputs"),
    ],
)
def test_wrapped_loaders_whose_samples_cannot_be_divided_are_refused(loader, name):
    with refused(f"training loader is a {name} whose samples cannot be divided"):
        module_source(ReturnsLoader(loader))


def test_validation_loaders_of_a_wrapped_module_are_used_as_they_are():
    module = ReturnsLoader(DataLoader(TWENTY_SAMPLES))
    loader = DoublesInputs(TWENTY_SAMPLES, 4)
    module.val_dataloader = lambda: loader

    assert module_source(module).val_loaders is loader
