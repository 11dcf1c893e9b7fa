"""Which clients are concerned, and that corruptions and attacks agree on it."""

import pytest

from flsv.attacks import GradientPoisoning, SignFlip
from flsv.data import ClientChoice, ClosedSetLabelNoise, GaussianNoise
from flsv.errors import ConfigurationError


def test_all_named_or_a_share():
    assert ClientChoice().chosen(4) == [0, 1, 2, 3]
    assert ClientChoice(clients=[3, 1]).chosen(4) == [1, 3]
    assert ClientChoice(clients=[]).chosen(4) == []
    assert ClientChoice(fraction=0).chosen(4) == []
    assert ClientChoice(fraction=1).chosen(4) == [0, 1, 2, 3]
    # 0.25 * 10 = 2.5 rounds up, where Python's round() would go to the even 2.
    for fraction, count in ((0.3, 3), (0.25, 3), (0.24, 2), (0.35, 4)):
        assert len(ClientChoice(fraction=fraction).chosen(10)) == count


@pytest.mark.parametrize("seed", range(5))
def test_a_corruption_and_an_attack_of_one_fraction_and_seed_concern_the_same_clients(seed):
    corruption = ClosedSetLabelNoise(fraction=0.3, seed=seed)
    attack = GradientPoisoning(fraction=0.3, seed=seed)
    other = SignFlip(fraction=0.3, seed=seed)
    assert corruption.chosen(20) == attack.chosen(20) == other.chosen(20) == corruption.chosen(20)
    assert set(corruption.chosen(20)) < set(GaussianNoise(fraction=0.5, seed=seed).chosen(20))


def test_seeds_choose_everybody_equally_often():
    counts = [0] * 10
    for seed in range(2000):
        for client in ClientChoice(fraction=0.3, seed=seed).chosen(10):
            counts[client] += 1
    # Binomial(2000, 0.3): a standard deviation is 20.5.
    assert all(abs(count - 600) < 5 * 20.5 for count in counts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": [1], "fraction": 0.3}, "clients or fraction, not both"),
        ({"clients": [1, 1]}, "different clients"),
        ({"clients": [-1]}, "at least 0"),
        ({"fraction": 1.5}, r"in \[0, 1\]"),
        ({"fraction": -0.1}, r"in \[0, 1\]"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ClosedSetLabelNoise(**arguments)


def test_clients_that_do_not_exist_and_a_share_of_nobody():
    with pytest.raises(ConfigurationError, match=r"no client 7; clients are 0 \.\. 4"):
        ClientChoice(clients=[0, 7]).chosen(5)
    with pytest.raises(ConfigurationError, match=r"none of 5 clients.* is 0\.1"):
        ClientChoice(fraction=0.05).chosen(5)


def test_repr_shows_what_was_given():
    assert repr(ClosedSetLabelNoise(rate=0.1, fraction=0.3)) == "ClosedSetLabelNoise(rate=0.1, fraction=0.3)"
    assert repr(GaussianNoise()) == "GaussianNoise()"
