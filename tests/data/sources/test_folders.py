"""A folder per client: images in class folders, CSV files; and folders that are none of it."""

import shutil

import numpy as np
import pytest
import torch
from data_options import grouped
from PIL import Image

from flsv.data import DirichletPartitioner, FederatedDataModule, GroupPartitioner, load_image_data
from flsv.errors import ConfigurationError

CLIENTS = {
    "Boston": {"cat": 6, "dog": 4},
    "Lyon": {"dog": 8},
    "clinic 10": {"cat": 5},
    "clinic 2": {"eel": 5, "dog": 1},
}


def draw(folder, number, value):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        Image.fromarray(np.full((6, 6, 3), value, np.uint8)).save(folder / f"{index}.png")


def images(root, clients=CLIENTS):
    """A class is told by its brightness."""
    for client, classes in clients.items():
        for name, number in classes.items():
            draw(root / client / name, number, {"cat": 0, "dog": 51, "eel": 102}[name])
    return root


def tables(root, clients=("Boston", "Lyon", "Köln Süd"), inside=False, rows=20):
    rng = np.random.default_rng(0)
    for place, client in enumerate(clients):
        lines = [f"{rng.normal() + place:.4f},{'fm'[i % 2]},{i % 2 if place else 1}" for i in range(rows)]
        path = root / client / "patients.csv" if inside else root / f"{client}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["age,sex,ill", *lines]), "utf-8")
    return root


def ready(*args, **kwargs):
    data = FederatedDataModule(*args, **grouped({"image_size": 4, "server_val": 0.0, **kwargs}))
    data.setup("fit")
    return data


def test_images_by_client_have_one_numbering(tmp_path):
    (images(tmp_path) / "README.txt").write_text("photographs")
    data = ready(str(tmp_path))
    assert data.client_names == ("Boston", "clinic 2", "clinic 10", "Lyon")
    assert data.class_names == ("cat", "dog", "eel")
    assert data.class_counts.tolist() == [[6, 4, 0], [0, 1, 5], [5, 0, 0], [0, 8, 0]]
    assert isinstance(data.partitioner, GroupPartitioner)
    for client in range(4):
        for x, y in data.client_loader(client):
            torch.testing.assert_close(x[:, 0, 0, 0], 0.2 * y)


def test_what_the_server_has_of_its_own(tmp_path):
    images(tmp_path, {**CLIENTS, "test": {"dog": 3}, "val": {"cat": 2, "eel": 2}})
    data = ready(str(tmp_path), server_val=0.1)
    assert data.num_clients == 4
    assert len(data.server_val_indices) == 0
    assert torch.cat([y for _, y in data.val_dataloader()]).tolist() == [0, 0, 2, 2]
    assert torch.cat([y for _, y in data.test_dataloader()]).tolist() == [1, 1, 1]
    with pytest.raises(ConfigurationError, match="the source has test data of its own"):
        ready(str(tmp_path), test=(torch.zeros(2, 3, 4, 4), [0, 1]))
    images(tmp_path, {"test": {"cat": 1}})
    (tmp_path / "test" / "cat").rename(tmp_path / "test" / "yak")
    with pytest.raises(ConfigurationError, match="test data have classes that no client has: yak"):
        ready(str(tmp_path))


def test_images_without_splits(tmp_path):
    images(tmp_path)
    data = load_image_data(str(tmp_path / "Boston"), image_size=4)
    assert (data.class_names, len(data.train), data.val, data.test) == (("cat", "dog"), 10, None, None)
    federated = ready(str(tmp_path / "Boston"), server_val=0.2, partitioner=DirichletPartitioner(2, alpha=9.0))
    assert (federated.num_clients, federated.class_names) == (2, ("cat", "dog"))
    with pytest.raises(ConfigurationError, match="has no test data"):
        federated.test_dataloader()
    assert ready(str(tmp_path / "Boston")).num_clients == 5


@pytest.mark.parametrize("inside", [False, True])
def test_tables_by_client(tmp_path, inside):
    tables(tmp_path, inside=inside)
    data = ready(str(tmp_path), labels="ill", client_test=0.2)
    assert data.client_names == ("Boston", "Köln Süd", "Lyon")
    assert data.class_counts.sum(1).tolist() == [16, 16, 16]
    assert data.class_counts[0].tolist() == [0, 16]  # one class only
    assert data.input_shape == (3,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: draw(p / "Lyon2", 2, 0), "has Boston, .*What can be read"),
        (lambda p: (p / "Paris").mkdir(), "client 'Paris': .*Paris' was not found, or cannot be read"),
        (lambda p: tables(p), "has Boston, .*What can be read"),
        (lambda p: tables(p, ["Paris"], inside=True), "client 'Paris'.*needs labels|say labels|is a table"),
        (lambda p: draw(p / "deep" / "train" / "cat", 1, 0), "client 'deep': .*was not found, or cannot be read"),
        (lambda p: draw(p / "Lyon" / "deep" / "cat", 1, 0), "client 'Lyon': .*was not found, or cannot be read"),
        (
            lambda p: [shutil.rmtree(each) for each in p.iterdir()],
            "has nothing, of .*What can be",
        ),
        (lambda p: [shutil.rmtree(p / name) for name in CLIENTS if name != "Lyon"], "fall into 1 groups"),
    ],
)
def test_refused_folders(tmp_path, change, message):
    change(images(tmp_path))
    with pytest.raises(ConfigurationError, match=message):
        ready(str(tmp_path))


def test_other_ways_to_say_whose_they_are_are_refused(tmp_path):
    images(tmp_path)
    with pytest.raises(
        ConfigurationError, match="DirichletPartitioner.* would deal them anew. Leave the partitioner out"
    ):
        ready(str(tmp_path), DirichletPartitioner(2, alpha=1.0))
    with pytest.raises(ConfigurationError, match="which says whose the samples are. Leave groups out"):
        ready(str(tmp_path), groups="ward")
    assert ready(str(tmp_path), GroupPartitioner(2)).client_names == ("Boston + clinic 2", "clinic 10 + Lyon")
