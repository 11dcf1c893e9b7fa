"""Sentences of fitness: by the number of clients, the sampler and the seeds, and as the results' page has them."""

from pathlib import Path

import pytest

from flsv.report.fitness import EVERYBODY, misallocated


@pytest.mark.parametrize(
    ("clients", "drawn", "seeds", "words"),
    [
        (5, False, 3, "with up to 9 clients, all in every round, 5 % of a payment"),
        (9, False, 1, "with up to 9 clients, all in every round, 6 %"),
        (12, False, 3, "with up to 12 clients, all in every round, 5 %"),
        (13, False, 1, "with up to 20 clients, all in every round, 14 %"),
        (30, False, 1, "with up to 20 clients, fewer than these 30, all in every round, 14 %"),
        (5, True, 1, "with up to 8 clients, some of them drawn for each round, 4 to 9 %"),
        (10, True, 3, "with up to 8 clients, fewer than these 10, some of them drawn for each round, 2 to 8 %"),
    ],
)
def test_trials_are_of_the_same_kind(clients: int, drawn: bool, seeds: int, words: str) -> None:
    assert words in misallocated(clients, drawn, seeds)


def test_the_first_page_says_the_same() -> None:
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    assert f"misallocated {EVERYBODY[1].one} % with up to twelve clients, {EVERYBODY[2].one} % with 13 to 20" in readme
