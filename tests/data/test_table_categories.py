"""Categories and classes of tables: gaps and codes that change none, and spellings that are refused."""

import re

import numpy as np
import pandas as pd
import pytest

from flsv.utilities.errors import ConfigurationError
from helpers.data import set_up_data


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


def read_categories(data):
    for card in data.column_cards:
        if card.name == "code":
            return list(card.categories)
    raise AssertionError("no column is called code")


CODES = {"categorical": ["code"]}


@pytest.mark.parametrize("gap_at", [None, "Boston", "Lyon"])
def test_categories_are_the_same_whatever_gaps_a_file_has(tmp_path, gap_at):
    cells = {
        "Boston": [1, 2, 3, 1] * 10,
        "Lyon": [2, 1, 3, 3] * 10,
    }
    if gap_at is not None:
        cells[gap_at][5] = None  # pandas then writes 1.0 for 1

    data = set_up_data(
        clients=write_hospitals(tmp_path, **cells),
        labels="ill",
        columns=CODES,
    )

    assert read_categories(data) == ["1", "2", "3"]


def test_classes_are_the_same_whatever_gaps_a_file_has(tmp_path):
    cells = {
        "Boston": [0, 1, 1, None] * 10,
        "Lyon": [1, 0, 0, 1] * 10,
    }
    files = write_hospitals(tmp_path, **cells)

    with pytest.warns(UserWarning, match="10 of 40 rows have no 'code'"):
        data = set_up_data(clients=files, labels="code", columns={"exclude": ["ill"]})

    assert data.class_names == ("0", "1")


def test_version_numbers_keep_their_zero(tmp_path):
    cells = {
        "Boston": ["1.0", "1.1"] * 20,
        "Lyon": ["2.0", "1.0"] * 20,
    }
    data = set_up_data(
        clients=write_hospitals(tmp_path, **cells),
        labels="ill",
        columns=CODES,
    )

    assert read_categories(data) == ["1.0", "1.1", "2.0"]


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
    in_boston = rf"{re.escape(repr(spelling))} \(\S*Boston.csv, line 2\)"
    in_lyon = rf"{re.escape(repr(other_spelling))} \(\S*Lyon.csv, line 3\)"

    with pytest.raises(
        ConfigurationError, match=f"'code' has {in_boston}, {in_lyon}, which look like"
    ):
        set_up_data(clients=files, labels="ill", columns=CODES)

    data = set_up_data(clients=files, labels="ill", columns={"exclude": ["code"]})
    assert data.input_shape == (1,)
