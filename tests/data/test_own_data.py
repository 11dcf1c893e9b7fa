"""A user's own data by client, and the names of clients from the data to the last message."""

import csv
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from frames import Frame
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset, Subset, TensorDataset
from toys import Plain, fit, toy_sets, trainer_for

from flsv import FederatedLoop
from flsv.aggregation import FedAvg
from flsv.cli import main
from flsv.data import (
    Columns,
    DirichletPartitioner,
    FederatedDataModule,
    GroupPartitioner,
    IIDPartitioner,
    OneClient,
    TableData,
)
from flsv.engines.remote.data import RemoteData
from flsv.errors import ConfigurationError
from flsv.metrics import ClassSpecificShapley
from flsv.server.fingerprint import check_same, fingerprint

ROOT = os.environ.get("FLSV_DATA_ROOT")
X = np.random.default_rng(0).normal(size=(60, 4))
Y = np.arange(60) % 3
WORDS = np.array(["cat", "dog", "eel"])
HERE = TensorDataset(torch.tensor(X).float(), torch.tensor(Y))


def ready(*args, **kwargs):
    data = FederatedDataModule(*args, **kwargs)
    data.setup("fit")
    return data


class Rows(Dataset):
    """Samples that are not held as tensors."""

    def __init__(self, length=30, **attributes):
        self.length = length
        self.__dict__.update(attributes)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((4,), float(index)), index % 3


# Clients by name


def test_data_sets_by_client():
    data = ready(clients={"Boston": HERE, "Lyon": Subset(HERE, list(range(30, 60)))}, client_val_fraction=0.1)
    assert data.client_names == ("Boston", "Lyon")
    assert data.num_clients == 2
    assert len(data.server_val_indices) == 9
    # The samples are one after the other, and nobody has another's.
    assert all(index < 60 for index in data.client_indices(0).tolist())
    assert all(index >= 60 for index in data.client_indices(1).tolist())
    x, y = next(iter(data.client_loader(1, shuffle=False)))
    rows = data.client_indices(1)[: len(x)] - 60 + 30
    assert torch.equal(x, HERE.tensors[0][rows])
    assert torch.equal(y, HERE.tensors[1][rows])


def test_the_same_samples_with_groups_train_the_same():
    by_client = ready(clients={"b": HERE, "a": Subset(HERE, list(range(20)))})
    both = TensorDataset(
        torch.cat([HERE.tensors[0], HERE.tensors[0][:20]]), torch.cat([HERE.tensors[1], HERE.tensors[1][:20]])
    )
    grouped = ready(both, GroupPartitioner(), groups=[0] * 60 + [1] * 20)
    for client in range(2):
        assert torch.equal(by_client.client_indices(client), grouped.client_indices(client))
        for mine, theirs in zip(by_client.client_loader(client), grouped.client_loader(client)):
            assert all(map(torch.equal, mine, theirs))


def test_data_sets_that_are_no_tensors():
    data = ready(clients={"a": Rows(30), "b": HERE, "c": Rows(9)}, server_val_fraction=0.0)
    assert data.num_samples.tolist() == [30, 60, 9]
    assert data.class_counts[2].tolist() == [3, 3, 3]


def test_classes_have_one_numbering():
    data = ready(
        clients={"a": (X, WORDS[Y]), "b": (X[:9], ["eel"] * 9)},
        server_val_fraction=0.0,
        test=(X[:4], ["dog", "cat"] * 2),
    )
    assert data.class_names == ("cat", "dog", "eel")
    assert data.class_counts.tolist() == [[20, 20, 20], [0, 0, 9]]
    assert next(iter(data.test_dataloader()))[1].tolist() == [1, 0, 1, 0]


def test_named_classes_of_data_sets_are_numbered_anew_by_their_names():
    few = TensorDataset(torch.zeros(10, 4), torch.tensor([0, 1] * 5))
    few.classes = ("dog", "yak")
    whole = TensorDataset(*HERE.tensors)
    whole.classes = tuple(WORDS)
    data = ready(clients={"few": few, "whole": whole}, server_val_fraction=0.0)
    assert data.class_names == ("cat", "dog", "eel", "yak")
    assert data.class_counts.tolist() == [[0, 5, 0, 5], [20, 20, 20, 0]]
    assert few.tensors[1].tolist() == [0, 1] * 5  # the user's own
    with pytest.raises(ConfigurationError, match="labels of a Rows cannot be numbered anew"):
        ready(clients={"few": few, "rows": Rows(classes=("cat", "dog", "eel"))})
    with pytest.raises(ConfigurationError, match=r"'few' has names for its classes .* and 'here' has none"):
        ready(clients={"few": few, "here": HERE})
    few.classes = ("dog",)
    with pytest.raises(ConfigurationError, match=r"'few' has labels in 0 \.\. 1, and names for 1 classes: dog"):
        ready(clients={"few": few, "whole": whole})


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        ({"a": HERE}, {}, "clients has 1 entries: a federation needs at least 2"),
        ([HERE, HERE], {}, "clients: a list. Expected the clients' data by name"),
        ({"a": HERE, "b": HERE}, {"source": "mnist"}, "source=mnist and clients: give one of them"),
        ({"a": HERE, "b": HERE}, {"groups": [1, 2]}, "the names of clients say whose the samples are"),
        (
            {"a": HERE, "b": HERE},
            {"partitioner": IIDPartitioner(2)},
            r"by client \('a', 'b'\), and IIDPartitioner.* anew",
        ),
        ({"a": HERE, "b": HERE}, {"columns": Columns()}, "columns says .*: say label, the one to predict"),
        ({"a": HERE, "b": HERE}, {"label": "y", "labels": [0] * 120}, "the classes are in the column 'y'"),
        ({"a": HERE, "b": HERE}, {"label": "y"}, "label='y' names the column to predict of a table"),
        ({"a": HERE, "b": Frame(a=[1, 2], y=[0, 1])}, {"label": "y"}, "'b' is a table and 'a' is not .TensorDataset."),
        ({"a": HERE, "b": (X[:0], Y[:0])}, {}, "client 'b': there are no samples"),
        ({"a": HERE, "b": (X[:, :3], Y)}, {}, r"samples of 'a' are \(float32 \[4\].*those of 'b' \(float32 \[3\]"),
        ({"a": HERE, "b": None}, {}, "client 'b': a NoneType cannot be read as samples. Expected a map-style data set"),
        ({"a": HERE, "b": {"x": X}}, {}, "client 'b': a dict cannot be read"),
        ({"a": HERE, "b": iter([1])}, {}, "client 'b': a list_iterator cannot be read"),
        ({"a": HERE, "b": "digits"}, {}, "client 'b': 'digits' was not found: .*known by name are dealt as a whole"),
        ({"a": HERE, "b": FederatedDataModule()}, {}, "client 'b': a FederatedDataModule has training, validation and"),
        ({"a": HERE, "a ": HERE}, {}, "Two clients are called 'a'"),
        ({1: HERE, "1": HERE}, {}, "Two clients are called 'site 1'"),
        (
            {"a": HERE, "b": (X[:2], Y[:2])},
            {"client_val_fraction": 0.4, "client_test_fraction": 0.5},
            r"Client 1 \('b'\) has 2 samples, of which",
        ),
        (
            {"a": HERE, "b": (X[:2], Y[:2])},
            {"drop_last": True, "batch_size": 8},
            r"Client 1 \('b'\) has .* not one full",
        ),
    ],
)
def test_refused(clients, options, message):
    with pytest.raises(ConfigurationError, match=message):
        ready(clients=clients, server_val_fraction=0.0, **options)


def test_a_client_is_not_lost_to_the_servers_validation_set():
    clients = {"a": HERE, "Lyon": (X[:1], Y[:1])}
    lost = [seed for seed in range(30) if not _kept(clients, seed)]
    assert 3 < len(lost) < 27
    with pytest.raises(ConfigurationError, match="Nothing is left to 'Lyon': all their samples went to the server"):
        ready(clients=clients, server_val_fraction=0.5, seed=lost[0])
    both = TensorDataset(torch.cat([HERE.tensors[0], HERE.tensors[0]]), torch.cat([HERE.tensors[1]] * 2))
    with pytest.warns(UserWarning, match="Nothing is left to 'c'.* They are no clients"):
        data = ready(
            Subset(both, range(61)), groups=["a"] * 30 + ["b"] * 30 + ["c"], server_val_fraction=0.5, seed=lost[0]
        )
    assert data.client_names == ("a", "b")


def _kept(clients, seed):
    try:
        return ready(clients=clients, server_val_fraction=0.5, seed=seed).num_clients == 2
    except ConfigurationError:
        return False


# Names from groups


def test_names_from_groups():
    wards = [["St Mary", "General", 'a/b "c"'][i % 3] for i in range(60)]
    assert ready(HERE, groups=wards).client_names == ("General", "St Mary", 'a/b "c"')
    assert ready(HERE, GroupPartitioner(2), groups=wards).client_names == ('General + a/b "c"', "St Mary")
    assert ready(HERE, groups=[i % 3 for i in range(60)]).client_names == ("0", "1", "2")
    assert ready(HERE, groups=[i % 3 + 7 for i in range(60)]).client_names == ("group 7", "group 8", "group 9")
    assert ready(Rows(ward=[i % 2 for i in range(30)]), groups="ward").client_names == ("ward 0", "ward 1")
    # Clients that have parts of groups are not called after them.
    assert ready(HERE, IIDPartitioner(3), groups=wards).client_names == ("0", "1", "2")


def test_names_of_merged_groups_are_those_of_their_samples():
    wards = np.array([f"ward {i * i % 7}" for i in range(60)])
    data = ready(HERE, GroupPartitioner(2), groups=wards.tolist())
    for client, name in enumerate(data.client_names):
        held = set(wards[data.client_indices(client).tolist()])
        assert set(name.split(" + ")) <= held
    assert len({name for names in data.client_names for name in names.split(" + ")}) == len(set(wards))


def test_arrays_alone():
    data = ready((X, Y), DirichletPartitioner(2, alpha=5.0))
    assert (data.client_names, data.input_shape) == (("0", "1"), (4,))
    whole = ready(((X, WORDS[Y]), (X[:7], WORDS[Y[:7]])))
    assert whole.class_names == tuple(WORDS)
    assert sum(len(y) for _, y in whole.test_dataloader()) == 7
    with pytest.raises(ConfigurationError, match=r"X has 60 entries and y the shape \[50\]"):
        ready((X, Y[:50]))


def test_server_data_beside_any_source():
    data = ready(HERE, val=(X[:5], Y[:5]), test=(X[:6], Y[:6]))
    assert len(data.server_val_indices) == 0
    assert sum(len(y) for _, y in data.val_dataloader()) == 5
    assert sum(len(y) for _, y in data.test_dataloader()) == 6
    with pytest.raises(ConfigurationError, match="test: the source has test data of its own"):
        ready((HERE, HERE), test=HERE)
    with pytest.raises(
        ConfigurationError, match="label says how data are read, but a FederatedDataModule reads its own"
    ):
        ready(FederatedDataModule(), label="y")


def test_a_path_and_a_site(tmp_path):
    file = tmp_path / "all.csv"
    file.write_text("age,ward,ill\n" + "".join(f"{i},{'ab'[i % 2]},{i % 3 % 2}\n" for i in range(40)))
    assert ready(file, label="ill", groups="ward").client_names == ("a", "b")
    assert ready((file, file), label="ill", groups="ward").num_clients == 2
    assert ready(file, label="ill", groups=[i % 3 for i in range(40)]).num_clients == 3
    with pytest.raises(ConfigurationError, match="A table of one site alone cannot be encoded"):
        ready(file, OneClient(), label="ill")
    with pytest.raises(ConfigurationError, match="A table of one site alone cannot be encoded"):
        ready(TableData(str(file), "ill"), OneClient())
    with pytest.raises(ConfigurationError, match="the path of a file or a folder, arrays .X, y., a DataFrame"):
        ready(None)


def test_it_can_be_sent_to_another_process(tmp_path):
    data = ready(clients={"a": patients(20, 1), "b": patients(20, 2)}, label="ill")
    again = pickle.loads(pickle.dumps(data))
    assert again.client_names == ("a", "b")
    assert torch.equal(again._data.train.tensors[0], data._data.train.tensors[0])


def test_remote_data_have_the_sites_names():
    remote = RemoteData(["Boston", "Lyon"], [{"train": 3, "val": 0, "test": 0}] * 2)
    assert remote.client_names == ("Boston", "Lyon")
    with pytest.raises(PermissionError, match=r"samples of client 1 \('Lyon'\) are at its site"):
        iter(remote.client_loader(1))


# Tables: what the clients agree on


def patients(number, seed, shift=0.0):
    rng = np.random.default_rng(seed)
    return Frame(
        age=(rng.normal(50 + shift, 9, number)).tolist(),
        ward=[["A", "B", f"only {seed}"][i % 3] for i in range(number)],
        ill=(np.arange(number) % 2).tolist(),
    )


def test_statistics_of_training_rows_are_what_the_clients_would_send():
    """Counts, sums, sums of squares and sets of categories of each client's training rows give the same features."""
    clients = {"Boston": patients(30, 1), "Lyon": patients(50, 2, 20.0), "Köln": patients(20, 3, -5.0)}
    data = ready(
        clients=clients,
        label="ill",
        server_val_fraction=0.2,
        client_val_fraction=0.1,
        client_test_fraction=0.1,
        test=patients(10, 4),
    )
    ages = np.concatenate([np.array(frame["age"]) for frame in clients.values()])
    wards = np.concatenate([np.array(frame["ward"]) for frame in clients.values()])
    messages = []
    for client in range(3):
        x = ages[data.client_indices(client).numpy()]
        messages.append((len(x), x.sum(), (x * x).sum(), set(wards[data.client_indices(client).numpy()])))
    count, total, squares = (sum(message[i] for message in messages) for i in range(3))
    mean = total / count
    deviation = np.sqrt(squares / count - mean**2)
    categories = sorted(set().union(*(message[3] for message in messages)))
    expected = np.column_stack([(ages - mean) / deviation, *(wards == category for category in categories)])
    features = data._data.train.tensors[0]
    np.testing.assert_allclose(features.numpy(), expected, atol=1e-6)
    assert categories == ["A", "B", "only 1", "only 2", "only 3"]
    assert data._data.test.tensors[0].shape == (10, 6)
    assert data._data.test.tensors[0][:, 0].mean().item() == pytest.approx(
        float((np.array(patients(10, 4)["age"]) - mean).mean() / deviation), abs=1e-5
    )


def test_what_nobody_trains_on_changes_no_feature():
    clients = {"Boston": patients(30, 1), "Lyon": patients(50, 2)}
    options = {"label": "ill", "server_val_fraction": 0.2, "client_test_fraction": 0.2}
    before = ready(clients=clients, **options)
    held = torch.cat([before.server_val_indices, before.client_indices(0, "test"), before.client_indices(1, "test")])
    for row in held.tolist():
        frame, place = (clients["Boston"], row) if row < 30 else (clients["Lyon"], row - 30)
        frame["age"][place] = 1e6
    after = ready(clients=clients, **options)
    for client in range(2):
        rows = before.client_indices(client)
        assert torch.equal(after.client_indices(client), rows)
        assert torch.equal(after._data.train.tensors[0][rows], before._data.train.tensors[0][rows])
    assert after._data.train.tensors[0][held, 0].min() > 1e3


def test_each_clients_own_statistics():
    clients = {"Boston": patients(30, 1), "Lyon": patients(50, 2, 100.0)}
    columns = Columns(statistics="group", features=["age"])
    data = ready(clients=clients, label="ill", columns=columns)
    for client in range(2):
        x = data._data.train.tensors[0][data.client_indices(client), 0]
        assert x.mean().item() == pytest.approx(0, abs=1e-5)
        assert x.std(unbiased=False).item() == pytest.approx(1, abs=1e-5)
    with pytest.raises(ConfigurationError, match="the val and test data are no client's"):
        ready(clients=clients, label="ill", columns=columns, test=patients(9, 3))


def test_a_standardised_target_is_fitted_to_training_rows():
    clients = {"Boston": patients(30, 1), "Lyon": patients(50, 2, 100.0)}
    columns = Columns(task="regression", standardise_target=True, exclude=["ill"])
    data = ready(clients=clients, label="age", columns=columns, server_val_fraction=0.3)
    y = data._data.train.tensors[1][torch.cat([data.client_indices(0), data.client_indices(1)])]
    assert y.mean().item() == pytest.approx(0, abs=1e-5)
    assert y.std(unbiased=False).item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "clustering"}, r"Columns\(task='clustering'\): expected one of"),
        ({"features": "age"}, r"Columns\(features='age'\): expected a list"),
        ({"features": ["age", "age"]}, "more than once"),
        ({"max_categories": 1}, "of at least 2"),
        ({"standardise_target": True}, "classes have no mean"),
    ],
)
def test_columns_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Columns(**options)


@pytest.mark.skipif(ROOT is None or not Path(ROOT, "tables").is_dir(), reason="FLSV_DATA_ROOT has no folder tables")
class TestRealTables:
    def test_65_schools_by_name(self):
        columns = Columns(task="regression", exclude=["student"])
        data = ready("tables/exam.csv", root=ROOT, label="normexam", groups="school", columns=columns)
        assert data.client_names == tuple(f"school {i}" for i in range(1, 66))
        assert int(data.num_samples.sum()) + len(data.server_val_indices) == 4059
        fewer = ready(
            "tables/exam.csv", GroupPartitioner(5), root=ROOT, label="normexam", groups="school", columns=columns
        )
        assert fewer.num_clients == 5
        assert all(name.endswith("+ 10 more") for name in fewer.client_names)

    def test_four_clinics(self):
        columns = Columns(features=["Age", "Black", "BMI"])
        with pytest.warns(UserWarning, match="9 of 823 rows have no 'Preg.ended"):
            data = ready("tables/opt.csv", root=ROOT, label="Preg.ended...37.wk", groups="Clinic", columns=columns)
        assert data.client_names == ("KY", "MN", "MS", "NY")
        assert data.class_names == ("No", "Yes")

    def test_60_districts_of_a_data_module(self):
        source = TableData("tables/contraception.csv", "use", group="district", features=["age", "urban"], root=ROOT)
        data = ready(source, GroupPartitioner())
        assert data.client_names[:2] == ("district 1", "district 2")
        assert data.num_clients == 60


# To the end


def test_describe_names_clients_and_classes():
    data = ready(clients={"Boston": (X, WORDS[Y]), "Lyon": (X, WORDS[Y])})
    assert data.describe()["client_names"] == "Boston, Lyon"
    assert data.describe()["class_names"] == "cat, dog, eel"
    assert data.describe()["source"] == "2 clients' data"
    assert (
        str(data)
        == "FederatedDataModule(source=2 clients' data, partitioner=GroupPartitioner(num_clients=None, seed=0))"
    )
    table = ready(clients={"a": patients(20, 1), "b": patients(20, 2)}, label="ill")
    assert table.describe()["label"] == "ill"
    assert "statistics='pooled'" in table.describe()["columns"]
    assert not {"client_names", "class_names", "label"} & set(ready().describe())


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


def test_all_names_count_in_the_fingerprint_and_old_checkpoints_have_none():
    named = {f"clinic {chr(65 + i)}": (X[:4], Y[:4]) for i in range(24)}
    data = ready(clients=named, server_val_fraction=0.0)
    now = fingerprint({}, data)
    assert "clinic X" in now["settings"]["data.client_names"]
    check_same(now, now)
    old = {**now, "settings": {k: v for k, v in now["settings"].items() if k != "data.client_names"}}
    check_same(old, now)
    last = {(name if name != "clinic X" else "clinic Y"): held for name, held in named.items()}
    with pytest.raises(ConfigurationError, match="client_names"):
        check_same(now, fingerprint({}, ready(clients=last, server_val_fraction=0.0)))


def test_a_failing_client_is_called_by_its_name(tmp_path):
    class Failing(Plain):
        def training_step(self, batch, batch_idx):
            raise ValueError("no such thing")

    data = FederatedDataModule(clients=toy_clients("Boston", "Lyon"), batch_size=8)
    loop = FederatedLoop(aggregator=FedAvg(), seed=3)
    with pytest.raises(ValueError, match="no such thing") as caught:
        trainer_for(loop, tmp_path).fit(Failing(), data)
    told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "while client 0 ('Boston') trained in round 0" in told


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
    quick = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
    options = [
        "--trainer.max_epochs",
        "1",
        "--trainer.enable_progress_bar",
        "false",
        "--federation.print_table",
        "false",
    ]
    options += ["--trainer.enable_model_summary", "false", "--federation.figures_every", "0"]
    options += ["--trainer.default_root_dir", str(tmp_path), "--data.label", "ill", "--data.partitioner", "null"]
    assert main(["fit", "--config", quick, *options, *ways[form]]) in (0, None)
    (written,) = tmp_path.rglob("contributions.csv")
    with written.open(encoding="utf-8") as file:
        clients = {row["client"] for row in csv.DictReader(file)}
    assert len(clients) == 3
    (hparams,) = tmp_path.rglob("hparams.yaml")
    assert "Boston, Köln Süd, Lyon" in hparams.read_text("utf-8").replace("\\xF6", "ö").replace("\\xFC", "ü")
