"""The page on contribution metrics holds the numbers that it is given, and is not written where it would be wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_page_text import _seeds, kept_cells, kept_section, page

from flsv.benchmark import federation, names, truth_table
from flsv.benchmark.federation import SETS
from flsv.benchmark.registry import METRICS
from flsv.benchmark.scores import Results, Values
from flsv.benchmark.summary import Cost, Coverage, Known, Summary

KINDS = ("duplicates", "feature_noise", "free_rider", "label_noise")
LOW = {"fedce": -0.3, "cssv_weights": 0.1, "ot_gradient": 0.0, "size": 0.3, "gradient_agreement": 0.8125}
LOW |= {"gradient_agreement_game": 0.8725, "fedsv_samples": 0.7, "decayed": 0.5, "multi_round": 0.5, "ssv": 0.5}
LOW |= dict.fromkeys(("permutation_24", "leverage_24", "adjusted_24", "surrogate_24"), 0.65)


@pytest.fixture(scope="module")
def known() -> Known:
    found = (federation(name) for name in names())
    return {each.name: (each, truth_table(each)) for each in found if not each.circles}


def said(known: Known) -> dict[str, Summary]:
    found = {}
    for metric in METRICS:
        score = LOW.get(metric, 0.5)
        low = metric == "fedce"
        found[metric] = Summary(
            spearman=dict.fromkeys(known, score),
            sets=dict.fromkeys(SETS, score),
            interval=0.01,
            pearson=score,
            error=0.1,
            auroc=dict.fromkeys(KINDS, 0.1 if low else 0.9),
            seeds=0.9,
            aggregators=0.9,
            partial=0.0,
            dropout=0.0,
            private=0.0321,
            refused={},
            intervals=Coverage(0.4, dict.fromkeys(known, 0.4), 0.95, 0.1, 1.0, 100),
        )
    return found


def results(known: Known) -> Results:
    found = Results(None)
    values = {metric: torch.ones(3) for metric in METRICS}
    for place, name in enumerate(known):
        for seed in range(1 + place % 2):
            found.add(name, "base", seed, Values(values, {}, {}, {}, 0.0))
    for name in list(known)[:5]:
        for condition in ("partial", "dropout", "private", "uniform", "median"):
            found.add(name, condition, 0, Values(values, {}, {}, {}, 0.0))
    return found


OLD = (
    "# Old\n\n| many clients | `This` | as before |\n\n"
    "| clients can train more than their own model | `That` | too |\n\n"
    "## Rank and money\n\nA metric pays.\n\n## The goal, and what was tried\n\nMuch.\n\n"
    "## Near the truth, and at what cost\n\n| metric | tuning | held out | share error |\n| --- | --- | --- | --- |\n"
    "| `cgsv` | 0.7 | 0.65 | 0.19 |\n\n## Tables\n\nother\n"
)
COSTS = dict.fromkeys(METRICS, Cost(0.0123, 0.0, 0.05))


def test_numbers_are_those_of_the_values(known: Known) -> None:
    text = page(said(known), known, COSTS, results(known), OLD)
    assert "the highest rank correlation of all, 0.87 (0.87 held out, least 0.87); 12 ms a round" in text
    assert "12.3 ms a round" in text
    assert "0.81 over all federations, as it looks at the mean loss" in text
    assert "by more than 0.03" in text
    assert "1 to 2 seeds a federation" in text
    assert "of noise in 5 and" in text
    assert "came later" not in text
    assert "Much." not in text  # which is in the log
    assert "# Old" not in text
    assert "| many clients | `This` | as before |\n" in text
    assert "| clients can train more than their own model | `That` | too |\n" in text
    assert "## Rank and money\n\nA metric pays.\n\n## What single metrics do" in text
    assert "none of the" in text  # no metric's intervals hold the true share


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([2, 3, 2], "two seeds or more in each of 3 federations"),
        ([1, 1], "one seed in each of 2 federations"),
        ([1, 2, 3], "one seed in 1 of 3 federations, more in the others"),
    ],
)
def test_seeds_in_words(runs: list[int], words: str) -> None:
    assert _seeds(runs) == words


def test_cells_of_the_page_as_it_was() -> None:
    assert kept_cells(OLD) == {"cgsv": ("0.65", "0.19")}
    with pytest.raises(ValueError, match="no section 'Nowhere'"):
        kept_section(OLD, "Nowhere")


def test_another_best_one_is_noticed(known: Known) -> None:
    summaries = said(known)
    page(summaries, known, COSTS, results(known), OLD)
    summaries["cgsv"] = replace(summaries["cgsv"], spearman=dict.fromkeys(known, 0.99))
    with pytest.raises(ValueError, match="do not say so any more"):
        page(summaries, known, COSTS, results(known), OLD)


@pytest.mark.parametrize(
    ("metric", "change"),
    [
        ("ssv", {"spearman": 0.7}),  # no longer behind sums
        ("fedce", {"auroc": dict.fromkeys(KINDS, 0.9)}),
        ("leverage_24", {"spearman": 0.2}),
        ("ot_gradient", {"spearman": 0.4}),
    ],
)
def test_what_is_not_so_any_more_is_not_written(known: Known, metric: str, change: dict[str, Any]) -> None:
    summaries = said(known)
    if "spearman" in change:
        change = {"spearman": dict.fromkeys(known, change["spearman"])}
    summaries[metric] = replace(summaries[metric], **change)
    with pytest.raises(ValueError, match="do not say so any more"):
        page(summaries, known, COSTS, results(known), OLD)
