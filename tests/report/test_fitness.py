"""Sentences of fitness: by the number of clients, the sampler and the seeds, and as the results' page has them."""

from pathlib import Path

import pytest

from flsv.report.fitness import EVERYBODY, misallocated


@pytest.mark.parametrize(
    ("clients", "drawn", "seeds", "fractions", "words"),
    [
        (5, False, 3, (0.05,), "with up to 7 clients, all of them in every round"),
        (12, False, 3, (0.06,), "with up to 12 clients, all of them in every round"),
        (13, False, 1, (0.14,), "with up to 20 clients, all of them in every round"),
        (5, True, 1, (0.04, 0.09), "with up to 8 clients, some of them drawn for each round"),
        (10, True, 3, (0.02, 0.08), "with up to 8 clients (here there are 10), some of them drawn for each round"),
    ],
)
def test_reported_misallocation_follows_clients_sampling_and_number_of_seeds(
    clients: int, drawn: bool, seeds: int, fractions: tuple[float, ...], words: str
) -> None:
    assert misallocated(clients, drawn, seeds) == (fractions, words)


def test_readme_has_the_misallocation_of_the_trials() -> None:
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    few, more, many = (f"{100 * trials.one[0]:.0f}" for trials in EVERYBODY)
    assert f"misallocated {few} % with up to seven clients, {more} % with 8\u201312, {many} % with 13\u201320" in readme
