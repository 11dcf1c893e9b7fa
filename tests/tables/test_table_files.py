"""Tables: how files are read, which number formats are recognized, and which kinds columns are taken for."""

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
    lines_of_file = ["", "a\tb", '1\t"x', 'y"', "", "2\tz", ""]
    path.write_text("\n".join(lines_of_file))

    lines_at_which_rows_end = open_table(path).lines()

    assert lines_at_which_rows_end.tolist() == [4, 6]


def read_numbers(folder, texts, notation):
    """The values of a column of a file, NaN for gaps, and which of them are no numbers."""
    path = folder / "all.csv"
    pd.DataFrame({"x": texts, "y": 0}).to_csv(path, index=False, sep=";")
    table = open_table(path, file_format=FileFormat(**notation))
    return Column(NUMBERS).values(table, "x")


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
    numbers, is_misfit = read_numbers(tmp_path, texts, notation)

    assert not is_misfit.any()
    assert numbers.tolist() == expected


@pytest.mark.parametrize("texts", [["2.500", "1.5"], ["12.5", "12,5"]])
def test_points_that_separate_no_thousands_do_not_fit_beside_decimal_commas(tmp_path, texts):
    _, is_misfit = read_numbers(tmp_path, texts, GERMAN)

    assert is_misfit.any()


LABORATORY = pd.DataFrame({"lab": [1.5, -99.0, 2.5], "code": ["07", "7", " NA "]})
CODES = {"kind": "categories", "categories": ["07", "7", "NA"]}


@pytest.fixture(params=["frame", "file"])
def laboratory_table(request, tmp_path):
    """The same table as a DataFrame and as a file, in which pandas writes -99 as -99.0 beside decimals."""
    if request.param == "frame":
        return open_table(LABORATORY)
    path = tmp_path / "lab.csv"
    LABORATORY.to_csv(path, index=False)
    return open_table(path)


@pytest.mark.parametrize("mark", ["-99", "-99.0"])
def test_mark_of_a_gap_in_numbers_matches_any_notation(laboratory_table, mark):
    values, _ = Column(NUMBERS, gaps=[mark]).values(laboratory_table, "lab")

    assert values.isna().tolist() == [False, True, False]


def test_mark_of_a_gap_in_codes_is_no_other_code_of_the_same_number(laboratory_table):
    values, _ = Column(gaps=["7"], **CODES).values(laboratory_table, "code")

    assert values.isna().tolist() == [False, True, False]


def test_usual_mark_of_a_gap_in_files_is_a_word_in_a_frame(tmp_path):
    path = tmp_path / "lab.csv"
    LABORATORY.to_csv(path, index=False)

    values_of_file, _ = Column(**CODES).values(open_table(path), "code")
    values_of_frame, _ = Column(**CODES).values(open_table(LABORATORY), "code")

    assert values_of_file.isna().tolist() == [False, False, True]
    assert not values_of_frame.isna().any()


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
def test_kind_of_a_column_is_inferred_from_its_texts(tmp_path, texts, kind):
    columns = {"x": np.resize(texts, 300), "ill": [0, 1] * 150}
    path = tmp_path / "all.csv"
    pd.DataFrame(columns).to_csv(path, index=False)

    data = set_up_data(str(path), labels="ill")

    assert data.dictionary.columns["x"].kind == kind


def test_kinds_of_the_dictionary_replace_inference(tmp_path):
    table = pd.DataFrame()
    table["sixty_words"] = [f"name {row}" for row in range(60)]
    table["decimal_points"] = np.resize(["25.548", "873", "1.412"], 60)
    table["mark_of_gaps"] = np.resize(["1.5", "2.5", "<1"], 60)
    table["came"] = "31.12.2023"
    table["left"] = "2.1.2024"
    table["ill"] = [0, 1] * 30
    path = tmp_path / "all.csv"
    table.to_csv(path, index=False)
    kinds = {
        "sixty_words": {"kind": "categories"},
        "decimal_points": {"kind": "numbers"},
        "mark_of_gaps": {"gaps": ["<1"]},
        "left": {"kind": "days since came"},
    }
    date_format = {"all.csv": {"date_format": "%d.%m.%Y"}}
    dictionary = {"excluded": ["came"], "columns": kinds, "read": date_format}

    data = set_up_data(str(path), labels="ill", dictionary=dictionary, server_val=0.0)

    columns = data.dictionary.columns
    days_from_december_31_to_january_2 = 2
    assert len(columns["sixty_words"].categories) == 60
    assert columns["decimal_points"].mean == pytest.approx((25.548 + 873 + 1.412) / 3)
    assert columns["mark_of_gaps"].mean == pytest.approx((1.5 + 2.5) / 2)
    assert columns["left"].mean == days_from_december_31_to_january_2
    assert columns["left"].scale == 0


def test_version_numbers_keep_their_zero():
    versions = ["1.0", "1.1", "2.0"]
    table = Table(pd.DataFrame({"x": versions}))
    assert table.words("x").tolist() == versions


@pytest.fixture
def folder_of_three_encodings(tmp_path):
    text = "ward,ill\n" + "Süd,0\nNord,1\n" * 20
    for name, encoding in {"Boston": "utf-8-sig", "Lyon": "cp1252", "Osaka": "utf-16"}.items():
        (tmp_path / f"{name}.csv").write_text(text, encoding)
    return str(tmp_path)


def test_file_in_an_encoding_that_is_not_named_is_refused(folder_of_three_encodings):
    message = 'Lyon.csv cannot be decoded as utf-8-sig: .*read: ."Lyon.csv": ."encoding": "cp1252"'
    with refused(message):
        set_up_data(folder_of_three_encodings, labels="ill")


def test_files_in_encodings_that_are_named_are_read(folder_of_three_encodings):
    formats = {"Lyon.csv": {"encoding": "cp1252"}, "Osaka": {"encoding": "utf-16"}}

    data = set_up_data(folder_of_three_encodings, labels="ill", dictionary={"read": formats})

    assert data.dictionary.columns["ward"].categories == ("Nord", "Süd")
