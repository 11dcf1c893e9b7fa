"""The page of all clients: one set of values, all that speaks against relying on it, and nothing that is not known."""

import html
import json
import math
import re
from pathlib import Path

import pandas
import pytest
import torch

import flsv.contrib
import flsv.metrics
from flsv.functional.joint_shares import CaseValues
from flsv.payment import Budget, write_report
from flsv.payment.html import Cell, bar_cells, heatmap_table
from flsv.payment.shares import fraction_moved
from flsv.results.record import write_case_values
from flsv.results.text import MESSAGES, NO_NUMBER
from flsv.utilities.csv_files import NAN
from helpers.pages import text_of_page
from helpers.retrained import add_retrained_runs, make_trained
from helpers.runs import (
    NAMES,
    add_intervals,
    change_record,
    make_game,
    make_repeated_runs,
    make_run,
)

VALUES = {"sv": [0.4, 0.1, -0.05, 0.02], "loo": [0.1, 0.05, -0.01, 0.01]}
NASTY = ("a|b <b>x</b>", "</title><script>alert(1)</script>", "[x](http://evil)", "`c` *d* & \\e")


RETRAINED_VALUES = [0.1, 0.3, 0.05, 0.15]
RETRAINED_SHARES = [1 / 6, 0.5, 1 / 12, 0.25]
RETRAINED_SHARES_BY_LOSS = [0.25, 0.4, 0.1, 0.25]


def add_retrained_values(folder: Path, **facts) -> Path:
    """Values by retraining that differ from the run's in their order."""
    by_loss = {"negative_loss": RETRAINED_SHARES_BY_LOSS}
    return add_retrained_runs(folder, RETRAINED_VALUES, by_loss, **{"majority": 0.2} | facts)


def front_page_of(folder: Path, **options) -> str:
    return text_of_page(write_report(folder, **options)).partition("\nAppendix\n")[0]


@pytest.mark.slow
def test_first_page_after_retraining_shows_retrained_values_only(tmp_path):
    folder = add_retrained_values(make_game(tmp_path, VALUES))
    values = dict(zip(NAMES, RETRAINED_VALUES))
    names_by_value = sorted(values, key=lambda name: values[name], reverse=True)
    share_moved_by_loss = fraction_moved(RETRAINED_SHARES, RETRAINED_SHARES_BY_LOSS)
    assert f"{100 * share_moved_by_loss:.1f}" == "10.0"

    for budget in (None, Budget(1000.0)):
        front = front_page_of(folder, budget=budget)
        shown_names = re.findall(r"^\| (\w+) \| 0\.\d+ \[", front, re.MULTILINE)
        assert shown_names == names_by_value
        assert "would go to other partners: 10.0 % by loss." in front
        page = text_of_page(write_report(folder, budget=budget))
        assert page.count("| 0.300 [") == 1  # one value, one bracket

    client_page = text_of_page(write_report(folder, client=1)).partition("\nAppendix\n")[0]
    assert "| retraining, measured by accuracy | 0.300 [0.287 to 0.313] |" in client_page
    assert "would go to other partners" not in client_page  # it would tell of the others' values


def add_case_covariance(folder: Path, deviation: float) -> Path:
    """The run, whose values also depend on the validation samples, each on its own."""
    # A pair of values, above and below 0, for each client: they vary independently.
    record = json.loads((folder / "run.json").read_text())
    clients = len(record["clients"])
    size = deviation * math.sqrt((2 * clients - 1) / 2)
    pair = torch.tensor([[size, -size]], dtype=torch.float64)
    values = torch.kron(torch.eye(clients, dtype=torch.float64), pair)
    write_case_values(folder, {"sv": CaseValues(values, is_resampled=True)})
    return make_trained(add_intervals(folder, "sv", 0.03))


def test_page_has_one_interval_with_and_without_a_budget(tmp_path):
    folder = add_case_covariance(make_game(tmp_path, VALUES), deviation=0.04)

    page = front_page_of(folder)
    page_with_budget = front_page_of(folder, budget=Budget(1000.0))

    brackets = re.search(r"\| Boston \| 0.400 \[(.*) to (.*)\] \|", page)
    assert brackets is not None
    low, high = brackets.groups()
    # 1.645 times the root of 0.04 squared and the square of the deviation between seeds, 0.03 / 1.645.
    half_width = math.hypot(1.645 * 0.04, 0.03)
    assert float(low) == pytest.approx(0.4 - half_width, abs=0.003)
    assert float(high) == pytest.approx(0.4 + half_width, abs=0.003)
    assert MESSAGES["intervals"]["seeds_and_samples"] in page.replace("\n", " ")
    assert f"| Boston | 0.400 [{low} to {high}] |" in page_with_budget


def test_brackets_in_the_appendix_say_for_what_they_are(tmp_path):
    folder = add_case_covariance(make_game(tmp_path, VALUES), deviation=0.04)
    add_retrained_values(folder)

    _, _, appendix = text_of_page(write_report(folder)).partition("\nAppendix\n")

    sentences = appendix.replace("\n", " ")
    assert "| partner | retrained (loss) | sv |" in appendix
    assert f"retrained (loss): {MESSAGES['intervals']['seeds']}" in sentences
    assert f"sv: {MESSAGES['intervals']['seeds_and_samples']}" in sentences
    assert sentences.count("In square brackets") == 2


def test_page_of_a_repeated_run_has_means_over_its_seeds(tmp_path):
    values_of_seed_0 = [0.4, 0.3, 0.05]  # of Boston, Lyon and Graz
    values_of_seed_1 = [0.2, 0.4, 0.05]
    values_of_seed_2 = [0.0, 0.5, 0.05]
    run = make_repeated_runs(tmp_path, values_of_seed_0, values_of_seed_1, values_of_seed_2)

    front = front_page_of(run)

    mean_of_lyon = "0.40+"  # (0.3 + 0.4 + 0.5) / 3
    mean_of_boston = "0.20"  # (0.4 + 0.2 + 0.0) / 3
    assert re.search(
        rf"\| Lyon \| {mean_of_lyon} \[.*\| Boston \| {mean_of_boston}", front, re.DOTALL
    )
    assert (
        "Source of the values: the metric sv, mean of 3 runs; seeds 0, 1 and 2, 3 of 5 rounds."
        in front
    )
    assert MESSAGES["intervals"]["seeds"] in front.replace("\n", " ")
    # From 0.25 by the sum of the mean values: 0.2 + 0.4 + 0.05.
    assert "accuracy on the validation set: from 25.0 % to 90.0 %" in front


def test_page_of_all_has_values_by_class_and_the_metrics_guide(tmp_path):
    run = make_run(tmp_path, clients=4, rounds=5)
    page = text_of_page(write_report(run))

    # As make_run writes them.
    for text in ("cssv by class", "class 2", "cosine", "more is better"):
        assert text in page, text


def test_numbers_of_a_heatmap_have_equally_many_decimals():
    table = pandas.DataFrame([[0.983, 0.0046], [-0.0002, NAN]], index=["Boston", "Lyon"])

    heatmap = heatmap_table(table, caption="sv")

    cells = [cell for row in heatmap.rows for cell in row[1:] if isinstance(cell, Cell)]
    assert [cell.text for cell in cells] == ["0.98", "0.00", "0.00", NO_NUMBER]


def test_page_tells_why_a_metric_beside_its_values_has_none(tmp_path):
    run = make_game(tmp_path, VALUES)
    record = json.loads((run / "run.json").read_text())
    reason = "Their training was interrupted."
    record["paid_in"]["value"] = {**record["paid_in"]["sv"], "why_no_values": reason}
    change_record(run, paid_in=record["paid_in"])

    text = text_of_page(write_report(run))

    assert f"There are no values by value. {reason}" in text


def test_bars_reach_to_values_and_lines_to_the_ends_of_intervals():
    estimates = pandas.DataFrame(
        {
            "value": [0.5, -0.5, NAN],
            "low": [0.25, NAN, NAN],
            "high": [1.5, NAN, NAN],
        }
    )

    with_interval, negative, missing = bar_cells(estimates)

    # The scale is from -0.5 to 1.5: 0.0 is at 25 %, 0.25 at 37.5 %, 0.5 at 50 %. The line is of ink.
    assert "var(--ink) 37.5% 100.0%" in with_interval.style
    assert ") 25.0% 50.0%, transparent" in with_interval.style
    assert ") 0.0% 25.0%, transparent" in negative.style
    assert "--ink" not in negative.style
    assert " / 100% 1.2em " in negative.style  # of one thickness in rows of one and of two lines
    assert missing.text == NO_NUMBER
    assert not missing.style
    assert not missing.title


def test_steps_lead_from_the_untrained_models_score_to_that_of_all():
    estimates = pandas.DataFrame(
        {
            "value": [0.5, 0.25],
            "low": [0.4, NAN],
            "high": [0.6, NAN],
        }
    )

    first_step, second_step = bar_cells(estimates, bases=[0.25, 0.75])

    # The scale is from 0 to 1.
    assert ") 25.0% 75.0%, transparent" in first_step.style
    assert "var(--ink) 65.0% 85.0%" in first_step.style
    assert ") 75.0% 100.0%, transparent" in second_step.style


def test_report_is_reproducible_loads_no_other_file_and_escapes_names(tmp_path):
    run = make_run(tmp_path, names=NASTY)
    page = write_report(run).read_text(encoding="utf-8")
    fetched = r"<(script|link|img|iframe|object|b|a)\b|<[^>]* (src|href|on\w+)=|url\(|@import"
    assert not re.search(fetched, page)
    assert all(html.escape(name) in page for name in NASTY)
    assert write_report(tmp_path).read_text(encoding="utf-8") == page


def test_page_of_a_run_that_was_killed_in_its_first_round_says_so(tmp_path):
    assert "0 rounds (stopped)" in front_page_of(make_run(tmp_path, ended=False, rounds=0))


def test_every_metric_has_caveats_for_the_report():
    metrics = [
        name for name in flsv.contrib.__all__ if hasattr(getattr(flsv.contrib, name), "guide")
    ]
    exported = {*flsv.metrics.__all__, *metrics} - {"ContributionMetric"}
    for name in exported:
        entry = f"caveats:\n  {name}:\n    - What its values do not say."
        assert name in MESSAGES["caveats"], f"flsv/results/messages.yaml: add\n{entry}"
    assert MESSAGES["caveats"].keys() <= exported
