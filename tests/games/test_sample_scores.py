"""How much values depend on the validation samples: against a plain bootstrap, and by closed forms."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError, R2Score

from flsv.core.parameter_space import ParameterSpace
from flsv.functional import few_coalitions, predicted_shapley
from flsv.functional.shapley.exact import all_coalitions, shapley_of_table
from flsv.functional.shapley.predicted_outputs import PredictionScore, case_values
from flsv.games import ModelEvaluator
from flsv.games.output_score import OutputScore
from flsv.scores.performance import performance_of
from helpers import make_generator

CASES, CLIENTS, CLASSES = 240, 3, 3


def labels_of_cases() -> Tensor:
    generator = make_generator()
    return torch.multinomial(
        torch.tensor([0.6, 0.3, 0.1]),
        CASES,
        True,
        generator=generator,
    )


def make_score(measure) -> OutputScore:
    """A score of three classes, one of them rare. The module itself plays no part."""
    module = nn.Linear(2, CLASSES)
    inputs = torch.zeros(CASES, 2)
    batches = list(zip(inputs.split(100), labels_of_cases().split(100)))
    evaluator = ModelEvaluator(module, ParameterSpace(module), batches, num_classes=CLASSES)
    score = OutputScore.for_evaluator(evaluator, measure)
    assert score is not None
    return score


def make_score_of_regression(metric, targets: Tensor, mode=None) -> OutputScore:
    module = nn.Linear(2, 1)
    batches = [(torch.zeros(len(targets), 2), targets[:, None])]
    measure = performance_of("test", metric, mode)
    evaluator = ModelEvaluator(module, ParameterSpace(module), batches, metric=measure.of)
    score = OutputScore.for_evaluator(evaluator, measure)
    assert score is not None
    return score


def covariance_of(score: OutputScore, masks: Tensor, outputs: Tensor, weights: Tensor) -> Tensor:
    """The covariance of values between draws of the validation samples."""
    values = score.scores_by_sample.values(masks, outputs, weights, scoring=score)
    assert values is not None
    return values.covariance()


def make_outputs(masks: Tensor) -> Tensor:
    """Logits of the coalitions' models, better with more members, and best on the members' own classes."""
    generator = make_generator(1)
    is_label = nn.functional.one_hot(labels_of_cases(), CLASSES).float()
    noise = torch.randn(len(masks), CASES, CLASSES, generator=generator)
    strength_by_size = 0.4 * masks.sum(dim=1, keepdim=True)
    strength_by_membership = 1.5 * masks.float()  # client i has samples of class i
    strengths = strength_by_size + strength_by_membership  # [coalitions, classes]

    return noise + strengths[:, None] * is_label


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["accuracy", "negative_loss", "balanced_accuracy"])
def test_covariance_of_values_is_that_of_a_plain_bootstrap(measure):
    masks = all_coalitions(CLIENTS)
    outputs = make_outputs(masks)
    score = make_score(measure)
    covariance = covariance_of(score, masks, outputs, torch.ones(CLIENTS))

    labels = labels_of_cases()
    logits = outputs.numpy()
    rng = np.random.default_rng(0)
    values = []
    for _ in range(3000):
        rows = rng.integers(0, CASES, CASES)
        if measure == "balanced_accuracy":  # its classes have fixed numbers of samples
            members = [np.flatnonzero(labels.numpy() == label) for label in range(CLASSES)]
            rows = np.concatenate([rng.choice(of_class, len(of_class)) for of_class in members])
        resample = labels[rows].numpy()
        hits = logits[:, rows].argmax(-1) == resample
        if measure == "accuracy":
            utilities = hits.mean(1)
        elif measure == "balanced_accuracy":
            utilities = np.mean(
                [hits[:, resample == label].mean(1) for label in range(CLASSES)],
                0,
            )
        else:
            log_likelihood = torch.from_numpy(logits[:, rows]).log_softmax(-1).numpy()
            utilities = log_likelihood[:, np.arange(CASES), resample].mean(1)
        values.append(
            shapley_of_table(torch.from_numpy(utilities).double()[:, None])[:, 0],
        )

    expected = torch.cov(torch.stack(values).T)
    scale = float(expected.diagonal().max())

    torch.testing.assert_close(covariance, expected, rtol=0, atol=0.12 * scale)


def test_values_of_the_cases_average_to_the_predicted_values():
    masks = few_coalitions(CLIENTS, "singles")
    outputs = make_outputs(masks)
    score = make_score("balanced_accuracy")
    assert score.scores_by_sample is not None
    sizes = torch.tensor([3.0, 2.0, 1.0])
    # Scores take the samples sorted by class, here in all outputs.
    outputs = outputs[:, score.order]
    utilities = score.score(outputs)
    values = predicted_shapley(
        masks,
        utilities,
        outputs,
        sizes,
        score.score,
        logits=True,
    ).values

    by_case = case_values(
        masks,
        score.scores_by_sample.score(outputs),
        outputs,
        sizes,
        PredictionScore(score.scores_by_sample.score, logits=True),
    )

    assert by_case.shape == (CLIENTS, CASES)
    assert by_case.mean(1).tolist() == pytest.approx(
        values.tolist(),
        abs=1e-9,
    )


@pytest.mark.parametrize("metric", [MeanSquaredError(), MeanAbsoluteError()])
def test_errors_of_a_regression_have_the_standard_error_of_a_mean(metric):
    num_samples = 50
    targets = torch.linspace(-1, 1, num_samples)
    score = make_score_of_regression(metric, targets)

    # The model of both clients predicts 0. The other models (of nobody and of each client alone) predict 1.
    masks = all_coalitions(2)
    has_both_clients = masks.all(1)
    outputs = torch.ones(len(masks), num_samples)
    outputs[has_both_clients] = 0
    covariance = covariance_of(score, masks, outputs, torch.ones(2))

    # Both clients have the same value, half of the mean gain. So all four variances and covariances are the value's
    # variance.
    power = 2 if isinstance(metric, MeanSquaredError) else 1
    errors_of_1 = (targets - 1).abs() ** power
    errors_of_0 = targets.abs() ** power
    gains = errors_of_1 - errors_of_0
    half_gains = gains / 2
    variance_of_value = float(half_gains.var()) / num_samples
    expected = torch.full_like(covariance, variance_of_value)
    assert covariance.shape == (2, 2)
    torch.testing.assert_close(
        covariance,
        expected,
        rtol=2e-4,
        atol=0,
    )


def test_a_measure_that_is_no_mean_over_samples_is_resampled():
    targets = torch.randn(400, generator=make_generator())
    score = make_score_of_regression(R2Score(), targets, mode="max")
    assert score.scores_by_sample is not None
    assert score.scores_by_sample.is_resampled

    noise = torch.randn(400, generator=make_generator(1))
    # Of nobody, client 0, client 1 and both: client 0 alone knows the targets.
    outputs = torch.stack([0 * targets, targets, 0 * targets, targets + 0.5 * noise])
    covariance = covariance_of(score, all_coalitions(2), outputs, torch.ones(2))

    assert 0 < covariance[0, 0] < 0.01
    assert covariance[0, 1] != 0
