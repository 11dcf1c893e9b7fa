"""Tables as hospitals write them: what is in doubt is named, and a line to paste helps and loses no measurement."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest

from flsv.data.groups import check_spelling
from flsv.data.sources.doubts import codes_in
from flsv.data.sources.table import read_table_file
from flsv.utilities.errors import ConfigurationError
from helpers.data import ready

ROWS = 120


def hospital(seed):
    rng = np.random.default_rng(seed)
    came = pd.Timestamp("2023-01-01") + pd.to_timedelta(rng.integers(0, 600, ROWS), unit="D")
    return pd.DataFrame(
        {
            "age": rng.normal(60, 14, ROWS).round(),
            "crp": rng.lognormal(2, 1.2, ROWS).round(1),
            "sex": rng.choice(["f", "m"], ROWS),
            "left": (came + pd.to_timedelta(rng.integers(1, 20, ROWS), unit="D")).strftime("%Y-%m-%d"),
            "came": came.strftime("%Y-%m-%d"),
            "died": np.resize(["yes", "no", "no"], ROWS),
        }
    )


def in_files(folder, at_lyon=lambda frame: frame, everywhere=lambda frame: frame, **csv):
    for seed, name in enumerate(("Boston", "Lyon", "Osaka")):
        frame = everywhere(hospital(seed))
        (at_lyon(frame) if name == "Lyon" else frame).to_csv(folder / f"{name}.csv", index=False, **csv)
    return folder


def told(folder, **columns):
    """The data, or None; what is said; and the line to paste."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            data, said = ready(str(folder), labels="died", columns=columns), ""
        except ConfigurationError as error:
            data, said = None, str(error)
    said = "\n".join([said, *(str(each.message) for each in caught)])
    lines = [json.loads(line.partition(": ")[2]) for line in said.splitlines() if line.startswith("  columns: ")]
    return data, said, lines[-1] if lines else None


def pasted(folder, line):
    """The columns that come of a line: it helps at once."""
    data, said, more = told(folder, **line)
    assert data is not None, said
    assert more is None, said
    return {card.name: card for card in data.column_cards}


def codes(frame):
    frame.loc[::20, "age"], frame.loc[::30, "crp"], frame.loc[5::40, "left"] = -999, 9999, "1900-01-01"
    return frame


@pytest.mark.parametrize("dates", [{}, {"dates": {"left": "came"}, "exclude": ["came"]}])
def test_codes_for_gaps_are_named_with_the_file_and_the_line(tmp_path, dates):
    data, said, line = told(in_files(tmp_path, codes), **dates)
    assert (data is None) == (not dates)  # dates are refused otherwise
    assert "Lyon.csv: 'age' is -999 in 6 rows, and from " in said
    assert "Lyon.csv: 'left' is 1900-01-01 in 3 rows" in said
    assert line["gaps"] == {"age": ["-999"], "crp": ["9999"], "left": ["1900-01-01"]}
    cards = pasted(tmp_path, line)
    assert {name: int(cards[name].values.isna().sum()) for name in line["gaps"]} == {"age": 6, "crp": 4, "left": 3}
    assert cards["crp"].values.max() < 1000


def test_empty_gap_codes_silence_the_warning_about_codes(tmp_path):
    columns = {"gaps": {"age": [], "crp": [], "left": []}, "dates": {"left": "days"}, "exclude": ["came"]}
    _, said, line = told(in_files(tmp_path, codes), **columns)
    assert line is None, said


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ([*range(20, 90), -999.0, -999.0, 9999.0, 9999.0], [-999, 9999]),
        ([0.5 + i for i in range(400)] + [-9.0] * 3, [-9]),
        ([0.3 + 1.35 * i for i in range(400)] + [999.0] * 3, [999]),
        ([0, 1, 9] * 5, [9]),
        ([36.4 + i / 10 for i in range(30)] + [0.0] * 2, [0]),
        # none of these is one
        ([*range(20, 90), -999.0], []),
        ([0, 1] * 9, []),
        ([0, 0, 0, 1, 2, 3, 3, 12, 12], []),
        ([*range(-12, 12), -9, -9], []),
        (np.random.default_rng(0).lognormal(2, 1.5, 5000).round(1), []),
        (np.random.default_rng(0).poisson(0.3, 5000), []),
    ],
)
def test_codes_in_finds_the_numbers_that_stand_for_gaps(numbers, found):
    assert codes_in(pd.Series(numbers, dtype=float)) == found


def test_a_number_among_gaps_is_meant_however_it_is_written(tmp_path):
    """pandas writes -99 as -99.0 where there are decimals: CSV, Parquet and DataFrame alike."""
    frame = pd.DataFrame({"lab": [1.5, -99.0, 2.5, 3.0] * 10, "code": ["07", "7"] * 20, "ill": [0, 1] * 20})
    frame.to_csv(tmp_path / "lab.csv", index=False)
    made = [frame, str(tmp_path / "lab.csv")]
    gaps = [["-99"], {"lab": [-99]}, {"lab": ["-99.0"], "code": ["7"]}]
    for given in made:
        for each in gaps:
            cards = {card.name: card for card in ready(given, labels="ill", columns={"gaps": each}).column_cards}
            assert cards["lab"].values.isna().sum() == 10
            assert cards["code"].values.isna().sum() == (20 if "code" in each else 0)  # 07 is another
    with pytest.warns(UserWarning, match=r"no row has '-98' in 'lab' \(gaps\)"):
        ready(frame, labels="ill", columns={"gaps": {"lab": ["-99", "-98"]}})
    with pytest.warns(UserWarning, match=r"no row has '-98' \(gaps\)"):
        ready(frame, labels="ill", columns={"gaps": ["-99", "-98"]})
    with pytest.raises(ConfigurationError, match=r"no column 'lob' \(gaps\). Did you mean 'lab'"):
        ready(frame, labels="ill", columns={"gaps": {"lob": ["-99"]}})


def test_a_time_zone_is_the_same_of_text_and_of_a_frame(tmp_path):
    hours = pd.date_range("2024-03-30", periods=60, freq="h", tz="Europe/Paris")  # clocks change in between
    frame = pd.DataFrame({"came": hours, "left": hours[::-1], "ill": [0, 1] * 30})
    frame.to_csv(tmp_path / "stays.csv", index=False)
    columns = {"dates": {"left": "came", "came": "days"}}
    frames, files = (ready(each, labels="ill", columns=columns) for each in (frame, str(tmp_path / "stays.csv")))
    assert frames.content_hashes() == files.content_hashes()
    assert frames.column_cards[1].values[0] == pytest.approx(59 / 24)


def test_a_file_with_semicolons_and_decimal_commas(tmp_path):
    folder = in_files(tmp_path, everywhere=lambda frame: frame.drop(columns=["came", "left"]), sep=";", decimal=",")
    _, said, _ = told(folder)
    assert """Boston.csv: its values have ';' between them, not ','""" in said
    assert 'columns: {"delimiter": ";"}' in said
    _, said, line = told(folder, delimiter=";")
    assert "in 'age' has a decimal comma (decimal: ',')" in said
    cards = pasted(folder, line)
    assert line == {"delimiter": ";", "decimal": ","}
    assert [cards[name].kind for name in ("age", "crp", "sex")] == ["numbers", "numbers", "categories"]
    assert cards["crp"].values.tolist() == [x for seed in range(3) for x in hospital(seed)["crp"]]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigurationError, match="save this one with ';'"):
        read_table_file(tmp_path / "other.csv", ";")


def test_two_decimal_marks_are_told_and_no_measurement_becomes_categories(tmp_path):
    def commas(frame):
        return frame.assign(crp=frame["crp"].astype(str).str.replace(".", ","))

    folder = in_files(tmp_path, commas, lambda frame: frame.drop(columns=["came", "left"]))
    _, said, line = told(folder)
    assert "Lyon.csv, line 2: '35,9' in 'crp' is a number as text, and '" in said
    assert "categorical" not in line
    assert pasted(folder, line)["crp"].kind == "left out"
    frames = {name: commas(hospital(seed)).drop(columns=["came", "left"]) for seed, name in enumerate("AB")}
    with pytest.raises(ConfigurationError, match="in 'crp' is a number as text: write all numbers alike"):
        ready(clients=frames, labels="died")


@pytest.mark.parametrize("marks", [["<1.5"], ["<1.5", "> 40"]])
def test_words_among_measurements_are_gaps_and_no_categories(tmp_path, marks):
    def censored(frame):
        words = frame["crp"].astype(str).mask(frame["crp"] < 1.5, marks[0]).mask(frame["crp"] > 40, marks[-1])
        return frame.assign(crp=words).drop(columns=["came", "left"])

    _, _, line = told(in_files(tmp_path, everywhere=censored))
    assert line == {"gaps": {"crp": marks}}
    assert pasted(tmp_path, line)["crp"].kind == "numbers"


def test_column_with_two_names_is_named_with_a_remedy(tmp_path):
    folder = in_files(tmp_path, lambda frame: frame.rename(columns={"crp": "CRP", "age": "Age (years)"}))
    _, said, line = told(folder)
    assert "Lyon.csv has 'CRP', the others 'crp': give it one name" in said
    assert "no column 'age' (features)" in said  # too far for a guess
    assert pasted(folder, line)["CRP"].kind == "left out"


def test_abbreviations_are_named_with_their_tables(tmp_path):
    def words(frame):
        return frame.assign(sex=frame["sex"].map({"f": "Female", "m": "M"}))

    _, said, _ = told(in_files(tmp_path, words), exclude=["came", "left"])
    alike = [line for line in said.splitlines() if "which look like one name" in line]
    assert "'Female' (" in alike[0]
    assert "Lyon.csv), 'f' (" in alike[0]
    assert len(alike) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_spelling(["A", "AB", "B", "0", "no", "normal", "never"], "blood", refuse=False)
    with pytest.warns(UserWarning, match="'negative', 'neg', which look like one"):
        check_spelling(["neg", "negative", "positive"], "The classes")
