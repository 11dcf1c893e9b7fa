"""Tables whose columns have pandas' Arrow types, or complex numbers."""

import numpy as np
import pandas as pd
import pytest
import torch

from helpers import refused
from helpers.data import set_up_data

pyarrow = pytest.importorskip("pyarrow", reason="columns of Arrow's types need pyarrow")


def visits():
    """Ninety visits with numbers, whole numbers, truth values, dates, words and gaps."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "score": random.normal(size=90),
            "doses": random.integers(0, 9, size=90),
            "smoker": random.integers(0, 2, size=90) == 1,
            "day": pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(90), unit="D"),
            "ward": random.choice(["north", "south"], size=90),
            "outcome": random.choice(["ill", "well"], size=90),
        }
    )
    frame.loc[:9, "score"] = np.nan
    return frame


def features_of(frame):
    dictionary = {"columns": {"day": {"kind": "days since 1970"}}}
    data = set_up_data(frame, labels="outcome", dictionary=dictionary)
    return data.division.source.tensors[0]


def test_arrow_columns_have_the_values_of_numpy_columns():
    frame = visits()

    features = features_of(frame.convert_dtypes(dtype_backend="pyarrow"))

    torch.testing.assert_close(features, features_of(frame), rtol=0, atol=0)


def test_arrow_dictionary_column_is_read_as_categories():
    frame = visits()
    words_by_code = pd.ArrowDtype(pyarrow.dictionary(pyarrow.int32(), pyarrow.string()))
    with_codes = frame.assign(ward=frame["ward"].astype("category").astype(words_by_code))

    features = features_of(with_codes)

    torch.testing.assert_close(features, features_of(frame), rtol=0, atol=0)


def test_parquet_file_of_arrow_columns_is_read_as_one_of_numpy_columns(tmp_path):
    frame = visits()
    path = tmp_path / "visits.parquet"
    frame.convert_dtypes(dtype_backend="pyarrow").to_parquet(path)

    features = features_of(path)

    torch.testing.assert_close(features, features_of(frame), rtol=0, atol=0)


def test_column_of_complex_numbers_is_named():
    frame = visits().assign(impedance=1j * np.arange(90))

    with refused("impedance: DataFrame has complex numbers"):
        features_of(frame)


def test_complex_numbers_do_not_fit_a_column_of_numbers():
    frame = visits().assign(score=1j * np.arange(90))
    column_of_numbers = {"kind": "numbers", "mean": 0.0, "scale": 1.0}
    dictionary = {"classes": ["ill", "well"], "columns": {"score": column_of_numbers}}

    with refused("in 'score', expected numbers"):
        set_up_data(frame, labels="outcome", dictionary=dictionary)
