"""Tables of utilities: made, continued, read; those that are shipped are what the command makes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.benchmark import federation, make_truth, names, train_coalitions, truth_table
from flsv.benchmark.truth import FOLDER, SEEDS, arcs, exact_truth, sampled_truth, truth_settings, values_by_circles
from flsv.functional import exact_shapley
from flsv.functional.shapley.enumeration import all_coalitions, shapley_of_table
from flsv.functional.shapley.memoized_game import MemoizedGame
from flsv.functional.shapley.permutation import marginals_along
from flsv.functional.shapley.random_coalitions import random_permutations
from flsv.retraining.retrained_utility import RetrainedUtility
from flsv.sampling import FixedCohort
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import seed_global_rngs
from helpers.runs import small_federation


def test_truth_made_in_parts_equals_truth_made_at_once(tmp_path: Path) -> None:
    mine, path = small_federation(), tmp_path / "small.csv"
    assert make_truth(mine, tmp_path, seeds=[1, 2]) == 16
    whole, lines = truth_table(mine, tmp_path).utilities, path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:7]) + "1,0+2")  # killed while it wrote
    with pytest.raises(ConfigurationError, match="3 of 8 coalitions are missing"):
        truth_table(mine, tmp_path)
    for killed, trained in ((path.read_text(), 11), (lines[0][:20], 16), (lines[0] + "seed,", 16)):
        path.write_text(killed)
        assert make_truth(mine, tmp_path, seeds=[1, 2]) == trained
        torch.testing.assert_close(truth_table(mine, tmp_path).utilities, whole, atol=0, rtol=0)
    other = replace(mine, rounds=3)
    elsewhere = replace(mine, title="another", root="/somewhere")
    assert truth_settings(other, FOLDER) != truth_settings(mine, FOLDER) == truth_settings(elsewhere, FOLDER)
    for function in (truth_table, make_truth):
        with pytest.raises(ConfigurationError, match="small.csv holds results of other settings: settings is"):
            function(other, tmp_path)


def test_truth_values_and_ceiling_equal_those_by_hand() -> None:
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(4, 8, dtype=torch.float64, generator=draw)
    truth = exact_truth((1, 2, 3, 4), table)
    masks = all_coalitions(3)
    for row, values in zip(table, truth.values):
        game = {tuple(mask.tolist()): u for mask, u in zip(masks, row)}
        exact = exact_shapley(lambda asked, game=game: torch.stack([game[tuple(m.tolist())] for m in asked]), 3)
        assert torch.allclose(values, exact.values)
    low, high = stats.t.interval(0.9, 3, truth.mean.numpy(), stats.sem(truth.values.numpy()))
    np.testing.assert_allclose(truth.interval(0.9).numpy(), (high - low) / 2)
    others = [np.delete(truth.values.numpy(), s, 0).mean(0) for s in range(4)]
    expected = np.mean([stats.spearmanr(v, o).statistic for v, o in zip(truth.values.numpy(), others)])
    assert truth.ceiling == pytest.approx(expected)


@pytest.mark.parametrize("name", names())
def test_shipped_truth_tables_are_complete_and_match_the_shipped_federations(name: str) -> None:
    truth = truth_table(federation(name))
    assert len(truth.seeds) >= 3  # or there is no interval
    assert set(truth.seeds) <= set(SEEDS)
    assert truth.values.isfinite().all()
    assert truth.ceiling > 0.6
    if truth.utilities is not None:
        assert len({round(u, 4) for u in truth.utilities[0].tolist()}) > truth.num_clients  # a game worth the name
    else:
        assert truth.num_clients > 10  # or it could be exact


@pytest.mark.slow
@pytest.mark.parametrize(("name", "members"), [("digits_free_riders", (2, 3, 4)), ("digits_20_clients", range(20))])
def test_shipped_utilities_equal_newly_trained_ones(name: str, members: Sequence[int]) -> None:
    each = federation(name)
    mask = torch.tensor([[client in members for client in range(len(each.num_samples))]])
    rows = [line.split(",") for line in (FOLDER / f"{name}.csv").read_text().splitlines()[2:]]
    shipped = {(seed, coalition.lstrip("'")): float(utility) for seed, coalition, utility in rows}
    made = train_coalitions(each, mask, SEEDS[0]).item()
    assert made == pytest.approx(shipped[str(SEEDS[0]), "+".join(map(str, members))], abs=0.0025)  # a validation sample


def test_truth_of_unmade_or_too_many_coalitions_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no truth of small"):
        truth_table(small_federation(), tmp_path)
    many = {"class_path": "flsv.data.IIDPartitioner", "init_args": {"num_clients": 11}}
    with pytest.raises(ConfigurationError, match="2,048 coalitions.*Say `circles: 3`"):
        make_truth(small_federation(data={**small_federation().data, "partitioner": many}), tmp_path)


def test_truth_by_circles_made_in_parts_continues_where_it_stopped(tmp_path: Path) -> None:
    partitioner = {"class_path": "flsv.data.IIDPartitioner", "init_args": {"num_clients": 5}}
    mine = small_federation(circles=1, data={**small_federation().data, "partitioner": partitioner})
    assert make_truth(mine, tmp_path, seeds=[1, 2]) == 2 * (5 * 4 + 2)
    path, truth = tmp_path / "small.csv", truth_table(mine, tmp_path)
    assert truth.utilities is None
    assert (truth.num_clients, truth.trained, truth.values.shape) == (5, 22, (2, 5))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:30]) + "2,0+1")  # killed while it wrote
    with pytest.raises(ConfigurationError, match="16 of 44 coalitions are missing"):
        truth_table(mine, tmp_path)
    assert make_truth(mine, tmp_path, seeds=[1, 2]) == 16
    # Another circle needs what is not there yet, and no coalition twice.
    more = replace(mine, circles=2)
    assert truth_settings(more, tmp_path) == truth_settings(mine, tmp_path)
    with pytest.raises(ConfigurationError, match="are missing"):
        truth_table(more, tmp_path)
    assert 0 < make_truth(more, tmp_path, seeds=[1, 2]) <= 2 * (32 - 22)
    assert truth_table(more, tmp_path).trained > truth.trained


def test_the_interval_of_circles_holds_the_exact_values() -> None:
    """Circles of the exact tables, each seed with its own: 90 % intervals hold the mean of all seeds' exact values."""
    held = []
    for name in ("digits_label_noise", "digits_sizes", "fashion_dirichlet", "mnist_sizes", "digits_dirichlet"):
        exact = truth_table(federation(name))
        assert exact.utilities is not None
        members = [tuple(mask.nonzero().flatten().tolist()) for mask in all_coalitions(exact.num_clients)]
        # One game that all draw from: what remains is the drawing.
        table = dict(zip(members, exact.utilities.mean(0).tolist()))
        for first in range(0, 100, 5):
            sampled = sampled_truth({first + more: table for more in range(5)}, exact.num_clients, 1)
            held.append(((sampled.mean - exact.mean).abs() <= sampled.interval(0.9)).double().mean().item())
    assert 0.85 < sum(held) / len(held) < 0.95


def test_truth_coalitions_equal_fits_in_this_process() -> None:
    mine, masks = small_federation(performance="negative_loss"), all_coalitions(3)

    def trainer(cohort: FixedCohort) -> L.Trainer:
        quiet = Reporting(table=False)
        return mine.trainer(FederatedLoop(sampler=cohort, seed=7, uploads=mine.attackers(), reporting=quiet))

    found = train_coalitions(mine, masks, seed=7)
    seed_global_rngs(7, "benchmark")
    apart = RetrainedUtility(trainer, mine.module(), mine.datamodule(), "negative_loss")(masks)
    torch.testing.assert_close(found, apart, rtol=1e-6, atol=1e-6)
    assert apart.unique().numel() == 8 - 1 + (apart[4] != apart[0]).item()  # the coalitions do differ


# ---- orders along circles: each place equally often, unbiased on exact tables, cheaper than orders drawn alone

SHIPPED = ["digits_label_noise", "digits_sizes", "digits_free_riders", "fashion_duplicates", "clinics"]


def shipped(name: str) -> tuple[MemoizedGame, int, Tensor]:
    """The game of a table's first seed, its players and its exact values."""
    truth = truth_table(federation(name))
    assert truth.utilities is not None
    table, players = truth.utilities[0], truth.num_clients
    game = MemoizedGame(lambda masks: table[(masks * 2 ** torch.arange(players)).sum(1)], players)
    return game, players, truth.values[0]


def test_circles_evaluate_exactly_their_arcs_and_more_circles_add_arcs() -> None:
    asked: set[tuple[bool, ...]] = set()

    def utility(masks: Tensor) -> Tensor:
        asked.update(map(tuple, masks.tolist()))
        return masks.sum(1).double()

    values = values_by_circles(MemoizedGame(utility, 8), 8, seed=5, circles=2)
    torch.testing.assert_close(values, torch.ones(2, 8, dtype=torch.float64))
    found = [tuple(mask) for mask in arcs(8, seed=5, circles=2).tolist()]
    assert set(found) == asked
    assert len(found) == len(asked)
    assert arcs(8, 5, 1).tolist() == [list(mask) for mask in found][: len(arcs(8, 5, 1))]
    assert len(arcs(8, 5, 1)) == 8 * 7 + 2


def test_one_circle_of_three_players_gives_exact_values() -> None:
    table = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    game = MemoizedGame(lambda masks: table[(masks * torch.tensor([1, 2, 4])).sum(1)], 3)
    assert sorted(map(tuple, arcs(3, 0, 1).tolist())) == sorted(map(tuple, all_coalitions(3).tolist()))
    torch.testing.assert_close(values_by_circles(game, 3, 0, 1)[0], shapley_of_table(table[:, None])[:, 0])


@pytest.mark.parametrize("name", SHIPPED)
def test_values_by_circles_are_unbiased_and_vary_less_than_antithetic_permutations(name: str) -> None:
    game, players, exact = shipped(name)
    circles = values_by_circles(game, players, seed=0, circles=400)
    stderr = circles.std(0) / 400**0.5
    assert ((circles.mean(0) - exact).abs() <= 4 * stderr + 1e-12).all()
    torch.testing.assert_close(circles.sum(1), exact.sum().expand(400))
    orders = random_permutations(400, players, torch.Generator().manual_seed(0))
    both = marginals_along(game, torch.stack([orders, orders.flip(1)], 1).flatten(0, 1)).squeeze(-1)
    pairs = both.view(400, 2, players).mean(1)
    # For as many coalitions: a pair has 2 (n - 1), a circle n (n - 1).
    assert players * circles.var(0).sum() < 0.3 * 2 * pairs.var(0).sum()
