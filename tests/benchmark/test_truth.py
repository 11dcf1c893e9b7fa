"""Tables of utilities: made, continued, read; those that are shipped are what the command makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from small_federation import small

from flsv.benchmark import federation, make_truth, names, train_coalitions, truth_table
from flsv.benchmark.truth import FOLDER, SEEDS, Truth, settings
from flsv.errors import ConfigurationError
from flsv.functional import exact_shapley
from flsv.functional.shapley.exact import all_coalitions


def test_made_in_parts_is_made_whole(tmp_path: Path) -> None:
    mine, whole, parts = small(), tmp_path / "whole", tmp_path / "parts"
    assert make_truth(mine, whole, seeds=[1, 2]) == 16
    assert make_truth(mine, parts, seeds=[1], coalitions=[(0, 2), ()]) == 2
    with pytest.raises(ConfigurationError, match="6 of 8 coalitions are missing"):
        truth_table(mine, parts)
    path = parts / "small.csv"
    for killed in ("", path.read_text()[:20], path.read_text().split("\n")[0] + "\nseed,"):  # in its first lines
        other = tmp_path / f"other{len(killed)}"
        other.mkdir()
        (other / "small.csv").write_text(killed)
        assert make_truth(mine, other, seeds=[1], coalitions=[()]) == 1
        assert (other / "small.csv").read_text().count("\n") == 3
    path.write_text(path.read_text() + "1,0+1,0.3")  # killed while it wrote
    assert make_truth(mine, parts, seeds=[1, 2]) == 14
    assert make_truth(mine, parts, seeds=[1, 2]) == 0
    one, other = truth_table(mine, whole), truth_table(mine, parts)
    assert torch.allclose(one.utilities, other.utilities, atol=0.05)
    assert torch.allclose(one.losses, other.losses, rtol=1e-3)


def test_values_and_intervals() -> None:
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(4, 8, dtype=torch.float64, generator=draw)
    truth = Truth((1, 2, 3, 4), table, table)
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
def test_shipped_tables_are_whole_and_of_the_shipped_federations(name: str) -> None:
    truth = truth_table(federation(name))
    assert len(truth.seeds) >= 3  # or there is no interval
    assert set(truth.seeds) <= set(SEEDS)
    assert truth.utilities.isfinite().all()
    assert len({round(u, 4) for u in truth.utilities[0].tolist()}) > truth.num_clients  # a game worth the name


def test_shipped_tables_are_what_the_command_makes(tmp_path: Path) -> None:
    digits = federation("digits_free_riders")
    make_truth(digits, tmp_path, seeds=SEEDS[:1], coalitions=[(2, 3, 4), (0,)])
    made = (tmp_path / "digits_free_riders.csv").read_text().splitlines()
    shipped = (FOLDER / "digits_free_riders.csv").read_text().splitlines()
    assert made[:2] == shipped[:2]
    rows = {tuple(line.split(",")[:2]): [float(x) for x in line.split(",")[2:]] for line in shipped[2:]}
    for line in made[2:]:
        seed, members, utility, loss = line.split(",")
        # Two of 431 validation samples, and rounding after 100 steps of other kernels.
        assert float(utility) == pytest.approx(rows[seed, members][0], abs=0.005)
        assert float(loss) == pytest.approx(rows[seed, members][1], rel=0.01)


def test_a_table_of_other_settings_is_refused(tmp_path: Path) -> None:
    mine = small()
    make_truth(mine, tmp_path, seeds=[1], coalitions=[(0,)])
    other = replace(mine, rounds=3)
    assert settings(other) != settings(mine) == settings(replace(mine, title="another", root="/somewhere"))
    for function in (truth_table, make_truth):
        with pytest.raises(ConfigurationError, match="other settings"):
            function(other, tmp_path)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no truth of small"):
        truth_table(small(), tmp_path)
    many = {"class_path": "flsv.data.IIDPartitioner", "init_args": {"num_clients": 11}}
    with pytest.raises(ConfigurationError, match="2,048 coalitions"):
        make_truth(small(data={**small().data, "partitioner": many}), tmp_path)


def test_the_empty_coalition_is_untrained() -> None:
    masks = torch.zeros(1, 3, dtype=torch.bool)
    longer = small(rounds=3)
    assert torch.equal(train_coalitions(small(), masks, 1)["loss"], train_coalitions(longer, masks, 1)["loss"])
