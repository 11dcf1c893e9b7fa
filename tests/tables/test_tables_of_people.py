"""Tables as people have them: read, warned about or refused by one process and by sites."""

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from flsv.data import FederatedDataModule, OneClient, Splits
from flsv.tables import Dictionary
from flsv.tables.merger import merge
from flsv.utilities.errors import ConfigurationError
from helpers.data import set_up_data

ROWS = 120
NUMBERS = ("age", "hb", "creatinine", "weight")
DICTIONARY = {
    "target": "died",
    "classes": ["no", "yes"],
    "columns": {
        "age": {"mean": 60, "scale": 12, "low": 0, "high": 120, "gaps": False},
        "hb": {"mean": 13, "scale": 1.5, "low": 4, "high": 30, "unit": "g/dl", "gaps": False},
        "creatinine": {"mean": 1, "scale": 0.3, "low": 0.1, "high": 20, "gaps": False},
        "weight": {"mean": 75, "scale": 12, "low": 20, "high": 250, "gaps": False},
        "smoker": {"categories": ["0", "1"], "gaps": False},
        "ward": {"categories": ["A", "B", "C"], "gaps": False},
    },
}


def make_tables():
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


def tables_of(tables, site):
    return list(tables.values()) if site is None else [tables[site]]


@dataclass(frozen=True)
class WriteCells:
    """Writes cells, again and again, into the first rows of a site's column, or of every site's."""

    cells: Any
    column: str
    site: str | None = "Lyon"
    rows: int = ROWS

    def __call__(self, tables):
        for table in tables_of(tables, self.site):
            table.loc[: self.rows - 1, self.column] = np.resize(self.cells, self.rows)


@dataclass(frozen=True)
class ScaleNumbers:
    """Multiplies Lyon's numbers."""

    column: str
    factor: float

    def __call__(self, tables):
        lyon = tables["Lyon"]
        numbers = self.factor * lyon[self.column].astype(float)
        lyon[self.column] = numbers.round(2).astype(str)


@dataclass(frozen=True)
class Recode:
    """Replaces words by others."""

    column: str
    words: Mapping[str, str]
    site: str = "Lyon"

    def __call__(self, tables):
        table = tables[self.site]
        table[self.column] = table[self.column].map(self.words)


class ApplyAll:
    def __init__(self, *changes):
        self.changes = changes

    def __call__(self, tables):
        for change in self.changes:
            change(tables)


no_change = ApplyAll()


def write_decimal_commas(tables):
    lyon = tables["Lyon"]
    for name in NUMBERS:
        lyon[name] = lyon[name].str.replace(".", ",")
    tables["Lyon"] = lyon.to_csv(index=False, sep=";")


def store_numbers(tables):
    for table in tables.values():
        for name in NUMBERS:
            table[name] = table[name].astype(float)
        table["smoker"] = table["smoker"].astype(int)


def add_time_zones(tables):
    store_numbers(tables)
    hours = pd.date_range("2024-03-30", periods=ROWS, freq="h", tz="Europe/Paris")
    for table in tables.values():
        table["came"] = hours


def store_numbers_of_a_frame_as_texts(tables):
    store_numbers(tables)
    tables["Lyon"]["hb"] = tables["Lyon"]["hb"].astype(str)


def predict_a_number_as_classes(tables):
    for table in tables.values():
        table["died"] = table["weight"]


def texts_of_dates(date_format):
    return pd.date_range("2024-01-20", periods=ROWS).strftime(date_format)


THREE_DIGITS = [str(number) for number in range(500, 500 + 3 * ROWS, 3)]
CODES_FROM_1 = Recode("smoker", {"0": "1", "1": "2"})
MARKS_OF_GAPS = WriteCells("-999", "hb", rows=10)
OTHER_UNIT = ScaleNumbers("hb", 1.6)
LOWER_CASE = Recode("ward", {"A": "a", "B": "b", "C": "c"})


@dataclass
class Reading:
    """What has been read of tables, and the data warnings."""

    features: torch.Tensor
    data_warnings: list[str]


def data_of(source, number, dictionary):
    data = FederatedDataModule(
        source, OneClient(), labels="died", dictionary=dictionary, splits=Splits(server_val=0.0)
    )
    if dictionary:
        data.set_up_site(number)
    else:
        data.setup("fit")
    return data


def read_in_one_process(sources, dictionary, val=None):
    data = set_up_data(
        clients=sources, labels="died", dictionary=dictionary, val=val, server_val=0.0
    )
    source = data.division.source
    features, _ = source.train.tensors
    return Reading(features, list(map(str, source.data_warnings)))


def merged_dictionary(sources):
    """Merge the dictionaries that all sites infer and send as texts, and return the data warnings."""
    dictionary_by_site = {}
    for number, (site, source) in enumerate(sources.items()):
        data = data_of(source, number, dictionary={})
        sent_text = data.dictionary.to_text()
        dictionary_by_site[site] = Dictionary.from_plain(yaml.safe_load(sent_text))
    dictionary, data_warnings = merge(dictionary_by_site)
    if dictionary.questions:
        raise ConfigurationError("\n".join(dictionary.questions))
    return dictionary, list(map(str, data_warnings))


def read_at_sites(sources, dictionary, val=None):
    data_warnings = []
    if dictionary is None:
        dictionary, data_warnings = merged_dictionary(sources)
    features_of_sites = []
    for number, source in enumerate(sources.values()):
        data = data_of(source, number, dictionary)
        features, _ = data.division.source.train.tensors
        features_of_sites.append(features)
        data_warnings += map(str, data.division.source.data_warnings)
    if val is not None:
        data_of(val, 0, dictionary)
    return Reading(torch.cat(features_of_sites), data_warnings)


READERS = {"one process": read_in_one_process, "sites": read_at_sites}


def sources_of(change, folder):
    tables = make_tables()
    change(tables)
    return {site: source_of(table, folder / f"{site}.csv") for site, table in tables.items()}


def source_of(table, file):
    """A typed table as it is; of texts, and of the text of a file, the file's path."""
    if isinstance(table, str):
        file.write_text(table)
        return str(file)
    if table["age"].dtype == float:
        return table
    table.to_csv(file, index=False)
    return str(file)


def has_usual_features(reading, usual_reading):
    """Whether the features begin with those of tables without a change."""
    num_usual_features = usual_reading.features.shape[1]
    first_features = reading.features[:, :num_usual_features]
    return first_features.equal(usual_reading.features)


def outcome(change, read, dictionary, folder):
    """Return "right", or what is said: "refused: ...", "warned: ...", or "silent"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the data warnings are compared
        try:
            reading = read(sources_of(change, folder), dictionary)
        except ConfigurationError as error:
            return f"refused: {error}"
        if reading.data_warnings:
            return f"warned: {'; '.join(reading.data_warnings)}"
        usual_reading = read(sources_of(no_change, folder), dictionary)
    return "right" if has_usual_features(reading, usual_reading) else "silent"


def misfits(count, fields=""):
    return rf"refused: .*Fields that do not fit the data dictionary \w+: {count}{fields}"


COMMA = r"refused: .*Lyon.csv, line 2: is '\S+' a number in another format"
POINT = "refused: .*Lyon.csv, line 2: does the point of '25.548' separate thousands"
DATES = "refused: .*came: .* has dates, such as .*Make numbers of them"
LIES_APART = "refused: .*line \\d+: '.*' is farther from all other values"


#: What is said without a dictionary, in one process and at sites, and what with one. A dictionary without a column
#: excludes it.
OUTCOMES = {
    "no change": (no_change, "right", "right"),
    "decimal commas": (
        write_decimal_commas,
        COMMA,
        misfits(r"\d+", "\n.*Lyon.csv, line 2: .* in 'age'"),
    ),
    "points of thousands": (
        ApplyAll(WriteCells(THREE_DIGITS, "cells", None), WriteCells("25.548", "cells", rows=10)),
        POINT,
        "right",
    ),
    "dates in three formats": (
        ApplyAll(
            WriteCells(texts_of_dates("%Y-%m-%d"), "came", None),
            WriteCells(texts_of_dates("%d.%m.%Y"), "came"),
            WriteCells(texts_of_dates("%m/%d/%Y"), "came", "Osaka"),
        ),
        DATES,
        "right",
    ),
    "codes from 1": (
        CODES_FROM_1,
        "warned: smoker of Lyon: the values are 1 or 2, elsewhere 0 or 1",
        misfits(r"\d+", r"\n.*Lyon.csv, line \d+: '2' in 'smoker'"),
    ),
    "marks of gaps": (
        MARKS_OF_GAPS,
        LIES_APART,
        misfits(10, "\n.*Lyon.csv, line 2: '-999' in 'hb', expected numbers from 4 to 30 g/dl"),
    ),
    "blanks and no class": (
        ApplyAll(Recode("died", {"no": "no ", "yes": "yes "}), WriteCells("no", "died", "Osaka")),
        "right",
        "right",
    ),
    "column of one site": (
        WriteCells("A", "insurer"),
        "refused: .*insurer: the column is in the tables of Lyon, but not of Boston, Osaka",
        "right",
    ),
    "time zones": (
        add_time_zones,
        "refused: .*came: (the )?DataFrame.* has dates, such as '2024-03-30 00:00:00.01:00'",
        "right",
    ),
    "another unit": (
        OTHER_UNIT,
        "warned: hb of Lyon: the mean is 20.4[56], elsewhere 12.89",
        "warned: hb of .*Lyon.*: the mean is 20.45, in the dictionary 13",
    ),
    "other classes at Osaka": (
        Recode("died", {"no": "0", "yes": "1"}, "Osaka"),
        "refused: The target 'died' is '0', '1' at Osaka, and no other site",
        "refused: .*Osaka.csv, line 2: '[01]' in the target 'died'",
    ),
    "numbers as classes": (
        predict_a_number_as_classes,
        "refused: .*The target 'died' has .* different values in (360|120) rows",
        "refused: .*Boston.csv, line 2: .* in the target 'died'",
    ),
    "an empty column": (
        WriteCells("", "hb", None),
        "refused: .*hb: no row of any site has a value",
        misfits(120, "\n.*Boston.csv, line 2: '' in 'hb'"),
    ),
    "other zip codes at Osaka": (
        ApplyAll(
            WriteCells(["10115", "80331", "50667"], "zip", None),
            WriteCells(["01067", "04109", "06108"], "zip", "Osaka"),
        ),
        "refused: .*zip: .*numbers at Boston, Lyon and categories at Osaka",
        "right",
    ),
    "lower case": (
        LOWER_CASE,
        "refused: .*ward: .*look like spellings of one name",
        misfits(120, "\n.*Lyon.csv, line 2: '.' in 'ward'"),
    ),
    "numbers of a frame as texts": (store_numbers_of_a_frame_as_texts, "right", "right"),
    "infinity": (
        WriteCells("inf", "hb", rows=1),
        "refused: .*hb: .*line 2: .* this one is 'inf'",
        misfits(1, "\n"),
    ),
    "a class in title case": (
        Recode("died", {"no": "No", "yes": "Yes"}),
        "refused: The target 'died' has .*look like spellings of one name",
        "refused: .*Lyon.csv, line 2: '(Yes|No)' in the target 'died'",
    ),
    "a number of Python": (
        WriteCells("1_000", "weight", rows=1),
        "refused: .*weight: .*: the other fields are .*, but this one is '1_000'",
        misfits(1, "\n"),
    ),
}


@pytest.mark.by_turn
@pytest.mark.fast_rows(
    "no change-one process",
    "decimal commas-one process",
    "marks of gaps-one process",
    "*classes*-one process",
)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", OUTCOMES)
def test_table_without_a_dictionary_is_read_warned_about_or_refused(kind, reader, tmp_path):
    change, pattern, _ = OUTCOMES[kind]

    answer = outcome(change, READERS[reader], dictionary=None, folder=tmp_path)

    assert re.match(pattern, answer, re.DOTALL), answer


@pytest.mark.by_turn
@pytest.mark.fast_rows("no change-one process", "marks of gaps-one process")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", OUTCOMES)
def test_table_with_a_dictionary_is_read_warned_about_or_refused(kind, reader, tmp_path):
    change, _, pattern = OUTCOMES[kind]

    answer = outcome(change, READERS[reader], dictionary=DICTIONARY, folder=tmp_path)

    assert re.match(pattern, answer, re.DOTALL), answer


#: Changes of the server's validation table, and what one process and sites say of it.
OUTCOMES_OF_VAL = {
    "marks of gaps": (
        MARKS_OF_GAPS,
        {"one process": "hb: .*val.csv, line 2: '-999' is farther", "sites": "'-999' in 'hb'"},
    ),
    "lower case": (
        LOWER_CASE,
        {"one process": "ward: .*spellings of one name", "sites": "'.' in 'ward'"},
    ),
    "gaps": (
        WriteCells("", "hb", rows=10),
        {"one process": "right", "sites": "'' in 'hb', expected numbers"},
    ),
    "another unit": (
        ScaleNumbers("creatinine", 88.42),
        {
            "one process": "creatinine of val: .*another unit",
            "sites": "in 'creatinine', expected numbers",
        },
    ),
}


def warnings_or_refusal(read, sources, val):
    try:
        reading = read(sources, dictionary=None, val=str(val))
    except ConfigurationError as error:
        return str(error)
    return "; ".join(reading.data_warnings) or "right"


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", OUTCOMES_OF_VAL)
def test_validation_table_of_the_server_is_read_warned_about_or_refused(kind, reader, tmp_path):
    change, patterns = OUTCOMES_OF_VAL[kind]
    table = make_tables()["Osaka"].sample(frac=1, random_state=1, ignore_index=True)
    change({"Lyon": table})
    file = tmp_path / "val.csv"
    table.to_csv(file, index=False)

    answer = warnings_or_refusal(READERS[reader], sources_of(no_change, tmp_path), file)

    assert re.search(patterns[reader], answer), answer


USUAL_CELLS = [str(400 + row * 37 % 101) for row in range(ROWS)]
CELLS_WITH_FRACTIONS = [f"{cell}.5" for cell in USUAL_CELLS]
LEADING_ZEROS = [f"0{cell}" for cell in USUAL_CELLS]


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("cells", "change", "message"),
    [
        (
            CELLS_WITH_FRACTIONS,
            WriteCells(["425.548", "473", "441.412"], "cells"),
            "does the point of '441.412' separate thousands",
        ),
        (
            USUAL_CELLS,
            WriteCells(LEADING_ZEROS, "cells"),
            "refused: .*: cells: the values begin with a zero",
        ),
    ],
)
def test_tables_of_june_with_other_cells_than_in_januarys_dictionary_are_refused(
    cells, change, message, tmp_path
):
    in_january = WriteCells(cells, "cells", None)
    dictionary, _ = merged_dictionary(sources_of(in_january, tmp_path))

    answer = outcome(ApplyAll(in_january, change), read_at_sites, dictionary, tmp_path)

    assert re.search(message, answer), answer


@pytest.mark.parametrize("dictionary", [{}, DICTIONARY], ids=["alone", "with a dictionary"])
def test_file_of_one_client_is_read_with_the_options_of_pandas(dictionary, tmp_path):
    formats = {"Lyon": {"decimal": ",", "sep": ";", "encoding": "utf-8"}}
    sources = sources_of(write_decimal_commas, tmp_path)
    usual_sources = sources_of(no_change, tmp_path / "..")

    reading = read_in_one_process(sources, {**dictionary, "read": formats})

    usual_reading = read_in_one_process(usual_sources, dictionary or None)
    assert reading.features.equal(usual_reading.features)
    assert not reading.data_warnings
