"""How attacks are applied: to whom, to what, and from which randomness."""

import pytest
import torch
from torch import nn

from flsv.attacks import Attack, FreeRider, GradientPoisoning, Scaling, SignFlip
from flsv.errors import ConfigurationError
from flsv.parameters import ParameterSpace
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


def test_the_update_itself_is_not_changed():
    before = UPDATE.clone()
    for attack in (SignFlip(), Scaling(), FreeRider(), FreeRider("noise"), GradientPoisoning()):
        send([attack])
        assert torch.equal(UPDATE, before)


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


def test_buffers_are_left_alone():
    for attack in (SignFlip(), Scaling(5.0), GradientPoisoning()):
        sent = send([attack], num_parameters=40)
        assert torch.equal(sent[40:], UPDATE[40:])
        assert not torch.equal(sent[:40], UPDATE[:40])
    # Who does not train has no new statistics.
    for mode in ("zero", "noise"):
        assert not send([FreeRider(mode)], num_parameters=40)[40:].any()


def test_a_model_with_batch_norm_stays_usable():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    space = ParameterSpace(net)
    start = space.read(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = 10 * torch.randn(64, 4)
    for _ in range(20):
        loss = net(x).logsumexp(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    update = space.read(net) - start
    for attack in (SignFlip(10), Scaling(10), FreeRider("noise", 10), GradientPoisoning(-5, 5)):
        space.write(net, start + send([attack], update, num_parameters=space.num_parameters))
        assert (net[1].running_var > 0).all()
        assert net.eval()(x).isfinite().all()


def test_double_updates_stay_double():
    for attack in (SignFlip(), Scaling(), FreeRider("noise"), GradientPoisoning()):
        assert send([attack], UPDATE.double()).dtype == torch.float64


def test_an_attack_of_ones_own_keeps_the_shape():
    class Short(Attack):
        def attack(self, update, context, generator):
            return update[1:]

    with pytest.raises(ConfigurationError, match=r"made \[49\] out of an update \[50\]"):
        send([Short()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FreeRider("sleep"), 'expected "zero" or "noise"'),
        (lambda: FreeRider("noise", scale=0), "scale=.*expected a finite number above 0"),
        (lambda: SignFlip(scale=-1), "scale=.*expected a finite number above 0"),
        (lambda: Scaling(float("inf")), "factor=inf.*expected a finite number"),
        (lambda: GradientPoisoning(0.5, -0.5), "expected high=-0.5 to be above low=0.5"),
        (lambda: GradientPoisoning(0.5, 0.5), "expected high=0.5 to be above low=0.5"),
        (lambda: SignFlip(fraction=2), r"in \[0, 1\]"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
