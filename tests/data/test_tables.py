"""Tables as data: what columns are taken for, how they are encoded, and what is refused, at once and with a remedy."""

import numpy as np
import pandas as pd
import pytest
import yaml

from flsv.data import Columns
from flsv.data.sources import frames
from flsv.data.sources.column_values import read_column, with_gaps_as_nan
from flsv.data.sources.frames import concatenated_tables, frame_table, read_table_file
from flsv.data.sources.table import Table
from flsv.utilities.errors import ConfigurationError
from helpers.data import Frame, HuggingFace, make_patients, set_up_data

ROWS = 40
AGE = [float(20 + i) if i % 7 else float("nan") for i in range(ROWS)]
PATIENTS = {
    "age": AGE,
    "sex": ["fm"[i % 2] for i in range(ROWS)],
    "ward": [["Boston", "Lyon", "Köln / Ost"][i % 3] for i in range(ROWS)],
    "ill": [i % 4 // 3 for i in range(ROWS)],
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "table.csv is empty"),
        ("a,b\n1,2\n3\n", "line 3: 1 values, but the header has 2 names"),
        ("a,b\n1,2\na , b\n", "line 3: the columns' names again"),
        ("a,a\n1,2\n", "columns are called 'a', 'a'"),
        ('a,b\n"x" y,2\n', "line 2: ',' expected after '\"'. A value that contains ','"),
    ],
)
def test_read_csv_of_a_broken_table_raises(tmp_path, text, message):
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_table_file(tmp_path / "table.csv")


@pytest.mark.parametrize("is_large", [True, False])
def test_large_table_is_named_when_its_reading_begins(tmp_path, monkeypatch, caplog, is_large):
    path = tmp_path / "visits.csv"
    path.write_text("age,ill\n30,yes\n")
    size = path.stat().st_size
    monkeypatch.setattr(frames, "_LARGE_FILE_BYTES", size if is_large else size + 1)

    with caplog.at_level("INFO", "lightning.pytorch"):
        read_table_file(path)
    assert (f"reading {path}" in caplog.text) == is_large


def test_marks_of_missing_values_apply_to_one_column_or_to_all():
    frame = pd.DataFrame(
        {
            "age": [" NA ", "", "0", "NAN"],
            "ward": ["x", "NA", ".", "A"],
        }
    )
    table = Table("wards.csv", frame)

    def gaps_in(column, options):
        return with_gaps_as_nan(table, column, "", options).isna().tolist()

    for_all_columns = Columns(gaps=["NA"])
    assert gaps_in("age", for_all_columns) == [True, True, False, False]
    assert gaps_in("ward", for_all_columns) == [False, True, False, False]

    # What is a gap in one column is none in another, and the usual marks stay.
    for_ward = Columns(gaps={"ward": ["x"]})
    assert gaps_in("ward", for_ward) == [True, True, True, False]
    assert gaps_in("age", for_ward) == [True, True, False, False]


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ((["30", "4.5"], ["-1e3", ""]), "numbers"),
        ((["0", "0.5"], ["-0.5", "+0"]), "numbers"),
        ((["1067", "4109"], ["01067", "80331"]), "categories"),
        ((["True", "False"], ["True", ""]), "truth values"),
        ((["yes", "no"], ["1_000", "x"]), "categories"),
    ],
)
@pytest.mark.parametrize("first_is_a_data_frame", [False, True])
def test_the_kind_of_a_column_is_decided_once_over_all_files(columns, kind, first_is_a_data_frame):
    first_column, second_column = columns
    first_frame = pd.DataFrame({"x": first_column}, dtype=object)
    second_frame = pd.DataFrame({"x": second_column}, dtype=object)
    if first_is_a_data_frame:
        first_table = frame_table(first_frame)
    else:
        first_table = Table("0.csv", first_frame)
    tables = [first_table, Table("1.csv", second_frame)]

    column_kind, joined = read_column(concatenated_tables(tables), "x", Columns())

    assert column_kind == kind
    if kind == "categories":
        assert joined.tolist() == [*first_column, *second_column]


def test_dtypes_of_a_dataframe_decide_the_kinds_of_its_columns():
    """Categories whose names are numbers, words that look like numbers, the word NA, truth values."""
    rows = np.arange(60)
    frame = pd.DataFrame(
        {
            "plan": pd.Categorical(np.array([101, 205, 330])[rows % 3]),
            "zip": np.array(["01234", "05678"], object)[rows % 2],
            "country": ["NA" if row % 4 == 0 else "DE" for row in rows],
            "smoker": rows % 5 == 0,
            "age": rows.astype(float),
            "ill": rows % 2,
        }
    )
    original = frame.copy(deep=True)

    data = set_up_data(frame, labels="ill", server_val=0, client_test=0)

    x = data._source.train.tensors[0].numpy()
    pd.testing.assert_frame_equal(frame, original)

    numbers = np.column_stack([rows % 5 == 0, rows])
    categories = [
        rows % 3 == 0,
        rows % 3 == 1,
        rows % 3 == 2,
        rows % 2 == 0,
        rows % 2 == 1,
        rows % 4 != 0,
        rows % 4 == 0,
    ]
    standardized = (numbers - numbers.mean(0)) / numbers.std(0)
    expected = np.column_stack([standardized, *categories])

    np.testing.assert_allclose(x, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda: pd.date_range("2020-01-01", periods=60), "'odd' has Timestamp in DataFrame"),
        (
            lambda: [pd.Timestamp(2020, 1, 1 + i % 3).date() for i in range(60)],
            r"'odd' has date in .*dates\": .\"odd",
        ),
        (lambda: pd.Series([1, "1"] * 30, dtype=object), "int in .* and str in "),
        (lambda: ["1,5", "2,5"] * 30, "row 0: '1,5' in 'odd' is a number stored as text"),
        (lambda: [np.inf, *range(59)], "row 0: 'inf' in 'odd' is not a valid number"),
        (lambda: [1e300, *range(59)], "row 0: '1e.300' in 'odd' is not a valid number"),
    ],
)
def test_column_of_unusable_values_is_refused_unless_excluded(values, message):
    frame = pd.DataFrame({"odd": values(), "x": np.arange(60), "ill": np.arange(60) % 2})
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        set_up_data(frame, labels="ill")
    assert set_up_data(frame, labels="ill", columns=Columns(exclude=["odd"])).input_shape == (1,)


@pytest.mark.parametrize(
    "coding",
    [
        (True, False),
        ("ja", "nein"),
        ("no", "yes."),
        (1, 0),
        ("dead",),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["frames", "mixed"])
def test_two_codings_of_a_target_are_refused_by_table_unless_all_classes_are_named(
    tmp_path, coding, kind
):
    rng = np.random.default_rng(0)
    clients = {}
    for client in ("Boston", "Lyon", "Osaka", "Quito"):
        labels = ("no", "yes")
        if client == "Lyon":
            labels = coding
        frame = pd.DataFrame({"age": rng.normal(size=40)})
        column = np.array(labels, dtype=object)
        frame["ill"] = np.resize(column, 40)
        clients[client] = frame

    if kind == "mixed":
        path = tmp_path / "Lyon.csv"
        clients["Lyon"].to_csv(path, index=False)
        clients["Lyon"] = path

    message = r"(Lyon\.csv|^the DataFrame of 'Lyon'): target 'ill' has no label of 'no', 'yes'"
    if "yes." in coding:
        message = r"'yes' \(.*\), 'yes\.' \(.*Lyon.*\), which look like spellings of one name"

    with pytest.raises(ConfigurationError, match=message):
        set_up_data(clients=clients, labels="ill")

    classes = ["no", "yes"]
    for label in coding:
        if label != "no":
            classes.append(str(label))

    data = set_up_data(clients=clients, labels="ill", columns={"classes": classes})
    assert sorted(data.class_names) == sorted(classes)

    message = "in target 'ill' is none of the 2 classes: no, yes"
    with pytest.raises(ConfigurationError, match=message):
        set_up_data(clients=clients, labels="ill", columns={"classes": ["no", "yes"]})


def test_clients_with_disjoint_labels_are_refused_and_overlapping_ones_accepted():
    def read(*codings):
        frames = {}
        for name, coding in zip("abcd", codings):
            labels = np.resize(coding, 40)
            frames[name] = pd.DataFrame({"age": range(40), "ill": labels})
        return set_up_data(clients=frames, labels="ill").class_names

    with pytest.raises(
        ConfigurationError, match="'b', .* of 'c': target 'ill' has no label of 'no', 'yes'"
    ):
        read(
            ("no", "yes"),
            ("nein", "ja"),
            ("nein", "ja"),
            ("yes", "no"),
        )

    assert read(
        ("I",),
        ("III", "IV"),
        ("II", "III"),
        ("I", "II"),
    ) == ("I", "II", "III", "IV")


@pytest.mark.parametrize(
    "labels",
    [
        [
            "0",
            "00",
            "1",
            "1.0",
        ],
        ["True", "true", "TRUE", "no"],
    ],
)
def test_labels_and_clients_that_differ_in_spelling_only_are_refused(labels):
    message = "which look like spellings of one name"
    x = [1.0, 2.0, 3.0, 4.0] * 10

    with pytest.raises(ConfigurationError, match=f"target 'ill' has .* {message}"):
        set_up_data(Frame(x=x, ill=labels * 10), labels="ill")
    with pytest.raises(ConfigurationError, match=rf"'ward' \(group\) has .* {message}"):
        set_up_data(
            Frame(x=x, ill=[0, 1] * 20, ward=labels * 10),
            labels="ill",
            groups="ward",
        )

    clients = {name: (np.zeros((40, 1)), labels * 10) for name in "ab"}
    with pytest.raises(ConfigurationError, match=message):
        set_up_data(clients=clients)


# Dates, against Python's own calendar


# Notations: a suggested line is all that a user has to paste


# Numbers, against NumPy


def test_table_features_equal_those_from_sums_squares_and_categories_of_each_client():
    """Counts, sums, sums of squares and sets of categories of each client's training rows give the same features."""
    clients = {
        "Boston": make_patients(30, 1),
        "Lyon": make_patients(50, 2, 20.0),
        "Köln": make_patients(20, 3, -5.0),
    }
    data = set_up_data(
        clients=clients,
        labels="ill",
        server_val=0.2,
        client_val=0.1,
        client_test=0.1,
        test=make_patients(10, 4),
    )
    ages = np.concatenate([np.array(frame["age"]) for frame in clients.values()])
    wards = np.concatenate([np.array(frame["ward"]) for frame in clients.values()])
    train_rows = [data.client_indices(client).numpy() for client in range(3)]
    count = sum(len(rows) for rows in train_rows)
    total = sum(ages[rows].sum() for rows in train_rows)
    squares = sum((ages[rows] ** 2).sum() for rows in train_rows)
    mean = total / count
    deviation = np.sqrt(squares / count - mean**2)
    categories = sorted(set().union(*(wards[rows] for rows in train_rows)))

    assert categories == ["A", "B", "only 1", "only 2", "only 3"]

    def features(ages, wards):
        is_in_category = [wards == category for category in categories]
        return np.column_stack([(ages - mean) / deviation, *is_in_category])

    x, _ = data._source.train.tensors
    test_x, _ = data._source.test.tensors

    np.testing.assert_allclose(x.numpy(), features(ages, wards), atol=1e-6)

    # Some of the test set are of a ward that nobody knows.
    test_frame = make_patients(10, 4)
    expected = features(np.array(test_frame["age"]), np.array(test_frame["ward"]))

    np.testing.assert_allclose(test_x, expected, atol=1e-5)


def write_patients_csv(folder):
    path = folder / "wards.csv"
    pd.DataFrame(PATIENTS).to_csv(path, index=False)
    return path


def write_patients_parquet(folder):
    pytest.importorskip("pyarrow")
    path = folder / "wards.parquet"
    pd.DataFrame(PATIENTS).to_parquet(path)
    return path


MAKERS_OF_PATIENTS = {
    "pandas": lambda folder: pd.DataFrame(PATIENTS),
    "polars": lambda folder: pytest.importorskip("polars").DataFrame(PATIENTS),
    "pyarrow": lambda folder: pytest.importorskip("pyarrow").table(PATIENTS),
    "datasets": lambda folder: pytest.importorskip("datasets").Dataset.from_dict(PATIENTS),
    "hugging face": lambda folder: HuggingFace(PATIENTS),
    "csv": write_patients_csv,
    "parquet": write_patients_parquet,
}


@pytest.mark.parametrize("library", MAKERS_OF_PATIENTS)
def test_dataframes_of_every_library_give_the_same_data(library, tmp_path):
    make_table = MAKERS_OF_PATIENTS[library]
    table = make_table(tmp_path)

    data = set_up_data(table, labels="ill", groups="ward")

    expected = set_up_data(Frame(**PATIENTS), labels="ill", groups="ward")
    assert data.client_names == ("Boston", "Köln / Ost", "Lyon")
    assert data.client_names == expected.client_names
    assert data.class_names == ("0", "1")
    assert data.content_hashes() == expected.content_hashes()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([0.1] * ROWS, "all training rows have the same 'y'"),
        ([1e300, *AGE[1:]], "'1e.300' in 'y' .labels. is not"),
    ],
)
def test_targets_that_would_be_nan_or_infinite_are_refused(target, message):
    columns = Columns(task="regression", standardize_target=True)
    with pytest.raises(ConfigurationError, match=message):
        set_up_data(Frame(x=list(range(ROWS)), y=target), labels="y", columns=columns)


def make_clinic(rng, rows=40, **columns):
    days = pd.Timestamp("2024-01-01") + pd.to_timedelta(
        rng.integers(0, 300, rows),
        unit="D",
    )
    return pd.DataFrame(
        {
            "came": days.strftime("%Y-%m-%d"),
            "name": [f"name {i}" for i in rng.permutation(1000)[:rows]],
            "score": [
                *rng.normal(size=rows - 1).round(3).astype(str),
                "not done",
            ],
            "lab": [""] * rows,
            "age": rng.integers(20, 90, rows),
            "ill": np.where(rng.random(rows) < 0.5, "yes", "no"),
            **columns,
        }
    )


def test_unusable_columns_are_in_one_message_whose_line_repairs_them(tmp_path):
    rng = np.random.default_rng(0)
    for name, columns in (
        ("Boston", {}),
        ("Lyon", {"insurer": "A"}),
        ("val", {}),
    ):
        make_clinic(rng, **columns).to_csv(tmp_path / f"{name}.csv", index=False)

    columns = {"categorical": ["age"], "max_categories": 75}

    with pytest.raises(ConfigurationError) as error:
        set_up_data(str(tmp_path), labels="ill", columns=columns)

    options = yaml.safe_load(str(error.value).splitlines()[-1])["columns"]
    assert options == {
        "exclude": ["name", "score", "lab", "insurer"],
        "dates": {"came": "days"},
        "categorical": ["age"],
        "max_categories": 75,
    }

    repaired = set_up_data(str(tmp_path), labels="ill", columns=options)
    cards = {card.name: card for card in repaired.column_cards}

    assert {name: card.kind for name, card in cards.items()} == {
        "came": "days since 1970",
        "age": "categories",
    }


def test_delimiters_are_found_file_by_file(tmp_path):
    for name, mark in {"Boston": ",", "Lyon": ";", "Osaka": "\t"}.items():
        pd.DataFrame(PATIENTS).to_csv(tmp_path / f"{name}.csv", index=False, sep=mark)
    data = set_up_data(str(tmp_path), labels="ill")
    np.testing.assert_array_equal(data.column_cards[0].values, AGE * 3)
