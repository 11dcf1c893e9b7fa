"""What clients tell about their tables, and the one encoder made of it, against scikit-learn on all rows together."""

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from flsv.data import Columns, FederatedDataModule, OneClient, Splits
from flsv.data.sources.agreed import AgreedEncoder, Moments, TableSummary
from flsv.data.sources.encoder import TableEncoder
from flsv.data.sources.frames import frame_table
from flsv.data.sources.summaries import encoder_of_sites
from flsv.utilities.errors import ConfigurationError
from helpers.data import set_up_data

ROWS = 200


def make_wards() -> pd.DataFrame:
    """Rows with gaps, a constant, numbers of every size, and a category that only the last rows have."""
    rng = np.random.default_rng(5)
    age = rng.normal(62, 14, ROWS)
    dose = pd.Series(rng.lognormal(0, 3, ROWS))
    dose[rng.random(ROWS) < 0.2] = np.nan
    ward = rng.choice(["A", "B"], ROWS)
    ward[190:] = "C"
    is_ill = rng.random(ROWS) < 0.4

    return pd.DataFrame(
        {
            "age": age,
            "money": 1e9 * age,
            "tiny": 1e-200 * age,
            "fee": np.full(ROWS, 0.1),
            "dose": dose,
            "smoker": rng.random(ROWS) < 0.3,
            "ward": ward,
            "ill": np.where(is_ill, "yes", "no"),
        }
    )


#: The last client has the only rows of ward C; the one before it has no rows.
LAST_ROWS = [90, 190, 190]


def fit_encoder(
    frame: pd.DataFrame,
    last_rows: Sequence[int] = LAST_ROWS,
    min_rows: int = 1,
) -> AgreedEncoder:
    """The encoder of clients whose rows end before ``last_rows``."""
    encoder = TableEncoder(Columns(min_rows=min_rows), "ill")
    table = frame_table(frame)
    rows_by_client = np.split(np.arange(len(frame)), last_rows)
    # Both calls change the encoder, and their results are of no use here.
    encoder.classes(table)
    encoder.features(table, rows_by_client)

    assert encoder.agreed is not None

    return encoder.agreed


def through_json(plain: Any) -> Any:
    return json.loads(json.dumps(plain))


def test_moments_of_many_numbers_of_unlike_size_are_sums_of_fractions():
    rng = np.random.default_rng(3)
    signs = rng.choice([-1.0, 1.0], 2000)
    numbers = signs * rng.lognormal(0, 30, 2000)

    moments = Moments.of(numbers)

    fractions = [Fraction(number) for number in numbers.tolist()]
    assert moments.total == sum(fractions)
    squares = [fraction**2 for fraction in fractions]
    assert moments.squares == sum(squares)


def test_encoder_is_that_of_scikit_learn_on_all_rows_together() -> None:
    frame = make_wards()
    encoder = fit_encoder(frame)
    codes = {code.name: code for code in encoder.columns}

    numbers = ["age", "money", "fee", "dose", "smoker"]
    reference = StandardScaler().fit(frame[numbers].astype(float))
    means = [codes[name].mean for name in numbers]
    scales = [codes[name].scale for name in numbers]

    np.testing.assert_allclose(means, reference.mean_, rtol=1e-12)
    np.testing.assert_allclose(scales, reference.scale_, rtol=1e-12)

    # A variance of 1e-400 is no float, in scikit-learn either.
    expected_scale = 1e-200 * codes["age"].scale
    assert codes["tiny"].scale == pytest.approx(expected_scale, rel=1e-12)

    one_hot = OneHotEncoder().fit(frame[["ward"]])
    assert codes["ward"].categories == ("A", "B", "C")
    assert list(one_hot.categories_[0]) == ["A", "B", "C"]
    assert encoder.feature_names[-1] == "dose missing"
    assert encoder.classes == ("no", "yes")


def test_encoder_is_the_same_to_the_bit_for_any_order_of_rows_and_any_clients() -> None:
    frame = make_wards()
    order = np.random.default_rng(1).permutation(ROWS)
    shuffled = frame.iloc[order].reset_index(drop=True)
    encoder = fit_encoder(frame)

    assert fit_encoder(shuffled, last_rows=[]) == encoder  # of one client
    assert fit_encoder(frame, min_rows=2) == encoder  # each client of which has two rows of all
    assert fit_encoder(frame.iloc[:-1]).hash != encoder.hash

    sent = through_json(encoder.to_plain())
    assert AgreedEncoder.from_plain(sent) == encoder


def test_moments_are_exact_where_sums_of_floats_are_not() -> None:
    numbers = [1e30, 1.0, -1e30, 5e-324, 0.1]
    moments = Moments.of(np.array(numbers))
    fractions = list(map(Fraction, numbers))

    assert moments.total == sum(fractions)
    assert moments.squares == sum(number**2 for number in fractions)
    assert Moments.from_plain(moments.to_plain()) == moments


def summarize(frame: pd.DataFrame, **columns: Any) -> TableSummary:
    """What a site with these rows tells, after a journey as text."""
    data = make_site_data(frame, columns)
    summary = data.table_summary()
    return TableSummary.from_plain(through_json(summary.to_plain()))


def make_site_data(frame: pd.DataFrame, columns: Any = None) -> FederatedDataModule:
    data = FederatedDataModule(
        frame,
        OneClient(),
        labels="ill",
        columns=columns,
        splits=Splits(server_val=0.0),
    )
    data.deal_from(0)

    return data


def test_summary_has_these_fields_and_no_value_of_fewer_rows_than_min_rows() -> None:
    first_row = 100
    frame = make_wards().iloc[first_row:]
    frame["one"] = np.nan
    frame.loc[first_row, "one"] = 7.25  # the column's only value
    frame.loc[frame.index[:3], "ill"] = "unclear"
    plain = summarize(frame, min_rows=11).to_plain()

    assert plain.keys() == {"settings", "columns", "classes"}
    assert plain["settings"].keys() == {"target", "pos_label", "columns"}

    for name, column in plain["columns"].items():
        content = "categories" if name == "ward" else "moments"
        assert column.keys() == {"kind", "missing", content}

    # The moments of no value. Sums are sent as texts.
    no_moments = [0, "0", "0"]
    expected_column = {
        "kind": "numbers",
        "missing": len(frame) - 1,
        "moments": no_moments,
    }
    assert plain["columns"]["one"] == expected_column
    assert plain["classes"].keys() == {"yes", "no"}
    # Ten rows are of ward C.
    ward = plain["columns"]["ward"]
    assert list(ward["categories"]) == ["A", "B"]

    of_ten = summarize(frame, min_rows=10)
    categories_of_ten = of_ten.columns["ward"].categories or ()
    assert list(categories_of_ten) == ["A", "B", "C"]


def test_one_row_more_tells_its_numbers_but_no_category_of_few_rows() -> None:
    """The difference attack of the page on trust: of two answers, one has a row more."""
    frame = make_wards()
    first_row = frame.iloc[[0]]
    newcomer = first_row.assign(
        age=41.5,
        dose=np.nan,
        ward="isolation",
        ill="no",
    )
    first_columns = summarize(frame, min_rows=5).columns
    with_newcomer = pd.concat([frame, newcomer], ignore_index=True)
    second_columns = summarize(with_newcomer, min_rows=5).columns

    first_ages = first_columns["age"].moments
    second_ages = second_columns["age"].moments
    assert first_ages is not None
    assert second_ages is not None
    assert second_ages.count - first_ages.count == 1
    assert second_ages.total - first_ages.total == Fraction(41.5)
    assert second_columns["dose"].missing == first_columns["dose"].missing + 1

    # Of categories it is told that one to four rows have come to those of few rows.
    first_wards = first_columns["ward"].categories
    second_wards = second_columns["ward"].categories
    assert first_wards is not None
    assert second_wards == {**first_wards, "A": first_wards["A"] - 3}


def test_category_of_too_few_rows_becomes_zeros_in_one_process_too() -> None:
    columns = {"min_rows": 11, "exclude": ["tiny"]}
    data = set_up_data(make_wards(), labels="ill", columns=columns, server_val=0)
    (ward,) = [card for card in data.column_cards if card.name == "ward"]

    assert ward.categories == ["A", "B"]

    ward_features = inputs_of_training(data)[:, 5:7].sum(1)  # of A and B
    rows_of_ward_c = 10  # the last ones
    assert not ward_features[-rows_of_ward_c:].any()
    assert (ward_features[:-rows_of_ward_c] == 1).all()


def inputs_of_training(data: FederatedDataModule) -> torch.Tensor:
    return data._data.tensors()[0]


def agree_on_encoder(**sites: pd.DataFrame) -> AgreedEncoder:
    summaries = {}
    for name, frame in sites.items():
        summaries[name] = summarize(frame)
    return encoder_of_sites(summaries)


@pytest.mark.parametrize(
    ("lyon", "message"),
    [
        (make_wards().drop(columns="dose"), "(?s)Lyon: no column 'dose'.*exclude.*dose"),
        (
            make_wards().assign(age="old"),
            "(?s)'age' has categories at Lyon and numbers at Boston.*categorical.*age",
        ),
        (
            make_wards().assign(ill="1"),
            "Lyon: target 'ill' has no label of 'no', 'yes'.*name them: columns: ..classes",
        ),
        (
            make_wards().assign(ward="A."),
            "the sites' tables: 'ward' has 'A' .Boston., 'A.' .Lyon.",
        ),
    ],
    ids=["a missing column", "another type", "other classes", "another spelling"],
)
def test_site_whose_table_does_not_fit_is_named_with_what_to_do(
    lyon: pd.DataFrame, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        agree_on_encoder(Boston=make_wards(), Lyon=lyon)


def test_sites_that_read_tables_by_other_options_are_named() -> None:
    summaries = {
        "Boston": summarize(make_wards()),
        "Lyon": summarize(make_wards(), decimal=","),
        "Osaka": summarize(make_wards(), min_rows=5),
    }
    with pytest.raises(ConfigurationError, match="Osaka reads its table by .*, and Boston by"):
        encoder_of_sites(summaries)


def test_site_without_any_value_of_a_column_takes_the_others_encoder() -> None:
    boston = make_wards()
    osaka = boston.assign(dose=None, ward=None)
    encoder = agree_on_encoder(Boston=boston, Osaka=osaka)
    data = make_site_data(osaka)

    assert data.needs_encoder

    data.encode(encoder)

    inputs = inputs_of_training(data)
    assert inputs.shape == (ROWS, len(encoder.feature_names))

    features = dict(zip(encoder.feature_names, inputs.T))
    for name in ("dose", "ward=A", "ward=B", "ward=C"):
        assert not features[name].any()
    assert features["dose missing"].all()
    assert data.class_names == ("no", "yes")


@pytest.mark.parametrize(
    ("column", "field", "value"),
    [
        ("age", "rows", [1]),
        ("age", "kind", 3),
        ("age", "moments", None),
        ("age", "moments", [-1, "0", "0"]),
        ("age", "moments", [2, "1e999999999", "1"]),
        ("age", "moments", [2, "6", "1"]),
        ("age", "moments", [1, "1", "9" * 99]),
        ("ward", "categories", {"A": True}),
    ],
)
def test_summary_that_no_table_has_is_refused(column: str, field: str, value: Any) -> None:
    plain = summarize(make_wards()).to_plain()
    plain["columns"][column][field] = value
    with pytest.raises((ValueError, TypeError, KeyError)):
        TableSummary.from_plain(plain)


@pytest.mark.parametrize(
    "code",
    [
        {"scale": 0},
        {"mean": 1, "std": 2},
        {"kind": "numbers", "categories": ["a"]},
        {"categories": ["a", "a"]},
    ],
)
def test_encoder_that_cannot_be_is_refused(code: dict[str, Any]) -> None:
    encoder = {"columns": {"age": code}, "classes": ["no", "yes"]}
    with pytest.raises(ConfigurationError, match="encoder: .*(age|std)"):
        Columns(encoder=encoder)
    with pytest.raises(ConfigurationError, match="its encoder has classes None"):
        Columns(encoder={"columns": {}})
