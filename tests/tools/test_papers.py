"""What the papers' tables measure, against formulas by hand."""

from __future__ import annotations

import importlib

import pytest
import torch
from paper_fedbary import potentials
from paper_fedbary_samples import determined, leave_one_out, means, recovered, scores, transcript
from paper_guo import agreement, check
from paper_pfedsv import communication, judged, one_by_one
from paper_shapfed import gap
from paper_shapleyfl import algorithm_3, exact_values, utilities
from personalization.judged import Judged
from study_parts import rank_likeness
from torch import Tensor, nn

from flsv.functional.shapley import exact_shapley
from flsv.functional.transport import safe_support
from flsv.parameters import ParameterSpace
from flsv.participants.local_data import at
from flsv.personalization.base import OWN_MODEL


@pytest.mark.parametrize(
    ("scenario", "values", "met", "number"),
    [
        ("same", [1.0, 0.9, 1.0, 1.0, 1.0], True, -10.0),
        ("same", [1.0, 0.95, 0.89, 1.0, 0.93], False, -11.0),
        ("same", [0.0] * 5, True, 0.0),
        ("sizes", [0.1, 0.2, 0.3, 0.4, 0.5], True, 1.0),
        ("sizes", [0.2, 0.1, 0.3, 0.4, 0.5], False, 0.9),  # 1 - 6 (1 + 1) / (5 (25 - 1))
        ("noisy", [0.5, 0.4, 0.3, 0.2, 0.1], True, 1.0),
        ("noisy", [0.2] * 5, False, 0.0),
        ("mixtures", [0.3, 0.3, 0.3, 0.1, -0.01], False, -0.01),
        ("biased", [0.10, 0.11, 0.12, 0.1, 0.5], True, 0.38),
        ("biased", [-0.10, -0.11, -0.12, -0.1, 0.5], False, 0.6),
    ],
)
def test_guos_checks(scenario: str, values: list[float], met: bool, number: float) -> None:
    assert check(scenario, values) is met
    assert agreement(scenario, values) == pytest.approx(number)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # By distance its own model counts as at the mean of the others' distances, 2: 1/2, 1, 1/3.
        ("by distance", [3 / 11, 6 / 11, 2 / 11]),
        ("equally", [1 / 3, 1 / 3, 1 / 3]),
        # By loss: it started at a loss of 4, has come to 2 in a step of 1, and the others' losses are 0 and 8.
        ("by loss", [2 / (2 + 4 / 2**0.5), 4 / 2**0.5 / (2 + 4 / 2**0.5), 0]),
    ],
)
def test_figure_4_of_pfedsv(weights: str, expected: list[float]) -> None:
    """Two others, at distances 1 and 3 of the parameters; the last entry is a buffer."""
    start, own = torch.tensor([0.0, -1, 0, 0]), torch.zeros(4)
    others = [torch.tensor([1.0, 0, 0, 9]), torch.tensor([0.0, 0, 3, 9])]
    losses = {tuple(v.tolist()): loss for v, loss in zip([start, own, *others], (4.0, 2.0, 0.0, 8.0))}
    client = Judged(0, lambda vector: -losses[tuple(vector.tolist())])
    client.data.visit(start, own)
    with at(client.data):
        found = one_by_one(client.data, others, None, weights=weights, num_parameters=3, generator=torch.Generator())
        torch.testing.assert_close(found.float(), torch.tensor(expected))
        mixed = torch.tensor([expected[1], 0, 3 * expected[2], 9 * (expected[1] + expected[2])])
        torch.testing.assert_close(client.data.state[OWN_MODEL], mixed)


def test_judged() -> None:
    """Client 0 has looked at everybody after round 2, client 1 at its two after round 1, client 2 never at one."""
    ring = torch.eye(6) + torch.eye(6).roll(1, 1)
    truth = (ring @ ring.T > 0).fill_diagonal_(False)
    values = torch.full((3, 6, 6), float("nan"))
    values[1:, 0] = truth[0].float() - 0.5
    values[:, 1, [0, 2]] = 0.5
    values[:, 2, 1] = -0.5
    found = judged(values, truth)
    assert found["found"] == [2, 1, None, None, None, None]
    assert found["bound"] == [2] * 6
    # Relevant: .5 .5 .5 .5 -.5; others: -.5 three times. 12 wins and 3 ties of 15.
    assert found["auroc"] == pytest.approx(13.5 / 15)
    assert found["above"] == [pytest.approx(100 * 4 / 12), 0.0]


def test_communication() -> None:
    """LeNet-5: 20 models up; down 2 x 5 + 18 x 2 = 46, of which, with a shared extractor, 20 extractors."""
    found = communication({"downloads": [5.0] * 2 + [2.0] * 18}, {}, "pFedSV", "pathological, MNIST")
    size, head = 44426, 84 * 10 + 10
    expected = (20 * size + 20 * (size - head) + 46 * head, 66 * size, 120 * size, 40 * size)
    names = ("pFedSV (D+C)", "pFedSV (D)", "FedFomo, pFedSV with k fixed", "FedAMP, FedAvg")
    assert [found[name]["lenet5"] for name in names] == pytest.approx([each / 1e6 for each in expected])


def test_the_gap_of_figure_3() -> None:
    own = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))
    own[2:, 2:] = 0.5
    own[:2, 2:] = 0.1
    assert gap({"cssv": own.tolist()}, {}, "", "") == pytest.approx(0.4)


def test_likeness() -> None:
    values = torch.tensor([0.1, 0.5, 0.3])
    assert rank_likeness(values, 2 * values) == pytest.approx(1)
    assert rank_likeness(values, -values) == pytest.approx(-1)
    assert rank_likeness(values, torch.ones(3)) == rank_likeness(values, torch.tensor([1.0, float("nan"), 2.0])) == 0


def game(players: int, seed: int) -> tuple[Tensor, object]:
    table = torch.rand(2**players, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return table, lambda masks: table[masks.long() @ (2 ** torch.arange(players))]


def test_estimators_of_shapleyfl() -> None:
    table, utility = game(5, 1)
    torch.testing.assert_close(exact_values(table, 5), exact_shapley(utility, 5).values)  # type: ignore[arg-type]
    _, utility = game(3, 2)  # for each other player one coalition of nobody and one of the third: nothing is drawn
    found = algorithm_3(utility, 3, 2, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    torch.testing.assert_close(found, exact_shapley(utility, 3).values)  # type: ignore[arg-type]
    _, utility = game(6, 3)
    made = [algorithm_3(utility, 6, 5, torch.Generator().manual_seed(i)) for i in range(2000)]  # type: ignore[arg-type]
    draws = torch.stack(made)
    away = (draws.mean(0) - exact_shapley(utility, 6).values) / (draws.std(0) / len(draws) ** 0.5)  # type: ignore[arg-type]
    assert float(away.abs().max()) < 4.5


def test_utilities_are_those_of_the_averaged_models() -> None:
    """Against torch's own forward pass of every coalition's average."""
    draw = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    space = ParameterSpace(network)
    vectors, start = torch.randn(4, space.size, generator=draw), torch.randn(space.size, generator=draw)
    images, labels = torch.randn(40, 1, 2, 3, generator=draw), torch.randint(3, (40,), generator=draw)
    table = utilities(vectors, start, images, labels)
    for coalition in range(16):
        members = [i for i in range(4) if coalition >> i & 1]
        space.write(network, vectors[members].mean(0) if members else start)
        assert float(table[coalition]) == pytest.approx(float((network(images).argmax(1) == labels).double().mean()))


def test_leave_one_out_is_what_refitting_without_each_sample_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    x, x2 = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (20, 15))
    y, y2 = (torch.randint(3, (n,), generator=generator) for n in (20, 15))
    center, constant = x.mean(0), (x - x.mean(0)).square().sum(1).mean().sqrt()
    points, others = (torch.cat([z - center, constant.expand(len(z), 1)], 1) for z in (x, x2))
    penalty = 0.5 * points.square().sum(1).mean() * torch.eye(5, dtype=torch.float64)
    targets, wanted = (torch.nn.functional.one_hot(labels, 3).double() for labels in (y, y2))

    def loss(kept: Tensor) -> Tensor:
        a, b = points[kept], targets[kept]
        return (others @ torch.linalg.solve(a.T @ a + penalty, a.T @ b) - wanted).square().sum()

    every = torch.arange(20)
    expected = torch.stack([loss(every) - loss(every[every != i]) for i in range(20)])
    torch.testing.assert_close(leave_one_out(x, y, x2, y2, ridge=0.5), expected)


def test_all_five_potentials_are_in_the_order_of_the_clients_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    clean, other = (torch.randn(30, 3, generator=generator) for _ in range(2))
    x = clean.clone()
    x[7] += 20
    found, distances = potentials(x, other, 12, 0)
    assert [int(values.argmax()) for values in found.values()] == [7] * 5
    assert potentials(clean, other, 12, 0)[1][-1] < distances[-1]
    bad = torch.tensor([True, False, False, False])
    score = scores(bad, torch.tensor([5.0, 1.0, -2.0, -2.0]))
    assert (score["auroc"], score["positive precision"], score["positive recall"]) == (1.0, 0.5, 1.0)


def test_samples_are_found_with_as_many_points_as_samples_and_not_below_half() -> None:
    points = torch.rand(40, 5, generator=torch.Generator().manual_seed(0))
    other = torch.rand(60, 5, generator=torch.Generator().manual_seed(1))
    found = {
        support: recovered(means(transcript(points, other, support, 2, 0), 40), points)
        for support in (40, safe_support(40))
    }
    assert found[40] == (1.0, 1.0)
    assert found[safe_support(40)][0] == 0
    four = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    pairs = torch.tensor([[0.0], [10.0]]), torch.tensor([[0.0], [5.0]])
    assert determined([pairs], four) == 0
    assert determined([(four, four)], four) == 1


def test_class_ordered_batches() -> None:
    tool = importlib.import_module("paper_guo")
    data = tool.FederatedDataModule("digits", importlib.import_module("flsv.data").IIDPartitioner(3), batch_size=10)
    data.__class__ = tool.ClassOrdered
    data.setup("fit")
    first, again = ([y for _, y in data.client_loader(2)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert (torch.cat(first).diff() >= 0).all()
    assert torch.equal(torch.bincount(torch.cat(first), minlength=10), data.class_counts[2])
