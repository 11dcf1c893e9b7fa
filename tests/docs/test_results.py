"""Pages of results: they open with their answer, and the answer's numbers are those of their tables."""

import re
from pathlib import Path

import pytest
from pandas import read_csv

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path for path in (DOCS / "results").glob("*.md") if path.name != "README.md")
PAGES.append(DOCS / "benchmark.md")


def opening(page: str) -> str:
    """What comes before the first command, table, picture or heading of a page."""
    return re.split(r"^(?:```|\||!\[|## )", page.split("\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def numbers(text: str) -> list[str]:
    """Numbers with a decimal point; addresses on arXiv are none."""
    text = re.sub(r"(?:arXiv |abs/)\d+\.\d+", "", text)
    return re.findall(r"(?<![\w.])[+-]?\d+\.\d+(?:e[+-]?\d+)?(?![\d.])", text)


def is_rounded(number: str, of: set[str]) -> bool:
    decimals = len(number.partition(".")[2].partition("e")[0])
    if "e" in number:
        return number in of
    return any(abs(abs(float(number)) - abs(float(each))) <= 0.5 * 10**-decimals + 1e-9 for each in of)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_numbers_in_the_opening_of_a_results_page_are_in_its_tables(path: Path) -> None:
    page, more = path.read_text(), path.with_suffix(".csv")
    top = opening(page)
    rest = set(numbers(page.replace(top, "") + (more.read_text().replace(",", " ") if more.is_file() else "")))
    for name in re.findall(r"\]\(\.\./(\w+)\.md\)", top):
        rest |= set(numbers((DOCS / f"{name}.md").read_text()))
    assert [number for number in numbers(top) if not is_rounded(number, rest)] == []


#: A class to its name in the benchmark.
MEASURED = {
    "ShadowShapley": "shadow",
    "BlendedContribution": "blended",
    "CosineGradientShapley": "cgsv",
    "ClassSpecificShapley": "cssv",
    "CumulativeShapley": "fedsv_samples",
    "GradientAgreement": "gradient_agreement",
    "counted samples": "size",
}


def recommended() -> list[tuple[str, float, float]]:
    """A metric, its rank correlation and the misallocated part, wherever a page recommends by them."""
    readme = (DOCS.parent / "README.md").read_text()
    rows = re.findall(r"^\|.*?(?:`(\w+)` |(counted samples) \|).*?\| (0\.\d+).*?\| (\d+) % \|$", readme, re.MULTILINE)
    found = [(name or other, float(rank), float(part)) for name, other, rank, part in rows]
    metrics = (DOCS / "explanation" / "metrics.md").read_text()
    pairs = re.findall(r"`(\w+)(?:\([^`]*\))?` \((0\.\d+), (\d+) %\)", metrics.replace("\n", " "))
    return found + [(name, float(rank), float(part)) for name, rank, part in pairs]


def test_readme_table_has_the_figures_of_the_fresh_federations() -> None:
    table = read_csv(DOCS / "results" / "benchmark.csv").query("set == 'fresh'").set_index("metric")
    found = recommended()
    assert {name for name, *_ in found} == set(MEASURED)
    for name, rank, part in found:
        row = table.loc[MEASURED[name]]
        assert (round(row["rank_correlation"], 2), round(100 * row["misallocated"])) == (rank, part), name
