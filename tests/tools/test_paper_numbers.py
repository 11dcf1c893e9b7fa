"""The papers' numbers stand beside ours, on every page and in every report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paper_numbers import known, with_paper
from run_table import TABLES, preset_of

DOCS = Path(__file__).parents[2] / "docs"
PAPERS = sorted(known())


@pytest.mark.parametrize("name", PAPERS)
def test_pages_have_them(name: str) -> None:
    """Writing them again changes nothing, and none of them is without a place on the page or in the CSV beside it."""
    page, more = ((DOCS / "results" / f"{name}.{end}") for end in ("md", "csv"))
    assert with_paper(page.read_text(), name) == page.read_text()
    found = page.read_text() + more.read_text()
    for part in known()[name]:
        for rows in part["numbers"].values():
            for number in rows.values():
                assert f" ({number})" in found, number


def test_each_paper_has_some() -> None:
    assert PAPERS == ["fedbary", "guo", "pfedsv", "shapfed", "shapleyfl"]


def test_a_number_stands_in_its_row_and_column_only() -> None:
    caption = "Each method's own model, test accuracy, %, in brackets the paper's:"
    table = "| | Dirichlet, MNIST | other |\n|---|---|---|\n| **pFedSV (received)** | **1.0** | 2 |\n| FedEM | - | 3 |"
    text = f"{caption}\n\n{table}\n\nMinus the best other:\n\n{table}"
    found = with_paper(text, "pfedsv")
    assert found.count("78.17") == 1
    assert "| **pFedSV (received)** | **1.0** (78.17) | 2 |\n| FedEM | - | 3 |" in found
    assert found.endswith(table)
    assert with_paper(found, "pfedsv") == found
    assert with_paper(text, "privacy") == text


def test_a_report_of_the_runner_has_them() -> None:
    keys = [("MC", "all", 0), ("MC", "all", 1)]
    for name in PAPERS:
        assert callable(preset_of(TABLES / f"{name}.yaml").report)
    results = {
        (row, "self weight, MNIST", seed): {"received": [70.0 + seed], "trained": [71.0], "steps": 1, "cpu": 1.0}
        for row in ("Separate", "FedAvg", "pFedSV, mean")
        for seed in range(len(keys))
    }
    text = preset_of(TABLES / "pfedsv.yaml").report(results, [])
    assert re.search(r"\| Separate \| .* \(74\.05\) \|", text)
    assert "| pFedSV, mean minus |" in text
    assert text.count("(74.05)") == 1  # beside what it is of, and not beside differences
