"""Tables with a column for the clients, made here and real."""

import os
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

from flsv import ClassifierClient
from flsv.data import FederatedDataModule, GroupPartitioner, Splits, TableData
from flsv.errors import ConfigurationError

ROOT = os.environ.get("FLSV_DATA_ROOT")
real = pytest.mark.skipif(
    ROOT is None or not Path(ROOT, "tables").is_dir(), reason="FLSV_DATA_ROOT is not set or has no folder tables"
)
HEADER = "ward,age,sex,note,dose,ill"


def rows(number=40, wards=("A", "B", "Größe")):
    """A table in which whoever gets a higher dose is ill."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(number):
        age, dose = rng.integers(20, 60), rng.normal()
        note = ["", '"well, so far"', "plain"][i % 3]
        lines.append(
            f"{wards[i % len(wards)]},{age if i % 7 else 'NA'},{'fm'[i % 2]},{note},{dose:.3f},{int(dose > 0)}"
        )
    return lines


@pytest.fixture
def make(tmp_path):
    """A ``TableData`` of these lines."""

    def command(lines=None, header=HEADER, test=None, **options):
        (tmp_path / "wards.csv").write_text("\n".join([header, *(rows() if lines is None else lines)]), "utf-8")
        if test is not None:
            (tmp_path / "test.csv").write_text("\n".join([header, *test]), "utf-8")
            options["test_path"] = "test.csv"
        defaults = {"target": "ill", "group": "ward", "root": str(tmp_path)}
        data = TableData("wards.csv", **{**defaults, **options})
        data.setup("fit")
        return data

    return command


def test_features_targets_and_groups(make):
    data = make(val_fraction=0.25, test_fraction=0.1)
    assert data.feature_names == (
        *("age", "dose", "sex=f", "sex=m", "note=plain", "note=well, so far", "age missing", "note missing"),
    )
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [26, 10, 4]
    assert (data.num_classes, data.input_shape, data.group_names) == (2, (8,), ("A", "B", "Größe"))
    x, y = data.train_set.tensors
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(x[:, 1].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(x[:, 1].std(unbiased=False), torch.tensor(1.0))
    assert (x[x[:, 6] == 1, 0] == 0).all()
    assert x[:, 6].sum() > 0
    assert torch.equal(x[:, 4:6].sum(1) + x[:, 7], torch.ones(26))
    # Standardizing keeps an order.
    assert x[y == 1, 1].min() > x[y == 0, 1].max()


def test_every_row_is_in_one_place_and_the_seed_says_where(make):
    options = {"target": "dose", "task": "regression", "val_fraction": 0.3, "test_fraction": 0.2}
    data, again, other = (make(seed=seed, **options) for seed in (0, 0, 1))

    def found(each):
        return [part.tensors[1].tolist() for part in (each.train_set, each.val_set, each.test_set)]

    assert [len(part) for part in found(data)] == [20, 12, 8]
    assert found(data) == found(again) != found(other)
    doses = sorted(float(np.float32(line.split(",")[-2])) for line in rows())
    assert sorted(dose for part in found(data) for dose in part) == doses
    assert sorted(dose for part in found(other) for dose in part) == doses


def test_regression_needs_no_classes(make):
    data = make(target="dose", task="regression", val_fraction=0)
    federated = FederatedDataModule(data, GroupPartitioner(), splits=Splits(server_val=0.2))
    federated.setup("fit")
    assert data.num_classes is None
    assert federated.num_clients == 3
    assert len(federated.server_val_indices) == 8
    (_, y) = next(iter(federated.client_loader(1)))
    assert y.dtype == torch.float32
    doses = {float(np.float32(line.split(",")[-2])) for line in rows()}
    assert set(y.tolist()) <= doses


def test_a_test_file_is_encoded_by_the_training_rows(make):
    test = ["A,40,x,plain,0.5,1", "C,NA,f,,-0.5,0"]
    with pytest.warns(UserWarning, match="no training row has 'x' in 'sex'"):
        data = make(test=test)
    x, y = data.test_set.tensors
    names = data.feature_names
    assert y.tolist() == [1, 0]
    assert x[:, names.index("sex=f")].tolist() == [0, 1]
    assert x[:, names.index("sex=m")].tolist() == [0, 0]
    assert x[:, names.index("age missing")].tolist() == [0, 1]
    assert x[1, names.index("age")] == 0
    assert len(data.train_set) == 36
    same = make()
    assert torch.equal(same.train_set.tensors[0], data.train_set.tensors[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "il"}, r"no column 'il' \(target\)\. Did you mean 'ill'\?"),
        ({"group": "clinic"}, r"no column 'clinic' \(group\)"),
        ({"features": ["age", "weight"]}, r"no column 'weight' \(features\)"),
        ({"exclude": ["weight"]}, r"no column 'weight' \(exclude\)"),
        ({"categorical": ["weight"]}, r"no column 'weight' \(categorical\)"),
        ({"features": ["age", "ill"]}, "'ill' is the target or the group"),
        ({"features": ["age", "ward"]}, "'ward' is the target or the group"),
        ({"features": ["age"], "exclude": ["age"]}, "no column is left to predict 'ill' from"),
        ({"target": "ward"}, "'ward' is the target or the group"),
        ({"task": "clustering"}, "expected .classification. or .regression."),
        ({"max_categories": 1}, "of at least 2"),
        ({"batch_size": 0}, "of at least 1"),
        ({"val_fraction": 1.0}, r"in \[0, 1\)"),
        ({"val_fraction": 0.6, "test_fraction": 0.4}, "40 of 40 samples are to be held out"),
        ({"val_fraction": 0.01}, r"val_fraction=0.01\): none of 40 rows"),
        ({"test": ["A,30,f,plain,0.1,1"], "test_fraction": 0.1}, "from the second file or from the first"),
        ({"target": "dose"}, "40 different values in 40 rows, which are no classes"),
        ({"target": "sex", "task": "regression"}, "'sex' .target. is no finite number in 40 of 40 rows, such as 'f'"),
        ({"categorical": ["dose"], "max_categories": 20}, "'dose' has .* values, more than max_categories=20"),
        ({"root": "nowhere"}, r"wards\.csv was not found"),
    ],
)
def test_refused(make, options, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (" ,30,f,plain,0.1,1", r"1 of 41 rows have no 'ward' \(group\): line 42"),
        ("A,thirty,f,plain,0.1,1", "line 42: 'thirty' in 'age' is no finite number, but others there are"),
        ("A,inf,f,plain,0.1,1", "line 42: 'inf' in 'age' is no finite number"),
        ('A,"3,5",f,plain,0.1,1', "line 42: '3,5' in 'age' is no finite number"),
        ("A,30,f,plain,1e999,1", "line 42: '1e999' in 'dose' is no finite number"),
    ],
)
def test_refused_rows(make, line, message):
    with pytest.raises(ConfigurationError, match=message):
        make([*rows(), line])


def test_refused_columns(make):
    with pytest.raises(ConfigurationError, match=r"no training row has a 'note'.*exclude: \[note\]"):
        make([f"A,{i},f,,{i},{i % 2}" for i in range(10)], val_fraction=0)
    with pytest.raises(ConfigurationError, match=r"no row has a 'ill' \(target\)"):
        make(["A,30,f,plain,0.1,", "A,30,f,plain,0.1,NA"])


def test_it_trains_without_a_federation(make, tmp_path):
    data = make(rows(200), val_fraction=0.2, test_fraction=0.2)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=5, default_root_dir=tmp_path, enable_model_summary=False, **options)
    L.seed_everything(0)
    model = ClassifierClient("softmax", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    trainer.fit(model, data)
    (scores,) = trainer.test(model, data, verbose=False)
    assert scores["test_accuracy"] > 0.85


def test_a_standardized_target(make):
    options = {"target": "dose", "task": "regression", "val_fraction": 0.25, "test": ["A,40,f,plain,0.5,1"]}
    plain, data = make(**options), make(standardize_target=True, **options)
    y = data.train_set.tensors[1]
    assert y.mean().item() == pytest.approx(0, abs=1e-6)
    assert y.std(unbiased=False).item() == pytest.approx(1, abs=1e-6)
    assert (plain.target_mean, plain.target_std) == (0, 1)
    for name in ("train_set", "val_set", "test_set"):
        scaled, target = (getattr(each, name).tensors[1] for each in (data, plain))
        torch.testing.assert_close(scaled * data.target_std + data.target_mean, target)
    assert plain.test_set.tensors[1].tolist() == [0.5]
    with pytest.raises(ConfigurationError, match="classes have no mean"):
        make(standardize_target=True)
    with pytest.raises(ConfigurationError, match="all training rows have the same 'dose'"):
        make([f"A,{i},f,x,0.1,{i % 2}" for i in range(9)], target="dose", task="regression", standardize_target=True)


@real
def test_clinics():
    features = ["Group", "BL.PD.avg", "BMI"]
    data = TableData("tables/opt.csv", "V5.PD.avg", "regression", "Clinic", features, root=ROOT)
    with pytest.warns(UserWarning, match=r"164 of 823 rows have no 'V5.PD.avg'"):
        data.setup()
    assert data.group_names == ("KY", "MN", "MS", "NY")
    assert data.feature_names == ("BL.PD.avg", "BMI", "Group=C", "Group=T", "BMI missing")
    assert len(data.train_set) + len(data.val_set) == 659
    # The marks of gaps in the laboratory's columns are full stops.
    data = TableData("tables/opt.csv", "Preg.ended...37.wk", group="Clinic", features=["OAA1"], root=ROOT)
    with pytest.warns(UserWarning, match="9 of 823 rows"):
        data.setup()
    assert data.feature_names == ("OAA1", "OAA1 missing")
    everything = TableData("tables/opt.csv", "Clinic", root=ROOT)
    everything.setup()
    assert len(everything.feature_names) > 169
