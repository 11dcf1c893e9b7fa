"""The first page is for those who decide: no words of those who measure, and each sentence once."""

import re
from collections import Counter
from pathlib import Path

import pytest

import flsv.metrics
from flsv.functional.intervals import BRACKETS
from flsv.report import Budget, write_report
from flsv.report.facts import caveats
from flsv.results.text import WORDS
from helpers.pages import text_of
from helpers.runs import at_fault, copying, make_game, make_run, repeated

#: What nobody but those who measure understands.
FOREIGN = (
    *("nats", "2^", "U(C)", "coalition", "Shapley", "hyperparameter", 'class "0"', "class 0", "negative_loss", "NaN"),
)


def pages(folder: Path, budget: Budget | None = None) -> tuple[str, str, str]:
    """The first page's words, those of the whole, and the HTML."""
    page = write_report(folder, budget=budget)
    text = text_of(page)
    return text.partition("\nAppendix\n")[0], text, " ".join(page.read_text(encoding="utf-8").split())


def sentences(text: str) -> list[str]:
    """Those of five words or more; not what stands in tables, but in their cells' long texts."""
    lines = [part for line in text.splitlines() for part in (line.split("|") if line.startswith("|") else [line])]
    found = [each.strip(" -*>#") for line in lines for each in re.split(r"(?<=[.!?])\s+", line)]
    return [each for each in found if len(re.findall(r"[A-Za-z]{2,}", each)) >= 5]


@pytest.mark.parametrize("kind", ["game", "loss", "cssv", "found"])
def test_first_page_has_no_jargon_and_no_sentence_twice(kind: str, tmp_path: Path) -> None:
    values = {"sv": [0.4, 0.1, -0.05, 0.02], "loo": [0.1, 0.05, -0.01, 0.01]}
    if kind == "cssv":
        make_run(tmp_path)
    elif kind == "found":
        found = {"events": [at_fault(1, 1, 3), *copying(2, 3)], "logged": {"val_accuracy": 0.72}}
        make_game(tmp_path, {"sv": values["sv"], "loo": values["sv"][::-1]}, **found)
    else:
        by = "negative_loss" if kind == "loss" else "accuracy"
        make_game(tmp_path, values, start=-0.7 if kind == "loss" else 0.25, by=by)
    front, whole, _ = pages(tmp_path, Budget(10_000.0, "cssv" if kind == "cssv" else "sv"))
    assert not [word for word in FOREIGN if word in front]
    twice = [sentence for sentence, times in Counter(sentences(whole)).items() if times > 1]
    assert not twice


def test_waterfall_is_drawn_only_if_its_steps_add_up(tmp_path: Path) -> None:
    front, _, html = pages(make_game(tmp_path / "a", {"sv": [0.4, 0.1, -0.05]}))
    assert "<desc>start 0.250, Boston 0.400, Lyon 0.100, Graz -0.0500, end 0.700</desc>" in html
    assert "they add up" in front
    assert "<title>from 0.250 to 0.700 in 3 steps</title>" in html
    told = {"paid_in": {"sv": {"by": "accuracy", "start": 0.25, "end": 0.9, "sum": 0.45, "majority": 0.3}}}
    _, _, html = pages(make_game(tmp_path / "b", {"sv": [0.4, 0.1, -0.05]}, **told))
    assert "in 3 steps" not in html
    assert "25.0 % when training began, 90.0 % (the most frequent class alone: 30.0 %) when it ended." in html
    _, _, html = pages(make_game(tmp_path / "many", {"sv": [0.01 * i for i in range(40)]}))
    assert "in 13 steps" in html
    assert "all others" in html


def test_waterfall_of_an_error_falls_and_shows_no_negative_error(tmp_path: Path) -> None:
    front, _, html = pages(make_game(tmp_path, {"sv": [0.8, 0.1, -0.5]}, start=-0.7, by="negative_loss"))
    assert "The model's error, from 0.700 when training began to 0.300 when it ended" in front
    steps = re.findall(r"<desc>(start[^<]*)</desc>", html)[0]
    assert steps == "start 0.700, Graz 0.500, Lyon -0.100, Boston -0.800, end 0.300"


def test_waterfall_of_a_logged_loss_falls(tmp_path: Path) -> None:
    game = {"by": "val_loss", "start": 0.9, "end": 0.5, "sum": 0.4}
    front, _, html = pages(make_game(tmp_path, {"sv": [0.3, 0.1]}, paid_in={"sv": game}))
    assert "The model's val_loss, from 0.900 when training began to 0.500 when it ended" in front
    assert "<desc>start 0.900, Lyon -0.100, Boston -0.300, end 0.500</desc>" in html


def test_first_page_has_one_column_of_shares(tmp_path: Path) -> None:
    run = make_game(tmp_path, {"sv": [0.4, 0.1, 0.05]})
    assert [pages(run, budget)[1].count("| share |") for budget in (None, Budget(100.0))] == [1, 1]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, ""),
        ({"events": copying(0, 1)}, "sent almost the same updates: Boston, Lyon."),
        ({"events": [at_fault(2, 1, 3)]}, "far larger than all others: Graz (1 of 3 rounds)."),
    ],
)
def test_first_page_shows_every_finding_once_as_a_red_warning(
    tmp_path: Path, told: dict[str, object], said: str
) -> None:
    _, whole, html = pages(make_game(tmp_path, {"sv": [0.4, 0.1, -0.05]}, **told))
    warnings = re.findall(r'<p class="warning">(.*?)</p>', html)
    assert len(warnings) == bool(told)
    assert said in " ".join(warnings)
    assert not told or whole.count(said) == 1


def test_first_page_says_whether_values_are_of_one_seed_or_means(tmp_path: Path) -> None:
    values = [0.4, 0.3, 0.05], [0.2, 0.4, 0.05], [0.0, 0.5, 0.05]
    run = repeated(tmp_path, *values)
    front, means, html = pages(run, Budget(100.0))
    (tmp_path / "runs.csv").unlink()
    alone, whole, _ = pages(run)
    assert "by sv, this run only; they add up" in alone
    assert "By sv, Boston contributed most, Graz least." in alone
    assert "sv (this run only)" in whole
    assert "Values of a single run with a single seed vary" in whole
    assert "by sv, mean of 3 runs with a seed each; they add up" in front
    assert "<desc>start 0.250, Lyon 0.400, Boston 0.200, Graz 0.0500, end 0.900</desc>" in html
    assert re.search(r"\| Lyon \| 0.40+ \[.*\| Boston \| 0.20", front, re.DOTALL)
    assert "By sv, Lyon contributed clearly more than Graz. Other brackets overlap both." in front
    assert "single seed" not in means
    assert "this run" not in front


def test_page_shows_no_intervals_of_metrics_that_train_no_coalitions(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    path = folder / "contributions.csv"
    rows = (line.split(",") for line in path.read_text().splitlines())
    ends = [",".join([*row[:7], "-1", "2"] if row[1] == "cssv" and not row[3] else row) for row in rows]
    path.write_text("\n".join(ends) + "\n")
    front, whole, _ = pages(folder)
    assert "[" not in front  # brackets hold the mean over many seeds, and these do not
    assert BRACKETS not in whole


def test_caveats_exist_for_every_metric() -> None:
    for kind in {*flsv.metrics.__all__} - {"ContributionMetric"}:
        said = caveats({"class": kind}, errors=True)
        assert said, kind
        assert caveats({"class": kind}, errors=False) == [*said, WORDS["no_error"]]
