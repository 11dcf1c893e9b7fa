"""Predicted outputs: against scikit-learn's Gaussian process, enumerations by hand, and what symmetry demands."""

import pytest
import torch
from functional.shapley.games import shapley_by_all_orders
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct
from torch.testing import assert_close

from flsv.functional import exact_shapley, few_coalitions, predicted_shapley
from flsv.functional.shapley.exact import all_coalitions, shapley_of_table
from flsv.functional.shapley.mixtures import (
    MAX_NORM_RATIO,
    cap_logits,
    coalition_shares,
    interpolation_weights,
)
from flsv.functional.shapley.predicted_outputs import (
    OutputMeasure,
    PredictedGame,
    has_complete_sizes,
)
from helpers import make_generator

NUM_SAMPLES = 60
NUM_CLASSES = 4


def make_federation(num_clients, design="singles", seed=0):
    """Return T trained coalitions ``[T, n]``, their logits ``[T, V, M]`` for V samples and M classes, the clients'
    sizes ``[n]`` and the score. The first coalition is the empty one, the second that of all clients, and those of one
    client follow."""
    generator = make_generator(seed)
    labels = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)
    trained = few_coalitions(num_clients, design)
    one_hot_labels = torch.nn.functional.one_hot(labels, NUM_CLASSES)
    noise = torch.randn(num_clients, NUM_SAMPLES, NUM_CLASSES, generator=generator)
    client_logits = noise + 2 * one_hot_labels
    sizes = torch.randint(20, 90, (num_clients,), generator=generator)

    # A coalition's logits are the mean of its members', with noise.
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
    linear_kernel = ConstantKernel(4.0) * DotProduct(sigma_0=0.0)
    kernel = linear_kernel + RBF(length_scale=0.5)

    interpolated = interpolation_weights(masks, trained, sizes) @ outputs

    # The mean by generalized least squares, as in ordinary kriging.
    points = coalition_shares(trained, sizes).numpy()
    noise = 1e-3 * torch.eye(len(points)).double()
    covariance = torch.from_numpy(kernel(points))
    inverse = torch.linalg.inv(covariance + noise)
    mean = (inverse.sum(0) @ outputs) / inverse.sum()
    process = GaussianProcessRegressor(kernel, alpha=1e-3, optimizer=None)
    process.fit(points, (outputs - mean).numpy())
    predicted = process.predict(coalition_shares(masks, sizes).numpy())
    expected = mean + torch.from_numpy(predicted)

    assert_close(interpolated, expected, rtol=0, atol=1e-8)


def members_of(mask):
    members = mask.nonzero().flatten()
    return tuple(members.tolist())


def values_by_hand(trained, outputs, sizes, accuracy):
    """Return Shapley values of the mean of both games, one coalition at a time."""
    outputs_by_members = {}
    for mask, logits in zip(trained, outputs):
        outputs_by_members[members_of(mask)] = logits  # [V, M]

    def utility(members):
        if members in outputs_by_members:
            logits = outputs_by_members[members]
            return float(accuracy(logits[None]))

        interpolated = interpolate_by_hand(members, trained, outputs, sizes)
        mixed = mix_by_hand(members, outputs_by_members, sizes)
        both_outputs = torch.stack([interpolated, mixed])
        return float(accuracy(both_outputs).sum()) / 2

    utilities = [utility(members_of(mask)) for mask in all_coalitions(len(sizes))]
    table = torch.tensor(utilities, dtype=torch.float64)
    return torch.from_numpy(shapley_by_all_orders(table))


def interpolate_by_hand(members, trained, outputs, sizes):
    """Return a coalition's logits ``[V, M]``: weighted sums of those of the T trained coalitions but the empty one."""
    has_members = trained.sum(1) > 0
    trained_masks = trained[has_members]
    is_single = trained_masks.sum(1) == 1
    capped_outputs = cap_logits(outputs[has_members].double(), is_single)  # [T, V, M]

    mask = torch.zeros(1, len(sizes), dtype=torch.bool)
    mask[0, list(members)] = True
    (weights,) = interpolation_weights(mask, trained_masks, sizes)  # [T]
    return torch.einsum("t,tvm->vm", weights, capped_outputs)


def mix_by_hand(members, outputs_by_members, sizes):
    """Return the mean ``[V, M]`` of the members' probabilities, by size."""
    member_sizes = sizes[list(members)].double()
    mean = 0.0
    for client, share in zip(members, member_sizes / member_sizes.sum()):
        probabilities = outputs_by_members[client,].double().softmax(-1)
        mean = mean + share * probabilities
    return mean


@pytest.mark.parametrize("design", ["singles", "both", "all"])
def test_values_are_those_of_an_enumeration_by_hand(design):
    trained, outputs, sizes, accuracy = make_federation(4, design)

    utilities = accuracy(outputs)
    estimate = predicted_shapley(trained, utilities, outputs, sizes, accuracy, logits=True)

    expected = values_by_hand(trained, outputs, sizes, accuracy)
    assert_close(estimate.values, expected, rtol=0, atol=1e-12)
    assert estimate.evaluations == 2**4
    assert not estimate.stderr.any()


def enlarge_logits_of_client_0(trained, outputs, factor):
    """As a last layer times ``factor`` does, which changes no accuracy of its model."""
    client_0_alone = trained[:, 0] & (trained.sum(1) == 1)
    outputs = outputs.clone()
    outputs[client_0_alone] *= factor
    return outputs


def test_logits_are_centered_and_those_of_one_client_capped_at_1_5_times_the_median():
    trained, outputs, *_ = make_federation(5)
    outputs = enlarge_logits_of_client_0(trained, outputs, factor=1000)
    has_members = trained.any(1)
    trained = trained[has_members]
    outputs = outputs[has_members]
    is_single = trained.sum(1) == 1

    capped = cap_logits(outputs, is_single)

    sums = capped.sum(-1)
    zeros = torch.zeros_like(sums)
    assert_close(sums, zeros)
    norms = capped.norm(dim=-1).mean(1)  # [T], means over samples
    norms_of_clients = norms[is_single]
    max_norm = MAX_NORM_RATIO * norms_of_clients.median()
    assert_close(norms_of_clients[0], max_norm)


def test_predicted_values_of_a_class_equal_those_of_its_game():
    trained, outputs, sizes, accuracy = make_federation(4)

    def share_of_class_0(outputs):
        is_class_0 = outputs.argmax(-1) == 0
        return is_class_0.double().mean(-1)

    def score_both(outputs):
        return torch.stack(
            [accuracy(outputs), share_of_class_0(outputs)],
            dim=1,
        )

    def predict(score):
        return predicted_shapley(
            trained,
            score(outputs),
            outputs,
            weights=sizes,
            score=score,
            logits=True,
        )

    estimate = predict(score_both)

    assert estimate.disagreement.shape == (4, 2)
    assert_close(estimate.values[:, 0], predict(accuracy).values)
    assert_close(estimate.values[:, 1], predict(share_of_class_0).values)


def test_predicted_values_of_a_linear_regression_are_exact():
    """The members' predictions average linearly where all trained models do: then both games are the true one."""
    y = torch.linspace(-1, 1, NUM_SAMPLES)
    sizes = torch.tensor([3, 1, 4, 2])
    num_clients = len(sizes)
    masks = all_coalitions(num_clients)
    generator = make_generator(1)
    client_outputs = torch.randn(num_clients, NUM_SAMPLES, generator=generator)
    shares = coalition_shares(masks, sizes).float()
    outputs = (shares @ client_outputs).double()

    def negative_error(outputs):
        return -(outputs - y).square().mean(-1)

    utilities = negative_error(outputs)
    is_trained = masks.sum(1) <= 1
    is_trained[-1] = True  # the coalition of all clients

    estimate = predicted_shapley(
        masks[is_trained],
        utilities[is_trained],
        outputs[is_trained],
        sizes,
        negative_error,
        logits=False,
    )

    exact = shapley_of_table(utilities[:, None])[:, 0]  # masks are in the table's order
    assert_close(estimate.values, exact, rtol=0.01, atol=0.01)


@pytest.mark.slow
def test_predicted_values_of_17_clients_are_sampled_close_to_exact_ones():
    trained, outputs, sizes, accuracy = make_federation(17)
    utilities = accuracy(outputs)

    estimate = predicted_shapley(trained, utilities, outputs, sizes, accuracy, logits=True)

    game = PredictedGame(trained, utilities, outputs, sizes, OutputMeasure(accuracy, logits=True))
    exact = exact_shapley(game, 17).values.mean(1)

    assert estimate.evaluations <= 2**14

    errors = (estimate.values - exact).abs()
    assert (errors < 5 * estimate.stderr).all()
    # Along orders of the clients it is 0.0013, with four times as many coalitions.
    assert estimate.stderr.max() < 0.0002


def test_sizes_of_coalitions_are_complete_if_all_or_no_coalitions_of_a_size_are_trained():
    masks = few_coalitions(4, "both")
    assert has_complete_sizes(masks)
    assert not has_complete_sizes(masks[:-1])
    assert not has_complete_sizes(few_coalitions(4, "leave-one-out"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {
                "trained": slice(-1),
                "utilities": slice(-1),
                "outputs": slice(-1),
            },
            "player alone",
        ),
        ({"utilities": slice(1, None)}, "T utilities"),
    ],
)
def test_predicted_shapley_with_a_coalition_too_few_raises(change, message):
    trained, outputs, sizes, accuracy = make_federation(3)
    arguments = {"trained": trained, "utilities": accuracy(outputs), "outputs": outputs}
    for name, rows in change.items():
        arguments[name] = arguments[name][rows]

    with pytest.raises(ValueError, match=message):
        predicted_shapley(**arguments, weights=sizes, score=accuracy, logits=True)


def test_predicted_shapley_of_infinite_outputs_raises():
    trained, outputs, sizes, accuracy = make_federation(3)
    infinite_outputs = outputs * torch.inf

    with pytest.raises(ValueError, match="finite"):
        predicted_shapley(
            trained,
            accuracy(outputs),
            infinite_outputs,
            weights=sizes,
            score=accuracy,
            logits=True,
        )
