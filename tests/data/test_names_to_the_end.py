"""The names of clients, from the data to the last message."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from own_data import HERE, WORDS, Rows, X, Y, patients, ready
from torch.utils.data import Subset
from toys import fit, toy_sets

from flsv import FederatedLoop
from flsv.aggregation import FedAvg
from flsv.cli import main
from flsv.data import FederatedDataModule, GroupPartitioner, IIDPartitioner
from flsv.errors import ConfigurationError
from flsv.metrics import ClassSpecificShapley


def test_names_from_groups():
    wards = [["St Mary", "General", 'a/b "c"'][i % 3] for i in range(60)]
    assert ready(HERE, groups=wards).client_names == ("General", "St Mary", 'a/b "c"')
    assert ready(HERE, GroupPartitioner(2), groups=wards).client_names == ('General + a/b "c"', "St Mary")
    assert ready(HERE, groups=[i % 3 for i in range(60)]).client_names == ("0", "1", "2")
    assert ready(HERE, groups=[i % 3 + 7 for i in range(60)]).client_names == ("group 7", "group 8", "group 9")
    assert ready(Rows(ward=[i % 2 for i in range(30)]), groups="ward").client_names == ("ward 0", "ward 1")
    # Clients that have parts of groups are not called after them.
    assert ready(HERE, IIDPartitioner(3), groups=wards).client_names == ("0", "1", "2")


def test_describe_names_clients_and_classes():
    data = ready(clients={"Boston": (X, WORDS[Y]), "Lyon": (X, WORDS[Y])})
    assert data.describe()["client_names"] == "Boston, Lyon"
    assert data.describe()["class_names"] == "cat, dog, eel"
    assert data.describe()["source"] == "2 clients' data"
    assert str(data) == "FederatedDataModule(source=2 clients' data, partitioner=GroupPartitioner())"
    table = ready(clients={"a": patients(20, 1), "b": patients(20, 2)}, labels="ill")
    assert table.describe()["labels"] == "ill"
    assert "max_categories=50" in table.describe()["columns"]
    assert not {"client_names", "class_names", "labels"} & set(ready().describe())


def toy_clients(*names):
    train, _ = toy_sets()
    bounds = np.linspace(0, len(train), len(names) + 1).astype(int)
    return {name: Subset(train, range(*bounds[i : i + 2])) for i, name in enumerate(names)}


def test_metrics_and_files_have_the_names_and_a_renamed_client_is_refused(tmp_path):
    def loop():
        return FederatedLoop(aggregator=FedAvg(), metrics={"m": ClassSpecificShapley()}, seed=3)

    saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, filename="saved")]}
    names = ("Boston", "Ly/on", "Köln")
    first = loop()
    fit(
        first, tmp_path / "one", data=FederatedDataModule(clients=toy_clients(*names), batch_size=8), rounds=2, **saving
    )
    assert first.metrics["m"].client_names == names
    path = tmp_path / "saved.ckpt"
    again = loop()
    data = FederatedDataModule(clients=toy_clients(*names), batch_size=8)
    fit(again, tmp_path / "two", data=data, rounds=3, ckpt_path=path)
    whole = loop()
    fit(whole, tmp_path / "three", data=FederatedDataModule(clients=toy_clients(*names), batch_size=8), rounds=3)
    assert torch.equal(again.metrics["m"].compute(), whole.metrics["m"].compute())
    for other in (("Boston", "Paris", "Köln"), ("Ly/on", "Boston", "Köln")):
        data = FederatedDataModule(clients=toy_clients(*other), batch_size=8)
        with pytest.raises(
            ConfigurationError, match=r"data.client_names is \[.*\] and was \['Boston', 'Ly/on', 'Köln'\]"
        ):
            fit(loop(), tmp_path / "four", data=data, rounds=3, ckpt_path=path)


@pytest.mark.parametrize("form", ["folder", "clients", "column"])
def test_from_the_command_line(form, tmp_path, monkeypatch):
    """`flsv fit` with nothing but a folder, named files, or a file with a column for the clients."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    generator = np.random.default_rng(0)
    rows = []
    (tmp_path / "hospitals").mkdir()
    for name in ("Boston", "Lyon", "Köln Süd"):
        lines = [f"{generator.normal():.3f},{'fm'[i % 2]},{i % 2}" for i in range(30)]
        (tmp_path / "hospitals" / f"{name}.csv").write_text("\n".join(["age,sex,ill", *lines]), "utf-8")
        rows += [f"{line},{name}" for line in lines]
    (tmp_path / "all.csv").write_text("\n".join(["age,sex,ill,hospital", *rows]), "utf-8")
    ways = {
        "folder": ["--data.source", "hospitals"],
        "clients": [
            "--data.clients",
            "{" + ", ".join(f"{n}: 'hospitals/{n}.csv'" for n in ("Boston", "Köln Süd", "Lyon")) + "}",
        ],
        "column": ["--data.source", "all.csv", "--data.groups", "hospital", "--data.columns", "{features: [age, sex]}"],
    }
    quick = str(Path(__file__).parents[2] / "configs" / "digits.yaml")
    options = [
        "--trainer.max_epochs",
        "1",
        "--trainer.enable_progress_bar",
        "false",
        "--federation.reporting.table",
        "false",
    ]
    options += ["--trainer.enable_model_summary", "false", "--federation.reporting.figures", "0"]
    options += ["--trainer.default_root_dir", str(tmp_path), "--data.labels", "ill", "--data.partitioner", "null"]
    assert main(["fit", "--config", quick, *options, *ways[form]]) in (0, None)
    (written,) = tmp_path.rglob("contributions.csv")
    with written.open(encoding="utf-8") as file:
        clients = {row["client"] for row in csv.DictReader(file)}
    assert len(clients) == 3
    (hparams,) = tmp_path.rglob("hparams.yaml")
    assert "Boston, Köln Süd, Lyon" in hparams.read_text("utf-8").replace("\\xF6", "ö").replace("\\xFC", "ü")
