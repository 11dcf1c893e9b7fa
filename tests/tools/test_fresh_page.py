"""The page on fresh federations: who is right has all of the ceiling, and of a page only its own part changes."""

from __future__ import annotations

from pathlib import Path

import fresh_page
import pytest
import torch

from flsv.benchmark import federation, truth_table
from flsv.benchmark.registry import METRICS
from flsv.benchmark.scores import Results, Values
from flsv.benchmark.summary import Cost, Known, summarise

NAMES = ("diabetes_four", "skew_adam_four")  # which need no download
SAID = ("one_round", "gradient_agreement_game", "size")
OLD = (
    "# Old\n\n| clients can train more than their own model | `That` | too |\n| many clients | `This` | as before |\n\n"
    "## Rank and money\n\nOld.\n\n## Near the truth, and at what cost\n\n| metric | held out | share error |\n"
    "| --- | --- | --- |\n" + "".join(f"| `{name}` | 0.65 | 0.19 |\n" for name in SAID) + "\n## Tables\n\nother\n"
)

TABLE = (
    "text\n\n|  | to | all | pairs |\n| --- | --- | --- | --- |\n"
    "| diabetes_four | rank, this seed | 1.00 | 0.99 |\n| diabetes_four | rank, truth | 0.90 | 0.80 |\n"
    "| diabetes_four | share, truth | 0.05 | 0.10 |\n| mean | rank, truth | 0.900 | 0.800 |\n"
)
SHADOW = fresh_page.of_shadow(TABLE, ["diabetes_four"], "pairs")


def test_the_table_of_shadow_models_is_read() -> None:
    assert SHADOW.of == {"diabetes_four": (0.8, 0.1)}
    assert fresh_page.of_shadow(TABLE, ["diabetes_four"], "all").of == {"diabetes_four": (0.9, 0.05)}


@pytest.fixture(scope="module")
def known() -> Known:
    return {name: (federation(name), truth_table(federation(name))) for name in NAMES}


@pytest.fixture(scope="module")
def results(known: Known) -> Results:
    """One metric says the truth, another the opposite."""
    found = Results(None)
    for name, (_, truth) in known.items():
        values = {
            "one_round": truth.mean,
            "gradient_agreement_game": -truth.mean,
            "size": torch.ones(truth.num_clients),
        }
        for seed in range(2):
            found.add(name, "base", seed, Values(values, {}, {}, {}, 0.0))
        found.add(name, "partial", 0, Values(values, {}, {}, {}, 0.0))
    return found


def test_the_page_says_what_the_values_and_the_tables_say(known: Known, results: Results) -> None:
    each = {name: fresh_page.of_retraining(results, name, known) for name in known}
    summaries = {name: summarise(results, known, name) for name in SAID}
    costs = dict.fromkeys(METRICS, Cost(0.0123, 0.0, 0.05))
    shadow = fresh_page.Line(dict.fromkeys(known, (0.75, 0.25)), "n more models each")
    text = fresh_page.page(results, known, summaries, costs, each, {"pairs": shadow, "all": shadow})
    assert "each client alone and every two: 0.75, least 0.75, 25 % of the payment" in text
    assert "| while the run trains (`ShadowShapley()`) | n more models each | 0.75 |" in text
    ceiling = sum(truth.ceiling for _, truth in known.values()) / 2
    assert f"is {ceiling:.2f}" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| `one_round` |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:4] == ["12.3 ms a round", "1.00", f"{100 / ceiling:.0f} %"]
    assert (cells[4][:4], *cells[5:]) == ("1.00", "0.00", "1.00", "2")
    assert "| `gradient_agreement_game` | 12.3 ms a round | -1.00 |" in text
    assert "| `size` | 12.3 ms a round | 0.00 |" in text
    fits = sum(fresh_page.visits(fresh_page.of_sizes(t.num_clients, (1,)), f.num_samples) for f, t in known.values())
    assert f"| each alone (`--trainings singles`, n + 2) | {fits / 2:.1f} fits |" in text


def test_only_its_part_of_the_benchmarks_page_is_written_anew(known: Known, results: Results) -> None:
    each = {name: fresh_page.of_retraining(results, name, known) for name in known}
    summaries = {name: summarise(results, known, name) for name in SAID if name != "one_round"}
    summaries["one_round"] = summarise(results, known, "one_round")
    with pytest.raises(ValueError, match="do not say so any more"):
        fresh_page.into(OLD, summaries, known, each, results, SHADOW)  # here one does: it says the truth
    wrong = Results(None)
    for key, values in results.values.items():
        wrong.add(*key[:3], Values({key[3]: -values.abs()}, {}, {}, {}, 0.0))
    text = fresh_page.into(OLD, summaries, known, each, wrong, SHADOW)
    assert "| many clients | `This` | as before |" in text
    assert text.endswith("## Tables\n\nother\n")
    assert "Old." not in text
    assert "`That`" not in text
    assert "| clients can train more than their own model | `ShadowShapley()` |" in text
    assert "| `size` | 0.65 |" in text
    assert Path(fresh_page.__file__).name == "fresh_page.py"
