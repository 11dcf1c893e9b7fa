"""Columns as numbers, against NumPy."""

import numpy as np
import pandas as pd
import pytest

from flsv.data import Columns
from flsv.data.sources.encoder import TableEncoder
from flsv.data.sources.table import Table
from flsv.data.sources.values import read_column, without_gaps


@pytest.fixture
def table():
    """60 rows with a constant column, and gaps; the first 40 are for fitting."""
    rng = np.random.default_rng(0)
    x = rng.normal(100, [1, 50, 3, 0], (60, 4))
    x[:, 3] = 0.1
    x[rng.random((60, 4)) < 0.2] = np.nan
    return x, np.arange(60) < 40


def standardize(x, fit):
    """The numbers among the features of a table."""
    frame = pd.DataFrame(x).add_prefix("x").assign(y=0.0)
    encoder = TableEncoder(Columns(task="regression"), "y")
    return encoder.features([Table("a table", frame, typed=True)], fit)[0].numpy()[:, : x.shape[1]]


def expected_of(x, fitted):
    """Gaps are no part of the deviation, which an imputer before would shrink."""
    spread = np.nanstd(fitted, axis=0)
    return np.nan_to_num((x - np.nanmean(fitted, axis=0)) / np.where(spread > 1e-12, spread, 1), nan=0.0)


def test_pooled_statistics(table):
    x, fit = table
    expected = expected_of(x, x[fit])
    np.testing.assert_allclose(standardize(x, fit), expected, rtol=1e-6, atol=1e-6)


def test_nothing_of_held_out_rows_leaks(table):
    x, fit = table
    other = x.copy()
    other[~fit] *= -7
    np.testing.assert_array_equal(standardize(other, fit)[fit], standardize(x, fit)[fit])


def test_gaps():
    table = Table("wards.csv", pd.DataFrame({"age": [" NA ", "", "0", "NAN"], "ward": ["x", "NA", ".", "A"]}))
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
def test_the_kind_of_a_column_is_decided_once_over_all_files(values, kind):
    """One value with a leading zero, at whichever client, makes names of all."""
    tables = [Table(f"{place}.csv", pd.DataFrame({"x": column}, dtype=object)) for place, column in enumerate(values)]
    found, joined = read_column(tables, "x", Columns())
    assert found == kind
    if kind == "categories":
        assert joined.tolist() == [*values[0], *values[1]]
