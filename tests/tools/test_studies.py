"""What the tables that are of no paper measure, by hand."""

from __future__ import annotations

import pytest
import torch
from study_parts import invert, likeness, shuffle_targets, shuffled
from study_truth import DESIGNS, covered, of_sizes, visits
from torch import Tensor, nn

from flsv.functional import few_coalitions


def case(*values: float, half: float) -> tuple[Tensor, Tensor, Tensor]:
    value = torch.tensor(values, dtype=torch.float64)
    return value, value - half, value + half


@pytest.mark.parametrize(
    ("runs", "half", "expected"),
    [
        # The mean is 0.53 and 0.47; single runs are 0.1 and 0.04 away.
        ([(0.6, 0.4), (0.46, 0.54)], 0.05, [0.5, 0.0, 0.05, 1.645 * 0.14 / 2**0.5, 0.03 / 0.07]),
        ([(0.6, 0.4), (0.4, 0.6)], 0.3, [1.0, 1.0, 0.3, 1.645 * 0.2 / 2**0.5, 0.0]),
    ],
)
def test_what_intervals_cover(runs: list[tuple[float, float]], half: float, expected: list[float]) -> None:
    truth = torch.tensor([0.5, 0.5], dtype=torch.float64)
    found = covered([case(*values, half=half) for values in runs], truth)
    assert list(found.values()) == pytest.approx(expected, abs=1e-12)


def test_designs_are_those_of_the_command() -> None:
    for which, sizes in (("singles", (1,)), ("leave-one-out", (-1,)), ("both", (1, -1))):
        ours, theirs = (set(map(tuple, m.tolist())) for m in (of_sizes(5, sizes), few_coalitions(5, which)))  # type: ignore[arg-type]
        assert ours == theirs
    equal = torch.full((6,), 10)
    costs = {name: visits(of_sizes(6, sizes), equal) for name, sizes in DESIGNS.items()}
    assert list(costs.values()) == [2, 6, 7, 7, 12, 32]


@pytest.mark.parametrize("shape", [(9,), (9, 4)])
def test_a_clients_targets_stay_at_the_client(shape: tuple[int, ...]) -> None:
    before = torch.arange(torch.tensor(shape).prod()).view(shape)
    targets, rows = before.clone(), torch.tensor([0, 2, 3, 5, 8])
    shuffle_targets(targets, rows, seed=0)
    others = torch.tensor([1, 4, 6, 7])
    assert torch.equal(targets[others], before[others])
    assert not torch.equal(targets[rows], before[rows])
    assert torch.equal(targets[rows].flatten().sort().values, before[rows].flatten().sort().values)


def test_a_client_beside_itself_with_noise() -> None:
    runs = {"nobody": {"values": [3.0, 2.0], "samples": [5, 6]}, "1": {"values": [3.0, -1.0], "samples": [5, 6]}}
    (found,) = shuffled(runs["1"], runs, "1", "clinics").values()
    assert list(found.values()) == [6, 2.0, -1.0, -3.0, True, True]
    assert shuffled(runs["nobody"], runs, "nobody", "clinics") == {}


def test_inversion_finds_what_the_first_layer_says() -> None:
    """A linear layer's weight gradient is its bias gradient times the input (Phong et al., IEEE TIFS 2018)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.Sigmoid(), nn.Linear(20, 5))
    loss = nn.functional.cross_entropy(net(torch.rand(1, 1, 6, 6)), torch.tensor([2]))
    observed = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
    weights, biases = observed[: 36 * 20].view(20, 36), observed[36 * 20 : 37 * 20]
    closed_form = (weights * biases[:, None]).sum(0) / biases.square().sum()
    image, label = invert(net, observed, (1, 6, 6))
    assert label == 2
    torch.testing.assert_close(image.flatten(), closed_form, atol=2e-3, rtol=0)
    assert likeness(1 - image, image) == pytest.approx(-1)
    assert likeness(torch.zeros(1, 6, 6), image) == 0
