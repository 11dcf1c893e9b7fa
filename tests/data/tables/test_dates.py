"""Dates as numbers, against Python's own calendar; and all columns that cannot be used, said at once."""

import datetime as dt
import json
import warnings

import numpy as np
import pandas as pd
import pytest
import yaml

from flsv.data import Columns, FederatedDataModule, Files
from flsv.data.sources.encoder import TableEncoder
from flsv.data.sources.table import Table, frame_table
from flsv.errors import ConfigurationError

CAME = ["2024-02-28", "2023-12-31", "", "2024-03-01"]
LEFT = ["2024-03-01", "2024-01-02", "2024-05-05", "2024-03-01"]
EVERY = np.ones(4, dtype=bool)


def encoded(columns, came=CAME, typed=False):
    frame = pd.DataFrame({"came": came, "left": LEFT, "ill": ["a", "b"] * 2}, dtype=object)
    if typed:
        frame = frame.replace("", None)
    table = frame_table(frame.assign(**{n: pd.to_datetime(frame[n]) for n in ("came", "left")})) if typed else None
    table = table or Table("stays.csv", frame.set_axis(range(2, 6)))
    encoder = TableEncoder(Columns(**columns), "ill")
    return encoder, encoder.features([table], EVERY)[0].numpy()


@pytest.mark.parametrize("typed", [False, True])
def test_days_since_another_date(typed):
    encoder, x = encoded({"dates": {"left": "came"}, "exclude": ["came"]}, typed=typed)
    stays = np.array([2.0, 2.0, np.nan, 0.0])
    expected = (stays - np.nanmean(stays)) / np.nanstd(stays)
    assert encoder.feature_names == ("left", "left missing")
    np.testing.assert_allclose(x[:, 0], np.nan_to_num(expected), atol=1e-6)
    assert x[:, 1].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("typed", [False, True])
def test_days_since_1970(typed):
    encoder, x = encoded({"dates": {"left": "days"}, "exclude": ["came"]}, typed=typed)
    days = np.array([(dt.date.fromisoformat(day) - dt.date(1970, 1, 1)).days for day in LEFT])
    np.testing.assert_allclose(x[:, 0], (days - days.mean()) / days.std(), atol=1e-4)
    assert encoder.read[0].values.tolist() == days.tolist()
    assert encoder.read[0].became == "days since 1970"


def test_dates_as_they_are_written_elsewhere():
    columns = {"dates": {"came": "days"}, "exclude": ["left"], "date_format": "%d.%m.%Y"}
    encoder, _ = encoded(columns, came=["28.02.2024", "31.12.2023", "", "1.3.2024"])
    expected = [(dt.date.fromisoformat(day) - dt.date(1970, 1, 1)).days for day in CAME if day]
    assert encoder.read[0].values[[0, 1, 3]].tolist() == expected
    with pytest.raises(ConfigurationError, match=r"line 2: '28.02.2024' in 'came' is no date as YYYY-MM-DD"):
        encoded({"dates": {"came": "days"}, "exclude": ["left"]}, came=["28.02.2024", *CAME[1:]])


def pasted(error):
    """The options that an error says to paste."""
    line = next(line for line in str(error).splitlines() if line.strip().startswith("columns: "))
    assert yaml.safe_load(line)["columns"] == json.loads(line.partition(":")[2])
    return json.loads(line.partition(":")[2])


def clinic(rng, rows=40, **more):
    days = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 300, rows), unit="D")
    return pd.DataFrame(
        {
            "patient": rng.permutation(rows) + 500,
            "came": days.strftime("%d.%m.%Y"),
            "name": [f"name {i}" for i in rng.permutation(1000)[:rows]],
            "score": [*rng.normal(size=rows - 1).round(3).astype(str), "not done"],
            "lab": [""] * rows,
            "age": rng.integers(20, 90, rows),
            "ill": np.where(rng.random(rows) < 0.5, "yes", "no"),
            **more,
        }
    )


def test_all_columns_that_cannot_be_used_are_in_one_message_whose_line_helps(tmp_path):
    rng = np.random.default_rng(0)
    for name, more in (("Boston", {}), ("Lyon", {"insurer": "A"}), ("val", {})):
        clinic(rng, **more).to_csv(tmp_path / f"{name}.csv", index=False)

    def made(**columns):
        data = FederatedDataModule(str(tmp_path), labels="ill", columns=columns, files=Files(root=str(tmp_path)))
        data.setup("fit")
        return data

    with pytest.raises(ConfigurationError, match="6 columns cannot be used as they are") as found:
        made(categorical=["age"], max_categories=60)
    options = pasted(found.value)
    assert options.pop("max_categories") == 60
    assert options == {
        "exclude": ["came", "name", "lab", "insurer", "patient"],
        "categorical": ["age"],
        "gaps": {"score": ["not done"]},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = made(**options, max_categories=90)
    cards = {card.name: card for card in data.column_cards}
    assert {name: card.became for name, card in cards.items()} == {
        **{"came": "left out", "score": "a number"},
        **{"age": cards["age"].became, "patient": "left out", "name": "left out", "lab": "left out"},
        "insurer": "left out",
    }
    assert cards["score"].values.isna().sum() == 2
    assert cards["insurer"].values.isna().sum() == 40


def test_an_identifier_alone_is_warned_of_and_can_be_meant(tmp_path):
    frame = clinic(np.random.default_rng(0)).drop(columns=["came", "name", "score", "lab"])
    with pytest.warns(UserWarning, match=r"'patient' has another whole number in every row.*exclude: \[patient\]"):
        FederatedDataModule(frame, labels="ill").setup("fit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FederatedDataModule(frame, labels="ill", columns={"features": ["patient", "age"]}).setup("fit")
        FederatedDataModule(frame.rename(columns={"patient": "weight"}), labels="ill").setup("fit")
