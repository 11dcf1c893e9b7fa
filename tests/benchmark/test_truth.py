"""Tables of utilities: made, continued, read; those that are shipped are what the command makes."""

from dataclasses import replace
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from scipy import stats

from flsv import FederatedLoop, Reporting
from flsv.benchmark import federation, make_truth, names, train_coalitions, truth_table
from flsv.benchmark.truth import FOLDER, SEEDS, exact_truth, truth_settings
from flsv.functional import exact_shapley
from flsv.functional.shapley.exact import all_coalitions
from flsv.retraining.retrained_utility import RetrainedUtility
from flsv.sampling import FixedCohort
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import seed_global_rngs
from helpers.runs import small_federation


def test_truth_made_in_parts_equals_truth_made_at_once(tmp_path: Path) -> None:
    mine, path = small_federation(rounds=1), tmp_path / "small.csv"
    assert make_truth(mine, tmp_path, seeds=[1]) == 8
    whole, lines = truth_table(mine, tmp_path).utilities, path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:7]) + "1,0+2")  # killed while it wrote
    with pytest.raises(ConfigurationError, match="3 of 8 coalitions are missing"):
        truth_table(mine, tmp_path)
    for killed, trained in ((path.read_text(), 3), (lines[0][:20], 8), (lines[0] + "seed,", 8)):
        path.write_text(killed)
        assert make_truth(mine, tmp_path, seeds=[1]) == trained
        torch.testing.assert_close(truth_table(mine, tmp_path).utilities, whole, atol=0, rtol=0)
    other = replace(mine, rounds=3)
    elsewhere = replace(mine, title="another")
    assert (
        truth_settings(other, FOLDER)
        != truth_settings(mine, FOLDER)
        == truth_settings(elsewhere, FOLDER)
    )
    for function in (truth_table, make_truth):
        with pytest.raises(
            ConfigurationError, match="small.csv holds results of other settings: settings is"
        ):
            function(other, tmp_path)


def test_truth_values_and_ceiling_equal_those_by_hand() -> None:
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(4, 8, dtype=torch.float64, generator=draw)
    truth = exact_truth((1, 2, 3, 4), table)
    masks = all_coalitions(3)
    for row, values in zip(table, truth.values):
        game = {tuple(mask.tolist()): u for mask, u in zip(masks, row)}
        exact = exact_shapley(
            lambda asked, game=game: torch.stack([game[tuple(m.tolist())] for m in asked]), 3
        )
        assert torch.allclose(values, exact.values)
    others = [np.delete(truth.values.numpy(), s, 0).mean(0) for s in range(4)]
    expected = np.mean(
        [stats.spearmanr(v, o).statistic for v, o in zip(truth.values.numpy(), others)]
    )
    assert truth.ceiling == pytest.approx(expected)


@pytest.mark.parametrize("name", names())
def test_shipped_truth_tables_are_complete_and_match_the_shipped_federations(name: str) -> None:
    truth = truth_table(federation(name))
    assert len(truth.seeds) >= 3  # or there is no interval
    assert set(truth.seeds) <= set(SEEDS)
    assert truth.values.isfinite().all()
    assert truth.ceiling > 0.6
    assert (
        len({round(u, 4) for u in truth.utilities[0].tolist()}) > truth.num_clients
    )  # a game worth the name


@pytest.mark.slow
def test_shipped_utilities_equal_newly_trained_ones() -> None:
    name, members = "digits_free_riders", (2, 3, 4)
    each = federation(name)
    mask = torch.tensor([[client in members for client in range(len(each.num_samples))]])
    rows = [line.split(",") for line in (FOLDER / f"{name}.csv").read_text().splitlines()[2:]]
    shipped = {(seed, coalition.lstrip("'")): float(utility) for seed, coalition, utility in rows}
    made = train_coalitions(each, mask, SEEDS[0]).item()
    assert made == pytest.approx(
        shipped[str(SEEDS[0]), "+".join(map(str, members))], abs=0.0025
    )  # a validation sample


def test_truth_of_unmade_or_too_many_coalitions_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no truth of small"):
        truth_table(small_federation(), tmp_path)
    many = {"class_path": "flsv.data.IIDPartitioner", "init_args": {"num_clients": 11}}
    with pytest.raises(ConfigurationError, match="2,048 coalitions.*the limit is 10 clients"):
        make_truth(
            small_federation(data={**small_federation().data, "partitioner": many}), tmp_path
        )


def test_truth_coalitions_equal_fits_in_this_process() -> None:
    mine, masks = small_federation(performance="negative_loss"), all_coalitions(3)

    def trainer(cohort: FixedCohort) -> L.Trainer:
        quiet = Reporting(table=False)
        return mine.trainer(
            FederatedLoop(sampler=cohort, seed=7, uploads=mine.attackers(), reporting=quiet)
        )

    found = train_coalitions(mine, masks, seed=7)
    seed_global_rngs(7, "benchmark")
    apart = RetrainedUtility(trainer, mine.module(), mine.datamodule(), "negative_loss")(masks)
    torch.testing.assert_close(found, apart, rtol=1e-6, atol=1e-6)
    assert (
        apart.unique().numel() == 8 - 1 + (apart[4] != apart[0]).item()
    )  # the coalitions do differ
