"""Surrogate plus residual, and the closed-form Shapley values of its features."""

from math import comb

import pytest
import torch
from functional.shapley.games import make_accuracy_table, make_random_table, make_table_game
from torch.testing import assert_close

from flsv.functional.shapley.exact import all_coalitions, shapley_of_table
from flsv.functional.shapley.game import MemoizedGame
from flsv.functional.shapley.kernels import (
    averaged_membership,
    gaussian,
    gram,
    kernel_shapley,
    membership,
    pairs,
)
from flsv.functional.shapley.surrogate import (
    CONSTANT_VARIANCE,
    JointSurrogate,
    PairedSample,
    adjusted_values,
    fit_surrogate,
    joint_shapley,
    scale_kernels,
    surrogate_shapley,
)
from helpers import make_generator


def test_leave_one_out_residuals_equal_those_by_refitting():
    num_coalitions = 20
    order = torch.randperm(2**5, generator=make_generator())
    masks = all_coalitions(5)[order[:num_coalitions]]
    utilities = make_table_game(make_accuracy_table(5))(masks).unsqueeze(1)
    kernels = [membership, gaussian(0.3)]

    surrogate, excluded = fit_surrogate([scale_kernels(kernels, masks)], utilities)

    # The fit is by kernel ridge regression: (matrix + penalty I) dual = targets.
    scale = utilities.std()
    targets = (utilities - utilities.mean()) / scale
    matrix = torch.full(
        (num_coalitions, num_coalitions),
        CONSTANT_VARIANCE,
        dtype=torch.float64,
    )  # a mean
    for kernel, weight in surrogate.kernel.parts:
        matrix += weight * gram(kernel, masks, masks)
    dual = surrogate.coefficients / scale
    fitted = utilities.mean() + scale * (matrix @ dual)
    assert_close(surrogate.utilities(surrogate.kernel.matrix(masks)), fitted)

    penalty = ridge_penalty(matrix, dual, targets)
    ridge = penalty * torch.eye(num_coalitions - 1, dtype=torch.float64)

    for coalition in range(num_coalitions):
        is_other = torch.arange(num_coalitions) != coalition
        system = matrix[is_other][:, is_other] + ridge
        dual_of_others = torch.linalg.solve(system, targets[is_other])
        prediction = matrix[coalition, is_other] @ dual_of_others
        residual = (targets[coalition] - prediction) * scale
        assert_close(excluded[coalition], residual)


def ridge_penalty(matrix, dual, targets):
    """Solve (matrix + penalty I) dual = targets for the penalty, which the fit has chosen and does not return."""
    return float(((targets - matrix @ dual) / dual).median())


def values_by_maximum_sample_reuse(masks, residuals):
    """The equation of Witter, Liu and Musco, coalition by coalition."""
    num_players = masks.shape[1]
    sizes = masks.sum(1).tolist()
    values = torch.zeros(num_players, dtype=torch.float64)

    for mask, size, residual in zip(masks, sizes, residuals):
        sampled_share_of_size = sizes.count(size) / comb(num_players, size)
        for player in range(num_players):
            if mask[player]:
                weight = 1 / (num_players * comb(num_players - 1, size - 1))
            else:
                weight = -1 / (num_players * comb(num_players - 1, size))
            values[player] += weight * residual / sampled_share_of_size

    return values


def test_residual_terms_equal_the_papers_maximum_sample_reuse():
    """Where the fit has seen the whole sample."""
    num_players = 7
    table = make_random_table(num_players, seed=2)
    game = MemoizedGame(make_table_game(table), num_players)
    sample = PairedSample(num_players, make_generator(5))
    sample.draw(24)

    values, _ = adjusted_values(game, sample)

    first_halves_of_pairs = torch.cat([stratum.masks for stratum in sample.strata])
    nobody = torch.zeros(num_players)
    everybody = torch.ones(num_players)
    empty_and_grand = torch.stack([nobody, everybody]).bool()
    masks = torch.cat([empty_and_grand, first_halves_of_pairs, ~first_halves_of_pairs])
    surrogate = JointSurrogate(masks, game(masks))
    residuals = (game(masks) - surrogate(masks))[:, 0]
    expected = surrogate.shapley()[:, 0] + values_by_maximum_sample_reuse(masks, residuals)

    assert_close(values[:, 0], expected)


def set_of_rows(masks):
    return set(map(tuple, masks.tolist()))


def assert_no_pair_twice(stratum):
    """Nor a coalition of another size; and a stratum of singles has all of them."""
    sizes = stratum.masks.sum(dim=1)
    assert (sizes == stratum.size).all()

    coalitions = set_of_rows(stratum.masks)
    complements = set_of_rows(~stratum.masks)
    assert len(coalitions) == len(stratum.masks)
    assert not coalitions & complements, "a pair counted twice"

    if stratum.size == 1:
        assert len(coalitions) == stratum.capacity


@pytest.mark.parametrize("n", [1, 2, 7, 8, 20])
def test_paired_sample_draws_the_total_without_a_pair_twice(n):
    for extra_pairs in (0, 7, 300):
        sample = PairedSample(n, make_generator())
        assert sample.capacity == 2 ** (n - 1) - 1
        num_pairs = sample.min_num_pairs + extra_pairs
        total = min(num_pairs, sample.capacity)

        sample.draw(total)

        assert sum(len(stratum.masks) for stratum in sample.strata) == total
        for stratum in sample.strata:
            assert_no_pair_twice(stratum)


def test_draws_per_size_follow_the_inverse_root_of_s_times_n_minus_s():
    n = 41
    sample = PairedSample(n, make_generator())

    sample.draw(4000)

    counts = {stratum.size: len(stratum.masks) for stratum in sample.strata}
    middle = 20
    for size in (5, 10, 15):
        ratio = middle * (n - middle) / (size * (n - size))
        relative_count = counts[size] / counts[middle]
        assert relative_count == pytest.approx(ratio**0.5, abs=0.03)


KERNELS = {
    "membership": membership,
    "pairs": pairs,
    "averaged": averaged_membership,
    "narrow": gaussian(0.05),
    "wide": gaussian(3.0),
}


@pytest.mark.parametrize("n", [1, 2, 5, 7])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_shapley_equals_the_exact_values_of_kernel_games(name, n):
    everything = all_coalitions(n)
    kernel = KERNELS[name]
    table = gram(kernel, everything, everything)  # column T: the game S -> k(S, T)

    values = kernel_shapley(kernel, everything)

    expected = shapley_of_table(table).T
    assert_close(values, expected)


def test_kernels_are_inner_products_of_features():
    members = all_coalitions(5).double()
    sizes = members.sum(dim=1, keepdim=True)
    averages = members / sizes.clamp_min(1)
    lower, upper = torch.triu_indices(5, 5, 1)
    pairs_of_members = members[:, lower] * members[:, upper]
    features_by_kernel = {
        membership: members,
        pairs: pairs_of_members,
        averaged_membership: averages,
    }

    for kernel, features in features_by_kernel.items():
        products = features @ features.T
        assert_close(gram(kernel, members, members), products)


def test_gaussian_kernel_falls_with_the_distance_of_averages():
    squared_width = 0.7
    members = all_coalitions(5).double()
    averages = members / members.sum(
        dim=1,
        keepdim=True,
    ).clamp_min(1)

    matrix = gram(gaussian(squared_width), members, members)

    squared_distances = torch.cdist(averages, averages).square()
    expected = torch.exp(-squared_distances / (2 * squared_width))
    assert_close(matrix, expected)


def test_joint_estimation_of_several_games_equals_one_estimation_of_each():
    num_players = 20
    generator = make_generator(3)
    interactions = torch.rand(num_players, num_players, generator=generator, dtype=torch.float64)
    updates = torch.rand(num_players, generator=generator, dtype=torch.float64)

    def squared_mean(masks):
        members = masks.double()
        return (members @ updates / members.sum(1).clamp_min(1)).square()

    def interacting(masks):
        members = masks.double()
        return ((members @ interactions) * members).sum(1)

    def both(masks):
        return torch.stack([squared_mean(masks), interacting(masks)], dim=1)

    joint = joint_shapley(both, num_players, budget=400, generator=make_generator(0), num_parts=2)

    for column, game in enumerate([squared_mean, interacting]):
        single = surrogate_shapley(game, num_players, budget=400, generator=make_generator(0))
        assert_close(joint.values[:, column], single.values, rtol=1e-9, atol=1e-12)
        assert_close(joint.stderr[:, column], single.stderr, rtol=1e-6, atol=1e-12)
