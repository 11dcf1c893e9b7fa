"""OneRoundShapley: models rebuilt from all rounds, against keeping every update."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import Plain, fit, network, toy_data, validation_loss

from flsv import ConfigurationError
from flsv.aggregation import FedAvg
from flsv.functional import exact_shapley
from flsv.games import Renormalized
from flsv.loop import FederatedLoop
from flsv.metrics import OneRoundShapley
from flsv.report import write_report
from flsv.sampling import UniformSampler


class Remember(FedAvg):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rounds: list[Any] = []

    def weights(self, round: Any, contributions: Any) -> torch.Tensor:
        self.rounds.append((round, super().weights(round, contributions)))
        return self.rounds[-1][1]


class Watch:
    def __init__(self) -> None:
        self.tables: list[torch.Tensor] = []

    def __call__(self, utility: Any, players: int, generator: Any = None) -> Any:
        self.tables.append(utility(torch.tensor(list(product([False, True], repeat=players)))))
        return exact_shapley(utility, players)


@pytest.mark.parametrize("kind", ["fixed", "renormalized"])
@pytest.mark.parametrize("server_lr", [1.0, 0.7])
def test_models_are_the_initial_one_plus_the_members_updates(tmp_path: Path, kind: Any, server_lr: float) -> None:
    """Algorithm 1 of Song et al. 2019, with all updates of all rounds kept."""
    watch, remember, data = Watch(), Remember(server_lr=server_lr), toy_data((3, 2, 2), server_val=0.3)
    metric = OneRoundShapley(3, estimator=watch, performance="negative_loss", coalition_weights=kind)
    loop = FederatedLoop(remember, {"or": metric}, seed=4)
    module = fit(loop, tmp_path, Plain(network(batch_norm=False)), data, rounds=3)
    (table,) = watch.tables
    final = loop.space.read(module)
    assert table[-1].item() == pytest.approx(-validation_loss(module, loop.space, final, data), abs=1e-5)
    for mask, utility in zip(product([False, True], repeat=3), table.tolist()):
        model = remember.rounds[0][0].global_vector.clone()
        for round, weights in remember.rounds:
            own = weights * torch.tensor(mask)
            if kind == "renormalized" and own.sum() > 0:
                own = own / own.sum()
            model += server_lr * own.float() @ (round.client_vectors - round.global_vector)
        assert -validation_loss(module, loop.space, model, data) == pytest.approx(utility, abs=1e-5)


def test_fixed_weights_are_exact_when_the_cohort_changes(tmp_path: Path) -> None:
    watch, remember, data = Watch(), Remember(), toy_data((3, 2, 2), server_val=0.3)
    metric = OneRoundShapley(4, estimator=watch, performance="negative_loss", coalition_weights="fixed")
    loop = FederatedLoop(remember, {"or": metric}, sampler=UniformSampler(2), seed=4)
    module = fit(loop, tmp_path, Plain(network(batch_norm=False)), data, rounds=4)
    for mask, utility in zip(product([False, True], repeat=3), watch.tables[0].tolist()):
        model = remember.rounds[0][0].global_vector.clone()
        for round, weights in remember.rounds:
            own = weights * torch.tensor(mask)[round.client_ids]
            model += own.float() @ (round.client_vectors - round.global_vector)
        assert -validation_loss(module, loop.space, model, data) == pytest.approx(utility, abs=1e-5)


def test_nothing_is_evaluated_before_the_last_round(tmp_path: Path) -> None:
    watch = Watch()
    loop = FederatedLoop(metrics={"or": OneRoundShapley(3, estimator=watch)}, seed=0)
    with pytest.warns(UserWarning, match=r"rounds=3\) plays its game after 3 rounds, and the run has max_epochs=2"):
        fit(loop, tmp_path, data=toy_data(server_val=0.3), rounds=2)
    (folder,) = (path.parent for path in tmp_path.rglob("run.json"))
    assert "Nobody has a value by or: its rounds have not come yet" in write_report(folder).read_text()
    assert not watch.tables
    assert loop.contributions["or"].isnan().all()
    assert loop.metrics["or"].diagnostics()["evaluations"] == 0


def test_batch_norms_buffers_are_the_global_models(tmp_path: Path) -> None:
    """Their changes are not added up: a running variance could become negative."""
    metric = OneRoundShapley(3, performance="negative_loss")
    loop = FederatedLoop(metrics={"or": metric}, seed=0)
    fit(loop, tmp_path, Plain(network(batch_norm=True)), toy_data(server_val=0.3), rounds=3)
    assert loop.contributions["or"].isfinite().all()


def test_weights_of_zero() -> None:
    calls = []

    def game(start: torch.Tensor, updates: torch.Tensor, weights: Any) -> Any:
        calls.append((start, updates, weights))
        return lambda masks: masks.float().sum(1)

    metric = OneRoundShapley(2, num_clients=4)
    for index in range(2):
        updates = torch.full((3, 5), float(index + 1))
        weights = torch.tensor([0.5, 0.5 * index, 0.0])
        metric.update(torch.tensor([0, 2, 3]), index, torch.full((5,), 7.0 + index), updates, weights, game)
    ((start, updates, weights),) = calls
    assert isinstance(weights, Renormalized)
    assert weights.weights.tolist() == [0.5, 0, 0.25, 0]
    assert start.tolist() == [7] * 5
    assert updates[:, 0].tolist() == [3, 0, 4, 0]  # (0.5 + 1)/0.5, nobody, 1/0.25, nothing
    assert metric.compute().isnan().tolist() == [False, True, False, False]


def test_errors() -> None:
    with pytest.raises(ConfigurationError, match=r"rounds=0\): expected a whole number of at least 1"):
        OneRoundShapley(0)
    with pytest.raises(ConfigurationError, match='"renormalized" or "fixed"'):
        OneRoundShapley(3, coalition_weights="mean")  # type: ignore[arg-type]
    metric = OneRoundShapley(3, num_clients=2)
    with pytest.raises(ValueError, match="has not seen round 0"):
        metric.update(torch.arange(2), 1, torch.zeros(4), torch.zeros(2, 4), torch.ones(2), lambda *_: None)
