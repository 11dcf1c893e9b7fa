"""The others' average, and shares of what they gain."""

from __future__ import annotations

import pytest
import torch

from flsv.functional import everybody_else, without_own


@pytest.mark.parametrize("k", [2, 3, 6])
def test_the_others_average(k: int) -> None:
    draw = torch.Generator().manual_seed(k)
    models, weights = torch.randn(k, 9, generator=draw, dtype=torch.float64), torch.rand(k, generator=draw).double()
    weights = weights / weights.sum()
    aggregate = weights @ models
    for i in range(k):
        others = [j for j in range(k) if j != i]
        expected = sum(weights[j] * models[j] for j in others) / weights[others].sum()
        found = without_own(aggregate, models[i], float(weights[i]))
        torch.testing.assert_close(found, expected)


def test_little_of_the_others_is_something() -> None:
    others = without_own(torch.tensor([0.999], dtype=torch.float64), torch.ones(1, dtype=torch.float64), 0.9999)
    torch.testing.assert_close(others, torch.tensor([-9.0], dtype=torch.float64), rtol=1e-9, atol=0)


def test_nobody_else() -> None:
    assert without_own(torch.ones(3), torch.ones(3), 1.0) is None
    assert torch.equal(without_own(torch.ones(3), torch.zeros(3), 0.0), torch.ones(3))
    with pytest.raises(ValueError, match=r"lies in \[0, 1\]; got 1.5"):
        without_own(torch.ones(3), torch.ones(3), 1.5)


def test_values_sum_to_the_gains_and_no_report_is_in_its_own_value() -> None:
    gains = torch.tensor([0.3, -0.1, 0.2, 0.05], dtype=torch.float64)
    values = everybody_else(gains)
    for i in range(4):
        torch.testing.assert_close(values[i], torch.stack([gains[j] for j in range(4) if j != i]).mean())
    torch.testing.assert_close(values.sum(), gains.sum())
    lying = gains.clone()
    lying[2] = -9.0
    assert torch.equal(everybody_else(lying)[2], values[2])
    assert everybody_else(torch.tensor([0.4])).tolist() == [0]
    with pytest.raises(ValueError, match=r"expected gains \[k\]"):
        everybody_else(torch.zeros(2, 2))


def test_the_mean_is_over_those_who_have_said() -> None:
    nan = float("nan")
    assert everybody_else(torch.tensor([0.5, nan, 0.25, nan])).tolist() == [0.25, 0.375, 0.5, 0.375]
    assert everybody_else(torch.tensor([nan, 0.25])).tolist()[0] == 0.25
    assert everybody_else(torch.tensor([nan, 0.25]))[1].isnan()


@pytest.mark.parametrize(("k", "trim"), [(4, 1), (6, 1), (7, 2)])
def test_trimmed_means_by_sorting(k: int, trim: int) -> None:
    gains = torch.randn(k, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    values = everybody_else(gains, trim)
    for i in range(k):
        rest = sorted(gains[j].item() for j in range(k) if j != i)[trim : k - 1 - trim]
        assert values[i].item() == pytest.approx(sum(rest) / len(rest))


@pytest.mark.parametrize("lie", [-1e6, 1e6])
def test_a_liar_moves_no_value_beyond_what_honest_clients_say(lie: float) -> None:
    gains = torch.tensor([0.1, 0.2, 0.3, 0.25, lie, 0.15])
    values = everybody_else(gains, trim=1)
    assert (values >= 0.1).all()
    assert (values <= 0.3).all()
    assert values[4] == everybody_else(gains.where(gains != lie, 0.2), trim=1)[4]


def test_trimming_leaves_somebody() -> None:
    with pytest.raises(ValueError, match="leaves none of 2 reports of the others. Lower it, or let at least 4 clients"):
        everybody_else(torch.zeros(3), trim=1)


def test_trimming_is_of_those_who_have_said() -> None:
    gains = torch.tensor([0.1, float("nan"), 0.2, 0.4, 5.0])
    values = everybody_else(gains, trim=1)
    assert values.tolist() == pytest.approx([0.4, 0.3, 0.4, 0.2, 0.2])
    assert everybody_else(torch.tensor([0.1, float("nan"), 0.2, 0.4]), trim=1).isnan().tolist() == [
        True,
        False,
        True,
        True,
    ]
