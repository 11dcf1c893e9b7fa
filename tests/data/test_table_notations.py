"""Numbers, dates, encodings and gaps in tables: by which notation each file is read, and what is not clear."""

import numpy as np
import pandas as pd
import pytest

from flsv.data import Columns
from flsv.data.sources import column_values
from flsv.data.sources.column_values import read_column
from flsv.data.sources.encoder import TableEncoder
from flsv.data.sources.frames import concatenated_tables, frame_table, read_table_file
from flsv.data.sources.table import Table
from flsv.utilities.errors import ColumnError, ConfigurationError
from helpers.data import set_up_data

CAME = ["2024-02-28", "2023-12-31", "", "2024-03-01"]


LEFT = ["2024-03-01", "2024-01-02", "2024-05-05", "2024-03-01"]


def make_stays(came=CAME):
    """A frame of texts."""
    columns = {
        "came": came,
        "left": LEFT,
        "ill": ["a", "b"] * 2,
    }
    return pd.DataFrame(columns, dtype=object)


def make_stays_file(came=CAME):
    """A table whose rows are the lines 2 to 5 of a file."""
    lines = range(2, 6)
    frame = make_stays(came)
    return Table("stays.csv", frame.set_axis(lines))


def make_stays_with_timestamps():
    frame = make_stays().replace("", None)
    for name in ("came", "left"):
        frame[name] = pd.to_datetime(frame[name])
    return frame_table(frame)


def encode_stays(table, **columns):
    encoder = TableEncoder(Columns(**columns), "ill")
    features = encoder.features(table, [np.arange(4)])
    return encoder, features.numpy()


def days_since_1970(dates):
    first_day = pd.Timestamp("1970-01-01")
    return [(pd.Timestamp(date) - first_day).days for date in dates]


DAYS_OF_ARRIVAL = {"dates": {"came": "days"}, "exclude": ["left"]}


def test_date_that_two_declared_formats_read_differently_is_refused():
    table = make_stays_file(["03/04/2024", "31/12/2023"] * 2)

    with pytest.raises(
        ConfigurationError, match="'03/04/2024' in 'came' is not a date, or an ambiguous one"
    ):
        encode_stays(table, **DAYS_OF_ARRIVAL, date_format=["%d/%m/%Y", "%m/%d/%Y"])


def test_dates_with_a_time_zone_are_equal_from_csv_and_dataframe(tmp_path):
    # Clocks change in between.
    hours = pd.date_range(
        "2024-03-30",
        periods=60,
        freq="h",
        tz="Europe/Paris",
    )
    columns = {"came": hours, "ill": [0, 1] * 30}
    frame = pd.DataFrame(columns)
    path = tmp_path / "stays.csv"
    frame.to_csv(path, index=False)

    days = {"dates": {"came": "days"}}
    of_frame = set_up_data(frame, labels="ill", columns=days)
    of_file = set_up_data(str(path), labels="ill", columns=days)

    assert of_frame.content_hashes() == of_file.content_hashes()


@pytest.mark.parametrize("make_table", [make_stays_file, make_stays_with_timestamps])
def test_dates_become_days_since_another_column(make_table):
    table = make_table()

    encoder, x = encode_stays(
        table,
        dates={"left": "came"},
        exclude=["came"],
    )

    # From February 28 to March 1 of a leap year, over New Year, not known, and none.
    days = np.array([2.0, 2.0, np.nan, 0.0])
    differences = days - np.nanmean(days)
    standardized = differences / np.nanstd(days)
    expected = np.nan_to_num(standardized)
    lengths, marks = x.T
    assert encoder.feature_names == ("left", "left missing")
    np.testing.assert_allclose(lengths, expected, atol=1e-6)
    assert marks.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("make_table", [make_stays_file, make_stays_with_timestamps])
def test_dates_become_days_since_1970(make_table):
    table = make_table()

    encoder, x = encode_stays(
        table,
        dates={"left": "days"},
        exclude=["came"],
    )

    days = np.array(days_since_1970(LEFT))
    differences = days - days.mean()
    standardized = differences / days.std()
    np.testing.assert_allclose(x[:, 0], standardized, atol=1e-4)
    assert encoder.read[0].became == "days since 1970"


ROWS = 60  # of each table that write_table writes
GROUPS = [row % 3 for row in range(ROWS)]


def write_table(path, cells):
    """The cells of the column x are repeated."""
    labels = np.resize(["yes", "no", "no"], ROWS)
    columns = {
        "x": repeat(cells),
        "y": range(ROWS),
        "died": np.random.default_rng(0).permutation(labels),
    }
    pd.DataFrame(columns).to_csv(path, index=False, sep=";")
    return path


def repeat(cells):
    return np.resize(cells, ROWS)


@pytest.mark.parametrize(
    "cells",
    [
        ["81,5", "78.0", "90"],
        ["1.234,56", "78,5", "12.345.678"],
        ["1,234.5", "1.234,5", "90"],
        ["1,234.56", "78.5", "90"],
        ["1 234,5", "78,5", "1\u202f250"],
        ["1'234.5", "78.5", "90"],
    ],
)
def test_numbers_in_a_notation_that_is_not_stated_are_refused(tmp_path, cells):
    table = write_table(tmp_path / "all.csv", cells)
    message = r"all.csv, line \d: .* in 'x' is a number in another notation. Set decimal"
    with pytest.raises(ConfigurationError, match=message):
        read_numbers(table, {})


def test_word_among_numbers_is_refused_with_the_ways_to_read_it(tmp_path):
    table = write_table(tmp_path / "all.csv", [*map(str, range(20)), "<1.5"])
    message = r"'<1.5' in 'x' is not a valid number, .* \(gaps: .'x': \['<1.5'\].\), two codings"

    with pytest.raises(ConfigurationError, match=message):
        read_numbers(table, {})

    numbers = read_numbers(table, {"gaps": {"x": ["<1.5"]}})
    np.testing.assert_array_equal(numbers, repeat([*map(float, range(20)), np.nan]))


@pytest.mark.parametrize(
    ("cells", "date_format", "dates"),
    [
        (["31.12.2023", "1.2.2024", ""], "%d.%m.%Y", ["2023-12-31", "2024-02-01"]),
        (["12/31/2023", "01/02/2024", ""], "%m/%d/%Y", ["2023-12-31", "2024-01-02"]),
        (["31.12.2023 00:00", "1.2.2024", ""], "%d.%m.%Y", ["2023-12-31", "2024-02-01"]),
    ],
)
def test_dates_are_refused_until_their_format_is_stated(tmp_path, cells, date_format, dates):
    table = write_table(tmp_path / "all.csv", cells)
    to_days = {"dates": {"x": "days"}}

    with pytest.raises(ConfigurationError, match="'x' has dates, such as .* need a date_format"):
        read_numbers(table, {})
    with pytest.raises(ConfigurationError, match="is not a date.*: set date_format"):
        read_numbers(table, to_days)

    numbers = read_numbers(table, {**to_days, "date_format": date_format})
    days = [*days_since_1970(dates), np.nan]  # the last cell is empty
    np.testing.assert_array_equal(numbers, repeat(days))


@pytest.mark.parametrize(
    "cells",
    [
        ["1.2.3", "1.2.4", "2.0.1"],
        ["low", "high", "1,5"],
    ],
)
def test_words_that_are_no_numbers_in_any_notation_are_categories(tmp_path, cells):
    path = write_table(tmp_path / "all.csv", cells)
    data = set_up_data(str(path), labels="died", groups=GROUPS)
    assert data.column_cards[0].kind == "categories"


def read_numbers(path, columns, groups=GROUPS):
    """Return the numbers of the column x of a table."""
    data = set_up_data(str(path), labels="died", groups=groups, columns=columns)
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
        (["1.234,56", "12.345.678"], GERMAN, [1234.56, 12345678.0]),
        (["1 234,5", "1\u202f250"], {"decimal": ",", "thousands": " "}, [1234.5, 1250.0]),
    ],
)
def test_stated_notation_is_obeyed_also_where_nothing_shows_it(tmp_path, cells, stated, expected):
    table = write_table(tmp_path / "all.csv", cells)
    values = read_numbers(table, stated)
    assert values == pytest.approx(repeat(expected).tolist())


@pytest.mark.parametrize(
    "cells",
    [
        POINTS,
        ["-1.412", "", "0"],
        ["999.999", "+5"],
    ],
)
def test_points_that_may_separate_thousands_are_refused_by_name(tmp_path, cells):
    table = write_table(tmp_path / "all.csv", cells)
    message = r"all.csv, line \d.* in 'x' is .* separates thousands"

    with pytest.raises(ConfigurationError, match=message):
        read_numbers(table, {})


def test_points_that_may_separate_thousands_are_refused_in_each_file(tmp_path):
    write_table(tmp_path / "Boston.csv", ["13733.5", "873"])
    write_table(tmp_path / "Graz.csv", ["13.733", "873"])
    message = "'13.733' in 'x' is 13733 if the point"
    with pytest.raises(ConfigurationError, match=message):
        set_up_data(str(tmp_path), labels="died")


@pytest.mark.parametrize("other_cell", ["0.873", "87.3", "1000"])
def test_points_beside_numbers_without_thousands_are_decimal(tmp_path, other_cell):
    cells = ["1.412", other_cell]
    table = write_table(tmp_path / "all.csv", cells)
    expected = [float(cell) for cell in cells]
    assert read_numbers(table, {}) == repeat(expected).tolist()


@pytest.mark.parametrize("cells", [["2.500", "1.5"], ["12.5", "12,5"]])
def test_points_that_separate_no_thousands_are_refused_beside_decimal_commas(tmp_path, cells):
    table = write_table(tmp_path / "all.csv", cells)
    with pytest.raises(ConfigurationError, match="is a number in another notation"):
        read_numbers(table, GERMAN)


def test_file_in_another_encoding_is_refused_unless_the_encoding_is_named(tmp_path):
    rows = "Süd,0\nNord,1\n" * 20
    text = f"ward,ill\n{rows}"
    (tmp_path / "Boston.csv").write_text(text, "utf-8-sig")
    (tmp_path / "Lyon.csv").write_text(text, "cp1252")

    with pytest.raises(
        ConfigurationError, match="Lyon.csv: this is not UTF-8 .* columns: ..encoding.: .cp1252"
    ):
        set_up_data(str(tmp_path), labels="ill")

    with pytest.raises(ConfigurationError, match="Lyon.csv: this is not ascii"):
        set_up_data(str(tmp_path), labels="ill", columns={"encoding": "ascii"})

    stated = {"encoding": "cp1252"}
    data = set_up_data(str(tmp_path), labels="ill", columns=stated)
    (card,) = data.column_cards
    assert card.categories == ["Nord", "Süd"]


def test_utf_16_is_read_by_its_mark_and_named_without_one(tmp_path):
    path = tmp_path / "all.csv"
    text = "ward,ill\n" + "Nord,0\nWest,1\n" * 20
    path.write_text(text, "utf-16")
    groups = [row % 2 for row in range(40)]
    marked = set_up_data(str(path), labels="ill", groups=groups)

    assert marked.column_cards[0].categories == ["Nord", "West"]

    path.write_text(text, "utf-16-le")
    with pytest.raises(ConfigurationError, match="zero bytes.*encoding.: .utf-16-le"):
        set_up_data(str(path), labels="ill", groups=groups)

    stated = {"encoding": "utf-16-le"}
    unmarked = set_up_data(str(path), labels="ill", groups=groups, columns=stated)

    assert unmarked.column_cards[0].categories == ["Nord", "West"]


def test_numeric_gap_mark_matches_any_notation_of_the_number(tmp_path):
    """pandas writes -99 as -99.0 where there are decimals: CSV and DataFrame alike."""
    columns = {
        "lab": [1.5, -99.0, 2.5, 3.0] * 10,
        "code": ["07", "7"] * 20,
        "ill": [0, 1] * 20,
    }
    frame = pd.DataFrame(columns)
    frame.to_csv(tmp_path / "lab.csv", index=False)

    for source in (frame, str(tmp_path / "lab.csv")):
        for gaps in (
            ["-99"],
            {"lab": [-99]},
            {"lab": ["-99.0"], "code": ["7"]},
        ):
            data = set_up_data(source, labels="ill", columns={"gaps": gaps})
            lab, code = (card.values.isna().sum() for card in data.column_cards)
            assert lab == 10
            assert code == (20 if "code" in gaps else 0)  # 07 is another

    with pytest.raises(ConfigurationError, match=r"no column 'lob' \(gaps\). It has .*lab"):
        set_up_data(frame, labels="ill", columns={"gaps": {"lob": ["-99"]}})


#: Texts of random columns: those of a group are usual beside each other, and each may stand beside any other.
TEXT_GROUPS = (
    ["1", "2", "37", "873", "-5", "+8"],
    ["25.548", "1.234", "12.5", "-0.25", " 7.0 ", "1e3"],
    ["", "NA", "?", "nan", "-999", "-999.0", "."],
    ["007", "01.5", "-03", "0.5", "0", "00"],
    ["True", "false", "1_000", "inf", "1e39", "1e400"],
    ["A", "b ", "2024-01-31", "1,5", "1.234,5", "\u0661\u0662"],
)
SETS_OF_OPTIONS = (
    {},
    {"gaps": ["-999"]},
    {"gaps": {"lab": ["-999", "7"]}},
    {"gaps": []},
    {"decimal": ","},
    {"thousands": ","},
    {"categorical": ["lab"]},
)


def write_random_files(generator, folder):
    """A column in one or two files, with texts of one to three groups. Some are in quotation marks."""
    num_groups = generator.integers(1, 4)
    texts_of_groups = []
    for group in generator.choice(len(TEXT_GROUPS), num_groups, replace=False):
        texts_of_groups += TEXT_GROUPS[group]
    num_texts = generator.integers(1, 7)
    texts = generator.choice(texts_of_groups, num_texts, replace=False)

    files = []
    num_files = generator.integers(1, 3)
    for number in range(num_files):
        num_rows = generator.integers(1, 9)
        quote = generator.choice(["", '"'], p=[0.7, 0.3])
        lines = ["lab;row"]
        for row, cell in enumerate(generator.choice(texts, num_rows)):
            lines.append(f"{quote}{cell}{quote};{row}")
        path = folder / f"{number}.csv"
        path.write_text("\n".join(lines))
        files.append(path)
    return files


def read_or_refusal(files, options, text_names=()):
    columns = Columns(**options)
    tables = [read_table_file(path, columns, text_names=text_names) for path in files]
    try:
        kind, values = read_column(concatenated_tables(tables), "lab", columns)
    except ColumnError as error:
        return str(error), error.remedy
    return kind, values.tolist()


def test_random_columns_of_plain_numbers_are_read_as_text_by_text(tmp_path):
    generator = np.random.default_rng(0)
    for options in SETS_OF_OPTIONS * 58:
        files = write_random_files(generator, tmp_path)
        result = read_or_refusal(files, options)
        result_text_by_text = read_or_refusal(files, options, text_names=["lab"])
        assert repr(result) == repr(result_text_by_text)  # NaN is shown, too


def test_plain_numbers_need_no_reading_text_by_text(tmp_path, monkeypatch):
    path = tmp_path / "lab.csv"
    path.write_text("lab,row\n1,0\n2.5,1\nNA,2\n-999,3\n3e2,4\n")
    columns = Columns(gaps={"lab": ["-999"]})
    table = read_table_file(path, columns)

    monkeypatch.delattr(column_values, "_kind_and_numbers")
    kind, values = read_column(table, "lab", columns)

    assert kind == "numbers"
    np.testing.assert_equal(values.to_numpy(), [1, 2.5, np.nan, np.nan, 300])
