"""DataFrames and Hugging Face data sets, imitated and, where they are installed, real."""

import numpy as np
import pandas
import pytest
import torch
from data_options import grouped
from frames import Frame, HuggingFace

from flsv.data import Columns, FederatedDataModule
from flsv.data.sources.table import read_csv
from flsv.errors import ConfigurationError

ROWS = 40
AGE = [float(20 + i) if i % 7 else float("nan") for i in range(ROWS)]
SEX = ["fm"[i % 2] for i in range(ROWS)]
WARD = [["Boston", "Lyon", "Köln / Ost"][i % 3] for i in range(ROWS)]
ILL = [i % 4 // 3 for i in range(ROWS)]
PATIENTS = {"age": AGE, "sex": SEX, "ward": WARD, "ill": ILL}


def ready(*args, **kwargs):
    data = FederatedDataModule(*args, **grouped(kwargs))
    data.setup("fit")
    return data


def everything(data):
    return [data._data.train.tensors, [data.client_indices(i) for i in range(data.num_clients)]]


def test_what_columns_say_of_themselves_stays():
    """Categories whose names are numbers, words that look like numbers, the word NA, truth values."""
    rows = np.arange(60)
    frame = pandas.DataFrame(
        {
            "plan": pandas.Categorical(np.array([101, 205, 330])[rows % 3]),
            "zip": np.array(["01234", "05678"], object)[rows % 2],
            "country": ["NA" if row % 4 == 0 else "DE" for row in rows],
            "smoker": rows % 5 == 0,
            "age": rows.astype(float),
            "ill": rows % 2,
        }
    )
    x = ready(frame, labels="ill", server_val=0, client_test=0)._data.train.tensors[0].numpy()
    numbers = np.column_stack([rows % 5 == 0, rows])
    named = [rows % 3 == 0, rows % 3 == 1, rows % 3 == 2, rows % 2 == 0, rows % 2 == 1, rows % 4 != 0, rows % 4 == 0]
    expected = np.column_stack([(numbers - numbers.mean(0)) / numbers.std(0), *named])
    np.testing.assert_allclose(x, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda pd: pd.date_range("2020-01-01", periods=60), "'odd' has values of the type Timestamp"),
        (lambda pd: [pd.Timestamp(2020, 1, 1 + i % 3).date() for i in range(60)], "the type date; expected numbers"),
        (lambda pd: pd.Series([1, "1"] * 30, dtype=object), r"the type int, str.*categorical: \[odd\]"),
        (lambda pd: [[1.0]] * 60, "of the type list"),
        (lambda pd: np.arange(60).astype(str).astype(object), r"Numbers that are kept as words.*astype"),
        (lambda pd: [1e300, *range(59)], "row 0: 1e.300 in 'odd' is too large"),
        (lambda pd: [np.inf, *range(59)], "row 0: 'inf' in 'odd' is no finite number"),
    ],
)
def test_columns_that_are_no_features(values, message):
    frame = pandas.DataFrame({"odd": values(pandas), "x": np.arange(60), "ill": np.arange(60) % 2})
    with pytest.raises(ConfigurationError, match=message):
        ready(frame, labels="ill")
    assert ready(frame, labels="ill", columns=Columns(exclude=["odd"])).input_shape == (1,)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["0", "00", "1", "1.0"], "target 'ill' has '0', '00', which are one class to a person"),
        (["True", "true", "TRUE", "no"], "'TRUE', 'True', 'true', which are one"),
    ],
)
def test_classes_that_are_one_to_a_person(labels, message, tmp_path):
    with pytest.raises(ConfigurationError, match=message):
        ready(Frame(x=[1.0, 2.0, 3.0, 4.0] * 10, ill=labels * 10), labels="ill")
    rows = [f"{i},{label}" for i, label in enumerate(labels * 10)]
    (tmp_path / "ill.csv").write_text("\n".join(["x,ill", *rows]))
    with pytest.raises(ConfigurationError, match=message):
        ready("ill.csv", root=str(tmp_path), labels="ill")
    with pytest.raises(ConfigurationError, match="which are one class to a person"):
        ready(clients={"a": (np.zeros((40, 1)), labels * 10), "b": (np.zeros((40, 1)), labels * 10)})


def test_spellings_of_a_client_and_of_a_category_are_warned_of():
    frame = Frame(ward=["Boston", "boston "] * 20, sex=["f", "m", "F", "M"] * 10, ill=[0, 1] * 20)
    with (
        pytest.warns(UserWarning, match=r"'ward' \(group\) has 'Boston', 'boston', each for itself"),
        pytest.warns(UserWarning, match="'sex' has 'F', 'f', each for itself"),
    ):
        ready(frame, labels="ill", groups="ward")


def test_a_frame_is_a_federation_in_one_line():
    data = ready(Frame(**PATIENTS), labels="ill", groups="ward", server_val=0.2)
    assert data.client_names == ("Boston", "Köln / Ost", "Lyon")
    assert data.class_names == ("0", "1")
    assert int(data.num_samples.sum()) == 32
    x, y = next(iter(data.client_loader(0)))
    assert (x.shape[1:], y.dtype) == ((4,), torch.int64)  # age, sex=f, sex=m, age missing
    wards = np.unique(WARD)
    for client, ward in enumerate(wards):
        assert {WARD[i] for i in data.client_indices(client).tolist()} == {ward}


def test_a_frame_and_the_same_file_are_the_same(tmp_path):
    rows = [f"{'' if np.isnan(a) else a},{s},{w},{i}" for a, s, w, i in zip(*PATIENTS.values())]
    (tmp_path / "wards.csv").write_text("\n".join(["age,sex,ward,ill", *rows]), "utf-8")
    frame = ready(Frame(**PATIENTS), labels="ill", groups="ward")
    file = ready("wards.csv", root=str(tmp_path), labels="ill", groups="ward")
    hugging = ready(HuggingFace(PATIENTS), labels="ill", groups="ward")
    assert read_csv(tmp_path / "wards.csv").frame["age"][:2].tolist() == ["", "21.0"]
    for other in (file, hugging):
        assert other.client_names == frame.client_names
        torch.testing.assert_close(everything(other), everything(frame), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Frame is a table: say labels, the column to predict. It has age, sex, ward, ill"),
        ({"labels": "il"}, r"no column 'il' \(labels\). Did you mean 'ill'\?"),
        ({"labels": "ill", "groups": "clinic"}, r"no column 'clinic' \(group\)"),
        ({"labels": "ill", "groups": "ill"}, "'ill' is the target or the group. It is neither both"),
        ({"labels": "age"}, "34 different values in 34 rows, which are no classes"),
        ({"labels": "ill", "columns": Columns(features=["weight"])}, r"no column 'weight' \(features\)"),
        (
            {"labels": "sex", "columns": Columns(task="regression")},
            "'sex' .target. is no finite number",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*are left out")
def test_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ready(Frame(**PATIENTS), **options)


def test_splits_by_name():
    train, test = (HuggingFace({"x": [1.0, 2.0] * n, "y": ["a", "b"] * n}) for n in (20, 5))
    data = ready({"train": train, "validation": test, "test": test}, labels="y")
    assert len(data.server_val_indices) == 0
    assert sum(len(y) for _, y in data.val_dataloader()) == 10
    assert sum(len(y) for _, y in data.test_dataloader()) == 10
    with pytest.raises(ConfigurationError, match="Data by client are given as clients"):
        ready({"Boston": train, "Lyon": test}, labels="y")


def test_pandas():
    data = pandas.DataFrame(PATIENTS)
    found = ready(data, labels="ill", groups="ward")
    torch.testing.assert_close(
        everything(found), everything(ready(Frame(**PATIENTS), labels="ill", groups="ward")), rtol=0, atol=0
    )
    by_ward = {name: rows.drop(columns="ward") for name, rows in data.groupby("ward")}
    assert ready(clients=by_ward, labels="ill").client_names == found.client_names
    odd = data.assign(
        age=pandas.array([None if np.isnan(a) else int(a) for a in AGE], dtype="Int64"),
        sex=pandas.Categorical(SEX),
        ill=pandas.Series(ILL).astype("boolean"),
    )
    again = ready(odd, labels="ill", groups="ward")
    assert again.class_names == ("False", "True")
    torch.testing.assert_close(everything(again), everything(found), rtol=0, atol=0)
    series = ready((data[["age"]].fillna(0).to_numpy(), data["ill"]))
    assert series.class_counts.sum(0).tolist() != [0, 0]


def test_the_real_library():
    datasets, arrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")

    def made(columns, features):
        table = arrow.table(columns, schema=features.arrow_schema)
        # With a fingerprint: to make one, the library pickles the table, which some versions of its own parts cannot.
        info = datasets.DatasetInfo(features=features)
        return datasets.Dataset(datasets.table.InMemoryTable(table), info=info, fingerprint="made here")

    kinds = {"age": "float64", "sex": "string", "ward": "string", "ill": "int64"}
    real = made(PATIENTS, datasets.Features({name: datasets.Value(kind) for name, kind in kinds.items()}))
    found = ready(real, labels="ill", groups="ward")
    torch.testing.assert_close(
        everything(found), everything(ready(Frame(**PATIENTS), labels="ill", groups="ward")), rtol=0, atol=0
    )
    assert ready(real.with_format("torch"), labels="ill", groups="ward").client_names == found.client_names

    assert ready(real, labels="ill", groups="ward").client_names == found.client_names


@pytest.mark.parametrize("library", ["polars", "pyarrow"])
def test_other_tables(library):
    module = pytest.importorskip(library)
    table = (module.DataFrame if library == "polars" else module.table)({**PATIENTS})
    torch.testing.assert_close(
        everything(ready(table, labels="ill", groups="ward")),
        everything(ready(Frame(**PATIENTS), labels="ill", groups="ward")),
        rtol=0,
        atol=0,
    )
