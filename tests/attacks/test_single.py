"""Attacks of one client: by their numbers, to whom they are applied, and from which randomness."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from toys import Plain, fit, network, vector

from flsv.attacks import Attack, FalseReports, FreeRider, GradientPoisoning, Scaling, SignFlip
from flsv.benchmark.registry import TrainingLoss
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.uploads import UploadContext

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
def test_a_free_rider_that_sends_noise_of_a_typical_norm(scale):
    noise = sent(FreeRider("noise", scale=scale))
    assert (noise.norm() / UPDATE.norm()).item() == pytest.approx(scale, rel=1e-4)
    # Independent directions have a cosine of about 1 / sqrt(P) = 0.003.
    assert abs(cosine(noise, UPDATE)) < 0.015
    assert abs(cosine(noise, sent(FreeRider("noise", scale=scale), seed=1))) < 0.015


def send(attacks, update=SHORT, client=0, num_clients=5, num_parameters=None, round_index=0):
    context = UploadContext(client, num_clients, len(update) if num_parameters is None else num_parameters, round_index)
    for position, attack in enumerate(attacks):
        update = attack.apply(update, context.at(position))
    return update


def test_only_the_chosen_clients_are_concerned():
    attack = SignFlip(fraction=0.4, seed=3)
    changed = [client for client in range(5) if not torch.equal(send([attack], client=client), SHORT)]
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


def test_attacks_act_in_turn_and_draw_apart():
    assert torch.equal(send([Scaling(3.0), SignFlip()]), SHORT * 3 * -1)
    once, twice = (send([GradientPoisoning()] * times) / SHORT for times in (1, 2))
    assert not torch.allclose(once**2, twice)
    buffers = send([FreeRider()], num_parameters=40)[40:]
    assert not buffers.any()  # it has not trained
    assert torch.equal(send([Scaling(3.0)], num_parameters=40)[40:], SHORT[40:])


def test_an_attack_of_ones_own_keeps_the_shape():
    class Short(Attack):
        def attack(self, update, context, generator):
            return update[1:]

    with pytest.raises(ConfigurationError, match=r"made \[49\] out of an update \[50\]"):
        send([Short()])


@pytest.mark.parametrize("engine", ["sequential", "vmap"])
def test_the_loss_is_what_it_says_and_nothing_else_changes(tmp_path: Path, engine: str) -> None:
    def run(attacks: list[Attack]) -> tuple[Tensor, Tensor]:
        loop = FederatedLoop(metrics={"m": TrainingLoss()}, uploads=attacks, seed=1, engine=engine)
        module = fit(loop, tmp_path / str(len(attacks)), Plain(network(batch_norm=False)), rounds=2)
        return loop.contributions["m"], vector(module)

    (honest, model), (told, same) = run([]), run([FalseReports(loss=0.001, clients=[1])])
    assert told[1] == pytest.approx(-0.001)
    assert honest[1] < -0.01
    assert torch.equal(told[[0, 2]], honest[[0, 2]])
    assert torch.equal(model, same)
