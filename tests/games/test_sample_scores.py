"""How much values depend on the validation samples: against a plain bootstrap, and by closed forms."""

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError, R2Score

from flsv.core.parameter_space import ParameterSpace
from flsv.functional import few_coalitions, predicted_shapley
from flsv.functional.shapley.exact import all_coalitions, shapley_of_table
from flsv.functional.shapley.predicted_outputs import OutputMeasure, case_values
from flsv.games import ModelEvaluator
from flsv.scores.performance import as_measure, performance_of
from helpers import make_generator

SAMPLES, CLIENTS, CLASSES = 240, 3, 3


def labels_of_samples():
    class_shares = torch.tensor([0.6, 0.3, 0.1])
    generator = make_generator()
    return torch.multinomial(class_shares, SAMPLES, replacement=True, generator=generator)


def make_measure(name):
    """A measure of three classes, one of them rare. The module itself plays no part."""
    module = nn.Linear(2, CLASSES)
    inputs = torch.zeros(SAMPLES, 2)
    labels = labels_of_samples()
    batches = list(zip(inputs.split(100), labels.split(100)))
    space = ParameterSpace(module)
    evaluator = ModelEvaluator(module, space, batches, num_classes=CLASSES)
    return evaluator.output_measure(as_measure(name))


def make_measure_of_regression(metric, targets, mode=None):
    module = nn.Linear(2, 1)
    inputs = torch.zeros(len(targets), 2)
    batches = [(inputs, targets[:, None])]
    measure = performance_of("test", metric, mode)
    space = ParameterSpace(module)
    evaluator = ModelEvaluator(module, space, batches, metric=measure.of)
    return evaluator.output_measure(measure)


def covariance_of(measure, masks, outputs):
    """The covariance, between draws of the validation samples, of the values of equally large clients."""
    _, num_clients = masks.shape
    sizes = torch.ones(num_clients)
    return measure.shapley_by_sample(masks, outputs, sizes).covariance()


def make_outputs(masks):
    """Logits of the coalitions' models, better with more members, and best on the members' own classes."""
    generator = make_generator(1)
    is_label = nn.functional.one_hot(labels_of_samples(), CLASSES).float()
    noise = torch.randn(len(masks), SAMPLES, CLASSES, generator=generator)
    strength_by_size = 0.4 * masks.sum(dim=1, keepdim=True)
    strength_by_membership = 1.5 * masks.float()  # client i has samples of class i
    strengths = strength_by_size + strength_by_membership  # [coalitions, classes]

    return noise + strengths[:, None] * is_label


def accuracies(logits, labels):
    """Of all coalitions' logits ``[K, V, M]``."""
    return (logits.argmax(-1) == labels).mean(1)


def balanced_accuracies(logits, labels):
    recalls = []
    for label in range(CLASSES):
        is_of_class = labels == label
        recalls.append(accuracies(logits[:, is_of_class], label))
    return np.mean(recalls, axis=0)


def negative_losses(logits, labels):
    log_probabilities = torch.from_numpy(logits).log_softmax(-1).numpy()
    return log_probabilities[:, np.arange(SAMPLES), labels].mean(1)


def resample(rng, labels):
    return rng.integers(0, SAMPLES, SAMPLES)


def resample_each_class(rng, labels):
    samples_by_class = [np.flatnonzero(labels == label) for label in range(CLASSES)]
    resampled = [rng.choice(samples, len(samples)) for samples in samples_by_class]
    return np.concatenate(resampled)


def covariance_by_bootstrap(utilities, draw_samples, outputs):
    """The covariance of values between 2,000 draws of the samples, by utilities of all coalitions' outputs."""
    labels = labels_of_samples().numpy()
    rng = np.random.default_rng(0)
    utilities_by_draw = []
    for _ in range(2000):
        samples = draw_samples(rng, labels)
        utilities_by_draw.append(utilities(outputs[:, samples], labels[samples]))

    table = torch.tensor(np.array(utilities_by_draw)).double()  # [draws, coalitions]
    values_by_draw = shapley_of_table(table.T)
    return torch.cov(values_by_draw)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "utilities", "draw_samples"),
    [
        ("accuracy", accuracies, resample),
        ("negative_loss", negative_losses, resample),
        ("balanced_accuracy", balanced_accuracies, resample_each_class),
    ],
)
def test_covariance_of_values_is_that_of_a_plain_bootstrap(name, utilities, draw_samples):
    masks = all_coalitions(CLIENTS)
    outputs = make_outputs(masks)

    covariance = covariance_of(make_measure(name), masks, outputs)

    expected = covariance_by_bootstrap(utilities, draw_samples, outputs.numpy())
    largest_variance = float(expected.diagonal().max())
    torch.testing.assert_close(covariance, expected, rtol=0, atol=0.12 * largest_variance)


def test_values_of_samples_average_to_the_predicted_values():
    masks = few_coalitions(CLIENTS, "singles")
    outputs = make_outputs(masks)
    measure = make_measure("balanced_accuracy")
    sizes = torch.tensor([3.0, 2.0, 1.0])
    sorted_outputs = outputs[:, measure.order]  # the measure takes the samples sorted by class

    estimate = predicted_shapley(
        masks,
        measure.utility(sorted_outputs),
        sorted_outputs,
        weights=sizes,
        score=measure.utility,
        logits=True,
    )
    values_by_sample = case_values(
        masks,
        measure.by_sample(sorted_outputs),
        sorted_outputs,
        weights=sizes,
        measure=OutputMeasure(measure.by_sample, logits=True),
    )

    assert values_by_sample.shape == (CLIENTS, SAMPLES)
    mean_values = values_by_sample.mean(dim=1).tolist()
    assert mean_values == pytest.approx(estimate.values.tolist(), abs=1e-9)


@pytest.mark.parametrize(("metric", "power"), [(MeanSquaredError(), 2), (MeanAbsoluteError(), 1)])
def test_values_by_errors_of_a_regression_have_the_variance_of_a_mean(metric, power):
    num_samples = 50
    targets = torch.linspace(-1, 1, num_samples)
    measure = make_measure_of_regression(metric, targets)

    # The model of both clients predicts 0. The other models (of nobody and of each client alone) predict 1.
    masks = all_coalitions(2)
    has_both_clients = masks.all(dim=1)
    outputs = torch.ones(len(masks), num_samples)
    outputs[has_both_clients] = 0
    covariance = covariance_of(measure, masks, outputs)

    # Both clients have the same value, half of the mean gain. So all four variances and covariances are the value's
    # variance.
    errors_of_1 = (targets - 1).abs() ** power
    errors_of_0 = targets.abs() ** power
    half_gains = (errors_of_1 - errors_of_0) / 2
    variance_of_value = float(half_gains.var()) / num_samples
    expected = torch.full((2, 2), variance_of_value).double()
    torch.testing.assert_close(covariance, expected, rtol=2e-4, atol=0)


def test_measure_that_is_no_mean_over_samples_is_resampled():
    targets = torch.randn(400, generator=make_generator())
    measure = make_measure_of_regression(R2Score(), targets, mode="max")
    zeros = torch.zeros(400)
    noise = torch.randn(400, generator=make_generator(1))
    outputs_of_nobody = outputs_of_client_1 = zeros
    outputs_of_client_0 = targets
    outputs_of_both = targets + 0.5 * noise
    outputs = torch.stack(
        [outputs_of_nobody, outputs_of_client_0, outputs_of_client_1, outputs_of_both]
    )

    covariance = covariance_of(measure, all_coalitions(2), outputs)

    assert measure.is_resampled
    variance_of_client_0 = covariance[0, 0]
    assert 0 < variance_of_client_0 < 0.01
    covariance_of_clients = covariance[0, 1]
    assert covariance_of_clients != 0
