"""Tables as data: what columns are taken for, how they are encoded, and what is refused, at once and with a remedy."""

import datetime as dt
import json

import numpy as np
import pandas as pd
import pytest
import yaml

from flsv.configuration.identity import sample_hashes
from flsv.data import Columns
from flsv.data.sources import table as table_module
from flsv.data.sources.columns import read_column, without_gaps
from flsv.data.sources.encoder import TableEncoder
from flsv.data.sources.table import Table, frame_table, one_table, read_table_file
from flsv.utilities.errors import ConfigurationError
from helpers.data import Frame, HuggingFace, patients, ready

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
    monkeypatch.setattr(table_module, "_LARGE", size if is_large else size + 1)
    with caplog.at_level("INFO"):
        read_table_file(path)
    assert (f"reading {path}" in caplog.text) == is_large


def test_marks_of_missing_values_apply_to_one_column_or_to_all():
    table = Table(
        "wards.csv", pd.DataFrame({"age": [" NA ", "", "0", "NAN"], "ward": ["x", "NA", ".", "A"]})
    )
    only, besides = Columns(gaps=["NA"]), Columns(gaps={"ward": ["x"]})
    assert without_gaps(table, "age", "", only).isna().tolist() == [True, True, False, False]
    assert without_gaps(table, "ward", "", only).isna().tolist() == [False, True, False, False]
    # What is a gap in one column is none in another, and the usual marks stay.
    assert without_gaps(table, "ward", "", besides).isna().tolist() == [True, True, True, False]
    assert without_gaps(table, "age", "", besides).isna().tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ((["30", "4.5"], ["-1e3", ""]), "numbers"),
        ((["0", "0.5"], ["-0.5", "+0"]), "numbers"),
        ((["1067", "4109"], ["01067", "80331"]), "categories"),
        ((["True", "False"], ["True", ""]), "truth values"),
        ((["yes", "no"], ["1_000", "x"]), "categories"),
    ],
)
@pytest.mark.parametrize("typed", [False, True])
def test_the_kind_of_a_column_is_decided_once_over_all_files(values, kind, typed):
    tables = [
        Table(f"{place}.csv", pd.DataFrame({"x": column}, dtype=object))
        for place, column in enumerate(values)
    ]
    tables[0] = frame_table(tables[0].frame) if typed else tables[0]
    found, joined = read_column(one_table(tables), "x", Columns())
    assert found == kind
    if kind == "categories":
        assert joined.tolist() == [*values[0], *values[1]]


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
    before = frame.copy(deep=True)
    x = ready(frame, labels="ill", server_val=0, client_test=0)._data.train.tensors[0].numpy()
    pd.testing.assert_frame_equal(frame, before)
    numbers = np.column_stack([rows % 5 == 0, rows])
    named = [
        rows % 3 == 0,
        rows % 3 == 1,
        rows % 3 == 2,
        rows % 2 == 0,
        rows % 2 == 1,
        rows % 4 != 0,
        rows % 4 == 0,
    ]
    expected = np.column_stack([(numbers - numbers.mean(0)) / numbers.std(0), *named])
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
        (lambda: ["1,5", "2,5"] * 30, "row 0: '1,5' in 'odd' is a number, but stored as text"),
        (lambda: [np.inf, *range(59)], "row 0: 'inf' in 'odd' is not a valid number"),
        (lambda: [1e300, *range(59)], "row 0: '1e.300' in 'odd' is not a valid number"),
    ],
)
def test_column_of_unusable_values_is_refused_unless_excluded(values, message):
    frame = pd.DataFrame({"odd": values(), "x": np.arange(60), "ill": np.arange(60) % 2})
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        ready(frame, labels="ill")
    assert ready(frame, labels="ill", columns=Columns(exclude=["odd"])).input_shape == (1,)


@pytest.mark.parametrize(
    "coding", [(True, False), ("ja", "nein"), ("no", "yes."), (1, 0), ("dead",)], ids=str
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
        ready(clients=clients, labels="ill")

    classes = ["no", "yes"]
    for label in coding:
        if label != "no":
            classes.append(str(label))
    data = ready(clients=clients, labels="ill", columns={"classes": classes})
    assert sorted(data.class_names) == sorted(classes)

    message = "in target 'ill' is none of the 2 classes: no, yes"
    with pytest.raises(ConfigurationError, match=message):
        ready(clients=clients, labels="ill", columns={"classes": ["no", "yes"]})


def test_clients_with_disjoint_labels_are_refused_and_overlapping_ones_accepted():
    def read(*codings):
        frames = {
            n: pd.DataFrame({"age": range(40), "ill": np.resize(each, 40)})
            for n, each in zip("abcd", codings)
        }
        return ready(clients=frames, labels="ill").class_names

    with pytest.raises(
        ConfigurationError, match="'b', .* of 'c': target 'ill' has no label of 'no', 'yes'"
    ):
        read(("no", "yes"), ("nein", "ja"), ("nein", "ja"), ("yes", "no"))
    assert read(("I",), ("III", "IV"), ("II", "III"), ("I", "II")) == ("I", "II", "III", "IV")


@pytest.mark.parametrize("labels", [["0", "00", "1", "1.0"], ["True", "true", "TRUE", "no"]])
def test_labels_and_clients_that_differ_in_spelling_only_are_refused(labels):
    said, x = "which look like spellings of one name", [1.0, 2.0, 3.0, 4.0] * 10
    with pytest.raises(ConfigurationError, match=f"target 'ill' has .* {said}"):
        ready(Frame(x=x, ill=labels * 10), labels="ill")
    with pytest.raises(ConfigurationError, match=rf"'ward' \(group\) has .* {said}"):
        ready(Frame(x=x, ill=[0, 1] * 20, ward=labels * 10), labels="ill", groups="ward")
    with pytest.raises(ConfigurationError, match=said):
        ready(
            clients={"a": (np.zeros((40, 1)), labels * 10), "b": (np.zeros((40, 1)), labels * 10)}
        )


def write_hospitals(folder, **columns_of_hospitals):
    """Write a file per hospital with these cells of the column ``code``, and return the files by name."""
    files = {}
    for hospital, cells in columns_of_hospitals.items():
        frame = pd.DataFrame({"code": cells})
        frame["age"] = range(len(cells))
        frame["ill"] = np.resize(["no", "yes"], len(cells))
        files[hospital] = folder / f"{hospital}.csv"
        frame.to_csv(files[hospital], index=False)
    return files


def categories_of(data):
    for card in data.column_cards:
        if card.name == "code":
            return list(card.categories)


CODES = {"categorical": ["code"]}


@pytest.mark.parametrize("gap_at", [None, "Boston", "Lyon"])
def test_categories_are_the_same_whatever_gaps_a_file_has(tmp_path, gap_at):
    cells = {
        "Boston": [1, 2, 3, 1] * 10,
        "Lyon": [2, 1, 3, 3] * 10,
    }
    if gap_at is not None:
        cells[gap_at][5] = None  # pandas then writes 1.0 for 1

    data = ready(
        clients=write_hospitals(tmp_path, **cells),
        labels="ill",
        columns=CODES,
    )

    assert categories_of(data) == ["1", "2", "3"]


def test_classes_are_the_same_whatever_gaps_a_file_has(tmp_path):
    cells = {
        "Boston": [0, 1, 1, None] * 10,
        "Lyon": [1, 0, 0, 1] * 10,
    }
    files = write_hospitals(tmp_path, **cells)

    with pytest.warns(UserWarning, match="10 of 40 rows have no 'code'"):
        data = ready(clients=files, labels="code", columns={"exclude": ["ill"]})

    assert data.class_names == ("0", "1")


def test_a_gap_changes_no_code_beside_letters(tmp_path):
    cells = {
        "Boston": [1, 2, None, 2] * 10,
        "Lyon": ["1", "A", "2", "A"] * 10,
    }
    data = ready(
        clients=write_hospitals(tmp_path, **cells),
        labels="ill",
        columns=CODES,
    )

    assert categories_of(data) == ["1", "2", "A"]


def test_version_numbers_keep_their_zero(tmp_path):
    cells = {
        "Boston": ["1.0", "1.1"] * 20,
        "Lyon": ["2.0", "1.0"] * 20,
    }
    data = ready(
        clients=write_hospitals(tmp_path, **cells),
        labels="ill",
        columns=CODES,
    )

    assert categories_of(data) == ["1.0", "1.1", "2.0"]


@pytest.mark.parametrize(
    ("spelling", "other_spelling"),
    [("Male", "male"), ("New York", "New  York"), ("St", "St.")],
)
def test_spellings_of_a_category_are_refused_with_file_and_line(tmp_path, spelling, other_spelling):
    cells = {
        "Boston": [spelling, "other"] * 20,
        "Lyon": ["other", other_spelling] * 20,
    }
    files = write_hospitals(tmp_path, **cells)
    places = rf"{spelling!r} \(\S*Boston.csv, line 2\), {other_spelling!r} \(\S*Lyon.csv, line 3\)"
    places = places.replace("St.'", r"St\.'")
    with pytest.raises(ConfigurationError, match=f"'code' has {places}, which look like"):
        ready(clients=files, labels="ill", columns=CODES)

    data = ready(clients=files, labels="ill", columns={"exclude": ["code"]})
    assert data.input_shape == (1,)


def test_white_space_around_a_category_is_no_other_category(tmp_path):
    cells = {
        "Boston": ["male", "female"] * 20,
        "Lyon": [" male", "female "] * 20,
    }
    data = ready(clients=write_hospitals(tmp_path, **cells), labels="ill")

    assert categories_of(data) == ["female", "male"]


def test_spellings_of_a_label_are_refused_with_file_and_line(tmp_path):
    cells = {
        "Boston": ["no", "yes"] * 20,
        "Lyon": ["no", "yes."] * 20,
    }
    files = write_hospitals(tmp_path, **cells)

    places = r"'yes' \(\S*Boston.csv, line 3\), 'yes\.' \(\S*Lyon.csv, line 3\)"
    with pytest.raises(ConfigurationError, match=f"target 'code' has {places}"):
        ready(clients=files, labels="code", columns={"exclude": ["ill"]})


# Dates, against Python's own calendar

CAME = ["2024-02-28", "2023-12-31", "", "2024-03-01"]
LEFT = ["2024-03-01", "2024-01-02", "2024-05-05", "2024-03-01"]


def encoded(columns, came=CAME, typed=False):
    frame = pd.DataFrame({"came": came, "left": LEFT, "ill": ["a", "b"] * 2}, dtype=object)
    table = Table("stays.csv", frame.set_axis(range(2, 6)))
    if typed:
        frame = frame.replace("", None)
        table = frame_table(frame.assign(**{n: pd.to_datetime(frame[n]) for n in ("came", "left")}))
    encoder = TableEncoder(Columns(**columns), "ill")
    return encoder, encoder.features(table, [np.arange(4)]).numpy()


@pytest.mark.parametrize("typed", [False, True])
def test_dates_become_days_since_another_column_or_since_1970(typed):
    encoder, x = encoded({"dates": {"left": "came"}, "exclude": ["came"]}, typed=typed)
    stays = np.array([2.0, 2.0, np.nan, 0.0])
    assert encoder.feature_names == ("left", "left missing")
    np.testing.assert_allclose(
        x[:, 0], np.nan_to_num((stays - np.nanmean(stays)) / np.nanstd(stays)), atol=1e-6
    )
    assert x[:, 1].tolist() == [0, 0, 1, 0]
    encoder, x = encoded({"dates": {"left": "days"}, "exclude": ["came"]}, typed=typed)
    days = np.array([(dt.date.fromisoformat(day) - dt.date(1970, 1, 1)).days for day in LEFT])
    np.testing.assert_allclose(x[:, 0], (days - days.mean()) / days.std(), atol=1e-4)
    assert encoder.read[0].became == "days since 1970"


def test_dates_in_a_declared_format_are_read_and_others_refused():
    columns = {"dates": {"came": "days"}, "exclude": ["left"]}
    encoder, _ = encoded(
        {**columns, "date_format": "%d.%m.%Y"}, ["28.02.2024", "31.12.2023", "", "1.3.2024"]
    )
    assert encoder.read[0].values[[0, 1, 3]].tolist() == [19781, 19722, 19783]
    with pytest.raises(
        ConfigurationError,
        match="line 2: '28.02.2024' in 'came' is not a date.* formats YYYY-MM-DD",
    ):
        encoded(columns, ["28.02.2024", *CAME[1:]])
    with pytest.raises(
        ConfigurationError, match="'03/04/2024' in 'came' is not a date, or an ambiguous one"
    ):
        encoded(
            {**columns, "date_format": ["%d/%m/%Y", "%m/%d/%Y"]}, ["03/04/2024", "31/12/2023"] * 2
        )
    with pytest.raises(
        ConfigurationError, match="stays.csv: 'came' has dates, such as '2024-02-28'"
    ):
        encoded({"exclude": ["left"]})


def test_dates_with_a_time_zone_are_equal_from_csv_and_dataframe(tmp_path):
    hours = pd.date_range(
        "2024-03-30", periods=60, freq="h", tz="Europe/Paris"
    )  # clocks change in between
    frame = pd.DataFrame({"came": hours, "ill": [0, 1] * 30})
    frame.to_csv(tmp_path / "stays.csv", index=False)
    columns = {"dates": {"came": "days"}}
    frames, files = (
        ready(each, labels="ill", columns=columns) for each in (frame, str(tmp_path / "stays.csv"))
    )
    assert frames.content_hashes() == files.content_hashes()


# Notations: a suggested line is all that a user has to paste


def pasted(path, **columns):
    """Read a table that is refused first and then read with the options of the message; return options and values."""
    options = {"labels": "died", "groups": None if path.is_dir() else [i % 3 for i in range(60)]}
    with pytest.raises(ConfigurationError) as error:
        ready(str(path), columns=columns, **options)
    line = json.loads(str(error.value).splitlines()[-1].partition(": ")[2])
    exclude = line.get("exclude") == ["x"]
    return line, str(error.value) if exclude else ready(
        str(path), columns=line, **options
    ).column_cards[0].values


def written(path, cells, **more):
    died = np.random.default_rng(0).permutation(np.resize(["yes", "no", "no"], 60))
    frame = pd.DataFrame({"x": np.resize(cells, 60), "y": np.arange(60.0), "died": died, **more})
    frame.to_csv(path, index=False, sep=";")
    return path


@pytest.mark.parametrize(
    ("cells", "line", "numbers"),
    [
        (["81,5", "78.0", "90"], {"decimal": ","}, [81.5, 78.0, 90.0]),
        (
            ["1.234,56", "78,5", "12.345.678"],
            {"decimal": ",", "thousands": "."},
            [1234.56, 78.5, 12345678.0],
        ),
        (["1,234.56", "78.5", "90"], {"thousands": ","}, [1234.56, 78.5, 90.0]),
        (
            ["1 234,5", "78,5", "1\u202f250"],
            {"decimal": ",", "thousands": " "},
            [1234.5, 78.5, 1250.0],
        ),
        # which it is, nobody knows
        (
            ["1,234", "56", "78"],
            {"exclude": ["x"]},
            "several notations are possible (thousands: ',' or decimal: ',')",
        ),
        (["12.500", "0,5", "90"], {"exclude": ["x"]}, "others are in another notation"),
        (
            ["01/02/2024", "03/04/2024", ""],
            {"exclude": ["x"]},
            "whether the day or the month comes first is not clear",
        ),
        (["31.12.2023", "1.2.2024", ""], ["%d.%m.%Y"], ["2023-12-31", "2024-02-01"]),
        (["12/31/2023", "01/02/2024", ""], ["%m/%d/%Y"], ["2023-12-31", "2024-01-02"]),
        (
            ["31.12.2023 00:00", "1.2.2024", ""],
            ["%d.%m.%Y", "%d.%m.%Y %H:%M"],
            ["2023-12-31", "2024-02-01"],
        ),
        # measurements with words among them
        (
            [*map(str, range(20)), "<1.5"],
            {"gaps": {"x": ["<1.5"]}},
            [*map(float, range(20)), np.nan],
        ),
    ],
)
def test_numbers_and_dates_in_another_notation_are_read_by_the_suggested_line_or_refused(
    tmp_path, cells, line, numbers
):
    if isinstance(line, list):
        line = {"dates": {"x": "days"}, "date_format": line}
        numbers = [
            *((pd.Timestamp(day) - pd.Timestamp(1970, 1, 1)).days for day in numbers),
            np.nan,
        ]
    found, values = pasted(written(tmp_path / "all.csv", cells))
    assert found == line
    if isinstance(numbers, str):
        assert numbers in values
    else:
        np.testing.assert_array_equal(values, np.resize(numbers, 60))


@pytest.mark.parametrize("cells", [["1.2.3", "1.2.4", "2.0.1"], ["low", "high", "1,5"]])
def test_words_that_are_no_numbers_in_any_notation_are_categories(tmp_path, cells):
    path = written(tmp_path / "all.csv", cells)
    cards = ready(str(path), labels="died", groups=[i % 3 for i in range(60)]).column_cards
    assert cards[0].kind == "categories"


def values_of(path, columns):
    """Return the numbers of the column x of a table."""
    groups = [row % 3 for row in range(60)]
    data = ready(str(path), labels="died", groups=groups, columns=columns)
    card = data.column_cards[0]
    return card.values.tolist()


GERMAN = {"decimal": ",", "thousands": "."}
POINTS = ["25.548", "873", "1.412"]
COMMAS = ["25,548", "873", "1,412"]


@pytest.mark.parametrize(
    ("cells", "stated", "expected"),
    [
        (POINTS, GERMAN, [25548, 873, 1412]),
        (POINTS, {"thousands": ","}, [25.548, 873, 1.412]),
        (COMMAS, {"thousands": ","}, [25548, 873, 1412]),
        (COMMAS, {"decimal": ","}, [25.548, 873, 1.412]),
        (["2.500", "1,5"], GERMAN, [2500, 1.5]),
        (["2.500", "1.5"], GERMAN, [2.5, 1.5]),
    ],
)
def test_stated_notation_is_obeyed_also_where_nothing_shows_it(tmp_path, cells, stated, expected):
    table = written(tmp_path / "all.csv", cells)
    values = values_of(table, stated)
    assert values == pytest.approx(np.resize(expected, 60).tolist())


@pytest.mark.parametrize(
    "cells",
    [
        POINTS,
        ["-1.412", "", "0"],
        ["999.999", "+5"],
    ],
)
def test_points_that_may_separate_thousands_are_refused_by_name(tmp_path, cells):
    table = written(tmp_path / "all.csv", cells)
    message = r"all.csv, line \d.* in 'x' is .* separates thousands"
    with pytest.raises(ConfigurationError, match=message):
        values_of(table, {})
    options, _ = pasted(table)
    assert options == GERMAN


def test_points_that_may_separate_thousands_are_refused_in_each_file(tmp_path):
    written(tmp_path / "Boston.csv", ["13733.5", "873"])
    written(tmp_path / "Graz.csv", ["13.733", "873"])
    message = "'13.733' in 'x' is 13733 if the point"
    with pytest.raises(ConfigurationError, match=message):
        ready(str(tmp_path), labels="died")


@pytest.mark.parametrize("other_cell", ["0.873", "87.3", "1000"])
def test_points_beside_numbers_without_thousands_are_decimal(tmp_path, other_cell):
    cells = ["1.412", other_cell]
    table = written(tmp_path / "all.csv", cells)
    expected = [float(cell) for cell in cells]
    assert values_of(table, {}) == np.resize(expected, 60).tolist()


def test_decimal_points_of_one_file_stay_decimal_beside_commas_of_another(tmp_path):
    """Lyon's commas do not make thousands of Boston's 1.250."""
    for name, cells in {
        "Boston": ["1.250", "0.980"],
        "Lyon": ["1,250", "0,980"],
        "Osaka": ["1", "2"],
    }.items():
        written(tmp_path / f"{name}.csv", cells)
    line, values = pasted(tmp_path)
    assert line == {"decimal": ","}
    assert values.tolist() == [1.25, 0.98] * 60 + [1.0, 2.0] * 30


def test_ambiguous_dates_do_not_take_the_day_month_order_of_another_file(tmp_path):
    """Lyon's 08/11/2023 may be of August or of November, whatever Boston's 12/31/2023 is."""
    written(tmp_path / "Boston.csv", ["12/31/2023", "11/30/2023"])
    written(tmp_path / "Lyon.csv", ["08/11/2023", "03/12/2023"])
    assert pasted(tmp_path)[0] == {"exclude": ["x"]}


def test_file_in_another_encoding_is_refused_unless_the_encoding_is_named(tmp_path):
    (tmp_path / "Boston.csv").write_text("ward,ill\n" + "Süd,0\nNord,1\n" * 20, "utf-8-sig")
    (tmp_path / "Lyon.csv").write_text("ward,ill\n" + "Süd,0\nNord,1\n" * 20, "cp1252")
    with pytest.raises(
        ConfigurationError, match="Lyon.csv: this is not UTF-8 .* columns: ..encoding.: .cp1252"
    ):
        ready(str(tmp_path), labels="ill")
    with pytest.raises(ConfigurationError, match="Lyon.csv: this is not ascii"):
        ready(str(tmp_path), labels="ill", columns={"encoding": "ascii"})
    (card,) = ready(str(tmp_path), labels="ill", columns={"encoding": "cp1252"}).column_cards
    assert card.categories == ["Nord", "Süd"]


def test_utf_16_is_read_by_its_mark_and_named_without_one(tmp_path):
    path = tmp_path / "all.csv"
    text = "ward,ill\n" + "Nord,0\nWest,1\n" * 20
    path.write_text(text, "utf-16")
    groups = [row % 2 for row in range(40)]
    marked = ready(str(path), labels="ill", groups=groups)
    assert marked.column_cards[0].categories == ["Nord", "West"]

    path.write_text(text, "utf-16-le")
    with pytest.raises(ConfigurationError, match="zero bytes.*encoding.: .utf-16-le"):
        ready(str(path), labels="ill", groups=groups)
    stated = {"encoding": "utf-16-le"}
    unmarked = ready(str(path), labels="ill", groups=groups, columns=stated)
    assert unmarked.column_cards[0].categories == ["Nord", "West"]


def test_delimiters_are_found_file_by_file(tmp_path):
    for name, mark in {"Boston": ",", "Lyon": ";", "Osaka": "\t"}.items():
        pd.DataFrame(PATIENTS).to_csv(tmp_path / f"{name}.csv", index=False, sep=mark)
    data = ready(str(tmp_path), labels="ill")
    np.testing.assert_array_equal(data.column_cards[0].values, AGE * 3)


def test_numeric_gap_mark_matches_any_notation_of_the_number(tmp_path):
    """pandas writes -99 as -99.0 where there are decimals: CSV and DataFrame alike."""
    frame = pd.DataFrame(
        {"lab": [1.5, -99.0, 2.5, 3.0] * 10, "code": ["07", "7"] * 20, "ill": [0, 1] * 20}
    )
    frame.to_csv(tmp_path / "lab.csv", index=False)
    for given in (frame, str(tmp_path / "lab.csv")):
        for each in (["-99"], {"lab": [-99]}, {"lab": ["-99.0"], "code": ["7"]}):
            cards = {
                card.name: card
                for card in ready(given, labels="ill", columns={"gaps": each}).column_cards
            }
            assert cards["lab"].values.isna().sum() == 10
            assert cards["code"].values.isna().sum() == (
                20 if "code" in each else 0
            )  # 07 is another
    with pytest.raises(ConfigurationError, match=r"no column 'lob' \(gaps\). It has .*lab"):
        ready(frame, labels="ill", columns={"gaps": {"lob": ["-99"]}})


# Numbers, against NumPy


def test_table_features_equal_those_from_sums_squares_and_categories_of_each_client():
    """Counts, sums, sums of squares and sets of categories of each client's training rows give the same features."""
    clients = {
        "Boston": patients(30, 1),
        "Lyon": patients(50, 2, 20.0),
        "Köln": patients(20, 3, -5.0),
    }
    data = ready(
        clients=clients,
        labels="ill",
        server_val=0.2,
        client_val=0.1,
        client_test=0.1,
        test=patients(10, 4),
    )
    ages, wards = (
        np.concatenate([np.array(frame[name]) for frame in clients.values()])
        for name in ("age", "ward")
    )
    held = [data.client_indices(client).numpy() for client in range(3)]
    sent = [(len(rows), ages[rows].sum(), (ages[rows] ** 2).sum()) for rows in held]
    count, total, squares = map(sum, zip(*sent))
    mean, deviation = total / count, np.sqrt(squares / count - (total / count) ** 2)
    categories = sorted(set().union(*(wards[rows] for rows in held)))
    expected = np.column_stack(
        [(ages - mean) / deviation, *(wards == category for category in categories)]
    )
    (found, _), (tested, _) = data._data.train.tensors, data._data.test.tensors
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    assert categories == ["A", "B", "only 1", "only 2", "only 3"]
    age, ward = (
        np.array(patients(10, 4)[name]) for name in ("age", "ward")
    )  # some are of a ward that nobody knows
    expected = np.column_stack(
        [(age - mean) / deviation, *(ward == category for category in categories)]
    )
    np.testing.assert_allclose(tested, expected, atol=1e-5)


@pytest.mark.parametrize(
    "library", ["pandas", "polars", "pyarrow", "datasets", "hugging face", "csv", "parquet"]
)
def test_dataframes_of_every_library_give_the_same_data(library, tmp_path):
    if library == "csv":
        pd.DataFrame(PATIENTS).to_csv(made := tmp_path / "wards.csv", index=False)
    elif library == "parquet":
        pytest.importorskip("pyarrow")
        pd.DataFrame(PATIENTS).to_parquet(made := tmp_path / "wards.parquet")
    elif library == "hugging face":
        made = HuggingFace(PATIENTS)
    else:
        module = pytest.importorskip(library)
        made = {"pyarrow": "table", "datasets": "Dataset"}.get(library, "DataFrame")
        made = (
            getattr(module, made)(PATIENTS)
            if library != "datasets"
            else module.Dataset.from_dict(PATIENTS)
        )
    found, expected = (
        ready(each, labels="ill", groups="ward") for each in (made, Frame(**PATIENTS))
    )
    assert found.client_names == expected.client_names == ("Boston", "Köln / Ost", "Lyon")
    assert found.class_names == ("0", "1")
    assert found.content_hashes() == expected.content_hashes()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([0.1] * ROWS, "all training rows have the same 'y'"),
        ([1e300, *AGE[1:]], "'1e.300' in 'y' .target. is not"),
    ],
)
def test_targets_that_would_be_nan_or_infinite_are_refused(target, message):
    columns = Columns(task="regression", standardize_target=True)
    with pytest.raises(ConfigurationError, match=message):
        ready(Frame(x=list(range(ROWS)), y=target), labels="y", columns=columns)


def test_equal_tables_have_equal_hashes():
    clients = {name: patients(30, seed) for name, seed in (("a", 1), ("b", 2), ("c", 1))}
    hashes = sample_hashes(ready(clients=clients, labels="ill", server_val=0))
    assert hashes["0"] == hashes["2"] != hashes["1"]


def clinic(rng, rows=40, **more):
    days = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 300, rows), unit="D")
    return pd.DataFrame(
        {
            "came": days.strftime("%d.%m.%Y"),
            "name": [f"name {i}" for i in rng.permutation(1000)[:rows]],
            "score": [*rng.normal(size=rows - 1).round(3).astype(str), "not done"],
            "lab": [""] * rows,
            "age": rng.integers(20, 90, rows),
            "ill": np.where(rng.random(rows) < 0.5, "yes", "no"),
            **more,
        }
    )


def test_unusable_columns_are_in_one_message_whose_line_repairs_them(tmp_path):
    rng = np.random.default_rng(0)
    for name, more in (("Boston", {}), ("Lyon", {"insurer": "A"}), ("val", {})):
        clinic(rng, **more).to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.raises(ConfigurationError) as found:
        ready(str(tmp_path), labels="ill", columns={"categorical": ["age"], "max_categories": 75})
    options = yaml.safe_load(str(found.value).splitlines()[-1])["columns"]
    assert options == {
        "exclude": ["name", "lab", "insurer"],
        "dates": {"came": "days"},
        "date_format": ["%d.%m.%Y"],
        "categorical": ["age"],
        "gaps": {"score": ["not done"]},
        "max_categories": 75,
    }
    cards = {
        card.name: card for card in ready(str(tmp_path), labels="ill", columns=options).column_cards
    }
    assert {name: card.kind for name, card in cards.items()} == {
        "came": "days since 1970",
        "score": "numbers",
        "age": "categories",
    }
    assert cards["score"].values.isna().sum() == 2
