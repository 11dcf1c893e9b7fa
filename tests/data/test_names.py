"""Groups, and the names of clients, from the data to the last message."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from data_options import ready
from lightning.pytorch.callbacks import ModelCheckpoint
from own_data import HERE, WORDS, Items, X, Y, patients, rows
from torch.utils.data import Subset
from toys import Plain, fit, network, toy_sets

from flsv import FederatedLoop
from flsv.aggregation import FedAvg
from flsv.cli import main
from flsv.data import FederatedDataModule, GroupPartitioner, IIDPartitioner
from flsv.data.groups import named_groups, names_of_parts, plain_names
from flsv.errors import ConfigurationError
from flsv.metrics import ClassSpecificShapley

PAIRS = [(torch.zeros(2), label) for label in (3, 1, 2)]


def test_groups_by_attribute_name_list_and_field():
    dataset = Items(PAIRS, groups=[7, 5, 7], hospital=np.array(["b", "a", "c"]))
    assert named_groups(dataset)[0].tolist() == [1, 0, 1]
    assert named_groups(dataset, "hospital")[0].tolist() == [1, 0, 2]
    assert named_groups(dataset, torch.tensor([9, 9, 1]))[0].tolist() == [1, 1, 0]
    assert named_groups(Subset(dataset, [2, 1]), "hospital")[0].tolist() == [1, 0]
    assert named_groups(Items(PAIRS)) == (None, ())
    for gaps in (["a", None, "b"], [1.0, float("nan"), 2.0]):
        with pytest.raises(ConfigurationError, match="none of them None or NaN"):
            named_groups(Items(PAIRS), gaps)
    fields = Items([{"x": torch.zeros(2), "meta": {"clinic": number}, "a.b": str(number)} for number in (7, 3)])
    assert named_groups(fields, "meta.clinic")[1] == ("clinic 3", "clinic 7")
    assert named_groups(fields, "a.b")[0].tolist() == [1, 0]
    with pytest.raises(ConfigurationError, match="groups='meta.ward': Items and its samples have no such field"):
        named_groups(fields, "meta.ward")


def test_a_number_is_no_name():
    names = ("school 3", "school 0042", "school -1.5", "two lines")
    assert plain_names([3, "0042", "-1.5", "two\nlines\t"], "school") == names
    assert plain_names(["1", "2"], "site") == ("site 1", "site 2")
    assert plain_names([0, 1, 2], "group") == ("0", "1", "2")  # these are the clients' numbers
    assert plain_names([0, 1, 2], "school") == ("school 0", "school 1", "school 2")


def test_clients_of_several_groups():
    groups = torch.arange(8).repeat(2)
    parts = [torch.tensor([0, 8]), torch.tensor([1, 2]), torch.tensor([3, 4, 5]), torch.tensor([6, 7, 14, 9, 10])]
    names = ("a", "b", "c", "d", "e", "f", "g", "h")
    assert names_of_parts(parts, groups, names) == ("a", "b + c", "d + e + f", "b + c + g + 1 more")
    # A group that is called as another two are together.
    both = ("b + c", "b + c (1)")
    assert names_of_parts([torch.tensor([0]), torch.tensor([1, 2])], groups, ("b + c", "b", "c")) == both


def test_names_from_groups():
    wards = [["St Mary", "General", 'a/b "c"'][i % 3] for i in range(60)]
    assert ready(HERE, groups=wards).client_names == ("General", "St Mary", 'a/b "c"')
    assert ready(HERE, GroupPartitioner(2), groups=wards).client_names == ('General + a/b "c"', "St Mary")
    assert ready(rows(ward=[i % 2 for i in range(30)]), groups="ward").client_names == ("ward 0", "ward 1")
    # Clients that have parts of groups are not called after them.
    assert ready(HERE, IIDPartitioner(3), groups=wards).client_names == ("0", "1", "2")


def test_describe_names_clients_and_classes():
    data = ready(clients={"Boston": (X, WORDS[Y]), "Lyon": (X, WORDS[Y])})
    facts = {"client_names": "Boston, Lyon", "class_names": "cat, dog, eel", "source": "2 clients' data"}
    assert facts.items() <= data.describe().items()
    assert str(data) == "FederatedDataModule(source=2 clients' data, partitioner=GroupPartitioner())"
    table = ready(clients={"a": patients(20, 1), "b": patients(20, 2)}, labels="ill")
    assert table.describe()["labels"] == "ill"
    assert "max_categories=50" in table.describe()["columns"]
    assert not {"client_names", "class_names", "labels"} & set(ready().describe())


def toy_clients(*names):
    train, _ = toy_sets()
    size = len(train) // len(names)
    parts = {name: Subset(train, range(i * size, (i + 1) * size)) for i, name in enumerate(names)}
    return FederatedDataModule(clients=parts, batch_size=12)


def test_metrics_and_files_have_the_names_and_a_renamed_client_is_refused(tmp_path):
    saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, filename="saved")]}
    first = FederatedLoop(FedAvg(), {"m": ClassSpecificShapley()}, seed=3)
    plain = Plain(network(batch_norm=False))
    fit(first, tmp_path / "one", plain, toy_clients("Boston", "Ly/on", "Köln"), rounds=1, **saving)
    assert first.metrics["m"].client_names == ("Boston", "Ly/on", "Köln")
    other = FederatedLoop(FedAvg(), {"m": ClassSpecificShapley()}, seed=3)
    with pytest.raises(ConfigurationError, match=r"client_names is \[.*\] and was \['Boston', 'Ly/on', 'Köln'\]"):
        fit(other, tmp_path, plain, toy_clients("Boston", "Paris", "Köln"), ckpt_path=tmp_path / "saved.ckpt")


def test_named_files_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    names = ("Boston", "Köln Süd", "Lyon")
    for place, name in enumerate(names):
        lines = [f"{place + i / 7},{'fm'[i % 2]},{i % 2}" for i in range(30)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,sex,ill", *lines]), "utf-8")
    given = ["--data.clients", f"{{{', '.join(f'{name}: {name}.csv' for name in names)}}}"]
    given += ["--data.labels", "ill", "--data.partitioner", "null", "--trainer.default_root_dir", str(tmp_path)]
    quick = ["--config", str(Path(__file__).parents[2] / "configs" / "digits.yaml"), "--trainer.max_epochs", "1"]
    quick += ["--federation.reporting.table", "false", "--federation.reporting.figures", "0"]
    assert main(["fit", *quick, *given]) in (0, None)
    (written,) = tmp_path.rglob("contributions.csv")
    with written.open(encoding="utf-8") as file:
        assert {row["client"] for row in csv.DictReader(file)} == {"0", "1", "2"}
    (hparams,) = tmp_path.rglob("hparams.yaml")
    assert "Boston, Köln Süd, Lyon" in hparams.read_text("utf-8").replace("\\xF6", "ö").replace("\\xFC", "ü")
