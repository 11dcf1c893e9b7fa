"""Doubts about tables: each kind of fault is named at its site, and clean splits have none."""

import numpy as np
import pandas as pd
import pytest
from sklearn import datasets

from flsv.data.doubts import SiteTable, find_doubts


def a_table(rows: int, seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "age": draw.normal(50, 15, rows),
            "temperature": draw.normal(37, 0.5, rows),
            "ward": draw.choice(["A", "B", "C"], rows),
            "smokes": draw.integers(0, 2, rows),
        }
    )


def other_unit(table: pd.DataFrame) -> None:
    table["age"] *= 60


def power_of_ten(table: pd.DataFrame) -> None:
    table["age"] /= 100


def other_origin(table: pd.DataFrame) -> None:
    table["temperature"] = table["temperature"] * 1.8 + 32


def constant(table: pd.DataFrame) -> None:
    table["smokes"] = 0


def gaps(table: pd.DataFrame) -> None:
    table.loc[table.index % 2 == 0, "age"] = np.nan


def other_words(table: pd.DataFrame) -> None:
    table["ward"] = table["ward"].replace("A", "ward a")


FAULTS = {
    other_unit: (
        "age",
        "as between minutes and hours",
    ),
    power_of_ten: ("age", "(a power of ten)"),
    other_origin: (
        "temperature",
        "far outside the usual spread",
    ),
    constant: ("smokes", "all values are 0"),
    gaps: (
        "age",
        "50 % are missing, 0 % at the other sites",
    ),
    other_words: (
        "ward",
        "only this site has ward a",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_site_is_its_only_doubt(
    fault,
) -> None:
    tables = [a_table(120, seed) for seed in range(3)]
    fault(tables[1])
    sites = [SiteTable(name, table) for name, table in zip(["Lyon", "Bonn", "Graz"], tables)]
    (doubt,) = find_doubts(sites)
    column, text = FAULTS[fault]
    assert (doubt.site, doubt.column) == (
        "Bonn",
        column,
    )
    assert text in doubt.text
    assert doubt.strength > 1


def test_rows_of_one_site_at_another_and_another_share_of_a_class_are_doubts() -> None:
    tables = [a_table(120, seed) for seed in range(3)]
    tables[2] = pd.concat([tables[2], tables[0].iloc[:40]])
    counts = [(80, 40), (85, 35), (158, 2)]
    names = ["Lyon", "Bonn", "Graz"]
    sites = [SiteTable(*parts) for parts in zip(names, tables, counts)]
    rows, classes = find_doubts(sites, ["no", "yes"])
    assert (rows.site, rows.text) == (
        "Lyon",
        "40 of 120 rows are rows of Graz, too",
    )
    assert (classes.site, classes.column) == (
        "Graz",
        "class",
    )
    assert classes.text == "1 % are yes, 31 % at the other sites"


def test_columns_of_a_site_and_numbers_of_cases_are_named_once() -> None:
    tables = [a_table(120, seed) for seed in range(3)]
    for index, table in enumerate(tables):
        table["city"] = f"city {index}"
        table["case"] = range(1, 121)  # from 1 at each site
    sites = [SiteTable(str(index), table) for index, table in enumerate(tables)]
    assert {(doubt.site, doubt.column) for doubt in find_doubts(sites)} == {
        ("most sites", "city"),
        ("all sites", "case"),
    }


@pytest.mark.parametrize(
    "name",
    [
        "breast_cancer",
        "wine",
        "iris",
        "diabetes",
        "made",
    ],
)
@pytest.mark.parametrize("num_sites", [2, 5])
def test_clean_splits_have_no_doubt(name: str, num_sites: int) -> None:
    if name == "made":
        table = a_table(600, seed=9)
    else:
        table = getattr(datasets, f"load_{name}")(as_frame=True).data
    draw = np.random.default_rng(num_sites)
    sizes = np.arange(1, num_sites + 1) / np.arange(1, num_sites + 1).sum()
    owners = draw.choice(num_sites, len(table), p=sizes)
    sites = [SiteTable(str(index), table[owners == index]) for index in range(num_sites)]
    assert find_doubts(sites) == []
