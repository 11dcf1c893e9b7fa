"""Sentences of fitness: by the number of clients, the sampler and the seeds, and as the results' table has them."""

from pathlib import Path

import pandas
import pytest

from flsv.report.certainty import DRAWN, EVERYBODY, misallocated

TABLE = Path(__file__).parents[2] / "docs" / "results" / "predicted.csv"


@pytest.mark.parametrize(
    ("clients", "drawn", "seeds", "fraction", "words"),
    [
        (5, False, 3, 0.07, "with up to 7 clients, all of them in every round"),
        (12, False, 1, 0.08, "with up to 16 clients, all of them in every round"),
        (30, False, 3, 0.06, "with up to 16 clients (here there are 30), all of them in every round"),
        (5, True, 1, 0.04, "with up to 7 clients, some of them drawn for each round"),
        (10, True, 3, 0.03, "with up to 7 clients (here there are 10), some of them drawn for each round"),
    ],
)
def test_reported_misallocation_follows_clients_sampling_and_number_of_seeds(
    clients: int, drawn: bool, seeds: int, fraction: float, words: str
) -> None:
    assert misallocated(clients, drawn, seeds) == (fraction, words)


def test_reported_misallocation_is_that_of_the_held_out_federations() -> None:
    table = pandas.read_csv(TABLE)
    drawn, few = table["federation"].str.contains("_of_"), table["clients"] <= 7
    for trials, rows in ((EVERYBODY[0], ~drawn & few), (EVERYBODY[1], ~drawn & ~few), (DRAWN, drawn)):
        mean = table[rows].groupby("way")["misallocated_percent"].mean().round() / 100
        found = mean["alone, predicted"], mean["alone and all but one, predicted, 3 seeds"]
        assert found == (trials.one, trials.several)
