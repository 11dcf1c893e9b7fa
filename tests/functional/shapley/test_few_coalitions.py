from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from flsv.functional import exact_shapley, few_coalitions, few_coalitions_shapley, interval_over_seeds
from flsv.functional.shapley.few_coalitions import PARTS, prior_variance, retrained_shapley
from flsv.functional.shapley.surrogate import Kernel, averaged_membership, fit_surrogate, gaussian, gram, membership


def game(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, n, generator=generator, dtype=torch.float64).unbind()


def played(masks: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return 0.3 + masks.double() @ a + masks.double() @ b / masks.sum(1).clamp_min(1)


def by_permutations(worth: dict[tuple[int, ...], float], n: int) -> Tensor:
    values = torch.zeros(n, dtype=torch.float64)
    for order in itertools.permutations(range(n)):
        for place, player in enumerate(order):
            values[player] += worth[tuple(sorted(order[: place + 1]))] - worth[tuple(sorted(order[:place]))]
    return values / math.factorial(n)


@pytest.mark.parametrize("n", [2, 3, 5, 7])
def test_all_coalitions_are_exact(n: int) -> None:
    masks = few_coalitions(n, "all")[torch.randperm(2**n, generator=torch.Generator().manual_seed(n))]
    utilities = torch.rand(2**n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    worth = {tuple(m.nonzero().flatten().tolist()): float(u) for m, u in zip(masks, utilities)}
    found = few_coalitions_shapley(masks, utilities)
    if n < 7:
        torch.testing.assert_close(found.values, by_permutations(worth, n))
    torch.testing.assert_close(found.values.sum(), utilities[masks.all(1)].sum() - utilities[~masks.any(1)].sum())
    assert found.stderr.tolist() == [0.0] * n
    assert found.evaluations == 2**n


@pytest.mark.parametrize("n", [4, 6, 9])
def test_a_sum_of_gains_and_an_average_is_known_from_few(n: int) -> None:
    """Its values are known to a tenth or so of how far they are apart."""
    a, b = game(n)
    masks = few_coalitions(n, "both")
    found = few_coalitions_shapley(masks, played(masks, a, b))
    exact = exact_shapley(lambda rows: played(rows, a, b), n).values
    assert float((found.values - exact).norm() / (exact - exact.mean()).norm()) < 0.15
    assert found.evaluations == len(masks) == 2 * n + 2


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("kernel", [membership, averaged_membership, gaussian(0.3)])
def test_a_values_variance_is_that_of_all_coalitions(n: int, kernel: Kernel) -> None:
    """L K L', with the linear map L from a game's table to its Shapley values, column by column."""
    masks = few_coalitions(n, "all")
    matrix = gram(kernel, masks, masks)
    places = {tuple(mask): place for place, mask in enumerate(masks.tolist())}

    def shapley(table: torch.Tensor) -> torch.Tensor:
        return exact_shapley(lambda rows: table[[places[tuple(row)] for row in rows.tolist()]], n).values

    values = torch.stack([shapley(column) for column in matrix.T], dim=1)
    variance = torch.stack([shapley(row) for row in values])
    torch.testing.assert_close(
        variance.diagonal(), torch.full((n,), prior_variance(kernel, n)).double(), rtol=0, atol=1e-7
    )


@pytest.mark.parametrize("which", ["singles", "leave-one-out", "both"])
def test_it_is_the_surrogate_of_the_same_kernels(which: str) -> None:
    """Fitted there in the dual, whose Shapley values follow from the kernels."""
    n, masks = 6, few_coalitions(6, which)  # type: ignore[arg-type]
    utilities = played(masks, *game(n))
    fitted, _ = fit_surrogate([list(PARTS)], masks, utilities[:, None])
    left = utilities[:2] - fitted(masks[:2])[:, 0]
    expected = fitted.shapley()[:, 0] + (left[1] - left[0]) / n
    torch.testing.assert_close(few_coalitions_shapley(masks, utilities).values, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("which", ["singles", "leave-one-out", "both"])
def test_values_add_up_and_know_neither_order_nor_unit(which: str) -> None:
    masks = few_coalitions(5, which)  # type: ignore[arg-type]
    utilities = torch.rand(len(masks), 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = few_coalitions_shapley(masks, utilities)
    torch.testing.assert_close(found.values.sum(0), utilities[1] - utilities[0])
    order = torch.randperm(len(masks), generator=torch.Generator().manual_seed(2))
    players = torch.tensor([3, 0, 4, 1, 2])
    again = few_coalitions_shapley(masks[order][:, players], 100 * utilities[order] - 7)
    torch.testing.assert_close(again.values, 100 * found.values[players], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(again.stderr, 100 * found.stderr[players], rtol=1e-6, atol=1e-6)
    one = few_coalitions_shapley(masks, utilities[:, 0])
    torch.testing.assert_close(one.values, found.values[:, 0])


@pytest.mark.slow
def test_intervals_cover_games_of_the_form_with_noise() -> None:
    """Of 90 % intervals, most hold the truth; with fewer coalitions they are wider."""
    noise, hits, widths, count = 0.05, {"singles": 0, "both": 0}, {"singles": 0.0, "both": 0.0}, 0
    for seed in range(60):
        a, b = game(6, seed)
        truth = exact_shapley(lambda rows, a=a, b=b: played(rows, a, b), 6).values
        for which in hits:
            masks = few_coalitions(6, which)  # type: ignore[arg-type]
            drawn = torch.randn(len(masks), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            found = few_coalitions_shapley(masks, played(masks, a, b) + noise * drawn, noise=noise)
            hits[which] += int(((found.values - truth).abs() <= 1.645 * found.stderr).sum())
            widths[which] += float(found.stderr.mean())
        count += 6
    assert hits["both"] / count > 0.85, hits
    assert widths["singles"] > widths["both"]


@pytest.mark.parametrize("which", ["singles", "leave-one-out", "both"])
def test_a_hint_is_a_part_of_the_fit(which: str) -> None:
    """A true one helps, whatever its unit; one that says nothing changes nothing; the posterior is that of features."""
    masks, a = few_coalitions(6, which), torch.tensor([0.1, 0.5, 0.2, 0.9, 0.4, 0.3]).double()  # type: ignore[arg-type]
    noisy = played(masks, a, 0 * a) + 0.3 * torch.randn(
        len(masks), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    plain = few_coalitions_shapley(masks, noisy, 0.3).values
    found = few_coalitions_shapley(masks, noisy, 0.3, hint=7 * a, hint_weight=10.0)
    assert float((found.values - a).norm()) < 0.7 * float((plain - a).norm())
    torch.testing.assert_close(found.values, few_coalitions_shapley(masks, noisy, 0.3, hint=a, hint_weight=10.0).values)
    torch.testing.assert_close(few_coalitions_shapley(masks, noisy, 0.3, hint=0 * a).values, plain, rtol=0, atol=0)
    with pytest.raises(ValueError, match="expected hint .6., all of it finite"):
        few_coalitions_shapley(masks, noisy, 0.3, hint=a / 0)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_intervals_over_seeds_hold_the_mean_of_all_seeds(seeds: int) -> None:
    """Of players whose spreads are equal, and of those of whom one spreads three times as much as another."""
    generator = torch.Generator().manual_seed(seeds)
    for spread in (torch.ones(6), torch.linspace(1, 3, 6)):
        drawn = spread * torch.randn(3000, seeds, 6, generator=generator, dtype=torch.float64)
        half = torch.stack([interval_over_seeds(each) for each in drawn])
        held = float((drawn.mean(1).abs() <= half).double().mean())
        assert 0.88 < held < 0.92, held


def test_all_coalitions_of_several_seeds_have_the_interval_of_the_seeds() -> None:
    masks, table = few_coalitions(3, "all"), torch.rand(2, 8, generator=torch.Generator().manual_seed(0)).double()
    values, half = retrained_shapley(masks, table)
    by_seed = torch.stack([few_coalitions_shapley(masks, utilities).values for utilities in table])
    torch.testing.assert_close(values, by_seed.mean(0))
    torch.testing.assert_close(half, interval_over_seeds(by_seed))
    some = few_coalitions(3, "singles")
    known = few_coalitions_shapley(some, table[:, :5].mean(0), float(table[:, :5].var(0).mean().sqrt()) / 2**0.5)
    values, half = retrained_shapley(some, table[:, :5], level=0.5)
    torch.testing.assert_close(values, known.values)
    torch.testing.assert_close(half, 0.6744898 * known.stderr)


def test_an_interval_over_seeds_by_hand() -> None:
    """Standard deviations over the seeds 2^0.5 and 18^0.5; Student's quantile of one degree, 6.314."""
    found = interval_over_seeds(torch.tensor([[1.0, 1.0], [3.0, 7.0]]))
    torch.testing.assert_close(found, 6.313752 * torch.tensor([1.0, 3.0]).double(), rtol=1e-6, atol=0)
    assert interval_over_seeds(torch.tensor([[1.0, 1.0]])).isnan().all()
    with pytest.raises(ValueError, match=r"\[seeds, n\] and a level"):
        interval_over_seeds(torch.ones(3))


#: Minus the losses of four clinics with 1207, 503, 212 and 502 patients, 20 % of them ill, of all coalitions; the third
#: one has 35 % of its labels wrong.
CLINICS = (-0.6862, -0.3130, -0.4021, -0.3280, -0.6379, -0.3252, -0.4374, -0.3371,
           -0.3933, -0.3273, -0.3929, -0.3374, -0.4302, -0.3364, -0.4129, -0.3448)  # fmt: skip


@pytest.mark.parametrize(("which", "most"), [("singles", 0.13), ("both", 0.03)])
def test_unequal_clients_are_not_taken_for_noise(which: str, most: float) -> None:
    """Half the sum of the shares' differences, and the intervals, against what all coalitions say."""

    def utility(masks: Tensor) -> Tensor:
        return torch.tensor(CLINICS).double()[(masks * 2 ** torch.arange(4)).sum(1)]

    masks, exact = few_coalitions(4, which), exact_shapley(utility, 4).values  # type: ignore[arg-type]
    found = few_coalitions_shapley(masks, utility(masks))
    shares = [values.clamp_min(0) / values.clamp_min(0).sum() for values in (found.values, exact)]
    assert float((shares[0] - shares[1]).abs().sum() / 2) < most
    assert ((found.values - exact).abs() <= 1.645 * found.stderr).all()


def test_coalitions_that_are_all_worth_the_same() -> None:
    found = few_coalitions_shapley(few_coalitions(4, "both"), torch.full((10,), 0.5))
    assert found.values.tolist() == [0.0] * 4
    assert found.stderr.tolist() == [0.0] * 4


def test_wrong_input() -> None:
    masks, utilities = few_coalitions(3, "both"), torch.rand(8)
    for bad_masks, bad, words in (
        (masks.int(), utilities, "expected masks bool"),
        (masks, utilities[1:], "expected masks bool"),
        (masks[[0, 1, 2, 2]], utilities[:4], "a coalition is there twice"),
        (masks[1:], utilities[1:], "the empty coalition and that of everybody"),
        (masks, utilities / 0, "is not finite"),
    ):
        with pytest.raises(ValueError, match=words):
            few_coalitions_shapley(bad_masks, bad)


def test_by_default_all_coalitions_of_seven_players_and_those_of_one_two_and_all_but_one_of_more() -> None:
    sizes = {"singles": 9, "leave-one-out": 9, "both": 16, "pairs": 30, "pairs+leave-one-out": 37, "all": 128}
    assert {which: len(few_coalitions(7, which)) for which in sizes} == sizes  # type: ignore[arg-type]
    assert torch.equal(few_coalitions(7), few_coalitions(7, "all"))
    assert few_coalitions(8).sum(1).tolist() == [0, 8] + [1] * 8 + [2] * 28 + [7] * 8
