"""What crosses to the server with privacy, and the end of the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import Plain, fit, network, toy_data, trainer_for

from flsv.aggregation import FedAvg
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import PrivacyLoss
from flsv.personalization import Personalizer
from flsv.privacy import GaussianPrivacy, gaussian_epsilon
from flsv.round import Round
from flsv.sampling import UniformSampler
from flsv.seeding import generator_for
from flsv.uploads import TopK


class Watch(FedAvg):
    """Keeps the rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[Round] = []

    def aggregate(self, round: Round, contributions: Any) -> Any:
        self.rounds.append(round)
        return super().aggregate(round, contributions)


def plain() -> Plain:
    return Plain(network(batch_norm=False))


def updates(loop: FederatedLoop, folder: Path, rounds: int = 1) -> Tensor:
    fit(loop, folder, plain(), rounds=rounds)
    assert isinstance(loop.aggregator, Watch)
    return loop.aggregator.rounds[-1].client_updates


def test_the_server_sees_clipped_updates_with_each_clients_own_noise(tmp_path: Path) -> None:
    free = updates(FederatedLoop(Watch(), seed=5), tmp_path / "free")
    assert (free.norm(dim=1) > 0.2).all()
    sent = updates(FederatedLoop(Watch(), uploads=[GaussianPrivacy(0.2, 3.0)], seed=5), tmp_path / "private")
    for client in range(3):
        clipped = free[client] * 0.2 / free[client].norm()
        noise = torch.randn(free.shape[1], generator=generator_for(5, "privacy", 0, client))
        torch.testing.assert_close(sent[client], clipped + 0.2 * 3.0 * noise, atol=1e-5, rtol=1e-4)


class Watching(Personalizer):
    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.own: list[list[torch.Tensor]] = []

    def personalize(self, round: Round, contributions: Any, models: Any) -> dict[int, torch.Tensor]:
        assert round.clients is not None
        self.rounds.append(round)
        self.own.append([client.ask(lambda local: local.model.clone()) for client in round.clients])  # type: ignore[union-attr]
        return {i: vector + 1 for i, vector in zip(round.client_ids.tolist(), round.client_vectors)}


def test_what_leaves_a_client_is_clipped_and_what_it_keeps_is_not(tmp_path: Path) -> None:
    watching = Watching()
    privacy = GaussianPrivacy(clip=0.05, noise_multiplier=0.0)
    fit(FederatedLoop(personalizer=watching, uploads=[privacy], seed=1), tmp_path, plain(), rounds=2)
    for round, own in zip(watching.rounds, watching.own):
        steps = round.client_vectors - round.global_vector
        # The second round's clients start far from the global model: their own start points count as secrets, too.
        torch.testing.assert_close(steps.norm(dim=1), torch.full((3,), 0.05))
        kept = torch.stack(own) - round.global_vector
        assert (kept.norm(dim=1) > 0.1).all()
        torch.testing.assert_close(torch.cosine_similarity(kept, steps), torch.ones(3))


def test_it_stops_before_the_budget_is_exceeded(tmp_path: Path) -> None:
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=2.0, max_epsilon=4.0)
    assert privacy.affordable_rounds() == 3
    loop = FederatedLoop(uploads=[privacy], seed=0)
    with pytest.warns(UserWarning, match=r"stops after 3 rounds: client 0 has spent epsilon = 3\.709 in 3 rounds"):
        fit(loop, tmp_path, plain(), rounds=10)
    assert loop.round_index == 3
    torch.testing.assert_close(loop.contributions["epsilon"], torch.full((3,), gaussian_epsilon(2.0, 3)))
    rows = (tmp_path / "contributions.csv").read_text()
    assert "2,epsilon,0,,3.70" in rows
    assert "2,epsilon/affordable,0,,0" in rows


def test_whoever_took_part_most_ends_it(tmp_path: Path) -> None:
    loop = FederatedLoop(sampler=UniformSampler(1), uploads=[GaussianPrivacy(1.0, 2.0, max_epsilon=3.0)], seed=1)
    with pytest.warns(UserWarning, match="training stops"):
        fit(loop, tmp_path, plain(), rounds=30)
    assert isinstance(loop.metrics["epsilon"], PrivacyLoss)
    taken = loop.metrics["epsilon"].participations
    assert int(taken.max()) == 2
    assert int(taken.sum()) == loop.round_index


@pytest.mark.parametrize("how", ["resumed", "min_epochs"])
def test_a_spent_budget_stays_spent(tmp_path: Path, how: str) -> None:
    def loop() -> FederatedLoop:
        return FederatedLoop(uploads=[GaussianPrivacy(1.0, 2.0, max_epsilon=3.0)], seed=0)

    if how == "min_epochs":
        with pytest.warns(UserWarning, match="stops"), pytest.raises(ConfigurationError, match="no budget for"):
            fit(loop(), tmp_path, plain(), rounds=5, min_epochs=4)
        return
    first = loop()
    trainer = trainer_for(first, tmp_path, 2)
    module = plain()
    trainer.fit(module, toy_data())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.raises(ConfigurationError, match="no budget for another round: client 0 has spent"):
        fit(loop(), tmp_path, plain(), rounds=5, ckpt_path=tmp_path / "two.ckpt")


def test_noise_is_always_accounted_for() -> None:
    privacy = GaussianPrivacy(clip=1.0, noise_multiplier=1.0)
    assert list(FederatedLoop(uploads=[TopK(0.1)]).metrics) == []
    assert list(FederatedLoop(uploads=[privacy, TopK(0.1)]).metrics) == ["epsilon"]
