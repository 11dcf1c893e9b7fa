"""The first page is for those who decide: no words of those who measure, and each sentence once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from made_runs import make_game, make_run

from flsv.report import Terms, write_report

#: What nobody but those who measure understands.
FOREIGN = (
    "nats",
    "2^",
    "U(C)",
    "coalition",
    "Shapley",
    "hyperparameter",
    'class "0"',
    "class 0",
    "negative_loss",
    "NaN",
)
NAN = float("nan")


def pages(folder: Path, terms: Terms | None = None) -> tuple[str, str, str]:
    """The first page and the whole in Markdown, and the HTML."""
    html, markdown = write_report(folder, terms=terms)
    text = markdown.read_text(encoding="utf-8")
    return text.partition("# Appendix")[0], text, html.read_text(encoding="utf-8")


def sentences(text: str) -> list[str]:
    """Those of five words or more; not what stands in tables, but in their cells' long texts."""
    lines = [part for line in text.splitlines() for part in (line.split("|") if line.startswith("|") else [line])]
    found = [each.strip(" -*>#") for line in lines for each in re.split(r"(?<=[.!?])\s+", line)]
    return [each for each in found if len(re.findall(r"[A-Za-z]{2,}", each)) >= 5]


@pytest.fixture(params=["game", "loss", "cssv", "contradicted"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    values = {"sv": [0.4, 0.1, -0.05, 0.02], "loo": [0.1, 0.05, -0.01, 0.01]}
    if request.param == "cssv":
        return make_run(tmp_path)
    if request.param == "contradicted":
        named = {"named": {"1": [1, 3]}, "copies": [[2, 3]], "logged": {"val_accuracy": 0.72}}
        return make_game(tmp_path, {"sv": values["sv"], "loo": values["sv"][::-1]}, **named)
    by = "negative_loss" if request.param == "loss" else "accuracy"
    return make_game(tmp_path, values, start=-0.7 if by == "negative_loss" else 0.25, by=by)


def test_no_foreign_words_and_no_sentence_twice(folder: Path) -> None:
    front, whole, _ = pages(folder, Terms(10_000.0))
    assert not [word for word in FOREIGN if word in front]
    twice = [sentence for sentence, times in Counter(sentences(whole)).items() if times > 1]
    assert not twice


def test_steps_add_up_from_start_to_end_or_there_are_none(tmp_path: Path) -> None:
    front, _, html = pages(make_game(tmp_path / "a", {"sv": [0.4, 0.1, -0.05]}))
    rows = dict(re.findall(r"^\| (\w+) \| (-?[\d.]+) \|$", front, re.MULTILINE))
    assert float(rows["start"]) + sum(float(rows[n]) for n in ("Boston", "Lyon", "Graz")) == pytest.approx(
        float(rows["end"]), abs=0.002
    )
    assert "they add up" in front
    assert "<title>from 0.250 to 0.700 in 3 steps</title>" in html
    told = {"paid_in": {"sv": {"by": "accuracy", "start": 0.25, "end": 0.9, "sum": 0.45, "told_apart": True}}}
    _, _, html = pages(make_game(tmp_path / "b", {"sv": [0.4, 0.1, -0.05]}, **told))
    assert "in 3 steps" not in html
    assert "They do not add up to the difference" in html


def test_an_error_falls_and_never_below_0(tmp_path: Path) -> None:
    front, _, html = pages(make_game(tmp_path, {"sv": [0.8, 0.1, -0.5]}, start=-0.7, by="negative_loss"))
    assert "The model's error, from 0.700 when training began to 0.300 at its end" in front
    steps = re.findall(r"<desc>(start[^<]*)</desc>", html)[0]
    assert steps == "start 0.700, Graz 0.500, Lyon -0.100, Boston -0.800, end 0.300"


def test_of_many_partners_the_rest_is_one_step(tmp_path: Path) -> None:
    _, _, html = pages(make_game(tmp_path, {"sv": [0.01 * i for i in range(40)]}))
    assert "in 13 steps" in html
    assert "all others" in html


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"copies": [[0, 1]]}, "into disrepute: Boston, Lyon."),
        ({"named": {"2": [1, 3]}}, "far larger than all others: Graz (1 of 3 rounds)."),
        (
            {"paid_in": {"sv": {"by": "accuracy", "start": 0.1, "end": 0.1, "sum": 0, "told_apart": False}}},
            "not told apart",
        ),
    ],
)
def test_red_lines(tmp_path: Path, told: dict[str, object], said: str) -> None:
    folder = make_game(tmp_path / "run", {"sv": [0.4, 0.1, -0.05]}, **told)
    front, whole, html = pages(folder)
    assert f"> **{said.split()[0]}" in front or said in front
    assert said in front
    assert said in " ".join(re.findall(r'<p class="warning">(.*?)</p>', html))
    assert whole.count(said) == 1
    front, _, html = pages(make_game(tmp_path / "fine", {"sv": [0.4, 0.1, -0.05]}))
    assert "warning" not in html.partition("</style>")[2]


def test_contradictions_are_red_and_side_by_side(tmp_path: Path) -> None:
    folder = make_game(tmp_path, {"sv": [0.5, 0.3, 0.2, -0.315]})
    head = "client,client_name,by,value,low,high,share,kernel_shap,majority"
    shares = [0.4, 0.26, 0.091, 0.249]
    lines = [f"{i},x,accuracy,{s},{s - 0.01},{s + 0.01},{s},{s},nan" for i, s in enumerate(shares)]
    (folder / "retrained.csv").write_text("\n".join([head, *lines]) + "\n")
    front, _, html = pages(folder)
    said = "By sv the model would be better without Oslo, which has 24.9 % by retraining."
    assert said in re.findall(r'<p class="warning">(.*?)</p>', html)[0]
    assert "| Oslo | below 0 | 24.9 % |" in front
    assert "Shares by retraining" in front


def test_it_says_what_it_rests_on(tmp_path: Path) -> None:
    told = {"validation": {"of": "hospitals/val/patients.csv", "rows": 1095}, "logged": {"val_accuracy": 0.968}}
    front, _, _ = pages(make_game(tmp_path, {"sv": [0.4, 0.1]}, **told))
    assert "judged on 1,095 cases of hospitals/val/patients.csv" in front
    assert "96.8 % of the answers are right" in front


def test_the_appendix_draws_payment_and_seeds(tmp_path: Path) -> None:
    for seed in range(3):
        make_game(tmp_path / "runs" / f"seed_{seed}", {"sv": [0.4 + 0.02 * seed, 0.1, -0.05]})
    (tmp_path / "runs" / "repeat.json").write_text("{}")
    _, whole, html = pages(tmp_path / "runs" / "seed_0", Terms(1_000.0, currency="EUR"))
    assert "<title>3 runs of 3</title>" in html
    assert "<desc>Boston mean 0.420, Lyon mean 0.100, Graz mean -0.0500</desc>" in html
    assert "| Boston | 0.400 | 0.420 | 0.440 |" in whole
    assert "<title>payment to 2</title>" in html  # Graz is below 0
    assert "1,000.00 EUR by sv, mean of 3 runs" in html
    _, _, html = pages(make_game(tmp_path / "alone", {"sv": [0.4, 0.1]}))
    assert "<title>payment to" not in html


def test_what_data_are_worth_before_training_stands_beside_the_others(tmp_path: Path) -> None:
    folder = make_game(tmp_path / "run", {"sv": [0.5, 0.3, -0.2]})
    (tmp_path / "value").mkdir()
    lines = ["client,samples,distance,share,client_name", "0,9,1.0,0.2,Boston", "1,9,1.0,0.3,Lyon", "2,9,1.0,0.5,Graz"]
    (tmp_path / "value" / "valuation.csv").write_text("\n".join(lines) + "\n")
    _, markdown = write_report(folder, valuation=tmp_path / "value")
    front = markdown.read_text().partition("# Appendix")[0]
    assert "By sv the model would be better without Graz, which has 50.0 % by the data before training." in front
    assert "| Graz | below 0 | 50.0 % |" in front
    assert "Shares by sv" in front  # by data alone only who is asked to
    _, markdown = write_report(folder, valuation=tmp_path / "value", terms=Terms(by="valued"))
    assert "Shares by the data before training" in markdown.read_text()
