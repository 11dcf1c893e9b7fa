"""Figures of pages are those of their tables and files."""

import re
from pathlib import Path

import docs_figures
import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path for path in (DOCS / "results").glob("*.md") if path.name != "README.md")
PAGES.append(DOCS / "benchmark.md")


def opening_of_page(page):
    """Return what comes before the first command, table, picture or heading of a page."""
    _title, text = page.split("\n", 1)
    end_of_opening = re.compile(r"^(?:```|\||!\[|## )", flags=re.MULTILINE)
    opening, *_ = end_of_opening.split(text, maxsplit=1)
    return opening


def decimal_numbers(text):
    """Numbers with a decimal point; addresses on arXiv are none."""
    text = re.sub(r"(?:arXiv |abs/)\d+\.\d+", "", text)
    return re.findall(r"(?<![\w.])[+-]?\d+\.\d+(?:e[+-]?\d+)?(?![\d.])", text)


def is_rounded(number, exact_numbers):
    """Return whether a number is one of these, or one of them with fewer decimals, whatever its sign."""
    if "e" in number:
        return number in exact_numbers

    decimals = len(number.partition(".")[2])
    tolerance = 0.5 * 10**-decimals + 1e-9
    size = abs(float(number))
    return any(abs(size - abs(float(exact))) <= tolerance for exact in exact_numbers)


@pytest.mark.parametrize(
    "path",
    PAGES,
    ids=lambda path: path.stem,
)
def test_numbers_in_the_opening_of_a_results_page_are_in_its_tables(path):
    page = path.read_text()
    top = opening_of_page(page)
    exact_numbers = set(decimal_numbers(page.replace(top, "")))
    table = path.with_suffix(".csv")

    if table.is_file():
        exact_numbers |= set(decimal_numbers(table.read_text().replace(",", " ")))

    for name in re.findall(r"\]\(([\w./]+\.md)\)", top):
        exact_numbers |= set(decimal_numbers((path.parent / name).read_text()))

    for number in decimal_numbers(top):
        assert is_rounded(number, exact_numbers), number


for_each_first_page = pytest.mark.parametrize("name", docs_figures.LIST["pages"])


@for_each_first_page
def test_figures_of_the_first_pages_follow_from_their_files(name):
    assert docs_figures.check(name, (DOCS.parent / name).read_text())[1] == []
