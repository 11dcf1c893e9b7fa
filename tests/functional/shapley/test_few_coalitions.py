"""Values of few coalitions: the Gaussian process, KernelSHAP, and what tells values apart."""

from functools import partial

import pytest
import torch
from functional.shapley.games import make_random_table, make_table_game, shapley_by_all_orders
from torch.testing import assert_close

from flsv.functional import (
    exact_shapley,
    few_coalitions,
    few_coalitions_shapley,
    interval_over_seeds,
)
from flsv.functional.shapley.exact import all_coalitions, shapley_of_table
from flsv.functional.shapley.few_coalitions import KERNEL_PARTS, prior_variance
from flsv.functional.shapley.kernels import averaged_membership, gaussian, gram, membership
from flsv.functional.shapley.surrogate import fit_surrogate, scale_kernels
from helpers import make_generator


def make_quadratic_game(n, seed=0):
    generator = make_generator(seed)
    sums, averages = torch.rand(
        2,
        n,
        generator=generator,
        dtype=torch.float64,
    )
    return sums, averages


def play_quadratic_game(masks, sums, averages):
    members = masks.double()
    sizes = masks.sum(1).clamp_min(1)
    return 0.3 + members @ sums + members @ averages / sizes


@pytest.mark.parametrize("n", [2, 3, 5])
def test_few_coalitions_shapley_of_all_coalitions_is_exact(n):
    table = make_random_table(n, 1)
    order = torch.randperm(2**n, generator=make_generator(n))
    masks = few_coalitions(n, "all")[order]

    estimate = few_coalitions_shapley(masks, make_table_game(table)(masks))

    exact = torch.from_numpy(shapley_by_all_orders(table))
    assert_close(estimate.values, exact)
    assert estimate.stderr.tolist() == [0.0] * n
    assert estimate.evaluations == 2**n


def test_equal_utilities_give_zero_values_and_errors():
    masks = few_coalitions(4, "both")

    estimate = few_coalitions_shapley(masks, torch.full((10,), 0.5))

    assert estimate.values.tolist() == [0.0] * 4
    assert estimate.stderr.tolist() == [0.0] * 4
    assert estimate.evaluations == 10


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("kernel", [membership, averaged_membership, gaussian(0.3)])
def test_prior_variance_equals_that_computed_from_all_coalitions(n, kernel):
    """L K L', with the linear map L from a game's table to its Shapley values, of all columns at once."""
    masks = all_coalitions(n)
    table_covariance = gram(kernel, masks, masks)

    # The Shapley values of a game's table u [2^n] are L u. A covariance K of tables gives L K L' of values.
    left_product = shapley_of_table(table_covariance)
    value_covariance = shapley_of_table(left_product.T)

    expected_variance = torch.full(
        (n,),
        prior_variance(kernel, n),
    ).double()
    assert_close(value_covariance.diagonal(), expected_variance, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("n", "design"), [(6, "singles"), (6, "leave-one-out"), (6, "both"), (9, "pairs")]
)
def test_few_coalitions_shapley_equals_the_surrogate_of_its_kernels(n, design):
    """Fitted there in the dual, whose Shapley values follow from the kernels."""
    masks = few_coalitions(n, design)
    utilities = play_quadratic_game(masks, *make_quadratic_game(n))

    two_games = torch.stack([utilities, 2 * utilities], dim=1)
    values, doubled_values = few_coalitions_shapley(masks, two_games).values.T

    kernel = scale_kernels(list(KERNEL_PARTS), masks)
    surrogate, _ = fit_surrogate([kernel], utilities[:, None])
    # What the surrogate leaves of the gain from the empty to the grand coalition is shared equally.
    empty_and_grand = masks[:2]
    assert empty_and_grand.sum(dim=1).tolist() == [0, n]
    unexplained = utilities[:2] - surrogate.utilities(kernel.matrix(empty_and_grand))[:, 0]
    unexplained_gain = unexplained[1] - unexplained[0]
    expected = surrogate.shapley()[:, 0] + unexplained_gain / n

    assert_close(values, expected, rtol=0, atol=1e-9)
    assert_close(doubled_values, 2 * values)


def test_standard_errors_match_real_errors_in_noisy_games():
    noise = 0.2
    masks = few_coalitions(6, "both")
    ratios = []
    for seed in range(20):
        sums, averages = make_quadratic_game(6, seed)
        play = partial(play_quadratic_game, sums=sums, averages=averages)
        exact = exact_shapley(play, 6)
        generator = make_generator(seed)
        deviations = torch.randn(
            len(masks),
            generator=generator,
            dtype=torch.float64,
        )
        utilities = play(masks) + noise * deviations

        estimate = few_coalitions_shapley(masks, utilities, noise=noise)

        ratios.append((estimate.values - exact.values) / estimate.stderr)

    # 1: standard errors as large as the errors. They may be too large, by two thirds at most, and not too small.
    root_mean_square = torch.cat(ratios).square().mean().sqrt()
    assert 0.6 < root_mean_square < 1


NORMAL_QUANTILE = 1.6448536  # 95 % of a normal variable are below it
#: The deviation of one seed's values, as a share of the gain: where the seeds tell it too, and where one seed does not.
SEED_DEVIATION = 0.025
ONE_SEED_DEVIATION = 0.045


def test_interval_over_seeds_equals_that_by_hand():
    """Three seeds: variances 1 and 0, mean values 2 and 100, of which 2.5 % is 2.55."""
    values = torch.tensor([[1.0, 100.0], [2.0, 100.0], [3.0, 100.0]])
    stderr_of_fit = torch.tensor([0.0, 0.3])

    half_widths = interval_over_seeds(values, stderr_of_fit)

    gain = 2 + 100
    num_seeds = 3
    # A client's own variance and the usual one, of two degrees of freedom each.
    usual_variance = (SEED_DEVIATION * gain) ** 2
    variances = [
        (2 * 1 + 2 * usual_variance) / (2 + 2),
        (2 * 0 + 2 * usual_variance) / (2 + 2),
    ]
    student_quantile = 2.1318468  # of four degrees
    expected = []
    for variance, stderr in zip(variances, stderr_of_fit.double()):
        of_seeds = student_quantile**2 * variance / num_seeds
        of_fit = (NORMAL_QUANTILE * stderr) ** 2
        expected.append((of_seeds + of_fit).sqrt())
    assert_close(half_widths, torch.stack(expected), rtol=1e-6, atol=0)


def test_interval_over_two_seeds_has_the_larger_mean_variance():
    """The mean variance 2 is larger than 2.5 % of the gain."""
    half_widths = interval_over_seeds(torch.tensor([[1.0, -5.0], [3.0, -3.0]]))

    # The variance 2 of one degree of freedom, and the mean variance 2 in place of the usual one, of two.
    student_quantile = 2.3533634  # of three degrees
    num_seeds = 2
    variance = (1 * 2 + 2 * 2) / (1 + 2)
    expected = student_quantile * (variance / num_seeds) ** 0.5
    assert half_widths.tolist() == pytest.approx([expected, expected])


def test_interval_over_one_seed_has_a_share_of_the_gain():
    values = [1.0, 1.0]
    stderr_of_fit = 0.3

    half_widths = interval_over_seeds(torch.tensor([values]), stderr_of_fit)

    gain = sum(values)
    stderr_of_seed = ONE_SEED_DEVIATION * gain
    expected = NORMAL_QUANTILE * (stderr_of_fit**2 + stderr_of_seed**2) ** 0.5
    assert half_widths.tolist() == pytest.approx([expected, expected])


def test_interval_over_seeds_of_a_vector_is_refused():
    with pytest.raises(ValueError, match=r"\[seeds, n\]"):
        interval_over_seeds(torch.ones(3))


EIGHT_MASKS = few_coalitions(3, "both")


@pytest.mark.parametrize(
    ("masks", "utilities", "message"),
    [
        (EIGHT_MASKS.int(), torch.rand(8), "expected masks bool"),
        (EIGHT_MASKS, torch.rand(7), "expected masks bool"),
        (EIGHT_MASKS[[0, 1, 2, 2]], torch.rand(4), "a coalition occurs twice"),
        (EIGHT_MASKS[1:], torch.rand(7), "the empty or the grand coalition"),
        (
            EIGHT_MASKS,
            torch.full(
                (8,),
                torch.inf,
            ),
            "is not finite",
        ),
    ],
)
def test_few_coalitions_shapley_of_wrong_masks_or_utilities_raises(masks, utilities, message):
    with pytest.raises(ValueError, match=message):
        few_coalitions_shapley(masks, utilities)


def test_designs_have_the_documented_numbers_of_coalitions():
    empty_and_grand = 2
    pairs = 7 * 6 // 2
    expected_numbers = {
        "singles": empty_and_grand + 7,
        "leave-one-out": empty_and_grand + 7,
        "both": empty_and_grand + 7 + 7,
        "pairs": empty_and_grand + 7 + pairs,
        "pairs+leave-one-out": empty_and_grand + 7 + pairs + 7,
        "pairs+leave-two-out": empty_and_grand + 7 + pairs + 7 + pairs,
        "all": 2**7,
    }

    for design, expected_number in expected_numbers.items():
        assert len(few_coalitions(7, design)) == expected_number
    assert torch.equal(few_coalitions(7), few_coalitions(7, "both"))
    assert torch.equal(few_coalitions(7, "auto"), few_coalitions(7, "both"))
    assert len(few_coalitions(3)) == 2**3  # all
