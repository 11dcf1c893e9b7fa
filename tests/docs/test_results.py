"""Figures of pages are those of their tables and files."""

import re
from pathlib import Path

import pytest
import quickstart_picture
from docs.figures import NUMBER
from pandas import read_csv
from PIL import Image

from docs import figures

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

    for name in re.findall(r"\]\(([\w./]+\.md)(?:#[\w-]+)?\)", top):
        exact_numbers |= set(decimal_numbers((path.parent / name).read_text()))

    for number in decimal_numbers(top):
        assert is_rounded(number, exact_numbers), number


def test_first_picture_has_the_steps_of_the_quickstarts_numbers():
    picture = Image.open(quickstart_picture.PICTURE)

    numbers = read_csv(quickstart_picture.NUMBERS)

    assert picture.text["Description"] == quickstart_picture.describe(numbers)


#: A number, in digits or in words; names and formulas such as x2 and 2^n are none.
_IN_WORDS = (
    r"(?:eleven|twelve|\w+teen|twenty|thirty|forty|fifty|\w+ty-\w+|hundred|thousand|million)"
)
ANY_NUMBER = re.compile(rf"(?<![\w.^]){NUMBER}|\b{_IN_WORDS}\b", re.IGNORECASE)
NO_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]*>")


def sentences(page):
    """Sentences, rows of tables and items of lists; tests compare what commands print with what they print."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=[|#-])", text):
        on_one_line = " ".join(block.split())
        found += re.split(r"(?<=[.:?!])\s+(?=[A-Z`*\[(!])", on_one_line)
    return found


def spans_of(text, sentence):
    """Where a text stands in a sentence, and not as the end or the beginning of another number."""
    pattern = rf"(?<![\d.]){re.escape(text)}(?!\d)"
    return [match.span() for match in re.finditer(pattern, sentence)]


@pytest.mark.parametrize("name", figures.PAGES)
def test_figures_of_the_first_pages_follow_from_their_files(name):
    page = sentences((DOCS.parent / name).read_text(encoding="utf-8"))
    spans = {sentence: [] for sentence in page}
    for text in figures.PAGES[name]():
        found = {sentence: spans_of(text, sentence) for sentence in page}
        is_said = any(found.values())
        assert is_said, f"{name} does not say: {text}"
        for sentence, spans_of_text in found.items():
            spans[sentence] += spans_of_text

    for sentence in page:
        prose = NO_PROSE.sub(lambda match: " " * len(match[0]), sentence)
        for match in ANY_NUMBER.finditer(prose):
            has_source = any(
                begin <= match.start() and match.end() <= end for begin, end in spans[sentence]
            )
            assert has_source, f"{match[0]} is not in tests/docs/figures.py: {sentence}"
