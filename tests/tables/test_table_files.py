"""Tables: how files are read, which number formats are recognized, and which kinds columns are taken for."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from flsv.tables import Column
from flsv.tables.dictionary import NUMBERS
from flsv.tables.table import FileFormat, Table, open_table
from helpers import refused
from helpers.data import set_up_data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "table.csv is empty"),
        ("a,a\n1,2\n", "table.csv has columns with the names 'a', 'a'"),
        (",a\n1,2\n", "table.csv has columns with the names ''"),
        ("a,b\n1,2\n1,2,3\n", "line 3: the row has 3 fields, but the header has 2 names"),
        ("a,b\n1,2\na , b\n", "line 3: the header is repeated"),
        ('a,b\n"x" y,2\n"x,2\n', "line 3: the row has 1 fields, but the header has 2 names"),
    ],
)
def test_read_csv_of_a_broken_table_raises(tmp_path, text, message):
    (tmp_path / "table.csv").write_text(text)
    with refused(f"(?s){message}"):
        open_table(tmp_path / "table.csv")


def test_lines_are_those_of_the_file(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text('\na\tb\n1\t"x\ny"\n\n2\tz\n')

    lines = open_table(path).lines()
    assert lines.tolist() == [4, 6]


def numbers_in(path: Path, texts: list[str], column: Column, **notation: Any) -> list[float]:
    """The values of a column of a file, NaN for gaps."""
    table = pd.DataFrame({"x": texts, "y": 0})
    table.to_csv(path, index=False, sep=";")

    file_format = FileFormat(**notation)
    table = open_table(path, file_format=file_format)
    values, is_misfit = column.values(table, "x")
    assert not is_misfit.any(), values[is_misfit]
    return values.tolist()


GERMAN = {"decimal": ",", "thousands": "."}
POINTS = ["25.548", "873", "1.412"]
COMMAS = ["25,548", "873", "1,412"]


@pytest.mark.parametrize(
    ("texts", "notation", "expected"),
    [
        (POINTS, GERMAN, [25548, 873, 1412]),
        (COMMAS, {"thousands": ","}, [25548, 873, 1412]),
        (COMMAS, {"decimal": ","}, [25.548, 873, 1.412]),
        (["1.234,56", "12.345.678"], GERMAN, [1234.56, 12345678.0]),
        (["1 234,5", "1\u202f250"], {"decimal": ",", "thousands": " "}, [1234.5, 1250.0]),
        ([" 7.0 ", "1e3", "-.5", "+8", "5."], {}, [7, 1000, -0.5, 8, 5]),
    ],
)
def test_stated_notation_is_obeyed_also_where_nothing_shows_it(tmp_path, texts, notation, expected):
    path = tmp_path / "all.csv"
    numbers = numbers_in(path, texts, Column(NUMBERS), **notation)
    assert numbers == expected


@pytest.mark.parametrize("texts", [["2.500", "1.5"], ["12.5", "12,5"]])
def test_points_that_separate_no_thousands_do_not_fit_beside_decimal_commas(tmp_path, texts):
    path = tmp_path / "all.csv"
    column = Column(NUMBERS)
    with pytest.raises(AssertionError):
        numbers_in(path, texts, column, **GERMAN)


def test_marks_of_gaps_match_any_notation_of_a_number(tmp_path):
    """pandas writes -99 as -99.0 where there are decimals: CSV and DataFrame alike."""
    columns = {"lab": [1.5, -99.0, 2.5], "code": ["07", "7", " NA "]}
    frame = pd.DataFrame(columns)
    path = tmp_path / "lab.csv"
    frame.to_csv(path, index=False)
    categories = {"kind": "categories", "categories": ["07", "7", "NA"]}
    is_second = [False, True, False]

    for source, num_usual_gaps in ((frame, 0), (path, 1)):
        table = open_table(source)
        for marks in (["-99"], ["-99.0"]):
            column = Column(NUMBERS, gaps=marks)
            lab, _ = column.values(table, "lab")
            assert lab.isna().tolist() == is_second

        column = Column(gaps=["7"], **categories)
        codes, _ = column.values(table, "code")
        assert codes.isna().tolist() == is_second  # 07 is another

        # The usual marks are of text files: in a frame, NA is a word.
        column = Column(**categories)
        codes, _ = column.values(table, "code")
        assert codes.isna().sum() == num_usual_gaps


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["30", "4.5", "-1e3", ""], "numbers"),
        (["1.412", "0.873"], "numbers"),
        (["1.412", "1000"], "numbers"),
        (["7", "8", "NA"], "whole numbers"),
        (["1.2.3", "1.2.4", "2.0.1"], "categories"),
        (["True", "False", ""], "truth values"),
        ([f"x{row}" for row in range(50)], "categories"),
    ],
)
def test_kinds_of_columns(tmp_path, texts, kind):
    columns = {"x": np.resize(texts, 300), "ill": [0, 1] * 150}
    path = tmp_path / "all.csv"
    pd.DataFrame(columns).to_csv(path, index=False)

    data = set_up_data(str(path), labels="ill")

    column = data.dictionary.columns["x"]
    assert column.kind == kind


def test_kinds_of_the_dictionary_replace_inference(tmp_path):
    """Sixty words, points that separate no thousands, a mark of a gap, and dates in two notations."""
    columns = {
        "word": [f"name {row}" for row in range(60)],
        "point": np.resize(POINTS, 60),
        "lab": np.resize(["1.5", "2.5", "<1"], 60),
        "came": "31.12.2023",
        "left": "2.1.2024",
        "ill": [0, 1] * 30,
    }
    path = tmp_path / "all.csv"
    pd.DataFrame(columns).to_csv(path, index=False)
    dictionary = {
        "excluded": ["came"],
        "columns": {
            "word": {"kind": "categories"},
            "point": {"kind": "numbers"},
            "lab": {"gaps": ["<1"]},
            "left": {"kind": "days since came"},
        },
        "read": {"all.csv": {"date_format": "%d.%m.%Y"}},
    }

    data = set_up_data(str(path), labels="ill", dictionary=dictionary, server_val=0.0)

    columns = data.dictionary.columns
    assert len(columns["word"].categories) == 60
    expected_mean = (25.548 + 873 + 1.412) / 3
    assert columns["point"].mean == pytest.approx(expected_mean)
    assert columns["lab"].mean == pytest.approx(2)
    assert columns["left"].mean == 2
    assert columns["left"].scale == 0


def test_version_numbers_keep_their_zero():
    versions = ["1.0", "1.1", "2.0"]
    table = Table(pd.DataFrame({"x": versions}))
    assert table.words("x").tolist() == versions


def test_file_in_another_encoding_is_refused_unless_the_encoding_is_named(tmp_path):
    text = "ward,ill\n" + "Süd,0\nNord,1\n" * 20
    (tmp_path / "Boston.csv").write_text(text, "utf-8-sig")
    (tmp_path / "Lyon.csv").write_text(text, "cp1252")
    (tmp_path / "Osaka.csv").write_text(text, "utf-16")

    message = 'Lyon.csv cannot be decoded as utf-8-sig: .*read: ."Lyon.csv": ."encoding": "cp1252"'
    with refused(message):
        set_up_data(str(tmp_path), labels="ill")

    formats = {"Lyon.csv": {"encoding": "cp1252"}, "Osaka": {"encoding": "utf-16"}}
    dictionary = {"read": formats}
    data = set_up_data(str(tmp_path), labels="ill", dictionary=dictionary)
    ward_column = data.dictionary.columns["ward"]
    assert ward_column.categories == ("Nord", "Süd")
