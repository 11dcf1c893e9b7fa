"""Tables as people have them: what one process and sites say of each, with and without a data dictionary."""

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

from flsv.data import Dictionary, FederatedDataModule, OneClient, Splits
from flsv.data.tables.merger import merge
from flsv.utilities.errors import ConfigurationError

ROWS = 120
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


def cut_a_row(tables: Tables) -> None:
    lines = tables["Lyon"].to_csv(index=False).split("\n")
    lines[5], _, _ = lines[5].rpartition(",")
    tables["Lyon"] = "\n".join(lines)


def cut_a_row_and_quote_a_comma(tables: Tables) -> None:
    """The number of commas is right."""
    cut_a_row(tables)
    lines = tables["Lyon"].split("\n")
    cells = lines[9].split(",")
    cells[5] = '"A,B"'
    lines[9] = ",".join(cells)
    tables["Lyon"] = "\n".join(lines)


def write_names_twice(tables: Tables) -> None:
    text = tables["Lyon"].to_csv(index=False)
    tables["Lyon"] = text + text


def write_names_twice_among_words(tables: Tables) -> None:
    for table in tables.values():
        for name in ("age", "hb", "creatinine", "weight"):
            table[name] = np.resize(["w0", "w1", "w2"], ROWS)
        table["smoker"] = table["smoker"].map({"0": "n", "1": "y"})
    write_names_twice(tables)


def write_classes_otherwise_at_osaka(tables: Tables) -> None:
    tables["Osaka"]["died"] = tables["Osaka"]["died"].map({"no": "0", "yes": "1"})


def predict_a_number_as_classes(tables: Tables) -> None:
    for table in tables.values():
        table["died"] = table["weight"]


def write_months_in_a_third_of_all(tables: Tables) -> None:
    for table in tables.values():
        scale(table, "age", 12, rows=40)


def write_months_in_a_tenth_at_lyon(tables: Tables) -> None:
    scale(tables["Lyon"], "age", 12, rows=12)


def have_one_ward_at_lyon(tables: Tables) -> None:
    tables["Lyon"]["ward"] = "A"


def empty_a_column(tables: Tables) -> None:
    for table in tables.values():
        table["hb"] = ""


def write_other_zip_codes_at_osaka(tables: Tables) -> None:
    for table in tables.values():
        table["zip"] = np.resize(["10115", "80331", "50667"], ROWS)
    tables["Osaka"]["zip"] = np.resize(["01067", "04109", "06108"], ROWS)


def spell_wards_otherwise(tables: Tables) -> None:
    tables["Lyon"]["ward"] = tables["Lyon"]["ward"].str.lower()


def code_missing_smokers(tables: Tables) -> None:
    tables["Lyon"].loc[:14, "smoker"] = "99"


def code_gaps_everywhere(tables: Tables) -> None:
    for table in tables.values():
        table.loc[:9, "hb"] = "-999"


def write_percent_signs(tables: Tables) -> None:
    for table in tables.values():
        table["sat"] = [f"{90 + row % 9} %" for row in range(ROWS)]


def store_numbers_of_a_frame_as_texts(tables: Tables) -> None:
    for table in tables.values():
        for name in ("age", "hb", "creatinine", "weight"):
            table[name] = table[name].astype(float)
        table["smoker"] = table["smoker"].astype(int)
    tables["Lyon"]["hb"] = tables["Lyon"]["hb"].astype(str)


def leave_decimal_commas_unquoted(tables: Tables) -> None:
    table = tables["Lyon"]
    lines = [",".join(table)]
    for cells in table.to_numpy().tolist():
        lines.append(",".join([cells[0].replace(".", ","), *cells[1:]]))
    tables["Lyon"] = "\n".join(lines)


# Ten more, on which somebody would lose a number without a word.


def write_infinity(tables: Tables) -> None:
    tables["Lyon"].loc[0, "hb"] = "inf"


def write_a_number_beyond_float32(tables: Tables) -> None:
    tables["Lyon"].loc[0, "hb"] = "1e39"


def write_python_numbers(tables: Tables) -> None:
    tables["Lyon"].loc[0, "weight"] = "1_000"


def give_a_column_twice(tables: Tables) -> None:
    table = tables["Lyon"]
    tables["Lyon"] = table.assign(hb2=table["hb"]).rename(columns={"hb2": "hb"})


def give_a_column_no_name(tables: Tables) -> None:
    tables["Lyon"] = tables["Lyon"].to_csv()


def write_truths_as_numbers_at_lyon(tables: Tables) -> None:
    for table in tables.values():
        table["smoker"] = table["smoker"].map({"0": "False", "1": "True"})
    tables["Lyon"]["smoker"] = tables["Lyon"]["smoker"].map({"False": "0", "True": "1"})


def spell_a_class_otherwise(tables: Tables) -> None:
    tables["Lyon"]["died"] = tables["Lyon"]["died"].str.title()


def write_commas_of_thousands(tables: Tables) -> None:
    for table in tables.values():
        table["cells"] = [str(number) for number in range(500, 500 + ROWS)]
    tables["Lyon"].loc[:9, "cells"] = "25,548"


def write_day_before_month_at_lyon(tables: Tables) -> None:
    dates = pd.date_range("2024-01-01", periods=ROWS)
    for table in tables.values():
        table["came"] = dates.strftime("%Y-%m-%d")
    tables["Lyon"]["came"] = dates.strftime("%d/%m/%Y")


def write_a_class_in_one_file_only(tables: Tables) -> None:
    for table in tables.values():
        table["died"] = "no"
    tables["Lyon"]["died"] = "yes"


@dataclass
class Look:
    """What the features are, and what is doubted."""

    features: torch.Tensor
    doubts: list[str]


def data_of(source: Any, number: int, dictionary: Any) -> FederatedDataModule:
    data = FederatedDataModule(
        source,
        OneClient(),
        labels="died",
        dictionary=dictionary,
        splits=Splits(server_val=0.0),
    )
    if dictionary:
        data.deal_from(number)
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
    doubts = [f"{doubt.column} of {doubt.site}: {doubt.text}" for doubt in data._source.doubts]
    return Look(data._source.tensors[0], doubts)


def merged_dictionary(sources: Sources) -> tuple[Dictionary, list[str]]:
    """Merge the dictionaries that all sites draft and send as texts, and return the doubts."""
    drafts = {}
    doubts = []
    for number, (site, source) in enumerate(sources.items()):
        data = data_of(source, number, dictionary={})
        assert data.dictionary is not None
        drafts[site] = Dictionary.from_plain(yaml.safe_load(data.dictionary.to_text()))
        doubts += [f"{doubt.column}: {doubt.text}" for doubt in data._source.doubts]
    dictionary, disagreements = merge(drafts)
    if dictionary.questions:
        raise ConfigurationError("\n".join(dictionary.questions))
    doubts += [f"{doubt.column} of {doubt.site}: {doubt.text}" for doubt in disagreements]
    return dictionary, doubts


def look_at_sites(sources: Sources, dictionary: Any, val: Any = None) -> Look:
    doubts: list[str] = []
    if dictionary is None:
        dictionary, doubts = merged_dictionary(sources)
    inputs = []
    for number, source in enumerate(sources.values()):
        data = data_of(source, number, dictionary)
        inputs.append(data._source.tensors[0])
        doubts += [f"{doubt.column} at the site: {doubt.text}" for doubt in data._source.doubts]
    if val is not None:
        data = data_of(val, 0, dictionary)
        doubts += [f"{doubt.column} of val: {doubt.text}" for doubt in data._source.doubts]
    return Look(torch.cat(inputs), doubts)


LOOKS = {"one process": look_in_one_process, "sites": look_at_sites}


def sources_of(change: Callable[[Tables], None], folder: Path) -> Sources:
    tables = make_tables()
    change(tables)
    sources: dict[str, str | pd.DataFrame] = {}
    for site, table in tables.items():
        file = folder / f"{site}.csv"
        if isinstance(table, str):
            file.write_text(table)
        elif table["age"].ndim == 1 and table["age"].dtype == float:
            sources[site] = table
            continue
        else:
            is_german = change is write_decimal_commas and site == "Lyon"
            separator = ";" if is_german else ","
            table.to_csv(file, index=False, sep=separator)
        sources[site] = str(file)
    return sources


def outcome(change: Callable[[Tables], None], look: Any, dictionary: Any, folder: Path) -> str:
    """Return "right", or what is said: "refused: ...", "doubted: ...", or "silent"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about doubts, which are looked at
        try:
            answer = look(sources_of(change, folder), dictionary)
        except ConfigurationError as error:
            return f"refused: {error}"
        if answer.doubts:
            return f"doubted: {'; '.join(answer.doubts)}"
        usual_features = look(sources_of(no_change, folder), dictionary).features
    num_features = usual_features.shape[1]
    is_right = len(answer.features) == 3 * ROWS and answer.features[:, :num_features].equal(
        usual_features
    )
    return "right" if is_right else "silent"


MISFIT = r"refused: .*Cells that do not fit the data dictionary \w+: "
COMMA = r"refused: .*Lyon.csv, line 2: '\S+' is a number in another notation"
POINT = "refused: .*Lyon.csv, line 2: does the point of '25.548' separate thousands"
DATES = "refused: .*came: dates, such as .*Days since what"
SHORT_ROW = "refused: .*Lyon.csv, line 6: 6 values, but the header has 7 names"
LONG_ROW = "refused: .*Lyon.csv, line 2: 8 values, but the header has 7 names"
NAMES_TWICE = "refused: .*Lyon.csv, line 122: the columns' names again"
NO_NAME = "refused: .*columns are called '(hb', 'hb)?'"


#: What is said without a dictionary, in one process and at sites, and what with one. A dictionary without a column
#: leaves it out, and one by hand has no counts, so that sites do not compare their shares of a class.
OUTCOMES: dict[Callable[[Tables], None], tuple[str, str]] = {
    no_change: ("right", "right"),
    write_decimal_commas: (COMMA, COMMA),
    mix_decimal_marks: (COMMA, COMMA),
    separate_thousands: (POINT, "right"),
    write_dates_in_three_formats: (DATES, "right"),
    write_yes_in_three_ways: (
        "refused: .*smoker: categories at Boston, Lyon and numbers at Osaka. Two codings",
        f"{MISFIT}120.*Boston.csv, line 2: 'no' in 'smoker', expected one of '0', '1'",
    ),
    write_units: (
        "refused: .*dose: numbers at Boston, Osaka and categories at Lyon.*or a unit",
        "right",
    ),
    code_smokers_from_1: (
        "doubted: smoker of Lyon: 1 or 2, elsewhere 0 or 1: two codings",
        rf"{MISFIT}\d+\n.*Lyon.csv, line \d+: '2' in 'smoker', expected one of '0', '1'",
    ),
    code_gaps: (
        "doubted: .*hb.*: 10 of 120 values lie apart: codes of missing ones",
        f"{MISFIT}10\n.*Lyon.csv, line 2: '-999' in 'hb', expected numbers from 4 to 30 g/dl",
    ),
    add_zip_codes: ("right", "right"),
    add_patients: (
        "doubted: .*patient.*: nearly all values are different, as of a number of the case",
        "right",
    ),
    add_codes: ("refused: .*code: 120 different words", "right"),
    leave_blanks_and_no_class: (
        "doubted: class of Osaka: 0% are yes, 49% elsewhere",
        "doubted: class of Osaka: 0% are yes, 32% elsewhere|right",
    ),
    add_column_of_one_site: (
        "refused: .*insurer: no such column at Boston, Osaka, and Lyon have it",
        "right",
    ),
    add_time_zones: (
        "refused: .*came: dates, such as '2024-03-30 00:00:00.01:00' in (the )?DataFrame",
        "right",
    ),
    write_creatinine_in_micromoles: (
        r"doubted: .*creatinine.*: 6 of 120 values lie apart",
        f"{MISFIT}6\n.*Boston.csv, line 2: '130.86' in 'creatinine', expected .* 0.1 to 20",
    ),
    write_hemoglobin_in_another_unit: (
        "doubted: hb of Lyon: mean 20.45, elsewhere 12.89",
        "doubted: hb (of Lyon|at the site): mean 20.45, elsewhere 13",
    ),
    # What none can see stands on the page about own data: values that are possible in their column.
    write_some_weights_in_pounds: ("silent", "silent"),
    cut_a_row: (SHORT_ROW, SHORT_ROW),
    cut_a_row_and_quote_a_comma: (SHORT_ROW, SHORT_ROW),
    write_names_twice: (NAMES_TWICE, NAMES_TWICE),
    write_names_twice_among_words: (NAMES_TWICE, "refused"),
    write_classes_otherwise_at_osaka: (
        "refused: the target 'died' is '0', '1' at Osaka, and nowhere else",
        "refused: .*Osaka.csv, line 2: '[01]' in target 'died', expected one of 2 classes: no, yes",
    ),
    predict_a_number_as_classes: (
        "refused: .*the target 'died' has .* different values in (360|120) rows.* task: regression",
        "refused: .*Boston.csv, line 2: .* in target 'died', expected one of 2 classes",
    ),
    write_months_in_a_third_of_all: (
        "doubted: .*age.*: 40 of 120 values lie apart",
        f"{MISFIT}40\n.*Boston.csv, line 2: '.*' in 'age', expected numbers from 0 to 120",
    ),
    write_months_in_a_tenth_at_lyon: ("doubted: .*age.*: 12 of 120 values lie", f"{MISFIT}12"),
    # One ward may be all that a hospital has.
    have_one_ward_at_lyon: ("silent", "silent"),
    empty_a_column: (
        "refused: .*hb: no row has a value",
        f"{MISFIT}120\n.*Boston.csv, line 2: '' in 'hb'",
    ),
    write_other_zip_codes_at_osaka: (
        "refused: .*zip: numbers at Boston, Lyon and categories at Osaka",
        "right",
    ),
    spell_wards_otherwise: (
        "refused: .*ward: .*look like spellings of one name",
        f"{MISFIT}120\n.*Lyon.csv, line 2: '.' in 'ward', expected one of 'A', 'B', 'C'",
    ),
    code_missing_smokers: ("doubted: .*smoker.*: 15 of 120 values lie apart", f"{MISFIT}15"),
    code_gaps_everywhere: ("doubted: .*hb.*: 10 of 120 values lie apart", f"{MISFIT}10"),
    # Nine words are categories.
    write_percent_signs: ("right", "right"),
    store_numbers_of_a_frame_as_texts: ("right", "right"),
    leave_decimal_commas_unquoted: (LONG_ROW, LONG_ROW),
    write_infinity: ("refused: .*hb: .*line 2: 'inf' is none of numbers", f"{MISFIT}1\n"),
    write_a_number_beyond_float32: ("refused: .*hb: .*: '1e39' is none of", f"{MISFIT}1\n"),
    write_python_numbers: ("refused: .*weight: .*: '1_000' is none of", f"{MISFIT}1\n"),
    give_a_column_twice: (NO_NAME, NO_NAME),
    give_a_column_no_name: (NO_NAME, NO_NAME),
    write_truths_as_numbers_at_lyon: (
        "refused: .*smoker: truth values at Boston, Osaka and numbers at Lyon",
        f"{MISFIT}120",
    ),
    spell_a_class_otherwise: (
        "refused: the target 'died' has .*look like spellings of one name",
        "refused: .*Lyon.csv, line 2: '(Yes|No)' in target 'died', expected one of 2 classes",
    ),
    write_commas_of_thousands: (
        "refused: .*Lyon.csv, line 2: '25,548' is a number in another notation",
        "right",
    ),
    write_day_before_month_at_lyon: (DATES, "right"),
    write_a_class_in_one_file_only: (
        "refused: the target 'died' is 'yes' at Lyon, and nowhere else",
        "doubted: .*class of Lyon: 100% are yes|right",
    ),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("change", OUTCOMES, ids=lambda change: change.__name__)
def test_what_is_said_of_a_table(
    change: Callable[[Tables], None], look: str, tmp_path: Path
) -> None:
    for dictionary, pattern in zip((None, DICTIONARY), OUTCOMES[change]):
        answer = outcome(change, LOOKS[look], dictionary, tmp_path)
        assert re.match(pattern, answer, re.DOTALL), answer


def leave_gaps(tables: Tables) -> None:
    tables["Lyon"].loc[:9, "hb"] = ""


def write_micromoles(tables: Tables) -> None:
    scale(tables["Lyon"], "creatinine", 88.42)


def open_a_ward(tables: Tables) -> None:
    tables["Lyon"].loc[:9, "ward"] = "D"


#: What one process says, and what sites say, of the server's validation table.
OUTCOMES_OF_VAL: dict[Callable[[Tables], None], tuple[str, str]] = {
    code_smokers_from_1: (
        "smoker of val: 1 or 2, elsewhere 0 or 1",
        "'2' in 'smoker', expected whole",
    ),
    code_gaps: ("hb of val: .*values lie apart", "'-999' in 'hb', expected numbers from"),
    spell_wards_otherwise: ("ward: .*spellings of one name", "'.' in 'ward', expected one of"),
    leave_gaps: ("silent", "'' in 'hb', expected numbers"),
    write_micromoles: ("creatinine of val: .*another unit", "in 'creatinine', expected numbers"),
    open_a_ward: ("ward of val: no other site has D", "'D' in 'ward', expected one of"),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("change", OUTCOMES_OF_VAL, ids=lambda change: change.__name__)
def test_what_is_said_of_the_servers_table(
    change: Callable[[Tables], None], look: str, tmp_path: Path
) -> None:
    sources = sources_of(no_change, tmp_path)
    table = make_tables()["Osaka"].sample(frac=1, random_state=1, ignore_index=True)
    change({"Lyon": table})
    table.to_csv(tmp_path / "val.csv", index=False)
    try:
        answer = LOOKS[look](sources, None, val=str(tmp_path / "val.csv"))
        words = "; ".join(answer.doubts) or "silent"
    except ConfigurationError as error:
        words = str(error)

    in_one_process, at_sites = OUTCOMES_OF_VAL[change]
    pattern = at_sites if look == "sites" else in_one_process
    assert re.search(pattern, words), words


def write_one_more_point(tables: Tables) -> None:
    cells = [str(number) for number in range(500, 500 + ROWS)]
    tables["Lyon"]["cells"] = ["25.548"] * 40 + cells[40:]


def write_leading_zeros(tables: Tables) -> None:
    tables["Lyon"]["cells"] = [f"0{400 + row % 90}" for row in range(ROWS)]


def have_one_high_value(tables: Tables) -> None:
    tables["Osaka"].loc[3, "creatinine"] = "14.2"


def cut_ages(tables: Tables) -> None:
    tables["Osaka"].loc[:30, "age"] = "6"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (write_hemoglobin_in_another_unit, "hb: mean 20.45, elsewhere 15.4|in 'hb', expected"),
        (write_one_more_point, "does the point of '25.548' separate thousands"),
        (
            write_leading_zeros,
            "refused: .*: cells has numbers that begin with a zero",
        ),
        (have_one_high_value, "line 5: '14.2' in 'creatinine', expected numbers from 0 to"),
        (cut_ages, "age at the site: 31 of 120 values lie apart"),
    ],
)
def test_dictionary_of_january_beside_tables_of_june(
    change: Callable[[Tables], None], message: str, tmp_path: Path
) -> None:
    def in_january(tables: Tables) -> None:
        for table in tables.values():
            suffix = ".5" if change is write_one_more_point else ""
            table["cells"] = [f"{400 + row * 37 % 101}{suffix}" for row in range(ROWS)]

    def in_june(tables: Tables) -> None:
        in_january(tables)
        change(tables)

    dictionary, _ = merged_dictionary(sources_of(in_january, tmp_path))
    answer = outcome(in_june, look_at_sites, dictionary, tmp_path)

    assert re.search(message, answer), answer


def test_file_of_one_client_is_read_as_pandas_words_say(tmp_path: Path) -> None:
    read = {"Lyon": {"decimal": ",", "sep": ";", "encoding": "utf-8"}}
    sources = sources_of(write_decimal_commas, tmp_path)
    usual_sources = sources_of(no_change, tmp_path / "..")
    for dictionary in ({}, DICTIONARY):
        answer = look_in_one_process(sources, {**dictionary, "read": read})
        usual_look = look_in_one_process(usual_sources, dictionary or None)
        assert answer.features.equal(usual_look.features)
        assert not answer.doubts
