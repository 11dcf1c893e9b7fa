"""ShapleyFL's tables at the size of a test: cells, exact values of 20 players' kin, and the report."""

from __future__ import annotations

from dataclasses import replace

import pytest
import shapleyfl_estimators
import torch
from run_table import cells
from shapleyfl_report import METHODS
from table_runs import Cell, built, federated_loop
from torch import Tensor, nn

from flsv.functional.shapley import exact_shapley
from flsv.parameters import ParameterSpace

pytestmark = pytest.mark.slow

DIGITS = {"data.source": "digits", "data.splits.max_samples": None, "model.init_args.network": "softmax"}


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it


def of(column: str, seeds: list[int]) -> list[Cell]:
    """The cells of the columns that begin so."""
    return [cell for cell in cells("shapleyfl", False, seeds) if cell.column.startswith(column)]


def small(row: str, scenario: str):  # type: ignore[no-untyped-def]
    (cell,) = (c for c in cells("shapleyfl", False, [1]) if c.row == row and c.column == f"Fashion-MNIST, {scenario}")
    return replace(cell, overrides={**cell.overrides, **DIGITS, "trainer.max_epochs": 2})


def test_rows_differ_in_what_they_say_they_do() -> None:
    """One cohort size and one partition for all; FedSV's softmax and its sum; S-FedAvg's two temperatures."""
    loops, partitions = {}, set()
    for row in METHODS:
        with built(small(row, "open-set noise"), "data") as cli:
            loops[row] = federated_loop(cli.trainer)
            partitions.add(repr(cli.datamodule.partitioner))
    assert len(partitions) == 1
    sizes = {getattr(each.sampler, "expected_cohort", None) or each.sampler.cohort_size for each in loops.values()}
    assert sizes == {6}
    assert loops["FedProx"].client_algorithm.mu == 0.01
    assert loops["AFedSV"].metrics["ssv"].fold.momentum == loops["AFedSV+"].metrics["ssv"].fold.momentum == 0.7
    kinds = {row: type(loop.aggregator).__name__ for row, loop in loops.items()}
    assert (kinds["FedSV"], kinds["FedSV, by the sum"]) == ("ShapleySoftmax", "ShapleyWeighted")
    temperatures = [loops[row].sampler.temperature for row in ("S-FedAvg", "S-FedAvg, temperature 0.1")]
    assert temperatures == [1.0, 0.1]


# ---- table 3


def test_utilities_are_those_of_the_averaged_models() -> None:
    """Against torch's own forward pass of every coalition's average."""
    draw = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    space = ParameterSpace(network)
    vectors, start = torch.randn(4, space.size, generator=draw), torch.randn(space.size, generator=draw)
    images, labels = torch.randn(40, 1, 2, 3, generator=draw), torch.randint(3, (40,), generator=draw)
    table = shapleyfl_estimators.utilities(vectors, start, images, labels)
    for coalition in range(16):
        members = [i for i in range(4) if coalition >> i & 1]
        space.write(network, vectors[members].mean(0) if members else start)
        assert float(table[coalition]) == pytest.approx(float((network(images).argmax(1) == labels).double().mean()))


def test_exact_values() -> None:
    table = torch.rand(2**5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = exact_shapley(lambda masks: table[masks.long() @ (2 ** torch.arange(5))], 5).values
    torch.testing.assert_close(shapleyfl_estimators.exact_values(table, 5), expected)


def test_algorithm_3_of_three_players_is_exact() -> None:
    """For each other player there is one coalition of nobody and one of the third: no draw is left to chance."""
    table = torch.rand(2**3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def utility(masks: Tensor) -> Tensor:
        return table[masks.long() @ (2 ** torch.arange(3))]

    found = shapleyfl_estimators.algorithm_3(utility, 3, 2, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found, exact_shapley(utility, 3).values)


def test_algorithm_3_is_unbiased_and_costs_what_the_paper_counts() -> None:
    table, asked = torch.rand(2**6, generator=torch.Generator().manual_seed(3), dtype=torch.float64), []

    def utility(masks: Tensor) -> Tensor:
        asked.append(len(masks))
        return table[masks.long() @ (2 ** torch.arange(6))]

    draws = torch.stack(
        [shapleyfl_estimators.algorithm_3(utility, 6, 5, torch.Generator().manual_seed(i)) for i in range(2000)]
    )
    away = (draws.mean(0) - exact_shapley(utility, 6).values) / (draws.std(0) / len(draws) ** 0.5)
    assert float(away.abs().max()) < 4.5
    assert sum(asked[:2]) == shapleyfl_estimators.evaluations("DMC, algorithm 3", 6, 5) == 50
    assert [shapleyfl_estimators.evaluations(name, 20, 80) for name in ("MC", "DMC, algorithm 3")] == [1600, 2888]


def test_errors_of_estimators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapleyfl_estimators, "PERMUTATIONS", (8, 64))
    monkeypatch.setattr(shapleyfl_estimators, "DRAWS", 3)
    cell = of("estimators, Fashion-MNIST", [0])[0]
    five = {"num_clients": 6, "shards_per_client": 3, "seed": 0}
    partitioner = {"class_path": "flsv.data.ShardPartitioner", "init_args": five}
    overrides = {**cell.overrides, **DIGITS, "data.partitioner": partitioner}
    result = shapleyfl_estimators.errors(replace(cell, overrides=overrides), "data")
    found = result["errors"]
    for key in ("sampled", "referenced"):
        assert set(result[key]) == set(shapleyfl_estimators.SAMPLED)
        assert all(many < few for name, (few, many) in result[key].items() if name != "TMC")
    assert result["sampled"]["MC"] != result["referenced"]["MC"]
    assert set(found) == set(shapleyfl_estimators.ESTIMATORS)
    for name, (few, many) in found.items():
        # 384 distinct coalitions are all there are; a truncated walk stays away from some of them.
        assert many <= few + 1e-9 if name != "TMC" else many < 0.1
    assert found["MC"][1] == pytest.approx(0, abs=1e-6)
    text = "\n".join(shapleyfl_estimators.report({("all", "estimators, digits", s): result for s in (0, 1)}))
    assert "| 8 permutations | 64 permutations |" in text
    assert text.count("| DMC, algorithm 3 |") == 7
    assert "the paper's reference" in text
