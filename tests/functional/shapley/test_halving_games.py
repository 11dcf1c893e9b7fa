"""The four games of halvings: against NumPy and enumerations, at the smallest sizes, and for regressions."""

import itertools

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch.testing import assert_close

from flsv.functional import predicted_shapley
from flsv.functional.shapley import halving_games, mixtures
from flsv.functional.shapley.exact import all_coalitions, shapley_of_table
from flsv.functional.shapley.halvings import choose_halvings
from flsv.functional.shapley.mixtures import TrainedOutputs, coalition_shares
from helpers import make_generator

NUM_SAMPLES = 30
NUM_CLASSES = 3
TOLERANCE = 1e-5  # outputs are float32


def make_trained(num_clients, count=1):
    """Clients alone, the halves of some halvings and all clients, with logits that depend on the members."""
    generator = make_generator()
    singles = torch.eye(num_clients, dtype=torch.bool)
    noise = torch.randn(num_clients, NUM_SAMPLES, NUM_CLASSES, generator=generator)
    client_logits = 2 * noise
    names = [f"client {client}" for client in range(num_clients)]
    halves = choose_halvings(client_logits, names, count, logits=True)
    everybody = torch.ones(1, num_clients, dtype=torch.bool)
    masks = torch.cat([singles, halves, everybody])
    sizes = torch.randint(20, 90, (num_clients,), generator=generator)

    shares = coalition_shares(masks, sizes).float()
    outputs = torch.einsum("tn,nvm->tvm", shares, client_logits)
    outputs += 0.3 * torch.randn(outputs.shape, generator=generator)
    return TrainedOutputs(masks=masks, outputs=outputs, weights=sizes, logits=True)


def untrained_masks(trained):
    num_clients = trained.masks.shape[1]
    all_rows = all_coalitions(num_clients)[1:].tolist()
    trained_rows = trained.masks.tolist()
    untrained_rows = [row for row in all_rows if row not in trained_rows]
    return torch.tensor(untrained_rows)


def softmax(logits):
    largest = logits.max(-1, keepdims=True)
    powers = np.exp(logits - largest)
    sums = powers.sum(-1, keepdims=True)
    return powers / sums


def center(logits):
    return logits - logits.mean(-1, keepdims=True)


def members_of(mask):
    members = np.flatnonzero(mask)
    return tuple(members.tolist())


def by_members(masks, outputs):
    """Outputs, by the members of their coalitions."""
    members = map(members_of, masks.numpy())
    return dict(zip(members, outputs.numpy()))


def outputs_by_members(trained):
    return by_members(trained.masks, trained.outputs.double())


def class_logits_by_hand(members, outputs, sizes):
    """l_S: the centered logarithm of the class frequencies that the members are expected to know."""
    frequencies = [softmax(outputs[client,]).mean(0) for client in members]
    mean = np.average(
        frequencies,
        axis=0,
        weights=sizes[list(members)],
    )
    smoothed = 0.99 * mean + 0.01 / len(mean)
    return center(np.log(smoothed))


def interpolate(members, outputs, trained):
    """By the weights that tests/functional/shapley/test_predicted_outputs.py compares with a Gaussian process."""
    mask = torch.zeros(
        1,
        len(trained.weights),
        dtype=torch.bool,
    )
    mask[0, list(members)] = True
    (weights,) = mixtures.interpolation_weights(mask, trained.masks, trained.weights)
    stacked_outputs = np.stack(list(outputs.values()))
    return np.tensordot(weights.numpy(), stacked_outputs, 1)


def capped_outputs_by_members(trained):
    outputs = trained.outputs.double()
    capped = mixtures.cap_logits(outputs, trained.is_single)
    return by_members(trained.masks, capped)


@pytest.mark.parametrize(("num_clients", "count"), [(3, 1), (5, 2), (6, 3)])
def test_transported_interpolation_equals_its_formula(num_clients, count):
    trained = make_trained(num_clients, count)
    sizes = trained.weights.double().numpy()
    outputs = outputs_by_members(trained)
    transported = {
        members: logits - class_logits_by_hand(members, outputs, sizes)
        for members, logits in capped_outputs_by_members(trained).items()
    }
    masks = untrained_masks(trained)

    predicted = halving_games.transported_interpolation(trained)(masks)

    for members, logits in by_members(
        masks,
        predicted.double(),
    ).items():
        expected = interpolate(members, transported, trained)
        expected = expected + class_logits_by_hand(members, outputs, sizes)
        assert_allclose(logits, expected, atol=TOLERANCE)


def cuts_by_hand(members, coalitions):
    """All sets of the fewest disjoint coalitions whose union is ``members``."""
    inside = [coalition for coalition in coalitions if set(coalition) <= set(members)]
    for num_blocks in range(1, len(members) + 1):
        cuts = [
            cut
            for cut in itertools.combinations(inside, num_blocks)
            if sorted(itertools.chain(*cut)) == list(members)
        ]
        if cuts:
            return cuts
    raise AssertionError("each player alone is trained")


@pytest.mark.parametrize(("num_clients", "count"), [(3, 1), (5, 2), (6, 3)])
def test_blocks_equal_an_enumeration_of_cuts(num_clients, count):
    trained = make_trained(num_clients, count)
    sizes = trained.weights.double().numpy()
    outputs = outputs_by_members(trained)
    masks = untrained_masks(trained)

    predicted = halving_games.blocks(trained)(masks)

    for members, logits in by_members(
        masks,
        predicted.double(),
    ).items():
        means = []
        for cut in cuts_by_hand(members, list(outputs)):
            block_sizes = [sizes[list(block)].sum() for block in cut]
            probabilities = [softmax(outputs[block]) for block in cut]
            means.append(np.average(probabilities, axis=0, weights=block_sizes))
        expected = np.mean(means, 0)
        assert_allclose(softmax(logits), expected, atol=TOLERANCE)


def combiner_loss_by_hand(coefficients, features, trained):
    """The penalized cross-entropy of the trained coalitions' probabilities."""
    targets = softmax(trained.outputs.double().numpy())
    predicted = np.log(softmax(features @ coefficients))
    cross_entropies = -(targets * predicted).sum(-1).mean(1)
    num_members = trained.masks.sum(1).numpy()
    num_clients = trained.masks.shape[1]
    weights = np.where(num_members == 1, 0.2 / num_clients, 1.0)
    mean_cross_entropy = weights @ cross_entropies / weights.sum()
    distance = coefficients - np.array([1.0, 0, 0, 0])
    penalty = 0.01 * (distance**2).sum()
    return mean_cross_entropy + penalty


def features_by_hand(members, trained):
    sizes = trained.weights.double().numpy()
    outputs = outputs_by_members(trained)
    singles = {client: outputs[client,] for client in members}
    weights = sizes[list(members)]
    capped = capped_outputs_by_members(trained)
    probabilities = [softmax(logits) for logits in singles.values()]
    by_size = np.average(probabilities, axis=0, weights=weights)
    mean_logits = np.average(
        [capped[client,] for client in members],
        axis=0,
        weights=weights,
    )
    classes = class_logits_by_hand(members, outputs, sizes)
    mean_probabilities = np.mean(probabilities, 0)
    features = [
        center(np.log(by_size)),
        mean_logits,
        center(np.log(mean_probabilities)),
        np.broadcast_to(classes, by_size.shape),
    ]
    return np.stack(features, -1)


def stack_features(masks, trained):
    features = [
        features_by_hand(
            members_of(mask),
            trained,
        )
        for mask in masks.numpy()
    ]
    return np.stack(features)


def test_combiner_is_a_sum_of_four_logits_that_minimizes_its_loss():
    trained = make_trained(5, count=2)
    masks = untrained_masks(trained)
    features_of_trained = stack_features(trained.masks, trained)
    features_of_untrained = stack_features(masks, trained)

    predicted = halving_games.combiner(trained)(masks).double().numpy()

    # The coefficients follow from the predictions by least squares.
    coefficients, residuals, *_ = np.linalg.lstsq(
        features_of_untrained.reshape(
            -1,
            4,
        ),
        predicted.reshape(-1),
        rcond=None,
    )
    assert residuals < 1e-6
    least_loss = combiner_loss_by_hand(coefficients, features_of_trained, trained)
    rng = np.random.default_rng(0)
    for step in 0.02 * rng.normal(size=(50, 4)):
        loss = combiner_loss_by_hand(coefficients + step, features_of_trained, trained)
        assert loss > least_loss - 1e-6
    ensemble = np.array([1.0, 0, 0, 0])
    loss_of_ensemble = combiner_loss_by_hand(ensemble, features_of_trained, trained)
    assert loss_of_ensemble > least_loss + 1e-3


def test_kriged_residuals_equal_their_formula():
    trained = make_trained(5)
    outputs = outputs_by_members(trained)
    combined = halving_games.combiner(trained)

    def combine(mask):
        (logits,) = combined(mask[None])
        return center(logits.double().numpy())

    residuals = {}
    for mask in trained.masks:
        members = members_of(mask)
        residuals[members] = center(outputs[members]) - combine(mask)
    masks = untrained_masks(trained)

    kriged = halving_games.with_kriged_residuals(trained, combined)
    predicted = kriged(masks).double().numpy()

    for mask, logits in zip(masks, predicted):
        residual = interpolate(members_of(mask.numpy()), residuals, trained)
        expected = combine(mask) + residual
        assert_allclose(logits, expected, atol=TOLERANCE)


def game_of(trained):
    """The trained coalitions with the empty one, their accuracies and the function that scores outputs."""
    generator = make_generator(1)
    labels = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)

    def accuracy(outputs):
        return (outputs.argmax(-1) == labels).double().mean(-1)

    empty = torch.zeros_like(trained.masks[:1])
    masks = torch.cat([empty, trained.masks])
    no_outputs = torch.zeros_like(trained.outputs[:1])
    outputs = torch.cat([no_outputs, trained.outputs])
    return masks, outputs, accuracy


def test_values_are_those_of_the_mean_of_four_tables():
    trained = make_trained(5, count=2)
    masks, outputs, accuracy = game_of(trained)
    utilities = accuracy(outputs)
    every_mask = all_coalitions(5)
    table = torch.zeros(2**5, dtype=torch.float64)
    predictions = halving_games.halving_predictions(trained)
    assert len(predictions) == 4
    for predict in predictions:
        table[1:] += accuracy(predict(every_mask[1:])) / 4
    powers = 2 ** torch.arange(5)
    trained_numbers = (masks.long() * powers).sum(1)
    table[trained_numbers] = utilities

    values = predicted_shapley(
        masks, utilities, outputs, trained.weights, accuracy, logits=True
    ).values

    expected = shapley_of_table(table[:, None])[:, 0]
    assert_close(values, expected, rtol=0, atol=1e-12)


def test_two_players_have_no_halves_beside_themselves_and_exact_values():
    trained = make_trained(2)
    masks, outputs, accuracy = game_of(trained)
    utilities = accuracy(outputs)

    values = predicted_shapley(
        masks, utilities, outputs, trained.weights, accuracy, logits=True
    ).values

    assert len(trained.masks) == 3
    without_other = utilities[1:3] - utilities[0]
    with_other = utilities[3] - utilities[1:3].flip(0)
    assert_close(values, (without_other + with_other) / 2)


def test_player_whose_model_predicts_one_class_has_finite_predictions():
    trained = make_trained(4)
    outputs = trained.outputs.clone()
    outputs[0] = torch.tensor([1e4, 0, 0])
    certain = TrainedOutputs(
        trained.masks,
        outputs,
        weights=trained.weights,
        logits=True,
    )

    for predict in halving_games.halving_predictions(certain):
        assert predict(untrained_masks(certain)).isfinite().all()


def test_regressions_have_the_interpolation_and_blocks():
    trained = make_trained(4)
    targets = TrainedOutputs(
        trained.masks, trained.outputs[..., 0], weights=trained.weights, logits=False
    )
    masks = untrained_masks(targets)
    interpolate = mixtures.interpolation(targets)

    predictions = halving_games.halving_predictions(targets)

    assert len(predictions) == 2
    assert_close(predictions[0](masks), interpolate(masks))
    weights = halving_games.block_weights(masks, targets.masks, targets.weights)
    expected = weights.float() @ targets.outputs
    assert_close(predictions[1](masks), expected)
