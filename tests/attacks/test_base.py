"""How attacks are applied: to whom, to what, and from which randomness."""

import pytest
import torch

from flsv.attacks import Attack, FreeRider, GradientPoisoning, Scaling, SignFlip
from flsv.errors import ConfigurationError
from flsv.uploads import UploadContext

UPDATE = torch.randn(50, generator=torch.Generator().manual_seed(0))


def send(attacks, update=UPDATE, client=0, num_clients=5, num_parameters=None, round_index=0):
    context = UploadContext(client, num_clients, len(update) if num_parameters is None else num_parameters, round_index)
    for position, attack in enumerate(attacks):
        update = attack.apply(update, context.at(position))
    return update


def test_only_the_chosen_clients_are_concerned():
    attack = SignFlip(fraction=0.4, seed=3)
    changed = [client for client in range(5) if not torch.equal(send([attack], client=client), UPDATE)]
    assert changed == attack.chosen(5)
    honest = next(client for client in range(5) if client not in changed)
    assert send([attack], client=honest) is UPDATE
    assert send([]) is UPDATE


@pytest.mark.parametrize("attack", [GradientPoisoning(), FreeRider("noise")])
def test_noise_depends_on_seed_round_and_client(attack):
    first = send([attack])
    assert torch.equal(first, send([attack]))
    again = type(attack)(seed=1)
    again.mode = getattr(attack, "mode", None)
    for other in (send([attack], round_index=1), send([attack], client=1), send([again])):
        assert not torch.equal(first, other)


def test_attacks_act_in_turn_and_draw_apart():
    assert torch.equal(send([Scaling(3.0), SignFlip()]), UPDATE * 3 * -1)
    once, twice = send([GradientPoisoning()]) / UPDATE, send([GradientPoisoning(), GradientPoisoning()]) / UPDATE
    assert not torch.allclose(once**2, twice)
    assert not send([GradientPoisoning(), FreeRider()]).any()


def test_an_attack_of_ones_own_keeps_the_shape():
    class Short(Attack):
        def attack(self, update, context, generator):
            return update[1:]

    with pytest.raises(ConfigurationError, match=r"made \[49\] out of an update \[50\]"):
        send([Short()])
