"""Tables of utilities: made, continued, read; those that are shipped are what the command makes."""

from dataclasses import replace

import pytest
import torch

from benchmark import federation, make_truth, names, train_coalitions, truth_table
from benchmark.truth import FOLDER, SEEDS, truth_settings
from helpers import refused
from helpers.small_federation import make_small_federation


@pytest.mark.slow
def test_truth_made_in_parts_equals_truth_made_at_once_and_has_its_settings(tmp_path):
    small = make_small_federation(rounds=1)
    path = tmp_path / "small.csv"

    # Made at once.
    assert make_truth(small, tmp_path, seeds=[1]) == 8

    utilities = truth_table(small, tmp_path).utilities
    lines = path.read_text().splitlines(keepends=True)

    # Killed while it wrote.
    truncated = "".join(lines[:7]) + "1,0+2"
    path.write_text(truncated)

    with refused("of 8 coalitions are missing"):
        truth_table(small, tmp_path)

    for text, missing_count in [
        (truncated, 3),
        (lines[0][:20], 8),
        (lines[0] + "seed,", 8),
    ]:
        path.write_text(text)
        assert make_truth(small, tmp_path, seeds=[1]) == missing_count
        table = truth_table(small, tmp_path)
        torch.testing.assert_close(
            table.utilities,
            utilities,
            atol=0,
            rtol=0,
        )

    longer = replace(small, rounds=3)
    renamed = replace(small, title="another")
    settings = truth_settings(small, FOLDER)

    assert truth_settings(longer, FOLDER) != settings
    assert truth_settings(renamed, FOLDER) == settings
    for function in (truth_table, make_truth):
        with refused('results of other settings: it has # {"settings"'):
            function(longer, tmp_path)


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize("name", names())
def test_shipped_truth_tables_are_complete_and_match_the_shipped_federations(name):
    truth = truth_table(federation(name))

    assert len(truth.seeds) >= 3  # or there is no interval
    assert set(truth.seeds) <= set(SEEDS)
    assert truth.values.isfinite().all()
    assert truth.ceiling > 0.6

    # A game worth the name: the coalitions differ.
    distinct_utilities = {round(utility, 4) for utility in truth.utilities[0].tolist()}
    assert len(distinct_utilities) > truth.num_clients


def read_shipped_utilities(name):
    """By seed and coalition, such as 2+3+4."""
    settings, header, *lines = (FOLDER / f"{name}.csv").read_text().splitlines()
    assert settings.startswith("#")
    assert header == "seed,coalition,utility"

    utilities = {}
    for line in lines:
        seed, coalition, utility = line.split(",")
        # A quotation mark keeps spreadsheets from adding up a coalition.
        utilities[int(seed), coalition.lstrip("'")] = float(utility)
    return utilities


@pytest.mark.slow
def test_shipped_utilities_equal_newly_trained_ones():
    name = "digits_free_riders"
    free_riders = federation(name)
    num_clients = len(free_riders.num_samples)
    mask = torch.tensor([[client in (2, 3, 4) for client in range(num_clients)]])

    trained = train_coalitions(free_riders, mask, SEEDS[0]).item()

    expected = read_shipped_utilities(name)[SEEDS[0], "2+3+4"]
    assert trained == pytest.approx(expected, abs=0.0025)  # a validation sample
