"""Tables as people have them: what one process and sites say of each, with and without a data dictionary."""

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from flsv.data import FederatedDataModule, OneClient, Splits
from flsv.data.doubts import doubts_of
from flsv.data.sources.agreed import TableSummary
from flsv.data.sources.summaries import encoder_of_sites
from flsv.data.sources.summary_doubts import doubts_of_summaries
from flsv.utilities.errors import ConfigurationError

ROWS = 120
Tables = dict[str, pd.DataFrame]
#: A site's file, or a typed frame.
Sources = Mapping[str, str | pd.DataFrame]
DICTIONARY = {
    "target": "died",
    "classes": ["no", "yes"],
    "positive": "yes",
    "columns": {
        "age": {"mean": 60, "scale": 12, "low": 0, "high": 120, "gaps": False},
        "hb": {"mean": 13, "scale": 1.5, "low": 4, "high": 30, "unit": "g/dl", "gaps": False},
        "creatinine": {"mean": 1, "scale": 0.3, "low": 0.1, "high": 20, "gaps": False},
        "weight": {"mean": 75, "scale": 12, "low": 20, "high": 250, "gaps": False},
        "smoker": {"categories": ["0", "1"], "gaps": False},
        "ward": {"categories": ["A", "B", "C"], "gaps": False},
    },
}


def make_tables() -> Tables:
    """Three sites' tables of texts."""
    tables = {}
    for number, site in enumerate(("Boston", "Lyon", "Osaka")):
        draw = np.random.default_rng(number)
        columns = {
            "age": draw.normal(60, 12, ROWS).round(1),
            "hb": draw.normal(13, 1.5, ROWS).round(1),
            "creatinine": draw.lognormal(0, 0.3, ROWS).round(2),
            "weight": draw.normal(75, 12, ROWS).round(1),
            "smoker": draw.choice([0, 1], ROWS),
            "ward": draw.choice(["A", "B", "C"], ROWS),
            "died": draw.choice(["no", "yes"], ROWS),
        }
        tables[site] = pd.DataFrame(columns).astype(str)
    return tables


def scale(table: pd.DataFrame, name: str, factor: float, rows: int = ROWS) -> None:
    """Multiply the numbers of the first rows."""
    numbers = table[name].astype(float)
    numbers[:rows] *= factor
    table[name] = numbers.round(2).astype(str)


def write_decimal_commas(tables: Tables) -> None:
    lyon = tables["Lyon"]
    for name in ("age", "hb", "creatinine", "weight"):
        lyon[name] = lyon[name].str.replace(".", ",")


def mix_decimal_marks(tables: Tables) -> None:
    lyon = tables["Lyon"]
    lyon.loc[:39, "hb"] = lyon["hb"][:40].str.replace(".", ",")


def separate_thousands(tables: Tables) -> None:
    for table in tables.values():
        table["cells"] = [str(number) for number in range(500, 500 + ROWS)]
    tables["Lyon"].loc[:9, "cells"] = "25.548"


def write_dates_in_three_formats(tables: Tables) -> None:
    dates = pd.date_range("2024-01-20", periods=ROWS)
    formats = ("%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y")
    for table, date_format in zip(tables.values(), formats):
        table["came"] = dates.strftime(date_format)


def write_yes_in_three_ways(tables: Tables) -> None:
    for site, words in {"Boston": ("no", "yes"), "Lyon": ("nein", "ja")}.items():
        word_by_code = dict(zip("01", words))
        smoker = tables[site]["smoker"]
        tables[site]["smoker"] = smoker.map(word_by_code)


def write_units(tables: Tables) -> None:
    for table in tables.values():
        table["dose"] = np.resize(["5", "10", "20"], ROWS)
    tables["Lyon"]["dose"] += " mg"


def code_smokers_from_1(tables: Tables) -> None:
    tables["Lyon"]["smoker"] = tables["Lyon"]["smoker"].map({"0": "1", "1": "2"})


def code_gaps(tables: Tables) -> None:
    tables["Lyon"].loc[:9, "hb"] = "-999"


def add_zip_codes(tables: Tables) -> None:
    for table in tables.values():
        table["zip"] = np.resize(["01067", "01069", "80331"], ROWS)


def add_patients(tables: Tables) -> None:
    for number, table in enumerate(tables.values()):
        first_patient = 1000 * number
        patients = range(first_patient, first_patient + ROWS)
        table["patient"] = [str(patient) for patient in patients]


def add_codes(tables: Tables) -> None:
    for site, table in tables.items():
        table["code"] = [f"{site} {row}" for row in range(ROWS)]


def leave_blanks_and_no_class(tables: Tables) -> None:
    tables["Lyon"]["died"] += " "
    tables["Osaka"]["died"] = "no"


def add_column_of_one_site(tables: Tables) -> None:
    tables["Lyon"]["insurer"] = "A"


def add_time_zones(tables: Tables) -> None:
    hours = pd.date_range("2024-03-30", periods=ROWS, freq="h", tz="Europe/Paris")
    for site, table in tables.items():
        typed = table.assign(came=hours)
        for name in ("age", "hb", "creatinine", "weight"):
            typed[name] = typed[name].astype(float)
        typed["smoker"] = typed["smoker"].astype(int)
        tables[site] = typed


def write_creatinine_in_micromoles(tables: Tables) -> None:
    """Six rows of each site."""
    for table in tables.values():
        scale(table, "creatinine", 88.42, rows=6)


def write_hemoglobin_in_another_unit(tables: Tables) -> None:
    scale(tables["Lyon"], "hb", 1.6)


def write_some_weights_in_pounds(tables: Tables) -> None:
    scale(tables["Lyon"], "weight", 2.2046, rows=36)


def no_change(tables: Tables) -> None:
    pass


def features_in_one_process(sources: Sources, columns: Any) -> tuple[torch.Tensor, list[str]]:
    """Return features, and doubts."""
    data = FederatedDataModule(
        clients=sources,
        labels="died",
        pos_label="yes",
        columns=columns,
        splits=Splits(server_val=0.0),
    )
    data.setup("fit")
    return data._data.tensors()[0], [doubt.text for doubt in doubts_of(data)]


def features_at_sites(sources: Sources, columns: Any) -> tuple[torch.Tensor, list[str]]:
    """Return the features of all sites, and the doubts of the server and in the sites' own logs."""
    sites = {}
    summaries = {}
    doubts = []
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        for number, (site, source) in enumerate(sources.items()):
            sites[site] = FederatedDataModule(
                source,
                OneClient(),
                labels="died",
                pos_label="yes",
                columns=columns,
                splits=Splits(server_val=0.0),
            )
            sites[site].deal_from(number)
            if sites[site].needs_encoder:
                plain_summary = sites[site].table_summary().to_plain()
                summaries[site] = TableSummary.from_plain(plain_summary)
        if summaries:
            num_rows = dict.fromkeys(sources, ROWS)
            doubts = [doubt.text for doubt in doubts_of_summaries(summaries, num_rows)]
            encoder = encoder_of_sites(summaries)
            for data in sites.values():
                data.encode(encoder)
    inputs = [data._data.tensors()[0] for data in sites.values()]
    own_doubts = [str(warning.message) for warning in log if "doubtful" in str(warning.message)]
    return torch.cat(inputs), doubts + own_doubts


LOOKS = {"one process": features_in_one_process, "sites": features_at_sites}


def sources_of(change: Callable[[Tables], None], folder: Path) -> Sources:
    tables = make_tables()
    change(tables)
    sources: dict[str, str | pd.DataFrame] = {}
    for site, table in tables.items():
        if table["age"].dtype == float:
            sources[site] = table
            continue
        is_german = change is write_decimal_commas and site == "Lyon"
        file = folder / f"{site}.csv"
        table.to_csv(
            file,
            index=False,
            sep=";" if is_german else ",",
            encoding="utf-8-sig" if is_german else "utf-8",
        )
        sources[site] = str(file)
    return sources


def outcome(
    change: Callable[[Tables], None],
    look: Any,
    columns: Any,
    folder: Path,
) -> str:
    """Return "right", or what is said: "refused: ...", "doubted: ...", or "silent"."""
    try:
        features, doubts = look(sources_of(change, folder), columns)
    except ConfigurationError as error:
        return f"refused: {error}"
    if doubts:
        return f"doubted: {'; '.join(doubts)}"
    usual_features, _ = look(sources_of(no_change, folder), columns)
    is_right = features[:, : usual_features.shape[1]].equal(usual_features)
    return "right" if is_right else "silent"


MISFIT = r"refused: Cells that do not fit the data dictionary \w+: "
COMMA = r"refused: .*Lyon.csv, line 2: '\S+' in '\w+' is a number in another notation"
OTHER_CODES = "doubted: values are 1 and 2, at most sites 0 and 1, as of two codings"
GAP_CODE = "10 values are -999, far from all others, as a code for a missing value"
OTHER_CLASSES = "doubted: 0 % are yes, 49 % at the other sites"
#: What one process says, and with a dictionary, and sites say, and with a dictionary. A dictionary without a column
#: leaves it out.
OUTCOMES: dict[Callable[[Tables], None], tuple[str, str, str, str]] = {
    no_change: ("right", "right", "right", "right"),
    write_decimal_commas: (COMMA, COMMA, COMMA, COMMA),
    mix_decimal_marks: (COMMA, COMMA, COMMA, COMMA),
    separate_thousands: (
        "refused: .*Lyon.csv, line 2: '25.548' in 'cells' is 25548 if the point separates thousands",
        "right",
        "refused: .*Lyon.csv, line 2: '25.548' in 'cells' is 25548 if the point separates thousands",
        "right",
    ),
    write_dates_in_three_formats: (
        r"refused: .*Boston.csv, line 2: 'came' has dates.*date_format",
        "right",
        r"refused: .*Boston.csv, line 2: 'came' has dates",
        "right",
    ),
    write_yes_in_three_ways: (
        "refused: .*Boston.csv, line 2: 'no' in 'smoker' is not a valid number, .*two codings.*exclude",
        f"{MISFIT}240.*Boston.csv, line 2: 'no' in 'smoker', expected one of '0', '1'",
        "refused: 'smoker' has categories at Boston, Lyon and numbers at Osaka: two codings.*exclude",
        f"{MISFIT}120.*Boston.csv, line 2: 'no' in 'smoker', expected one of '0', '1'",
    ),
    write_units: (
        "refused: .*Lyon.csv, line 2: '5 mg' in 'dose' is not a valid number, .*or a unit.*exclude",
        "right",
        "refused: 'dose' has categories at Lyon and numbers at Boston, Osaka: .*or a unit.*exclude",
        "right",
    ),
    code_smokers_from_1: (
        OTHER_CODES,
        rf"{MISFIT}\d+\n.*Lyon.csv, line \d+: '2' in 'smoker', expected one of '0', '1'",
        OTHER_CODES,
        rf"{MISFIT}\d+\n.*Lyon.csv, line \d+: '2' in 'smoker', expected one of '0', '1'",
    ),
    code_gaps: (
        f"doubted: {GAP_CODE}",
        f"{MISFIT}10\n.*Lyon.csv, line 2: -999.0 in 'hb', expected 4 to 30 g/dl",
        f"doubted: deviation is 280, .*hb of this site: {GAP_CODE}",
        f"{MISFIT}10\n.*Lyon.csv, line 2: -999.0 in 'hb', expected 4 to 30 g/dl",
    ),
    add_zip_codes: ("right", "right", "right", "right"),
    add_patients: (
        "doubted: nearly all of its 360 values are different, as of a number of the case",
        "right",
        "doubted: .*patient of all sites: nearly all of its 120 values are different",
        "right",
    ),
    add_codes: (
        "refused: .*'code' has 360 different values, more than max_categories=50",
        "right",
        "refused: .*'code' has 360 different values, more than max_categories=50",
        "right",
    ),
    leave_blanks_and_no_class: (OTHER_CLASSES, OTHER_CLASSES, OTHER_CLASSES, "right"),
    add_column_of_one_site: (
        "refused: .*Boston.csv has no column 'insurer'",
        "right",
        "refused: Boston, Osaka: no column 'insurer', which others have",
        "right",
    ),
    add_time_zones: (
        "refused: 'came' has Timestamp in the DataFrame of 'Osaka'.*dates.*came.*days",
        "right",
        "refused: 'came' has Timestamp in DataFrame.*dates.*came.*days",
        "right",
    ),
    write_creatinine_in_micromoles: (
        r"doubted: 6 of 120 values are 104 times the usual ones .* all between 70 and 200; 6 of",
        f"{MISFIT}18\n.*Boston.csv, line 2: 130.86 in 'creatinine', expected 0.1 to 20",
        "doubted: .*creatinine of this site: 6 of 120 values are 104 times the usual ones",
        f"{MISFIT}6\n.*Boston.csv, line 2: 130.86 in 'creatinine', expected 0.1 to 20",
    ),
    # What none can see stands on the page about own data: values that are possible in their column.
    write_hemoglobin_in_another_unit: (
        "doubted: median is 20.32, at the other sites 12.9, far outside the usual spread",
        "doubted: median is 20.32, at the other sites 12.9, far outside the usual spread",
        "doubted: mean is 20.45, at the other sites 12.89, far outside the usual spread",
        "silent",
    ),
    write_some_weights_in_pounds: ("silent", "silent", "silent", "silent"),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("change", OUTCOMES, ids=lambda change: change.__name__)
def test_what_is_said_of_a_table(
    change: Callable[[Tables], None], look: str, tmp_path: Path
) -> None:
    alone, with_dictionary, at_sites, at_sites_with_dictionary = OUTCOMES[change]
    expected = (alone, with_dictionary)
    if look == "sites":
        expected = (at_sites, at_sites_with_dictionary)

    for columns, pattern in zip((None, {"encoder": DICTIONARY}), expected):
        answer = outcome(change, LOOKS[look], columns, tmp_path)
        assert re.match(pattern, answer, re.DOTALL), answer


@pytest.mark.parametrize(
    ("change", "column", "first_row"),
    [
        (code_gaps, "hb", "line 2: -999"),
        (write_creatinine_in_micromoles, "creatinine", r"line 2: \d+"),
    ],
)
def test_doubts_name_single_rows_to_who_has_them(
    change: Callable[[Tables], None], column: str, first_row: str, tmp_path: Path
) -> None:
    sources = sources_of(change, tmp_path)
    data = FederatedDataModule(
        clients=sources, labels="died", pos_label="yes", splits=Splits(server_val=0.0)
    )
    data.setup("fit")
    (doubt,) = [
        doubt for doubt in doubts_of(data) if doubt.column == column and doubt.site == "Lyon"
    ]
    _, doubts_at_sites = features_at_sites(sources, None)

    assert re.match(first_row, doubt.rows)
    assert "line" not in doubt.text  # which all sites read
    of_sites_themselves = [text for text in doubts_at_sites if "of this site" in text]
    assert any(re.search(first_row, text) for text in of_sites_themselves)
    for text in doubts_at_sites:
        assert "line" not in text or text in of_sites_themselves


@pytest.mark.parametrize("columns", [{}, {"encoder": DICTIONARY}], ids=["alone", "dictionary"])
def test_file_of_one_client_is_read_as_pandas_words_say(
    columns: dict[str, Any], tmp_path: Path
) -> None:
    read = {"Lyon": {"decimal": ",", "sep": ";", "encoding": "utf-8"}}
    sources = sources_of(write_decimal_commas, tmp_path)
    features, doubts = features_in_one_process(sources, columns | {"read": read})

    usual_features, _ = features_in_one_process(sources_of(no_change, tmp_path), columns)
    assert features.equal(usual_features)
    assert not doubts


@pytest.mark.parametrize(
    ("read", "message"),
    [
        ({"Graz": {"decimal": ","}}, "read: 'Graz' has no text file of its own, as Boston, Lyon"),
        ({"Lyon": {"delimiter": ";"}}, "read: 'Lyon' has .'delimiter'.. Expected sep, decimal"),
        ({"Lyon": {"decimal": ",", "thousands": ","}}, "cannot separate both thousands and"),
        ({"Lyon": {"sep": "::"}}, "sep is one ASCII character"),
    ],
)
def test_reading_of_nobodys_file_or_in_other_words_is_refused(
    read: dict[str, dict[str, str]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        features_in_one_process(sources_of(no_change, tmp_path), {"read": read})


def test_notations_of_clients_do_not_mix(tmp_path: Path) -> None:
    """A thousands separator of one is another's decimal mark, also in gaps and in the target."""
    texts = {"Boston": ["1,500", "2,000", "-9"], "Lyon": ["1.500", "1,5", "-9,0"]}
    sources = {}
    for site, numbers in texts.items():
        first_number, second_number = numbers[:2]
        rows = {
            "cost": numbers * 4,
            "days": [first_number] * 6 + [second_number] * 6,
        }
        sources[site] = str(tmp_path / f"{site}.csv")
        pd.DataFrame(rows).to_csv(sources[site], index=False)
    columns = {
        "task": "regression",
        "gaps": {"cost": ["-9"]},
        "read": {"Boston": {"thousands": ","}, "Lyon": {"decimal": ",", "thousands": "."}},
    }
    data = FederatedDataModule(
        clients=sources, labels="days", columns=columns, splits=Splits(server_val=0.0)
    )
    data.setup("fit")

    (card,) = data.column_cards
    assert card.values[:2].tolist() == [1500, 2000]
    assert card.values[12:14].tolist() == [1500, 1.5]
    assert card.values.isna().sum() == 8
    _, days = data._data.tensors()
    assert days[[0, 11, 12, 23]].tolist() == [1500, 2000, 1500, 1.5]
