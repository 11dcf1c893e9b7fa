"""Surrogate plus residual, and the closed-form Shapley values of its features."""

from functools import partial
from math import comb

import pytest
import torch
from functional.shapley.games import (
    make_accuracy_table,
    make_generator,
    make_random_table,
    make_table_game,
)

from flsv.functional import exact_shapley, surrogate_shapley
from flsv.functional.shapley.exact import all_coalitions, shapley_of_table
from flsv.functional.shapley.game import MemoizedGame
from flsv.functional.shapley.surrogate import (
    CONSTANT,
    SURROGATES,
    Kernel,
    PairedSample,
    adjusted_values,
    averaged_membership,
    fit_surrogate,
    gaussian,
    gram,
    kernel_shapley,
    membership,
    pairs,
)


@pytest.mark.parametrize("parts", SURROGATES[-3:])
def test_surrogate_shapley_equals_exact_values_of_the_fitted_game(parts: list[Kernel]) -> None:
    n = 6
    table = make_accuracy_table(6)
    observed = torch.randperm(64, generator=make_generator())[:40]
    utilities = torch.stack([table, table**2], dim=1)
    surrogate, left_out = fit_surrogate([parts], all_coalitions(n)[observed], utilities[observed])
    fitted = surrogate(all_coalitions(n))

    assert fitted.shape == (64, 2)
    torch.testing.assert_close(surrogate.shapley(), shapley_of_table(fitted))

    residual = (utilities - fitted)[observed]
    assert (residual.square().mean(dim=0) < utilities.var(dim=0)).all()
    assert (left_out.abs() >= residual.abs() - 1e-9).all(), (
        "a coalition is closer to a fit that has seen it"
    )


def test_leave_one_out_residuals_equal_those_by_refitting() -> None:
    masks = all_coalitions(5)[torch.randperm(32, generator=make_generator())[:20]]
    utilities = make_table_game(make_accuracy_table(5))(masks).unsqueeze(1)
    surrogate, left_out = fit_surrogate([SURROGATES[1]], masks, utilities)
    scale = utilities.std()
    y = (utilities - utilities.mean()) / scale
    matrix = (
        sum(weight * gram(kernel, masks, masks) for kernel, weight in surrogate.parts) + CONSTANT
    )
    # The ridge penalty, read off the fit: (matrix + penalty) dual = y.
    dual = surrogate.coefficients / scale
    penalty = float(((y - matrix @ dual) / dual).median())

    for i in range(20):
        keep = torch.arange(20) != i
        system = matrix[keep][:, keep] + penalty * torch.eye(19, dtype=torch.float64)
        prediction = matrix[i, keep] @ torch.linalg.solve(system, y[keep])
        torch.testing.assert_close(left_out[i], (y[i] - prediction) * scale)


def test_residual_terms_equal_the_papers_maximum_sample_reuse() -> None:
    """The equation of Witter, Liu and Musco, coalition by coalition, where the fit has seen the sample."""
    n = 7
    table = make_random_table(n, seed=2)
    game = MemoizedGame(make_table_game(table), n)
    sample = PairedSample(n, make_generator(5))
    sample.draw(24)
    fit = partial(fit_surrogate, SURROGATES)

    values, _ = adjusted_values(fit, game, sample)

    halves = torch.cat([layer.masks for layer in sample.layers])
    empty_and_grand = torch.stack(
        [
            torch.zeros(n),
            torch.ones(n),
        ]
    ).bool()
    masks = torch.cat([empty_and_grand, halves, ~halves])
    surrogate, _ = fit(masks, game(masks))
    residuals = (game(masks) - surrogate(masks))[:, 0]
    sizes = masks.sum(1).tolist()
    expected = surrogate.shapley()[:, 0].clone()

    for mask, size, residual in zip(masks, sizes, residuals):
        chance = sizes.count(size) / comb(n, size)
        for player in range(n):
            if mask[player]:
                weight = 1 / (n * comb(n - 1, size - 1))
            else:
                weight = -1 / (n * comb(n - 1, size))
            expected[player] += weight * residual / chance

    torch.testing.assert_close(values[:, 0], expected)


def test_surrogate_is_exact_for_games_of_its_kernels() -> None:
    updates = torch.randn(12, 3, generator=make_generator(), dtype=torch.float64)

    def utility(masks: torch.Tensor) -> torch.Tensor:
        average = masks.double() @ updates / masks.sum(dim=1, keepdim=True).clamp_min(1)
        return -(average - 0.3).square().sum(dim=1)

    exact = exact_shapley(utility, 12).values
    scale = exact.abs().max()
    sampled = surrogate_shapley(utility, 12, budget=300, generator=make_generator())

    assert (sampled.values - exact).abs().max() < 2e-3 * scale


@pytest.mark.parametrize("n", [1, 2, 7, 8, 20])
def test_paired_sample_draws_the_total_without_a_pair_twice(n: int) -> None:
    for extra_pairs in (0, 7, 300):
        sample = PairedSample(n, make_generator())
        assert sample.capacity == 2 ** (n - 1) - 1
        total = min(sample.minimum + extra_pairs, sample.capacity)
        sample.draw(total)
        assert sum(len(layer.masks) for layer in sample.layers) == total
        for layer in sample.layers:
            rows = set(map(tuple, layer.masks.tolist()))
            assert len(rows) == len(layer.masks)
            assert (layer.masks.sum(dim=1) == layer.size).all()
            complements = set(map(tuple, (~layer.masks).tolist()))
            assert not rows & complements, "a pair counted twice"
            assert layer.size > 1 or len(rows) == layer.capacity


def test_draws_per_size_follow_the_inverse_root_of_s_times_n_minus_s() -> None:
    n = 41
    sample = PairedSample(41, make_generator())
    sample.draw(4000)
    counts = {layer.size: len(layer.masks) for layer in sample.layers}

    for size in (5, 10, 15):
        assert counts[size] / counts[20] == pytest.approx(
            (20 * 21 / (size * (n - size))) ** 0.5, abs=0.03
        )


def test_standard_errors_of_the_surrogate_are_near_the_spread_over_seeds() -> None:
    game = make_table_game(make_random_table(7, seed=3))
    runs = [
        surrogate_shapley(game, 7, budget=60, generator=make_generator(seed)) for seed in range(60)
    ]
    claimed = torch.stack([run.stderr for run in runs]).square().mean(0).sqrt()
    ratio = claimed / torch.stack([run.values for run in runs]).std(0)

    assert ((ratio > 0.75) & (ratio < 1.5)).all()


def test_surrogate_values_scale_with_utilities_and_are_zero_for_constant_utilities() -> None:
    table = make_accuracy_table(8)
    constant = torch.full_like(table, 0.7)
    utilities = torch.stack(
        [
            table,
            constant,
            -2 * table,
        ],
        dim=1,
    )

    estimate = surrogate_shapley(
        make_table_game(utilities),
        8,
        budget=90,
        generator=make_generator(),
    )

    assert (estimate.values[:, 1] == 0).all()
    assert (estimate.stderr[:, 1] == 0).all()
    torch.testing.assert_close(estimate.values[:, 2], -2 * estimate.values[:, 0])


KERNELS = {
    "membership": membership,
    "pairs": pairs,
    "averaged": averaged_membership,
    "narrow": gaussian(0.05),
    "wide": gaussian(3.0),
}


@pytest.mark.parametrize("n", [1, 2, 5, 7])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_shapley_equals_the_exact_values_of_kernel_games(name: str, n: int) -> None:
    everything = all_coalitions(n)
    table = gram(KERNELS[name], everything, everything)  # column T: the game S -> k(S, T)
    torch.testing.assert_close(kernel_shapley(KERNELS[name], everything), shapley_of_table(table).T)


def test_kernels_are_inner_products_of_features() -> None:
    masks = all_coalitions(5).double()
    sizes = masks.sum(dim=1, keepdim=True).clamp_min(1)
    upper = torch.triu_indices(5, 5, 1)
    products = masks[:, upper[0]] * masks[:, upper[1]]

    for kernel, features in (
        (membership, masks),
        (pairs, products),
        (averaged_membership, masks / sizes),
    ):
        torch.testing.assert_close(gram(kernel, masks, masks), features @ features.T)

    distances = torch.cdist(masks / sizes, masks / sizes).square()
    torch.testing.assert_close(gram(gaussian(0.7), masks, masks), torch.exp(-distances / 1.4))
