"""Predicted outputs: against scikit-learn's Gaussian process, enumerations by hand, and what symmetry demands."""

import itertools
import math

import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct

from flsv.functional import exact_shapley, few_coalitions, predicted_shapley
from flsv.functional.shapley.exact import all_coalitions
from flsv.functional.shapley.predicted_outputs import (
    CAP,
    PredictedGame,
    cap_logits,
    coalition_shares,
    interpolation_weights,
    whole_layers,
)

SAMPLES, CLASSES = 60, 4


def a_federation(n, design="singles", seed=0):
    """Return trained coalitions, their logits, the clients' sizes and the score."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    trained = few_coalitions(n, design)
    base = torch.randn(n, SAMPLES, CLASSES, generator=draw) + 2 * torch.nn.functional.one_hot(
        y, CLASSES
    )
    sizes = torch.randint(20, 90, (n,), generator=draw)
    outputs = torch.einsum("tn,nvm->tvm", coalition_shares(trained, sizes).float(), base)
    outputs += 0.3 * torch.randn(outputs.shape, generator=draw)

    def accuracy(outputs):
        return (outputs.argmax(-1) == y).double().mean(-1)

    return trained, outputs, sizes, accuracy


@pytest.mark.parametrize("design", ["singles", "both", "pairs"])
def test_interpolation_equals_the_scikit_learn_gaussian_process(design):
    trained, outputs, sizes, _ = a_federation(5, design)
    trained, outputs = trained[1:], outputs[1:].flatten(1).double()
    masks = all_coalitions(5)[1:]
    kernel = ConstantKernel(4.0) * DotProduct(sigma_0=0.0) + RBF(length_scale=0.5)
    points = coalition_shares(trained, sizes).numpy()
    # The mean by generalized least squares, as in ordinary kriging.
    inverse = torch.linalg.inv(
        torch.from_numpy(kernel(points)) + 1e-3 * torch.eye(len(points)).double()
    )
    mean = (inverse.sum(0) @ outputs) / inverse.sum()
    process = GaussianProcessRegressor(kernel, alpha=1e-3, optimizer=None).fit(
        points, (outputs - mean).numpy()
    )
    expected = mean + torch.from_numpy(process.predict(coalition_shares(masks, sizes).numpy()))
    found = interpolation_weights(masks, trained, sizes) @ outputs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def by_hand(trained, outputs, sizes, accuracy):
    """Return Shapley values of the mean of both games, by the definition and one coalition at a time."""
    n = len(sizes)
    known = {tuple(mask.nonzero().flatten().tolist()): row for row, mask in enumerate(trained)}
    full = trained.sum(1) > 0
    capped = cap_logits(outputs[full].double(), trained[full].sum(1) == 1)

    def utility(members):
        if members in known:
            return float(accuracy(outputs[known[members]][None]))
        mask = torch.zeros(1, n, dtype=torch.bool)
        mask[0, list(members)] = True
        share = sizes[list(members)].double() / sizes[list(members)].sum()
        mixed = sum(p * outputs[known[(i,)]].double().softmax(-1) for i, p in zip(members, share))
        interpolated = torch.einsum(
            "t,tvm->vm", interpolation_weights(mask, trained[full], sizes)[0], capped
        )
        return float(accuracy(interpolated[None]) + accuracy(mixed[None])) / 2

    values = torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        for size in range(n):
            for members in itertools.combinations(others, size):
                gain = utility(tuple(sorted((*members, i)))) - utility(members)
                values[i] += gain / (n * math.comb(n - 1, size))
    return values


@pytest.mark.parametrize("design", ["singles", "both"])
def test_values_are_those_of_an_enumeration_by_hand(design):
    trained, outputs, sizes, accuracy = a_federation(4, design)
    found = predicted_shapley(trained, accuracy(outputs), outputs, sizes, accuracy, logits=True)
    torch.testing.assert_close(
        found.values, by_hand(trained, outputs, sizes, accuracy), rtol=0, atol=1e-12
    )
    assert found.evaluations == 16
    assert not found.stderr.any()


def test_values_are_exact_with_all_coalitions():
    trained, outputs, sizes, accuracy = a_federation(4, "all")
    utilities = torch.rand(len(trained), dtype=torch.float64)
    table = {tuple(mask): u for mask, u in zip(trained.tolist(), utilities)}
    exact = exact_shapley(
        lambda masks: torch.stack([table[tuple(mask)] for mask in masks.tolist()]), 4
    ).values
    found = predicted_shapley(trained, utilities, outputs, sizes, accuracy, logits=True)
    torch.testing.assert_close(found.values, exact, rtol=0, atol=1e-12)
    assert found.disagreement.abs().max() < 1e-12


def test_values_sum_to_the_gain_and_follow_the_clients():
    trained, outputs, sizes, accuracy = a_federation(5)
    utilities = accuracy(outputs)
    found = predicted_shapley(trained, utilities, outputs, sizes, accuracy, logits=True)
    torch.testing.assert_close(found.values.sum(), utilities[1] - utilities[0])
    order = torch.tensor([3, 0, 4, 2, 1])
    moved = predicted_shapley(
        trained[:, order], utilities, outputs, sizes[order], accuracy, logits=True
    )
    torch.testing.assert_close(moved.values, found.values[order], rtol=0, atol=1e-12)


def test_large_logits_of_one_client_are_capped():
    """A last layer times a thousand changes no score of its model: its logits count as 1.5 times the median's."""
    trained, outputs, sizes, accuracy = a_federation(5)
    utilities = accuracy(outputs)
    outputs[2] *= 1000
    capped = cap_logits(outputs[1:], trained[1:].sum(1) == 1)
    norms = capped.norm(dim=-1).mean(1)
    torch.testing.assert_close(norms[1], CAP * norms[1:].median())
    much = predicted_shapley(trained, utilities, outputs, sizes, accuracy, logits=True).values
    outputs[2] *= 1000
    more = predicted_shapley(trained, utilities, outputs, sizes, accuracy, logits=True).values
    torch.testing.assert_close(much, more, rtol=0, atol=1e-9)


def test_predicted_values_of_a_class_equal_those_of_its_game():
    trained, outputs, sizes, _ = a_federation(4)
    y = torch.arange(SAMPLES) % CLASSES

    def by_class(outputs):
        hits = (outputs.argmax(-1) == y).double()
        return torch.stack([hits[:, y == label].mean(1) for label in range(CLASSES)], 1)

    found = predicted_shapley(trained, by_class(outputs), outputs, sizes, by_class, logits=True)
    assert found.values.shape == found.disagreement.shape == (4, CLASSES)
    for label in range(CLASSES):
        alone = predicted_shapley(
            trained,
            by_class(outputs)[:, label],
            outputs,
            sizes,
            lambda each, label=label: by_class(each)[:, label],
            logits=True,
        )
        torch.testing.assert_close(found.values[:, label], alone.values)


def test_predicted_values_of_a_linear_regression_are_exact():
    """The members' predictions average linearly where all trained models do: then both games are the true one."""
    n, y = 4, torch.linspace(-1, 1, SAMPLES)
    everyone = all_coalitions(n)
    own, sizes = (
        torch.randn(n, SAMPLES, generator=torch.Generator().manual_seed(1)),
        torch.tensor([3, 1, 4, 2]),
    )
    outputs = (coalition_shares(everyone, sizes).float() @ own).double()

    def negative_error(outputs):
        return -(outputs - y).square().mean(-1)

    table = {tuple(mask): u for mask, u in zip(everyone.tolist(), negative_error(outputs))}
    exact = exact_shapley(
        lambda masks: torch.stack([table[tuple(mask)] for mask in masks.tolist()]), n
    ).values
    few = everyone.sum(1) <= 1
    few[-1] = True
    found = predicted_shapley(
        everyone[few],
        negative_error(outputs[few]),
        outputs[few],
        sizes,
        negative_error,
        logits=False,
    )
    torch.testing.assert_close(found.values, exact, rtol=0.01, atol=0.01)


def test_predicted_values_of_17_clients_are_sampled_close_to_exact_ones():
    trained, outputs, sizes, accuracy = a_federation(17)
    found = predicted_shapley(trained, accuracy(outputs), outputs, sizes, accuracy, logits=True)
    game = PredictedGame(trained, accuracy(outputs), outputs, sizes, accuracy, logits=True)
    exact = exact_shapley(game, 17).values.mean(1)
    assert found.evaluations <= 2**16
    assert ((found.values - exact).abs() < 5 * found.stderr).all()
    assert found.stderr.max() < 0.01


def test_whole_layers_accepts_only_complete_coalition_sizes():
    masks = few_coalitions(4, "both")
    assert whole_layers(masks)
    assert not whole_layers(masks[:-1])
    assert not whole_layers(few_coalitions(4, "leave-one-out"))


def test_predicted_shapley_with_wrong_arguments_is_refused():
    trained, outputs, sizes, accuracy = a_federation(3)
    with pytest.raises(ValueError, match="each player alone"):
        predicted_shapley(
            trained[:-1], accuracy(outputs[:-1]), outputs[:-1], sizes, accuracy, logits=True
        )
    with pytest.raises(ValueError, match="finite"):
        predicted_shapley(
            trained, accuracy(outputs), outputs * torch.inf, sizes, accuracy, logits=True
        )
    with pytest.raises(ValueError, match="T utilities"):
        predicted_shapley(trained, accuracy(outputs)[1:], outputs, sizes, accuracy, logits=True)
