"""Doubts about tables: each kind of fault is named at its site, and clean splits have none."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest
from sklearn import datasets

from flsv.data.copies import STRONG_DOUBT
from flsv.data.doubts import Doubt, SiteTable, find_doubts
from flsv.data.sources.agreed import ColumnSummary, TableSummary
from flsv.data.sources.summaries import count_frequent, moments_of_enough
from flsv.data.sources.summary_doubts import doubts_of_summaries


def make_table(rows: int, seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "age": draw.normal(50, 15, rows),
            "temperature": draw.normal(37, 0.5, rows),
            "ward": draw.choice(["A", "B", "C"], rows),
            "smokes": draw.integers(0, 2, rows),
        }
    )


def change_unit(table: pd.DataFrame) -> None:
    table["age"] *= 60


def multiply_by_ten(table: pd.DataFrame) -> None:
    table["age"] /= 100


def shift_origin(table: pd.DataFrame) -> None:
    table["temperature"] = table["temperature"] * 1.8 + 32


def make_constant(table: pd.DataFrame) -> None:
    table["smokes"] = 0


def add_gaps(table: pd.DataFrame) -> None:
    table.loc[table.index % 2 == 0, "age"] = np.nan


def rename_categories(table: pd.DataFrame) -> None:
    table["ward"] = table["ward"].replace("A", "ward a")


def code_by_other_numbers(table: pd.DataFrame) -> None:
    table["smokes"] += 1


FAULTS = {
    code_by_other_numbers: (
        "smokes",
        "values are 1 and 2, at most sites 0 and 1, as of two codings of yes and no",
    ),
    change_unit: (
        "age",
        "as between minutes and hours",
    ),
    multiply_by_ten: ("age", "(a power of ten)"),
    shift_origin: (
        "temperature",
        "far outside the usual spread",
    ),
    make_constant: ("smokes", "all values are 0"),
    add_gaps: (
        "age",
        "50 % are missing, 0 % at the other sites",
    ),
    rename_categories: (
        "ward",
        "only this site has ward a",
    ),
}


def doubts_by_rows(tables: Mapping[str, pd.DataFrame]) -> list[Doubt]:
    sites = []
    for site, table in tables.items():
        sites.append(SiteTable(site, table))
    return find_doubts(sites)


def doubts_without_rows(tables: Mapping[str, pd.DataFrame]) -> list[Doubt]:
    """By what sites tell about their tables, of which each has five rows at least."""
    summaries = {}
    num_rows = {}
    for site, table in tables.items():
        columns = {}
        for name in table.columns:
            columns[name] = summarize(table[name])
        summaries[site] = TableSummary(settings={}, columns=columns)
        num_rows[site] = len(table)

    return doubts_of_summaries(summaries, num_rows)


def summarize(values: pd.Series) -> ColumnSummary:
    present = values.dropna()
    missing = len(values) - len(present)
    if pd.api.types.is_numeric_dtype(values):
        numbers = present.to_numpy(dtype=float)
        moments = moments_of_enough(numbers, min_rows=5)
        return ColumnSummary("numbers", missing, moments=moments)

    categories = count_frequent(present, min_rows=5)
    return ColumnSummary("categories", missing, categories=categories)


LOOKS = [doubts_by_rows, doubts_without_rows]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_site_is_its_only_doubt(fault, look) -> None:
    column, text = FAULTS[fault]
    tables = {
        "Lyon": make_table(120, seed=0),
        "Bonn": make_table(120, seed=1),
        "Graz": make_table(120, seed=2),
    }
    fault(tables["Bonn"])

    (doubt,) = look(tables)

    assert doubt.site == "Bonn"
    assert doubt.column == column
    assert text in doubt.text
    assert doubt.strength > 1


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.75])
@pytest.mark.parametrize("factor", [12, 1 / 12, 88.42, 1000])
def test_some_rows_in_another_unit_are_the_only_doubt(
    share: float,
    factor: float,
) -> None:
    tables = {}
    for seed, name in enumerate(["Lyon", "Bonn", "Graz"]):
        table = make_table(400, seed)
        table["age"] = table["age"].clip(20, 100)
        tables[name] = table

    num_rows = round(400 * share)
    tables["Bonn"].loc[: num_rows - 1, "age"] *= factor

    (doubt,) = doubts_by_rows(tables)

    assert doubt.site == "Bonn"
    assert doubt.column == "age"
    assert doubt.kind == "part"
    assert doubt.text.startswith(f"{num_rows} of 400 values are ")
    assert doubt.strength >= STRONG_DOUBT


def test_values_of_another_unit_at_all_sites_are_named_and_no_strong_doubt() -> None:
    tables = {}
    for seed, name in enumerate(["Lyon", "Bonn"]):
        generator = np.random.default_rng(seed)
        creatinine = generator.normal(1, 0.2, size=400).clip(0.5, 2)
        creatinine[:20] *= 88.42
        tables[name] = pd.DataFrame({"creatinine": creatinine})

    doubts = doubts_by_rows(tables)

    assert [doubt.site for doubt in doubts] == ["Lyon", "Bonn"]
    for doubt in doubts:
        assert doubt.kind == "part"
        assert doubt.text.startswith("20 of 400 values are ")
        assert "(as between creatinine in mg/dl and µmol/l)" in doubt.text
        assert 1 < doubt.strength < STRONG_DOUBT


def test_bounds_of_values_of_another_unit_are_no_value_of_a_row() -> None:
    years = [float(age) for age in range(40, 90)]
    months = [600.0, 700.0, 750.0, 840.0, 960.0, 1000.0]
    lyon = pd.Series(years + months)
    bonn = pd.Series(years) + 0.25
    tables = {
        "Lyon": pd.DataFrame({"age": lyon}),
        "Bonn": pd.DataFrame({"age": bonn}),
    }

    (doubt,) = doubts_by_rows(tables)

    assert doubt.text.startswith("6 of 56 values are ")
    assert doubt.text.endswith(", all between 500 and 2000")


def scale_by_unit(values: pd.Series) -> pd.Series:
    return values * 88.42


def write_codes(values: pd.Series) -> pd.Series:
    return values * 0 - 999


@pytest.mark.parametrize("share", [0.05, 0.4])
@pytest.mark.parametrize("change", [scale_by_unit, write_codes])
def test_sums_show_that_some_values_are_far_outside(change, share) -> None:
    tables = {}
    for seed, name in enumerate(["Lyon", "Bonn", "Graz"]):
        tables[name] = make_table(400, seed)

    temperatures = tables["Bonn"]["temperature"]
    num_rows = round(400 * share)
    is_changed = temperatures.index < num_rows
    tables["Bonn"]["temperature"] = temperatures.mask(is_changed, change)

    (doubt,) = doubts_without_rows(tables)

    assert doubt.site == "Bonn"
    assert doubt.column == "temperature"
    assert doubt.kind == "part"
    assert "codes for missing ones" in doubt.text


@pytest.mark.parametrize("look", LOOKS)
def test_counts_that_a_site_has_not_are_no_codings(look) -> None:
    generator = np.random.default_rng(0)
    counts_by_site = {
        "Lyon": [0, 1],
        "Bonn": [0, 1, 2],
        "Graz": [1, 2],
    }
    tables = {}
    for site, counts in counts_by_site.items():
        children = generator.choice(counts, 200)
        tables[site] = pd.DataFrame({"children": children})

    kinds = [doubt.kind for doubt in look(tables)]

    assert "coding" not in kinds


@pytest.mark.parametrize("tail", [1.0, 2.0, 3.0])
def test_numbers_with_long_tails_have_no_parts_of_another_unit(tail: float) -> None:
    tables = {}
    for seed, name in enumerate(["Lyon", "Bonn", "Graz"]):
        generator = np.random.default_rng(seed)
        incomes = generator.lognormal(3, tail, size=500)
        tables[name] = pd.DataFrame({"income": incomes})

    assert doubts_by_rows(tables) == []


def test_columns_of_a_site_and_numbers_of_cases_are_named_once() -> None:
    sites = []
    for index in range(3):
        table = make_table(120, index)
        table["city"] = f"city {index}"
        table["case"] = range(1, 121)  # from 1 at each site
        sites.append(SiteTable(str(index), table))

    doubts = find_doubts(sites)

    assert {(doubt.site, doubt.column) for doubt in doubts} == {
        ("most sites", "city"),
        ("all sites", "case"),
    }


def make_adults(rows: int) -> pd.DataFrame:
    """Columns as of a census: most gains are 0, few are 99999, and most people work 40 hours."""
    draw = np.random.default_rng(1)
    gains = np.exp(draw.normal(8.8, 0.8, rows)).round()
    kinds_of_gain = draw.choice(3, rows, p=[0.915, 0.08, 0.005])
    hours = draw.normal(40, 12, rows).round().clip(1, 99)
    return pd.DataFrame(
        {
            "age": draw.gamma(4, 6, rows).round() + 17,
            "weight": np.exp(draw.normal(12, 0.5, rows)).round(-3),
            "gain": np.choose(kinds_of_gain, [0.0, gains, 99999.0]),
            "hours": np.where(draw.random(rows) < 0.47, 40.0, hours),
            "rank": draw.choice([1, 2], rows),
            "job": draw.choice(["A", "B", "C", "D"], rows, p=[0.7, 0.2, 0.08, 0.02]),
        }
    )


def make_lesions(rows: int) -> pd.DataFrame:
    """Columns as of HAM10000's table: ages in steps of five years, rare places of the body."""
    draw = np.random.default_rng(2)
    ages = 5 * draw.normal(10, 3.4, rows).round().clip(0, 17)
    places = [f"place {number}" for number in range(15)]
    shares_of_places = np.geomspace(1, 0.005, len(places))
    kinds = ["confocal", "consensus", "follow_up", "histo"]
    return pd.DataFrame(
        {
            "dx_type": draw.choice(kinds, rows, p=[0.01, 0.09, 0.37, 0.53]),
            "age": np.where(draw.random(rows) < 0.006, np.nan, ages),
            "sex": draw.choice(["female", "male", "unknown"], rows, p=[0.45, 0.54, 0.01]),
            "place": draw.choice(places, rows, p=shares_of_places / shares_of_places.sum()),
        }
    )


@pytest.mark.parametrize(
    "name",
    [
        "lesions",
        "breast_cancer",
        "wine",
        "iris",
        "diabetes",
        "made",
        "adult",
    ],
)
@pytest.mark.parametrize("num_sites", [2, 5])
@pytest.mark.parametrize("look", LOOKS)
def test_clean_splits_have_no_doubt(name: str, num_sites: int, look) -> None:
    if name == "made":
        table = make_table(600, seed=9)
    elif name == "adult":
        table = make_adults(4000)
    elif name == "lesions":
        table = make_lesions(4000)
    else:
        table = getattr(datasets, f"load_{name}")(as_frame=True).data

    draw = np.random.default_rng(num_sites)
    sizes = np.arange(1, num_sites + 1)
    owners = draw.choice(num_sites, len(table), p=sizes / sizes.sum())
    tables = {}
    for index in range(num_sites):
        tables[f"site {index}"] = table[owners == index]

    assert look(tables) == []


def test_shares_of_classes_are_compared_without_rows() -> None:
    counts = {
        "Lyon": {"no": 80, "yes": 40},
        "Bonn": {"no": 85, "yes": 35},
        "Graz": {"no": 158},  # of 2 rows it tells nothing
    }
    summaries = {}
    num_rows = {}
    for site, classes in counts.items():
        summaries[site] = TableSummary(settings={}, columns={}, classes=classes)
        num_rows[site] = sum(classes.values())

    (doubt,) = doubts_of_summaries(summaries, num_rows)

    assert doubt.site == "Graz"
    assert doubt.text == "0 % are yes, 31 % at the other sites"


@pytest.mark.parametrize(
    ("code", "values"),
    [
        (-999.0, range(20, 90)),
        (99.0, range(1, 8)),
        (9999.0, range(20, 90)),
    ],
)
def test_code_for_a_missing_value_is_doubted_at_its_site(code, values):
    ages = [float(value) for value in values] * 10
    codes = [code] * 6
    graz = pd.DataFrame({"age": ages})
    lyon = pd.DataFrame({"age": ages + codes})

    doubts = doubts_by_rows({"Graz": graz, "Lyon": lyon})

    texts = [(doubt.site, doubt.text) for doubt in doubts]

    message = f"6 values are {code:g}, far from all others, as a code for a missing value: set gaps"
    assert ("Lyon", message) in texts


def test_usual_number_of_nines_is_no_code_for_a_missing_value():
    no_gains = [0.0] * 200
    different_gains = [float(gain) for gain in range(1000, 42000, 1000)]
    largest_gains = [99999.0] * 9
    gains = no_gains + different_gains + largest_gains
    ages = [float(age) for age in range(20, 100)] * 3
    for numbers in (gains, ages):
        frame = pd.DataFrame({"number": numbers})
        for doubt in doubts_by_rows({"Graz": frame, "Lyon": frame}):
            assert "missing value" not in doubt.text


def test_rows_are_named_by_lines_if_these_are_known_ten_and_the_number_of_all():
    ages = [float(value) for value in range(20, 90)]
    frame = pd.DataFrame({"age": ages + [-999.0] * 12})
    lines = pd.RangeIndex(2, 84, name="line")

    def rows_named(table: pd.DataFrame) -> list[str]:
        doubts = doubts_by_rows({"Graz": table, "Lyon": table[:70]})
        return [doubt.rows for doubt in doubts if doubt.kind == "gaps"]

    first_rows = [f"line {line}: -999" for line in range(72, 82)]
    assert rows_named(frame) == [""]
    assert rows_named(frame.set_axis(lines)) == [f"{', '.join(first_rows)}, ... (12 in all)"]
