"""Columns as numbers, against scikit-learn."""

import numpy as np
import pytest
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from flsv.data.tables.values import as_numbers, find_gaps, one_hot, standardise


@pytest.fixture
def table():
    """60 rows of 3 groups with different means, a constant column, and gaps; the first 40 are for fitting."""
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 3, 60)
    x = rng.normal(groups[:, None] * 100, [1, 50, 3, 0], (60, 4))
    x[:, 3] = 0.1
    x[rng.random((60, 4)) < 0.2] = np.nan
    return x, np.arange(60) < 40, groups


def test_pooled_statistics_are_scikit_learns(table):
    x, fit, _ = table
    # An imputer before the scaler would shrink the deviation: gaps are not part of it here.
    scaler = StandardScaler().fit(x[fit])
    expected = np.nan_to_num(scaler.transform(x), nan=0.0)
    np.testing.assert_allclose(standardise(x, fit, np.zeros(60)), expected, atol=1e-12)


def test_each_group_by_itself(table):
    x, fit, groups = table
    scaled = standardise(x, fit, groups)
    for group in range(3):
        rows = groups == group
        expected = np.nan_to_num(StandardScaler().fit(x[rows & fit]).transform(x[rows]), nan=0.0)
        np.testing.assert_allclose(scaled[rows], expected, atol=1e-12)


def test_nothing_of_other_groups_and_of_held_out_rows_leaks(table):
    x, fit, groups = table
    before = standardise(x, fit, groups)
    other = x.copy()
    other[(groups != 1) | ~fit] *= -7
    rows = (groups == 1) & fit
    np.testing.assert_array_equal(standardise(other, fit, groups)[rows], before[rows])
    pooled = standardise(x, fit, np.zeros(60))
    other = x.copy()
    other[~fit] *= -7
    np.testing.assert_array_equal(standardise(other, fit, np.zeros(60))[fit], pooled[fit])


def test_a_group_without_values_gets_zeros():
    x = np.array([[1.0], [2.0], [np.nan], [9.0]])
    scaled = standardise(x, np.array([True, True, True, False]), np.array([0, 0, 1, 1]))
    assert scaled.tolist() == [[-1.0], [1.0], [0.0], [0.0]]


@pytest.mark.parametrize("value", [0.1, 1e9 / 3, 1e-9, 0.0])
def test_equal_values_have_no_spread(value):
    x = np.full((7, 1), value)
    assert np.abs(standardise(x, np.ones(7, dtype=bool), np.zeros(7))).max() <= 1e-6


def test_one_hot_is_scikit_learns():
    values, categories = ["b", "a", "b", "", "z"], ["a", "b", "c"]
    encoder = OneHotEncoder(categories=[categories], handle_unknown="ignore", sparse_output=False)
    expected = encoder.fit([["a"], ["b"], ["c"]]).transform([[value] for value in values])
    np.testing.assert_array_equal(one_hot(values, categories), expected)


@pytest.mark.parametrize("words", [["1", "two"], ["1", "inf"], ["1", "nan"], ["1_000"], ["1,5"]])
def test_what_are_no_finite_numbers(words):
    assert as_numbers(words, np.zeros(len(words), dtype=bool)) is None


def test_gaps():
    assert find_gaps([" NA ", "", "0", "NAN"], {"", "NA"}).tolist() == [True, True, False, False]
    assert as_numbers(["x", "y"], np.array([True, True])) is None
