"""Attacks by their numbers, to whom they are applied, from which randomness; in federations: tests/replay."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flsv import ClientEvaluation
from flsv.aggregation import FedAvg
from flsv.attacks import (
    Alignment,
    Attack,
    Collusion,
    FalseReports,
    FreeRider,
    GradientPoisoning,
    InnerProductManipulation,
    Scaling,
    SignFlip,
)
from flsv.benchmark.registry import TrainingLoss
from flsv.core import Round
from flsv.federation import FederatedLoop
from flsv.metrics import CommunicationCost
from flsv.personalization import Standalone
from flsv.privacy import GaussianPrivacy
from flsv.uploads import TopK, UploadContext
from flsv.utilities.errors import ConfigurationError
from helpers.data import toy_data
from helpers.fits import fit, vector
from helpers.models import Plain, network

SIZE = 100_000

UPDATE = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)) * 0.01
SHORT = UPDATE[:50]


def sent(attack, seed=7):
    return attack.attack(UPDATE, None, torch.Generator().manual_seed(seed))


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0).item()


def test_gradient_poisoning_multiplies_every_entry_by_its_own_uniform_factor():
    factor = (sent(GradientPoisoning()).double() / UPDATE.double()).numpy()
    assert (factor.min(), factor.max()) == pytest.approx((0.5, 1.5), abs=1e-3)
    # U[0.5, 1.5]: every tenth of the range has a tenth of the entries (standard deviation 95 of 10,000).
    assert np.abs(np.histogram(factor, bins=10, range=(0.5, 1.5))[0] - SIZE / 10).max() < 5 * 95
    assert abs(np.corrcoef(factor, UPDATE)[0, 1]) < 0.02
    # A range that is not centered scales as well: E[1 + b] = 3.
    assert (sent(GradientPoisoning(1, 3)) / UPDATE).mean().item() == pytest.approx(3, abs=0.01)


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_free_rider_noise_has_the_norm_of_an_update_times_the_scale(scale):
    noise = sent(FreeRider("noise", scale=scale))
    assert (noise.norm() / UPDATE.norm()).item() == pytest.approx(scale, rel=1e-4)
    # Independent directions have a cosine of about 1 / sqrt(P) = 0.003.
    assert abs(cosine(noise, UPDATE)) < 0.015
    assert abs(cosine(noise, sent(FreeRider("noise", scale=scale), seed=1))) < 0.015


def send(attacks, update=SHORT, client=0, num_clients=5, num_parameters=None, round_index=0):
    context = UploadContext(
        client, num_clients, len(update) if num_parameters is None else num_parameters, round_index
    )
    for position, attack in enumerate(attacks):
        update = attack.apply(update, replace(context, position=position))
    return update


def test_attack_changes_only_the_chosen_clients_updates():
    attack = SignFlip(fraction=0.4, seed=3)
    changed = [
        client for client in range(5) if not torch.equal(send([attack], client=client), SHORT)
    ]
    assert changed == attack.chosen(5)
    honest = next(client for client in range(5) if client not in changed)
    assert send([attack], client=honest) is SHORT
    assert send([]) is SHORT


@pytest.mark.parametrize("attack", [GradientPoisoning(), FreeRider("noise")])
def test_noise_depends_on_seed_round_and_client(attack):
    first = send([attack])
    assert torch.equal(first, send([attack]))
    again = type(attack)(seed=1)
    again.mode = getattr(attack, "mode", None)
    for other in (send([attack], round_index=1), send([attack], client=1), send([again])):
        assert not torch.equal(first, other)


def test_several_attacks_are_applied_in_order_with_independent_noise():
    assert torch.equal(send([Scaling(3.0), SignFlip()]), SHORT * 3 * -1)
    once, twice = (send([GradientPoisoning()] * times) / SHORT for times in (1, 2))
    assert not torch.allclose(once**2, twice)
    buffers = send([FreeRider()], num_parameters=40)[40:]
    assert not buffers.any()  # it has not trained
    assert torch.equal(send([Scaling(3.0)], num_parameters=40)[40:], SHORT[40:])


def test_custom_attack_that_changes_the_shape_is_refused():
    class Short(Attack):
        def attack(self, update, context, generator):
            return update[1:]

    with pytest.raises(ConfigurationError, match=r"made \[49\] out of an update \[50\]"):
        send([Short()])


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_false_reports_change_the_reported_loss_only(tmp_path: Path, engine: str) -> None:
    def run(attacks: list[Attack]) -> tuple[Tensor, Tensor]:
        loop = FederatedLoop(metrics={"m": TrainingLoss()}, uploads=attacks, seed=1, engine=engine)
        module = fit(loop, tmp_path / str(len(attacks)), Plain(network(batch_norm=False)), rounds=2)
        return loop.contributions["m"], vector(module)

    (honest, model), (told, same) = run([]), run([FalseReports(loss=0.001, clients=[1])])
    assert told[1] == pytest.approx(-0.001)
    assert honest[1] < -0.01
    assert torch.equal(told[[0, 2]], honest[[0, 2]])
    assert torch.equal(model, same)


# ---- Updates that go where the server went last


def context(state: dict[str, torch.Tensor], start: torch.Tensor, client: int = 1) -> UploadContext:
    return UploadContext(client, 3, num_parameters=3, round_index=1, state=state, start=start)


def test_alignment_mixes_own_direction_with_the_servers_last_step() -> None:
    state: dict[str, torch.Tensor] = {}
    attack = Alignment(mix=0.5)
    update = torch.tensor([0.0, 3.0, 4.0, 9.0])  # the last is a buffer
    assert torch.equal(attack.apply(update, context(state, torch.zeros(4))), update)
    sent = attack.apply(update, context(state, torch.tensor([2.0, 0.0, 0.0, 5.0])))
    assert sent[:3].norm().item() == pytest.approx(5)
    assert sent[3] == 9
    expected = torch.tensor([1.0, 0.6, 0.8]) / 2**0.5 * 5
    torch.testing.assert_close(sent[:3], expected)
    # The step is counted from when it last took part.
    torch.testing.assert_close(state["attack.0.start"], torch.tensor([2.0, 0.0, 0.0]))


def test_alignment_without_a_direction_leaves_the_update_finite() -> None:
    still = {"attack.0.start": torch.ones(3)}
    update = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(Alignment().apply(update, context(dict(still), torch.ones(3))), update)
    assert not Alignment().apply(torch.zeros(3), context(dict(still), torch.zeros(3))).any()
    opposite = Alignment(mix=0.5).apply(
        torch.tensor([1.0, 0.0, 0.0]), context(still, torch.tensor([0.0, 1.0, 1.0]))
    )
    assert opposite.isfinite().all()


def test_alignment_with_mix_1_sends_the_servers_last_step_direction(tmp_path: Path) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Seen(Alignment):
        def attack(self, update, context, generator):
            seen.append((context.start.clone(), super().attack(update, context, generator)))
            return seen[-1][1]

    fit(FederatedLoop(uploads=[Seen(mix=1.0, clients=[1])], seed=1), tmp_path, rounds=3)
    (first, _), (second, sent), (third, last) = seen
    for got, step in ((sent, second - first), (last, third - second)):
        cosine = torch.nn.functional.cosine_similarity(got, step[: len(sent)], dim=0)
        assert cosine.item() == pytest.approx(1, abs=1e-5)


# ---- Attackers who look at each other's updates, against loops written from the papers


UPDATES = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))


class Quarter(Collusion):
    def collude(
        self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator
    ) -> Tensor:
        self.seen = [*getattr(self, "seen", []), updates.clone()]
        return updates.mean(0) / 4


def run(folder: Path, *uploads: Any, **options: Any) -> FederatedLoop:
    loop = FederatedLoop(
        uploads=list(uploads), metrics={"cost": CommunicationCost()}, seed=1, **options
    )
    fit(loop, folder, data=toy_data((4, 3, 4, 3)), rounds=1)
    return loop


class Asks(FedAvg):
    needs = ("clients",)

    def weights(self, round: Round, contributions: Any) -> torch.Tensor:
        self.said = torch.stack([client.ask(lambda local: local.sent) for client in round.clients])
        self.came = torch.stack(
            [round.global_vector + round.matrix.update(i) for i in range(len(round))]
        )
        return super().weights(round, contributions)


def test_colluders_keep_their_trained_models_and_answer_with_the_sent_updates(
    tmp_path: Path,
) -> None:
    asks, keep = Asks(), {"evaluation": ClientEvaluation(every=1, models="trained")}
    honest = run(tmp_path / "honest", **keep)
    loop = run(tmp_path / "attacked", Quarter(clients=[1, 2]), aggregator=asks, **keep)
    torch.testing.assert_close(asks.said, asks.came)
    for client in range(4):
        assert torch.equal(loop.trained[client], honest.trained[client])


def test_colluders_come_last_and_send_dense_updates(tmp_path: Path) -> None:
    attack = Quarter(clients=[0], knows="all")
    loop = run(tmp_path, TopK(0.1), attack)
    uploaded = loop.contributions["cost"].by_class[:, 0]
    assert uploaded[0] == loop.space.size
    assert uploaded[1] < loop.space.size / 2
    assert (attack.seen[0] == 0).float().mean() > 0.5  # what the others are about to send
    with pytest.raises(ConfigurationError, match="then collusion"):
        FederatedLoop(uploads=[attack, GaussianPrivacy(1.0, 1.0)])


def test_collusion_with_wrong_arguments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="colluders need updates that all start from the global model"
    ):
        FederatedLoop(uploads=[InnerProductManipulation()], personalizer=Standalone())

    class Short(Collusion):
        def collude(
            self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator
        ) -> Tensor:
            return updates[:, :2]

    with pytest.raises(ConfigurationError, match=r"made \[1, 2\]; expected \[40\] or \[1, 40\]"):
        Short(clients=[1]).sent(range(7), UPDATES, 7, 0)
