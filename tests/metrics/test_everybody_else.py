"""EverybodyElse by hand, and from sums of updates only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judging import Sigmoid
from resuming import assert_resumes
from toys import Plain, fit, network, toy_data

from flsv import Reporting
from flsv.aggregation import FedAvg
from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ContributionEstimation, ContributionMetric, CosineGradientShapley, EverybodyElse
from flsv.parameters import ParameterSpace
from flsv.participants import Channel, Client, LocalData, NoAnswer
from flsv.round import Round
from flsv.server.contribution_metrics import ContributionMetrics


def data(**kwargs: Any) -> FederatedDataModule:
    return toy_data(**{"client_val": 0.3, **kwargs})


class Kept(FedAvg):
    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[Round] = []

    def end_round(self, round: Round) -> None:
        self.rounds.append(round)


def loss(vector: torch.Tensor, dealt: FederatedDataModule, client: int) -> float:
    module = Plain(network(batch_norm=False))
    ParameterSpace(module).write(module, vector)
    module.eval()
    with torch.no_grad():
        parts = [
            torch.nn.functional.cross_entropy(module(x), y, reduction="none")
            for x, y in dealt.client_loader(client, "val", shuffle=False)
        ]
    return float(torch.cat(parts).mean())


def test_a_federation_by_hand(tmp_path: Path) -> None:
    aggregator, dealt = Kept(), data()
    loop = FederatedLoop(
        aggregator, {"ee": EverybodyElse(performance="negative_loss")}, seed=1, reporting=Reporting(table=False)
    )
    fit(loop, tmp_path, Plain(network(batch_norm=False)), dealt, rounds=2)
    total = torch.zeros(3, dtype=torch.float64)
    for round in aggregator.rounds:
        samples = round.num_samples.double()
        gains = []
        for j in range(3):
            others = [i for i in range(3) if i != j]
            model = (samples[others] / samples[others].sum()) @ round.client_vectors[others].double()
            gains.append(loss(round.global_vector, dealt, j) - loss(model.float(), dealt, j))
        total += torch.tensor([sum(gains[j] for j in range(3) if j != i) / 2 for i in range(3)])
    torch.testing.assert_close(loop.contributions["ee"].double(), total, atol=1e-5, rtol=0)
    assert total.max() - total.min() > 0.01


def a_round(models: torch.Tensor, masks: torch.Tensor) -> tuple[Round, Channel]:
    """Clients that have trained ``models [k, P]`` and send them with ``masks [k, P]`` on top."""
    k, size = models.shape
    channel, clients = Channel(), []
    counts = torch.tensor([4, 4])
    start = 0.1 * torch.arange(size).to(models)
    for i in range(k):
        local = LocalData(f"client {i}", lambda split: [], counts, k * counts, evaluator=lambda batches: Sigmoid)
        local.visit(start, models[i])
        clients.append(Client(i, local, channel))
    space = ParameterSpace(torch.nn.Linear(size - 1, 1).double())
    samples = torch.tensor([10, 30, 40, 20])[:k]
    round = Round(0, torch.arange(k), samples, start, models + masks, space, clients=tuple(clients), channel=channel)
    vector, weights = FedAvg().aggregate(round, {})
    return round.aggregated(vector, weights), channel


def pairwise_masks(samples: torch.Tensor, size: int) -> torch.Tensor:
    """Bonawitz et al. 2017: every pair agrees on a mask, one adds it and the other takes it off its part of the sum."""
    draw, k = torch.Generator().manual_seed(5), len(samples)
    masks = torch.zeros(k, size, dtype=torch.float64)
    for i in range(k):
        for j in range(i + 1, k):
            agreed = 100 * torch.randn(size, generator=draw, dtype=torch.float64)
            masks[i] += agreed / samples[i]
            masks[j] -= agreed / samples[j]
    return masks


def valued(metric: ContributionMetric, round: Round) -> torch.Tensor:
    board = ContributionMetrics({"metric": metric})
    board.bind(len(round), 2, None)
    for stage in ("training", "aggregation"):
        board.update(round, stage)  # type: ignore[arg-type]
    return board.contributions["metric"]


def test_the_server_is_given_sums_only() -> None:
    """With every single update hidden behind masks that cancel in the sum, the values are the same."""
    models = torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    masks = pairwise_masks(torch.tensor([10, 30, 40, 20]), 6)
    plain, channel = a_round(models, torch.zeros(4, 6))
    hidden, _ = a_round(models, masks)
    assert ((hidden.client_vectors - models).norm(dim=1) > 3 * models.norm(dim=1)).all()
    torch.testing.assert_close(hidden.server_vector, plain.server_vector)
    torch.testing.assert_close(valued(EverybodyElse(), hidden), valued(EverybodyElse(), plain))
    # What crosses: the sum comes down, and one number goes up.
    assert channel.names() == {("down", "leave_self_out"), ("up", "leave_self_out")}
    assert channel.numbers(range(4), "down").tolist() == [6] * 4
    assert channel.numbers(range(4), "up").tolist() == [1] * 4
    # Whoever looks at single updates sees the masks.
    for other in (CosineGradientShapley, ContributionEstimation):
        assert (valued(other(), plain) - valued(other(), hidden)).abs().max() > 0.01


def test_the_metric_has_no_word_for_a_single_update() -> None:
    (fields,) = ContributionMetrics({"ee": EverybodyElse()}).fields.values()
    assert set(fields) == {"client_ids", "aggregation_weights", "aggregate", "clients", "sum_weight"}
    assert {field for field in fields.values() if isinstance(field, str)} == {
        "client_ids",
        "aggregation_weights",
        "clients",
        "sum_weight",
    }


def test_values_sum_to_the_gains_and_nobody_judges_itself() -> None:
    models = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    round, _ = a_round(models, torch.zeros(4, 6))
    metric = EverybodyElse()
    value = valued(metric, round)
    torch.testing.assert_close(value.sum(), metric.diagnostics()["gain"].sum())
    before = value[2].clone()
    assert round.clients is not None
    round.clients[2].ask(lambda local: local._evaluators.update({("val", None): lambda m: Sigmoid(-9 * m)}))
    after = valued(EverybodyElse(), round)
    assert after[2] == before  # its own report is not in it
    assert (after[[0, 1, 3]] != value[[0, 1, 3]]).all()


def test_alone_nobody_gains() -> None:
    round, _ = a_round(torch.ones(1, 4, dtype=torch.float64), torch.zeros(1, 4))
    metric = EverybodyElse(num_clients=2)
    assert round.clients is not None
    metric.update(torch.tensor([0]), torch.ones(1), round.client_vectors[0], round.clients)
    assert metric.compute()[0] == 0
    assert metric.compute()[1].isnan()


def test_any_task(tmp_path: Path) -> None:
    class Logs(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", torch.nn.functional.cross_entropy(self(x), y))

    values = []
    for options in ({"performance": "negative_loss"}, {"performance": "val_loss", "mode": "min"}):
        loop = FederatedLoop(FedAvg(), {"ee": EverybodyElse(**options)}, seed=1, reporting=Reporting(table=False))  # type: ignore[arg-type]
        fit(loop, tmp_path, Logs(network(batch_norm=False)), data(), rounds=2)
        values.append(loop.contributions["ee"])
    torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=0)
    loop = FederatedLoop(FedAvg(), {"ee": EverybodyElse(performance="val_loss", mode="min")})
    with pytest.raises(ConfigurationError, match="val_loss"):
        fit(loop, tmp_path, data=data())  # which does not log it; said before the first round
    assert loop.round_index == 0


def test_it_resumes(tmp_path: Path) -> None:
    def make() -> FederatedLoop:
        return FederatedLoop(FedAvg(), {"ee": EverybodyElse()}, seed=2)

    whole = assert_resumes(make, tmp_path, data=lambda: data(proportions=(4, 2, 2), batch_size=6))
    assert whole.contributions["ee"].isfinite().all()


def test_what_no_value_can_be_made_of() -> None:
    round, _ = a_round(torch.ones(2, 4, dtype=torch.float64), torch.zeros(2, 4))
    assert round.clients is not None
    given = torch.arange(2), round.client_vectors.mean(0), round.clients
    with pytest.raises(ValueError, match="a weight below 0 cannot be taken out"):
        EverybodyElse(2).update(given[0], torch.tensor([1.5, -0.5]), *given[1:])
    broken = lambda models: Sigmoid(models * torch.nan)  # noqa: E731
    round.clients[1].ask(lambda local: local._evaluators.update({("val", None): broken}))
    with pytest.raises(ValueError, match=r"not finite on the validation samples of clients \[1\]"):
        EverybodyElse(2).update(given[0], torch.ones(2), *given[1:])


class Silent(Client):
    def ask(self, *args: Any, **kwargs: Any) -> Any:
        raise NoAnswer(f"client {self.id} is away.")


def test_what_a_client_has_not_told_is_no_gain_of_0() -> None:
    class Scores:
        def __init__(self, models: torch.Tensor) -> None:
            self.models = models

        def value(self, metric: str) -> torch.Tensor:
            return self.models[:, 0].double()

    clients: list[Client] = []
    for i, model in enumerate([0.6, 0.8, 0.4]):
        own = LocalData(f"client {i}", lambda split: [], torch.tensor([4]), torch.tensor([12]), lambda batches: Scores)
        own.visit(torch.zeros(1), torch.tensor([model]))
        clients.append((Silent if i == 1 else Client)(i, own))
    metric = EverybodyElse(num_clients=4)
    with pytest.warns(UserWarning, match="client 1 is away"):
        metric.update(torch.arange(3), torch.full((3,), 1 / 3), torch.tensor([0.6]), clients)
    assert metric.compute().isnan().tolist() == [False, False, False, True]  # the others have told what they gain
    gain = metric.diagnostics()["gain"]
    assert gain.isnan().tolist() == [False, True, False, True]
