"""Counts of right predictions of many models at once, against NumPy, model by model and sample by sample."""

import numpy as np
import pytest
import torch

from flsv.games.classification import SortedLabels
from helpers import make_generator

NUM_MODELS = 3
NUM_SAMPLES = 40
#: The last class has no sample.
NUM_CLASSES = 4


def draw_labels():
    return torch.randint(NUM_CLASSES - 1, (NUM_SAMPLES,), generator=make_generator(0))


def draw_logits():
    shape = NUM_MODELS, NUM_SAMPLES, NUM_CLASSES
    return torch.randn(shape, generator=make_generator(1))


def with_ties():
    """Whole numbers from -1 to 1, so that most samples have several largest logits."""
    return draw_logits().clamp(-1, 1).round()


def with_nan():
    """A logit is NaN: of the right class, of another one, and of all samples of a model."""
    logits_of_models = draw_logits()
    first_model, second_model, last_model = logits_of_models
    first_model[:10, 0] = torch.nan
    second_model[10:20, NUM_CLASSES - 1] = torch.nan
    last_model[:] = torch.nan
    return logits_of_models


def with_infinity():
    logits_of_models = draw_logits()
    first_model, second_model, _ = logits_of_models
    first_model[:10, 1] = torch.inf
    second_model[:10, 1] = -torch.inf
    return logits_of_models


def is_right_by_numpy(logits, label):
    """The first largest logit decides, and a sample with a NaN is never right."""
    has_nan = np.isnan(logits).any()
    return not has_nan and np.argmax(logits) == label


def hits_by_numpy(logits, labels):
    hits = np.zeros((NUM_MODELS, NUM_SAMPLES), dtype=bool)
    for model, sample in np.ndindex(hits.shape):
        sample_logits = logits[model, sample].numpy()
        hits[model, sample] = is_right_by_numpy(sample_logits, labels[sample].item())
    return hits


@pytest.mark.parametrize("make_logits", [draw_logits, with_ties, with_nan, with_infinity])
def test_hits_of_sorted_samples_are_those_of_numpy(make_logits):
    labels = draw_labels()
    logits = make_logits()
    sorted_labels = SortedLabels(labels, NUM_CLASSES)

    hits = sorted_labels.hits(logits[:, sorted_labels.order])

    expected_hits = hits_by_numpy(logits, labels)
    np.testing.assert_array_equal(hits.numpy(), expected_hits[:, sorted_labels.order])


@pytest.mark.parametrize("make_logits", [draw_logits, with_ties, with_nan, with_infinity])
def test_counts_by_class_are_those_of_numpy(make_logits):
    labels = draw_labels()
    logits = make_logits()
    sorted_labels = SortedLabels(labels, NUM_CLASSES)

    counts = sorted_labels.counts(logits[:, sorted_labels.order])

    hits = hits_by_numpy(logits, labels)
    counts_by_class = [hits[:, labels.numpy() == label].sum(axis=1) for label in range(NUM_CLASSES)]
    np.testing.assert_array_equal(counts.numpy(), np.stack(counts_by_class, axis=1))


def test_losses_of_sorted_samples_are_those_of_numpy():
    labels = draw_labels()
    logits = draw_logits()
    sorted_labels = SortedLabels(labels, NUM_CLASSES)

    losses = sorted_labels.losses(logits[:, sorted_labels.order])

    exponentials = np.exp(logits.double().numpy())
    probabilities = exponentials / exponentials.sum(axis=2, keepdims=True)
    probabilities_of_labels = probabilities[:, np.arange(NUM_SAMPLES), labels.numpy()]
    expected_losses = -np.log(probabilities_of_labels)
    np.testing.assert_allclose(losses.numpy(), expected_losses[:, sorted_labels.order], rtol=1e-5)
