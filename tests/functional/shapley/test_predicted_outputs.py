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


def make_federation(n, design="singles", seed=0):
    """Return trained coalitions, their logits, the clients' sizes and the score."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    trained = few_coalitions(n, design)
    one_hot_labels = torch.nn.functional.one_hot(labels, CLASSES)
    client_logits = torch.randn(n, SAMPLES, CLASSES, generator=generator) + 2 * one_hot_labels
    sizes = torch.randint(20, 90, (n,), generator=generator)

    shares = coalition_shares(trained, sizes).float()
    outputs = torch.einsum("tn,nvm->tvm", shares, client_logits)
    outputs += 0.3 * torch.randn(outputs.shape, generator=generator)

    def accuracy(outputs):
        is_right = outputs.argmax(-1) == labels
        return is_right.double().mean(-1)

    return trained, outputs, sizes, accuracy


@pytest.mark.parametrize("design", ["singles", "both", "pairs"])
def test_interpolation_equals_the_scikit_learn_gaussian_process(design):
    trained, outputs, sizes, _ = make_federation(5, design)
    trained = trained[1:]
    outputs = outputs[1:].flatten(1).double()
    masks = all_coalitions(5)[1:]
    kernel = ConstantKernel(4.0) * DotProduct(sigma_0=0.0) + RBF(length_scale=0.5)

    interpolated = interpolation_weights(masks, trained, sizes) @ outputs

    # The mean by generalized least squares, as in ordinary kriging.
    points = coalition_shares(trained, sizes).numpy()
    noise = 1e-3 * torch.eye(len(points)).double()
    inverse = torch.linalg.inv(torch.from_numpy(kernel(points)) + noise)
    mean = (inverse.sum(0) @ outputs) / inverse.sum()
    process = GaussianProcessRegressor(kernel, alpha=1e-3, optimizer=None)
    process.fit(points, (outputs - mean).numpy())
    predicted = process.predict(coalition_shares(masks, sizes).numpy())
    expected = mean + torch.from_numpy(predicted)

    torch.testing.assert_close(interpolated, expected, rtol=0, atol=1e-8)


def values_by_hand(trained, outputs, sizes, accuracy):
    """Return Shapley values of the mean of both games, by the definition and one coalition at a time."""
    n = len(sizes)
    row_of_members = {}
    for row, mask in enumerate(trained):
        row_of_members[tuple(mask.nonzero().flatten().tolist())] = row

    is_trained = trained.sum(1) > 0
    is_single = trained[is_trained].sum(1) == 1
    capped = cap_logits(outputs[is_trained].double(), is_single)

    def utility(members):
        if members in row_of_members:
            row = row_of_members[members]
            return float(accuracy(outputs[row][None]))

        mask = torch.zeros(1, n, dtype=torch.bool)
        mask[0, list(members)] = True
        samples = sizes[list(members)].double()
        mixed = 0.0
        for client, share in zip(members, samples / samples.sum()):
            single = outputs[row_of_members[(client,)]].double()
            mixed = mixed + share * single.softmax(-1)

        weights = interpolation_weights(mask, trained[is_trained], sizes)[0]
        interpolated = torch.einsum("t,tvm->vm", weights, capped)
        return float(accuracy(interpolated[None]) + accuracy(mixed[None])) / 2

    values = torch.zeros(n, dtype=torch.float64)
    for client in range(n):
        other_clients = [j for j in range(n) if j != client]
        for size in range(n):
            weight = 1 / (n * math.comb(n - 1, size))
            for members in itertools.combinations(other_clients, size):
                joined = tuple(sorted((*members, client)))
                values[client] += weight * (utility(joined) - utility(members))

    return values


@pytest.mark.parametrize("design", ["singles", "both"])
def test_values_are_those_of_an_enumeration_by_hand(design):
    trained, outputs, sizes, accuracy = make_federation(4, design)

    estimate = predicted_shapley(
        trained,
        accuracy(outputs),
        outputs,
        sizes,
        accuracy,
        logits=True,
    )

    expected = values_by_hand(trained, outputs, sizes, accuracy)
    torch.testing.assert_close(
        estimate.values,
        expected,
        rtol=0,
        atol=1e-12,
    )
    assert estimate.evaluations == 16
    assert not estimate.stderr.any()


def make_table_utility(masks, utilities):
    """The game of these coalitions' utilities."""
    table = {
        tuple(mask): utility
        for mask, utility in zip(
            masks.tolist(),
            utilities,
        )
    }

    def utility(coalitions):
        return torch.stack([table[tuple(mask)] for mask in coalitions.tolist()])

    return utility


def test_values_are_exact_with_all_coalitions():
    trained, outputs, sizes, accuracy = make_federation(4, "all")
    utilities = torch.rand(len(trained), dtype=torch.float64)
    exact = exact_shapley(make_table_utility(trained, utilities), 4).values

    estimate = predicted_shapley(trained, utilities, outputs, sizes, accuracy, logits=True)

    torch.testing.assert_close(estimate.values, exact, rtol=0, atol=1e-12)
    assert estimate.disagreement.abs().max() < 1e-12


def test_values_sum_to_the_gain_and_follow_the_clients():
    trained, outputs, sizes, accuracy = make_federation(5)
    utilities = accuracy(outputs)
    order = torch.tensor([3, 0, 4, 2, 1])

    values = predicted_shapley(trained, utilities, outputs, sizes, accuracy, logits=True).values
    reordered = predicted_shapley(
        trained[:, order],
        utilities,
        outputs,
        sizes[order],
        accuracy,
        logits=True,
    )

    torch.testing.assert_close(values.sum(), utilities[1] - utilities[0])
    torch.testing.assert_close(
        reordered.values,
        values[order],
        rtol=0,
        atol=1e-12,
    )


def test_large_logits_of_one_client_are_capped():
    """A last layer times a thousand changes no score of its model: its logits count as 1.5 times the median's."""
    trained, outputs, sizes, accuracy = make_federation(5)
    utilities = accuracy(outputs)
    outputs[2] *= 1000
    capped = cap_logits(outputs[1:], trained[1:].sum(1) == 1)
    norms = capped.norm(dim=-1).mean(1)

    torch.testing.assert_close(norms[1], CAP * norms[1:].median())

    values = predicted_shapley(trained, utilities, outputs, sizes, accuracy, logits=True).values
    outputs[2] *= 1000
    values_of_larger_logits = predicted_shapley(
        trained, utilities, outputs, sizes, accuracy, logits=True
    ).values

    torch.testing.assert_close(values, values_of_larger_logits, rtol=0, atol=1e-9)


def test_predicted_values_of_a_class_equal_those_of_its_game():
    trained, outputs, sizes, _ = make_federation(4)
    y = torch.arange(SAMPLES) % CLASSES

    def by_class(outputs):
        hits = (outputs.argmax(-1) == y).double()
        recalls = [hits[:, y == label].mean(1) for label in range(CLASSES)]
        return torch.stack(recalls, 1)

    utilities = by_class(outputs)

    estimate = predicted_shapley(trained, utilities, outputs, sizes, by_class, logits=True)

    assert estimate.values.shape == estimate.disagreement.shape == (4, CLASSES)

    for label in range(CLASSES):
        of_class = predicted_shapley(
            trained,
            utilities[:, label],
            outputs,
            sizes,
            lambda predictions, label=label: by_class(predictions)[:, label],
            logits=True,
        )
        torch.testing.assert_close(estimate.values[:, label], of_class.values)


def test_predicted_values_of_a_linear_regression_are_exact():
    """The members' predictions average linearly where all trained models do: then both games are the true one."""
    n = 4
    y = torch.linspace(-1, 1, SAMPLES)
    masks = all_coalitions(n)
    single_outputs = torch.randn(
        n,
        SAMPLES,
        generator=torch.Generator().manual_seed(1),
    )
    sizes = torch.tensor([3, 1, 4, 2])
    outputs = (coalition_shares(masks, sizes).float() @ single_outputs).double()

    def negative_error(outputs):
        return -(outputs - y).square().mean(-1)

    utilities = negative_error(outputs)
    is_trained = masks.sum(1) <= 1
    is_trained[-1] = True

    estimate = predicted_shapley(
        masks[is_trained],
        utilities[is_trained],
        outputs[is_trained],
        sizes,
        negative_error,
        logits=False,
    )

    exact = exact_shapley(make_table_utility(masks, utilities), n).values
    torch.testing.assert_close(estimate.values, exact, rtol=0.01, atol=0.01)


def test_predicted_values_of_17_clients_are_sampled_close_to_exact_ones():
    trained, outputs, sizes, accuracy = make_federation(17)
    utilities = accuracy(outputs)

    estimate = predicted_shapley(trained, utilities, outputs, sizes, accuracy, logits=True)

    game = PredictedGame(trained, utilities, outputs, sizes, accuracy, logits=True)
    exact = exact_shapley(game, 17).values.mean(1)

    assert estimate.evaluations <= 2**14

    errors = (estimate.values - exact).abs()
    assert (errors < 5 * estimate.stderr).all()
    # Along orders of the clients it is 0.0013, with four times as many coalitions.
    assert estimate.stderr.max() < 0.0002


def test_whole_layers_accepts_only_complete_coalition_sizes():
    masks = few_coalitions(4, "both")
    assert whole_layers(masks)
    assert not whole_layers(masks[:-1])
    assert not whole_layers(few_coalitions(4, "leave-one-out"))


def test_predicted_shapley_with_wrong_arguments_is_refused():
    trained, outputs, sizes, accuracy = make_federation(3)
    utilities = accuracy(outputs)

    with pytest.raises(ValueError, match="each player alone"):
        predicted_shapley(
            trained[:-1],
            utilities[:-1],
            outputs[:-1],
            sizes,
            accuracy,
            logits=True,
        )

    infinite_outputs = outputs * torch.inf
    with pytest.raises(ValueError, match="finite"):
        predicted_shapley(trained, utilities, infinite_outputs, sizes, accuracy, logits=True)

    with pytest.raises(ValueError, match="T utilities"):
        predicted_shapley(
            trained,
            utilities[1:],
            outputs,
            sizes,
            accuracy,
            logits=True,
        )
