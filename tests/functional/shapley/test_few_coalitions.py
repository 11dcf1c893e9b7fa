"""Values of few coalitions: the Gaussian process, KernelSHAP, and what tells values apart."""

from functools import partial

import pytest
import torch
from functional.shapley.games import make_random_table, make_table_game, shapley_by_all_orders
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


def make_quadratic_game(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sums, averages = torch.rand(2, n, generator=generator, dtype=torch.float64)
    return sums, averages


def play_quadratic_game(masks: Tensor, sums: Tensor, averages: Tensor) -> Tensor:
    members = masks.double()
    sizes = masks.sum(1).clamp_min(1)
    return 0.3 + members @ sums + members @ averages / sizes


@pytest.mark.parametrize("n", [2, 3, 5])
def test_few_coalitions_shapley_of_all_coalitions_is_exact(n: int) -> None:
    table = make_random_table(n, 1)
    order = torch.randperm(
        2**n,
        generator=torch.Generator().manual_seed(n),
    )
    masks = few_coalitions(n, "all")[order]

    estimate = few_coalitions_shapley(masks, make_table_game(table)(masks))

    exact = torch.from_numpy(shapley_by_all_orders(table))
    torch.testing.assert_close(estimate.values, exact)
    assert estimate.stderr.tolist() == [0.0] * n
    assert estimate.evaluations == 2**n


def test_equal_utilities_give_zero_values_and_errors() -> None:
    masks = few_coalitions(4, "both")

    estimate = few_coalitions_shapley(masks, torch.full((10,), 0.5))

    assert estimate.values.tolist() == [0.0] * 4
    assert estimate.stderr.tolist() == [0.0] * 4
    assert estimate.evaluations == 10


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(
    "kernel",
    [
        membership,
        averaged_membership,
        gaussian(0.3),
    ],
)
def test_prior_variance_equals_that_computed_from_all_coalitions(n: int, kernel: Kernel) -> None:
    """L K L', with the linear map L from a game's table to its Shapley values, column by column."""
    masks = few_coalitions(n, "all")
    matrix = gram(kernel, masks, masks)
    row_of_mask = {tuple(mask): row for row, mask in enumerate(masks.tolist())}

    def shapley(table: torch.Tensor) -> torch.Tensor:
        def utility(coalitions: torch.Tensor) -> torch.Tensor:
            return table[[row_of_mask[tuple(mask)] for mask in coalitions.tolist()]]

        return exact_shapley(utility, n).values

    values = torch.stack(
        [shapley(column) for column in matrix.T],
        dim=1,
    )
    covariance = torch.stack([shapley(row) for row in values])

    expected = torch.full(
        (n,),
        prior_variance(kernel, n),
    ).double()

    torch.testing.assert_close(
        covariance.diagonal(),
        expected,
        rtol=0,
        atol=1e-7,
    )


@pytest.mark.parametrize(
    ("n", "design"),
    [
        (6, "singles"),
        (6, "leave-one-out"),
        (6, "both"),
        (9, "pairs"),
    ],
)
def test_few_coalitions_shapley_equals_the_surrogate_of_its_kernels(n: int, design: Which) -> None:
    """Fitted there in the dual, whose Shapley values follow from the kernels."""
    masks = few_coalitions(n, design)
    utilities = play_quadratic_game(masks, *make_quadratic_game(n))

    values = few_coalitions_shapley(masks, utilities).values

    surrogate, _ = fit_surrogate([list(PARTS)], masks, utilities[:, None])
    # What the surrogate leaves of the empty and the grand coalition's utility is shared equally.
    empty, grand = utilities[:2] - surrogate(masks[:2])[:, 0]
    expected = surrogate.shapley()[:, 0] + (grand - empty) / n

    torch.testing.assert_close(values, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("design", ["singles", "leave-one-out", "both"])
def test_values_sum_to_the_gain_for_any_order_and_unit(design: str) -> None:
    masks = few_coalitions(5, design)  # type: ignore[arg-type]
    seeded = torch.Generator().manual_seed(1)
    utilities = torch.rand(
        len(masks),
        2,
        generator=seeded,
        dtype=torch.float64,
    )
    order = torch.randperm(
        len(masks),
        generator=torch.Generator().manual_seed(2),
    )
    players = torch.tensor([3, 0, 4, 1, 2])

    estimate = few_coalitions_shapley(masks, utilities)
    reordered = few_coalitions_shapley(masks[order][:, players], 100 * utilities[order] - 7)

    values = estimate.values
    torch.testing.assert_close(values.sum(0), utilities[1] - utilities[0])
    torch.testing.assert_close(
        reordered.values,
        100 * values[players],
        rtol=1e-6,
        atol=1e-6,
    )

    stderr = 100 * estimate.stderr[players]
    torch.testing.assert_close(reordered.stderr, stderr, rtol=1e-6, atol=1e-6)


def test_standard_errors_match_real_errors_in_noisy_games() -> None:
    noise = 0.2
    masks = few_coalitions(6, "both")
    ratios = []
    for seed in range(20):
        sums, averages = make_quadratic_game(6, seed)
        play = partial(play_quadratic_game, sums=sums, averages=averages)
        exact = exact_shapley(play, 6)
        generator = torch.Generator().manual_seed(seed)
        deviations = torch.randn(len(masks), generator=generator, dtype=torch.float64)
        utilities = play(masks) + noise * deviations

        estimate = few_coalitions_shapley(masks, utilities, noise=noise)

        ratios.append((estimate.values - exact.values) / estimate.stderr)

    mean_square = torch.cat(ratios).square().mean()
    assert 0.6 < mean_square.sqrt() < 1


@pytest.mark.parametrize("design", ["all", "singles"])
def test_retrained_shapley_averages_each_seeds_values_with_the_interval_over_seeds(
    design: Which,
) -> None:
    masks = few_coalitions(3, design)
    seeded = torch.Generator().manual_seed(0)
    table = torch.rand(2, len(masks), generator=seeded).double()

    values, half = retrained_shapley(masks, table, level=0.5)

    estimates = [few_coalitions_shapley(masks, utilities) for utilities in table]
    by_seed = torch.stack([estimate.values for estimate in estimates])
    stderr = torch.stack([estimate.stderr for estimate in estimates])

    torch.testing.assert_close(values, by_seed.mean(0))

    expected = interval_over_seeds(by_seed, stderr.mean(0), level=0.5)
    torch.testing.assert_close(half, expected)
    assert (stderr == 0).all() == (design == "all")


NORMAL_QUANTILE = 1.6448536  # 95 % of a normal variable are below it


def test_interval_over_seeds_equals_that_by_hand() -> None:
    """Three seeds: variances 1 and 0, mean values 2 and 100, of which 2.5 % is 2.55."""
    values = torch.tensor([[1.0, 100.0], [2.0, 100.0], [3.0, 100.0]])
    stderr_of_fit = torch.tensor([0.0, 0.3])

    half_widths = interval_over_seeds(values, stderr_of_fit)

    # A client's own variance and the prior one, of two degrees each.
    prior_variance_of_seed = 2.55**2
    variances = [
        (2 * 1 + 2 * prior_variance_of_seed) / 4,
        (2 * 0 + 2 * prior_variance_of_seed) / 4,
    ]
    student_quantile = 2.1318468  # of four degrees
    expected = []
    for variance, stderr in zip(variances, stderr_of_fit.double()):
        of_seeds = student_quantile**2 * variance / 3
        of_fit = (NORMAL_QUANTILE * stderr) ** 2
        expected.append((of_seeds + of_fit).sqrt())
    torch.testing.assert_close(
        half_widths,
        torch.stack(expected),
        rtol=1e-6,
        atol=0,
    )


def test_interval_over_two_seeds_has_the_larger_mean_variance() -> None:
    """The mean variance 2 is larger than 2.5 % of the gain."""
    half_widths = interval_over_seeds(torch.tensor([[1.0, -5.0], [3.0, -3.0]]))

    student_quantile = 2.3533634  # of three degrees
    variance = (1 * 2 + 2 * 2) / 3
    expected = student_quantile * (variance / 2) ** 0.5
    assert half_widths.tolist() == pytest.approx([expected, expected])


def test_interval_over_one_seed_has_a_share_of_the_gain() -> None:
    stderr_of_fit = 0.3
    gain = 2.0

    half_widths = interval_over_seeds(torch.tensor([[1.0, 1.0]]), stderr_of_fit)

    stderr_of_seed = 0.045 * gain
    expected = NORMAL_QUANTILE * (stderr_of_fit**2 + stderr_of_seed**2) ** 0.5
    assert half_widths.tolist() == pytest.approx([expected, expected])


def test_interval_over_seeds_of_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[seeds, n\] and a level"):
        interval_over_seeds(torch.ones(3))


def test_few_coalitions_with_wrong_input_raise() -> None:
    masks = few_coalitions(3, "both")
    utilities = torch.rand(8)
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

    for design, count in sizes.items():
        assert len(few_coalitions(7, design)) == count  # type: ignore[arg-type]
    assert torch.equal(few_coalitions(7), few_coalitions(7, "both"))
    assert torch.equal(few_coalitions(7, "auto"), few_coalitions(7, "both"))
    assert len(few_coalitions(3)) == 8  # all
