"""What a spreadsheet opens runs nothing, and what is read back is what was written."""

import csv
import itertools

import pytest
from hypothesis import given, settings, strategies as st
from pandas import DataFrame

from flsv.results.rows import client_rows
from flsv.results.run_table import CSV, read_contributions
from flsv.utilities.csv_files import csv_text, read_rows, save_table

NAMES = ('=HYPERLINK("http://x","y")', "+1+1", "-2+3", "@home", "'=1", "'Boston'", "-1", "St. Anna")


def read_cells(path):
    """As a spreadsheet gets them."""
    with path.open(newline="", encoding="utf-8") as file:
        return set(itertools.chain(*csv.reader(file)))


def is_formula(cell):
    """Return whether a spreadsheet takes a cell for a formula. A number alone is none."""
    try:
        float(cell)
    except ValueError:
        return cell[:1] in ("=", "+", "-", "@")
    return False


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.text(st.sampled_from("=+-@'\"1a, e\n\té"), max_size=8), min_size=1, max_size=4))
def test_any_text_comes_back_on_one_line_and_is_no_formula(tmp_path_factory, texts):
    path = tmp_path_factory.getbasetemp() / "texts.csv"
    head = ["number", *map(str, range(len(texts)))]
    path.write_bytes(csv_text([head, (-1, *texts)]))

    cells = read_cells(path)
    (row,) = read_rows(path, {})

    _, *texts_read = row.values()
    assert not any(map(is_formula, cells))
    assert texts_read == [" ".join(text.split()) for text in texts]


def test_no_file_of_a_run_holds_a_name_as_a_formula(tmp_path):
    file = CSV(tmp_path / "contributions.csv")
    file.keep_rows_before(0)
    numbers = dict.fromkeys(range(len(NAMES)), -0.5)
    file.append(client_rows(0, "=sv", numbers, NAMES, column="0", class_name="=class"))
    table = DataFrame({"client_name": NAMES, "value": -0.5})
    save_table(tmp_path / "retrained.csv", table)

    for path in tmp_path.glob("*.csv"):
        assert not any(map(is_formula, read_cells(path))), path
        table_rows = [*read_rows(path, {})]
        names = [row["client_name"] for row in table_rows if "client_name" in row]
        assert names == list(NAMES)

    contributions = read_contributions(tmp_path / "contributions.csv")
    columns = contributions[["metric", "client_name", "class_name", "value"]]

    assert columns.values.tolist() == [
        [
            "=sv",
            name,
            "=class",
            -0.5,
        ]
        for name in NAMES
    ]
