"""Where samples come from: arrays, data sets, clients by name, Parquet files, other people's data modules and kinds."""

import re
import sys
from pathlib import Path

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
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from flsv import FederatedDataModule
from flsv.cli import main
from flsv.data import Loader, Splits
from flsv.data.sources.open_source import module_source
from flsv.data.sources.source_data import array_set
from helpers import refused, warns
from helpers.data import HERE, DataModuleOfLoader, Frame, X, Y, set_up_data

ONES = np.ones((3, 2))


@pytest.mark.parametrize(
    ("shape", "image_shape"),
    [
        pytest.param((2, 8, 6), (2, 1, 8, 6), id="gray"),
        pytest.param((2, 8, 6, 3), (2, 3, 8, 6), id="channels last"),
        pytest.param((2, 3, 8, 6), (2, 3, 8, 6), id="channels first"),
        pytest.param((2, 1, 8, 6), (2, 1, 8, 6), id="one channel"),
    ],
)
def test_pixels_are_read_with_their_channels_and_named_as_images(shape, image_shape, caplog):
    pixels = np.full(shape, 51, np.uint8)

    with caplog.at_level("INFO", "lightning.pytorch"):
        (images,) = array_set(pixels).tensors

    assert images.shape == image_shape
    assert images.max().item() == pytest.approx(51 / 255)
    assert f"{list(shape)} are read as images" in caplog.text


def test_pixels_whose_channels_may_be_first_or_last_are_refused():
    pixels = np.zeros((2, 3, 8, 3), np.uint8)

    with refused("second or the last dimension"):
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
    _, vector = array_set(ONES, y).tensors

    assert vector.tolist() == labels


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


def make_numbered_samples(numbers):
    """Samples whose inputs are their numbers."""
    inputs = torch.tensor(numbers)
    return TensorDataset(inputs[:, None].float(), inputs % 3)


def test_data_sets_by_client_give_each_client_its_own_samples():
    numbers_of_clients = [range(60), range(100, 130)]
    boston, lyon = map(make_numbered_samples, numbers_of_clients)

    data = set_up_data(clients={"Boston": boston, "Lyon": lyon}, client_val=0.1)

    assert data.client_names == ("Boston", "Lyon")
    assert len(data.server_val_indices) == 0.1 * (60 + 30)
    for client in range(2):
        for inputs, labels in data.client_loader(client):
            numbers = inputs.flatten().long()
            assert set(numbers.tolist()) <= set(numbers_of_clients[client])
            assert torch.equal(labels, numbers % 3)


def test_class_numbers_of_all_clients_follow_from_the_class_names():
    boston_words = ["dog", "cat", "eel"] * 20
    lyon_words = ["eel"] * 60
    test_words = ["dog", "cat", "dog", "cat"]

    data = set_up_data(
        clients={"Boston": (X, boston_words), "Lyon": (X, lyon_words)},
        test=(X[:4], test_words),
        server_val=0.0,
    )

    cat, dog, _ = range(3)
    assert data.class_names == ("cat", "dog", "eel")
    assert data.class_counts.tolist() == [[20, 20, 20], [0, 0, 60]]
    ((_, test_labels),) = data.test_dataloader()
    assert test_labels.tolist() == [dog, cat, dog, cat]


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
            {"source": HERE, "val": [DataLoader(HERE)]},
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


#: Of 61 samples the last goes to the server by the first seed, and stays with its client by the second.
SEED_THAT_TAKES_THE_LAST_SAMPLE = 2
SEED_THAT_LEAVES_THE_LAST_SAMPLE = 0
SIXTY_SAMPLES = HERE
ONE_SAMPLE = TensorDataset(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))


def test_validation_split_that_takes_all_samples_of_a_client_is_refused():
    clients = {"Boston": SIXTY_SAMPLES, "Lyon": ONE_SAMPLE}

    data = set_up_data(clients=clients, server_val=0.5, seed=SEED_THAT_LEAVES_THE_LAST_SAMPLE)
    assert data.num_clients == 2

    with refused("No training sample is left at 'Lyon'. All of them are in the server"):
        set_up_data(clients=clients, server_val=0.5, seed=SEED_THAT_TAKES_THE_LAST_SAMPLE)


def test_group_that_the_validation_split_takes_is_no_client():
    samples = ConcatDataset([SIXTY_SAMPLES, ONE_SAMPLE])
    group_of_each_sample = ["Boston", "Graz"] * 30 + ["Lyon"]

    with warns("No training sample is left at 'Lyon'"):
        data = set_up_data(
            samples,
            groups=group_of_each_sample,
            server_val=0.5,
            seed=SEED_THAT_TAKES_THE_LAST_SAMPLE,
        )

    assert data.client_names == ("Boston", "Graz")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(HERE, id="data set"),
        pytest.param((X, Y), id="arrays"),
        pytest.param([torch.tensor(X), pd.Series(Y)], id="tensor and series"),
    ],
)
def test_val_and_test_data_are_added_to_any_source(source):
    five_samples = (X[:5], Y[:5])
    six_samples = (X[:6], Y[:6])

    data = set_up_data(source, val=five_samples, test=six_samples)

    ((_, validation_labels),) = data.val_dataloader()
    ((_, test_labels),) = data.test_dataloader()
    assert len(data.server_val_indices) == 0
    assert len(validation_labels) == 5
    assert len(test_labels) == 6


@pytest.fixture
def table_file(tmp_path):
    """A file of forty patients."""
    path = tmp_path / "all.csv"
    columns = {"age": range(40), "ward": ["a", "b"] * 20, "ill": [0, 1, 0, 0] * 10}
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


@pytest.mark.parametrize("has_test_file", [False, True])
def test_column_of_a_table_file_names_the_clients(table_file, has_test_file):
    source = (table_file, table_file) if has_test_file else table_file

    data = set_up_data(source, labels="ill", groups="ward")

    assert data.client_names == ("a", "b")


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
    ages = np.random.default_rng(0).normal(50, 10, 90)
    columns = {
        "patient": range(90),
        "age": ages,
        "ward": ["a", "b", "c"] * 30,
        "ill": np.where(ages > 52, "yes", "no"),
    }
    pd.DataFrame(columns).to_parquet(path)


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
    printed = capsys.readouterr().out
    for ward in ("a", "b", "c"):
        assert f"\n{ward} " in printed


TWENTY_SAMPLES = TensorDataset(torch.zeros(20, 3), torch.arange(20) % 4)


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
    source = module_source(DataModuleOfLoader(loader))

    expected_options = {
        "batch_size": 6,
        "collate_fn": collate,
        "num_workers": 2,
        "pin_memory": False,
        "worker_init_fn": None,
    }
    assert source.indices is None
    assert source.train_options == {**expected_options, "drop_last": True}
    assert source.eval_options == {**expected_options, "drop_last": False}


def test_subset_sampler_of_a_wrapped_loader_selects_samples():
    loader = DataLoader(TWENTY_SAMPLES, batch_size=2, sampler=SubsetRandomSampler([1, 4, 9]))

    assert module_source(DataModuleOfLoader(loader)).indices.tolist() == [1, 4, 9]


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
        module_source(DataModuleOfLoader(loader))


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: FederatedDataModule(drop_last=True), "loader=Loader(drop_last=...)"),
        (lambda: FederatedDataModule(server_val=0.2), "splits=Splits(server_val=...)"),
        (lambda: Loader(batch_size=8), "batch_size=..."),
        (lambda: Splits(root="here"), "files=Files(root=...)"),
    ],
)
def test_error_for_an_option_in_the_wrong_place_names_its_place(make, place):
    with pytest.raises(TypeError, match=re.escape(f": FederatedDataModule({place}).")):
        make()


class BatchSamplerOfUser(BatchSampler):
    """Chooses by its own code which samples are together in a batch."""


class DoublesInputs(DataLoader):
    """Yields something else than its data set holds."""

    def __iter__(self):
        return ((2 * x, y) for x, y in super().__iter__())


OWN_BATCHES = BatchSamplerOfUser(SequentialSampler(TWENTY_SAMPLES), batch_size=2, drop_last=False)


@pytest.mark.parametrize(
    ("loader", "description"),
    [
        (DataLoader(TWENTY_SAMPLES, batch_size=None), "a DataLoader without batches"),
        ([DataLoader(TWENTY_SAMPLES), DataLoader(TWENTY_SAMPLES)], "a list"),
        (
            DataLoader(TWENTY_SAMPLES, batch_sampler=OWN_BATCHES),
            "a DataLoader with a batch_sampler of its own .BatchSamplerOfUser",
        ),
        (DoublesInputs(TWENTY_SAMPLES, 4), "a DoublesInputs"),
    ],
)
def test_loaders_whose_samples_cannot_be_divided_are_refused(loader, description):
    with refused(f"training loader is {description}.*, whose samples cannot be divided"):
        module_source(DataModuleOfLoader(loader))
    with refused(f"client 'b': expected a torch DataLoader .* but got {description}"):
        set_up_data(clients={"a": DataLoader(TWENTY_SAMPLES), "b": loader}, server_val=0)


def collate_doubled(samples):
    inputs, labels = default_collate(samples)
    return 2 * inputs, labels


@pytest.mark.parametrize(
    "options", [{"batch_size": 7, "collate_fn": collate_doubled}, {"batch_sampler": OWN_BATCHES}]
)
@pytest.mark.parametrize(
    "options_of_clients",
    [
        {"source": TWENTY_SAMPLES},
        {"clients": [DataLoader(TWENTY_SAMPLES, batch_size=4)] * 2},
        {"clients": [TWENTY_SAMPLES] * 2},
    ],
)
def test_loaders_of_held_out_data_are_used_as_they_are(options, options_of_clients):
    loader = DataLoader(TensorDataset(torch.ones(14, 3), torch.arange(14) % 6), **options)

    data = set_up_data(**options_of_clients, val=loader, test=loader)

    assert data.val_dataloader() is loader
    assert data.test_dataloader() is loader
    assert data.validation() == {"of": "DataLoader", "rows": 14}
    assert len(data.server_val_indices) == 0
    assert data.num_classes == 6


def test_loader_of_validation_data_beside_tables_or_other_class_names_is_refused():
    loader = DataLoader(TWENTY_SAMPLES)

    with refused("'source' is a table, but 'the val data' is not"):
        set_up_data(TABLE_OF_PATIENTS, labels="ill", val=loader)
    with refused("'val' has no names"):
        set_up_data((X, np.where(Y == 0, "ill", "well")), val=loader)


def test_validation_loaders_of_a_wrapped_module_are_used_as_they_are():
    validation_loader = DoublesInputs(TWENTY_SAMPLES, 4)
    module = DataModuleOfLoader(DataLoader(TWENTY_SAMPLES))
    module.val_dataloader = lambda: validation_loader

    assert module_source(module).val_loaders is validation_loader
