"""Tables as people have them: read, warned about or refused by one process and by sites."""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
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

ROWS = 120
NUMBERS = ("age", "hb", "creatinine", "weight")
#: A site's table, or the text of its file.
Tables = dict[str, Any]
#: A site's file, or a typed frame.
Sources = Mapping[str, str | pd.DataFrame]
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


#: A change of the sites' tables.
Change = Callable[[Tables], None]


def write_cells(cells: Any, name: str, site: str | None = "Lyon", rows: int = ROWS) -> Change:
    """Write cells, again and again, into the first rows of a site's column, or of every site's."""

    def change(tables: Tables) -> None:
        for table_site, table in tables.items():
            if site in (None, table_site):
                table.loc[: rows - 1, name] = np.resize(cells, rows)

    return change


def scale_numbers(name: str, factor: float, site: str | None = "Lyon", rows: int = ROWS) -> Change:
    """Multiply the numbers of the first rows."""

    def change(tables: Tables) -> None:
        for table_site, table in tables.items():
            if site in (None, table_site):
                numbers = table[name].astype(float)
                numbers[:rows] *= factor
                table[name] = numbers.round(2).astype(str)

    return change


def recode(name: str, words: Mapping[str, str], site: str = "Lyon") -> Change:
    def change(tables: Tables) -> None:
        tables[site][name] = tables[site][name].map(words)

    return change


def apply_all(*changes: Change) -> Change:
    def change(tables: Tables) -> None:
        for single_change in changes:
            single_change(tables)

    return change


no_change = apply_all()


def write_decimal_commas(tables: Tables) -> None:
    lyon = tables["Lyon"]
    for name in NUMBERS:
        lyon[name] = lyon[name].str.replace(".", ",")
    tables["Lyon"] = lyon.to_csv(index=False, sep=";")


def store_numbers(tables: Tables) -> None:
    for table in tables.values():
        for name in NUMBERS:
            table[name] = table[name].astype(float)
        table["smoker"] = table["smoker"].astype(int)


def add_time_zones(tables: Tables) -> None:
    store_numbers(tables)
    hours = pd.date_range("2024-03-30", periods=ROWS, freq="h", tz="Europe/Paris")
    for table in tables.values():
        table["came"] = hours


def store_numbers_of_a_frame_as_texts(tables: Tables) -> None:
    store_numbers(tables)
    tables["Lyon"]["hb"] = tables["Lyon"]["hb"].astype(str)


def cut_a_row_and_quote_a_comma(tables: Tables) -> None:
    """The number of commas is right."""
    lines = tables["Lyon"].to_csv(index=False).split("\n")
    lines[5], _, _ = lines[5].rpartition(",")
    fields = lines[9].split(",")
    fields[5] = '"A,B"'
    lines[9] = ",".join(fields)
    tables["Lyon"] = "\n".join(lines)


def write_names_twice(tables: Tables) -> None:
    text = tables["Lyon"].to_csv(index=False)
    tables["Lyon"] = text + text


def predict_a_number_as_classes(tables: Tables) -> None:
    for table in tables.values():
        table["died"] = table["weight"]


def texts_of_dates(date_format: str) -> Any:
    return pd.date_range("2024-01-20", periods=ROWS).strftime(date_format)


THREE_DIGITS = [str(number) for number in range(500, 500 + 3 * ROWS, 3)]
CODES_FROM_1 = recode("smoker", {"0": "1", "1": "2"})
MARKS_OF_GAPS = write_cells("-999", "hb", rows=10)
OTHER_UNIT = scale_numbers("hb", 1.6)
LOWER_CASE = recode("ward", {"A": "a", "B": "b", "C": "c"})


@dataclass
class Look:
    """The features and the data warnings."""

    features: torch.Tensor
    data_warnings: list[str]


def data_of(source: Any, number: int, dictionary: Any) -> FederatedDataModule:
    data = FederatedDataModule(
        source, OneClient(), labels="died", dictionary=dictionary, splits=Splits(server_val=0.0)
    )
    if dictionary:
        data.set_up_site(number)
    else:
        data.setup("fit")
    return data


def look_in_one_process(sources: Sources, dictionary: Any, val: Any = None) -> Look:
    data = FederatedDataModule(
        clients=sources,
        labels="died",
        dictionary=dictionary,
        val=val,
        splits=Splits(server_val=0.0),
    )
    data.setup("fit")
    source = data.division.source
    data_warnings = [str(data_warning) for data_warning in source.data_warnings]
    return Look(source.tensors[0], data_warnings)


def merged_dictionary(sources: Sources) -> tuple[Dictionary, list[str]]:
    """Merge the dictionaries that all sites infer and send as texts, and return the data warnings."""
    dictionary_by_site = {}
    for number, (site, source) in enumerate(sources.items()):
        data = data_of(source, number, dictionary={})
        assert data.dictionary is not None
        dictionary_by_site[site] = Dictionary.from_plain(yaml.safe_load(data.dictionary.to_text()))
    dictionary, data_warnings = merge(dictionary_by_site)
    if dictionary.questions:
        raise ConfigurationError("\n".join(dictionary.questions))
    return dictionary, list(map(str, data_warnings))


def look_at_sites(sources: Sources, dictionary: Any, val: Any = None) -> Look:
    data_warnings: list[str] = []
    if dictionary is None:
        dictionary, data_warnings = merged_dictionary(sources)
    inputs = []
    for number, source in enumerate(sources.values()):
        data = data_of(source, number, dictionary)
        inputs.append(data.division.source.tensors[0])
        data_warnings += map(str, data.division.source.data_warnings)
    if val is not None:
        data_of(val, 0, dictionary)
    return Look(torch.cat(inputs), data_warnings)


LOOKS = {"one process": look_in_one_process, "sites": look_at_sites}


def sources_of(change: Change, folder: Path) -> Sources:
    tables = make_tables()
    change(tables)
    sources: dict[str, str | pd.DataFrame] = {}
    for site, table in tables.items():
        file = folder / f"{site}.csv"
        if isinstance(table, str):
            file.write_text(table)
        elif table["age"].dtype == float:
            sources[site] = table
            continue
        else:
            table.to_csv(file, index=False)
        sources[site] = str(file)
    return sources


def outcome(change: Change, look: Any, dictionary: Any, folder: Path) -> str:
    """Return "right", or what is said: "refused: ...", "warned: ...", or "silent"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the data warnings are compared
        try:
            answer = look(sources_of(change, folder), dictionary)
        except ConfigurationError as error:
            return f"refused: {error}"
        if answer.data_warnings:
            return f"warned: {'; '.join(answer.data_warnings)}"
        usual_features = look(sources_of(no_change, folder), dictionary).features
    num_features = usual_features.shape[1]
    is_right = len(answer.features) == 3 * ROWS and answer.features[:, :num_features].equal(
        usual_features
    )
    return "right" if is_right else "silent"


def misfits(count: int | str, fields: str = "") -> str:
    return rf"refused: .*Fields that do not fit the data dictionary \w+: {count}{fields}"


COMMA = r"refused: .*Lyon.csv, line 2: is '\S+' a number in another format"
POINT = "refused: .*Lyon.csv, line 2: does the point of '25.548' separate thousands"
DATES = "refused: .*came: .* has dates, such as .*Make numbers of them"
SHORT_ROW = "refused: .*Lyon.csv, line 6: the row has 6 fields, but the header has 7 names"
NAMES_TWICE = "refused: .*Lyon.csv, line 122: the header is repeated"
LIES_APART = "refused: .*line \\d+: '.*' is farther from all other values"


#: What is said without a dictionary, in one process and at sites, and what with one. A dictionary without a column
#: excludes it.
OUTCOMES: dict[str, tuple[Change, str, str]] = {
    "no change": (no_change, "right", "right"),
    "decimal commas": (
        write_decimal_commas,
        COMMA,
        misfits(r"\d+", "\n.*Lyon.csv, line 2: .* in 'age'"),
    ),
    "points of thousands": (
        apply_all(
            write_cells(THREE_DIGITS, "cells", None), write_cells("25.548", "cells", rows=10)
        ),
        POINT,
        "right",
    ),
    "dates in three formats": (
        apply_all(
            write_cells(texts_of_dates("%Y-%m-%d"), "came", None),
            write_cells(texts_of_dates("%d.%m.%Y"), "came"),
            write_cells(texts_of_dates("%m/%d/%Y"), "came", "Osaka"),
        ),
        DATES,
        "right",
    ),
    "yes in three ways": (
        apply_all(
            recode("smoker", {"0": "no", "1": "yes"}, "Boston"),
            recode("smoker", {"0": "nein", "1": "ja"}),
        ),
        "refused: .*smoker: .*categories at Boston, Lyon and numbers at Osaka",
        misfits(120, ".*Boston.csv, line 2: 'no' in 'smoker'"),
    ),
    "units in cells": (
        apply_all(
            write_cells(["5", "10", "20"], "dose", None), write_cells(["5 mg", "10 mg"], "dose")
        ),
        "refused: .*dose: '5 mg' is a number with a unit. Set unit: 'mg'",
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
    "codes": (
        write_cells([f"case {row}" for row in range(ROWS)], "code", None),
        "refused: .*code: .* has 120 different words",
        "right",
    ),
    "blanks and no class": (
        apply_all(recode("died", {"no": "no ", "yes": "yes "}), write_cells("no", "died", "Osaka")),
        "right",
        "right",
    ),
    "column of one site": (
        write_cells("A", "insurer"),
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
    "a cut row and a quoted comma": (cut_a_row_and_quote_a_comma, SHORT_ROW, SHORT_ROW),
    "names twice": (write_names_twice, NAMES_TWICE, NAMES_TWICE),
    "other classes at Osaka": (
        recode("died", {"no": "0", "yes": "1"}, "Osaka"),
        "refused: The target 'died' is '0', '1' at Osaka, and no other site",
        "refused: .*Osaka.csv, line 2: '[01]' in the target 'died'",
    ),
    "numbers as classes": (
        predict_a_number_as_classes,
        "refused: .*The target 'died' has .* different values in (360|120) rows",
        "refused: .*Boston.csv, line 2: .* in the target 'died'",
    ),
    "an empty column": (
        write_cells("", "hb", None),
        "refused: .*hb: no row of any site has a value",
        misfits(120, "\n.*Boston.csv, line 2: '' in 'hb'"),
    ),
    "other zip codes at Osaka": (
        apply_all(
            write_cells(["10115", "80331", "50667"], "zip", None),
            write_cells(["01067", "04109", "06108"], "zip", "Osaka"),
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
        write_cells("inf", "hb", rows=1),
        "refused: .*hb: .*line 2: .* this one is 'inf'",
        misfits(1, "\n"),
    ),
    "a number of Python": (
        write_cells("1_000", "weight", rows=1),
        "refused: .*weight: .*: the other fields are .*, but this one is '1_000'",
        misfits(1, "\n"),
    ),
    "a class in title case": (
        recode("died", {"no": "No", "yes": "Yes"}),
        "refused: The target 'died' has .*look like spellings of one name",
        "refused: .*Lyon.csv, line 2: '(Yes|No)' in the target 'died'",
    ),
}


@pytest.mark.fast_rows(
    "no change-one process",
    "decimal commas-one process",
    "marks of gaps-one process",
    "a cut row*",
    "names twice*",
    "*classes*-one process",
)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", OUTCOMES)
def test_table_without_a_dictionary_is_read_warned_about_or_refused(kind, look, tmp_path):
    change, pattern, _ = OUTCOMES[kind]

    answer = outcome(change, LOOKS[look], dictionary=None, folder=tmp_path)

    assert re.match(pattern, answer, re.DOTALL), answer


@pytest.mark.fast_rows("no change-one process", "marks of gaps-one process")
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", OUTCOMES)
def test_table_with_a_dictionary_is_read_warned_about_or_refused(kind, look, tmp_path):
    change, _, pattern = OUTCOMES[kind]

    answer = outcome(change, LOOKS[look], dictionary=DICTIONARY, folder=tmp_path)

    assert re.match(pattern, answer, re.DOTALL), answer


#: Changes of the server's validation table, and what one process and sites say of it.
OUTCOMES_OF_VAL: dict[str, tuple[Change, dict[str, str]]] = {
    "marks of gaps": (
        MARKS_OF_GAPS,
        {"one process": "hb: .*val.csv, line 2: '-999' is farther", "sites": "'-999' in 'hb'"},
    ),
    "lower case": (
        LOWER_CASE,
        {"one process": "ward: .*spellings of one name", "sites": "'.' in 'ward'"},
    ),
    "gaps": (
        write_cells("", "hb", rows=10),
        {"one process": "right", "sites": "'' in 'hb', expected numbers"},
    ),
    "another unit": (
        scale_numbers("creatinine", 88.42),
        {
            "one process": "creatinine of val: .*another unit",
            "sites": "in 'creatinine', expected numbers",
        },
    ),
}


def warnings_or_refusal(look: Any, sources: Sources, val: Path) -> str:
    try:
        answer = look(sources, None, val=str(val))
    except ConfigurationError as error:
        return str(error)
    return "; ".join(answer.data_warnings) or "right"


@pytest.mark.fast_rows
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", OUTCOMES_OF_VAL)
def test_validation_table_of_the_server_is_read_warned_about_or_refused(kind, look, tmp_path):
    change, patterns = OUTCOMES_OF_VAL[kind]
    table = make_tables()["Osaka"].sample(frac=1, random_state=1, ignore_index=True)
    change({"Lyon": table})
    file = tmp_path / "val.csv"
    table.to_csv(file, index=False)

    answer = warnings_or_refusal(LOOKS[look], sources_of(no_change, tmp_path), file)

    assert re.search(patterns[look], answer), answer


USUAL_CELLS = [str(400 + row * 37 % 101) for row in range(ROWS)]
CELLS_WITH_FRACTIONS = [f"{cell}.5" for cell in USUAL_CELLS]
LEADING_ZEROS = [f"0{cell}" for cell in USUAL_CELLS]


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("cells", "change", "message"),
    [
        (
            CELLS_WITH_FRACTIONS,
            write_cells(["425.548", "473", "441.412"], "cells"),
            "does the point of '441.412' separate thousands",
        ),
        (
            USUAL_CELLS,
            write_cells(LEADING_ZEROS, "cells"),
            "refused: .*: cells: the values begin with a zero",
        ),
    ],
)
def test_tables_of_june_with_other_cells_than_in_januarys_dictionary_are_refused(
    cells, change, message, tmp_path
):
    in_january = write_cells(cells, "cells", None)
    dictionary, _ = merged_dictionary(sources_of(in_january, tmp_path))

    answer = outcome(apply_all(in_january, change), look_at_sites, dictionary, tmp_path)

    assert re.search(message, answer), answer


@pytest.mark.parametrize("dictionary", [{}, DICTIONARY], ids=["alone", "with a dictionary"])
def test_file_of_one_client_is_read_with_the_options_of_pandas(dictionary, tmp_path):
    read = {"Lyon": {"decimal": ",", "sep": ";", "encoding": "utf-8"}}
    sources = sources_of(write_decimal_commas, tmp_path)
    usual_sources = sources_of(no_change, tmp_path / "..")

    answer = look_in_one_process(sources, {**dictionary, "read": read})

    expected = look_in_one_process(usual_sources, dictionary or None)
    assert answer.features.equal(expected.features)
    assert not answer.data_warnings
