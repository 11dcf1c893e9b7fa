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


def test_recommended_metrics_have_the_figures_of_the_fresh_federations() -> None:
    """Wherever a page recommends by a rank correlation and the misallocated part."""
    table = read_csv(DOCS / "results" / "benchmark.csv").query("set == 'fresh'").set_index("metric")
    metrics = (DOCS / "explanation" / "metrics.md").read_text().replace("\n", " ")
    found = re.findall(r"`(\w+)(?:\([^`]*\))?` \((0\.\d+), (\d+) %\)", metrics)
    readme = (DOCS.parent / "README.md").read_text().replace("\n", " ")
    best, counted = re.findall(r"best cheap metric misallocates (\d+) %, and counted samples (\d+) %", readme)[0]
    assert {name for name, *_ in found} | {"counted samples"} == set(MEASURED)
    for name, rank, part in [*found, ("BlendedContribution", None, best), ("counted samples", None, counted)]:
        row = table.loc[MEASURED[name]]
        assert rank is None or f"{row['rank_correlation']:.2f}" == rank, name
        assert f"{100 * row['misallocated']:.0f}" == part, name


#: Rows of the README's table to the ways of the study.
WAYS = {
    "`ShadowShapley()`": "alone, predicted",
    "`flsv retrain`, three seeds of each alone and all but one": "alone and all but one, predicted, 3 seeds",
    "every group, one seed": "exact",
    "every group, three seeds": "exact, 3 seeds",
}


def test_readme_table_has_the_figures_of_the_held_out_federations() -> None:
    table = read_csv(DOCS / "results" / "predicted.csv")
    means = table.groupby("way")[["misallocated_percent", "rank"]].mean()
    readme = (DOCS.parent / "README.md").read_text()
    rows = re.findall(r"^\| (.+?) \| [^|]+ \| (\d+\.\d) % \| (0\.\d+) \|$", readme, re.MULTILINE)
    assert [name for name, *_ in rows] == list(WAYS)
    for name, part, rank in rows:
        expected = means.loc[WAYS[name]]
        assert (f"{expected['misallocated_percent']:.1f}", f"{expected['rank']:.2f}") == (part, rank), name
    assert f"[{table['federation'].nunique()} held-out federations]" in readme
