"""Tables as hospitals write them: what is in doubt is named, and a line to paste helps and loses no measurement."""

import json
import re
import warnings

import numpy as np
import pandas as pd
import pytest

from flsv.configuration.identity import sample_hashes
from flsv.data.sources.reading import codes_in
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
def test_codes_for_missing_values_are_reported_with_their_file_and_a_yaml_line(tmp_path, dates):
    data, said, line = told(in_files(tmp_path, codes), **dates)
    if not dates:
        assert data is None  # dates are refused, and found to have codes after that
        _, more, line = told(tmp_path, **line)
        said += more
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
        ([0.3 + 1.35 * i for i in range(400)] + [999.0] * 3, [999]),
        ([0, 1, 9] * 5, [9]),
        ([36.4 + i / 10 for i in range(30)] + [0.0] * 2, [0]),
        # none of these is one
        ([0, 1] * 9, []),
        ([0, 0, 0, 1, 2, 3, 3, 12, 12], []),
        ([*range(-12, 12), -9, -9], []),
        (np.random.default_rng(0).lognormal(2, 1.5, 5000).round(1), []),
    ],
)
def test_codes_in_finds_the_numbers_that_stand_for_gaps(numbers, found):
    assert codes_in(pd.Series(numbers, dtype=float)) == found


def test_numeric_gap_mark_matches_any_notation_of_the_number(tmp_path):
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
    with pytest.raises(ConfigurationError, match=r"no column 'lob' \(gaps\). It has .*lab"):
        ready(frame, labels="ill", columns={"gaps": {"lob": ["-99"]}})


def test_dates_with_a_time_zone_are_equal_from_csv_and_dataframe(tmp_path):
    hours = pd.date_range("2024-03-30", periods=60, freq="h", tz="Europe/Paris")  # clocks change in between
    frame = pd.DataFrame({"came": hours, "left": hours[::-1], "ill": [0, 1] * 30})
    frame.to_csv(tmp_path / "stays.csv", index=False)
    columns = {"dates": {"left": "came", "came": "days"}}
    frames, files = (ready(each, labels="ill", columns=columns) for each in (frame, str(tmp_path / "stays.csv")))
    assert frames.content_hashes() == files.content_hashes()
    assert frames.column_cards[1].values[0] == pytest.approx(59 / 24)


def test_words_among_measurements_are_suggested_as_gaps_and_not_as_categories(tmp_path):
    def censored(frame):
        words = frame["crp"].astype(str).mask(frame["crp"] < 1.5, "<1.5").mask(frame["crp"] > 40, "> 40")
        return frame.assign(crp=words).drop(columns=["came", "left"])

    _, _, line = told(in_files(tmp_path, everywhere=censored))
    assert line == {"gaps": {"crp": ["<1.5", "> 40"]}}
    assert pasted(tmp_path, line)["crp"].kind == "numbers"


def test_words_that_no_other_table_has_are_reported_with_their_table(tmp_path):
    def words(frame):
        return frame.assign(sex=frame["sex"].map({"f": "Female", "m": "Male"}))

    _, said, _ = told(in_files(tmp_path, words), exclude=["came", "left"])
    assert re.search("Lyon.csv: 'sex' is 'Female', 'Male', and never 'f', 'm' as in the other tables.", said)
    _, said, _ = told(in_files(tmp_path, everywhere=words), exclude=["came", "left"])
    assert not said


# Notations


def test_file_in_another_encoding_is_refused_with_its_line_unless_the_encoding_is_named(tmp_path):
    folder = in_files(tmp_path, everywhere=lambda frame: frame.drop(columns=["came", "left"]).assign(ward="Süd"))
    (folder / "Lyon.csv").write_bytes((folder / "Lyon.csv").read_text().encode("cp1252"))
    assert re.search(r"Lyon.csv, line 2: this is not UTF-8. .* columns: ..encoding.: .cp1252", told(folder)[1])
    assert "Lyon.csv, line 2: this is not ascii" in told(folder, encoding="ascii")[1]
    assert pasted(folder, {"encoding": "cp1252"})["ward"].categories == ["Süd"]


@pytest.mark.parametrize(
    ("cells", "line", "numbers"),
    [
        (["81,5", "78.0", "90"], {"decimal": ","}, [81.5, 78.0, 90.0]),
        (["1.234,56", "78,5", "12.345.678"], {"decimal": ",", "thousands": "."}, [1234.56, 78.5, 12345678.0]),
        (["1,234.56", "78.5", "90"], {"thousands": ","}, [1234.56, 78.5, 90.0]),
        (["1 234,5", "78,5", "1\u202f250"], {"decimal": ",", "thousands": " "}, [1234.5, 78.5, 1250.0]),
        # which it is, nobody knows
        (["1,234", "56", "78"], None, "several notations are possible (thousands: ',' or decimal: ',')"),
        (["12.500", "0,5", "90"], None, "others are in another notation"),
        # these are no numbers
        (["1.2.3", "1.2.4", "2.0.1"], {}, None),
        (["low", "high", "1,5"], {}, None),
    ],
)
def test_numbers_in_another_notation_are_read_by_the_suggested_line_or_refused(tmp_path, cells, line, numbers):
    frame = pd.DataFrame({"x": np.resize(cells, 60), "y": np.arange(60.0), "died": np.resize(["yes", "no", "no"], 60)})
    frame.to_csv(tmp_path / "all.csv", index=False, sep=";")

    def read(**columns):
        return ready(str(tmp_path / "all.csv"), labels="died", groups=[i % 3 for i in range(60)], columns=columns)

    if line == {}:
        assert read().column_cards[0].kind == "categories"
        return
    with pytest.raises(ConfigurationError) as error:
        read()
    pasted_line = json.loads(str(error.value).splitlines()[-1].partition(": ")[2])
    if line is None:
        assert pasted_line == {"exclude": ["x"]}
        assert numbers in str(error.value)
    else:
        assert pasted_line == line
        assert read(**line).column_cards[0].values.tolist() == np.resize(numbers, 60).tolist()


def test_points_of_one_file_stay_decimal_beside_another_files_commas(tmp_path):
    """Lyon's commas do not make thousands of Boston's 1.250."""
    values = {"Boston": ["1.250", "0.980"], "Lyon": ["1,250", "0,980"], "Osaka": ["1", "2"]}
    for name, cells in values.items():
        frame = pd.DataFrame({"x": np.resize(cells, 30), "died": np.resize(["yes", "no", "no"], 30)})
        frame.to_csv(tmp_path / f"{name}.csv", index=False, sep=";")
    _, _, line = told(tmp_path)
    assert line == {"decimal": ","}
    found = pasted(tmp_path, line)["x"].values.tolist()
    assert found == [1.25, 0.98] * 30 + [1.0, 2.0] * 15


@pytest.mark.parametrize(
    ("days", "line", "expected"),
    [
        (["31.12.2023", "1.2.2024", ""], ["%d.%m.%Y"], ["2023-12-31", "2024-02-01"]),
        (["12/31/2023", "01/02/2024", ""], ["%m/%d/%Y"], ["2023-12-31", "2024-01-02"]),
        (["31.12.2023 00:00", "1.2.2024", ""], ["%d.%m.%Y", "%d.%m.%Y %H:%M"], ["2023-12-31", "2024-02-01"]),
        (["01/02/2024", "03/04/2024", ""], None, None),
    ],
)
def test_dates_in_another_notation_become_days_unless_day_month_order_is_unclear(tmp_path, days, line, expected):
    frame = pd.DataFrame(
        {"came": np.resize(days, 60), "y": np.arange(60.0), "died": np.resize(["yes", "no", "no"], 60)}
    )
    frame["died"] = np.random.default_rng(0).permutation(frame["died"])
    frame.to_csv(tmp_path / "all.csv", index=False)
    groups = [i % 3 for i in range(60)]
    with pytest.raises(ConfigurationError) as error:
        ready(str(tmp_path / "all.csv"), labels="died", groups=groups)
    found = json.loads(str(error.value).splitlines()[-1].partition(": ")[2])
    if line is None:
        assert found == {"exclude": ["came"]}
        assert "Whether the day or the month comes first is not clear" in str(error.value)
        return
    assert found == {"dates": {"came": "days"}, "date_format": line}
    cards = ready(str(tmp_path / "all.csv"), labels="died", groups=groups, columns=found).column_cards
    since = [(pd.Timestamp(day) - pd.Timestamp(1970, 1, 1)).days for day in expected]
    assert cards[0].values.dropna().tolist() == since * 20


def test_slash_dates_take_no_order_of_day_and_month_from_other_tables(tmp_path):
    """Lyon writes 08/11/2023 and 03/12/2023, a stay of 25 days. In the others' order it would be -148 days."""

    def at_lyon(frame):
        came = pd.Timestamp("2023-11-08") + pd.to_timedelta(np.arange(ROWS) % 5, unit="D")
        left = pd.Timestamp("2023-12-03") + pd.to_timedelta(np.arange(ROWS) % 9, unit="D")
        return frame.assign(left=left.strftime("%d/%m/%Y"), came=came.strftime("%d/%m/%Y"))

    def american(frame):
        return frame.assign(**{day: pd.to_datetime(frame[day]).dt.strftime("%m/%d/%Y") for day in ("left", "came")})

    folder = in_files(tmp_path, at_lyon, american)
    data, said, line = told(folder)
    assert data is None
    assert re.search(r"'left' has dates.* the month comes first is not clear in \S*Lyon.csv: set date_format", said)
    assert line == {"exclude": ["left", "came"]}
    stays = {"dates": {"left": "came"}, "exclude": ["came"], "date_format": "%m/%d/%Y"}
    said = told(folder, **stays)[1]
    assert re.search(r"Lyon.csv, line \d+: 'left' is before 'came', as in \d+ rows of \S*Lyon.csv", said)
    assert "is before" not in told(in_files(tmp_path, american, american), **stays)[1]


def test_a_copy_of_a_partners_table_is_named(tmp_path):
    copied = in_files(tmp_path, everywhere=lambda frame: frame.drop(columns=["came", "left"]))
    frame = pd.read_csv(copied / "Lyon.csv").sample(frac=1, random_state=0)
    assert "same rows" not in told(copied)[1]
    frame.to_csv(copied / "Quito.csv", index=False)
    said = "'Quito' has the same rows as 'Lyon'"
    assert said in told(copied)[1]
    frames = {path.stem: pd.read_csv(path) for path in sorted(copied.glob("*.csv"))}
    with pytest.warns(UserWarning, match=said):
        ready(clients=frames, labels="died")
    frames["Quito"] = frames["Lyon"]
    hashes = sample_hashes(ready(clients=frames, labels="died", server_val=0, client_val=0))
    assert hashes["1"] == hashes["3"]
    assert len(set(hashes.values())) == 4  # with the server's
    one = pd.concat([each.assign(city=name, row=range(ROWS)) for name, each in frames.items()])
    one["row"] = np.arange(len(one))
    with pytest.warns(UserWarning, match=said):
        ready(one, labels="died", groups="city", columns={"exclude": ["row"]})


def test_date_that_two_declared_formats_read_differently_is_refused(tmp_path):
    frame = pd.DataFrame({"came": ["03/04/2024", "31/12/2023"] * 30, "y": np.arange(60.0), "died": [0, 1, 1] * 20})
    columns = {"dates": {"came": "days"}, "date_format": ["%d/%m/%Y", "%m/%d/%Y"]}
    frame.to_csv(tmp_path / "all.csv", index=False)
    with pytest.raises(ConfigurationError, match="'03/04/2024' in 'came' is not a date, or an ambiguous one"):
        ready(str(tmp_path / "all.csv"), labels="died", groups=[i % 3 for i in range(60)], columns=columns)


def test_delimiters_are_found_file_by_file(tmp_path):
    for name, mark in {"Boston": ",", "Lyon": ";", "Osaka": "\t"}.items():
        hospital(0).drop(columns=["came", "left"]).to_csv(tmp_path / f"{name}.csv", index=False, sep=mark)
    data = ready(str(tmp_path), labels="died")
    assert data.column_cards[1].values.tolist() == hospital(0)["crp"].tolist() * 3
    (tmp_path / "Lyon.csv").write_bytes("a;b\nMüller;1;2\n".encode())
    with pytest.raises(ConfigurationError, match="Lyon.csv, line 2: 3 values, but .* 2 names. A value .*';'"):
        ready(str(tmp_path), labels="died")


def test_problems_of_wide_tables_are_summarized(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(60, 50)).round(2).astype(str), columns=[f"gene {i}" for i in range(50)])
    frame.iloc[3, :40] = "high"
    frame["died"] = np.resize(["yes", "no", "no"], 60)
    frame.to_csv(tmp_path / "all.csv", index=False)
    with pytest.raises(ConfigurationError, match="(?s)40 problems with the columns.*and 10 more\n") as error:
        ready(str(tmp_path / "all.csv"), labels="died", groups=[i % 3 for i in range(60)])
    assert len(str(error.value).splitlines()) == 34
