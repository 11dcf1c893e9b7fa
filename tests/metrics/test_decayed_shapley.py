"""DecayedShapley: against the function, over merges and restarts, and on the models of a federation's own rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Plain, fit, network, toy_data, validation_loss

from flsv.aggregation import DivergenceWeighted
from flsv.functional import exact_shapley
from flsv.loop import FederatedLoop
from flsv.metrics import DecayedShapley

NAN = float("nan")
ROUNDS = [([0, 1, 2], 1), ([1, 3], 2), ([0, 2, 3], 3), ([0, 1], 4)]


def of_table(table: torch.Tensor) -> Any:
    return lambda masks: table[(masks.long() << torch.arange(masks.shape[1])).sum(1)]


def game(players: int, seed: int) -> Any:
    return of_table(torch.rand(2**players, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def additive(*worth: float) -> Any:
    return lambda masks: masks.float() @ torch.tensor(worth)


def decayed_shapley(
    rows: torch.Tensor, decay: float = 0.8, threshold: float = 0.0, normalize: bool = True
) -> torch.Tensor:
    """The formula, of rounds that gain something, NaN outside the cohort."""
    values = torch.full(rows.shape[1:], NAN, dtype=torch.float64)
    for t, row in enumerate(rows.double(), start=1):
        here = ~row.isnan()
        if decay**t >= threshold:
            total = row[here].sum() if row[here].sum() > 0 else row[here].abs().sum()
            values[here] = values[here].nan_to_num() + decay**t * row[here] / (total if normalize else 1)
    return values


def expected(decay: float, threshold: float = 0.0, normalize: bool = True) -> torch.Tensor:
    rows = torch.full((len(ROUNDS), 5), NAN, dtype=torch.float64)
    for row, (ids, seed) in zip(rows, ROUNDS):
        row[ids] = exact_shapley(game(len(ids), seed), len(ids)).values
    return decayed_shapley(rows, decay, threshold, normalize).float()


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize("normalize", [True, False])
def test_as_the_function(threshold: float, normalize: bool) -> None:
    metric = DecayedShapley(num_clients=5, decay=0.6, threshold=threshold, normalize=normalize)
    for index, (ids, seed) in enumerate(ROUNDS):
        metric.update(torch.tensor(ids), index, game(len(ids), seed))
    torch.testing.assert_close(metric.compute(), expected(0.6, threshold, normalize), equal_nan=True)
    assert metric.compute()[4].isnan()
    assert metric.diagnostics()["evaluations"] == (8 + 4 if threshold else 8 + 4 + 8 + 4)


def test_rounds_are_evaluated_only_above_the_threshold() -> None:
    def never(masks: torch.Tensor) -> torch.Tensor:
        raise AssertionError("evaluated")

    metric = DecayedShapley(num_clients=3, decay=0.5, threshold=0.2)
    for index in range(4):
        metric.update(torch.tensor([0, 1]), index, additive(1.0, 1.0) if index < 2 else never)
    metric.update(torch.tensor([2]), 4, never)
    assert metric.compute().nan_to_num(-1).tolist() == [0.375, 0.375, -1]
    assert metric.diagnostics()["truncated"] == 3
    assert metric.rounds == 5


def test_rounds_without_gain_are_counted() -> None:
    metric = DecayedShapley(num_clients=2, decay=1.0)
    for index, worth in enumerate([(0.0, 0.0), (0.1, -0.3), (0.3, 0.1)]):
        metric.update(torch.arange(2), index, additive(*worth))
    torch.testing.assert_close(metric.compute(), torch.tensor([0.25 + 0.75, -0.75 + 0.25]))
    assert {name: int(value) for name, value in metric.diagnostics().items()} == {
        "evaluations": 12,
        "skipped": 1,
        "flagged": 1,
        "truncated": 0,
    }


# ---- inside a federation


class Watch:
    """An estimator that keeps the round's utilities of all coalitions, in the order of their numbers."""

    def __init__(self) -> None:
        self.tables: list[torch.Tensor] = []

    def __call__(self, utility: Any, players: int, generator: Any = None) -> Any:
        masks = (torch.arange(2**players)[:, None] >> torch.arange(players)) & 1
        self.tables.append(utility(masks.bool()))
        return exact_shapley(utility, players)


class Remember(DivergenceWeighted):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rounds: list[Any] = []

    def weights(self, round: Any, contributions: Any) -> torch.Tensor:
        weights = super().weights(round, contributions)
        self.rounds.append((round, weights))
        return weights


@pytest.mark.parametrize("kind", ["fixed", "renormalized"])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_sub_models_have_the_weights_of_the_rounds_aggregation(tmp_path: Path, kind: Any, server_lr: float) -> None:
    watch, remember = Watch(), Remember(a=0.3, server_lr=server_lr)
    metric = DecayedShapley(decay=0.5, estimator=watch, performance="negative_loss", coalition_weights=kind)
    data = toy_data((3, 2, 2), server_val=0.3)
    loop = FederatedLoop(remember, {"guo": metric}, seed=4)
    # Without BatchNorm, whose buffers are always averages.
    module = fit(loop, tmp_path, Plain(network(batch_norm=False)), data, rounds=2)
    for (round, weights), table in zip(remember.rounds, watch.tables):
        for number, utility in enumerate(table.tolist()):
            members = [i for i in range(3) if number >> i & 1]
            own = weights[members].float()
            if kind == "renormalized" and members:
                own = own / own.sum()
            model = round.global_vector + server_lr * own @ (round.client_vectors - round.global_vector)[members]
            assert -validation_loss(module, loop.space, model, data) == pytest.approx(utility, abs=1e-5)
    # Everybody together is the next global model, which is the next round's empty coalition.
    assert watch.tables[0][-1].item() == pytest.approx(watch.tables[1][0].item(), abs=1e-6)
    rows = [exact_shapley(of_table(table), 3).values for table in watch.tables]
    torch.testing.assert_close(loop.contributions["guo"], decayed_shapley(torch.stack(rows), 0.5).float())


def test_a_client_whose_weight_is_clipped_is_a_null_player(tmp_path: Path) -> None:
    watch = Watch()
    metric = DecayedShapley(estimator=watch, coalition_weights="fixed")
    remember = Remember(a=3.0, b=0.0)
    loop = FederatedLoop(remember, {"guo": metric}, seed=4)
    fit(loop, tmp_path, data=toy_data((3, 2, 2), server_val=0.3), rounds=1)
    weights = remember.rounds[0][1]
    assert 0 < (weights == 0).sum() < 3
    assert (loop.contributions["guo"][weights == 0] == 0).all()
