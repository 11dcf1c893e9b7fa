"""Values of few coalitions: the Gaussian process, KernelSHAP, and what tells values apart."""

import pytest
import torch
from functional.shapley.games import random_table, reference_shapley, table_game
from torch import Tensor

from flsv.functional import (
    exact_shapley,
    few_coalitions,
    few_coalitions_shapley,
    interval_over_seeds,
)
from flsv.functional.shapley.few_coalitions import PARTS, Which, prior_variance, retrained_shapley
from flsv.functional.shapley.surrogate import (
    Kernel,
    averaged_membership,
    fit_surrogate,
    gaussian,
    gram,
    membership,
)


def game(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, n, generator=generator, dtype=torch.float64).unbind()


def played(masks: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return 0.3 + masks.double() @ a + masks.double() @ b / masks.sum(1).clamp_min(1)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_few_coalitions_shapley_of_all_coalitions_is_exact(n: int) -> None:
    table = random_table(n, 1)
    masks = few_coalitions(n, "all")[
        torch.randperm(2**n, generator=torch.Generator().manual_seed(n))
    ]
    found = few_coalitions_shapley(masks, table_game(table)(masks))
    torch.testing.assert_close(found.values, torch.from_numpy(reference_shapley(table)))
    assert found.stderr.tolist() == [0.0] * n
    assert found.evaluations == 2**n


def test_equal_utilities_give_zero_values_and_errors() -> None:
    found = few_coalitions_shapley(few_coalitions(4, "both"), torch.full((10,), 0.5))
    assert found.values.tolist() == found.stderr.tolist() == [0.0] * 4
    assert found.evaluations == 10


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("kernel", [membership, averaged_membership, gaussian(0.3)])
def test_prior_variance_equals_that_computed_from_all_coalitions(n: int, kernel: Kernel) -> None:
    """L K L', with the linear map L from a game's table to its Shapley values, column by column."""
    masks = few_coalitions(n, "all")
    matrix = gram(kernel, masks, masks)
    places = {tuple(mask): place for place, mask in enumerate(masks.tolist())}

    def shapley(table: torch.Tensor) -> torch.Tensor:
        return exact_shapley(
            lambda rows: table[[places[tuple(row)] for row in rows.tolist()]], n
        ).values

    values = torch.stack([shapley(column) for column in matrix.T], dim=1)
    variance = torch.stack([shapley(row) for row in values])
    torch.testing.assert_close(
        variance.diagonal(), torch.full((n,), prior_variance(kernel, n)).double(), rtol=0, atol=1e-7
    )


@pytest.mark.parametrize(
    ("n", "which"), [(6, "singles"), (6, "leave-one-out"), (6, "both"), (9, "pairs")]
)
def test_few_coalitions_shapley_equals_the_surrogate_of_its_kernels(n: int, which: Which) -> None:
    """Fitted there in the dual, whose Shapley values follow from the kernels."""
    masks = few_coalitions(n, which)
    utilities = played(masks, *game(n))
    fitted, _ = fit_surrogate([list(PARTS)], masks, utilities[:, None])
    left = utilities[:2] - fitted(masks[:2])[:, 0]
    expected = fitted.shapley()[:, 0] + (left[1] - left[0]) / n
    torch.testing.assert_close(
        few_coalitions_shapley(masks, utilities).values, expected, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("which", ["singles", "leave-one-out", "both"])
def test_values_sum_to_the_gain_for_any_order_and_unit(which: str) -> None:
    masks = few_coalitions(5, which)  # type: ignore[arg-type]
    utilities = torch.rand(
        len(masks), 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    found = few_coalitions_shapley(masks, utilities)
    torch.testing.assert_close(found.values.sum(0), utilities[1] - utilities[0])
    order = torch.randperm(len(masks), generator=torch.Generator().manual_seed(2))
    players = torch.tensor([3, 0, 4, 1, 2])
    again = few_coalitions_shapley(masks[order][:, players], 100 * utilities[order] - 7)
    torch.testing.assert_close(again.values, 100 * found.values[players], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(again.stderr, 100 * found.stderr[players], rtol=1e-6, atol=1e-6)


def test_standard_errors_match_real_errors_in_noisy_games() -> None:
    noise, masks, ratios = 0.2, few_coalitions(6, "both"), []
    for seed in range(20):
        a, b = game(6, seed)
        truth = exact_shapley(lambda rows, a=a, b=b: played(rows, a, b), 6).values
        drawn = torch.randn(
            len(masks), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        found = few_coalitions_shapley(masks, played(masks, a, b) + noise * drawn, noise=noise)
        ratios.append((found.values - truth) / found.stderr)
    assert 0.6 < torch.cat(ratios).square().mean().sqrt() < 1


def test_retrained_shapley_averages_each_seeds_values_with_the_interval_over_seeds() -> None:
    masks, table = (
        few_coalitions(3, "all"),
        torch.rand(2, 8, generator=torch.Generator().manual_seed(0)).double(),
    )
    some = few_coalitions(3, "singles")
    for rows, known in ((masks, table), (some, table[:, :5])):
        found = [few_coalitions_shapley(rows, utilities) for utilities in known]
        by_seed, stderr = (
            torch.stack([each.values for each in found]),
            torch.stack([each.stderr for each in found]),
        )
        values, half = retrained_shapley(rows, known, level=0.5)
        torch.testing.assert_close(values, by_seed.mean(0))
        torch.testing.assert_close(half, interval_over_seeds(by_seed, stderr.mean(0), level=0.5))
        assert (stderr == 0).all() == (rows is masks)


def test_interval_over_seeds_equals_that_by_hand() -> None:
    """Three seeds: variances 1 and 0, mean values 2 and 100, of which 2.5 % is 2.55; Student's quantile of four degrees
    2.1318, the normal one 1.6449. Two seeds: the mean variance 2 is larger than 2.5 % of the gain."""
    found = interval_over_seeds(
        torch.tensor([[1.0, 100.0], [2.0, 100.0], [3.0, 100.0]]), torch.tensor([0.0, 0.3])
    )
    by_hand = [(2 * 1 + 2 * 2.55**2) / 4, 2 * 2.55**2 / 4]
    fit = [0.0, (1.6448536 * 0.3) ** 2]
    expected = [(2.1318468**2 * each / 3 + more) ** 0.5 for each, more in zip(by_hand, fit)]
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-6, atol=0)
    found = interval_over_seeds(torch.tensor([[1.0, -5.0], [3.0, -3.0]]))
    assert found.tolist() == pytest.approx([2.3533634 * ((2 + 2 * 2) / 3 / 2) ** 0.5] * 2)
    alone = interval_over_seeds(torch.tensor([[1.0, 1.0]]), 0.3)
    assert alone.tolist() == pytest.approx(
        [1.6448536 * (0.3**2 + 0.09**2) ** 0.5] * 2
    )  # 4.5 % of the gain
    with pytest.raises(ValueError, match=r"\[seeds, n\] and a level"):
        interval_over_seeds(torch.ones(3))


def test_few_coalitions_with_wrong_input_raise() -> None:
    masks, utilities = few_coalitions(3, "both"), torch.rand(8)
    for bad_masks, bad, words in (
        (masks.int(), utilities, "expected masks bool"),
        (masks, utilities[1:], "expected masks bool"),
        (masks[[0, 1, 2, 2]], utilities[:4], "A coalition occurs twice"),
        (masks[1:], utilities[1:], "the empty and the grand coalition"),
        (masks, utilities / 0, "is not finite"),
    ):
        with pytest.raises(ValueError, match=words):
            few_coalitions_shapley(bad_masks, bad)


def test_designs_have_the_documented_numbers_of_coalitions() -> None:
    sizes = {
        "pairs+leave-two-out": 58,
        "singles": 9,
        "leave-one-out": 9,
        "both": 16,
        "pairs": 30,
        "pairs+leave-one-out": 37,
        "all": 128,
    }
    assert {which: len(few_coalitions(7, which)) for which in sizes} == sizes  # type: ignore[arg-type]
    assert torch.equal(few_coalitions(7), few_coalitions(7, "both"))
    assert torch.equal(few_coalitions(7, "auto"), few_coalitions(7, "both"))
    assert len(few_coalitions(3)) == 8  # all
